"""Predictions from files: the same as on arrays, whatever else lies in the folder."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from adder_flax import data, interop, training
from adder_flax.app import modes
from adder_flax.experiments import common
from adder_flax.predict import Prediction, Predictor, files_of
from adder_flax.training import RunError, build_run
from tests.training.tiny import TINY


@pytest.fixture(scope="module")
def run():
    config = common.deit("multiplicative", "tiny")
    config.update_from_flattened_dict(TINY)
    return build_run(config)


def config_from(run, path):
    """The run's configuration, to start from its weights in a file."""
    interop.save_weights(run.model(run.init()["params"]), path, names="timm")
    config = run.config.copy_and_resolve_references()
    config.init_from = str(path)
    return config


def write_digits(folder, images):
    for number, image in enumerate(images):
        Image.fromarray(image[..., 0]).save(folder / f"{number:03d}.png")


def test_files_are_taken_for_what_their_pixels_are(run, tmp_path):
    model, source = run.model(run.init()["params"]), run.eval_source
    images = source.first(70)["image"]  # more than a batch
    write_digits(tmp_path, images)
    (tmp_path / "010b.png").write_bytes((tmp_path / "010.png").read_bytes()[:60])
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "071.txt").write_text("no image")
    (tmp_path / "sub" / "072.png").symlink_to("nowhere")
    (tmp_path / ".hidden").write_text("left alone")
    files = files_of(tmp_path)
    assert [path.name for path in files[9:12]] == ["009.png", "010.png", "010b.png"]
    found = list(Predictor(run.task, model, source)(files))
    assert [p.path.name for p, _ in found if p.problem] == ["010b.png", "071.txt", "072.png"]
    logits = np.asarray(model(*run.task.inputs({"image": images})), np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    read = [(p, pixels) for p, pixels in found if not p.problem]
    assert len(read) == 70
    for (prediction, pixels), image, row in zip(read, images, expected, strict=True):
        np.testing.assert_array_equal(pixels, image)
        order = np.argsort(-row)[:5]
        assert [name for name, _ in prediction.classes] == [str(i) for i in order]
        np.testing.assert_allclose([p for _, p in prediction.classes], row[order], rtol=1e-4)


def test_an_image_of_another_shape_gives_its_middle(run, tmp_path):
    """Twice as large, turned as its EXIF says, with margins left and right."""
    image = run.eval_source.first(1)["image"][0, :, :, 0]
    wide = np.zeros((16, 24), np.uint8)
    wide[:, 4:20] = np.kron(image, np.ones((2, 2), np.uint8))
    turned = Image.fromarray(wide).rotate(90, expand=True)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    seen = data.read_image(tmp_path / "turned.png", 8, 1, crop_ratio=1.0)[..., 0]
    reduced = np.asarray(Image.fromarray(wide).resize((12, 8), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(seen, reduced[:, 2:10])
    assert np.corrcoef(seen.ravel(), image.ravel())[0, 1] > 0.95


def test_images_of_a_set_that_is_not_square_are_seen_whole(run, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 16, 1), np.uint8)
    records = images, np.arange(64, dtype=np.int32) % 10, list("0123456789")
    load = lambda name, split, **_: data.ArraySource("wide", split, ("train", "test"), *records)
    wide = build_run(run.config, load=load)
    write_digits(tmp_path, images[:3])
    predictor = Predictor(wide.task, wide.model(wide.init()["params"]), wide.eval_source)
    found = [pixels for _, pixels in predictor(files_of(tmp_path))]
    np.testing.assert_array_equal(found, images[:3])
    assert modes._preparation(wide.eval_source) == "the whole image, resized"
    # A program and a page take the middle of others, as predictions do.
    assert modes._preparation(run.eval_source).startswith("the shorter side resized to 8 pixels")
    assert modes._shorter_side(run.eval_source) == 8


def test_lines_for_people_and_programs():
    taken = Prediction(Path(os.fsdecode(b"caf\xe9\n.png")), (("cat\x1b[31m", 0.75), ("dog", 0.25)))
    assert taken.as_text(20) == r"caf\udce9\n.png       cat\x1b[31m 75.0%  dog 25.0%"
    assert Prediction(Path("a"), problem="no image").as_text(3) == "a    not read: no image"
    assert json.loads(taken.as_json())["classes"][1] == {"name": "dog", "probability": 0.25}
    unread = Prediction(Path("x"), problem="no image").as_json()
    assert json.loads(unread) == {"file": "x", "problem": "no image"}


@pytest.mark.slow
def test_a_checkpoint_predicts_by_its_averaged_weights(run, tmp_path):
    config = run.config.copy_and_resolve_references()
    config.ema_decay = 0.5
    averaging = build_run(config)
    state = averaging.init()
    state["ema_params"] = jax.tree.map(lambda leaf: 3 * leaf, state["params"])
    place = training.open_workdir(tmp_path / "run", config) / "checkpoints"
    with training.Checkpoints(place, of=training.fingerprint(config)) as checkpoints:
        checkpoints.save(1, state)
    images, lines = tmp_path / "images", tmp_path / "lines"
    images.mkdir()
    write_digits(images, run.eval_source.first(1)["image"])
    modes.predict(config, tmp_path / "run", "last", str(images), str(lines), None)
    model = averaging.model(state["ema_params"])
    [(expected, _)] = Predictor(run.task, model, run.eval_source)(files_of(images))
    assert json.loads(lines.read_text()) == json.loads(expected.as_json())


def test_the_mode_writes_lines_and_pictures_and_counts_what_it_cannot_read(run, tmp_path, capsys):
    config = config_from(run, tmp_path / "weights.safetensors")
    images = tmp_path / "images"
    images.mkdir()
    write_digits(images, run.eval_source.first(2)["image"])
    (images / "note.txt").write_text("")
    places = dict(output=str(tmp_path / "lines"), overlay=str(tmp_path / "overlay"))
    with pytest.raises(SystemExit) as ended:
        modes.predict(config, tmp_path / "run", "last", str(images), **places)
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert "1 of 3 files could not be read" in printed.err
    assert len(printed.out.splitlines()) == len((tmp_path / "lines").read_text().splitlines()) == 3
    pictures = sorted(path.name for path in (tmp_path / "overlay").iterdir())
    assert pictures == ["00000-000.png", "00001-001.png"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (None, "expected --images"),
        ("nowhere", "nowhere, which is not there"),
        ("empty", "got an empty folder"),
    ],
)
def test_nothing_to_look_at_is_one_message(images, message, run, tmp_path):
    (tmp_path / "empty").mkdir()
    place = images and str(tmp_path / images)
    with pytest.raises(RunError, match=message):
        modes.predict(run.config, tmp_path / "run", "last", place, None, None)


def test_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path, monkeypatch):
    def locked(place):
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(PermissionError):
        files_of(tmp_path)


def test_weights_for_a_part_of_the_model_are_refused(run, tmp_path):
    config = config_from(run, tmp_path / "weights.safetensors")
    config.model.score = "bilinear"
    write_digits(tmp_path, run.eval_source.first(1)["image"])
    with pytest.raises(RunError, match="weights for the whole model"):
        modes.predict(config, tmp_path / "run", "last", str(tmp_path / "000.png"), None, None)


@pytest.mark.slow  # imports TFDS
def test_no_images_stand_in_for_a_set_that_is_normalised_by_its_own(tmp_path):
    """KMNIST's mean is measured where it is trained on; that of photographs would not do."""
    fields = {"data.data_dir": str(tmp_path), "model.patch_size": 14}
    for name, known in (("mnist", True), ("kmnist", False)):
        config = common.deit("multiplicative", "tiny", name)
        config.update_from_flattened_dict(TINY | fields)
        if known:
            assert modes._run_without_data(config, tmp_path).task.data_facts.mean == (0.1307,)
        else:
            with pytest.raises(RunError, match="kmnist prepared as ArrayRecord .* Prepare it once"):
                modes._run_without_data(config, tmp_path)
