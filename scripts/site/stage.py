#!/usr/bin/env python3
"""Lays out the sources of the site, for Sphinx: pages, files that pages link, and the reference.

    stage.py OUT_DIR

Pages keep their text; links between them follow where the pages go. A file that a page links and
that is no page gets one that shows it. Files that did not change are not written again.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import navigation
import reference

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(^ *```.*?^ *```+ *$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]`]|`[^`]*`|\[[^\]]*\])*)\]\(([^)\s]+)\)")
LANGUAGES = {
    ".cpp": "cpp", ".h": "cpp", ".cu": "cuda", ".cuh": "cuda", ".py": "python", ".json": "json",
    ".sh": "bash", ".txt": "text", ".toml": "toml",
}  # fmt: skip
#: Pages that are made, by section.
REFERENCE = {"Reference": ["reference/python/index", "reference/cpp/index", "reference/program"]}
#: A file of more bytes is named, not shown.
MAX_SHOWN = 200_000
#: A folder of more files names them without links.
MAX_LINKED = 20


def docname(file: str) -> str:
    """The page of the site that a page of the project becomes: without docs/, README as index."""
    name = file.removesuffix(".md").removeprefix("docs/")
    head, _, last = name.rpartition("/")
    if last == "README":
        last = "index"
    elif not head:
        last = last.lower()
    return f"{head}/{last}" if head else last


class Stage:
    """What goes into the folder: text by file, and pages that are still to be made."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.written: set[Path] = set()
        self.waiting: list[str] = []
        self.known: set[str] = set()

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file of the site's sources, unless it has this content."""
        file = self.out / name
        self.written.add(file)
        data = content.encode() if isinstance(content, str) else content
        if not file.is_file() or file.read_bytes() != data:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)

    def remove_others(self) -> None:
        """Removes what an earlier run wrote and this one did not."""
        for file in self.out.rglob("*"):
            if file.is_file() and file not in self.written:
                file.unlink()

    def target_of(self, path: str) -> str:
        """The page that shows a path of the project; makes sure that there will be one."""
        if (ROOT / path).is_dir():
            readme = f"{path}/README.md"
            if (ROOT / readme).is_file():
                path = readme
        is_page = path.endswith(".md")
        page = (
            docname(path)
            if is_page
            else f"files/{path}" + ("/index" if (ROOT / path).is_dir() else "")
        )
        if path not in self.known:
            self.known.add(path)
            self.waiting.append(path)
        return page

    def link(self, match: re.Match[str], page: str) -> str:
        mark, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group()
        path, _, part = target.partition("#")
        base = Path(page).parent
        full = os.path.normpath(base / path)
        if mark:
            self.write(full, (ROOT / full).read_bytes())
            place = full
        else:
            place = self.target_of(full) + ".md"
        here = os.path.dirname(docname(page))
        relative = os.path.relpath(place, here or ".")
        return f"{mark}[{text}]({relative}{'#' + part if part else ''})"

    def page(self, file: str, extra: str = "", head: str = "") -> None:
        """A page of the project, with its links, between ``head`` and ``extra``."""
        text = (ROOT / file).read_text(encoding="utf-8")
        parts = BLOCK.split(text)  # prose, block, prose, ...
        parts[::2] = [LINK.sub(lambda match: self.link(match, file), part) for part in parts[::2]]
        self.write(docname(file) + ".md", head + "".join(parts).rstrip("\n") + "\n" + extra)

    def shown_file(self, path: str) -> None:
        """A page that shows a file, or lists a folder."""
        full = ROOT / path
        head = f"---\norphan: true\nnosearch: true\n---\n# {path}\n\n"
        if full.is_dir():
            here = f"files/{path}"
            lines = []
            entries = sorted(full.iterdir())
            for entry in entries:
                if len(entries) <= MAX_LINKED and entry.suffix in {*LANGUAGES, ".md"}:
                    page = self.target_of(f"{path}/{entry.name}")
                    lines.append(f"- [{entry.name}]({os.path.relpath(page, here)}.md)")
                elif not entry.name.startswith((".", "__")):
                    lines.append(f"- {entry.name}")
            self.write(f"{here}/index.md", head + "\n".join(lines) + "\n")
            return
        if full.stat().st_size > MAX_SHOWN:
            body = f"{full.stat().st_size} bytes, not shown here.\n"
        else:
            text = full.read_text(encoding="utf-8")
            fence = "`" * (3 + max((len(run) for run in re.findall("`{3,}", text)), default=0))
            body = f"{fence}{LANGUAGES.get(full.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"
        self.write(f"files/{path}.md", head + body)

    def linked(self) -> None:
        """What pages link and nothing else has made, until there is no more."""
        while self.waiting:
            path = self.waiting.pop()
            if path.endswith(".md"):
                if self.out / (docname(path) + ".md") not in self.written:
                    self.page(path, head="---\norphan: true\n---\n")
            else:
                self.shown_file(path)


def toctree(entries: list[str], caption: str = "", depth: int = 1) -> str:
    """A hidden toctree, in MyST."""
    options = f":hidden:\n:maxdepth: {depth}\n" + (f":caption: {caption}\n" if caption else "")
    return "\n```{toctree}\n" + options + "\n" + "\n".join(entries) + "\n```\n"


def relative_entries(pages: list[str], folder: str) -> list[str]:
    return [os.path.relpath(docname(page), folder) for page in pages]


def stage_pages(stage: Stage) -> None:
    """All pages of the navigation, the home page with the sections last."""
    home = ""
    for section, entries in navigation.navigation(ROOT).items():
        top = []
        for entry, below in entries:
            if not entry.endswith("/"):
                stage.page(entry)
                top.append(docname(entry))
                continue
            folder = docname(entry + "README.md").removesuffix("/index")
            tree = toctree(relative_entries(below, folder))
            if (ROOT / entry / "README.md").is_file():
                stage.page(entry + "README.md", tree)
            else:
                title = navigation.TITLES[entry]
                listed = "".join(f"- [](./{os.path.basename(page)})\n" for page in below)
                stage.write(f"{folder}/index.md", f"# {title}\n\n{listed}{tree}")
            top.append(f"{folder}/index")
            for page in below:
                stage.page(page)
        top += REFERENCE.get(section, [])
        home += toctree(top, section)
    stage.page(navigation.HOME, home)


def main() -> int:
    out = Path(sys.argv[1])
    problems = navigation.problems(ROOT)
    if problems:
        print("\n".join(problems))
        return 1
    stage = Stage(out)
    stage_pages(stage)
    stage.linked()
    for name, text in reference.pages(ROOT, out.parent):
        stage.write(name, text)
    stage.remove_others()
    count = sum(1 for file in stage.written if file.suffix in (".md", ".rst"))
    print(f"site: {count} pages to build")
    return 0


if __name__ == "__main__":
    sys.exit(main())
