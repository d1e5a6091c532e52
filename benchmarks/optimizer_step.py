"""What a training step costs with each optimizer, beside AdamW's: whole windows of steps in turn.

    python -m benchmarks.optimizer_step  # multiplicative DeiT-Tiny on 224 x 224 pixels
    python -m benchmarks.optimizer_step --data=digits --variants="curvature_stride=8; damping=1"
    python -m benchmarks.optimizer_step --config=experiments/autoencoder.py --optimizers=muon

K-FAC renews curvature and inverses at some steps alone, SOAP and KL-Shampoo their bases, so a
window is as many steps as lie between two at which all is renewed, and some times as many where
another's is longer: the end of each is waited for, which costs a short one more. Variants, with
semicolons between them, are fields of --config.optimizer.kfac, or of what begins them: "cg_fac
curvature_stride=8". Images are of random pixels where --data=fake. Another network comes with
--config: an experiment, or the record of a run. The steps are compiled side by side, and each is
timed as soon as all are; what a window took is said at once, so that a run that is cut off has told
what it measured. On a GPU it is also said how long the device worked in a step: the rest of its
time it waited for the host.
"""

import argparse
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import ml_collections

import benchmarks
from adder_flax import experiment, ops, settings
from adder_flax.experiments import common
from benchmarks.timing import busy_seconds, gpu_events, measure, repeated, seconds_of
from benchmarks.train_step import NO_AUGMENTATION, jax_step

ROUNDS = 5


def make_config(flags: argparse.Namespace, optimizer: str) -> ml_collections.ConfigDict:
    if flags.config:
        fields = experiment.load_experiment(flags.config).to_dict()
        config = ml_collections.ConfigDict(settings.completed(settings.RunSettings, fields))
    else:
        config = common.deit("multiplicative", "tiny", flags.data)
        config.batch_size, config.model.depth = flags.batch_size, flags.depth
        if flags.data == "fake":
            config.data.image_size = flags.image_size
            config.model.patch_size = flags.patch_size
            config.task.update(NO_AUGMENTATION)
    config.optimizer.name = optimizer
    return config


def with_fields(
    config: ml_collections.ConfigDict, assignments: list[str]
) -> ml_collections.ConfigDict:
    """Sets fields of K-FAC or CG-FAC as ``a=1`` says them."""
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        section = config.optimizer[config.optimizer.name]
        section[name] = type(section[name])(value)
    return config


def window_of(config: ml_collections.ConfigDict) -> int:
    """Returns the steps from one at which all is renewed to the next such."""
    # As read: what follows the step of K-FAC has its value.
    optimizer = settings.read(settings.OptimizerSettings, config.optimizer)
    if optimizer.name == "kfac":
        return math.lcm(optimizer.kfac.curvature_interval, optimizer.kfac.inverse_interval)
    if optimizer.name == "cg_fac":
        return 1
    return 10 if optimizer.name in ("soap", "kl_shampoo") else 2


def alike(lengths: dict[str, int]) -> dict[str, int]:
    """Returns multiples of the lengths of windows, none shorter than the longest of these.

    >>> alike({"adamw": 2, "kfac": 5})
    {'adamw': 6, 'kfac': 5}
    """
    longest = max(lengths.values())
    return {name: math.ceil(longest / length) * length for name, length in lengths.items()}


def compile_all(steps: dict[str, Callable]) -> None:
    """Takes one step of each, in threads of their own, and says how long it took."""
    with ThreadPoolExecutor(len(steps)) as threads:
        for name, seconds in zip(steps, threads.map(seconds_of, steps.values()), strict=True):
            print(f"{name}: first step after {seconds:.0f} s", flush=True)


def busy(window: Callable, length: int) -> str:
    if jax.default_backend() != "gpu":
        return ""
    return f", the device busy for {1e3 * busy_seconds(gpu_events(window, 1)) / length:.1f} ms"


def main() -> None:
    parser = benchmarks.parser(__doc__)
    parser.add_argument("--config", default="", help="an experiment in place of a DeiT")
    parser.add_argument("--data", default="fake")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--patch-size", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--optimizers", default="adamw", help="beside kfac, the first to compare")
    parser.add_argument("--variants", default="", help="of kfac: 'a=1 b=2; cg_fac c=3'")
    flags = parser.parse_args()
    print(ops.backend_report().splitlines()[0])

    first, *others = flags.optimizers.split(",")
    configs = {name: make_config(flags, name) for name in (first, *others)}
    for variant in flags.variants.split(";"):
        words = variant.split()
        name = words.pop(0) if words and "=" not in words[0] else "kfac"
        configs[" ".join([name, *words])] = with_fields(make_config(flags, name), words)
    lengths = alike({name: window_of(config) for name, config in configs.items()})
    steps = {name: jax_step(config) for name, config in configs.items()}
    compile_all(steps)
    windows = {name: repeated(step, lengths[name]) for name, step in steps.items()}
    width = max(map(len, steps))

    def say(name: str, seconds: float) -> None:
        print(f"  {name:{width}}  {1e3 * seconds / lengths[name]:7.1f} ms a step", flush=True)

    timings = measure(windows, ROUNDS, seconds=math.inf, say=say)
    for name, length in lengths.items():
        ratio = timings.ratio(name, first) * lengths[first] / length
        print(
            f"{name:{width}}  {1e3 * timings.median(name) / length:7.1f} ms a step "
            f"{ratio:5.2f} x {first}{busy(windows[name], length)}"
        )


if __name__ == "__main__":
    main()
