"""``--mode=analyze`` hands the report what it needs: the checkpoint, another run beside it, and
steps of training."""

import dataclasses

import numpy as np
import pytest
from scipy.special import softmax

from adder_flax import attention, report, training
from adder_flax.app import modes
from adder_flax.experiments import common
from adder_flax.training import RunError, Trainer, build_run
from tests.training.tiny import TINY


def train(mechanism, workdir, **fields):
    config = common.deit(mechanism, "tiny")
    config.update_from_flattened_dict(TINY | fields)
    Trainer(build_run(config), training.open_workdir(workdir, config)).fit()
    return config


@pytest.fixture
def reported(monkeypatch):
    calls = []

    def write_study(study, out_dir):
        calls.append((study, out_dir))
        return report.Report(out_dir / "report.html", [], [])

    monkeypatch.setattr(report, "write_study", write_study)
    return calls


@pytest.mark.slow
def test_a_checkpoint_is_analysed_beside_a_baseline(reported, tmp_path, capsys):
    train("multiplicative", tmp_path / "dot")
    config = train("adder", tmp_path / "adder")
    modes.analyze(config, tmp_path / "adder", "last", tmp_path / "dot")
    [(study, out_dir)] = reported
    assert f"report at {tmp_path / 'adder' / 'report' / 'report.html'}" in capsys.readouterr().out
    assert out_dir == tmp_path / "adder" / "report"
    assert study.pictures.shape == (32, 8, 8, 1)
    assert len(study.labels) == 32
    np.testing.assert_array_equal(study.answers.records, np.arange(360))
    logits, answers = study.subject.captured.logits, study.answers.probabilities[:32]
    np.testing.assert_allclose(answers, softmax(logits, -1), atol=1e-5)
    subjects = (study.subject, study.untrained, study.baseline)
    assert [subject.scores[0] for subject in subjects] == ["adder", "adder", "dot"]
    names = ["digits, adder attention", "untrained", "digits, dot attention"]
    assert [subject.name for subject in subjects] == names
    trained, untrained, _ = (subject.model.pos_embed[...] for subject in subjects)
    assert not np.array_equal(trained, untrained)
    start, checkpoint = study.second_order.values()
    assert [step.step for step in start] == [0, 1, 2]
    assert [step.step for step in checkpoint] == [9, 10, 11]
    assert all(np.isfinite(step.ratio()) and np.isnan(step.second) for step in start + checkpoint)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (None, "expected the directory of a run"),
        ('{"data": {"name": "fake", "image_size": 32}}', "digits at 8 pixels, got fake at 32"),
        # What it lacks is at its default: 224 pixels.
        ("{}", "expected a baseline on digits at 8 pixels, got digits at 224"),
        ('{"data": 3, "model": []}', r"baseline\.model: expected"),
    ],
)
def test_a_baseline_has_to_be_a_run_on_the_same_data(stored, message, reported, tmp_path):
    if stored:
        (tmp_path / "config.json").write_text(stored)
    with pytest.raises(RunError, match=message):
        modes.analyze(common.deit("adder", "tiny"), tmp_path / "run", "last", tmp_path)


def test_scores_that_are_no_probabilities_are_refused_before_anything_is_computed(
    reported, tmp_path
):
    gate = dataclasses.replace(attention.get_score("dot"), name="gate", rows_are_probability=False)
    config = common.deit("multiplicative", "tiny")
    config.update_from_flattened_dict(TINY | {"model.score": "gate"})
    with attention.SCORES.temporary():
        attention.register_score(gate)
        with pytest.raises(RunError, match="rows of weights are probabilities, got 'gate'"):
            modes.analyze(config, tmp_path, "last")
    assert not reported
