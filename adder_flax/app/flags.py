"""The flags of ``main.py`` and ``adder-flax``, and a call for each mode."""

import difflib
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from adder_flax.extras import needs

with needs("train"):
    from absl import app, flags, logging

import adder_flax
from adder_flax import experiment, settings
from adder_flax.errors import RunError

with needs("train"):
    from ml_collections import config_flags

_USAGE = """Trains and studies vision transformers.

  {command} --config=adder_deit_tiny
  {command} --workdir=runs/adder_deit_tiny
  {command} --workdir=runs/adder_deit_tiny --mode=analyze

The first trains on digits in minutes, the second goes on where it was, the
third says what was learned. Every setting is a flag:
--config.optimizer.learning_rate=1e-3. Behind a colon stands the data:
--config=deit_tiny:cifar10. Experiments:

  {names}
"""
_MODES = ["train", "eval", "analyze", "predict", "compile", "quantize", "export", "compare"]
_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "Experiment by its name, adder_deit_tiny, or its file, experiments/adder_deit_tiny.py; [:data]",
)
flags.DEFINE_string(
    "workdir", None, "Where the run is kept; by default runs/<experiment>[-<data>][,<overrides>]"
)
flags.DEFINE_enum(
    "mode",
    "train",
    _MODES,
    "train: train or resume; eval: score a checkpoint; analyze: report on it; predict: say what "
    "images show; compile: what training will take on the devices of --config.topology; quantize: "
    "write a checkpoint's adder layers and scores in few bits, see --weights; export: "
    "write the weights of a checkpoint to a safetensors file, or the model as a program; compare: "
    "run the grid of runs that the experiment file describes and write its tables",
)
flags.DEFINE_boolean(
    "cluster",
    False,
    "Let JAX look for the other processes itself, as TPU virtual machines need; srun needs no flag",
)
_NAMES = [
    *("adder_flax", "timm", "hugging_face", "transformers_5"),
    *("stablehlo", "onnx", "hugging_face_folder", "c", "web"),
]
_WEIGHTS = ["int8", "int6", "int5", "int4"]
# Flags that some modes alone read: default, these modes, what it says.
_OF_MODES = {
    "checkpoint": (
        "last",
        ("eval", "analyze", "predict", "quantize", "export"),
        "last, best or a step",
    ),
    "weights": (
        None,
        ("quantize", "eval", "analyze", "predict", "export"),
        "those of a checkpoint in so many bits, which --mode=quantize writes (int8 by default) and "
        "the others read",
    ),
    "baseline": (None, ("analyze",), "directory of another run on the same data, to compare with"),
    "split": ("eval", ("eval",), "what to score; eval is the one that training evaluates on"),
    "data": ("", ("eval",), "another data set of the same classes, as imagenet_v2 is of ImageNet"),
    "labels": (
        "",
        ("eval",),
        "JSON file with a list of all right labels for each image of the split, in the order of "
        "the images' names, as ImageNet ReaL's real.json",
    ),
    "images": (None, ("predict",), "an image, or a folder of images"),
    "predictions": (None, ("predict",), "file that gets them as lines of JSON"),
    "overlay": (None, ("predict",), "folder that gets pictures of the attention"),
    "names": (
        "adder_flax",
        ("export",),
        "whose names and layouts the weights get; stablehlo: the whole model, a program for JAX "
        "alone; onnx: for ONNX Runtime; hugging_face_folder: as AutoModelForImageClassification "
        "loads it, with a model card; c: a file of C99 and one of weights, of what --weights says; "
        "web: a page for a browser, with what --mode=quantize wrote of the checkpoint beside it",
    ),
    "workers": (
        1,
        ("compare",),
        "processes that share the runs, and the cores or GPUs, out among them; 0 writes the tables "
        "of what is finished and runs nothing",
    ),
}
for _name, (_default, _modes, _help) in _OF_MODES.items():
    _help = f"With --mode={' or '.join(_modes)}: {_help}"
    if _name == "workers":
        flags.DEFINE_integer(_name, _default, _help, lower_bound=0, upper_bound=1024)
    elif _name in ("names", "weights"):
        values = _NAMES if _name == "names" else _WEIGHTS
        flags.DEFINE_enum(_name, _default, values, _help)
    else:
        flags.DEFINE_string(_name, _default, _help)


flags.DEFINE_boolean("version", False, "Print the version and end")


def run(start_time: float) -> None:
    """Reads the flags of this process, which began at ``start_time``, and runs their mode."""
    if "--version" in sys.argv[1:]:
        print(f"adder_flax {adder_flax.__version__}")
        return
    # Absl shows it as help, with the flags of the program's own file.
    if any(argument.lstrip("-").startswith("help") for argument in sys.argv[1:]):
        sys.modules["__main__"].__doc__ = _usage(sys.argv[0])  # which reads all experiments
    for flag in flags.FLAGS.get_flags_for_module(__name__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    flags.mark_flag_as_required("config")
    app.run(lambda argv: _run_mode(argv, start_time), flags_parser=_parse_flags)


def _usage(program: str) -> str:
    command = "python main.py" if program.endswith(".py") else "adder-flax"
    names = textwrap.wrap(
        ", ".join(experiment.experiment_names()), 78, break_long_words=False, break_on_hyphens=False
    )
    return _USAGE.format(command=command, names="\n  ".join(names))


def _run_mode(argv: list[str], start_time: float) -> None:
    if len(argv) > 1:
        raise RunError(f"expected flags only, got {argv[1:]}; overrides read --config.field=value")
    given = flags.FLAGS
    for name, (_, modes, _) in _OF_MODES.items():
        if given[name].present and given.mode not in modes:
            raise RunError(
                f"expected --{name} with --mode={' or '.join(modes)} only, got {given.mode}; "
                "leave it out"
            )
    in_few_bits = given.weights or (given.mode == "export" and given.names == "c")
    if in_few_bits and given.mode != "quantize" and given["checkpoint"].present:
        raise RunError(
            "expected no --checkpoint for weights in few bits, which are of the one that "
            f"--mode=quantize took, got {given.checkpoint}; leave it out"
        )
    if given.weights and given.mode == "export" and given.names != "c":
        raise RunError(f"expected --weights with --names=c only, got {given.names}; leave it out")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # libraries report every small step at INFO
    # Imported here so that --help and mistyped flags answer at once.
    if given.mode == "train":
        from adder_flax import ops

        # The other modes find kernels in the cache, or compile for another machine.
        ops.build_in_background()
    from adder_flax import training
    from adder_flax.app import modes

    flag = flags.FLAGS["config"]
    workdir = modes.check_workdir(
        given.workdir
        or modes.default_workdir(
            config_flags.get_config_filename(flag), config_flags.get_override_values(flag)
        )
    )
    modes.enable_compilation_cache()
    modes.check_backend(here=given.mode != "compile")
    training.connect(detect=given.cluster)
    with training.peer_errors():
        _call_mode(workdir, start_time)


def _call_mode(workdir: str, start_time: float) -> None:
    from adder_flax.app import modes

    config, given = _CONFIG.value, flags.FLAGS
    match given.mode:
        case "train":
            modes.train(config, workdir, start_time=start_time)
        case "eval":
            of_what = given.split, given.data, given.labels
            modes.evaluate(config, workdir, given.checkpoint, *of_what, weights=given.weights)
        case "analyze":
            modes.analyze(config, workdir, given.checkpoint, given.baseline, given.weights)
        case "predict":
            places = given.images, given.predictions, given.overlay
            modes.predict(config, workdir, given.checkpoint, *places, weights=given.weights)
        case "compile":
            modes.compile_step(config)
        case "quantize":
            modes.quantize(config, workdir, given.checkpoint, given.weights or "int8")
        case "export":
            if given.names == "c":
                modes.export_c(config, workdir, given.weights or "int8")
            else:
                modes.export(config, workdir, given.checkpoint, given.names)
        case "compare":
            # With SciPy's statistics, half a second that no other mode has to wait for.
            from adder_flax.compare import mode

            mode.run(config, workdir, given.workers)


class _ExperimentParser(flags.ArgumentParser):
    """Reads ``--config``."""

    def parse(self, path: str):
        config = experiment.load_experiment(path)
        config.lock()
        return config


def _parse_flags(argv: list[str]) -> list[str]:
    flags.FLAGS["config"].parser = _ExperimentParser()
    try:
        rest = flags.FLAGS(_with_the_run_s_own(argv))
        if _CONFIG.value is not None:
            settings.read(_read_as(), _CONFIG.value)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        words = str(error)
        # All that ml_collections says of --config.<unknown field>.
        if unknown := re.match(r"\W*'(\w+)\\?'", words):
            raise RunError(_unknown_field(unknown[1], argv)) from error
        if "expected" not in words:
            words = f"expected flags as --help lists them, got: {error}"
        raise RunError(_misfit(str(error)) or words) from error
    return rest


def _with_the_run_s_own(argv: list[str]) -> list[str]:
    """Returns the flags with the configuration that a run left in --workdir, if none is given."""
    found = re.search(r"^--?workdir[=\n](.+)", "\n".join(argv[1:]), re.MULTILINE)
    left = Path(found[1]).expanduser() / "config.json" if found else Path()
    if any(re.match(r"--?config(=|$)", flag) for flag in argv) or not left.is_file():
        return argv
    return [argv[0], f"--config={left}", *argv[1:]]


def _misfit(error: str) -> str | None:
    """Returns what a field takes in place of what one of the flags gave it, if that is amiss."""
    if "--config=None" in error:
        return (
            "expected --config=<experiment>, or --workdir=<of a run that has begun>, got neither; "
            "begin with --config=adder_deit_tiny, or see --help"
        )
    found = re.match(r"flag --config\.([\w.]+)=(.*?): ", error)
    kinds = (settings.RunSettings, settings.CompareSettings)
    return found and next(filter(None, (settings.misfit(k, *found.groups()) for k in kinds)), None)


def _read_as() -> type:
    """Returns what the configuration has to be for the mode."""
    of_runs = "base" in _CONFIG.value
    if of_runs != (flags.FLAGS.mode == "compare"):
        what, other = ("a grid of runs", "compare") if of_runs else ("a run", "train")
        raise RunError(
            f"expected --mode={other} for the configuration of {what}, got {flags.FLAGS.mode}; set "
            "--mode, or --config"
        )
    return settings.CompareSettings if of_runs else settings.RunSettings


def _unknown_field(part: str, argv: Sequence[str]) -> str:
    """Returns what to write in place of the flag in which a part of a path names no field."""
    paths = (m[1] for flag in argv if (m := re.match(r"--?config\.([\w.]+)", flag)))
    given = next((path for path in paths if part in path.split(".")), part)
    of_runs, of_grids = (
        [path for path, _ in settings.declarations(kind)]
        for kind in (settings.RunSettings, settings.CompareSettings)
    )
    if given in of_runs:  # which the configuration of a run has
        near = [f"base.{given}"]
    else:
        parts = {part for path in of_grids for part in path.split(".")}
        near = difflib.get_close_matches(given, [*of_runs, *of_grids, *sorted(parts)], n=1)
    fix = f"did you mean {near[0]!r}" if near else "see docs/settings.md for all of them"
    return f"expected --config.<field> to name a field of the configuration, got {given!r}; {fix}"
