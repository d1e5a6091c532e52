"""Draws the picture of each mechanism: PYTHONPATH=. python docs/figures.py writes
docs/images/score_*.png.

Left: the score of every key in the plane for one query. Right: the attention map of tokens along a
spiral.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from adder_flax import attention

QUERY = np.array([1.2, 0.6], np.float32)
REACH = 3.0
TOKENS = 24


def parameters(name: str) -> dict[str, np.ndarray]:
    """Learned arrays of one head, chosen to show the shape of the score."""
    if name == "bilinear":
        return {"kernel": np.array([[[0.3, 1.4], [-1.1, 0.6]]], np.float32)}
    if name == "additive":
        rng = np.random.default_rng(5)
        make = lambda *shape: rng.normal(size=shape).astype(np.float32)
        return {
            "query_kernel": make(1, 2, 6),
            "key_kernel": make(1, 2, 6),
            "bias": make(1, 6),
            "v": make(1, 6),
        }
    return {}


def scores(name: str, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Raw scores of (queries, 2) and (keys, 2)."""
    arrays = parameters(name)
    return np.asarray(attention.get_score(name).function(query[None], key[None], **arrays)[0])


def draw(name: str) -> plt.Figure:
    figure, (plane, tokens) = plt.subplots(1, 2, figsize=(8.4, 3.7), layout="constrained")
    axis = np.linspace(-REACH, REACH, 161, dtype=np.float32)
    keys = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    field = plane.contourf(
        axis, axis, scores(name, QUERY[None], keys).reshape(161, 161), levels=15, cmap="viridis"
    )
    plane.annotate(
        "", QUERY, (0, 0), arrowprops=dict(arrowstyle="->", color="white", linewidth=1.5)
    )
    plane.plot(*QUERY, "o", color="white", markeredgecolor="black", markersize=5)
    plane.annotate("query", QUERY, xytext=(6, 4), textcoords="offset points", color="white")
    plane.set(
        xlabel="key, first coordinate",
        ylabel="key, second coordinate",
        title="score of a key",
        aspect="equal",
    )
    figure.colorbar(field, ax=plane)

    turn = np.linspace(0.5, 3 * np.pi, TOKENS)
    spiral = (turn / 4 * np.stack([np.cos(turn), np.sin(turn)])).T.astype(np.float32)[None, :, None]
    _, weights = attention.attend(
        spiral,
        spiral,
        spiral,
        score=name,
        parameters=parameters(name),
        scale=1.0,
        return_weights=True,
    )
    image = tokens.imshow(weights[0, 0], cmap="viridis", vmin=0)
    tokens.set(xlabel="key token", ylabel="query token", title="attention map along a spiral")
    figure.colorbar(image, ax=tokens)
    return figure


def main() -> None:
    images = Path(__file__).parent / "images"
    for name in ("dot", "bilinear", "additive", "adder", "gaussian"):
        draw(name).savefig(images / f"score_{name}.png", dpi=110)


if __name__ == "__main__":
    main()
