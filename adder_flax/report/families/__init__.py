"""The families of claims of the papers, one file each: it computes, judges and draws."""

import importlib

# In the order of the page.
for _name in (
    "answers",
    *("theorem_1", "proposition_1", "maps"),
    *("exclusive_or", "saturation", "identities", "gates"),
    *("sphere", "kernel", "walk", "diffusion", "motion", "heads", "second_order_term", "fisher"),
    "energy",
    "alignments",
):
    importlib.import_module(f"{__name__}.{_name}")
