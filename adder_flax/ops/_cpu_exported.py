"""The native kernels under names that exported programs hold.

These are registered with XLA whenever the package is imported.

A program that `jax.export` stored with native kernels (asked for by name:
`use_backend("cpu_native")`) is loaded and run without a trace of the functions that made it, so
nobody has built the kernels by then. What is registered under these names is a function that loads
them, or builds them, when it is first called, and then passes each call on. It goes through Python,
some microseconds a call, so programs that are traced here have names of their own.
"""

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import jax

from adder_flax.ops._backend import get_backend

# A program holds this name for good: a kernel that takes other operands or attributes
# gets another one.
EXPORTED_PREFIX = "adder_flax_exported_v1_"

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

_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_kept_alive = []


# The beginnings of XLA's structures, from xla/ffi/api/c_api.h; every one of them opens
# with its size and extensions.


class _ApiVersion(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("api_version", _ApiVersion)]


class _Extension(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    ]


class _ErrorArguments(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    ]


class _Api(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("version", _ApiVersion),
        ("internal", ctypes.c_void_p),
        ("create_error", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))),
    ]


class _CallFrame(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
    ]


_METADATA_EXTENSION = 1
_FAILED_PRECONDITION = 9


def register() -> None:
    """Registers the names with XLA; builds nothing."""
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()

    def number(part: str) -> int:
        (found,) = re.findall(rf"#define XLA_FFI_API_{part} (\d+)", header)
        return int(found)

    version = [number("MAJOR"), number("MINOR")]
    for kernel, symbol in KERNELS.items():
        handler = _Handler(functools.partial(_handle, symbol, version))
        _kept_alive.append(handler)
        jax.ffi.register_ffi_target(
            EXPORTED_PREFIX + kernel, jax.ffi.pycapsule(handler), platform="cpu"
        )


def _handle(symbol: str, version: list[int], frame_address: int) -> int | None:
    """Answers a call of XLA: tells for which version of its interface this was made, or computes.

    Returns:
      The address of an error of XLA's, or None.
    """
    frame = _CallFrame.from_address(frame_address)
    if frame.extension and frame.extension.contents.type == _METADATA_EXTENSION:
        api_version = frame.extension.contents.metadata.contents.api_version
        api_version.major, api_version.minor = version
        return None
    try:
        return _kernel(symbol)(frame_address)
    except (OSError, RuntimeError) as error:
        message = f"expected to build the kernels that this program was exported with, got: {error}"
        arguments = _ErrorArguments(
            ctypes.sizeof(_ErrorArguments), None, message.encode(), _FAILED_PRECONDITION
        )
        return frame.api.contents.create_error(arguments)


@functools.cache
def _kernel(symbol: str) -> _Handler:
    native: Any = get_backend("cpu_native")  # whose module imports this one
    return _Handler(native.address(symbol))
