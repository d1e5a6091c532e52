"""Reading and running traced programs equation by equation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend import core


def scope(outer: str, equation: core.JaxprEqn) -> str:
    """Named scopes around an equation of a program that itself stands inside of `outer`."""
    return "/".join(part for part in (outer, str(equation.source_info.name_stack)) if part)


def inner_programs(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """The programs that an equation holds: bodies, branches, callees, whatever they are called."""
    items = []
    for value in equation.params.values():
        items += value if isinstance(value, (tuple, list)) else (value,)
    programs = [getattr(item, "jaxpr", item) for item in items]
    return [program for program in programs if hasattr(program, "eqns")]


# Loops, branches and shards hold programs too, but do more with them than to call them.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_lin")
_CALLS += ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def scan_parts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a ``jax.lax.scan`` are the same at each turn, and how many it carries.

    From JAX 0.11 on its parameters tell them as trees.

    Example:
      >>> import jax
      >>> rows, c = jax.numpy.ones(3), jax.numpy.float32(2)
      >>> program = jax.make_jaxpr(lambda c: jax.lax.scan(lambda x, y: (x + c * y, y), c, rows))(c)
      >>> scan_parts(program.eqns[-1].params)
      (1, 1)
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def callee(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """The program that an equation calls once: ``jax.jit``, ``jax.checkpoint``, own derivatives.

    Example:
      >>> import jax
      >>> program = jax.make_jaxpr(lambda x: jax.jit(lambda x: 2 * x)(x) + x)(1.0)
      >>> [callee(equation) is not None for equation in program.eqns]
      [True, False]
    """
    if equation.primitive.name not in _CALLS:
        return None
    params = equation.params
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    program = next((params[name] for name in names if name in params), None)
    if program is None or len(equation.invars) != len(getattr(program, "jaxpr", program).invars):
        return None
    return program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, ())


def evaluate(
    program: core.ClosedJaxpr,
    inputs: Sequence[Any],
    run_equation: Callable[[core.JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Runs a program, each of its equations by a function of the equation and its inputs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> program = jax.make_jaxpr(lambda x: jnp.exp(x) + 1.0)(0.0)
      >>> [two] = evaluate(program, [0.0], lambda *now: apply(program.jaxpr, *now))
      >>> float(two)
      2.0
    """
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *inputs], strict=True))
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]
    for equation in jaxpr.eqns:
        outputs = run_equation(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def apply(program: core.Jaxpr, equation: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Runs one equation of a program."""
    pairs = zip(equation.invars, inputs, strict=True)
    variables = {atom: x for atom, x in pairs if isinstance(atom, core.Var)}
    names = program.debug_info.with_unknown_names()
    ends: dict[str, Any] = dict(invars=list(variables), outvars=equation.outvars)
    alone = program.replace(constvars=[], eqns=[equation], debug_info=names, **ends)
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*variables.values())
