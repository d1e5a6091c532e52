"""Short commands for contributors.

``nox`` runs the quick check, ``nox --list`` shows all of them.
"""

from pathlib import Path

import nox

nox.options.sessions = ["lint"]
nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "venv"


@nox.session
def lint(session: nox.Session) -> None:
    """Reads every file for mistakes and form."""
    session.install("ruff>=0.8")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Reads the packages for annotations that contradict each other or the code."""
    session.install("-r", "requirements.txt", "pyright[nodejs]>=1.1.410")
    session.run("pyright")


@nox.session
def tests(session: nox.Session) -> None:
    """Runs the tests named behind --, or all: nox -s tests -- tests/ops -x."""
    session.install("-r", "requirements.txt", "-r", "requirements-test.txt")
    session.run("python", "-m", "pytest", *(session.posargs or ["-n", "2"]))


@nox.session
def program(session: nox.Session) -> None:
    """Runs exported programs where there is JAX 0.12 on Python 3.12 and nothing else."""
    session.install("-r", "requirements.txt", "-r", "requirements-test.txt")
    alone = Path(session.create_tmp(), "alone")
    session.run("python3.12", "-m", "venv", str(alone), external=True)
    python = str(alone / "bin" / "python")
    session.run(python, "-m", "pip", "install", "-q", "jax==0.12.*", "flatbuffers", external=True)
    every, where = ("-m", "slow or not slow", "-rP"), {"ADDER_FLAX_TEST_PYTHON": python}
    session.run("python", "-m", "pytest", *every, "tests/interop/test_program.py", env=where)


@nox.session
def tpus(session: nox.Session) -> None:
    """Compiles for TPUs, by libtpu without one."""
    session.install("-r", "requirements.txt", "-r", "requirements-test.txt")
    # In a folder of its own, because JAX looks for chips wherever libtpu is installed.
    folder = Path(session.create_tmp(), "libtpu")
    code = "import importlib.metadata as m; print(*(r for r in m.requires('jax') if 'libtpu' in r))"
    libtpu = session.run("python", "-c", code, silent=True).split(";")[0].strip()
    session.run("python", "-m", "pip", "install", "-q", "--no-deps", "-t", str(folder), libtpu)
    tests = ("tests/ops/test_lowering.py", "tests/training/test_estimate.py")
    chosen = ("-k", "for_tpus and v5e or counts_arguments or does_not_fit_says")
    every, where = ("-n", "2", "-m", "slow or not slow"), {"PYTHONPATH": str(folder)}
    session.run("python", "-m", "pytest", *every, *chosen, *tests, env=where)


@nox.session
def coverage(session: nox.Session) -> None:
    """Runs the tests and prints lines and branches that none of them reaches, by package."""
    session.install("-r", "requirements.txt", "-r", "requirements-test.txt", "pytest-cov>=7")
    session.run("coverage", "erase")
    session.run("python", "-m", "pytest", "-n", "2", "--cov", "--cov-report=", *session.posargs)
    session.run("python", "tests/coverage_by_package.py")


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the site into site/."""
    session.install(".[data,report]", "-r", "docs/requirements.txt")  # the notebooks run
    session.run("python", "-m", "docs.build")


@nox.session
def package(session: nox.Session) -> None:
    """Builds the wheel and the source distribution and checks what is in them."""
    session.install("build", "twine", "check-wheel-contents")
    session.run("python", "-m", "build", "--outdir", "dist")
    session.run(
        "bash",
        "-c",
        "twine check --strict dist/* && check-wheel-contents dist/*.whl",
        external=True,
    )


@nox.session
def ci(session: nox.Session) -> None:
    """Runs what every change must pass."""
    session.run(".ci/run", external=True)
