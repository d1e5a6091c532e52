"""The studies among the experiments run as their headers say and print their tables."""

import sys

import pytest

from adder_flax.experiments import second_order, xor_alignment


def run(module, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [module.__name__, *flags])
    module.main()


def test_xor_alignment_shows_what_each_score_reaches(monkeypatch, capsys, tmp_path):
    run(xor_alignment, monkeypatch, "--seeds=3", f"--out={tmp_path / 'xor'}")
    lines = capsys.readouterr().out.splitlines()
    bilinear, additive = (
        next(line for line in lines if line.startswith(name)) for name in xor_alignment.SCORES
    )
    assert bilinear.endswith("12")
    assert "0 of 3 seeds" in bilinear
    assert "3 of 3 seeds" in additive
    assert {path.name for path in (tmp_path / "xor").iterdir()} == {"xor.png", "xor.svg"}


@pytest.mark.slow
def test_second_order_prints_three_phases_of_each_mechanism(monkeypatch, capsys, tmp_path):
    small = {"model.width": 16, "model.num_heads": 2, "model.depth": 1}
    monkeypatch.setattr(second_order, "FIELDS", small)
    flags = ["--mechanisms=multiplicative,additive", "--epochs=0.3", "--every=1"]
    run(second_order, monkeypatch, *flags, f"--out={tmp_path}")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:7]] == ["multiplicative"] * 3 + ["additive"] * 3
    assert (tmp_path / "second_order.png").is_file()
