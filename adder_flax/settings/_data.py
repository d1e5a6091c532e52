"""Settings of the data."""

import dataclasses
from collections.abc import Iterator

from adder_flax.settings._fields import setting
from adder_flax.settings._rules import Choice, Integer, Number, Numbers, Or, Text

_SPLIT = Text("the name of a split, or a part of one as train[:90%]")
_PATH = Text("a folder, or nothing", longest=4096, empty=True)


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Where the records come from."""

    name: str = setting("digits", Text("the name of a data set"), "the data set")
    data_dir: str = setting("", _PATH, "where it lies; empty for the usual place")
    train_split: str = setting("train", _SPLIT, "what is trained on; train[:90%] is a part of it")
    eval_split: str = setting(
        "eval",
        _SPLIT,
        "what is evaluated on; eval is the first that there is of validation, val and test",
    )
    repeats: int = setting(
        1,
        Integer(1, 1024),
        "rows of a batch with one record, each augmented on its own; an epoch keeps its length",
    )
    image_size: int | None = setting(
        224, Or({0: None}, Integer(1, 8192)), "side of the images, pixels; 0 is the set's own"
    )
    eval_crop_ratio: float = setting(
        0.875,
        Number(0.1, 1),
        "side of the middle that evaluations see, over the shorter side of photographs that vary "
        "in size",
    )
    mean: tuple[float, ...] = setting(
        "",
        Numbers(Number(-100, 100), 4),
        'of each channel of images in [0, 1], by which they are normalised: "0.5,0.5,0.5"; empty: '
        "as the weights of init_from want it, else the set's own",
    )
    std: tuple[float, ...] = setting(
        "", Numbers(Number(1e-4, 100), 4), "of each channel, the standard deviation beside mean"
    )
    num_threads: int | None = setting(
        0, Or({0: None}, Integer(1, 1024)), "that read images; 0 chooses"
    )
    on_unreadable: str = setting(
        "raise", Choice("raise", "skip"), "what to do with an image that cannot be decoded"
    )

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        if len(self.mean) != len(self.std):
            yield (
                f"{where}.std: expected a number for each of {where}.mean = {list(self.mean)}, got "
                f"{list(self.std)}"
            )
