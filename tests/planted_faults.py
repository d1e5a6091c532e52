"""Plants faults, one at a time, and tells which of them the tests nearest to each do not see.

    python tests/planted_faults.py [--only SUBSTRING] [--list]

The faults are the blocks of ``planted_faults.txt``. One is caught where a test fails; where tests
cannot be collected or do not run, it is not.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = "tests/planted_faults.txt"
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")


class Fault(NamedTuple):
    """What takes the place of what in a file, what that would do, and the tests nearest to it."""

    file: str
    tests: tuple[str, ...]
    effect: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}: {self.effect}\n    - {self.old}\n    + {self.new}"

    def problem(self) -> str | None:
        """Returns why it cannot be planted, if so."""
        for path in (self.file, *(test.split("::")[0] for test in self.tests)):
            if not (ROOT / path).exists():
                return f"expected {path}, which is not there; write what is there now into {TABLE}"
        for path, _, name in (test.partition("::") for test in self.tests):
            if name and f"def {name.split('[')[0]}(" not in (ROOT / path).read_text():
                return f"expected {name} in {path}; write what is there now into {TABLE}"
        if (count := (ROOT / self.file).read_text().count(self.old)) != 1:
            return (
                f"{self.file}: expected what the fault {self.effect!r} replaces once, found it "
                f"{count} times; write what is there now into {TABLE}:\n    {self.old}"
            )
        return None

    def is_caught(self) -> bool:
        """Plants it, runs the tests, and takes it out again."""
        whole = (ROOT / self.file).read_text()
        try:
            (ROOT / self.file).write_text(whole.replace(self.old, self.new))
            done = subprocess.run([*PYTEST, *self.tests], cwd=ROOT, capture_output=True, text=True)
        finally:
            (ROOT / self.file).write_text(whole)
        # 1 where tests ran and some failed; other codes are errors of pytest's own, or of its call.
        return done.returncode == 1 and "\nERROR tests" not in done.stdout


def faults() -> list[Fault]:
    found = []
    for block in (ROOT / TABLE).read_text().strip().split("\n\n")[1:]:
        (file, _, tests), *lines = block.splitlines()[0].partition(": "), *block.splitlines()[1:]
        parts = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "#-+")
        found.append(Fault(file, tuple(tests.split()), *parts))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="those in whose block this stands")
    parser.add_argument("--list", action="store_true", help="show them, plant none")
    args = parser.parse_args()
    chosen = [fault for fault in faults() if args.only in f"{fault} {fault.tests}"]
    if args.list:
        return print(*chosen, f"{len(chosen)} faults", sep="\n")
    status = ["git", "diff", "--quiet", "HEAD", "--", *{fault.file for fault in chosen}]
    if subprocess.run(status, cwd=ROOT).returncode:
        sys.exit("expected no changes in files that faults are planted in; commit them first")
    if problems := [problem for fault in chosen if (problem := fault.problem())]:
        sys.exit("\n".join(problems))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: what is planted is taken out
    caught: dict[Fault, bool] = {}
    for fault in chosen:
        began = time.monotonic()
        caught[fault] = fault.is_caught()
        word = "caught" if caught[fault] else "SURVIVED"
        print(f"{word:8}{time.monotonic() - began:5.0f} s  {fault}", flush=True)
    for folder in dict.fromkeys([*(os.path.dirname(fault.file) for fault in chosen), ""]):
        own = [was for fault, was in caught.items() if fault.file.startswith(folder)]
        print(f"{folder or 'all':28}{sum(own):4} of {len(own)}")
    survivors = [fault for fault, was in caught.items() if not was]
    print(*survivors, sep="\n")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
