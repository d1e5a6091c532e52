"""Numbers of style that the packages keep; ``python tests/style.py`` prints all of them."""

import functools

import pytest

from tests.processes import ROOT
from tests.style import Style, find, measure, sources


@functools.cache
def of(folder) -> Style:
    return measure(sorted((ROOT / folder).rglob("*.py")))


# Files in the median; those of kfac, where one holds a whole mechanism, are longer.
@pytest.mark.parametrize(
    ("package", "file_lines", "width"),
    [("adder_flax", 175, 95), ("kfac", 240, 95), ("experiments", 100, 100)],
)
def test_functions_fit_on_a_screen_and_files_and_lines_are_short(package, file_lines, width):
    style = of(package)
    assert style.function_lines <= 40
    assert style.parameters <= 12
    assert style.file_lines <= file_lines
    assert style.width <= width


def test_kernels_say_why():
    assert of("adder_flax/ops").comments >= 3


def test_the_measure_counts_what_it_says(tmp_path):
    head = '"""Doc."""\n\n# Why.\nx = lambda a: a  # how\n\n\n'
    function = 'def _f(a, b, *, c):\n    """Doc\n\n    more.\n    """\n    return a\n'
    (tmp_path / "a.py").write_text(head + function)
    style = measure([tmp_path / "a.py"])
    # Three lines of code: x, def and return; two comments, the first behind the docstring.
    assert (style.files, style.lines, style.file_lines) == (1, 3, 12)
    assert style.comments == pytest.approx(100 * 2 / 3)
    assert style.lambdas == pytest.approx(1000 / 3)
    assert (style.function_lines, style.parameters) == (2, 3)


def test_what_stands_beside_is_found_without_its_tests():
    """As a package that is installed, or as a folder."""
    assert find("optax").name == "optax"
    assert find(str(ROOT / "kfac")) == ROOT / "kfac"
    assert not [file for file in sources(find("optax")) if file.stem.endswith("_test")]
    with pytest.raises(SystemExit, match="no_such_package"):
        find("no_such_package")
