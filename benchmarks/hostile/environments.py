"""Whole processes of ``main.py`` in environments that do not fit: files, variables, directories,
terminals, limits."""

import builtins
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.hostile.case import Case, Fault, Group, Observed, Verdict, judge_process

EXPERIMENT = "--config=experiments/adder_deit_tiny.py"
SMALL = (
    *(
        "--config.model.width=16",
        "--config.model.depth=1",
        "--config.model.num_heads=2",
        "--config.batch_size=32",
    ),
    *("--config.num_epochs=0.04", "--config.optimizer.warmup_epochs=0.0"),  # 2 steps
)
NOTHING = "nothing is written before the message"

_FILE = Fault("an experiment file that makes no configuration", NOTHING)
_VARIABLE = Fault("an environment variable that a library does not understand", NOTHING)
_HARMLESS = Fault(
    "no home, no cache, no folder for temporary files, an odd terminal", "the run, without a cache"
)
_WORKDIR = Fault("a --workdir that can be none", NOTHING)
_OUTPUT = Fault("output that nobody takes", "checkpoints and metrics so far")
_FLAG = Fault("flags that mean nothing", NOTHING)
_LIMIT = Fault(
    "limits of memory, files or processes that are too small", "checkpoints and metrics so far"
)


def _trains(output: str) -> bool:
    return "test accuracy" in output


def _main(*flags: str | Path, **options) -> Observed:
    return judge_process(["main.py", *flags], timeout=300, **options)


def _in_folder(attack: Callable[[Path], Observed]) -> Callable[[], Observed]:
    """Gives an attack an empty folder."""

    def run() -> Observed:
        with tempfile.TemporaryDirectory(prefix="hostile") as folder:
            try:
                return attack(Path(folder))
            finally:
                subprocess.run(
                    ["chmod", "-R", "u+rwx", folder], check=False, stderr=subprocess.DEVNULL
                )

    return run


def _experiment_files(draw: random.Random) -> Iterator[tuple[Fault, str, Callable[[], Observed]]]:
    """Draws files whose Python fails, and things that are no files of Python."""
    errors = [
        name
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    good = (
        "from adder_flax.experiments import common\ndef get_config(): return common.deit('adder', "
        "'tiny')\n"
    )
    sources = {
        f"raises {name}": f"raise {name}('on purpose')"
        for name in draw.sample(
            [e for e in errors if not e.startswith(("Unicode", "ExceptionG"))], 8
        )
    }
    cut = draw.randrange(20, len(good) - 12)
    sources |= {
        f"cut after {cut} characters": good[:cut] + "(",
        f"a {(bracket := draw.choice('([{'))} too many": good + bracket,
        "leaves with 0": "import sys; sys.exit(0)",
        "leaves with a text": "import sys; sys.exit('bye')",
        "leaves in get_config": "def get_config(): raise SystemExit",
        "interrupts itself": "def get_config(): raise KeyboardInterrupt",
        "empty": "",
        "get_config is a number": "get_config = 3",
        "returns None": "def get_config(): pass",
        "returns a dict": "def get_config(): return {'seed': 0}",
        "an empty configuration": "import ml_collections\nget_config = ml_collections.ConfigDict",
        "lacks fields": good.replace("return common", "c = common").replace("\n", "\n", 1) + "",
        "takes two arguments": "def get_config(a, b): return a",
        "takes none, is given one": good,
        "recursion": "def get_config(): return get_config()",
        "imports what is missing": "import no_such_library_at_all",
        "tabs and spaces": "if True:\n\tx = 1\n        y = 2\n",
        "a name that is not defined": "get_config = lambda: undefined_name",
        "a generator": "def get_config(): yield 1",
        "a class that raises": "class get_config:\n  def __init__(self): self.x = 1 / 0",
        "prints control characters": "raise ValueError('\\x1b[31m\\x00' * 100)",
        "a message of a megabyte": "raise ValueError('x' * 2**20)",
        "asserts": "assert 1 == 2",
    }
    good_lacking = (
        "from adder_flax.experiments import common\ndef get_config():\n  c = common.deit('adder', "
        "'tiny')\n"
    )
    field = draw.choice(
        ["seed", "model", "optimizer", "data", "task", "mesh", "batch_size", "num_epochs"]
    )
    sources["lacks fields"] = f"{good_lacking}  del c.{field}\n  return c\n"
    for name, source in sources.items():
        argument = ":digits" if "given one" in name else ""

        def attack(folder: Path, source=source, argument=argument) -> Observed:
            file = folder / "experiment.py"
            file.write_text(source)
            return _main(f"--config={file}{argument}", f"--workdir={folder / 'run'}")

        yield _FILE, name, _in_folder(attack)

    def binary(folder: Path) -> None:
        (folder / "x.py").write_bytes(draw.randbytes(4096))

    makers = {
        "random bytes": binary,
        "not UTF-8": lambda folder: (folder / "x.py").write_bytes(b"x = '\xff\xfe'\n"),
        "null bytes": lambda folder: (folder / "x.py").write_bytes(b"x = 1\0\n"),
        "a folder": lambda folder: (folder / "x.py").mkdir(),
        "a FIFO": lambda folder: os.mkfifo(folder / "x.py"),
        "a dangling link": lambda folder: (folder / "x.py").symlink_to(folder / "none"),
        "a link to itself": lambda folder: (folder / "x.py").symlink_to(folder / "x.py"),
        "a name of 300 characters": lambda folder: None,
        "a device": lambda folder: (folder / "x.py").symlink_to("/dev/zero"),
    }
    for name, make in makers.items():

        def attack(folder: Path, name=name, make=make) -> Observed:
            make(folder)
            file = folder / ("y" * 300 if "300" in name else "x.py")
            return _main(f"--config={file}", f"--workdir={folder / 'run'}")

        yield _FILE, name, _in_folder(attack)


def _variables(draw: random.Random) -> Iterator[tuple[Fault, str, Callable[[], Observed]]]:
    word = "".join(draw.choices("abcdefghij", k=6))
    step = {
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    cases = {
        "JAX_PLATFORMS a word": {"JAX_PLATFORMS": word},
        "JAX_PLATFORMS cuda": {"JAX_PLATFORMS": "cuda"},
        "JAX_PLATFORMS tpu,cpu": {"JAX_PLATFORMS": f"{word},cpu"},
        "ADDER_FLAX_BACKEND a word": {"ADDER_FLAX_BACKEND": word},
        "ADDER_FLAX_BACKEND of a TPU": {"ADDER_FLAX_BACKEND": "pallas_tpu", "JAX_PLATFORMS": "cpu"},
        "XLA_FLAGS an unknown flag": {"XLA_FLAGS": f"--{word}=1"},
        "XLA_FLAGS a bad value": {"XLA_FLAGS": f"--xla_force_host_platform_device_count={word}"},
        "XLA_FLAGS a word": {"XLA_FLAGS": word},
        "SLURM_NTASKS a word": step | {"SLURM_NTASKS": word},
        "SLURM_NTASKS negative": step | {"SLURM_NTASKS": str(-draw.randrange(1, 9))},
        "SLURM_PROCID a word": step | {"SLURM_NTASKS": "2", "SLURM_PROCID": word},
        "SLURM without a job": {"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "2"},
        "JAX_PROCESS_ID alone": {"JAX_PROCESS_ID": "0"},
        "JAX_PROCESS_ID too large": {
            "JAX_COORDINATOR_ADDRESS": "localhost:1",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(draw.randrange(2, 99)),
        },
        "JAX_NUM_PROCESSES a word": {
            "JAX_COORDINATOR_ADDRESS": "localhost:1",
            "JAX_NUM_PROCESSES": word,
            "JAX_PROCESS_ID": "0",
        },
        "JAX_COORDINATOR_ADDRESS without a port": {
            "JAX_COORDINATOR_ADDRESS": word,
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": "0",
        },
        "JAX_ENABLE_X64 a word": {"JAX_ENABLE_X64": word},
        "JAX_DEFAULT_MATMUL_PRECISION a word": {"JAX_DEFAULT_MATMUL_PRECISION": word},
    }
    for name, env in cases.items():
        yield (
            _VARIABLE,
            name,
            _in_folder(
                lambda folder, env=env: _main(
                    EXPERIMENT, *SMALL, f"--workdir={folder / 'run'}", env=env
                )
            ),
        )


def _harmless(draw: random.Random) -> Iterator[tuple[Fault, str, Callable[[], Observed]]]:
    cases = {
        "HOME unset": {"HOME": ""},
        "HOME not there": {"HOME": "/no/such/home"},
        "XDG_CACHE_HOME relative": {"XDG_CACHE_HOME": "cache"},
        "XDG_CACHE_HOME a file": {"XDG_CACHE_HOME": "/etc/passwd"},
        "TMPDIR not there": {"TMPDIR": "/no/such/folder"},
        "JAX_COMPILATION_CACHE_DIR a file": {"JAX_COMPILATION_CACHE_DIR": "/etc/passwd"},
        "JAX_COMPILATION_CACHE_DIR on /proc": {"JAX_COMPILATION_CACHE_DIR": "/proc/cache"},
        "an ASCII terminal": {
            "LANG": "C",
            "LC_ALL": "C",
            "PYTHONIOENCODING": "ascii",
            "PYTHONUTF8": "0",
        },
        "a Latin-1 terminal": {"PYTHONIOENCODING": "latin-1"},
        "COLUMNS odd": {"COLUMNS": draw.choice(["0", "-3", "x", "1", "99999999"]), "LINES": "x"},
        "OMP_NUM_THREADS odd": {"OMP_NUM_THREADS": draw.choice(["-1", "x", "0"])},
        "MPLBACKEND odd": {"MPLBACKEND": "nothing"},
        "PYTHONWARNINGS odd": {"PYTHONWARNINGS": "nonsense::", "TERM": "dumb"},
    }
    for name, env in cases.items():

        def attack(folder: Path, env=env) -> Observed:
            return _main(
                EXPERIMENT, *SMALL, f"--workdir={folder / 'run'}", env=env, is_right=_trains
            )

        yield _HARMLESS, name, _in_folder(attack)


def _workdirs(draw: random.Random) -> Iterator[tuple[Fault, str, Callable[[], Observed]]]:
    def dangling(folder: Path) -> Path:
        (folder / "link").symlink_to(folder / "none" / "there")
        return folder / "link"

    def loop(folder: Path) -> Path:
        (folder / "link").symlink_to(folder / "link")
        return folder / "link"

    def file(folder: Path) -> Path:
        (folder / "file").write_text("")
        return folder / "file"

    cases = {
        "a long name": lambda folder: folder / ("a" * draw.randrange(256, 400)),
        "a long path": lambda folder: folder.joinpath(*["b" * 200] * 25),
        "not UTF-8": lambda folder: os.fsencode(folder) + b"/\xff\xfe",
        "a file": file,
        "below a file": lambda folder: file(folder) / "run",
        "below a dangling link": lambda folder: dangling(folder) / "run",
        "a link to itself": loop,
        "of a bucket": lambda folder: "gs://bucket/run",
        "on /proc": lambda folder: Path("/proc/no/run"),
        "a device": lambda folder: Path("/dev/null"),
    }
    for name, make in cases.items():

        def attack(folder: Path, make=make) -> Observed:
            workdir = os.fsdecode(make(folder))
            return _main(EXPERIMENT, *SMALL, f"--workdir={workdir}")

        yield _WORKDIR, name, _in_folder(attack)


def _shell(command: str, folder: Path, **options) -> Observed:
    """Runs a command line; $MAIN stands for the small run."""
    flags = " ".join([EXPERIMENT, *SMALL, f"--workdir={folder / 'run'}"])
    code = "import os, sys; os.execvp('bash', ['bash', '-c', sys.argv[1]])"
    line = command.replace("$MAIN", f"$PYTHON main.py {flags}")
    return judge_process(["-c", code, line], timeout=300, env={"PYTHON": sys.executable}, **options)


def _outputs(draw: random.Random) -> Iterator[tuple[Fault, str, Callable[[], Observed]]]:
    lines = draw.randrange(1, 12)
    cases = {
        f"| head -{lines}": (
            f"$MAIN | head -{lines}; exit ${{PIPESTATUS[0]}}",
            (141,),
            lambda out: True,
        ),
        "| true": ("$MAIN | true; exit ${PIPESTATUS[0]}", (141,), lambda out: True),
        "> /dev/full": ("$MAIN > /dev/full", (), None),
        "> /dev/full, compile": ("$MAIN --mode=compile > /dev/full", (), None),
        "no output": ("$MAIN >&-", (0,), lambda out: True),
        "no output nor errors": ("$MAIN >&- 2>&-", (0,), lambda out: True),
        "no input": ("$MAIN <&-", (0,), _trains),
        "no errors": ("$MAIN 2>&-", (0,), _trains),
    }
    for name, (command, codes, is_right) in cases.items():

        def attack(folder: Path, command=command, codes=codes, is_right=is_right) -> Observed:
            return _shell(command, folder, exit_codes=codes, is_right=is_right)

        yield _OUTPUT, name, _in_folder(attack)


def _flags(draw: random.Random) -> Iterator[tuple[Fault, str, Callable[[], Observed]]]:
    word = "".join(draw.choices("klmnopqrst", k=5))
    cases = {
        "mode": [f"--mode={word}"],
        "checkpoint": ["--mode=eval", f"--checkpoint={word}"],
        "names": ["--mode=export", f"--names={word}"],
        "baseline": ["--mode=analyze", f"--baseline=/no/{word}"],
        "unknown": [f"--{word}=1"],
        "a word": [word],
        "cluster": [f"--cluster={word}"],
        "topology": ["--mode=compile", f"--config.topology={word}"],
        "topology cpu:": ["--mode=compile", "--config.topology=cpu:-3"],
        "unknown field": [f"--config.{word}=1"],
        "unknown field of a field": [f"--config.model.{word}=1"],
        "field of a number": [f"--config.seed.{word}=1"],
        "whole group": ["--config.model=3"],
        "verbosity": [f"--verbosity={word}"],
        "flagfile": [f"--flagfile=/no/{word}"],
        "flagfile of bytes": ["--flagfile=/proc/self/exe"],
        "flagfile a folder": ["--flagfile=."],
        "checkpoint with train": ["--checkpoint=best"],
        "names with eval": ["--mode=eval", "--names=timm"],
        "baseline with export": ["--mode=export", f"--baseline=/no/{word}"],
    }
    for name, flags in cases.items():

        def attack(folder: Path, flags=flags) -> Observed:
            return _main(EXPERIMENT, *SMALL, f"--workdir={folder / 'run'}", *flags)

        yield _FLAG, name, _in_folder(attack)
    yield _FLAG, "none", lambda: _main()
    yield _FLAG, "an empty --config", lambda: _main("--config=")
    yield (
        _FLAG,
        "--config twice, the last missing",
        lambda: _main(EXPERIMENT, f"--config={word}.py"),
    )


def _limits(draw: random.Random) -> Iterator[tuple[Fault, str, Callable[[], Observed]]]:
    cases = {
        "16 open files": (resource.RLIMIT_NOFILE, 16),
        "files of 1 kB": (resource.RLIMIT_FSIZE, 1024),
        "files of 20 kB": (resource.RLIMIT_FSIZE, 20480),
        "memory of 300 MB": (resource.RLIMIT_AS, 300 * 10**6),
        "memory of 1 GB": (resource.RLIMIT_AS, 10**9),
        "memory of 3 GB": (resource.RLIMIT_AS, 3 * 10**9),
    }
    for name, (kind, limit) in cases.items():

        def attack(folder: Path, kind=kind, limit=limit) -> Observed:
            def lower() -> None:
                resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))

            return _main(
                EXPERIMENT,
                *SMALL,
                f"--workdir={folder / 'run'}",
                preexec_fn=lower,
                is_right=_trains,
            )

        yield _LIMIT, name, _in_folder(attack)

    def without_proc(folder: Path) -> Observed:
        if os.geteuid():
            return Observed(Verdict.RIGHT, "skipped: only root may hide /proc")
        code = "import os, sys; os.execvp('unshare', ['unshare', '-m', 'bash', '-c', sys.argv[1]])"
        flags = " ".join([EXPERIMENT, *SMALL, f"--workdir={folder / 'run'}"])
        line = f"mount -t tmpfs tmpfs /proc && {sys.executable} main.py {flags}"
        return judge_process(["-c", code, line], timeout=300)

    yield _LIMIT, "no /proc", _in_folder(without_proc)


def _cases(seed: int, count: int) -> Iterator[Case]:
    """Yields cases of all kinds in turn, drawn anew where there are more to be than kinds of
    cases."""
    given = 0
    while given < count:
        draw = random.Random(seed + given)
        kinds = (_flags, _experiment_files, _variables, _workdirs, _outputs, _harmless, _limits)
        waiting = [list(make(draw)) for make in kinds]
        for cases in waiting:
            draw.shuffle(cases)
        while any(waiting) and given < count:
            for cases in waiting:
                if cases and given < count:
                    fault, name, run = cases.pop()
                    given += 1
                    yield Case(fault, name, run)


GROUP = Group("environments", 100, _cases)
