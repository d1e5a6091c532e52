"""The kinds of layer: how the output y = f(W, x) of one layer moves with its own parameters W.

What the optimizer needs is its local Jacobian J = ∂f/∂W: ``jvp``: v → J v and its transpose
``vjp``: z → Jᵀ z. ``Dense`` has them in closed form; ``Generic`` derives them from f.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kfac._arrays import axes_of, own_along

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    Params = dict[str, Array]
    Features = Float[Array, "*batch features"]
    Lifted = Float[Array, "lifted outputs"]
    Rows = Float[Array, "rows outputs"]
    Square = Float[Array, "n n"]


@dataclasses.dataclass(frozen=True)
class Dense:
    """y = x W + b, W of shape (*in_shape, *out_shape), the last axis of x all of ``in_shape``.

    A matrix product of *features* φ(x) = [x, 1] with a *lifted* parameter [W; b], so its curvature
    has Kronecker structure. W and b are one block.

    Attributes:
      num_in_axes: how many leading axes of the kernel are contracted with x.
      transpose: y = x Wᵀ (an embedding table used as output layer).

    >>> Dense()({"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}, jnp.ones((1, 3))).tolist()
    [[4.0, 4.0]]
    """

    num_in_axes: int = 1
    transpose: bool = False

    factored = True
    isometric = True  # whether `lift` keeps lengths: the factors' eigenvectors are the block's then
    kind = "dense"

    def __call__(self, params: Params, x: Features) -> Float[Array, "*batch outputs"]:
        return self.features(params, x) @ self.lift(params, params)

    def features(self, params: Params, x: Features) -> Float[Array, "*batch lifted"]:
        """[x, 1, 0, …], as ``_filled`` says, or x where there is no bias."""
        rows = self._lifted_rows(params)
        if rows == x.shape[-1]:
            return x
        one = (jnp.arange(rows - x.shape[-1]) == 0).astype(x.dtype)
        return jnp.concatenate([x, jnp.broadcast_to(one, (*x.shape[:-1], one.size))], axis=-1)

    def lift(self, params: Params, v: Params) -> Lifted:
        """The matrix M with J v = φ(x) M; here [V; v_b; 0; …]."""
        return self.matrix(v)

    def project(self, params: Params, matrix: Lifted) -> Params:
        """The transpose of ``lift``."""
        return self.unmatrix(params, matrix)

    def matrix(self, v: Params) -> Rows:
        """[V; v_b; 0; …] itself, whatever the lift."""
        matrix = self._matrix(v["kernel"])
        if "bias" not in v:
            return matrix
        matrix = jnp.concatenate([matrix, v["bias"].reshape(1, -1)])
        return jnp.pad(matrix, ((0, _filled(len(matrix)) - len(matrix)), (0, 0)))

    def unmatrix(self, params: Params, matrix: Rows) -> Params:
        """The inverse, and the transpose, of ``matrix``."""
        kernel = params["kernel"]
        rows = self._matrix(kernel).shape[0]
        part = matrix[:rows].T if self.transpose else matrix[:rows]
        parts = {"kernel": part.reshape(kernel.shape)}
        if "bias" in params:
            parts["bias"] = matrix[rows].reshape(params["bias"].shape)
        return parts

    def mean_left(self, params: Params, left: Square) -> Square:
        """Σ_o L_oᵀ 𝒜 L_o / outputs, L_o the lift of o: the left factor as ``matrix`` sees it."""
        return left

    def left_traces(self, params: Params, left: Square) -> Float[Array, " outputs"]:
        """tr L_oᵀ 𝒜 L_o of every output o; by the diagonal of 𝒢 they sum to the block's trace."""
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

    def _matrix(self, kernel: Array) -> Array:
        matrix = kernel.reshape(math.prod(kernel.shape[: self.num_in_axes]), -1)
        return matrix.T if self.transpose else matrix

    def _lifted_rows(self, params: Params) -> int:
        rows = self._matrix(params["kernel"]).shape[0]
        return _filled(rows + 1) if "bias" in params else rows


@dataclasses.dataclass(frozen=True)
class L1Dense(Dense):
    """y = −Σ_k |x_k − W_k| + b with ∂y_o/∂W_o = x − W_o (AdderNet, CVPR 2020).

    Its Jacobian is that of a dense layer with bias behind a linear map, ``J v = [x, 1] [V; v_b −
    Σ_k W_k∘V_k]``, so it has the same Kronecker factors. Another rule for W needs ``Generic``.

    Attributes:
      distances: (x, W) → −Σ_k |x_k − W_k| under that rule, where ``kfac.tap`` calls the layer.
    """

    distances: Callable[[Array, Array], Array] | None = None

    isometric = False
    kind = "adder"

    def __call__(self, params: Params, x: Features) -> Float[Array, "*batch outputs"]:
        if self.distances is None:
            raise ValueError(
                "expected distances=(x, W) → −Σ_k |x_k − W_k| of a layer that is called, got none; "
                "give kfac.L1Dense those of the layer's own rule"
            )
        y = self.distances(x, params["kernel"])
        return y + params["bias"] if "bias" in params else y

    def lift(self, params: Params, v: Params) -> Lifted:
        offset = v.get("bias", 0) - (params["kernel"] * v["kernel"]).sum(0)
        return self.matrix({"kernel": v["kernel"], "bias": offset})

    def project(self, params: Params, matrix: Lifted) -> Params:
        rows = len(params["kernel"])
        projected = {"kernel": matrix[:rows] - params["kernel"] * matrix[rows]}
        return projected | ({"bias": matrix[rows]} if "bias" in params else {})

    def mean_left(self, params: Params, left: Square) -> Square:
        kernel, rows = params["kernel"], len(params["kernel"])
        inputs, column, corner = left[:rows, :rows], left[:rows, rows], left[rows, rows]
        cross = jnp.outer(column, kernel.mean(1))
        mean = inputs - cross - cross.T + corner * (kernel @ kernel.T) / kernel.shape[1]
        if "bias" not in params:
            return mean
        column = (column - corner * kernel.mean(1))[:, None]
        mean = jnp.block([[mean, column], [column.T, corner[None, None]]])
        return jnp.pad(mean, (0, len(left) - len(mean)))

    def left_traces(self, params: Params, left: Square) -> Float[Array, " outputs"]:
        kernel, rows = params["kernel"], len(params["kernel"])
        offsets = (
            left[rows, rows] * ((kernel**2).sum(0) + ("bias" in params))
            - 2 * left[:rows, rows] @ kernel
        )
        return _trace(left[:rows, :rows]) + offsets

    def _lifted_rows(self, params: Params) -> int:
        return _filled(len(params["kernel"]) + 1)


@dataclasses.dataclass(frozen=True)
class Scale(Dense):
    """y = x̂∘s + b with x̂ a function of the input alone, as LayerNorm, RMSNorm, GroupNorm have it.

    Its Jacobian is that of a dense layer with bias whose matrix is diagonal, ``J v = [x̂, 1] [diag
    v_s; v_b]``, so it has the same Kronecker factors.

    Attributes:
      fn: (params, x) → y, with parameters ``scale``, ``bias`` or both, along the last axis;
        hashable.

    >>> norm = Scale(fn=lambda p, x: x / jnp.abs(x).max(-1, keepdims=True) * p["scale"])
    >>> state = norm.linearize({"scale": jnp.ones(2)}, jnp.array([[2.0, 4.0]]))
    >>> norm.vjp(state, jnp.array([[1.0, 1.0]]))["scale"].tolist()
    [0.5, 1.0]
    """

    fn: Callable[[Params, Array], Array] = dataclasses.field(kw_only=True)

    isometric = False
    kind = "norm"

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

    def lift(self, params: Params, v: Params) -> Lifted:
        rows = [jnp.diag(v["scale"])] if "scale" in v else []
        return jnp.concatenate([*rows, *([v["bias"][None]] if "bias" in v else [])])

    def project(self, params: Params, matrix: Lifted) -> Params:
        projected = {"scale": jnp.diagonal(matrix)} if "scale" in params else {}
        return projected | ({"bias": matrix[-1]} if "bias" in params else {})

    def matrix(self, v: Params) -> Rows:
        return jnp.stack([v[role] for role in ("scale", "bias") if role in v])

    def unmatrix(self, params: Params, matrix: Rows) -> Params:
        return dict(zip([r for r in ("scale", "bias") if r in params], matrix, strict=True))

    def _lefts(self, params: Params, left: Square) -> Float[Array, "outputs rows rows"]:
        """L_oᵀ 𝒜 L_o of every output o, which reads the rows of its own scale and of the bias."""
        (outputs,) = next(iter(params.values())).shape
        places = {"scale": jnp.arange(outputs), "bias": jnp.full(outputs, len(left) - 1)}
        rows = jnp.stack([places[role] for role in ("scale", "bias") if role in params], axis=1)
        return left[rows[:, :, None], rows[:, None, :]]

    def mean_left(self, params: Params, left: Square) -> Square:
        return self._lefts(params, left).mean(0)

    def left_traces(self, params: Params, left: Square) -> Float[Array, " outputs"]:
        return jax.vmap(_trace)(self._lefts(params, left))

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


@dataclasses.dataclass(frozen=True)
class Readout(Dense):
    """y = φ(x)ᵀ W with features φ(x) too many to keep: vᵀ tanh(q + k) of all queries and keys.

    Products are exact, by ``fn`` and its pull-back. The Kronecker factor of the features, which
    needs only their second moment, is that of a sample of them.

    Attributes:
      fn: (params, x) → y with one output on a last axis of its own, linear in the one parameter
        ``kernel``; hashable.
      sample: x → features, shaped like y but for fewer of its positions and the features on the
        last axis; hashable.

    >>> pairs = lambda x: jnp.tanh(x[0][:, :, None] + x[1][:, None])
    >>> some = lambda x: pairs((x[0][:, :1], x[1]))
    >>> layer = Readout(fn=lambda p, x: pairs(x) @ p["kernel"][:, None], sample=some)
    >>> x, params = (jnp.ones((5, 4, 2)), jnp.ones((5, 3, 2))), {"kernel": jnp.ones(2)}
    >>> layer(params, x).shape, layer.features(params, x).shape
    ((5, 4, 3, 1), (5, 1, 3, 2))
    """

    fn: Callable[[Params, Any], Array] = dataclasses.field(kw_only=True)
    sample: Callable[[Any], Array] = dataclasses.field(kw_only=True)

    kind = "readout"

    def __call__(self, params: Params, x: Any) -> Float[Array, "*batch outputs"]:
        return self.fn(params, x)

    def features(self, params: Params, x: Any) -> Float[Array, "*sample features"]:
        """The sample, scaled so that its sum of squares is what that of all is expected to be."""
        sample = self.sample(x)
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

    def _lifted_rows(self, params: Params) -> int:
        return params["kernel"].shape[0]


@dataclasses.dataclass(frozen=True)
class Generic:
    """Any layer y = f(params, x): the local Jacobian by automatic differentiation.

    ``vjp`` is JAX's own pull-back, custom gradient rules included, and ``jvp`` the transpose of
    that. A backward pass that cannot be transposed, such as a call to a foreign kernel, needs
    ``pushforward``.

    Attributes:
      fn: ``(params, x, **options) → y``; hashable, and one object for layers solved together.
      options: static keyword arguments, as a tuple of pairs.
      pushforward: optional ``(params, x, v, **options) → J v``.

    >>> scale = Generic(lambda params, x: x * params["scale"])
    >>> state = scale.linearize({"scale": jnp.ones(2)}, jnp.array([[1.0, 2.0]]))
    >>> scale.vjp(state, jnp.array([[1.0, 1.0]]))["scale"].tolist()
    [1.0, 2.0]
    """

    fn: Callable[..., Array]
    options: tuple[tuple[str, Hashable], ...] = ()
    pushforward: Callable[..., Array] | None = None

    factored = False

    @property
    def kind(self) -> str:
        return f"generic {getattr(self.fn, '__name__', '')}".strip()

    def __call__(self, params: Params, x: Any) -> Array:
        return self.fn(params, x, **dict(self.options))

    def linearize(self, params: Params, x: Any) -> Any:
        inputs = None if self.pushforward is None else (params, x)
        return jax.vjp(lambda p: self(p, x), params)[1], inputs

    def jvp(self, linearized: Any, v: Params, output: jax.ShapeDtypeStruct) -> Array:
        pullback, inputs = linearized
        if self.pushforward is not None:
            return self.pushforward(*inputs, v, **dict(self.options))
        # An array, not its shape: it says along which manual axes it is each device's own.
        z = own_along(axes_of(next(iter(v.values()))), jnp.zeros(output.shape, output.dtype))
        return jax.linear_transpose(lambda z: pullback(z)[0], z)(v)[0]

    def vjp(self, linearized: Any, z: Array) -> Params:
        return linearized[0](z)[0]


# Functions that layers are made of, and which of their arguments frames are leading axes of.
_ALONG_FRAMES = {"fn": (None, 0), "sample": (0,), "pushforward": (None, 0, None)}


def framed(layer: Any, num_frames: int) -> Any:
    """The layer on inputs with further leading axes."""
    if num_frames == 0:
        return layer
    functions = {name: getattr(layer, name, None) for name in _ALONG_FRAMES}
    mapped = {
        name: _Framed(fn, _ALONG_FRAMES[name], num_frames) for name, fn in functions.items() if fn
    }
    return dataclasses.replace(layer, **mapped)


@dataclasses.dataclass(frozen=True)
class _Framed:
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
    """So many rows of [W; b], with those of zeros, where few, that make them a multiple of 16 or 8.

    The devices of a mesh can divide them then, and matrix units meet whole tiles.
    """
    for unit in (16, 8):
        whole = -(-rows // unit) * unit
        if 20 * (whole - rows) <= rows:
            return whole
    return rows


def _trace(matrix: Float[Array, "n n"]) -> Float[Array, ""]:
    """tr M of its n entries: ``jnp.trace`` masks the whole matrix and sums it."""
    return jnp.diagonal(matrix).sum()
