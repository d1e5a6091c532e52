"""Attention mechanisms in long trainings, beside the control that tells what distances bring.

An adder network differs from a dense one in three things at once: distances in place of products, a
LayerNorm behind each linear layer, and weights that start as N(0, 1) and do not decay. ``product``
keeps the last two and takes the first away: layers ``normed_dense`` and dot-product scores. All
arms are compared with it. ``adder layers, dot scores`` and ``dense layers, adder scores`` tell
layers and scores apart.

| argument after the colon | training of a run | validation | rates | seeds |
|---|---|---|---|---|
| none: scikit-learn's digits | 850 steps of 64 images: 50 epochs | 20 % | 4 | 10 |
| fashion_mnist | 4,215 steps of 64 images: 5 epochs, patches of 7 | 10 % | 4 | 10 |
| cifar10 | experiments/cifar10_fast.py: 5.25 epochs of 256 images, a stem, Muon | 10 % | 3 | 3 |
| cmudict | experiments/dot_g2p.py: 4 epochs of 256 words | its own | 3 | 3 |

The network has six blocks of width 96, for Fashion-MNIST three of width 64. That of cmudict has one
score and no layers of other kinds, so that its control is the dot product.
``twice,digits`` trains the best arm (before it is known, the control) for as many steps and for
twice as many: whether these trainings end. On digits they do, on Fashion-MNIST they do not
(results/trained_fashion_mnist_twice). The first minutes of such trainings are
experiments/compare_mechanisms.py.
Command: python main.py --mode=compare --config=experiments/compare_trained.py
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_collections

from adder_flax import settings
from adder_flax.experiments import cifar10_fast, common, g2p

_ADDER = common.MECHANISMS["adder"]
_NORMED = dict(qkv_linear="normed_dense", proj_linear="normed_dense", mlp_linear="normed_dense")
_CONTROL = "product"
_MECHANISMS = {
    _CONTROL: _NORMED,
    "dot": {},
    "additive": {"score": "additive"},
    "adder": _ADDER,
    "adder without identity": _ADDER | {"identity": "off"},
}
_APART = {
    "adder layers, dot scores": _ADDER | {"score": "dot"},
    "dense layers, adder scores": {"score": "adder", "identity": "off"},
}
_SCORES = ("dot", "bilinear", "gaussian", "additive", "adder")


def get_config(data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the comparison on ``[twice,]digits``, ``fashion_mnist``, ``cifar10``, ``cmudict``."""
    twice, data = (data or "").startswith("twice,"), (data or "").removeprefix("twice,") or "digits"
    mechanisms, control = _MECHANISMS | (_APART if data == "digits" else {}), _CONTROL
    if data == "cmudict":
        mechanisms, control = {score: {"score": score} for score in _SCORES}, "dot"
    of = common.chosen(_SETS, data)
    base = of.base()
    fields = {
        "title": f"Attention mechanisms beside their control, on {data}",
        "base": base,
        "factors": {"mechanism": {name: {"model": model} for name, model in mechanisms.items()}},
        "baseline": {"mechanism": control},
        "search": {"optimizer": {"learning_rate": ("log", *of.rates)}},
        "trials": of.trials,
        "seeds": of.seeds,
        "validation_percent": of.validation_percent,
    }
    if twice:
        arm = of.best or control
        fields["title"] = f"Whether trainings end: {arm}, for twice as many steps, on {data}"
        base.model.update(mechanisms[arm])
        levels = {"as long": {}, "twice as long": {"num_epochs": 2 * base.num_epochs}}
        fields |= {
            "factors": {"length": levels},
            "baseline": {"length": "as long"},
            "match": "nothing",
            "seeds": 6,
        }
    return ml_collections.ConfigDict(settings.defaults(settings.CompareSettings) | fields)


def _small(data: str, num_epochs: float, **sizes: int) -> ml_collections.ConfigDict:
    base = common.deit("multiplicative", "tiny", data)
    base.model.update(sizes)
    if data == "digits":
        base.update(num_epochs=num_epochs, eval_every_steps=170)
    else:
        common.shorten(base, num_epochs)
    base.checkpoint_every_steps = 1000
    base.init = "path"
    return base


def _cifar10() -> ml_collections.ConfigDict:
    base = cifar10_fast.get_config("cifar10")
    base.init = "path"
    return base


def _cmudict() -> ml_collections.ConfigDict:
    base = g2p.transduction("dot")
    base.update(init="path", checkpoint_every_steps=1000, eval_every_steps=473)
    base.data.eval_split = "test"
    return base


class _Set(NamedTuple):
    base: Callable[[], ml_collections.ConfigDict]
    trials: int
    seeds: int
    validation_percent: int = 10
    rates: tuple[float, float] = (3e-4, 1e-2)
    best: str = ""  # once it is known


_SETS = {
    "digits": _Set(
        lambda: _small("digits", 50.0, width=96, depth=6),
        trials=4,
        seeds=10,
        validation_percent=20,
        best="dense layers, adder scores",
    ),
    "fashion_mnist": _Set(
        lambda: _small("fashion_mnist", 5.0, width=64, depth=3, num_heads=2), trials=4, seeds=10
    ),
    "cifar10": _Set(_cifar10, trials=3, seeds=3, rates=(2e-3, 2e-2)),
    "cmudict": _Set(_cmudict, trials=3, seeds=3, validation_percent=0),
}
