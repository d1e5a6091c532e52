"""XOR alignment of two-bit queries and keys.

They belong together if exactly one of their coordinates is equal.

Source: "Additive vs. multiplicative attention", The limits of bilinearity. Bilinear scores with all
biases can get at most 12 of the 16 pairs right (proved by enumeration,
``adder_flax.measures.xor_bound``), additive ones all of them.
Command: python -m experiments.xor_alignment [--seeds=32] [--steps=800] [--out=runs/xor_alignment]
Measured: 32 seeds, 7 s on one core: bilinear 6 to 11 pairs, median 9 (the loss is not the
accuracy); additive 16 from every seed.
"""

import argparse
from pathlib import Path

import numpy as np

from adder_flax import measures, report

SCORES = ("bilinear", "additive")


def main() -> None:
    """Trains both scores from many initialisations and prints how many pairs each gets right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=32, help="initialisations of each score")
    parser.add_argument("--steps", type=int, default=800, help="steps of Adam on all 16 pairs")
    parser.add_argument("--hidden", type=int, default=16, help="hidden width of the additive score")
    parser.add_argument(
        "--out", default="", help="directory for xor.png and xor.svg; nothing is drawn without it"
    )
    options = parser.parse_args()
    training = dict(seeds=options.seeds, steps=options.steps, hidden=options.hidden)
    accuracies = {score: measures.train_xor(score, **training) for score in SCORES}
    bound = measures.xor_bound()
    print(
        "score     pairs right, of 16: smallest, median, largest   all 16 right   largest possible"
    )
    for score, values in accuracies.items():
        right = np.rint(16 * np.quantile(values, [0, 0.5, 1])).astype(int)
        possible = int(16 * bound) if score == "bilinear" else 16
        solved = f"{np.sum(values == 1)} of {len(values)} seeds"
        print(f"{score:9s} {str(right.tolist()):>45s}   {solved:>12s}   {possible:16d}")
    if options.out:
        written = report.save_figure(
            report.xor_figure(accuracies), Path(options.out) / "xor", ("png", "svg")
        )
        print(*written, sep="\n")


if __name__ == "__main__":
    main()
