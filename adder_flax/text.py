"""Names from outside made fit for terminals, pictures and pages; numbers made fit for people."""

import math
from collections.abc import Mapping

_PREFIXES: Mapping[int, str] = dict(enumerate(("p", "n", "µ", "m", "", *"kMGTP"), -4))


def printable(text: object, limit: int = 200) -> str:
    r"""Returns a text that any terminal, font, encoding and line-based file takes.

    Control characters, line ends, bytes that are not UTF-8 (which Python keeps as lone surrogates)
    and white space that cannot be told from none become escapes. The middle of a long text is left
    out.

    Example:
      >>> print(printable("red\x1b[31m\n"), printable("caf\udce9"), printable("a" * 500, limit=9))
      red\x1b[31m\n caf\udce9 aaaa…aaaa

    Args:
      text: or anything whose ``str`` is one.
      limit: of characters in the result.
    """
    text = str(text)
    inner = text.strip()
    start = text.find(inner)
    text = "".join(
        character
        if character.isprintable() and (character != " " or start <= place < start + len(inner))
        else _escape(character)
        for place, character in enumerate(text)
    )
    if len(text) <= limit:
        return text
    return text[: limit // 2] + "…" + text[-((limit - 1) // 2) :]


def _escape(character: str) -> str:
    return r"\x20" if character == " " else character.encode("unicode_escape").decode()


def si(value: float) -> str:
    """Returns a number with four significant digits and a prefix, to stand before a unit.

    >>> si(1254000000), si(0.0012) + "J"
    ('1.254 G', '1.2 mJ')
    """
    if value == 0:
        return "0 "
    exponent = min(max(math.floor(math.log10(abs(value)) / 3), min(_PREFIXES)), max(_PREFIXES))
    return f"{value / 1000.0**exponent:.4g} {_PREFIXES[exponent]}"
