"""What random boxes of a crop are, wherever they are drawn."""

import numpy as np

# Of a batch's mean of a quantity with unit variance: tests of distributions allow five standard
# errors.
FIVE_SIGMA = 5


def check_boxes(top, left, height, width):
    """Of 300 × 400 pixels, for a fifth to a half of the area and ratios of torchvision's.

    Area uniform in its range, log ratio uniform, every box inside the image, at any place there.
    """
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 300).all()
    assert (left + width <= 400).all()
    area, ratio = height * width / (300 * 400), np.log(width / height)
    sigma = 1 / np.sqrt(len(area))
    assert abs(area.mean() - 0.35) < FIVE_SIGMA * sigma * 0.3 / np.sqrt(12)
    assert abs(area.std() - 0.3 / np.sqrt(12)) < FIVE_SIGMA * sigma * 0.3 / np.sqrt(12)
    assert abs(ratio.mean()) < FIVE_SIGMA * sigma * 2 * np.log(4 / 3) / np.sqrt(12)
    assert np.abs(ratio).max() < np.log(4 / 3) + 0.02
    for position, free in ((top, 300 - height), (left, 400 - width)):
        place = (position / np.maximum(free, 1))[free > 20]
        assert abs(place.mean() - 0.5) < FIVE_SIGMA / np.sqrt(12 * len(place)) + 0.01
        assert place.min() < 0.01
        assert place.max() > 0.99
