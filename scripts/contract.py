#!/usr/bin/env python3
"""Writes down what users call: every public signature of Python and C++, in docs/contract.

    contract.py           exits 1 where a signature is not as the files say, or a deprecation does
                          not name the version in which the name goes
    contract.py --write   writes the files

A signature that changes is in the file in the same commit. Reads sources alone: names are found
through __all__ and imports, members through bases, wherever the files lie.
"""

import argparse
import ast
import difflib
import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = "docs/contract"
PUBLIC = (
    "waybill",
    "waybill.moe",
    "waybill.torch",
    "waybill.torch.kernels",
    "waybill.torch.moe",
    "waybill.integrations.automodel",
    "waybill.integrations.deep_ep",
    "waybill.integrations.megatron",
    "waybill.integrations.torchtitan",
    "waybill.integrations.transformers",
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FIELD = re.compile(r": (?!property)| = ")
# Methods that no caller names, and that no operator of a caller's stands for.
INNER = {f"__{name}__" for name in ("slots", "post_init", "repr", "str", "getattr", "del", "copy")}
INNER |= {f"__{name}__" for name in ("deepcopy", "reduce", "reduce_ex", "getstate", "setstate")}
# Adapters that make functions for tensors from functions for arrays: their own type of result.
ADAPTERS = {"as_torch": None, "_like_its_tensor": "torch.Tensor"}
VERSION = re.compile(r"\bgoes in (?:version )?\d+\.\d+\b")


# Python


class Module:
    """What a module defines and imports at its top."""

    def __init__(self, name):
        self.name = name
        base = ROOT / "python" / pathlib.Path(*name.split("."))
        self.is_package = base.is_dir()
        path = base / "__init__.py" if self.is_package else base.with_suffix(".py")
        self.defined, self.imported, self.stars, self.all = {}, {}, [], []
        if path.is_file():
            self.read(ast.parse(path.read_text(encoding="utf-8")).body)

    def read(self, body):
        for node in body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                self.defined[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self.assign(target, node.value)
            elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "__all__":
                self.all += self.names(node.value)
            elif isinstance(node, ast.ImportFrom):
                self.read_import(node)
            elif isinstance(node, (ast.If, ast.Try)):
                for part in ("body", "orelse", "finalbody"):
                    self.read(getattr(node, part, []))

    def assign(self, target, value):
        if isinstance(target, ast.Name) and target.id == "__all__":
            self.all = self.names(value)
        elif isinstance(target, ast.Name) and value is not None:
            self.defined[target.id] = value

    def names(self, value):
        """The names of an expression such as [*a.__all__, "b"]."""
        if isinstance(value, (ast.List, ast.Tuple)):
            return [name for item in value.elts for name in self.names(item)]
        if isinstance(value, ast.Constant):
            return [value.value]
        if isinstance(value, ast.Starred):
            return self.names(value.value)
        name = ast.unparse(value).removesuffix(".__all__")
        return list(module(".".join(self.imported.get(name, (self.name, name)))).all)

    def read_import(self, node):
        base = self.name.split(".")
        base = base[: len(base) - node.level + self.is_package] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(source)
            else:
                self.imported[alias.asname or alias.name] = (source, alias.name)


@functools.cache
def module(name):
    return Module(name)


def is_module(name):
    base = ROOT / "python" / pathlib.Path(*name.split("."))
    return base.is_dir() or base.with_suffix(".py").is_file()


def resolve(where, name):
    """(module, name, node) where a name is defined; node None: not in Python of this project."""
    here = module(where)
    if name in here.defined:
        node = here.defined[name]
        if isinstance(node, ast.Name):
            return resolve(where, node.id)
        return where, name, node
    if name in here.imported:
        source, original = here.imported[name]
        if not source.startswith("waybill") or is_module(f"{source}.{original}"):
            return source, original, None
        return resolve(source, original)
    for star in here.stars:
        if name in module(star).all:
            return resolve(star, name)
    return where, name, None


def signature(node):
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def adapted(where, node):
    """The signature of a function of torch's face that an adapter makes of one of numpy's."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ADAPTERS:
        return None
    source, name = node.args[0].value.id, node.args[0].attr
    *_, function = resolve(".".join(module(where).imported[source]), name)
    returns = ADAPTERS[ast.unparse(node.func)] or ast.unparse(function.returns)
    return f"({ast.unparse(function.args)}) -> {returns}"


def decorators(node):
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def bases_of(where, node, public):
    """(texts of the bases that users know, classes of the others with their private bases)"""
    shown, private = [], []
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        place, original, found = resolve(where, ast.unparse(plain))
        if not isinstance(found, ast.ClassDef):
            shown.append(ast.unparse(base))
        elif (place, original) in public:
            shown.append(public[place, original])
        else:
            further, classes = bases_of(place, found, public)
            shown += further
            private += [found, *classes]
    return shown, private


def is_private(name):
    return name in INNER or (name.startswith("_") and not name.endswith("__"))


def is_forwarded(value):
    """A property that gives an attribute of what the object holds."""
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "forwarded"


def members_of(node):
    """{name: text} of what a class itself has."""
    found = {}
    for child in node.body:
        if isinstance(child, FUNCTIONS):
            marks = decorators(child)
            if any(mark.endswith((".setter", "overload")) for mark in marks):
                mark = "settable" if marks[0].endswith("setter") else f"or {signature(child)}"
                found[f"{child.name} {mark}"] = ""
            elif any("property" in mark for mark in marks):
                returns = ast.unparse(child.returns) if child.returns else "?"
                found[child.name] = f": property {returns}"
            else:
                kinds = [mark + " " for mark in marks if mark in ("staticmethod", "classmethod")]
                found[child.name] = signature(child) + "".join(f"  # {kind}" for kind in kinds)
            if child.name == "__init__":
                found |= attributes_of(child)
        elif isinstance(child, ast.AnnAssign) and is_forwarded(child.value):
            found[child.target.id] = f": property {ast.unparse(child.annotation)}"
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            default = f" = {ast.unparse(child.value)}" if child.value else ""
            found[child.target.id] = f": {ast.unparse(child.annotation)}{default}"
        elif isinstance(child, ast.Assign):
            for target in child.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = f" = {ast.unparse(child.value)}"
    return {name: text.rstrip() for name, text in found.items() if not is_private(name)}


def attributes_of(init):
    """Attributes that a constructor sets; a property of the same name says more."""
    found = {}
    for node in ast.walk(init):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found[target.attr] = ": attribute"
    return found


def class_lines(where, name, node, public):
    shown, private = bases_of(where, node, public)
    marks = [mark for mark in decorators(node) if mark.startswith("dataclass")]
    yield f"class {name}({', '.join(shown)})" + "".join(f"  # {mark}" for mark in marks)
    members = {}
    for each in [*reversed(private), node]:
        members |= members_of(each)
    if marks or any("NamedTuple" in base or "Enum" in base for base in shown):
        fields = [m for m, text in members.items() if FIELD.match(text) and m != "__hash__"]
        text = ", ".join(f"{field}{members.pop(field)}" for field in fields)
        yield f"{name}: fields {text}"  # in their order
    for member in sorted(members):
        yield f"{name}.{member}{members[member]}"


def public_places():
    """{(module, name) of a definition: the first of its public names}"""
    places = {}
    for public in PUBLIC:
        found = {name: resolve(public, name)[:2] for name in module(public).all}
        # Its own name before an alias of it.
        for name in sorted(found, key=lambda name: (found[name][1] != name, name)):
            places.setdefault(found[name], f"{public}.{name}")
    return places


def python_lines():
    places = public_places()
    for public in PUBLIC:
        for name in sorted(set(module(public).all)):
            full = f"{public}.{name}"
            where, original, node = resolve(public, name)
            known = places[where, original]
            if known != full:
                yield f"{full} = {known}"
            elif isinstance(node, ast.ClassDef):
                yield from class_lines(where, full, node, places)
            elif isinstance(node, FUNCTIONS):
                yield f"{full}{signature(node)}"
            elif adapted(where, node) is not None:
                yield f"{full}{adapted(where, node)}"
            elif node is None:
                yield f"{full}: {'module' if is_module(full) else 'compiled'}"
            else:
                yield f"{full}: constant"


# C++

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
IGNORED = re.compile(r"\[\[(?:nodiscard|maybe_unused)\]\]|\binline\b")
TYPE = re.compile(
    r"\b(?:class|struct|union)\s+(?:alignas\([^)]*\)\s*)?(\w+)(?:\s+final)?\s*(:[^:].*)?$"
)
BODY = re.compile(
    r"\)\s*(?:const|noexcept|override|final|&|\s|->[^;{]*|requires[^;{]*)*(:[^:].*)?$"
)

FORWARD = re.compile(r"(?:class|struct|enum class) (\w+)(?: : [\w:]+)?")


def closing(text, at):
    """The end of what the bracket at `at` opens."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "{([") - (text[i] in "})]")
        if depth == 0:
            return i + 1
    return len(text)


def declarations(text, scope, private):
    """(scope, declaration) of what is public in a piece of a header."""
    at = start = 0
    while at < len(text):
        label = re.match(r"\s*(public|private|protected)\s*:(?!:)", text[start:])
        if label and at <= start + label.end():
            private = label[1] != "public"
            at = start = start + label.end()
            continue
        char = text[at]
        if char in "([":
            at = closing(text, at)
        elif char in ";}":
            if not private:
                yield scope, text[start:at]
            at = start = at + 1
        elif char == "{":
            head, end = " ".join(text[start:at].split()), closing(text, at)
            kind = TYPE.search(head)
            if head.startswith("namespace"):
                name = head.removeprefix("namespace").strip()
                if name and "detail" not in name.split("::"):
                    yield from declarations(text[at + 1 : end - 1], f"{scope}{name}::", False)
            elif kind and "(" not in head and "=" not in head and not head.startswith("enum"):
                if not private:
                    inner = f"{scope}{kind[1]}::"
                    yield inner, head
                    closed = re.search(r"\bclass\b", head) is not None
                    yield from declarations(text[at + 1 : end - 1], inner, closed)
                end = text.find(";", end) + 1
            elif body := BODY.search(head):
                if not private:
                    yield scope, head[: body.start(1)] if body[1] else head
            else:  # an initialiser, or an enumeration
                at = end
                continue
            at = start = end
        else:
            at += 1


def cpp_lines():
    """Sorted by scope; fields in their order, then functions by name."""
    scopes = {}
    for header in sorted((ROOT / "include" / "waybill").rglob("*.h")):
        text = COMMENT.sub("", header.read_text(encoding="utf-8"))
        text = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.MULTILINE)
        for scope, found in declarations(text, "", False):
            line = " ".join(IGNORED.sub("", found).split()).replace("( ", "(")
            own = scope.removesuffix("::").rpartition("::")[2]
            forward = FORWARD.fullmatch(line)
            if not line or line.startswith("friend class") or (forward and forward[1] != own):
                continue
            lines = scopes.setdefault(scope.removesuffix("::"), [])
            if line not in lines:
                lines.append(line)
    for scope, lines in sorted(scopes.items()):
        kind = TYPE.search(lines[0])
        own = kind is not None and kind[1] == scope.rpartition("::")[2]
        of_type = lines if own else ["", *lines]
        first, rest = of_type[0], of_type[1:]
        fields = [line for line in rest if "(" not in line.partition("=")[0]] if first else []
        for line in [first, *fields, *sorted(line for line in rest if line not in fields)]:
            if line:
                yield f"{scope}: {line}"


# Both


def deprecations():
    """The places of those that name no version."""
    for path in sorted((ROOT / "python").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.unparse(node) if isinstance(node, ast.Call) else ""
            warns = "DeprecationWarning" in text and "warn(" in text
            if warns and not VERSION.search(text):
                yield f"{path.relative_to(ROOT)}:{node.lineno}"
    for path in sorted((ROOT / "include").rglob("*.h")):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"\[\[deprecated(.*?)\]\]", text, re.DOTALL):
            if not VERSION.search(match[1]):
                yield f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    problems = [f'{place}: a deprecation says "goes in VERSION"' for place in deprecations()]
    count = 0
    for name, lines in (("python.txt", [*python_lines()]), ("cpp.txt", [*cpp_lines()])):
        path = ROOT / FOLDER / name
        count += len(lines)
        if given.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        written = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        changed = difflib.unified_diff(
            written, lines, f"{FOLDER}/{name}", "the code", "", "", 0, ""
        )
        problems += [line for line in changed if not line.startswith("@@")]
    print("\n".join(problems) or f"contract: {count} lines hold")
    if problems:
        print("contract: scripts/contract.py --write writes the new signatures, in the same commit")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
