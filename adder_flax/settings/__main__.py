"""Prints the page of all settings: ``python -m adder_flax.settings > docs/settings.md``."""

from adder_flax.settings._page import page

if __name__ == "__main__":
    print(page(), end="")
