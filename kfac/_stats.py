"""What a step of CG-FAC tells of itself."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kfac._blocks import Block
from kfac._options import Options
from kfac._trees import nodes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """What a step tells of itself, see ``telemetry``.

    Of all blocks in one array: on a GPU an array for each would be as many small kernels, and
    buffers to hand over, at every step.

    Attributes:
      damping: λ.
      step, momentum: α and β.
      kl_scale: factor by which the KL clip shortened the step.
      coherence: of the network's Δᵀ F Δ over the layers', 1 where it is not measured.
      model: predicted change of the loss.
      ratio: actual over predicted change, when last measured.
      rejected: 1 where the step was refused.
      iterations: of CG in each of ``blocks``, means over their lanes; None where there are none,
        since Orbax stores no empty arrays.
      residual: of CG in each of ``measured``, likewise.
      blocks: names of the blocks.
      measured: names of those whose residual a product tells.
    """

    damping: Float[Array, ""]
    step: Float[Array, ""]
    momentum: Float[Array, ""]
    kl_scale: Float[Array, ""]
    coherence: Float[Array, ""]
    model: Float[Array, ""]
    ratio: Float[Array, ""]
    rejected: Float[Array, ""]
    iterations: Float[Array, " block"] | None
    residual: Float[Array, " measured"] | None
    blocks: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    measured: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def arrays(self) -> list[str]:
        """Names of the fields that are no names themselves."""
        return [f.name for f in dataclasses.fields(self) if not f.metadata.get("static")]

    def by_name(self) -> dict[str, Array]:
        """Scalars by the names of ``telemetry``."""
        scalars = {f"cg_fac/{name}": getattr(self, name) for name in _SCALARS}
        for name, of in (("iterations", self.blocks), ("residual", self.measured)):
            means = zip(of, getattr(self, name) if of else (), strict=True)
            scalars |= {f"cg_fac/{name}/{block}": mean for block, mean in means}
        return scalars


_SCALARS = ("damping", "step", "momentum", "kl_scale", "coherence", "model", "ratio", "rejected")


def empty_stats(owned: dict[str, Block], zero: Array, options: Options) -> Stats:
    """What is told before the first step.

    Args:
      owned: the blocks by name.
      zero: a 0 of the dtype of all numbers.
      options: of the optimizer.
    """
    measured = tuple(name for name, block in owned.items() if options.measures_residual(block))
    return Stats(
        **{name: jnp.full_like(zero, name == "ratio") for name in _SCALARS},
        iterations=jnp.zeros(len(owned), zero.dtype) if owned else None,
        residual=jnp.zeros(len(measured), zero.dtype) if measured else None,
        blocks=tuple(owned),
        measured=measured,
    )


def find_stats(opt_state: PyTree[Array]) -> list[Stats]:
    """What the last steps of CG-FAC tell, wherever it stands in an optimizer's state.

    It is what a compiled step hands out, for ``telemetry`` to name outside of it.

    >>> find_stats({"of": "another optimizer"})
    []
    """
    return nodes(opt_state, Stats)


def telemetry(opt_state: PyTree[Array]) -> dict[str, Array]:
    """Scalars of the last step of ``cg_fac``, wherever it stands in an optax chain, by name.

    ``cg_fac/damping`` λ, ``step`` and ``momentum`` (α, β), ``kl_scale``, ``coherence``
    (of the network's Δᵀ F Δ over the layers'; 1 where it is not measured), ``model`` (predicted
    change of the loss), ``ratio`` (actual over predicted, when last measured), ``rejected``; and
    for each block ``iterations/<block>`` and, but for ``solver="inverse"``, ``residual/<block>``
    (mean over its lanes). Empty for other optimizers.

    >>> import jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jnp.ones((3, 2))}}
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p["fc"], x, path="fc") ** 2).mean()
    >>> optimizer = kfac.cg_fac(1.0, kfac.find_layers(loss_fn, params, jnp.ones((4, 3))))
    >>> sorted(telemetry(optimizer.init(params)))[:3]
    ['cg_fac/coherence', 'cg_fac/damping', 'cg_fac/iterations/fc']
    """
    scalars: dict[str, Array] = {}
    for stats in find_stats(opt_state):
        scalars |= stats.by_name()
    return scalars
