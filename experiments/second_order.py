"""The second-order term of the loss against the first along training.

For the three mechanisms on digits.

Source: "The Brownian motion in the transformer model", section 3.3, whose case for second-order
optimizers is that this term should not be ignored. Networks of 4 blocks of width 64, AdamW, the
recipe for digits; every tenth step is measured unless --every says otherwise.
Command:
    python -m experiments.second_order [--epochs=10] [--optimizer=adamw] [--out=runs/second_order]
Measured, |second-order| / |first-order|, medians over the thirds of training (every twentieth step,
peak rate 5e-4, 2e-3 for adder, about a minute each): multiplicative 0.50, 0.19, 0.07; additive
0.24, 0.21, 0.10; adder 0.40, 0.32, 0.14. From the Hessian and from differences of the loss the term
is the same within 6 % in the last two thirds.
"""

import argparse
from pathlib import Path

import numpy as np

from adder_flax import report, training
from adder_flax.experiments import common

FIELDS = {"model.width": 64, "model.num_heads": 2, "model.depth": 4, "model.mlp_ratio": 2.0}


def measure(
    mechanism: str, *, epochs: float, optimizer: str, every: int
) -> list[report.SecondOrderStep]:
    """Trains one network from its initialisation and expands the loss along every so manyth step.

    Without the Hessian for adder layers, which has nothing of their kinks and needs minutes to
    compile.
    """
    config = common.deit(mechanism, "tiny")
    schedule = {"num_epochs": epochs, "optimizer.warmup_epochs": epochs / 10}
    config.update_from_flattened_dict(FIELDS | schedule | {"optimizer.name": optimizer})
    run, smooth = training.build_run(config), config.model.mlp_linear != "adder"
    steps = report.second_order_along(
        run, run.init(), num_steps=run.num_steps, every=every, derivatives=smooth
    )
    return list(steps)


def main() -> None:
    """Prints a table over the phases of training, and draws the terms."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument(
        "--every", type=int, default=10, help="steps from one measurement to the next"
    )
    parser.add_argument("--mechanisms", default=",".join(common.MECHANISMS))
    parser.add_argument(
        "--out",
        default="",
        help="directory for second_order.png, .svg; nothing is drawn without it",
    )
    options = parser.parse_args()
    studies = {}
    print(
        "mechanism       steps        loss     odd part   even part  ½ δᵀHδ     |even| / |odd|     "
        "change"
    )
    for mechanism in options.mechanisms.split(","):
        settings = dict(epochs=options.epochs, optimizer=options.optimizer, every=options.every)
        studies[mechanism] = measure(mechanism, **settings)
        for third in np.array_split(np.array(studies[mechanism], object), 3):
            terms = {name: np.median([getattr(s, name) for s in third]) for name in vars(third[0])}
            ratio = np.median([s.ratio() for s in third])
            print(
                f"{mechanism:15s} {third[0].step:4d}-{third[-1].step:<4d} {terms['loss']:7.4f} "
                f"{terms['odd']:12.2e} {terms['even']:11.2e} {terms['second']:10.2e} {ratio:15.3f} "
                f"{terms['change']:12.2e}",
                flush=True,
            )
    if options.out:
        figure = report.second_order_figure(studies)
        print(
            *report.save_figure(figure, Path(options.out) / "second_order", ("png", "svg")),
            sep="\n",
        )


if __name__ == "__main__":
    main()
