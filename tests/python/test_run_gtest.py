"""scripts/run_gtest.py with a program that stands for one of GoogleTest."""

import pathlib
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = ["passes", "loses_the_device", "follows", "fails_beside_others", "hangs", "fails"]
PROGRAM = """#!{python}
import sys, time
given = dict(one[2:].split("=", 1) for one in sys.argv[1:] if "=" in one)
if "--gtest_list_tests" in sys.argv:
    print("S.")
    for name in {names!r}:
        if given["gtest_filter"] in ("*", "S." + name):
            print("  " + name)
    sys.exit(0)
names = given["gtest_filter"].split(":")
for number, name in enumerate(names):
    print("[ RUN      ]", name, flush=True)
    if name == "S.hangs":
        time.sleep(60)
    if name == "S.fails" or (name == "S.fails_beside_others" and len(names) > 1):
        print("[  FAILED  ]", name, "(1 ms)", flush=True)
        sys.exit(1)
    print("[       OK ]", name, "(1 ms)", flush=True)
    if name == "S.loses_the_device":
        sys.exit(76)
"""


def start(folder, *arguments):
    program = folder / "program"
    program.write_text(PROGRAM.format(python=sys.executable, names=NAMES))
    program.chmod(0o755)
    return subprocess.Popen(
        [sys.executable, ROOT / "scripts/run_gtest.py", program, *arguments],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_verdicts(tmp_path):
    """A lost device costs the tests that follow nothing; who fails beside others runs alone."""
    process = start(tmp_path, "--jobs", "1", "--limit-s", "1")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    lines = output.splitlines()
    assert [one for one in lines if one.startswith("run_gtest: FAILED")] == [
        "run_gtest: FAILED S.hangs", "run_gtest: FAILED S.fails",
    ]  # fmt: skip
    assert any("4 passed, 0 skipped, 2 failed of 6" in one for one in lines)
    assert "run_gtest: S.hangs: FAILED: not done after 1.0 s" in lines


def test_a_signal_ends_all_and_names_what_has_no_verdict(tmp_path):
    process = start(tmp_path, "--jobs", "1", "--filter", "S.hangs", "--verbose")
    with process:
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "run_gtest: NO VERDICT S.hangs" in output


def test_without_failures(tmp_path):
    process = start(tmp_path, "--filter", "S.passes", "--verbose")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "S.passes: OK" in output
