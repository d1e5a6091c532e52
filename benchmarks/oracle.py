"""How far optimizers are from the oracle: the exact layerwise Gauss-Newton step of `kfac.oracle`.

    python -m benchmarks.oracle  # writes results/oracle_digits, five minutes of two busy cores
    python -m benchmarks.oracle --networks=vit --trials=3 --steps=100 --out=runs/oracle

Every arm sees all examples at every step, without augmentation, decay or clipping by norm, and
follows a cosine without warm-up: what differs is what it makes of the same gradient. An arm is the
best of its trials by the loss of all examples at the end. The target is AdamW's loss at the end;
steps to it are interpolated in the logarithm of the loss. The oracle tries a fourth of, just and
four times its last relative damping, each at four lengths, takes the lowest loss, and damps more
where none is lower (Levenberg-Marquardt by trying); it has two trials, of the damping that it
begins with.
It is one seed: a description, no verdict. A rate at the end of its range, as AdamW's may be, says
that more trials would help that arm.

The share of the gap is (steps of AdamW − steps of the arm) / (steps of AdamW − steps of the
oracle). Along each arm's best run its next step is compared with the oracle's of the same
parameters, at that of eight relative dampings, 1e-3 to 1e4, with the lowest loss. The argument of
--networks may also be an experiment of your own; layers of more than two thousand parameters take
minutes a step.
"""

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pandas as pd
from flax import nnx

import benchmarks
from adder_flax import experiment, ops, training
from adder_flax.compare.blocks import Heading, Paragraph, Table, as_markdown
from adder_flax.experiments import autoencoder, common
from adder_flax.report import _style as style
from adder_flax.training.sharding import put_batch
from benchmarks.train_step import NO_AUGMENTATION
from benchmarks.verify import in_float64
from kfac import oracle

POINTS = (0, 10, 30, 100)
# Relative, of the oracle that steps are compared with.
DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e3, 1e4)
_MOST_DAMPING = 1e6
# Of a step, in units of its own: of the oracle's, and of an optimizer's.
LENGTHS, MORE_LENGTHS = (0.25, 0.5, 1.0, 2.0), tuple(2.0**power for power in range(-6, 5))
_ADAM = tuple({"learning_rate": rate} for rate in (1e-2, 3e-2, 1e-1, 3e-3, 1e-3, 3e-1))
_LARGER = tuple({"learning_rate": 3 * trial["learning_rate"]} for trial in _ADAM)


def _clipped(name: str, preset: float, clips: Sequence[float]) -> tuple[dict[str, Any], ...]:
    """Trials of the damping that is the preset, and of a smaller one."""
    of = {"name": name, "learning_rate": 1e-2, f"{name}.step": "clip"}
    pairs = itertools.product(clips, (preset, 1.0))
    return tuple(of | {f"{name}.damping": d, f"{name}.kl_clip": c} for c, d in pairs)


def arms_of(network: str) -> dict[str, tuple[dict[str, Any], ...]]:
    """Returns the trials of each arm."""
    # The loss of an autoencoder is a sum over pixels.
    clips = (3e-3, 3e-2, 3e-1) if network == "autoencoder" else (1e-4, 1e-3, 1e-2)
    cg_fac = _clipped("cg_fac", 100.0, clips)
    return {
        "adamw": _ADAM,
        "muon": _LARGER,
        "soap": tuple(trial | {"b1": 0.95, "b2": 0.95} for trial in _ADAM),
        "kl_shampoo": tuple(trial | {"b2": 0.98} for trial in _ADAM),
        "kfac, rms": tuple({"name": "kfac"} | trial for trial in _LARGER),
        "kfac, clip": _clipped("kfac", 10.0, clips),
        "cg_fac": tuple(trial | {"cg_fac.iterations": 10} for trial in cg_fac),
        "algorithm_1": tuple(
            {"name": "cg_fac", "cg_fac.step": "algorithm_1"}
            | {"cg_fac.damping": gamma, "cg_fac.learning_rate": rate}
            for gamma, rate in itertools.product((1e-2, 1e-1), (0.3, 1.0, 0.1))
        ),
    }


ORACLE_DAMPINGS = (1e-2, 1.0)


class Network(NamedTuple):
    """A network with all of its examples, in float64, as `kfac.oracle` takes them."""

    run: training.Run  # of AdamW
    outputs: Callable
    x: jax.Array
    targets: jax.Array
    likelihood: str

    def loss(self, params: Any) -> float:
        return oracle.mean_loss(self.outputs, params, self.x, self.targets, self.likelihood)

    def curvature(self, params: Any) -> dict[str, oracle.LayerCurvature]:
        problem = self.outputs, params, self.x, self.targets, self.likelihood
        return oracle.layerwise_curvature(*problem)


def make_config(name: str) -> ml_collections.ConfigDict:
    """Returns the small network of this name, or an experiment's, with all examples in a step."""
    if name == "vit":
        config = common.deit("multiplicative", "tiny")
        config.model.update(width=16, num_heads=2, depth=2, mlp_ratio=2.0)
        config.data.train_split = "train[:50%]"
    elif name == "autoencoder":
        config = autoencoder.get_config()
        config.model.widths = "12,4"
        # An image has 64 outputs, hence 64 rows of curvature.
        config.data.train_split = "train[:25%]"
    else:
        config = experiment.load_experiment(name)
    if config.task.name == "classification":
        config.model.drop_path_rate = 0.0
        config.task.update(**NO_AUGMENTATION, resized_crop_scale=(), label_smoothing=0.0)
    config.batch_size = len(training.build_run(config).train_source)
    return config


def build(config: ml_collections.ConfigDict, steps: int, fields: dict[str, Any]) -> training.Run:
    config = ml_collections.ConfigDict(config.to_dict())
    config.num_epochs = float(steps)
    plain = dict(warmup_epochs=0.0, weight_decay=0.0, clip_norm=0.0, final_learning_rate=0.0)
    config.optimizer.update_from_flattened_dict(plain | fields)
    return training.build_run(config)


def make_network(run: training.Run) -> Network:
    graphdef, _ = nnx.split(in_float64(run), nnx.Param)
    batch = run.batches()[0]
    (x,) = run.task.inputs(batch)
    labels = batch.get("label") if run.task.likelihood == "categorical" else None
    targets = x.reshape(len(x), -1) if labels is None else labels

    def outputs(params: Any, x: Any) -> jax.Array:
        with ops.use_backend("xla"):
            return nnx.merge(graphdef, params)(x).reshape(len(x), -1)

    return Network(run, outputs, x, jnp.asarray(targets), run.task.likelihood)


def train(run: training.Run, network: Network) -> tuple[list[float], dict[int, Any]]:
    state, points, losses = run.init(), {}, []
    batch = put_batch(run.batches()[0], run.mesh)
    for step in range(run.num_steps):
        before = jax.tree.map(np.array, state["params"]) if step in POINTS else None
        with jax.set_mesh(run.mesh):
            state, metrics = run.train_step(state, batch, run.hyper)
        losses.append(metrics["loss"])
        if before is not None:
            update = jax.tree.map(lambda new, old: np.array(new) - old, state["params"], before)
            points[step] = before, update
    return [float(f"{x:.6g}") for x in (*losses, network.loss(state["params"]))], points


class Tried(NamedTuple):
    """An oracle's step at the length with the lowest loss."""

    loss: float
    damping: float
    length: float
    step: oracle.Oracle


def best_length(
    loss_of: Callable[[Any], float], params: Any, update: Any, lengths: Sequence[float]
) -> tuple[float, float]:
    """Returns the factor of an update with the lowest loss, among these, and that loss."""
    moved = lambda s: jax.tree.map(lambda p, u: np.asarray(p, np.float64) + s * u, params, update)
    losses = [loss_of(moved(s)) for s in lengths]
    best = int(np.nanargmin(losses))
    return lengths[best], losses[best]


def best_step(network: Network, layers: dict, params: Any, dampings: Sequence[float]) -> Tried:
    tried = []
    for damping in dampings:
        step = oracle.layerwise_step(layers, damping, relative=True)
        length, loss = best_length(network.loss, params, step.update(params), LENGTHS)
        tried.append(Tried(loss, damping, length, step))
    return min(tried, key=lambda each: each.loss)


def follow_oracle(network: Network, damping: float, target: float, most: int) -> list[float]:
    """Takes the oracle's own steps until the target, and returns the losses."""
    params = jax.tree.map(np.array, network.run.init()["params"])
    losses = [network.loss(params)]
    while losses[-1] > target and len(losses) <= most:
        layers = network.curvature(params)
        found = best_step(network, layers, params, [damping / 4, damping, 4 * damping])
        while found.loss >= losses[-1] and found.damping < _MOST_DAMPING:
            found = best_step(network, layers, params, [16 * found.damping])
        damping = found.damping
        if found.loss < losses[-1]:
            update = found.step.update(params)
            params = jax.tree.map(lambda p, u, s=found.length: p + s * u, params, update)
        losses.append(min(found.loss, losses[-1]))
    return [float(f"{loss:.6g}") for loss in losses]


def steps_to(losses: Sequence[float], target: float) -> float | None:
    """Returns the step at which losses are first at the target, interpolated in their logarithm.

    >>> steps_to([8.0, 4.0, 1.0], 2.0), steps_to([8.0, 4.0], 2.0)
    (1.5, None)
    """
    logs = np.log(losses) - np.log(target)
    reached = np.flatnonzero(logs <= 1e-12)
    if not reached.size:
        return None
    after = int(reached[0])
    if after == 0:
        return 0.0
    return float(after - 1 + logs[after - 1] / (logs[after - 1] - logs[after]))


def share_of_gap(steps: float | None, adamw: float | None, oracles: float | None) -> float | None:
    """Returns the share of AdamW's distance to the oracle, in steps, that an arm closes.

    >>> share_of_gap(55.0, 100.0, 10.0)
    0.5
    """
    if None in (steps, adamw, oracles):
        return None
    return (adamw - steps) / (adamw - oracles)


def kind_of(layer: str) -> str:
    """Returns the layer's name without the number of its block.

    >>> kind_of("blocks/1/attention/qkv"), kind_of("encoder/0"), kind_of("head")
    ('blocks/attention/qkv', 'encoder/0', 'head')
    """
    return re.sub(r"^([^/]+)/\d+/(?=.)", r"\1/", layer)


def measure(name: str, steps: int, trials: int) -> list[dict[str, Any]]:
    """Returns the records of one network: a line an arm, and a line a layer of a compared step."""
    config = make_config(name)
    network = make_network(build(config, steps, {"name": "adamw"}))
    arms, kept = [], {}
    for arm, choices in arms_of(name).items():
        begun, tried = time.perf_counter(), []
        for fields in choices[:trials]:
            losses, points = train(build(config, steps, {"name": arm} | fields), network)
            tried.append((np.nan_to_num(losses[-1], nan=np.inf), losses, fields, points))
        _, losses, fields, kept[arm] = min(tried, key=lambda each: each[0])
        arms.append({"arm": arm, "chosen": fields, "losses": losses})
        seconds = time.perf_counter() - begun
        print(f"{name}, {arm}: {losses[-1]:.4g} with {fields}, {seconds:.0f} s", flush=True)
    target = arms[0]["losses"][-1]
    followed, most = [], steps
    for damping in ORACLE_DAMPINGS:
        followed.append(follow_oracle(network, damping, target, most))
        most = len(followed[-1]) - 1  # more would not be the best
    reached = [steps_to(losses, target) or np.inf for losses in followed]
    best = int(np.argmin(reached))
    print(f"{name}, oracle: {reached} steps, {time.perf_counter() - begun:.0f} s", flush=True)
    chosen = {"damping": ORACLE_DAMPINGS[best]}
    arms.append({"arm": "oracle", "chosen": chosen, "losses": followed[best]})
    for record in arms:
        record |= {"target": target, "steps": steps_to(record["losses"], target)}
        record |= {"examples": config.batch_size, "trials": trials}
    ends = arms[0]["steps"], arms[-1]["steps"]
    for record in arms:
        record["share_of_gap"] = share_of_gap(record["steps"], *ends)
    compared = [
        {"arm": arm, "step": step} | row
        for step in POINTS
        if step < steps
        for arm, row in compare(network, {arm: points[step] for arm, points in kept.items()})
    ]
    return [{"network": name} | record for record in (*arms, *compared)]


def compare(network: Network, taken: dict[str, tuple[Any, Any]]) -> Iterator[tuple[str, dict]]:
    """Yields the rows of `kfac.oracle.compare_step`, the last of an arm with what the loss does;
    `taken` has by arm the parameters, and what its optimizer added to them."""
    found, of = None, {}
    for arm, (params, update) in taken.items():
        here = network.loss(params)
        if found is None or here != of["loss"]:  # at the start all have the same parameters
            found = best_step(network, network.curvature(params), params, DAMPINGS)
            of = {"loss": here, "damping": found.damping, "decrease_oracle": here - found.loss}
        *rows, whole = map(dataclasses.asdict, oracle.compare_step(update, found.step))
        length, loss = best_length(network.loss, params, update, MORE_LENGTHS)
        whole |= of | {"best_length": length, "decrease": here - loss}
        yield from ((arm, row) for row in (*rows, whole))


def as_table(frame: pd.DataFrame) -> Table:
    lines = [[str(name), *row] for name, row in zip(frame.index, frame.values, strict=True)]
    return Table([str(frame.index.name), *frame.columns], lines)


def _told(fields: dict[str, Any]) -> str:
    last = {name.rpartition(".")[2]: value for name, value in fields.items()}
    numbers = {n: v for n, v in last.items() if isinstance(v, float) and n not in ("b1", "b2")}
    name = [last["name"]] if "name" in last else []
    return ", ".join([*name, *(f"{n.replace('_', ' ')} {v:g}" for n, v in numbers.items())])


def arms_table(arms: pd.DataFrame) -> Table:
    told = lambda form: lambda x: "not reached" if pd.isna(x) else format(x, form)
    shown = arms.sort_values("steps", na_position="last").set_index("arm")
    columns = {
        "steps to the target": shown["steps"].map(told(".1f")),
        "share of the gap": shown["share_of_gap"].map(told(".2f")),
        "last loss": shown["losses"].map(lambda losses: f"{losses[-1]:.3g}"),
        "best of its trials": shown["chosen"].map(_told),
    }
    return as_table(pd.DataFrame(columns))


def steps_table(rows: pd.DataFrame) -> Table:
    whole = rows[rows["name"] == "all layers"]
    whole = whole.assign(true=whole["decrease"] / whole["decrease_oracle"])
    points = ", ".join(map(str, whole["step"].astype(int).unique()))
    titles = {"cosine": "cosine", "best_share": "predicted decrease", "true": "true decrease"}
    told = lambda values: ", ".join(map("{:.2f}".format, values))
    found = whole.groupby("arm", sort=False)[[*titles]].agg(told)
    return as_table(found.rename(columns={k: f"{v}, steps {points}" for k, v in titles.items()}))


def layers_table(rows: pd.DataFrame, key: str) -> Table:
    """Returns medians over blocks and points, a row for each kind of layer, a column an arm."""
    of_layers = rows[rows["name"] != "all layers"]
    of_layers = of_layers.assign(layer=of_layers["name"].map(kind_of))
    found = of_layers.pivot_table(key, "layer", "arm", aggfunc="median", sort=False)
    return as_table(found.map("{:.2g}".format))


LAYERS = {
    "best_share": "Share of the oracle's predicted decrease, at the step's best length:",
    "share": "The same at its own length (below 0: too long):",
    "length_ratio": "Length, in lengths of the oracle's step:",
    "cosine": "Cosine to the oracle's step:",
}


def _steps(number: float) -> str:
    return "more steps than were taken" if np.isnan(number) else f"{number:.0f} steps"


def page(records: Sequence[dict]) -> str:
    findings, sections = [], []
    for name, own in pd.DataFrame(records).groupby("network", sort=False):
        arms, rows = own[own["losses"].notna()], own[own["cosine"].notna()]
        rivals = arms[~arms["arm"].isin(["adamw", "oracle"])]
        best, of = rivals.sort_values("steps").iloc[0], arms.iloc[0]
        steps = arms.set_index("arm")["steps"]
        findings.append(
            f"**{name}: one seed, which ranks nothing.** To its target the oracle takes "
            f"{_steps(steps['oracle'])}, {best['arm']} {_steps(best['steps'])}, AdamW "
            f"{_steps(steps['adamw'])}. The tables show where the steps differ."
        )
        sections += [
            Heading(2, str(name)),
            Paragraph(
                f"{of['examples']:.0f} images, {len(of['losses']) - 1} steps, {of['trials']:.0f} "
                f"trials an arm. Target: a loss of {of['target']:.4g}, where AdamW ends."
            ),
            arms_table(arms),
            Paragraph(
                "The arm's next step beside the oracle's, all layers together. Decreases are "
                "shares of the oracle's, each at its best length:"
            ),
            steps_table(rows),
            Paragraph("By layer, medians over blocks and steps."),
        ]
        for key, title in LAYERS.items():
            sections += [Paragraph(title), layers_table(rows, key)]
    about = (__doc__ or "").split("\n\n", 2)[2].strip()
    picture = "![losses, and shares of the oracle's decrease](oracle.svg)"
    head = [Heading(1, "How far from the oracle"), *map(Paragraph, (*findings, picture))]
    return as_markdown([*head, *sections, Heading(2, "How it was measured"), Paragraph(about)])


def figure(records: Sequence[dict]) -> Any:
    networks = list(dict.fromkeys(record["network"] for record in records))
    drawn, axes = style.new_figure(4.6, 7.4 * len(networks), 2 * len(networks))
    for (left, right), name in zip(axes.reshape(-1, 2), networks, strict=True):
        own = [record for record in records if record["network"] == name]
        arms = [record["arm"] for record in own if "losses" in record]
        for number, arm in enumerate(arms):
            look = {**style.line(number), "markersize": 3, "linewidth": 1.2, "label": arm}
            (losses,) = (r["losses"] for r in own if r["arm"] == arm and "losses" in r)
            left.plot(losses, **look, markevery=(number, max(1, len(losses) // 8)))
            whole = [r for r in own if r["arm"] == arm and r.get("name") == "all layers"]
            if whole:
                shares = [row["best_share"] for row in whole]
                right.plot([row["step"] for row in whole], shares, **look)
        left.axhline(own[0]["target"], color=style.GREY, linewidth=0.8)
        for side in (left, right):
            side.set(xscale="symlog", yscale="log")
        style.dress(left, xlabel="step", ylabel="loss of all examples", title=name)
        style.dress(right, xlabel="step", ylabel="share of the oracle's predicted decrease")
        left.set_xlim(left=0)
        handles, _ = left.get_legend_handles_labels()
        below = dict(loc="upper left", bbox_to_anchor=(-0.08, -0.16), ncols=2)
        style.legend(right, handles=handles, **below)
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmarks.parser(__doc__)
    parser.add_argument("--networks", default="autoencoder", help="none: the page alone")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--trials", type=int, default=6, help="of each arm, at most 6")
    parser.add_argument("--out", default="results/oracle_digits")
    flags = parser.parse_args(arguments)
    networks, out = [name for name in flags.networks.split(",") if name], Path(flags.out)
    path = out / "records.jsonl"
    old = [json.loads(line) for line in path.open()] if path.exists() else []
    records = [record for record in old if record["network"] not in networks]
    for name in networks:
        records += measure(name, flags.steps, flags.trials)
    out.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (out / "results.md").write_text(page(records))
    style.save_figure(figure(records), out / "oracle", ("svg",))
    print(page(records))


if __name__ == "__main__":
    main()
