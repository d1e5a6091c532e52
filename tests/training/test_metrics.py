"""The log of a run: no line is lost, whatever else stands in it."""

import json
import os
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from adder_flax import errors
from adder_flax.errors import RunError
from adder_flax.training import read_metrics
from adder_flax.training.metrics import MetricWriter

ROWS = [json.dumps({"step": step, "train/loss": step / 2}) for step in range(1, 7)]


def lines(path):
    return path.read_text().split("\n")[:-1] if path.exists() else []


def test_what_is_moved_aside_is_added_to_what_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for attempt in range(3):
        path.write_text(f"{ROWS[0]}\nnoise {attempt}\n")
        MetricWriter(tmp_path, start_step=1).__exit__()
    assert lines(tmp_path / "metrics.jsonl.aside") == ["noise 0", "noise 1", "noise 2"]


@pytest.mark.parametrize("end", ["\n", "", '\n{"step": 3, "train/lo'])
def test_a_last_line_without_its_end_does_not_swallow_the_next(end, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("\n".join(ROWS[:2]) + end)
    with MetricWriter(tmp_path, start_step=2) as writer:
        writer.write(3, {"train/loss": 1.5})
    assert lines(tmp_path / "metrics.jsonl") == ROWS[:3]


def test_a_log_without_anything_to_move_is_not_rewritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,  "train/loss":0.5}\n')
    number = os.stat(path).st_ino
    MetricWriter(tmp_path, start_step=1).__exit__()
    assert (os.stat(path).st_ino, path.read_text()) == (number, '{"step":1,  "train/loss":0.5}\n')


def events(workdir):
    """The records of TensorBoard's files, whose form is a length, its check sum, the data and
    theirs."""
    for path in sorted((workdir / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    for start_step in (0, 2):
        with MetricWriter(tmp_path, start_step=start_step) as writer:
            for step in range(start_step + 1, start_step + 4):
                writer.write(step, {"train/loss": step / 2, "eval/accuracy": 0.25})
    found = [event for event in events(tmp_path) if event.step]
    assert [event.step for event in found] == [1, 2, 3, 3, 3, 4, 5]
    # Of the second start: what was said of 3 is forgotten.
    assert found[3].session_log.status == SessionLog.START
    numbers = [{value.tag: value.simple_value for value in event.summary.value} for event in found]
    of = lambda step: {"train/loss": step / 2, "eval/accuracy": 0.25}
    assert numbers == [of(1), of(2), of(3), {}, of(3), of(4), of(5)]


@pytest.mark.parametrize("place", ["rows", "events"])
def test_what_cannot_be_written_stops_the_run_and_nobody_waits_for_it(place, tmp_path):
    said = "No space left on device; what was written before is whole"
    with open("/dev/full", "wb", buffering=0) as full, MetricWriter(tmp_path) as writer:
        if place == "events":
            writer._events._py_recordio_writer._writer = full
        else:
            (tmp_path / "metrics.jsonl").unlink()
            (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(RunError, match=said):
            writer.write(1, {"train/loss": 1.0})
    if place == "events":
        assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_what_orbax_says_of_a_folder_that_is_gone_is_an_error_of_the_run(tmp_path):
    said = "got: No ArrayMetadata found; the directory is gone"
    with pytest.raises(RunError, match=said), errors.writing("a checkpoint", tmp_path / "gone"):
        raise ValueError("No ArrayMetadata found\nfor process_index=0")


def test_rows_go_to_the_log_that_is_there(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 0.5})
        (tmp_path / "metrics.jsonl").rename(tmp_path / "rotated")
        writer.write(2, {"train/loss": 1.0})
        written = [lines(tmp_path / name) for name in ("rotated", "metrics.jsonl")]
        assert written == [ROWS[:1], ROWS[1:2]]
        (tmp_path / "metrics.jsonl").unlink()
        tmp_path.rename(f"{tmp_path}-moved")
        with pytest.raises(RunError, match="the directory is gone"):
            writer.write(3, {"train/loss": 1.5})
