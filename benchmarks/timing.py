"""Times functions in turn, so that other work on the machine falls on all of them."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

QUICK_SECONDS = 0.2


class Timings(NamedTuple):
    """Seconds of several functions, by name, one for each round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float | None:
        """Returns the median of its seconds, or None if it was not measured."""
        return statistics.median(self.seconds[name]) if name in self.seconds else None

    def ratio(self, slower: str, faster: str) -> float | None:
        """Returns how many times longer `slower` takes than `faster`, or None if either was not
        measured."""
        if slower not in self.seconds or faster not in self.seconds:
            return None
        pairs = zip(self.seconds[slower], self.seconds[faster], strict=False)
        return statistics.median(a / b for a, b in pairs)


def measure(
    functions: dict[str, Callable],
    rounds: int,
    seconds: float,
    say: Callable[[str, float], None] = lambda name, seconds: None,
) -> Timings:
    """Calls the functions in turn, `rounds` times (if the time is up, three), after one call each
    to warm up, and says each time at once.

    Quick ones are called once more before each timed call: the one before them may have thrown
    their operands out of the caches and their memory back to the system, which is not what they
    meet in use.
    """
    timings = Timings({name: [] for name in functions})
    for function in functions.values():
        jax.block_until_ready(function())
    quick = {name for name, function in functions.items() if seconds_of(function) < QUICK_SECONDS}
    deadline = time.perf_counter() + seconds
    for done in range(rounds):
        if done >= 3 and time.perf_counter() > deadline:
            break
        for name, function in functions.items():
            if name in quick:
                jax.block_until_ready(function())
            timings.seconds[name].append(seconds_of(function))
            say(name, timings.seconds[name][-1])
    return timings


def seconds_of(function: Callable) -> float:
    """Returns how long one call and its computation take."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start
