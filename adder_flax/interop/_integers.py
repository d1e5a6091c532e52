"""Models in few bits in safetensors files, that `--mode=quantize` writes and others read."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from adder_flax import quantized
from adder_flax.extras import needs
from adder_flax.files import write_whole
from adder_flax.text import printable

with needs("interop"):
    import safetensors.numpy
    from safetensors import SafetensorError, safe_open

_ENTRY = "adder_flax.integers"
_AGAIN = "write it again with --mode=quantize"


def save_integers(
    model: nnx.Module,
    path: str | Path,
    *,
    bits: int,
    network: Mapping[str, Any],
    notes: Mapping[str, Any],
) -> int:
    """Writes a model that `adder_flax.quantized.quantize_model` made.

    Bytes of weights are packed to their bits, one after the other, the highest bit first; all else
    is float32. The header has, in JSON: bits, network, notes, and a digest of these and the arrays.

    Args:
      model: as made, with these bits.
      path: of the file, which is written whole.
      bits: of its weights.
      network: what the model was built of, by name; who reads has to have the same.
      notes: whatever else a reader wants to know.

    Returns:
      How many bytes the file has.

    Raises:
      ValueError: the model has layers of other bits.
    """
    layers = (m for _, m in nnx.iter_modules(model) if isinstance(m, quantized.AdderLinear))
    if (found := {layer.weights.grid.bits for layer in layers}) - {bits}:
        raise ValueError(
            f"expected a model in {bits} bits, got layers in {sorted(found)}; give the bits that "
            "quantize_model was given"
        )
    flat: dict[Any, Any] = flatten_dict(nnx.to_pure_dict(nnx.split(model)[1]))
    arrays = {
        ".".join(map(str, name)): _packed(np.asarray(array), bits) for name, array in flat.items()
    }
    header = {"bits": bits, "network": dict(network), "notes": dict(notes)}
    header["digest"] = _digest(header, arrays)
    # Hugging Face's reader insists on the first entry.
    metadata = {"format": "pt", _ENTRY: json.dumps(header)}
    content = safetensors.numpy.save(arrays, metadata=metadata)
    write_whole(path, content)
    return len(content)


def load_integers(
    model: nnx.Module, path: str | Path, *, network: Mapping[str, Any]
) -> tuple[nnx.Module, dict[str, Any]]:
    """Reads what `save_integers` wrote.

    Args:
      model: in floating point, abstract perhaps, that was made integers of.
      path: of the file.
      network: what the model is built of.

    Returns:
      The model in few bits, and the header.

    Raises:
      ValueError: no such file, a damaged one, or one of another network.
      OSError: it cannot be read.
    """
    shown = printable(path)
    try:
        with safe_open(path, "numpy") as file:
            header = json.loads((file.metadata() or {})[_ENTRY])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        digest, bits, built = header.pop("digest"), header["bits"], header["network"]
    except FileNotFoundError as error:
        raise ValueError(
            f"expected a model in few bits in {shown}, got no file; --mode=quantize writes it"
        ) from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected a model in few bits in {shown}, got another file or part of one: "
            f"{printable(error, limit=200)}; {_AGAIN}"
        ) from error
    if digest != _digest(header, arrays):
        raise ValueError(
            f"expected {shown} to have the digest in its header, got another: the file is damaged; "
            f"{_AGAIN}"
        )
    network = json.loads(json.dumps(dict(network)))  # tuples as lists
    if built != network:
        name = min(n for n in built.keys() | network.keys() if built.get(n) != network.get(n))
        raise ValueError(
            f"expected integers of a network with {name} = {network.get(name)!r} in {shown}, got "
            f"{printable(repr(built.get(name)), limit=80)}; {_AGAIN}"
        )
    graphdef, state = quantized.empty_like(model, bits)
    shapes: dict[Any, Any] = flatten_dict(nnx.to_pure_dict(state))
    named = {".".join(map(str, name)): name for name in shapes}
    whole = {
        named[name]: _unpacked(array, shapes[named[name]], bits)
        for name, array in arrays.items()
        if name in named
    }
    if whole.keys() != shapes.keys() or any(x.shape != shapes[n].shape for n, x in whole.items()):
        raise ValueError(
            f"expected integers of this network in {shown}, got other arrays; {_AGAIN}"
        )
    return nnx.merge(graphdef, jax.tree.map(jax.numpy.asarray, unflatten_dict(whole))), header


def _packed(array: np.ndarray, bits: int) -> np.ndarray:
    if array.dtype != np.uint8:
        return array
    return np.packbits(np.unpackbits(array[..., None], axis=-1)[..., 8 - bits :])


def _unpacked(array: np.ndarray, like: jax.ShapeDtypeStruct, bits: int) -> np.ndarray:
    if like.dtype != np.uint8 or array.size != -(-like.size * bits // 8):
        return array.astype(like.dtype)
    ones = np.unpackbits(array, count=like.size * bits).reshape(-1, bits)
    padded = np.pad(ones, ((0, 0), (8 - bits, 0)))
    return np.packbits(padded, axis=-1).reshape(like.shape)


def _digest(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
