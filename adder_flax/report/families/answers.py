"""What a classifier answers: confusions, the accuracy of each class, calibration, mistakes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from adder_flax.measures.answers import calibration, confusion_matrix
from adder_flax.report import _style
from adder_flax.report._families import Section, register_claims
from adder_flax.report._study import Answers, Findings, ImageStudy, Picture

_SHOWN_CLASSES = 20  # more names than this cannot be read along an axis
_SHOWN_MISTAKES = 12
_NAME_LENGTH = 18
_COLOR = _style.LINES[2]["color"]

ANSWERS = Section(
    "What it answers",
    "What the model takes images of the evaluation split for, before what the papers claim.",
    "this model",
)


@register_claims("answers", ANSWERS, of=ImageStudy)
def judge(study: ImageStudy) -> Findings:
    """Draws; it judges nothing."""
    answers = study.answers
    table = confusion_matrix(answers.labels, answers.predicted, len(answers.names))
    few = len(answers.names) <= _SHOWN_CLASSES
    pictures = [
        _confusion(table, answers) if few else _confused_pairs(table, answers),
        _class_accuracy(table, answers),
        _calibration(answers),
    ]
    mistakes = np.flatnonzero(answers.predicted != answers.labels)
    if mistakes.size:
        surest = mistakes[np.argsort(-answers.confidence[mistakes], kind="stable")]
        pictures.append(_mistakes(surest[:_SHOWN_MISTAKES], answers))
    return Findings([], pictures)


def _confusion(table: np.ndarray, answers: Answers) -> Picture:
    names = _short(answers.names)
    share = table / np.maximum(table.sum(1, keepdims=True), 1)
    side = 1.6 + 0.42 * len(names)
    figure, [[axis]] = _style.new_figure(side + 1.2, side)
    image = axis.imshow(share, cmap=_style.HEAT, vmin=0.0, vmax=1.0)
    for true, seen in np.argwhere(table):
        color = "black" if share[true, seen] > 0.6 else "white"
        axis.text(seen, true, table[true, seen], ha="center", va="center", fontsize=7, color=color)
    turn = {} if max(map(len, names)) < 4 else {"rotation": 90}
    axis.set_xticks(range(len(names)), names, fontsize=8, parse_math=False, **turn)
    axis.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    axis.set_xlabel("taken for")
    axis.set_ylabel("class")
    figure.colorbar(image, ax=axis, label="share of the class", shrink=0.8)
    return Picture(
        "confusion",
        figure,
        f"Numbers of images, of {len(answers.labels)}. What is off the diagonal is wrong.",
        f"Confusion matrix of {len(names)} classes.",
        {"confusion": table},
    )


def _confused_pairs(table: np.ndarray, answers: Answers) -> Picture:
    wrong = table.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_SHOWN_CLASSES]
    true, seen = np.unravel_index(order[wrong.flat[order] > 0], table.shape)
    names, counts = _short(answers.names), wrong[true, seen]
    figure, [[axis]] = _style.new_figure(7.0, 1.2 + 0.22 * len(counts))
    axis.barh(range(len(counts)), counts, color=_COLOR)
    pairs = [f"{names[a]} → {names[b]}" for a, b in zip(true, seen, strict=True)]
    axis.set_yticks(range(len(counts)), pairs, parse_math=False)
    axis.invert_yaxis()
    _style.dress(axis, "images of the first taken for the second")
    return Picture(
        "confusion",
        figure,
        f"The pairs of classes that are confused most often, of {len(answers.labels)} images.",
        "Numbers of images of one class that are taken for another, the most frequent pairs.",
        {"true": true, "seen": seen, "images": counts, "images of the class": table.sum(1)[true]},
    )


def _class_accuracy(table: np.ndarray, answers: Answers) -> Picture:
    count, right = table.sum(1), np.diag(table)
    accuracy = np.where(count, right / np.maximum(count, 1), np.nan)
    there = np.flatnonzero(count)
    worst = there[np.argsort(accuracy[there], kind="stable")][:_SHOWN_CLASSES]
    figure, [[axis]] = _style.new_figure(7.0, 1.2 + 0.24 * len(worst))
    places = np.arange(len(worst))
    _with_interval(axis, accuracy[worst], places, right[worst], count[worst], of="x")
    axis.axvline(right.sum() / count.sum(), color=_style.GREY, linewidth=0.9, linestyle=":")
    names = _short(answers.names)
    axis.set_yticks(places, [f"{names[i]} ({count[i]})" for i in worst], parse_math=False)
    axis.invert_yaxis()
    _style.dress(axis, "accuracy")
    part = "" if len(worst) == len(there) else f" of the {len(worst)} classes where it is lowest"
    return Picture(
        "class_accuracy",
        figure,
        f"Accuracy{part or ' of each class'}, with Wilson's 95 % interval; the number of images in "
        "brackets. The dotted line is the accuracy of all.",
        "Accuracy by class with intervals.",
        {"class": np.array(names), "images": count, "right": right, "accuracy": accuracy},
    )


def _calibration(answers: Answers) -> Picture:
    found = calibration(answers.probabilities, answers.labels)
    figure, [[diagram, counts]] = _style.new_figure(8.4, 3.4, 1, 2)
    diagram.plot([0, 1], [0, 1], color=_style.GREY, linewidth=0.9, linestyle=":")
    seen = found.count > 0
    accuracy, count = found.accuracy[seen], found.count[seen]
    right = np.rint(accuracy * count)
    _with_interval(diagram, found.confidence[seen], accuracy, right, count)
    edges = np.linspace(0, 1, len(found.count) + 1)
    counts.bar(edges[:-1], found.count, np.diff(edges), align="edge", color=_COLOR)
    title = f"expected calibration error {found.error:.3f}"
    _style.dress(diagram, "confidence", "accuracy", title)
    _style.dress(counts, "confidence", "images")
    surplus = answers.confidence.mean() - (answers.predicted == answers.labels).mean()
    lean = "surer than it is right" if surplus > 0 else "less sure than it is right"
    return Picture(
        "calibration",
        figure,
        "How often answers of about one confidence are right, with Wilson's 95 % interval: on the "
        f"dotted line as often as they say. On average the model is {abs(surplus):.3f} {lean}.",
        "Accuracy against confidence, and how many images have each confidence.",
        vars(found) | {"error": np.full(len(found.count), found.error)},
    )


def _mistakes(surest: np.ndarray, answers: Answers) -> Picture:
    columns = min(6, len(surest))
    rows = -(-len(surest) // columns)
    figure, grid = _style.new_figure(1.5 * columns + 0.6, 2.1 * rows, rows, columns)
    names, pictures = _short(answers.names), answers.pictures(answers.records[surest])
    for axis in grid.ravel()[len(surest) :]:
        axis.remove()
    for axis, index, picture in zip(grid.ravel(), surest, pictures, strict=False):
        grey = {"cmap": "gray", "vmin": 0, "vmax": 255 if picture.dtype == np.uint8 else 1}
        axis.imshow(picture.squeeze(-1) if picture.shape[-1] == 1 else picture, **grey)
        sure = answers.confidence[index]
        note = f"{names[answers.predicted[index]]}, {sure:.0%}"
        _style.bare(axis, title=names[answers.labels[index]], note=f"taken for\n{note}")
    wrong = int((answers.predicted != answers.labels).sum())
    return Picture(
        "mistakes",
        figure,
        f"The {len(surest)} of {wrong} mistakes that the model is surest of: above the class, "
        "below what it is taken for.",
        f"{len(surest)} images that are classified wrongly with high confidence.",
        {
            "record": answers.records[surest],
            "label": answers.labels[surest],
            "predicted": answers.predicted[surest],
            "confidence": answers.confidence[surest],
        },
    )


def _with_interval(
    axis: Any, x: np.ndarray, y: np.ndarray, right: np.ndarray, count: np.ndarray, of: str = "y"
) -> None:
    from scipy.stats import binomtest  # which takes half a second to import

    tests = [binomtest(int(hits), int(n)) for hits, n in zip(right, count, strict=True)]
    low, high = np.array([test.proportion_ci(method="wilson") for test in tests]).T
    share = {"x": x, "y": y}[of]
    reach = {f"{of}err": np.maximum([share - low, high - share], 0)}
    axis.errorbar(x, y, **reach, fmt="o", color=_COLOR, markersize=4, linewidth=1)


def _short(names: Sequence[str]) -> list[str]:
    cut = lambda name: name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 1]}…"
    return [cut(name) for name in names]
