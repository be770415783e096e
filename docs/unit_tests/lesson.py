"""Runs the tests of a file one after another and says what each has shown."""

import sys
import traceback


def run(names):
    """Runs each function ``test_...`` of a file, in order; exits with 1 when one fails."""
    failed = 0
    for name, test in names.items():
        if not name.startswith("test_") or not callable(test):
            continue
        try:
            test()
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"FAILED  {name}")
        else:
            print(f"ok      {test.__doc__.splitlines()[0]}")
    sys.exit(1 if failed else 0)


def raises(kind, text, call, *arguments, **options):
    """Asserts that a call raises an error of this kind, whose text has these words."""
    try:
        call(*arguments, **options)
    except kind as error:
        assert text in str(error), f"the error says {error}, expected {text!r}"
    else:
        raise AssertionError(f"no error, expected one that says {text!r}")
