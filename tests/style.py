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
import statistics
import tokenize
from collections.abc import Iterable
from pathlib import Path

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


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
        return (
            f"{name:24}{self.files:6}{self.lines:8}{self.file_lines:8.0f}{self.function_lines:11.0f}{self.width:7.0f}"
            f"{self.comments:10.1f}{self.lambdas:9.1f}{self.parameters:12}"
        )


def measure(paths: Iterable[Path]) -> Style:
    """Returns the numbers of Python files."""
    texts = [path.read_text() for path in paths]
    trees = [ast.parse(text) for text in texts]
    code, comments, docstrings = 0, 0, 0
    for text, tree in zip(texts, trees, strict=True):
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        first = next(
            n for n, token in enumerate(tokens) if token.type not in _NO_CODE
        )  # a licence stands before it
        comments += sum(token.type == tokenize.COMMENT for token in tokens[first:])
        code += len(
            {
                line
                for t in tokens
                if t.type not in _NO_CODE
                for line in range(t.start[0], t.end[0] + 1)
            }
        )
        docstrings += sum(map(_docstring_lines, ast.walk(tree)))
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, _FUNCTION)]
    lambdas = sum(isinstance(node, ast.Lambda) for tree in trees for node in ast.walk(tree))
    code -= docstrings
    return Style(
        files=len(texts),
        lines=code,
        file_lines=statistics.median(text.count("\n") for text in texts),
        function_lines=_ninth(
            node.end_lineno - node.lineno + 1 - _docstring_lines(node) for node in functions
        ),
        width=_ninth(len(line) for text in texts for line in text.splitlines() if line.strip()),
        comments=100 * comments / max(code, 1),
        lambdas=1000 * lambdas / max(code, 1),
        parameters=max(
            (_parameters(node) for node in functions if _is_private(node.name)), default=0
        ),
    )


def _docstring_lines(node: ast.AST) -> int:
    """Returns the length of a docstring, 0 where there is none."""
    if (
        not isinstance(node, (*_FUNCTION, ast.ClassDef, ast.Module))
        or ast.get_docstring(node) is None
    ):
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
    return (
        statistics.quantiles(values, n=10, method="inclusive")[-1]
        if len(values) > 1
        else float(sum(values))
    )


def find(name: str) -> Path:
    """Returns the folder of an installed package, which is not imported, or the folder of that
    name.

    Raises:
      SystemExit: there is neither.
    """
    if Path(name).is_dir():
        return Path(name)
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"expected a folder or an installed package, got {name!r}; pip install it, or give its "
            "path"
        )
    return Path(spec.submodule_search_locations[0])


def sources(folder: Path) -> list[Path]:
    """Returns the Python files of a folder but for tests, which some packages bring along and
    others do not."""
    files = sorted(folder.rglob("*.py"))
    return [
        file
        for file in files
        if not file.stem.endswith("_test") and not file.stem.startswith("test_")
    ]


def main(folders: list[str], beside: list[str]) -> None:
    """Prints the table."""
    widths = {
        "": 24,
        "files": 6,
        "lines": 8,
        "file": 8,
        "functions": 11,
        "width": 7,
        "comments": 10,
        "lambdas": 9,
    }
    print("".join(f"{name:>{width}}" for name, width in (widths | {"parameters": 12}).items()))
    for folder in folders:
        print(measure(sorted(Path(folder).rglob("*.py"))).row(folder.removeprefix("./")[-24:]))
    for name in beside:
        print(measure(sources(find(name))).row(Path(name).name[-24:]))


if __name__ == "__main__":
    packages = sorted(str(path.parent) for path in Path("adder_flax").glob("*/__init__.py"))
    parser = argparse.ArgumentParser(description="How code reads, in numbers.")
    parser.add_argument(
        "folders", nargs="*", default=["adder_flax", "kfac", "experiments", *packages]
    )
    parser.add_argument(
        "--beside", default="", help="installed packages or folders, joined by commas"
    )
    given = parser.parse_args()
    main(given.folders, list(filter(None, given.beside.split(","))))
