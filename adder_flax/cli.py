"""What the modes of ``main.py`` do: the pieces of the library put together for a person at a terminal."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from adder_flax import analysis, ops, training
from adder_flax.layers import AdderLinear

_FIGURE_IMAGES = 6
_REPORT_IMAGES = 32
_STUDIED_STEPS = 4


def enable_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX was told where to: a second start is faster."""
    if jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "adder_flax" / "jax"))


def train(config: Any, workdir: str | Path, *, start_time: float | None = None) -> None:
    """Trains or resumes the run in ``workdir`` and prints what came of it.

    Raises:
      RunError: what its user must mend.
      SystemExit: after SIGINT or SIGTERM, with exit code 128 + signal.
    """
    run = training.build_run(config)
    workdir = training.open_workdir(workdir, config)
    print(_overview(run, workdir))
    result = training.Trainer(run, workdir, start_time=start_time).fit()
    if result.interrupted:
        print(f"{result.interrupted.name} at step {result.step} of {run.num_steps}; the same command resumes there")
        sys.exit(128 + result.interrupted)
    if jax.process_index() == 0:
        _draw(run, workdir, training.evaluation_params(result.state))
    print(
        f"test accuracy {result.evaluation['eval/accuracy']:.4f} after {result.step} steps; in {workdir}: "
        "checkpoints/, metrics.jsonl, tensorboard/, config.json, curves.png, attention.png"
    )


def _overview(run: training.Run, workdir: Path) -> str:
    """Returns what a person wants to know before the first step: sizes, operations, devices, steps."""
    abstract_model = run.model(run.abstract_state["params"])
    devices = run.mesh.devices.flatten()
    mesh = " × ".join(f"{axis} {size}" for axis, size in run.mesh.shape.items())
    train, test = run.train_source, run.eval_source
    lines = [
        analysis.summary_text(abstract_model, train.image_shape),
        f"devices  {len(devices)} × {devices[0].device_kind}, mesh {mesh}",
        f"kernels  {ops.backend_report()}",
        f"data     {train.name}: {len(train)} {train.split} and {len(test)} {test.split} images, "
        f"{train.num_classes} classes",
        f"steps    {run.num_steps} of {run.config.batch_size} images, {run.steps_per_epoch} an epoch",
        f"workdir  {workdir}",
    ]
    return "\n".join(lines)


def _draw(run: training.Run, workdir: Path, params: Any) -> None:
    """Draws the training curves, and where the class token looks on the first test images."""
    name = _run_name(run.config)
    analysis.save_figure(analysis.curves_figure(training.read_metrics(workdir), title=name), workdir / "curves.png")
    images, labels = _first_images(run, _FIGURE_IMAGES)
    forward = jax.jit(lambda params, images: run.model(params)(run.normalize(images), return_weights=True))
    logits, maps = forward(params, images)
    names = run.eval_source.label_names
    captions = [
        f"{names[label]}, predicted {names[predicted]}"
        for label, predicted in zip(labels, np.argmax(logits, axis=-1), strict=True)
    ]
    figure = analysis.attention_figure(
        images, maps, class_token=run.config.model.pooling == "cls", captions=captions, title=name
    )
    analysis.save_figure(figure, workdir / "attention.png")


def evaluate(config: Any, workdir: str | Path, checkpoint: str) -> None:
    """Scores a checkpoint on the whole evaluation split.

    Args:
      config: of the run.
      workdir: of the run.
      checkpoint: ``last``, ``best`` or a step.
    """
    run, state = _restore(config, workdir, checkpoint)
    metrics = training.Evaluator(run)(training.evaluation_params(state))
    shown = "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in metrics.items())
    scored = f"{len(run.eval_source)} images of {config.data.name}/{run.eval_source.split}"
    print(f"step {int(state['step'])}  {scored}  {shown}")


def analyze(config: Any, workdir: str | Path, checkpoint: str, baseline: str | Path | None = None) -> None:
    """Measures the papers' claims on a checkpoint and writes ``<workdir>/report/report.html``.

    Args:
      config: of the run.
      workdir: of the run.
      checkpoint: ``last``, ``best`` or a step.
      baseline: directory of another run on the same data, whose last checkpoint stands beside this one.
    """
    other = {} if baseline is None else _baseline(config, baseline)
    run, state = _restore(config, workdir, checkpoint)
    start, model = run.init(), run.model(training.evaluation_params(state))
    smooth = not any(isinstance(module, AdderLinear) for _, module in nnx.iter_modules(model))
    images, labels = _first_images(run, _REPORT_IMAGES)
    report = analysis.write_report(
        model,
        np.asarray(run.normalize(images)),
        labels,
        Path(workdir) / "report",
        pictures=images,
        label_names=run.eval_source.label_names,
        name=_run_name(config),
        untrained=run.model(start["params"]),
        second_order={
            where: list(analysis.second_order_along(run, origin, num_steps=_STUDIED_STEPS, derivatives=smooth))
            for where, origin in {"from the start": start, "from the checkpoint": state}.items()
        },
        peak_learning_rate=config.optimizer.learning_rate,
        **other,
    )
    print(*(f"{claim.name}: {claim.verdict}" for claim in report.claims), sep="\n")
    print(f"report at {report.page}")


def _baseline(config: Any, workdir: str | Path) -> dict[str, Any]:
    """Returns the model of another run and its name, as ``write_report`` takes them."""
    other = training.read_config(workdir)
    if (other.data.name, other.data.image_size) != (config.data.name, config.data.image_size):
        raise training.RunError(
            f"expected a baseline on {config.data.name} at {config.data.image_size} pixels, got {other.data.name} at "
            f"{other.data.image_size}; set --baseline to a run on the same data"
        )
    run, state = _restore(other, workdir, "last")
    return {"baseline": run.model(training.evaluation_params(state)), "baseline_name": _run_name(other)}


def _restore(config: Any, workdir: str | Path, checkpoint: str) -> tuple[training.Run, Any]:
    run = training.build_run(config)
    directory = Path(workdir) / "checkpoints"
    if not directory.is_dir():
        raise training.RunError(f"expected checkpoints in {directory}, found none; train first, or set --workdir")
    training.open_workdir(workdir, config)
    with training.Checkpoints(directory) as checkpoints:
        named = {"last": None, "best": checkpoints.best_step}
        if checkpoint not in named and not checkpoint.isdecimal():
            raise training.RunError(f"expected --checkpoint to be last, best or a step, got {checkpoint!r}")
        step = named[checkpoint] if checkpoint in named else int(checkpoint)
        return run, checkpoints.restore(run.abstract_state, step)


def _first_images(run: training.Run, count: int) -> tuple[np.ndarray, np.ndarray]:
    records = [run.eval_source[i] for i in range(min(count, len(run.eval_source)))]
    return np.stack([record["image"] for record in records]), np.array([record["label"] for record in records])


def _run_name(config: Any) -> str:
    return f"{config.data.name}, {config.model.score} attention"


def default_workdir(experiment: str, overrides: Mapping[str, Any]) -> str:
    """Returns ``runs/<experiment>[-<data>][,<field>=<value>…]``, so that different runs do not share a directory.

    Args:
      experiment: value of ``--config``.
      overrides: the fields that were set on the command line, and their values.

    Example:
      >>> default_workdir("experiments/adder_deit_tiny.py:cifar10", {"optimizer.name": "sgd", "seed": 1})
      'runs/adder_deit_tiny-cifar10,optimizer.name=sgd,seed=1'
    """
    path, _, data = experiment.partition(":")
    settings = [f"{field}={_slug(value)}" for field, value in sorted(overrides.items())]
    return "runs/" + ",".join([Path(path).stem + (f"-{data}" if data else ""), *settings])


def _slug(value: Any) -> str:
    return re.sub(r"[^\w.+-]+", "_", str(value)).strip("_")
