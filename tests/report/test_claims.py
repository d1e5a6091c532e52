"""The page of claims says what the reports say."""

import csv
import dataclasses
import json
import re

import pytest
from PIL import Image

from adder_flax import packed
from adder_flax.report import Claim, claims
from adder_flax.report.claims import by_model, claims_list, read_report, told_of, write_claims


@pytest.fixture
def make_run(tmp_path):
    def make(mechanism, seed, verdicts, accuracy=0.9, margins=(), data="digits", identity="auto"):
        workdir = tmp_path / f"{mechanism}{seed}{data}{identity}"
        (workdir / "report" / "figures").mkdir(parents=True)
        with (workdir / "report" / "claims.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Claim)])
            writer.writeheader()
            for name, verdict in verdicts.items():
                said = "paper, part 1", f"‖q|k‖ of {name} is so.", verdict, f"{mechanism} {seed}"
                writer.writerow(Claim(name, *said, "long", "curve", margins).row())
        model = {"score": mechanism, "identity": identity, "depth": 12, "width": 192}
        config = {"seed": seed, "model": model, "data": {"name": data, "eval_split": "eval"}}
        (workdir / "config.json").write_text(json.dumps(config))
        lines = [{"eval/accuracy": 0.1}, {"eval/accuracy": accuracy}, {"train/loss": 1}]
        (workdir / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        for name in ("curve", "maps"):
            Image.new("RGB", (9, 9)).save(workdir / "report" / "figures" / f"{name}.png")
        return workdir

    return make


def item(page, name):
    [line] = [line for line in page.splitlines() if line.startswith("- ") and f"`{name}`" in line]
    return line


def row(page, name):
    [line] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def verdicts(runs):
    """Of the claim a, by mechanism."""
    [told] = told_of([read_report(run) for run in runs])
    return told.verdicts


def test_claims_count_seeds_and_tell_mechanisms_apart(make_run):
    runs = [
        make_run("adder", 0, {"a": "holds", "b": "does not hold", "c": "holds"}),
        make_run("adder", 1, {"a": "holds", "b": "holds", "c": "holds"}),
        make_run("dot", 0, {"a": "does not hold", "b": "not measured", "c": "holds"}),
    ]
    told = told_of([read_report(run) for run in runs])
    page = claims_list(told)
    assert page.startswith("### paper\n\n- **Differs between models**: ‖q|k‖ of a is so. [`a`](")
    assert item(page, "a").endswith("[`a`](images/claims/adder-curve.png) (part 1)")
    assert "**Does not hold (1/2); holds (1/2)**: " in item(page, "b")
    assert "(part 1, adder 0)" in item(page, "b")
    assert "**Holds**: " in item(page, "c")
    assert row(by_model(told, "verdicts"), "a") == ["holds", "does not hold"]
    assert row(by_model(told, "numbers"), "c") == ["adder 0", "dot 0"]
    assert "| b |" not in by_model(told, "verdicts")
    assert by_model(told[1:2], "numbers") == ""


@pytest.mark.parametrize(
    ("margins", "verdict"),
    [
        # Student's interval of n numbers: mean ± t s/√n, t = 4.3027 of 2 degrees of freedom.
        ([1.0, 1.1, 1.2], "holds (margin 0.852 to 1.35)"),
        ([-1.0, -1.1, -1.2], "does not hold (margin -1.35 to -0.852)"),
        ([1.0, 1.1, -0.5], "not decided (margin -1.69 to 2.76)"),
        ([1.0], "not decided (1 seed)"),
    ],
)
def test_a_difference_is_decided_by_its_interval_over_the_seeds(make_run, margins, verdict):
    make = lambda seed, margin: make_run("adder", seed, {"a": "holds"}, margins=(margin,))
    assert verdicts([make(*given) for given in enumerate(margins)]) == {"adder": verdict}


def test_a_difference_of_two_margins_needs_both(make_run):
    second = {"dot": [2.0, 2.1, 2.2], "additive": [-2.0] * 3, "bilinear": [-0.9, 0.1, 1.1]}
    runs = [
        make_run(name, seed, {"a": "holds"}, margins=(1.0 + seed / 9, margin))
        for name, margins in second.items()
        for seed, margin in enumerate(margins)
    ]
    dot, additive, bilinear = (said.partition(" (")[0] for said in verdicts(runs).values())
    assert (dot, bilinear) == ("holds", "not decided")
    assert additive == "holds"  # decided apart: its own report says what it is


def test_seeds_data_sets_and_mechanisms_without_the_identity_are_told_apart(make_run, tmp_path):
    runs = [
        make_run("adder", 0, {"a": "holds"}),
        make_run("adder", 0, {"a": "holds"}, identity="off", data="fashion_mnist"),
        make_run("dot", 0, {"a": "does not hold"}, data="fashion_mnist"),
    ]
    other = make_run("adder", 1, {"a": "does not hold"})
    out = tmp_path / "docs" / "claims.md"
    assert "**1 differ between seeds.**" in write_claims([runs[0], other], out).read_text()
    page = write_claims(runs, out).read_text()
    head = "| adder on digits | adder without identity on fashion_mnist | dot on fashion_mnist |"
    assert f"| claim {head}" in page
    assert "| adder without identity on fashion_mnist | 0.9000 |" in page
    assert f"--workdir={runs[1]} --baseline={runs[2]}\n" in page
    assert (tmp_path / "docs" / "images" / "claims" / "adder_on_digits-curve.png").is_file()


def test_a_run_from_a_record_is_made_again_from_the_record(make_run, tmp_path, monkeypatch):
    run = make_run("dot", 0, {"a": "holds"})
    file = tmp_path / "results" / "mechanisms" / packed.NAME
    file.parent.mkdir(parents=True)
    packed.write_packed(file, {}, {run.name: {}})
    monkeypatch.chdir(tmp_path)
    record = f"{file.relative_to(tmp_path)}#{run.name}"
    page = write_claims([run], tmp_path / "docs" / "claims.md").read_text()
    first = f"python main.py --config={record} --config.data.eval_split=eval --workdir={run}\n"
    second = f"python main.py --mode=analyze --config={run / 'config.json'} --workdir={run}\n"
    assert first + second in page


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
    assert "| adder | 0.9750 |" in page
    assert "12 blocks of width 192; accuracy on test, by seed:" in page
    with pytest.raises(FileNotFoundError, match="--mode=analyze"):
        read_report(tmp_path)
    images = lambda: {path.name for path in (out.parent / "images" / "claims").iterdir()}
    assert images() == {"adder-curve.png", "dot-curve.png", "adder-maps.png"}
    # What "eval" stands for depends on the set.
    (runs[0] / "data.json").write_text(json.dumps({"train": [8.0], "validation": [4.0]}))
    write_claims(runs[:1], out)
    assert "; accuracy on validation, by seed:" in out.read_text()
    assert "**Not measured**" in item(out.read_text(), "b")
    assert images() == {"adder-curve.png", "adder-maps.png"}


def test_a_model_of_ones_own_has_neither_score_nor_blocks(make_run, tmp_path):
    run = make_run("dot", 0, {"a": "holds"})
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"model": {"name": "cnn", "width": 8}}))
    page = write_claims([run], tmp_path / "docs" / "claims.md").read_text()
    assert "\naccuracy on test, by seed:" in page
    assert "| cnn | 0.9000 |" in page
