"""What is true of a parameter beside its value, said where the parameter is made.

Facts travel as metadata of the variable, through ``nnx.split``, ``nnx.merge`` and
``nnx.eval_shape``; optimizers and meshes read them with :func:`parameter_facts` and know no class
of layers.
"""

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx

Parameter = TypeVar("Parameter", bound=nnx.Variable)

_FACTS = "facts"


class Axis(NamedTuple):
    """An axis that may be split over devices.

    Attributes:
      name: logical name, which a mesh maps to one of its own axes: ``"heads"`` or ``"hidden"``.
      parts: number of whole parts it consists of, such as heads.
    """

    name: str
    parts: int


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is true of one parameter.

    Attributes:
      role: ``"weight"``: inputs are multiplied with it; ``"prototype"``: their L1 distance to it is
        taken; ``"other"``: biases, norms, embeddings, and all else.
      decay: whether weight decay shrinks it.
      axes: one entry for each axis that may be split, by position.
      matrix: how many of its last axes are inputs and how many outputs of the matrix that it is; in
        front of them a stack of such, as one for each head.
    """

    role: str = "other"
    decay: bool = False
    axes: tuple[Axis | None, ...] = ()
    matrix: tuple[int, int] = (1, 1)


def state_facts(parameter: Parameter, *, role: str, decay: bool) -> Parameter:
    """Writes to a parameter its role and whether weight decay shrinks it; returns the parameter.

    Example:
      >>> parameter = state_facts(nnx.Param(jax.numpy.ones((2, 3))), role="prototype", decay=False)
      >>> parameter_facts(nnx.Dict(kernel=parameter))["kernel"].role
      'prototype'
    """
    known = parameter.get_metadata(_FACTS, Facts())
    parameter.set_metadata(_FACTS, dataclasses.replace(known, role=role, decay=decay))
    return parameter


def as_attribute(number: float | jax.Array) -> Any:
    """Returns a number as a module keeps it: part of the program, or, of an array, data."""
    return nnx.data(number) if isinstance(number, jax.Array) else number


def name_axis(
    parameter: nnx.Variable | None, axis: int, name: str, parts: int | None = None
) -> None:
    """Says that an axis of a parameter may be split over devices.

    Args:
      parameter: None, as of a layer without a kernel, is left alone.
      axis: which.
      name, parts: as of `Axis`; by default each position is a part.

    Example:
      >>> linear = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
      >>> name_axis(linear.kernel, -1, "heads", 3)
      >>> parameter_facts(linear)["kernel"].axes
      (None, Axis(name='heads', parts=3))
    """
    if parameter is None:
        return
    shape = parameter.shape
    facts = parameter.get_metadata(_FACTS, None) or _default("kernel", len(shape))
    axes = list(facts.axes or [None] * len(shape))
    axes[axis] = Axis(name, shape[axis] if parts is None else parts)
    parameter.set_metadata(_FACTS, dataclasses.replace(facts, axes=tuple(axes)))


def parameter_facts(model: nnx.Module) -> dict[str, Any]:
    """Returns a tree like the model's parameters with the :class:`Facts` of each.

    A parameter that states none is a decayed weight if its name ends in ``kernel``, as in Flax's
    own layers and in the scores, and it has two or more axes, and else none of both. The model may
    be abstract.

    Example:
      >>> facts = parameter_facts(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> facts["kernel"].decay, facts["bias"].decay
      (True, False)
    """
    state = nnx.state(model, nnx.Param)
    facts = {
        path: parameter.get_metadata(_FACTS, None) or _default(path[-1], len(parameter.shape))
        for path, parameter in nnx.to_flat_state(state)
    }
    for path, module in nnx.iter_modules(model):
        kernel = (*path, "kernel")
        if kernel in facts and (matrix := _matrix_of(module)):
            facts[kernel] = dataclasses.replace(facts[kernel], matrix=matrix)
    # In the order of the parameters, so that both trees have one structure.
    return jax.tree_util.tree_map_with_path(
        lambda path, _: facts[tuple(key.key for key in path)], nnx.to_pure_dict(state)
    )


def has_prototypes(model: nnx.Module) -> bool:
    """Whether some layer of a module, abstract perhaps, takes L1 distances to its parameters."""
    return any(facts.role == "prototype" for facts in jax.tree.leaves(parameter_facts(model)))


def _default(name: Any, num_axes: int) -> Facts:
    is_weight = str(name).endswith("kernel") and num_axes >= 2
    return Facts("weight" if is_weight else "other", decay=is_weight)


def _matrix_of(module: nnx.Module) -> tuple[int, int] | None:
    """Inputs and outputs among the axes of the kernel of one of Flax's layers that has several."""
    if isinstance(module, nnx.Conv | nnx.ConvTranspose):
        return len(module.kernel_size) + 1, 1
    if isinstance(module, nnx.LinearGeneral):
        return len(module.axis), len(module.out_features)
    return None
