"""The files of the package depend on each other one way, and numpy's do not know torch's."""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

import waybill

PACKAGE = Path(waybill.__file__).parent
TORCH_TOO = ("waybill.integrations", "waybill._bench")
#: The one way from numpy's files to torch's, which begins when it is called; type checkers see it.
EXCEPTIONS = {
    ("waybill.metadata", "waybill.torch.functions", "Metadata.cuda"),
    ("waybill.metadata", "waybill.torch.functions", ""),
}


class Import(NamedTuple):
    """One module that a file imports; ``inside`` names the function, "" for the file itself."""

    source: str
    target: str
    inside: str


def modules_of(package):
    """{"waybill.moe": path, ...}"""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def targets(node, name, is_package, modules):
    """The modules that a statement imports, those of the package by their full names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = name.split(".") if is_package else name.split(".")[:-1]
        base = base[: len(base) - node.level + 1] if node.level else []
        origin = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{origin}.{alias.name}"
            yield inner if inner in modules or alias.name == "_core" else origin


def imports_of(name, path, modules):
    """All of a file, those in functions and behind TYPE_CHECKING among them."""

    def walk(node, scope):
        for target in targets(node, name, path.name == "__init__.py", modules):
            yield Import(name, target, ".".join(scope) if in_function(scope) else "")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope = (*scope, node.name)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, scope)

    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def in_function(scope):
        return any(part not in classes for part in scope)

    return list(walk(tree, ()))


def all_imports(package):
    modules = modules_of(package)
    return [one for name, path in modules.items() for one in imports_of(name, path, modules)]


def circles(imports):
    """The groups of files of which each needs all others."""
    needs = {}
    for source, target, _ in imports:
        needs.setdefault(source, set()).add(target)

    def reachable(start):
        seen, left = set(), [start]
        while left:
            for target in needs.get(left.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    left.append(target)
        return seen

    reach = {name: reachable(name) for name in needs}
    groups = {
        frozenset(other for other in reach[name] if name in reach.get(other, ()))
        for name in needs
        if name in reach[name]
    }
    return sorted(sorted(group) for group in groups)


def is_torch(module):
    return module.split(".")[0] == "torch" or module.startswith(("waybill.torch", *TORCH_TOO))


def test_no_files_need_each_other():
    imports = [one for one in all_imports(PACKAGE) if tuple(one) not in EXCEPTIONS]
    assert len(imports) > 100
    assert circles(imports) == []


def test_numpy_files_do_not_import_the_torch_face():
    numpys = [one for one in all_imports(PACKAGE) if not is_torch(one.source)]
    to_face = {tuple(one) for one in numpys if one.target.startswith("waybill.torch")}
    assert to_face == EXCEPTIONS
    at_import = {one for one in numpys if is_torch(one.target) and not one.inside} - EXCEPTIONS
    # Imported by World.from_process_group alone, whose callers have torch.
    assert {one.source for one in at_import} <= {"waybill._process_group"}


@pytest.mark.parametrize("late", [False, True])
def test_a_circle_would_be_found(tmp_path, late):
    """Also one through a function, or through the package itself."""
    package = tmp_path / "toy"
    (package / "inner").mkdir(parents=True)
    back = "from .. import a"
    files = {
        "__init__": "from .a import f",
        "a": "from typing import Any\nfrom .b import g",
        "b": "import numpy as np\nfrom .inner import h",
        "inner/__init__": f"def k():\n    {back}" if late else back,
    }
    for name, text in files.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    imports = all_imports(package)
    assert circles(imports) == [["toy.a", "toy.b", "toy.inner"]]
    assert {one.inside for one in imports if one.target == "toy.a"} == {"", "k" if late else ""}
    assert circles([one for one in imports if one.source != "toy.inner"]) == []
