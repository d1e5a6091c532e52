"""What curvature costs: one product F v, and each part of a step, in units of one gradient;
and memory.

    python -m benchmarks.curvature  # adder DeiT-Tiny of 4 blocks on digits, a minute
    python -m benchmarks.curvature --mechanism=multiplicative --depth=12 --batch-size=64

A product's time is the slope of the solver's time over its iterations, so that it includes the
solver's own arithmetic and leaves out what is done once. Times are medians of interleaved
repetitions; the first column of numbers is the ratio to the gradient of the whole network, which
does not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import kfac
from adder_flax import data, ops, training
from adder_flax.experiments import common
from adder_flax.training.sharding import put_batch
from benchmarks.timing import Timings, measure
from kfac._trees import path_name
from kfac.solve import _solvers as solver
from kfac.solve import _systems as systems

FEW, MANY = 2, 10
MAX_ROUNDS = 1000  # the time is up before
FORMS = {"exact": "exact block", "factors": "Kronecker factors"}


def make_run(flags: argparse.Namespace) -> training.Run:
    """The experiment's run, with the depth and batch size asked for."""
    config = common.deit(flags.mechanism, "tiny")
    config.model.depth, config.batch_size = flags.depth, flags.batch_size
    config.optimizer.name = "kfac"
    return training.build_run(config)


def solve(curvature: kfac.Curvature, params: Any, grads: Any, form: str, iterations: int) -> Any:
    """CG of this many iterations on every block that has this form."""
    flat = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    flat_grads = {
        path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]
    }
    forms, factors = {}, {}
    for name, block in curvature.layers.blocks.items():
        forms[name] = form if form == "exact" or block.factored else "kron"
        if form != "exact":
            factors[name] = systems.new_factors(
                block, curvature, systems.lanes_of(block, flat), forms[name]
            )
    solutions = []
    for system in systems.build(curvature, flat, forms, factors):
        lanes = [systems.lanes_of(block, flat_grads) for block in system.blocks]
        b = system.pack(jax.tree.map(lambda *a: jnp.concatenate(a), *lanes))
        gamma = jnp.ones(sum(block.lanes for block in system.blocks))
        solutions.append(solver.cg(system.matvec, b, gamma, max_iterations=iterations).x)
    return solutions


def compile_parts(
    run: training.Run, batch_size: int
) -> tuple[dict[str, Any], dict[str, Callable[[], Any]], Any]:
    """Compiled programs and calls of them by name, and the curvature of one batch."""
    params = run.init()["params"]
    batch = put_batch(data.TrainPipeline(run.train_source, batch_size, 0)[0], run.mesh)
    examples = run.task.examples(jax.random.key(0), batch), jax.random.key(1)

    def loss_fn(params, examples, key):
        outcome = run.parts.loss(params, examples, key)
        return outcome.loss, outcome.outputs

    def with_curvature(params: Any, fisher: str) -> Any:
        function = kfac.value_grad_and_curvature(loss_fn, fisher=fisher, has_aux=True)
        return function(params, *examples, key=jax.random.key(2))[1:]

    programs, calls = {}, {}

    def add(name: str, function: Callable, *args: Any) -> Any:
        programs[name] = compiled = jax.jit(function).lower(*args).compile()
        calls[name] = lambda: compiled(*args)
        return calls[name]()

    add("gradient", lambda p: jax.grad(loss_fn, has_aux=True)(p, *examples)[0], params)
    add("gradient and capture", lambda p: with_curvature(p, "empirical"), params)
    grads, curvature = add("gradient and curvature", lambda p: with_curvature(p, "mc"), params)
    for form in FORMS:
        for n in (FEW, MANY):
            add(
                f"{form} {n}",
                lambda c, p, g, form=form, n=n: solve(c, p, g, form, n),
                curvature,
                params,
                grads,
            )
    return programs, calls, curvature


def time_table(timings: Timings) -> str:
    """Markdown: each part in gradients and milliseconds."""
    rows = {
        name: timings.median(name)
        for name in ("gradient", "gradient and capture", "gradient and curvature")
    }
    for form, label in FORMS.items():
        few, many = (timings.median(f"{form} {n}") for n in (FEW, MANY))
        product = (many - few) / (MANY - FEW)
        rows[f"one product and CG step, {label}"] = product
        rows[f"once per solution, {label}"] = few - FEW * product
    lines = [f"| {name} | {t / rows['gradient']:.2f} | {1e3 * t:.1f} |" for name, t in rows.items()]
    return "\n".join(["| part | gradients | ms |", "| --- | --- | --- |", *lines])


def memory_table(programs: dict[str, Any], curvature: kfac.Curvature, state: Any) -> str:
    """Markdown: what is held, and what each program needs beside its arguments and results."""
    bytes_of = lambda tree: sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
    rows = {
        "parameters": bytes_of(state["params"]),
        "optimizer state": bytes_of(state["opt_state"]),
        "captured inputs and cotangents": bytes_of(curvature.captured),
    }
    for name in ("gradient", "gradient and capture", "gradient and curvature"):
        rows[f"{name}: temporary"] = programs[name].memory_analysis().temp_size_in_bytes
    lines = [f"| {name} | {size / 2**20:.1f} |" for name, size in rows.items()]
    return "\n".join(["| memory | MiB |", "| --- | --- |", *lines])


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mechanism", default="adder", choices=common.MECHANISMS)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0, help="of measurement")
    flags = parser.parse_args(argv)
    run = make_run(flags)
    programs, calls, curvature = compile_parts(run, flags.batch_size)
    timings = measure(calls, MAX_ROUNDS, flags.seconds)
    print(
        f"\n{flags.mechanism} DeiT-Tiny, {flags.depth} blocks, batch {flags.batch_size}, on "
        f"{ops.backend_report()}"
    )
    print(f"{100 * curvature.layers.coverage:.1f} % of the parameters covered\n")
    print(time_table(timings), memory_table(programs, curvature, run.abstract_state), sep="\n\n")


if __name__ == "__main__":
    main()
