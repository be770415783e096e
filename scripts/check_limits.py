#!/usr/bin/env python3
"""Holds what may only shrink to scripts/limits.json: per room (folder of the product) its files,
lines, types, headers with one user, calls of to_size(, identifiers with most_ or least_, words that
are not the field's, and the rooms that it takes from.

    check_limits.py                      exits 1 where a number is above its limit
    check_limits.py --update             writes lower numbers, and drops rooms that are gone
    check_limits.py --update --reason T  writes higher ones, too, with T as the reason
    check_limits.py --list               prints the numbers and their sums

A limit may be above the lowest that it has been on this branch only with a reason in the file.
"""

import argparse
import ast
import collections
import io
import json
import pathlib
import re
import subprocess
import sys
import tokenize

import check_types

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMITS = "scripts/limits.json"
FOLDERS = ("include", "src", "python")
CPP = (".h", ".cpp", ".cuh", ".cu")
KINDS = ("files", "lines", "types", "one_user", "to_size", "most_least", "dialect", "comments")
ROUND_LINES = 50  # a limit of lines is a multiple of this: a mended line needs no new limit

# A literal is skipped; two slashes in it begin no comment.
CPP_TEXT = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)"
    r"|R\"(\w*)\(.*?\)\2\"|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
WORD = re.compile(r"[A-Za-z_]\w*")
WORD_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

DIALECT = re.compile(
    r"greeter|reception|introduction|told|teller|meets?|meetings?|took|hear|hears|heard|mates?"
    r"|crumbs?|lent|loans?|beside"
)
UNITS = (
    "lane|warp|block|thread|rank|node|token|row|call|expert|group|number|second|step|peer|slot|"
    "topk slot|line|chunk|piece|element|head|pair|message"
)
COUNTED = r"\d+|one|two|three|four|so many|as many|many|few|several"
SMALL = "a|an|and|along|as|by|for|from|in|nor|of|on|or|that|the|then|to|until|with"
RIDDLES = re.compile(
    r"\b(?:behind|beside|ahead)\b"
    rf"|\b(?:{COUNTED})(?: (?!(?:{SMALL})\b)[\w-]+){{0,2}} an? (?:{UNITS})\b"  # 8 elements a lane
    r"|^(?:Of|What|Who)\b",  # at the start of a comment
    re.IGNORECASE,
)
PER = re.compile(rf"\w_an?_(?:{UNITS})\b")  # words_a_lane


class Source:
    """A file's code without comments and literals, its comments, and what it takes from others."""

    def __init__(self, path, text):
        self.path, self.num_lines = path, len(text.splitlines())
        if path.suffix == ".py":
            self.code, self.comments = python_parts(text)
            self.num_types = sum(isinstance(n, ast.ClassDef) for n in ast.walk(ast.parse(text)))
        else:
            self.code, self.comments = cpp_parts(text)
            self.num_types = sum(bool(m["type"]) for m in check_types.TOKEN.finditer(self.code))
        self.text = text


def cpp_parts(text):
    """Code and comments; lines of // that follow each other are one comment."""
    comments, last_end = [], None
    for match in CPP_TEXT.finditer(text):
        if not match["comment"]:
            continue
        said = re.sub(r"^[/*!<\s]+", "", match["comment"])
        if last_end is not None and re.fullmatch(r"\n[ \t]*", text[last_end : match.start()]):
            comments[-1] += " " + said
        else:
            comments.append(said)
        last_end = match.end()
    return CPP_TEXT.sub(lambda m: "\n" * m.group().count("\n") or " ", text), comments


def python_parts(text):
    """Code and comments, docstrings among these."""
    code, comments, last = [], [], -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            said = token.string.lstrip("#: ")
            if token.start[0] == last + 1 and not token.line[: token.start[1]].strip():
                comments[-1] += " " + said
            else:
                comments.append(said)
            last = token.start[0]
        elif token.type == tokenize.STRING:
            if token.string.startswith(('"""', 'r"""')):
                comments.append(token.string.lstrip('r"').strip())
        elif token.type == tokenize.NAME or token.type == tokenize.OP:
            code.append(token.string)
    return " ".join(code), comments


def room_of(path):
    return path.parent.as_posix()


def sources():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (*CPP, ".py") and "__pycache__" not in path.parts:
                yield Source(path.relative_to(ROOT), path.read_text(encoding="utf-8"))


def included(source):
    """The files of the project that a C++ file includes."""
    for name in INCLUDE.findall(source.text):
        for base in ("include", "src", source.path.parent):
            # Neither resolve() nor "..": the tree may stand behind links.
            parts = []
            for part in (pathlib.Path(base) / name).parts:
                parts = parts[:-1] if part == ".." else [*parts, part]
            if (ROOT / pathlib.Path(*parts)).is_file():
                yield pathlib.Path(*parts)
                break


def imported(source):
    """The rooms that a Python file imports from."""
    package = source.path.relative_to("python").with_suffix("").parts
    package = package if source.path.name == "__init__.py" else package[:-1]
    package = package[:-1] if source.path.name == "__init__.py" else package
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "waybill":
                yield room_of_module(name)


def room_of_module(name):
    """The folder of a dotted name: the longest of its beginnings that is a package or a module."""
    if name[:2] == ["waybill", "_core"]:
        return "python/bindings"
    for length in range(len(name), 0, -1):
        path = pathlib.Path("python", *name[:length])
        if (ROOT / path).is_dir():
            return path.as_posix()
        if (ROOT / path.with_suffix(".py")).is_file():
            return room_of(path)
    return "python/waybill"


def identifier_counts(source):
    words = WORD.findall(source.code)
    parts = [part.lower() for word in words for part in WORD_PART.findall(word)]
    dialect = sum(bool(DIALECT.fullmatch(part)) for part in parts)
    return {
        "to_size": len(re.findall(r"\bto_size ?\(", source.code)),
        "most_least": sum(word.startswith(("most_", "least_")) for word in words),
        "dialect": dialect + len(PER.findall(" ".join(words))),
        "comments": sum(len(RIDDLES.findall(comment)) for comment in source.comments),
    }


def count():
    """({room: {kind: number}}, {room: rooms that it takes from})"""
    rooms = collections.defaultdict(lambda: dict.fromkeys(KINDS, 0))
    arrows = collections.defaultdict(set)
    users = collections.defaultdict(set)
    for source in sources():
        room = room_of(source.path)
        numbers = rooms[room]
        numbers["files"] += 1
        numbers["lines"] += source.num_lines
        numbers["types"] += source.num_types
        for kind, number in identifier_counts(source).items():
            numbers[kind] += number
        if source.path.suffix == ".py":
            arrows[room].update(imported(source))
        else:
            for header in included(source):
                arrows[room].add(room_of(header))
                if header.stem != source.path.stem:  # a header and its own source are one
                    users[header].add(source.path)
    for header, files in users.items():
        if header.parts[0] != "include" and len(files) == 1:
            rooms[room_of(header)]["one_user"] += 1
    for room in rooms:
        arrows[room].discard(room)
    return dict(rooms), {room: sorted(arrows[room]) for room in rooms}


def as_limits(rooms):
    """Limits that these numbers just keep."""
    return {
        room: numbers | {"lines": -(-numbers["lines"] // ROUND_LINES) * ROUND_LINES}
        for room, numbers in rooms.items()
    }


def rises(limits, rooms, arrows):
    """(room, kind, limit, number) of all that is above its limit; kind "to R": an arrow to R."""
    return raised(limits, {"rooms": rooms, "arrows": arrows})


def past_limits():
    """The file as it was at each of its commits on this branch."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run(
        [*git, "log", "--first-parent", "--format=%H", "--", LIMITS], capture_output=True, text=True
    )
    commits = found.stdout.split() if found.returncode == 0 else []
    for commit in commits:
        text = subprocess.run([*git, "show", f"{commit}:{LIMITS}"], capture_output=True, text=True)
        if text.returncode == 0:
            yield json.loads(text.stdout)


def without_reason(limits):
    """(room, kind, lowest, limit) of limits above the lowest that they were, without a reason."""
    past = [{(room, kind): n for room, kind, n in numbers_of(old)} for old in past_limits()]
    for room, kind, limit in numbers_of(limits) if past else ():
        lowest = min(old.get((room, kind), 0) for old in past)
        given = limits["reasons"].get(f"{room} {kind}", {})
        reasoned = given.get("to", 0) if given.get("reason") else 0
        if limit > max(lowest, reasoned):
            yield room, kind, lowest, limit


def update(limits, rooms, arrows, reason):
    """The new file: lower numbers; higher ones only with a reason."""
    new = as_limits(rooms)
    arrows = {room: list(others) for room, others in arrows.items()}
    if reason is None:
        for room, numbers in new.items():
            allowed = limits["rooms"].get(room, {})
            new[room] = {kind: min(n, allowed.get(kind, 0)) for kind, n in numbers.items()}
            known = limits["arrows"].get(room, [])
            arrows[room] = [other for other in arrows[room] if other in known]
    written = {"rooms": new, "arrows": arrows, "reasons": {}}
    # Without their reasons, all that are above the lowest that they were are missing one.
    for room, kind, _, limit in [*without_reason(written), *raised(limits, written)]:
        key = f"{room} {kind}"
        given = limits["reasons"].get(key, {"to": 0})
        if limit <= given["to"]:
            written["reasons"][key] = given | {"to": limit}
        elif reason is not None:
            written["reasons"][key] = {"to": limit, "reason": reason}
    return written


def numbers_of(limits):
    for room, numbers in limits["rooms"].items():
        yield from ((room, kind, limit) for kind, limit in numbers.items())
        yield from ((room, f"to {other}", 1) for other in limits["arrows"].get(room, []))


def raised(old, new):
    """(room, kind, old limit, new limit) of all that is higher in a new file."""
    before = {(room, kind): limit for room, kind, limit in numbers_of(old)}
    for room, kind, limit in numbers_of(new):
        if limit > before.get((room, kind), 0):
            yield room, kind, before.get((room, kind), 0), limit


def text_of(limits):
    """JSON with a line per room."""
    parts = []
    for name, entries in limits.items():
        lines = ",\n".join(
            f"    {json.dumps(k)}: {json.dumps(entries[k])}" for k in sorted(entries)
        )
        parts.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}" if lines else f'  "{name}": {{}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def show(rooms):
    width = max(map(len, rooms))
    print(" " * width, *(f"{kind:>10}" for kind in KINDS))
    for room, numbers in sorted(rooms.items()):
        print(f"{room:{width}}", *(f"{numbers[kind]:10}" for kind in KINDS))
    sums = (sum(numbers[kind] for numbers in rooms.values()) for kind in KINDS)
    print(f"{'all':{width}}", *(f"{number:10}" for number in sums))


def check(limits, rooms, arrows):
    problems = [
        f"{room}: {kind}: {number}, at most {limit}"
        for room, kind, limit, number in rises(limits, rooms, arrows)
    ]
    problems += [
        f"{LIMITS}: {room}: {kind}: raised from {lowest} to {limit} without a reason"
        for room, kind, lowest, limit in without_reason(limits)
    ]
    if problems:
        print("\n".join(problems))
        print('limits: see scripts/README.md; --update --reason "..." raises a limit')
        return 1
    total = sum(numbers["lines"] for numbers in rooms.values())
    print(f"limits: {len(rooms)} rooms, {total} lines, none above its limit")
    return 0


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--reason")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(arguments)
    rooms, arrows = count()
    if given.list:
        show(rooms)
        return 0
    path = ROOT / LIMITS
    limits = {"rooms": {}, "arrows": {}, "reasons": {}}
    if path.is_file():
        limits = json.loads(path.read_text(encoding="utf-8"))
    elif given.update:  # the first: what is there is the limit
        limits = {"rooms": as_limits(rooms), "arrows": arrows, "reasons": {}}
    if given.update:
        limits = update(limits, rooms, arrows, given.reason)
        path.write_text(text_of(limits), encoding="utf-8")
    return check(limits, *count())


if __name__ == "__main__":
    sys.exit(main())
