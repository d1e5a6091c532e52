"""The page of all claims over several models, from the reports that ``--mode=analyze`` left.

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
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from adder_flax import packed
from adder_flax.extras import needs
from adder_flax.report import document
from adder_flax.report._study import DOES_NOT_HOLD, HOLDS, NOT_DECIDED, NOT_MEASURED, Claim
from adder_flax.report.contests import Contest, contests_table, read_contest

# Figures that no claim is decided by.
_GALLERY = {
    "class-attention": "Where the class token looks (the adder paper's figure 3), and rollout",
    "maps": "Whole attention maps (the adder paper's figure 2)",
    "diffusion": "Diffusion coordinates of an image's patches, and diffusion distances",
    "k-steps": "A walk from the class token after k steps",
    "operations": "Operations and energy of the parts of the network",
}


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """The report of one run.

    Attributes:
      mechanism: name of its attention score, and that it goes without the identity map where others
        have it; of a model without a score its own.
      size: number of blocks and their width, nothing of a model without.
      split: that it was evaluated on.
      accuracy: of its last evaluation, nan if none is recorded.
      workdir: of the run.
    """

    mechanism: str
    data: str
    size: str
    seed: int
    split: str
    accuracy: float
    claims: Mapping[str, Claim]
    workdir: Path


def read_report(workdir: str | Path) -> ModelReport:
    """Reads what ``--mode=analyze`` left in the directory of a run."""
    workdir = Path(workdir)
    table, metrics, marks = (
        workdir / name for name in ("report/claims.csv", "metrics.jsonl", "data.json")
    )
    if not table.exists():
        raise FileNotFoundError(
            f"expected a report, {table}, found none; run main.py --mode=analyze on it first"
        )
    with table.open(encoding="utf-8") as file:
        claims = {row["name"]: Claim.from_row(row) for row in csv.DictReader(file)}
    config = json.loads((workdir / "config.json").read_text())
    model, split = config["model"], config["data"]["eval_split"]
    if split == "eval":  # what it stands for depends on the set
        split = [*json.loads(marks.read_text())][-1] if marks.exists() else "test"
    without = model.get("score") == "adder" and model["identity"] == "off"
    sized = "depth" in model and "width" in model
    rows = map(json.loads, metrics.read_text().splitlines() if metrics.exists() else [])
    return ModelReport(
        mechanism=model.get("score", model.get("name")) + (" without identity" if without else ""),
        data=config["data"]["name"],
        size="{depth} blocks of width {width}".format_map(model) if sized else "",
        seed=config["seed"],
        split=split,
        accuracy=[math.nan, *(r["eval/accuracy"] for r in rows if "eval/accuracy" in r)][-1],
        claims=claims,
        workdir=workdir,
    )


_Groups = Mapping[str, Sequence[ModelReport]]


def _groups(reports: Sequence[ModelReport]) -> _Groups:
    """Reports by mechanism, and by data set where there are several."""
    several = len({report.data for report in reports}) > 1
    groups: dict[str, list[ModelReport]] = {}
    for report in reports:
        name = report.mechanism + (f" on {report.data}" if several else "")
        groups.setdefault(name, []).append(report)
    return groups


class Told(NamedTuple):
    """A claim, and what was found by each mechanism that it was measured on.

    Attributes:
      claim: as the first of them has it.
      figure: where it is, seen from the page.
      decided: verdicts over the seeds, None where they differ and no interval decides.
      verdicts: the same in words, with what they rest on.
      numbers: of the first seed.
    """

    claim: Claim
    figure: str
    decided: Mapping[str, str | None]
    verdicts: Mapping[str, str]
    numbers: Mapping[str, str]


def told_of(reports: Sequence[ModelReport]) -> list[Told]:
    """Returns every claim in the order in which it is met, the first seed of a mechanism first.

    Over the seeds of a mechanism a verdict is counted, or decided by the interval of what decides
    it.
    """
    made: dict[str, dict[str, list[Claim]]] = {}
    for group, of_group in _groups(reports).items():
        for report in of_group:
            for name, claim in report.claims.items():
                made.setdefault(name, {}).setdefault(group, []).append(claim)
    return [_told(groups) for groups in made.values()]


def _told(made: Mapping[str, Sequence[Claim]]) -> Told:
    measured = {g: [c for c in of if c.verdict != NOT_MEASURED] for g, of in made.items()}
    found = {group: claims for group, claims in measured.items() if claims}
    owner, (claim, *_) = next(iter((found or made).items()))
    verdicts = {group: _decide(claims) for group, claims in found.items()}
    return Told(
        claim,
        _figure(owner, claim.figure) if claim.figure else "",
        {group: verdict for group, (verdict, _) in verdicts.items()},
        {group: said for group, (_, said) in verdicts.items()},
        {group: claims[0].number for group, claims in found.items()},
    )


def _decide(claims: Sequence[Claim]) -> tuple[str | None, str]:
    """The verdict over the seeds of a mechanism, None where they differ and no interval decides;
    and how the page says it.
    """
    counts, intervals = Counter(claim.verdict for claim in claims), _intervals(claims)
    verdict = claims[0].verdict if len(counts) == 1 else None
    if any(low <= 0 <= high for low, high in intervals):
        verdict = NOT_DECIDED
    elif len({low > 0 for low, _ in intervals}) == 1:
        verdict = HOLDS if intervals[0][0] > 0 else DOES_NOT_HOLD
    if verdict and intervals:
        margins = ", ".join(f"{low:.3g} to {high:.3g}" for low, high in intervals)
        return verdict, f"{verdict} ({'1 seed' if len(claims) == 1 else f'margin {margins}'})"
    counted = (f"{said} ({count}/{len(claims)})" for said, count in counts.most_common())
    return verdict, verdict or "; ".join(counted)


def _intervals(claims: Sequence[Claim]) -> list[tuple[float, float]]:
    """Student's, of each margin over the seeds, the whole line for one seed."""
    every = [*zip(*(claim.margins for claim in claims), strict=False)]
    if not every or len(claims) < 2:
        return [(-math.inf, math.inf)] * len(every)
    half = stats.t.ppf(0.975, len(claims) - 1) * stats.sem(every, axis=1)
    mean = np.mean(every, axis=1)
    return list(zip(mean - half, mean + half, strict=True))


def claims_list(told: Sequence[Told]) -> str:
    """Returns a list of the claims of each paper as Markdown, the verdict first."""
    papers: dict[str, list[str]] = {}
    for each in told:
        paper, _, place = each.claim.source.partition(", ")
        papers.setdefault(paper, []).append(_item(each, place))
    return "\n\n".join("\n".join((f"### {paper}", "", *of)) for paper, of in papers.items())


def _item(told: Told, place: str) -> str:
    verdicts = {said.partition(" (margin")[0] for said in told.verdicts.values()} or {NOT_MEASURED}
    verdict = verdicts.pop() if len(verdicts) == 1 else "differs between models"
    numbers = set(told.numbers.values())
    behind = ", ".join(filter(None, (place, numbers.pop() if len(numbers) == 1 else "")))
    said = f"**{verdict[0].upper()}{verdict[1:]}**: {told.claim.statement}"
    name = f"[`{told.claim.name}`]({told.figure})" if told.figure else f"`{told.claim.name}`"
    return f"- {said} {name}" + (f" ({behind})" if behind else "")


def by_model(told: Sequence[Told], field: str) -> str:
    """Returns a table of the ``verdicts`` or ``numbers`` that differ, a column for each model."""
    # What blocks and images spread over is in the reports.
    short = lambda text: re.sub(r" \([^()]* to [^()]*\)", "", text) if field == "numbers" else text
    cells = {
        each.claim.name: {model: short(text) for model, text in getattr(each, field).items()}
        for each in told
    }
    cells = {name: found for name, found in cells.items() if len(set(found.values())) > 1}
    if not cells:
        return ""
    models = list(dict.fromkeys(model for each in told for model in each.verdicts))
    lines = [["claim", *models], ["---"] * (1 + len(models))]
    lines += [[name, *(found.get(m, "") for m in models)] for name, found in cells.items()]
    return "\n".join(f"| {' | '.join(c.replace('|', '&#124;') for c in line)} |" for line in lines)


def _slug(group: str) -> str:
    return re.sub(r"\W+", "_", group)


def _figure(group: str, name: str) -> str:
    """Where a figure of a group's first run is, seen from the page."""
    return f"images/claims/{_slug(group)}-{name}.png"


def write_claims(
    workdirs: Sequence[str | Path], out: str | Path, contests: Sequence[Contest] = ()
) -> Path:
    """Writes the page of claims and copies the figures it shows beside it, to ``images/claims``."""
    reports, out = [read_report(workdir) for workdir in workdirs], Path(out)
    groups, told = _groups(reports), told_of(reports)
    figures = {group: of[0].workdir / "report" / "figures" for group, of in groups.items()}
    first = next(iter(groups))
    each = lambda values: dict.fromkeys(filter(None, values))
    page = document.render(
        "claims.md",
        models=[
            (group, ", ".join(f"{report.accuracy:.4f}" for report in of_group))
            for group, of_group in groups.items()
        ],
        size=", ".join(each(report.size for report in reports)),
        data=" and ".join(each(report.data for report in reports)),
        tally=_tally(told),
        commands=_commands(groups),
        claims=claims_list(told),
        verdicts=by_model(told, "verdicts"),
        numbers=by_model(told, "numbers"),
        contests=contests_table(contests) if contests else "",
        gallery=[
            (text, _figure(first, name))
            for name, text in _GALLERY.items()
            if (figures[first] / f"{name}.png").exists()
        ],
        first=first,
        splits=", ".join(each(report.split for report in reports)),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    images = out.parent / "images" / "claims"
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir(parents=True)
    with needs("report"):
        from PIL import Image
    owners = {_slug(group): folder for group, folder in figures.items()}
    for owner, figure in sorted(set(re.findall(r"\(images/claims/(\w+?)-([\w-]+)\.png\)", page))):
        # With a palette, in figures of few colours a third of the bytes and no visible difference.
        with Image.open(owners[owner] / f"{figure}.png") as image:
            small = image.convert("RGB").quantize(256)
            small.save(images / f"{owner}-{figure}.png", optimize=True)
    return out


def _tally(told: Sequence[Told]) -> str:
    """How the claims stand, over all models that they were measured on."""
    kinds: Counter[str] = Counter()
    for each in told:
        verdicts = set(each.decided.values()) or {NOT_MEASURED}
        kind = verdicts.pop() or "differ between seeds"
        kind = "differ between models" if verdicts else kind
        kinds["hold under a condition" if kind.startswith("holds only") else kind] += 1
    plural = {HOLDS: "hold", DOES_NOT_HOLD: "do not hold"}
    return ", ".join(f"{count} {plural.get(kind, kind)}" for kind, count in kinds.most_common())


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
    reports = [report for of_group in groups.values() for report in of_group]
    # Of several the first one.
    dots = {(r.data, r.seed): r.workdir for r in reversed(reports) if r.mechanism == "dot"}
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
