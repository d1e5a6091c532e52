"""Augmentation on the device: its operations against Pillow's, its policy against timm's, and its
speed.

    python -m benchmarks.augment
    python -m benchmarks.augment --cifar10=DIR  # where TFDS sets are prepared

1. Each operation on pieces of scikit-learn's two photographs, and on images of CIFAR-10 if told
   where they are, at magnitudes from 0 to 10, both signs, bicubic and bilinear: the largest
   difference from Pillow's in levels, and the share of the values that differ.
2. How often each operation is drawn and what arguments it gets, against timm's own draws (if timm
   is installed): the largest distance between the two distributions of a kind (Kolmogorov and
   Smirnov).
3. DeiT's whole recipe: programs compiled over 200 steps with all magnitudes, and images per second
   of augmentation alone beside those of the training step that it is part of.
"""

import argparse
import functools
import importlib.util
import random

import jax
import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageEnhance, ImageOps
from sklearn.datasets import load_sample_images

from adder_flax import data
from adder_flax.data.operations import OPERATIONS, choose_operation
from adder_flax.data.policies import draw_layer, operation_arguments
from adder_flax.experiments import common
from adder_flax.settings import AugmentSettings, put_numbers, take_numbers
from benchmarks.timing import measure
from benchmarks.train_step import jax_step

FILL = (124, 116, 104)
RECIPE = dict(rand_augment_magnitude=9.0, rand_augment_std=0.5)
DRAWS = 200_000


def _map(coefficients):
    return lambda image, x, way: image.transform(
        image.size, Image.AFFINE, coefficients(x, *image.size), resample=way, fillcolor=FILL
    )


PILLOW = {
    "auto_contrast": lambda image, x, way: ImageOps.autocontrast(image),
    "equalize": lambda image, x, way: ImageOps.equalize(image),
    "invert": lambda image, x, way: ImageOps.invert(image),
    # No bits are black; Pillow refuses to keep none.
    "posterize": lambda image, x, way: (
        ImageOps.posterize(image, int(x)) if x else Image.new("RGB", image.size)
    ),
    "solarize": lambda image, x, way: ImageOps.solarize(image, x),
    "solarize_add": lambda image, x, way: image.point(
        [min(255, v + int(x)) if v < 128 else v for v in range(256)] * 3
    ),
    "color": lambda image, x, way: ImageEnhance.Color(image).enhance(x),
    "contrast": lambda image, x, way: ImageEnhance.Contrast(image).enhance(x),
    "brightness": lambda image, x, way: ImageEnhance.Brightness(image).enhance(x),
    "sharpness": lambda image, x, way: ImageEnhance.Sharpness(image).enhance(x),
    "rotate": lambda image, x, way: image.rotate(x, resample=way, fillcolor=FILL),
    "shear_x": _map(lambda x, width, height: (1, x, 0, 0, 1, 0)),
    "shear_y": _map(lambda x, width, height: (1, 0, 0, x, 1, 0)),
    "translate_x": _map(lambda x, width, height: (1, 0, x * width, 0, 1, 0)),
    "translate_y": _map(lambda x, width, height: (1, 0, 0, 0, 1, x * height)),
}
"""What each operation is in Pillow: a function of an image, an argument and a way to resample."""

_TIMM = (
    *(
        "AutoContrast",
        "Equalize",
        "Invert",
        "PosterizeIncreasing",
        "SolarizeIncreasing",
        "SolarizeAdd",
    ),
    *("ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing"),
    *("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
)
TIMM = dict(zip(OPERATIONS, _TIMM, strict=True))
"""What timm calls them."""


def photographs() -> UInt8[np.ndarray, "8 40 48 3"]:
    """Eight pieces of scikit-learn's photographs of a temple and a flower, reduced to a third."""
    images = [Image.fromarray(image) for image in load_sample_images().images]
    corners = (60, 80), (250, 200), (400, 100), (150, 250)
    pieces = [
        image.crop((x, y, x + 144, y + 120)).resize((48, 40))
        for image in images
        for x, y in corners
    ]
    return np.stack([np.asarray(piece) for piece in pieces])


def against_pillow(
    images: UInt8[np.ndarray, "8 height width 3"], steps: int
) -> dict[str, tuple[int, float]]:
    """Largest difference in levels and share of the values that differ, of each operation over all
    magnitudes."""
    choose = jax.jit(choose_operation, static_argnames="fill")
    found = {}
    for number, name in enumerate(OPERATIONS):
        differences = []
        for magnitude in np.linspace(0, 10, steps):
            # Signs and ways to resample take turns over the eight images.
            signs, bicubic = np.resize([1.0, -1.0], 8), np.resize([True, True, False, False], 8)
            magnitudes = np.full(8, magnitude)
            arguments = np.asarray(operation_arguments(magnitudes, signs, increasing=True))[number]
            got = np.asarray(
                choose(np.full(8, number), images, arguments, fill=FILL, bicubic=bicubic)
            )
            for image, argument, cubic, result in zip(images, arguments, bicubic, got, strict=True):
                way = Image.BICUBIC if cubic else Image.BILINEAR
                # What float32 added to the decimals taken off: it can push a whole line over the
                # border.
                expected = np.asarray(
                    PILLOW[name](Image.fromarray(image), round(float(argument), 6), way)
                )
                differences.append(np.abs(result.astype(int) - expected))
        found[name] = int(np.max(differences)), float(np.mean(np.array(differences) > 0))
    return found


def against_timm() -> dict[str, tuple[float, float]] | None:
    """Of each operation how much more often it is drawn than by timm, and the distance of the
    arguments; None without timm."""
    if importlib.util.find_spec("timm") is None:
        return None
    from scipy import stats
    from timm.data.auto_augment import rand_augment_transform

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  which timm draws from
    policy = rand_augment_transform("rand-m9-mstd0.5-inc1", {"img_mean": FILL})
    drawn: dict[str, list[float]] = {name: [] for name in TIMM.values()}

    def note(name, image, *arguments, **_):
        drawn[name].append(arguments[0] if arguments else 0.0)
        return image

    for operation in policy.ops:
        operation.aug_fn = functools.partial(note, operation.name)
    for _ in range(DRAWS // policy.num_layers):
        policy(None)
    operations, arguments, _ = map(
        np.asarray, draw_layer(jax.random.key(0), DRAWS, AugmentSettings(**RECIPE))
    )
    found = {}
    for number, name in enumerate(OPERATIONS):
        own, theirs = arguments[operations == number], np.array(drawn[TIMM[name]])
        found[name] = (
            (own.size - theirs.size) / DRAWS,
            stats.ks_2samp(own, theirs.astype(np.float32)).statistic,
        )
    return found


def recompilations(size: int, steps: int = 200) -> int:
    """Programs beyond the first that DeiT's recipe needs for steps of all magnitudes."""
    shape, numbers = take_numbers(AugmentSettings(**RECIPE))
    facts = dict(num_classes=10, mean=(0.5,) * 3, std=(0.25,) * 3)
    step = jax.jit(
        lambda key, images, labels, numbers: data.augment(
            key, images, labels, put_numbers(shape, numbers), **facts
        )
    )
    images, labels = np.zeros((4, size, size, 3), np.uint8), np.zeros(4, np.int32)
    for number, magnitude in enumerate(np.linspace(0, 10, steps)):
        step(
            jax.random.key(number),
            images,
            labels,
            numbers | {"rand_augment_magnitude": float(magnitude)},
        )
    return step._cache_size() - 1


def speeds(batch_size: int, size: int, rounds: int, seconds: float) -> dict[str, float]:
    """Images per second of augmentation alone, of the step with it, and of the step with none of
    its policy."""

    def config_of(**task):
        config = common.deit("multiplicative", "tiny", "imagenet2012")
        config.data.update(name="fake", image_size=size)
        config.model.patch_size = size // 14 if size % 14 == 0 else size // 8
        config.batch_size = batch_size
        config.task.update(color_jitter=0.0, **task)
        return config

    source = data.load_source("fake", "train", image_size=size)
    images, labels = source.read(np.arange(batch_size))[0].values()
    facts = dict(num_classes=source.num_classes, mean=(0.5,) * 3, std=(0.25,) * 3)
    settings = AugmentSettings(color_jitter=0.0, **RECIPE)
    alone = jax.jit(lambda key: data.augment(key, images, labels, settings, **facts))
    timings = measure(
        {
            "augmentation alone": lambda: alone(jax.random.key(0)),
            "step with RandAugment": jax_step(config_of(**RECIPE)),
            "step without RandAugment": jax_step(config_of()),
        },
        rounds,
        seconds,
    )
    return {name: batch_size / timings.median(name) for name in timings.seconds}


def main(arguments: list[str] | None = None) -> None:
    """Prints the three parts.

    Args:
        arguments: command line; None for that of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--magnitudes", type=int, default=21, help="from 0 to 10, of the comparison with Pillow"
    )
    parser.add_argument("--cifar10", metavar="DIR", help="folder of TFDS sets with CIFAR-10")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument(
        "--size", type=int, default=224, help="side of the images, pixels; a multiple of 8 or 14"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="after which three rounds are enough"
    )
    parser.add_argument(
        "--no_speed",
        action="store_true",
        help="leave the speed out, which other work would disturb",
    )
    options = parser.parse_args(arguments)
    seen = {"photographs": photographs()}
    if options.cifar10:
        cifar10 = data.load_source("cifar10", "test", data_dir=options.cifar10)
        seen["CIFAR-10"], _ = cifar10.read(np.arange(8))[0].values()
    for kind, images in seen.items():
        print(f"{kind:16}{'largest difference from Pillow, levels':>40}{'values that differ':>22}")
        for name, (largest, share) in against_pillow(images, options.magnitudes).items():
            print(f"{name:16}{largest:40}{share:22.3%}")
    if (distances := against_timm()) is None:
        print("timm is not installed: its draws are not compared")
    else:
        print(f"{'operation':16}{'drawn more often than by timm':>40}{'distance of arguments':>22}")
        for name, (more, distance) in distances.items():
            print(f"{name:16}{more:40.3%}{distance:22.4f}")
    print(
        "programs compiled again over 200 steps of all magnitudes: "
        f"{recompilations(min(options.size, 32))}"
    )
    if not options.no_speed:
        for name, speed in speeds(
            options.batch_size, options.size, options.rounds, options.seconds
        ).items():
            print(f"{name:26}{speed:12,.1f} images/s")


if __name__ == "__main__":
    main()
