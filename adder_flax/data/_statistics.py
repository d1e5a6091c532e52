"""Channel means and standard deviations of training sets, of images in [0, 1]."""

from __future__ import annotations

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# Over all pixels of the train split, except for ImageNet, where convention has fixed what published weights expect
# (torchvision).
_STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "digits": ((0.3053,), (0.3757,)),
    "fake": ((0.5,), (0.2898,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "mnist": ((0.1307,), (0.3081,)),
}


def channel_statistics(name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel; a set without an entry gets ImageNet's, or their average if it is
    grey.

    >>> channel_statistics("cifar10:3.*.*", 3)
    ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))

    Args:
        name: name given to `load_source`; TFDS configurations and versions do not matter.
        channels: number of channels.
    """
    mean, std = _STATISTICS.get(name.split(":")[0].split("/")[0], _IMAGENET)
    if len(mean) != channels:
        mean, std = (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
    return mean, std
