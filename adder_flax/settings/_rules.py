"""What a value has to be: its type, its range, and the words that say so in a message."""

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


class Refused(Exception):
    """A value does not follow its rule."""


@runtime_checkable
class Rule(Protocol):
    """What a value has to be, in words, and what stands for it in the program.

    Attributes:
      expected: the words of a message: "a number in [0, 1)".
    """

    @property
    def expected(self) -> str: ...

    def read(self, value: Any) -> Any:
        """Returns the value in the form that the program uses.

        Raises:
          Refused: it is not what was expected.
        """


def _require(holds: bool) -> None:
    if not holds:
        raise Refused


@dataclasses.dataclass(frozen=True)
class Number:
    """A finite real number between two bounds; whole numbers that a float can hold are numbers too.

    Args:
      low, high: the bounds.
      ends: which bounds belong to the range, as mathematics writes it: "[]", "[)", "(]" or "()".

    >>> Number(0, 1, "[)").expected
    'a number in [0, 1)'
    """

    low: float
    high: float
    ends: str = "[]"

    @property
    def expected(self) -> str:
        return f"a number in {self.ends[0]}{self.low:g}, {self.high:g}{self.ends[1]}"

    def read(self, value: Any) -> float:
        _require(isinstance(value, numbers.Real) and not isinstance(value, bool))
        try:
            number = float(value)
        except OverflowError:
            raise Refused from None
        _require(
            math.isfinite(number) and (not isinstance(value, numbers.Integral) or number == value)
        )
        above = number >= self.low if self.ends[0] == "[" else number > self.low
        below = number <= self.high if self.ends[1] == "]" else number < self.high
        _require(above and below)
        return number


@dataclasses.dataclass(frozen=True)
class Integer:
    """A whole number between two bounds, both included.

    >>> Integer(1, 8).expected
    'an integer from 1 to 8'
    """

    low: int
    high: int

    @property
    def expected(self) -> str:
        return f"an integer from {self.low} to {self.high}"

    def read(self, value: Any) -> int:
        _require(isinstance(value, numbers.Integral) and not isinstance(value, bool))
        _require(self.low <= int(value) <= self.high)
        return int(value)


@dataclasses.dataclass(frozen=True)
class Flag:
    """True or False."""

    expected: str = "True or False"

    def read(self, value: Any) -> bool:
        # NumPy's own, known by its names: NumPy is not imported for this.
        _require(
            isinstance(value, bool)
            or (type(value).__module__, type(value).__name__[:4]) == ("numpy", "bool")
        )
        return bool(value)


class Choice:
    """One of some words, each of which may stand for another value.

    >>> Choice("cls", "mean").expected, Choice(auto=None, on=True, off=False).read("on")
    ("'cls' or 'mean'", True)
    """

    def __init__(self, *words: str, **meanings: Any):
        self.meanings = {**{word: word for word in words}, **meanings}
        *rest, last = (repr(word) for word in self.meanings)
        self.expected = f"{', '.join(rest)} or {last}" if rest else last

    def read(self, value: Any) -> Any:
        _require(isinstance(value, str) and value in self.meanings)
        return self.meanings[str(value)]


LONGEST_NAME = 200


@dataclasses.dataclass(frozen=True)
class Text:
    """Readable characters in one line: a name, or a path.

    Args:
      expected: what they are, in the words of a message.
      longest: number of characters.
      empty: whether there may be none.
    """

    expected: str
    longest: int = LONGEST_NAME
    empty: bool = False

    def read(self, value: Any) -> str:
        _require(isinstance(value, str) and (self.empty or bool(value.strip())))
        _require(len(value) <= self.longest and value.isprintable())
        return str(value)


class Or:
    """Some values, each with a meaning of its own, or what another rule says.

    Where words are among them, a number may be text too: that is how a command line gives it then.

    >>> key_block = Or({"auto": "auto", "off": None}, Integer(1, 1024))
    >>> key_block.expected, key_block.read("off"), key_block.read("64"), key_block.read(64)
    ("'auto', 'off' or an integer from 1 to 1024", None, 64, 64)
    """

    def __init__(self, meanings: Mapping[str | int, Any], rule: Number | Integer):
        self.meanings, self.rule = dict(meanings), rule
        self.expected = f"{', '.join(map(repr, meanings))} or {rule.expected}"

    def read(self, value: Any) -> Any:
        words = {key: meaning for key, meaning in self.meanings.items() if isinstance(key, str)}
        if isinstance(value, str):
            return (
                words[value] if value in words else self.rule.read(self._parse(value, bool(words)))
            )
        for key, meaning in self.meanings.items():
            if isinstance(key, int):
                with contextlib.suppress(Refused):
                    type(self.rule)(key, key).read(value)
                    return meaning
        return self.rule.read(value)

    def _parse(self, text: str, allowed: bool) -> float:
        _require(allowed)
        try:
            return (int if isinstance(self.rule, Integer) else float)(text)
        except ValueError:
            raise Refused from None


class Span:
    """A pair (low, high), which may be equal, or () for none where that is allowed.

    >>> Span(Number(0, 1)).read([0.5, 1])
    (0.5, 1.0)
    """

    def __init__(self, ends: Number | Integer, *, optional: bool = False):
        self.ends, self.optional = ends, optional
        self.expected = f"(low, high), low ≤ high, each {ends.expected}" + (
            ", or ()" if optional else ""
        )

    def read(self, value: Any) -> tuple[Any, Any] | None:
        _require(isinstance(value, tuple | list))
        if not value and self.optional:
            return None
        _require(len(value) == 2)
        low, high = (self.ends.read(end) for end in value)
        _require(low <= high)
        return low, high


class Integers:
    """Whole numbers with commas between them, as text; no text for none.

    >>> Integers(Integer(1, 99), 2).read("32,64"), Integers(Integer(1, 99), 2).read("")
    ((32, 64), ())
    """

    __match_args__ = ("each", "most")

    def __init__(self, each: Integer, most: int):
        self.each, self.most = each, most
        self.expected = f'up to {most} with commas between them ("32,64"), each {each.expected}'

    def read(self, value: Any) -> tuple[int, ...]:
        _require(isinstance(value, str) and value.isascii() and len(value) <= 16 * self.most)
        texts = [text.strip() for text in value.split(",")] if value else []
        _require(len(texts) <= self.most and all(text.isdecimal() for text in texts))
        return tuple(self.each.read(int(text)) for text in texts)


class Numbers:
    """Numbers with commas between them, as text; no text for none.

    >>> Numbers(Number(0, 1), 4).read("0.5, 0.25"), Numbers(Number(0, 1), 4).read("")
    ((0.5, 0.25), ())
    """

    def __init__(self, each: Number, most: int):
        self.each, self.most = each, most
        self.expected = f'up to {most} with commas between them ("0.5,0.5"), each {each.expected}'

    def read(self, value: Any) -> tuple[float, ...]:
        _require(isinstance(value, str) and len(value) <= 32 * self.most)
        texts = value.split(",") if value else []
        _require(len(texts) <= self.most)
        try:
            return tuple(self.each.read(float(text)) for text in texts)
        except ValueError:
            raise Refused from None


class EachBlock:
    """What another rule says, for all blocks, or with commas between them one for each.

    In the latter case it is a tuple.

    >>> (
    ...     EachBlock(Choice("dense", "adder"), 2).read("dense"),
    ...     EachBlock(Choice("dense", "adder"), 2).read("adder,dense"),
    ... )
    ('dense', ('adder', 'dense'))
    """

    def __init__(self, rule: Choice, most: int):
        self.rule, self._most = rule, most
        self.expected = f"{rule.expected}, or one for each block with commas between them"

    def read(self, value: Any) -> Any:
        _require(isinstance(value, str) and len(value) <= 32 * self._most)
        read = tuple(self.rule.read(word.strip()) for word in value.split(","))
        _require(len(read) <= self._most)
        return read[0] if len(read) == 1 else read


class Names:
    """A name, or several with commas between them, then as a tuple.

    >>> Names("score", 2).read("dot"), Names("score", 2).read("adder,dot")
    ('dot', ('adder', 'dot'))
    """

    def __init__(self, what: str, most: int):
        self._most = most
        self.expected = f"the name of a {what}, or one for each block with commas between them"

    def read(self, value: Any) -> str | tuple[str, ...]:
        _require(isinstance(value, str) and value.isprintable())
        names = tuple(name.strip() for name in value.split(","))
        _require(all(0 < len(name) <= LONGEST_NAME for name in names) and len(names) <= self._most)
        return names[0] if len(names) == 1 else names
