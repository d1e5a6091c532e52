"""The page of claims says what the reports say."""

import csv
import dataclasses
import json
import re

import numpy as np
import pytest

from adder_flax.report import claims, save_figure
from adder_flax.report._style import new_figure
from adder_flax.report.claims import claims_table, read_report, write_claims
from adder_flax.report.page import Claim


@pytest.fixture
def make_run(tmp_path):
    def make(mechanism, seed, verdicts, accuracy=0.9):
        workdir = tmp_path / f"{mechanism}{seed}"
        (workdir / "report" / "figures").mkdir(parents=True)
        rows = [
            Claim(name, "paper, part 1", f"‖q|k‖ of {name} is so.", verdict, f"{mechanism} {seed}", "long", "curve")
            for name, verdict in verdicts.items()
        ]
        with (workdir / "report" / "claims.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Claim)])
            writer.writeheader()
            writer.writerows(map(dataclasses.asdict, rows))
        (workdir / "config.json").write_text(json.dumps({"seed": seed, "model": {"score": mechanism}}))
        lines = [
            {"step": 1, "eval/accuracy": 0.1},
            {"step": 2, "eval/accuracy": accuracy},
            {"step": 2, "train/loss": 1},
        ]
        (workdir / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        figure, axes = new_figure(2, 2)
        axes[0, 0].imshow(np.eye(3))
        for name in ("curve", "maps"):
            save_figure(figure, workdir / "report" / "figures" / name, ("png",))
        return workdir

    return make


def cells(page, name):
    [row] = [line for line in page.splitlines() if line.startswith(f"| **{name}**")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_rows_count_seeds_and_tell_mechanisms_apart(make_run):
    runs = [
        make_run("adder", 0, {"a": "holds", "b": "does not hold", "c": "holds"}),
        make_run("adder", 1, {"a": "holds", "b": "holds", "c": "holds"}),
        make_run("dot", 0, {"a": "does not hold", "b": "not measured", "c": "holds"}),
    ]
    table = claims_table([read_report(run) for run in runs])
    statement, verdict, number, command, figure = cells(table, "a")
    assert statement == "**a**: ‖q&#124;k‖ of a is so.<br>*paper, part 1*"
    assert (verdict, number) == ("adder: holds<br>dot: does not hold", "adder: adder 0<br>dot: dot 0")
    assert (command, figure) == ("adder, dot", "[curve](images/claims/adder-curve.png)")
    assert cells(table, "b")[1:4] == ["does not hold (1 of 2 seeds); holds (1 of 2 seeds)", "adder 0", "adder"]
    assert cells(table, "c")[1] == "holds"


def test_page_has_its_figures_models_and_tally(make_run, tmp_path, capsys):
    runs = [
        make_run("adder", 0, {"a": "holds", "b": "not measured", "c": "holds"}, accuracy=0.975),
        make_run("dot", 0, {"a": "does not hold", "b": "holds only when small", "c": "holds"}),
    ]
    out = tmp_path / "docs" / "claims.md"
    claims.main([*map(str, runs), f"--out={out}"])
    assert capsys.readouterr().out.strip() == str(out)
    page = out.read_text()
    for count in (r"1 hold(?! under)", "1 differ between models", "1 hold under a condition"):
        assert re.search(count, page)
    assert "| adder | 0 | 0.9750 |" in page
    images = {path.name for path in (out.parent / "images" / "claims").iterdir()}
    assert images == {"adder-curve.png", "dot-curve.png", "adder-maps.png"}
    write_claims(runs[:1], out)
    assert "not measured" in cells(out.read_text(), "b")[1]
    assert {path.name for path in (out.parent / "images" / "claims").iterdir()} == {"adder-curve.png", "adder-maps.png"}


def test_a_run_without_a_report_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="--mode=analyze"):
        read_report(tmp_path)
    with pytest.raises(ValueError, match="at least one report"):
        claims_table([])
