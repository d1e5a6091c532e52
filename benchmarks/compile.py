"""Memory, traffic and operations of a training step by model, mechanism, optimizer and topology: a
Markdown table.

    python -m benchmarks.compile
    python -m benchmarks.compile --topologies=h100:1,h100:8
    python -m benchmarks.compile --sizes=base --topologies=v5e:4x4 --dtype=bfloat16

Each row is the training step of an ImageNet experiment (224 pixels, 1,000 classes, global batch
1,024), compiled for the topology without the hardware, as ``main.py --mode=compile`` does. It needs
Linux on x86-64 and ``pip install "jax[tpu]"`` for TPUs, ``pip install ".[gpu-compile]"``
for GPUs, and takes some minutes for each row of the larger models.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence

from adder_flax import data, training
from adder_flax.experiments import common
from benchmarks import parser, print_row, print_titles

BATCH_SIZE = 1024
TITLES = ("`--config=`", "topology", "train state, batch, program", "activations, gradients")
TITLES += ("one device", "multiplications, additions", "compiled in")


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser(__doc__)
    given.add_argument("--sizes", default="tiny,small,base")
    given.add_argument("--mechanisms", default="multiplicative,additive,adder")
    given.add_argument("--optimizers", default="adamw,kfac")
    given.add_argument("--topologies", default="v5e:2x4,v5e:4x4")
    given.add_argument("--accumulation_steps", type=int, default=1)
    given.add_argument("--dtype", default="float32")
    given.add_argument(
        "--fsdp", type=int, default=1, help="devices over which parameters are split; -1 for all"
    )
    options = given.parse_args(arguments)
    parts, fsdp = options.accumulation_steps, options.fsdp
    print(f"batch {BATCH_SIZE} in {parts} parts, {options.dtype}, fsdp {fsdp}\n")
    print_titles(TITLES)
    chosen = options.topologies, options.sizes, options.mechanisms, options.optimizers
    for case in itertools.product(*(names.split(",") for names in chosen)):
        print_row(cells(*case, options))


def cells(
    topology: str, size: str, mechanism: str, optimizer: str, options: argparse.Namespace
) -> Iterator[str]:
    config = common.deit(mechanism, size, "imagenet2012")
    config.update_from_flattened_dict(
        {
            "batch_size": BATCH_SIZE,
            "accumulation_steps": options.accumulation_steps,
            "optimizer.name": optimizer,
            "model.dtype": options.dtype,
            "mesh.data": 1 if options.fsdp == -1 else -1,
            "mesh.fsdp": options.fsdp,
        }
    )
    run = training.build_run(
        config, devices=training.topology_devices(topology), load=data.load_or_imitate
    )
    step = training.estimate(run)
    counted = training.step_operations(run)
    working = step.memory["activations, gradients"]
    experiment = "deit" if mechanism == "multiplicative" else f"{mechanism}_deit"
    yield f"`{experiment}_{size}.py:imagenet2012`" + (" + K-FAC" if optimizer == "kfac" else "")
    yield f"`{topology}`"
    yield _gib(step.total - working)
    yield _gib(working)
    yield f"{_gib(step.total)}: {'fits' if step.fits else 'does not fit'}"
    yield f"{counted.multiplications:.2e}, {counted.additions:.2e}".replace("e+", "e")
    refused = "" if "program" in step.memory else "refused after "
    yield f"{refused}{step.compile_seconds:.0f} s"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


if __name__ == "__main__":
    main()
