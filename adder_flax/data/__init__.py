"""Data sources, the host pipeline and on-device augmentation."""
