"""The pronouncing dictionary: parsing, splits by headword, records, what is refused."""

import numpy as np
import pytest

from adder_flax import data
from adder_flax.data._sequences import LETTERS, PHONEMES, SPLITS, parse_dictionary, split_of

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
    words = [f"{a}{b}{c}" for a in "bcdfg" for b in "aeiou" for c in "lmnprst"]
    lines = [f"{w} {w[0].upper() if w[0] != 'c' else 'K'} AE1 T" for w in words]
    long = "".join("abcdefgh"[i % 8] for i in range(20))
    path = tmp_path / "cmudict.dict"
    path.write_text("\n".join([*ENTRIES.splitlines(), *lines, f"{long} AE1 B"]) + "\n")
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


def test_every_word_is_in_one_split_with_all_its_pronunciations(dictionary):
    words = {}
    for split in SPLITS:
        source = data.load_source("cmudict", split, data_dir=str(dictionary))
        words[split] = {"".join(source.text("source", row)) for row in source.arrays["source"]}
    known = parse_dictionary(dictionary.read_text().splitlines())
    too_long = {word for word in known if len(word) > 16}
    assert set.union(*words.values()) >= known.keys() - too_long
    for split, found in words.items():
        assert {split_of(word) for word in found} <= {split}
    assert all(words[a].isdisjoint(words[b]) for a, b in [SPLITS[:2], SPLITS[1:]])


def test_records_hold_letters_phonemes_and_their_end(dictionary):
    known = parse_dictionary(dictionary.read_text().splitlines())
    for split in SPLITS:
        source = data.load_source("cmudict", split, data_dir=str(dictionary))
        for index in range(len(source)):
            record = source[index]
            word = "".join(source.text("source", record["source"]))
            rows = record["references"] if split != "train" else record["target"][None]
            found = [source.text("target", row) for row in rows if row.any()]
            assert found == known[word] if split != "train" else found[0] in known[word]
            for row, phonemes in zip(rows, found, strict=False):
                assert row[len(phonemes)] == 1
                assert not row[len(phonemes) + 1 :].any()


def test_shapes_are_declared_and_batches_are_read(dictionary):
    source = data.load_source("cmudict", "train", data_dir=str(dictionary))
    batch = data.TrainPipeline(source, 8, seed=0)[3]
    for name, shape in source.record_shapes.items():
        assert batch[name].shape == (8, *shape.shape)
        assert batch[name].dtype == shape.dtype == np.int32
    assert batch["source"].max() <= len(LETTERS)
    assert batch["target"].max() <= len(PHONEMES) + 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe\x00", "line 1"), (b"", "Expected words"), (b"a b c\n", "line 1")],
)
def test_a_file_that_is_no_dictionary_is_refused(tmp_path, content, message):
    path = tmp_path / "words.dict"
    path.write_bytes(content)
    with pytest.raises(data.DataError, match=message):
        data.load_source("cmudict", "train", data_dir=str(path))


def test_a_missing_file_and_an_unknown_split_are_refused(tmp_path, dictionary):
    with pytest.raises(data.DataError, match="got no file"):
        data.load_source("cmudict", "train", data_dir=str(tmp_path / "none"))
    with pytest.raises(data.DataError, match="split"):
        data.load_source("cmudict", "dev", data_dir=str(dictionary))


def test_the_split_of_a_word_does_not_change():
    # The first four bytes of `printf WORD | sha256sum`, modulo 100: 43, 7 and 2.
    assert tuple(map(split_of, ("attention", "cat", "house"))) == SPLITS
    counts = np.unique([split_of(f"word{i}") for i in range(4000)], return_counts=True)[1]
    assert (np.abs(np.sort(counts) / 4000 - [0.05, 0.05, 0.9]) < 0.015).all()
