"""Pages of the reference: which names of the package, and which headers, stand on which page.

What they say comes from the docstrings of the installed package, from the comments of the public
headers, and from the program's own help.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.ext.autodoc.mock import _make_subclass as made_up
from sphinx.ext.autodoc.mock import mock

sys.path.append(str(Path(__file__).resolve().parents[1]))
import contract

#: Packages of others that adapters import; none has to be there for the reference.
FOREIGN = ["megatron", "torchtitan", "transformers", "nemo_automodel"]
#: Headers that include others and declare nothing.
UMBRELLAS = ("plan.h", "sequence.h", "experts.h")
#: What a header has for others: without private members.
SECTIONS = (
    "briefdescription detaileddescription define enum func innerclass innernamespace public-attrib"
    " public-func public-static-attrib public-static-func public-type typedef"
)

DOXYGEN = """\
INPUT = {include}
STRIP_FROM_PATH = {include}
OUTPUT_DIRECTORY = {out}
RECURSIVE = YES
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
XML_PROGRAMLISTING = NO
EXTRACT_ALL = YES
EXCLUDE_SYMBOLS = *::detail
JAVADOC_AUTOBRIEF = YES
AUTOLINK_SUPPORT = NO
SORT_MEMBER_DOCS = NO
QUIET = YES
WARN_IF_UNDOCUMENTED = NO
WARN_IF_INCOMPLETE_DOC = NO
WARN_AS_ERROR = YES
INPUT_FILTER = "sed -f {out}/throws.sed"
"""
#: After @throws comes prose, as "as plan.check()": a paragraph, not a list of names.
THROWS = r"s#@throws #\n///\n/// **Throws** #"


def stand_in() -> None:
    """Puts a package in the place of transformers, whose model the adapter looks into."""
    package = ModuleType("transformers")
    package.__path__ = []
    for name in ("AttentionInterface", "AttentionMaskInterface"):
        setattr(package, name, made_up(name, "transformers")())
    package.PreTrainedModel = type("PreTrainedModel", (), {"loss_function": property()})
    sys.modules["transformers"] = package


def run_doxygen(root: Path, out: Path) -> None:
    """Reads the public headers into out/xml, again when one has changed."""
    headers = sorted((root / "include").rglob("*.h"))
    done = out / "xml" / "index.xml"
    if done.is_file() and done.stat().st_mtime > max(file.stat().st_mtime for file in headers):
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "throws.sed").write_text(THROWS + "\n")
    settings = DOXYGEN.format(include=root / "include", out=out)
    subprocess.run(["doxygen", "-"], input=settings, text=True, check=True)


def title(text: str, line: str = "=") -> str:
    return f"{text}\n{line * len(text)}\n\n"


def first_sentence(docstring: str | None) -> str:
    """The first sentence of a docstring, in one line."""
    text = " ".join((docstring or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s(?=[A-Z])", text)[0].rstrip(":")


def defined_in(name: str, module: ModuleType) -> str:
    """The file of the package that defines a public name of a module."""
    value = getattr(module, name)
    where = getattr(value, "__module__", None) or module.__name__
    if not where.startswith("waybill") or inspect.ismodule(value):
        return module.__name__
    if isinstance(value, type) and issubclass(value, BaseException):
        return "waybill.errors"
    return where


def page_name(where: str) -> str:
    return where.removeprefix("waybill.").replace(".", "_")


def directive(full_name: str, value: Any) -> str:
    """How autodoc is asked for a name."""
    kind = "class" if isinstance(value, type) else "function" if callable(value) else "data"
    options = "   :members:\n   :show-inheritance:\n" if kind == "class" else ""
    return f".. auto{kind}:: {full_name}\n{options}\n"


def python_pages() -> Iterator[tuple[str, str]]:
    """The pages of the package: one for each file that defines public names, by module."""
    index = title("Python") + (
        "What ``import`` gives, by module. Each page has the names that one file defines.\n\n"
    )
    pages: list[str] = []
    placed: dict[int, str] = {}
    for module_name in contract.PUBLIC:
        module = importlib.import_module(module_name)
        groups: dict[str, list[str]] = {}
        for name in module.__all__:
            if not name.startswith("__") and not inspect.ismodule(getattr(module, name)):
                groups.setdefault(defined_in(name, module), []).append(name)
        index += title(module_name, "-") + f"{(module.__doc__ or '').strip()}\n\n"
        for where, names in sorted(groups.items()):
            page = f"{page_name(module_name)}-{page_name(where)}"
            own = [name for name in names if id(getattr(module, name)) not in placed]
            listed = ", ".join(f":py:obj:`{name} <{module_name}.{name}>`" for name in own)
            if own:
                placed.update({id(getattr(module, name)): module_name for name in own})
                about = importlib.import_module(where).__doc__ or ""
                text = title(f"{module_name}: {page_name(where).split('_')[-1]}")
                text += f"{about.strip()}\n\n.. py:currentmodule:: {module_name}\n\n"
                for name in own:
                    text += directive(f"{module_name}.{name}", getattr(module, name))
                yield f"reference/python/{page}.rst", text
                pages.append(page)
                index += f"- :doc:`{page}`: {listed}\n"
            others: dict[str, list[str]] = {}
            for name in names:
                if name not in own:
                    others.setdefault(placed[id(getattr(module, name))], []).append(name)
            for other, same in others.items():
                links = ", ".join(f":py:obj:`{name} <{other}.{name}>`" for name in same)
                index += f"- from ``{other}``: {links}\n"
        index += "\n"
    tree = "".join(f"   {page}\n" for page in pages)
    yield "reference/python/index.rst", f"{index}.. toctree::\n   :hidden:\n\n{tree}"


def cpp_pages(root: Path) -> Iterator[tuple[str, str]]:
    """The pages of the headers, by module, in the order of the way of the data."""
    include = root / "include" / "waybill"
    index = title("C++") + (
        "The public headers, by module. Three of them include what a program needs: "
        + ", ".join(f"``waybill/{name}``" for name in UMBRELLAS)
        + ".\n\n"
    )
    pages = []
    order = [name for name in dict.fromkeys(contract_modules(root)) if (include / name).is_dir()]
    for module in order:
        index += title(module, "-")
        for header in sorted((include / module).glob("*.h")):
            page = f"{module}-{header.stem}"
            pages.append(page)
            name = header.relative_to(root / "include").as_posix()
            text = title(name) + f".. code-block:: cpp\n\n   #include <{name}>\n\n"
            text += f".. doxygenfile:: {header.name}\n   :sections: {SECTIONS}\n"
            yield f"reference/cpp/{page}.rst", text
            names = sorted(set(public_types(header)))
            index += f"- :doc:`{header.name} <{page}>`: {', '.join(names) or 'functions'}\n"
        index += "\n"
    tree = "".join(f"   {page}\n" for page in pages)
    yield "reference/cpp/index.rst", f"{index}.. toctree::\n   :hidden:\n\n{tree}"
    missing = {file.parent.name for file in include.glob("*/*.h")} - set(order)
    if missing:
        raise SystemExit(f"docs/architecture.md: no row of the table has {sorted(missing)}")


def contract_modules(root: Path) -> list[str]:
    """The modules in the order of the table of docs/architecture.md."""
    text = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)


def public_types(header: Path) -> list[str]:
    """The types that a header defines at the top, as its text has them."""
    text = header.read_text(encoding="utf-8")
    return re.findall(r"^(?:class|struct|enum class) (\w+)[^;{]*\{", text, flags=re.MULTILINE)


def program_page(root: Path) -> tuple[str, str]:
    """The help of the program and of each of its commands."""
    program = root / "build" / "venv" / "bin" / "waybill"

    def help_of(*command: str) -> str:
        run = subprocess.run([program, *command, "--help"], capture_output=True, check=True)
        return "```text\n" + run.stdout.decode().strip() + "\n```\n\n"

    whole = help_of()
    text = f"# The program\n\n`waybill`, or `python -m waybill`.\n\n{whole}"
    for command in re.findall(r"^  (\w+) +[A-Z]", whole.split("Subcommands:")[1], re.MULTILINE):
        text += f"## {command}\n\n" + help_of(command)
    return "reference/program.md", text


def pages(root: Path, build: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each page of the reference."""
    run_doxygen(root, build / "doxygen")
    stand_in()
    with mock(FOREIGN):
        yield from python_pages()
    yield from cpp_pages(root)
    yield program_page(root)
