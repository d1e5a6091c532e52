"""Images a second of whole networks: sums of bytes beside float32 and beside what others run.

    python -m benchmarks.inference
    taskset -c 0 python -m benchmarks.inference --size small --batches 1 8

DeiT of random weights: ours in eight bits, with float32 adder layers, and multiplicative; timm's in
PyTorch, eager and compiled; the same as ONNX by ONNX Runtime in static int8 (QDQ) and by OpenVINO
in float32 and int8. What is not installed is left out with a line (`pip install torch timm onnx
onnxruntime openvino`). All take turns, on as many threads as the process has cores; a ratio is a
median over rounds. On a machine that does anything else, the numbers are an indication.
"""

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import benchmarks
from adder_flax import ops, own_cache, quantized
from adder_flax.models import deit_small, deit_tiny
from benchmarks.ops import cores
from benchmarks.timing import measure

ADDER = dict(score="adder", qkv_linear="adder", proj_linear="adder", mlp_linear="adder")
OURS, ROUNDS, CALIBRATION_IMAGES = "ours, int8 adder", 15, 8
TITLES = ("batch", "network", "ms", "images/s", f"times as long as {OURS}")


def ours(size: str, side: int, images: np.ndarray) -> dict[str, Callable]:
    """Returns our networks as functions of no argument, compiled."""
    make = {"tiny": deit_tiny, "small": deit_small}[size]
    sizes: dict[str, Any] = dict(image_size=side, patch_size=patch_of(side))
    adder = make(**sizes, **ADDER, rngs=nnx.Rngs(0))
    models = {
        OURS: quantized.quantize_model(adder, images_of(side, CALIBRATION_IMAGES)),
        "ours, float32 adder": adder,
        "ours, float32 multiplicative": make(**sizes, rngs=nnx.Rngs(0)),
    }

    def function(model: nnx.Module) -> Callable:
        graphdef, state = nnx.split(model)
        call = jax.jit(lambda state, images: nnx.merge(graphdef, state)(images))
        return functools.partial(call, state, jax.numpy.asarray(images))

    return {name: function(model) for name, model in models.items()}


def rivals(
    size: str, side: int, images: np.ndarray, folder: Path
) -> Iterator[tuple[str, Callable]]:
    """Yields the networks of others that are installed."""
    try:
        import timm
        import torch
    except ModuleNotFoundError as error:
        print(f"left out: all networks of others, for want of {error.name}", file=sys.stderr)
        return
    torch.set_num_threads(cores())
    sizes = dict(img_size=side, patch_size=patch_of(side))
    model = timm.create_model(f"deit_{size}_patch16_224", **sizes).eval()
    given, channels_first = torch.tensor(images).permute(0, 3, 1, 2).contiguous(), (0, 3, 1, 2)

    def in_torch(call: Callable) -> Callable:
        def run() -> Any:
            with torch.inference_mode():
                return call(given)

        return run

    yield "PyTorch, float32", in_torch(model)
    yield "PyTorch, compiled", in_torch(torch.compile(model))
    try:
        import onnx  # noqa: F401 - torch writes with it
        import onnxruntime
        from onnxruntime import quantization
    except ModuleNotFoundError as error:
        print(f"left out: ONNX Runtime and OpenVINO, for want of {error.name}", file=sys.stderr)
        return
    paths = [str(folder / f"{kind}{len(images)}.onnx") for kind in ("float32", "int8")]
    torch.onnx.export(model, (given,), paths[0], input_names=["images"], dynamo=False)
    array = np.ascontiguousarray(images.transpose(channels_first))

    class Examples(quantization.CalibrationDataReader):
        left = 4

        def get_next(self) -> dict[str, np.ndarray] | None:
            self.left -= 1
            return {"images": array} if self.left >= 0 else None

    quantization.quantize_static(
        *paths,
        Examples(),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        op_types_to_quantize=["MatMul", "Gemm"],
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores()
    session = onnxruntime.InferenceSession(paths[1], options)
    yield "ONNX Runtime, int8", functools.partial(session.run, None, {"images": array})
    try:
        import openvino
    except ModuleNotFoundError as error:
        print(f"left out: OpenVINO, for want of {error.name}", file=sys.stderr)
        return
    limits = {"INFERENCE_NUM_THREADS": cores(), "PERFORMANCE_HINT": "LATENCY"}
    processor, kinds = openvino.Core(), {"float32": (paths[0], "f32"), "int8": (paths[1], "f32")}
    if "BF16" in processor.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        kinds |= {"bfloat16": (paths[0], "bf16"), "int8 and bfloat16": (paths[1], "bf16")}
    for kind, (path, precision) in kinds.items():
        settings = {**limits, "INFERENCE_PRECISION_HINT": precision}
        compiled = processor.compile_model(path, "CPU", settings)
        yield f"OpenVINO, {kind}", functools.partial(compiled, [array])


def images_of(side: int, count: int) -> np.ndarray:
    """Returns normalised images of noise."""
    return np.random.default_rng(0).normal(size=(count, side, side, 3)).astype(np.float32)


def patch_of(side: int) -> int:
    """Returns DeiT's 16 pixels for large images, an eighth of small ones."""
    return 16 if side >= 128 else side // 8


def main() -> None:
    parser = benchmarks.parser(__doc__)
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--side", type=int, default=224, help="of the images, in pixels")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=120.0, help="for each batch")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {own_cache.processor_name()}, {cores()} cores")
    print(f"{ops.backend_report()}\nDeiT {options.size}, {options.side} pixels\n")
    print(f"| {' | '.join(TITLES)} |\n{'|---' * len(TITLES)}|")
    for batch in options.batches:
        images = images_of(options.side, batch)
        with tempfile.TemporaryDirectory() as folder:
            functions = ours(options.size, options.side, images)
            functions |= dict(rivals(options.size, options.side, images, Path(folder)))
            timings = measure(functions, ROUNDS, options.seconds)
        for name in functions:
            seconds = timings.median(name)
            row = (batch, name, f"{1e3 * seconds:.1f}", f"{batch / seconds:.1f}")
            print(f"| {' | '.join(map(str, row))} | {timings.ratio(name, OURS):.2f} |", flush=True)


if __name__ == "__main__":
    main()
