"""Settings of the tasks."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from adder_flax.registry import Registry
from adder_flax.settings._fields import setting
from adder_flax.settings._rules import Choice, Flag, Integer, Number, Span, Text

_PROBABILITY = Number(0, 1)
_FRACTION = Number(0, 1, "(]")
# Far beyond use, and small enough that no factor overflows float32.
_STRENGTH = Number(0, 100)
_ALPHA = Number(0, 1000)
_ASPECT = Number(0.01, 100)


@dataclasses.dataclass(frozen=True)
class AugmentSettings:
    """What is done to images that are trained on, see `adder_flax.data.augment`.

    By default DeiT's recipe with its jitter of colours in place of RandAugment.
    """

    crop_padding: int = setting(
        0, Integer(0, 8192), "of each side before a random crop, pixels; 0 is off"
    )
    resized_crop_scale: tuple[float, float] | None = setting(
        (0.08, 1.0),
        Span(_FRACTION, optional=True),
        "area of a random resized crop, as a fraction; () is off",
    )
    resized_crop_ratio: tuple[float, float] = setting(
        (3 / 4, 4 / 3), Span(_ASPECT), "its width over its height"
    )
    flip_probability: float = setting(
        0.5, _PROBABILITY, "of mirroring left and right", data="if on"
    )
    brightness: float = setting(
        0.3, _STRENGTH, "b gives a factor in [1 - b, 1 + b]; 0 is off", data="if on"
    )
    contrast: float = setting(
        0.3, _STRENGTH, "likewise, from the mean grey; 0 is off", data="if on"
    )
    saturation: float = setting(
        0.3, _STRENGTH, "likewise, from the grey image; 0 is off", data="if on"
    )
    hue: float = setting(
        0.0, Number(0, 0.5), "turned by up to this part of the circle; 0 is off", data="if on"
    )
    rand_augment_magnitude: float = setting(
        0.0,
        Number(0, 10),
        "RandAugment with timm's fifteen operations, each done with probability 1/2; 0 is off",
        data="if on",
    )
    rand_augment_std: float = setting(
        0.0, Number(0, 100), "of the magnitude, normal for each operation and image", data="if on"
    )
    rand_augment_layers: int = setting(2, Integer(1, 64), "operations drawn for an image")
    rand_augment_increasing: bool = setting(
        True,
        Flag(),
        "all operations change more at larger magnitudes; False: with the paper's ranges",
    )
    rand_augment_interpolation: str = setting(
        "bicubic", Choice("bicubic", "random"), "of moved images: random draws bilinear or bicubic"
    )
    three_augment: bool = setting(
        False, Flag(), "grey, solarized or blurred, one of them for each image (DeiT III)"
    )
    mixup_alpha: float = setting(
        0.8, _ALPHA, "Mixup with weight Beta(alpha, alpha); 0 is off", data="if on"
    )
    cutmix_alpha: float = setting(
        1.0, _ALPHA, "CutMix with area Beta(alpha, alpha); 0 is off", data="if on"
    )
    mix_probability: float = setting(1.0, _PROBABILITY, "of mixing at all", data=True)
    cutmix_probability: float = setting(
        0.5, _PROBABILITY, "of CutMix and not Mixup where both are on", data=True
    )
    mix_per: str = setting(
        "batch", Choice("batch", "element"), "for what a weight, a box and the choice are drawn"
    )
    erase_probability: float = setting(
        0.25, _PROBABILITY, "of erasing a rectangle; 0 is off", data="if on"
    )
    erase_scale: tuple[float, float] = setting(
        (0.02, 1 / 3), Span(_FRACTION), "its area, as a fraction"
    )
    erase_ratio: tuple[float, float] = setting(
        (0.3, 1 / 0.3), Span(_ASPECT), "its width over its height"
    )
    erase_value: Literal["noise", "zero"] = setting(
        "noise", Choice("noise", "zero"), "what fills it: unit normal noise, or the mean colour"
    )
    label_smoothing: float = setting(
        0.1, Number(0, 1, "[)"), "share of the targets that all classes get", data=True
    )


@dataclasses.dataclass(frozen=True)
class ClassificationSettings(AugmentSettings):
    """Classification of images."""

    name: str = setting(
        "classification", Text("the name of a task"), "the task, whose own fields follow"
    )
    loss: str = setting(
        "softmax",
        Choice("softmax", "sigmoid"),
        "cross-entropy of one class out of all; sigmoid: of each by itself, all that are mixed "
        "being there (DeiT III)",
    )

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        if self.loss == "sigmoid" and self.label_smoothing:
            yield (
                f"{where}.label_smoothing: expected 0 with {where}.loss='sigmoid', for which every "
                f"class with a share of the target is there, got {self.label_smoothing}"
            )


TASK_SETTINGS: Registry[type] = Registry("task", "adder_flax.tasks.register_task")
TASK_SETTINGS.register("classification", ClassificationSettings)
