"""What may be wrong beside a run: broken images, images that are gone, figures that fail."""

import pytest

from adder_flax import training
from adder_flax.app import modes
from adder_flax.report import figures
from adder_flax.training import RunError, fingerprint
from tests.data.files import write_images


@pytest.fixture
def folder_config(tiny_config, tmp_path):
    """A run on an image folder, one of whose 24 training images is no image."""
    for split, count in (("train", 12), ("val", 4)):
        for label in ("ant", "bird"):
            write_images(tmp_path / "data" / split / label, count)
    (tmp_path / "data" / "train" / "bird" / "7.png").write_bytes(b"no image")
    return tiny_config(
        "multiplicative",
        batch_size=8,
        num_epochs=1.0,
        **{"data.name": "folder", "data.data_dir": str(tmp_path / "data")},
    )


def test_an_undecodable_image_stops_the_run_with_its_name(folder_config, tmp_path):
    said = r"readable image in record 21 .*bird/7.png.*--config.data.on_unreadable=skip"
    with pytest.raises(RunError, match=said):
        modes.train(folder_config, tmp_path / "run")
    begun = fingerprint(folder_config)
    folder_config.data.on_unreadable = "skip"  # goes on with it, as the message says
    assert fingerprint(folder_config) == begun


@pytest.mark.slow
def test_images_that_are_left_out_are_counted_and_those_that_were_removed_are_told(
    folder_config, tmp_path, capsys
):
    folder_config.data.on_unreadable = "skip"
    modes.train(folder_config, tmp_path / "run")
    assert "1 unreadable train images were left out" in capsys.readouterr().out
    assert training.read_metrics(tmp_path / "run")[-1]["step"] == 3
    for folder in (tmp_path / "data" / "train").iterdir():
        for path in sorted(folder.iterdir())[4:]:
            path.unlink()
    said = "at least the 3 steps .* one of 1: .* train 24 records then, 8 now"
    with pytest.raises(RunError, match=said):
        training.Trainer(training.build_run(folder_config), tmp_path / "run").fit()


@pytest.mark.slow
def test_figures_do_not_decide_whether_training_succeeded(
    tiny_config, tmp_path, capsys, monkeypatch
):
    def fail(*args, **options):
        raise ZeroDivisionError("no ink")

    monkeypatch.setattr(figures, "attention_figure", fail)
    modes.train(tiny_config(num_epochs=0.1), tmp_path)
    out = capsys.readouterr().out
    assert "complete, but attention.png could not be drawn: ZeroDivisionError: no ink" in out
    assert out.splitlines()[-1].endswith("config.json, curves.png")
    assert (tmp_path / "curves.png").exists()
