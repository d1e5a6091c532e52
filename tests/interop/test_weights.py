"""Weights of timm and Hugging Face against a NumPy transformer, and against those libraries if
installed."""

import json

import jax
import numpy as np
import optax.contrib
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from adder_flax import interop, models, quantized, training
from adder_flax.experiments import common
from adder_flax.interop import _network
from tests.interop.reference import timm_forward
from tests.modules import moved
from tests.training.tiny import TINY, TINY_FLAGS

SIZES = dict(image_size=12, patch_size=3, channels=3, num_classes=5, width=16, depth=2, num_heads=4)
ADDER = dict(score="adder", qkv_linear="adder", proj_linear="adder", mlp_linear="adder")


def make(seed=0, **options):
    """A transformer all of whose parameters are random, norms and biases too."""
    return moved(models.VisionTransformer(**SIZES | options, rngs=nnx.Rngs(seed)), seed)


def images(side=12, channels=3):
    return np.random.default_rng(1).normal(size=(2, side, side, channels)).astype(np.float32)


def timm_arrays(seed=0):
    """Random arrays with the shapes that timm's own state_dict has."""
    rng, width = np.random.default_rng(seed), 16
    # In the order of these names, on which numbers that timm gave depend.
    shapes = {"cls_token": (1, 1, width), "pos_embed": (1, 17, width)}
    shapes |= {"patch_embed.proj.weight": (width, 3, 3, 3), "patch_embed.proj.bias": (width,)}
    shapes |= {"head.weight": (5, width), "head.bias": (5,)}
    sizes = {"attn.qkv": (48, 16), "attn.proj": (16, 16), "mlp.fc1": (64, 16), "mlp.fc2": (16, 64)}
    ends = [f"{norm}.{part}" for norm in ("norm1", "norm2") for part in ("weight", "bias")]
    for i in range(2):
        shapes |= {f"blocks.{i}.{name}.weight": size for name, size in sizes.items()}
        shapes |= {f"blocks.{i}.{name}.bias": size[:1] for name, size in sizes.items()}
        shapes |= {f"blocks.{i}.{end}": (width,) for end in ends}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    return {name: (0.3 * rng.normal(size=shape)).astype("f") for name, shape in shapes.items()}


def load(model, path, grid=(4, 4)):
    """Loads weights whose network the test states to be the model's, but for the grid."""
    facts = _network.network_of(model)._replace(grid=grid)._asdict()
    (path.parent / "config.json").write_text(json.dumps({_network.METADATA: facts}))
    return interop.load_weights(model, path)


def given(arrays, folder, **options):
    """A model all of whose weights are those arrays, by way of folder/w."""
    save_file(arrays, folder / "w")
    model = make(**options)
    assert load(model, folder / "w") == ()
    return model


def again(path, **options):
    """A model all of whose weights are from a file that says which network it is of."""
    model = make(seed=1, **options)
    assert interop.load_weights(model, path) == ()
    return model


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        *((names, dict(channels=1)) for names in interop.FORMATS),
        ("adder_flax", ADDER),
        ("adder_flax", dict(score="additive", temperature="learned")),
        ("adder_flax", dict(norm_position="post")),
        ("adder_flax", dict(num_heads=1, qkv_linear="identity")),
        ("adder_flax", dict(mlp_linear="normed_dense")),
    ],
    ids=str,
)
def test_weights_that_were_written_come_back_the_same(names, options, tmp_path):
    model = make(**options)
    interop.save_weights(model, tmp_path / "w", names=names)
    other = again(tmp_path / "w", **options)
    pairs = zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, other)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("options", "others", "fact"),
    [
        (dict(temperature=3.0), {}, "temperature is 1.0 in block 0, as the model's, got 3.0"),
        (ADDER, ADDER | dict(identity=False), "identity is False in block 0, .* got True"),
        (ADDER | dict(scale="variance_matched"), ADDER, r"scale is 0\.5 in block 0"),
    ],
)
def test_scores_of_one_kind_have_to_be_the_same_function(options, others, fact, tmp_path):
    """Else the same arrays give other logits; a score of another kind is asked for on purpose."""
    interop.save_weights(make(**options), tmp_path / "w")
    with pytest.raises(ValueError, match=f"scores whose {fact}"):
        interop.load_weights(make(**others), tmp_path / "w")
    interop.load_weights(make(**options), tmp_path / "w")


class WithBatchNorm(models.VisionTransformer):
    """A model of one's own, with statistics that are no parameters."""

    def __init__(self, rngs):
        sizes = dict(image_size=4, patch_size=2, channels=1, num_classes=3, depth=1, num_heads=1)
        super().__init__(**sizes, width=4, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(4, rngs=rngs)


def test_statistics_of_batch_normalisation_travel_with_the_parameters(tmp_path):
    path = tmp_path / "own.safetensors"
    first, second = (WithBatchNorm(nnx.Rngs(seed)) for seed in (0, 1))
    rows = np.random.default_rng(0).normal(2.0, 3.0, (50, 4)).astype("f")
    first.batch_norm(rows)
    interop.save_weights(first, path)
    assert interop.load_weights(second, path) == ()
    # Flax moves them from 0 and 1 by a hundredth of the way.
    np.testing.assert_allclose(second.batch_norm.mean[...], 0.01 * rows.mean(0), rtol=1e-4)
    np.testing.assert_allclose(second.batch_norm.var[...], 0.99 + 0.01 * rows.var(0), rtol=1e-4)


def test_another_attention_on_dense_weights_keeps_what_its_score_learns(tmp_path):
    given(timm_arrays(), tmp_path, score="adder")
    model = make(score="additive", temperature="learned")
    before = np.asarray(model.blocks[0].attention.score["v"][...])
    kept = load(model, tmp_path / "w")
    learned = {name.rpartition(".attention.")[2] for name in kept if name.startswith("blocks.1.")}
    score = {f"score.{name}" for name in ("bias", "key_kernel", "query_kernel", "v")}
    assert learned == score | {"log_temperature"}
    assert all(".attention." in name for name in kept)
    np.testing.assert_array_equal(model.blocks[0].attention.score["v"][...], before)


def test_a_head_for_other_classes_stays(tmp_path):
    save_file(timm_arrays(), tmp_path / "timm.safetensors")
    model = make(num_classes=9)
    head = np.asarray(model.head.kernel[...])
    assert load(model, tmp_path / "timm.safetensors") == ("head.bias", "head.kernel")
    np.testing.assert_array_equal(model.head.kernel[...], head)


def zeros(*shape):
    return np.zeros(shape, np.float32)


GATED = r"a gated MLP \(SwiGLU\)"


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        (dict(width=32), {}, r"of shape \(96,\), got \(48,\)"),
        (dict(depth=1), {}, r"of 1 blocks, got blocks\.1\."),
        (dict(depth=3), {}, r"expected blocks\.2\..* among the weights, got none"),
        ({}, {"pos_embed": zeros(1, 18, 16)}, "of 4 × 4 patches, .* or without 1 more, got 18"),
        (ADDER, {}, "got adder layers"),
        ({}, {"dist_token": zeros(1, 1, 16)}, "got dist_token; set config.model.distilled"),
        ({}, {"blocks.1.mlp.w12.weight": zeros(128, 16)}, GATED),
        ({}, {"blocks.1.mlp.fc1.weight": zeros(128, 16)}, GATED + r" in blocks\.1\.mlp"),
        ({}, {"blocks.0.attn.q_norm.weight": zeros(4)}, "norms of queries and keys"),
        ({}, {"fc_norm.weight": zeros(16)}, "without the last norm behind the pooling"),
        ({}, {"norm_pre.weight": zeros(16)}, "a norm in front of the blocks"),
        ({}, {"head.weight": zeros(5, 12)}, r"head\.weight of shape \(5, 16\), got \(5, 12\)"),
        ({}, {"head.weight": zeros(7, 12), "head.bias": zeros(7)}, r"head\.\w+ of shape"),
        ({}, {"blocks.0.ls1.gamma": zeros(8)}, r"ls1\.gamma of shape \(16,\), got \(8,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(options, change, message, tmp_path):
    path = tmp_path / "timm.safetensors"
    save_file(timm_arrays() | change, path)
    with pytest.raises(ValueError, match=message):
        load(make(**options), path)


def test_files_that_are_no_weights_are_refused(tmp_path):
    (tmp_path / "text").write_text("no weights")
    with pytest.raises(ValueError, match="text: expected a safetensors file"):
        interop.load_weights(make(), tmp_path / "text")
    save_file({"layer.weight": np.zeros(3)}, tmp_path / "other")
    with pytest.raises(ValueError, match="the names of adder_flax, timm, .*, got .*layer.weight"):
        interop.load_weights(make(), tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        interop.load_weights(make(), tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "names", "got"),
    [
        (ADDER, "timm", "got adder layers"),
        (dict(image_size=16, patch_size=4, stem_channels=(5,)), "timm", "got convolutions in fro"),
        (dict(norm_position="post"), "timm", "got other blocks"),
        (dict(num_heads=1, qkv_linear="identity"), "timm", "got other blocks"),
        (dict(mlp_linear="normed_dense"), "timm", "got other blocks"),
        (dict(score="bilinear"), "hugging_face", "expected dot-product attention .* got bilinear"),
        ({}, "keras", "expected names of adder_flax, timm, .*_5, got 'keras'"),
        (None, "adder_flax", "got one with layers in few bits"),
    ],
)
def test_what_others_have_no_name_for_is_not_written(options, names, got, tmp_path):
    model = make(**ADDER if options is None else options)
    if options is None:
        layer = model.blocks[0].mlp.fc1
        weights = quantized.quantize_weights(layer.kernel[...], quantized.Grid(-1.0, 0.01))
        model.blocks[0].mlp.fc1 = quantized.AdderLinear.of_weights(layer, weights)
    with pytest.raises(ValueError, match=got):
        interop.save_weights(model, tmp_path / "x", names=names)
    assert not (tmp_path / "x").exists()


AVERAGES = {"optimizer.name": "schedule_free_adamw", "optimizer.schedule": "constant"}


@pytest.mark.parametrize("fields", [{"ema_decay": 0.9}, AVERAGES])
def test_a_run_starts_from_weights_and_its_average_too(fields, tmp_path):
    config = common.deit("additive", "tiny")
    config.update_from_flattened_dict(TINY | fields)
    run = training.build_run(config)
    donor = run.model(run.init()["params"])
    donor.head.bias[...] = donor.head.bias[...] + 3.0
    interop.save_weights(donor, tmp_path / "own.safetensors")
    started, kept, words = interop.start_from(run, tmp_path / "own.safetensors")
    assert (kept, words) == ((), "at random: nothing")
    state = started.init()
    assert int(state["step"]) == 0
    is_average = lambda node: isinstance(node, optax.contrib.ScheduleFreeState)
    averages = filter(is_average, jax.tree.leaves(state["opt_state"], is_leaf=is_average))
    own = [average.z for average in averages]
    assert len(own) == (fields is AVERAGES)
    for params in (state["params"], state["ema_params"], *own):
        np.testing.assert_array_equal(params["head"]["bias"], 3.0 * np.ones(10))
    sharding = lambda params: jax.tree.map(lambda x: x.sharding, params)
    assert sharding(state["params"]) == sharding(run.abstract_state["params"])


@pytest.mark.slow
def test_export_to_files_and_folders_and_start_from_them_on_the_command_line(run_main, tmp_path):
    def run(name, *more, code=0):
        place = f"--workdir={tmp_path / name}"
        done = run_main("--config=experiments/deit_tiny.py", *TINY_FLAGS, place, *more)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    def scores(name, score):
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").open())
        return [row[score] for row in rows if score in row]

    run("first")
    exported = tmp_path / "first" / "timm.safetensors"
    assert str(exported) in run("first", "--mode=export", "--names=timm")
    start = f"--config.init_from={exported}"
    rates = {"learning_rate": 1e-12, "final_learning_rate": 0.0}
    again = ["second", start, *(f"--config.optimizer.{name}={x}" for name, x in rates.items())]
    assert "at random: nothing" in run(*again)
    kept = exported.rename(tmp_path / "kept")
    assert "already complete" in run(*again)  # the file is not needed to resume
    kept.rename(exported)
    losses = [scores(name, "eval/loss") for name in ("first", "second")]
    assert losses[1][0] == pytest.approx(losses[0][-1], rel=1e-4)
    # The folder's own configuration is enough to read it again, without this project's headers.
    run("first", "--mode=export", "--names=hugging_face_folder")
    weights = tmp_path / "first" / "hugging_face_folder" / "model.safetensors"
    save_file(load_file(weights), weights)
    model, statistics = interop.read_model(weights, image_shape=(8, 8, 1), num_classes=10)
    assert model.blocks[0].attention.num_heads == 2
    assert len(statistics[0]) == 1
    *_, accuracy = scores("first", "eval/accuracy")
    assert f"| accuracy | {accuracy:.4f} |" in (weights.parent / "README.md").read_text()
    said = run("second_adder", start, "--config.model.mlp_linear=adder", code=2)
    assert "got adder layers" in said
    assert "Traceback" not in said


def test_layer_scale_and_positions_without_an_entry_for_the_class_token(tmp_path):
    """DeiT III: every branch is multiplied by a vector, and the class token has no position."""
    arrays, rng = timm_arrays(), np.random.default_rng(5)
    branches = [(i, n, layer) for i in (0, 1) for n, layer in ((1, "attn.proj"), (2, "mlp.fc2"))]
    gammas = {f"blocks.{i}.ls{n}.gamma": rng.normal(size=16).astype("f") for i, n, _ in branches}
    patches = {"pos_embed": arrays["pos_embed"][:, 1:]}
    theirs = {name: array.copy() for name, array in (arrays | gammas | patches).items()}
    for i, n, layer in branches:
        gamma = gammas[f"blocks.{i}.ls{n}.gamma"]
        arrays[f"blocks.{i}.{layer}.weight"] *= gamma[:, None]
        arrays[f"blocks.{i}.{layer}.bias"] *= gamma
    arrays["pos_embed"][:, 0] = 0
    expected = timm_forward(arrays, images(), patch_size=3, depth=2, num_heads=4)
    for options in ({}, {"layer_scale": 0.1}):
        model = given(theirs, tmp_path, **options)
        close(model(images()), expected)
    interop.save_weights(model, tmp_path / "timm", names="timm")
    written = load_file(tmp_path / "timm")["blocks.1.ls2.gamma"]
    for found in (model.blocks[1].layer_scale2.scale[...], written):
        np.testing.assert_array_equal(found, gammas["blocks.1.ls2.gamma"])
    # Which has no LayerScale:
    interop.save_weights(model, tmp_path / "folded", names="hugging_face")
    close(again(tmp_path / "folded")(images()), expected)


TIMM_SIZES = dict(img_size=12, patch_size=3, num_classes=5, embed_dim=16, depth=2, num_heads=4)
TIMM = {"architecture": "vit_tiny_patch16_224", "global_pool": "token", "model_args": TIMM_SIZES}
HUGGING_FACE = dict(model_type="vit", image_size=12, num_attention_heads=4, hidden_act="gelu")
HUGGING_FACE |= dict(layer_norm_eps=1e-6)


def timm(**more):
    return TIMM | {"model_args": TIMM_SIZES | more}


UNKNOWN = {
    "timm": [
        (TIMM, None),
        (TIMM | {"model_args": {}}, "heads is 4, as the model's, got 3 by what .*config.json says"),
        (timm(act_layer="relu"), "activation is gelu, .* got relu"),
        (timm(act_layer="gelu_tanh"), "got gelu_tanh"),
        (timm(block_fn="ResPostBlock"), "one with block_fn=ResPostBlock"),
        (timm(norm_layer="rmsnorm"), "LayerNorm, got norm_layer=rmsnorm"),
        (TIMM | {"global_pool": "avg"}, "pooling is cls, .* got mean"),
        (TIMM | {"architecture": "vit_base_patch16_rpn_224"}, "its activation, place of the norms"),
        ({"labels": []}, "its number of heads, activation, place of the norms, .*grid of pat"),
        (None, 'no config.json beside them; put .*, or write there .*"adder_flax.network": '),
        ("{", "expected a configuration in JSON in .*config.json"),
        (TIMM | {"model_args": 3}, "expected model_args by name"),
    ],
    "hugging_face": [
        (HUGGING_FACE, None),
        (HUGGING_FACE | {"num_attention_heads": 2}, "number of heads is 4, .* got 2"),
        (HUGGING_FACE | {"hidden_act": "relu"}, "activation is gelu, .* got relu"),
        (HUGGING_FACE | {"layer_norm_eps": 1e-12}, "1e-12 .*; set config.model.norm_epsilon"),
        (HUGGING_FACE | {"model_type": "dinov2"}, "Face's vit or deit, got .* of dinov2"),
        (HUGGING_FACE | {"layer_norm_eps": "x"}, "a number in config.json, got x"),
        (HUGGING_FACE | {"num_attention_heads": 4.5}, "a whole number in config.json, got 4.5"),
        (None, "got no config.json"),
    ],
    "transformers_5": [(HUGGING_FACE, None)],
    "adder_flax": [(None, "got no entry adder_flax.network in the file")],
}
UNKNOWN = [(names, *case) for names, cases in UNKNOWN.items() for case in cases]


@pytest.mark.parametrize(("names", "config", "message"), UNKNOWN)
def test_what_arrays_do_not_tell_is_read_beside_them_or_refused_by_name(
    names, config, message, tmp_path
):
    interop.save_weights(make(), tmp_path / "own", names=names)
    # Without what this project writes into the header.
    save_file(load_file(tmp_path / "own"), tmp_path / "w")
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
    if message is None:
        assert interop.load_weights(make(seed=1), tmp_path / "w") == ()
    else:
        with pytest.raises(ValueError, match=message):
            interop.load_weights(make(seed=1), tmp_path / "w")


def test_what_the_header_says_counts_more_than_what_lies_beside(tmp_path):
    interop.save_weights(make(), tmp_path / "w", names="timm")
    with pytest.raises(ValueError, match="heads is 2, .* got 4 by the entry adder_flax.network"):
        load(make(num_heads=2), tmp_path / "w")
    with pytest.raises(ValueError, match="epsilon .* is 1e-05, .* got 1e-06 .*; set config.model"):
        load(make(norm_epsilon=1e-5), tmp_path / "w")


@pytest.mark.unchecked
def test_what_hugging_face_has_no_class_for_is_no_folder(tmp_path):
    options = dict(label_names=list("abcde"), mean=[0.5] * 3, std=[0.5] * 3)
    for model, message in (
        (make(pooling="mean"), "got pooling 'mean', 0 tokens in front"),
        (make(registers=2), "got pooling 'cls', 3 tokens in front"),
        (make(fc_norm=True), "reads its class token behind the last norm"),
        (models.ConvNet((4,), rngs=nnx.Rngs(0)), "got a ConvNet"),
    ):
        with pytest.raises(ValueError, match=message):
            interop.save_folder(model, tmp_path / "folder", **options)
    assert not (tmp_path / "folder").exists()
