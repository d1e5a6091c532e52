"""The claims of three papers, measured on a model, as one page to read from top to bottom."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from adder_flax.arrays import AnyArray
from adder_flax.errors import first_line
from adder_flax.report import _study, document
from adder_flax.report import families as _families  # noqa: F401 - they register themselves
from adder_flax.report._families import CLAIMS, Section
from adder_flax.report.expansion import SecondOrderStep
from adder_flax.text import printable

_Sections = Mapping[Section, tuple[Sequence[_study.Claim], Sequence[_study.Picture]]]


@dataclasses.dataclass(frozen=True)
class Report:
    """What :func:`write_report` leaves behind: ``report.html``, every claim with its verdict, as in
    ``claims.csv``, and all files written.
    """

    page: Path
    claims: Sequence[_study.Claim]
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
    """Measures the papers' claims on a model and writes the report.

    ``out_dir`` gets ``report.html`` (figures inside, nothing from the network), ``figures/*.png``
    and ``*.svg``, ``data/*.csv`` or ``*.npz`` with the numbers behind each figure, and
    ``claims.csv``.

    Args:
      model: the model that the report is about.
      images: test images as the model expects them, normalised; 32 or so are enough.
      labels: their classes.
      out_dir: where to; made if needed, files of an earlier report are overwritten.
      pictures: the same images for people, uint8 or floats in [0, 1]; by default ``images``
        stretched to [0, 1].
      label_names: names of the classes, in captions.
      name, baseline_name: of the models.
      baseline: another model for the same images, to compare with.
      untrained: the same model before training.
      second_order: steps from :func:`second_order_along`, by where in training they are.
      peak_learning_rate: of the training, to which these steps are scaled.
      families: names of the families of claims to judge, by default all that are registered.

    Raises:
      ValueError: if there are no images, or not as many labels, or other classes or names than the
        model has, or scores whose rows of weights are no probabilities, or a family of that name.

    Example::

      report = write_report(model, normalize(images), labels, "report", pictures=images)
      print([f"{claim.name}: {claim.verdict}" for claim in report.claims])
    """
    look = lambda name, model: None if model is None else _study.observe(name, model, images)
    if pictures is None:
        pictures = np.asarray(images - np.min(images)) / max(float(np.ptp(images)), 1e-12)
    study = _study.study_images(
        _study.observe(name, model, images),
        labels,
        _study.probe(model, [images], labels),
        baseline=look(baseline_name, baseline),
        untrained=look("untrained", untrained),
        pictures=pictures,
        label_names=label_names,
        second_order=second_order or {},
        peak_learning_rate=peak_learning_rate,
    )
    return write_study(study, out_dir, families=families)


def write_study(
    study: Any, out_dir: str | Path, *, families: Sequence[str] | None = None
) -> Report:
    """Judges claims on what was observed, and writes the report as :func:`write_report` does.

    Args:
      study: of whatever kind: its ``subject`` has a ``name``, and ``about()`` says what was looked
        at.
      out_dir: where to.
      families: by default all that are made for this kind of study.

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
    out_dir, sections = Path(out_dir), _measure(study, families)
    claims = [claim for of_section, _ in sections.values() for claim in of_section]
    pictures = [picture for _, of_section in sections.values() for picture in of_section]
    files = [path for picture in pictures for path in document.write_picture(picture, out_dir)]
    table, page = out_dir / "claims.csv", out_dir / "report.html"
    rows = [claim.row() for claim in claims]
    fields = [field.name for field in dataclasses.fields(_study.Claim)]
    document.write_csv(table, {field: [row[field] for row in rows] for field in fields})
    page.write_text(_page(study, sections, out_dir), encoding="utf-8")
    return Report(page, claims, [*files, table, page])


def _measure(study: Any, families: Sequence[str]) -> _Sections:
    sections: dict[Section, tuple[list[_study.Claim], list[_study.Picture]]] = {}
    for name in families:
        claims, pictures = sections.setdefault(CLAIMS.get(name).section, ([], []))
        found = _findings(name, study)
        claims += found.claims
        pictures += found.pictures
    return sections


def _findings(name: str, study: Any) -> _study.Findings:
    family = CLAIMS.get(name)
    try:
        return family.measure(study)
    # Such as on maps of a single token: the page says so, and the other families are worth having.
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {first_line(error)}")
        finding = f"On this model its numbers cannot be computed ({reason})."
        statement = f"The claims of {name}."
        return _study.Findings(
            [family.section.claim(name, "", statement, _study.NOT_MEASURED, "", finding)], []
        )


# {kind of verdict: (its sign, how many there are)}
_KINDS = {
    "yes": ("✓", "hold"),
    "partly": ("◐", "hold only under a condition"),
    "no": ("✗", "do not hold"),
    "open": ("–", "not measured"),
}


def _kind(claim: _study.Claim) -> str:
    kinds = {_study.HOLDS: "yes", _study.NOT_MEASURED: "open"}
    return kinds.get(claim.verdict, "partly" if claim.verdict.startswith(_study.HOLDS) else "no")


def _page(study: Any, sections: _Sections, out_dir: Path) -> str:
    count = Counter(_kind(claim) for claims, _ in sections.values() for claim in claims)
    tally = [f"{count[kind]} {of}" for kind, (_, of) in _KINDS.items() if count[kind]]
    shown = [
        (
            section,
            [(claim, _kind(claim), _KINDS[_kind(claim)][0]) for claim in claims],
            [document.picture_html(picture, out_dir) for picture in pictures],
        )
        for section, (claims, pictures) in sections.items()
    ]
    return document.render(
        "report.html",
        title=f"{study.subject.name}: claims and measurements",
        name=study.subject.name,
        tally=", ".join(tally) or "no claims",
        about=study.about(),
        sections=shown,
    )
