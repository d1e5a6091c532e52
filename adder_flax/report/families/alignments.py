"""Alignments of sequences: if they move on, focus, are needed, carry over to long inputs."""

import numpy as np

from adder_flax.measures.maps import row_entropy
from adder_flax.report import _style
from adder_flax.report._families import ALIGNMENT, register_claims
from adder_flax.report._sequences import SequenceStudy, SequenceSubject
from adder_flax.report._study import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_MEASURED,
    TOLERANCE,
    Claim,
    Findings,
    Picture,
)
from adder_flax.report.figures import alignment_figure

_SOURCE = ALIGNMENT.source
_SHOWN = 6
_MONOTONIC = 0.9  # share of the steps: what "largely" is taken to mean
_FEW = 1 / 3  # of the symbols that are read


@register_claims("alignments", ALIGNMENT, of=SequenceStudy)
def judge(study: SequenceStudy) -> Findings:
    """Direction and width of alignments, errors with uniform ones, errors over the input length."""
    claims = [
        _monotonic_claim(study),
        _focus_claim(study),
        _needed_claim(study),
        _length_claim(study),
    ]
    subjects = [study.subject, *([study.baseline] if study.baseline else [])]
    return Findings(
        claims, [*(_alignment_picture(study, one) for one in subjects), _error_picture(study)]
    )


def moves_on(study: SequenceStudy, subject: SequenceSubject) -> float:
    """Returns the share of steps at which the expected source position rises.

    A step is from one target symbol to the next.
    """
    centres = [weights @ np.arange(weights.shape[1]) for weights in study.alignments(subject)]
    return float(np.mean(np.concatenate([np.diff(centre) > 0 for centre in centres])))


def width(study: SequenceStudy, subject: SequenceSubject) -> float:
    """Returns the median share of the source that a target symbol looks at.

    The share is exp(entropy of its row) / length.
    """
    shares = [
        np.exp(row_entropy(weights)) / weights.shape[1] for weights in study.alignments(subject)
    ]
    return float(np.median(np.concatenate(shares)))


def _others(study: SequenceStudy, measure, shown: str) -> str:
    """Returns the same number of the other models, for the end of a finding."""
    others = [one for one in (study.untrained, study.baseline) if one]
    return "".join(f"; {one.name}: {measure(study, one):{shown}}" for one in others)


def _monotonic_claim(study: SequenceStudy) -> Claim:
    share = moves_on(study, study.subject)
    return Claim(
        "alignment-monotonic",
        f"{_SOURCE}, section 5.2.1",
        "Alignments are largely monotonic.",
        HOLDS if share >= _MONOTONIC else DOES_NOT_HOLD,
        f"{share:.1%} of the steps",
        f"The expected position in the source rises at {share:.1%} of the steps from one symbol to "
        f"the next (largely: at least {_MONOTONIC:.0%}){_others(study, moves_on, '.1%')}.",
        "alignments",
    )


def _focus_claim(study: SequenceStudy) -> Claim:
    share = width(study, study.subject)
    return Claim(
        "alignment-focused",
        f"{_SOURCE}, section 5.2.1",
        "Each symbol that is written looks at a few of those that are read.",
        HOLDS if share <= _FEW else DOES_NOT_HOLD,
        f"{share:.1%} of the source",
        f"The median of exp(entropy of a row) is {share:.1%} of the length of the source (a few: "
        f"at most {_FEW:.0%}; one symbol of ten: 10 %){_others(study, width, '.1%')}.",
        "alignments",
    )


def _needed_claim(study: SequenceStudy) -> Claim:
    name, source = "alignment-needed", f"{_SOURCE}, section 3.1"
    statement = (
        "The decoder depends on its alignments: with uniform ones its errors at least double."
    )
    subject = study.subject
    if subject.uniform_edits is None:
        return Claim(
            name, source, statement, NOT_MEASURED, "", "0 layers whose maps could be replaced."
        )
    uniform = subject.uniform_edits.sum() / subject.phonemes.sum()
    return Claim(
        name,
        source,
        statement,
        HOLDS if uniform >= 2 * subject.error_rate else DOES_NOT_HOLD,
        f"{subject.error_rate:.1%} to {uniform:.1%}",
        f"Phoneme error rate {subject.error_rate:.1%} with its own maps, {uniform:.1%} when every "
        "map is uniform.",
        "errors-by-length",
    )


def _length_claim(study: SequenceStudy) -> Claim:
    subject, lengths = study.subject, np.array([len(source) for source in study.sources])
    short, long = np.quantile(lengths, [1 / 3, 2 / 3])
    rate = lambda chosen: float(subject.edits[chosen].sum() / subject.phonemes[chosen].sum())
    of_short, of_long = rate(lengths <= short), rate(lengths >= long)
    return Claim(
        "alignment-length",
        f"{_SOURCE}, section 5.1",
        "Long inputs are not turned into outputs with more errors than short ones.",
        HOLDS if of_long <= (1 + TOLERANCE) * of_short else DOES_NOT_HOLD,
        f"{of_short:.1%} to {of_long:.1%}",
        f"Phoneme error rate {of_short:.1%} for words of up to {short:.0f} letters, {of_long:.1%} "
        f"from {long:.0f} on.",
        "errors-by-length",
    )


def _alignment_picture(study: SequenceStudy, subject: SequenceSubject) -> Picture:
    chosen = sorted(range(min(100, len(study.sources))), key=lambda i: -len(study.sources[i]))[
        :_SHOWN
    ]
    maps = study.alignments(subject)
    sources, targets = ([words[i] for i in chosen] for words in (study.sources, study.targets))
    weights = [maps[i] for i in chosen]
    return Picture(
        "alignments" if subject is study.subject else "alignments-baseline",
        alignment_figure(sources, targets, weights, title=subject.name),
        f"Where {subject.name} looks (columns) while it is given the right symbols one by one "
        "(rows): the longest of a hundred words.",
        "Heat maps of alignments, one for each of six words.",
        {f"{i} {''.join(study.sources[i])}": maps[i] for i in chosen},
    )


def _error_picture(study: SequenceStudy) -> Picture:
    lengths = np.array([len(source) for source in study.sources])
    lines = {study.subject.name: (study.subject.edits, study.subject.phonemes)}
    if study.subject.uniform_edits is not None:
        lines["its maps made uniform"] = (study.subject.uniform_edits, study.subject.phonemes)
    if study.baseline is not None:
        lines[study.baseline.name] = (study.baseline.edits, study.baseline.phonemes)
    present = np.unique(lengths)
    data = {"letters": present, "words": np.array([(lengths == n).sum() for n in present])}
    figure, axes = _style.new_figure(5.4, 3.3)
    for style, (label, (edits, phonemes)) in zip(_style.LINES, lines.items(), strict=False):
        rates = np.array(
            [edits[lengths == n].sum() / phonemes[lengths == n].sum() for n in present]
        )
        axes[0, 0].plot(present, 100 * rates, **style, markersize=4, linewidth=1.3, label=label)
        data[label] = rates
    _style.whole_ticks(axes[0, 0])
    _style.dress(axes[0, 0], xlabel="letters of the word", ylabel="phoneme error rate (%)")
    _style.legend(axes[0, 0])
    return Picture(
        "errors-by-length",
        figure,
        "Errors over the length of the word, with the model's own alignments and with uniform "
        "ones.",
        "Lines of the phoneme error rate over the number of letters.",
        data,
    )
