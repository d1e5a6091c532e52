"""What the core of the package does without.

Each optional library is imported where its extra is named.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path


class MissingExtraError(ModuleNotFoundError):
    """A library that an extra brings is not installed; the message names both."""


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Says how to install what the imports in a ``with`` block do not find.

    Args:
      extra: of ``pyproject.toml``, one that brings the libraries.

    Raises:
      MissingExtraError: one of them is not installed.

    Example:
      >>> with needs("report"):
      ...     import no_such_library
      Traceback (most recent call last):
      ...
      adder_flax.extras.MissingExtraError: expected no_such_library, got none; in the repository of this project: pip install ".[report]"
    """  # noqa: E501 - a message is one line
    try:
        yield
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        raise missing(error.name or str(error), extra) from error


def missing(library: str, extra: str) -> MissingExtraError:
    """Returns the error for a library that was looked for in another way than by importing it.

    Args:
      library: that is not installed, in the words of a message.
      extra: that brings it.

    Example:
      >>> print(missing("ptxas", "gpu-compile"))
      expected ptxas, got none; in the repository of this project: pip install ".[gpu-compile]"
    """
    return MissingExtraError(
        f"expected {library}, got none; in the repository of this project: "
        f'pip install ".[{extra}]"',
        name=library,
    )


def wheel_folders(*packages: str) -> Iterator[Path]:
    """Yields where packages are installed, of those that are; they are not imported.

    Args:
      packages: with dots, such as those in which NVIDIA's wheels bring its tools.

    Example:
      >>> [folder.name for folder in wheel_folders("no.such", "jax.numpy")]
      ['numpy']
    """
    for package in packages:
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(package)
            yield from map(Path, (spec and spec.submodule_search_locations) or ())
