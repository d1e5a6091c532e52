"""Random images of any shape: for benchmarks, dry runs and tests, where only shapes matter."""

import numpy as np
from jaxtyping import UInt8

from adder_flax.data._registry import DataSet, register_source
from adder_flax.data._source import ImageSource

SPLITS = ("train", "test")


class FakeSource(ImageSource):
    """Uniform noise: record i is a function of (split, i) alone, and nothing is stored.

    Its label is i mod the number of classes. The test split has a quarter of the examples.
    """

    def __init__(
        self, split: str, image_shape: tuple[int, int, int], num_classes: int, num_examples: int
    ):
        super().__init__("fake", split, SPLITS)
        self._length = num_examples if split == "train" else max(num_examples // 4, 1)
        self.image_shape = image_shape
        self.label_names = tuple(str(label) for label in range(num_classes))

    def __len__(self) -> int:
        return self._length

    def read(self, indices, seeds=None, map_function=map):
        labels = np.asarray(indices, np.int32) % self.num_classes
        images = np.stack(list(map_function(self._image, indices)))
        return {"image": images, "label": labels}, np.ones(len(indices), bool)

    def _image(self, index: int) -> UInt8[np.ndarray, "height width channel"]:
        rng = np.random.default_rng((self.splits.index(self.split), index))
        size = int(np.prod(self.image_shape))
        return np.frombuffer(rng.bytes(size), np.uint8).reshape(self.image_shape)


def load_fake(
    split: str,
    *,
    image_size: int | None = None,
    num_classes: int = 1000,
    num_examples: int = 50_000,
    channels: int = 3,
    **_,
) -> FakeSource:
    """Random images by name; see `load_source`."""
    size = image_size or 224
    return FakeSource(split, (size, size, channels), num_classes, num_examples)


_OPTIONS = ("num_classes", "num_examples", "channels")
# The standard deviation of whole numbers 0..255 that are equally likely.
_STATISTICS = ((0.5,), (0.2898,))
register_source(DataSet("fake", load_fake, SPLITS, statistics=_STATISTICS, options=_OPTIONS))
