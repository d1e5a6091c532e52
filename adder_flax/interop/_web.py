"""Trained vision transformers as one page for a browser."""

import base64
import html
import json
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from adder_flax import counting, layers
from adder_flax.attention import LAYER_NORM_EPSILON, get_score
from adder_flax.files import write_whole
from adder_flax.interop import _c
from adder_flax.quantized import AdderLinear

_HERE = Path(__file__).parent
_FLAGS = (
    "--target=wasm32 -std=c99 -O2 -fno-unroll-loops -msimd128 -mbulk-memory -fno-math-errno "
    "-ffreestanding -nostdlib -nostdlibinc -I. -Wl,--no-entry,--strip-all,--allow-undefined"
)
_SCORES = ("dot", "adder", "gaussian", "bilinear", "additive")


def save_web(
    networks: Mapping[str, Any],
    path: str | Path,
    *,
    title: str,
    mean: Sequence[float],
    std: Sequence[float],
    label_names: Sequence[str],
    examples: Mapping[str, np.ndarray],
    resized: int | None = None,
) -> None:
    """Writes an HTML file that shows what networks answer and where each head looks.

    It needs no server, library or network. One draws where images have one channel, and gives
    photographs where they have three. Networks in few bits are `save_c`'s program as WebAssembly,
    for which clang and lld are needed; others are computed by the page itself, in double.

    Args:
      networks: vision transformers of one image shape and the same classes, by the names that the
        page gives them; those in few bits as `save_c` takes them.
      path: of the page.
      title: its heading.
      mean, std: of each channel, or of all, by which images are normalised.
      label_names: of the classes.
      examples: images in uint8 by what the page calls them; one at least.
      resized: pixels that a photograph's shorter side becomes before its middle is taken; None
        where it is resized whole.

    Raises:
      ValueError: a network that the page does not compute.
      FileNotFoundError: no clang, or no lld, for networks in few bits.
    """
    shape = next(iter(networks.values())).image_shape
    # As the networks take them, in float32.
    over = lambda values: tuple(np.broadcast_to(np.float32(values), shape[-1]).tolist())
    statistics = {"mean": over(mean), "std": over(std)}
    data = {
        "image": shape,
        **statistics,
        "labels": label_names,
        "resized": resized,
        "examples": [{"label": k, "pixels": _text(image)} for k, image in examples.items()],
        "networks": [
            {"name": name, **_facts(model), **_computed(model, statistics)}
            for name, model in networks.items()
        ],
    }
    # In a script element only this can end it.
    told = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = (_HERE / "web.html").read_text()
    page = page.replace("<!-- TITLE -->", html.escape(title)).replace("<!-- DATA -->", told)
    write_whole(path, page.encode())


def _text(array: np.ndarray | bytes) -> str:
    return base64.b64encode(array if isinstance(array, bytes) else array.tobytes()).decode()


def _facts(model: Any) -> dict[str, Any]:
    """What the page shows of any network."""
    image = jax.ShapeDtypeStruct((1, *model.image_shape), np.float32)
    counted = counting.count_operations(model, image)
    return {
        "depth": len(model.blocks),
        "heads": model.blocks[0].attention.num_heads,
        "tokens": model.pos_embed.shape[1],
        "prefix": model.prefix_tokens,
        "grid": model.grid,
        "meanPooling": model.pooling == "mean",
        "multiplications": counted.multiplications,
        "additions": counted.additions,
        "joules": counting.energy(counted).total_arithmetic_joules,
    }


def _computed(model: Any, statistics: Mapping[str, Any]) -> dict[str, Any]:
    if any(isinstance(module, AdderLinear) for _, module in nnx.iter_modules(model)):
        source, weights = _c.program(model, **statistics)
        return {"program": _text(_compiled(source)), "weights": _text(weights)}
    _check(model)
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    arrays = {".".join(map(str, path)): np.asarray(each[...], "<f4") for path, each in state}
    weights = b"".join(array.tobytes() for array in arrays.values())
    modules = nnx.iter_modules(model)
    adders = [path for path, module in modules if isinstance(module, layers.AdderLinear)]
    return {
        "weights": _text(weights),
        "checksum": zlib.crc32(weights),
        "arrays": [(name, array.size) for name, array in arrays.items()],
        "adders": [".".join(map(str, path)) for path in adders],
        "blocks": [_block(block.attention) for block in model.blocks],
        "epsilon": model.blocks[0].norm1.epsilon,
        "adderEpsilon": LAYER_NORM_EPSILON,
    }


def _block(attention: Any) -> dict[str, Any]:
    score, settings = get_score(attention.settings.score), attention.settings
    return {
        "score": score.name,
        "identity": score.identity if settings.identity is None else settings.identity,
        "factor": _c.score_factors(attention).tolist(),
    }


def _check(model: Any) -> None:
    """Refuses what the page does not compute."""
    if got := _c.unlike(model):
        pass
    elif any(get_score(b.attention.settings.score).name not in _SCORES for b in model.blocks):
        got = "another score"
    elif any("norm_scale" in block.attention.score for block in model.blocks):
        got = "additive scores with layer_norm"
    elif any(layer.bits for layer in layers.adder_layers(model)) or any(
        (block.attention.settings.score_options or {}).get("bits") for block in model.blocks
    ):
        got = "layers or scores that learn in few bits"
    else:
        return
    raise ValueError(
        "expected a vision transformer with norms in front, patches cut from the image and one of "
        f"the scores {', '.join(_SCORES)}, got {got}; export a program (--names=stablehlo)"
    )


def _compiled(source: str) -> bytes:
    """WebAssembly of `model.c`."""
    for tool, package in (("clang", "clang"), ("wasm-ld", "lld")):
        if shutil.which(tool) is None:
            raise FileNotFoundError(
                f"expected {tool}, which compiles a network in few bits for a browser, got none; "
                f"apt-get install {package}"
            )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for header in ("math.h", "stdlib.h", "string.h"):
            (folder / header).touch()  # what they would declare is in web.c
        (folder / "model.c").write_text(source)
        shutil.copy(_HERE / "web.c", folder)
        command = f"clang {_FLAGS} -o web.wasm web.c".split()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"expected a clang that compiles for wasm32, got: {done.stderr}")
        return (folder / "web.wasm").read_bytes()
