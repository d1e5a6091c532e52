"""Parameter trees as flat dictionaries {path: array} and back; parts of them may be masked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import optax

Node = TypeVar("Node")

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, PyTree

    Flat = dict[str, Array]  # path → array


def path_name(path: tuple) -> str:
    """A tree path as text, ``"blocks/0/kernel"``, of a box (a Flax variable) its content's."""
    boxed = len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value")
    return jax.tree_util.keystr(path[:-1] if boxed else path, simple=True, separator="/")


def flatten(tree: PyTree[Array]) -> Flat:
    """The arrays of a tree by path."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def masked_paths(tree: PyTree[Any]) -> list[str]:
    """Where a tree has a ``optax.MaskedNode`` or None in place of an array or of a branch."""
    is_masked = lambda node: node is None or isinstance(node, optax.MaskedNode)
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_masked)[0]
    return [path_name(path) for path, leaf in leaves if is_masked(leaf)]


def nodes(tree: PyTree[Any], kind: type[Node]) -> list[Node]:
    """The nodes of a kind, wherever they stand in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=kind.__instancecheck__)
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def all_finite(arrays: Iterable[Array]) -> Bool[Array, ""]:
    """Whether no array has an entry that is infinite or not a number."""
    wrong = jnp.array([~jnp.isfinite(array).all() for array in arrays], jnp.float32).sum()
    # XLA copies a cheap chain, as this sum is, into each of the hundreds of fusions that ask for
    # its end, which is most of what it then compiles; a root counts as dear and is taken once.
    return jnp.sqrt(wrong) == 0


def all_fit(arrays: Iterable[Array]) -> Bool[Array, ""]:
    """Whether what was finite in float32 still is where it was cast to a dtype that holds less."""
    most = jnp.finfo(jnp.float32).maxexp
    return all_finite([array for array in arrays if jnp.finfo(array.dtype).maxexp < most])


def concatenated(trees: Iterable[PyTree[Array]], axis: int = 0) -> PyTree[Array]:
    """Trees of one structure as one, their arrays joined along an axis."""
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis), *trees)
