"""Time of one training step of DeiT-Tiny: against PyTorch's own transformer, and of the mechanisms
against each other.

    python -m benchmarks.train_step

1. Multiplicative DeiT-Tiny, 32 images of 65 tokens (32x32 pixels, patches of 4), forward, backward,
   clipping and AdamW, against `torch.nn.TransformerEncoder` of the same sizes between the same
   patch embedding and head (if PyTorch is installed: `pip install torch --index-url
   https://download.pytorch.org/whl/cpu`).
2. The three mechanisms on the digits, as the experiments train them: 64 images of 17 tokens.

The contestants take turns, and every ratio is the median over turns, so that other work on the
machine falls on all. The first steps, which compile, are timed apart.
"""

import os
from collections.abc import Callable

import jax

import benchmarks
from adder_flax import ops, training
from adder_flax.experiments import common
from adder_flax.training import sharding
from benchmarks.timing import measure, seconds_of

IMAGES = 32
NO_AUGMENTATION = dict(
    crop_padding=0, flip_probability=0.0, mixup_alpha=0.0, cutmix_alpha=0.0, erase_probability=0.0
)


def jax_step(config) -> Callable:
    """Returns a function that does an experiment's next training step and returns its metrics."""
    run = training.build_run(config)
    batch, state = sharding.put_batch(run.batches()[0], run.mesh), run.init()

    def step():
        nonlocal state
        with jax.set_mesh(run.mesh):
            state, metrics = run.train_step(state, batch, run.hyper)
        return metrics

    return step


def torch_step() -> Callable | None:
    try:
        import torch
    except ImportError:
        return None
    from torch import nn

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    form = dict(dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    layer, norm = nn.TransformerEncoderLayer(192, 3, 768, **form), nn.LayerNorm(192)
    embed, head = nn.Linear(48, 192), nn.Linear(192, 10)
    encoder = nn.TransformerEncoder(layer, 12, norm=norm, enable_nested_tensor=False)
    positions = nn.Parameter(0.02 * torch.randn(1, 65, 192))
    parameters = [*nn.ModuleList([embed, encoder, head]).parameters(), positions]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.05)
    patches, labels = torch.randn(IMAGES, 65, 48), torch.randint(10, (IMAGES,))

    def step():
        tokens = encoder(embed(patches) + positions)
        loss = nn.functional.cross_entropy(head(tokens[:, 0]), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()

    return step


def compare(steps: dict[str, Callable], reference: str) -> None:
    first = {name: seconds_of(step) for name, step in steps.items()}
    timings = measure(steps, rounds=15, seconds=60.0)
    width = max(map(len, steps))
    for name in steps:
        print(
            f"{name:{width}}  {1e3 * timings.median(name):7.0f} ms a step  "
            f"{timings.ratio(name, reference):5.2f} x {reference}  first step {first[name]:5.1f} s",
            flush=True,
        )


def main() -> None:
    benchmarks.parser(__doc__).parse_args()
    print(ops.backend_report().splitlines()[0])

    print(f"\nmultiplicative DeiT-Tiny, {IMAGES} images x 65 tokens, forward + backward + AdamW")
    config = common.deit("multiplicative", "tiny", "fake")
    config.batch_size = IMAGES
    config.task.update(NO_AUGMENTATION)
    steps = {"adder_flax": jax_step(config)}
    if torch := torch_step():
        steps["PyTorch"] = torch
    else:
        print("no PyTorch here to compare with: pip install torch")
    compare(steps, reference=list(steps)[-1])

    print("\nDeiT-Tiny on the digits, 64 images x 17 tokens, as the experiments train it")
    steps = {name: jax_step(common.deit(name, "tiny", "digits")) for name in common.MECHANISMS}
    compare(steps, reference="multiplicative")


if __name__ == "__main__":
    main()
