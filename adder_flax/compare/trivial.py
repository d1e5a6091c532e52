"""What a linear classifier and the nearest neighbour make of the pixels: the floor of a table.

A network below them has not learned what its images show.
"""

import json
import math
import warnings
from pathlib import Path

import numpy as np

from adder_flax import data
from adder_flax.compare.run import Comparison
from adder_flax.extras import needs
from adder_flax.files import write_whole

NAME = "trivial.json"
_ITERATIONS = 200
_MOST_PIXELS = 2**28  # of the training split: 1 GiB in float32, more than CIFAR-10 has


def trivial_scores(train: data.Source, test: data.Source) -> dict[str, float]:
    """Returns the accuracy of softmax regression and of the nearest neighbour on pixels.

    Pixels are divided by 255. Softmax regression has scikit-learn's penalty (C = 1) and ends after
    200 iterations of L-BFGS at the latest.

    Example:
      >>> parts = (data.load_source("digits", split) for split in ("train[:30%]", "test"))
      >>> {name: round(score, 2) for name, score in trivial_scores(*parts).items()}
      {'softmax regression': 0.96, 'nearest neighbour': 0.97}
    """
    with needs("data"):
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from sklearn.neighbors import KNeighborsClassifier

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
    """Writes them beside the records of a finished comparison of images, unless they are there.

    Only where all arms see one set, whose images have one size and fit into memory.
    """
    arms = list(comparison.plan.arms.values())
    base = comparison.plan.settings.base
    path = comparison.results / NAME
    if path.exists() or base.task.name != "classification":
        return
    if any(map(comparison.open_cells, arms)):
        return
    sets = [comparison.final_cells(arm)[0].config.data for arm in arms]
    if len({(of.name, of.data_dir, of.train_split) for of in sets}) > 1:
        return
    load = lambda split: data.load_source(
        sets[0].name,
        split,
        data_dir=sets[0].data_dir or None,
        image_size=sets[0].image_size or None,
        crop_scale=None,
    )
    train = load(sets[0].train_split)
    if not isinstance(train, data.ImageSource) or train.crops_on_host:
        return
    if len(train) * math.prod(train.image_shape) > _MOST_PIXELS:
        return
    scores = trivial_scores(train, load(base.data.eval_split))
    write_whole(path, (json.dumps(scores, indent=2) + "\n").encode())


def read_trivial(results: Path) -> dict[str, float]:
    """Returns what is written, nothing where there is no such file."""
    path = results / NAME
    return json.loads(path.read_text()) if path.exists() else {}


def _arrays(source: data.Source) -> tuple[np.ndarray, np.ndarray]:
    batch = source.first(len(source))
    return batch["image"].reshape(len(batch["label"]), -1).astype(np.float32) / 255, batch["label"]
