"""Prepares docstrings for Markdown: examples become code blocks, formulas and cross-references what
Markdown knows."""

import re
import textwrap
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)(?! *$).+)*", re.MULTILINE)
_FORMULA = re.compile(r"^(?P<indent> *)\.\. math::(?P<tex>.*(?:\n(?! *$).+)*)", re.MULTILINE)
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([^`]+)`")
_SHAPE = re.compile(r"(?<=\()\*(?=[a-z])")
_ATTRIBUTES = re.compile(r"^Attributes:\n(?:(?: +.*)?\n)*", re.MULTILINE)
_SHARED = re.compile(r"^(?P<names> +\w+(?:, \w+)+): (?P<text>.*\n(?: {3,}.*\n)*)", re.MULTILINE)


def to_markdown(docstring: str) -> str:
    """The same docstring with fenced doctests, TeX between dollars, and stars of shapes that are no
    emphasis."""
    parts, end = [], 0
    split = lambda section: _SHARED.sub(_one_by_one, section[0])
    docstring = _ATTRIBUTES.sub(split, f"{docstring}\n")
    for example in _EXAMPLE.finditer(docstring):
        parts += [_prose(docstring[end : example.start()]), _fence(example)]
        end = example.end()
    return "".join([*parts, _prose(docstring[end:])])


def _one_by_one(shared: re.Match[str]) -> str:
    """Griffe takes what stands behind the first of several names for its type."""
    return "".join(f"  {name.strip()}: {shared['text']}" for name in shared["names"].split(","))


def _fence(example: re.Match[str]) -> str:
    return textwrap.indent(f"```pycon\n{textwrap.dedent(example[0])}\n```", example["indent"])


def _prose(text: str) -> str:
    text = _FORMULA.sub(_formula, text)
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    return _SHAPE.sub(r"\\*", _ROLE.sub(r"`\1`", text))


def _formula(formula: re.Match[str]) -> str:
    return textwrap.indent(f"$$\n{formula['tex'].strip()}\n$$", formula["indent"])


class Markdown(griffe.Extension):
    """Hands every docstring that was read through `to_markdown`."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        del options
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
