"""The claims that a report judges, by family: found by name, in the order of the page."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from adder_flax.counting.energy import HOROWITZ_45NM
from adder_flax.registry import Registry
from adder_flax.report._study import DOES_NOT_HOLD, HOLDS, Claim, Findings, Study

Measure = Callable[[Any], Findings]


def only_when(condition: str) -> str:
    """The verdict on a claim that needs more than its source says."""
    return f"holds only when {condition}"


def spread(values: Any) -> str:
    """Median and range, for findings: "0.31 (0.12 to 0.58)"."""
    values = np.asarray(values, float)
    return f"{np.median(values):.3g} ({values.min():.3g} to {values.max():.3g})"


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page: its heading, the paragraph below, and where its claims are made."""

    title: str
    introduction: str
    source: str

    def claim(
        self,
        name: str,
        place: str,
        statement: str,
        verdict: bool | np.bool_ | str,
        number: str = "",
        finding: str = "",
        figure: str = "",
        margins: tuple[float, ...] = (),
    ) -> Claim:
        """Returns a claim (see `Claim`) that this section's source makes, at a ``place`` or as what
        is said in brackets; ``verdict`` is in words, or whether it holds.

        Example:
          >>> claim = ENERGY.claim("two", "page 2", "1 + 1 is 2.", 1 + 1 == 2, "2", "It is 2.")
          >>> claim.source, claim.verdict
          ('Adder attention, main text, page 2', 'holds')
        """
        source = f"{self.source}{' ' if place.startswith('(') else ', ' * bool(place)}{place}"
        if not isinstance(verdict, str):
            verdict = HOLDS if verdict else DOES_NOT_HOLD
        return Claim(name, source, statement, verdict, number, finding, figure, margins)


class Family(NamedTuple):
    """Claims of a section that are measured together, on a kind of study."""

    section: Section
    measure: Measure
    of: type


CLAIMS: Registry[Family] = Registry("family of claims", "adder_flax.report.register_claims")


def register_claims(
    name: str, section: Section, *, of: type = Study
) -> Callable[[Measure], Measure]:
    """Puts a family of claims into every report that is written from now on.

    It decorates the function that computes, judges and draws: ``measure(study) → Findings``.

    Args:
      name: of the family.
      section: one of the library's (`ADDER`, `ADDITIVE`, `BROWNIAN`, `ENERGY`) or your own.
      of: the kind of study that the function takes: `Study` of images by blocks of attention,
        `ImageStudy` of images by any model, `SequenceStudy`, or ``object`` for claims that are true
        or false whatever was looked at. Reports of other studies leave the family out.

    Raises:
      ValueError: another family has this name.

    Example:
      >>> with CLAIMS.temporary():
      ...
      ...     @register_claims("patience", Section("Waiting", "How long it took.", "proverb"))
      ...     def patience(study):
      ...         return Findings([], [])
      ...
      ...     "patience" in CLAIMS
      True
    """

    def register(measure: Measure) -> Measure:
        origin = measure.__module__, measure.__qualname__
        CLAIMS.register(name, Family(section, measure, of), origin=origin)
        return measure

    return register


ADDER = Section(
    "Adder attention",
    "Theorem 1 (the variance of the scores), Proposition 1 (what adding the identity map does to "
    "the singular values) and the maps themselves. The identity, where the model adds it, is taken "
    "off before anything is measured and put back where a figure says A + I.",
    "Adder attention, appendix",
)
ADDITIVE = Section(
    "Additive against multiplicative scores",
    "Expressive power on the XOR alignment task, where gradients vanish, and which parameters make "
    "no difference. The last are checked on this model's own queries, keys and weights.",
    "Additive vs. multiplicative attention",
)
BROWNIAN = Section(
    "The Brownian view",
    "LayerNorm puts tokens on a sphere, a row-normalised kernel walks between them, and blocks "
    "move them. Each step of the argument is measured by itself.",
    "Brownian motion in the transformer",
)
ALIGNMENT = Section(
    "Alignments",
    "Where a sequence model looks in its input for each symbol that it writes, the right symbols "
    "before it given; and the errors of what it writes by itself.",
    "Neural machine translation by jointly learning to align and translate",
)
ENERGY = Section(
    "Operations and energy",
    "Operations counted in the jaxpr of the forward pass for one image; energy modelled: "
    f"{HOROWITZ_45NM.name}. This is an ASIC's arithmetic. On a GPU an addition and a "
    "multiply-accumulate take the same issue slot.",
    "Adder attention, main text",
)
