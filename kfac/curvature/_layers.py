"""The kinds of layer: how the output of one layer moves with its own parameters.

A layer is y = f(W, x). Everything the optimizer needs is its local Jacobian J = ∂f/∂W: ``jvp``: v →
J v and its transpose ``vjp``: z → Jᵀ z. ``Dense`` has them in closed form and is linear in W;
``Generic`` derives them from f.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kfac._sharing import axes_of, own_along

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    Params = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Dense:
    """y = x W + b, W of shape (*in_shape, *out_shape).

    The last axis of x has the size of all of ``in_shape``.

    The layer is a matrix product of *features* φ(x) = [x, 1] with a *lifted* parameter [W; b], so
    its curvature is one of Kronecker structure. W and b are one block.

    Attributes:
      num_in_axes: how many leading axes of the kernel are contracted with x.
      transpose: y = x Wᵀ (an embedding table used as output layer).

    >>> import jax.numpy as jnp
    >>> Dense()({"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}, jnp.ones((1, 3))).tolist()
    [[4.0, 4.0]]
    """

    num_in_axes: int = 1
    transpose: bool = False

    factored = True
    elementwise = False
    kind = "dense"

    def __call__(
        self, params: Params, x: Float[Array, "*batch features"]
    ) -> Float[Array, "*batch outputs"]:
        return self.features(params, x) @ self.lift(params, params)

    def features(
        self, params: Params, x: Float[Array, "*batch features"]
    ) -> Float[Array, "*batch lifted"]:
        """[x, 1, 0, …], as ``_filled`` says, or x where there is no bias."""
        rows = self._lifted_rows(params)
        if rows == x.shape[-1]:
            return x
        one = (jnp.arange(rows - x.shape[-1]) == 0).astype(x.dtype)
        return jnp.concatenate([x, jnp.broadcast_to(one, (*x.shape[:-1], one.size))], axis=-1)

    def lift(self, params: Params, v: Params) -> Float[Array, "lifted outputs"]:
        """The matrix M with J v = φ(x) M; here [V; v_b; 0; …]."""
        return self.matrix(v)

    def project(self, params: Params, matrix: Float[Array, "lifted outputs"]) -> Params:
        """The transpose of ``lift``."""
        return self.unmatrix(params, matrix)

    def matrix(self, v: Params) -> Float[Array, "rows outputs"]:
        """[V; v_b; 0; …] itself, whatever the lift."""
        matrix = self._matrix(v["kernel"])
        if "bias" not in v:
            return matrix
        matrix = jnp.concatenate([matrix, v["bias"].reshape(1, -1)])
        return jnp.pad(matrix, ((0, _filled(len(matrix)) - len(matrix)), (0, 0)))

    def unmatrix(self, params: Params, matrix: Float[Array, "rows outputs"]) -> Params:
        """The inverse, and the transpose, of ``matrix``."""
        kernel = params["kernel"]
        rows = self._matrix(kernel).shape[0]
        part = matrix[:rows].T if self.transpose else matrix[:rows]
        parts = {"kernel": part.reshape(kernel.shape)}
        return parts | (
            {"bias": matrix[rows].reshape(params["bias"].shape)} if "bias" in params else {}
        )

    def mean_left(
        self, params: Params, left: Float[Array, "lifted lifted"]
    ) -> Float[Array, "rows rows"]:
        """The left factor seen by ``matrix``, averaged over outputs.

        Σ_o L_oᵀ 𝒜 L_o / outputs, L_o the lift of o.
        """
        return left

    def left_traces(
        self, params: Params, left: Float[Array, "lifted lifted"]
    ) -> Float[Array, " outputs"]:
        """tr L_oᵀ 𝒜 L_o of every output o.

        Weighted by the diagonal of 𝒢 they sum to the trace of the block.
        """
        return jnp.full(self._matrix(params["kernel"]).shape[1], _trace(left))

    def linearize(self, params: Params, x: Array) -> Any:
        """What ``jvp`` and ``vjp`` need; a tree of arrays."""
        return self.features(params, x), params

    def jvp(self, linearized: Any, v: Params, output: jax.ShapeDtypeStruct) -> Array:
        """J v, with the shape of the layer's output."""
        features, params = linearized
        return jnp.matmul(features, self.lift(params, v))

    def vjp(self, linearized: Any, z: Array) -> Params:
        """Jᵀ z."""
        features, params = linearized
        features = features.reshape(-1, features.shape[-1])
        return self.project(params, features.T @ z.reshape(-1, z.shape[-1]))

    def framed(self, num_frames: int) -> Dense:
        """The layer on inputs with further leading axes."""
        return self

    @property
    def isometric(self) -> bool:
        """Whether ``lift`` keeps lengths.

        Then eigenvectors of the factors are those of the block.
        """
        return True

    def lifted_shape(self, shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
        """Shape of the lifted matrix for parameters of these shapes."""
        params = {role: jax.ShapeDtypeStruct(shape, jnp.float32) for role, shape in shapes.items()}
        return jax.eval_shape(self.lift, params, params).shape

    def _matrix(self, kernel: Array) -> Array:
        matrix = kernel.reshape(math.prod(kernel.shape[: self.num_in_axes]), -1)
        return matrix.T if self.transpose else matrix

    def _lifted_rows(self, params: Params) -> int:
        rows = self._matrix(params["kernel"]).shape[0]
        return _filled(rows + 1) if "bias" in params else rows


@dataclasses.dataclass(frozen=True)
class L1Dense(Dense):
    """y = −Σ_k |x_k − W_k| + b under the full-precision weight gradient.

    ∂y_o/∂W_o = x − W_o (AdderNet, CVPR 2020).

    Its Jacobian is that of a dense layer with bias behind a linear map: ``J v = [x, 1] [V; v_b −
    Σ_k W_k∘V_k]``. So adder layers have the same Kronecker factors as dense ones. Another rule for
    W needs a ``Generic`` layer.

    Attributes:
      distances: (x, W) → −Σ_k |x_k − W_k| under that rule; only needed where ``kfac.tap`` calls the
        layer.
    """

    distances: Callable[[Array, Array], Array] | None = None

    kind = "adder"

    def __call__(
        self, params: Params, x: Float[Array, "*batch features"]
    ) -> Float[Array, "*batch outputs"]:
        if self.distances is None:
            raise ValueError(
                "expected distances=(x, W) → −Σ_k |x_k − W_k| of a layer that is called, got none; "
                "give kfac.L1Dense those of the layer's own rule"
            )
        y = self.distances(x, params["kernel"])
        return y + params["bias"] if "bias" in params else y

    def lift(self, params: Params, v: Params) -> Float[Array, "lifted outputs"]:
        offset = v.get("bias", 0) - (params["kernel"] * v["kernel"]).sum(0)
        return self.matrix({"kernel": v["kernel"], "bias": offset})

    def project(self, params: Params, matrix: Float[Array, "lifted outputs"]) -> Params:
        rows = len(params["kernel"])
        projected = {"kernel": matrix[:rows] - params["kernel"] * matrix[rows]}
        return projected | ({"bias": matrix[rows]} if "bias" in params else {})

    def mean_left(
        self, params: Params, left: Float[Array, "lifted lifted"]
    ) -> Float[Array, "rows rows"]:
        kernel, rows = params["kernel"], len(params["kernel"])
        inputs, column, corner = left[:rows, :rows], left[:rows, rows], left[rows, rows]
        cross = jnp.outer(column, kernel.mean(1))
        mean = inputs - cross - cross.T + corner * (kernel @ kernel.T) / kernel.shape[1]
        if "bias" not in params:
            return mean
        column = (column - corner * kernel.mean(1))[:, None]
        mean = jnp.block([[mean, column], [column.T, corner[None, None]]])
        return jnp.pad(mean, (0, len(left) - len(mean)))

    def left_traces(
        self, params: Params, left: Float[Array, "lifted lifted"]
    ) -> Float[Array, " outputs"]:
        kernel, rows = params["kernel"], len(params["kernel"])
        offsets = (
            left[rows, rows] * ((kernel**2).sum(0) + ("bias" in params))
            - 2 * left[:rows, rows] @ kernel
        )
        return _trace(left[:rows, :rows]) + offsets

    @property
    def isometric(self) -> bool:
        return False

    def _lifted_rows(self, params: Params) -> int:
        return _filled(len(params["kernel"]) + 1)


@dataclasses.dataclass(frozen=True)
class Scale(Dense):
    """y = x̂∘s + b with x̂ a function of the input alone.

    The learned part of LayerNorm, RMSNorm and GroupNorm.

    Its Jacobian is that of a dense layer with bias whose matrix is diagonal, ``J v = [x̂, 1] [diag
    v_s; v_b]``. So it has the same Kronecker factors, averaged over batches and cheap to multiply
    by, where ``Generic`` passes every token through the layer again.

    Attributes:
      fn: (params, x) → y, with parameters ``scale``, ``bias`` or both, along the last axis;
        hashable.

    >>> import jax.numpy as jnp
    >>> norm = Scale(fn=lambda p, x: x / jnp.abs(x).max(-1, keepdims=True) * p["scale"])
    >>> state = norm.linearize({"scale": jnp.ones(2)}, jnp.array([[2.0, 4.0]]))
    >>> norm.vjp(state, jnp.array([[1.0, 1.0]]))["scale"].tolist()
    [0.5, 1.0]
    """

    fn: Callable[[Params, Array], Array] = dataclasses.field(kw_only=True)

    kind = "norm"
    elementwise = True

    def __call__(self, params: Params, x: Array) -> Array:
        return self.fn(params, x)

    def features(self, params: Params, x: Array) -> Float[Array, "*batch lifted"]:
        """[x̂, 1], without the part whose parameter is missing."""
        parts = []
        if "scale" in params:
            neutral = {"scale": jnp.ones_like, "bias": jnp.zeros_like}
            parts.append(self.fn({role: neutral[role](p) for role, p in params.items()}, x))
        if "bias" in params:
            parts.append(jnp.ones((*x.shape[:-1], 1), parts[0].dtype if parts else x.dtype))
        return jnp.concatenate(parts, axis=-1)

    def lift(self, params: Params, v: Params) -> Float[Array, "lifted outputs"]:
        rows = [jnp.diag(v["scale"])] if "scale" in v else []
        return jnp.concatenate([*rows, *([v["bias"][None]] if "bias" in v else [])])

    def project(self, params: Params, matrix: Float[Array, "lifted outputs"]) -> Params:
        projected = {"scale": jnp.diagonal(matrix)} if "scale" in params else {}
        return projected | ({"bias": matrix[-1]} if "bias" in params else {})

    def matrix(self, v: Params) -> Float[Array, "rows outputs"]:
        return jnp.stack([v[role] for role in ("scale", "bias") if role in v])

    def unmatrix(self, params: Params, matrix: Float[Array, "rows outputs"]) -> Params:
        return dict(
            zip([role for role in ("scale", "bias") if role in params], matrix, strict=True)
        )

    def mean_left(
        self, params: Params, left: Float[Array, "lifted lifted"]
    ) -> Float[Array, "rows rows"]:
        if "scale" not in params:
            return left
        outputs = params["scale"].shape[0]
        scale = _trace(left[:outputs, :outputs]) / outputs
        if "bias" not in params:
            return scale[None, None]
        cross = left[:-1, -1].mean()
        return jnp.array([[scale, cross], [cross, left[-1, -1]]])

    def left_traces(
        self, params: Params, left: Float[Array, "lifted lifted"]
    ) -> Float[Array, " outputs"]:
        offset = left[-1, -1] if "bias" in params else 0
        if "scale" not in params:
            return jnp.broadcast_to(offset, params["bias"].shape)
        outputs = params["scale"].shape[0]
        return jnp.diagonal(left)[:outputs] + offset

    def jvp(self, linearized: Any, v: Params, output: jax.ShapeDtypeStruct) -> Array:
        features, params = linearized
        scaled = features[..., : v["scale"].shape[0]] * v["scale"] if "scale" in v else 0
        return jnp.broadcast_to(scaled + v.get("bias", 0), output.shape)

    def vjp(self, linearized: Any, z: Array) -> Params:
        features, params = linearized
        rows = z.reshape(-1, z.shape[-1])
        pulled = {}
        if "scale" in params:
            inputs = features[..., : z.shape[-1]].reshape(rows.shape)
            pulled["scale"] = (inputs * rows).sum(0)
        return pulled | ({"bias": rows.sum(0)} if "bias" in params else {})

    def framed(self, num_frames: int) -> Scale:
        return Scale(fn=_Framed(self.fn, (None, 0), num_frames)) if num_frames else self

    @property
    def isometric(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Readout(Dense):
    """y = φ(x)ᵀ W with features φ(x) that are too many to keep.

    vᵀ tanh(q + k) of every pair of a query and a key.

    Products are exact, by ``fn`` and its pull-back. The Kronecker factor of the features, which
    needs only their second moment, is that of a sample of them.

    Attributes:
      fn: (params, x) → y with one output on a last axis of its own, linear in the one parameter
        ``kernel``; hashable.
      sample: x → features, shaped like y but for fewer of its positions and the features on the
        last axis; hashable.

    >>> import jax.numpy as jnp
    >>> pairs = lambda x: jnp.tanh(x[0][:, :, None] + x[1][:, None])
    >>> layer = Readout(
    ...     fn=lambda p, x: pairs(x) @ p["kernel"][:, None],
    ...     sample=lambda x: pairs((x[0][:, :1], x[1])),
    ... )
    >>> x = (
    ...     jnp.ones((5, 4, 2)),
    ...     jnp.ones((5, 3, 2)),
    ... )  # 4 · 3 pairs an example, and 1 · 3 in the sample
    >>> params = {"kernel": jnp.ones(2)}
    >>> layer(params, x).shape, layer.features(params, x).shape
    ((5, 4, 3, 1), (5, 1, 3, 2))
    """

    fn: Callable[[Params, Any], Array] = dataclasses.field(kw_only=True)
    sample: Callable[[Any], Array] = dataclasses.field(kw_only=True)

    kind = "readout"

    def __call__(self, params: Params, x: Any) -> Float[Array, "*batch outputs"]:
        return self.fn(params, x)

    def features(self, params: Params, x: Any) -> Float[Array, "*sample features"]:
        """The sample, scaled to stand for all features.

        So large that its sum of squares is what that of all is expected to be.
        """
        sample = self.sample(x)
        # A second moment of few features estimates that of all, once scaled by how many
        # the others are.
        positions = jax.eval_shape(self.fn, params, x).size
        return sample * (positions * sample.shape[-1] / sample.size) ** 0.5

    def linearize(self, params: Params, x: Any) -> Any:
        return x, params

    def jvp(self, linearized: Any, v: Params, output: jax.ShapeDtypeStruct) -> Array:
        x, _ = linearized
        return self.fn(v, x)

    def vjp(self, linearized: Any, z: Array) -> Params:
        x, params = linearized
        y, pullback = jax.vjp(lambda p: self.fn(p, x), params)
        return pullback(z.astype(y.dtype))[0]

    def framed(self, num_frames: int) -> Readout:
        if num_frames == 0:
            return self
        sample = _Framed(self.sample, (0,), num_frames)
        return dataclasses.replace(self, fn=_Framed(self.fn, (None, 0), num_frames), sample=sample)

    def _lifted_rows(self, params: Params) -> int:
        return params["kernel"].shape[0]


@dataclasses.dataclass(frozen=True)
class Generic:
    """Any layer y = f(params, x): the local Jacobian by automatic differentiation.

    Under the layer's own rules.

    ``vjp`` is JAX's own pull-back, custom gradient rules included. ``jvp`` is its transpose, since
    the pull-back is linear in the cotangent (forward mode does not pass through
    ``jax.custom_vjp``). A backward pass that cannot be transposed, such as a call to a foreign
    kernel, needs ``pushforward``.

    Attributes:
      fn: f, a function of ``(params, x, **options)``; hashable, and the same object for layers
        solved together.
      options: static keyword arguments, as a tuple of pairs.
      pushforward: optional ``(params, x, v, **options) → J v``; the transpose of f's pull-back.

    >>> import jax.numpy as jnp
    >>> scale = Generic(lambda params, x: x * params["scale"])
    >>> state = scale.linearize({"scale": jnp.ones(2)}, jnp.array([[1.0, 2.0]]))
    >>> scale.jvp(
    ...     state, {"scale": jnp.array([3.0, 4.0])}, jax.ShapeDtypeStruct((1, 2), jnp.float32)
    ... ).tolist()
    [[3.0, 8.0]]
    >>> scale.vjp(state, jnp.array([[1.0, 1.0]]))["scale"].tolist()
    [1.0, 2.0]
    """

    fn: Callable[..., Array]
    options: tuple[tuple[str, Hashable], ...] = ()
    pushforward: Callable[..., Array] | None = None

    factored = False

    @property
    def kind(self) -> str:
        """For the coverage table."""
        return f"generic {getattr(self.fn, '__name__', '')}".strip()

    def __call__(self, params: Params, x: Any) -> Array:
        return self.fn(params, x, **dict(self.options))

    def framed(self, num_frames: int) -> Generic:
        """The layer on inputs with further leading axes, over which it is mapped."""
        if num_frames == 0:
            return self
        pushforward = self.pushforward and _Framed(self.pushforward, (None, 0, None), num_frames)
        return Generic(_Framed(self.fn, (None, 0), num_frames), self.options, pushforward)

    def linearize(self, params: Params, x: Any) -> Any:
        """What ``jvp`` and ``vjp`` need; a tree of arrays."""
        return jax.vjp(lambda p: self(p, x), params)[1], (
            None if self.pushforward is None else (params, x)
        )

    def jvp(self, linearized: Any, v: Params, output: jax.ShapeDtypeStruct) -> Array:
        """J v, with the shape of the layer's output."""
        pullback, inputs = linearized
        if self.pushforward is not None:
            return self.pushforward(*inputs, v, **dict(self.options))
        # An array, not its shape: it says along which manual axes it is each device's own.
        z = own_along(axes_of(next(iter(v.values()))), jnp.zeros(output.shape, output.dtype))
        return jax.linear_transpose(lambda z: pullback(z)[0], z)(v)[0]

    def vjp(self, linearized: Any, z: Array) -> Params:
        """Jᵀ z."""
        return linearized[0](z)[0]


@dataclasses.dataclass(frozen=True)
class _Framed:
    """A function mapped over leading axes of the arguments marked 0 in ``in_axes``."""

    fn: Callable[..., Array]
    in_axes: tuple[int | None, ...]
    num_frames: int

    def __call__(self, *args: Any, **options: Any) -> Array:
        mapped = functools.partial(self.fn, **options)
        for _ in range(self.num_frames):
            mapped = jax.vmap(mapped, self.in_axes)
        return mapped(*args)

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", "")


def _filled(rows: int) -> int:
    """So many rows of [W; b], with those of zeros that make them a multiple of 16 or 8.

    Where these are few: the devices of a mesh can divide them then, where an odd number of rows
    would be kept by each as a whole, and matrix units meet whole tiles.

    >>> _filled(97), _filled(193), _filled(769)
    (97, 200, 784)
    """
    multiples = (-(-rows // unit) * unit for unit in (16, 8))
    return next((whole for whole in multiples if 20 * (whole - rows) <= rows), rows)


def _trace(matrix: Float[Array, "n n"]) -> Float[Array, ""]:
    """tr M of its n entries: ``jnp.trace`` masks the whole matrix and sums it."""
    return jnp.diagonal(matrix).sum()
