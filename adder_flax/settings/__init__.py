"""Every setting of a run, declared once.

Declared are type, range, default, reason, and whether it shapes the compiled program.

A configuration (the ``ConfigDict`` that an experiment file makes, or a ``config.json``) is read by
`read` into frozen settings; all that is wrong with it is one message. Nothing here imports JAX, so
a mistake is answered at once.
"""

from adder_flax.settings._compare import CompareSettings, LogUniform, OneOf, Range
from adder_flax.settings._declare import (
    Declared,
    declarations,
    declared_in,
    defaults,
    following,
    join,
    section,
    setting,
    settle,
    shown,
)
from adder_flax.settings._model import (
    DEIT_SIZES,
    MODEL_SETTINGS,
    SCORE_OPTIONS,
    AdderOptions,
    AdderSettings,
    AdditiveOptions,
    AttentionSettings,
    BlockSettings,
    VitSettings,
)
from adder_flax.settings._optimizer import CgFacSettings, KfacSettings, OptimizerSettings
from adder_flax.settings._read import (
    SettingsError,
    completed,
    filled,
    json_schema,
    misfit,
    read,
    unread,
)
from adder_flax.settings._run import DataSettings, MeshSettings, RunSettings
from adder_flax.settings._task import TASK_SETTINGS, AugmentSettings, ClassificationSettings
from adder_flax.settings._use import Options, is_on, keywords_of, put_numbers, take_numbers

__all__ = [
    "AdderOptions",
    "AdderSettings",
    "AdditiveOptions",
    "AttentionSettings",
    "AugmentSettings",
    "BlockSettings",
    "CgFacSettings",
    "KfacSettings",
    "ClassificationSettings",
    "CompareSettings",
    "DEIT_SIZES",
    "DataSettings",
    "Declared",
    "LogUniform",
    "MODEL_SETTINGS",
    "MeshSettings",
    "OneOf",
    "OptimizerSettings",
    "Options",
    "Range",
    "RunSettings",
    "SCORE_OPTIONS",
    "SettingsError",
    "TASK_SETTINGS",
    "VitSettings",
    "completed",
    "declarations",
    "declared_in",
    "defaults",
    "filled",
    "following",
    "is_on",
    "join",
    "json_schema",
    "keywords_of",
    "misfit",
    "put_numbers",
    "read",
    "section",
    "setting",
    "settle",
    "shown",
    "take_numbers",
    "unread",
]
