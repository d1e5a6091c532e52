"""The documentation builds without a warning: links, anchors, included files, docstrings."""

import re
import subprocess
import sys

import pytest

from tests.processes import ROOT


@pytest.mark.slow
def test_the_site_builds_with_warnings_as_errors(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install -r docs/requirements.txt")
    # Not --quiet: what is not said is not counted either.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api" / "attention" / "index.html").read_text()
    assert "adder_attention" in page
    assert "&gt;&gt;&gt; x = jnp" not in page.split("<pre>")[0]  # doctests show as code
    # Formulas are drawn, and nothing is asked of other servers.
    adder = (tmp_path / "attention" / "adder" / "index.html").read_text()
    assert '<svg class="formula" role="img" aria-label="1/\\sqrt d"' in adder
    for written in tmp_path.rglob("*.html"):
        text = written.read_text()
        assert 'class="arithmatex"' not in text, written
        assert not re.findall(r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//[^"]+', text), written
        assert not re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="(?:https?:)?//[^"]+', text), (
            written
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["[link](nowhere.md)", "[link](#nowhere)", "![picture](nowhere.png)"]
)
def test_a_broken_link_fails_the_build(text, tmp_path):
    """One page with the site's own settings."""
    pytest.importorskip("mkdocs", reason="pip install -r docs/requirements.txt")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Title\n\nA broken {text}.\n")
    settings = f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: docs\nhooks: []\nnav: [index.md]\n"
    (tmp_path / "mkdocs.yml").write_text(settings)
    build = [sys.executable, "-m", "mkdocs", "build", "--site-dir", tmp_path / "site"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "nowhere" in done.stderr


def test_the_drawing_of_the_architecture_is_that_of_the_imports():
    made = [sys.executable, "-c", "import architecture as a; print(a.draw(a.imports()), end='')"]
    done = subprocess.run(made, cwd=ROOT / "docs", capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs" / "images" / "architecture.svg").read_text(), (
        "run python docs/architecture.py"
    )
