"""Every setting of a run, declared once.

Declared are type, range, default, reason, and whether it shapes the compiled program.

A configuration (the ``ConfigDict`` that an experiment file makes, or a ``config.json``) is read by
`read` into frozen settings; all that is wrong with it is one message. Nothing here imports JAX, so
a mistake is answered at once.
"""

from adder_flax.settings._compare import (
    CompareSettings,
    LogUniform,
    OneOf,
    Range,
    completed_comparison,
)
from adder_flax.settings._data import DataSettings
from adder_flax.settings._fields import (
    Declared,
    SettingsError,
    completed,
    declarations,
    defaults,
    following,
    join,
    read,
    section,
    setting,
    settle,
    shown,
    unread,
)
from adder_flax.settings._keywords import Options, keywords_of
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
from adder_flax.settings._numbers import is_on, put_numbers, take_numbers
from adder_flax.settings._optimizer import CgFacSettings, KfacSettings, OptimizerSettings
from adder_flax.settings._overrides import misfit
from adder_flax.settings._rules import (
    Choice,
    EachBlock,
    Flag,
    Integer,
    Integers,
    Names,
    Number,
    Numbers,
    Or,
    Refused,
    Rule,
    Span,
    Text,
)
from adder_flax.settings._run import MeshSettings, RunSettings
from adder_flax.settings._task import TASK_SETTINGS, AugmentSettings, ClassificationSettings

__all__ = [
    "DEIT_SIZES",
    "MODEL_SETTINGS",
    "SCORE_OPTIONS",
    "TASK_SETTINGS",
    "AdderOptions",
    "AdderSettings",
    "AdditiveOptions",
    "AttentionSettings",
    "AugmentSettings",
    "BlockSettings",
    "CgFacSettings",
    "KfacSettings",
    "Choice",
    "ClassificationSettings",
    "CompareSettings",
    "DataSettings",
    "Declared",
    "EachBlock",
    "Flag",
    "Integer",
    "LogUniform",
    "MeshSettings",
    "Integers",
    "Names",
    "Number",
    "Numbers",
    "OptimizerSettings",
    "OneOf",
    "Range",
    "Options",
    "Or",
    "Refused",
    "Rule",
    "RunSettings",
    "SettingsError",
    "Span",
    "Text",
    "VitSettings",
    "completed",
    "completed_comparison",
    "declarations",
    "defaults",
    "following",
    "is_on",
    "join",
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
