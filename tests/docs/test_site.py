"""The documentation builds without a warning: links, anchors, included files, docstrings."""

import re
import subprocess
import sys

import pytest

for _library in ("zensical", "nbclient", "ziamath"):
    pytest.importorskip(_library, reason="pip install -r docs/requirements.txt")

from docs import build  # noqa: E402 - it needs them
from docs.docstrings import to_markdown  # noqa: E402
from tests.processes import ROOT  # noqa: E402


@pytest.mark.slow
def test_the_site_builds_with_warnings_as_errors():
    done = subprocess.run(
        [sys.executable, "-m", "docs.build"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    site = ROOT / "site"
    page = (site / "api" / "attention" / "index.html").read_text()
    assert "adder_attention" in page
    assert "&gt;&gt;&gt; x = jnp" not in page.split("<pre>")[0]  # doctests show as code
    # Formulas are drawn, and nothing is asked of other servers.
    adder = (site / "attention" / "adder" / "index.html").read_text()
    assert '<svg class="formula" role="img" aria-label="1/\\sqrt d"' in adder
    for written in site.rglob("*.html"):
        text = written.read_text()
        assert 'class="arithmatex"' not in text, written
        assert not re.findall(r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//[^"]+', text), written
        sheets = re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="(?:https?:)?//[^"]+', text)
        assert not sheets, written


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[link](nowhere.md)", "[link](#nowhere)", "::: ops.nowhere"])
def test_what_leads_nowhere_fails_the_build(text, tmp_path):
    """One page with the site's own settings."""
    pages = tmp_path / "build" / "docs"
    pages.mkdir(parents=True)
    (pages / "index.md").write_text(f"# Title\n\nA broken\n\n{text}\n")
    settings = (ROOT / "zensical.toml").read_text()
    (tmp_path / "zensical.toml").write_text(re.sub(r"nav = \[.*?\n\]\n", "", settings, flags=re.S))
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "nowhere" in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)


def test_attributes_that_share_a_line_have_it_each():
    text = "What.\n\nAttributes:\n  low, high: ends\n    of it.\n  mean: their mean"
    each = "  low: ends\n    of it.\n  high: ends\n    of it.\n  mean: their mean\n"
    assert to_markdown(text) == f"What.\n\nAttributes:\n{each}"


def test_a_picture_that_is_not_there_is_found(tmp_path):
    (tmp_path / "here.png").touch()
    (tmp_path / "a.md").write_text("![one](here.png) ![two](gone.png) ![three](data:image/png;,)")
    assert build.missing_pictures(tmp_path) == ["a.md: gone.png"]


def test_the_drawing_of_the_architecture_is_that_of_the_imports():
    made = [sys.executable, "-c", "import architecture as a; print(a.draw(a.imports()), end='')"]
    done = subprocess.run(made, cwd=ROOT / "docs", capture_output=True, text=True, check=True)
    kept = (ROOT / "docs" / "images" / "architecture.svg").read_text()
    assert done.stdout == kept, "run python docs/architecture.py"
