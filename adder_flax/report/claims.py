"""The page of all claims over several models, from the reports that ``--mode=analyze`` left.

    python -m adder_flax.report.claims runs/adder_deit_tiny runs/deit_tiny runs/additive_deit_tiny

Runs of one mechanism on one data set are counted together. Claims on the difference between two
mechanisms are decided by the interval of that difference over the seeds; all else is in the
reports.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from adder_flax import packed
from adder_flax.extras import needs
from adder_flax.report import document
from adder_flax.report._study import DOES_NOT_HOLD, HOLDS, NOT_DECIDED, NOT_MEASURED, Claim
from adder_flax.report.contests import Contest, contests_table, read_contest


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """The report of one run.

    Attributes:
      mechanism: name of its attention score, and that it goes without the identity map where others
        have it; of a model without a score its own.
      size: number of blocks and their width, nothing of a model without.
      accuracy: of its last evaluation on ``split``, nan if none is recorded.
      directory: of the report.
    """

    mechanism: str
    data: str
    size: str
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
    """Reads what ``--mode=analyze`` left in the directory of a run."""
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
    without = model.get("score") == "adder" and model["identity"] == "off"
    sized = "depth" in model and "width" in model
    return ModelReport(
        mechanism=model.get("score", model.get("name")) + (" without identity" if without else ""),
        data=of_data["name"],
        size="{depth} blocks of width {width}".format_map(model) if sized else "",
        seed=config["seed"],
        split=_split(workdir, of_data["eval_split"]),
        accuracy=_accuracy(workdir / "metrics.jsonl"),
        claims=claims,
        directory=table.parent,
    )


def _split(workdir: Path, name: str) -> str:
    """The split that a run was evaluated on: what "eval" stands for depends on the set."""
    marks = workdir / "data.json"
    if name != "eval":
        return name
    return [*json.loads(marks.read_text())][-1] if marks.exists() else "test"


def _accuracy(metrics: Path) -> float:
    rows = map(json.loads, metrics.read_text().splitlines() if metrics.exists() else [])
    return [math.nan, *(row["eval/accuracy"] for row in rows if "eval/accuracy" in row)][-1]


_Groups = Mapping[str, Sequence[ModelReport]]
_Made = dict[str, list[Claim]]  # a claim by the groups that have it


class Told(NamedTuple):
    """A claim with verdicts over the seeds of each mechanism, and numbers of the first of them."""

    name: str
    statement: str
    source: str
    verdicts: Mapping[str, str]
    numbers: Mapping[str, str]
    figure: str


def told_of(reports: Sequence[ModelReport]) -> list[Told]:
    """Returns every claim in the order in which it is met, the first seed of a mechanism first.

    Over the seeds of a mechanism a verdict is counted, or decided by the interval of what decides
    it.
    """
    return list(map(_told, _by_name(_groups(reports))))


def _told(made: _Made) -> Told:
    found = _measured(made)
    owner, (claim, *_) = next(iter((found or made).items()))
    return Told(
        claim.name,
        claim.statement,
        claim.source,
        {group: _counted(claims) for group, claims in found.items()},
        {group: claims[0].number for group, claims in found.items()},
        _figure(owner, claim.figure) if claim.figure else "",
    )


def claims_list(told: Sequence[Told]) -> str:
    """Returns a list of the claims of each paper as Markdown, the verdict first."""
    papers: dict[str, list[str]] = {}
    for each in told:
        paper, _, place = each.source.partition(", ")
        papers.setdefault(paper, []).append(_item(each, place))
    return "\n\n".join("\n".join((f"### {paper}", "", *of)) for paper, of in papers.items())


def _item(told: Told, place: str) -> str:
    verdicts = {said.partition(" (margin")[0] for said in told.verdicts.values()}
    numbers = set(told.numbers.values())
    verdict = verdicts.pop() if len(verdicts) == 1 else "differs between models"
    verdict = verdict if told.verdicts else NOT_MEASURED
    number = numbers.pop() if len(numbers) == 1 else ""
    behind = ", ".join(filter(None, (place, number)))
    said = f"**{verdict[0].upper()}{verdict[1:]}**: {told.statement}"
    name = f"[`{told.name}`]({told.figure})" if told.figure else f"`{told.name}`"
    return f"- {said} {name}" + (f" ({behind})" if behind else "")


def by_model(told: Sequence[Told], field: str) -> str:
    """Returns a table of the ``verdicts`` or ``numbers`` that differ, a column for each model."""
    # What blocks and images spread over is in the reports.
    short = lambda text: re.sub(r" \([^()]* to [^()]*\)", "", text)
    shown = short if field == "numbers" else str
    cells = {
        each.name: {model: shown(text) for model, text in getattr(each, field).items()}
        for each in told
    }
    cells = {name: found for name, found in cells.items() if len(set(found.values())) > 1}
    if not cells:
        return ""
    models = list(dict.fromkeys(itertools.chain.from_iterable(each.verdicts for each in told)))
    lines = [["claim", *models], ["---"] * (1 + len(models))]
    lines += [[name, *(found.get(m, "") for m in models)] for name, found in cells.items()]
    return "\n".join(f"| {' | '.join(c.replace('|', '&#124;') for c in line)} |" for line in lines)


def _by_name(groups: _Groups) -> list[_Made]:
    """Each claim in the reports of the groups, in the order in which they are met."""
    made: dict[str, _Made] = {}
    for group, reports in groups.items():
        for report in reports:
            for name, claim in report.claims.items():
                made.setdefault(name, {}).setdefault(group, []).append(claim)
    return list(made.values())


def _measured(made: _Made) -> _Made:
    wanted = lambda claim: claim.verdict != NOT_MEASURED
    return {group: found for group, of in made.items() if (found := [*filter(wanted, of)])}


def _groups(reports: Sequence[ModelReport]) -> dict[str, list[ModelReport]]:
    """Reports by mechanism, and by data set where there are several."""
    several = len({report.data for report in reports}) > 1
    groups: dict[str, list[ModelReport]] = {}
    for report in reports:
        name = report.mechanism + (f" on {report.data}" if several else "")
        groups.setdefault(name, []).append(report)
    return groups


# Figures that no claim is decided by.
_GALLERY = {
    "class-attention": "Where the class token looks (the adder paper's figure 3), and rollout",
    "maps": "Whole attention maps (the adder paper's figure 2)",
    "diffusion": "Diffusion coordinates of an image's patches, and diffusion distances",
    "k-steps": "A walk from the class token after k steps",
    "operations": "Operations and energy of the parts of the network",
}


def _gallery(groups: _Groups) -> list[tuple[str, str]]:
    group, [report, *_] = next(iter(groups.items()))
    return [
        (text, _figure(group, name))
        for name, text in _GALLERY.items()
        if (report.directory / "figures" / f"{name}.png").exists()
    ]


def _slug(group: str) -> str:
    return re.sub(r"\W+", "_", group)


def _figure(group: str, name: str) -> str:
    """Where a figure of a group's first run is, seen from the page."""
    return f"images/claims/{_slug(group)}-{name}.png"


def _verdict(claims: Sequence[Claim]) -> str | None:
    """The verdict over the seeds of a mechanism; None where they differ and no interval decides."""
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
    if seeds == 1:
        return f"{verdict} (1 seed)" if verdict == NOT_DECIDED else claims[0].verdict
    if verdict and (intervals := _intervals(claims)):
        margins = ", ".join(f"{low:.3g} to {high:.3g}" for low, high in intervals)
        return f"{verdict} (margin {margins})"
    counts = Counter(claim.verdict for claim in claims).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return "; ".join(f"{said} ({count}/{seeds})" for said, count in counts)


def _intervals(claims: Sequence[Claim]) -> list[tuple[float, float]]:
    """Student's, of each margin over the seeds, the whole line for one seed."""
    every = [*zip(*(claim.margins for claim in claims), strict=False)]
    if not every or len(claims) < 2:
        return [(-math.inf, math.inf)] * len(every)
    half = stats.t.ppf(0.975, len(claims) - 1) * stats.sem(every, axis=1)
    mean = np.mean(every, axis=1)
    return list(zip(mean - half, mean + half, strict=True))


def write_claims(
    workdirs: Sequence[str | Path], out: str | Path, contests: Sequence[Contest] = ()
) -> Path:
    """Writes the page of claims and copies the figures it shows beside it, to ``images/claims``."""
    reports, out = [read_report(workdir) for workdir in workdirs], Path(out)
    groups, told = _groups(reports), told_of(reports)
    page = document.render(
        "claims.md",
        models=[
            (group, ", ".join(f"{report.accuracy:.4f}" for report in of_group))
            for group, of_group in groups.items()
        ],
        size=", ".join(dict.fromkeys(report.size for report in reports if report.size)),
        data=" and ".join(dict.fromkeys(report.data for report in reports)),
        tally=_tally(groups),
        commands=_commands(groups),
        claims=claims_list(told),
        verdicts=by_model(told, "verdicts"),
        numbers=by_model(told, "numbers"),
        contests=contests_table(contests) if contests else "",
        gallery=_gallery(groups),
        first=next(iter(groups)),
        splits=", ".join(dict.fromkeys(report.split for report in reports)),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    images = out.parent / "images" / "claims"
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir(parents=True)
    with needs("report"):
        from PIL import Image
    first = {_slug(group): of_group[0].directory / "figures" for group, of_group in groups.items()}
    for owner, figure in sorted(set(re.findall(r"\(images/claims/(\w+?)-([\w-]+)\.png\)", page))):
        # With a palette, in figures of few colours a third of the bytes and no visible difference.
        with Image.open(first[owner] / f"{figure}.png") as image:
            small = image.convert("RGB").quantize(256)
            small.save(images / f"{owner}-{figure}.png", optimize=True)
    return out


def _tally(groups: _Groups) -> str:
    """How the claims stand, over all models that they were measured on."""
    kinds: Counter[str] = Counter()
    for made in _by_name(groups):
        verdicts = {_verdict(claims) for claims in _measured(made).values()} or {NOT_MEASURED}
        kind = verdicts.pop() or "differ between seeds"
        kind = "differ between models" if verdicts else kind
        kinds["hold under a condition" if kind.startswith("holds only") else kind] += 1
    return ", ".join(f"{count} {_PLURAL.get(kind, kind)}" for kind, count in kinds.most_common())


_PLURAL = {HOLDS: "hold", DOES_NOT_HOLD: "do not hold"}


def _commands(groups: _Groups) -> list[tuple[str, str, str]]:
    """How the first run of each mechanism was trained and analysed.

    Differences are taken from the dot product's run of the same data and seed. A run that has the
    name of a comparison's record, in the folder results, was made from that record.
    """
    made_from = {
        name: f"{file}#{name}"
        for file in sorted(Path("results").glob(f"*/{packed.NAME}"))
        for name in packed.read_packed(file)[1]
    }
    reports = reversed([*itertools.chain.from_iterable(groups.values())])  # the first ones win
    dots = {(r.data, r.seed): r.workdir for r in reports if r.mechanism == "dot"}
    lines = []
    for group, [report, *_] in groups.items():
        train = analyse = f"--config={report.workdir / 'config.json'} --workdir={report.workdir}"
        if record := made_from.get(report.workdir.name):
            train = f"--config={record} --config.data.eval_split=eval --workdir={report.workdir}"
        dot = dots.get((report.data, report.seed))
        if dot and report.mechanism.startswith("adder"):
            analyse += f" --baseline={dot}"
        lines.append((group, train, analyse))
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page for the directories on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m adder_flax.report.claims", description="Writes docs/claims.md."
    )
    add = parser.add_argument
    add("workdirs", nargs="+", help="directories of analysed runs, first seeds first")
    said = "the page; figures go to images/claims beside it"
    add("--out", default="docs/claims.md", help=said)
    names = {"nargs": 3, "action": "append", "metavar": ("FOLDER", "SECOND", "FIRST")}
    said = "results of a comparison, and its arms of second and of first order"
    add("--second-order", **names, default=[], help=said)
    options: Any = parser.parse_args(argv)
    try:
        contests = [read_contest(*contest) for contest in options.second_order]
        print(os.fspath(write_claims(options.workdirs, options.out, contests)))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
