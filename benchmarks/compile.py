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
from collections.abc import Sequence

import benchmarks
from adder_flax import data, training
from adder_flax.experiments import common


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = benchmarks.parser(__doc__)
    parser.add_argument("--sizes", default="tiny,small,base")
    parser.add_argument("--mechanisms", default="multiplicative,additive,adder")
    parser.add_argument("--optimizers", default="adamw,kfac")
    parser.add_argument("--topologies", default="v5e:2x4,v5e:4x4")
    parser.add_argument("--batch_size", type=int, default=1024)
    parser.add_argument("--accumulation_steps", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--fsdp", type=int, default=1, help="devices over which parameters are split; -1 for all"
    )
    options = parser.parse_args(arguments)
    titles = (
        "`--config=`",
        "topology",
        "train state, batch, program",
        "activations, gradients",
        "one device",
    )
    titles += ("multiplications, additions", "compiled in")
    print(
        f"batch {options.batch_size} in {options.accumulation_steps} parts, {options.dtype}, fsdp "
        f"{options.fsdp}\n\n"
        f"{_line(titles)}\n{'|---' * len(titles)}|",
        flush=True,
    )
    for topology in options.topologies.split(","):
        for size in options.sizes.split(","):
            for mechanism in options.mechanisms.split(","):
                for optimizer in options.optimizers.split(","):
                    print(row(mechanism, size, optimizer, topology, options), flush=True)


def row(
    mechanism: str, size: str, optimizer: str, topology: str, options: argparse.Namespace
) -> str:
    """Returns one line of the table."""
    config = common.deit(mechanism, size, "imagenet2012")
    config.update_from_flattened_dict(
        {
            "batch_size": options.batch_size,
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
    refused = "program" not in step.memory
    cells = (
        f"`{experiment}_{size}.py:imagenet2012`" + (" + K-FAC" if optimizer == "kfac" else ""),
        f"`{topology}`",
        _gib(step.total - working),
        _gib(working),
        f"{_gib(step.total)}: {'fits' if step.fits else 'does not fit'}",
        f"{counted.multiplications:.2e}, {counted.additions:.2e}".replace("e+", "e"),
        f"{'refused after ' if refused else ''}{step.compile_seconds:.0f} s",
    )
    return _line(cells)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


if __name__ == "__main__":
    main()
