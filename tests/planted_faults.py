"""Plants one fault at a time, and tells whether the tests nearest to it fail.

    python tests/planted_faults.py [--only SUBSTRING] [--list]

The faults are blocks of ``planted_faults.txt``. One is caught where a test fails; where tests cannot
be collected or do not run, it is not.
"""

import argparse
import collections
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_FAILED = 1  # pytest's exit code where tests ran and some failed; others are errors of its own


class Fault(NamedTuple):
    """What takes the place of what in a file, why that matters, and the tests nearest to it."""

    file: str
    tests: list[str]
    why: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}: {self.why}\n    - {self.old}\n    + {self.new}"

    def problem(self) -> str | None:
        """Returns why it cannot be planted."""
        if missing := [test for test in self.tests if not (ROOT / test.split("::")[0]).exists()]:
            return f"{self.file}: expected tests, found no {', '.join(missing)}; name those nearest"
        if (found := (ROOT / self.file).read_text().count(self.old)) == 1:
            return None
        return (
            f"{self.file}: expected what a fault replaces once, found it {found} times; write in "
            f"tests/planted_faults.txt what stands there now:\n    {self.old}"
        )

    def is_caught(self) -> bool:
        """Plants it, runs the tests, and takes it out again."""
        path = ROOT / self.file
        whole = path.read_text()
        try:
            path.write_text(whole.replace(self.old, self.new))
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
            done = subprocess.run([*command, *self.tests], cwd=ROOT, capture_output=True, text=True)
        finally:
            path.write_text(whole)
        last = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        print(f"        {' '.join(last)[:150] or f'exit code {done.returncode}'}")
        return done.returncode == _FAILED and not any(line.startswith("ERROR") for line in last)


def faults() -> list[Fault]:
    """Reads the table."""
    found = []
    for block in (ROOT / "tests/planted_faults.txt").read_text().strip().split("\n\n")[1:]:
        file, _, tests = block.splitlines()[0].partition(": ")
        parts = collections.defaultdict(list)
        for line in block.splitlines()[1:]:
            parts[line[0]].append(line[2:])
        why, old, new = ("\n".join(parts[sign]) for sign in "#-+")
        found.append(Fault(file, tests.split(), why, old, new))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="faults whose file, reason or tests have it")
    parser.add_argument("--list", action="store_true", help="print them, plant none")
    args = parser.parse_args()
    chosen = [fault for fault in faults() if args.only in " ".join([*fault.tests, str(fault)])]
    if args.list:
        return print(*chosen, f"{len(chosen)} faults", sep="\n")
    changed = subprocess.run(["git", "diff", "--name-only", "HEAD"], cwd=ROOT, capture_output=True)
    if own := {fault.file for fault in chosen} & {*changed.stdout.decode().split()}:
        sys.exit(f"expected files without changes, got changes in {', '.join(own)}; commit them")
    if problems := list(filter(None, map(Fault.problem, chosen))):
        sys.exit("\n".join(problems))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was planted is taken out then, too
    caught, planted, survivors = collections.Counter(), collections.Counter(), []
    for fault in chosen:
        began, folder = time.monotonic(), os.path.dirname(fault.file)
        is_caught = fault.is_caught()
        planted[folder] += 1
        caught[folder] += is_caught
        survivors += [] if is_caught else [fault]
        seconds = time.monotonic() - began
        print(f"{'caught' if is_caught else 'SURVIVED':8} {seconds:4.0f} s  {fault}", flush=True)
    for folder in planted:
        print(f"{folder:25}{caught[folder]:4} of {planted[folder]}")
    print(f"{'all':25}{caught.total():4} of {planted.total()}", *survivors, sep="\n")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
