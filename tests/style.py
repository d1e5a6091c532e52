"""How code reads, in numbers: ``python tests/style.py [FOLDER…]`` prints a row for each;
test_style.py holds some. ``--beside optax,equinox`` adds rows for packages that are installed, and
for folders, to compare with.

They are a mirror, not a law. Files: lines of the median one. Functions: lines of the ninth decile,
without the docstring. Width: characters of the ninth decile of lines that are not blank. Comments:
per 100 lines of code, those behind code too, docstrings not. Lambdas: per 1,000 lines of code.
Parameters: most of a function whose name begins with an underscore.
"""

import argparse
import ast
import dataclasses
import importlib.util
import io
import re
import statistics
import tokenize
from collections.abc import Iterable
from pathlib import Path

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_SPACE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_NO_CODE = (tokenize.COMMENT, *_SPACE)
_WIDTHS = dict(files=6, lines=8, file=8, functions=11, width=7)
_WIDTHS |= dict(comments=10, lambdas=9, parameters=12)


@dataclasses.dataclass(frozen=True)
class Style:
    """Numbers of a folder, as the module says."""

    files: int
    lines: int
    file_lines: float
    function_lines: float
    width: float
    comments: float
    lambdas: float
    parameters: int

    def row(self, name: str) -> str:
        """One line of the table."""
        forms = ("", "", ".0f", ".0f", ".0f", ".1f", ".1f", "")
        cells = zip(dataclasses.astuple(self), _WIDTHS.values(), forms, strict=True)
        return f"{name:24}" + "".join(f"{cell:{width}{form}}" for cell, width, form in cells)


def measure(paths: Iterable[Path]) -> Style:
    """Returns the numbers of Python files."""
    texts = [path.read_text() for path in paths]
    trees = [ast.parse(text) for text in texts]
    code, comments, docstrings = 0, 0, 0
    for text, tree in zip(texts, trees, strict=True):
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        real = [token for token in tokens if token.type not in _NO_CODE]
        after = tokens[tokens.index(real[0]) :]  # a licence stands before it
        comments += sum(token.type == tokenize.COMMENT for token in after)
        code += len({line for t in real for line in range(t.start[0], t.end[0] + 1)})
        docstrings += sum(map(_docstring_lines, ast.walk(tree)))
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, _FUNCTION)]
    lambdas = sum(isinstance(node, ast.Lambda) for tree in trees for node in ast.walk(tree))
    code -= docstrings
    return Style(
        files=len(texts),
        lines=code,
        file_lines=statistics.median(text.count("\n") for text in texts),
        function_lines=_ninth(n.end_lineno - n.lineno + 1 - _docstring_lines(n) for n in functions),
        width=_ninth(len(line) for text in texts for line in text.splitlines() if line.strip()),
        comments=100 * comments / max(code, 1),
        lambdas=1000 * lambdas / max(code, 1),
        parameters=max((_parameters(n) for n in functions if _is_private(n.name)), default=0),
    )


def _docstring_lines(node: ast.AST) -> int:
    if not isinstance(node, (*_FUNCTION, ast.ClassDef, ast.Module)) or not ast.get_docstring(node):
        return 0
    return node.body[0].end_lineno - node.body[0].lineno + 1


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _parameters(node: ast.FunctionDef) -> int:
    every = node.args
    return len(every.posonlyargs) + len(every.args) + len(every.kwonlyargs)


def _ninth(values: Iterable[int]) -> float:
    """Returns the ninth decile."""
    values = sorted(values)
    if len(values) < 2:
        return float(sum(values))
    return statistics.quantiles(values, n=10, method="inclusive")[-1]


def find(name: str) -> Path:
    """Returns the folder of that name, or that of an installed package, which is not imported."""
    if Path(name).is_dir():
        return Path(name)
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"expected a folder or an installed package, got {name!r}; give its path")
    return Path(spec.submodule_search_locations[0])


def sources(folder: Path) -> list[Path]:
    """Returns the Python files of a folder but for tests, which not all packages bring along."""
    files = sorted(folder.rglob("*.py"))
    return [file for file in files if not re.search("^test_|_test$", file.stem)]


def main(folders: list[str], beside: list[str]) -> None:
    print(f"{'':24}" + "".join(f"{name:>{width}}" for name, width in _WIDTHS.items()))
    for folder in folders:
        print(measure(sorted(Path(folder).rglob("*.py"))).row(folder.removeprefix("./")[-24:]))
    for name in beside:
        print(measure(sources(find(name))).row(Path(name).name[-24:]))


if __name__ == "__main__":
    packages = sorted(str(path.parent) for path in Path("adder_flax").glob("*/__init__.py"))
    parser = argparse.ArgumentParser(description="How code reads, in numbers.")
    own = ["adder_flax", "kfac", "experiments", *packages]
    parser.add_argument("folders", nargs="*", default=own)
    parser.add_argument("--beside", default="", help="packages or folders, joined by commas")
    given = parser.parse_args()
    main(given.folders, list(filter(None, given.beside.split(","))))
