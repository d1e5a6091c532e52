"""The pronouncing dictionary: parsing, splits by headword, records, what is refused."""

import numpy as np
import pytest

from adder_flax import data
from adder_flax.data._sequences import LETTERS, PHONEMES, SPLITS, parse_dictionary, split_of
from tests.data.files import write_dictionary

ENTRIES = """\
;;; a comment
read R EH1 D # past tense
read(2) R IY1 D
READS R IY1 D Z
record R AH0 K AO1 R D
record(2) R EH1 K ER0 D
record(3) R AH0 K AO2 R D
"""


@pytest.fixture
def dictionary(tmp_path):
    path = tmp_path / "cmudict.dict"
    write_dictionary(path, 300)
    path.write_text(f"{ENTRIES}{path.read_text()}{'abcd' * 5} AE1 B\n")
    return path


def test_stress_comments_and_what_differs_in_stress_alone_are_dropped():
    words = parse_dictionary(ENTRIES.splitlines())
    assert words == {
        "read": [("R", "EH", "D"), ("R", "IY", "D")],
        "reads": [("R", "IY", "D", "Z")],
        "record": [("R", "AH", "K", "AO", "R", "D"), ("R", "EH", "K", "ER", "D")],
    }


@pytest.mark.parametrize(
    "line", ["read", "read R EE1 D", "r3ad R EH1 D", "\x1b[31m R EH1 D", "é EY1"]
)
def test_a_line_that_is_no_entry_is_named(line):
    with pytest.raises(data.DataError, match=r"in line 2 of the dictionary") as error:
        parse_dictionary(["cat K AE1 T", line])
    assert "\x1b" not in str(error.value)


@pytest.fixture
def sources(dictionary):
    return {split: data.load_source("cmudict", split, data_dir=str(dictionary)) for split in SPLITS}


def words_of(source):
    return ["".join(source.text("source", row)) for row in source.arrays["source"]]


def test_every_word_is_in_one_split(dictionary, sources):
    known = parse_dictionary(dictionary.read_text().splitlines())
    found = [word for source in sources.values() for word in set(words_of(source))]
    assert sorted(found) == sorted(word for word in known if len(word) <= 16)
    for split, source in sources.items():
        assert set(map(split_of, words_of(source))) == {split}


def test_records_hold_letters_phonemes_and_their_end(dictionary, sources):
    known = parse_dictionary(dictionary.read_text().splitlines())
    for split, source in sources.items():
        for index, word in enumerate(words_of(source)):
            record = source[index]
            rows = record["references"] if split != "train" else record["target"][None]
            found = [source.text("target", row) for row in rows if row.any()]
            assert found == known[word] if split != "train" else found[0] in known[word]
            for row, phonemes in zip(rows, found, strict=False):
                assert row[len(phonemes)] == 1
                assert not row[len(phonemes) + 1 :].any()


def test_shapes_are_declared_and_batches_are_read(sources):
    batch = data.TrainPipeline(sources["train"], 8, seed=0)[3]
    for name, shape in sources["train"].record_shapes.items():
        assert batch[name].shape == (8, *shape.shape)
        assert batch[name].dtype == shape.dtype == np.int32
    assert batch["source"].max() <= len(LETTERS)
    assert batch["target"].max() <= len(PHONEMES) + 1


@pytest.mark.parametrize(
    ("content", "split", "message"),
    [
        (b"\xff\xfe\x00", "train", "line 1"),
        (b"", "train", "Expected words"),
        (None, "train", "got no file"),
        (b"cat K AE1 T\n", "dev", "split"),
    ],
)
def test_a_file_that_is_no_dictionary_is_refused(tmp_path, content, split, message):
    path = tmp_path / "words.dict"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(data.DataError, match=message):
        data.load_source("cmudict", split, data_dir=str(path))


def test_the_split_of_a_word_does_not_change():
    # The first four bytes of `printf WORD | sha256sum`, modulo 100: 43, 7 and 2.
    assert tuple(map(split_of, ("attention", "cat", "house"))) == SPLITS
    counts = np.unique([split_of(f"word{i}") for i in range(4000)], return_counts=True)[1]
    assert (np.abs(np.sort(counts) / 4000 - [0.05, 0.05, 0.9]) < 0.015).all()
