"""What operations on images are in Pillow, and the photographs that they are compared on."""

import numpy as np
from PIL import Image, ImageEnhance, ImageOps
from sklearn.datasets import load_sample_images

FILL = (124, 116, 104)


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


def photographs():
    """Eight pieces of scikit-learn's photographs of a temple and a flower, reduced to a third."""
    images = [Image.fromarray(image) for image in load_sample_images().images]
    corners = (60, 80), (250, 200), (400, 100), (150, 250)
    pieces = [
        image.crop((x, y, x + 144, y + 120)).resize((48, 40))
        for image in images
        for x, y in corners
    ]
    return np.stack([np.asarray(piece) for piece in pieces])
