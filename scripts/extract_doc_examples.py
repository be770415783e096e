#!/usr/bin/env python3
"""Makes tests of the worked examples in README.md, docs/ and tests/docs/examples.

    scripts/extract_doc_examples.py OUT_DIR NUM_FILES

Every block that begins with ```cpp becomes a TEST, named by its page and its number there; blocks
marked ```cpp no-test are left out. A block is the body of a function, or a whole program when it
has a main(). #line keeps compiler messages and failures at the place in the page.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(\s*)```(.*)$")
INCLUDE = re.compile(r"^\s*#\s*include\b")
MAIN = re.compile(r"^int main\(\) \{", re.MULTILINE)


class Example:
    """One block: its page, its number there (from 1), its lines and where they begin."""

    def __init__(self, page, number, first_line):
        self.page = page
        self.number = number
        self.first_line = first_line
        self.lines = []


def pages():
    """The pages whose examples run."""
    more = (ROOT / "tests" / "docs" / "examples").glob("*.md")
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(more)]


def examples_of(page):
    found = []
    open_block = None  # an Example, or False inside a block that does not run
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if fence and open_block is None:
            runs = fence.group(2).strip() == "cpp"
            open_block = Example(page, len(found) + 1, number + 1) if runs else False
        elif fence:
            if open_block:
                found.append(open_block)
            open_block = None
        elif open_block:
            open_block.lines.append(line)
    if open_block is not None:
        sys.exit(f"{page.relative_to(ROOT)}: a ``` block is not closed")
    return found


def suite_of(page):
    path = page.relative_to(ROOT).with_suffix("")
    parts = path.parts[1:] if path.parts[0] == "docs" else path.parts
    return re.sub(r"\W", "_", "_".join(parts))


def test_source(example):
    """The TEST of an example; its #include lines stand outside of it."""
    suite = suite_of(example.page)
    page = example.page.relative_to(ROOT).as_posix()
    body = ["" if INCLUDE.match(line) else line for line in example.lines]
    place = f'#line {example.first_line} "{page}"'
    name = f"{suite}_example_{example.number}"
    if MAIN.search("\n".join(body)):
        inside, call = body, f"EXPECT_EQ({name}::main(), 0);"
    else:
        inside, call = ["void run() {", place, *body, "}"], f"{name}::run();"
    return "\n".join(
        [
            f"namespace {name} {{",
            place,
            *inside,
            f"}}  // namespace {name}",
            f"TEST({suite}, example_{example.number}) {{ {call} }}",
            "",
        ]
    )


def file_source(examples):
    includes = sorted(
        {line.strip() for example in examples for line in example.lines if INCLUDE.match(line)}
    )
    return "\n".join(
        [
            "// Made by scripts/extract_doc_examples.py.",
            '#include "preamble.h"',
            "",
            *includes,
            "",
            "namespace {",
            "",
            *(test_source(example) for example in examples),
            "}  // namespace",
            "",
        ]
    )


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    out_dir, num_files = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    examples = [example for page in pages() if page.is_file() for example in examples_of(page)]
    if not examples:
        sys.exit("extract_doc_examples: found no ```cpp block")
    out_dir.mkdir(parents=True, exist_ok=True)
    for i in range(num_files):
        text = file_source(examples[i::num_files])
        (out_dir / f"examples_{i}.cpp").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
