"""Settings of the optimizers."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from adder_flax.settings._declare import following, section, setting, settle

_MOST_OF_ITSELF = 0.5
# What suits each kind of step: docs/cg_fac.md has how the first two were found; the last is
# kfac.Options'.
_RATES = {"trust_ratio": 0.1, "rms": 0.2, "fixed": 1.0, "quadratic": 1.0}
_DAMPINGS = {"trust_ratio": 0.1, "rms": 0.03, "fixed": 10.0, "quadratic": 0.01}
_ITERATIONS = {"trust_ratio": 2, "rms": 2, "fixed": 1, "quadratic": 5}
_MOMENTA = {"trust_ratio": 0.9, "rms": 0.95, "fixed": 0.9, "quadratic": 0.9}
_INTERVALS = {"trust_ratio": 5, "rms": 1, "fixed": 5, "quadratic": 1}
_INVERSES = {"trust_ratio": 10, "rms": 5, "fixed": 10, "quadratic": 10}


@dataclasses.dataclass(frozen=True)
class CgFacSettings:
    """Arguments of `kfac.cg_fac`, and layers and curvature_interval.

    They are those of ``--config.optimizer.name=cg_fac``.
    """

    learning_rate: float = following(
        "step",
        _RATES,
        "factor of the steps, which follow the schedule relative to its peak, or itself with rms",
        data=True,
        gt=0,
        le=1e6,
    )
    layers: Literal["matrices", "all"] = setting(
        "matrices", "norms and embeddings are AdamW's then, or no layer is"
    )
    curvature: Literal["kron", "exact", "token"] = setting(
        "kron", "which products stand for the Fisher matrix"
    )
    fisher: Literal["mc", "empirical", "ggn", "enumerate"] = setting(
        "mc", "whose gradients it is made of"
    )
    token_sharing: Literal["expand", "reduce"] = setting(
        "expand", "how the tokens of an image share a layer"
    )
    solver: Literal["cg", "inverse", "dual"] = setting(
        "cg",
        "of the linear systems: CG; the inverses that precondition it, alone, with step "
        "trust_ratio or rms; dual with exact curvature only",
    )
    max_iterations: int = following("step", _ITERATIONS, "of CG in a step", ge=1, le=1000)
    curvature_interval: int = following(
        "step", _INTERVALS, "steps from one new curvature to the next", ge=1, le=2**31 - 1
    )
    curvature_stride: int | None = setting(
        0,
        "one of so many examples gives curvature, in a pass of its own; 1: all, in the gradient's "
        "pass if each step renews it; 0: for 'kron' as kfac.curvature_stride says, one of several "
        "where tokens are many",
        words={0: None},
        ge=1,
        le=65536,
    )
    preconditioner_interval: int = following(
        "step",
        _INVERSES,
        "steps from one inverse to the next, 0 is off",
        unset=-1,
        ge=0,
        le=2**31 - 1,
    )
    product_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "of what makes up factors, of inverses and of what they multiply; sums are float32",
    )
    damping: float = following(
        "step",
        _DAMPINGS,
        "of the systems, as damping_scale says",
        data=True,
        gt=0,
        le=1e12,
    )
    damping_scale: Literal["relative", "balanced", "absolute"] = setting(
        "relative",
        "what damping multiplies: a layer's mean eigenvalue; the geometric mean of that and all "
        "layers'; nothing",
    )
    damping_interval: int = setting(
        0,
        "steps between adaptations of the damping; 0 is off",
        only=("step", ("quadratic",)),
        ge=0,
        le=2**31 - 1,
    )
    factor_decay: float = setting(
        0.95, "of the running means of the curvature, per new curvature", data=True, ge=0, lt=1
    )
    step: Literal["trust_ratio", "rms", "fixed", "quadratic"] = setting(
        "trust_ratio",
        "each layer's step the share learning_rate of its weights; of the size of Muon's; "
        "momentum and kl_clip as they are; by the model, for large batches",
    )
    momentum: float = following(
        "step",
        _MOMENTA,
        "of the steps, with rms of the gradients",
        unset=-1,
        data=True,
        only=("step", ("trust_ratio", "rms", "fixed")),
        ge=0,
        lt=1,
    )
    kl_clip: float | None = setting(
        3e-3,
        "bound on the change of the output; docs/cg_fac.md has what others gave; 0 is off",
        words={0: None},
        data=True,
        only=("step", ("fixed", "quadratic")),
        gt=0,
        le=1e6,
    )
    kl_scope: Literal["layers", "network"] = setting(
        "network",
        "whether kl_clip bounds what layers change each by itself, or all together",
        only=("step", ("fixed",)),
    )
    reject: bool = setting(False, "refuse a step that raises the loss of its own batch")

    def __post_init__(self):
        settle(self)

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        every_step = self.curvature != "kron" or self.step == "quadratic"
        if self.curvature_interval > 1 and every_step:
            yield (
                f"{where}.curvature_interval: expected 1, or more with curvature='kron' and "
                f"a step other than 'quadratic', got {self.curvature_interval} with "
                f"{self.curvature!r} and {self.step!r}"
            )
        if self.solver == "inverse" and (
            every_step or self.step == "fixed" or not self.preconditioner_interval
        ):
            yield (
                f"{where}.solver: expected 'cg', or 'inverse' with curvature='kron', step="
                "'trust_ratio' or 'rms' and a preconditioner_interval above 0, got 'inverse' with "
                f"{self.curvature!r}, {self.step!r} and {self.preconditioner_interval}"
            )
        if self.solver == "dual" and self.curvature != "exact":
            yield (
                f"{where}.solver: expected 'cg', or 'dual' with curvature='exact', got 'dual' with "
                f"{self.curvature!r}"
            )
        if self.step == "trust_ratio" and self.learning_rate > _MOST_OF_ITSELF:
            yield (
                f"{where}.learning_rate: expected the share of its weights that a layer changes by "
                f"in a step, at most {_MOST_OF_ITSELF}, with step='trust_ratio', got "
                f"{self.learning_rate}; set 0.1"
            )


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, its schedule and its decay."""

    name: str = setting(
        "adamw",
        "adamw, nadamw, schedule_free_adamw, lamb, muon, soap, kl_shampoo, sgd, lbfgs, cg_fac or a "
        "registered one",
        expected="the name of an optimizer",
    )
    learning_rate: float = setting(1e-3, "peak of the schedule", data=True, ge=0, le=1e6)
    final_learning_rate: float = setting(
        1e-5,
        "end of the cosine, which comes one step after the last",
        data=True,
        ge=0,
        le=1e6,
    )
    schedule: Literal["cosine", "constant"] = setting(
        "cosine", "from the peak to the end; constant: stays there"
    )
    warmup_epochs: float = setting(
        5.0,
        "linear rise from 0, which the first step has, to the peak, epochs",
        data=True,
        ge=0,
        le=1e6,
    )
    layer_decay: float = setting(
        1.0,
        "the rate of each block of a transformer is the next one's times this, for fine-tuning; 1 "
        "is off",
        gt=0,
        le=1,
    )
    freeze: str = setting(
        "",
        'what is not trained: "patch_embed,pos_embed,blocks.0"; empty: nothing',
        expected="names of parameters or modules with commas between them",
        max_length=1000,
    )
    weight_decay: float = setting(
        0.05, "decoupled, of multiplicative weights", data=True, ge=0, le=1000
    )
    decay_prototypes: bool = setting(False, "whether it takes adder layers' weights, too")
    b1: float = setting(0.9, "decay of Adam's mean of the gradients", data=True, ge=0, lt=1)
    b2: float = setting(
        0.999,
        "decay of their squares' mean; the papers of soap and kl_shampoo take 0.95 and 0.98",
        data=True,
        ge=0,
        lt=1,
    )
    eps: float = setting(1e-8, "added to Adam's denominator", data=True, ge=1e-30, le=1)
    momentum: float = setting(0.9, "of sgd and muon", data=True, ge=0, lt=1)
    basis_interval: int = setting(
        10, "steps between eigenbases of soap or kl_shampoo", ge=1, le=2**31 - 1
    )
    clip_norm: float | None = setting(
        1.0,
        "largest norm of all gradients together; 0 is off",
        words={0: None},
        data=True,
        gt=0,
        le=1e6,
    )
    clip_scope: Literal["all", "each"] = setting(
        "all", "each: of every parameter's gradient by itself, so that large ones shrink no others"
    )
    adder_rate: float | None = setting(
        0.0,
        "AdderNet's η, the rate of adder weights; 0 is off",
        words={0: None},
        data=True,
        gt=0,
        le=1e6,
    )
    cg_fac: CgFacSettings = section(CgFacSettings, read_by="cg_fac")

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        if self.final_learning_rate > self.learning_rate:
            yield (
                f"{where}.final_learning_rate: expected at most {where}.learning_rate, its peak, "
                f"{self.learning_rate}, got {self.final_learning_rate}"
            )
        if self.name == "schedule_free_adamw" and self.schedule != "constant":
            yield (
                f"{where}.schedule: expected 'constant' with schedule_free_adamw, whose average "
                f"takes the place of a decay, got {self.schedule!r}"
            )
        if self.name in ("schedule_free_adamw", "lbfgs") and (self.layer_decay != 1 or self.freeze):
            yield (
                f"{where}.layer_decay, {where}.freeze: expected 1.0 and nothing with {self.name}, "
                f"whose steps depend on each other, got {self.layer_decay} and {self.freeze!r}"
            )
        if self.name == "cg_fac" and self.adder_rate:
            yield (
                f"{where}.adder_rate: expected 0 with cg_fac, which scales every layer itself, got "
                f"{self.adder_rate}"
            )
        if self.name == "cg_fac" and not self.learning_rate:
            yield (
                f"{where}.learning_rate: expected a number above 0 with cg_fac, whose schedule it "
                "sets, got 0.0"
            )
