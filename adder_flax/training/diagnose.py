"""Finds the layer in which the first infinity or NaN of a forward pass arises."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from adder_flax import jaxprs
from adder_flax.training.sharding import tree_path


def non_finite_leaves(tree: Any) -> list[str]:
    """Returns the paths of the leaves that hold an infinity or NaN.

    >>> non_finite_leaves({"a": jnp.ones(2), "b": [jnp.array(jnp.nan)]})
    ['b/0']
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [tree_path(path) for path, leaf in leaves if not _finite(leaf)]


def first_non_finite(fn: Callable, *args: Any) -> str | None:
    """Runs a function operation by operation to find where it stops to be finite.

    Example:
      >>> def network(x):
      ...     with jax.named_scope("norm"):
      ...         return jnp.log(x - 1.0)
      >>> first_non_finite(network, jnp.ones(3))
      'norm (log)'
    """
    closed = jax.make_jaxpr(fn)(*args)
    try:
        _evaluate(closed, jax.tree.leaves(args), "")
    except _NonFinite as found:
        return str(found)
    return None


class _NonFinite(Exception):
    pass


def _finite(x: Any) -> bool:
    return not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or bool(jnp.isfinite(x).all())


def _evaluate(program: core.ClosedJaxpr, args: Sequence[Any], scope: str) -> list[Any]:
    def run_equation(equation: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
        here = jaxprs.scope(scope, equation)
        outputs = _evaluate_equation(program.jaxpr, equation, inputs, here)
        if all(map(_finite, inputs)) and not all(map(_finite, outputs)):
            raise _NonFinite(f"{here or 'top level'} ({equation.primitive.name})")
        return outputs

    return jaxprs.evaluate(program, args, run_equation)


def _evaluate_equation(
    program: core.Jaxpr, equation: core.JaxprEqn, inputs: list[Any], scope: str
) -> list[Any]:
    if equation.primitive.name == "scan" and not equation.params["reverse"]:
        return _evaluate_scan(equation.params, inputs, scope)
    if (inner := jaxprs.callee(equation)) is not None:
        return _evaluate(inner, inputs, scope)
    return jaxprs.apply(program, equation, inputs)


def _evaluate_scan(params: Any, inputs: list[Any], scope: str) -> list[Any]:
    num_consts, num_carry = jaxprs.scan_parts(params)
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    columns = inputs[num_consts + num_carry :]
    rows = []
    for i in range(params["length"]):
        outputs = _evaluate(
            params["jaxpr"], [*consts, *carry, *(x[i] for x in columns)], f"{scope}/{i}"
        )
        carry = outputs[:num_carry]
        rows.append(outputs[num_carry:])
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def explain_non_finite(forward: Callable, params: Any, gradients: Callable, *batch: Any) -> str:
    """Says in words where a training step first leaves the finite numbers."""
    if bad := non_finite_leaves(params):
        return f"the parameters already hold it: {', '.join(bad[:3])}"
    if place := first_non_finite(forward, params, *batch):
        return f"first in the forward pass, at {place}"
    if bad := non_finite_leaves(gradients(params, *batch)):
        return f"the forward pass is finite, the gradient is not, first for {', '.join(bad[-3:])}"
    return "it could not be reproduced operation by operation: the compiled step rounds differently"
