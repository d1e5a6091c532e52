"""Weights against timm and transformers themselves, where they are installed: no other test needs
PyTorch."""

import functools
import json
import math

import numpy as np
import pytest
from PIL import Image

from adder_flax import interop
from adder_flax.data import read_image
from adder_flax.interop import _network
from adder_flax.interop._names import resize_positions
from tests.interop.test_weights import close, images, load, make

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

TIMM_SIZES = dict(img_size=12, patch_size=3, num_classes=5, embed_dim=16, depth=2, num_heads=4)


def randomized(theirs, seed=0):
    """Their model, all of whose parameters are random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return theirs.eval()


def tensor(pixels):
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2))


def logits_of(theirs, pixels=None, **options):
    with torch.no_grad():
        found = theirs(tensor(images() if pixels is None else pixels), **options)
    return getattr(found, "logits", found).numpy()


def check_report(report):
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def save(theirs, path):
    safetensors_torch.save_file(theirs.state_dict(), path)


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({}, {}),
        (dict(init_values=0.5, no_embed_class=True), {}),  # as DeiT III
        (dict(global_pool="avg", class_token=False, fc_norm=False), dict(pooling="mean")),
        (
            dict(global_pool="avg", class_token=False, reg_tokens=4, no_embed_class=True),
            dict(pooling="mean", registers=4, fc_norm=True),
        ),
        ({}, dict(distilled=True)),
    ],
)
def test_timm_both_ways(options, own, tmp_path):
    timm = pytest.importorskip("timm")
    kind = timm.models.vision_transformer.VisionTransformer
    if "distilled" in own:
        kind = timm.models.deit.VisionTransformerDistilled
    theirs = randomized(kind(**TIMM_SIZES, **options))
    save(theirs, tmp_path / "timm.safetensors")
    model, ours = make(**own), make(seed=3, **own)
    assert load(model, tmp_path / "timm.safetensors") == ()
    close(model(images()), logits_of(theirs))
    interop.save_weights(ours, tmp_path / "ours.safetensors", names="timm")
    unwritten = () if "reg_tokens" in options else ("init_values", "no_embed_class")
    plain = kind(**TIMM_SIZES, **{n: v for n, v in options.items() if n not in unwritten})
    plain.load_state_dict(safetensors_torch.load_file(tmp_path / "ours.safetensors"))
    close(ours(images()), logits_of(plain.eval()))


def test_every_plain_architecture_of_timm_is_what_its_name_is_taken_for():
    timm = pytest.importorskip("timm")
    plain = [name for name in timm.list_models() if _network._PLAIN.fullmatch(name)]
    assert len(plain) > 25
    for name in plain:
        with torch.device("meta"):
            theirs = timm.create_model(name)
        block = theirs.blocks[-1]
        found = _network._timm({"architecture": name}, theirs.patch_embed.patch_size[0])
        if not name.endswith("dinov2"):  # whose configuration tells the size of its images
            assert found.grid == theirs.patch_embed.grid_size, name
        assert found.num_heads == block.attn.num_heads, name
        assert isinstance(block.mlp.act, torch.nn.GELU), name
        assert block.mlp.act.approximate == "none", name
        assert {norm.eps for norm in (block.norm1, block.norm2)} == {found.epsilon}, name
        assert type(block).__name__ == "Block", name
        assert type(block.attn).__name__ == "Attention", name
        assert {"token": "cls", "avg": "mean"}[theirs.global_pool] == found.pooling, name


def vit(**options):
    transformers = pytest.importorskip("transformers")
    sizes = dict(image_size=12, patch_size=3, hidden_size=16, intermediate_size=64, num_labels=5)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=4)
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes | options))


HUGGING_FACE_FIELDS = "image_size patch_size hidden_size num_hidden_layers num_attention_heads"
HUGGING_FACE_FIELDS += " intermediate_size layer_norm_eps id2label label2id"


def deit_config():
    transformers = pytest.importorskip("transformers")
    config = vit(layer_norm_eps=1e-6).config.to_dict()
    return transformers.DeiTConfig(**{name: config[name] for name in HUGGING_FACE_FIELDS.split()})


@pytest.mark.parametrize("epsilon", [1e-12, 1e-6])
def test_hugging_face_both_ways(epsilon, tmp_path):
    theirs = randomized(vit(layer_norm_eps=epsilon))
    theirs.save_pretrained(tmp_path)
    model, ours = make(norm_epsilon=epsilon), make(seed=3, norm_epsilon=epsilon)
    assert interop.load_weights(model, tmp_path / "model.safetensors") == ()
    close(model(images()), logits_of(theirs))
    interop.save_weights(ours, tmp_path / "model.safetensors", names="hugging_face")
    again, report = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    check_report(report)
    close(ours(images()), logits_of(again.eval()))


def test_the_state_of_transformers_both_ways(tmp_path):
    """What ``state_dict`` has, which from version 5 on are other names than those in files."""
    theirs = randomized(vit(layer_norm_eps=1e-6))
    save(theirs, tmp_path / "raw.safetensors")
    (tmp_path / "config.json").write_text(theirs.config.to_json_string(use_diff=False))
    model = make()
    assert interop.load_weights(model, tmp_path / "raw.safetensors") == ()
    close(model(images()), logits_of(theirs))
    renamed = "vit.layers.0.attention.q_proj.weight" in theirs.state_dict()
    names = "transformers_5" if renamed else "hugging_face"
    interop.save_weights(make(seed=3), tmp_path / "ours.safetensors", names=names)
    theirs.load_state_dict(safetensors_torch.load_file(tmp_path / "ours.safetensors"), strict=True)
    close(make(seed=3)(images()), logits_of(theirs))


def test_distilled_models_of_hugging_face_both_ways(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = randomized(transformers.DeiTForImageClassificationWithTeacher(deit_config()))
    theirs.save_pretrained(tmp_path)
    save(theirs, tmp_path / "raw.safetensors")
    with torch.no_grad():
        both = theirs(tensor(images()))
    model, ours = make(distilled=True), make(seed=3, distilled=True)
    for name in ("model", "raw"):
        assert interop.load_weights(model, tmp_path / f"{name}.safetensors") == ()
        close(model(images()), both.logits.numpy())
        close(model.heads(images())[:, 0], both.cls_logits.numpy())
        close(model.heads(images())[:, 1], both.distillation_logits.numpy())
    interop.save_weights(ours, tmp_path / "model.safetensors", names="hugging_face")
    again, report = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    check_report(report)
    close(ours(images()), logits_of(again.eval()))


@pytest.mark.parametrize("distilled", [False, True])
def test_one_head_beside_a_distillation_token_is_refused_by_name(distilled, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.DeiTForImageClassification(deit_config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"got classifier\.\w+, .*DeiTForImageClassification"):
        interop.load_weights(make(distilled=distilled), tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("mlp", "where"), [("SwiGLU", ""), ("SwiGLUPacked", r" in blocks\.0\.mlp")]
)
def test_parts_that_timm_has_and_the_model_does_not_are_refused_by_name(mlp, where, tmp_path):
    timm = pytest.importorskip("timm")
    options = TIMM_SIZES | {"mlp_layer": getattr(timm.layers, mlp)}
    theirs = timm.models.vision_transformer.VisionTransformer(**options)
    save(theirs, tmp_path / "timm.safetensors")
    with pytest.raises(ValueError, match=r"a gated MLP \(SwiGLU\)" + where):
        load(make(), tmp_path / "timm.safetensors")


SQUARES = [(4, 8), (8, 4), (14, 24), (24, 14), (7, 5), (3, 16)]
GRIDS = [((old, old), (new, new)) for old, new in SQUARES]
GRIDS += [((4, 4), (2, 8)), ((2, 8), (4, 16)), ((3, 5), (5, 3)), ((8, 4), (1, 1)), ((1, 6), (4, 2))]


@pytest.mark.parametrize("like", ["timm", "torch"])
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_positions_are_resized_as_others_resize_them(old, new, like):
    """timm, and torch as DeiT calls it."""
    embedding = np.random.default_rng(0).normal(size=(1, 1 + math.prod(old), 6)).astype(np.float32)
    if like == "timm":
        resample = pytest.importorskip("timm").layers.resample_abs_pos_embed
        expected = resample(torch.from_numpy(embedding), list(new), list(old)).numpy()
    else:
        grid = tensor(embedding[:, 1:].reshape(1, *old, 6))
        grid = torch.nn.functional.interpolate(grid, size=new, mode="bicubic", align_corners=False)
        resized = grid.permute(0, 2, 3, 1).reshape(1, -1, 6).numpy()
        expected = np.concatenate([embedding[:, :1], resized], axis=1)
    found = resize_positions(embedding, old, new, prefix_tokens=1, like=like)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_smaller_grid_gives_what_interpolate_pos_encoding_gives(tmp_path):
    """A file of Hugging Face at 12 pixels, in a model for 6: their own logits of 6 pixels."""
    theirs = randomized(vit(layer_norm_eps=1e-6))
    theirs.save_pretrained(tmp_path)
    model, small = make(image_size=6), images(side=6)
    assert interop.load_weights(model, tmp_path / "model.safetensors") == ()
    close(model(small), logits_of(theirs, small, interpolate_pos_encoding=True))


def test_parts_and_a_model_without_a_classifier_as_transformers_saves_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = randomized(vit(layer_norm_eps=1e-6))
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    model, bare = make(), make(seed=1)
    assert interop.load_weights(model, tmp_path / "parts") == ()
    close(model(images()), logits_of(theirs))
    saved = transformers.ViTModel(theirs.config)
    saved.load_state_dict(theirs.vit.state_dict(), strict=False)
    saved.save_pretrained(tmp_path / "bare")
    assert interop.load_weights(bare, tmp_path / "bare") == ("head.bias", "head.kernel")
    bare.head.kernel[...], bare.head.bias[...] = model.head.kernel[...], model.head.bias[...]
    close(bare(images()), logits_of(theirs))


@pytest.mark.parametrize(
    "options", [{}, dict(qkv_bias=False), dict(in_chans=1), dict(img_size=(12, 24))]
)
def test_what_timm_saves_is_read_with_its_own_configuration(options, tmp_path):
    timm = pytest.importorskip("timm")
    theirs = randomized(timm.create_model("vit_tiny_patch16_224", **TIMM_SIZES | options))
    timm.models.save_for_hf(theirs, tmp_path, safe_serialization=True)
    assert "model_args" in json.loads((tmp_path / "config.json").read_text())
    channels, shape = options.get("in_chans", 3), options.get("img_size", (12, 12))
    make_own = functools.partial(make, channels=channels, image_size=shape)
    model = make_own()
    assert interop.load_weights(model, tmp_path) == ()
    pictures = np.random.default_rng(1).normal(size=(2, *shape, channels)).astype("f")
    close(model(pictures), logits_of(theirs, pictures))
    assert interop.read_statistics(tmp_path) is not None
    with pytest.raises(ValueError, match="number of heads is 2"):
        interop.load_weights(make_own(num_heads=2), tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("distilled", "options"),
    [(False, {}), (True, {}), (False, dict(scale=0.3, temperature=2.0)), (True, dict(scale=0.1))],
)
def test_a_folder_is_what_auto_model_loads(distilled, options, tmp_path):
    transformers = pytest.importorskip("transformers")
    model, names = make(seed=3, distilled=distilled, **options), ["a", "b", "c", "ü", "e"]
    told = dict(label_names=names, mean=[0.5] * 3, std=[0.25] * 3, crop_ratio=0.875)
    interop.save_folder(model, tmp_path, **told)
    theirs, report = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    kind = "DeiTForImageClassificationWithTeacher" if distilled else "ViTForImageClassification"
    assert type(theirs).__name__ == kind
    check_report(report)
    assert [theirs.config.id2label[index] for index in range(5)] == names
    close(model(images()), logits_of(theirs.eval()))
    again = make(distilled=distilled, **options)
    assert interop.load_weights(again, tmp_path / "model.safetensors") == ()
    close(again(images()), model(images()))


@pytest.mark.parametrize("crop_ratio", [0.875, 1.0])
@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_a_folder_has_photographs_seen_as_evaluations_see_them(
    mode, channels, crop_ratio, tmp_path
):
    transformers = pytest.importorskip("transformers")
    noise = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    photograph = Image.fromarray(noise).resize((120, 60)).convert(mode)
    photograph.save(tmp_path / "x.png")
    statistics = dict(mean=[0.5] * channels, std=[0.25] * channels)
    options = dict(label_names="abcde", crop_ratio=crop_ratio)
    interop.save_folder(make(channels=channels), tmp_path, **statistics, **options)
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    found = theirs(photograph, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    expected = read_image(tmp_path / "x.png", 12, channels, crop_ratio=crop_ratio)
    assert found.shape == expected.shape
    assert np.abs(found - (expected / 255 - 0.5) / 0.25).mean() < 4 / 255  # less than a level
