"""The table of all claims over several models.

It is made from the reports that ``--mode=analyze`` left in their directories.

    python -m adder_flax.report.claims runs/adder_deit_tiny runs/deit_tiny runs/additive_deit_tiny

Runs of one mechanism on one data set are counted together. Claims on the difference between two
mechanisms are decided by the interval of that difference over the seeds; all else is in the
reports.
"""

import argparse
import csv
import dataclasses
import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from adder_flax import packed
from adder_flax.extras import needs
from adder_flax.report._study import DOES_NOT_HOLD, HOLDS, NOT_DECIDED, NOT_MEASURED, Claim
from adder_flax.report.optimizers import Contest, contests_table, read_contest


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """The report of one run.

    Attributes:
      mechanism: name of its attention score, and that it goes without the identity map where others
        have it.
      data: name of its data set.
      size: number of blocks and their width.
      seed: of the run.
      split: on which it was evaluated along training.
      accuracy: of its last evaluation there, nan if none is recorded.
      claims: by name.
      directory: of the report.
    """

    mechanism: str
    data: str
    size: tuple[int, int]
    seed: int
    split: str
    accuracy: float
    claims: Mapping[str, Claim]
    directory: Path

    @property
    def workdir(self) -> Path:
        """The directory of the run."""
        return self.directory.parent


def read_report(workdir: str | Path) -> ModelReport:
    """Reads what ``--mode=analyze`` left in the directory of a run.

    Raises:
      FileNotFoundError: there is no report.
    """
    workdir = Path(workdir)
    table = workdir / "report" / "claims.csv"
    if not table.exists():
        raise FileNotFoundError(
            f"expected a report, {table}, found none; run main.py --mode=analyze on it first"
        )
    with table.open(encoding="utf-8") as file:
        claims = {row["name"]: Claim.from_row(row) for row in csv.DictReader(file)}
    config = json.loads((workdir / "config.json").read_text())
    model, of_data = config["model"], config["data"]
    return ModelReport(
        mechanism=_mechanism(model),
        data=of_data["name"],
        size=(model["depth"], model["width"]),
        seed=config["seed"],
        split="test" if of_data["eval_split"] == "eval" else of_data["eval_split"],
        accuracy=_accuracy(workdir),
        claims=claims,
        directory=table.parent,
    )


def _mechanism(model: Mapping[str, Any]) -> str:
    without = model["score"] == "adder" and model["identity"] == "off"
    return model["score"] + (" without identity" if without else "")


def _accuracy(workdir: Path) -> float:
    metrics = workdir / "metrics.jsonl"
    rows = (
        [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    )
    return next(
        (row["eval/accuracy"] for row in reversed(rows) if "eval/accuracy" in row), float("nan")
    )


def claims_table(reports: Sequence[ModelReport], figures: str = "images/claims") -> str:
    """The table as Markdown, one row a claim.

    Where models agree, a cell says so once; else it has a line for each mechanism. Over the seeds
    of a mechanism a verdict is counted, or decided by the interval of what decides it, and the
    number is that of the first.

    Args:
      reports: from :func:`read_report`; the first seed of each mechanism comes first.
      figures: where the figures are, seen from the table.

    Raises:
      ValueError: there are no reports.
    """
    if not reports:
        raise ValueError(
            "expected at least one report, got none. Pass the directories of analysed runs."
        )
    groups = _groups(reports)
    names = dict.fromkeys(name for report in reports for name in report.claims)
    lines = ["| claim | verdict | number | command | figure |", "|---|---|---|---|---|"]
    for name in names:
        lines.append(_row(name, groups, figures))
    return "\n".join(lines)


def _groups(reports: Sequence[ModelReport]) -> dict[str, list[ModelReport]]:
    """Reports by what the table calls their models.

    That is the mechanism, and the data set where there are several.
    """
    several = len({report.data for report in reports}) > 1
    groups: dict[str, list[ModelReport]] = {}
    for report in reports:
        groups.setdefault(report.mechanism + (f" on {report.data}" if several else ""), []).append(
            report
        )
    return groups


# Figures that no claim is decided by.
_GALLERY = {
    "class-attention": "Where the class token looks (the adder paper's figure 3), and rollout",
    "maps": "Whole attention maps (the adder paper's figure 2)",
    "diffusion": "Diffusion coordinates of an image's patches, and diffusion distances",
    "k-steps": "A walk from the class token after k steps",
    "operations": "Operations and energy of the parts of the network",
}


def _gallery(groups: Mapping[str, Sequence[ModelReport]], figures: str = "images/claims") -> str:
    group, [report, *_] = next(iter(groups.items()))
    return "\n\n".join(
        f"{text}, {group}:\n\n![{text}]({figures}/{_slug(group)}-{name}.png)"
        for name, text in _GALLERY.items()
        if (report.directory / "figures" / f"{name}.png").exists()
    )


def _slug(group: str) -> str:
    return re.sub(r"\W+", "_", group)


def _row(name: str, groups: Mapping[str, Sequence[ModelReport]], figures: str) -> str:
    made = {
        group: [r.claims[name] for r in reports if name in r.claims]
        for group, reports in groups.items()
    }
    found = {
        group: [claim for claim in claims if claim.verdict != NOT_MEASURED]
        for group, claims in made.items()
    }
    found = {group: claims for group, claims in found.items() if claims}
    claim = next(claims[0] for claims in (found or made).values() if claims)
    statement = f"**{claim.name}**: {claim.statement}<br>*{claim.source}*"
    figure = ""
    if claim.figure:
        owner = next(group for group in found or made)
        figure = f"[{claim.figure}]({figures}/{_slug(owner)}-{claim.figure}.png)"
    cells = [
        statement,
        _merged({group: _counted(claims) for group, claims in found.items()}) or NOT_MEASURED,
        _merged({group: claims[0].number for group, claims in found.items()}),
        "every one" if found.keys() == groups.keys() and len(found) > 3 else ", ".join(found),
        figure,
    ]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _verdict(claims: Sequence[Claim]) -> str | None:
    """The verdict on a claim over the seeds of a mechanism.

    It is None where the seeds differ and no interval decides.
    """
    intervals = _intervals(claims)
    if any(low <= 0 <= high for low, high in intervals):
        return NOT_DECIDED
    if intervals and len({low > 0 for low, _ in intervals}) == 1:
        return HOLDS if intervals[0][0] > 0 else DOES_NOT_HOLD
    verdicts = {claim.verdict for claim in claims}
    return verdicts.pop() if len(verdicts) == 1 else None


def _counted(claims: Sequence[Claim]) -> str:
    """The verdict, with the number of seeds that it rests on where these matter."""
    verdict, seeds = _verdict(claims), len(claims)
    if verdict is None:
        counts = Counter(claim.verdict for claim in claims)
        return "; ".join(
            f"{said} ({count} of {seeds} seeds)" for said, count in counts.most_common()
        )
    if seeds == 1:
        return f"{verdict} (1 seed)" if verdict == NOT_DECIDED else verdict
    if intervals := _intervals(claims):
        return (
            f"{verdict} ({seeds} seeds, margin "
            f"{', '.join(f'{low:.3g} to {high:.3g}' for low, high in intervals)})"
        )
    return f"{verdict} ({seeds} of {seeds} seeds)"


def _intervals(claims: Sequence[Claim]) -> list[tuple[float, float]]:
    """Of each margin over the seeds; none where a report has none."""
    return [
        _interval(margins) for margins in zip(*(claim.margins for claim in claims), strict=False)
    ]


def _interval(margins: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's interval of the mean of what seeds gave, the whole line for one seed.

    >>> [round(end, 3) for end in _interval([1.0, 2.0, 3.0])]
    [-0.484, 4.484]
    """
    if len(margins) < 2:
        return -math.inf, math.inf
    half = stats.t.ppf((1 + level) / 2, len(margins) - 1) * stats.sem(margins)
    return float(np.mean(margins) - half), float(np.mean(margins) + half)


def _merged(texts: Mapping[str, str]) -> str:
    """One text if all mechanisms have the same, else a line for each different one."""
    owners: dict[str, list[str]] = {}
    for mechanism, text in texts.items():
        owners.setdefault(text, []).append(mechanism)
    if len(owners) == 1:
        return next(iter(owners))
    return "<br>".join(f"{', '.join(mechanisms)}: {text}" for text, mechanisms in owners.items())


def write_claims(
    workdirs: Sequence[str | Path], out: str | Path, contests: Sequence[Contest] = ()
) -> Path:
    """Writes the page of claims and copies the figures it shows beside it, to ``images/claims``.

    Args:
      workdirs: of analysed runs.
      out: the Markdown file.
      contests: of second-order with first-order optimizers.

    Returns:
      ``out``.
    """
    reports, out = [read_report(workdir) for workdir in workdirs], Path(out)
    groups = _groups(reports)
    parts = dict(models=_models(reports), commands=_commands(groups), tally=_tally(groups))
    parts |= dict(table=claims_table(reports), gallery=_gallery(groups))
    page = _PAGE.format(**parts, contests=_contests(contests))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    images = out.parent / "images" / "claims"
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir(parents=True)
    first = {_slug(group): of_group[0] for group, of_group in groups.items()}
    for owner, figure in sorted(set(re.findall(r"\(images/claims/(\w+?)-([\w-]+)\.png\)", page))):
        _copy_small(
            first[owner].directory / "figures" / f"{figure}.png", images / f"{owner}-{figure}.png"
        )
    return out


def _contests(contests: Sequence[Contest]) -> str:
    return f"{_CONTESTS}\n\n{contests_table(contests)}\n" if contests else ""


def _copy_small(source: Path, target: Path) -> None:
    """Copies a picture with a palette.

    That is a third of the bytes, with no visible difference in figures of few colours.
    """
    with needs("report"):
        from PIL import Image

    with Image.open(source) as image:
        image.convert("RGB").quantize(256).save(target, optimize=True)


def _models(reports: Sequence[ModelReport]) -> str:
    lines = [
        "| attention | data | blocks, width | seed | accuracy | of the split |",
        "|---|---|---|---|---|---|",
    ]
    for report in reports:
        depth, width = report.size
        lines.append(
            f"| {report.mechanism} | {report.data} | {depth}, {width} | {report.seed} | "
            f"{report.accuracy:.4f} | {report.split} |"
        )
    return "\n".join(lines)


def _tally(groups: Mapping[str, Sequence[ModelReport]]) -> str:
    """How the claims stand, over all models that they were measured on."""
    kinds: Counter[str] = Counter()
    for name in dict.fromkeys(
        name for reports in groups.values() for report in reports for name in report.claims
    ):
        verdicts: set[str | None] = set()
        for reports in groups.values():
            claims = [report.claims[name] for report in reports if name in report.claims]
            if measured := [claim for claim in claims if claim.verdict != NOT_MEASURED]:
                verdicts.add(_verdict(measured))
        [kind] = verdicts if len(verdicts) == 1 else [None if verdicts else NOT_MEASURED]
        kind = "differ between models" if kind is None else kind
        kinds["hold under a condition" if kind.startswith("holds only") else kind] += 1
    return ", ".join(f"{count} {_PLURAL.get(kind, kind)}" for kind, count in kinds.most_common())


_PLURAL = {HOLDS: "hold", DOES_NOT_HOLD: "do not hold"}


def _commands(groups: Mapping[str, Sequence[ModelReport]]) -> str:
    """How the first run of each mechanism was trained and analysed.

    Differences are taken from the dot product's run of the same data and seed. A run that has the
    name of a comparison's record, in the folder results, was made from that record.
    """
    made_from = {
        name: f"{file}#{name}"
        for file in sorted(Path("results").glob(f"*/{packed.NAME}"))
        for name in packed.read_packed(file)[1]
    }
    every = [report for reports in groups.values() for report in reports]
    lines = []
    for group, [report, *_] in groups.items():
        analyse = f"--config={report.workdir / 'config.json'} --workdir={report.workdir}"
        record = made_from.get(report.workdir.name)
        rerun = f"--config={record} --config.data.eval_split=eval --workdir={report.workdir}"
        train = rerun if record else analyse
        dots = [
            r.workdir
            for r in every
            if (r.mechanism, r.data, r.seed) == ("dot", report.data, report.seed)
        ]
        baseline = f" --baseline={dots[0]}" if dots and report.mechanism.startswith("adder") else ""
        lines.append(
            f"- **{group}**: `python main.py {train}`, then `python main.py --mode=analyze "
            f"{analyse}{baseline}`"
        )
    return "\n".join(lines)


_PAGE = """# The papers' claims, measured

Every row is a claim of one of three papers: *Adder Attention for Vision Transformer* (appendix), *Additive vs.
multiplicative attention*, *The Brownian motion in the transformer model*. Its verdict is computed from the numbers,
which the report behind the command has in full. {tally}.

The models:

{models}

Commands for the first seed of each, by the name that the table has for them; `config.json` is what a run leaves of its
configuration:

{commands}

This page: `python -m adder_flax.report.claims` with the directories of these runs. Two studies train something of
their own: `python -m experiments.xor_alignment` and `python -m experiments.second_order`.

A number is "median (smallest to largest)" over blocks, images and heads unless it says what it is, and of the first
seed. Verdicts are counted over the seeds. The papers stated these claims before anything was measured, so intervals
decide: a difference between two mechanisms holds if Student's 95 % interval of its margin, over paired seeds, is above
zero, does not hold if it is below, and is not decided if it holds zero, as with one seed it always does.

{table}

{contests}
{gallery}
"""  # noqa: E501 - lines of another language

_CONTESTS = """## Second order and accuracy

*The Brownian motion in the transformer model*, section 3.3: "the second-order method is not only for fast convergence, but is
also for the high accuracy". That is a claim on where runs end: accuracy on the test images, in spelling the share of phonemes that are right.
Each row is the end of two schedules on paired seeds, with Student's interval of the difference and its p after Holm over the arms of that
comparison. The claim is decided by ten seeds or more and a p of at most 0.05; fewer seeds decide nothing.

None of the arms `defaults`, `clip` and `kfac…` is the paper's Algorithm 1: they form, average and invert Kronecker factors. Their settings were
found on these same networks."""  # noqa: E501 - lines of another language


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page for the directories on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m adder_flax.report.claims", description="Writes docs/claims.md."
    )
    parser.add_argument(
        "workdirs", nargs="+", help="directories of analysed runs, first seeds first"
    )
    parser.add_argument(
        "--out", default="docs/claims.md", help="the page; figures go to images/claims beside it"
    )
    parser.add_argument(
        "--second-order",
        nargs=3,
        action="append",
        default=[],
        metavar=("FOLDER", "SECOND", "FIRST"),
        help="results of a comparison, and its arms of second and of first order",
    )
    options: Any = parser.parse_args(argv)
    try:
        contests = [read_contest(*contest) for contest in options.second_order]
        print(os.fspath(write_claims(options.workdirs, options.out, contests)))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
