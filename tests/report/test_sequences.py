"""Reports on sequence models: numbers of alignments by hand, uniform maps, a run analysed from end
to end."""

import csv

import jax
import numpy as np
import pytest
from flax import nnx

from adder_flax import attention, data, report, tasks, training
from adder_flax.app import modes
from adder_flax.data._sequences import pad
from adder_flax.experiments import g2p
from adder_flax.models import Seq2Seq
from adder_flax.report.families import alignments
from adder_flax.training import Trainer, build_run
from tests.data.files import write_dictionary
from tests.tasks.test_transduction import by_recursion


def study_of(maps, *, edits=(0, 4), uniform=(4, 4), phonemes=(4, 8), letters=(2, 3)):
    """Two words, with the first map cut out of a larger array."""
    weights = np.zeros((2, 4, 5))
    for row, given in zip(weights, maps, strict=True):
        row[: len(given), : len(given[0])] = given
    counts = map(np.array, (edits, uniform, phonemes))
    subject = alignments.SequenceSubject("x", weights, *counts)
    sources = [tuple("abcde"[:n]) for n in letters]
    targets = [tuple("ABCD"[: len(given)]) for given in maps]
    return alignments.SequenceStudy(subject, None, None, sources, targets)


EVEN, FIRST, LAST = [0.5, 0.5], [1.0, 0.0], [0.0, 1.0]


def test_numbers_of_alignments_are_those_by_hand():
    study = study_of(
        [[FIRST, EVEN, LAST], [[1.0, 0, 0], [0, 0, 1.0], [0, 1.0, 0], [0, 1 / 2, 1 / 2]]]
    )
    # Centres 0, ½, 1 and 0, 2, 1, 1½: of five steps one goes back.
    assert alignments.moves_on(study, study.subject) == pytest.approx(4 / 5)
    # Shares 1/2, 2/2, 1/2 and 1/3, 1/3, 1/3, 2/3.
    assert alignments.width(study, study.subject) == pytest.approx(1 / 2)
    assert study.subject.error_rate == pytest.approx(4 / 12)
    verdicts = {claim.name: claim.verdict for claim in alignments.judge(study).claims}
    assert verdicts == {
        "alignment-monotonic": report.DOES_NOT_HOLD,
        "alignment-focused": report.DOES_NOT_HOLD,
        "alignment-needed": report.HOLDS,  # 4 of 12 to 8 of 12
        "alignment-length": report.DOES_NOT_HOLD,  # 0 of 4 for two letters, 4 of 8 for three
    }


def test_verdicts_turn_with_the_numbers():
    study = study_of([[FIRST, LAST], [[1.0, 0, 0], [0, 1.0, 0]]], edits=(1, 2), uniform=(2, 3))
    verdicts = [claim.verdict for claim in alignments.judge(study).claims]
    assert verdicts == ["holds", "does not hold", "does not hold", "holds"]
    # Without any error alignments are not needed.
    study = study_of([[FIRST, LAST], [FIRST, LAST]], edits=(0, 0), uniform=(0, 0), letters=(2, 2))
    found = {claim.name: claim.verdict for claim in alignments.judge(study).claims}
    assert found["alignment-needed"] == report.DOES_NOT_HOLD


@pytest.mark.parametrize("temperature", [0.7, "learned"])
def test_uniform_maps_keep_the_mask(temperature):
    options = dict(score="dot", temperature=temperature, rngs=nnx.Rngs(0))
    layer = attention.SequenceAttention(4, 4, **options)
    normal = lambda n: np.random.default_rng(n).standard_normal((2, 3 + n, 4)).astype(np.float32)
    query, key = normal(0), normal(1)
    mask = np.arange(4) < np.array([[2], [4]])
    uniform = alignments.with_uniform_maps(layer)
    _, weights = uniform(query, key, mask=mask[:, None], return_weights=True)
    expected = np.broadcast_to(mask[:, None] / mask.sum(-1)[:, None, None], (2, 3, 4))
    np.testing.assert_allclose(weights, expected)
    assert uniform is not layer


@pytest.mark.slow
def test_edits_are_those_of_what_the_model_writes():
    rows = [[1, 2], [2], [3, 1, 2]]
    references = pad([[n + 1 for n in row] + [1] for row in rows], 4)[:, None]
    arrays = {"source": pad(rows, 3), "references": references}
    symbols = {"source": ("", "a", "b", "c"), "target": ("", "", "A", "B", "C")}
    source = data.SequenceSource("upper", "test", ["test"], arrays, symbols, longest=4)
    facts = tasks._transduction.SequenceFacts(4, 5, 3, 4, 4)
    task = tasks.Transduction(tasks.TransductionSettings(), facts)
    sizes = dict(source_symbols=4, target_symbols=5, width=8, embedding_features=4)
    model = Seq2Seq(**sizes, rngs=nnx.Rngs(0))
    subject = alignments.observe_sequences("x", model, task, source.first(3))
    until_end = lambda row: row.tolist()[: row.tolist().index(1)] if 1 in row else row.tolist()
    right = [until_end(row) for row in arrays["references"][:, 0]]
    uniform = alignments.with_uniform_maps(model)
    for writer, edits in ((model, subject.edits), (uniform, subject.uniform_edits)):
        rows = np.asarray(jax.jit(task.write)(writer, arrays["source"]))
        written = [until_end(row) for row in rows]
        assert edits.tolist() == [by_recursion(*pair) for pair in zip(written, right, strict=True)]
    assert subject.phonemes.tolist() == [2, 1, 3]


@pytest.mark.slow
def test_a_run_is_analysed_beside_another(tmp_path, capsys):
    write_dictionary(tmp_path / "dictionary")
    small = {"data.data_dir": str(tmp_path / "dictionary"), "model.width": 16, "batch_size": 32}
    for score in ("dot", "additive"):
        config = g2p.transduction(score)
        config.update_from_flattened_dict(small | {"num_epochs": 0.5})
        Trainer(build_run(config), training.open_workdir(tmp_path / score, config)).fit()
    modes.analyze(config, tmp_path / "additive", "last", tmp_path / "dot")
    out = capsys.readouterr().out
    folder = tmp_path / "additive" / "report"
    with (folder / "claims.csv").open(encoding="utf-8") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    names = (f"alignment-{name}" for name in ("monotonic", "focused", "needed", "length"))
    for name in (*names, "xor-additive"):
        assert f"{name}: {rows[name]['verdict']}" in out
    assert "dot attention" in rows["alignment-focused"]["finding"]
    drawn = {path.stem for path in (folder / "figures").glob("*.png")}
    assert drawn >= {"alignments", "alignments-baseline", "errors-by-length"}
