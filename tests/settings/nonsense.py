"""Nonsense by common sense, written without a look at the declarations of the settings.

It would find a range that is declared too wide.
"""

import copy
import functools
import math
from typing import Any

from adder_flax.experiments import common

_NAN, _INF = math.nan, math.inf
_RATES = (-1e-3, -1, _NAN, _INF, -_INF, 1e30, 1e300)
_SCALES = (-1, -0.1, _NAN, _INF, 1e30)
_DECAYS = (1, 1.0, 1.5, 2, -0.1, -1, _NAN, _INF)
_DROPS = (1, 1.0, 1.5, -0.1, _NAN, _INF)
_PROBABILITIES = (1.01, 2, -0.01, -1, _NAN, _INF)
_INTERVALS = (-1, -100, 0.5, _NAN, _INF, 2**31, 2**63, 2**64)
_SIZES = (0, -1, -192, 1.5, _NAN, _INF, 2**31, 2**63, 10**30)
_COUNTS = (-2, 1.5, 10**9, _NAN)
_WORDS = ("", "Adder", "backwards", 1, None)


def _each(section: str, names: str, values: Any) -> dict[str, Any]:
    return {f"{section}.{name}".lstrip("."): values for name in names.split()}


NONSENSE: dict[str, tuple[Any, ...]] = {
    **_each("", "batch_size eval_batch_size accumulation_steps", _SIZES),
    **_each("model", "width depth num_heads patch_size", _SIZES),
    **_each("", "eval_every_steps checkpoint_every_steps", _INTERVALS),
    **_each("optimizer", "b1 b2 momentum", _DECAYS),
    **_each("optimizer", "learning_rate final_learning_rate kfac.learning_rate", _RATES),
    **_each("optimizer", "weight_decay adder_rate kfac.damping", _SCALES),
    **_each("optimizer", "kfac.iterations kfac.curvature_stride", _COUNTS),
    **_each("model", "attention_dropout_rate dropout_rate drop_path_rate", _DROPS),
    **_each("task", "flip_probability mix_probability erase_probability", _PROBABILITIES),
    **_each("task", "color_jitter mixup_alpha cutmix_alpha", _SCALES),
    **_each("mesh", "data fsdp tensor", (0, -2, 1.5, _NAN, _INF, "all")),
    "non_finite": _WORDS,
    **_each("model", "pooling anneal_blocks qkv_linear proj_linear remat", _WORDS),
    **_each("model.score_options", "layer_norm gradient", _WORDS),
    **_each("model.adder_options", "x_gradient w_gradient norm", _WORDS),
    **_each("optimizer", "schedule clip_scope kfac.step cg_fac.solver cg_fac.fisher", _WORDS),
    **_each("", "data.on_unreadable task.mix_per", _WORDS),
    "seed": (-1, 2**63, 2**64, 2**32, 0.5, _NAN, _INF),
    "num_epochs": (0, 0.0, -1, _NAN, _INF, -_INF, 1e300),
    "ema_decay": _DECAYS,
    "log_every_steps": (0, *_INTERVALS),
    "profile_steps": ((5, 3), (0, 3), (1.5, 2.5), (1,), (1, 2, 3), "3,5", (1, _INF)),
    "topology": ("a\nb", "x" * 10_000, 8),
    "init_from": ("a\0b", "a\nb", 7),
    "model.mlp_ratio": (0, 0.0, -1, 1e-9, _NAN, _INF, 1e9),
    "model.score": ("", ",", "dot,,dot", 3, None, ("dot",)),
    "model.scale": ("", "big", "nan", "inf", "0", "-1", _NAN, 0.0, -1.0),
    "model.temperature": (0, 0.0, -1.0, 1e-30, _NAN, _INF, 1e300, "warm"),
    "model.key_block": ("0", "-1", "1.5", "many", "", "nan", 0, -4, 1.5),
    "model.identity": ("", "yes", True, None, 1),
    "model.registers": (-1, 1.5, "two", None),
    "model.mlp_linear": ("none", 0, "dense,", "adder,sparse"),
    "model.dtype": ("", "float", "float8", "int32", "f4", None, 32, "float64"),
    "model.score_options.hidden_dim": (-1, 1.5, _NAN, 10**9, "wide"),
    "model.adder_options.hardtanh_slope": (0, -1, _NAN, _INF, 1e30, "steep"),
    "model.adder_options.initial_scale": (0, -1.0, _NAN, _INF, "unit"),
    "model.stem_strides": ("3", "0", "2;1", 2.5),
    "optimizer.decay_prototypes": ("perhaps", 2, None),
    "optimizer.warmup_epochs": (-1, _NAN, _INF, 1e300),
    "optimizer.clip_norm": (-1, _NAN, _INF),
    "optimizer.kfac.curvature_interval": (-5, 2.5, 2**31),
    "optimizer.kfac.inverse_interval": (-2, 0.5, 2**31),
    "optimizer.kfac.kl_clip": (-1e-4, 0.0, _NAN, _INF),
    "optimizer.kfac.product_dtype": ("float16", "", None),
    "optimizer.cg_fac.iterations": (-1, *_COUNTS),
    "data.image_size": (-1, 7.5, 10**6, _NAN, "large"),
    "data.data_dir": ("a\0b", 3, None),
    "task.crop_padding": (-1, 1.5, 10**6, _NAN),
    "task.resized_crop_scale": ((1.0, 0.5), (0, 0.5), (0.5, 1.5), (_NAN, 1), (0.5,), 0.5),
    "task.resized_crop_ratio": ((), (2, 1), (0, 1), (1, _INF), (1e-30, 1), (1, 1e30), None),
    "task.label_smoothing": (1, 1.5, -0.1, _NAN),
}

CONTRADICTIONS: tuple[dict[str, Any], ...] = (
    {"optimizer.warmup_epochs": 30.0},
    {"optimizer.final_learning_rate": 1.0},
    {"model.num_heads": 5},
    {"model.depth": 3, "model.score": "dot,adder"},
    {"model.depth": 3, "model.mlp_linear": "dense,adder"},
    {"model.distilled": True, "model.pooling": "mean"},
    {"model.distilled": True, "model.fc_norm": True},
    {"model.anneal_start": 0.5, "model.anneal_end": 0.5},
    {"model.stem_channels": "8,8", "model.stem_strides": "1"},
    {"optimizer.name": "schedule_free_adamw"},
    {"model.width": 3, "model.num_heads": 1, "model.mlp_ratio": 0.1},
    {"batch_size": 64, "accumulation_steps": 3},
    {"batch_size": 64, "accumulation_steps": 128},
    {"mesh.data": -1, "mesh.fsdp": -1},
    {"optimizer.name": "cg_fac", "optimizer.adder_rate": 0.2},
    _each("optimizer", "learning_rate final_learning_rate", 0.0) | {"optimizer.name": "cg_fac"},
    {"optimizer.kfac.step": "clip", "optimizer.kfac.iterations": 0},
    {"optimizer.kfac.step": "share", "optimizer.kfac.learning_rate": 1.0},
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
