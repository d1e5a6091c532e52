"""Cases from public trackers for where images come from: other layouts, other endings of names."""

import csv
import importlib.util
import io
import json

import numpy as np
import pytest
from PIL import Image

from adder_flax.data import DataError, load_source
from adder_flax.data._images import image_suffixes
from tests.data.files import encode, smooth_image, write_images

COUNTS = {"train": {"10": 3, "9": 2}, "val": {"10": 1, "9": 2}}


def pictures(split):
    """(class, PNG, its pixels) of each image of a split, in no order of classes."""
    rng = np.random.default_rng(len(split))
    rows = [(name, n) for name, count in COUNTS[split].items() for n in range(count)]
    for place in rng.permutation(len(rows)):
        name, n = rows[place]
        pixels = smooth_image(9 + n, 8 + len(name), seed=1000 * n + len(name) + len(split))
        yield name, encode(pixels), pixels


def write_list(root):
    for split in COUNTS:
        with open(root / f"{split}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["label", "path"])
            for number, (name, encoded, _) in enumerate(pictures(split)):
                place = root / "files" / f"{split}, {number}.png"  # a comma and a space
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(encoded)
                writer.writerow([name, f"files/{place.name}"])


def write_tars(root):
    wds = pytest.importorskip("webdataset")
    for split in COUNTS:
        with wds.ShardWriter(str(root / f"{split}-%04d.tar"), maxcount=2, verbose=0) as writer:
            for number, (name, encoded, _) in enumerate(pictures(split)):
                label = {"cls": name} if number % 2 else {"json": json.dumps({"label": name})}
                made = {"__key__": f"{split}/x{number}", "png": encoded} | label
                writer.write({n: v.encode() if isinstance(v, str) and n[0] != "_" else v
                              for n, v in made.items()})  # fmt: skip


def hugging_face_sets(named):
    datasets = pytest.importorskip("datasets")
    kind = datasets.ClassLabel(names=["9", "10"]) if named else datasets.Value("string")
    features = datasets.Features({"image": datasets.Image(), "label": kind})

    sets = {}
    for split in COUNTS:
        labels, files, _ = zip(*pictures(split), strict=True)
        rows = {"image": [{"bytes": file, "path": None} for file in files]}
        rows["label"] = list(labels)
        sets[split] = datasets.Dataset.from_dict(rows, features=features)
    return sets


def write_saved(root):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict(hugging_face_sets(named=False)).save_to_disk(str(root))


def write_parquet(root):
    for split, rows in hugging_face_sets(named=True).items():
        rows.to_parquet(str(root / f"{split}-00000-of-00001.parquet"))


LAYOUTS = {
    "list": ("image_list", write_list),
    "tars": ("webdataset", write_tars),
    "saved": ("hugging_face", write_saved),
    "parquet": ("hugging_face", write_parquet),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    if importlib.util.find_spec("datasets"):
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_images_and_classes_that_were_put_in(layout, tmp_path):
    name, write = LAYOUTS[layout]
    root = tmp_path / "set"
    root.mkdir()
    write(root)
    for split in COUNTS:
        # The library calls it so, whatever the files are called.
        named = "validation" if layout == "parquet" and split == "val" else split
        # A side of the shorter one's, so that the middle is not resized where the image is square.
        options = dict(data_dir=str(root), image_size=8, eval_crop_ratio=1.0, crop_scale=None)
        source = load_source(name, named, **options)
        assert source.split == named
        assert len(source.splits) == 2
        assert source.label_names == ("9", "10")
        images, labels = source.read(np.arange(len(source)))[0].values()
        expected = list(pictures(split))
        assert [source.label_names[label] for label in labels] == [n for n, _, _ in expected]
        for image, (_, _, pixels) in zip(images, list(pictures(split)), strict=True):
            height, width, _ = pixels.shape
            size = (8, int(8 * height / width)) if width < height else (int(8 * width / height), 8)
            resized = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
            left, top = (round((side - 8) / 2) for side in resized.size)
            expected = np.asarray(resized.crop((left, top, left + 8, top + 8)))
            np.testing.assert_array_equal(image, expected)
        held_out = load_source(name, "eval", data_dir=str(root), image_size=8)
        assert held_out.split in ("val", "validation")
        part = load_source(name, f"{named}[:50%]", data_dir=str(root), image_size=8)
        assert len(part) == round(len(source) / 2)


def test_tar_files_are_read_as_webdataset_reads_them(tmp_path):
    wds = pytest.importorskip("webdataset")
    write_tars(tmp_path)
    shards = sorted(map(str, tmp_path.glob("train-*.tar")))
    assert len(shards) == 3
    theirs = list(wds.WebDataset(shards, shardshuffle=False))
    records = load_source("webdataset", "train", data_dir=str(tmp_path), image_size=8)._records
    assert [records[i][0] for i in range(len(records))] == [sample["png"] for sample in theirs]
    assert records.file_names() == [f"{sample['__key__']}.png" for sample in theirs]


def test_a_column_of_parquet_may_hold_the_bytes_of_images(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    names, files, _ = zip(*pictures("train"), strict=True)
    rows = datasets.Dataset.from_dict({"image": list(files), "label": list(names)})
    rows.to_parquet(tmp_path / "train-0.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    options = dict(data_dir=str(tmp_path), image_size=8)
    source = load_source("hugging_face", "train", **options)
    assert source[0]["label"] == ["9", "10"].index(names[0])
    assert [source._records[i][0] for i in range(len(files))] == list(files)


def test_shards_may_have_the_name_of_their_set_in_front_of_the_split(tmp_path):
    """As https://huggingface.co/datasets/timm/imagenet-1k-wds: imagenet1k-train-0000.tar."""
    write_tars(tmp_path)
    splits = {}
    for renamed in (False, True):
        load = lambda split: load_source("webdataset", split, data_dir=str(tmp_path), image_size=8)
        splits[renamed] = [load(split).read(range(3))[0]["image"] for split in COUNTS]
        for path in tmp_path.glob("*.tar"):
            path.rename(tmp_path / f"set1k-{path.name}")
    for one, other in zip(*splits.values(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("image_list", {}, r"<split>.csv with the columns path and label, got no such file"),
        ("image_list", {"train.csv": "a,b\n1,2\n"}, r"the columns path and label .* \['a', 'b'\]"),
        ("image_list", {"train.csv": "path,label\nx.png\n"}, "each with .* none in line 2"),
        ("image_list", {"train.csv": "path,label\n"}, "Expected rows in"),
        ("webdataset", {}, "<split>-<number>.tar, got no such file"),
        ("webdataset", {"train-0.tar": "no tar at all"}, "Expected samples of WebDataset"),
        ("hugging_face", {}, "Expected a folder of Hugging Face's datasets"),
    ],
)
def test_what_is_no_such_folder_is_one_message(name, files, message, tmp_path):
    (tmp_path / "set").mkdir()
    for file, text in files.items():
        (tmp_path / "set" / file).write_text(text)
    with pytest.raises(DataError, match=message):
        load_source(name, "train", data_dir=str(tmp_path / "set"), image_size=8)


ENDINGS = dict(gif="GIF", GIF="GIF", jfif="JPEG", pgm="PPM", jp2="JPEG2000", tga="TGA")
ENDINGS |= dict(apng="PNG", ico="ICO", qoi="QOI")


@pytest.mark.parametrize(("ending", "form"), ENDINGS.items())
def test_every_ending_that_pillow_reads_is_an_image(ending, form, tmp_path):
    """catalyst-team/classification#38: images of other endings than the expected were skipped."""
    assert f".{ending.lower()}" in image_suffixes()
    pixels = np.full((16, 16, 3), (200, 40, 90), np.uint8)
    if form == "GIF" or ending == "pgm":
        pixels = pixels[..., 0]
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    for split in ("train", "val"):
        for name in ("ant", "bird"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            (folder / f"0.{ending}").write_bytes(buffer.getvalue())
    source = load_source("folder", "train", data_dir=str(tmp_path), image_size=16)
    assert len(source) == 2
    shown = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, -1)
    difference = source[0]["image"].astype(int) - shown
    assert np.abs(difference).max() <= 2


def test_what_is_left_out_of_a_folder_is_said_by_kind(tmp_path, caplog):
    for name in ("ant", "bird"):
        folder = tmp_path / "train" / name
        write_images(folder, 1)
        for other in ("a.txt", "b.TXT", "c.mp4", "noend", ".hidden"):
            (folder / other).write_text("x")
    load_source("folder", "train", data_dir=str(tmp_path), image_size=4)
    (said,) = (r.getMessage() for r in caplog.records if "left out" in r.getMessage())
    assert said.endswith("no image by its name: 4 .txt, 2 .mp4, 2 without an ending")


@pytest.mark.parametrize("ending", ["eps", "wmf", "pdf", "txt"])
def test_what_starts_other_programs_is_no_image(ending):
    assert f".{ending}" not in image_suffixes()
