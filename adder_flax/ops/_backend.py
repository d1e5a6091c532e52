"""Which implementation runs: the interface of a backend, the registry, and the choice among them.

A backend computes seven functions on three-dimensional arrays; everything public in this package
(shapes, gradient rules, autodiff) is built on these seven once, in `_primitive.py` and
`_functions.py`. A new backend is one file with a subclass of `Backend` and one line,
`register_backend("name", "module:class")`, from outside too.

**Choice and `jax.jit`.** What was asked for by name, or that nothing was, is read when a function
is traced. It is held in a JAX user context, which is part of the key of every `jax.jit` cache, so
that one jitted function called under two backends is traced twice and never answers with the
other's code. It is then a parameter of the primitive, so that a backward pass traced later, outside
the `with` block, runs on the same backend as its forward pass. Where nothing was asked for, the
best backend is chosen when the program is lowered, for the platform that it is lowered for.
"""

import collections
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from adder_flax.ops._arrays import to_nk, upcast
from adder_flax.registry import Registry

ENVIRONMENT_VARIABLE = "ADDER_FLAX_BACKEND"
AUTO = "auto"

logger = logging.getLogger(__name__)

# GEMM-form gradients are differences of two large sums, so they are computed in full
# float32 on every platform.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def left_to_compiler(method):
    """Marks a function that XLA splits over devices by itself, whatever `split_by` says."""
    method.left_to_compiler = True
    return method


class Backend:
    """What a backend computes, and where it can run.

    Shapes: B batch, M rows of `x`, N rows (or columns) of `w`, K the contracted axis, C features.
    `x`, `dx` and `query` are (B, M, K), `key` is (B, N, K), `v` is (B, K), `g` and what is given
    back (B, M, N); of `layer_norm` x is (B, M, C), scale and bias (B, C). `w` and `dw` are (B, K,
    N) where `axes` is `"kn"`, as weights come, and (B, N, K) where it is `"nk"`, as keys do; below
    it is written w[n, k] for either. A `rule` is a function of differences, with a name and a
    slope.

    All inputs of one call share one floating dtype; sums are accumulated, and results returned, in
    float32 (float64 for float64 inputs). Any of B, M, N, K may be zero. NaN and infinities
    propagate as in the reference backend. Every method must be traceable under `jax.jit`,
    `jax.vmap`, `jax.lax.scan` and `jax.shard_map`, and give the same bits when run again.

    Attributes:
      name: what users call it, in `use_backend` and in `ADDER_FLAX_BACKEND`.
      platforms: JAX platforms (`"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`) on which it may run; empty
        means all.
      split_by: what splits its functions over devices: `"compiler"`, where XLA can look into them,
        or else, see `_partition.py`, `"rule"` or `"mesh"`.
      portable: whether its programs call nothing but what JAX promises to run later too, so that
        `jax.export` may hold them without being told which calls to allow.
    """

    name: str
    platforms: tuple[str, ...] = ()
    split_by: Literal["compiler", "rule", "mesh"] = "compiler"
    portable: bool = False

    def why_unavailable(self) -> str | None:
        """Returns why this backend cannot run here, or None; called once, may build and load."""
        return None

    def supports(self, dtype: jax.typing.DTypeLike) -> bool:
        """Returns whether inputs of `dtype` are accepted; the XLA backend serves the others."""
        return True

    def lowered_for(
        self, platform: str, dtype: jax.typing.DTypeLike, *, for_export: bool, num_devices: int
    ) -> "Backend":
        """Returns what computes in a program for a platform, as JAX names it there, lowered by
        `jax.export` or not: this, unless there is a choice or it travels.
        """
        return self

    def l1(self, x, w, axes):
        """Computes y[m, n] = -sum_k |x[m, k] - w[n, k]|."""
        raise NotImplementedError

    def l1_pullback_x(self, x, w, g, rule, axes):
        """Computes dx[m, k] = sum_n g[m, n] rule(w[n, k] - x[m, k]); `rule` is never `full`."""
        raise NotImplementedError

    def l1_pullback_w(self, x, w, g, rule, axes):
        """Computes dw[n, k] = sum_m g[m, n] rule(x[m, k] - w[n, k]), in the axes of `w`."""
        raise NotImplementedError

    def l1_pullback(self, x, w, g, rule, axes):
        """Computes both pullbacks under one rule, which a backend can share between them."""
        return self.l1_pullback_x(x, w, g, rule, axes), self.l1_pullback_w(x, w, g, rule, axes)

    def l1_pushforward(self, x, w, dx, rule, axes):
        """Computes sum_k dx[m, k] rule(w[n, k] - x[m, k]), `l1_pullback_x` transposed."""
        raise NotImplementedError

    def additive(self, query, key, v):
        """Computes s[m, n] = sum_k v[k] tanh(query[m, k] + key[n, k])."""
        raise NotImplementedError

    def additive_pullback(self, query, key, v, g):
        """Computes the gradients of sum(g * additive(query, key, v)) by query, key and v."""
        raise NotImplementedError

    # What follows is made of the above, or of matrix products; a backend may have something better.

    def l1_pushforward_w(self, x, w, dw, rule, axes):
        """Computes sum_k dw[n, k] rule(x[m, k] - w[n, k]), `l1_pullback_w` transposed."""
        pushed = self.l1_pushforward(to_nk(w, axes), x, to_nk(dw, axes), rule, "nk")
        return jnp.swapaxes(pushed, 1, 2)

    def l1_pushforward_both(self, x, w, dx, dw, rule, axes):
        """Computes the sum of both pushforwards, the transpose of `l1_pullback`."""
        by_x = self.l1_pushforward(x, w, dx, rule, axes)
        return by_x + self.l1_pushforward_w(x, w, dw, rule, axes)

    # `full_*` is `l1_*` under the rule `full`: products, and the share of the other operand's sum.

    @left_to_compiler
    def full_pushforward(self, x, w, dx, axes):
        x, w, dx = upcast(x, w, dx)
        return _einsum(f"bmk,b{axes}->bmn", dx, w) - (x * dx).sum(-1)[..., None]

    @left_to_compiler
    def full_pushforward_w(self, x, w, dw, axes):
        x, w, dw = upcast(x, w, dw)
        product = _einsum(f"bmk,b{axes}->bmn", x, dw)
        return product - jnp.expand_dims((w * dw).sum(1 + axes.index("k")), 1)

    @left_to_compiler
    def full_pullback_x(self, x, w, g, axes):
        x, w, g = upcast(x, w, g)
        return _einsum(f"bmn,b{axes}->bmk", g, w) - x * g.sum(-1)[..., None]

    @left_to_compiler
    def full_pullback_w(self, x, w, g, axes):
        x, w, g = upcast(x, w, g)
        product = _einsum(f"bmk,bmn->b{axes}", x, g)
        return product - w * jnp.expand_dims(g.sum(1), 1 + axes.index("k"))

    @left_to_compiler
    def layer_norm(self, x, scale, bias, epsilon, fast_variance):
        """Computes y[m, c] = scale[c] (x[m, c] - mean(x[m])) / sqrt(var(x[m]) + epsilon) + bias[c].

        The fast variance is E[x²] - E[x]², one pass for two; a backend that reads a row once anyway
        need not use it.
        """
        x, scale, bias = upcast(x, scale, bias)
        mean = x.mean(-1, keepdims=True)
        if fast_variance:
            variance = jnp.maximum(0, jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean))
        else:
            variance = jnp.square(x - mean).mean(-1, keepdims=True)
        factor = jax.lax.rsqrt(variance + epsilon) * scale[:, None]
        return (x - mean) * factor + bias[:, None]

    # These two by the formula, which can be differentiated, whatever `layer_norm` a subclass has.

    @left_to_compiler
    def layer_norm_pushforward(self, x, scale, bias, dx, d_scale, d_bias, **options):
        """Computes the derivative of `layer_norm` along these tangents."""
        function = functools.partial(Backend.layer_norm, self, **options)
        return jax.jvp(function, upcast(x, scale, bias), upcast(dx, d_scale, d_bias))[1]

    @left_to_compiler
    def layer_norm_pullback(self, x, scale, bias, g, **options):
        """Computes the gradients of sum(g * layer_norm(x, scale, bias)) by x, scale and bias."""
        function = functools.partial(Backend.layer_norm, self, **options)
        return jax.vjp(function, *upcast(x, scale, bias))[1](*upcast(g))

    @left_to_compiler
    def sad(self, x, w):
        """Computes y[m, n] = sum_k |x[m, k] - w[n, k]| of bytes, exactly, in int32."""
        return get_backend("xla").sad(x, w)

    @left_to_compiler
    def additive_pushforward(self, query, key, v, d_query, d_key, d_v):
        """Computes the derivative of `additive` along tangents, `additive_pullback` transposed."""
        return get_backend("xla").additive_pushforward(query, key, v, d_query, d_key, d_v)


def up_to_float32(self: Backend, dtype: jax.typing.DTypeLike) -> bool:
    """`Backend.supports` of kernels whose sums are float32."""
    return jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16)


# The backends, best first for their platform. Modules load when first asked for, so that importing
# the package does not pay for compilers and kernel languages that it will not use.
_BACKENDS: Registry[type[Backend]] = Registry(
    "kernel backend", f"adder_flax.ops.register_backend, or choose {AUTO!r}, the best one that runs"
)
for _name, _place in {
    "cpu_native": "_cpu:CpuBackend",
    "cuda": "_cuda:CudaBackend",
    "pallas_tpu": "_pallas_tpu:PallasTpuBackend",
    "xla": "_xla:XlaBackend",
    "reference": "_reference:ReferenceBackend",
}.items():
    _BACKENDS.register_lazily(_name, f"adder_flax.ops.{_place}")

# The name of the forced backend, or AUTO. A JAX user context: see the module's docstring.
_choice = jax.make_user_context(default_value=os.environ.get(ENVIRONMENT_VARIABLE) or AUTO)


def register_backend(name: str, backend: type[Backend] | str) -> None:
    """Adds a backend, to be asked for by name; where none of this project's own runs on one of its
    `platforms`, it is the best one there.

    Args:
      name: for `use_backend` and the environment variable `ADDER_FLAX_BACKEND`; that of the class.
      backend: a subclass of `Backend`, or where it is, as `"package.module:Class"`, to import it
        when it is asked for.

    >>> class Shifted(Backend):
    ...     name = "shifted"
    >>> register_backend("shifted", Shifted)
    """
    add: Callable = _BACKENDS.register_lazily if isinstance(backend, str) else _BACKENDS.register
    add(name, backend)
    _reasons.pop(name, None)


def get_backend(name: str) -> Backend:
    """Returns the backend of that name, whether or not it can run here."""
    try:
        return _instance(_BACKENDS.get(name))
    except ValueError as error:
        if name == os.environ.get(ENVIRONMENT_VARIABLE):  # then that is to be changed
            raise ValueError(f"{ENVIRONMENT_VARIABLE} in the environment: {error}") from None
        raise


@functools.cache
def _instance(backend: type[Backend]) -> Backend:
    return backend()


# Whoever asks for a backend while another thread builds it waits, and does not build it again.
_asking: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)
_reasons: dict[str, str | None] = {}


def _why_unavailable(name: str) -> str | None:
    with _asking[name]:
        if name not in _reasons:
            _reasons[name] = reason = get_backend(name).why_unavailable()
            if reason is not None:
                told = "ops backend %r is not available (%s); using another one"
                logger.warning(told, name, reason)
        return _reasons[name]


def build_in_background() -> None:
    """Starts to build the kernels that compile on the user's machine, in the background.

    Optional: the first function that needs them builds them, or waits for what was started here.
    Later starts find them in the cache.

    >>> build_in_background()
    """
    if _choice.value in (AUTO, "cpu_native"):
        threading.Thread(target=_why_unavailable, args=("cpu_native",), daemon=True).start()


def _process_platforms() -> tuple[str, ...]:  # in the names that lowering uses
    default = jax.default_backend()
    if default == "gpu":
        default = "rocm" if "rocm" in jax.devices()[0].client.platform_version else "cuda"
    return tuple(dict.fromkeys([default, "cpu"]))


def expected_platform() -> str:
    """Returns the JAX platform that a function traced here and now is most likely to run on: that
    of the backend that was asked for by name, if this is made for one, and else that of the default
    device.
    """
    platforms = () if _choice.value == AUTO else get_backend(_choice.value).platforms
    return platforms[0] if platforms else _process_platforms()[0]


def _best_for(platform: str, dtype: jax.typing.DTypeLike) -> Backend:
    for name in _BACKENDS:
        backend = get_backend(name)
        fits = platform in backend.platforms and backend.supports(dtype)
        if fits and _why_unavailable(name) is None:
            return backend
    return get_backend("xla")


class _Automatic(Backend):
    """Chooses when a program is lowered, where its platform is known."""

    name = AUTO

    def lowered_for(self, platform, dtype, *, for_export, num_devices):
        best = _best_for(platform, dtype)
        if for_export and not (best.portable and (num_devices == 1 or best.split_by != "rule")):
            return get_backend("xla")
        return best


def resolve_backend(dtype: jax.typing.DTypeLike) -> Backend:
    """Returns the backend of a function traced here and now, for inputs of `dtype`."""
    if _choice.value == AUTO:
        return _instance(_Automatic)
    backend = get_backend(_choice.value)
    if reason := _why_unavailable(backend.name):
        raise ValueError(
            f"expected the ops backend {backend.name!r}, which was asked for by name; it cannot "
            f"run here ({reason}); choose another, or {AUTO!r}"
        )
    return backend if backend.supports(dtype) else get_backend("xla")


def use_backend(name: str) -> contextlib.AbstractContextManager:
    """Selects the backend of the functions traced or called inside a `with` block, in this thread.

    Args:
      name: `"auto"` (the best one that runs on the platform at hand), `"xla"` (blocked, pure JAX),
        `"reference"` (plain broadcasting: slow, but the formula itself), or another name that
        `backend_report` lists.

    >>> from adder_flax import ops
    >>> with ops.use_backend("reference"):
    ...     print(ops.adder_matmul(jnp.ones((2, 3)), jnp.zeros((3, 1))))
    [[-3.]
     [-3.]]
    """
    return _choice(_known(name))


def use_backend_for(platform: str) -> contextlib.AbstractContextManager:
    """Selects, inside a `with` block, the kernels of a platform, to compile for devices that need
    not be here; a backend that was asked for by name stays.

    Args:
      platform: as JAX's devices tell it: `"cpu"`, `"gpu"` or `"tpu"`.

    >>> with use_backend_for("tpu"):
    ...     print(backend_report().splitlines()[0])
    ops backend: pallas_tpu (asked for by name)
    """
    if _choice.value != AUTO or platform == jax.default_backend():
        return contextlib.nullcontext()
    lowered = {"gpu": "cuda"}.get(platform, platform)
    made = (name for name in _BACKENDS if lowered in get_backend(name).platforms)
    return _choice(next(made, "xla"))


def set_backend(name: str) -> None:
    """Selects the backend for the whole process, but for blocks of `use_backend`.

    The environment variable `ADDER_FLAX_BACKEND`, read at import, sets the initial one.
    """
    _choice.set_global(_known(name))


def _known(name: str) -> str:
    return name if name == AUTO else get_backend(name).name


def available_backends() -> tuple[str, ...]:
    """Returns the names of the backends that can run in this process, best first.

    >>> available_backends()[-2:]
    ('xla', 'reference')
    """
    return tuple(name for name in _BACKENDS if _runs_here(name) and _why_unavailable(name) is None)


def _runs_here(name: str) -> bool:
    platforms = get_backend(name).platforms
    return not platforms or any(platform in platforms for platform in _process_platforms())


def backend_report() -> str:
    """Returns a short text for people: which backend runs on which platform here, and why.

    >>> with use_backend("xla"):
    ...     print(backend_report().splitlines()[0])
    ops backend: xla (asked for by name)
    """
    if _choice.value != AUTO:
        lines = [f"ops backend: {_choice.value} (asked for by name)"]
    else:
        chosen = [f"{_best_for(p, 'float32').name} on {p}" for p in _process_platforms()]
        lines = [f"ops backend: {', '.join(chosen)} (the best available)"]
    for name in _BACKENDS:
        if not _runs_here(name):
            state = f"for {', '.join(get_backend(name).platforms)}"
        elif (reason := _why_unavailable(name)) is None:
            state = "available"
        else:
            state = f"not available: {reason}"
        lines.append(f"  {name}: {state}")
    return "\n".join(lines)
