"""Prints its arguments on the terminal of the pip or uv that runs this build.

Both keep the output of a build to themselves unless it fails. The nearest process above that is one
of them is looked up, and its standard error written to, if that is a terminal or a pipe.
"""

import os
import stat
import sys


def installer_above(process):
    """Process id of the nearest pip or uv above `process`; None: there is none."""
    while process > 1:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            process = int(file.read().rpartition(")")[2].split()[1])
        with open(f"/proc/{process}/cmdline", encoding="utf-8", errors="replace") as file:
            words = [os.path.basename(word) for word in file.read().split("\0")[:4]]
        if any(word == "uv" or word.rstrip("0123456789.") == "pip" for word in words):
            return process
    return None


def main():
    installer = installer_above(os.getpid())
    place = f"/proc/{installer}/fd/2"
    if installer is None or os.readlink(place) == os.readlink("/proc/self/fd/2"):
        return  # it is read already
    mode = os.stat(place).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        with open(place, "w", encoding="utf-8") as terminal:
            terminal.write("\n  " + " ".join(sys.argv[1:]) + "\n")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # /proc of others may be closed to us
        print(f"tell_installer: {error}", file=sys.stderr)
