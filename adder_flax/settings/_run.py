"""Settings of a run: its data and devices, and what holds its sections together."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from adder_flax.settings._declare import fault, section, setting
from adder_flax.settings._model import MODEL_SETTINGS, VitSettings
from adder_flax.settings._optimizer import OptimizerSettings
from adder_flax.settings._task import TASK_SETTINGS, ClassificationSettings

_FOLDER: dict[str, Any] = dict(expected="a folder, or nothing", max_length=4096)
_OF_CHANNELS: dict[str, Any] = dict(commas=float, le=100, max_length=4)
_SPLIT = "the name of a split, or a part of one as train[:90%]"


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Where the records come from."""

    retired: ClassVar[dict[str, Any]] = {"num_threads": range(1025)}

    name: str = setting("digits", "the data set", expected="the name of a data set")
    data_dir: str = setting("", "where it lies; empty for the usual place", **_FOLDER)
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
        **_OF_CHANNELS,
        ge=-100,
    )
    std: tuple[float, ...] = setting(
        "", "of each channel, the standard deviation beside mean", **_OF_CHANNELS, ge=1e-4
    )
    on_unreadable: Literal["raise", "skip"] = setting(
        "raise", "what to do with an image that cannot be decoded"
    )

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        if len(self.mean) != len(self.std):
            expected = f"a number for each of {where}.mean = {list(self.mean)}"
            yield fault(f"{where}.std", expected, list(self.std))


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Devices along each axis of the mesh; one may be -1 and takes what the others leave."""

    data: int = setting(-1, "devices that share the batch", words={-1: -1}, ge=1, le=2**20)
    fsdp: int = setting(
        1, "devices that share the batch and the parameters", words={-1: -1}, ge=1, le=2**20
    )
    tensor: int = setting(1, "devices that share each product", words={-1: -1}, ge=1, le=2**20)

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        sizes = dataclasses.asdict(self)
        if list(sizes.values()).count(-1) > 1:
            yield f"{where}: expected at most one axis of -1 devices, got {sizes}"


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """All that a run is made from."""

    # Fields of earlier versions, and the values at which they change nothing.
    retired: ClassVar[dict[str, tuple]] = {
        "init_from_network": ("read", "same"),
        "init_from_positions": ("auto", "timm", "torch"),
        "attention_diagnostics": (False, True),
    }

    # Keys of JAX keep 32 bits: a larger seed would silently be another one.
    seed: int = setting(
        0, "of initialisation, shuffling, augmentation, dropout", data=True, ge=0, le=2**32 - 1
    )
    init: Literal["sequence", "path"] = setting(
        "sequence", "random numbers of a parameter: the next ones, or those of its path"
    )
    init_from: str = setting(
        "",
        "safetensors to start from, of timm, Hugging Face or --mode=export",
        expected="a file or a folder, or nothing",
        max_length=4096,
    )
    batch_size: int = setting(1024, "images of a step, of all devices together", ge=1, le=2**20)
    accumulation_steps: int = setting(
        1, "parts of a batch, one after the other: less memory, the same gradient", ge=1, le=2**20
    )
    num_epochs: float = setting(300.0, "length of the training", data=True, gt=0, le=1e6)
    ema_decay: float = setting(
        0.0, "of the mean of the weights that is evaluated; 0 is off", data="if on", ge=0, lt=1
    )
    non_finite: Literal["stop", "skip"] = setting(
        "stop", "what to do with a batch whose loss or gradient is not finite"
    )
    eval_batch_size: int = setting(
        512, "images evaluated at a time, of all devices together", ge=1, le=2**20
    )
    eval_every_steps: int = setting(0, "0 is once an epoch", ge=0, le=2**31 - 1)
    checkpoint_every_steps: int = setting(0, "0 is once an epoch", ge=0, le=2**31 - 1)
    log_every_steps: int = setting(10, "of metrics", ge=1, le=2**31 - 1)
    profile_steps: tuple[int, int] | None = setting(
        (),
        "steps whose timeline is recorded under <workdir>/profile",
        words={(): None},
        ge=1,
        le=2**31 - 1,
    )
    topology: str = setting(
        "",
        "of --mode=compile; empty for the devices at hand",
        expected="v5e:4x4, h100:8, cpu:8 or empty",
    )
    mesh: MeshSettings = section(MeshSettings)
    # Of the class that its name stands for, as the task's.
    model: Any = section(VitSettings, among=MODEL_SETTINGS)
    optimizer: OptimizerSettings = section(OptimizerSettings)
    data: DataSettings = section(DataSettings)
    task: Any = section(ClassificationSettings, among=TASK_SETTINGS)

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        if self.batch_size % self.accumulation_steps:
            expected = f"a number that divides {where}.batch_size = {self.batch_size}"
            yield fault(f"{where}.accumulation_steps", expected, self.accumulation_steps)
        warmup = self.optimizer.warmup_epochs
        if warmup > self.num_epochs:
            expected = f"at most {where}.num_epochs = {self.num_epochs}"
            yield fault(f"{where}.optimizer.warmup_epochs", expected, warmup)
        size, padding = self.data.image_size, getattr(self.task, "crop_padding", 0)
        if size and padding > size:
            expected = f"at most {where}.data.image_size = {size}"
            yield fault(f"{where}.task.crop_padding", expected, padding)
