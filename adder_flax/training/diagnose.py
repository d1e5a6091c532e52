"""Finds the layer in which the first infinity or NaN of a forward pass arises."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from adder_flax import jaxprs
from adder_flax.training.checkpoints import take_digests


def explain_non_finite(forward: Callable, params: Any, gradients: Callable, *batch: Any) -> str:
    """Says in words where a training step first leaves the finite numbers.

    >>> def network(params, x):
    ...     with jax.named_scope("norm"):
    ...         return jnp.log(x - params["shift"]).sum()
    >>> explain_non_finite(network, {"shift": jnp.ones(3)}, jax.grad(network), jnp.ones(3))
    'first in the forward pass, at norm (log)'
    """
    if bad := take_digests(params)[1]:
        return f"the parameters already hold it: {', '.join(bad[:3])}"
    try:
        _evaluate(jax.make_jaxpr(forward)(params, *batch), jax.tree.leaves((params, *batch)), "")
    except _NonFinite as found:
        return f"first in the forward pass, at {found}"
    if bad := take_digests(gradients(params, *batch))[1]:
        return f"the forward pass is finite, the gradient is not, first for {', '.join(bad[-3:])}"
    return "it could not be reproduced operation by operation: the compiled step rounds differently"


class _NonFinite(Exception):
    pass


def _finite(x: Any) -> bool:
    return not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or bool(jnp.isfinite(x).all())


def _evaluate(program: core.ClosedJaxpr, args: Sequence[Any], scope: str) -> list[Any]:
    def run_equation(equation: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
        here = jaxprs.scope(scope, equation)
        if equation.primitive.name == "scan" and not equation.params["reverse"]:
            outputs = _evaluate_scan(equation.params, inputs, here)
        elif (inner := jaxprs.callee(equation)) is not None:
            outputs = _evaluate(inner, inputs, here)
        else:
            outputs = jaxprs.apply(program.jaxpr, equation, inputs)
        if all(map(_finite, inputs)) and not all(map(_finite, outputs)):
            raise _NonFinite(f"{here or 'top level'} ({equation.primitive.name})")
        return outputs

    return jaxprs.evaluate(program, args, run_equation)


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
