#!/usr/bin/env python3
"""Runs the Python examples of README.md and docs/ and holds the pages to the package.

    scripts/check_python_docs.py [--examples] [PAGE...]

- every ```python block runs, in a namespace of its own; it must check something: an assert, or the
  ```text output block right after it, which is what it prints
- every ```python signature block says what inspect.signature says
- every public name of waybill and waybill.torch, and every public member of Metadata and QkvPlan,
  stands in a ```python block of docs/ or as `name` on docs/python.md
- every page of docs/functions has a ```python block that runs without torch, but for those that
  NO_PYTHON names: what they describe has no Python face yet
- --examples: the programs of examples/python run too (run_examples.py)

A block marked ```python no-test is left out, one marked ```python excerpt FILE is part of a program
(check_stale_docs.py holds it to that). Blocks and programs that need a package which is not
installed (torch, matplotlib) are skipped and counted; program: exit status 77. Runs with the Python
in which the package is installed. Exits 1 when something does not hold.
"""

import argparse
import ast
import contextlib
import importlib.util
import inspect
import io
import os
import pathlib
import re
import sys
import tempfile
import time
import traceback
import warnings

from extract_doc_examples import FENCE, ROOT, pages
from run_examples import run_examples

NO_PYTHON = ("README.md",)
OPTIONAL = ("torch", "matplotlib")
TYPES_WITH_MEMBERS = ("Metadata", "QkvPlan")


class Block:
    """A fenced block: its page, info string, first line and text."""

    def __init__(self, page, info, first_line):
        self.page, self.info, self.first_line = page, info, first_line
        self.lines = []
        self.output = None  # text that it must print

    @property
    def text(self):
        return "\n".join(self.lines) + "\n"

    def place(self, line=1):
        return f"{self.page.relative_to(ROOT)}:{self.first_line + line - 1}"

    def needs(self):
        """Packages that it imports and that an installation need not have."""
        names = {name for name in OPTIONAL if re.search(rf"\b(import|from) {name}\b", self.text)}
        if re.search(
            r"\bwaybill\.(torch|integrations)\b|\bfrom waybill import torch\b|\.cuda\(", self.text
        ):
            names.add("torch")
        if re.search(r"\.plot_\w+\(", self.text):
            names.add("matplotlib")
        return names


def blocks_of(page):
    """The ```python blocks of a page, each with the ```text output block that follows it."""
    found, block, previous = [], None, None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if fence and block is None:
            block = Block(page, fence.group(2).split(), number + 1)
        elif fence:
            if block.info == ["text", "output"]:
                if previous is None:
                    raise SystemExit(f"{block.place()}: no ```python block before this output")
                previous.output = block.text
            elif block.info[:1] == ["python"]:
                known = block.info[1:] in ([], ["no-test"], ["signature"])
                if not known and block.info[1] != "excerpt":
                    raise SystemExit(f"{block.place(0)}: what is ```{' '.join(block.info)}?")
                found.append(block)
            previous = block if block.info == ["python"] else None
            block = None
        elif block is not None:
            block.lines.append(line)
        elif line.strip():
            previous = None
    return found


def line_of_error(error, filename):
    """The line of the block at which an error rose; 1 when it has none there."""
    if isinstance(error, SyntaxError):
        return error.lineno or 1
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == filename]
    return lines[-1] if lines else 1


def run_block(block):
    """None, or what is wrong."""
    filename = f"<{block.place()}>"
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("error")
        # torch's compiler causes it, and hides it where warnings are no errors.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
        try:
            exec(compile(block.text, filename, "exec"), {"__name__": "__main__"})
        except (Exception, SystemExit) as error:
            line = line_of_error(error, filename)
            source = block.lines[line - 1].strip() if line <= len(block.lines) else ""
            return f"{block.place(line)}: {type(error).__name__}: {error}\n    {source}"
    if block.output is not None and printed.getvalue().rstrip() != block.output.rstrip():
        return f"{block.place()}: printed\n{printed.getvalue()}instead of\n{block.output}"
    return None


def checks_something(block):
    return block.output is not None or any(
        isinstance(node, ast.Assert) for node in ast.walk(ast.parse(block.text))
    )


def run_blocks(blocks, missing):
    """(problems, number run, {package: number skipped}, pages with a block that needs nothing)"""
    problems, num_run, skipped, plain_pages = [], 0, {}, set()
    for block in blocks:
        needs = block.needs()
        if not needs:
            plain_pages.add(block.page)
        lacking = sorted(needs & missing)
        for name in lacking:
            skipped[name] = skipped.get(name, 0) + 1
        if lacking:
            continue
        num_run += 1
        problem = run_block(block)
        if problem is None and not checks_something(block):
            problem = f"{block.place()}: checks nothing: no assert, no ```text output"
        if problem is not None:
            problems.append(problem)
    return problems, num_run, skipped, plain_pages


def parameters(signature):
    """Names, kinds and defaults, as text; annotations are left out."""
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(plain))


def documented_signature(node):
    """Parameters of a `def`, by defining it with an empty body."""
    node.body, node.decorator_list, node.returns = [ast.Pass()], [], None
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    scope = {}
    module = ast.fix_missing_locations(ast.Module([node], []))
    exec(compile(module, "<signature>", "exec"), scope)
    return parameters(inspect.signature(scope[node.name]))


def owner_of(path):
    """The package's object under a dotted name without `waybill.`: module, class or function."""
    import waybill

    value = waybill
    for part in path:
        if value is waybill and part == "torch":
            import waybill.torch
        value = getattr(value, part)
    return value


def check_signatures(block, missing):
    """A comment `# waybill.torch` changes the module, a class statement the class."""
    if "torch" in missing and "waybill.torch" in block.text:
        return
    base = ["torch"] if "# waybill.torch" in block.text else []
    for statement in ast.parse(block.text).body:
        inside = isinstance(statement, ast.ClassDef)
        owner = [*base, statement.name] if inside else base
        for node in statement.body if inside else [statement]:
            if not isinstance(node, ast.FunctionDef) or any(
                isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list
            ):
                continue
            is_classmethod = bool(node.decorator_list)
            name = ".".join(["waybill", *owner, node.name])
            try:
                ours = parameters(inspect.signature(owner_of([*owner, node.name])))
            except AttributeError:
                yield f"{block.place(node.lineno)}: there is no {name}"
                continue
            if is_classmethod:
                node.args.args = node.args.args[1:]
            theirs = documented_signature(node)
            if ours != theirs:
                yield f"{block.place(node.lineno)}: {name} is {ours}, the page has {theirs}"


def exported_names(*file):
    """__all__ of a module of the package with what it takes from modules beside it, read from their
    sources: torch need not be there; what is in both faces stands in _common.py.
    """
    package = pathlib.Path(importlib.util.find_spec("waybill").origin).parent
    names = []
    for statement in ast.parse(package.joinpath(*file).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names += ast.literal_eval(statement.value)
        elif isinstance(statement, ast.AugAssign) and ast.unparse(statement.target) == "__all__":
            module = ast.unparse(statement.value).removesuffix(".__all__")
            if package.joinpath(*file[:-1], f"{module}.py").is_file():
                names += exported_names(*file[:-1], f"{module}.py")
    if not names:
        raise SystemExit(f"{'/'.join(file)}: no __all__")
    return names


def check_faces(missing):
    """waybill.torch has the functions of waybill with the same arguments."""
    if "torch" in missing:
        return
    import waybill
    import waybill.torch as face

    for name in face.__all__:
        ours, theirs = getattr(face, name), getattr(waybill, name, None)
        if inspect.isfunction(ours) and theirs is not None:
            found = parameters(inspect.signature(ours))
            expected = parameters(inspect.signature(theirs))
            if found != expected:
                yield f"docs/python.md:1: waybill.torch.{name} is {found}, waybill has {expected}"


def public_members():
    import waybill

    for name in TYPES_WITH_MEMBERS:
        kind = getattr(waybill, name)
        members = {m for m in vars(kind) if not m.startswith("_")}
        yield from sorted(members | set(getattr(kind, "__dataclass_fields__", ())))


def check_names(blocks):
    """Every public name must stand where people look for Python."""
    text = "\n".join(block.text for block in blocks)
    python_page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    for code in re.findall(r"`([^`\n]+)`", python_page):
        words.update(re.findall(r"\w+", code))
    names = {
        *exported_names("_common.py"),
        *exported_names("__init__.py"),
        *exported_names("torch", "__init__.py"),
        *public_members(),
    }
    for name in sorted(names - words):
        yield f"docs/python.md:1: {name} is public, but no page shows it in Python"


def check(chosen, with_examples):
    begin = time.monotonic()
    missing = {name for name in OPTIONAL if importlib.util.find_spec(name) is None}
    every_page = [page for page in pages() if page.is_file()]
    every_block = [block for page in every_page for block in blocks_of(page)]
    wanted = [block for block in every_block if not chosen or block.page in chosen]

    problems, num_run, skipped, plain_pages = run_blocks(
        [block for block in wanted if block.info == ["python"]], missing
    )
    signatures = [block for block in wanted if block.info[1:] == ["signature"]]
    for block in signatures:
        problems.extend(check_signatures(block, missing))
    if not chosen:
        problems.extend(check_names([b for b in every_block if b.page.parent != ROOT]))
        problems.extend(check_faces(missing))
        for page in every_page:
            if (
                page.parent.name == "functions"
                and page.name not in NO_PYTHON
                and page not in plain_pages
            ):
                problems.append(f"{page.relative_to(ROOT)}:1: no ```python block that runs")
    examples = ""
    if with_examples:
        more, num_programs, num_skipped = run_examples(missing)
        problems.extend(more)
        examples = f", {num_programs} programs ran ({num_skipped} skipped)"

    for name, count in sorted(skipped.items()):
        print(f"SKIPPED {count} blocks: {name} is not installed")
    for problem in problems:
        print(problem)
    print(
        f"python docs: {num_run} blocks ran, {len(signatures)} blocks of signatures hold"
        f"{examples}: {len(problems)} problems, {time.monotonic() - begin:.1f} s"
    )
    return 1 if problems else 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", action="store_true", help="run examples/python too")
    parser.add_argument("pages", nargs="*", type=pathlib.Path, help="only these pages")
    options = parser.parse_args()
    os.environ.setdefault("MPLBACKEND", "Agg")
    chosen = {page.resolve() for page in options.pages}
    with tempfile.TemporaryDirectory() as folder:  # blocks may write files
        here = os.getcwd()
        os.chdir(folder)
        try:
            return check(chosen, options.examples)
        finally:
            os.chdir(here)


if __name__ == "__main__":
    sys.exit(main())
