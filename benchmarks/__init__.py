"""Speeds and counts that this project quotes, printed by ``python -m benchmarks.<name>``."""

import argparse
import sys
from collections.abc import Iterable, Sequence

from adder_flax import app

# As main.py does, and only where a benchmark is what this process is for.
if sys.argv[0] == "-m":
    app.prepare_process()


def parser(description: str | None) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=form)


def print_row(cells: Iterable[object]) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_titles(titles: Sequence[str]) -> None:
    print_row(titles)
    print(f"{'|---' * len(titles)}|", flush=True)
