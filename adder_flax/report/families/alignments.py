"""Reports on sequence models: whether alignments move on, focus, are needed, and carry over to long
inputs.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from adder_flax.arrays import AnyArray
from adder_flax.attention import capture_attention
from adder_flax.measures.maps import row_entropy
from adder_flax.report import _style
from adder_flax.report._families import ALIGNMENT, register_claims
from adder_flax.report._study import NOT_MEASURED, TOLERANCE, Claim, Findings, Picture, beside
from adder_flax.report.figures import alignment_figure
from adder_flax.settings import AttentionSettings

if TYPE_CHECKING:
    from adder_flax.tasks import Transduction

_SHOWN = 6
_MONOTONIC = 0.9  # share of the steps: what "largely" is taken to mean
_FEW = 1 / 3  # of the symbols that are read


@dataclasses.dataclass(frozen=True)
class SequenceSubject:
    """A sequence model at work on the words of a report.

    Attributes:
      name: in legends.
      alignments: what each target symbol looks at, the right target given; rows sum to 1.
      edits: of what the model writes by itself to the closest right answer.
      uniform_edits: the same with uniform maps, None for a model without attention.
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
    """All that a report on a sequence model, beside another and itself before training, has.

    Attributes:
      sources, targets: words and first right answers, as symbols without filling and end.
    """

    subject: SequenceSubject
    baseline: SequenceSubject | None
    untrained: SequenceSubject | None
    sources: Sequence[tuple[str, ...]]
    targets: Sequence[tuple[str, ...]]

    def about(self) -> str:
        """Returns what was looked at, for the head of the page."""
        rate = f"phoneme error rate {self.subject.error_rate:.1%}"
        of_other = f" ({self.baseline.error_rate:.1%})" if self.baseline else ""
        other = beside(self.baseline, self.untrained, of_other)
        return ", ".join([f"measured on {len(self.sources)} words ({rate})", *other])

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
    model = nnx.clone(model)
    modules: Any = [module for _, module in nnx.iter_modules(model)]
    layers = [m for m in modules if isinstance(getattr(m, "settings", None), AttentionSettings)]
    for layer in layers:
        # Scores of any size vanish beside each other, and no mask does.
        layer.settings = dataclasses.replace(layer.settings, temperature=1e30)
        layer.log_temperature = nnx.data(None)
    return model if layers else None


@register_claims("alignments", ALIGNMENT, of=SequenceStudy)
def judge(study: SequenceStudy) -> Findings:
    """Direction and width of alignments, errors with uniform ones, errors over the input length."""
    claims = [*_shape(study), _needed(study.subject), _length(study)]
    subjects = filter(None, (study.subject, study.baseline))
    pictures = [*(_alignment_picture(study, one) for one in subjects), _error_picture(study)]
    return Findings(claims, pictures)


def moves_on(study: SequenceStudy, subject: SequenceSubject) -> float:
    """Returns the share of steps at which the expected source position rises."""
    centres = [weights @ np.arange(weights.shape[1]) for weights in study.alignments(subject)]
    return float(np.mean(np.concatenate([np.diff(centre) > 0 for centre in centres])))


def width(study: SequenceStudy, subject: SequenceSubject) -> float:
    """Returns the median share of the source that a target symbol looks at, by exp(entropy)."""
    maps = study.alignments(subject)
    return float(np.median(np.concatenate([np.exp(row_entropy(m)) / m.shape[1] for m in maps])))


def _shape(study: SequenceStudy) -> list[Claim]:
    others = [one for one in (study.untrained, study.baseline) if one]
    also = lambda measure: "".join(f"; {one.name}: {measure(study, one):.1%}" for one in others)
    rising, wide = moves_on(study, study.subject), width(study, study.subject)
    return [
        ALIGNMENT.claim(
            "alignment-monotonic",
            "section 5.2.1",
            "Alignments are largely monotonic.",
            rising >= _MONOTONIC,
            f"{rising:.1%} of the steps",
            f"The expected position in the source rises at {rising:.1%} of the steps from one "
            f"symbol to the next (largely: at least {_MONOTONIC:.0%}){also(moves_on)}.",
            "alignments",
        ),
        ALIGNMENT.claim(
            "alignment-focused",
            "section 5.2.1",
            "Each symbol that is written looks at a few of those that are read.",
            wide <= _FEW,
            f"{wide:.1%} of the source",
            f"The median of exp(entropy of a row) is {wide:.1%} of the length of the source (a "
            f"few: at most {_FEW:.0%}; one symbol of ten: 10 %){also(width)}.",
            "alignments",
        ),
    ]


def _needed(subject: SequenceSubject) -> Claim:
    claim = functools.partial(
        ALIGNMENT.claim,
        "alignment-needed",
        "section 3.1",
        "The decoder depends on its alignments: with uniform ones its errors at least double.",
    )
    if subject.uniform_edits is None:
        return claim(NOT_MEASURED, finding="0 layers whose maps could be replaced.")
    uniform = subject.uniform_edits.sum() / subject.phonemes.sum()
    return claim(
        0 < uniform >= 2 * subject.error_rate,
        f"{subject.error_rate:.1%} to {uniform:.1%}",
        f"Phoneme error rate {subject.error_rate:.1%} with its own maps, {uniform:.1%} when every "
        "map is uniform.",
        "errors-by-length",
    )


def _length(study: SequenceStudy) -> Claim:
    subject, lengths = study.subject, np.array([len(source) for source in study.sources])
    short, long = np.quantile(lengths, [1 / 3, 2 / 3])
    rate = lambda chosen: float(subject.edits[chosen].sum() / subject.phonemes[chosen].sum())
    of_short, of_long = rate(lengths <= short), rate(lengths >= long)
    return ALIGNMENT.claim(
        "alignment-length",
        "section 5.1",
        "Long inputs are not turned into outputs with more errors than short ones.",
        of_long <= (1 + TOLERANCE) * of_short,
        f"{of_short:.1%} to {of_long:.1%}",
        f"Phoneme error rate {of_short:.1%} for words of up to {short:.0f} letters, {of_long:.1%} "
        f"from {long:.0f} on.",
        "errors-by-length",
    )


def _alignment_picture(study: SequenceStudy, subject: SequenceSubject) -> Picture:
    by_length = sorted(range(min(100, len(study.sources))), key=lambda i: -len(study.sources[i]))
    maps, chosen = study.alignments(subject), by_length[:_SHOWN]
    sources, targets = ([every[i] for i in chosen] for every in (study.sources, study.targets))
    return Picture(
        "alignments" if subject is study.subject else "alignments-baseline",
        alignment_figure(sources, targets, [maps[i] for i in chosen], title=subject.name),
        f"Where {subject.name} looks (columns) while it is given the right symbols one by one "
        "(rows): the longest of a hundred words.",
        "Heat maps of alignments, one for each of six words.",
        {f"{i} {''.join(study.sources[i])}": maps[i] for i in chosen},
    )


def _error_picture(study: SequenceStudy) -> Picture:
    subject, lengths = study.subject, np.array([len(source) for source in study.sources])
    edits = {subject.name: (subject.edits, subject.phonemes)}
    if subject.uniform_edits is not None:
        edits["its maps made uniform"] = (subject.uniform_edits, subject.phonemes)
    if study.baseline is not None:
        edits[study.baseline.name] = (study.baseline.edits, study.baseline.phonemes)
    present = np.unique(lengths)
    by_length = lambda counts: np.array([counts[lengths == n].sum() for n in present])
    rates = {name: by_length(wrong) / by_length(of) for name, (wrong, of) in edits.items()}
    figure, [[axis]] = _style.new_figure(5.4, 3.3)
    _style.draw_lines(axis, present, {name: 100 * rate for name, rate in rates.items()})
    _style.whole_ticks(axis)
    _style.dress(axis, "letters of the word", "phoneme error rate (%)", legend_at="best")
    return Picture(
        "errors-by-length",
        figure,
        "Errors over the length of the word, with the model's own alignments and with uniform "
        "ones.",
        "Lines of the phoneme error rate over the number of letters.",
        {"letters": present, "words": by_length(np.ones_like(lengths)), **rates},
    )
