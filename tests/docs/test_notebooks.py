"""The notebooks of the tutorial run from the first cell to the last, and lie in the repository
without outputs."""

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install -r docs/requirements.txt")
pytest.importorskip("nbclient", reason="pip install -r docs/requirements.txt")

from docs import notebooks  # noqa: E402 - it needs them

PATHS = [pytest.param(path, id=path.stem) for path in notebooks.notebooks()]


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert [path.id for path in PATHS] == ["borrow", "second_order", "swap", "train"]


@pytest.mark.parametrize("path", PATHS)
def test_a_notebook_is_kept_without_what_it_gave(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(notebook))


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_notebook_runs(path):
    notebook = notebooks.outputs_of(path)
    given = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert given
    draws = lambda cell: any("image/png" in output.get("data", {}) for output in cell.outputs)
    drawn = sum(map(draws, code_cells(notebook)))
    assert drawn == sum("alt" in cell.metadata for cell in code_cells(notebook))
    text, pictures = notebooks.as_page(notebook, path.stem)
    assert len(pictures) == drawn == text.count("![")


@pytest.mark.slow
def test_a_cell_that_raises_fails_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "KEPT", tmp_path / "kept")
    path = tmp_path / "broken.ipynb"
    cells = [nbformat.v4.new_code_cell("1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        notebooks.run(path)
    assert not (tmp_path / "kept").exists()


def test_outputs_are_kept_until_notebook_or_code_changes(tmp_path, monkeypatch):
    path = tmp_path / "one.ipynb"
    nbformat.write(nbformat.v4.new_notebook(), path)
    kept = notebooks._kept(path)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("2")]), path)
    assert notebooks._kept(path) != kept
    kept = notebooks._kept(path)
    monkeypatch.setattr(notebooks, "_code", lambda: b"other")
    assert notebooks._kept(path) != kept
