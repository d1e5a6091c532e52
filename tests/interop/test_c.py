"""A network in few bits as C99, compiled strictly and run: JAX's sums and classes, float64's
logits."""

import shutil
import subprocess

import numpy as np
import pytest
import scipy.special

from adder_flax import interop, ops, quantized
from tests.quantized.test_model import transformer

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
STRICT = "-std=c99 -pedantic -O2 -Wall -Wextra -Werror"
STRICT += " -fsanitize=address,undefined -fno-sanitize-recover=all"

MEAN, STD = (0.4,), (0.3,)
IMAGES = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), np.uint8)


def normalised(images, dtype=np.float32):
    return (images.astype(dtype) / 255 - np.float32(MEAN)) / np.float32(STD)


def write(folder, bits=8, **options):
    model = transformer(**options)
    images = normalised(IMAGES if model.image_shape[-1] == 1 else np.repeat(IMAGES, 3, -1))
    few = quantized.quantize_model(model, images, bits=bits)
    interop.save_c(few, folder, mean=MEAN, std=STD)
    return few, images


def wide(parameter):
    return np.asarray(parameter[...] if hasattr(parameter, "set_metadata") else parameter, float)


def norm(x, layer):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + layer.epsilon)
    return x * wide(layer.scale) + wide(layer.bias)


def to_bytes(x, lowest, step, bits):
    steps = np.round((x.astype(np.float32) - np.float32(lowest)) * (1 / np.float32(step)))
    return np.clip(steps, 0, 2**bits - 1)


def adder(x, layer):
    grid, columns = layer.weights.grid, np.asarray(layer.weights.packed.columns, float)
    sums = np.abs(to_bytes(x, grid.lowest, grid.scale, grid.bits)[..., None, :] - columns).sum(-1)
    return norm(-(sums * wide(grid.scale) + wide(layer.weights.excess)), layer.norm)


def attended(x, attention, bits, identity, maps):
    heads, width = attention.num_heads, attention.head_dim
    split = lambda y: y.reshape(*y.shape[:-1], heads, width).swapaxes(-2, -3)
    three = (attention.query, attention.key, attention.value)
    query, key, value = (split(adder(x, layer)) for layer in three)
    lowest, step = (wide(attention.score[n])[:, None, None] for n in ("lowest", "step"))
    query_bytes, key_bytes = (to_bytes(y, lowest, step, bits) for y in (query, key))
    sums = np.abs(query_bytes[..., :, None, :] - key_bytes[..., None, :, :]).sum(-1)
    beyond = np.abs(key - np.clip(key, lowest, lowest + step * (2**bits - 1))).sum(-1)
    factor = np.full(heads, width**-0.5)
    if attention.log_temperature is not None:
        factor = factor * np.exp(-wide(attention.log_temperature))
    scores = -(sums * step + beyond[..., None, :]) * np.float32(factor)[:, None, None]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    maps.append(weights / weights.sum(-1, keepdims=True))
    mixed = maps[-1] @ value + identity * value
    return adder(mixed.swapaxes(-2, -3).reshape(x.shape), attention.out)


def logits_in_float64(model, images, bits=8, identity=True, maps=None, **_):
    """The network in few bits by NumPy; only rounding to bytes is in float32, as it is defined.

    `maps`, a list, gets the softmax of each block.
    """
    maps = [] if maps is None else maps
    images, (rows, columns) = images.astype(float), model.grid
    side = images.shape[1] // rows
    patches = images.reshape(len(images), rows, side, columns, side, -1).swapaxes(2, 3)
    patches = patches.reshape(len(images), rows * columns, -1) @ wide(model.patch_embed.proj.kernel)
    front = [wide(token) for token in (model.cls_token, model.reg_token) if token is not None]
    front = [np.broadcast_to(token, (len(images), *token.shape[1:])) for token in front]
    tokens = np.concatenate([*front, patches + wide(model.patch_embed.proj.bias)], axis=1)
    tokens = tokens + wide(model.pos_embed)
    for block in model.blocks:
        scales = (block.layer_scale1.scale, block.layer_scale2.scale)
        scale1, scale2 = (1.0 if scale is None else wide(scale) for scale in scales)
        added = attended(norm(tokens, block.norm1), block.attention, bits, identity, maps)
        tokens = tokens + added * scale1
        hidden = adder(norm(tokens, block.norm2), block.mlp.fc1)
        hidden = hidden * (1 + scipy.special.erf(hidden / np.sqrt(2))) / 2
        tokens = tokens + adder(hidden, block.mlp.fc2) * scale2
    tokens = tokens if model.norm is None else norm(tokens, model.norm)
    pooled = tokens[:, 0]
    if model.pooling == "mean":
        pooled = tokens[:, model.prefix_tokens :].mean(1)
    pooled = pooled if model.fc_norm is None else norm(pooled, model.fc_norm)
    return pooled @ wide(model.head.kernel) + wide(model.head.bias)


def build(folder):
    command = [COMPILER, *STRICT.split(), "-o", "classify", "model.c", "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def classify(folder, given):
    command = [folder / "classify", folder / "model.bin"]
    return subprocess.run(command, input=given.tobytes(), capture_output=True)


COLOURS = dict(channels=3, identity=False, pooling="mean", fc_norm=True, width=18, mlp_ratio=1.5)
FOUR_BITS = dict(bits=4, pooling="mean", registers=1, layer_scale=0.5, temperature="learned")


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, FOUR_BITS, COLOURS], ids=["plain", "4 bits", "colours"])
def test_it_computes_the_formulas_and_classifies_as_jax_does(options, tmp_path):
    few, normal = write(tmp_path, **options)
    build(tmp_path)
    images = IMAGES if options.get("channels", 1) == 1 else np.repeat(IMAGES, 3, -1)
    done = classify(tmp_path, images)
    assert done.returncode == 0, done.stderr
    rows = np.array([line.split() for line in done.stdout.decode().splitlines()], float)
    exact = normalised(images, float)
    np.testing.assert_allclose(rows[:, 1:], logits_in_float64(few, exact, **options), atol=1e-6)
    expected = np.asarray(few(normal))
    np.testing.assert_array_equal(rows[:, 0], expected.argmax(-1))
    difference = np.abs(rows[:, 1:] - expected).max(-1)
    # A number in the middle of two bytes, to float32's rounding, may become the other in JAX.
    assert np.mean(difference < 1e-5) > 0.8
    assert difference.max() < 0.02


def test_its_sums_are_those_of_jax(tmp_path):
    """10,000 rows and columns of bytes, by the function that the network is made of."""
    write(tmp_path)
    source = (tmp_path / "model.c").read_text().replace("int main(", "int classify_main(")
    harness = """
int main(void)
{
    static uint8_t a[100 * 37], b[100 * 37];
    if (!fread(a, sizeof a, 1, stdin) || !fread(b, sizeof b, 1, stdin))
        return classify_main(0, NULL);
    for (int i = 0; i < 100; i++)
        for (int j = 0; j < 100; j++)
            printf("%u\\n", (unsigned)distance(a + 37 * i, b + 37 * j, 37));
    return 0;
}
"""
    (tmp_path / "model.c").write_text(source + harness)
    build(tmp_path)
    a, b = np.random.default_rng(1).integers(0, 256, (2, 100, 37), np.uint8)
    done = subprocess.run(
        [tmp_path / "classify"], input=a.tobytes() + b.tobytes(), capture_output=True
    )
    got = np.array(done.stdout.split(), np.int64).reshape(100, 100)
    np.testing.assert_array_equal(got, ops.sad_scores(a, b))
    np.testing.assert_array_equal(got, np.abs(a[:, None].astype(int) - b.astype(int)).sum(-1))


def test_damaged_weights_and_half_an_image_are_one_message(tmp_path):
    write(tmp_path)
    build(tmp_path)
    whole, rng = (tmp_path / "model.bin").read_bytes(), np.random.default_rng(0)
    damaged = [whole[:length] for length in (0, 7, 60, 500, -1)] + [whole + b"\0"]
    for place, bit in zip(rng.integers(len(whole), size=30), rng.integers(8, size=30), strict=True):
        damaged.append(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
    for number, content in enumerate(damaged):
        (tmp_path / "model.bin").write_bytes(content)
        done = classify(tmp_path, IMAGES)
        assert (done.returncode, done.stdout) == (1, b""), number
        assert done.stderr.count(b"\n") == 1
        assert b"expected" in done.stderr, done.stderr
    (tmp_path / "model.bin").write_bytes(whole)
    done = classify(tmp_path, IMAGES.ravel()[:100])
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 1)
    assert done.stderr == b"expected images of 64 bytes, got 36 at the end\n"


OTHERS = [dict(score="dot"), dict(mlp_linear="dense"), dict(stem_channels=(4,))]
OTHERS += [dict(distilled=True), dict(mlp_linear="normed_dense", dtype=np.float32)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", OTHERS)
def test_other_networks_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match="expected a vision transformer in few bits.*; export a"):
        write(tmp_path, **options)
    assert not list(tmp_path.iterdir())
