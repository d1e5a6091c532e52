"""The examples of kfac/README.md run as printed."""

import doctest

import pytest

from tests.processes import ROOT


@pytest.mark.slow
def test_examples():
    assert doctest.testfile(str(ROOT / "kfac" / "README.md"), module_relative=False).failed == 0
