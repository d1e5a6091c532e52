"""Channel means and standard deviations of training sets, of images in [0, 1]."""

from concurrent import futures

import numpy as np

from adder_flax.data._source import ArraySource, ImageSource, Statistics

_IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""What published weights expect (torchvision), and by convention what photographs get."""

_SAMPLE = 10_000
_CHUNK = 500


def channel_statistics(source: ImageSource) -> Statistics:
    """Mean and standard deviation of each channel: the set's own, or those of its images.

    A set that carries no statistics and whose images lie in memory, or will, is measured once, on
    up to 10,000 records that are evenly spaced. Sets of large photographs get ImageNet's values, or
    their average if they are grey.

    >>> from adder_flax.data import load_source
    >>> channel_statistics(load_source("digits", "train"))
    ((0.3053,), (0.3757,))
    """
    if source.statistics is None and isinstance(source, ArraySource):
        source.statistics = _measure(source)
    mean, std = _IMAGENET if source.statistics is None else source.statistics
    channels = source.image_shape[2]
    if len(mean) != channels:
        mean, std = (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
    return mean, std


def _measure(source: ImageSource) -> Statistics:
    """Sums of whole numbers, which are the same on every machine."""
    chosen = np.arange(0, len(source), -(-len(source) // _SAMPLE))
    count = 0
    total, squares = (np.zeros(source.image_shape[2], np.int64) for _ in range(2))
    with futures.ThreadPoolExecutor() as threads:
        for start in range(0, len(chosen), _CHUNK):
            arrays, readable = source.read(chosen[start : start + _CHUNK], None, threads.map)
            pixels = arrays["image"][readable].reshape(-1, len(total)).astype(np.int64)
            count, total = count + len(pixels), total + pixels.sum(0)
            squares += (pixels**2).sum(0)
    mean = total / max(count, 1)
    std = np.sqrt(squares / max(count, 1) - mean**2)
    std = np.where(std > 0, std / 255, 1.0)  # a channel of one value has no scale
    return tuple((mean / 255).round(4).tolist()), tuple(std.round(4).clip(1e-4).tolist())
