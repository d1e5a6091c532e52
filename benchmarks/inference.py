"""Images a second of whole networks: sums of bytes beside float32 and beside what others run.

    python -m benchmarks.inference
    taskset -c 0 python -m benchmarks.inference --size small --batches 1 8
    python -m benchmarks.inference --runs runs/adder_deit_tiny runs/deit_tiny --batches 64

DeiT: ours in few bits, with float32 adder layers, and multiplicative; timm's in PyTorch, eager and
compiled; the same as ONNX by ONNX Runtime in static int8 (QDQ) and by OpenVINO in float32 and int8.
What is not installed is left out with a line (`pip install torch timm onnx onnxruntime openvino`).
All take turns, on as many threads as the process has cores; a ratio is a median over rounds. On a
machine that does anything else, the numbers are an indication.

Weights are random, or those of two runs on the same data, an adder one that `--mode=quantize` was
run on and a multiplicative one: then all are scored on the same evaluation split. Memory is what
loading a network and three calls add to the peak of a process that has imported all libraries:
weights, arrays, and what compiles it.
"""

import functools
import importlib
import importlib.util
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

import benchmarks
from adder_flax import data, interop, ops, own_cache, quantized, settings, training
from adder_flax.app import modes
from adder_flax.experiments import common
from adder_flax.models import VisionTransformer
from benchmarks.ops import cores
from benchmarks.timing import measure

OURS, CALIBRATION_IMAGES, SCORED_BATCH = "ours, int8 adder", 64, 64
ROUNDS, SECONDS_PER_BATCH = 15, 120.0
TITLES = ("batch", "network", "ms", "images/s", f"times as long as {OURS}", "MB", "accuracy")


class Files(NamedTuple):
    """All that a process needs to load any of the networks."""

    folder: Path  # with the weights of each in a file, see `write`
    fields: dict[str, dict[str, Any]]  # `config.model` of the adder and the multiplicative network
    image_shape: tuple[int, int, int]  # height, width and channels
    num_classes: int
    bits: tuple[int, ...] = (8,)  # of the files in few bits
    network: dict[str, Any] = {}  # what their header says of the network

    def vit(self, kind: str) -> settings.VitSettings:
        return settings.read(settings.VitSettings, ConfigDict(self.fields[kind]))

    def model(self, kind: str) -> VisionTransformer:
        sizes: dict[str, Any] = dict(image_size=self.image_shape[:2], channels=self.image_shape[2])
        sizes |= dict(settings=self.vit(kind), num_classes=self.num_classes)
        return nnx.eval_shape(lambda: VisionTransformer(**sizes, rngs=nnx.Rngs(0)))


class Network(NamedTuple):
    """A function of images, and what makes them its kind of array."""

    call: Callable[[Any], Any]
    given: Callable[[np.ndarray], Any]


def ours(files: Files, batch: int, *, kind: str, bits: int = 0) -> Network:
    like = files.model(kind)
    if bits:
        path = files.folder / f"int{bits}.safetensors"
        model, _ = interop.load_integers(like, path, network=files.network)
    else:
        zeros = lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype)
        graphdef, state = nnx.split(like)
        model = nnx.merge(graphdef, jax.tree.map(zeros, state))
        interop.load_weights(model, files.folder / f"{kind}.safetensors")
    graphdef, state = nnx.split(model)
    call = jax.jit(lambda state, images: nnx.merge(graphdef, state)(images))
    return Network(functools.partial(call, state), jax.numpy.asarray)


def in_torch(files: Files, batch: int, *, compiled: bool) -> Network:
    import torch

    torch.set_num_threads(cores())
    model = timm_model(files)
    model = torch.compile(model) if compiled else model

    def call(images: Any) -> Any:
        with torch.inference_mode():
            return model(images)

    return Network(call, lambda images: torch.tensor(_channels_first(images)))


def timm_model(files: Files) -> Any:
    import timm
    from safetensors.torch import load_file

    vit, (height, width, channels) = files.vit("multiplicative"), files.image_shape
    model = timm.create_model(
        "vit_tiny_patch16_224",
        **dict(img_size=(height, width), patch_size=vit.patch_size, in_chans=channels),
        **dict(embed_dim=vit.width, depth=vit.depth, num_heads=vit.num_heads),
        num_classes=files.num_classes,
    )
    model.load_state_dict(load_file(files.folder / "timm.safetensors"))
    return model.eval()


def in_onnxruntime(files: Files, batch: int) -> Network:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores()
    session = onnxruntime.InferenceSession(str(onnx_file(files, "int8", batch)), options)
    return Network(lambda images: session.run(None, {"images": images})[0], _channels_first)


def in_openvino(files: Files, batch: int, *, kind: str, precision: str) -> Network:
    import openvino

    limits = {"INFERENCE_NUM_THREADS": cores(), "PERFORMANCE_HINT": "LATENCY"}
    hints = {**limits, "INFERENCE_PRECISION_HINT": precision}
    model = openvino.Core().compile_model(str(onnx_file(files, kind, batch)), "CPU", hints)
    return Network(lambda images: model([images])[0], _channels_first)


def onnx_file(files: Files, kind: str, batch: int) -> Path:
    return files.folder / f"{kind}_{batch}.onnx"


def networks(files: Files) -> Iterator[tuple[str, Callable[[Files, int], Network]]]:
    """Yields a function for each network that can be had here: it loads it for a batch size."""
    for bits in files.bits:
        yield f"ours, int{bits} adder", functools.partial(ours, kind="adder", bits=bits)
    yield "ours, float32 adder", functools.partial(ours, kind="adder")
    yield "ours, float32 multiplicative", functools.partial(ours, kind="multiplicative")
    if _installed("PyTorch", "torch", "timm"):
        yield "PyTorch, float32", functools.partial(in_torch, compiled=False)
        yield "PyTorch, compiled", functools.partial(in_torch, compiled=True)
        if _installed("ONNX Runtime", "onnx", "onnxruntime"):
            yield "ONNX Runtime, int8", in_onnxruntime
            if _installed("OpenVINO", "openvino"):
                import openvino

                capable = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
                for precision in ("f32", "bf16") if "BF16" in capable else ("f32",):
                    for kind in ("float32", "int8"):
                        name = {"f32": kind, "bf16": f"{kind} in bfloat16"}[precision]
                        take = functools.partial(in_openvino, kind=kind, precision=precision)
                        yield f"OpenVINO, {name}", take


def write(folder: Path, models: dict[str, nnx.Module], **shared: Any) -> Files:
    for kind, model in models.items():
        interop.save_weights(model, folder / f"{kind}.safetensors")
    interop.save_weights(models["multiplicative"], folder / "timm.safetensors", names="timm")
    return Files(folder, **shared)


def write_onnx(files: Files, images: np.ndarray, batch: int) -> None:
    """Writes timm's network for a batch size, in float32 and in int8 calibrated on images."""
    paths = [onnx_file(files, kind, batch) for kind in ("float32", "int8")]
    packages = map(importlib.util.find_spec, ("torch", "timm", "onnx", "onnxruntime"))
    if paths[1].exists() or not all(packages):
        return
    import torch
    from onnxruntime import quantization

    images = _channels_first(images)
    given = torch.tensor(np.resize(images, (batch, *images.shape[1:])))
    names = dict(input_names=["images"], dynamo=False)
    torch.onnx.export(timm_model(files), (given,), str(paths[0]), **names)

    class Examples(quantization.CalibrationDataReader):
        left = iter(np.resize(images, (max(batch, len(images)), *images.shape[1:])))

        def get_next(self) -> dict[str, np.ndarray] | None:
            rows = [row for row, _ in zip(self.left, range(batch), strict=False)]
            return {"images": np.stack(rows)} if len(rows) == batch else None

    quantization.quantize_static(
        *paths,
        Examples(),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        op_types_to_quantize=["MatMul", "Gemm"],
    )


def random_networks(size: str, side: int, folder: Path) -> tuple[Files, np.ndarray]:
    fields, models = {}, {}
    for kind in ("adder", "multiplicative"):
        model = common.deit(kind, size).model
        model.patch_size = 16 if side >= 128 else side // 8
        fields[kind] = model.to_dict()
        sizes = dict(image_size=side, num_classes=1000, rngs=nnx.Rngs(0))
        vit = settings.read(settings.VitSettings, model)
        models[kind] = VisionTransformer(settings=vit, **sizes)
    images = np.random.default_rng(0).normal(size=(8, side, side, 3)).astype(np.float32)
    few = quantized.quantize_model(models["adder"], images)
    interop.save_integers(few, folder / "int8.safetensors", bits=8, network={}, notes={})
    shared = dict(image_shape=(side, side, 3), num_classes=1000)
    return write(folder, models, fields=fields, **shared), images


def trained_networks(workdirs: Sequence[str], folder: Path) -> tuple[Files, np.ndarray, Any]:
    """Writes the networks of two runs, and returns images to calibrate on and a run's data."""
    fields, models, network = {}, {}, {}
    for kind, workdir in zip(("adder", "multiplicative"), workdirs, strict=True):
        run = training.build_run(training.read_config(workdir), teach=False)
        of = training.fingerprint(run.config)
        place = training.SavedCheckpoints(Path(workdir) / "checkpoints", of=of)
        state = place.restore(run.abstract_state, "last")
        fields[kind] = run.config.model.to_dict()
        models[kind] = run.model(training.evaluation_params(state))
        network = network or modes.network_fields(run)
    few = list(Path(workdirs[0]).glob("int?.safetensors"))
    for path in few:
        shutil.copy(path, folder)
    images = run.task.inputs(run.train_source.first(CALIBRATION_IMAGES))[0]
    shared = dict(image_shape=images.shape[1:], num_classes=run.task.example().sizes["classes"])
    shared |= dict(bits=tuple(sorted((int(path.stem[3:]) for path in few), reverse=True)))
    return write(folder, models, fields=fields, network=network, **shared), np.asarray(images), run


def accuracy(network: Network, run: training.Run) -> float:
    """Returns the share of the evaluation split that a network for batches of 64 has right."""
    right = []
    for batch in data.EvalPipeline(run.eval_source, SCORED_BATCH):
        images = np.asarray(run.task.inputs(batch)[0])
        classes = np.asarray(network.call(network.given(images))).argmax(-1)
        right.append((classes == batch["label"])[batch["mask"]])
    return float(np.concatenate(right).mean())


def peak_memory(files: Files, name: str, batch: int) -> int:
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_load_and_call, files, name, batch).result()


def _load_and_call(files: Files, name: str, batch: int) -> int:
    for library in filter(importlib.util.find_spec, ("torch", "onnxruntime", "openvino")):
        importlib.import_module(library)
    jax.block_until_ready(jax.numpy.zeros(1))
    before = training.peak_memory()
    network = dict(networks(files))[name](files, batch)
    images = network.given(np.zeros((batch, *files.image_shape), np.float32))
    for _ in range(3):
        jax.block_until_ready(network.call(images))
    return training.peak_memory() - before


def _installed(who: str, *packages: str) -> bool:
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        print(f"left out: {who}, for want of {', '.join(absent)}", file=sys.stderr)
    return not absent


def _channels_first(images: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def main() -> None:
    parser = benchmarks.parser(__doc__)
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--side", type=int, default=224, help="of the images, in pixels")
    runs = dict(nargs=2, metavar=("ADDER", "MULTIPLICATIVE"))
    parser.add_argument("--runs", **runs, help="directories of runs, in place of size and side")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    options = parser.parse_args()
    forkserver.ensure_running()  # while this process is small: children count its memory as theirs
    print(f"jax {jax.__version__}, {own_cache.processor_name()}, {cores()} cores")
    print(f"{ops.backend_report()}")
    with tempfile.TemporaryDirectory() as temporary:
        folder, scores = Path(temporary), {}
        if options.runs:
            files, calibration, run = trained_networks(options.runs, folder)
            write_onnx(files, calibration, SCORED_BATCH)
            for name, load in networks(files):
                scores[name] = f"{accuracy(load(files, SCORED_BATCH), run):.4f}"
        else:
            files, calibration = random_networks(options.size, options.side, folder)
        vit = files.vit("multiplicative")
        print(f"{vit.depth} blocks of width {vit.width}, images {files.image_shape}\n")
        benchmarks.print_titles(TITLES)
        for batch in options.batches:
            write_onnx(files, calibration, batch)
            images = np.resize(calibration, (batch, *files.image_shape))
            functions = {}
            for name, load in networks(files):
                network = load(files, batch)
                functions[name] = functools.partial(network.call, network.given(images))
            timings = measure(functions, ROUNDS, SECONDS_PER_BATCH)
            for name in functions:
                seconds, ratio = timings.median(name), timings.ratio(name, OURS)
                memory = peak_memory(files, name, batch) / 1e6
                row = (batch, name, f"{1e3 * seconds:.1f}", f"{batch / seconds:.1f}")
                row += (f"{ratio:.2f}", f"{memory:.0f}", scores.get(name, ""))
                benchmarks.print_row(row)


if __name__ == "__main__":
    main()
