"""Every block of every experiment against dense algebra in float64, by `kfac.verify`.

    python -m benchmarks.verify
    python -m benchmarks.verify adder_deit_tiny adder_g2p

A few examples as the experiment's task makes them, its network at the start with one or two of its
blocks, its own loss with dropout. A row stands for all blocks of a kind of layer: how many there
are, how much of the gradient is not captured, how far a product with F is from that with the
gradients of single examples, how far conjugate gradients run to their end are from a direct
solution, and the cosine between the solutions with factors and with F itself, its worst and its
median. Where they are not here, images and words are imitated in their shapes.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

import benchmarks
import kfac
from adder_flax import data, experiment, ops, training

# The larger DeiT have the kinds of blocks of the small one, and what begins with the weights of
# another run or learns from it those of what does not.
CONFIGS = (
    *("deit_tiny", "additive_deit_tiny", "adder_deit_tiny", "cifar10_fast"),
    *("deit_recipe:multiplicative,tiny,digits", "deit3_recipe", "conv_net", "autoencoder"),
    *("dot_g2p", "additive_g2p", "adder_g2p", "bilinear_g2p"),
)
TITLES = ("experiment", "covered", "kind", "blocks", "capture", "product", "cg", "cosine", "median")


def make_run(name: str, examples: int, depth: int) -> training.Run:
    """Returns the run of an experiment with so few examples and no more than so many blocks."""
    config: ml_collections.ConfigDict = experiment.load_experiment(name)
    config.batch_size = examples
    if "depth" in config.model:
        config.model.depth = min(config.model.depth, depth)
    return training.build_run(config, load=data.load_or_imitate)


def in_float64(run: training.Run) -> nnx.Module:
    model = run.program.build_model(run.numbers)
    for _, module in nnx.iter_modules(model):
        if getattr(module, "dtype", None) is not None:
            module.dtype = jnp.dtype(jnp.float64)
    return model


def report_of(run: training.Run) -> kfac.Report:
    graphdef, params = nnx.split(in_float64(run), nnx.Param)
    parts, key = run.program.parts(run.numbers, graphdef), jax.random.key(0)
    examples = parts.examples(key, run.batches()[0])

    def loss(params, examples, key):
        outcome = parts.loss(params, examples, key)
        return outcome.loss, outcome.outputs

    def wide(array):
        return array.astype(jnp.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array

    with jax.enable_x64(True), ops.use_backend("xla"):
        params, examples = jax.tree.map(wide, (nnx.to_pure_dict(params), examples))
        return kfac.verify(loss, params, examples, key, has_aux=True)


def lines(report: kfac.Report) -> list[str]:
    kinds = defaultdict(list)
    for row in report.rows:
        (use, *_) = report.layers.blocks[row.name].uses
        kinds[f"{use.layer.kind} ({row.form})"].append(row)
    found = []
    for kind, rows in sorted(kinds.items()):
        worst = (
            f"{max(getattr(row, name) for row in rows):.1e}"
            for name in ("capture_error", "product_error", "cg_error")
        )
        cosines = [row.kron_cosine for row in rows]
        ends = (f"{min(cosines):.3f}", f"{statistics.median(cosines):.3f}")
        found.append(" | ".join((kind, str(len(rows)), *worst, *ends)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmarks.parser(__doc__)
    parser.add_argument("configs", nargs="*", default=CONFIGS, help="experiments by name")
    flags = parser.parse_args(arguments)
    benchmarks.print_titles(TITLES)
    for name in flags.configs:
        report = report_of(make_run(name, examples=8, depth=2))
        for line in lines(report):
            covered = f"{100 * report.layers.coverage:.1f} %"
            benchmarks.print_row((f"`{name}`", covered, line))


if __name__ == "__main__":
    main()
