"""What clusters do to a run: damaged checkpoints, full disks, broken images, and processes killed
at any moment."""

import resource

import jax
import jax.numpy as jnp
import pytest

from adder_flax import training
from adder_flax.app import modes
from adder_flax.report import figures
from adder_flax.training import Checkpoints, RunError
from adder_flax.training.metrics import MetricWriter
from tests.data.files import encode, smooth_image


def make_state(value, size=1000):
    return {
        "step": jnp.int32(value),
        "params": {"kernel": jnp.full((size, 10), value, jnp.float32)},
    }


def save_two(directory):
    with Checkpoints(directory, keep_last=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step))
        checkpoints.wait()
    return directory


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_where_no_checkpoint_can_be_read_none_is_moved(tmp_path):
    directory = save_two(tmp_path / "checkpoints")
    for path in directory.rglob("d/*"):
        truncate(path)
    with (
        Checkpoints(directory) as checkpoints,
        pytest.raises(RunError, match="only unreadable ones: {2: .* 1: "),
    ):
        checkpoints.restore(jax.eval_shape(lambda: make_state(0)))
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["1", "2"]


def test_a_full_disk_stops_the_run_and_leaves_the_older_checkpoint(tmp_path):
    # A limit on the size of files makes the kernel refuse to write, as a full disk does.
    incompressible = jax.random.normal(jax.random.key(0), (2**20,))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1))
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, hard))
        try:
            with pytest.raises(RunError, match="what was written before is whole, mend that"):  # noqa: PT012
                checkpoints.save(2, make_state(2) | {"params": {"kernel": incompressible}})
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [1]
        assert int(checkpoints.restore(jax.eval_shape(lambda: make_state(0)))["step"]) == 1


def test_metrics_on_a_full_disk_stop_the_run(tmp_path):
    with MetricWriter(tmp_path) as writer:
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(
            RunError, match="No space left on device; what was written before is whole"
        ):
            writer.write(1, {"train/loss": 1.0})


@pytest.fixture
def folder_config(tiny_config, tmp_path):
    """A run on an image folder, one of whose 24 training images is no image."""
    for split, count in (("train", 12), ("val", 4)):
        for label in ("ant", "bird"):
            folder = tmp_path / "data" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number}.png").write_bytes(encode(smooth_image(12, 12, seed=number)))
    (tmp_path / "data" / "train" / "bird" / "7.png").write_bytes(b"no image")
    return tiny_config(
        "multiplicative",
        batch_size=8,
        num_epochs=1.0,
        **{"data.name": "folder", "data.data_dir": str(tmp_path / "data")},
    )


def test_an_undecodable_image_stops_the_run_with_its_name(folder_config, tmp_path):
    with pytest.raises(
        RunError,
        match=r"readable image in record 21 .*bird/7.png.*--config.data.on_unreadable=skip",
    ):
        modes.train(folder_config, tmp_path / "run")


@pytest.mark.slow
def test_undecodable_images_can_be_left_out_and_are_counted(folder_config, tmp_path, capsys):
    folder_config.data.on_unreadable = "skip"
    modes.train(folder_config, tmp_path / "run")
    assert "1 unreadable train images were left out" in capsys.readouterr().out
    assert training.read_metrics(tmp_path / "run")[-1]["step"] == 3


@pytest.mark.slow
def test_images_that_were_removed_are_told(folder_config, tmp_path):
    folder_config.data.on_unreadable = "skip"
    run = training.build_run(folder_config)
    training.Trainer(run, tmp_path / "run").fit()
    for folder in (tmp_path / "data" / "train").iterdir():
        for path in sorted(folder.iterdir())[4:]:
            path.unlink()
    smaller = training.build_run(folder_config)
    with pytest.raises(
        RunError, match="at least the 3 steps .* one of 1: .* train 24 records then, 8 now"
    ):
        training.Trainer(smaller, tmp_path / "run").fit()


@pytest.mark.slow
def test_figures_do_not_decide_whether_training_succeeded(
    tiny_config, tmp_path, capsys, monkeypatch
):
    def fail(*args, **options):
        raise ZeroDivisionError("no ink")

    monkeypatch.setattr(figures, "attention_figure", fail)
    modes.train(tiny_config(num_epochs=0.1), tmp_path)
    out = capsys.readouterr().out
    assert (
        "training is complete, but attention.png could not be drawn: ZeroDivisionError: no ink"
        in out
    )
    assert "curves.png" in out.splitlines()[-1]
    assert "attention.png" not in out.splitlines()[-1]
    assert (tmp_path / "curves.png").exists()
