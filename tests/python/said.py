"""What ranks say in collective calls, and what they may be told: random programs in which ranks
differ are judged by it.

A rank writes down each call of each object (a dispatcher, a layer) that it enters: what it means by
it, what it gives, and the outcome. Afterwards all that was written is compared. A result is right
if all ranks meant the same by the call of that number, and it equals what is computed here from
what they gave. Anything else must be an error of the library, in its own words, by the deadline.
"""

import re
import sys
import time

from error_texts import CLOSED, FINALIZED, UNUSABLE

import waybill

# What no error's text may contain: words of bindings, of C++ and of Python's own errors.
FOREIGN = re.compile(
    r"nanobind|std::|bad_alloc|incompatible function|basic_string|vector::|core dumped|"
    r"index out of range|NoneType|object has no attribute|Traceback|assert",
)
# Of an object that an earlier error has ended, or that this rank has closed.
ENDED = re.compile(rf": the (dispatcher|layer) ({UNUSABLE}|{CLOSED}|{FINALIZED})")
SLACK_S = 8.0  # a loaded machine's


class Said:
    """A call that a rank entered."""

    def __init__(self, rank, operation, meaning, given):
        self.rank, self.operation, self.meaning, self.given = rank, operation, meaning, given
        self.results = self.error = None


class Rank:
    """What one rank writes down."""

    def __init__(self, world):
        self.world, self.rank = world, world.rank
        self.calls = {}  # by object: a list of Said
        self.complaints = []
        self.errors = []
        self.longest = 0.0

    def call(self, key, operation, meaning, given, make, waits=1):
        """Makes the call; results or None. One that is refused before it begins is not written."""
        said = Said(self.rank, operation, meaning, given)
        begin = time.monotonic()
        try:
            said.results = make()
        except waybill.Error as error:
            said.error = error
            self.note(error)
        except Exception as error:
            said.error = error
            self.complaints.append(f"rank {self.rank}: {operation}: foreign error {error!r}")
        took = time.monotonic() - begin
        self.longest = max(self.longest, took)
        if took > waits * self.world.timeout_s + SLACK_S:
            self.complaints.append(f"rank {self.rank}: {operation} took {took:.1f} s")
        if key is not None and (said.error is None or not before_anything(said.error)):
            self.calls.setdefault(key, []).append(said)
        return said.results

    def note(self, error):
        text = str(error)
        self.errors.append((type(error).__name__, text))
        if FOREIGN.search(text):
            self.complaints.append(f"rank {self.rank}: foreign words in {text!r}")
        if isinstance(error, waybill.InternalError):
            self.complaints.append(f"rank {self.rank}: {error!r}")


def before_anything(error):
    """Whether the call was refused before other ranks could hear of it."""
    refused = isinstance(error, (waybill.InvalidArgument, waybill.Unsupported))
    if refused and not isinstance(error, waybill.Disagreement):
        return True
    return type(error) is waybill.TransportError and ENDED.search(str(error)) is not None


def judge(ranks, reference):
    """Complaints about what all ranks wrote down.

    :param reference: (the Saids of all ranks of one call) -> for each rank a list of arrays, or
        None for what is not compared
    """
    complaints = [c for rank in ranks for c in rank.complaints]
    for key in {k: None for rank in ranks for k in rank.calls}:
        lists = [rank.calls.get(key, []) for rank in ranks]
        for number in range(max(map(len, lists))):
            saids = [calls[number] if number < len(calls) else None for calls in lists]
            complaints += judge_call(f"{key} call {number + 1}", saids, reference)
    return complaints


def judge_call(where, saids, reference):
    present = [said for said in saids if said is not None]
    agreed = len(present) == len(saids) and all(s.meaning == saids[0].meaning for s in saids)
    complaints = []
    wanted = None
    for said in present:
        if said.error is not None:
            if isinstance(said.error, waybill.Disagreement):
                complaint = wrong_names(str(said.error), saids)
                complaints += [f"{where}: {complaint}"] if complaint else []
            continue
        if not agreed:
            meant = [s and (s.operation, s.meaning) for s in saids]
            complaints.append(
                f"{where}: rank {said.rank} has a result of {said.operation}: {meant}"
            )
            continue
        if wanted is None:
            wanted = reference(saids)
        complaint = differs(said.results, wanted[said.rank])
        if complaint:
            complaints.append(f"{where}: rank {said.rank}: {said.operation}: {complaint}")
    return complaints


def wrong_names(text, saids):
    """A Disagreement in a call names two ranks that did mean something else by it."""
    if "ranks disagree in call " not in text:  # in an exchange, which other calls share
        return None
    named = list(dict.fromkeys(int(r) for r in re.findall(r"rank (\d+)", text)))
    if len(named) != 2:
        return f"names the ranks {named}: {text}"
    one, other = (saids[r] for r in named)
    if one is not None and other is not None and one.meaning == other.meaning:
        return f"ranks {named} did mean the same: {text}"
    return None


def differs(results, wanted):
    """Bit for bit."""
    if wanted is None:
        return None
    if len(results) != len(wanted):
        return f"{len(results)} results, expected {len(wanted)}"
    for i, (got, want) in enumerate(zip(results, wanted)):
        if (got is None) != (want is None):
            return f"result {i} is {got}, expected {want}"
        if got is None:
            continue
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"result {i} is {got.dtype}{got.shape}, expected {want.dtype}{want.shape}"
        if got.tobytes() != want.tobytes():
            return f"result {i} has other bits: {got.ravel()[:8]}, expected {want.ravel()[:8]}"
    return None


def run_cases(run_case):
    """A program: FIRST COUNT [anything, for all errors], the seeds and how many."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + count):
        print(f"seed {seed}", end="\r", file=sys.stderr, flush=True)
        what, complaints, errors = run_case(seed)
        kinds = sorted({kind for _, kind, _ in errors})
        print(seed, what, kinds, flush=True)
        if len(sys.argv) > 3:
            for error in errors:
                print("    ", *error)
        for complaint in complaints:
            print("  COMPLAINT", seed, str(complaint)[:1500], flush=True)
