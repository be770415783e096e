"""Wordings of errors that several test files expect: who changes a wording changes it here.

Each is a part of a text, for ``in`` and for ``pytest.raises(match=...)``; names and values that are
given may be patterns, too. What one file alone expects stands in its tests.
"""

UNUSABLE = "is unusable after a failure"
CLOSED = "was closed"
FINALIZED = "was finalized"
OF_ANOTHER_THREAD = "call of another thread"
DISAGREE_IN_EXCHANGE = "ranks disagree in exchange"
NO_WEIGHTS = "the dispatch had no weights"
WRITTEN_TWICE = "also written by source rank"
NOT_TO_BE_DESTROYED = "explicitly_destroy = False"
SPEED_OF_LINKS = "expected 1 to 1e"


def an_integer(name, got):
    return f"{name} = {got}, expected an integer"


def a_number(name, got):
    return f"{name} = {got}, expected a number"


def a_multiple(name, got, of):
    return f"{name} = {got}, expected a multiple of {of}"


def columns_of(got, of):
    return f"{got} columns, expected a multiple of {of}"


def a_divisor(name, got, of=""):
    return f"{name} = {got}, expected a divisor of {of}".rstrip()


def lies_on(name, where, expected):
    return f"{name} lies on {where}, expected {expected}"


def disagree_in_call(who, number):
    return f"{who}: ranks disagree in call {number}"


def rank_failed(rank, why=""):
    return f"rank {rank} failed: {why}"


def waited(rank, seconds="", peer=None):
    return f"rank {rank} waited {seconds}" + ("" if peer is None else f".* from rank {peer}")


def cannot_be_copied(kind):
    return f"{kind}: cannot be copied or pickled"
