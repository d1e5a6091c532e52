"""How often intervals of a comparison hold the truth, and how many seconds each arm of a finished
one takes to its target.

    python -m benchmarks.compare coverage  # of six pairs that differ by chance alone
    python -m benchmarks.compare seconds results/optimizers_digits \
        --config=experiments/compare_optimizers.py

Runs of a comparison were made one after the other or side by side, on one machine or several, so
their own seconds do not compare. The last command builds the first run of each arm once more, as
it was tuned, and times its steps in turn with those of the others, in windows in which every
arm renews all that it renews now and then. Seconds to the target are the median steps of the
records times these. It leaves ``timing.csv`` beside the records, or adds to it where that is of
another machine that timed the same arms, and ``python -m adder_flax.compare.across`` reads it.
"""

import datetime
import math
import sys
import tempfile
from collections.abc import Sequence

import jax
import numpy as np

import benchmarks
from adder_flax import compare, experiment
from adder_flax.compare import across, table
from adder_flax.compare.cells import machine
from adder_flax.report import document
from benchmarks.optimizer_step import window_of
from benchmarks.timing import measure, repeated
from benchmarks.train_step import jax_step

PAIRS = 6
REPETITIONS = 2000


def coverage() -> None:
    rng = np.random.default_rng(0)
    found = [compare.paired_difference(*rng.normal(size=(2, PAIRS))) for _ in range(REPETITIONS)]
    student = np.mean([each.low <= 0 <= each.high for each in found])
    bootstrap = np.mean([each.bootstrap[0] <= 0 <= each.bootstrap[1] for each in found])
    passed = np.mean([each.p_value <= 0.05 for each in found])
    print(
        f"{REPETITIONS} comparisons of {PAIRS} pairs: {student:.1%} of Student's intervals hold "
        f"zero, {bootstrap:.1%} of the bootstrap's; p ≤ 0.05 in {passed:.1%}"
    )


def seconds(results: str, config: str, rounds: int) -> None:
    fields = experiment.load_experiment(config)
    fields.results = results
    with tempfile.TemporaryDirectory() as workdir:
        comparison = compare.Comparison(fields, workdir)
    rows = [row for row in table.rows_of(comparison) if row.records]
    if not rows or rows[0].target is None:
        sys.exit(f"error: expected records of the baseline's final runs in {results}, got none")
    configs = {row.arm.name: comparison.final_cells(row.arm)[0].config for row in rows}
    where = machine()
    cores = f"{where['cores']} core{'s' if where['cores'] > 1 else ''}"
    here = f"{where['processor']}, {cores} ({where['device']})"
    today = f"jax {jax.__version__}, {datetime.date.today()}"
    path = comparison.results / across.TIMING
    try:
        before = across.read_timing(path)
    except ValueError as error:
        sys.exit(f"error: {error}")
    # Of other machines those stay that timed all of these arms; without one they compare nothing.
    timed = []
    for place, of_place in before.items():
        if place != here and configs.keys() <= {row["arm"] for row in of_place}:
            timed += of_place
    window = math.lcm(*map(window_of, configs.values()))
    steps = {name: repeated(jax_step(config), window) for name, config in configs.items()}
    timings = measure(steps, rounds, seconds=math.inf)
    print(f"{here}, {today}")
    for row in rows:
        name = row.arm.name
        step = timings.median(name) / window
        timed.append({"arm": name, "step_seconds": f"{step:.4g}", "machine": here, "timed": today})
        reached = row.cost_to_target(lambda _: 1.0)
        to_target = "not reached" if reached is None else f"{reached:5.0f} {reached * step:7.2f} s"
        print(
            f"{name:22} {1e3 * step:8.2f} ms a step {timings.ratio(name, rows[0].arm.name):5.2f} x "
            f"{rows[0].arm.name}  to {row.target:.4f}: {to_target}"
        )
    document.write_csv(path, {column: [row[column] for row in timed] for column in timed[-1]})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmarks.parser(__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("coverage")
    timed = commands.add_parser("seconds")
    timed.add_argument("results", help="folder of the comparison")
    timed.add_argument("--config", required=True, help="its experiment")
    timed.add_argument("--rounds", type=int, default=9, help="windows of each arm")

    options = parser.parse_args(arguments)
    if options.what == "coverage":
        coverage()
    else:
        seconds(options.results, options.config, options.rounds)


if __name__ == "__main__":
    main()
