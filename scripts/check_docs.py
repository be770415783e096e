#!/usr/bin/env python3
"""Holds the pages to the code: prints one line for each offence and exits 1 when there is one.

- every function, type and member function of the public headers is named on some page of docs/
- every @param of a public header names an argument: the site takes it for an error else
- every relative link of a Markdown file leads to a file, and its #part to a heading
- every page of docs/functions has an example that runs, in C++ or Python, and stands in the index
- every page stands in a section of the site (scripts/site/navigation.py)
"""

import re
import sys

from extract_doc_examples import ROOT, examples_of

sys.path.append(str(ROOT / "scripts" / "site"))
import navigation

SKIP_FOLDERS = {"build", ".git"}
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
TYPE = re.compile(r"\b(?:class|struct|enum class)\s+(\w+)[^;{}()]*$")
CALL = re.compile(r"([A-Za-z_]\w*)\s*\(")
TEMPLATE = re.compile(r"^template\s*<[^>]*>\s*")
NOT_NAMES = {
    "if",
    "for",
    "while",
    "switch",
    "requires",
    "static_assert",
    "sizeof",
    "noexcept",
    "decltype",
    "alignas",
    "defined",
    "void",
    "operator",
}
PARAM = re.compile(r"@param\s+(\w+(?:,\s+\w+)*)")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def statements(text):
    """(what encloses it, text) of each declaration and block head: "" at namespace scope, a type's
    name inside it, None in the body of a function."""
    stack, start = [""], 0
    private = [False]
    for match in re.finditer(r"[{};]|\b(?:public|private|protected):", text):
        head = TEMPLATE.sub("", text[start : match.start()].strip())
        start = match.end()
        token = match.group()
        if token.endswith(":"):
            private[-1] = token != "public:"
            continue
        if head and not private[-1]:
            yield stack[-1], head
        if token == "{":
            kind = TYPE.search(head)
            if head.startswith("namespace"):
                stack.append(None if head.endswith("detail") else "")
            else:
                stack.append(kind.group(1) if kind and stack[-1] is not None else None)
            private.append(
                bool(kind) and re.search(r"\bclass\b", head) is not None and "enum" not in head
            )
        elif token == "}":
            stack.pop()
            private.pop()


def public_names(header):
    """The types, functions and member functions that a header offers."""
    text = COMMENT.sub("", header.read_text(encoding="utf-8"))
    text = re.sub(r"^\s*#.*$", "", STRING.sub('""', text), flags=re.MULTILINE)
    text = re.sub(r"\[\[.*?\]\]", "", text, flags=re.DOTALL)
    for scope, head in statements(text):
        if scope is None or re.search(r"\boperator\b|=\s*delete|\bfriend\b|\busing\b", head):
            continue
        kind = TYPE.search(head)
        if kind:
            yield kind.group(1)
            continue
        call = CALL.search(head)
        if call and call.group(1) not in NOT_NAMES | {scope}:
            yield call.group(1)


def check_names(pages):
    words = set(re.findall(r"\w+", "\n".join(page.read_text(encoding="utf-8") for page in pages)))
    count = 0
    for header in sorted((ROOT / "include" / "waybill").rglob("*.h")):
        for name in sorted(set(public_names(header))):
            count += 1
            if name not in words:
                yield f"{header.relative_to(ROOT)}:1: {name} is not named on any page of docs/"
    if count < 50:
        yield f"include/waybill:1: found only {count} names; the script no longer reads the headers"


def check_params():
    count = 0
    for header in sorted((ROOT / "include" / "waybill").rglob("*.h")):
        text = header.read_text(encoding="utf-8")
        for match in re.finditer(r"(?:^ *///.*\n)+", text, re.MULTILINE):
            declared = set(re.findall(r"\w+", re.split(r";|\n\n", text[match.end() :])[0]))
            for names in PARAM.findall(match.group()):
                for name in re.split(r",\s+", names):
                    count += 1
                    if name not in declared:
                        line = text.count("\n", 0, match.start()) + 1
                        yield f"{header.relative_to(ROOT)}:{line}: @param {name} is no argument"
    if count < 50:
        yield f"include/waybill:1: found only {count} @params; the script no longer reads them"


def anchors(page):
    """The #parts of a page: its headings, as GitHub names them."""
    for line in page.read_text(encoding="utf-8").splitlines():
        heading = re.match(r"#+\s+(.*)", line)
        if heading:
            yield re.sub(r"[^\w\- ]", "", heading.group(1).lower()).strip().replace(" ", "-")


def check_links(page):
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL)
    for match in LINK.finditer(text):
        target, _, part = match.group(1).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            yield f"{place}: the link {match.group(1)} leads nowhere"
        elif part and path.suffix == ".md" and part not in set(anchors(path)):
            yield f"{place}: {target or page.name} has no heading #{part}"


def check_functions():
    folder = ROOT / "docs" / "functions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for page in sorted(folder.glob("*.md")):
        if page.name == "README.md":
            continue
        if not examples_of(page) and "\n```python\n" not in page.read_text(encoding="utf-8"):
            yield f"{page.relative_to(ROOT)}:1: no ```cpp or ```python example that runs"
        if f"({page.name})" not in index:
            yield f"{page.relative_to(ROOT)}:1: not in docs/functions/README.md"


def main():
    every_page = [
        page
        for page in sorted(ROOT.rglob("*.md"))
        if not SKIP_FOLDERS & set(page.relative_to(ROOT).parts)
    ]
    docs = [page for page in every_page if page.relative_to(ROOT).parts[0] == "docs"]
    problems = [*check_names(docs), *check_params(), *check_functions(), *navigation.problems(ROOT)]
    for page in every_page:
        problems.extend(check_links(page))
    for problem in problems:
        print(problem)
    if not problems:
        print(f"docs: {len(every_page)} pages hold")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
