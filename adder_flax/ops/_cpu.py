"""Native CPU backend: C++ kernels, compiled once on the machine they run on, called through the XLA
FFI.

The kernels are built for the processor at hand (`-march=native`), so they are compiled here rather
than shipped. `ADDER_FLAX_CPU` in the environment names another one that this one can stand in for,
as the compiler calls it: `znver3` gives the code of a machine without AVX-512. The library goes to
`$XDG_CACHE_HOME/adder_flax` (by default `~/.cache/adder_flax`), under a name that changes with
anything that could change its content, and is moved into place in one step, so processes that start
together do not disturb each other. What is damaged there, or could be somebody else's, is not
loaded but built anew. Where there is no compiler, the backend reports itself unavailable and the
XLA backend takes over.
"""

import contextlib
import ctypes
import functools
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from adder_flax import own_cache
from adder_flax.ops._backend import Backend, get_backend
from adder_flax.ops._partition import result_type
from adder_flax.text import printable

_TARGET_PREFIX = "adder_flax_"
# Names of the kernels, and of their symbols in the library.
KERNELS = {
    "l1_forward": "AdderFlaxL1Forward",
    "l1_pullback": "AdderFlaxL1Pullback",
    "full_pullback": "AdderFlaxFullPullback",
    "l1_joint_pullback": "AdderFlaxL1JointPullback",
    "l1_pushforward": "AdderFlaxL1Pushforward",
    "additive_forward": "AdderFlaxAdditiveForward",
    "additive_pullback": "AdderFlaxAdditivePullback",
    "layer_norm_forward": "AdderFlaxLayerNormForward",
    "layer_norm_pullback": "AdderFlaxLayerNormPullback",
}

_SOURCE = Path(__file__).with_name("cpu_kernels.cc")
SAD_SOURCE = Path(__file__).with_name("sad_kernels.cc")  # a library of its own, when first needed
_KERNELS_OF = {_SOURCE: KERNELS, SAD_SOURCE: {"sad": "AdderFlaxSad"}}
_COMPILERS = ("c++", "g++", "clang++")
_TARGET_VARIABLE = "ADDER_FLAX_CPU"
_FLAGS = ("-std=gnu++17", "-O3", "-DNDEBUG", "-fPIC", "-shared")
_COMPILER_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH", "COMPILER_PATH", "LIBRARY_PATH")
_COMPILE_TIMEOUT_S = 300
_TRY_TO_LOAD = """
import ctypes, sys
try:
    library = ctypes.CDLL(sys.argv[1])
    [library[name] for name in sys.argv[2:]]
except (OSError, AttributeError) as error:
    sys.exit(f"expected a library with the kernels from the compiler, got: {error}")
"""
_PRINTED_BYTES = 2**16


class CpuBackend(Backend):
    """Register-tiled sums on the vector units and threads of the host."""

    name = "cpu_native"
    platforms = ("cpu",)
    split_by = "rule"

    def why_unavailable(self):
        try:
            load_library()
        except (OSError, RuntimeError) as error:
            return str(error)
        return None

    def supports(self, dtype):
        return jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16)

    def lowered_for(self, platform, dtype, *, for_export, num_devices):
        # What is stored runs where nobody has built the kernels.
        return get_backend("xla") if for_export else self

    def _call(self, kernel, shapes, *operands, **attributes):
        """Calls a kernel; `shapes` lists the shapes of its results. Returns them as a list."""
        results = [result_type(shape, jnp.float32, *operands) for shape in shapes]
        # Under vmap an operand that is not mapped gets a leading axis of length one,
        # which the kernels broadcast.
        call = jax.ffi.ffi_call(_TARGET_PREFIX + kernel, results, vmap_method="expand_dims")
        return call(*operands, **attributes)

    def l1(self, x, w, axes):
        (y,) = self._call("l1_forward", [_output_shape(x, w, axes)], x, w, w_is_nk=axes == "nk")
        return y

    def l1_pullback_x(self, x, w, g, rule, axes):
        (dx,) = self._call(
            "l1_pullback", [x.shape], x, w, g, **_layout_of_x(axes), slope=_slope(rule)
        )
        return dx

    def l1_pullback_w(self, x, w, g, rule, axes):
        (dw,) = self._call(
            "l1_pullback", [w.shape], w, x, g, **_layout_of_w(axes), slope=_slope(rule)
        )
        return dw

    def full_pullback_x(self, x, w, g, axes):
        (dx,) = self._call("full_pullback", [x.shape], x, w, g, **_layout_of_x(axes))
        return dx

    def full_pullback_w(self, x, w, g, axes):
        (dw,) = self._call("full_pullback", [w.shape], w, x, g, **_layout_of_w(axes))
        return dw

    def l1_pullback(self, x, w, g, rule, axes):
        if x.shape[0] == 1:
            # The joint kernel works on a member of the batch with few threads.
            return super().l1_pullback(x, w, g, rule, axes)
        shapes = [x.shape, w.shape]
        return tuple(
            self._call(
                "l1_joint_pullback",
                shapes,
                x,
                w,
                g,
                key_transposed=axes == "kn",
                slope=_slope(rule),
            )
        )

    def l1_pushforward(self, x, w, dx, rule, axes):
        shapes = [_output_shape(x, w, axes)]
        (dy,) = self._call(
            "l1_pushforward", shapes, x, w, dx, w_is_nk=axes == "nk", slope=_slope(rule)
        )
        return dy

    def layer_norm(self, x, scale, bias, epsilon, fast_variance):
        if x.dtype != jnp.float32:
            return super().layer_norm(x, scale, bias, epsilon, fast_variance)
        (y,) = self._call(
            "layer_norm_forward",
            [x.shape],
            x,
            scale[:, None],
            bias[:, None],
            epsilon=np.float32(epsilon),
        )
        return y

    def layer_norm_pullback(self, x, scale, bias, g, epsilon, fast_variance):
        if x.dtype != jnp.float32 or g.dtype != jnp.float32:
            return super().layer_norm_pullback(x, scale, bias, g, epsilon, fast_variance)
        row = (scale.shape[0], 1, scale.shape[1])
        dx, d_scale, d_bias = self._call(
            "layer_norm_pullback",
            [x.shape, row, row],
            x,
            scale[:, None],
            g,
            epsilon=np.float32(epsilon),
        )
        return dx, d_scale[:, 0], d_bias[:, 0]

    def sad(self, x, w):
        load_library(SAD_SOURCE)
        sums = result_type((*x.shape[:2], w.shape[1]), jnp.int32, x, w)
        return jax.ffi.ffi_call(_TARGET_PREFIX + "sad", sums, vmap_method="expand_dims")(x, w)

    def additive(self, query, key, v):
        (scores,) = self._call(
            "additive_forward", [_output_shape(query, key, "nk")], query, key, v[:, None]
        )
        return scores

    def additive_pullback(self, query, key, v, g):
        v = v[:, None]
        d_query, d_key, d_v = self._call(
            "additive_pullback", [query.shape, key.shape, v.shape], query, key, v, g
        )
        return d_query, d_key, d_v[:, 0]


def _layout_of_x(axes):
    """Returns which operands of a pullback to x, the kernel's `own` beside `other` w, are stored
    transposed.
    """
    return {"own_transposed": False, "other_transposed": axes == "kn", "g_transposed": False}


def _layout_of_w(axes):
    """The same for a pullback to w."""
    return {"own_transposed": axes == "kn", "other_transposed": False, "g_transposed": True}


def _output_shape(x, w, axes):
    return (*x.shape[:2], w.shape[2 if axes == "kn" else 1])


def _slope(rule):
    """Returns what tells the kernels which rule: the slope of hardtanh, or zero for sign."""
    return np.float32(rule.slope if rule.name == "hardtanh" else 0.0)


@functools.cache
def load_library(source: Path = _SOURCE) -> ctypes.CDLL:
    """Compiles the kernels of a file if no cached library fits, loads and registers them with XLA.

    Raises:
      RuntimeError: there is no compiler, or it fails, or what it makes cannot be loaded.
      OSError: its files cannot be written.
    """
    library = _cached_or_compiled(find_compiler(), source)
    for kernel, symbol in _KERNELS_OF[source].items():
        target = _TARGET_PREFIX + kernel
        jax.ffi.register_ffi_target(
            target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu"
        )
    return library


def _cached_or_compiled(compiler: str, source: Path = _SOURCE) -> ctypes.CDLL:
    """Returns the kernels from the first cache that has them whole, or compiles and keeps them."""
    fingerprint = _fingerprint(compiler, source)
    return own_cache.kept(
        f"{source.stem}-{fingerprint}.so",
        lambda: _compile(compiler, source),
        functools.partial(_load, source=source),
        key=fingerprint,
        owner="ops backend 'cpu_native'",
    )


def _load(content: bytes, source: Path = _SOURCE) -> ctypes.CDLL:
    """Loads a library from bytes, through a file that no other user can change.

    What is loaded is then what was checked.

    Raises:
      OSError: it is no library, or not one of these kernels.
    """
    library = _load_from_memory(content)
    if library is None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cpu_kernels.so"
            path.write_bytes(content)
            library = ctypes.CDLL(str(path))
    if missing := [
        symbol for symbol in _KERNELS_OF[source].values() if not hasattr(library, symbol)
    ]:
        raise OSError(f"it has no {missing[0]}")
    return library


def _load_from_memory(content: bytes) -> ctypes.CDLL | None:
    """Loads a library without the disk, which may be full.

    Returns None where the system does not do that.
    """
    if not hasattr(os, "memfd_create"):
        return None
    with contextlib.ExitStack() as opened:
        try:
            file = os.memfd_create("cpu_kernels")
            opened.callback(os.close, file)
            with open(file, "wb", closefd=False) as stream:
                stream.write(content)
            library = ctypes.CDLL(f"/proc/self/fd/{file}")
        except OSError:
            return None
        # The file stays open: the loader would take another library at the same path for
        # the one that it has.
        opened.pop_all()
        return library


def find_compiler() -> str:
    """Returns the path of the compiler that builds the kernels.

    Raises:
      RuntimeError: there is none.
    """
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise RuntimeError(f"found no C++ compiler ({', '.join(_COMPILERS)}) on PATH")


def _target() -> str:
    return os.environ.get(_TARGET_VARIABLE, "native")


def _fingerprint(compiler: str, source: Path = _SOURCE) -> str:
    """Hashes all that the library depends on: all that is compiled, flags, compiler, processor."""
    version = _run([compiler, "--version"], timeout_s=60)
    searched = [os.environ.get(variable, "") for variable in _COMPILER_VARIABLES]
    facts = [*_FLAGS, _target(), compiler, version, *searched, own_cache.processor()]
    hashed = hashlib.sha256("\0".join(facts).encode())
    headers = Path(jax.ffi.include_dir())
    for path in [*sorted(source.parent.glob("*.h")), source, *sorted(headers.rglob("*.h"))]:
        content = path.read_bytes()
        hashed.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return hashed.hexdigest()[:32]


def run_compiler(compiler: str, target: str, path: Path, source: Path = _SOURCE) -> None:
    """Writes kernels for a processor, as the compiler calls it, to a library.

    Raises:
      RuntimeError: the compiler fails.
    """
    include = f"-I{jax.ffi.include_dir()}"
    _run(
        [compiler, *_FLAGS, f"-march={target}", include, str(source), "-o", str(path)],
        timeout_s=_COMPILE_TIMEOUT_S,
    )


def _compile(compiler: str, source: Path = _SOURCE) -> bytes:
    """Returns the kernels as a library that was loaded once in another process, which a broken one
    may end.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cpu_kernels.so"
        run_compiler(compiler, _target(), path, source)
        if not path.is_file():
            raise RuntimeError(f"expected a library from {compiler}, got none")
        _run(
            [sys.executable, "-I", "-c", _TRY_TO_LOAD, str(path), *_KERNELS_OF[source].values()],
            timeout_s=60,
        )
        return path.read_bytes()


def _run(command: Sequence[str], *, timeout_s: float) -> str:
    """Returns the beginning of what a program prints.

    Raises:
      RuntimeError: it fails, or does not end in time; then it is ended, with all that it started.
    """
    printed = bytearray()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    reader = threading.Thread(target=_keep_beginning, args=(process.stdout, printed), daemon=True)
    reader.start()
    try:
        code = process.wait(timeout_s)
        reader.join(1)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} did not end within {timeout_s:g} s") from error
    finally:
        if process.poll() is None or reader.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = " ".join(printed.decode(errors="replace").split())
    if code != 0:
        raise RuntimeError(
            f"{' '.join(command)} failed with exit code {code}: {printable(text, limit=500)}"
        )
    return text


def _keep_beginning(stream: io.BufferedReader, printed: bytearray) -> None:
    with stream:
        while chunk := stream.read1(2**16):
            printed += chunk[: max(_PRINTED_BYTES - len(printed), 0)]
