"""Lines and branches that the tests reach, by package, from coverage's data in this folder:

    python -m pytest -n 2 --cov --cov-report= && python tests/coverage_by_package.py

Ends with exit code 2 where the whole is below the floor in pyproject.toml.
"""

import collections
import json
import subprocess
import sys
import tempfile
from pathlib import Path

_COUNTED = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def package_of(file: str) -> str:
    """Returns the package that a file is counted in: the first folder inside adder_flax or kfac.

    >>> package_of("adder_flax/ops/_cpu.py"), package_of("kfac/step/_state.py")
    ('adder_flax.ops', 'kfac.step')
    """
    *folders, _ = Path(file).parts
    return ".".join(folders[:2])


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "coverage.json"
        code = subprocess.run(["coverage", "json", "--quiet", "-o", file]).returncode
        if not file.exists():
            return code
        files = json.loads(file.read_text())["files"]
    sums: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for name, facts in files.items():
        for row in (package_of(name), "all"):
            sums[row].update({what: facts["summary"][what] for what in _COUNTED})
    print(f"{'package':28}  {'lines':>13}  {'branches':>13}")
    for name, counts in sorted(sums.items(), key=lambda row: (row[0] == "all", row[0])):
        cells = [
            f"{100 * counts[reached] / max(counts[there], 1):5.1f} % {counts[there]:5}"
            for there, reached in (_COUNTED[:2], _COUNTED[2:])
        ]
        print(f"{name:28}  {'  '.join(cells)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
