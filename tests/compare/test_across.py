"""One page over several comparisons."""

import numpy as np
import pytest

from adder_flax.compare import across
from adder_flax.paired import performance_profiles, profile_scores


@pytest.fixture
def write_runs(tmp_path):
    """Writes a comparison: by arm its test scores and steps to the target, one for each seed."""

    def write(name, arms, score="accuracy", seconds=None):
        folder = tmp_path / name
        folder.mkdir()
        rows = [f"optimizer,seed,test_{score},steps,steps_to_target"]
        for arm, runs in arms.items():
            rows += [f"{arm},{seed},{x},170,{at}" for seed, (x, at) in enumerate(runs)]
        (folder / "runs.csv").write_text("\n".join(rows))
        if seconds is not None:
            rows = ["arm,step_seconds,machine,timed"]
            for machine, arms in seconds.items():
                rows += [f"{arm},{second},{machine},today" for arm, second in arms.items()]
            (folder / across.TIMING).write_text("\n".join(rows))
        return folder

    return write


def lines_of(page, heading):
    """{arm: cells} of the table below a heading."""
    below = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in below.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


ADAM = [(0.7, 150), (0.8, 130), (0.9, "")]
MUON = [(0.9, 60), (0.9, 40), (0.9, 50)]


def test_results_in_their_usual_place_have_the_name_of_their_comparison(write_runs, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"on_{name}").mkdir()
    folders = [
        write_runs(f"on_{name}/results", {"adam": ADAM, "muon": MUON}) for name in ("one", "two")
    ]
    page = across.write_across(folders, tmp_path / "out", "All").read_text()
    assert "| arm | one | two |" in page


def test_tables_over_two_comparisons(write_runs, tmp_path):
    wrong = [(0.2, 100), (0.1, ""), (0.3, "")]
    worse = [(0.5, ""), (0.4, ""), (0.6, "")]
    folders = [
        write_runs(
            "on_digits",
            {"adam": ADAM, "muon": MUON, "soap": MUON, "lamb": [(1.0, 10), (1.0, 10)]},
            seconds={"a machine": {"adam": 0.1, "muon": 0.4, "soap": 0.4, "lamb": 0.4}},
        ),
        write_runs("on_words", {"adam": wrong, "muon": wrong, "sgd": worse}, "phoneme_error_rate"),
    ]
    page = across.write_across(folders, tmp_path / "out", "All").read_text()
    assert page.startswith("# All\n")
    assert "[digits](../on_digits/results.md)" in page
    ends = lines_of(page, "Where they end")
    # The smallest error is best, and of equal ones each.
    assert ends["adam"] == ["0.8", "**0.2**"]
    assert ends["muon"] == ["**0.9**", "**0.2**"]
    assert ends["sgd"] == ["not run", "0.5"]
    # Two seeds of three are no mean to compare.
    assert ends["lamb"] == ["not finished", "not run"]
    steps = lines_of(page, "Steps to the target")
    # The median of 150, 130 and never is 150; of 100, never and never it is never.
    assert steps["adam"] == ["150", "not reached"]
    assert steps["muon"] == ["**50**", "not reached"]
    seconds = lines_of(page, "Seconds to the target")
    assert seconds["adam"] == ["**15**"]
    assert seconds["muon"] == ["20"]
    assert "on a machine; today." in page
    assert "the share of 2 or 1 comparisons in which" in page
    # Only one of the two is ever reached: Muon is first there, SOAP beside it, AdamW at three times
    # their steps and, by the clock, first.
    overall = lines_of(page, "Over all of them")
    assert overall["muon"] == ["2 of 2", "1 of 2", "1.00", "0.500", "0 of 1", "1.33", "0.889"]
    assert overall["adam"] == ["2 of 2", "0 of 2", "3.00", "0.167", "1 of 1", "1.00", "1.000"]
    assert overall["soap"][:4] == ["1 of 2", "1 of 2", "1.00", "0.500"]
    # What two of its seeds say is neither its own cost nor a mark for the others.
    assert overall["lamb"][:4] == ["0 of 2", "0 of 2", "not reached", "0.000"]
    assert (tmp_path / "out" / "figures" / "profile.png").exists()


def test_seconds_of_each_machine(write_runs, tmp_path):
    """A comparison may be timed on several machines, and on each of them not every one."""
    arms, timed = {"adam": ADAM, "muon": MUON}, lambda muon: {"adam": 0.1, "muon": muon}
    folders = [
        write_runs("a", arms, seconds={"old": timed(0.2)}),
        write_runs("b", arms, seconds={"old": timed(0.5), "new": timed(1)}),
    ]
    page = across.write_across(folders, tmp_path / "out", "All").read_text()
    old, new = (lines_of(page, f"Seconds to the target on {name}") for name in ("old", "new"))
    assert (old["muon"], new["muon"]) == (["**10**", "25"], ["50"])
    assert (old["adam"], new["adam"]) == (["15", "**15**"], ["**15**"])
    # On the old one Muon is first and at 5/3 of the fewest, on the new one at 10/3: means of the
    # heights from 1 to 4 are (1 + 7/9) / 2 and 2/9.
    overall = lines_of(page, "Over all of them")
    assert overall["muon"][4:7] == ["1 of 2", "1.67", "0.889"]
    assert overall["muon"][7:] == ["0 of 1", "3.33", "0.222"]


def test_scores_are_the_area_below_the_profiles():
    rng = np.random.default_rng(0)
    costs = {name: [*rng.uniform(1, 9, 20), None] for name in "abc"}
    factors = np.linspace(1, 4, 30001)
    profiles = performance_profiles(costs, factors)
    for name, score in profile_scores(costs).items():
        assert score == pytest.approx(np.trapezoid(profiles[name], factors) / 3, abs=1e-3)
    assert set(profile_scores({"a": [None], "b": [None]}).values()) == {0.0}


def test_what_cannot_be_read_is_named(write_runs, tmp_path, capsys):
    with pytest.raises(ValueError, match="expected final runs in .*, got none"):
        across.write_across([write_runs("empty", {})], tmp_path / "out", "All")
    wrong = write_runs("wrong", {"adam": [("high", 3)]})
    with pytest.raises(SystemExit, match=r"error: expected numbers .*wrong.runs\.csv, got .*high"):
        across.main([str(wrong), "--out", str(tmp_path / "out")])
    odd = write_runs("odd", {"adam": ADAM}, "charm")
    with pytest.raises(ValueError, match=r"expected a score among accuracy.*, got charm"):
        across.write_across([odd], tmp_path / "out", "All")
    digits = write_runs("digits", {"adam": ADAM}, seconds={"here": {"adam": "soon"}})
    with pytest.raises(SystemExit, match=r"error: expected the columns arm, step_seconds"):
        across.main([str(digits), "--out", str(tmp_path / "out")])
    (digits / across.TIMING).write_text("arm,step_seconds,machine,timed\nmuon,1.0,here,now\n")
    with pytest.raises(ValueError, match="got no row of adam on here"):
        across.read_workload(digits)
    (digits / across.TIMING).write_text("arm,step_seconds,machine\nadam,1.0,here\n")
    with pytest.raises(ValueError, match="expected the columns .* and timed .*, got 'timed'"):
        across.read_workload(digits)
    (digits / across.TIMING).unlink()
    across.main([str(digits), "--out", str(tmp_path / "out")])
    assert "Seconds" not in (tmp_path / "out" / "results.md").read_text()
    assert capsys.readouterr().out.endswith("results.md\n")
