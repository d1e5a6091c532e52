"""Settings of CG-FAC: what shapes the program is static, hyper-parameters may be traced."""

from __future__ import annotations

import dataclasses
import numbers
from typing import TYPE_CHECKING, Any

import jax
import optax

from kfac._blocks import CURVATURES, Block
from kfac._costs import prefers_factors
from kfac._fisher import FISHERS
from kfac._step import NORMALIZED, STEPS
from kfac._systems import Form

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    Scalar = float | Float[Array, ""]

SOLVERS = ("cg", "inverse", "dense", "dual", "eigh", "auto")

_CHOICES = {
    "curvature": CURVATURES,
    "fisher": (*FISHERS, None),
    "token_sharing": ("expand", "reduce"),
    "solver": SOLVERS,
    "damping_scale": ("relative", "balanced", "absolute"),
    "step": STEPS,
    "kl_scope": ("layers", "network"),
    "product_dtype": ("float32", "bfloat16"),
}

# Name → (least value, whether the least itself is allowed, a bound from above that is not
# reached).
_RANGES = {
    "damping": (0, True, float("inf")),
    "min_damping": (0, True, float("inf")),
    "tolerance": (0, True, float("inf")),
    "factor_decay": (0, True, 1),
    "momentum": (0, True, float("inf")),
    "kl_clip": (0, False, float("inf")),
    "max_iterations": (1, True, float("inf")),
    "preconditioner_interval": (0, True, float("inf")),
    "damping_interval": (0, True, float("inf")),
    "max_factor_size": (0, True, float("inf")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What ``scale_by_cg_fac`` is told. Fields marked with * are hyper-parameters.

    Hyper-parameters may be arrays, traced ones included: arguments of a compiled training step. The
    others shape the program. A hyper-parameter that is off by the number 0 (or by None) must be the
    number itself for that.

    Attributes:
      learning_rate: * factor of the whole step, or a schedule. It is inside, since momentum is of
        steps as they were taken, and the loss after a step is the loss after this very step. 1 for
        ``step="quadratic"``, which finds the length itself.
      curvature: ``"kron"``, ``"exact"`` or ``"token"`` (exact, without products of different
        tokens).
      fisher: the name that ``value_grad_and_curvature`` must have been given; None accepts any.
      token_sharing: ``"expand"`` or ``"reduce"``, for ``"kron"``.
      solver: ``"cg"``; ``"inverse"``: the gradient times the inverses that precondition CG, as old
        as ``preconditioner_interval`` has them, with no further product, as K-FAC does. That is the
        direction of CG's first iteration, for the steps that keep no length, ``"trust_ratio"`` and
        ``"rms"``; blocks without inverses are solved by CG. ``"eigh"`` (for ``"kron"``, by
        eigenvectors of the factors); ``"dual"`` (for ``"exact"``, by Woodbury's identity in example
        space); ``"dense"``, for checks; ``"auto"``: for each exact block the cheaper of ``"cg"``
        and ``"dual"``.
      max_iterations: products per layer and step.
      tolerance: * relative residual at which a layer stops; 0 for a fixed number of iterations,
        which costs no test.
      preconditioner_interval: steps between inversions of the damped Kronecker factors that
        precondition CG, for ``"kron"`` and ``solver="cg"``, and are all of ``"inverse"``; CG makes
        up for their age. 0 for none.
      product_dtype: ``"bfloat16"``: of the operands of products that form factors, of the inverses,
        and of what these multiply, for hardware that is faster so; sums are float32. Rounding is
        some thousandth of the largest inverse eigenvalue, and hides those of directions that are a
        thousand times as sharp as damping.
      warm_start: start CG from the last solution.
      safeguard: rescale the warm start so that it cannot cause an ascent direction.
      damping: * λ.
      damping_scale: ``"relative"``: γ = λ m, with m = tr F / size the mean eigenvalue of the layer,
        free of its scale; ``"balanced"``: γ = λ √(m m̄), with m̄ that of all layers together, free
        of the scale of the loss; ``"absolute"``: γ = λ. With much damping a step is ∇L / γ. As m is
        the mean square of an example's gradient, it is ∇L / m of that for ``"relative"``, so that
        the layers with the smallest gradients move the most, and ∇L / √m for ``"balanced"``, as
        Adam's of whole layers.
      min_damping: * adaptation lowers λ no further.
      damping_interval: steps between Levenberg-Marquardt adaptations of λ to the quadratic model; 0
        for none. Needs ``value`` and ``value_fn``, and one evaluation of the loss each time.
      factor_decay: * of the running averages of Kronecker factors; 0 for this batch alone.
      max_factor_size: layers with larger factors use their Jacobian, and diagonal right factors.
      step: ``"quadratic"``: step length and momentum from a quadratic model in the new direction
        and the last step; ``"fixed"``: momentum and learning rate as given; ``"trust_ratio"``: each
        layer's new direction is brought to the size of its parameters, of which ``learning_rate``
        is the share that a step changes, 0.03 say; ``"rms"``: to a root mean square of
        ``learning_rate``, 2e-3 say, and momentum comes before the solve. ``kl_clip`` is not for the
        last two.
      momentum: * of steps for ``step="fixed"``; for ``"trust_ratio"`` new directions count
        1 - momentum; for ``"rms"`` Nesterov's, of the gradients.
      kl_clip: * κ; shortens steps with Δᵀ F Δ > κ, twice the change of the predictions in nats,
        before the learning rate scales them. None for none, which is for batches much larger than
        the layers: the curvature of a small one leaves directions in which it sees nothing, and the
        quadratic model then asks for steps of any length.
      kl_scope: which F that is with ``step="fixed"``: ``"layers"``, the sum over the layers of what
        each does alone by its averaged blocks; ``"network"``, the Fisher matrix of all of them
        together. What layers and tokens do to the predictions adds up, so the second is larger,
        the more so the deeper the network is; κ means the same for all of them then. It is measured
        where curvature is fresh, for half a product of exact blocks, and its ratio to the first
        averaged.
      reject: refuse a step that raises the loss on its own batch, and raise λ fourfold. Needs
        ``value`` and ``value_fn``, and one evaluation of the loss per step. Steps that are not
        finite are always refused.

    Raises:
      ValueError: unknown names, numbers out of range, choices that exclude each other, a traced
        value that shapes the program.

    >>> Options(curvature="exact", solver="dual").measures_loss
    False
    """

    learning_rate: Scalar | optax.Schedule = 1.0
    curvature: str = "kron"
    fisher: str | None = None
    token_sharing: str = "expand"
    solver: str = "cg"
    max_iterations: int = 5
    tolerance: Scalar = 0.0
    preconditioner_interval: int = 10
    product_dtype: str = "float32"
    warm_start: bool = False
    safeguard: bool = True
    damping: Scalar = 1e-2
    damping_scale: str = "relative"
    min_damping: Scalar = 1e-8
    damping_interval: int = 0
    factor_decay: Scalar = 0.95
    max_factor_size: int = 8192
    step: str = "quadratic"
    momentum: Scalar = 0.9
    kl_clip: Scalar | None = 0.1
    kl_scope: str = "layers"
    reject: bool = False

    def __post_init__(self):
        self._check_kinds()
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"expected {name} to be one of {allowed}, got {getattr(self, name)!r}."
                )
        for name, (least, inclusive, bound) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, numbers.Real) and not (
                least < value < bound or (inclusive and value == least)
            ):
                above = f"{'at least' if inclusive else 'above'} {least}"
                below = f" and below {bound}" if bound < float("inf") else ""
                raise ValueError(f"expected {name} to be {above}{below}, got {value}.")
        if self.solver == "dual" and self.curvature != "exact":
            raise ValueError(
                f"solver='dual' expects curvature='exact', got {self.curvature!r}; use solver='cg'."
            )
        if self.solver == "inverse" and not (
            self.curvature == "kron" and self.preconditioner_interval and self.step in NORMALIZED
        ):
            raise ValueError(
                "solver='inverse' expects curvature='kron', a preconditioner_interval above 0 and "
                f"step to be one of {NORMALIZED}, got {self.curvature!r}, "
                f"{self.preconditioner_interval} and {self.step!r}; use solver='cg'."
            )
        if self.product_dtype != "float32" and self.curvature != "kron":
            raise ValueError(
                f"product_dtype={self.product_dtype!r} is that of factors: expected "
                f"curvature='kron', got {self.curvature!r}; set product_dtype='float32'."
            )
        if self.damping_interval and self.step != "quadratic":
            raise ValueError(
                f"damping_interval={self.damping_interval} adapts the damping to the quadratic "
                f"model: expected step='quadratic', got {self.step!r}; set damping_interval=0 or "
                "that step."
            )

    def _check_kinds(self) -> None:
        """Raises ValueError for an array where the program's shape depends on the value."""
        traced = [name for name in sorted(STATIC) if isinstance(getattr(self, name), jax.Array)]
        if traced:
            raise ValueError(
                f"expected {', '.join(traced)} to be known when the step is compiled, got an "
                "array; under optax.inject_hyperparams pass static_args=kfac.STATIC_ARGUMENTS."
            )

    @property
    def measures_loss(self) -> bool:
        """Whether the loss is evaluated again after a step."""
        return self.reject or self.damping_interval > 0

    @property
    def measures_coherence(self) -> bool:
        """Whether what the layers do together is measured beside what each does alone."""
        return self.step == "fixed" and self.kl_scope == "network" and self.kl_clip is not None

    def preconditions(self, block: Block) -> bool:
        """Whether the damped factors of this block are inverted."""
        return (
            self.solver in ("cg", "inverse")
            and self.preconditioner_interval > 0
            and self.form(block).name == "factors"
        )

    def measures_residual(self, block: Block) -> bool:
        """Whether a product with F tells how far this block's system is solved."""
        return self.solver != "inverse" or not self.preconditions(block)

    def form(self, block: Block) -> Form:
        """Which products serve a block."""
        if self.curvature != "kron":
            return Form(self.curvature)
        factored = block.factored and max(block.lifted_shape(block.uses[0])) <= self.max_factor_size
        # Nothing to average: no need to form what the Jacobian gives cheaper.
        if is_zero(self.factor_decay) and self.solver != "inverse":
            factored = factored and prefers_factors(block, self.max_iterations)
        return Form(
            "factors" if factored else "kron",
            self.token_sharing == "reduce",
            self.max_factor_size,
            None if self.product_dtype == "float32" else self.product_dtype,
        )


def is_zero(value: Any) -> bool:
    """Whether a hyper-parameter is off: the number 0.

    Not an array, which may hold another value at the next step.
    """
    return isinstance(value, numbers.Real) and value == 0


_HYPERPARAMETERS = {
    "learning_rate",
    "damping",
    "min_damping",
    "tolerance",
    "factor_decay",
    "momentum",
    "kl_clip",
}
STATIC = frozenset(field.name for field in dataclasses.fields(Options)) - _HYPERPARAMETERS
