"""What is left of the teacher in healed transformers.

Accuracy, share of its compute, and what each part carries.

Command: python -m adder_flax.experiments.healed runs/heal_attention,seed=0 runs/heal_all,seed=0
"""

import argparse
from pathlib import Path

from adder_flax import report, training
from adder_flax.app.ends import messages
from adder_flax.compare.cells import facts


def main() -> None:
    """Prints a table for every run and writes its numbers to ``<run>/bypass.json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", help="directories of runs of the task healing")
    parser.add_argument(
        "--blocks",
        choices=("each", "all"),
        default="each",
        help="what is turned off: parts of each block too, or of all together alone, which takes "
        "a seventh of the time for six blocks",
    )
    options = parser.parse_args()
    with messages():
        for workdir in options.runs:
            print(workdir)
            print(describe(Path(workdir), each_block=options.blocks == "each"), flush=True)


def describe(workdir: Path, *, each_block: bool) -> str:
    """Returns the figures of one run."""
    run, params = _trained(workdir)
    teacher, teacher_params = _trained(
        Path(run.settings.task.teacher.replace("{seed}", str(run.settings.seed)))
    )
    own, taught = _accuracy(run)(params), _accuracy(teacher)(teacher_params)
    compute = run.num_steps * facts(run)["step_operations"]
    compute /= teacher.num_steps * facts(teacher)["step_operations"]
    rows = report.bypass(run.model(params), _accuracy(run), each_block=each_block)
    report.write_bypass(rows, own, workdir / "bypass.json")
    energy = facts(run)["joules"] / facts(teacher)["joules"]
    lines = [
        f"teacher {taught:.4f}, healed {own:.4f}: {own / taught:.1%} of it",
        f"operations of its training {compute:.2%} of the teacher's",
        f"energy of one image {energy:.1%} of the teacher's (45 nm, arithmetic alone)",
        report.bypass_text(rows, own),
    ]
    return "\n".join(lines)


def _trained(workdir: Path):
    """Returns a run and the parameters of its last checkpoint."""
    config = training.read_config(workdir)
    run = training.build_run(config)
    saved = training.SavedCheckpoints(workdir / "checkpoints", of=training.fingerprint(config))
    return run, training.fetch(
        training.evaluation_params(saved.restore(run.abstract_state)), run.mesh
    )


def _accuracy(run: training.Run):
    evaluate = training.Evaluator(run)
    return lambda params: evaluate(params)["eval/accuracy"]


if __name__ == "__main__":
    main()
