"""Networks as a page: Node, Chromium and Firefox compute what float64 does, and damage is told."""

import base64
import json
import re
import shutil
import subprocess

import jax
import numpy as np
import pytest
from flax import nnx

from adder_flax import attention, data, interop, quantized
from tests.interop import test_c as c
from tests.interop.browsers import Chromium, Firefox, started
from tests.interop.test_weights import ADDER, make
from tests.processes import ROOT

NODE = shutil.which("node")
MEAN, STD, SIDE = (0.3053,), (0.3757,), 8
SIZES = dict(image_size=SIDE, patch_size=2, channels=1, num_classes=10)
FLOAT = {
    "dot": dict(score="dot", registers=2, layer_scale=0.5, temperature="learned"),
    "additive": dict(score="additive", qkv_linear="normed_dense", pooling="mean"),
    "adder": ADDER,
    "adder off": ADDER | dict(identity=False, pooling="mean", fc_norm=True, registers=1),
    "gaussian": dict(score="gaussian", scale=0.3, proj_linear="identity", identity=True),
    "bilinear": dict(score="bilinear", mlp_linear="adder", mlp_ratio=1.5),
}
FEW = {"8 bits": "adder", "6 bits": "adder off", "4 bits": "adder"}
HAS_CLANG = shutil.which("clang") and shutil.which("wasm-ld")
ALL = FLOAT | ({few: FLOAT[name] for few, name in FEW.items()} if HAS_CLANG else {})


def digits():
    """Ten digits of the test split, each once."""
    found = data.load_source("digits", "test").first(100)
    _, first = np.unique(found["label"], return_index=True)
    return found["image"][first]


def normal(images, dtype=np.float64):
    return (images.astype(dtype) / 255 - np.float32(MEAN)) / np.float32(STD)


def widened(model, images):
    """Logits and maps of a network in float64, by JAX."""
    with jax.enable_x64(True):
        graphdef, state = nnx.split(model)
        wide = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(np.float64), state))
        maps = attention.capture_attention(wide, images)
        return np.asarray(wide(images)), [np.asarray(each) for each in maps]


def exact(name, model, images):
    """Logits, and what the class is read from looks at in each block and head."""
    images, options = normal(images), ALL[name]
    identity = options.get("identity", options["score"] == "adder")
    if name in FLOAT:
        logits, maps = widened(model, images)
        maps = [each - identity * np.eye(each.shape[-1]) for each in maps]
    else:
        maps, how = [], dict(bits=int(name[0]), identity=identity)
        logits = c.logits_in_float64(model, images, maps=maps, **how)
    assert logits.dtype == maps[0].dtype == np.float64
    maps = np.stack(maps, axis=1)
    looks = maps[..., 0, :]
    if options.get("pooling") == "mean":
        looks = maps[..., model.prefix_tokens :, :].mean(-2)
    return logits, looks.reshape(len(images), -1)


@pytest.fixture(scope="module")
def networks():
    models = {name: make(**SIZES | options) for name, options in FLOAT.items()}
    inputs = normal(digits(), np.float32)
    few = {name: FEW[name] for name in ALL.keys() - FLOAT}
    for name, whole in few.items():
        models[name] = quantized.quantize_model(models[whole], inputs, bits=int(name[0]))
    return {name: models[name] for name in ALL}


@pytest.fixture(scope="module")
def page(networks, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "web.html"
    save(networks, path)
    return path


def save(networks, path, **options):
    told = dict(title="<b> & ten", mean=MEAN, std=STD, label_names=list("0123456789"))
    told["examples"] = {str(label): image for label, image in enumerate(digits())}
    interop.save_web(networks, path, **told | options)


def data_of(page):
    return json.loads(re.findall(r'(?<=type="application/json">).*?(?=</script>)', page)[0])


def check(found, networks):
    """Of each network and digit: logits, then weights of all tokens."""
    images = digits()
    for (name, model), answers in zip(networks.items(), found, strict=True):
        logits, maps = (np.array([answer[part] for answer in answers]) for part in (0, 1))
        expected, looks = exact(name, model, images)
        np.testing.assert_allclose(logits, expected, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(maps, looks, atol=1e-5, err_msg=name)
        jaxs = np.asarray(model(normal(images, np.float32)))
        np.testing.assert_array_equal(logits.argmax(-1), jaxs.argmax(-1), err_msg=name)


RUN = """
const page = require("fs").readFileSync(process.argv[1], "utf8");
const part = start => page.split(start)[1].split("</script>")[0];
const data = JSON.parse(part('type="application/json">'));
const {open, decoded} = eval(part('<script id="network">') + ";({open, decoded})");
(async () => {
  const found = [];
  for (const network of data.networks) {
    const answer = await open(network, data);
    found.push(data.examples.map(({pixels}) => answer(decoded(pixels))));
  }
  console.log(JSON.stringify(found.map(each => each.map(x => [[...x.logits], [...x.maps]]))));
})().catch(error => { console.error(error.message); process.exit(1); });
"""


def run_node(page):
    if NODE is None:
        pytest.skip("needs node")
    return subprocess.run([NODE, "-e", RUN, page], capture_output=True, text=True)


@pytest.mark.slow
def test_node_computes_what_float64_does(page, networks):
    done = run_node(page)
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout), networks)


@pytest.mark.slow
def test_damaged_weights_are_refused(page, tmp_path):
    text, damaged = page.read_text(), tmp_path / "web.html"
    scripts = text[text.index('<script id="network">') :]
    for number, place in enumerate(np.random.default_rng(0).integers(0, 4000, 20)):
        found = data_of(text)
        network = found["networks"][number % len(found["networks"])]
        weights = bytearray(base64.b64decode(network["weights"]))
        weights[place] ^= 1 << number % 8
        if number in (7, 8):  # bits
            del weights[-4:]
        network["weights"] = base64.b64encode(weights).decode()
        told = json.dumps(found | {"networks": [network]})
        damaged.write_text(f'type="application/json">{told}</script>{scripts}')
        done = run_node(damaged)
        assert (done.returncode, done.stdout) == (1, ""), network["name"]
        assert re.match("expected .*, got (damaged ones|others)\n$", done.stderr), done.stderr


DRAWN = """(async () => {
  const rest = () => new Promise(done => setTimeout(done, 500));
  const box = drawing.getBoundingClientRect(), event = (type, x, y) => drawing.dispatchEvent(
    new PointerEvent(type, {pointerId: 1, buttons: 1, clientX: box.x + x * box.width,
                            clientY: box.y + y * box.height}));
  drawing.setPointerCapture = () => {};
  find("clear").click();
  event("pointerdown", 0.3, 0.3);
  for (const [x, y] of [[0.5, 0.3], [0.7, 0.3], [0.5, 0.8]]) event("pointermove", x, y);
  event("pointerup", 0.5, 0.8);
  await rest();
  const all = [[[...image], answers.map(x => [...x.logits])]];
  const press = key => drawing.dispatchEvent(new KeyboardEvent("keydown", {key}));
  press("Escape"), press(" ");
  for (let i = 0; i < 6; i++) press("ArrowDown");
  await rest();
  all.push([[...image], answers.map(x => [...x.logits])]);
  return JSON.stringify([...all, find("said").textContent, find("fault").textContent]);
})()"""
ANSWERS = """ready.then(() => JSON.stringify(opened.map(answer => data.examples.map(({pixels}) => {
  const {logits, maps} = answer(decoded(pixels));
  return [[...logits], [...maps]];
}))))"""


@pytest.mark.slow
@pytest.mark.parametrize("browser", [Chromium, Firefox])
def test_browsers_compute_what_float64_does(browser, page, networks, tmp_path):
    with started(browser, tmp_path) as it:
        it.open(page.as_uri())
        check(json.loads(it.run(ANSWERS)), networks)
        *drawn, said, fault = json.loads(it.run(DRAWN))
        assert fault == ""
        assert re.match(r"dot: \d, \d+\s%; [\d,]+ multiplications, [\d,]+ additions\.$", said)
        for pixels, logits in drawn:
            pixels = np.array(pixels, np.uint8).reshape(1, SIDE, SIDE, 1)
            assert (pixels.max(2) > 60).sum() >= 6  # rows with ink: it is enlarged
            for (name, model), found in zip(networks.items(), logits, strict=True):
                np.testing.assert_allclose(found, exact(name, model, pixels)[0][0], atol=1e-5)
        assert not np.array_equal(*(pixels for pixels, _ in drawn))
        assert not it.errors


@pytest.mark.slow
def test_photographs_are_resized_for_networks_of_colours(tmp_path):
    model = make(**SIZES | dict(channels=3))
    image = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    told = dict(mean=(0.5,) * 3, std=(0.2, 0.3, 0.4), examples={"a": image}, resized=16)
    save({"float32": model}, tmp_path / "web.html", **told)
    # Left half red, right half blue, twice as wide as high: the middle is half and half.
    script = """(async () => {
      await ready;
      const canvas = Object.assign(document.createElement("canvas"), {width: 64, height: 32});
      const context = canvas.getContext("2d");
      context.fillStyle = "#f00", context.fillRect(0, 0, 32, 32);
      context.fillStyle = "#00f", context.fillRect(32, 0, 32, 32);
      await take(await new Promise(done => canvas.toBlob(done)));
      await new Promise(done => setTimeout(done, 300));
      return JSON.stringify([[...image], [...answers[0].logits]]);
    })()"""
    with started(Chromium, tmp_path / "profile") as it:
        it.open((tmp_path / "web.html").as_uri())
        pixels, logits = json.loads(it.run(script))
        assert not it.errors
    pixels = np.array(pixels, np.uint8).reshape(1, 8, 8, 3)
    expected = np.zeros((8, 8, 3))
    expected[:, :4, 0] = expected[:, 4:, 2] = 255
    assert np.abs(pixels[0, :, [0, 1, 6, 7]] - expected[:, [0, 1, 6, 7]].swapaxes(0, 1)).max() < 3
    given = (pixels / 255.0 - 0.5) / np.float32(told["std"]).astype(float)
    np.testing.assert_allclose(logits, widened(model, given)[0][0], atol=1e-5)


OTHERS = [dict(distilled=True), dict(norm_position="post"), ADDER | dict(adder_options={"bits": 4})]
OTHERS += [dict(score="additive", score_options={"layer_norm": True})]


@pytest.mark.parametrize("options", OTHERS)
def test_other_networks_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match="expected a vision transformer with norms .*; export a"):
        save({"it": make(**SIZES | options)}, tmp_path / "web.html")
    assert not list(tmp_path.iterdir())


def test_the_page_of_the_docs_is_of_this_template():
    page = (ROOT / "docs/play/digits.html").read_text()
    for part in re.split("<!-- \\w+ -->", (ROOT / "adder_flax/interop/web.html").read_text()):
        assert part in page, "run python docs/play.py"
    assert len(data_of(page)["networks"]) == 7
