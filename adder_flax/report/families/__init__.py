"""The families of claims of the papers: each computes, judges and draws."""

import importlib

# In the order of the page.
_names = ["answers", "adder", "maps", "scores", "parameters", "walk", "motion", "second_order"]
for _name in [*_names, "energy", "alignments"]:
    importlib.import_module(f"{__name__}.{_name}")
