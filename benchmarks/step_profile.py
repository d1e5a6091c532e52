"""What a training step on a CPU is made of: its matrix products, its adder and additive kernels,
and all that stands around them.

    python -m benchmarks.step_profile [--mechanisms=multiplicative,adder] [--width=96 --depth=6]
    python -m benchmarks.step_profile --data=fake --mechanisms=multiplicative

DeiT-Tiny on the digits unless sizes are given, 64 images of 17 tokens, forward, backward and
AdamW, as the experiments train it; or 32 images of 65 tokens, the step that `train_step` compares
with PyTorch's. The time of every operation is read from a timeline of
``jax.profiler``, and what an operation is from the compiled program: XLA fuses what stands around a
product into it, so a fusion with a product counts as one. The bound of a step is the time of its
products and kernels alone. On several cores operations may overlap and their sum exceed the step:
`taskset -c 0` shows one core.
"""

import argparse
import collections
import gzip
import json
import re
import statistics
import tempfile
from pathlib import Path

import jax

from adder_flax import ops, training
from adder_flax.experiments import common
from adder_flax.training import sharding
from benchmarks.timing import seconds_of
from benchmarks.train_step import deit_tiny_of_65_tokens

IMAGES_OF = {
    "digits": lambda mechanism: common.deit(mechanism, "tiny", "digits"),
    "fake": deit_tiny_of_65_tokens,
}
_PRODUCT, _KERNEL = "matrix products", "adder and additive kernels"
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\(")
_CALLED = re.compile(r"calls=%?([\w.-]+)")
_SOURCE = re.compile(r'op_name="[^"]*?([\w-]+)"')


def kinds(program: str) -> dict[str, str]:
    """Returns what each instruction of a compiled program is, by its name.

    Args:
      program: its text, as ``compiled.as_text()`` gives it.

    Returns:
      ``matrix products``, ``adder and additive kernels`` or, for the others, the JAX primitive that
      it came from, or XLA's own name of the operation where it came from none.
    """
    computation, products, instructions = "", set(), {}
    for line in map(str.strip, program.splitlines()):
        if line.endswith("{"):
            computation = line.removeprefix("ENTRY ").split()[0].lstrip("%")
        elif found := _INSTRUCTION.match(line):
            name, opcode = found.groups()
            called, source = _CALLED.search(line), _SOURCE.search(line)
            if opcode == "dot":
                products |= {name, computation}
            kind = source.group(1) if source else opcode
            is_kernel = opcode == "custom-call" and kind == "ffi_call"
            instructions[name] = (_KERNEL if is_kernel else kind, called and called.group(1))
    return {
        name: _PRODUCT if name in products or called in products else kind
        for name, (kind, called) in instructions.items()
    }


def profile(config, steps: int) -> tuple[float, collections.Counter]:
    """Returns the median seconds of a step, and seconds of a step by kind of operation.

    The latter from the median of each operation, since other work on the machine falls on some.
    """
    run = training.build_run(config)
    batch = sharding.put_batch(run.batches()[0], run.mesh)
    state = run.init()

    def step():
        nonlocal state
        state, metrics = run.train_step(state, batch, run.hyper)
        return state, metrics

    with jax.set_mesh(run.mesh), tempfile.TemporaryDirectory() as folder:
        of = kinds(run.train_step.lower(state, batch, run.hyper).compile().as_text())
        for _ in range(3):
            seconds_of(step)
        seconds = statistics.median(seconds_of(step) for _ in range(steps))
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level, options.python_tracer_level = 3, 0
        with jax.profiler.trace(folder, create_perfetto_trace=True, profiler_options=options):
            for _ in range(steps):
                seconds_of(step)
        (timeline,) = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]
    durations = collections.defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event["name"] in of:
            durations[event["name"]].append(event["dur"] / 1e6)
    spent = collections.Counter()
    for name, taken in durations.items():
        spent[of[name]] += statistics.median(taken) * len(taken) / steps
    return seconds, spent


def describe(name: str, seconds: float, spent: collections.Counter, rows: int) -> str:
    """Returns the table of one step."""
    total, bound = sum(spent.values()), spent[_PRODUCT] + spent[_KERNEL]
    lines = [f"{name}: {1e3 * seconds:.1f} ms a step, {1e3 * total:.1f} ms in its operations"]
    first = [kind for kind in (_PRODUCT, _KERNEL) if spent[kind]]
    others = [kind for kind, _ in spent.most_common() if kind not in first]
    shown = first + others[:rows]
    for kind in shown:
        lines.append(f"  {kind:28} {1e3 * spent[kind]:7.2f} ms  {spent[kind] / total:6.1%}")
    if rest := total - sum(spent[kind] for kind in shown):
        lines.append(f"  {'other operations':28} {1e3 * rest:7.2f} ms  {rest / total:6.1%}")
    lines.append(f"  all operations over products and kernels: {total / bound:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mechanisms", default="multiplicative,additive,adder")
    parser.add_argument("--data", default="digits", choices=IMAGES_OF)
    parser.add_argument("--width", type=int, help="of the network; DeiT-Tiny's unless given")
    parser.add_argument("--depth", type=int, help="its blocks; DeiT-Tiny's unless given")
    parser.add_argument("--steps", type=int, default=20, help="that are timed, and then recorded")
    parser.add_argument("--rows", type=int, default=12, help="of other operations in a table")
    options = parser.parse_args()
    print(ops.backend_report().splitlines()[0])
    for mechanism in options.mechanisms.split(","):
        config = IMAGES_OF[options.data](mechanism)
        sizes = {"width": options.width, "depth": options.depth}
        config.model.update({name: size for name, size in sizes.items() if size})
        print(describe(mechanism, *profile(config, options.steps), options.rows), flush=True)


if __name__ == "__main__":
    main()
