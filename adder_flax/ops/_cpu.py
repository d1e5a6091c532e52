"""Native CPU backend: C++ kernels, compiled once on the machine they run on, called through the XLA
FFI.

The kernels are built for the processor at hand (`-march=native`), so they are compiled here rather
than shipped. `ADDER_FLAX_CPU` in the environment names another one that this one can stand in for,
as the compiler calls it: `znver3` gives the code of a machine without AVX-512. `own_cache` keeps
the library, under a name that changes with all that it is made of. Where there is no compiler, the
backend reports itself unavailable and the XLA backend takes over.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

from adder_flax import own_cache
from adder_flax.ops._backend import Backend, get_backend, up_to_float32
from adder_flax.ops._partition import result_type
from adder_flax.ops._sad import attention_formula, norm_formula
from adder_flax.text import printable

KERNELS = (
    *("l1_forward", "l1_pullback", "full_pullback", "l1_joint_pullback", "l1_pushforward"),
    *("additive_forward", "additive_pullback", "layer_norm_forward", "layer_norm_pullback"),
)
_TARGET_PREFIX = "adder_flax_"
_SOURCE = Path(__file__).with_name("cpu_kernels.cc")
SAD_SOURCE = Path(__file__).with_name("sad_kernels.cc")  # a library of its own, when first needed
_KERNELS_OF = {_SOURCE: KERNELS, SAD_SOURCE: ("sad", "sad_norm", "sad_attention")}
_COMPILERS = ("c++", "g++", "clang++")
_TARGET_VARIABLE = "ADDER_FLAX_CPU"
_FLAGS = ("-std=gnu++17", "-O3", "-DNDEBUG", "-fPIC", "-shared")
_COMPILE_TIMEOUT_S = 300


class CpuBackend(Backend):
    """Register-tiled sums on the vector units and threads of the host."""

    name = "cpu_native"
    platforms = ("cpu",)
    split_by = "rule"
    supports = up_to_float32

    def why_unavailable(self):
        try:
            load_library()
        except (OSError, RuntimeError) as error:
            return str(error)
        return None

    def lowered_for(self, platform, dtype, *, for_export, num_devices):
        # What is stored runs where nobody has built the kernels.
        return get_backend("xla") if for_export else self

    def _call(self, kernel, shapes, *operands, dtype=jnp.float32, **attributes):
        """Calls a kernel; returns what it gives, of these shapes."""
        results = [result_type(shape, dtype, *operands) for shape in shapes]
        # Under vmap an operand that is not mapped gets a leading axis of length one, which the
        # kernels broadcast.
        call = jax.ffi.ffi_call(_TARGET_PREFIX + kernel, results, vmap_method="expand_dims")
        given = call(*operands, **attributes)
        return given[0] if len(given) == 1 else tuple(given)

    def l1(self, x, w, axes):
        return self._call("l1_forward", [_output_shape(x, w, axes)], x, w, w_is_nk=axes == "nk")

    def l1_pullback_x(self, x, w, g, rule, axes):
        return self._pull_back_x("l1_pullback", x, w, g, axes, slope=_slope(rule))

    def l1_pullback_w(self, x, w, g, rule, axes):
        return self._pull_back_w("l1_pullback", x, w, g, axes, slope=_slope(rule))

    def full_pullback_x(self, x, w, g, axes):
        return self._pull_back_x("full_pullback", x, w, g, axes)

    def full_pullback_w(self, x, w, g, axes):
        return self._pull_back_w("full_pullback", x, w, g, axes)

    # Kernels of own, other and g, each of which may be stored transposed.

    def _pull_back_x(self, kernel, x, w, g, axes, **options):
        options |= dict(own_transposed=False, other_transposed=axes == "kn", g_transposed=False)
        return self._call(kernel, [x.shape], x, w, g, **options)

    def _pull_back_w(self, kernel, x, w, g, axes, **options):
        options |= dict(own_transposed=axes == "kn", other_transposed=False, g_transposed=True)
        return self._call(kernel, [w.shape], w, x, g, **options)

    def l1_pullback(self, x, w, g, rule, axes):
        if x.shape[0] == 1:
            # The joint kernel works on a member of the batch with few threads.
            return super().l1_pullback(x, w, g, rule, axes)
        attributes: dict[str, Any] = dict(key_transposed=axes == "kn", slope=_slope(rule))
        return self._call("l1_joint_pullback", [x.shape, w.shape], x, w, g, **attributes)

    def l1_pushforward(self, x, w, dx, rule, axes):
        attributes: dict[str, Any] = dict(w_is_nk=axes == "nk", slope=_slope(rule))
        return self._call("l1_pushforward", [_output_shape(x, w, axes)], x, w, dx, **attributes)

    def layer_norm(self, x, scale, bias, epsilon, fast_variance):
        if x.dtype != jnp.float32:
            return super().layer_norm(x, scale, bias, epsilon, fast_variance)
        operands = x, scale[:, None], bias[:, None]
        return self._call("layer_norm_forward", [x.shape], *operands, epsilon=np.float32(epsilon))

    def layer_norm_pullback(self, x, scale, bias, g, epsilon, fast_variance):
        if x.dtype != jnp.float32 or g.dtype != jnp.float32:
            options: dict[str, Any] = dict(epsilon=epsilon, fast_variance=fast_variance)
            return super().layer_norm_pullback(x, scale, bias, g, **options)
        scale, epsilon = scale[:, None], np.float32(epsilon)
        shapes = [x.shape, scale.shape, scale.shape]
        given = self._call("layer_norm_pullback", shapes, x, scale, g, epsilon=epsilon)
        dx, d_scale, d_bias = given
        return dx, d_scale[:, 0], d_bias[:, 0]

    def sad(self, x, w):
        load_library(SAD_SOURCE)
        return self._call("sad", [_output_shape(x, w, "nk")], x, w, dtype=jnp.int32)

    def sad_norm(self, x, w, table, ends, levels, y_levels, epsilon, gelu):
        how: dict[str, Any] = dict(levels=levels, y_levels=y_levels, epsilon=epsilon, gelu=gelu)
        if x.shape[0] != 1 or 0 in x.shape or x.dtype not in (jnp.uint8, jnp.float32):
            return norm_formula(self, x, w, table, ends, **how)
        shape, dtype = (x.shape[1], w.shape[1]), jnp.uint8 if y_levels else jnp.float32
        return self._call_bytes("sad_norm", shape, dtype, x, w, table, ends, **how)

    def sad_attention(self, query, key, value, heads, levels):
        if query.shape[0] != 1 or 0 in (*query.shape, *value.shape):
            return attention_formula(self, query, key, value, heads, levels)
        shape = (*query.shape[1:-1], value.shape[-1])
        operands = query, key, value, heads
        return self._call_bytes("sad_attention", shape, jnp.float32, *operands, levels=levels)

    def _call_bytes(self, kernel, shape, dtype, *operands, **attributes):
        """Calls a kernel of operands with one leading axis, of length one."""
        load_library(SAD_SOURCE)
        result = result_type(shape, dtype, *operands)
        call = jax.ffi.ffi_call(_TARGET_PREFIX + kernel, result, vmap_method="sequential")
        types = {int: np.int32, float: np.float32, bool: bool}
        given = {name: types[type(value)](value) for name, value in attributes.items()}
        return call(*(a[0] for a in operands), **given)[None]

    def additive(self, query, key, v):
        shape = _output_shape(query, key, "nk")
        return self._call("additive_forward", [shape], query, key, v[:, None])

    def additive_pullback(self, query, key, v, g):
        v = v[:, None]
        shapes = [query.shape, key.shape, v.shape]
        d_query, d_key, d_v = self._call("additive_pullback", shapes, query, key, v, g)
        return d_query, d_key, d_v[:, 0]


def _output_shape(x, w, axes):
    return (*x.shape[:2], w.shape[2 if axes == "kn" else 1])


def _slope(rule):
    """What tells the kernels which rule: the slope of hardtanh, or zero for sign."""
    return np.float32(rule.slope if rule.name == "hardtanh" else 0.0)


@functools.cache
def load_library(source: Path = _SOURCE) -> ctypes.CDLL:
    """Compiles the kernels of a file if no cached library fits, loads and registers them with XLA.

    Raises:
      RuntimeError: there is no compiler, or it fails.
      OSError: what it makes cannot be loaded, or its files cannot be written.
    """
    library = _cached_or_compiled(find_compiler(), source)
    for kernel in _KERNELS_OF[source]:
        symbol = "AdderFlax" + "".join(map(str.capitalize, kernel.split("_")))
        capsule = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(_TARGET_PREFIX + kernel, capsule, platform="cpu")
    return library


def _cached_or_compiled(compiler: str, source: Path = _SOURCE) -> ctypes.CDLL:
    fingerprint, owner = _fingerprint(compiler, source), "ops backend 'cpu_native'"
    name, make = f"{source.stem}-{fingerprint}.so", functools.partial(_compile, compiler, source)
    return own_cache.kept(name, make, _load, key=fingerprint, owner=owner)


def _load(content: bytes) -> ctypes.CDLL:
    # Through a file that nobody else changes: these bytes were checked.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cpu_kernels.so"
        path.write_bytes(content)
        return ctypes.CDLL(str(path))


def find_compiler() -> str:
    """Returns the path of the compiler that builds the kernels; raises RuntimeError without one."""
    if found := next(filter(None, map(shutil.which, _COMPILERS)), None):
        return found
    raise RuntimeError(f"found no C++ compiler ({', '.join(_COMPILERS)}) on PATH")


def _target() -> str:
    return os.environ.get(_TARGET_VARIABLE, "native")


def _fingerprint(compiler: str, source: Path = _SOURCE) -> str:
    version = _run(compiler, "--version")
    facts = [
        *_FLAGS,
        _target(),
        compiler,
        version,
        jaxlib.version.__version__,
        own_cache.processor(),
        *(path.read_text() for path in (*sorted(source.parent.glob("*.h")), source)),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def run_compiler(compiler: str, target: str, path: Path, source: Path = _SOURCE) -> None:
    """Writes kernels for a processor, as the compiler calls it, to a library."""
    options = (*_FLAGS, f"-march={target}", f"-I{jax.ffi.include_dir()}")
    _run(compiler, *options, str(source), "-o", str(path))


def _compile(compiler: str, source: Path = _SOURCE) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cpu_kernels.so"
        run_compiler(compiler, _target(), path, source)
        return path.read_bytes()


def _run(*command: str) -> str:
    piped: dict[str, Any] = dict(
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        done = subprocess.run(command, **piped, timeout=_COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} did not end within {_COMPILE_TIMEOUT_S} s") from error
    text = " ".join(done.stdout.decode(errors="replace").split())
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} failed with exit code {done.returncode}: "
            f"{printable(text, limit=500)}"
        )
    return text
