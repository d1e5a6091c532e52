"""Options of the two optimizers: what shapes the program is static, the rest may be traced."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import optax

from kfac.curvature import _blocks as blocks
from kfac.curvature._blocks import Block
from kfac.solve._systems import Form

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    Scalar = float | Float[Array, ""]

_CHOICES = {"solver": ("cg", "dual"), "product_dtype": ("float32", "bfloat16")}
_LEAST = {"damping": 0, "tolerance": 0, "factor_decay": 0, "momentum": 0, "iterations": 0}
_LEAST |= {"inverse_interval": 1}
_PRESET = {"iterations": 2, "inverse_interval": 10}
_CG = {"iterations": 10, "tolerance": 0.0}
_TRACED = {"learning_rate", "momentum", "damping", "kl_clip", "factor_decay", "tolerance"}


class Options:
    """What the two optimizers differ in, as the code that they share reads it."""

    # Whether F is the layer's own Fisher matrix, of this batch, and CG starts from the last
    # solution; else it is made of averaged Kronecker factors.
    exact: ClassVar[bool]
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]]  # step → what fields of None stand for
    STATIC_ARGUMENTS: ClassVar[tuple[str, ...]]  # that shape the program, for inject_hyperparams

    learning_rate: Any
    step: str
    momentum: Any
    damping: Any
    iterations: Any
    kl_clip: Any
    fisher: str | None
    factor_decay: Any = 0.95
    inverse_interval: Any = None
    product_dtype: str = "float32"
    solver: str = "cg"
    tolerance: Any = 0.0

    @property
    def literal(self) -> bool:
        """Whether γ = λ for all layers and CG starts from the last solution as it is."""
        return self.step == "algorithm_1"

    def __post_init__(self):
        for name, allowed in ({"step": tuple(self.PRESETS)} | _CHOICES).items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"expected {name} to be one of {allowed}, got {getattr(self, name)!r}."
                )
        for name, value in self.PRESETS[self.step].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        static = [n for n in self.STATIC_ARGUMENTS if isinstance(getattr(self, n), jax.Array)]
        if static:
            raise ValueError(
                f"expected {', '.join(static)} to be known when the step is compiled, got an "
                "array; under optax.inject_hyperparams pass "
                f"static_args=kfac.{type(self).__name__}.STATIC_ARGUMENTS."
            )
        schedules = [n for n in sorted(_TRACED - {"learning_rate"}) if callable(getattr(self, n))]
        if schedules:
            raise ValueError(
                f"expected {', '.join(schedules)} to be a number or an array, got a function; give "
                "schedules of it to optax.inject_hyperparams around the optimizer."
            )
        inf = float("inf")
        for name, least in _LEAST.items():
            value, bound = getattr(self, name), 1 if name == "factor_decay" else inf
            if _is_number(value) and not least <= value < bound:
                below = f" and below {bound}" if bound < inf else ""
                raise ValueError(f"expected {name} to be at least {least}{below}, got {value}.")
        if _is_number(self.kl_clip) and not 0 < self.kl_clip < inf:
            raise ValueError(f"expected kl_clip to be above 0, got {self.kl_clip}.")
        if self.iterations == 0 and (self.exact or self.step == "clip"):
            raise ValueError(
                "expected at least one of iterations, or kfac with step 'rms' or 'share', whose "
                f"inverses give a direction without any, got 0 and step={self.step!r}."
            )

    @property
    def narrow(self) -> str | None:
        """The dtype that operands are rounded to, if they are."""
        return None if self.product_dtype == "float32" else self.product_dtype

    @property
    def measures_coherence(self) -> bool:
        """Whether what the layers do together is measured beside what each does alone."""
        return self.step == "clip" and self.kl_clip is not None

    def forms(self, owned: Mapping[str, Block]) -> dict[str, Form]:
        forms: dict[str, Form] = {}
        for name, block in owned.items():
            fits = not self.exact and block.factored
            fits = fits and max(block.lifted_shape) <= blocks.MOST_ROWS
            forms[name] = "exact" if self.exact else "factors" if fits else "kron"
        return forms


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KfacOptions(Options):
    """What ``kfac`` is told.

    ``learning_rate``, ``momentum``, ``damping``, ``factor_decay`` and ``kl_clip`` may be arrays,
    traced ones included. None stands for what suits the step: ``KfacOptions.PRESETS[step]``.

    Attributes:
      learning_rate: what the step measures, or a schedule of it. It is inside, since momentum is
        of steps as they were taken.
      step: ``"rms"``: each layer moves by a root mean square of ``learning_rate``, as with Muon,
        and momentum is Nesterov's, of gradients. ``"share"``: by the share ``learning_rate`` of its
        own size, and new directions count 1 - momentum. ``"clip"``: by ``learning_rate`` times the
        solution, where that moves the predictions of the network by no more than ``kl_clip``.
      momentum: as the step says.
      damping: λ; γ is λ times the mean eigenvalue of the layer.
      iterations: of CG behind the inverses of the factors, which then are its preconditioner; 0:
        the inverses alone, as K-FAC has it, for ``"rms"`` and ``"share"``.
      inverse_interval: steps from one inverse to the next. CG makes up for their age.
      factor_decay: of the running averages of the factors.
      kl_clip: κ; shortens steps with Δᵀ F Δ > κ, twice the change of the predictions in nats,
        before the learning rate scales them. F is that of all layers together, measured where
        curvature is fresh for half a product of exact blocks. None for no bound.
      product_dtype: ``"bfloat16"``: of the operands of products that form factors, of the inverses,
        and of what these multiply, for hardware that is faster so; sums are float32. Rounding is
        some thousandth of the largest inverse eigenvalue, and hides those of directions that are a
        thousand times as sharp as damping.
      fisher: the name that ``value_grad_and_curvature`` must have been given; None accepts any.

    Raises:
      ValueError: unknown names, numbers out of range, choices that exclude each other, a traced
        value that shapes the program.

    >>> KfacOptions(step="share").damping
    0.1
    """

    learning_rate: Scalar | optax.Schedule | None = None
    step: str = "rms"
    momentum: Scalar | None = None
    damping: Scalar | None = None
    iterations: int | None = None
    inverse_interval: int | None = None
    factor_decay: Scalar = 0.95
    kl_clip: Scalar | None = 3e-3
    product_dtype: str = "float32"
    fisher: str | None = None

    exact: ClassVar[bool] = False
    # docs/cg_fac_measured.md has what they are worth.
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rms": dict(_PRESET, learning_rate=2e-3, momentum=0.95, damping=0.03, inverse_interval=5),
        "share": dict(_PRESET, learning_rate=0.1, momentum=0.9, damping=0.1),
        "clip": dict(_PRESET, learning_rate=1.0, momentum=0.9, damping=10.0, iterations=1),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class CgFacOptions(Options):
    """What ``cg_fac`` is told.

    ``learning_rate``, ``momentum``, ``damping``, ``tolerance`` and ``kl_clip`` may be arrays,
    traced ones included. None stands for what suits the step: ``CgFacOptions.PRESETS[step]``.

    Attributes:
      learning_rate, momentum, damping, kl_clip, fisher: as of ``KfacOptions``.
      step: as of ``KfacOptions``, or ``"algorithm_1"``: the paper's to the letter, see
        ``kfac.algorithm_1``. γ is λ, and ``kl_clip`` is not read.
      iterations: of CG at most, one product with F each.
      tolerance: relative residual at which a layer stops; the number 0 for a fixed number of
        iterations, which costs no test.
      solver: ``"cg"``, or ``"dual"``: by Woodbury's identity in the space of the examples, exact,
        for few of these.

    Raises:
      ValueError: as of ``KfacOptions``.

    >>> CgFacOptions().step, CgFacOptions().iterations
    ('clip', 4)
    """

    learning_rate: Scalar | optax.Schedule | None = None
    step: str = "clip"
    momentum: Scalar | None = None
    damping: Scalar | None = None
    iterations: int | None = None
    tolerance: Scalar | None = None
    solver: str = "cg"
    kl_clip: Scalar | None = 7e-3
    fisher: str | None = None

    exact: ClassVar[bool] = True
    # Single runs on digits in batches of 64.
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "clip": dict(_CG, learning_rate=1.0, momentum=0.9, damping=100.0, iterations=4),
        "share": dict(_CG, learning_rate=0.03, momentum=0.9, damping=1.0),
        "rms": dict(_CG, learning_rate=4e-4, momentum=0.95, damping=1.0),
        "algorithm_1": {
            **{"learning_rate": 0.1, "momentum": 0.0, "damping": 0.1, "iterations": 10},
            **{"tolerance": 1e-2, "fisher": "empirical"},
        },
    }


def is_zero(value: Any) -> bool:
    """Whether a hyper-parameter is off: the number 0, no array, which may hold another later."""
    return isinstance(value, numbers.Real) and value == 0


for _options in (KfacOptions, CgFacOptions):
    _options.STATIC_ARGUMENTS = tuple(
        field.name for field in dataclasses.fields(_options) if field.name not in _TRACED
    )
