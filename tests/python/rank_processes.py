"""Programs as processes that start in milliseconds: forked from one that has torch and waybill.

A process of its own would take two seconds of a core to import torch, in each rank of each test.
"""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import pathlib
import random
import signal
import socket
import sys
import tempfile
import traceback

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["numpy", "torch.distributed.fsdp", "torch._dynamo", "waybill.torch", "waybill.integrations"]
)


def _run(code, arguments, environment, output):
    """Runs `code` as `python -c` would, with what it prints in the file `output`."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()  # all are forked from one state
    gc.freeze()  # no search for garbage among modules
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        traceback.print_exc()
        ctypes.pythonapi.Py_Exit(128 + signal.SIGINT)  # ends threads as the interpreter does
    finally:
        atexit._run_exitfuncs()  # a forked process ends without them


class Program:
    """A running program; `kill` and `returncode` are those of subprocess.Popen."""

    def __init__(self, code, output, arguments=(), environment=None):
        self.output = pathlib.Path(output)
        given = (code, [str(a) for a in arguments], dict(environment or os.environ), str(output))
        self._process = _CONTEXT.Process(target=_run, args=given, daemon=True)
        self._process.start()

    def wait(self, timeout):
        """(exit status, what it printed)"""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise TimeoutError(f"no end in {timeout} s; it printed: {self._printed()}")
        return self._process.exitcode, self._printed()

    def _printed(self):
        with contextlib.suppress(FileNotFoundError):
            return self.output.read_text()
        return ""

    def kill(self):
        self._process.kill()
        self._process.join()


def run_programs(folder, programs, timeout=180):
    """(exit status, what it printed) of each (code, arguments, environment), all at once."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="printed_", dir=folder))
    started = []
    try:
        for i, (code, arguments, environment) in enumerate(programs):
            started.append(Program(code, folder / str(i), arguments, environment))
        return [program.wait(timeout) for program in started]
    finally:
        for program in started:
            program.kill()


# A file as `python FILE` runs it: its folder, and what its warnings are, then its arguments.
_FILE = """
import multiprocessing, os, runpy, sys, warnings
import torch
torch.set_num_threads(1)
multiprocessing.current_process()._config["daemon"] = False  # loaders have workers
folder, filters, *sys.argv = sys.argv[1:]
os.chdir(folder)
warnings.simplefilter(filters)
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def launched(count):
    """The environment of each of the ranks that a launcher such as torchrun starts on this host."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    common = {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, "MASTER_PORT": port,
        "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
    }  # fmt: skip
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def run_file(folder, file, arguments=(), environments=(None,), timeout=180, filters="default"):
    """(exit status, what it printed) of each process that runs a program's file in the folder.

    :param environments: of each process; None: as it is here
    :param filters: what Python does with warnings
    """
    given = (folder, filters, file, *arguments)
    return run_programs(folder, [(_FILE, given, one) for one in environments], timeout)
