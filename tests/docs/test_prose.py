"""Pages stay short: what CONTRIBUTING says of prose, in numbers."""

import pytest

from tests.docs.prose import PAGES, ROOT, measure

FOUND = {path: measure(path.read_text()) for path in PAGES}


@pytest.mark.parametrize("path", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_a_page_can_be_read(path):
    words, cell, paragraph, _ = FOUND[path]
    assert words <= 2500
    assert cell <= 15
    assert paragraph <= 90


def test_the_ten_longest_pages_together():
    assert sum(sorted((found.words for found in FOUND.values()), reverse=True)[:10]) <= 15_000


def test_pages_of_results_are_drawn():
    for name in ("results", "optimizers", "claims", "healing", "cg_fac_measured", "compiled"):
        assert FOUND[ROOT / "docs" / f"{name}.md"].pictures, name
    for path in sorted((ROOT / "results").glob("*/results.md")):
        lines = [line for line in path.read_text().splitlines() if line]
        assert lines[1].startswith("**"), path
        assert any(line.startswith("![") for line in lines[:5]), path
