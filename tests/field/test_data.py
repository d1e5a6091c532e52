"""Cases from public trackers for where images come from: other layouts, other endings of names."""

import csv
import functools
import importlib.util
import json

import numpy as np
import pytest
from PIL import Image

from adder_flax.data import DataError, load_source
from adder_flax.data._images import image_suffixes
from tests.data.files import center_crop, encode, smooth_image, write_images

COUNTS = {"train": {"10": 3, "9": 2}, "val": {"10": 1, "9": 2}}


def pictures(split):
    """(class, PNG, its pixels) of each image of a split, in no order of classes."""
    rows = [(name, n) for name, count in COUNTS[split].items() for n in range(count)]
    for place in np.random.default_rng(len(split)).permutation(len(rows)):
        name, n = rows[place]
        pixels = smooth_image(9 + n, 8 + len(name), seed=1000 * n + len(name) + len(split))
        yield name, encode(pixels), pixels


def write_list(root):
    (root / "files").mkdir()
    for split in COUNTS:
        with open(root / f"{split}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["label", "path"])
            for number, (name, encoded, _) in enumerate(pictures(split)):
                place = f"files/{split}, {number}.png"  # a comma and a space
                (root / place).write_bytes(encoded)
                writer.writerow([name, place])


def write_tars(root):
    wds = pytest.importorskip("webdataset")
    for split in COUNTS:
        with wds.ShardWriter(str(root / f"{split}-%04d.tar"), maxcount=2, verbose=0) as writer:
            for number, (name, encoded, _) in enumerate(pictures(split)):
                said = json.dumps({"label": name}).encode()
                label = {"cls": name.encode()} if number % 2 else {"json": said}
                writer.write({"__key__": f"{split}/x{number}", "png": encoded} | label)


def hugging_face_sets(named):
    datasets = pytest.importorskip("datasets")
    kind = datasets.ClassLabel(names=["9", "10"]) if named else datasets.Value("string")
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    sets = {}
    for split in COUNTS:
        labels, files, _ = zip(*pictures(split), strict=True)
        rows = {"image": [{"bytes": file, "path": None} for file in files], "label": labels}
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
    load = functools.partial(load_source, name, data_dir=str(root), image_size=8)
    for split in COUNTS:
        # The library calls it so, whatever the files are called.
        named = "validation" if layout == "parquet" and split == "val" else split
        source = load(named, eval_crop_ratio=1.0, crop_scale=None)
        assert (source.split, len(source.splits)) == (named, 2)
        assert source.label_names == ("9", "10")
        images, labels = source.read(np.arange(len(source)))[0].values()
        names, _, pixels = zip(*pictures(split), strict=True)
        assert [source.label_names[label] for label in labels] == list(names)
        for image, expected in zip(images, pixels, strict=True):
            np.testing.assert_array_equal(image, center_crop(Image.fromarray(expected), 8, 1.0))
        assert load("eval").split in ("val", "validation")
        assert len(load(f"{named}[:50%]")) == round(len(source) / 2)


@pytest.mark.parametrize("front", ["", "set1k-"])
def test_tar_files_are_read_as_webdataset_reads_them(front, tmp_path):
    """With a name in front as https://huggingface.co/datasets/timm/imagenet-1k-wds has:
    imagenet1k-train-0000.tar."""
    wds = pytest.importorskip("webdataset")
    write_tars(tmp_path)
    for path in list(tmp_path.glob("*.tar")):
        path.rename(tmp_path / (front + path.name))
    for split, count in {"train": 3, "val": 2}.items():
        shards = sorted(map(str, tmp_path.glob(f"{front}{split}-*.tar")))
        assert len(shards) == count
        theirs = list(wds.WebDataset(shards, shardshuffle=False))
        source = load_source("webdataset", split, data_dir=str(tmp_path), image_size=8)
        records = [source._records[i][0] for i in range(len(source))]
        assert records == [sample["png"] for sample in theirs]
        assert source._records.file_names() == [f"{sample['__key__']}.png" for sample in theirs]


def test_a_column_of_parquet_may_hold_the_bytes_of_images(tmp_path):
    datasets = pytest.importorskip("datasets")
    names, files, _ = zip(*pictures("train"), strict=True)
    rows = datasets.Dataset.from_dict({"image": list(files), "label": list(names)})
    rows.to_parquet(tmp_path / "train-0.parquet")
    source = load_source("hugging_face", "train", data_dir=str(tmp_path), image_size=8)
    assert source[0]["label"] == ["9", "10"].index(names[0])
    assert [source._records[i][0] for i in range(len(files))] == list(files)


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
    picture = Image.new("RGB", (16, 16), (200, 40, 90))
    if form == "GIF" or ending == "pgm":
        picture = picture.convert("L")
    for place in ("train/ant", "train/bird"):
        (tmp_path / place).mkdir(parents=True)
        picture.save(tmp_path / place / f"0.{ending}", form)
    source = load_source("folder", "train", data_dir=str(tmp_path), image_size=16)
    assert len(source) == 2
    assert np.abs(source[0]["image"].astype(int) - np.asarray(picture.convert("RGB"))).max() <= 2


def test_what_is_left_out_of_a_folder_is_said_by_kind(tmp_path, caplog):
    for name in ("ant", "bird"):
        write_images(folder := tmp_path / "train" / name, 1)
        for other in ("a.txt", "b.TXT", "c.mp4", "noend", ".hidden"):
            (folder / other).write_text("x")
    load_source("folder", "train", data_dir=str(tmp_path), image_size=4)
    (said,) = (r.getMessage() for r in caplog.records if "left out" in r.getMessage())
    assert said.endswith("no image by its name: 4 .txt, 2 .mp4, 2 without an ending")
    # What starts other programs is no image.
    assert not {".eps", ".wmf", ".pdf", ".txt"} & set(image_suffixes())
