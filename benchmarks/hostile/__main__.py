"""The command line: see the package's docstring."""

import argparse
import collections
import importlib
import inspect
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import benchmarks.hostile
from adder_flax.own_cache import processor_name
from benchmarks.hostile.case import ROOT, Case, Group, Observed, Verdict

GROUPS = tuple(
    sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if path.stem not in ("__init__", "__main__", "case") and not path.stem.startswith("_")
    )
)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.hostile.{name}")


def run_group(group: Group, *, seed: int, share: float) -> list[tuple[Case, Observed]]:
    """Runs a share of a group's cases and prints those that were not dealt with soundly."""
    results = []
    for case in group.cases(seed, max(1, round(group.count * share))):
        observed = case.run()
        if not observed.verdict.sound:
            print(
                f"{group.name}: {observed.verdict.value}: {case.fault.what}: {case.name}",
                observed.seen,
                sep="\n",
            )
            sys.stdout.flush()
        results.append((case, observed))
    return results


def count_row(name: str, results: Iterable[tuple[Case, Observed]]) -> str:
    """Returns a line of the table."""
    counts = collections.Counter(observed.verdict for _, observed in results)
    cells = [name, str(counts.total()), *(str(counts[verdict]) for verdict in Verdict)]
    return f"| {' | '.join(cells)} |"


def fault_rows(results: Iterable[tuple[Case, Observed]]) -> list[dict[str, Any]]:
    """Returns one record per fault: what it is, how often it was tried, how it ended, an example of
    what one sees."""
    rows: dict[str, dict[str, Any]] = {}
    for case, observed in results:
        row = rows.setdefault(
            case.fault.what, {"fault": case.fault.what, "kept": case.fault.kept, "tried": 0}
        )
        row["tried"] += 1
        row.setdefault("verdicts", collections.Counter())[observed.verdict.value] += 1
        if "seen" not in row and observed.seen:
            row["case"], row["seen"] = case.name, _anywhere(observed.seen)
    return list(rows.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the groups; returns 1 if any case was not dealt with soundly."""
    parser = argparse.ArgumentParser(
        description=benchmarks.hostile.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of each group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", default="", help="JSON file that keeps the rows of the groups that ran"
    )
    parser.add_argument("--page", default="", help="Markdown page to write from the record")
    options = parser.parse_args(arguments)
    sys.unraisablehook = lambda unraisable: None  # as in the product, see adder_flax.terminal
    record = (
        json.loads(Path(options.record).read_text())
        if options.record and Path(options.record).exists()
        else {}
    )
    unsound, table = 0, []
    for name in filter(None, options.groups.split(",")):
        group: Group = _module(name).GROUP
        began = time.monotonic()
        results = run_group(group, seed=options.seed, share=options.share)
        unsound += sum(not observed.verdict.sound for _, observed in results)
        table.append(count_row(name, results))
        record[name] = {
            "seed": options.seed,
            "tried": len(results),
            "seconds": round(time.monotonic() - began),
            "processor": processor_name(),
            "row": table[-1],
            "faults": fault_rows(results),
        }
        if options.record:
            Path(options.record).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(table_head(), *table, sep="\n")
    if options.page:
        Path(options.page).write_text(page(record))
    return int(unsound > 0)


def table_head() -> str:
    """Returns the head of the table of verdicts."""
    names = ["group", "tried", *(verdict.value for verdict in Verdict)]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def page(record: dict[str, Any]) -> str:
    """Returns the page "What can go wrong" as Markdown: per group, each fault, what one sees, what
    was kept."""
    lines = [
        "# What can go wrong",
        "",
        "Faults made on purpose, what one sees of each, and what is kept. `python -m "
        "benchmarks.hostile` makes them as",
        "often as the first table says, and writes this page. What must come of every one is one "
        "message (expected,",
        "got, how to fix it) and an exit code other than 0, or the right result; and nothing on "
        "disk is lost.",
        "[Operations](operations.md#when-something-breaks) says what to do in the cases that "
        "clusters bring.",
        "",
        table_head(),
        *(group["row"] for _, group in sorted(record.items())),
        "",
        f"Processor: {', '.join(sorted({group['processor'] for group in record.values()}))}.",
        "",
    ]
    for name, group in sorted(record.items()):
        summary = " ".join(inspect.getdoc(_module(name)).split("\n\n")[0].splitlines())
        lines += [f"## {name.capitalize()}", "", summary, ""]
        lines += [
            "| fault | tried | what one sees, for example | what is kept |",
            "|---|---|---|---|",
        ]
        for row in group["faults"]:
            seen = _cell(row["seen"]) if "seen" in row else "the right result"
            lines.append(
                f"| {_cell(row['fault'])} | {row['tried']} | {seen} | {_cell(row['kept'])} |"
            )
        lines.append("")
    return "\n".join(lines)


def _anywhere(text: str) -> str:
    """Returns a message without what is of the machine and the moment that it was seen on."""
    text = re.sub(rf"{tempfile.gettempdir()}/\w+", "…", text.replace(f"{ROOT}/", ""))
    return re.sub(r"process \d+ on \S+ since \S+ [\d:+]+", "process 4711 on node7 since …", text)


def _cell(text: str) -> str:
    """Returns a text as one table cell: one line, no bars, no markup, no more than a few lines
    long."""
    line = re.sub(r"([|*_$`])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")
    return line if len(line) <= 300 else line[:299] + "…"


if __name__ == "__main__":
    sys.exit(main())
