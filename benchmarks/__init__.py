"""Speeds and counts that this project quotes, printed by ``python -m benchmarks.<name>``."""

import argparse
import sys

from adder_flax import app

# As main.py does, and only where a benchmark is what this process is for.
if sys.argv[0] == "-m":
    app.prepare_process()


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of a command line whose help begins with a file's header."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=form)
