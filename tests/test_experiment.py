"""An experiment file that makes no configuration is one message with the line."""

import json
import sys

import pytest

from adder_flax import compare, packed
from adder_flax.errors import RunError
from adder_flax.experiment import load_experiment
from adder_flax.settings import RunSettings, completed, defaults, read
from tests.processes import ROOT

_CONFIG = "from ml_collections import ConfigDict\n"


@pytest.mark.parametrize(
    ("source", "argument", "message"),
    [
        ("x = 1\nraise KeyError('why')", "", "KeyError from line 2 of .*why"),
        ("x = (\n", "", "syntax error in line 1"),
        ("import sys; sys.exit(0)", "", "SystemExit from line 1"),
        ("def get_config():\n    return get_config()", "", "RecursionError from line 2"),
        ("", "", "a function get_config in .*, got None"),
        ("def get_config(): pass", "", "to return an ml_collections.ConfigDict, got NoneType"),
        ("def get_config(): return 1", ":data", "takes 0 positional arguments but 1 was given"),
        ("def get_config(data): return data", "", "missing 1 required positional argument"),
    ],
)
def test_a_bad_file_is_one_message(source, argument, message, tmp_path):
    path = tmp_path / "experiment.py"
    path.write_text(source)
    with pytest.raises(RunError, match=message):
        load_experiment(f"{path}{argument}")


def test_what_is_no_text_is_one_message(tmp_path):
    (tmp_path / "binary").write_bytes(b"\0\xff")
    for name, message in {".": "Is a directory", "binary": "null byte"}.items():
        with pytest.raises(RunError, match=message):
            load_experiment(str(tmp_path / name))


def test_a_good_file_gives_its_configuration(tmp_path):
    path = tmp_path / "experiment.py"
    path.write_text(_CONFIG + "def get_config(data='none'): return ConfigDict({'data': data})")
    assert load_experiment(str(path)).data == "none"
    assert load_experiment(f"{path}:cifar10").data == "cifar10"


def test_a_configuration_in_json_is_read_with_its_tuples(tmp_path):
    path, fields = tmp_path / "config.json", {"task": {"resized_crop_scale": [0.8, 1.0]}}
    for whole in (fields, {"config": fields, "seconds": 1.0}):
        path.write_text(json.dumps(whole))
        assert load_experiment(str(path)).task.resized_crop_scale == (0.8, 1.0)


@pytest.mark.parametrize("text", ["{", "[]", '{"config": 3}', "[" * 100_000, '{"a.b": 1}'])
def test_json_that_is_no_configuration_is_one_message(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(RunError, match=r"expected the configuration of a run in .*\.json, got"):
        load_experiment(str(path))


def test_a_file_imports_from_those_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_this_one.py").write_text("ANSWER = 42")
    code = "import beside_this_one as b\ndef get_config(): return ConfigDict({'a': b.ANSWER})"
    (tmp_path / "mine.py").write_text(_CONFIG + code)
    assert load_experiment(str(tmp_path / "mine.py")).a == 42


def test_one_that_comes_with_the_package_is_found_by_its_name_from_anywhere(tmp_path, monkeypatch):
    named = load_experiment(str(ROOT / "experiments" / "adder_deit_tiny.py") + ":cifar10")
    monkeypatch.chdir(tmp_path)
    assert load_experiment("adder_deit_tiny:cifar10").to_dict() == named.to_dict()
    with pytest.raises(RunError, match="got 'adder_deit_tinny'; did you mean 'adder_deit_tiny'"):
        load_experiment("adder_deit_tinny")
    code = "def get_config(): return ConfigDict({'mine': True})"
    (tmp_path / "adder_deit_tiny").write_text(_CONFIG + code)
    assert load_experiment("adder_deit_tiny").mine


def test_what_an_earlier_version_left_is_read_by_this_one(tmp_path):
    """New fields get defaults, old ones that change nothing go: in base, levels and records."""
    base = defaults(RunSettings)
    del base["data"]["repeats"], base["ema_decay"]
    base["init_from_network"] = "read"
    levels = {"size": {"8": {}, "16": {"model": {"width": 24}, "init_from_positions": "timm"}}}
    record = base | {"seed": 3}
    file = tmp_path / packed.NAME
    packed.write_packed(file, {"base": base, "factors": levels}, {"a": {"config": record}})
    whole = load_experiment(str(file))
    assert whole.base.to_dict() == defaults(RunSettings)
    plan = compare.Plan(whole)
    widths = {a.name: plan.cell(a, "final", 0, {}).config.model.width for a in plan.arms.values()}
    assert widths == {"8": 192, "16": 24}
    again = load_experiment(f"{file}#a")
    assert again.to_dict() == completed(RunSettings, defaults(RunSettings) | {"seed": 3})
    packed.write_packed(file, {}, {"a": {"config": record | {"init_from_network": "ask"}}})
    with pytest.raises(RunError, match="network: expected 'read' or 'same', .* got 'ask'"):
        read(RunSettings, load_experiment(f"{file}#a"))
