"""docs/from_the_documents.md names everything that the documents in tests/upstream name, in their
order: each heading, and each identifier of code, under the heading of its document."""

import re

import pytest
from upstream import EXPERT_PAGE, FOLDER, SEQUENCE_PAGES, text_of

ROOT = FOLDER.parent.parent
PAGE = (ROOT / "docs" / "from_the_documents.md").read_text(encoding="utf-8")
#: The documents in their order, and the heading of each on the page.
PARTS = {
    "distca_orchestrate_simulate": "orchestrate_simulate",
    "distca_readme": "The read me",
    "distca_metadata_class": "Metadata Class",
    "triton_distributed_ep_all2all_layer": "Expert Parallelism All-to-All Layer",
    "distca_notes": "Docs",
}
WORD = re.compile(r"[A-Za-z_]\w*(?:\.(?:md|py)\b)?")
#: Words of prose whose capitals are not those of a name.
PROSE = {"MoE", "PyTorch", "TopK"}
#: Headings that name no more than the kind of page.
HEADINGS = {
    "orchestrate_simulate Function", "Purpose", "Function Signature", "Important Details",
    "Communication Metadata Documentation",
}  # fmt: skip


def identifiers(text):
    """Names of code and of files: with an underscore, or a capital after a small letter."""
    words = set(WORD.findall(re.sub(r"https?://\S+", " ", text))) - PROSE
    kinds = re.compile(r"[A-Za-z0-9]_+[A-Za-z0-9]|[a-z][A-Z]|\.(?:md|py)$")
    return {word for word in words if kinds.search(word)}


def plain(text):
    """Without marks, pictures and code."""
    return re.sub(r"[^\w()&\n -]", "", text.encode("ascii", "ignore").decode())


def headings(text):
    """Of Markdown outside of its code, or of reStructuredText."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    found += re.findall(r"^(\w.*)\n(?:=+|-+|\^+)$", text, flags=re.MULTILINE)
    return [plain(heading).strip() for heading in found]


def code_of(document):
    """The words of code on the page's part on a document."""
    pieces = re.findall(r"`[^`\n]+`", part_of(document))
    return {word for piece in pieces for word in WORD.findall(piece)}


def part_of(document):
    """The page's part on a document."""
    begin = PAGE.index(f"\n## {PARTS[document]}\n")
    end = PAGE.find("\n## ", begin + 4)
    return PAGE[begin:] if end == -1 else PAGE[begin:end]


def test_all_documents_in_their_order():
    assert set(PARTS) == {*SEQUENCE_PAGES, EXPERT_PAGE}
    assert set(PARTS) == {file.stem for file in FOLDER.glob("*.txt")}
    places = [PAGE.index(f"\n## {heading}\n") for heading in PARTS.values()]
    assert places == sorted(places) and len(re.findall(r"^## ", PAGE, re.MULTILINE)) == len(PARTS)


@pytest.mark.parametrize("document", PARTS)
def test_every_identifier(document):
    names = identifiers(text_of(document))
    assert len(names) > 20  # the pattern still reads the document
    assert names - code_of(document) == set()


@pytest.mark.parametrize("document", PARTS)
def test_every_heading(document):
    found = headings(text_of(document))
    assert len(found) > 5
    part = plain(part_of(document))
    assert [name for name in found if name not in HEADINGS and name not in part] == []


def test_cpp_names_are_public():
    """Each name of code in the column of C++."""
    words = set(WORD.findall((ROOT / "docs" / "contract" / "cpp.txt").read_text()))
    lines = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("|")]
    codes = [
        code for cells in lines if len(cells) == 3 for code in re.findall(r"`[^`]+`", cells[2])
    ]
    names = {name for code in codes if "/" not in code for name in WORD.findall(code)}
    assert len(names) > 40
    assert names - words == set()
