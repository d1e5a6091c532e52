"""Transformers so small that looking at them takes no time."""

SIZES = dict(image_size=8, patch_size=2, channels=1, num_classes=10, width=16, num_heads=2)
