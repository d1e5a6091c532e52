"""The table of all claims over several models, from the reports that ``--mode=analyze`` left in their directories.

    python -m adder_flax.report.claims runs/adder_deit_tiny runs/deit_tiny runs/additive_deit_tiny

Runs that differ only in their seed are counted together. Nothing is computed here: every number is in a report.
"""

import argparse
import csv
import dataclasses
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adder_flax.extras import needs
from adder_flax.report._study import NOT_MEASURED, Claim


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """The report of one run.

    Attributes:
      mechanism: name of its attention score.
      seed: of the run.
      accuracy: of its last evaluation on the test split, nan if none is recorded.
      claims: by name.
      directory: of the report.
    """

    mechanism: str
    seed: int
    accuracy: float
    claims: Mapping[str, Claim]
    directory: Path


def read_report(workdir: str | Path) -> ModelReport:
    """Reads what ``--mode=analyze`` left in the directory of a run.

    Raises:
      FileNotFoundError: there is no report.
    """
    workdir = Path(workdir)
    table = workdir / "report" / "claims.csv"
    if not table.exists():
        raise FileNotFoundError(f"expected a report, {table}, found none; run main.py --mode=analyze on it first")
    with table.open(encoding="utf-8") as file:
        claims = {row["name"]: Claim(**row) for row in csv.DictReader(file)}
    config = json.loads((workdir / "config.json").read_text())
    return ModelReport(config["model"]["score"], config["seed"], _accuracy(workdir), claims, table.parent)


def _accuracy(workdir: Path) -> float:
    metrics = workdir / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return next((row["eval/accuracy"] for row in reversed(rows) if "eval/accuracy" in row), float("nan"))


def claims_table(reports: Sequence[ModelReport], figures: str = "images/claims") -> str:
    """The table as Markdown, one row a claim.

    Where models agree, a cell says so once; else it has a line for each mechanism. Over the seeds of a mechanism a
    verdict is counted, and the number is that of the first.

    Args:
      reports: from :func:`read_report`; the first seed of each mechanism comes first.
      figures: where the figures are, seen from the table.

    Raises:
      ValueError: there are no reports.
    """
    if not reports:
        raise ValueError("expected at least one report, got none. Pass the directories of analysed runs.")
    groups: dict[str, list[ModelReport]] = {}
    for report in reports:
        groups.setdefault(report.mechanism, []).append(report)
    names = dict.fromkeys(name for report in reports for name in report.claims)
    lines = ["| claim | verdict | number | command | figure |", "|---|---|---|---|---|"]
    for name in names:
        lines.append(_row(name, groups, figures))
    return "\n".join(lines)


# Figures that no claim is decided by.
_GALLERY = {
    "class-attention": "Where the class token looks (the adder paper's figure 3), and rollout",
    "maps": "Whole attention maps (the adder paper's figure 2)",
    "diffusion": "Diffusion coordinates of an image's patches, and diffusion distances",
    "k-steps": "A walk from the class token after k steps",
    "operations": "Operations and energy of the parts of the network",
}


def _gallery(report: ModelReport, figures: str = "images/claims") -> str:
    return "\n\n".join(
        f"{text}, {report.mechanism}:\n\n![{text}]({figures}/{report.mechanism}-{name}.png)"
        for name, text in _GALLERY.items()
        if (report.directory / "figures" / f"{name}.png").exists()
    )


def _row(name: str, groups: Mapping[str, Sequence[ModelReport]], figures: str) -> str:
    found = {
        mechanism: [report.claims[name] for report in group if report.claims[name].verdict != NOT_MEASURED]
        for mechanism, group in groups.items()
    }
    found = {mechanism: claims for mechanism, claims in found.items() if claims}
    claim = next(iter(found.values()))[0] if found else next(iter(groups.values()))[0].claims[name]
    statement = f"**{claim.name}**: {claim.statement}<br>*{claim.source}*"
    figure = ""
    if claim.figure:
        owner = next(mechanism for mechanism in found or groups)
        figure = f"[{claim.figure}]({figures}/{owner}-{claim.figure}.png)"
    cells = [
        statement,
        _merged({mechanism: _verdict(claims) for mechanism, claims in found.items()}) or NOT_MEASURED,
        _merged({mechanism: claims[0].number for mechanism, claims in found.items()}),
        ", ".join(found),
        figure,
    ]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _verdict(claims: Sequence[Claim]) -> str:
    counts = Counter(claim.verdict for claim in claims)
    if len(counts) == 1:
        return claims[0].verdict
    return "; ".join(f"{verdict} ({count} of {len(claims)} seeds)" for verdict, count in counts.most_common())


def _merged(texts: Mapping[str, str]) -> str:
    """One text if all mechanisms have the same, else a line for each different one."""
    owners: dict[str, list[str]] = {}
    for mechanism, text in texts.items():
        owners.setdefault(text, []).append(mechanism)
    if len(owners) == 1:
        return next(iter(owners))
    return "<br>".join(f"{', '.join(mechanisms)}: {text}" for text, mechanisms in owners.items())


def write_claims(workdirs: Sequence[str | Path], out: str | Path) -> Path:
    """Writes the page of claims and copies the figures it shows beside it, to ``images/claims``.

    Args:
      workdirs: of analysed runs.
      out: the Markdown file.

    Returns:
      ``out``.
    """
    reports, out = [read_report(workdir) for workdir in workdirs], Path(out)
    parts = dict(models=_models(reports), commands=_commands(reports), tally=_tally(reports))
    page = _PAGE.format(**parts, table=claims_table(reports), gallery=_gallery(reports[0]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    images = out.parent / "images" / "claims"
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir(parents=True)
    for mechanism, figure in sorted(set(re.findall(r"\(images/claims/(\w+?)-([\w-]+)\.png\)", page))):
        owner = next(report for report in reports if report.mechanism == mechanism)
        _copy_small(owner.directory / "figures" / f"{figure}.png", images / f"{mechanism}-{figure}.png")
    return out


def _copy_small(source: Path, target: Path) -> None:
    """Copies a picture with a palette: a third of the bytes, no visible difference in figures of few colours."""
    with needs("report"):
        from PIL import Image

    with Image.open(source) as image:
        image.convert("RGB").quantize(256).save(target, optimize=True)


def _models(reports: Sequence[ModelReport]) -> str:
    lines = ["| attention | seed | test accuracy |", "|---|---|---|"]
    lines += [f"| {report.mechanism} | {report.seed} | {report.accuracy:.4f} |" for report in reports]
    return "\n".join(lines)


def _tally(reports: Sequence[ModelReport]) -> str:
    """How the claims stand, each by the first model that it was measured on."""
    kinds: Counter[str] = Counter()
    for name in dict.fromkeys(name for report in reports for name in report.claims):
        verdicts = [report.claims[name].verdict for report in reports if name in report.claims]
        decided = set(verdicts) - {NOT_MEASURED}
        kind = "not measured" if not decided else decided.pop() if len(decided) == 1 else "differ between models"
        kinds["hold under a condition" if kind.startswith("holds only") else kind] += 1
    return ", ".join(f"{count} {_PLURAL.get(kind, kind)}" for kind, count in kinds.most_common())


_PLURAL = {"holds": "hold", "does not hold": "do not hold"}

_EXPERIMENTS = {"adder": "adder_deit_tiny", "dot": "deit_tiny", "additive": "additive_deit_tiny"}


def _commands(reports: Sequence[ModelReport]) -> str:
    lines = []
    for mechanism in dict.fromkeys(report.mechanism for report in reports):
        experiment = _EXPERIMENTS.get(mechanism, f"{mechanism}.py")
        baseline = " --baseline=runs/deit_tiny" if mechanism == "adder" else ""
        command = f"python main.py --mode=analyze --config=experiments/{experiment}.py{baseline}"
        lines.append(f"- **{mechanism}**: `{command}`")
    return "\n".join(lines)


_PAGE = """# The papers' claims, measured

Every row is a claim of one of three papers: *Adder Attention for Vision Transformer* (appendix), *Additive vs.
multiplicative attention*, *The Brownian motion in the transformer model*. Its verdict is computed from the numbers,
which the report behind the command has in full. {tally}.

Models: DeiT-Tiny (12 blocks, width 192) trained on scikit-learn's handwritten digits by the experiment of each
mechanism (`python main.py --config=experiments/adder_deit_tiny.py`, then `--config.seed=1` and so on).

{models}

Commands, by the name that the table has for them:

{commands}

This page: `python -m adder_flax.report.claims` with the directories of these runs. Two studies train something of
their own: `python -m experiments.xor_alignment` and `python -m experiments.second_order`.

A number is "median (smallest to largest)" over blocks, images and heads unless it says what it is, and of the first
seed; verdicts are counted over the seeds where these differ.

{table}

{gallery}
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page for the directories on the command line."""
    parser = argparse.ArgumentParser(prog="python -m adder_flax.report.claims", description="Writes docs/claims.md.")
    parser.add_argument("workdirs", nargs="+", help="directories of analysed runs, first seeds first")
    parser.add_argument("--out", default="docs/claims.md", help="the page; figures go to images/claims beside it")
    options: Any = parser.parse_args(argv)
    print(os.fspath(write_claims(options.workdirs, options.out)))


if __name__ == "__main__":
    main()
