"""Native CPU backend: C++ kernels, compiled once on the machine they run on and called through the XLA FFI.

The kernels are built for the processor at hand (`-march=native`), so they are compiled here rather than shipped. The
library goes to `$XDG_CACHE_HOME/adder_flax` (by default `~/.cache/adder_flax`), under a name that changes with anything
that could change its content, and is moved into place in one step, so processes that start together do not disturb
each other. Where there is no compiler, the backend reports itself unavailable and the XLA backend takes over.
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

from adder_flax.ops._xla import XlaBackend

_SOURCE = Path(__file__).with_name("cpu_kernels.cc")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-DNDEBUG", "-fPIC", "-shared")
_RULE_IDS = {"sign": 0, "hardtanh": 1}
_TARGETS = {
    "adder_flax_l1_forward": "AdderFlaxL1Forward",
    "adder_flax_l1_pullback": "AdderFlaxL1Pullback",
    "adder_flax_l1_pushforward": "AdderFlaxL1Pushforward",
}
_COMPILE_TIMEOUT_S = 300


class CpuBackend(XlaBackend):
    """Register-tiled sums on the vector units and threads of the host."""

    name = "cpu_native"
    platforms = ("cpu",)

    def why_unavailable(self):
        try:
            _load_library()
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            return str(error)
        return None

    def supports(self, dtype):
        return jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16)

    def l1(self, x, w, axes):
        shape = (*x.shape[:2], w.shape[2 if axes == "kn" else 1])
        return _call("adder_flax_l1_forward", shape, x, w, w_is_nk=axes == "nk")

    def l1_pullback_x(self, x, w, g, rule, axes):
        return self._pullback(x, w, g, rule, own_transposed=False, other_transposed=axes == "kn", g_transposed=False)

    def l1_pullback_w(self, x, w, g, rule, axes):
        return self._pullback(w, x, g, rule, own_transposed=axes == "kn", other_transposed=False, g_transposed=True)

    def _pullback(self, own, other, g, rule, **layout):
        return _call("adder_flax_l1_pullback", own.shape, own, other, g, **layout, **_attributes(rule))

    def l1_pushforward(self, x, w, dx, rule, axes):
        shape = (*x.shape[:2], w.shape[2 if axes == "kn" else 1])
        return _call("adder_flax_l1_pushforward", shape, x, w, dx, w_is_nk=axes == "nk", **_attributes(rule))


def _attributes(rule):
    return {"rule": np.int32(_RULE_IDS[rule.name]), "slope": np.float32(rule.slope)}


def _call(target, shape, *operands, **attributes):
    # Under vmap each operand gets a leading axis, of length one where it is not mapped: the kernels broadcast those.
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, jnp.float32), vmap_method="expand_dims")
    return call(*operands, **attributes)


@functools.cache
def _load_library() -> ctypes.CDLL:
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
    """Hashes everything that the library depends on: source, flags, compiler, processor, and the FFI's headers."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
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
