"""The documentation builds without a warning: links, anchors, included files, docstrings."""

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
