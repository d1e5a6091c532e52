"""What the modes of ``main.py`` do: the library put together for a person at a terminal."""

import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from absl import logging
from flax import nnx

from adder_flax import (
    counting,
    data,
    interop,
    ops,
    own_cache,
    packed,
    quantized,
    report,
    settings,
    tasks,
    training,
)
from adder_flax import predict as predicting
from adder_flax.app.ends import fitted
from adder_flax.errors import first_line


def enable_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX was told another place."""
    given = jax.config.values["jax_compilation_cache_dir"] or ""
    if not given:
        # JAX does not tell processors apart.
        machine = hashlib.sha256(own_cache.processor().encode()).hexdigest()[:16]
        jax.config.update("jax_compilation_cache_dir", str(own_cache.folder() / "jax" / machine))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ and "://" not in given:
        # Parameters are drawn by dozens of programs that compile in a tenth of a second each; from
        # a bucket, each would take longer than that.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def check_workdir(workdir: str) -> str:
    """Returns the path of a run, which may be no file or address; "~" stands for the home."""
    if "://" in workdir:
        raise training.RunError(
            f"expected a directory, got {workdir!r}; mount it, and set --workdir to its path there"
        )
    place = Path(workdir).expanduser()  # shells do not, after a "="
    try:
        files = [f for f in (place, *place.parents) if f.exists() and not f.is_dir()]
    except OSError as error:  # that of many overrides is too long, say
        raise training.RunError(
            f"expected a directory, got {workdir!r}: {error.strerror}; set --workdir"
        ) from error
    if files:
        raise training.RunError(
            f"expected a directory, got a file at {files[0]}; choose another --workdir"
        )
    return str(place)


def check_backend(*, here: bool) -> None:
    """Refuses a backend of the environment that does not exist, or does not run ``here``."""
    name = os.environ.get("ADDER_FLAX_BACKEND", "auto")
    if name == "auto":
        return
    with training.user_errors():
        ops.use_backend(name)
    if here and name not in (available := ops.available_backends()):
        raise training.RunError(
            f"expected ADDER_FLAX_BACKEND out of auto, {', '.join(available)}, which run here, got "
            f"{name!r}; set or unset it"
        )


def train(config: Any, workdir: str | Path, *, start_time: float | None = None) -> None:
    """Trains or resumes a run; SIGINT, SIGTERM and SIGHUP exit with code 128 + signal."""
    if config.topology:
        raise training.RunError(
            f"expected an empty config.topology to train, got {config.topology!r}, which is for "
            "--mode=compile"
        )
    config = training.with_statistics(config, workdir)
    run, words = training.build_run(config), ""
    if _begins(config, workdir):
        run, _, words = _start_from(run)
    _say(_overview(run, Path(workdir)))
    training.trace(run)
    workdir = training.open_workdir(workdir, config)
    if words:
        _say(f"start    {config.init_from}; {words}")
    result = training.Trainer(run, workdir, start_time=start_time).fit()
    for source in (run.train_source, run.eval_source):
        if source.unreadable:
            _say(
                f"{len(source.unreadable)} unreadable {source.split} {run.task.unit} were left "
                "out; the warnings name them"
            )
    if result.interrupted:
        _say(
            f"{result.interrupted.name} at step {result.step} of {run.num_steps}; the same command "
            "resumes there"
        )
        sys.exit(128 + result.interrupted)
    params = training.fetch(training.evaluation_params(result.state), run.mesh)
    drawn = _draw(run, workdir, params) if jax.process_index() == 0 else []
    best = run.task.best.name
    _say(
        f"{run.eval_source.split} {best} {result.evaluation[f'eval/{best}']:.4f} after "
        f"{result.step} steps, peak memory {_gib(training.peak_memory())}; in {workdir}: "
        + ", ".join(["checkpoints/, metrics.jsonl, tensorboard/, config.json", *drawn])
    )


def _begins(config: Any, workdir: str | Path) -> bool:
    """Whether weights are those of ``init_from``: once there is a checkpoint, it has them."""
    checkpoints = training.SavedCheckpoints(Path(workdir) / "checkpoints")
    return bool(config.init_from) and not checkpoints.steps


def _start_from(run: training.Run) -> tuple[training.Run, tuple[str, ...], str]:
    with training.user_errors():
        run, at_random, words = interop.start_from(run, run.settings.init_from)
    if run.settings.data.mean:
        mean, std = run.config.data.mean, run.config.data.std
        words += f"; images normalised by mean {mean}, deviation {std}"
    return run, at_random, words


def _run_of(config: Any, workdir: str | Path, **options: Any) -> training.Run:
    """The run of a directory, to be looked at and not trained."""
    return training.build_run(training.with_statistics(config, workdir), teach=False, **options)


def _run_without_data(config: Any, workdir: str | Path) -> training.Run:
    """The run of a directory whose data need not be here, unless they were measured to normalise
    them.
    """
    run = _run_of(config, workdir, load=data.load_or_imitate)
    source: Any = run.train_source
    imitated = source.name == "fake" != run.settings.data.name
    if imitated and source.statistics is None and not source.crops_on_host:
        return _run_of(config, workdir)  # which says how to prepare them
    return run


def _whole_state(run: training.Run, workdir: str | Path, checkpoint: str) -> tuple[Any, str]:
    """The state at a checkpoint, or else of ``config.init_from``; and in words where it is from."""
    if not _begins(run.config, workdir):
        state = _restore(run, workdir, checkpoint)
        return state, f"step {int(state['step'])}"
    started, at_random, _ = _start_from(run)
    if at_random:
        raise training.RunError(
            f"expected weights for the whole model in {run.config.init_from}, got none for "
            f"{', '.join(at_random[:3])} ({len(at_random)} in all); train it first, or set "
            "--config.init_from to others"
        )
    return started.init(), run.config.init_from


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(fitted(text, terminal=sys.stdout.isatty()), flush=True)


def _overview(run: training.Run, workdir: Path) -> str:
    abstract_model = run.model(run.abstract_state["params"])
    train, test = run.train_source, run.eval_source
    lines = [
        report.summary_text(abstract_model, *run.task.example().inputs),
        f"devices  {_devices(run)}",
        f"data     {train.name}: {len(train)} {train.split} and {len(test)} {test.split} "
        f"{run.task.unit}" + (f", {about}" if (about := run.task.about()) else ""),
        f"steps    {run.num_steps} of {run.config.batch_size} {run.task.unit}, "
        f"{run.steps_per_epoch} an epoch",
        f"workdir  {workdir}",
    ]
    if run.program.layers is not None:
        lines.insert(1, f"curvature\n{run.program.layers}")
    return "\n".join(lines)


def _devices(run: training.Run) -> str:
    """Returns "8 × TPU v5 lite on 2 hosts, mesh data 8 × fsdp 1 × tensor 1"."""
    devices = run.mesh.devices.flatten()
    hosts = len({device.process_index for device in devices})
    there = f" on {hosts} hosts" if hosts > 1 else ""
    mesh = " × ".join(f"{axis} {size}" for axis, size in run.mesh.shape.items())
    return f"{len(devices)} × {devices[0].device_kind}{there}, mesh {mesh}"


def compile_step(config: Any) -> None:
    """Compiles the step for ``config.topology``, prints what it takes, exits with 4 if too much."""
    devices = training.topology_devices(config.topology)
    run = training.build_run(config, devices=devices, load=data.load_or_imitate)
    estimated = training.estimate(run)
    print(_estimate_text(run, estimated))
    if not estimated.fits:
        sys.exit(4)


def _estimate_text(run: training.Run, estimated: training.Estimate) -> str:
    config = run.config
    params = sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state["params"]))
    counted = training.step_operations(run)
    capacity = "" if estimated.capacity is None else f" of {_gib(estimated.capacity)}"
    lines = [
        f"model        {params:,} parameters, {_run_name(config)}, {config.optimizer.name}",
        f"devices      {_devices(run)}",
        f"batch        {config.batch_size} {run.task.unit} in {config.accumulation_steps} parts",
        "memory of one device",
        *(f"  {kind:24}{_gib(size):>12}" for kind, size in estimated.memory.items()),
        f"  {'total':24}{_gib(estimated.total):>12}{capacity}: "
        f"{'fits' if estimated.fits else 'does not fit'}",
        f"operations   {counted.multiplications:.3e} multiplications, {counted.additions:.3e} "
        "additions a step, on all devices together",
        f"compiled     in {estimated.compile_seconds:.1f} s",
    ]
    named = {name: n for name, n in counted.uncounted.items() if not name.startswith("random_")}
    lines += [f"not counted  {named}"] * bool(named)
    if not estimated.fits:
        lines += [
            "what makes it smaller, best first:",
            *(f"  {advice}" for advice in training.advise(run, estimated)),
        ]
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"


def _draw(run: training.Run, workdir: Path, params: Any) -> list[str]:
    """Draws curves and the task's pictures; training is complete whatever becomes of them."""
    drawn = []
    figures = {"curves.png": lambda: _curves(run, workdir)}
    figures |= run.task.pictures(run.model(params), run.eval_source, _run_name(run.config))
    for name, draw in figures.items():
        try:
            report.save_figure(draw(), workdir / name)
            drawn.append(name)
        except Exception as error:
            _say(
                f"training is complete, but {name} could not be drawn: {type(error).__name__}: "
                f"{first_line(error)}"
            )
            logging.debug("%s", name, exc_info=error)
    return drawn


def _curves(run: training.Run, workdir: Path) -> Any:
    best = run.task.best
    loss = "cross-entropy (nats)" if run.task.likelihood == "categorical" else "loss"
    rows = training.read_metrics(workdir)
    return report.curves_figure(
        rows, loss=loss, score=best.name, largest=best.largest, title=_run_name(run.config)
    )


def evaluate(
    config: Any,
    workdir: str | Path,
    checkpoint: str,
    split: str = "eval",
    other_data: str = "",
    labels: str = "",
    weights: str | None = None,
) -> None:
    """Scores a checkpoint, or ``config.init_from`` where there is none, on a split of the data."""
    run = _run_of(config, workdir, eval_split=split, eval_data=other_data, eval_labels=labels)
    if weights:
        model, origin = _in_few_bits(run, workdir, weights)
        metrics = training.Evaluator(run).score(model)
    else:
        state, origin = _whole_state(run, workdir, checkpoint)
        metrics = training.Evaluator(run)(training.evaluation_params(state))
    shown = "  ".join(
        f"{name.removeprefix('eval/')} {value:.4f}" for name, value in metrics.items()
    )
    scored = (
        f"{len(run.eval_source)} {run.task.unit} of {run.eval_source.name}/{run.eval_source.split}"
    )
    _say(f"{origin}  {scored}  {shown}")


def predict(
    config: Any,
    workdir: str | Path,
    checkpoint: str,
    images: str | None,
    output: str | None,
    overlay: str | None,
    weights: str | None = None,
) -> None:
    """Prints what images show; exits with code 1 where some files could not be read."""
    if images is None:
        raise training.RunError(
            "expected --images=FILE_OR_FOLDER with --mode=predict, got none; set it"
        )
    files = predicting.files_of(images)
    run = _run_without_data(config, workdir)
    if weights:
        model, _ = _in_few_bits(run, workdir, weights)
    else:
        state, _ = _whole_state(run, workdir, checkpoint)
        model = run.model(training.fetch(training.evaluation_params(state), run.mesh))
    predictor = predicting.Predictor(run.task, model, run.eval_source)
    unread = predicting.predict_files(
        predictor, files, *(Path(place) if place else None for place in (output, overlay))
    )
    if unread:
        print(f"{unread} of {len(files)} files could not be read", file=sys.stderr)
        sys.exit(1)


# Examples of the training split that grids are chosen on.
_CALIBRATION_EXAMPLES = 64


def quantize(config: Any, workdir: str | Path, checkpoint: str, weights: str) -> None:
    """Writes a checkpoint's model in few bits beside the checkpoints, with what that loses."""
    _require_one_process("quantize")
    run, bits = _run_of(config, workdir), int(weights.removeprefix("int"))
    state = _restore(run, workdir, checkpoint)
    params = training.fetch(training.evaluation_params(state), run.mesh)
    model, split = run.model(params), f"{run.eval_source.name}/{run.eval_source.split}"
    with training.user_errors():
        few = quantized.quantize_model(model, *_calibration(run), bits=bits)
    evaluator = training.Evaluator(run)
    scores = {"checkpoint": evaluator(params), weights: evaluator.score(few)}
    inputs = run.task.example().inputs
    joules = {
        name: counting.energy(counting.count_operations(each, *inputs)).total_arithmetic_joules
        for name, each in {"checkpoint": model, weights: few}.items()
    }
    path, best = _integers(workdir, weights), f"eval/{run.task.best.name}"
    notes = {
        "step": int(state["step"]),
        "calibrated_on": f"the first {_CALIBRATION_EXAMPLES} of {run.train_source.split}",
        "split": split,
        "scores": scores,
        "arithmetic_joules": joules,
    }
    with training.user_errors():
        size = interop.save_integers(few, path, bits=bits, network=network_fields(run), notes=notes)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    _say(
        f"{split} {run.task.best.name} {scores[weights][best]:.4f}, "
        f"{scores['checkpoint'][best]:.4f} before; arithmetic "
        f"{joules[weights] / joules['checkpoint']:.2f} of its energy (45 nm), "
        f"{size / whole:.3f} of its bytes; step {notes['step']} in {path}"
    )


def _calibration(run: training.Run) -> tuple[Any, ...]:
    """What the model is called with on some training examples, as evaluation sees them."""
    batch = run.train_source.first(_CALIBRATION_EXAMPLES)
    if run.train_source.record_shapes.keys() == run.eval_source.record_shapes.keys():
        return run.task.inputs(batch)
    # Records that are for training alone, as words with one of their pronunciations.
    return run.task.arguments(run.task.examples(jax.random.key(0), batch))


def export_c(config: Any, workdir: str | Path, weights: str) -> None:
    """Writes what ``--mode=quantize`` wrote as a program in C under ``<workdir>/c``."""
    run = _run_without_data(config, workdir)
    model, origin = _in_few_bits(run, workdir, weights)
    facts, folder = run.task.data_facts, Path(workdir) / "c"
    statistics = {name: getattr(facts, name, (0.0,)) for name in ("mean", "std")}
    with training.user_errors():  # a model of anything but images is told there
        interop.save_c(model, folder, **statistics)
    _say(f"{origin} at {folder}: cc -O3 -o classify model.c -lm; ./classify model.bin < IMAGES")


def _in_few_bits(run: training.Run, workdir: str | Path, weights: str) -> tuple[nnx.Module, str]:
    """Returns what ``--mode=quantize`` wrote, and in words what it is."""
    like = run.model(jax.eval_shape(training.evaluation_params, run.abstract_state))
    with training.user_errors():
        model, header = interop.load_integers(
            like, _integers(workdir, weights), network=network_fields(run)
        )
    return model, f"step {header['notes']['step']} in {header['bits']} bits"


def _integers(workdir: str | Path, weights: str) -> Path:
    return Path(workdir) / f"{weights}.safetensors"


def network_fields(run: training.Run) -> dict[str, Any]:
    """Returns the fields of a configuration that tell a network and how images are made for it."""
    fields = training.fingerprint(run.config)
    told = ("model.", "data.mean", "data.std", "data.image_size")
    return {name: value for name, value in fields.items() if name.startswith(told)}


def _require_one_process(mode: str) -> None:
    if (count := jax.process_count()) > 1:
        raise training.RunError(
            f"expected one process to {mode} a checkpoint, got {count}; start one"
        )


def export(config: Any, workdir: str | Path, checkpoint: str, names: str) -> None:
    """Writes the weights of a checkpoint, or its model, under ``<workdir>/<names>``."""
    run = _run_of(config, workdir)
    if names in _WHOLE and not isinstance(run.task, tasks.Classification):
        raise training.RunError(
            f"expected a run of config.task.name=classification for --names={names}, got "
            f"{run.settings.task.name}; export its weights with --names=adder_flax"
        )
    state = _restore(run, workdir, checkpoint)
    model = run.model(training.fetch(training.evaluation_params(state), run.mesh))
    path = Path(workdir) / {"onnx": "model.onnx", "web": "web.html"}.get(
        names, names if names in _WHOLE else f"{names}.safetensors"
    )
    if names in _WHOLE:
        write = _WHOLE[names](run, model, path, int(state["step"]))
    else:
        facts = run.task.data_facts
        statistics = (facts.mean, facts.std) if hasattr(facts, "mean") else None
        write = functools.partial(
            interop.save_weights, model, path, names=names, statistics=statistics
        )
    if jax.process_index() == 0:
        with training.user_errors():
            write()
    _say(f"{'model' if names in _WHOLE else 'weights'} of step {int(state['step'])} at {path}")


def _program_writer(
    save: Callable[..., None], run: training.Run, model: Any, path: Path, step: int
) -> Callable[[], None]:
    source = data.require_kind(data.ImageSource, run.eval_source, "a program")
    return functools.partial(
        save,
        lambda images: model(*run.task.inputs({"image": images})),
        path,
        image_shape=source.image_shape,
        label_names=source.label_names,
        notes={
            "images": _preparation(source),
            "run": {"name": _run_name(run.config), "seed": run.config.seed, "step": step},
        },
    )


def _preparation(source: data.ImageSource) -> str:
    """What becomes of an image before a program takes it."""
    if (shorter := _shorter_side(source)) is None:
        return "the whole image, resized"
    return f"the shorter side resized to {shorter} pixels, then the middle"


def _shorter_side(source: data.ImageSource) -> int | None:
    """What an image's becomes before its middle is taken, as ``--mode=predict`` does; None where it
    is resized whole.
    """
    height, width, _ = source.image_shape
    return data.resized_side(height, source.eval_crop_ratio) if height == width else None


_LOAD_FOLDER = """\
from transformers import AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained("{folder}").eval()"""


def _folder_writer(run: training.Run, model: Any, path: Path, step: int) -> Callable[[], None]:
    """What writes a folder for Hugging Face, scores of the evaluation split in its card."""
    source = data.require_kind(data.ImageSource, run.eval_source, "a model card")
    facts = run.task.data_facts
    measured = training.Evaluator(run)(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    operations = counting.count_operations(model, *run.task.example().inputs)
    card = interop.model_card(
        _run_name(run.config),
        data=f"{source.name}/{source.split}, {len(source)} {run.task.unit}",
        measured={name.removeprefix("eval/"): value for name, value in measured.items()},
        facts={
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))),
            "multiplications of an image": f"{operations.multiplications:.4g}",
            "additions of an image": f"{operations.additions:.4g}",
            "seed, step": f"{run.config.seed}, {step}",
            "trained on": f"{run.train_source.name}/{run.train_source.split}, "
            f"{len(run.train_source)} {run.task.unit}",
            "task": run.settings.task.name,
        },
        usage=_LOAD_FOLDER.format(folder=path.name),
        distilled=getattr(model, "head_dist", None) is not None,
    )
    return functools.partial(
        interop.save_folder,
        model,
        path,
        label_names=source.label_names,
        mean=facts.mean,
        std=facts.std,
        crop_ratio=source.eval_crop_ratio,
        card=card,
    )


def _page_writer(run: training.Run, model: Any, path: Path, step: int) -> Callable[[], None]:
    """What writes a page for a browser: a checkpoint, and what is there of it in few bits."""
    source = data.require_kind(data.ImageSource, run.eval_source, "a page")
    networks, facts = {"float32": model}, run.task.data_facts
    for file in sorted(path.parent.glob("int?.safetensors"), reverse=True):
        with training.user_errors():
            few, header = interop.load_integers(model, file, network=network_fields(run))
        if header["notes"]["step"] == step:
            networks[f"{header['bits']} bits"] = few
    batch, names = source.first(_PAGE_EXAMPLES), source.label_names
    # The first of each class, as later keys replace earlier ones.
    first = dict(zip(batch["label"][::-1].tolist(), batch["image"][::-1], strict=True))
    return functools.partial(
        interop.save_web,
        networks,
        path,
        title=_run_name(run.config),
        mean=facts.mean,
        std=facts.std,
        label_names=names,
        examples={names[label]: first[label] for label in sorted(first)[:10]},
        resized=_shorter_side(source),
    )


# Images of the evaluation split among which a page looks for one of each class.
_PAGE_EXAMPLES = 200


# What writes a whole model and not its weights alone.
_WHOLE = {
    "stablehlo": functools.partial(_program_writer, interop.save_program),
    "onnx": functools.partial(_program_writer, interop.save_onnx),
    "hugging_face_folder": _folder_writer,
    "web": _page_writer,
}


def analyze(
    config: Any,
    workdir: str | Path,
    checkpoint: str,
    baseline: str | Path | None = None,
    weights: str | None = None,
) -> None:
    """Measures the papers' claims on a checkpoint, beside a baseline, and writes a report."""
    _require_one_process("analyze")
    other = None if baseline is None else _baseline(config, baseline)
    trained = _restore_to_study(config, workdir, checkpoint)
    if weights:
        few, _ = _in_few_bits(trained.run, workdir, weights)
        trained = trained._replace(name=f"{trained.name}, {weights}", few=few)
    study = report.STUDIES.get(trained.run.settings.task.name)(trained, other)
    name = f"report-{weights}" if weights else "report"
    written = report.write_study(study, Path(workdir) / name)
    print(*(f"{claim.name}: {claim.verdict}" for claim in written.claims), sep="\n")
    print(f"report at {written.page}")


def _baseline(config: Any, workdir: str | Path) -> report.Trained:
    other = training.read_config(workdir)
    settings.read(settings.RunSettings, other, where="baseline")
    if (other.data.name, other.data.image_size) != (config.data.name, config.data.image_size):
        raise training.RunError(
            f"expected a baseline on {config.data.name} at {config.data.image_size} pixels, got "
            f"{other.data.name} at {other.data.image_size}; set --baseline to a run on the same "
            "data"
        )
    return _restore_to_study(other, workdir, "last")


def _restore_to_study(config: Any, workdir: str | Path, checkpoint: str) -> report.Trained:
    config = training.with_statistics(config, workdir)
    run = training.build_run(config)
    if config.init_from:
        run, *_ = _start_from(run)
    with training.user_errors():
        report.STUDIES.get(run.settings.task.name)
        report.require_probabilities(
            run.model(run.abstract_state["params"]), *run.task.example().inputs
        )
    return report.Trained(_run_name(config), run, _restore(run, workdir, checkpoint))


def _restore(run: training.Run, workdir: str | Path, checkpoint: str) -> Any:
    if checkpoint not in ("last", "best") and not (checkpoint.isascii() and checkpoint.isdecimal()):
        raise training.RunError(
            f"expected --checkpoint to be last, best or a step, got {checkpoint!r}"
        )
    directory = training.open_workdir(workdir, run.config) / "checkpoints"
    checkpoints = training.SavedCheckpoints(directory, of=training.fingerprint(run.config))
    return checkpoints.restore(
        run.abstract_state, int(checkpoint) if checkpoint.isdecimal() else checkpoint
    )


def _run_name(config: Any) -> str:
    score = [f"{config.model.score} attention"] if "score" in config.model else []
    return ", ".join([config.data.name, *score])


def default_workdir(experiment: str, overrides: Mapping[str, Any]) -> str:
    """Returns a directory's name that tells different runs apart.

    It is ``runs/<experiment>[-<data>][,<field>=<value>…]``.

      >>> default_workdir(
      ...     "experiments/adder_deit_tiny.py:cifar10", {"optimizer.name": "sgd", "seed": 1}
      ... )
      'runs/adder_deit_tiny-cifar10,optimizer.name=sgd,seed=1'
      >>> default_workdir("results/g2p/records.jsonl.xz#dot-final-0-711fbcaa2c4b", {})
      'runs/g2p-dot-final-0-711fbcaa2c4b'
    """
    path, _, data = experiment.partition(":")
    if packed.NAME in path:  # a run by its own name, a comparison by that of its folder
        path, _, data = Path(path).absolute().parent.name, "", path.partition("#")[2]
    settings = [f"{field}={_slug(value)}" for field, value in sorted(overrides.items())]
    return "runs/" + ",".join([Path(path).stem + (f"-{data}" if data else ""), *settings])


def _slug(value: Any) -> str:
    return re.sub(r"[^\w.+-]+", "_", str(value)).strip("_")
