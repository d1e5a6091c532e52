"""Parameter trees as flat dictionaries {path: array} and back.

Parts of a tree may be masked, as optax does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import optax

Node = TypeVar("Node")

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, PyTree

    Flat = dict[str, Array]  # path → array


def path_name(path: tuple) -> str:
    """A tree path as text, ``"blocks/0/kernel"``, of a box its content's: a Flax variable's, say.

    >>> path_name((jax.tree_util.DictKey("kernel"), jax.tree_util.GetAttrKey("value")))
    'kernel'
    """
    boxed = len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value")
    return jax.tree_util.keystr(path[:-1] if boxed else path, simple=True, separator="/")


def flatten(tree: PyTree[Array]) -> Flat:
    """The arrays of a tree by path.

    >>> flatten({"fc": {"kernel": 1.0, "bias": optax.MaskedNode()}})
    {'fc/kernel': 1.0}
    """
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def unflatten(flat: Flat, like: PyTree[Array]) -> PyTree[Array]:
    """A tree like ``like`` with the arrays of ``flat``.

    It has ``optax.MaskedNode`` where that has none.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: flat.get(path_name(path), optax.MaskedNode()), like
    )


def masked_paths(tree: PyTree[Any]) -> list[str]:
    """Where a tree has a ``optax.MaskedNode`` or None in place of an array, or of a whole branch.

    >>> masked_paths({"fc": {"kernel": 1.0, "bias": optax.MaskedNode()}, "head": None})
    ['fc/bias', 'head']
    """

    def is_masked(node: Any) -> bool:
        return node is None or isinstance(node, optax.MaskedNode)

    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_masked)[0]
    return [path_name(path) for path, leaf in leaves if is_masked(leaf)]


def nodes(tree: PyTree[Any], kind: type[Node]) -> list[Node]:
    """The nodes of a kind, wherever they stand in a tree.

    >>> nodes({"a": [1, "x"], "b": 2}, int)
    [1, 2]
    """

    def is_one(node: Any) -> bool:
        return isinstance(node, kind)

    return list(filter(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def all_finite(arrays: Iterable[Array]) -> Bool[Array, ""]:
    """Whether no array has an entry that is infinite or not a number.

    >>> bool(all_finite([jnp.ones(2), jnp.array([1.0, jnp.inf])]))
    False
    """
    wrong = jnp.array([~jnp.isfinite(array).all() for array in arrays], jnp.float32).sum()
    # XLA copies a cheap chain, as this sum is, into each of the hundreds of fusions that ask for
    # its end, which is most of what it then compiles; a root counts as dear and is taken once.
    return jnp.sqrt(wrong) == 0


def all_fit(arrays: Iterable[Array]) -> Bool[Array, ""]:
    """Whether what was finite in float32 still is where it was cast to a dtype that holds less.

    Only arrays of such a dtype are looked at.

    >>> bool(all_fit([jnp.array([jnp.inf]), jnp.array([6e4], jnp.float16)]))
    True
    >>> bool(all_fit([jnp.array([7e4]).astype(jnp.float16)]))
    False
    """
    most = jnp.finfo(jnp.float32).maxexp
    return all_finite(array for array in arrays if jnp.finfo(array.dtype).maxexp < most)


def is_inside(path: str, branch: str) -> bool:
    """Whether a path lies in a branch, which may be the whole tree.

    >>> is_inside("fc/kernel", "fc"), is_inside("fc2/kernel", "fc"), is_inside("fc/kernel", "")
    (True, False, True)
    """
    return branch == "" or f"{path}/".startswith(f"{branch}/")


def common_parent(paths: Sequence[str]) -> str:
    """The longest branch that paths lie in.

    >>> common_parent(["blocks/0/kernel", "blocks/0/bias"]), common_parent(["kernel"])
    ('blocks/0', '')
    """
    parents = []
    for keys in zip(*(path.split("/")[:-1] for path in paths), strict=False):
        if len(set(keys)) > 1:
            break
        parents.append(keys[0])
    return "/".join(parents)


def add(tree: PyTree[Array], flat: Flat) -> PyTree[Array]:
    """The tree with the arrays of ``flat`` added to those at their paths."""

    def one(path: tuple, p: Array) -> Array:
        change = flat.get(path_name(path))
        # The cast keeps a narrow parameter narrow: steps are float32 or wider.
        return p if change is None else p + change.astype(p.dtype)

    return jax.tree_util.tree_map_with_path(one, tree)


def concatenated(trees: Iterable[PyTree[Array]], axis: int = 0) -> PyTree[Array]:
    """Trees of one structure as one, their arrays joined along an axis.

    >>> concatenated([(jnp.zeros(1), jnp.ones(2)), (jnp.ones(1), jnp.ones(2))])[0].tolist()
    [0.0, 1.0]
    """
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis), *trees)


def chosen(condition: Bool[Array, ""], new: PyTree[Array], old: PyTree[Array]) -> PyTree[Array]:
    """The new tree where the condition holds, else the old one.

    Whatever the new one holds, NaN too, is gone then.
    """
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
