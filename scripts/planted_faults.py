#!/usr/bin/env python3
"""Plants faults in src and python, one after another, and sees whether a test finds each.

    build/venv/bin/python scripts/planted_faults.py     all but those that need a GPU
      --work FOLDER                   for the copy of the tree and builds; default build/faults
      --only TEXT                     those whose name, file or test has the text
      --check                         only whether each fault fits its file
      --cuda                          also compiles those in code for devices, with nvcc
      --gpu BUILD                     those alone that need a GPU, on a machine with one: BUILD is
                                      a build of this tree with waybill_tests_cuda; root only
      --whole                         runs the whole program or file of a fault's test, and names
                                      the tests that find it

scripts/planted_faults.json has the faults: a file or a folder, a text that occurs once in it, what
takes its place, and the test that finds it: "waybill_tests_moe Combine.weighted" (a program of the
build and a filter) or "tests/python/test_a.py::test_b". Without --gpu, a test of a GPU is named and
not run.

Works on a copy of the tree. A fault that no test finds is a missing test: exits 1.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FAULTS = "scripts/planted_faults.json"
SUFFIXES = (".h", ".cpp", ".cuh", ".cu", ".py")
COPIED = ("bench", "cmake", "data", "docs", "examples", "include", "python", "src", "tests")
TIMEOUT_S = 300
FAILED_TESTS = re.compile(r"^\[  FAILED  \] ([\w/]+\.[\w/]+)|^FAILED (\S+)", re.MULTILINE)


def load():
    return json.loads((ROOT / FAULTS).read_text(encoding="utf-8"))


def needs_gpu(fault):
    return fault["test"].startswith("waybill_tests_cuda")


def place_of(fault, root):
    """(file, its text) where a fault belongs. Raises ValueError where it fits none or several."""
    where = root / fault["file"]
    files = sorted(where.rglob("*")) if where.is_dir() else [where]
    found = []
    for path in files:
        if path.is_file() and path.suffix in SUFFIXES:
            text = path.read_text(encoding="utf-8")
            found += [(path, text)] * text.count(fault["find"])
    if len(found) != 1:
        raise ValueError(f"{fault['name']}: its text occurs {len(found)} times in {fault['file']}")
    return found[0]


def check(faults):
    """Prints what does not fit. @return how many"""
    wrong = 0
    names = [fault["name"] for fault in faults]
    for fault in faults:
        try:
            place_of(fault, ROOT)
            if names.count(fault["name"]) > 1:
                raise ValueError(f"{fault['name']}: two faults have this name")
        except ValueError as error:
            print(f"planted faults: {error}")
            wrong += 1
    return wrong


class Planted:
    """A fault in a copy of the tree, while it is entered."""

    def __init__(self, fault, root):
        self.path, self.text = place_of(fault, root)
        self.wrong = self.text.replace(fault["find"], fault["replace"])

    def write(self, text):
        self.path.write_text(text, encoding="utf-8")
        now = time.time()
        os.utime(self.path, (now, now))

    def __enter__(self):
        self.write(self.wrong)
        return self

    def __exit__(self, *_):
        self.write(self.text)


class Workshop:
    """The copy of the tree and what is built of it."""

    def __init__(self, folder):
        self.folder = folder
        self.tree = folder / "tree"
        self.build = folder / "cpp"
        self.copy()

    def copy(self):
        """What has not changed keeps its time, and so what was made of it."""
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", *COPIED, "*.txt"],
            capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        for name in listed:
            source, target = ROOT / name, self.tree / name
            if not source.is_file():
                continue
            if target.is_file() and target.read_bytes() == source.read_bytes():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        kept = {self.tree / name for name in listed}
        for path in self.tree.rglob("*"):
            if path.suffix in SUFFIXES and path not in kept:
                path.unlink()
        for name in ("pyproject.toml", "CMakePresets.json"):
            shutil.copyfile(ROOT / name, self.tree / name)

    def configure(self, build, *options):
        if not (build / "build.ninja").is_file():
            subprocess.run(
                ["cmake", "-S", self.tree, "-B", build, "-G", "Ninja", "--log-level=WARNING",
                 "-DWAYBILL_JOIN=OFF", "-DWAYBILL_CLI=OFF", "-DWAYBILL_EXAMPLES=OFF", *options],
                check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def built(self, program):
        """Whether a program of the tests can be built of the tree; and the compiler's words."""
        self.configure(self.build, "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0")
        done = subprocess.run(
            ["cmake", "--build", self.build, "-j2", "--target", program],
            capture_output=True,
            text=True,
        )
        return done.returncode == 0, done.stdout + done.stderr

    def compiled(self, source):
        """The same of a source for devices."""
        build = self.folder / "cuda"
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        self.configure(
            build, "-DCMAKE_BUILD_TYPE=Release", "-DWAYBILL_CUDA=ON", "-DWAYBILL_TESTS=OFF",
            f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DWAYBILL_CUDA_ARCHITECTURES=90a",
        )  # fmt: skip
        target = f"{self.tree / source}^"
        done = subprocess.run(["ninja", "-C", build, target], capture_output=True, text=True)
        return done.returncode == 0, done.stdout + done.stderr

    def site(self):
        """A folder in which Python finds the package of the tree, with the compiled part."""
        package = self.folder / "site" / "waybill"
        package.mkdir(parents=True, exist_ok=True)
        spec = importlib.util.find_spec("waybill")
        installed = pathlib.Path(spec.origin).parent
        compiled = [*installed.glob("_core*.so"), *installed.glob("lib")]  # it looks beside itself
        for path in [*(self.tree / "python" / "waybill").iterdir(), *compiled]:
            link = package / path.name
            if link.is_symlink():
                link.unlink()
            link.symlink_to(path.resolve())
        return package.parent

    def run(self, test):
        """("passed", "failed", "no test" or "broken", output) of a test."""
        if not test.startswith("tests/"):
            return outcome([*gtest(self.build, test), "--gtest_brief=1"], self.tree)
        env = {**os.environ, "PYTHONPATH": str(self.site()), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        return outcome(command, self.tree, env, failures=(1,))


def gtest(build, test):
    """The command that runs a test of C++."""
    program, _, filter_ = test.partition(" ")
    return [build / "tests" / program, *([f"--gtest_filter={filter_}"] if filter_ else [])]


def outcome(command, folder, env=None, failures=None):
    """("passed", "failed", "no test" or "broken", output) of a command.

    @param failures which statuses say that a test failed; None: all but 0
    """
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S,
            errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "failed", "timeout"
    output = done.stdout + done.stderr
    if done.returncode == 0:
        ran = re.search(r"\d+ passed|PASSED *\] [1-9]", output)
        return ("passed" if ran else "no test"), output
    return ("failed" if failures is None or done.returncode in failures else "broken"), output


def try_fault(workshop, fault, whole):
    """(whether it was found, what is to be said)"""
    test = re.split(r" |::", fault["test"])[0] if whole else fault["test"]
    is_python = test.startswith("tests/")
    with Planted(fault, workshop.tree):
        if not is_python:
            ok, said = workshop.built(test.split()[0])
            if not ok:
                return False, f"does not compile\n{said[-2000:]}"
        result, output = workshop.run(test)
    found = sorted({a or b for a, b in FAILED_TESTS.findall(output)})
    if result == "failed":
        return True, f"found by {', '.join(found) if whole else test}"
    return False, f"{result}: {test}" + (f"\n{output[-2000:]}" if result != "passed" else "")


def try_all(workshop, faults, whole):
    """@return the names of those that were not found"""
    lost, good = [], {}
    for number, fault in enumerate(faults):
        test = re.split(r" |::", fault["test"])[0] if whole else fault["test"]
        start = time.monotonic()
        if test not in good:  # without the fault it passes
            ok, said = True, ""
            if not test.startswith("tests/"):
                ok, said = workshop.built(test.split()[0])
            good[test] = workshop.run(test)[0] if ok else f"not built\n{said[-2000:]}"
        if good[test] == "passed":
            found, said = try_fault(workshop, fault, whole)
        else:
            found, said = False, f"without the fault: {good[test]}: {test}"
        if not found:
            lost.append(fault["name"])
        took_s = time.monotonic() - start
        mark = "found" if found else "NOT FOUND"
        print(f"[{number + 1}/{len(faults)}] {mark}: {fault['name']} ({took_s:.0f} s): {said}")
        sys.stdout.flush()
    return lost


def try_devices(workshop, faults):
    """@return the names of those that do not compile"""
    lost = []
    for fault in faults:
        with Planted(fault, workshop.tree):
            ok, said = workshop.compiled(fault.get("source", fault["file"]))
        mark = "compiles, needs a GPU" if ok else f"DOES NOT COMPILE\n{said[-2000:]}"
        print(f"{mark}: {fault['name']}: {fault['test']}")
        sys.stdout.flush()
        if not ok:
            lost.append(fault["name"])
    return lost


#: How try_in_place ends; 1 is for what went wrong before.
FOUND, NOT_FOUND, DOES_NOT_COMPILE = 0, 10, 11


def try_in_place(fault, build):
    """Plants a fault in this very tree, which is a copy; builds and runs its test there."""
    with Planted(fault, ROOT):
        program = fault["test"].split()[0]
        made = subprocess.run(["cmake", "--build", build, "-j4", "--target", program])
        if made.returncode != 0:
            return DOES_NOT_COMPILE
        result, output = outcome(gtest(build, fault["test"]), ROOT)
    print(output)
    return FOUND if result == "failed" else NOT_FOUND


def try_on_gpu(fault, build):
    """The same over this tree: what is written lies in memory, and goes.

    @return (the status of try_in_place, what it printed)
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name in ("written", "work"):
            os.mkdir(f"{folder}/{name}")
        layers = f"lowerdir={ROOT},upperdir={folder}/written,workdir={folder}/work"
        again = [sys.executable, f"{ROOT}/scripts/planted_faults.py", "--gpu", build, "--in-place"]
        script = f'mount -t overlay overlay -o {layers} {ROOT} && cd {ROOT} && exec "$@"'
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", *again, "--only", fault["name"]],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
    return done.returncode, done.stdout


def try_all_on_gpu(faults, build):
    """All side by side, after their tests without a fault. @return the names that were not found"""
    lost = []
    for test in sorted({fault["test"] for fault in faults}):
        result, output = outcome(gtest(build, test), ROOT)
        if result != "passed":
            print(f"without a fault: {result}: {test}\n{output[-2000:]}")
            return [fault["name"] for fault in faults]
    words = {FOUND: "found", NOT_FOUND: "NOT FOUND", DOES_NOT_COMPILE: "DOES NOT COMPILE"}
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        results = pool.map(lambda fault: try_on_gpu(fault, build), faults)
        for fault, (status, output) in zip(faults, results):
            mark = words.get(status, f"BROKEN ({status})")
            print(f"{mark}: {fault['name']}: {fault['test']}", flush=True)
            if status != FOUND:
                print(output[-2000:])
                lost.append(fault["name"])
    return lost


def finish(lost, number, words):
    """Prints the verdict. @return the status of the program"""
    if lost:
        print(f"planted faults: {len(lost)} of {number} not found: {', '.join(lost)}")
        return 1
    print(f"planted faults: {words}")
    return 0


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build" / "faults")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--gpu", type=pathlib.Path, metavar="BUILD")
    parser.add_argument("--in-place", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args(arguments)
    faults = [fault for fault in load() if given.only in " ".join(map(str, fault.values()))]
    if check(faults):
        return 1
    devices = [fault for fault in faults if needs_gpu(fault)]
    others = [fault for fault in faults if not needs_gpu(fault)]
    if given.check:
        print(f"planted faults: {len(others)} fit, and {len(devices)} that need a GPU")
        return 0
    if given.in_place:
        [fault] = [fault for fault in devices if fault["name"] == given.only]
        return try_in_place(fault, given.gpu.resolve())
    if given.gpu:
        lost = try_all_on_gpu(devices, given.gpu.resolve())
        return finish(lost, len(devices), f"all {len(devices)} found on a GPU")
    of_python = [fault["name"] for fault in others if fault["test"].startswith("tests/python")]
    if of_python and importlib.util.find_spec("waybill") is None:
        print(
            f"planted faults: {sys.executable} has no waybill, which {len(of_python)} of them"
            " need: use build/venv/bin/python after scripts/test.sh"
        )
        return 2
    workshop = Workshop(given.work.resolve())
    lost = try_all(workshop, others, given.whole)
    if given.cuda:
        lost += try_devices(workshop, devices)
    else:
        for fault in devices:
            print(f"needs a GPU: {fault['name']}: {fault['test']}")
    found = f"all {len(others)} found; {len(devices)} need a GPU"
    return finish(lost, len(faults), found)


if __name__ == "__main__":
    sys.exit(main())
