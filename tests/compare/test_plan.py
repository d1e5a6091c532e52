"""What an experiment file may say of a comparison, and which runs follow from it."""

import importlib

import pytest
from ml_collections import ConfigDict

from adder_flax import packed
from adder_flax.compare import Comparison, Plan
from adder_flax.compare.plan import FINAL, TUNING, digest
from adder_flax.errors import RunError
from adder_flax.settings import RunSettings, defaults, read
from tests.compare.tiny import make_config
from tests.processes import ROOT

MECHANISMS = {"mechanism": {"dot": {}, "additive": {"model": {"score": "additive"}}}}
TWO = MECHANISMS | {"width": {"narrow": {}, "wide": {"model": {"width": 32}}}}
RATES = {"optimizer": {"learning_rate": ("log", 1e-3, 1e-2)}}


def one_level(fields):
    return {"factors": {"m": {"a": fields}}}


def searched(value, group="optimizer", field="learning_rate"):
    return {"factors": MECHANISMS, "search": {group: {field: value}}}


MISTAKES = [
    ({"factors": {}}, r"config\.factors: expected by factor and by level"),
    ({"factors": {"mechanism": "dot"}}, r"config\.factors: expected by factor and by level"),
    (
        {"factors": MECHANISMS, "baseline": {"mechanism": "dott"}},
        "one of additive, dot, got 'dott'",
    ),
    ({"baseline": {"data": "digits"}}, r"config\.baseline: .* among mechanism, got 'data'"),
    (searched(("log", 2, 1)), r"config\.search: .*0 < low < high"),
    (searched(1e-2), r"config\.search: expected"),
    ({"search": {"seed": ("list", 1, 2)}}, "expected seed to be left to the comparison"),
    (searched(("list", "a", "b"), "model", "score"), "that no level sets"),
    (one_level({"model": {"scor": "dot"}}), r"config of a\.model: expected no field 'scor'"),
    (one_level({"model": {"width": 17}}), r"config of a\.model\.num_heads: expected .* 17"),
    ({"factors": {"m": {"a b": {}, "a_b": {}}}}, "of levels that differ in letters and digits"),
    (
        {"factors": MECHANISMS | {"other": {"b": {"model": {"score": "adder"}}}}},
        "arms that differ, got 'additive, b' and 'dot, b'",
    ),
    ({"search": {"num_epochs": ("log", 0.1, 0.4)}}, "arms of as many steps, .* got num_epochs"),
    ({"match": "operations"}, r"config\.match: expected .*steps.*nothing.*, got 'operations'"),
    (one_level({"model": {"width": ("log", 2, 1)}}), r"config\.factors: .* 0 < low < high"),
    (one_level({"seed": ("list", 1, 2)}), "expected seed to be left to the comparison"),
    ({"seeds": 0}, r"config\.seeds: expected an integer from 1"),
    ({"validation_percent": 0}, r"config\.base\.data\.eval_split: expected the name of the split"),
    ({"base": {"data.train_split": "train[:50%]"}}, "base.data.train_split: expected a whole"),
    (
        {"factors": {"m": {"a": {}, "b": {"num_epochs": 3.0}}}, "baseline": {"m": "a"}},
        r"num_epochs of 'b' to be 0\.2, that of 'a', as config\.match is 'steps', got 3\.0",
    ),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES)
def test_a_mistake_is_one_message(fields, message):
    with pytest.raises(RunError, match=message):
        Plan(make_config(**fields))


def test_arms_are_all_combinations_and_have_their_baselines():
    plan = Plan(make_config(factors=TWO, baseline={"mechanism": "dot"}))
    assert list(plan.arms) == ["dot, narrow", "dot, wide", "additive, narrow", "additive, wide"]
    assert plan.baseline_of(plan.arms["additive, wide"]).name == "dot, wide"
    assert plan.baseline_of(plan.arms["dot, wide"]) is None
    config = plan.cell(plan.arms["additive, wide"], FINAL, 2, {}).config
    found = config.model.score, config.model.width, config.seed, config.init
    assert found == ("additive", 32, 2, "path")
    assert (config.data.train_split, config.data.eval_split) == ("train[:90%]", "train[90%:]")
    read(RunSettings, config)


# (name, arms, data or other parts…)
EXPERIMENTS = [
    ("mechanisms", 6, None, "fashion_mnist", "cifar10"),
    ("trained", 7, None),
    ("trained", 5, "cifar10"),
    ("trained", 2, "twice,digits"),
    ("second_order", 7, None, "fashion_mnist", "cifar10"),
    ("adder", 17, None, "cifar10"),
    ("deit_tiny", 4, None),
    ("sphere", 4, None),
    ("g2p", 5, None),
    ("curvature", 7, None),
    ("default", 9, None),
    ("healing", 2, None, "attention,cifar10"),
    ("blocks", 7, "fashion_mnist"),
    ("kfac", 12, None, "adder,digits"),
    ("optimizers", 10, None, "adder,fashion_mnist", "autoencoder", "g2p"),
]


@pytest.mark.parametrize(
    ("name", "arms", "data"),
    [(name, arms, data) for name, arms, *parts in EXPERIMENTS for data in parts],
)
def test_the_comparisons_among_the_experiments_can_be_read(name, arms, data):
    plan = Plan(importlib.import_module(f"experiments.compare_{name}").get_config(data))
    configs = {str(plan.cell(arm, FINAL, 0, {}).config) for arm in plan.arms.values()}
    assert len(configs) == len(plan.arms) == arms


def test_arms_that_match_in_nothing_keep_their_own_schedules(tmp_path):
    levels = {"dot": {}, "shorter": {"num_epochs": 0.1}}
    config = make_config(factors={"arm": levels}, baseline={"arm": "dot"}, match="nothing")
    comparison = Comparison(config, tmp_path)
    cells = (comparison.plan.cell(arm, FINAL, 0, {}) for arm in comparison.plan.arms.values())
    assert [cell.config.num_epochs for cell in cells] == [0.2, 0.1]
    assert not list(tmp_path.iterdir())
    Plan(make_config(factors={"arm": levels}, match="nothing"))


def test_tuning_has_seeds_of_its_own():
    plan = Plan(make_config(factors=MECHANISMS, search=RATES, tuning_seeds=2))
    arm, values = plan.arms["dot"], {"optimizer.learning_rate": 0.01}
    cells = [plan.cell(arm, TUNING, seed, values) for seed in plan.tuning_seeds]
    assert not {cell.seed for cell in cells} & set(range(plan.settings.seeds))
    assert {cell.config.optimizer.learning_rate for cell in cells} == {0.01}


def test_what_is_searched_is_in_the_middle_of_its_range_until_it_has_a_value():
    # Whose default is no middle of it.
    steps = {"step": "share", "learning_rate": ("log", 3e-3, 0.3)}
    levels = {"trust": {"optimizer": {"name": "kfac", "kfac": steps}}}
    plan = Plan(make_config(factors={"optimizer": levels}))
    cell = plan.cell(plan.arms["trust"], FINAL, 0, {})
    assert cell.config.optimizer.kfac.learning_rate == 0.03
    read(RunSettings, cell.config)
    steps["learning_rate"] = ("log", 1.0, 2.0)
    with pytest.raises(RunError, match=r"config of trust\.optimizer\.kfac\.learning_rate"):
        Plan(make_config(factors={"optimizer": levels}))


def test_a_level_can_have_a_space_of_its_own():
    levels = {
        "adamw": {"optimizer": {"learning_rate": ("log", 1e-3, 1e-2)}},
        "sgd": {"optimizer": {"name": "sgd", "momentum": ("list", 0.5, 0.9)}},
    }
    shared = {"optimizer": {"weight_decay": ("log", 1e-3, 1e-1)}}
    plan = Plan(make_config(factors={"optimizer": levels}, search=shared))
    spaces = {name: set(arm.space) for name, arm in plan.arms.items()}
    decay, rate = "optimizer.weight_decay", "optimizer.learning_rate"
    momentum = "optimizer.momentum"
    assert spaces == {"adamw": {decay, rate}, "sgd": {decay, momentum}}
    assert plan.searched == (decay, rate, momentum)
    cell = plan.cell(plan.arms["sgd"], FINAL, 0, {decay: 0.01, momentum: 0.5})
    optimizer = cell.config.optimizer
    assert (optimizer.name, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.5, 0.01)
    # What an arm does not tune is what the base says.
    assert optimizer.learning_rate == plan.settings.base.optimizer.learning_rate


def test_what_a_cell_is_called_follows_from_what_it_computes():
    plan = Plan(make_config(factors=MECHANISMS))
    name = lambda plan: plan.cell(plan.arms["dot"], FINAL, 0, {}).id
    same = Plan(make_config(factors=MECHANISMS, base={"log_every_steps": 7}, seeds=9))
    assert name(plan) == name(same)
    # A run may be resumed with another of the latter, but as a whole it has another end.
    for base in ({"batch_size": 16}, {"non_finite": "skip"}):
        assert name(plan) != name(Plan(make_config(factors=MECHANISMS, base=base)))
    # A field that a later version adds leaves names as they are.
    fields = defaults(RunSettings)
    later = fields | {"seed": 3}
    earlier = {name: value for name, value in later.items() if name != "non_finite"}
    assert digest(ConfigDict(later)) == digest(ConfigDict(earlier)) != digest(ConfigDict(fields))


@pytest.mark.slow
def test_every_record_of_a_page_has_the_name_of_its_configuration():
    """By which a later version finds it: where that fails, a page's runs would all be run anew."""
    files = sorted((ROOT / "results").glob(f"*/{packed.NAME}"))
    assert files
    for file in files:
        _, records = packed.read_packed(file)
        names = {name: digest(record["config"]) for name, record in records.items()}
        assert [name for name, found in names.items() if not name.endswith(found)] == [], file


def test_what_an_arm_leaves_to_its_step_names_it_as_if_it_were_said():
    fields = {"name": "kfac", "kfac": {"step": "clip"}}
    said = fields | {"kfac": {"step": "clip", "learning_rate": 1.0, "iterations": 1}}
    other = fields | {"kfac": {"step": "clip", "learning_rate": 0.1}}
    own, same, changed = (_optimizer(f) for f in (fields, said, other))
    assert digest(own) == digest(same) != digest(changed)
    unread = {"name": "adamw", "kfac": {"damping": 3.0}}
    assert digest(_optimizer(unread)) == digest(_optimizer({"name": "adamw"}))


def _optimizer(fields):
    config = defaults(RunSettings)
    own = config["optimizer"]
    config["optimizer"] = own | fields | {"kfac": own["kfac"] | fields.get("kfac", {})}
    return config
