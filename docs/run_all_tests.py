"""Runs the five files of unit_tests one after another, with the installed package.

cd docs && python run_all_tests.py
"""

import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent / "unit_tests"


def main():
    failed = []
    for file in sorted(FOLDER.glob("test_*.py")):
        print(f"\n{file.name}", flush=True)
        if subprocess.run([sys.executable, str(file)], check=False).returncode != 0:
            failed.append(file.name)
    print(f"\n{'FAILED: ' + ', '.join(failed) if failed else 'All files passed.'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
