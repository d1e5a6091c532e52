"""What a linear classifier and the nearest neighbour make of the pixels: the floor of a table.

A network below them has not learned what its images show.
"""

import json
import warnings
from pathlib import Path

import numpy as np

from adder_flax import data
from adder_flax.compare.run import Comparison
from adder_flax.extras import needs
from adder_flax.files import write_whole

with needs("data"):
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

NAME = "trivial.json"
_ITERATIONS = 200


def trivial_scores(train: data.Source, test: data.Source) -> dict[str, float]:
    """Returns the accuracy of softmax regression and of the nearest neighbour on pixels.

    Pixels are divided by 255. Softmax regression has scikit-learn's penalty (C = 1) and ends after
    200 iterations of L-BFGS at the latest.

    Args:
      train, test: images of one size with labels.

    Example:
      >>> parts = (data.load_source("digits", split) for split in ("train", "test"))
      >>> {name: round(score, 2) for name, score in trivial_scores(*parts).items()}
      {'softmax regression': 0.97, 'nearest neighbour': 0.99}
    """
    (pixels, labels), (of_test, truth) = map(_arrays, (train, test))
    models = {
        "softmax regression": LogisticRegression(max_iter=_ITERATIONS),
        "nearest neighbour": KNeighborsClassifier(1, algorithm="brute"),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return {
            name: float(model.fit(pixels, labels).score(of_test, truth))
            for name, model in models.items()
        }


def add_trivial(comparison: Comparison) -> None:
    """Writes them beside the records of a finished comparison of images, unless they are there."""
    arms = list(comparison.plan.arms.values())
    task = comparison.plan.settings.base.task.name
    path = comparison.results / NAME
    if path.exists() or task != "classification" or any(map(comparison.open_cells, arms)):
        return
    fields = comparison.final_cells(arms[0])[0].config.data
    of_test = comparison.plan.settings.base.data.eval_split
    train, test = (
        data.load_source(fields.name, split, data_dir=fields.data_dir or None)
        for split in (fields.train_split, of_test)
    )
    if not getattr(train, "crops_on_host", False):  # images of many sizes have no pixels in common
        scores = trivial_scores(train, test)
        write_whole(path, (json.dumps(scores, indent=2) + "\n").encode())


def read_trivial(results: Path) -> dict[str, float]:
    """Returns what is written, nothing where there is no such file."""
    path = results / NAME
    return json.loads(path.read_text()) if path.exists() else {}


def _arrays(source: data.Source) -> tuple[np.ndarray, np.ndarray]:
    examples = [source[i] for i in range(len(source))]
    pixels = np.stack([example["image"].ravel() for example in examples])
    return pixels.astype(np.float32) / 255, np.array([example["label"] for example in examples])
