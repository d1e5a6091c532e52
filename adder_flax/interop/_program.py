"""A trained classifier as one program that needs JAX alone: StableHLO, by `jax.export`."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Float, UInt8

from adder_flax import ops
from adder_flax.extras import needs
from adder_flax.files import write_whole
from adder_flax.text import printable

Classify = Callable[[UInt8[Array, "batch height width channels"]], Float[Array, "batch classes"]]

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

LOADER = """\
from jax import export
classify = export.deserialize(open("{name}", "rb").read()).call
logits = classify(images)  # of uint8 images (batch, {height}, {width}, {channels})
"""


def save_program(
    classify: Classify,
    path: str | Path,
    *,
    image_shape: tuple[int, int, int],
    label_names: Sequence[str],
    notes: Any = None,
) -> None:
    """Writes a function of images as a program, and what one has to know of it to ``<path>.json``.

    The program holds its parameters, takes any number of images, and runs on CPUs, GPUs and TPUs.
    It is made of what JAX promises to run for at least half a year, of no kernel of this library:
    whoever runs it needs ``jax`` and ``flatbuffers`` alone.

    Args:
      classify: logits or probabilities of uint8 images, normalisation included.
      path: of the program.
      image_shape: height, width and channels.
      label_names: of the classes.
      notes: further entries of the JSON file.

    Example:
      >>> import tempfile, numpy as np
      >>> means = lambda images: images.astype(jnp.float32).mean((1, 2))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_program(means, f"{folder}/means", image_shape=(2, 2, 3), label_names="rgb")
      ...     run = export.deserialize(Path(folder, "means").read_bytes()).call
      ...     run(np.full((5, 2, 2, 3), 7, np.uint8)).shape
      (5, 3)
    """
    path = Path(path)
    (batch,) = export.symbolic_shape("batch")
    with ops.use_backend("xla"):
        exported = export.export(jax.jit(classify), platforms=PLATFORMS)(
            jax.ShapeDtypeStruct((batch, *image_shape), jnp.uint8)
        )
    with needs("export"):
        import flatbuffers  # noqa: F401 - jax.export writes with it
    content = exported.serialize()
    height, width, channels = image_shape
    sizes = dict(height=height, width=width, channels=channels)
    about = {
        "load": LOADER.format(name=printable(path.name), **sizes).splitlines(),
        "input": {"dtype": "uint8", "shape": ["batch", *image_shape]},
        "classes": list(label_names),
        "platforms": list(PLATFORMS),
        "jax": jax.__version__,
        **(notes or {}),
    }
    write_whole(path, content)
    text = json.dumps(about, indent=1, ensure_ascii=False)
    write_whole(path.with_name(path.name + ".json"), text.encode())
