"""``python -m waybill doctor``: the program is told what Python knows."""

import importlib.metadata
import json
import subprocess
import sys


def test_doctor_knows_python_and_torch():
    ran = subprocess.run(
        [sys.executable, "-m", "waybill", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(ran.stdout)
    assert ran.returncode == (0 if found["works"] else 1), ran.stderr
    lines = {line["name"]: line for line in found["checks"]}
    assert lines["Python"]["value"] == sys.version.split()[0]
    try:
        assert lines["torch"]["value"] == importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        assert lines["torch"]["state"] == "note"
    assert all(line["state"] == "good" or line["advice"] for line in found["checks"])
