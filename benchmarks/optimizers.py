"""Steps, seconds and gradient-equivalents to a training loss: CG-FAC against AdamW, Muon, SOAP and
kfac-jax.

    python -m benchmarks.optimizers  # everything, about two hours on 2 cores
    python -m benchmarks.optimizers --quick  # a check that it runs, minutes
    python -m benchmarks.optimizers --problems=autoencoder --optimizers=adamw,cg_fac
    python -m benchmarks.optimizers --out=results.json --max-seconds=120  # a part; repeat it

Problems, all on scikit-learn's digits (1536 for training), batches of 256: the autoencoder
64-48-24-8-24-48-64 under binary cross-entropy; a two-block vision transformer of width 32 under
cross-entropy, multiplicative; and the same with adder attention and adder layers. Dense weights and
position embeddings start at the scale of their fan-in: at width 32 DeiT's N(0, 0.02²) is a plateau
that every optimizer must leave first, as ``--problems=deit_start`` shows, which is not run
otherwise. Losses are those of the whole training set.

Every optimizer is tuned over a grid of six settings on one seed, by steps to the hardest target it
reaches, and then run with other seeds. Seconds are those of the steps alone, no compilation and no
evaluation: steps times the duration of one, which is measured at the end for all optimizers in
turn, so that a busy machine slows all alike (``--time`` measures again). A gradient-equivalent is
the arithmetic of one gradient. Peers that are not installed are left blank: SOAP (``soap_jax``) and
kfac-jax (``kfac_jax``, whose release 0.0.8 does not run on JAX 0.10 while its repository's head
does). One that cannot train a network shows its error.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import kfac
from adder_flax.attention import LAYER_NORM_EPSILON
from adder_flax.counting import count_operations
from adder_flax.experiments import common
from adder_flax.layers import Linear, image_to_patches
from adder_flax.models import VisionTransformer
from benchmarks.timing import measure

NUM_TRAIN = 1536
BATCH_SIZE = 256
EVAL_EVERY_STEPS = 5
# Steps timed at once, a multiple of every interval in the grids; and how often.
TURN, TURNS = (10, 15)
TIMING_SECONDS = 120.0
TUNING_SEED = 100
AUTOENCODER = (64, 48, 24, 8, 24, 48, 64)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something to minimise.

    Attributes:
      name: for the table.
      likelihood: of the outputs, for curvature.
      targets: training losses to reach, the hardest last.
      num_steps: of one run.
      init: seed → parameters.
      loss_fn: (params, x, labels) → (mean loss, outputs).
      data: x and labels of the whole training set.
      kfac_jax_loss_fn: the same in a form whose layers kfac-jax finds; None where there is none.
      cg_iterations: of CG-FAC. Inverses precondition adder layers by a mean over their outputs, so
        that more is left to CG there.
    """

    name: str
    likelihood: str
    targets: tuple[float, ...]
    num_steps: int
    init: Callable[[int], Any]
    loss_fn: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    data: tuple[jax.Array, jax.Array]
    kfac_jax_loss_fn: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = (
        None
    )
    cg_iterations: int = 3


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images in [0, 1] and labels of the training set."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))[:NUM_TRAIN]
    return (images[order] / 16).astype(np.float32), labels[order]


def autoencoder() -> Problem:
    """The digits autoencoder, tanh units, linear code."""
    images, labels = digits()
    code = len(AUTOENCODER) // 2 - 1

    def init(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        layers = {}
        for i, (rows, columns) in enumerate(itertools.pairwise(AUTOENCODER)):
            kernel = rng.normal(size=(rows, columns)) / rows**0.5
            layers[f"fc{i}"] = {
                "kernel": jnp.asarray(kernel, jnp.float32),
                "bias": jnp.zeros(columns),
            }
        return layers

    def loss_fn(
        params: Any, x: jax.Array, labels: jax.Array, *, dense: Callable
    ) -> tuple[jax.Array, jax.Array]:
        h = x
        for i, name in enumerate(params):
            h = dense(params[name], h, name)
            h = h if i in (code, len(params) - 1) else jnp.tanh(h)
        return optax.sigmoid_binary_cross_entropy(h, x).sum(-1).mean(), h

    tapped = functools.partial(
        loss_fn, dense=lambda layer, h, name: kfac.tap(kfac.Dense(), layer, h, path=name)
    )
    plain = functools.partial(
        loss_fn, dense=lambda layer, h, name: h @ layer["kernel"] + layer["bias"]
    )
    data = jnp.asarray(images), jnp.asarray(labels)
    return Problem("autoencoder", "bernoulli", (18.0, 17.0, 16.0), 1000, init, tapped, data, plain)


VIT = dict(
    image_size=8,
    patch_size=2,
    channels=1,
    num_classes=10,
    width=32,
    depth=2,
    num_heads=4,
    mlp_ratio=2.0,
)


def vision_transformer(name: str, *, by_fan_in: bool = True, **model_options: Any) -> Problem:
    """A two-block ViT on digits, which starts at the scale of its fan-in or as DeiT does."""
    images, labels = digits()

    def make(seed: int) -> VisionTransformer:
        rngs = nnx.Rngs(seed)
        model = VisionTransformer(**VIT, pooling="mean", rngs=rngs, **model_options)
        kernels = [
            module.kernel for _, module in nnx.iter_graph(model) if isinstance(module, Linear)
        ]
        for param in (*kernels, model.pos_embed) if by_fan_in else ():
            param[...] = nnx.initializers.lecun_normal()(rngs.params(), param.shape)
        return model

    graphdef, _ = nnx.split(make(0), nnx.Param)

    def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    loss_fn = lambda params, x, labels: cross_entropy(nnx.merge(graphdef, params)(x), labels)
    plain = lambda params, x, labels: cross_entropy(plain_logits(params, x), labels)
    init = lambda seed: nnx.to_pure_dict(nnx.state(make(seed), nnx.Param))
    data = (jnp.asarray(images.reshape(-1, 8, 8, 1)), jnp.asarray(labels))
    return Problem(
        name,
        "categorical",
        (0.3, 0.1, 0.03),
        300,
        init,
        loss_fn,
        data,
        None if model_options else plain,
        cg_iterations=10 if model_options else 3,
    )


def plain_logits(params: Any, x: jax.Array) -> jax.Array:
    """The multiplicative ViT without flattening tokens into rows, among which kfac-jax finds no
    examples."""
    dense = lambda p, h: h @ p["kernel"] + p["bias"]
    heads = lambda h: h.reshape(*h.shape[:2], VIT["num_heads"], -1)

    def norm(p: Any, h: jax.Array) -> jax.Array:
        centred = h - h.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + LAYER_NORM_EPSILON) * p["scale"] + p["bias"]

    patches = image_to_patches(x, VIT["patch_size"])
    h = dense(params["patch_embed"]["proj"], patches) + params["pos_embed"]
    for block in params["blocks"].values():
        attention, normed = block["attention"], norm(block["norm1"], h)
        query, key, value = (
            heads(dense(attention[name], normed)) for name in ("query", "key", "value")
        )
        weights = jax.nn.softmax(jnp.einsum("nqhd,nkhd->nhqk", query, key) / query.shape[-1] ** 0.5)
        h += dense(attention["out"], jnp.einsum("nhqk,nkhd->nqhd", weights, value).reshape(h.shape))
        hidden = jax.nn.gelu(dense(block["mlp"]["fc1"], norm(block["norm2"], h)), approximate=False)
        h += dense(block["mlp"]["fc2"], hidden)
    return dense(params["head"], norm(params["norm"], h).mean(1))


PROBLEMS = {
    "autoencoder": autoencoder,
    "vit": functools.partial(vision_transformer, "vit"),
    "adder_vit": functools.partial(vision_transformer, "adder_vit", **common.MECHANISMS["adder"]),
    "deit_start": functools.partial(vision_transformer, "deit_start", by_fan_in=False),
}

# ---- Optimizers: each is a grid of six settings and a function (problem, setting) → (init, step),
# where step(params, state, x, labels, key) → (params, state) is one optimizer step.

Runner = tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any]]]


def optax_runner(problem: Problem, transformation: optax.GradientTransformation) -> Runner:
    """A runner for a first-order optimizer."""

    def step(params, state, x, labels, key):
        grads = jax.grad(problem.loss_fn, has_aux=True)(params, x, labels)[0]
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return transformation.init, jax.jit(step)


def schedule(problem: Problem, learning_rate: float, cosine: bool) -> optax.ScalarOrSchedule:
    """A constant learning rate, or cosine decay to a tenth."""
    return (
        optax.cosine_decay_schedule(learning_rate, problem.num_steps, alpha=0.1)
        if cosine
        else learning_rate
    )


def adamw(problem: Problem, learning_rate: float, cosine: bool) -> Runner:
    """AdamW."""
    return optax_runner(
        problem, optax.adamw(schedule(problem, learning_rate, cosine), weight_decay=0.0)
    )


def muon(problem: Problem, learning_rate: float, cosine: bool) -> Runner:
    """Muon for matrices, Adam for the rest, as optax has it."""
    return optax_runner(problem, optax.contrib.muon(schedule(problem, learning_rate, cosine)))


def soap(problem: Problem, learning_rate: float, precondition_frequency: int) -> Runner:
    """SOAP by ``soap_jax``."""
    from soap_jax import soap as make

    return optax_runner(
        problem,
        make(learning_rate, precondition_frequency=precondition_frequency, weight_decay=0.0),
    )


def cg_fac(problem: Problem, damping: float, kl_clip: float) -> Runner:
    """CG-FAC, Monte Carlo Fisher matrix."""
    x, labels = (a[:BATCH_SIZE] for a in problem.data)
    layers = kfac.find_layers(problem.loss_fn, problem.init(0), x, labels)
    optimizer = kfac.cg_fac(
        1.0,
        layers,
        damping=damping,
        kl_clip=kl_clip,
        fisher="mc",
        max_iterations=problem.cg_iterations,
        preconditioner_interval=2,
        factor_decay=0.9,
    )
    function = kfac.value_grad_and_curvature(
        problem.loss_fn, likelihood=problem.likelihood, has_aux=True
    )

    def step(params, state, x, labels, key):
        _, grads, curvature = function(params, x, labels, key=key)
        updates, state = optimizer.update(grads, state, params, curvature=curvature)
        return optax.apply_updates(params, updates), state

    return optimizer.init, jax.jit(step)


def kfac_jax(problem: Problem, initial_damping: float, adaptive: bool) -> Runner:
    """kfac-jax with adaptive learning rate, momentum and damping, or with fixed damping."""
    import kfac_jax as peer

    register = {
        "bernoulli": lambda logits, x, labels: (
            peer.register_multi_bernoulli_predictive_distribution(logits, targets=x)
        ),
        "categorical": lambda logits, x, labels: peer.register_softmax_cross_entropy_loss(
            logits, labels
        ),
    }[problem.likelihood]

    function = problem.kfac_jax_loss_fn or problem.loss_fn
    x, labels = (a[:BATCH_SIZE] for a in problem.data)
    outputs = [f(problem.init(0), x, labels)[1] for f in (function, problem.loss_fn)]
    np.testing.assert_allclose(
        *outputs, atol=1e-4, err_msg="expected kfac-jax to train the same function"
    )

    def loss_fn(params, batch):
        loss, logits = function(params, *batch)
        register(logits, *batch)
        return loss

    optimizer = peer.Optimizer(
        value_and_grad_func=jax.value_and_grad(loss_fn),
        l2_reg=0.0,
        value_func_has_aux=False,
        value_func_has_state=False,
        value_func_has_rng=False,
        use_adaptive_learning_rate=True,
        use_adaptive_momentum=True,
        use_adaptive_damping=adaptive,
        initial_damping=initial_damping,
        num_burnin_steps=0,
        multi_device=False,
    )

    def step(params, state, x, labels, key):
        options = {} if adaptive else {"damping": initial_damping}
        params, state, _ = optimizer.step(params, state, key, batch=(x, labels), **options)
        return params, state

    return lambda params: optimizer.init(params, jax.random.key(0), (x, labels)), step


def settings(**choices: Sequence[Any]) -> list[dict[str, Any]]:
    """All combinations of the choices."""
    return [
        dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
    ]


OPTIMIZERS: dict[str, tuple[Callable[..., Runner], list[dict[str, Any]]]] = {
    "adamw": (adamw, settings(learning_rate=(3e-3, 1e-2, 3e-2), cosine=(False, True))),
    "muon": (muon, settings(learning_rate=(1e-2, 3e-2, 1e-1), cosine=(False, True))),
    "soap": (soap, settings(learning_rate=(3e-3, 1e-2, 3e-2), precondition_frequency=(1, 10))),
    "kfac_jax": (kfac_jax, settings(initial_damping=(1e-2, 1e-1, 1.0), adaptive=(True, False))),
    "cg_fac": (cg_fac, settings(damping=(3e-3, 1e-2, 3e-2), kl_clip=(0.3, 1.0))),
}
MODULES = {"soap": "soap_jax", "kfac_jax": "kfac_jax"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
      steps: target → steps to it, None if not reached.
      final_loss: of the whole training set.
    """

    steps: dict[str, int | None]
    final_loss: float


def batches(data: tuple[jax.Array, jax.Array], seed: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Random batches, forever; the same for every optimizer."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(NUM_TRAIN)
        for start in range(0, NUM_TRAIN, BATCH_SIZE):
            index = order[start : start + BATCH_SIZE]
            yield tuple(a[index] for a in data)


def train(problem: Problem, runner: Runner, evaluate: Callable, seed: int, num_steps: int) -> Run:
    """Trains until all targets are reached or the steps are used up."""
    init, step = runner
    params = problem.init(seed)
    state = init(params)
    reached: dict[str, int | None] = {str(t): None for t in problem.targets}
    loss = float("nan")
    for i, batch in zip(range(num_steps), batches(problem.data, seed), strict=False):
        params, state = step(params, state, *batch, jax.random.fold_in(jax.random.key(seed), i))
        if (i + 1) % EVAL_EVERY_STEPS == 0:
            loss = float(evaluate(params))
            for target in problem.targets:
                if loss <= target and reached[str(target)] is None:
                    reached[str(target)] = i + 1
            if not np.isfinite(loss) or all(reached.values()):
                break
    return Run(reached, loss)


def step_seconds(problem: Problem, runners: dict[str, Runner]) -> dict[str, float]:
    """Seconds of one step of each optimizer: medians of turns, the optimizers one after the other
    in each round."""
    x, labels = (a[:BATCH_SIZE] for a in problem.data)

    def turns(runner: Runner) -> Callable[[], Any]:
        init, step = runner
        params = problem.init(0)  # one for each: kfac-jax donates its arguments
        state = params, init(params)

        def turn() -> Any:
            nonlocal state
            for i in range(TURN):
                state = step(*state, x, labels, jax.random.key(i))
            return state

        return turn

    timings = measure(
        {name: turns(runner) for name, runner in runners.items()}, TURNS, TIMING_SECONDS
    )
    return {name: timings.median(name) / TURN for name in runners}


def score(run: Run) -> tuple:
    """Sorts runs: more targets reached first, then fewer steps to the hardest of them, then the
    loss."""
    hit = [s for s in run.steps.values() if s is not None]
    return (
        -len(hit),
        max(hit, default=0),
        run.final_loss if np.isfinite(run.final_loss) else float("inf"),
    )


def gradient_equivalents(problem: Problem, runner: Runner) -> float | None:
    """Arithmetic of one step over that of one gradient; None for a peer whose step cannot be
    traced."""
    x, labels = (a[:BATCH_SIZE] for a in problem.data)
    params = problem.init(0)
    total = lambda f, *args: sum(
        n for (_, dtype), n in count_operations(f, *args).counts.items() if "float" in dtype
    )
    gradient = total(lambda p: jax.grad(problem.loss_fn, has_aux=True)(p, x, labels)[0], params)
    init, step = runner
    try:
        state = jax.eval_shape(init, params)
        return (
            total(lambda p, s: step(p, s, x, labels, jax.random.key(0)), params, state) / gradient
        )
    except (TypeError, jax.errors.JAXTypeError):
        return None


def trial_key(setting: dict[str, Any], seed: int) -> str:
    """How a run is filed in the results."""
    return f"{json.dumps(setting, sort_keys=True)} seed {seed}"


def best_setting(grid: list[dict[str, Any]], trials: dict[str, Any]) -> dict[str, Any] | None:
    """The setting that did best on the tuning seed; None until all were tried."""
    keys = [trial_key(setting, TUNING_SEED) for setting in grid]
    if not all(key in trials for key in keys):
        return None
    return min(zip(keys, grid, strict=True), key=lambda pair: score(Run(**trials[pair[0]])))[1]


def next_trial(
    grid: list[dict[str, Any]], seeds: int, trials: dict[str, Any]
) -> tuple[dict[str, Any], int] | None:
    """The next run to do: each setting on the tuning seed, then the best one with the other
    seeds."""
    best = best_setting(grid, trials)
    plan = (
        [(setting, TUNING_SEED) for setting in grid]
        if best is None
        else [(best, seed) for seed in range(seeds)]
    )
    return next((trial for trial in plan if trial_key(*trial) not in trials), None)


def run_trials(
    problem: Problem,
    name: str,
    grid: list[dict[str, Any]],
    own: dict[str, Any],
    seeds: int,
    num_steps: int,
) -> Iterator[None]:
    """Tunes an optimizer and runs it with further seeds, adding to ``own``; yields after every
    run."""
    make, trials = OPTIMIZERS[name][0], own.setdefault("trials", {})
    evaluate = jax.jit(lambda params: problem.loss_fn(params, *problem.data)[0])
    compiled: tuple[dict[str, Any], Runner] | None = None
    own.pop("error", None)
    while (trial := next_trial(grid, seeds, trials)) is not None:
        setting, seed = trial
        try:
            if compiled is None or compiled[0] != setting:
                compiled = setting, make(problem, **setting)
            run = train(problem, compiled[1], evaluate, seed, num_steps)
        except Exception as error:
            if name not in MODULES:
                raise
            # That a peer cannot train this network is a result.
            own["error"] = type(error).__name__
            print(
                f"  {problem.name}: {name} fails with {type(error).__name__}: {str(error)[:200]}",
                flush=True,
            )
            return
        trials[trial_key(*trial)] = dataclasses.asdict(run)
        print(
            f"  {problem.name}: {name} {setting} seed {seed}: {run.steps}, loss "
            f"{run.final_loss:.4g}",
            flush=True,
        )
        yield
    if "gradient_equivalents" not in own:
        own["gradient_equivalents"] = gradient_equivalents(
            problem, make(problem, **best_setting(grid, trials))
        )
        yield


def table(problem: Problem, results: dict[str, Any], grids: dict[str, list], seeds: int) -> str:
    """Markdown: per optimizer and target the median steps (runs that reached it), seconds and
    gradient-equivalents."""
    head = [
        "optimizer",
        *(f"{t:g}: steps / s / gradients" for t in problem.targets),
        "ms/step",
        "setting",
    ]
    lines = [head, ["---"] * len(head)]
    for name, grid in grids.items():
        own = results.get(name, {})
        if "error" in own:
            lines.append([name, own["error"], *[""] * (len(head) - 2)])
            continue
        best = best_setting(grid, own.get("trials", {}))
        keys = [] if best is None else [trial_key(best, seed) for seed in range(seeds)]
        runs = [own["trials"][key] for key in keys if key in own["trials"]]
        if not runs or "step_seconds" not in own:  # not run or not timed yet
            lines.append([name, *[""] * (len(head) - 1)])
            continue
        equivalents, seconds = own.get("gradient_equivalents"), own["step_seconds"]
        cells = []
        for target in map(str, problem.targets):
            hit = [run["steps"][target] for run in runs if run["steps"][target] is not None]
            if not hit:
                cells.append(f"– (0/{len(runs)})")
                continue
            steps = statistics.median(hit)
            gradients = "" if equivalents is None else f"{steps * equivalents:.0f}"
            cells.append(
                f"{steps:g} / {steps * seconds:.2f} / {gradients} ({len(hit)}/{len(runs)})"
            )
        chosen = ", ".join(f"{k}={v}" for k, v in best.items())
        lines.append([name, *cells, f"{1e3 * seconds:.1f}", chosen])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints one table per problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems", default="autoencoder,vit,adder_vit", help=f"of {', '.join(PROBLEMS)}"
    )
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to read, add to and write")
    parser.add_argument(
        "--max-seconds", type=float, default=float("inf"), help="begin no run later than this"
    )
    parser.add_argument("--time", action="store_true", help="measure the durations of steps again")
    parser.add_argument("--quick", action="store_true", help="one setting, one seed, 20 steps")
    flags = parser.parse_args(argv)
    deadline = time.perf_counter() + flags.max_seconds
    seeds = 1 if flags.quick else flags.seeds
    grids = {name: grid[:1] if flags.quick else grid for name, (_, grid) in OPTIMIZERS.items()}
    results = json.loads(flags.out.read_text()) if flags.out and flags.out.exists() else {}

    def save() -> None:
        if flags.out:
            flags.out.write_text(json.dumps(results, indent=1))

    for problem_name in flags.problems.split(","):
        problem, of_problem = PROBLEMS[problem_name](), results.setdefault(problem_name, {})
        names = [
            name
            for name in flags.optimizers.split(",")
            if importlib.util.find_spec(MODULES.get(name, "kfac"))
        ]
        for name in sorted(set(flags.optimizers.split(",")) - set(names)):
            print(f"{name}: {MODULES[name]} is not installed, left out")
        for name in names:
            own = of_problem.setdefault(name, {})
            num_steps = 20 if flags.quick else problem.num_steps
            for _ in run_trials(problem, name, grids[name], own, seeds, num_steps):
                save()
                if time.perf_counter() > deadline:
                    print("out of time; the same command goes on from here")
                    return
        ran = [name for name in names if "error" not in of_problem[name]]
        if flags.time or any("step_seconds" not in of_problem[name] for name in ran):
            best = {name: best_setting(grids[name], of_problem[name]["trials"]) for name in ran}
            seconds = step_seconds(
                problem, {name: OPTIMIZERS[name][0](problem, **best[name]) for name in ran}
            )
            for name in ran:
                of_problem[name]["step_seconds"] = seconds[name]
            save()
        print(f"\n## {problem_name}\n\n{table(problem, of_problem, grids, seeds)}\n", flush=True)


if __name__ == "__main__":
    main()
