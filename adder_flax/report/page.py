"""The claims of three papers, measured on a model.

There are figures, data and one page to read from top to bottom.
"""

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template

import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from adder_flax.arrays import AnyArray
from adder_flax.errors import first_line
from adder_flax.report import document
from adder_flax.report import families as _families  # noqa: F401 - they register themselves
from adder_flax.report._families import CLAIMS, Section
from adder_flax.report._study import (
    HOLDS,
    NOT_MEASURED,
    AnyStudy,
    Claim,
    Findings,
    observe,
    study_images,
)
from adder_flax.report.second_order import SecondOrderStep
from adder_flax.text import printable


@dataclasses.dataclass(frozen=True)
class Report:
    """What :func:`write_report` leaves behind.

    Attributes:
      page: ``report.html``, self-contained.
      claims: every claim with its verdict, as in ``claims.csv``.
      files: all files written.
    """

    page: Path
    claims: Sequence[Claim]
    files: Sequence[Path]


def write_report(
    model: nnx.Module,
    images: Float[AnyArray, "image height width channels"],
    labels: Int[AnyArray, " image"],
    out_dir: str | Path,
    *,
    pictures: np.ndarray | None = None,
    label_names: Sequence[str] | None = None,
    name: str = "this model",
    baseline: nnx.Module | None = None,
    baseline_name: str = "the baseline",
    untrained: nnx.Module | None = None,
    second_order: Mapping[str, Sequence[SecondOrderStep]] | None = None,
    peak_learning_rate: float = float("nan"),
    families: Sequence[str] | None = None,
) -> Report:
    r"""Measures the papers' claims on a model and writes the report.

    ``out_dir`` gets ``report.html`` (figures inside, nothing from the network), ``figures/*.png``
    and ``*.svg``, ``data/*.csv`` or ``*.npz`` with the numbers behind each figure, and
    ``claims.csv``.

    Args:
      model: the model that the report is about.
      images: test images as the model expects them, normalised; 32 or so are enough for the
        averages over them.
      labels: their classes.
      out_dir: where to; made if needed, files of an earlier report are overwritten.
      pictures: the same images for people, uint8 or floats in [0, 1]; by default ``images``
        stretched to [0, 1].
      label_names: names of the classes, in captions.
      name: of the model.
      baseline: another model for the same images, for the claims that compare adder with
        multiplicative.
      baseline_name: its name.
      untrained: the same model before training, for the claims about what training changes.
      second_order: steps from :func:`second_order_along`, under a name for where in training they
        are, for the claim about the second-order term.
      peak_learning_rate: of the training, to which these steps are scaled.
      families: names of the families of claims to judge, by default all that are registered.

    Returns:
      Where the page is, and the claims.

    Raises:
      ValueError: if there are no images, or not as many labels, or scores whose rows of weights are
        no probabilities, or a family of that name.

    Example::

      report = write_report(
          model, normalize(images), labels, "report", pictures=images, untrained=fresh_model
      )
      print(*(f"{claim.name}: {claim.verdict}" for claim in report.claims), sep="\n")
    """
    study = study_images(
        observe(name, model, images),
        labels,
        baseline=None if baseline is None else observe(baseline_name, baseline, images),
        untrained=None if untrained is None else observe("untrained", untrained, images),
        pictures=(images - np.min(images)) / max(float(np.ptp(images)), 1e-12)
        if pictures is None
        else pictures,
        label_names=label_names,
        second_order=second_order or {},
        peak_learning_rate=peak_learning_rate,
    )
    return write_study(study, out_dir, families=families)


def write_study(
    study: AnyStudy, out_dir: str | Path, *, families: Sequence[str] | None = None
) -> Report:
    """Judges claims on what was observed, and writes the report as :func:`write_report` does.

    Args:
      study: of whatever kind.
      out_dir: where to; made if needed, files of an earlier report are overwritten.
      families: names of the families of claims to judge, by default all that are made for this kind
        of study.

    Raises:
      ValueError: if no family has such a name.
    """
    possible = [name for name in CLAIMS if isinstance(study, CLAIMS.get(name).of)]
    families = possible if families is None else families
    if others := [name for name in families if name in CLAIMS and name not in possible]:
        raise ValueError(
            f"expected families of claims that can be judged on {study.subject.name}, among "
            f"{', '.join(possible)}; got {', '.join(others)}, which look at something else; leave "
            "them out"
        )
    sections = _measure(study, families)
    out_dir = Path(out_dir)
    files = [
        path
        for found in sections.values()
        for picture in found.pictures
        for path in document.write_picture(picture, out_dir)
    ]
    claims = [claim for found in sections.values() for claim in found.claims]
    table = out_dir / "claims.csv"
    rows = [claim.row() for claim in claims]
    document.write_csv(table, {field: [row[field] for row in rows] for field in rows[0]})
    page = out_dir / "report.html"
    page.write_text(_page(study, sections, out_dir), encoding="utf-8")
    return Report(page, claims, [*files, table, page])


def _measure(study: AnyStudy, families: Iterable[str]) -> dict[Section, Findings]:
    """What the families find, by section of the page."""
    sections: dict[Section, list[Findings]] = {}
    for name in families:
        sections.setdefault(CLAIMS.get(name).section, []).append(_findings(name, study))
    return {
        section: Findings(
            [c for f in found for c in f.claims], [p for f in found for p in f.pictures]
        )
        for section, found in sections.items()
    }


def _findings(name: str, study: AnyStudy) -> Findings:
    """What a family finds: nothing, where it has nothing to work on, as on maps of a single token.

    The page says so.
    """
    family = CLAIMS.get(name)
    try:
        return family.measure(study)
    except Exception as error:  # as with the pictures of a run: the other families are worth having
        reason = printable(f"{type(error).__name__}: {first_line(error)}")
        finding = f"On this model its numbers cannot be computed ({reason})."
        statement = f"The claims of {name}."
        return Findings(
            [Claim(name, family.section.source, statement, NOT_MEASURED, "", finding)], []
        )


def _page(study: AnyStudy, sections: Mapping[Section, Findings], out_dir: Path) -> str:
    claims = [claim for found in sections.values() for claim in found.claims]
    kinds = [_kind(claim) for claim in claims]
    tally = ", ".join(
        f"{kinds.count(kind)} {words}"
        for kind, words in (
            ("yes", "hold"),
            ("partly", "hold only under a condition"),
            ("no", "do not hold"),
            ("open", "not measured"),
        )
        if kinds.count(kind)
    )
    body = _BODY.substitute(
        name=html.escape(study.subject.name),
        tally=tally,
        about=html.escape(study.about()),
        sections="\n".join(
            _section_html(section, found, out_dir) for section, found in sections.items()
        ),
    )
    return document.html_page(f"{study.subject.name}: claims and measurements", body, style=_STYLE)


def _kind(claim: Claim) -> str:
    if claim.verdict == HOLDS:
        return "yes"
    if claim.verdict == NOT_MEASURED:
        return "open"
    return "partly" if claim.verdict.startswith(HOLDS) else "no"


_SIGNS = {"yes": "✓", "partly": "◐", "no": "✗", "open": "–"}


def _section_html(section: Section, found: Findings, out_dir: Path) -> str:
    claims = "\n".join(_claim_html(claim) for claim in found.claims)
    pictures = "\n".join(document.picture_html(picture, out_dir) for picture in found.pictures)
    return (
        f"<section><h2>{html.escape(section.title)}</h2><p>{html.escape(section.introduction)}</p>"
        f'<ul class="claims">{claims}</ul>{pictures}</section>'
    )


def _claim_html(claim: Claim) -> str:
    kind = _kind(claim)
    number = f" · {html.escape(claim.number)}" if claim.number else ""
    link = f' <a href="#{claim.figure}">figure</a>' if claim.figure else ""
    return (
        f'<li class="{kind}" id="claim-{claim.name}"><p '
        f'class="statement">{html.escape(claim.statement)} <span '
        f'class="source">{html.escape(claim.source)}</span></p><p class="verdict"><span '
        f'aria-hidden="true">{_SIGNS[kind]}</span> '
        f"{html.escape(claim.verdict)}{number}</p>"
        f'<p class="finding">{html.escape(claim.finding)}{link}</p></li>'
    )


_STYLE = """
.tally { font-size: 1.1rem; font-weight: 600; }
ul.claims { list-style: none; padding: 0; }
ul.claims li { border-left: 5px solid; margin: 0 0 1rem; padding: .1rem 0 .1rem .8rem; }
ul.claims p { margin: 0 0 .2rem; }
ul.claims li.yes { border-color: #00694d; } ul.claims li.partly { border-color: #8a6d00; border-left-style: dashed; }
ul.claims li.no { border-color: #b03a00; border-left-style: double; } ul.claims li.open { border-color: #888; }
.statement { font-weight: 600; }
.source { font-weight: 400; font-size: .85rem; color: #555; }
.verdict { font-weight: 600; }
.yes .verdict { color: #00694d; } .partly .verdict { color: #6b5500; } .no .verdict { color: #a13500; }
.finding { font-size: .95rem; overflow-wrap: anywhere; }
"""  # noqa: E501 - lines of another language

_BODY = Template("""<h1>$name: what the papers claim and what is measured</h1>
<p class="tally">$tally.</p>
<p>$about.</p>
$sections
""")
