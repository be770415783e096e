#!/usr/bin/env python3
"""Names the versions of the site that lie in a folder, one below another, newest first.

    versions.py SITE_DIR

Writes versions.js, which each version's pages read, and index.html, which leads to the newest.
"""

import json
import sys
from pathlib import Path

FIRST_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Waybill</title>
<meta http-equiv="refresh" content="0; url=NEWEST/index.html">
</head>
<body>
<h1>Waybill</h1>
<p><a href="NEWEST/index.html">Version NEWEST</a></p>
</body>
</html>
"""


def number(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("."))


def main() -> int:
    site = Path(sys.argv[1])
    names = [page.parent.name for page in site.glob("[0-9]*/index.html")]
    names.sort(key=number, reverse=True)
    (site / "versions.js").write_text(f"window.waybillVersions = {json.dumps(names)};\n")
    (site / "index.html").write_text(FIRST_PAGE.replace("NEWEST", names[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
