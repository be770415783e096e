"""The variables that Waybill reads: as many as the page of starting programs says, and no more."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_page_names_all_that_are_read():
    read = set()
    for folder in ("src", "include", "python/waybill", "python/bindings"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".cpp", ".h", ".cu", ".cuh", ".py"):
                read |= set(re.findall(r'"(WAYBILL_[A-Z_]+)"', path.read_text(encoding="utf-8")))
    page = (ROOT / "docs/starting.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?<!-D)WAYBILL_[A-Z_]+", page)) == read
    assert len(read - {"WAYBILL_TEST"}) <= 8


def test_a_wrong_hook_of_tests_is_an_error_that_names_all():
    program = """
import waybill
try:
    waybill.run_threads(2, lambda world: None)
except waybill.InvalidArgument as error:
    print("refused:", error)
"""
    environment = {**os.environ, "WAYBILL_TEST": "delay_ns=5,late=1"}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert 'refused: WAYBILL_TEST: "late=1", expected delay_ns=0..1000000000, ' in ran.stdout, ran
