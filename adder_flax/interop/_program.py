"""A trained classifier as one program: StableHLO, by `jax.export`, or ONNX, by jax2onnx."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend import core
from jaxtyping import Array, Float, UInt8

from adder_flax import jaxprs, ops
from adder_flax.errors import first_line
from adder_flax.extras import missing, needs
from adder_flax.files import write_whole
from adder_flax.text import printable

Classify = Callable[[UInt8[Array, "batch height width channels"]], Float[Array, "batch classes"]]

_LARGEST = 2**31 - 1  # bytes of a protocol buffer

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


def save_onnx(
    classify: Classify,
    path: str | Path,
    *,
    image_shape: tuple[int, int, int],
    label_names: Sequence[str],
    notes: Any = None,
) -> None:
    """Writes a function of images as an ONNX model for any number of images, in one file.

    Its input is ``images``, uint8 (batch, height, width, channels). Metadata of the model hold
    ``classes``, a name on each line, and the notes as JSON.

    Args:
      classify, path, image_shape, label_names: as of `save_program`.
      notes: further metadata.

    Raises:
      ValueError: jax2onnx cannot write it, as with attention in blocks of keys, or one file cannot
        hold it.

    Example:
      >>> means = lambda images: images.astype(jnp.float32).mean((1, 2))
      >>> save_onnx(means, "means.onnx", image_shape=(2, 2, 3), label_names="rgb")  # doctest: +SKIP
    """
    try:
        from jax2onnx import to_onnx
    except ModuleNotFoundError as error:
        raise missing(f"{error.name} (and then: pip install --no-deps jax2onnx)", "onnx") from error
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it names shapes that it leaves out
    (batch,) = export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, *image_shape), jnp.uint8)
    # Traced here, since jax2onnx traces with functions of its own in the place of many of
    # jax.numpy's.
    program = jax.make_jaxpr(as_formulas(classify))(images)
    try:
        model = to_onnx(
            core.jaxpr_as_fun(program), [images], input_names=["images"], output_names=["logits"]
        )
    except Exception as error:  # of any type, for whatever it does not know
        raise ValueError(
            f"expected a model of operations that jax2onnx knows, got {type(error).__name__}: "
            f"{first_line(error)}; export a program (--names=stablehlo), or train with "
            "config.model.key_block=off if there are blocks of keys"
        ) from error
    model.metadata_props.add(key="classes", value="\n".join(label_names))
    for name, note in (notes or {}).items():
        model.metadata_props.add(key=name, value=json.dumps(note))
    if model.ByteSize() > _LARGEST:
        raise ValueError(
            "expected a model of at most 2 GiB, which one ONNX file holds, got "
            f"{model.ByteSize() / 2**30:.1f} GiB; export it as a program (--names=stablehlo)"
        )
    write_whole(Path(path), model.SerializeToString())


def as_formulas(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Returns a function with the plain formula in the place of every kernel, and no inner ones.

    It returns the leaves of what the other one does. It is for those who read traced programs and
    know JAX's own operations alone.
    """

    def plain(*arrays: Any) -> list[Any]:
        return _evaluate(jax.make_jaxpr(function)(*arrays), arrays)

    return plain


def _evaluate(program: core.ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
    def run_equation(equation: core.JaxprEqn, inputs: list[Any]) -> list[Any]:
        if inner := ops.formula(equation) or jaxprs.callee(equation):
            return _evaluate(inner, inputs)
        # A loop holds a program too, but does not call it once: its body is replaced, and the loop
        # stays.
        return jaxprs.apply(program.jaxpr, _with_formulas(equation), inputs)

    return jaxprs.evaluate(program, arrays, run_equation)


def _with_formulas(equation: core.JaxprEqn) -> core.JaxprEqn:
    """Returns an equation with formulas in the programs that it holds."""

    def replaced(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and any(isinstance(v, core.ClosedJaxpr) for v in value):
            return type(value)(map(replaced, value))
        if not isinstance(value, core.ClosedJaxpr):
            return value
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in value.in_avals]
        return jax.make_jaxpr(lambda *arrays: _evaluate(value, arrays))(*shapes)

    params = {name: replaced(value) for name, value in equation.params.items()}
    return equation.replace(params=params)
