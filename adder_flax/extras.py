"""What the core of the package does without: libraries imported where their extra is named."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path


class MissingExtraError(ModuleNotFoundError):
    """A library that an extra brings is not installed; the message names both."""


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Says which extra of ``pyproject.toml`` brings what imports in a ``with`` block do not find.

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
    """Returns the error for a library, in the words of a message, that an extra would bring."""
    return MissingExtraError(
        f"expected {library}, got none; in the repository of this project: "
        f'pip install ".[{extra}]"',
        name=library,
    )


def wheel_folders(*packages: str) -> Iterator[Path]:
    """Yields where packages (such as NVIDIA's, with dots) are installed; they are not imported.

    Example:
      >>> [folder.name for folder in wheel_folders("no.such", "jax.numpy")]
      ['numpy']
    """
    for package in packages:
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(package)
            yield from map(Path, (spec and spec.submodule_search_locations) or ())
