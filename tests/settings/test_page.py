"""The page of settings says what is declared."""

from adder_flax.settings import RunSettings, declarations
from adder_flax.settings.__main__ import page
from tests.processes import ROOT


def test_the_page_is_what_the_declarations_make():
    assert (ROOT / "docs" / "settings.md").read_text() == page() + "\n", (
        "python -m adder_flax.settings > docs/settings.md"
    )


def test_every_field_has_a_row():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(list(declarations(RunSettings)))
