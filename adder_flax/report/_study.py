"""What the sections of a report are given, and what they give back."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from adder_flax import recorder
from adder_flax.arrays import AnyArray
from adder_flax.attention import MultiHeadAttention, get_score
from adder_flax.measures._arrays import softmax
from adder_flax.measures.maps import has_identity, patch_grid, stochastic_part
from adder_flax.measures.spectrum import IdentityEffect, identity_effect
from adder_flax.report.captures import Capture, capture, tokens_in_front
from adder_flax.report.expansion import SecondOrderStep
from adder_flax.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOLDS = "holds"
DOES_NOT_HOLD = "does not hold"
NOT_MEASURED = "not measured"
NOT_DECIDED = "not decided"

TOLERANCE = 0.1
"""Below this share of its size a difference between two numbers of a model is not worth a "does not
hold"."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim of a paper, and what the numbers say to it.

    Attributes:
      name: short identifier, e.g. "proposition-1-rank".
      source: where the claim is made.
      statement: the claim.
      verdict: `HOLDS`, `DOES_NOT_HOLD`, `NOT_MEASURED` or "holds only when …".
      number: the one number that decides, for tables.
      finding: the numbers behind the verdict, in a sentence.
      figure: name of the figure that shows it, if there is one.
      margins: of a verdict on the difference of two trained models, the numbers that have to be
        positive for the claim to hold; over several trainings their intervals decide. Empty for
        other verdicts.
    """

    name: str
    source: str
    statement: str
    verdict: str
    number: str = ""
    finding: str = ""
    figure: str = ""
    margins: tuple[float, ...] = ()

    def row(self) -> dict[str, str]:
        """Returns the claim as a line of ``claims.csv``."""
        return vars(self) | {"margins": " ".join(repr(float(margin)) for margin in self.margins)}

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> "Claim":
        """Returns the claim that a line of ``claims.csv`` has.

        >>> claim = Claim("a", "paper", "It is so.", HOLDS, "1 > 0", margins=(1.0, -0.5))
        >>> Claim.from_row(claim.row()) == claim
        True
        """
        return cls(**{**row, "margins": tuple(map(float, row.get("margins", "").split()))})


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure with what it shows.

    Attributes:
      name: file name without suffix.
      caption, alt: what to see in it, and what it shows for those who do not see it.
      data: the numbers behind it: equally long columns become a CSV, anything else an NPZ.
    """

    name: str
    figure: "Figure"
    caption: str
    alt: str
    data: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Findings:
    """What a family of claims found, and the figures behind it."""

    claims: Sequence[Claim]
    pictures: Sequence[Picture]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model at work on the images of the report, by its name in legends."""

    name: str
    model: nnx.Module
    captured: Capture

    @property
    def maps(self) -> list[Float[np.ndarray, "image head token token"]]:
        """By block, the identity included where the model adds it."""
        return [block.map for block in self.captured.blocks]

    @functools.cached_property
    def walks(self) -> list[Float[np.ndarray, "image head token token"]]:
        """Attention maps by block without the identity, rows summing to 1."""
        return [stochastic_part(block) for block in self.maps]

    @functools.cached_property
    def effects(self) -> list[IdentityEffect]:
        """Spectra by block, of A and A + I."""
        return [identity_effect(block) for block in self.maps]

    @functools.cached_property
    def adds_identity(self) -> list[bool]:
        """By block, whether the model adds the identity map."""
        return [has_identity(block) for block in self.maps]

    @property
    def scores(self) -> list[str]:
        """Name of the score by block."""
        return [block.score for block in self.captured.blocks]

    def attention(self, index: int) -> MultiHeadAttention:
        """The attention module of a block."""
        wanted, modules = self.captured.blocks[index].path, nnx.iter_modules(self.model)
        return next(m for path, m in modules if ".".join(map(str, path)) == wanted)  # pyright: ignore

    @property
    def in_front(self) -> dict[str, Any]:
        """What figures have to know of the tokens in front of the patches."""
        return tokens_in_front(self.model)

    @property
    def prefix_tokens(self) -> int:
        """How many they are, the class token first."""
        return self.in_front["prefix_tokens"]

    @property
    def attends(self) -> bool:
        """Whether the model consists of blocks of attention, with maps, queries and tokens."""
        blocks = self.captured.blocks
        return bool(blocks) and all(block.tokens is not None for block in blocks)

    def blocks(self, *wanted: int) -> list[int]:
        """The wanted blocks, counted from 1 as in papers; if not all exist first, middle, last."""
        count = len(self.captured.blocks)
        found = [number - 1 for number in wanted if number <= count]
        return found if len(found) == len(wanted) else sorted({0, count // 2, count - 1})


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a classifier takes the images of a split for.

    Attributes:
      labels: true classes.
      records: their places in the split.
      names: of the classes.
      pictures: returns images as people see them, of these records.
    """

    probabilities: Float[np.ndarray, "image class"]
    labels: Int[np.ndarray, " image"]
    records: Int[np.ndarray, " image"]
    names: Sequence[str]
    pictures: Callable[[np.ndarray], np.ndarray]

    @functools.cached_property
    def predicted(self) -> Int[np.ndarray, " image"]:
        """The likeliest class of each image."""
        return self.probabilities.argmax(-1)

    @functools.cached_property
    def confidence(self) -> Float[np.ndarray, " image"]:
        """Its probability."""
        return self.probabilities.max(-1)


@dataclasses.dataclass(frozen=True)
class Probe:
    """A classifier under other parameters (a nested dict, as its own ``params``), on some images of
    these true classes.
    """

    params: Mapping[Any, Any]
    logits: Callable[[Mapping[Any, Any]], Float[np.ndarray, "image class"]]
    labels: Int[np.ndarray, " image"]

    def accuracy(self, params: Mapping[Any, Any]) -> float:
        """Returns the share of the images that is classified right with these parameters."""
        return float(np.mean(self.logits(params).argmax(-1) == self.labels))


def probe(
    model: nnx.Module,
    batches: Sequence[Float[AnyArray, "image height width channels"]],
    labels: Any,
) -> Probe:
    """Makes a `Probe` of a model, which is compiled once for images in batches of one size."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    answer = jax.jit(lambda params, images: nnx.merge(graphdef, params, rest)(images))

    def logits(changed: Mapping[Any, Any]) -> np.ndarray:
        state = jax.tree.map(lambda x: x, params)
        nnx.replace_by_pure_dict(state, dict(changed))
        return np.concatenate([np.asarray(answer(state, b), np.float32) for b in batches])

    return Probe(nnx.to_pure_dict(params), logits, np.asarray(labels))


@dataclasses.dataclass(frozen=True)
class ImageStudy:
    """What a report on a classifier of images is made from, whatever it consists of.

    Attributes:
      subject: the model that the report is about.
      baseline: another model on the same images, e.g. the multiplicative one.
      untrained: the same model before training.
      pictures: the images as people see them, uint8 or floats in [0, 1].
      captions: a line for each image.
      labels: true classes.
      answers: on these images, or on the whole split.
      probe: the subject under other parameters, on some images.
      second_order: expansions of the loss along training steps, by where in training they are.
      peak_learning_rate: of the subject's training; nan where nothing is known of it.
    """

    subject: Subject
    baseline: Subject | None
    untrained: Subject | None
    pictures: np.ndarray
    captions: Sequence[str]
    labels: Int[np.ndarray, " image"]
    answers: Answers
    probe: Probe
    second_order: Mapping[str, Sequence[SecondOrderStep]] = dataclasses.field(default_factory=dict)
    peak_learning_rate: float = float("nan")

    def about(self) -> str:
        """Returns what was looked at, for the head of the page."""
        answers = self.answers
        right, count = (answers.predicted == answers.labels).mean(), len(answers.labels)
        looked = f"claims measured on {len(self.labels)} images"
        said = f"{right:.2%} of {count} images classified right, {looked}"
        return ", ".join([*self._anatomy(), said, *beside(self.baseline, self.untrained)])

    def _anatomy(self) -> list[str]:
        return ["no blocks of attention: claims about maps are left out"]


def beside(baseline: Any, untrained: Any, said: str = "") -> list[str]:
    """What a subject is compared with, for the head of the page."""
    compared = [f"compared with {baseline.name}{said}"] if baseline else []
    return compared + (["and with its untrained self"] if untrained else [])


class Study(ImageStudy):
    """An `ImageStudy` of models of blocks of attention: with maps, queries, keys and tokens."""

    def _anatomy(self) -> list[str]:
        blocks, adds = self.subject.captured.blocks, self.subject.adds_identity
        added = "added" if all(adds) else "added in some blocks"
        return [
            f"{len(blocks)} blocks of {blocks[0].map.shape[1]} heads",
            f"{', '.join(dict.fromkeys(self.subject.scores))} score",
            f"identity map {added}" if any(adds) else "no identity map",
            f"{blocks[0].map.shape[-1]} tokens",
        ]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        tokens = self.subject.maps[0].shape[-1] - self.subject.prefix_tokens
        return patch_grid(self.pictures.shape[1:], tokens)

    @property
    def adder_and_dot(self) -> tuple[Subject, Subject] | None:
        """(adder, multiplicative) among subject and baseline, or None."""
        kinds = {frozenset(s.scores): s for s in (self.subject, self.baseline) if s}
        adder, dot = (kinds.get(frozenset({score})) for score in ("adder", "dot"))
        return (adder, dot) if adder and dot else None


def observe(
    name: str, model: nnx.Module, images: Float[AnyArray, "image height width channels"]
) -> Subject:
    """Runs a model on the images of a report."""
    if len(images) == 0:
        raise ValueError("expected at least one image, got none")
    require_probabilities(model, images)
    return Subject(name, model, capture(model, images))


def study_images(
    subject: Subject,
    labels: Int[AnyArray, " image"],
    probe: Probe,
    *,
    baseline: Subject | None,
    untrained: Subject | None,
    pictures: np.ndarray,
    label_names: Sequence[str] | None,
    second_order: Mapping[str, Sequence[SecondOrderStep]],
    peak_learning_rate: float,
    answers: Answers | None = None,
) -> ImageStudy:
    """Returns a `Study` if all models consist of blocks of attention, else an `ImageStudy`."""
    labels, pictures, logits = np.asarray(labels), np.asarray(pictures), subject.captured.logits
    count, classes = logits.shape
    if len(labels) != count:
        raise ValueError(f"expected one label for each of {count} images, got {len(labels)}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"expected labels of the model's {classes} classes, 0 to {classes - 1}, got "
            f"{labels.min()} to {labels.max()}"
        )
    if label_names is not None and len(label_names) != classes:
        raise ValueError(
            f"expected a name for each of the model's {classes} classes, got {len(label_names)}"
        )
    names = [printable(name, limit=60) for name in label_names or map(str, range(classes))]
    if answers is None:
        answers = Answers(softmax(logits), labels, np.arange(count), names, pictures.__getitem__)
    attend = all(model.attends for model in filter(None, (subject, baseline, untrained)))
    return (Study if attend else ImageStudy)(
        subject,
        baseline,
        untrained,
        pictures,
        [f"{names[a]}, seen as {names[b]}" for a, b in zip(labels, logits.argmax(-1), strict=True)],
        labels,
        answers,
        probe,
        {where: taken for where, taken in second_order.items() if taken},
        peak_learning_rate,
    )


def require_probabilities(model: nnx.Module, *inputs: Any) -> None:
    """Checks that rollout and walks can be made of a model, which may be abstract, as its inputs.

    Raises:
      ValueError: a score whose rows of weights are registered as anything else.
    """
    for record in recorder.describe({"attention": []}, model, *inputs):
        if not get_score(record.facts["score"]).rows_are_probability:
            raise ValueError(
                "expected scores whose rows of weights are probabilities, got "
                f"{record.facts['score']!r}, registered with rows_are_probability=False; look at "
                "its maps with capture_attention"
            )
