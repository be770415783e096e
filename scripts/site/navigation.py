"""Where each page of the site stands: one line per page. scripts/check_docs.py holds it complete.

An entry is a page, or a folder that ends in "/". A folder stands with all of its pages below its
README.md, in the order in which that names them; a page that it does not name comes last.
"""

from __future__ import annotations

import re
from pathlib import Path

#: The first page.
HOME = "README.md"

SECTIONS: dict[str, list[str]] = {
    "Start": [
        "docs/guide.md",
        "docs/cheat_sheet.md",
        "docs/faq.md",
        "docs/starting.md",
        "docs/python.md",
        "docs/learning_path.md",
        "docs/from_the_documents.md",
        "docs/what_differs.md",
        "docs/glossary.md",
    ],
    "Train": [
        "docs/training.md",
        "docs/choosing.md",
        "docs/context_parallel_attention.md",
        "docs/integrations/",
    ],
    "Experts": [
        "docs/moe.md",
        "docs/even_experts.md",
    ],
    "Serve": [
        "docs/integrations/deep_ep.md",
        "docs/concurrency.md",
    ],
    "Debug": [
        "docs/debugging.md",
        "docs/ways_and_edges.md",
        "SECURITY.md",
    ],
    "Performance": [
        "docs/bench.md",
        "docs/performance/",
        "docs/performance/history/",
    ],
    "Reference": [
        "docs/functions/",
        "docs/formats.md",
    ],
    "Internals": [
        "docs/architecture.md",
        "docs/engine/",
        "docs/sequence_kernel.md",
        "docs/expert_kernels.md",
        "docs/decisions/",
        "CONTRIBUTING.md",
        "scripts/README.md",
        "THIRD_PARTY.md",
        "docs/releases.md",
        "CHANGELOG.md",
    ],
}

#: Of folders without a README.md.
TITLES = {"docs/performance/history/": "Records of past runs"}


def pages_to_place(root: Path) -> list[str]:
    """Every page that has to stand somewhere: those of the root, of docs/ and of its folders."""
    patterns = ("*.md", "docs/*.md", "docs/*/*.md", "docs/performance/history/*.md")
    found = {page.relative_to(root).as_posix() for glob in patterns for page in root.glob(glob)}
    return sorted(found - {HOME})


def folder_pages(root: Path, folder: str, named: set[str]) -> list[str]:
    """The pages of a folder below its README.md, without those that have a line of their own."""
    readme = root / folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    order = {name: i for i, name in reversed(list(enumerate(re.findall(r"\((\w+\.md)", text))))}
    pages = [page.name for page in (root / folder).glob("*.md") if page.name != "README.md"]
    pages.sort(key=lambda name: (order.get(name, len(order)), name))
    return [folder + name for name in pages if folder + name not in named]


def navigation(root: Path) -> dict[str, list[tuple[str, list[str]]]]:
    """Section -> (page or folder, the pages below it), in order."""
    named = {entry for entries in SECTIONS.values() for entry in entries}
    return {
        section: [
            (entry, folder_pages(root, entry, named) if entry.endswith("/") else [])
            for entry in entries
        ]
        for section, entries in SECTIONS.items()
    }


def problems(root: Path) -> list[str]:
    """A line for each page that stands nowhere or twice, and each entry that is not there."""
    place = "scripts/site/navigation.py"
    placed: list[str] = []
    found: list[str] = []
    for entries in navigation(root).values():
        for entry, below in entries:
            if not (root / entry).exists():
                found.append(f"{place}: there is no {entry}")
            readme = [entry + "README.md"] if (root / entry / "README.md").is_file() else []
            placed += [*below, *readme] if entry.endswith("/") else [entry]
    found += [f"{place}: {page} stands twice" for page in set(placed) if placed.count(page) > 1]
    for page in pages_to_place(root):
        if page not in placed:
            found.append(f"{page}:1: stands in no section of SECTIONS in {place}")
    return sorted(found)
