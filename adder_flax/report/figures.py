"""Figures of runs and studies, as Matplotlib objects without pyplot's global state.

Matplotlib is imported when a figure is asked for, not before.
"""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx
from jaxtyping import Float

from adder_flax import recorder
from adder_flax.arrays import AnyArray
from adder_flax.attention import attention_map
from adder_flax.extras import needs
from adder_flax.measures.expressivity import score_parameters, xor_bound
from adder_flax.measures.maps import patch_attention, patch_grid
from adder_flax.measures.walks import rollout
from adder_flax.report import _style
from adder_flax.report.captures import tokens_in_front
from adder_flax.report.expansion import SecondOrderStep
from adder_flax.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from adder_flax.data import ImageSource
    from adder_flax.tasks import Task

_PREFERENCE = 1.5  # attention over uniform below which an outline would trace noise
_SHOWN_IMAGES = 6
_CAPTION_WIDTH = 29  # characters below a picture


def curves_figure(
    metrics: Sequence[Mapping[str, float]],
    *,
    loss: str = "cross-entropy (nats)",
    score: str = "accuracy",
    largest: bool = True,
    title: str = "",
) -> "Figure":
    """Loss and score against the training step: two panels, or one if only one of them is there.

    Args:
      metrics: rows of ``metrics.jsonl``: "step" and any of "train/loss", "train/<score>",
        "eval/loss", "eval/<score>". Values that are not finite leave a gap.
      loss: what the loss is.
      score: name of the score, see ``adder_flax.tasks.Best``; a share, which is shown in per cent,
        or the loss, which has its panel.
      largest: whether more of it is better.
      title: above the panels, e.g. the run's name.

    Raises:
      ValueError: if no row has any of these keys.

    Example:
      >>> rows = [{"step": 10, "train/loss": 2.1}, {"step": 20, "eval/accuracy": 0.8}]
      >>> [axis.get_ylabel() for axis in curves_figure(rows, title="digits").axes]
      ['cross-entropy (nats)', 'accuracy (%)']
    """
    wanted = (("loss", loss, 1, False), (score, f"{score.replace('_', ' ')} (%)", 100, largest))
    keys = sorted({key for row in metrics for key in row})
    there = lambda name: f"train/{name}" in keys or f"eval/{name}" in keys
    panels = [panel for panel in wanted[: 1 if score == "loss" else 2] if there(panel[0])]
    if not panels:
        raise ValueError(
            f"expected rows with 'train/loss', 'train/{score}', 'eval/loss' or 'eval/{score}'; got "
            f"{len(metrics)} rows with {keys or 'no keys'}. Pass the rows of a run's metrics.jsonl."
        )
    figure, axes = _style.new_figure(4.6 * len(panels), 3.4, 1, len(panels))
    for axis, (name, label, scale, up) in zip(axes[0], panels, strict=True):
        _draw_training(axis, *_series(metrics, f"train/{name}", scale))
        unit = " %" if scale == 100 else ""
        _draw_evaluation(axis, *_series(metrics, f"eval/{name}", scale), largest=up, unit=unit)
        corner = "lower right" if up else "upper right"
        _style.dress(axis, "training step", label, legend_at=corner)
    return _style.headline(figure, title)


def _series(
    metrics: Sequence[Mapping[str, float]], key: str, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    rows = [(row["step"], row[key]) for row in metrics if row.get(key) is not None]
    steps, values = np.array(rows, float).reshape(-1, 2).T
    return steps, np.where(np.isfinite(values), values, np.nan) * scale


def _draw_training(axis: "Axes", steps: np.ndarray, values: np.ndarray) -> None:
    """Faint single values, and over them their running mean where there are enough to need one."""
    line, window = {**_style.LINES[1], "marker": None}, max(1, len(values) // 40)
    if window == 1:
        if len(steps):
            axis.plot(steps, values, **line, linewidth=1.4, label="training")
        return
    axis.plot(steps, values, color="#c4c4c4", linewidth=0.7, label="training, single batches")
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):  # a window of none leaves a gap
        mean = _sum_around(np.where(finite, values, 0), window) / _sum_around(finite, window)
    axis.plot(steps, mean, **line, linewidth=1.6, label=f"training, mean of {window}")


def _sum_around(values: np.ndarray, window: int) -> np.ndarray:
    padded = np.pad(values.astype(float), window // 2, mode="edge")
    return np.convolve(padded, np.ones(window), "same")[window // 2 :][: len(values)]


def _draw_evaluation(
    axis: "Axes", steps: np.ndarray, values: np.ndarray, *, largest: bool, unit: str
) -> None:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return
    last, best = finite[-1], finite.max() if largest else finite.min()
    show = lambda value: f"{value:.{2 if unit else 4}f}{unit}"
    label = f"test, last {show(last)}" + ("" if last == best else f", best {show(best)}")
    style = {**_style.LINES[0], "markersize": 3.5, "markevery": max(1, len(steps) // 15)}
    axis.plot(steps, values, **style, linewidth=1.5, label=label)


def attention_of_images(
    task: "Task", model: nnx.Module, source: "ImageSource", title: str
) -> "Figure":
    """Where a classifier looks on the first images of a source, with what it takes them for."""
    batch, names = source.first(_SHOWN_IMAGES), source.label_names
    logits, records = recorder.record({"attention": ["weights"]}, model, *task.inputs(batch))
    captions = [
        f"{names[label]}, predicted {names[predicted]}"
        for label, predicted in zip(batch["label"], np.argmax(logits, axis=-1), strict=True)
    ]
    options = tokens_in_front(model) | {"captions": captions, "title": title}
    return attention_figure(batch["image"], list(map(attention_map, records)), **options)


def alignment_figure(
    sources: Sequence[Sequence[str]],
    targets: Sequence[Sequence[str]],
    maps: Sequence[Float[AnyArray, "_ _"]],
    *,
    title: str = "",
) -> "Figure":
    """Where a sequence model looks while it writes: a panel for each pair of sequences.

    Args:
      sources, targets: symbols that were read and written.
      maps: how much of each source symbol each target symbol, a row, looks at.
      title: above all.

    Example:
      >>> figure = alignment_figure(
      ...     ["cat", "it"], [("K", "AE", "T"), ("IH", "T")], [np.eye(3), np.eye(2)]
      ... )
      >>> len(figure.axes)
      2
    """
    columns = min(len(maps), 3)
    rows = -(-len(maps) // columns)
    figure, grid = _style.new_figure(3.2 * columns, 3.0 * rows, rows, columns)
    for axes in grid.ravel()[len(maps) :]:
        axes.remove()
    for axes, source, target, weights in zip(grid.ravel(), sources, targets, maps, strict=False):
        axes.imshow(weights, cmap=_style.HEAT, vmin=0.0, vmax=1.0, aspect="auto")
        axes.set_xticks(range(len(source)), source)
        axes.set_yticks(range(len(target)), target)
        axes.tick_params(labelsize=8, length=0)
    return _style.headline(figure, title)


def attention_figure(
    images: np.ndarray,
    maps: Sequence[Float[AnyArray, "image head token token"]],
    *,
    title: str = "",
    **options: Any,
) -> "Figure":
    """Where the class token looks, drawn over the images: a row for each image, a column for each
    block.

    Brightness is attention relative to uniform, on one scale for each panel, given below it; the
    line encloses the patches that hold half of the attention. The identity map, if the maps have
    it, is left out: it is the token's own share, not the image's.

    Args:
      images: (images, height, width, channels), uint8 or floats in [0, 1]; 1 or 3 channels.
      maps: for every block of the model the maps of these images.
      title: above all.
      **options: see :func:`comparison_figure`.

    Raises:
      ValueError: if images and maps differ in number, or the patches do not tile the image.

    Example:
      >>> maps = [np.full((2, 3, 17, 17), 1 / 17) + np.eye(17)] * 4
      >>> len(attention_figure(np.zeros((2, 8, 8, 1), np.uint8), maps).axes)
      8
    """
    return _style.headline(comparison_figure(images, {"": maps}, **options), title)


def comparison_figure(
    images: np.ndarray,
    models: Mapping[str, Sequence[Float[AnyArray, "image head token token"]]],
    *,
    blocks: Sequence[int] | None = None,
    prefix_tokens: int = 1,
    class_token: bool = True,
    with_rollout: bool = False,
    captions: Sequence[str] | None = None,
) -> "Figure":
    """Where the class tokens of several models look: for each image a row for each model.

    Args:
      images: as for :func:`attention_figure`.
      models: by name the maps of each, as for :func:`attention_figure`; equally many blocks.
      blocks: which to show; by default the first, a middle one and the last.
      prefix_tokens, class_token: see :func:`adder_flax.measures.maps.patch_attention`; without a
        class token the mean over the patches' rows is shown.
      with_rollout: add a last column with :func:`rollout` through all blocks.
      captions: a line for each image, e.g. "label 3, predicted 8".

    Raises:
      ValueError: as of :func:`attention_figure`.

    Example:
      >>> uniform = np.full((2, 3, 17, 17), 1 / 17)
      >>> models = {"dot": [uniform], "adder": [uniform + np.eye(17)]}
      >>> figure = comparison_figure(np.zeros((2, 8, 8, 1), np.uint8), models, with_rollout=True)
      >>> len(figure.axes)  # 2 images × 2 models × (image, block, rollout)
      12
    """
    images, columns = np.asarray(images), {}
    tokens = {"prefix_tokens": prefix_tokens, "class_token": class_token}
    for name, maps in models.items():
        if any(len(block) != len(images) for block in maps) or not len(images):
            raise ValueError(
                f"expected maps of each image, (images, heads, tokens, tokens), for {len(images)} "
                f"images; got shapes {[tuple(block.shape) for block in maps]}. Pass the maps that "
                "the model gave for these images."
            )
        columns[name] = {}
        for block in sorted({0, len(maps) // 2, len(maps) - 1}) if blocks is None else blocks:
            weights = patch_attention(maps[block], **tokens).mean(1)
            columns[name][f"block {block + 1}, mean of heads"] = weights
        if with_rollout:
            columns[name]["rollout, all blocks"] = patch_attention(rollout(maps), **tokens)
    rows, count = len(images) * len(columns), len(next(iter(columns.values()))) + 1
    figure, axes = _style.new_figure(1.7 * count, 1.95 * rows + 0.3, rows, count)
    for row, (index, name) in enumerate(itertools.product(range(len(images)), columns)):
        caption, image = captions[index] if captions is not None else "", images[index]
        lines = [name, *textwrap.wrap(caption, _CAPTION_WIDTH)]
        note = "\n".join(printable(line, limit=60) for line in lines if line)
        _style.bare(axes[row, 0], title="image" if row == 0 else "", note=note)
        shown = _unit_range(image) if image.shape[-1] == 3 else _grey(image)
        axes[row, 0].imshow(shown, cmap="gray", vmin=0, vmax=1)
        for axis, (title, weights) in zip(axes[row, 1:], columns[name].items(), strict=True):
            _draw_attention(axis, image, weights[index], title=title if row == 0 else "")
    below = "brighter: more attention; the line encloses half of it"
    figure.supxlabel(below, fontsize=8, color="#333333")
    return figure


def xor_figure(accuracies: Mapping[str, Float[np.ndarray, " seeds"]]) -> "Figure":
    """Accuracies from :func:`train_xor` beside the bilinear limit, and parameters by hidden width.

    >>> len(xor_figure({"bilinear": np.array([0.5, 0.75]), "additive": np.ones(2)}).axes)
    2
    """
    figure, [[axis, parameters]] = _style.new_figure(8.2, 3.2, 1, 2)
    for position, (line, values) in enumerate(zip(_style.LINES, accuracies.values(), strict=False)):
        offsets = position + np.linspace(-0.2, 0.2, len(values))
        marks = {**line, "linestyle": "none", "fillstyle": "none", "markersize": 6}
        axis.plot(offsets, 100 * values, **marks)
    limit = 100 * float(xor_bound())
    axis.axhline(limit, color=_style.GREY, linestyle="--", linewidth=1)
    text: dict[str, Any] = dict(fontsize=8, color="#444444")
    axis.text(1.45, limit - 1, "largest possible, bilinear", ha="right", va="top", **text)
    axis.set_xlim(-0.5, len(accuracies) - 0.5)
    axis.set_xticks(range(len(accuracies)), list(accuracies))
    axis.set_ylim(30, 104)
    _style.dress(axis, ylabel="right pairs (%)", title="XOR task, one mark a start")
    widths = range(1, 81)
    counts = np.transpose([score_parameters(64, 128, width) for width in widths])
    series: dict[str, Any] = dict(zip(("bilinear", "additive"), counts, strict=True))
    _style.draw_lines(parameters, widths, series, marker=None, linewidth=1.5)
    parameters.axvline(8192 / 193, color=_style.GREY, linestyle=":", linewidth=1)
    parameters.text(8192 / 193 + 1, 500, "42.4", **text)
    labels = "hidden width d_a", "parameters", "widths 64 and 128"
    _style.dress(parameters, *labels, legend_at="upper left")
    return figure


_TERMS = dict(change="change of the loss", odd="odd part", even="even part", second="½ δᵀHδ")


def second_order_figure(studies: Mapping[str, Sequence[SecondOrderStep]]) -> "Figure":
    """Terms of the loss along steps from :func:`second_order_along`, under their panel's title.

    >>> terms = dict(loss=2.0, first=-0.2, second=0.05, odd=-0.2, even=0.05, change=-0.15)
    >>> step = SecondOrderStep(step=3, learning_rate=0.1, **terms)
    >>> len(second_order_figure({"adder": [step]}).axes)
    1
    """
    figure, axes = _style.new_figure(4.2 * len(studies), 3.2, 1, len(studies))
    for axis, (title, steps) in zip(axes[0], studies.items(), strict=True):
        number = [step.step + 1 for step in steps]
        terms = {label: [getattr(step, name) for step in steps] for name, label in _TERMS.items()}
        # "second" is the last: where it was not computed, the lines before it look the same.
        computed = {label: term for label, term in terms.items() if np.isfinite(term).any()}
        _style.draw_lines(axis, number, computed, markevery=max(1, len(steps) // 12))
        axis.axhline(0, color=_style.GREY, linewidth=0.8)
        _style.whole_ticks(axis)
        _style.dress(axis, "training step", "nats" if axis is axes[0, 0] else "", title)
    _style.legend(axes[0, 0])
    return figure


def _draw_attention(axis: "Axes", image: np.ndarray, weights: np.ndarray, title: str) -> None:
    with needs("report"):
        from PIL import Image

    relative = weights.reshape(patch_grid(image.shape, weights.size)) * weights.size
    rows, columns = relative.shape
    size, coarse = (8 * columns, 8 * rows), Image.fromarray(relative.astype(np.float32))
    smooth = np.maximum(np.asarray(coarse.resize(size, Image.Resampling.BICUBIC)), 0.0)
    height, width = image.shape[:2]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axis.imshow(_grey(image), cmap="gray", vmin=0, vmax=1, extent=extent)
    top = max(2.0, smooth.max())  # so that an indifferent map looks flat and not bright
    axis.imshow(smooth, cmap=_style.HEAT, alpha=0.72, extent=extent, vmin=0, vmax=top)
    if relative.max() > _PREFERENCE:
        # What lies above this value sums to half of everything.
        ordered = np.sort(smooth, axis=None)[::-1]
        level = ordered[np.searchsorted(np.cumsum(ordered), ordered.sum() / 2)]
        middles = lambda count, side: (np.arange(count) + 0.5) * side / count - 0.5
        y, x = map(middles, smooth.shape, (height, width))
        axis.contour(x, y, smooth, [level], colors="black", linewidths=2.2)
        axis.contour(x, y, smooth, [level], colors="white", linewidths=1.0)
    _style.bare(axis, title=title, note=f"{relative.min():.2f} to {relative.max():.2f} × uniform")


def _unit_range(image: np.ndarray) -> np.ndarray:
    return image / 255.0 if image.dtype == np.uint8 else np.clip(image, 0.0, 1.0)


def _grey(image: np.ndarray) -> np.ndarray:
    """Luminance in [0, 1] (ITU-R BT.601 weights)."""
    image = _unit_range(image)
    return image @ np.array([0.299, 0.587, 0.114]) if image.shape[-1] == 3 else image[..., 0]
