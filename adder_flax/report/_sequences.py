"""What a report on sequences is made from: alignments, and errors with and without them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from adder_flax.arrays import AnyArray
from adder_flax.attention import capture_attention
from adder_flax.report._study import beside
from adder_flax.settings import AttentionSettings

if TYPE_CHECKING:
    from adder_flax.tasks import Transduction


@dataclasses.dataclass(frozen=True)
class SequenceSubject:
    """A sequence model at work on the words of a report.

    Attributes:
      name: in legends.
      alignments: how much of each source symbol each target symbol looks at, the right target
        given; rows sum to 1.
      edits: of what the model writes by itself to the closest right answer.
      uniform_edits: the same when every map is uniform over the source, None for a model without
        attention.
      phonemes: length of the closest right answer.
    """

    name: str
    alignments: Float[np.ndarray, "word target source"]
    edits: Int[np.ndarray, " word"]
    uniform_edits: Int[np.ndarray, " word"] | None
    phonemes: Int[np.ndarray, " word"]

    @property
    def error_rate(self) -> float:
        """Sum of edits over the sum of lengths."""
        return float(self.edits.sum() / self.phonemes.sum())


@dataclasses.dataclass(frozen=True)
class SequenceStudy:
    """All that a report on a sequence model is made from.

    Attributes:
      subject: the model that the report is about.
      baseline: another model on the same words, or None.
      untrained: the same model before training, or None.
      sources, targets: the words, and their first right answers, as symbols without filling and
        end.
    """

    subject: SequenceSubject
    baseline: SequenceSubject | None
    untrained: SequenceSubject | None
    sources: Sequence[tuple[str, ...]]
    targets: Sequence[tuple[str, ...]]

    def about(self) -> str:
        """Returns what was looked at, for the head of the page."""
        words, rate = f"measured on {len(self.sources)} words", self.subject.error_rate
        of_other = f" ({self.baseline.error_rate:.1%})" if self.baseline else ""
        other = beside(self.baseline, self.untrained, of_other)
        return ", ".join([f"{words} (phoneme error rate {rate:.1%})", *other])

    def alignments(self, subject: SequenceSubject) -> list[Float[np.ndarray, "target source"]]:
        """Returns the maps of a subject, a word's symbols long and wide."""
        pairs = zip(subject.alignments, self.targets, self.sources, strict=True)
        return [weights[: len(target), : len(source)] for weights, target, source in pairs]


def observe_sequences(
    name: str, model: nnx.Module, task: "Transduction", batch: Mapping[str, AnyArray]
) -> SequenceSubject:
    """Runs a sequence model on the words of a report."""
    from adder_flax.tasks import closest  # figures are drawn without what reads data

    source, first = task.inputs(batch)
    score = jax.jit(lambda model, source, right: closest(task.write(model, source), right))
    edits, phonemes = map(np.asarray, score(model, source, batch["references"]))
    uniform = with_uniform_maps(model)
    if uniform is not None:
        uniform = np.asarray(score(uniform, source, batch["references"])[0])
    alignments = np.asarray(capture_attention(model, source, first)[-1][:, 0], np.float64)
    return SequenceSubject(name, alignments, edits, uniform, phonemes)


def with_uniform_maps(model: nnx.Module) -> nnx.Module | None:
    """Returns a copy whose attention gives every key the same weight; None if it has no such layer.

    >>> from adder_flax.attention import SequenceAttention
    >>> model = SequenceAttention(4, 4, score="adder", rngs=nnx.Rngs(0))
    >>> query, key = np.ones((1, 2, 4)), np.arange(12.0).reshape(1, 3, 4)
    >>> bool(np.allclose(with_uniform_maps(model)(query, key), key.mean(-2)))
    True
    """
    model, found = nnx.clone(model), False
    modules: Any = nnx.iter_modules(model)
    for _, module in modules:
        if isinstance(settings := getattr(module, "settings", None), AttentionSettings):
            # Scores of any size vanish beside each other, and no mask does.
            found = True
            module.settings = dataclasses.replace(settings, temperature=1e30)
            module.log_temperature = nnx.data(None)
    return model if found else None
