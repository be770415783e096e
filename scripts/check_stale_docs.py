#!/usr/bin/env python3
"""Finds what pages say that is not so any more; prints a line for each and exits 1 for any.

- sentences about what does not exist yet, or is to be done: what is written is what there is
- names in `code`, and functions and headers in blocks that do not run, that no source, script or
  test has
- figures of speed without a link, in their paragraph, to docs/performance or docs/decisions
- files in `code` that are not there
- excerpts (```python excerpt FILE) that are not in their file
- pictures that are not there
"""

import re
import sys

from extract_doc_examples import FENCE, ROOT

SKIP_FOLDERS = {"build", ".git", "upstream", "history"}  # history: records of past runs
SKIP_PAGES = {"CHANGELOG.md"}  # it says what was
STALE = re.compile(
    r"\b(?:do(?:es)? not exist yet|not (?:yet )?implemented(?: yet)?|not supported yet"
    r"|(?:is|are) still missing|to be (?:written|done|decided)|coming soon|TODO|FIXME|XXX"
    r"|has no Python face yet|(?:is|are) planned for (?:a )?later|in a (?:later|future) version"
    r"|will be (?:added|implemented|supported|written)|will come later|once it is there)\b",
    re.IGNORECASE,
)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
WORD = re.compile(r"[A-Za-z_]\w*")
#: A file of the project, also as others include it; not of tests, which other projects have, too.
FILE = re.compile(r"(?<![\w/.])(?:include|src|python|scripts|cmake|bench|docs|waybill)/[\w/]+\.\w+")
#: A header of the project in a block of code that does not run.
INCLUDED = re.compile(r'^\s*#\s*include "([^"]+)"')
#: Functions, members and types in a block of code.
USED = re.compile(r"(?<=\.)[A-Za-z_]\w*|\b[A-Za-z_]\w*(?=\()|\b[A-Z]\w*[a-z]\w*")
SOURCES = ("include", "src", "python", "scripts", "tests", "examples", "cmake", "bench", "data")
SOURCE_ENDS = {
    ".h", ".cpp", ".cu", ".cuh", ".in", ".py", ".pyi", ".sh", ".cmake", ".txt", ".toml", ".json",
    ".jsonl", ".yml", ".yaml", ".supp",
}  # fmt: skip
#: Names of others that pages speak of and nothing here uses, and those in rules for names.
OTHERS = {
    "plan_items", "nvshmem_wait_until", "cuMemCreate", "memfd_create", "preserve_rng_state",
    "CCACHE_BASEDIR", "CCACHE_DISABLE", "RUSAGE_CHILDREN", "snake_case", "PascalCase", "num_x",
    "x_idx", "x_offset", "x_bytes", "a2a_ctx", "intra_node_barrier_ctx", "max_m",
}  # fmt: skip
#: Parts of names that stand for any: OPERATION_test, bind_MODULE.
ANY_NAME = re.compile(r"OPERATION|MODULE|^x_test$")
#: Their figures are settings and limits of the code, not measurements.
SETTINGS = {"docs/functions/world.md", "docs/functions/predictions.md"}
FIGURE = re.compile(
    r"(?<![\w.])\d[\d.,]*\s?(?:us|µs|ms|ns|GB/s|TB/s|%)(?![\w/])"
    r"|\b(?:times|x) (?:as fast|faster|slower)\b"
)
EVIDENCE = re.compile(r"\]\([^)]*(?:performance/|decisions/)[^)]*\)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


def pages():
    for page in sorted(ROOT.rglob("*.md")):
        parts = page.relative_to(ROOT).parts
        if not SKIP_FOLDERS & set(parts) and page.name not in SKIP_PAGES:
            yield page


def split_page(page):
    """(number, line) outside of fences, and (number, info, lines) of each fence."""
    prose, blocks, block = [], [], None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if fence and block is None:
            block = (number, fence.group(2).split(), [])
        elif fence:
            blocks.append(block)
            block = None
        elif block is not None:
            block[2].append(line)
        else:
            prose.append((number, line))
    return prose, blocks


def source_words():
    """Every word of what is built, run or tested, of the files' names, and the pages'."""
    words = {page.stem for page in pages()}
    files = [ROOT / name for name in ("CMakeLists.txt", "CMakePresets.json", "pyproject.toml")]
    files += [ROOT / name for name in ("Makefile", ".clang-tidy", ".clang-format")]
    for folder in SOURCES:
        files += [f for f in (ROOT / folder).rglob("*") if f.suffix in SOURCE_ENDS and f.is_file()]
    for file in files:
        words.update(WORD.findall(str(file.relative_to(ROOT))))
        words.update(WORD.findall(file.read_text(encoding="utf-8", errors="replace")))
    return words


def is_gone(word, words):
    """A name of code, not a word of English, that nothing has."""
    inside = "_" in word.strip("_") or re.search(r"[a-z][A-Z]", word) is not None
    known = word in words or word in OTHERS or ANY_NAME.search(word) is not None
    return len(word) > 3 and inside and not known


def gone_files(code):
    """Files that a piece of code names and that are not there."""
    for file in FILE.findall(code):
        bases = (ROOT, ROOT / "include", ROOT / "python")
        if not ANY_NAME.search(file) and not any((base / file).is_file() for base in bases):
            yield file


def paragraphs(prose):
    """Lists of (number, line) with neither a blank line nor code between."""
    found = [[]]
    for number, line in prose:
        if not line.strip() or (found[-1] and number != found[-1][-1][0] + 1):
            found.append([])
        if line.strip():
            found[-1].append((number, line))
    return found


def check_figures(name, prose):
    for paragraph in paragraphs(prose):
        if any(EVIDENCE.search(line) for _, line in paragraph):
            continue
        for number, line in paragraph:
            figure = FIGURE.search(line)
            if figure:
                yield f"{name}:{number}: {figure.group()}: no page of docs/performance behind it"


def check_excerpt(place, info, lines):
    file = ROOT / info[2] if len(info) == 3 else None
    if file is None or not file.is_file():
        yield f"{place}: expected ```python excerpt FILE, with a file that is there"
        return
    text = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    wanted = [line.strip() for line in lines]
    count = len(wanted)
    if not any(text[i : i + count] == wanted for i in range(len(text) - count + 1)):
        yield f"{place}: {info[2]} does not have these lines"


def check_blocks(name, blocks, words):
    for number, info, lines in blocks:
        if info[1:2] == ["excerpt"]:
            yield from check_excerpt(f"{name}:{number}", info, lines)
        if info[1:2] != ["no-test"]:
            continue
        for offset, line in enumerate(lines, start=1):
            for word in sorted({word for word in USED.findall(line) if is_gone(word, words)}):
                yield f"{name}:{number + offset}: {word} is in no source, script or test"
            for file in INCLUDED.findall(line):
                if not any((ROOT / base / file).is_file() for base in ("include", "src")):
                    yield f"{name}:{number + offset}: there is no header {file}"


def own_part(page, line, of_others):
    """A line without the columns of tables that hold the words of other projects."""
    if page.name == "glossary.md":
        return line.rsplit("|", 2)[0]  # "elsewhere" is last
    return line.split("|", 2)[-1] if of_others else line


def check_page(page, words):
    name = page.relative_to(ROOT).as_posix()
    prose, blocks = split_page(page)
    of_others = False  # in a table whose first column is another project's: "there | here"
    for number, line in prose:
        of_others = line.startswith("|") and (
            of_others or line.startswith(("| there ", "| Triton-distributed "))
        )
        place = f"{name}:{number}"
        stale = STALE.search(line)
        if stale:
            yield f'{place}: "{stale.group()}": pages say what there is'
        ours = own_part(page, line, of_others)
        for code in CODE.findall(ours):
            for word in WORD.findall(code):
                if is_gone(word, words):
                    yield f"{place}: `{word}` is in no source, script or test"
            for file in gone_files(code):
                yield f"{place}: there is no file {file}"
        for target in PICTURE.findall(line):
            if not (page.parent / target).is_file():
                yield f"{place}: there is no picture {target}"
    yield from check_blocks(name, blocks, words)
    is_evidence = {"performance", "decisions"} & set(page.relative_to(ROOT).parts)
    if not is_evidence and name not in SETTINGS:
        yield from check_figures(name, prose)


def main():
    words = source_words()
    every_page = list(pages())
    problems = [problem for page in every_page for problem in check_page(page, words)]
    for problem in problems:
        print(problem)
    if not problems:
        print(f"stale docs: {len(every_page)} pages hold")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
