"""Where second order ends beside first order, from the results of comparisons."""

import pytest

from adder_flax.report.claims import write_claims
from adder_flax.report.contests import contests_table, read_contest
from tests.report.test_claims import make_run  # noqa: F401 - a fixture


@pytest.fixture
def write_runs(tmp_path):
    def write(second, first, reached, column="test_accuracy"):
        folder = tmp_path / "compared"
        folder.mkdir(exist_ok=True)
        ours = enumerate(zip(second, reached, strict=True))
        rows = [f"cg,{seed},{score},170,{at}" for seed, (score, at) in ours]
        # In another order, with a seed that the other arm lacks.
        rows += [f"adam,{seed},{score},170," for seed, score in enumerate([*first, 0.0])][::-1]
        head = f"settings,seed,{column},steps,steps_to_target"
        (folder / "runs.csv").write_text("\n".join([head, *rows, ""]))
        return folder

    return write


FIRST = [0.8, 0.82, 0.81, 0.83, 0.79, 0.8, 0.81, 0.8, 0.82, 0.79]


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        # The exact test of ten pairs of one sign: p = 2 / 2¹⁰; fewer seeds decide nothing.
        ([0.1, 0.11, 0.12, 0.1, 0.13, 0.09, 0.1, 0.11, 0.12, 0.13], "holds"),
        ([-0.1, -0.11, -0.12, -0.1, -0.13, -0.09, *[-0.1] * 4], "does not hold"),
        ([0.1, -0.11, 0.12, -0.1, 0.13, -0.09, 0.1, 0.1, -0.1, 0.1], "not decided"),
        ([0.1, 0.11, 0.12, 0.1, 0.13, 0.09], "not decided"),
    ],
)
def test_a_higher_end_is_decided_by_interval_and_test(write_runs, gains, verdict):
    first = FIRST[: len(gains)]
    second = [score + gain for score, gain in zip(first, gains, strict=True)]
    folder = write_runs(second, first, [30, 20, "", 40, 50, 60, "", 20, 30, 40][: len(gains)])
    contest = read_contest(folder, "cg", "adam")
    assert contest.difference.mean == pytest.approx(sum(gains) / len(gains))
    [row] = contests_table([contest]).splitlines()[2:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[-1] == verdict
    assert cells[1] == f"170, {len(gains)}"
    # Of a run that never gets there nothing is known but that it takes longer.
    assert cells[-2] == ("45" if len(gains) == 6 else "40")


def test_p_values_are_those_of_all_arms_beside_the_first_order_one(write_runs):
    """Holm's: the smallest of 30 counts 30 times, 60 / 2¹⁰ in place of 2 / 2¹⁰."""
    folder = write_runs([score + 0.1 for score in FIRST], FIRST, [1] * 10)
    with (folder / "runs.csv").open("a") as file:
        for arm in range(29):  # no difference: up and down in turn
            for seed, score in enumerate(FIRST):
                file.write(f"arm{arm},{seed},{score + 0.01 * (-1) ** seed},170,\n")
    contest = read_contest(folder, "cg", "adam")
    assert contest.adjusted == pytest.approx(60 / 2**10)
    assert contest.verdict == "not decided"


@pytest.mark.parametrize(
    "reached", [["", 20, "", "", 50, "", "", "", 9, ""], [30, 20, "", "", 50, ""]]
)
def test_an_end_that_the_median_run_does_not_reach(write_runs, reached):
    """Of most seeds, or of half of them."""
    first = FIRST[: len(reached)]
    contest = read_contest(write_runs(first, first, reached), "cg", "adam")
    assert "| not reached |" in contests_table([contest])
    assert contest.verdict == "not decided"


def test_a_run_has_the_steps_of_one_that_did_not_diverge(write_runs):
    folder = write_runs(FIRST, FIRST, [1] * 10)
    lines = (folder / "runs.csv").read_text().replace("cg,0,0.8,170,", "cg,0,0.0,20,")
    (folder / "runs.csv").write_text(lines)
    assert "| 170, 10 |" in contests_table([read_contest(folder, "cg", "adam")])


def test_of_phonemes_the_share_that_is_right_counts(write_runs):
    fewer = [wrong - 0.1 for wrong in FIRST]
    folder = write_runs(fewer, FIRST, [1] * 10, "test_phoneme_error_rate")
    contest = read_contest(folder, "cg", "adam")
    assert contest.difference.mean == pytest.approx(0.1)
    assert contest.scores[0] == pytest.approx([1 - wrong for wrong in fewer])
    assert contest.verdict == "holds"


def test_the_page_shows_them(write_runs, make_run, tmp_path):  # noqa: F811 - the fixture
    contest = read_contest(write_runs(FIRST, FIRST, [1] * 10), "cg", "adam")
    out = tmp_path / "claims.md"
    page = write_claims([make_run("dot", 0, {"a": "holds"})], out, [contest]).read_text()
    assert "## Second order and accuracy" in page
    assert "[compared](../results/compared/results.md)" in page
    assert "Second order" not in write_claims([tmp_path / "dot0digitsauto"], out).read_text()


def test_what_cannot_be_compared_is_named(write_runs, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"runs\.csv, found none"):
        read_contest(tmp_path, "cg", "adam")
    with pytest.raises(ValueError, match="'soap'.*got the arms adam, cg"):
        read_contest(write_runs(FIRST, FIRST, [1] * 10), "soap", "adam")
    with pytest.raises(ValueError, match=r"accuracy or phoneme_error_rate in .*, got error"):
        read_contest(write_runs(FIRST, FIRST, [1] * 10, "test_error"), "cg", "adam")
