"""How things are found by name: one :class:`Registry` per kind of thing, beside its contract.

Whoever adds a score, a model, a task, …, inside this library or outside of it, does it with one
file and one line.
"""

import contextlib
import difflib
import importlib
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")

_changes = 0


def count_changes() -> int:
    """Returns how often a registry has changed: until then each name stands for the same."""
    return _changes


def _note_change() -> None:
    global _changes
    _changes += 1


class Registry(Generic[Entry]):
    """Entries of one kind by name, in the order of registration.

    Args:
      kind: what an entry is, in the words of a message: ``"score"``.
      how_to_add: where one's own is registered, in the words of a message.

    Example:
      >>> functions = Registry("function", "my_project.register")
      >>> functions.register("abs", abs)(-1)
      1
      >>> functions.get("asb")
      Traceback (most recent call last):
      ...
      ValueError: expected a function among abs, got 'asb'; did you mean 'abs'? Add your own with my_project.register
    """  # noqa: E501 - a message is one line

    def __init__(self, kind: str, how_to_add: str):
        self.kind, self._how_to_add = kind, how_to_add
        self._entries: dict[str, Any] = {}  # of Entry or _Lazy
        self._origins: dict[str, Any] = {}

    def register(self, name: str, entry: Entry, *, origin: Any = None) -> Entry:
        """Adds an entry and returns it.

        The same thing again, as when a notebook cell runs twice, replaces what it registered;
        something else of this name is a ValueError. By its ``origin``, by default module and name
        of its definition, the same thing is known.
        """
        named: Any = entry if hasattr(entry, "__qualname__") else type(entry)
        self._note(name, entry, origin or (named.__module__, named.__qualname__))
        return entry

    def _note(self, name: str, entry: "Entry | _Lazy", origin: Any) -> None:
        if self._origins.get(name, origin) != origin:
            raise ValueError(
                f"expected a new name for the {self.kind}, got {name!r}, which is registered "
                f"already; choose a name other than {', '.join(self)}"
            )
        if self._entries.get(name) is not entry:
            _note_change()
        self._entries[name], self._origins[name] = entry, origin

    def register_lazily(self, name: str, place: str) -> None:
        """Adds an entry, ``"package.module:attribute"``, that is imported when it is asked for.

        Example:
          >>> numbers = Registry("number", "my_project.register")
          >>> numbers.register_lazily("pi", "math:pi")
          >>> round(numbers.get("pi"), 2)
          3.14
        """
        self._note(name, _Lazy(place), place)

    def get(self, name: str) -> Entry:
        """Returns the entry of a name.

        Raises:
          ValueError: there is none; the message names those there are, and the nearest.
        """
        if name not in self._entries:
            near = difflib.get_close_matches(str(name), self, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"expected a {self.kind} among {', '.join(self) or 'none yet'}, got {name!r}; "
                f"{hint}Add your own with {self._how_to_add}"
            )
        entry = self._entries[name]
        if isinstance(entry, _Lazy):
            self._entries[name] = entry = load(entry)
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @contextlib.contextmanager
    def temporary(self) -> Iterator[None]:
        """Forgets, at the end of a ``with`` block, what was registered inside of it."""
        kept = dict(self._entries), dict(self._origins)
        try:
            yield
        finally:
            self._entries, self._origins = kept
            _note_change()


def load(place: str) -> Any:
    """Imports ``"package.module:attribute"``."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


class _Lazy(str):
    """The place of an entry that is yet to be imported."""
