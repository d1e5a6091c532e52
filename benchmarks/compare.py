"""What the comparison runner costs, and how often its intervals hold the truth.

python -m benchmarks.compare overhead  # seconds beside those of 24 runs of one arm themselves
python -m benchmarks.compare coverage  # of six pairs that differ by chance alone
"""

import argparse
import tempfile
import time
from collections.abc import Sequence

import ml_collections
import numpy as np

from adder_flax import compare, settings
from adder_flax.experiments import common

PAIRS = 6
REPETITIONS = 2000


def overhead() -> None:
    """Runs a comparison of 24 runs and prints the share of its time that is not theirs."""
    base = common.deit("multiplicative", "tiny")
    base.model.update(width=96, depth=6)
    base.update(num_epochs=2.0, checkpoint_every_steps=100)
    fields = {
        "base": base,
        "factors": {"mechanism": {"dot": {}}},
        "search": {"optimizer": {"learning_rate": ("log", 2e-4, 2e-2)}},
        "trials": 18,
        "extensions": 0,
        "seeds": 6,
    }
    config = ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | fields)
    with tempfile.TemporaryDirectory() as workdir:
        began = time.perf_counter()
        comparison = compare.Comparison(config, workdir)
        comparison.prepare()
        seconds = [record.seconds["run"] for record in compare.work(comparison)]
        total = time.perf_counter() - began
        runs = sum(seconds)
        print(
            f"{len(seconds)} runs {runs:.1f} s, in all {total:.1f} s: "
            f"{100 * (total - runs) / runs:.2f} % more"
        )
        began = time.perf_counter()
        compare.write_results(comparison)
        print(f"tables and figures {time.perf_counter() - began:.1f} s")


def coverage() -> None:
    """Prints how often intervals hold zero and tests are passed where there is no difference."""
    rng = np.random.default_rng(0)
    found = [compare.paired_difference(*rng.normal(size=(2, PAIRS))) for _ in range(REPETITIONS)]
    held = np.mean([difference.low <= 0 <= difference.high for difference in found])
    passed = np.mean([difference.p_value <= 0.05 for difference in found])
    print(
        f"{REPETITIONS} comparisons of {PAIRS} pairs: {held:.1%} of the intervals hold zero, p ≤ "
        f"0.05 in {passed:.1%}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one of the two.

    Args:
        arguments: command line; None for that of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["overhead", "coverage"])
    {"overhead": overhead, "coverage": coverage}[parser.parse_args(arguments).what]()


if __name__ == "__main__":
    main()
