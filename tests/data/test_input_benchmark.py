"""The input benchmark runs and prints a row for every case."""

from __future__ import annotations

from benchmarks import input as benchmark


def test_every_case_has_a_speed(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "NUM_FILES", 4)
    monkeypatch.setattr(benchmark, "NUM_SMALL", 8)
    benchmark.main(
        [
            "--threads=1,2",
            "--batch_size=2",
            "--seconds=0.01",
            "--rounds=1",
            "--step_images_per_second=1000",
        ]
    )
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("batch 2; JPEG files of ")
    assert columns.split() == ["1", "threads", "2", "threads"]
    assert [row[:22].strip() for row in rows] == [
        "ImageNet-like, train",
        "ImageNet-like, eval",
        "CIFAR-like, decoded",
        "CIFAR-like, cached",
    ]
    for row in rows:
        speeds = [
            float(word.replace(",", "")) for word in row[22:].split() if not word.startswith("(")
        ]
        assert len(speeds) == 2
        assert min(speeds) > 0
