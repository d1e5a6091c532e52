"""What users of other projects ran into with weights and exported models, tried here.

Names and formulas of timm and transformers are transcribed; `tests/interop/reference.py` is timm's
transformer in float64.
"""

import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from adder_flax import interop, training
from adder_flax.app import modes
from adder_flax.experiments import common
from adder_flax.interop import _folder, _network
from tests.interop.reference import timm_forward
from tests.interop.test_weights import again, close, given, images, make, timm_arrays
from tests.training.tiny import TINY


def of_timm(path):
    """Logits of timm's formulas for a file in timm's names."""
    return timm_forward(load_file(path), images(), patch_size=3, depth=2, num_heads=4)


SCORES = [
    {},
    {"scale": 0.5},
    {"scale": "sqrt_dim", "temperature": 3.0},
    {"scale": "variance_matched"},
    {"temperature": "learned"},
    {"scale": 0.3, "temperature": "learned"},
]


@pytest.mark.cases(3)
@pytest.mark.parametrize("options", SCORES, ids=str)
@pytest.mark.parametrize("names", ["timm", "hugging_face", "transformers_5"])
def test_scale_and_temperature_become_part_of_the_queries(names, options, tmp_path):
    """Others have q·k/√d and no field for anything else."""
    model = make(**options)
    interop.save_weights(model, tmp_path / "w", names=names)
    interop.save_weights(again(tmp_path / "w"), tmp_path / "timm", names="timm")
    written = {name: array.shape for name, array in load_file(tmp_path / "timm").items()}
    assert written == {name: array.shape for name, array in timm_arrays().items()}
    close(of_timm(tmp_path / "timm"), model(images()))


@pytest.mark.parametrize("options", SCORES[:4], ids=str)
def test_weights_of_timm_give_timms_logits_whatever_scale_the_model_has(options, tmp_path):
    model = given(timm_arrays(), tmp_path, **options)
    close(model(images()), of_timm(tmp_path / "w"))


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"identity": True}, "the identity map"),
        ({"score": "adder"}, "adder"),
        ({"score": ("dot", "gaussian"), "identity": False}, "gaussian"),
    ],
)
def test_attention_that_others_do_not_have_is_not_written_in_their_names(options, got, tmp_path):
    model = make(**options)
    for names in ("timm", "hugging_face", "transformers_5"):
        with pytest.raises(ValueError, match=f"names of {names}, got {got}"):
            interop.save_weights(model, tmp_path / "w", names=names)
    with pytest.raises(ValueError, match=f"got {got}"):
        interop.save_folder(model, tmp_path / "f", label_names="abcde", mean=[0.5], std=[0.5])
    assert not list(tmp_path.iterdir())


@pytest.mark.unchecked
def test_the_shorter_side_is_truncated_wherever_it_is_said():
    """timm computes floor(size / crop_pct), DeiT int((256 / 224) * size)."""
    for size in (32, 64, 96, 128, 160, 192, 224, 240, 256, 288, 299, 320, 384, 448, 512, 518):
        for ratio in (0.8, 0.85, 0.875, 0.888, 0.9, 0.95, 0.965, 1.0):
            shorter, shape = math.floor(size / ratio), (size, size, 3)
            found = _folder._preprocessing(shape, [0.5] * 3, [0.5] * 3, ratio)
            assert found["size"] == {"shortest_edge": shorter}
            options = dict(image_shape=shape, eval_crop_ratio=ratio, crops_on_host=True)
            said = modes._preparation(SimpleNamespace(**options))
            assert f"resized to {shorter} pixels" in said


def wide(x):
    return np.asarray(x[...]).astype(np.float64)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("gamma", [1e-4, 1e-6])
def test_layer_scale_is_folded_in_32_bits(gamma, dtype, tmp_path):
    """DeiT III and CaiT start at γ = 1e-4 to 1e-6: in 16 bits the product is rounded, or 0."""
    arrays = {name: array.astype(dtype) for name, array in timm_arrays().items()}
    scale = (gamma * np.random.default_rng(5).uniform(0.5, 1.5, 16)).astype(dtype)
    arrays |= {f"blocks.{i}.ls{n}.gamma": scale for i in (0, 1) for n in (1, 2)}
    model = given(arrays, tmp_path)
    exact = wide(arrays["blocks.1.mlp.fc2.weight"]) * wide(scale)[:, None]
    np.testing.assert_allclose(model.blocks[1].mlp.fc2.kernel[...].T, exact, rtol=1e-6)
    exact = wide(arrays["blocks.0.attn.proj.bias"]) * wide(scale)
    np.testing.assert_allclose(model.blocks[0].attention.out.bias[...], exact, rtol=1e-6)


def test_layer_scale_of_16_bit_parameters_is_folded_in_32_bits(tmp_path):
    graphdef, params = nnx.split(make(layer_scale=1e-4))
    model = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    interop.save_weights(model, tmp_path / "w", names="hugging_face")
    written = load_file(tmp_path / "w")["vit.encoder.layer.0.output.dense.weight"]
    block = model.blocks[0]
    exact = wide(block.mlp.fc2.kernel) * wide(block.layer_scale2.scale)
    np.testing.assert_allclose(written, exact.T, rtol=1e-6)


# Of e[row, column] = sin(1 + 3 row + 7 column), by PyTorch 2.14.1 in float64:
# torch.nn.functional.interpolate(mode="bicubic", align_corners=False), with antialias=True as
# timm 1.0.31 has it in resample_abs_pos_embed (which agreed to 1e-5), or without as DeiT has it.
KNOWN_POSITIONS = {
    ((4, 4), (2, 8), "timm"): """0.136757 0.141389 0.151225 0.140317 0.107972 0.060252 0.001301
        -0.026544 -0.063724 -0.08398 -0.126881 -0.150509 -0.151849 -0.13065 -0.089784 -0.07049""",
    ((4, 4), (2, 8), "torch"): """-0.07948 -0.113001 -0.168122 -0.207499 -0.210698 -0.179388
        -0.12923 -0.098832 0.187739 0.194842 0.207619 0.187867 0.149581 0.072791 0.000617 -0.043857
        """,
    ((2, 8), (4, 3), "timm"): """1.031867 -0.343619 -0.867776 0.511566 -0.19951 -0.416292 -0.520156
        0.086247 0.478969 -1.040457 0.230356 0.930453""",
    ((2, 8), (4, 3), "torch"): """1.206845 -0.430148 -0.900694 0.548006 -0.232208 -0.382735
        -0.537142 0.09381 0.470374 -1.195982 0.29175 0.988333""",
}
SAID = {
    "timm": {"architecture": "vit_tiny_patch16_224", "model_args": {"num_heads": 4}},
    "hugging_face": {"model_type": "vit", "num_attention_heads": 4, "layer_norm_eps": 1e-6},
}
SAID["transformers_5"] = SAID["hugging_face"]


def positions(grid):
    rows, columns = (np.arange(side) for side in grid)
    return np.sin(1 + 3 * rows[:, None] + 7 * columns).reshape(1, -1, 1) + np.zeros((1, 1, 16))


def said(names, height, width):
    """What timm or transformers write beside weights of images of this size."""
    if names != "timm":
        return SAID[names] | {"image_size": [height, width]}
    return SAID[names] | {"pretrained_cfg": {"input_size": [3, height, width]}}


def without_header(folder, config):
    """Leaves of folder/w what others would write, and their configuration."""
    save_file(load_file(folder / "w"), folder / "w")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("case", "known"), KNOWN_POSITIONS.items(), ids=str)
def test_rectangles_of_positions_are_resized_by_their_rows_and_columns(case, known, tmp_path):
    """huggingface/pytorch-image-models#2737: as many patches in another rectangle were copied."""
    old, new, like = case
    side_of_old, side_of_new = (tuple(3 * n for n in grid) for grid in (old, new))
    saved = make(image_size=side_of_old)
    saved.pos_embed[:, 1:] = positions(old)
    known = np.array(known.split(), float)
    for names in ("timm", "adder_flax") if like == "timm" else ("hugging_face",):
        for header in (True, False):
            interop.save_weights(saved, tmp_path / "w", names=names)
            if not header and names != "adder_flax":
                # Others say the size of the images beside the file.
                without_header(tmp_path, said(names, *side_of_old))
            found = again(tmp_path / "w", image_size=side_of_new).pos_embed
            np.testing.assert_allclose(found[0, 1:, 5], known, atol=2e-6)
            np.testing.assert_array_equal(found[:, 0], saved.pos_embed[:, 0])


@pytest.mark.parametrize("names", ["timm", "hugging_face"])
def test_a_grid_that_is_said_wrong_is_refused(names, tmp_path):
    interop.save_weights(make(), tmp_path / "w", names=names)
    for height, message in (
        (24, "positions of 8 × 8 patches, .*, got 17; say in the conf"),
        (0, "expected rows and columns of patches, from 1 to 1024"),
    ):
        without_header(tmp_path, said(names, height, 24))
        with pytest.raises(ValueError, match=message):
            interop.load_weights(make(), tmp_path / "w")


def test_a_header_without_a_grid_is_refused_with_what_to_write(tmp_path):
    """As of files that were written before grids were."""
    facts = _network.network_of(make())._asdict()
    interop.save_weights(make(), tmp_path / "w")
    old = {_network.METADATA: json.dumps({k: v for k, v in facts.items() if k != "grid"})}
    save_file(load_file(tmp_path / "w"), tmp_path / "w", metadata=old)
    with pytest.raises(ValueError, match="do not tell, its grid of patches, got") as refused:
        interop.load_weights(make(), tmp_path / "w")
    example = json.loads(str(refused.value).partition("such as ")[2])
    assert example[_network.METADATA]["grid"] == [4, 4]
    without_header(tmp_path, example)
    again(tmp_path / "w")


HALVES = MEAN, STD = ((0.5, 0.4, 0.3), (0.25, 0.2, 0.1))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("config.json", {"pretrained_cfg": {"mean": MEAN, "std": STD}}),
        ("config.json", {"mean": MEAN, "std": STD}),
        ("preprocessor_config.json", {"image_mean": MEAN, "image_std": STD}),
        (None, None),
    ],
)
def test_mean_and_deviation_are_read_from_where_each_project_keeps_them(name, fields, tmp_path):
    """timm's augreg transformers want 0.5, and were given ImageNet's without a word."""
    path = tmp_path / "model.safetensors"
    interop.save_weights(make(), path, names="timm", statistics=None if name else HALVES)
    if name:
        assert interop.read_statistics(tmp_path) is None
        (tmp_path / name).write_text(json.dumps(fields))
    assert interop.read_statistics(path) == interop.read_statistics(tmp_path) == HALVES


def test_deviations_that_are_none_are_refused(tmp_path):
    interop.save_weights(make(), tmp_path / "w")
    for std in ([0.5, 0.5, 0.0], [0.5]):
        fields = {"pretrained_cfg": {"mean": [0.5] * 3, "std": std}}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        with pytest.raises(ValueError, match="deviations above 0, got"):
            interop.read_statistics(tmp_path / "w")


@pytest.mark.slow
def test_a_run_keeps_the_mean_of_its_weights_to_the_end_and_in_what_it_exports(tmp_path, capsys):
    config = common.deit("multiplicative", "tiny")
    config.update_from_flattened_dict(TINY | {"num_epochs": 0.05})
    plain = training.build_run(config)
    assert plain.task.data_facts.mean == (0.3053,)
    source, weights = plain.eval_source, tmp_path / "weights"
    model = plain.model(plain.init()["params"])
    interop.save_weights(model, weights, names="timm", statistics=((0.6,), (0.2,)))
    config.init_from = str(weights)
    # No run yet: the file is scored by itself.
    modes.evaluate(config, tmp_path / "run", "last")
    printed = capsys.readouterr().out
    pixels, labels = (source.first(len(source))[name] for name in ("image", "label"))
    logits = model((np.float32(pixels) / 255 - 0.6) / 0.2)
    assert f"accuracy {float((logits.argmax(-1) == labels).mean()):.4f}" in printed
    assert str(weights) in printed
    assert not (tmp_path / "run").exists()

    modes.train(config, tmp_path / "run")
    assert "images normalised by mean 0.6, deviation 0.2" in capsys.readouterr().out
    weights.unlink()
    assert training.read_config(tmp_path / "run").data.mean == "0.6"
    modes.evaluate(config, tmp_path / "run", "last")
    modes.export(config, tmp_path / "run", "last", "timm")
    modes.export(config, tmp_path / "run", "last", "hugging_face_folder")
    for name in ("timm.safetensors", "hugging_face_folder"):
        assert interop.read_statistics(tmp_path / "run" / name) == ((0.6,), (0.2,))
    config.data.mean, config.data.std = "0.1", "0.3"
    with pytest.raises(training.RunError, match=r"data.mean: '0.6' there, '0.1' now"):
        modes.evaluate(config, tmp_path / "run", "last")


def test_mean_and_deviation_are_settings_of_the_data():
    config = common.deit("multiplicative", "tiny")
    numbers = {"data.mean": "0.5,0.4,0.3", "data.std": "0.2,0.2,0.5"}
    config.update_from_flattened_dict(TINY | numbers)
    task = training.build_run(config).task
    # Grey images have the average of the channels.
    np.testing.assert_allclose([task.data_facts.mean, task.data_facts.std], [(0.4,), (0.3,)])
    (inputs,) = task.inputs({"image": np.full((1, 8, 8, 1), 51, np.uint8)})
    np.testing.assert_allclose(inputs, (0.2 - 0.4) / 0.3, rtol=1e-6)
    config.data.mean, config.data.std = "0.5,0.4", "0.2,0.3"
    with pytest.raises(
        training.RunError, match="expected 1 or 3 numbers in config.data.mean, .* got 2"
    ):
        training.build_run(config)
    config.data.mean = "0.5,0.4,0.3"
    for std, message in (("0.2", "a number for each of"), ("0.2,0.2,0", "up to 4 with commas")):
        config.data.std = std
        with pytest.raises(training.RunError, match=f"data.std: expected {message}"):
            training.build_run(config)


def write_parts(arrays, folder):
    """Three files and their index, as Hugging Face's `save_pretrained(max_shard_size=…)`."""
    names = sorted(arrays)
    files = [f"model-0000{n + 1}-of-00003.safetensors" for n in range(3)]
    for n, file in enumerate(files):
        save_file({name: arrays[name] for name in names[n::3]}, folder / file)
    places = {name: files[n % 3] for n, name in enumerate(names)}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_folder_and_its_parts_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(said("hugging_face", 12, 12)))
    saved, whole = make(), tmp_path / "model.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    interop.save_weights(saved, whole, names="hugging_face")
    for place in (tmp_path, tmp_path, index):
        np.testing.assert_array_equal(again(place)(images()), saved(images()))
        if whole.exists():
            write_parts(load_file(whole), tmp_path)
            whole.unlink()
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="got: No such file"):
        interop.load_weights(make(), tmp_path)
    index.write_text('{"weight_map": {"a": "../w"}}')
    with pytest.raises(ValueError, match="expected files of the same folder by array"):
        interop.load_weights(make(), tmp_path)
    index.unlink()
    with pytest.raises(FileNotFoundError, match="expected a safetensors file in .*, got: No such"):
        interop.load_weights(make(), tmp_path)


@pytest.mark.parametrize("front", ["module.", "model.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("names", ["timm", "hugging_face"])
def test_names_of_wrappers_are_taken_off(front, names, tmp_path):
    """DataParallel, Lightning and torch.compile put them in front."""
    saved = make()
    interop.save_weights(saved, tmp_path / "w", names=names)
    arrays = load_file(tmp_path / "w")
    wrapped = {front + name: array for name, array in arrays.items()}
    save_file(wrapped, tmp_path / "w")
    without_header(tmp_path, said(names, 12, 12))
    np.testing.assert_array_equal(again(tmp_path / "w")(images()), saved(images()))
    save_file(arrays | wrapped, tmp_path / "w")
    with pytest.raises(ValueError, match="expected each array once"):
        interop.load_weights(make(), tmp_path / "w")


@pytest.mark.parametrize("names", ["hugging_face", "transformers_5"])
def test_a_model_without_a_classifier_gives_all_but_the_head(names, tmp_path):
    """What `ViTModel` saves, its pooler among it."""
    saved, model = make(), make(seed=1)
    interop.save_weights(saved, tmp_path / "w", names=names)
    arrays = {name.removeprefix("vit."): x for name, x in load_file(tmp_path / "w").items()}
    arrays = {name: x for name, x in arrays.items() if not name.startswith("classifier.")}
    pooler = {f"pooler.dense.{name}": np.ones(16, np.float32) for name in ("weight", "bias")}
    for more in ({}, pooler):
        save_file(arrays | more, tmp_path / "w")
        without_header(tmp_path, said(names, 12, 12))
        assert interop.load_weights(model, tmp_path / "w") == ("head.bias", "head.kernel")
    model.head.kernel[...], model.head.bias[...] = saved.head.kernel[...], saved.head.bias[...]
    np.testing.assert_array_equal(model(images()), saved(images()))


def test_absent_biases_of_query_key_and_value_are_zeros(tmp_path):
    arrays = {n: a for n, a in timm_arrays().items() if not n.endswith("qkv.bias")}
    zeros = {f"blocks.{i}.attn.qkv.bias": np.zeros(48, np.float32) for i in range(2)}
    model = given(arrays, tmp_path)
    save_file(arrays | zeros, tmp_path / "w")
    close(model(images()), of_timm(tmp_path / "w"))
    del zeros["blocks.1.attn.qkv.bias"]
    with pytest.raises(ValueError, match=r"expected blocks\.1\.attn\.qkv\.bias among the weights"):
        given(arrays | zeros, tmp_path)


def test_patches_of_three_channels_and_of_one(tmp_path):
    """timm sums three for one; one for three is a third of each: grey pictures give the same."""
    grey = images(channels=1)
    colour = np.repeat(grey, 3, axis=-1)
    expected = timm_forward(timm_arrays(), colour, patch_size=3, depth=2, num_heads=4)
    model = given(timm_arrays(), tmp_path, channels=1)
    close(model(grey), expected)
    for names in ("timm", "hugging_face"):
        interop.save_weights(model, tmp_path / "w", names=names)
        close(again(tmp_path / "w")(colour), expected)
    two = timm_arrays() | {"patch_embed.proj.weight": np.ones((16, 2, 3, 3), np.float32)}
    with pytest.raises(ValueError, match=r"of shape \(16, 3, 3, 3\), got \(16, 2, 3, 3\)"):
        given(two, tmp_path)


def test_what_is_not_as_in_the_file_is_said(tmp_path):
    arrays = {n: a for n, a in timm_arrays().items() if not n.endswith("qkv.bias")}
    arrays |= {f"blocks.{i}.ls{n}.gamma": np.ones(16, np.float32) for i in (0, 1) for n in (1, 2)}
    arrays["patch_embed.proj.weight"] = np.ones((16, 3, 4, 4), np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    facts = _network.network_of(make())._asdict()
    (tmp_path / "config.json").write_text(json.dumps({_network.METADATA: facts}))
    config = common.deit("additive", "tiny")
    sizes = {"width": 16, "depth": 2, "num_heads": 4, "patch_size": 4, "mlp_ratio": 4.0}
    config.update_from_flattened_dict(TINY | {f"model.{name}": n for name, n in sizes.items()})
    _, at_random, words = interop.start_from(training.build_run(config), tmp_path)
    assert {"head.bias", "head.kernel"} < set(at_random)
    assert words == (
        "at random: blocks.*.attention.score, head (that of the file is for 5 classes); positions "
        "resized from 4 × 4 to 2 × 2 patches; patches of 3 channels made those of 1; biases of "
        "query, key and value are 0, since there are none; LayerScale made part of the layers "
        "before it"
    )


def updates_of(**options):
    """A step of a run's optimizer from gradients of 1: updates by parameter."""
    config = common.deit("multiplicative", "tiny")
    sizes = {"model.depth": 2, "optimizer.clip_norm": 3.0}
    own = {f"optimizer.{name}": value for name, value in options.items()}
    config.update_from_flattened_dict(TINY | sizes | own)
    run = training.build_run(config)
    params = run.init()["params"]
    optimizer = run.program.parts(run.numbers).optimizer
    # The first step of the warm-up has a rate of 0.
    state, ones = optimizer.init(params), jax.tree.map(jnp.ones_like, params)
    for _ in range(2):
        updates, state = optimizer.update(ones, state, params)
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    named = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {named(path): np.asarray(update) for path, update in leaves}


# What timm 1.0.31 says for a transformer of two blocks and a decay of 1/2:
# timm.optim.param_groups_layer_decay(model, layer_decay=0.5), names by lr_scale.
TIMM_SCALES = {
    0.125: ("cls_token", "pos_embed", "patch_embed.proj.kernel"),
    0.25: ("blocks.0.attention.query.kernel", "blocks.0.norm1.scale"),
    0.5: ("blocks.1.mlp.fc2.bias", "norm.scale"),
    1.0: ("head.kernel", "head.bias"),
}


def test_rates_fall_towards_the_images_as_in_timm():
    plain, decayed = updates_of(), updates_of(layer_decay=0.5)
    for scale, names in TIMM_SCALES.items():
        for name in names:
            assert np.abs(plain[name]).min() > 0
            np.testing.assert_allclose(decayed[name], scale * plain[name], rtol=1e-6)


@pytest.mark.slow
def test_frozen_parameters_do_not_move_and_do_not_count_in_the_norm():
    plain = updates_of(name="sgd")
    frozen = updates_of(name="sgd", freeze="patch_embed, pos_embed,cls_token,blocks,norm")
    moved = {name for name, update in frozen.items() if np.abs(update).max() > 0}
    assert moved == {"head.bias", "head.kernel"}
    # Gradients of 1 are clipped to a norm of 3, that of the 170 numbers of the head alone.
    weights = sum(frozen[name].size for name in moved)
    everything = sum(update.size for update in plain.values())
    ratio = (frozen["head.bias"] / plain["head.bias"]).mean()
    np.testing.assert_allclose(ratio, (everything / weights) ** 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": "blocks.7"}, "to name parameters, got blocks.7, which is none of blocks"),
        ({"freeze": "head,hea"}, "got hea, which is none"),
        ({"name": "lbfgs", "freeze": "head"}, "expected 1.0 and nothing with lbfgs"),
    ],
)
def test_what_cannot_be_frozen_is_said(options, message):
    with pytest.raises(training.RunError, match=message):
        updates_of(**options)


# Register tokens, the mean behind a class token, the norm behind the mean: timm#2014.
# Arguments of timm's class, those of ours, and timm 1.0.31's logits of the first image of 12 × 12
# pixels and of one of 18 × 6, with `dynamic_img_size=True`.
REGISTERS = {
    "vit_*_reg4_gap": (
        dict(class_token=False, reg_tokens=4, no_embed_class=True, fc_norm=True),
        dict(pooling="mean", registers=4, fc_norm=True),
        [0.13208, 0.21598, -0.16877, -0.0384, 0.28247],
        [0.20358, 0.27614, -0.11193, 0.02408, 0.4433],
    ),
    "registers behind the class token": (
        dict(reg_tokens=2),
        dict(registers=2),
        [0.25647, 0.1623, -0.34545, -0.01208, 0.22421],
        [0.23954, 0.16263, -0.35231, -0.03104, 0.22968],
    ),
    "mean beside both": (
        dict(reg_tokens=3),
        dict(pooling="mean", registers=4),
        [0.24534, 0.23264, -0.10293, -0.00536, 0.40124],
        [0.26834, 0.27609, -0.06786, 0.01865, 0.47774],
    ),
    "plain": (
        {},
        {},
        [-0.23088, 0.23233, -0.0612, -0.18787, 0.31226],
        [-0.24359, 0.23533, -0.06214, -0.21592, 0.31999],
    ),
}
TALL = np.random.default_rng(1).normal(size=(1, 18, 6, 3)).astype(np.float32)


def arrays_with(class_token=True, reg_tokens=0, no_embed_class=False, fc_norm=False):
    """Arrays of timm's class with these arguments."""
    arrays, rng = timm_arrays(), np.random.default_rng(2)
    if reg_tokens:
        arrays["reg_token"] = rng.normal(size=(1, reg_tokens, 16)).astype(np.float32)
    if not class_token:
        del arrays["cls_token"]
    tokens = 16 + (0 if no_embed_class else class_token + reg_tokens)
    arrays["pos_embed"] = rng.normal(size=(1, tokens, 16)).astype(np.float32)
    if fc_norm:
        arrays |= {f"fc_{name}": arrays.pop(name) for name in ("norm.weight", "norm.bias")}
    return arrays


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", REGISTERS)
def test_registers_and_the_norm_behind_the_mean_give_timms_logits(kind, tmp_path):
    theirs, ours, logits, tall = REGISTERS[kind]
    model = given(arrays_with(**theirs), tmp_path, **ours)
    np.testing.assert_allclose(model(images())[0], logits, atol=2e-5)
    np.testing.assert_allclose(model(TALL)[0], tall, atol=2e-5)
    interop.save_weights(model, tmp_path / "w", names="timm")
    written = {name: array.shape for name, array in load_file(tmp_path / "w").items()}
    if "registers" in ours:  # of timm's class without positions for the tokens in front
        pooled_by_mean = ours.get("pooling") == "mean"
        options = dict(class_token=not pooled_by_mean, reg_tokens=ours["registers"])
        options |= dict(no_embed_class=True, fc_norm="fc_norm" in ours)
        assert written == {name: a.shape for name, a in arrays_with(**options).items()}
    close(again(tmp_path / "w", **ours)(images()), model(images()))
    read, _ = interop.read_model(tmp_path / "w", image_shape=(12, 12, 3), num_classes=5)
    close(read(images()), model(images()))


def test_a_model_is_built_from_what_timm_says_of_its_own(tmp_path):
    arrays = arrays_with(**REGISTERS["mean beside both"][0])
    save_file(arrays, tmp_path / "model.safetensors")
    said = {
        "architecture": "vit_tiny_patch16_224",
        "global_pool": "avg",
        "model_args": {"img_size": 12, "num_heads": 4, "fc_norm": False, "reg_tokens": 3},
    }
    (tmp_path / "config.json").write_text(json.dumps(said))
    model, _ = interop.read_model(tmp_path, image_shape=(12, 12, 3), num_classes=5)
    np.testing.assert_allclose(model(images())[0], REGISTERS["mean beside both"][2], atol=2e-5)
    said["model_args"]["pool_include_prefix"] = True
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="plain VisionTransformer, got one with pool_include_pre"):
        interop.read_model(tmp_path, image_shape=(12, 12, 3), num_classes=5)


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        (dict(reg_tokens=4), {}, "got reg_token; set config.model.registers to their number"),
        (dict(reg_tokens=4), dict(registers=3), "expected 3 tokens .*, got 4; set it to 4"),
        (dict(reg_tokens=4), dict(pooling="mean", registers=3), "expected 2 .*; set it to 5"),
        ({}, dict(pooling="mean"), "got cls_token; set config.model.pooling to 'cls', or,"),
        (dict(fc_norm=True), {}, r"got fc_norm\.bias; set config\.model\.fc_norm, or"),
        ({}, dict(fc_norm=True), r"got norm\.bias; set config\.model\.fc_norm to False"),
        ({}, dict(registers=2), "expected reg_token among the weights, got none"),
    ],
)
def test_what_tokens_and_norms_do_not_fit_says_what_to_set(theirs, ours, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        given(arrays_with(**theirs), tmp_path, **ours)


# Features of blocks, timm#1577: timm 1.0.31's `forward_intermediates` for TALL, the first features
# of the patch in row 4 and column 1, behind each block, and normalised behind the first.
FEATURES = {
    "vit_*_reg4_gap": ([-0.06304, 4.21895, 3.81086], [-0.49418, 3.80424, 3.79618]),
    "plain": ([-0.71275, 3.55102, 3.7155], [-1.11379, 3.12196, 3.40173]),
}
NORMALISED = [-0.1494, -1.08906, -0.77536]


@pytest.mark.parametrize("kind", FEATURES)
def test_features_of_blocks_are_timms(kind, tmp_path):
    theirs, ours, *_ = REGISTERS[kind]
    model = given(arrays_with(**theirs), tmp_path, **ours)
    found = model.features(TALL, blocks=(1, -2), as_grid=True)
    for x, expected in zip(found, FEATURES[kind][::-1], strict=True):
        assert x.shape == (1, 6, 2, 16)
        np.testing.assert_allclose(x[0, 4, 1, :3], expected, atol=2e-5)
    if kind == "plain":
        (x,) = model.features(TALL, blocks=(0,), as_grid=True, normalised=True)
        np.testing.assert_allclose(x[0, 4, 1, :3], NORMALISED, atol=2e-5)
