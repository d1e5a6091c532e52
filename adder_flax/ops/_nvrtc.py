"""CUDA C++ to PTX by NVRTC, NVIDIA's run-time compiler: a library that needs no GPU, driver or
headers, and comes with JAX's wheels for GPUs.
"""

import ctypes
import functools
import hashlib
import re
from collections.abc import Iterator

from adder_flax import own_cache
from adder_flax.extras import wheel_folders
from adder_flax.text import printable

# PTX for the oldest GPUs that the kernels are for runs on all later ones: the driver assembles it
# for the one at hand. NVRTC marks it as of its own version, and a driver refuses what is newer than
# itself; the kernels need nothing that came after the first version that knows those GPUs.
_OPTIONS = ("--gpu-architecture=compute_80", "--std=c++17")
_PTX_VERSION = "7.0"


def compile_to_ptx(source: str) -> str:
    """Returns a program as PTX for GPUs of compute capability 8.0 and later, compiled once and kept
    where `own_cache` keeps things.

    Raises:
      OSError: there is no NVRTC.
      RuntimeError: it refuses the program.
    """
    version = ".".join(map(str, _version()))
    key = hashlib.sha256("\0".join([version, _PTX_VERSION, *_OPTIONS, source]).encode()).hexdigest()
    return own_cache.kept(
        f"cuda_kernel-{key[:32]}.ptx",
        lambda: _compile(source).encode(),
        bytes.decode,
        key=key,
        owner="ops backend 'cuda'",
    )


@functools.cache
def load_library() -> ctypes.CDLL:
    """Returns NVRTC, from a wheel of NVIDIA's or else from the system; raises OSError without."""
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(
        "found no NVRTC, the compiler of its kernels; pip install nvidia-cuda-nvrtc-cu12, "
        "which jax[cuda12] brings"
    )


def _candidates() -> Iterator[str]:
    for folder in wheel_folders("nvidia.cuda_nvrtc", "nvidia.cu13"):
        yield from map(str, sorted(folder.glob("lib/libnvrtc.so.*")))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


@functools.cache
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    load_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _compile(source: str) -> str:
    library, program = load_library(), ctypes.c_void_p()
    code = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"cuda_kernels.cu", 0, None, None
    )
    if code != 0:
        raise RuntimeError(f"expected a program of NVRTC, got its error {code}")
    try:
        options = [option.encode() for option in _OPTIONS]
        code = library.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        if code != 0:
            raise RuntimeError(
                f"expected NVRTC {_version()} to compile the kernels, got its error {code}: "
                f"{printable(_text(program, 'ProgramLog'), limit=500)}"
            )
        ptx = _text(program, "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return re.sub(r"^\.version .*$", f".version {_PTX_VERSION}", ptx, count=1, flags=re.MULTILINE)


def _text(program: ctypes.c_void_p, what: str) -> str:
    library, size = load_library(), ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, text)
    return text.value.decode()
