"""Settings of the optimizers."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from adder_flax.errors import RunError
from adder_flax.settings._declare import fault, following, section, setting, settle

_WITH_CLIP = ("step", ("clip",))
_RATE: dict[str, Any] = dict(data=True, gt=0, le=1e6)
_RATE_OR_OFF: dict[str, Any] = dict(words={0: None}, **_RATE)
_INTERVAL: dict[str, Any] = dict(ge=1, le=2**31 - 1)
_MOST_OF_ITSELF = 0.5
# What suits each kind of step: the library's presets, which are not imported here since JAX is not;
# but for the learning rate of "rms", which is a factor of the run's here.
_KFAC = {
    "learning_rate": {"rms": 0.2, "share": 0.1, "clip": 1.0},
    "damping": {"rms": 0.03, "share": 0.1, "clip": 10.0},
    "iterations": {"rms": 2, "share": 2, "clip": 1},
    "inverse_interval": {"rms": 5, "share": 10, "clip": 10},
    "curvature_interval": {"rms": 1, "share": 5, "clip": 5},
}
_CG_FAC = {
    "learning_rate": {"clip": 1.0, "share": 0.03, "rms": 0.04, "algorithm_1": 0.1},
    "damping": {"clip": 100.0, "share": 1.0, "rms": 1.0, "algorithm_1": 0.1},
    "iterations": {"clip": 4, "share": 10, "rms": 10, "algorithm_1": 10},
}
_CLIP = "bound on the change of the output, with step clip"
_FACTOR = "step size; with rms times the run's rate"
_DAMPING = "of the systems, times each layer's mean eigenvalue"
_Fisher = Literal["mc", "empirical", "ggn", "enumerate"]


@dataclasses.dataclass(frozen=True)
class KfacSettings:
    """Fields of `kfac.KfacOptions`, and how often and of how many examples curvature is new."""

    learning_rate: float = following("step", _KFAC["learning_rate"], _FACTOR, **_RATE)
    step: Literal["rms", "share", "clip"] = setting(
        "rms", "length of a layer's step: Muon's, a share of its weights, or within kl_clip"
    )
    damping: float = following("step", _KFAC["damping"], _DAMPING, data=True, gt=0, le=1e12)
    iterations: int = following(
        "step",
        _KFAC["iterations"],
        "of CG behind the inverses; 0: these alone",
        unset=-1,
        ge=0,
        le=1000,
    )
    curvature_interval: int = following(
        "step", _KFAC["curvature_interval"], "steps from one new curvature to the next", **_INTERVAL
    )
    curvature_stride: int | None = setting(
        0,
        "one of so many examples gives curvature; 1: all; 0: as kfac.curvature_stride says",
        words={0: None},
        ge=1,
        le=65536,
    )
    inverse_interval: int = following(
        "step", _KFAC["inverse_interval"], "steps from one inverse to the next", **_INTERVAL
    )
    kl_clip: float = setting(3e-3, _CLIP, only=_WITH_CLIP, **_RATE)
    product_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "of what makes up factors, of inverses and of what they multiply; sums are float32",
    )
    fisher: _Fisher = setting("mc", "whose gradients curvature is made of")

    def __post_init__(self):
        settle(self)

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        yield from _too_large_a_share(self, where)
        if self.step == "clip" and not self.iterations:
            expected = "at least 1 with step='clip', whose length comes of a solution"
            yield fault(f"{where}.iterations", expected, 0)


@dataclasses.dataclass(frozen=True)
class CgFacSettings:
    """Fields of `kfac.CgFacOptions`, and of how many examples curvature is."""

    learning_rate: float = following("step", _CG_FAC["learning_rate"], "as of kfac", **_RATE)
    step: Literal["clip", "share", "rms", "algorithm_1"] = setting(
        "clip", "as of kfac, or the paper's Algorithm 1 to the letter"
    )
    damping: float = following(
        "step",
        _CG_FAC["damping"],
        "as of kfac; γ itself with algorithm_1",
        data=True,
        gt=0,
        le=1e12,
    )
    iterations: int = following(
        "step", _CG_FAC["iterations"], "of CG, a product each", ge=1, le=1000
    )
    solver: Literal["cg", "dual"] = setting(
        "cg", "dual: Woodbury's identity, for batches of few examples"
    )
    curvature_stride: int = setting(
        1, "one of so many examples gives curvature; 1: all", ge=1, le=65536
    )
    kl_clip: float = setting(1.5e-3, _CLIP, only=_WITH_CLIP, **_RATE)
    fisher: _Fisher = following(
        "step",
        {"clip": "mc", "share": "mc", "rms": "mc", "algorithm_1": "empirical"},
        "whose gradients curvature is made of",
        unset="auto",
    )

    def __post_init__(self):
        settle(self)

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        yield from _too_large_a_share(self, where)


def _too_large_a_share(made: KfacSettings | CgFacSettings, where: str) -> Iterator[str]:
    if made.step == "share" and made.learning_rate > _MOST_OF_ITSELF:
        yield (
            f"{where}.learning_rate: expected the share of its weights that a layer changes by in "
            f"a step, at most {_MOST_OF_ITSELF}, with step='share', got {made.learning_rate}; set "
            "0.1"
        )


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, its schedule and its decay."""

    retired: ClassVar[dict[str, Any]] = {"eps": (1e-8,), "basis_interval": (10,)}

    name: str = setting(
        "adamw",
        "adamw, nadamw, schedule_free_adamw, lamb, muon, soap, kl_shampoo, sgd, lbfgs, kfac, "
        "cg_fac or a registered one",
        expected="the name of an optimizer",
    )
    learning_rate: float = setting(1e-3, "peak of the schedule", data=True, ge=0, le=1e6)
    final_learning_rate: float = setting(
        1e-5, "end of the cosine, which comes one step after the last", data=True, ge=0, le=1e6
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
        1.0, "rate of a block over the next one's, for fine-tuning; 1 is off", gt=0, le=1
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
    momentum: float = setting(0.9, "of sgd and muon", data=True, ge=0, lt=1)
    clip_norm: float | None = setting(
        1.0, "largest norm of all gradients together; 0 is off", **_RATE_OR_OFF
    )
    clip_scope: Literal["all", "each"] = setting(
        "all", "each: of every parameter's gradient by itself, so that large ones shrink no others"
    )
    adder_rate: float | None = setting(
        0.0, "AdderNet's η, the rate of adder weights; 0 is off", **_RATE_OR_OFF
    )
    kfac: KfacSettings = section(KfacSettings, read_by="kfac")
    cg_fac: CgFacSettings = section(CgFacSettings, read_by="cg_fac")

    @property
    def second_order(self) -> KfacSettings | CgFacSettings | None:
        """The section of the optimizer that takes curvature, if it is one of these."""
        return {"kfac": self.kfac, "cg_fac": self.cg_fac}.get(self.name)

    @staticmethod
    def translated(fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an optimizer of version 0.1.0 without its section cg_fac, which was another."""
        old = fields.get("cg_fac", {})
        if not isinstance(old, Mapping) or "max_iterations" not in old:
            return dict(fields)
        if fields.get("name") == "cg_fac":
            raise RunError(
                "expected an optimizer of this version, got cg_fac of version 0.1.0; "
                "CHANGELOG.md says what there is in its place"
            )
        return {name: value for name, value in fields.items() if name != "cg_fac"}

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        name, peak = self.name, self.learning_rate
        if self.schedule == "cosine" and self.final_learning_rate > peak:
            expected = f"at most {where}.learning_rate, its peak, {peak}"
            yield fault(f"{where}.final_learning_rate", expected, self.final_learning_rate)
        if name == "schedule_free_adamw" and self.schedule != "constant":
            expected = f"'constant' with {name}, whose average takes the place of a decay"
            yield fault(f"{where}.schedule", expected, repr(self.schedule))
        if name in ("schedule_free_adamw", "lbfgs") and (self.layer_decay != 1 or self.freeze):
            expected = f"1.0 and nothing with {name}, whose steps depend on each other"
            got = f"{self.layer_decay} and {self.freeze!r}"
            yield fault(f"{where}.layer_decay, {where}.freeze", expected, got)
        if self.second_order and self.adder_rate:
            expected = f"0 with {name}, which scales every layer itself"
            yield fault(f"{where}.adder_rate", expected, self.adder_rate)
        if self.second_order and not peak:
            expected = f"a number above 0 with {name}, whose schedule it sets"
            yield fault(f"{where}.learning_rate", expected, 0.0)
