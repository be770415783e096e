"""``python -m waybill selftest``: what is installed here checks itself, in seconds.

Small recorded cases, the program, simulations, and ranks that are threads against the simulation;
where torch is there, its face too, and where there are GPUs, ranks on them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Optional, Tuple

from .. import _core
from ..errors import Error
from . import checks
from .checks import Check, Skipped, describe

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Runs the checks; 0 when none failed, 1 when some did, 130 after Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(list(arguments))
    repeats = options.repeat is not None
    stray = [name for name in _OF_REPEAT if getattr(options, name) is not None]
    if stray and not repeats:
        parser.error(f"--{stray[0]} needs --repeat")
    if repeats and importlib.util.find_spec("torch") is None:
        parser.error("--repeat needs torch, which is not installed")
    if repeats:  # before CUDA starts: what a rank queues or loads must not wait for another rank
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    print(describe(), flush=True)
    try:
        return (
            _repeat(options) if repeats else _run(_checks(not options.no_gpus), options.traceback)
        )
    except KeyboardInterrupt:
        print("\nselftest: interrupted", flush=True)
        return 130


#: Options that say how --repeat repeats.
_OF_REPEAT = ("device", "ranks", "tokens", "hidden", "only", "combine")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m waybill selftest",
        description="Checks this installation of Waybill: recorded cases, simulations, ranks that"
        " move rows, and torch and GPUs where they are there.",
    )
    parser.add_argument("--no-gpus", action="store_true", help="leave the GPUs alone")
    parser.add_argument("--traceback", action="store_true", help="show where a check failed")
    repeat = parser.add_argument_group(
        "the same bits",
        "With --repeat, instead of the checks: calls of each kind (dispatch, combine, sequences,"
        " gradients of K and V) again and again with the same inputs. The first results must be"
        " those of the simulation, all later ones have the same bits; they are compared on the"
        " device. On GPUs a tenth of the calls is eager, the rest is in CUDA graphs.",
    )
    repeat.add_argument(
        "--repeat", type=_count(10**9), metavar="N", help="calls of each kind; needs torch"
    )
    repeat.add_argument(
        "--device", choices=("cpu", "cuda"), help="cuda where there is a GPU, which ranks may share"
    )
    repeat.add_argument(
        "--ranks", type=_count(64), help="threads; as many as there are GPUs, and at least 2"
    )
    repeat.add_argument("--tokens", type=_count(2**20), help="tokens of each rank in a call; 128")
    repeat.add_argument(
        "--hidden", type=_count(2**16), help="elements of a row, a multiple of 128; 1024"
    )
    repeat.add_argument("--only", metavar="TEXT", help="kinds of call with this in their name")
    repeat.add_argument(
        "--combine", choices=("pull", "push"), help="how experts combine; pull unless given"
    )
    return parser


def _count(most: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not (text.isdecimal() and 1 <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text}, expected 1 to {most}")
        return int(text)

    return count


def _repeat(options: argparse.Namespace) -> int:
    found = importlib.import_module("waybill.torch._repeat")
    device = options.device or ("cpu" if _why_no_gpus(not options.no_gpus) else "cuda")
    try:
        return found.run(  # type: ignore[no-any-return]
            options.repeat, options.ranks, options.tokens or 128, options.hidden or 1024, device,
            options.only, options.combine or "pull",
        )  # fmt: skip
    except Error as error:
        print(f"selftest: {error}", file=sys.stderr)
        return 2


def _checks(with_gpus: bool) -> list[Tuple[str, Check]]:
    """(what is checked, the check), those that need nothing first."""
    found: list[Tuple[str, Check]] = [("recorded cases", checks.run_golden), *checks.CHECKS]
    if importlib.util.find_spec("torch") is None:
        found.append(("torch", _skip("torch is not installed")))
        return found
    # By name: no file of the numpy face imports torch's.
    torch_checks = importlib.import_module("waybill.torch._selftest")
    found += [("recorded cases, tensors", torch_checks.golden), *torch_checks.CHECKS]
    why = _why_no_gpus(with_gpus)
    if why is not None:
        found.append(("GPUs", _skip(why)))
    else:
        found += torch_checks.GPU_CHECKS
    return found


def _why_no_gpus(wanted: bool) -> Optional[str]:
    if not wanted:
        return "--no-gpus"
    if not _core.has_cuda:
        return "built without CUDA"
    if _core.num_gpus() == 0:
        return _core.driver_trouble() or "there is none"
    torch = importlib.import_module("torch")
    return None if torch.cuda.is_available() else "torch finds none"


def _skip(reason: str) -> Callable[[], str]:
    def check() -> str:
        raise Skipped(reason)

    return check


def _run(found: list[Tuple[str, Check]], with_traceback: bool) -> int:
    """Runs them in order, a line each, and prints the verdict."""
    start, failed, skipped = time.monotonic(), [], []
    width = max(len(name) for name, _ in found)
    for number, (name, check) in enumerate(found, start=1):
        print(f"{number:2}/{len(found)}  {name:{width}}  ", end="", flush=True)
        begin = time.monotonic()
        try:
            detail, verdict = check(), "ok"
        except Skipped as reason:
            detail, verdict = str(reason), "skipped"
            skipped.append(f"{name}: {reason}")
        except Exception as error:  # a check that fails must not end the others
            text = f"{type(error).__name__}: {error}"
            detail, verdict = text.splitlines()[0], "FAILED"
            failed.append(name)
            if with_traceback:
                detail += "\n" + traceback.format_exc().rstrip()
        elapsed = time.monotonic() - begin
        print(f"{verdict:8}{elapsed:6.2f} s  {detail}", flush=True)
    seconds = time.monotonic() - start
    if failed:
        print(f"selftest: FAILED: {', '.join(failed)} ({len(found)} checks, {seconds:.1f} s)")
        if not with_traceback:
            print("selftest: --traceback shows where")
        return 1
    aside = f"; skipped {', '.join(skipped)}" if skipped else ""
    print(f"selftest: passed: {len(found) - len(skipped)} checks in {seconds:.1f} s{aside}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
