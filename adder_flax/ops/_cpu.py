"""Native CPU backend: C++ kernels, compiled once on the machine they run on and called through the XLA FFI.

The kernels are built for the processor at hand (`-march=native`), so they are compiled here rather than
shipped. The library goes to `$XDG_CACHE_HOME/adder_flax` (by default `~/.cache/adder_flax`), under a name
that changes with anything that could change its content, and is moved into place in one step, so processes
that start together do not disturb each other. Where there is no compiler, the backend reports itself
unavailable and the XLA backend takes over.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from adder_flax.ops._backend import Backend
from adder_flax.ops._partition import result_type

_SOURCE = Path(__file__).with_name("cpu_kernels.cc")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-DNDEBUG", "-fPIC", "-shared")
_TARGETS = {
    "adder_flax_l1_forward": "AdderFlaxL1Forward",
    "adder_flax_l1_pullback": "AdderFlaxL1Pullback",
    "adder_flax_l1_joint_pullback": "AdderFlaxL1JointPullback",
    "adder_flax_l1_pushforward": "AdderFlaxL1Pushforward",
    "adder_flax_additive_forward": "AdderFlaxAdditiveForward",
    "adder_flax_additive_pullback": "AdderFlaxAdditivePullback",
}
_COMPILE_TIMEOUT_S = 300


class CpuBackend(Backend):
    """Register-tiled sums on the vector units and threads of the host."""

    name = "cpu_native"
    platforms = ("cpu",)
    split_by = "rule"

    def why_unavailable(self):
        try:
            load_library()
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            return str(error)
        return None

    def supports(self, dtype):
        return jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16)

    def l1(self, x, w, axes):
        (y,) = _call("l1_forward", [_output_shape(x, w, axes)], x, w, w_is_nk=axes == "nk")
        return y

    def l1_pullback_x(self, x, w, g, rule, axes):
        layout = {"own_transposed": False, "other_transposed": axes == "kn", "g_transposed": False}
        (dx,) = _call("l1_pullback", [x.shape], x, w, g, **layout, slope=_slope(rule))
        return dx

    def l1_pullback_w(self, x, w, g, rule, axes):
        layout = {"own_transposed": axes == "kn", "other_transposed": False, "g_transposed": True}
        (dw,) = _call("l1_pullback", [w.shape], w, x, g, **layout, slope=_slope(rule))
        return dw

    def l1_pullback(self, x, w, g, rule, axes):
        if x.shape[0] == 1:
            # The joint kernel works on a member of the batch with few threads.
            return super().l1_pullback(x, w, g, rule, axes)
        shapes = [x.shape, w.shape]
        return tuple(_call("l1_joint_pullback", shapes, x, w, g, key_transposed=axes == "kn", slope=_slope(rule)))

    def l1_pushforward(self, x, w, dx, rule, axes):
        shapes = [_output_shape(x, w, axes)]
        (dy,) = _call("l1_pushforward", shapes, x, w, dx, w_is_nk=axes == "nk", slope=_slope(rule))
        return dy

    def additive(self, query, key, v):
        (scores,) = _call("additive_forward", [_output_shape(query, key, "nk")], query, key, v[:, None])
        return scores

    def additive_pullback(self, query, key, v, g):
        v = v[:, None]
        d_query, d_key, d_v = _call("additive_pullback", [query.shape, key.shape, v.shape], query, key, v, g)
        return d_query, d_key, d_v[:, 0]


def _output_shape(x, w, axes):
    return (*x.shape[:2], w.shape[2 if axes == "kn" else 1])


def _slope(rule):
    """Returns what tells the kernels which rule: the slope of hardtanh, or zero for sign."""
    return np.float32(rule.slope if rule.name == "hardtanh" else 0.0)


def _call(target, shapes, *operands, **attributes):
    """Calls a kernel; `shapes` lists the shapes of its results. Returns them as a list."""
    results = [result_type(shape, jnp.float32, *operands) for shape in shapes]
    # Under vmap an operand that is not mapped gets a leading axis of length one, which the kernels broadcast.
    call = jax.ffi.ffi_call(f"adder_flax_{target}", results, vmap_method="expand_dims")
    return call(*operands, **attributes)


@functools.cache
def load_library() -> ctypes.CDLL:
    """Compiles the kernels if no cached library fits, loads them and registers them with XLA.

    Raises:
      RuntimeError: if there is no compiler or it fails.
      OSError: if the library cannot be written or loaded.
    """
    compiler = _find_compiler()
    path = _cache_directory() / f"cpu_kernels-{_fingerprint(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    library = ctypes.CDLL(str(path))
    for target, symbol in _TARGETS.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return library


def _find_compiler() -> str:
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise RuntimeError(f"found no C++ compiler ({', '.join(_COMPILERS)}) on PATH")


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adder_flax"


def _fingerprint(compiler: str) -> str:
    """Hashes everything that the library depends on: source, flags, compiler, processor, FFI headers."""
    command = [compiler, "--version"]
    version = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    parts = [_SOURCE.read_text(), *_FLAGS, compiler, version, _processor(), jaxlib.__version__]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Returns the model and the features of the host's processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in lines if line.lower().startswith(("model name", "flags", "features", "cpu part")))


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        output = Path(directory) / path.name
        command = [compiler, *_FLAGS, f"-I{jax.ffi.include_dir()}", str(_SOURCE), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip()[-2000:]}")
        output.replace(path)
