"""A run in few bits: what --mode=quantize writes, what takes it, and what is refused."""

import functools
import json
import re
import shutil
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save

from adder_flax import interop, layers, quantized, report, training
from adder_flax.app import modes
from adder_flax.experiments import common, g2p
from tests.data.files import write_dictionary
from tests.interop.test_web import HAS_CLANG, data_of
from tests.test_predict import write_digits
from tests.training.tiny import TINY


def config_of(**changes):
    config = common.deit("adder", "tiny")
    config.update_from_flattened_dict(TINY | {"model.width": 32} | changes)
    return config


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    modes.train(config_of(), str(place))
    modes.quantize(config_of(), str(place), "last", "int8")
    return place


def header_of(path):
    with safe_open(path, "numpy") as file:
        return json.loads(file.metadata()["adder_flax.integers"])


def scores(said):
    return {name: float(x) for name, x in re.findall(r"(\w+) (\d\.\d{4})", said)}


def test_eval_and_predict_take_what_quantize_wrote(workdir, tmp_path, capsys):
    header = header_of(workdir / "int8.safetensors")
    assert (header["bits"], header["notes"]["step"]) == (8, 9)
    found = header["notes"]["scores"]
    assert abs(found["int8"]["eval/loss"] / found["checkpoint"]["eval/loss"] - 1) < 0.02
    joules = header["notes"]["arithmetic_joules"]
    assert joules["int8"] < 0.9 * joules["checkpoint"]  # at width 192 a fifth
    capsys.readouterr()
    modes.evaluate(config_of(), workdir, "last", weights="int8")
    said = capsys.readouterr().out
    assert said.startswith("step 9 in 8 bits  360 images of digits/test")
    assert scores(said)["accuracy"] == pytest.approx(found["int8"]["eval/accuracy"], abs=1e-4)

    run = training.build_run(config_of())
    images = run.eval_source.first(12)["image"]
    write_digits(tmp_path, images)
    lines = tmp_path / "lines.json"
    modes.predict(config_of(), workdir, "last", str(tmp_path), str(lines), None, weights="int8")
    like = run.model(run.abstract_state["params"])
    model, _ = interop.load_integers(like, workdir / "int8.safetensors", network=header["network"])
    logits = np.asarray(model(*run.task.inputs({"image": images})))
    said = map(json.loads, lines.read_text().splitlines())
    taken = [line["classes"][0]["name"] for line in said if "classes" in line]
    assert taken == [run.eval_source.label_names[i] for i in logits.argmax(-1)]


def test_a_report_looks_at_what_quantize_wrote(workdir, monkeypatch, capsys):
    families = ["identities", "fisher", "second-order"]
    written = mock.Mock(side_effect=functools.partial(report.write_study, families=families))
    monkeypatch.setattr(report, "write_study", written)
    modes.analyze(config_of(), workdir, "last", weights="int8")
    assert (workdir / "report-int8" / "report.html").exists()
    verdicts = dict(line.split(": ") for line in capsys.readouterr().out.splitlines()[:-1])
    # What its grid holds, and what small changes of parameters tell of no step function.
    assert verdicts["temperature"] == verdicts["bias-scalar"] == "holds"
    assert verdicts["fisher"] == verdicts["second-order"] == "not measured"
    study = written.call_args.args[0]
    assert study.subject.name == "digits, adder attention, int8"
    said = header_of(workdir / "int8.safetensors")["notes"]["scores"]["int8"]["eval/accuracy"]
    right = study.answers.predicted == study.answers.labels
    assert np.mean(right) == pytest.approx(said, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 5, 4])
def test_what_is_read_is_what_was_written(bits, workdir, tmp_path):
    run = training.build_run(config_of())
    model = run.model(run.init()["params"])
    images = run.task.inputs(run.train_source.first(30))
    few = quantized.quantize_model(model, *images, bits=bits)
    size = interop.save_integers(few, tmp_path / "few", bits=bits, network={"width": 32}, notes={})
    like = run.model(run.abstract_state["params"])
    again, header = interop.load_integers(like, tmp_path / "few", network={"width": 32})
    assert header["bits"] == bits
    jax.tree.map(np.testing.assert_array_equal, *(nnx.split(m)[1] for m in (again, few)))
    kernels = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)) if leaf.ndim == 2)
    assert size == (tmp_path / "few").stat().st_size
    assert size < kernels * bits / 8 + 25_000


PART, DAMAGED = "got another file or part of one", "the file is damaged; write it again"


@pytest.mark.parametrize(
    ("change", "heads", "message"),
    [
        (None, 2, "expected a model in few bits in .*, got no file; --mode=quantize writes it"),
        (lambda whole: whole[:-100], 2, PART),
        (lambda whole: save({"kernel": np.ones(3, np.float32)}), 2, PART),
        (lambda whole: whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:], 2, DAMAGED),
        (lambda whole: whole.replace(rb"\"bits\": 8", rb"\"bits\": 4"), 2, DAMAGED),
        (bytes, 1, r"a network with model.num_heads = 1 in .*int8.safetensors, got 2; write"),
    ],
    ids=["gone", "cut", "floats", "changed", "header", "other"],
)
def test_other_files_are_one_message_before_compute(change, heads, message, workdir, tmp_path):
    name = "int8.safetensors"
    if change:
        (tmp_path / name).write_bytes(change((workdir / name).read_bytes()))
    config = config_of(**{"model.num_heads": heads})
    with pytest.raises(training.RunError, match=message):
        modes.evaluate(config, tmp_path, "last", weights="int8")


def test_arrays_of_another_shape_are_refused(workdir, tmp_path):
    path = workdir / "int8.safetensors"
    like = lambda config: (r := training.build_run(config)).model(r.abstract_state["params"])
    wider = like(config_of(**{"model.mlp_ratio": 3.0}))
    with pytest.raises(ValueError, match="integers of this network in .*, got other arrays"):
        interop.load_integers(wider, path, network=header_of(path)["network"])
    assert load_file(path)["blocks.0.mlp.fc1.weights.packed.columns"].dtype == np.uint8


def test_other_bits_than_a_model_has_are_refused(tmp_path):
    layer, x = layers.AdderLinear(8, 4, rngs=nnx.Rngs(0)), np.ones((3, 8), np.float32)
    few = quantized.quantize_model(layer, x, bits=8)
    with pytest.raises(ValueError, match=r"expected a model in 4 bits, got layers in \[8\]; give"):
        interop.save_integers(few, tmp_path / "few", bits=4, network={}, notes={})
    assert not list(tmp_path.iterdir())


def test_a_page_beside_a_damaged_file_is_one_message(workdir, tmp_path):
    shutil.copytree(workdir / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / "int8.safetensors").write_bytes(b"cut")
    with pytest.raises(training.RunError, match="got another file or part of one"):
        modes.export(config_of(), str(tmp_path), "last", "web")


def test_c_is_written_of_it(workdir, capsys):
    modes.export_c(config_of(), str(workdir), "int8")
    assert "step 9 in 8 bits at" in capsys.readouterr().out
    assert sorted(path.name for path in (workdir / "c").iterdir()) == ["model.bin", "model.c"]


@pytest.mark.skipif(not HAS_CLANG, reason="needs clang and lld")
def test_a_page_has_the_checkpoint_and_what_is_there_of_it_in_few_bits(workdir, capsys):
    modes.export(config_of(), str(workdir), "last", "web")
    assert "model of step 9 at" in capsys.readouterr().out
    found = data_of((workdir / "web.html").read_text())
    assert [network["name"] for network in found["networks"]] == ["float32", "8 bits"]
    multiplied, added = (found["networks"][0][name] for name in ("multiplications", "additions"))
    assert 0 < 5 * multiplied < added
    assert [example["label"] for example in found["examples"]] == list("0123456789")
    assert (found["image"], found["mean"]) == ([8, 8, 1], [float(np.float32(0.3053))])


@pytest.mark.slow
def test_a_run_of_words_goes_on_in_eight_bits_too(tmp_path, capsys):
    write_dictionary(tmp_path / "dictionary")
    config = g2p.transduction("adder")
    config.data.data_dir = str(tmp_path / "dictionary")
    config.optimizer.warmup_epochs, config.num_epochs = 0.0, 0.1
    config.batch_size, config.model.width = 32, 16
    modes.train(config, str(tmp_path))
    modes.quantize(config, str(tmp_path), "last", "int8")
    capsys.readouterr()
    modes.evaluate(config, tmp_path, "last", weights="int8")
    found = header_of(tmp_path / "int8.safetensors")["notes"]["scores"]
    said = scores(capsys.readouterr().out)
    assert said["loss"] == pytest.approx(found["int8"]["eval/loss"], abs=1e-4)
    assert said["loss"] == pytest.approx(found["checkpoint"]["eval/loss"], rel=0.01)
    with pytest.raises(training.RunError, match="expected a vision transformer.*, got a Seq2Seq"):
        modes.export_c(config, str(tmp_path), "int8")


@pytest.mark.slow
def test_flags_that_do_not_go_together_are_refused(run_main, workdir):
    modes_said = "--mode=quantize or eval or analyze or predict or export"
    for flags, message in (
        (["--mode=eval", "--checkpoint=best"], "expected no --checkpoint for weights in few bits"),
        (["--mode=export", "--names=timm"], "expected --weights with --names=c only, got timm"),
        (["--mode=train"], f"expected --weights with {modes_said}"),
    ):
        done = run_main(f"--workdir={workdir}", "--weights=int8", *flags)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
