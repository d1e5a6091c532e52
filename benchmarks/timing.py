"""Times functions in turn, so that other work on the machine falls on all of them, and tells what a
GPU did meanwhile."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

QUICK_SECONDS = 0.2


class Timings(NamedTuple):
    """Seconds of several functions, by name, one for each round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float | None:
        """Returns None for what was not measured, as `ratio` does."""
        return statistics.median(self.seconds[name]) if name in self.seconds else None

    def ratio(self, slower: str, faster: str) -> float | None:

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


def repeated(function: Callable, count: int) -> Callable:
    """Returns a function that calls it so often without waiting, and returns the last result."""

    def run():
        for _ in range(count - 1):
            function()
        return function()

    return run


def seconds_of(function: Callable) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


class GpuEvent(NamedTuple):
    name: str
    start_ns: float
    duration_ns: float


def gpu_events(function: Callable[[], Any], calls: int) -> list[GpuEvent]:
    """Returns what the streams of GPUs did in so many calls, from JAX's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = options.host_tracer_level = 0  # the device alone
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(calls):
                jax.block_until_ready(function())
        profiles = [ProfileData.from_file(str(path)) for path in Path(folder).rglob("*.xplane.pb")]
    planes = [plane for profile in profiles for plane in profile.planes]
    lines = [(plane.name, line) for plane in planes for line in plane.lines]
    # Other lines of a GPU have the same once more, by operation and by module.
    events = [
        GpuEvent(event.name, event.start_ns, event.duration_ns)
        for plane, line in lines
        if plane.startswith("/device:GPU") and line.name.startswith("Stream")
        for event in line.events
    ]
    if not events:
        found = [f"{plane}: {line.name}" for plane, line in lines]
        raise RuntimeError(f"expected events in a stream of a GPU, got {found}")
    return events


def busy_seconds(events: list[GpuEvent]) -> float:
    """Returns how long a GPU did anything at all, of such events.

    >>> round(1e9 * busy_seconds([GpuEvent("a", 0, 10), GpuEvent("b", 5, 10)]))
    15
    """
    busy, end = 0.0, 0.0
    for event in sorted(events, key=lambda event: event.start_ns):
        last = event.start_ns + event.duration_ns
        busy += max(last - max(event.start_ns, end), 0)
        end = max(end, last)
    return 1e-9 * busy
