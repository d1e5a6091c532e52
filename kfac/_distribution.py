"""Refuses to be imported from the folder of PyPI's distribution ``kfac``.

Both would have been installed into it.
"""

from pathlib import Path


def refuse_namesake(packages: Path) -> None:
    """Raises an error where another distribution has put files into the package ``kfac``.

    Args:
      packages: the folder that ``kfac`` is installed into.

    Raises:
      ImportError: there is one.
    """
    if found := next(packages.glob("kfac-*.dist-info"), None):
        raise ImportError(
            f"expected adder-flax alone to bring the package kfac, got {found.stem} in {packages} "
            "too; pip uninstall kfac, then pip install --force-reinstall --no-deps adder-flax"
        )


refuse_namesake(Path(__file__).parents[1])
