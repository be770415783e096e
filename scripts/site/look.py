#!/usr/bin/env python3
"""Looks at the built site in headless Chromium, at 1400 and 400 px, light and dark.

    look.py SITE_DIR OUT_DIR [PAGE ...]

Prints a line for each page that is wider than the window, and for each text whose contrast with its
ground is below 4.5 (3 for large text); exits 1 when there is one. Looks at the pages that are
named, or at all that are written by hand and some of the reference. Writes pictures of those that
are named, or of a few, into OUT_DIR.
"""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

WIDTHS = (1400, 400)
THEMES = ("light", "dark")
SHOWN = (
    "index.html", "guide.html", "moe.html", "architecture.html", "performance/gpu_sequences.html",
    "reference/python/index.html", "reference/cpp/planner-planner.html",
)  # fmt: skip
MAX_AT_ONCE = 12

#: Says how wide a page is and which texts are too pale; runs in a frame of the page.
MEASURE = """
function measure(doc, view) {
  const found = [];
  const wide = doc.documentElement.scrollWidth - view.innerWidth;
  if (wide > 1) found.push("is " + wide + " px wider than the window");
  const channels = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = (c) => {
    const part = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(c[0]) + 0.7152 * part(c[1]) + 0.0722 * part(c[2]);
  };
  const seen = new Set();
  const walker = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, at = node.parentElement;
    if (!node.textContent.trim() || !at.checkVisibility({checkOpacity: true})) continue;
    if (/^(SCRIPT|STYLE|NOSCRIPT|TITLE|OPTION)$/.test(at.tagName)) continue;
    if (!at.getClientRects().length) continue;
    const style = view.getComputedStyle(at), color = channels(style.color);
    let ground = [255, 255, 255];
    for (let up = at; up; up = up.parentElement) {
      const c = channels(view.getComputedStyle(up).backgroundColor);
      if (c.length === 3 || c[3] > 0.9) { ground = c; break; }
    }
    const [a, b] = [light(color), light(ground)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.6 && style.fontWeight >= 700);
    const key = style.color + ground + large;
    if (ratio < (large ? 3 : 4.5) && !seen.has(key)) {
      seen.add(key);
      found.push("contrast " + ratio.toFixed(2) + ": " + style.color + " on " + ground + ": "
                 + node.textContent.trim().slice(0, 40));
    }
  }
  return found;
}
"""

PAGE = """<!DOCTYPE html><body><script>MEASURE
const jobs = JOBS, results = [];
localStorage.setItem("theme", "THEME");
async function run() {
  for (const [page, width] of jobs) {
    const frame = document.createElement("iframe");
    frame.width = width; frame.height = 900; frame.src = "/" + page;
    document.body.append(frame);
    await new Promise((done) => { frame.onload = done; });
    const found = measure(frame.contentDocument, frame.contentWindow);
    results.push(...found.map((text) => page + " at " + width + " px, THEME: " + text));
    frame.remove();
  }
  document.body.innerHTML = "<pre id=results></pre>";
  document.getElementById("results").textContent = JSON.stringify(results);
}
run();
</script></body>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """The files of the site, and the pages that measure and show them."""

    made: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        text = self.made.get(self.path)
        if text is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_args) -> None:
        pass


def chromium(url: str, *options: str) -> str:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    run = subprocess.run(
        [*command, "--virtual-time-budget=120000", *options, url],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return run.stdout


def measured(host: str, pages: list[str]) -> list[str]:
    """What is wrong on these pages, in both widths and themes."""
    found = []
    jobs = [(page, width) for page in pages for width in WIDTHS]
    for theme in THEMES:
        for first in range(0, len(jobs), MAX_AT_ONCE):
            part = json.dumps(jobs[first : first + MAX_AT_ONCE])
            text = PAGE.replace("MEASURE", MEASURE).replace("JOBS", part).replace("THEME", theme)
            Handler.made["/measure"] = text
            dom = chromium(f"{host}/measure", "--dump-dom", "--window-size=1500,1000")
            result = re.search(r'<pre id="results">(.*?)</pre>', dom, re.DOTALL)
            if result is None:
                found.append(f"{part}: was not measured")
            else:
                found += json.loads(html.unescape(result.group(1)))
    return found


def photographed(host: str, pages: list[str], out: Path) -> None:
    """Pictures of the tops of pages."""
    out.mkdir(parents=True, exist_ok=True)
    for page in pages:
        for width, theme in zip(WIDTHS, THEMES):
            Handler.made["/show"] = (
                f'<body style="margin:0"><script>localStorage.setItem("theme", "{theme}");'
                f'document.write(\'<iframe style="border:0" width={width} height=1800 '
                f"src=/{page}></iframe>');</script>"
            )
            name = page.replace("/", "_").removesuffix(".html") + f"_{width}_{theme}.png"
            chromium(f"{host}/show", f"--screenshot={out / name}", f"--window-size={width},1800")


def written_by_hand(site: Path) -> list[str]:
    """The pages, but those that a script makes or fills."""
    names = [page.relative_to(site).as_posix() for page in site.rglob("*.html")]
    made = re.compile(r"reference/|files/|tests/|_|search\.html|genindex\.html|py-modindex\.html")
    return [name for name in names if not made.match(name)]


def main() -> int:
    site, out = Path(sys.argv[1]), Path(sys.argv[2])
    shown = sys.argv[3:] or [page for page in SHOWN if (site / page).is_file()]
    pages = sys.argv[3:] or sorted({*shown, *written_by_hand(site)})
    handler = functools.partial(Handler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"http://127.0.0.1:{server.server_port}"
    found = measured(host, pages)
    photographed(host, shown, out)
    server.shutdown()
    for line in dict.fromkeys(found):
        print(line)
    if not found:
        print(f"site: {len(pages)} pages looked at, at {WIDTHS} px, light and dark; see {out}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
