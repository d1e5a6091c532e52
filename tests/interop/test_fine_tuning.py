"""The five commands of docs/fine_tune.md, from a folder that timm wrote to programs of others."""

import json
import re
import shutil

import numpy as np
import pytest
from jax import export
from PIL import Image
from sklearn.datasets import load_sample_images

from adder_flax.data import load_source
from tests.processes import run_python

CROPS = {"train": 40, "val": 16}
SIDE = 96


def photographs():
    """Eight, each a class, which scikit-learn and scikit-image carry."""
    skimage = pytest.importorskip("skimage.data")
    names = ("astronaut", "camera", "chelsea", "coffee", "coins", "text")
    samples = dict(zip(("china", "flower"), load_sample_images().images, strict=True))
    return samples | {name: getattr(skimage, name)() for name in names}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders of timm's DeiT-Tiny with random weights, and of images; training from the left."""
    timm = pytest.importorskip("timm")
    weights, images = tmp_path_factory.mktemp("weights"), tmp_path_factory.mktemp("images")
    model = timm.create_model("deit_tiny_patch16_224")
    timm.models.save_for_hf(model, weights, safe_serialization=True)
    rng = np.random.default_rng(0)
    for label, photograph in photographs().items():
        middle = photograph.shape[1] * 2 // 3
        halves = {"train": photograph[:, :middle], "val": photograph[:, middle:]}
        for split, half in halves.items():
            (images / split / label).mkdir(parents=True)
            for number in range(CROPS[split]):
                y, x = (rng.integers(max(1, side - SIDE)) for side in half.shape[:2])
                crop = Image.fromarray(half[y : y + SIDE, x : x + SIDE]).convert("RGB")
                crop.save(images / split / label / f"{number}.png")
    return weights, images


@pytest.mark.slow
def test_five_commands_give_one_accuracy(places, tmp_path):
    transformers = pytest.importorskip("transformers")
    weights, images = places
    run = ["--config=experiments/fine_tune.py", f"--workdir={tmp_path}", "--config.num_epochs=4"]
    run += [f"--config.data.data_dir={images}", "--config.data.image_size=64"]
    run += [f"--config.init_from={weights}"]

    def main(*arguments):
        done = run_python("main.py", *run, *arguments)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    said = main()
    assert "at random: head" in said
    assert re.search(r"positions? .*14 × 14 .*4 × 4", said)
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    *_, accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert accuracy > 0.25  # of eight classes, in 40 steps from random weights
    assert f"{accuracy:.4f}" in main("--mode=eval")
    one = images / "val" / "coffee" / "0.png"
    assert "coffee" in main("--mode=predict", f"--images={one}")

    main("--mode=export", "--names=hugging_face_folder")
    [folder] = [path.parent for path in tmp_path.glob("*/preprocessor_config.json")]
    theirs = transformers.AutoModelForImageClassification.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    classify = transformers.pipeline("image-classification", theirs, image_processor=processor)
    files = sorted((images / "val").glob("*/*.png"))
    found = [best["label"] for (best,) in classify(list(map(str, files)), top_k=1)]
    right = np.array(found) == [path.parent.name for path in files]
    assert np.mean(right) == pytest.approx(accuracy, abs=1e-6)

    main("--mode=export", "--names=stablehlo")
    program = export.deserialize((tmp_path / "stablehlo").read_bytes()).call
    about = json.loads((tmp_path / "stablehlo.json").read_text())
    source = load_source("folder", "val", data_dir=str(images), image_size=64, crop_scale=None)
    examples = [source[i] for i in range(len(source))]
    logits = program(np.stack([example["image"] for example in examples]))
    labels = np.array([example["label"] for example in examples])
    assert about["classes"] == sorted(photographs())
    assert np.mean(np.argmax(logits, -1) == labels) == pytest.approx(accuracy, abs=1e-6)
    shutil.rmtree(tmp_path)
