"""What the core costs those who install it, beside flax and optax: packages, megabytes, seconds.

Command: python -m benchmarks.install [--rounds=9]

Makes two empty environments in a temporary folder, installs into one `flax` and `optax`, into the
other this package from the checkout, and measures in turn how long a new process takes to import
from each. The network and its caches decide the seconds of an installation, so the second is at an
advantage; imports are read from a warm disk.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from adder_flax.own_cache import processor_name

ROOT = Path(__file__).parents[1]
_INSTALLED = {"flax, optax": ["flax", "optax"], "adder_flax": [str(ROOT)]}
# By the environment: the first row of each is what all others stand on.
_IMPORTED = (
    ("flax, optax", "import jax"),
    ("flax, optax", "from flax import nnx; import optax"),
    ("adder_flax", "import adder_flax.ops"),
    ("adder_flax", "import adder_flax.attention"),
    ("adder_flax", "import adder_flax.layers, adder_flax.models"),
    ("adder_flax", "import kfac"),
)


def make_environment(folder: Path, requirements: list[str]) -> tuple[int, float, float]:
    """Installs into a new environment; returns its packages, its megabytes (2²⁰) and the seconds.

    pip itself, which comes with an environment, is not counted.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python, began = folder / "bin" / "python", time.monotonic()
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, *requirements], check=True, cwd=folder)
    seconds = time.monotonic() - began
    (site,) = folder.glob("lib/python*/site-packages")
    size = sum(file.lstat().st_size for file in site.rglob("*") if "__pycache__" not in file.parts)
    return len(list(site.glob("*.dist-info"))), size / 2**20, seconds


def import_seconds(environment: Path, statement: str) -> float:
    """Runs a statement in a new process of an environment; returns its seconds."""
    began = time.monotonic()
    # Away from the checkout, which Python would import from.
    subprocess.run([environment / "bin" / "python", "-c", statement], check=True, cwd=environment)
    return time.monotonic() - began


def main(arguments: list[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="of imports, each of all in turn")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        print(f"Processor: {processor_name()}\n")
        print("| installed | packages | MB | seconds |\n|---|---|---|---|")
        for number, (name, requirements) in enumerate(_INSTALLED.items()):
            packages, size, seconds = make_environment(Path(folder) / str(number), requirements)
            print(f"| {name} | {packages} | {size:.0f} | {seconds:.0f} |", flush=True)
        places = {name: Path(folder) / str(number) for number, name in enumerate(_INSTALLED)}
        rounds = [
            [import_seconds(places[name], statement) for name, statement in _IMPORTED]
            for _ in range(1 + options.rounds)
        ]
    print("\n| new process | environment | seconds, median | quartiles |\n|---|---|---|---|")
    # The first round wrote the bytecode.
    for (name, statement), times in zip(_IMPORTED, zip(*rounds[1:], strict=True), strict=True):
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        print(f"| `{statement}` | {name} | {median:.2f} | {low:.2f} to {high:.2f} |")


if __name__ == "__main__":
    main()
