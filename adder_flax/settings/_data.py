"""Settings of the data."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from adder_flax.settings._declare import fault, setting

_SPLIT = "the name of a split, or a part of one as train[:90%]"


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Where the records come from."""

    retired: ClassVar[dict[str, Any]] = {"num_threads": range(1025)}

    name: str = setting("digits", "the data set", expected="the name of a data set")
    data_dir: str = setting(
        "",
        "where it lies; empty for the usual place",
        expected="a folder, or nothing",
        max_length=4096,
    )
    train_split: str = setting(
        "train", "what is trained on; train[:90%] is a part of it", expected=_SPLIT
    )
    eval_split: str = setting(
        "eval", "what is evaluated on; eval: the first of validation, val and test", expected=_SPLIT
    )
    repeats: int = setting(
        1, "rows of a batch with one record, each augmented on its own", ge=1, le=1024
    )
    image_size: int | None = setting(
        224, "side of the images, pixels; 0 is the set's own", words={0: None}, ge=1, le=8192
    )
    eval_crop_ratio: float = setting(
        0.875,
        "side of the middle that evaluations see over a photograph's shorter side",
        ge=0.1,
        le=1,
    )
    mean: tuple[float, ...] = setting(
        "",
        'of each channel: "0.5,0.5,0.5"; empty: that of init_from, else the set\'s own',
        commas=float,
        ge=-100,
        le=100,
        max_length=4,
    )
    std: tuple[float, ...] = setting(
        "",
        "of each channel, the standard deviation beside mean",
        commas=float,
        ge=1e-4,
        le=100,
        max_length=4,
    )
    on_unreadable: Literal["raise", "skip"] = setting(
        "raise", "what to do with an image that cannot be decoded"
    )

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        if len(self.mean) != len(self.std):
            expected = f"a number for each of {where}.mean = {list(self.mean)}"
            yield fault(f"{where}.std", expected, list(self.std))
