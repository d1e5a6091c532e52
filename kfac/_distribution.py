"""Refuses to be imported from the folder that PyPI's distribution ``kfac`` was installed into."""

from pathlib import Path

for _other in Path(__file__).parents[1].glob("kfac-*.dist-info"):
    raise ImportError(
        f"expected adder-flax alone to bring the package kfac, got {_other.stem} in "
        f"{_other.parent} too; pip uninstall kfac, then pip install --force-reinstall --no-deps "
        "adder-flax"
    )
