"""LayerNorm, forward and with its gradients, beside Flax's by XLA and PyTorch's.

    python -m benchmarks.layer_norm

Rows and widths are those of DeiT-Tiny's, -Small's and -Base's blocks on 64 images of the digits and
on 8 images of 224 pixels. Beside it, what NumPy takes on one core to copy as many bytes as have to
be moved: forward reads x and writes y, the gradients read x and that of y and write that of x.
Ratios are medians over rounds in which the sides take turns. PyTorch is compared with where it is
installed.
"""

import functools
import importlib.util

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from adder_flax import ops, own_cache
from benchmarks.ops import WIDTHS
from benchmarks.timing import measure

ROWS = (64 * 17, 8 * 197)
ROUNDS, SECONDS = 15, 3.0


def flax(x, scale, bias):
    """Flax's LayerNorm at its defaults."""
    return nn.LayerNorm().apply({"params": {"scale": scale, "bias": bias}}, x)


def with_gradients(function, g, *arrays):
    """The output and the gradients of all arrays for the cotangent g."""
    y, pullback = jax.vjp(function, *arrays)
    return y, *pullback(g)


def torch_sides(x, scale, bias, g) -> dict:
    """Returns what PyTorch does, by name; nothing where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    x, scale, bias, g = (torch.from_numpy(a.copy()) for a in (x, scale, bias, g))

    def forward():
        with torch.no_grad():
            return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias).shape

    leaves = [a.clone().requires_grad_() for a in (x, scale, bias)]

    def train():
        y = torch.nn.functional.layer_norm(leaves[0], x.shape[-1:], *leaves[1:])
        return torch.autograd.grad(y, leaves, g)[0].shape

    return {"torch": forward, "torch, train": train}


def main() -> None:
    """Prints a line for each number of rows and width."""
    print(ops.backend_report().splitlines()[0])
    print(f"{own_cache.processor_name()}\n")
    titles = ["rows x width"]
    for mode in ("forward", "with gradients"):
        titles += [f"{mode}, us", "x copy", "flax / it", "torch / it"]
    print("  ".join(f"{title:>16}" for title in titles))
    rng = np.random.default_rng(0)
    for rows in ROWS:
        for width in sorted({w * factor for w in WIDTHS.values() for factor in (1, 4)}):
            x, g = (rng.normal(size=(rows, width)).astype(np.float32) for _ in range(2))
            scale, bias = (rng.normal(size=width).astype(np.float32) for _ in range(2))
            target = np.empty_like(x)
            on_device = [jnp.asarray(a) for a in (x, scale, bias)]
            cotangent = jnp.asarray(g)
            sides = {"copy": functools.partial(np.copyto, target, x)}
            for name, function in (("own", ops.layer_norm), ("flax", flax)):
                sides[name] = functools.partial(jax.jit(function), *on_device)
                train = jax.jit(functools.partial(with_gradients, function))
                sides[f"{name}, train"] = functools.partial(train, cotangent, *on_device)
            sides |= torch_sides(x, scale, bias, g)
            times = measure(sides, ROUNDS, SECONDS)
            cells = [f"{rows} x {width}"]
            for mode, copies in (("", 1.0), (", train", 2.5)):  # 2 arrays a copy; 2 + 3 to train
                own = f"own{mode}"
                cells.append(f"{1e6 * times.median(own):.0f}")
                cells.append(f"{times.ratio(own, 'copy') / copies:.2f}")
                for other in ("flax", "torch"):
                    ratio = times.ratio(f"{other}{mode}", own)
                    cells.append("" if ratio is None else f"{ratio:.2f}")
            print("  ".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
