"""Configurations that no run should start from, and odd ones that every run should.

What is wrong is made in two ways: from each field's declared rule (every wrong type, just outside
each bound), and from a list that was written without a look at the declarations (``NONSENSE``),
which would find a range that is declared too wide. What is right is drawn by Hypothesis from the
declared ranges, at sizes small enough to take a step with.
"""

import copy
import functools
import itertools
import math
import random
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st
from ml_collections import ConfigDict

from adder_flax import settings
from adder_flax.experiments import common
from adder_flax.settings import RunSettings
from benchmarks.hostile.case import Case, Fault, Group, Observed, Verdict, judge_call, judge_process

_KEPT = "everything: nothing was written or computed yet"
_TYPE = Fault("a setting of a wrong type", _KEPT)
_RANGE = Fault("a setting outside its range, NaN, infinite or huge", _KEPT)
_UNKNOWN = Fault("a setting that does not exist", _KEPT)
_MISSING = Fault("a setting or a section that is missing or empty", _KEPT)
_COMPLETED = Fault(
    "options of scores that are missing",
    "they have their defaults: a score may be registered after a configuration",
)
_CONTRADICTION = Fault("settings that contradict each other", _KEPT)
_NONSENSE = Fault(
    "nonsense by common sense, from a list that does not know the declared ranges", _KEPT
)
_NAME = Fault("a score, optimizer, model or data set that nobody registered", _KEPT)
_COMMAND = Fault(
    "a setting out of range on the command line", "the working directory is not even made"
)
_SOUND = Fault("unusual settings inside their ranges", "the run takes its first step")

_OF_SCORES = "model.score_options"
_NAN, _INF = math.nan, math.inf
_RATES = (-1e-3, -1, _NAN, _INF, -_INF, 1e30, 1e300)
_DECAYS = (1, 1.0, 1.5, 2, -0.1, -1, _NAN, _INF)
_DROPS = (1, 1.0, 1.5, -0.1, _NAN, _INF)
_PROBABILITIES = (1.01, 2, -0.01, -1, _NAN, _INF)
_INTERVALS = (-1, -100, 0.5, _NAN, _INF, 2**31, 2**63, 2**64)
_SIZES = (0, -1, -192, 1.5, _NAN, _INF, 2**31, 2**63, 10**30)

NONSENSE: dict[str, tuple[Any, ...]] = {
    "seed": (-1, 2**63, 2**64, 2**32, 0.5, _NAN, _INF),
    "batch_size": _SIZES,
    "eval_batch_size": _SIZES,
    "accumulation_steps": _SIZES,
    "num_epochs": (0, 0.0, -1, _NAN, _INF, -_INF, 1e300),
    "ema_decay": _DECAYS,
    "non_finite": ("", "ignore", "Stop", None),
    "eval_every_steps": _INTERVALS,
    "checkpoint_every_steps": _INTERVALS,
    "log_every_steps": (0, *_INTERVALS),
    "profile_steps": (
        (5, 3),
        (0, 3),
        (-2, -1),
        (1.5, 2.5),
        (1,),
        (1, 2, 3),
        (_NAN, 3),
        "3,5",
        (1, _INF),
    ),
    "topology": ("a\nb", "x" * 10_000, 8),
    "init_from": ("a\0b", "a\nb", 7),
    "mesh.data": (0, -2, 1.5, _NAN),
    "mesh.fsdp": (0, -2, 0.5, _INF),
    "mesh.tensor": (0, -8, "all"),
    "model.width": _SIZES,
    "model.depth": _SIZES,
    "model.num_heads": _SIZES,
    "model.patch_size": _SIZES,
    "model.mlp_ratio": (0, 0.0, -1, 1e-9, _NAN, _INF, 1e9),
    "model.score": ("", ",", "dot,,dot", 3, None, ("dot",)),
    "model.scale": ("", "big", "nan", "inf", "0", "-1", _NAN, 0.0, -1.0),
    "model.temperature": (0, 0.0, -1.0, 1e-30, _NAN, _INF, 1e300, "warm"),
    "model.key_block": ("0", "-1", "1.5", "many", "", "nan", 0, -4, 1.5),
    "model.identity": ("", "yes", True, None, 1),
    "model.attention_dropout_rate": _DROPS,
    "model.dropout_rate": _DROPS,
    "model.drop_path_rate": _DROPS,
    "model.pooling": ("max", "", None, "CLS"),
    "model.qkv_linear": ("sparse", "", None),
    "model.proj_linear": ("Adder", "conv"),
    "model.mlp_linear": ("none", 0, "dense,", "adder,sparse"),
    "model.anneal_blocks": ("backwards", "", None),
    "model.dtype": (
        "",
        "float",
        "float8",
        "int32",
        "complex64",
        "bool",
        "f4",
        "object",
        "float128",
        None,
        32,
        "float64",
    ),
    "model.remat": (1, "yes", None, 0.0),
    "model.score_options.hidden_dim": (-1, 1.5, _NAN, 10**9, "wide"),
    "model.score_options.layer_norm": (1, "on", None),
    "model.score_options.gradient": ("exact", "", None),
    "model.adder_options.x_gradient": ("exact", "", None, "Sign"),
    "model.adder_options.w_gradient": ("none", 1),
    "model.adder_options.hardtanh_slope": (0, -1, _NAN, _INF, 1e30, "steep"),
    "model.adder_options.norm": ("batchnorm", "", None, False),
    "model.adder_options.initial_scale": (0, -1.0, _NAN, _INF, "unit"),
    "model.stem_strides": ("3", "0", "2;1", 2.5),
    "optimizer.schedule": ("linear", "", None, 1),
    "optimizer.clip_scope": ("layers", "", None),
    "optimizer.decay_prototypes": ("perhaps", 2, None),
    "optimizer.learning_rate": _RATES,
    "optimizer.final_learning_rate": _RATES,
    "optimizer.warmup_epochs": (-1, _NAN, _INF, 1e300),
    "optimizer.weight_decay": (-0.1, _NAN, _INF, 1e30),
    "optimizer.b1": _DECAYS,
    "optimizer.b2": _DECAYS,
    "optimizer.eps": (0, -1e-8, _NAN, _INF, 1e30),
    "optimizer.momentum": _DECAYS,
    "optimizer.clip_norm": (-1, _NAN, _INF),
    "optimizer.adder_rate": (-0.2, _NAN, _INF, 1e30),
    "optimizer.cg_fac.learning_rate": _RATES,
    "optimizer.cg_fac.max_iterations": (-1, 1.5, 10**9, _NAN),
    "optimizer.cg_fac.curvature_interval": (-5, 2.5, 2**31),
    "optimizer.cg_fac.curvature_stride": (-2, 1.5, 10**9),
    "optimizer.cg_fac.preconditioner_interval": (-2, 0.5, 2**31),
    "optimizer.cg_fac.damping": (-1, _NAN, _INF, 1e30),
    "optimizer.cg_fac.damping_interval": (-1, 0.5, _NAN),
    "optimizer.cg_fac.factor_decay": _DECAYS,
    "optimizer.cg_fac.momentum": tuple(value for value in _DECAYS if value != -1),
    "optimizer.cg_fac.kl_clip": (-1e-4, _NAN, _INF),
    "optimizer.cg_fac.curvature": ("full", "", None),
    "optimizer.cg_fac.damping_scale": ("layer", "", None),
    "optimizer.cg_fac.fisher": ("monte carlo", "", None),
    "optimizer.cg_fac.reject": (1, "no"),
    "data.image_size": (-1, 7.5, 10**6, _NAN, "large"),
    "data.num_threads": (-1, 1.5, 10**6, _INF),
    "data.on_unreadable": ("ignore", "", None),
    "data.data_dir": ("a\0b", 3, None),
    "task.crop_padding": (-1, 1.5, 10**6, _NAN),
    "task.resized_crop_scale": (
        (1.0, 0.5),
        (0, 0.5),
        (-0.1, 1),
        (0.5, 1.5),
        (_NAN, 1),
        (0.5,),
        (0.1, 0.2, 0.3),
        0.5,
    ),
    "task.resized_crop_ratio": (
        (),
        (2, 1),
        (0, 1),
        (-1, 1),
        (_NAN, _NAN),
        (1, _INF),
        (1e-30, 1),
        (1, 1e30),
        None,
    ),
    "task.flip_probability": _PROBABILITIES,
    "task.brightness": (-0.1, _NAN, _INF, 1e30),
    "task.contrast": (-1, _NAN, _INF, 1e30),
    "task.saturation": (-1, _NAN, _INF, 1e30),
    "task.mixup_alpha": (-1, _NAN, _INF, 1e30),
    "task.cutmix_alpha": (-1, _NAN, _INF, 1e30),
    "task.mix_probability": _PROBABILITIES,
    "task.cutmix_probability": _PROBABILITIES,
    "task.mix_per": ("pixel", "", None),
    "task.erase_probability": _PROBABILITIES,
    "task.erase_scale": ((), (0, 0.5), (0.5, 0.2), (0.5, 1.5), (_NAN, 1), None),
    "task.erase_ratio": ((), (2, 1), (0, 1), (_NAN, _NAN), (1, _INF), None),
    "task.erase_value": ("black", 0, None),
    "task.label_smoothing": (1, 1.5, -0.1, _NAN),
}

CONTRADICTIONS: tuple[dict[str, Any], ...] = (
    {"optimizer.warmup_epochs": 30.0},
    {"optimizer.final_learning_rate": 1.0},
    {"model.num_heads": 5},
    {"model.depth": 3, "model.score": "dot,adder"},
    {"model.depth": 3, "model.mlp_linear": "dense,adder"},
    {"model.distilled": True, "model.pooling": "mean"},
    {"model.anneal_start": 0.5, "model.anneal_end": 0.5},
    {"model.stem_channels": "8,8", "model.stem_strides": "1"},
    {"optimizer.name": "schedule_free_adamw"},
    {"model.width": 3, "model.num_heads": 1, "model.mlp_ratio": 0.1},
    {"batch_size": 64, "accumulation_steps": 3},
    {"batch_size": 64, "accumulation_steps": 128},
    {"mesh.data": -1, "mesh.fsdp": -1},
    {"optimizer.name": "cg_fac", "optimizer.adder_rate": 0.2},
    {
        "optimizer.name": "cg_fac",
        "optimizer.learning_rate": 0.0,
        "optimizer.final_learning_rate": 0.0,
    },
    {"optimizer.cg_fac.curvature": "exact", "optimizer.cg_fac.curvature_interval": 5},
    {"optimizer.cg_fac.step": "quadratic", "optimizer.cg_fac.curvature_interval": 2},
    {"optimizer.cg_fac.solver": "dual"},
    {"optimizer.cg_fac.solver": "inverse", "optimizer.cg_fac.step": "fixed"},
    {"optimizer.cg_fac.damping_interval": 5},
    {"optimizer.cg_fac.learning_rate": 1.0},
    {"task.crop_padding": 9},
    # Those that are seen when the run is built, with the data and the devices at hand.
    {"model.patch_size": 3},
    {"batch_size": 2000},
    {"mesh.data": 1000},
    {"data.image_size": 16},
    {"model.score_options.hidden_dim": 8},
    {"model.score": "adder", "model.score_options.layer_norm": True},
    {"model.score": "bilinear", "model.score_options.gradient": "full"},
)

# Small enough that a step compiles in seconds, whatever else is drawn.
_SMALL = {
    "model.width": st.sampled_from((4, 12, 24)),
    "model.num_heads": st.sampled_from((1, 2, 4)),
    "model.depth": st.just(1),
    "model.mlp_ratio": st.floats(0.25, 2.0),
    "model.patch_size": st.sampled_from((2, 4, 8)),
    "model.distilled": st.just(False),  # goes with the class token alone
    "model.anneal_start": st.just(0.0),
    # Halved once, every such patch is whole.
    "model.stem_channels": st.sampled_from(("", "3", " 4 ")),
    "model.stem_strides": st.just(""),  # as many as convolutions
    "model.score": st.sampled_from(("dot", "bilinear", "additive", "adder", "gaussian")),
    "data.train_split": st.sampled_from(("train", "train[:90%]", "train[50%:]")),
    "data.eval_split": st.sampled_from(("eval", "test", "train[:10%]")),
    "batch_size": st.sampled_from((8, 16, 32)),
    "accumulation_steps": st.sampled_from((1, 2)),
    "eval_batch_size": st.integers(1, 64),
    "num_epochs": st.floats(1e-3, 1e3),
    "optimizer.name": st.sampled_from(("adamw", "sgd", "cg_fac")),
    "optimizer.warmup_epochs": st.just(0.0),
    "optimizer.final_learning_rate": st.just(0.0),
    "optimizer.learning_rate": st.floats(1e-12, 1e6),
    "optimizer.adder_rate": st.just(0.0),
    # The exact Fisher matrix takes minutes to compile.
    "optimizer.cg_fac.curvature": st.sampled_from(("kron", "token")),
    "optimizer.cg_fac.max_iterations": st.integers(1, 3),
    "optimizer.cg_fac.solver": st.just("cg"),
    "optimizer.cg_fac.curvature_interval": st.just(1),
    "optimizer.cg_fac.curvature_stride": st.sampled_from((1, 2, 4)),
    "optimizer.cg_fac.damping_interval": st.just(0),
    "task.crop_padding": st.integers(0, 8),
}
# Facts of the machine and of the data set, not of the run.
_FIXED = (
    "model.name",
    "task.name",
    "data.name",
    "data.data_dir",
    "data.image_size",
    "init_from",
    "topology",
    "profile_steps",
)


def tiny() -> dict[str, Any]:
    """Returns a sound configuration for the handwritten digits."""
    fields = common.deit("multiplicative", "tiny", "digits").to_dict()
    fields["model"].update(width=12, num_heads=2, depth=1, mlp_ratio=2.0)
    return fields


def changed(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy with some fields, named by their paths, set to something else."""
    fields = copy.deepcopy(fields)
    for path, value in changes.items():
        *sections, name = path.split(".")
        functools.reduce(dict.__getitem__, sections, fields)[name] = value
    return fields


def _declared() -> dict[str, settings.Declared]:
    return dict(settings.declarations(RunSettings))


_NEVER = (
    None,
    {},
    {"a": 1},
    1j,
    b"1",
    object(),
    ["a", "b"],
    [[[]]],
    {1},
    np.zeros(2),
    dict,
    lambda: 1,
    "\x1b[31m",
)
_ANYTHING = (*_NEVER, [])


def wrong_types(rule: settings.Rule) -> tuple[Any, ...]:
    """Returns values of types that a rule cannot mean."""
    match rule:
        case settings.Number():
            return (*_ANYTHING, True, "0.5", "", (0.5,), np.array([0.5]))
        case settings.Or():
            texts = ("auto", "3") if not any(isinstance(key, str) for key in rule.meanings) else ()
            return (
                *(v for v in wrong_types(rule.rule) if not isinstance(v, str)),
                *texts,
                "",
                "many",
            )
        case settings.Integer():
            return (*_ANYTHING, True, False, "3", "", (3,), np.array([3]), Fraction(1, 3))
        case settings.Flag():
            return (*_ANYTHING, 0, 1, 1.0, "True", "", np.int64(1))
        case settings.Span():
            # An empty list may be an empty range.
            return (*_NEVER, 1, "1,2", ("a", "b"), ((1,), (2,)), {1: 2})
        case settings.Integers():
            return (
                *_ANYTHING,
                0,
                1.5,
                True,
                (32,),
                "x",
                "3,,4",
                "3;4",
                "1.5",
                "-1",
                "1e3",
                "\u0663",
                "9" * 10_000,
            )
        case settings.Text() | settings.Names():
            return (*_ANYTHING, 0, 1.5, True, ("dot",), "a\nb", "\0", "x" * 1_000_000, "\udc80")
        case _:
            return (*_ANYTHING, True, "", " ", "x" * 1_000_000, ("a",))


def outside(rule: settings.Rule) -> tuple[Any, ...]:
    """Returns numbers just and far outside the bounds of a rule, where it has any."""
    far = (
        _NAN,
        _INF,
        -_INF,
        10**400,
        -(10**400),
        10**5000,
        1e308,
        -1e308,
        np.float64(_NAN),
        np.float32(_INF),
    )
    match rule:
        case settings.Number(low, high, ends):
            below = low if ends[0] == "(" else np.nextafter(low, -_INF)
            above = high if ends[1] == ")" else np.nextafter(high, _INF)
            return (float(below), float(above), np.float64(above), *far)
        case settings.Integer(low, high):
            return (low - 1, high + 1, np.int64(low - 1), low + 0.5, float(low), *far)
        case settings.Or():
            return (-2, -1e-9, *far)
        case settings.Span():
            return (
                (2, 1),
                (-1, 1),
                (1,),
                (1, 2, 3),
                (_NAN, _NAN),
                (1, _INF),
                (-_INF, 1),
                (0, 0),
                (10**400, 10**400),
            )
        case settings.Integers(each, most):
            too_many = ",".join([f"{each.low}"] * (most + 1))
            return (f"{each.low - 1}", f"{each.high + 1}", f"{each.low},{10**30}", too_many)
        case _:
            return ()


def _refused(fields: Any, path: str, *, build: bool = False) -> Observed:
    """Reads, or builds a run from, what is wrong at a path, and judges the message: it has to name
    the place."""
    if build:
        from adder_flax import training

        function = lambda: training.build_run(ConfigDict(fields))
    else:
        function = lambda: settings.read(RunSettings, fields)
    observed = judge_call(function)
    if observed.verdict is Verdict.MESSAGE and path not in observed.seen:
        return Observed(
            Verdict.WRONG, f"expected a message that names {path}, got: {observed.seen}"
        )
    return observed


def _case(
    fault: Fault, changes: dict[str, Any], *, path: str | None = None, build: bool = False
) -> Case:
    name = ", ".join(f"{field}={settings.shown(value)}" for field, value in changes.items())
    path = path if path is not None else f"config.{next(iter(changes))}"
    return Case(fault, name, lambda: _refused(changed(tiny(), changes), path, build=build))


def _type_cases() -> Iterator[Case]:
    for path, declared in _declared().items():
        yield from (_case(_TYPE, {path: value}) for value in wrong_types(declared.rule))


def _range_cases() -> Iterator[Case]:
    for path, declared in _declared().items():
        yield from (_case(_RANGE, {path: value}) for value in outside(declared.rule))


def _unknown_cases(rng: random.Random) -> Iterator[Case]:
    letters = "abcdefghijklmnopqrstuvwxyz_"
    for path in _declared():
        section, _, name = path.rpartition(".")
        at = rng.randrange(len(name))
        typos = (
            name[:at] + name[at + 1 :],
            name[:at] + rng.choice(letters) + name[at:],
            name.upper(),
            f"{name} ",
        )
        far = (
            "".join(rng.choices(letters, k=12)),
            "x" * 100_000,
            "a\nb",
            "__class__",
            "items",
            "",
            3,
            None,
        )
        for unknown in (*typos, rng.choice(far)):
            where = f"{section}." if section else ""
            if f"{where}{unknown}" in _declared() or f"{where}{unknown}" == path:
                continue
            changes = functools.partial(_with_field, section, unknown)
            # The nearest name is due where there is one.
            expected = (
                f"'{name}'"
                if unknown in typos[:2] and len(name) > 3
                else f"config{'.' * bool(section)}{section}"
            )
            yield Case(
                _UNKNOWN,
                f"{where}{settings.shown(unknown)}",
                lambda c=changes, e=expected: _refused(c(), e),
            )


def _with_field(section: str, name: Any, value: Any = 1) -> dict[str, Any]:
    fields = tiny()
    functools.reduce(dict.__getitem__, filter(None, section.split(".")), fields)[name] = value
    return fields


def _missing_cases() -> Iterator[Case]:
    sections = {path.rpartition(".")[0] for path in _declared()} - {""}
    for path in (*_declared(), *sections):
        if path.startswith(f"{_OF_SCORES}."):
            yield Case(_COMPLETED, f"without {path}", lambda path=path: _completed(_without(path)))
        else:
            yield Case(_MISSING, f"without {path}", functools.partial(_refused_without, path))
    yield Case(
        _COMPLETED, f"{_OF_SCORES}={{}}", lambda: _completed(changed(tiny(), {_OF_SCORES: {}}))
    )
    for section, value in itertools.product(sorted(sections), ({}, None, 0, "", [], "adamw", dict)):
        if (section, value) != (_OF_SCORES, {}):
            yield _case(_MISSING, {section: value})
    for whole in ({}, None, [], "config", 3, dict):
        yield Case(
            _MISSING,
            f"config={settings.shown(whole)}",
            functools.partial(_refused, whole, "config"),
        )


def _without(path: str) -> dict[str, Any]:
    fields = tiny()
    *sections, name = path.split(".")
    del functools.reduce(dict.__getitem__, sections, fields)[name]
    return fields


def _refused_without(path: str) -> Observed:
    return _refused(_without(path), f"config.{path}")


def _completed(fields: dict[str, Any]) -> Observed:
    made, whole = (settings.read(RunSettings, each) for each in (fields, tiny()))
    return Observed(Verdict.RIGHT if made == whole else Verdict.WRONG)


def _nonsense_cases() -> Iterator[Case]:
    for path, values in NONSENSE.items():
        # A ratio of 1e-9 contradicts the width; the message is about the field all the same.
        yield from (_case(_NONSENSE, {path: value}) for value in values)


def _contradiction_cases() -> Iterator[Case]:
    yield from (_case(_CONTRADICTION, changes, path="", build=True) for changes in CONTRADICTIONS)


def _name_cases() -> Iterator[Case]:
    names = (
        "",
        " ",
        "dott",
        "ADDER",
        "nobody",
        "x" * 150,
        "../../etc",
        "dot ",
        "None",
        "ünïcode",
        "a b",
        "__main__",
    )
    for path, name in itertools.product(
        ("model.score", "optimizer.name", "model.name", "data.name"), names
    ):
        # Names are taken without the blanks around them.
        if (path, name) != ("model.score", "dot "):
            yield _case(_NAME, {path: name}, path="", build=True)


_COMMANDS = (
    *(
        "seed=-1",
        "seed=4294967296",
        "num_epochs=nan",
        "num_epochs=inf",
        "num_epochs=0",
        "ema_decay=1",
        "batch_size=0",
    ),
    *(
        "log_every_steps=0",
        "profile_steps=(5,3)",
        "model.width=0",
        "model.num_heads=5",
        "model.mlp_ratio=0",
    ),
    *(
        "model.temperature=1e-30",
        "model.dtype=float",
        "model.attention_dropout_rate=1",
        "model.key_block=0",
    ),
    *(
        "optimizer.b1=1",
        "optimizer.learning_rate=nan",
        "optimizer.eps=0",
        "optimizer.cg_fac.max_iterations=0",
    ),
    *(
        "task.resized_crop_scale=(1.0,0.5)",
        "task.flip_probability=2",
        "mesh.data=0",
        "model.name=vitt",
    ),
)


def _command_cases() -> Iterator[Case]:
    yield from (
        Case(_COMMAND, setting, functools.partial(_refused_on_command_line, setting))
        for setting in _COMMANDS
    )


def _refused_on_command_line(setting: str) -> Observed:
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        flags = ("--config=experiments/deit_tiny.py", f"--config.{setting}", f"--workdir={workdir}")
        observed = judge_process(["main.py", *flags])
        return Observed(Verdict.WRONG, f"{workdir} was made") if workdir.exists() else observed


def inside(rule: settings.Rule) -> st.SearchStrategy:
    """Returns a Hypothesis strategy that draws what a rule allows."""
    match rule:
        case settings.Number(low, high, ends):
            # Subnormal numbers are zero on a device.
            numbers = functools.partial(st.floats, low, high, allow_subnormal=False)
            return numbers(exclude_min=ends[0] == "(", exclude_max=ends[1] == ")")
        case settings.Integer(low, high):
            return st.integers(low, high)
        case settings.Or():
            numbers, keys = inside(rule.rule), tuple(rule.meanings)
            return st.one_of(
                st.sampled_from(keys), numbers.map(str) if isinstance(keys[0], str) else numbers
            )
        case settings.Flag():
            return st.booleans()
        case settings.Choice():
            return st.sampled_from(tuple(rule.meanings))
        case settings.EachBlock():
            return inside(rule.rule)
        case settings.Span():
            pairs = st.tuples(inside(rule.ends), inside(rule.ends)).map(
                lambda pair: tuple(sorted(pair))
            )
            return st.one_of(st.just(()), pairs) if rule.optional else pairs
    raise TypeError(f"expected a rule that Hypothesis can draw from, got {rule}; add it here")


# Hypothesis likes to draw again what it drew before, with small changes.
_DRAWS_PER_CASE = 10


def sound_settings(seed: int, count: int) -> list[dict[str, Any]]:
    """Returns changes of the tiny configuration that lie inside the declared ranges."""
    drawn: list[dict[str, Any]] = []
    strategy = st.fixed_dictionaries(
        {
            path: _SMALL[path] if path in _SMALL else inside(declared.rule)
            for path, declared in _declared().items()
            if path not in _FIXED and not path.startswith(("mesh.", "model.score_options."))
        }
    )

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=_DRAWS_PER_CASE * count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(strategy)
    def draw(changes):
        drawn.append(changes)

    draw()
    return drawn[::_DRAWS_PER_CASE][:count]


def _sound_cases(seed: int, count: int) -> Iterator[Case]:
    for number, changes in enumerate(sound_settings(seed, count)):
        yield Case(_SOUND, f"draw {number}: {changes}", functools.partial(_takes_a_step, changes))


def _takes_a_step(changes: dict[str, Any]) -> Observed:
    import jax

    from adder_flax import training

    def step() -> dict[str, Any]:
        run = training.build_run(ConfigDict(changed(tiny(), changes)))
        batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), training.abstract_batch(run))
        _, metrics = run.train_step(run.init(), batch, run.hyper)
        return jax.device_get(metrics)

    return judge_call(step, lambda metrics: bool(np.isfinite(metrics["loss"])))


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yields cases, each fault in its share."""
    rng = random.Random(seed)
    processes, sound = max(1, count // 100), max(1, count // 100)
    kinds: list[list[Case]] = [
        list(kind)
        for kind in (
            _type_cases(),
            _range_cases(),
            _unknown_cases(rng),
            _missing_cases(),
            _nonsense_cases(),
            _contradiction_cases(),
            _name_cases(),
        )
    ]
    for kind in kinds:
        rng.shuffle(kind)
    command = list(_command_cases())
    rng.shuffle(command)
    slow = [*command[:processes], *_sound_cases(seed, sound)][: max(1, count)]
    yield from slow[:count]
    mixed = itertools.chain.from_iterable(itertools.zip_longest(*kinds))
    yield from itertools.islice(filter(None, mixed), count - len(slow))


GROUP = Group("settings", 3000, cases)
