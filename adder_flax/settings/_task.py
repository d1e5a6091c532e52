"""Settings of the tasks."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from adder_flax.registry import Registry
from adder_flax.settings._declare import fault, setting

_JITTERS = ("brightness", "contrast", "saturation")


@dataclasses.dataclass(frozen=True)
class AugmentSettings:
    """What is done to images that are trained on, see `adder_flax.data.augment`.

    By default DeiT's recipe with its jitter of colours in place of RandAugment.
    """

    retired: ClassVar[dict[str, Any]] = {
        "cutmix_probability": (0.5,),
        "erase_scale": ((0.02, 1 / 3),),
        "erase_ratio": ((0.3, 1 / 0.3),),
        "erase_value": ("noise",),
        "hue": (0,),
        "rand_augment_layers": (2,),
        "rand_augment_increasing": (True,),
        "rand_augment_interpolation": ("bicubic",),
        **dict.fromkeys(_JITTERS, "color_jitter, one number for all three, has its place"),
    }

    crop_padding: int = setting(
        0, "of each side before a random crop, pixels; 0 is off", ge=0, le=8192
    )
    resized_crop_scale: tuple[float, float] | None = setting(
        (0.08, 1.0),
        "area of a random resized crop, as a fraction; () is off",
        words={(): None},
        gt=0,
        le=1,
    )
    resized_crop_ratio: tuple[float, float] = setting(
        (3 / 4, 4 / 3), "its width over its height", ge=0.01, le=100
    )
    flip_probability: float = setting(0.5, "of mirroring left and right", data="if on", ge=0, le=1)
    color_jitter: float = setting(
        0.3,
        "c: factors of brightness, contrast, saturation in [1 - c, 1 + c]; 0 is off",
        data="if on",
        ge=0,
        le=100,
    )
    rand_augment_magnitude: float = setting(
        0.0,
        "RandAugment with timm's fifteen operations, each done with probability 1/2; 0 is off",
        data="if on",
        ge=0,
        le=10,
    )
    rand_augment_std: float = setting(
        0.0, "of the magnitude, normal for each operation and image", data="if on", ge=0, le=100
    )
    three_augment: bool = setting(
        False, "grey, solarized or blurred, one of them for each image (DeiT III)"
    )
    mixup_alpha: float = setting(
        0.8, "Mixup with weight Beta(alpha, alpha); 0 is off", data="if on", ge=0, le=1000
    )
    cutmix_alpha: float = setting(
        1.0,
        "CutMix with area Beta(alpha, alpha), in half of the mixing; 0 is off",
        data="if on",
        ge=0,
        le=1000,
    )
    mix_probability: float = setting(1.0, "of mixing at all", data=True, ge=0, le=1)
    mix_per: Literal["batch", "element"] = setting(
        "batch", "for what a weight, a box and the choice are drawn"
    )
    erase_probability: float = setting(
        0.25, "of erasing a rectangle; 0 is off", data="if on", ge=0, le=1
    )
    label_smoothing: float = setting(
        0.1, "share of the targets that all classes get", data=True, ge=0, lt=1
    )

    @staticmethod
    def translated(fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a task of an earlier version, whose three jitters of colours are one."""
        jitters = {fields.get(name) for name in _JITTERS}
        if len(jitters) > 1 or jitters == {None}:
            return dict(fields)
        rest = {name: value for name, value in fields.items() if name not in _JITTERS}
        return {"color_jitter": jitters.pop(), **rest}


@dataclasses.dataclass(frozen=True)
class ClassificationSettings(AugmentSettings):
    """Classification of images."""

    name: str = setting(
        "classification", "the task, whose own fields follow", expected="the name of a task"
    )
    loss: Literal["softmax", "sigmoid"] = setting(
        "softmax", "cross-entropy of one class out of all; sigmoid: of each (DeiT III)"
    )

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        if self.loss == "sigmoid" and self.label_smoothing:
            expected = (
                f"0 with {where}.loss='sigmoid', for which every class with a share of the target "
                "is there"
            )
            yield fault(f"{where}.label_smoothing", expected, self.label_smoothing)


TASK_SETTINGS: Registry[type] = Registry("task", "adder_flax.tasks.register_task")
TASK_SETTINGS.register("classification", ClassificationSettings)
