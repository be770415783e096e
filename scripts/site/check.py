#!/usr/bin/env python3
"""Checks the built site: prints a line for each offence and exits 1 when there is one.

    check.py SITE_DIR

- every link of a page leads to a file of the site, and its #part to a place there
- nothing that a browser loads comes from outside: scripts, styles, fonts, pictures
- a page has a title, one first heading, no level left out; a picture has a text
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

OUTSIDE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:)?//|^https?:", re.IGNORECASE)
#: What styles load; data: is in the file.
CSS_LOADS = re.compile(r"""(?:url\(|@import)\s*["']?\s*((?:https?:)?//[^"')\s]+)""")
#: What scripts load.
JS_LOADS = re.compile(
    r"""(?:\bfetch\(|\bimport\(|\.src\s*=|importScripts\()\s*["'`]((?:https?:)?//[^"'`]+)"""
)
LOADS = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src",
    "audio": "src", "embed": "src", "object": "data", "image": "href", "use": "href",
}  # fmt: skip
LOADED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect"}


class Page(HTMLParser):
    """The places, links, loads and headings of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[int, str]] = []
        self.loads: list[tuple[int, str]] = []
        self.headings: list[tuple[int, int]] = []
        self.problems: list[tuple[int, str]] = []
        self.has_title = self.has_language = False
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, "str | None"]]) -> None:
        values = {name: value or "" for name, value in attrs}
        line = self.getpos()[0]
        if "id" in values:
            if values["id"] in self.ids:
                self.problems.append((line, f"the id {values['id']} is there twice"))
            self.ids.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append((line, values["href"]))
        if tag == "link" and set(values.get("rel", "").split()) & LOADED_LINKS:
            self.loads.append((line, values.get("href", "")))
        if tag in LOADS and values.get(LOADS[tag]):
            self.loads.append((line, values[LOADS[tag]]))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append((line, int(tag[1])))
        if tag == "img" and not values.get("alt"):
            self.problems.append((line, f"the picture {values.get('src')} has no text"))
        self.has_title |= tag == "title"
        self.has_language |= tag == "html" and bool(values.get("lang"))


def check_headings(page: Page):
    firsts = [line for line, level in page.headings if level == 1]
    if len(firsts) != 1:
        yield (1, f"{len(firsts)} first headings, expected 1")
    before = 0
    for line, level in page.headings:
        if level > before + 1:
            yield (line, f"a heading of level {level} follows one of level {before}")
        before = level
    if not page.has_title or not page.has_language:
        yield (1, "expected a title and a language")


def check_links(file: Path, pages: dict[Path, Page]):
    for line, link in pages[file].links + pages[file].loads:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        if target.is_dir():
            target /= "index.html"
        part = unquote(parts.fragment)
        if not target.is_file():
            yield (line, f"the link {link} leads nowhere")
        elif part and target in pages and part not in pages[target].ids:
            yield (line, f"the link {link} leads to no place of its page")


def check_loads(site: Path, pages: dict[Path, Page]):
    for file, page in pages.items():
        for line, load in page.loads:
            if OUTSIDE.match(load):
                yield (file, line, f"{load} comes from outside")
    for file in site.rglob("*"):
        pattern = {".css": CSS_LOADS, ".svg": CSS_LOADS, ".js": JS_LOADS}.get(file.suffix)
        if file.suffix == ".html":
            pattern = CSS_LOADS
        if pattern is None:
            continue
        text = file.read_text(encoding="utf-8")
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield (file, line, f"{match.group(1)} comes from outside")


def main() -> int:
    site = Path(sys.argv[1]).resolve()
    pages = {file: Page(file) for file in sorted(site.rglob("*.html"))}
    found = list(check_loads(site, pages))
    for file, page in pages.items():
        headings = check_headings(page) if file.name != "search.html" else ()  # a script fills it
        for line, text in [*page.problems, *headings, *check_links(file, pages)]:
            found.append((file, line, text))
    for file, line, text in found:
        print(f"{file.relative_to(site)}:{line}: {text}")
    if not pages:
        print(f"{site}: no pages")
    links = sum(len(page.links) for page in pages.values())
    if pages and not found:
        print(f"site: {len(pages)} pages hold, {links} links; nothing is loaded from outside")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
