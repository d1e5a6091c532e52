"""The report: complete, self-contained, and its verdicts follow the numbers."""

import csv
import dataclasses
import re

import jax
import numpy as np
import pytest
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from adder_flax.counting import Operations, count_operations
from adder_flax.models import VisionTransformer
from adder_flax.report import NOT_MEASURED, SecondOrderStep, page, write_report
from adder_flax.report._families import ADDER, CLAIMS, register_claims
from adder_flax.report._study import Answers, Claim, Findings, Probe, Study, observe, probe
from adder_flax.report.bypass import without_heads
from adder_flax.report.families import adder, answers, maps, motion, second_order, walk
from adder_flax.report.families.energy import SIZES, VARIANTS, deit_operations, in_bytes
from tests.report.small import model_of

IMAGES = np.random.default_rng(0).standard_normal((5, 8, 8, 1)).astype(np.float32)
LABELS = np.arange(5)
ONLY = "holds only when"


def step_of(ratio, learning_rate=1e-3):
    """A training step whose second-order term is this share of the first."""
    second = 0.1 * ratio
    loss = 2.0 if learning_rate > 1e-4 else 1.0
    return SecondOrderStep(1, learning_rate, loss, second - 0.1, -0.1, second, -0.1, second, 1e-3)


@pytest.fixture(scope="module")
def subject():
    return observe("m", model_of(), IMAGES)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    adder = dict(score="adder", qkv_linear="adder")
    others = dict(baseline=model_of(seed=1), untrained=model_of(seed=2, **adder))
    steps = {"start": [step_of(0.3)], "end": [step_of(0.2, learning_rate=1e-5)], "nothing": []}
    options = dict(name="adder <small>", second_order=steps, peak_learning_rate=1e-3)
    folder = tmp_path_factory.mktemp("report")
    save = Figure.savefig
    coarse = lambda *args, **given: save(*args, **given | {"dpi": 20})
    with pytest.MonkeyPatch.context() as patch:
        # Each size takes six traces of a whole network; how figures are laid out is not looked at.
        patch.delitem(SIZES, "DeiT-S")
        patch.delitem(SIZES, "DeiT-B")
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda engine, figure: None)
        patch.setattr(Figure, "savefig", coarse)
        return write_report(model_of(**adder), IMAGES, LABELS, folder, **others, **options)


def test_claims_are_many_distinct_and_decided(report):
    names = [claim.name for claim in report.claims]
    assert len(names) == len(set(names)) >= 20
    for claim in report.claims:
        assert re.fullmatch(r"holds|does not hold|not measured|holds only when .+", claim.verdict)
        assert re.search(r"\d", claim.finding)
    # Baseline and untrained are given.
    assert "not measured" not in {claim.verdict for claim in report.claims}
    with (report.page.parent / "claims.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [Claim.from_row(row) for row in rows] == report.claims


def test_page_needs_no_network_and_its_links_lead_somewhere(report):
    text = report.page.read_text(encoding="utf-8")
    assert not re.search(r"https?://|<script", text)
    assert "adder &lt;small&gt;" in text
    assert '<meta name="viewport"' in text
    ids = {f"#{name}" for name in re.findall(r'<[^>]* id="([^"]+)"', text)}
    for target in re.findall(r'<a [^>]*href="([^"]+)"', text):
        assert target in ids or (report.page.parent / target).is_file()
    images = re.findall(r"<img [^>]+>", text)
    assert len(images) >= 14
    for image in images:
        assert ' src="data:image/png;base64,' in image
        assert len(re.search(r' alt="([^"]+)"', image)[1]) > 20


def test_every_figure_comes_as_png_svg_and_data(report):
    figures = {path.stem for path in report.files if path.suffix == ".png"}
    assert figures == {path.stem for path in report.files if path.suffix == ".svg"}
    assert figures == {path.stem for path in report.files if path.parent.name == "data"}
    assert {claim.figure for claim in report.claims if claim.figure} <= figures
    assert all(path.is_file() for path in report.files)
    # Data are the numbers behind the figure.
    with (report.page.parent / "data" / "energy.csv").open() as file:
        rows = {(row["size"], row["variant"]): row for row in csv.DictReader(file)}
    multiplications = int(rows["DeiT-Ti", "multiplicative"]["multiplications"])
    assert multiplications == deit_operations("DeiT-Ti", "multiplicative").multiplications


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        (LABELS[:4], None, "one label for each of 5 images, got 4"),
        (LABELS + 6, None, "labels of the model's 10 classes, 0 to 9, got 6 to 10"),
        (LABELS, ["a", "b"], "a name for each of the model's 10 classes, got 2"),
    ],
)
def test_images_labels_and_names_have_to_match(labels, names, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_report(model_of(), IMAGES, labels, tmp_path, label_names=names)


def answers_of(probabilities, labels, names):
    pictures = lambda records: np.zeros((len(records), 8, 8, 1), np.uint8)
    labels, records = np.asarray(labels), 100 + np.arange(len(labels))
    given = Answers(np.asarray(probabilities), labels, records, names, pictures)
    found = answers.judge(dataclasses.replace(study_of(None), answers=given))
    return {picture.name: picture for picture in found.pictures}


@pytest.mark.unchecked
def test_the_surest_mistakes_come_first():
    sure = [[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.3, 0.7]]
    found = answers_of(sure, [1, 0, 0, 0], ["cat", "dog"])
    assert found["mistakes"].data["record"].tolist() == [100, 102, 103]
    assert found["mistakes"].data["confidence"].tolist() == [0.9, 0.8, 0.7]
    assert found["confusion"].data["confusion"].tolist() == [[1, 2], [1, 0]]
    assert found["class_accuracy"].data["accuracy"].tolist() == [1 / 3, 0]
    # Sure of 0.75, right of one in four.
    assert "0.500 surer than it is right" in found["calibration"].caption
    # Without mistakes none is shown, and without images a class has no accuracy.
    found = answers_of(np.eye(3)[[0, 1]], [0, 1], ["a", "b", "c"])
    assert found.keys() == {"confusion", "class_accuracy", "calibration"}
    accuracy = found["class_accuracy"].data["accuracy"]
    np.testing.assert_array_equal(accuracy, [1, 1, np.nan])


@pytest.mark.unchecked
def test_of_many_classes_the_most_confused_and_the_worst_are_shown():
    names, labels = [f"class {i}" for i in range(100)], np.repeat(np.arange(100), 3)
    taken = labels.copy()
    taken[:2], taken[3] = 7, 8
    found = answers_of(np.eye(100)[taken], labels, names)
    data = found["confusion"].data
    columns = [data[name].tolist() for name in ("true", "seen", "images")]
    assert columns == [[0, 1], [7, 8], [2, 1]]
    [axis] = found["class_accuracy"].figure.axes
    shown = [text.get_text() for text in axis.get_yticklabels()]
    assert len(shown) == 20
    assert shown[:2] == ["class 0 (3)", "class 1 (3)"]


def test_a_model_without_attention_has_a_report_without_claims_on_maps(tmp_path):
    class Perceptron(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(IMAGES[0].size, 10, rngs=rngs)

        def __call__(self, images):
            return self.head(images.reshape(len(images), -1))

    model = Perceptron(nnx.Rngs(0))
    written = write_report(model, IMAGES, LABELS, tmp_path, families=["second-order"])
    assert [claim.verdict for claim in written.claims] == ["not measured"]
    assert "no blocks of attention" in written.page.read_text()
    message = "among .*second-order, fisher, energy; got maps, which look at something else"
    with pytest.raises(ValueError, match=message):
        write_report(model, IMAGES, LABELS, tmp_path, families=["maps"])


@pytest.mark.cases(1)
@pytest.mark.parametrize("variant", ["multiplicative", "adder"])
def test_extrapolated_operations_are_those_of_the_whole_model(variant):
    options = {"width": 192, "num_heads": 3, "depth": 5, **VARIANTS[variant]}
    model = nnx.eval_shape(lambda: VisionTransformer(rngs=nnx.Rngs(0), **options))
    counted = count_operations(model, jax.ShapeDtypeStruct((1, 224, 224, 3), "float32"))
    extrapolated = deit_operations("DeiT-Ti", variant, depth=5)
    for field in ("counts", "bytes_moved", "bytes_at_boundary"):
        assert getattr(extrapolated, field) == getattr(counted, field)


def test_bytes_cost_what_horowitz_has():
    counts = {("l1_elements", "float32"): 10, ("additions", "float32"): 27}
    of_difference, of_product = in_bytes(Operations(counts))
    # Ten terms of two additions each; seven additions are of something else.
    assert of_difference == pytest.approx((7 * 0.9 + 10 * (0.03 + 0.1)) * 1e-12)
    assert of_product == pytest.approx((7 * 0.9 + 10 * (0.2 + 0.1)) * 1e-12)


def study_of(subject, untrained=None):
    pictures = (IMAGES - IMAGES.min()) / np.ptp(IMAGES)
    answers = Answers(np.eye(10)[LABELS], LABELS, LABELS, list("0123456789"), pictures.__getitem__)
    given = Probe({}, lambda params: np.eye(10)[LABELS], LABELS)
    return Study(subject, None, untrained, pictures, [""] * 5, LABELS, answers, given)


def with_blocks(subject, change, count=3, **of_capture):
    """With fields of each of the first blocks replaced by ``change(index)``."""
    blocks = enumerate(subject.captured.blocks[:count])
    blocks = tuple(dataclasses.replace(block, **change(index)) for index, block in blocks)
    captured = dataclasses.replace(subject.captured, blocks=blocks, **of_capture)
    return dataclasses.replace(subject, captured=captured)


def verdicts(findings):
    return {claim.name: claim.verdict for claim in findings.claims}


@pytest.mark.slow
def test_proposition_holds_for_symmetric_positive_maps_and_not_for_cycles():
    subject = observe("m", model_of(score="adder"), IMAGES)
    size = subject.maps[0].shape[-1]

    def judged(matrix, *names):
        maps = np.broadcast_to(matrix, subject.maps[0].shape)
        changed = with_blocks(subject, lambda _: {"map": maps})
        found = verdicts(adder.judge_proposition_1(study_of(changed)))
        return {found[name] for name in ("maps-symmetric", "proposition-1-shift", *names)}

    positive = 0.5 / size + 0.5 * np.eye(size)
    assert judged(positive, "proposition-1-rank") == {"holds"}
    assert judged(np.roll(np.eye(size), 1, 1)) == {"does not hold"}


@pytest.mark.slow
@pytest.mark.unchecked  # more vectors than the network's maps have tokens
def test_theorem_on_live_vectors_follows_the_vectors():
    subject = observe("m", model_of(score="adder"), IMAGES)
    normal = np.random.default_rng(0).standard_normal((2, 3, 5, 2, 400, 8))

    def verdict(factor):
        change = lambda i: {"query": factor * normal[0, i], "key": factor * normal[1, i]}
        found = adder.judge_theorem_1(study_of(with_blocks(subject, change)))
        return verdicts(found)["theorem-1-live"]

    assert verdict(1.0) == "holds"
    assert verdict(3.0) == "holds only when the variance of the components is put in"


def after(kl, learning_rate):
    last = dataclasses.replace(step_of(0.3, learning_rate), loss=1.0, kl=kl)
    return [dataclasses.replace(step_of(0.3), loss=2.0, kl=1e-2), last]


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("steps", "claim", "verdict"),
    [
        ([step_of(0.3)], "second-order", "holds"),
        ([step_of(0.01)], "second-order", "does not hold"),
        ([step_of(0.01, 1e-5)], "second-order", f"{ONLY} the learning rate is near its peak"),
        (after(1e-4, 1e-3), "kl-shrinks", "holds"),
        (after(1e-4, 1e-5), "kl-shrinks", f"{ONLY} the learning rate falls with it"),
        (after(1e-1, 1e-1), "kl-shrinks", f"{ONLY} steps are of one length"),
        (after(1e-1, 1e-3), "kl-shrinks", "does not hold"),
    ],
)
def test_steps_are_judged_by_their_terms_and_their_lengths(steps, claim, verdict):
    given = dict(second_order={str(n): [step] for n, step in enumerate(steps)})
    study = dataclasses.replace(study_of(None), **given, peak_learning_rate=1e-3)
    assert verdicts(second_order.judge_second_order(study))[claim] == verdict


def judged_heads(subject, needed):
    """Of a model that is right as long as ``needed(kernel)`` of each block's values."""
    params = nnx.to_pure_dict(nnx.state(subject.model, nnx.Param))
    params["blocks"] = {i: params["blocks"][i] for i in range(len(subject.captured.blocks))}
    for block in params["blocks"].values():
        block["attention"]["value"]["kernel"] = np.ones((16, 16))

    def logits(params):
        values = [block["attention"]["value"]["kernel"] for block in params["blocks"].values()]
        right = np.eye(10)[LABELS]
        return right if all(map(needed, values)) else 1 - right

    study = dataclasses.replace(study_of(subject), probe=Probe(params, logits, LABELS))
    return motion.judge_heads(study)


def test_heads_that_carry_nothing_are_removed_first(subject):
    """The value of one head of two is what the classes are read from."""
    found = judged_heads(subject, lambda kernel: kernel[:, 0].any())
    assert verdicts(found) == {"heads-removable": "holds", "heads-single": "holds"}
    assert found.claims[0].number.startswith("50%")
    assert found.claims[1].number == "3 of 3 blocks"
    np.testing.assert_array_equal(found.pictures[0].data["cost"], [[1, 0]] * 3)


def test_a_share_of_the_heads_is_that_of_those_which_were_removed(subject):
    """Of two heads none is a fifth; each is needed, so that no share can go."""
    found = judged_heads(with_blocks(subject, lambda _: {}, count=1), lambda kernel: kernel.all())
    assert verdicts(found) == {"heads-removable": "does not hold", "heads-single": "does not hold"}
    assert found.claims[0].number.startswith("0% of the heads")
    assert found.pictures[0].data["share"].tolist() == [0, 0.5, 1]


@pytest.mark.parametrize("linear", ["dense", "adder"])
def test_a_removed_head_gives_zeros(linear):
    model = model_of(qkv_linear=linear)
    of = probe(model, [IMAGES], LABELS)
    np.testing.assert_allclose(of.logits(of.params), model(IMAGES), atol=1e-5)
    count = model.blocks[1].attention.num_heads
    cut = without_heads(of.params, {1: [0]}, count)
    graphdef, state = nnx.split(model.blocks[1].attention.value)
    nnx.replace_by_pure_dict(state, cut["blocks"][1]["attention"]["value"])
    outputs = np.asarray(nnx.merge(graphdef, state)(np.ones((2, 16), np.float32)))
    assert not outputs[:, :8].any()
    assert outputs[:, 8:].all()
    assert not np.allclose(of.logits(cut), of.logits(of.params))


def test_values_that_cannot_be_zeros_are_not_measured():
    """An adder layer without a norm says -Σ|x| where its weights are zeros."""
    model = model_of(qkv_linear="adder", adder_options=dict(norm=None))
    study = study_of(observe("m", model, IMAGES))
    study = dataclasses.replace(study, probe=probe(model, [IMAGES], LABELS))
    assert set(verdicts(motion.judge_heads(study)).values()) == {NOT_MEASURED}


@pytest.mark.unchecked
def test_attention_on_the_object_is_told_from_attention_on_the_border(subject):
    picture = np.zeros((5, 8, 8, 1))
    picture[:, 2:4, 2:4] = 1  # one patch of sixteen
    study = dataclasses.replace(study_of(subject), pictures=picture)
    size = subject.maps[0].shape[-1]
    there, elsewhere = np.zeros((2, 5, 2, size, size))
    there[..., 1 + 5], elsewhere[..., 1] = 1, 1
    assert maps._focus(study, subject, there) == 16
    assert maps._focus(study, subject, elsewhere) == 0
    assert maps._focus(study, subject, np.full_like(there, 1 / size)) == pytest.approx(1)
    picture[0] = 0  # without an object
    assert maps._focus(study, subject, there) == 16


@pytest.mark.unchecked
def test_second_order_by_the_letter_on_a_small_model(subject):
    of_model = probe(subject.model, [IMAGES], LABELS)
    study = dataclasses.replace(study_of(subject), probe=of_model)
    found = verdicts(second_order.judge_fisher(study))
    assert found == {
        "fisher-hessian": "holds",
        "algorithm-1": "holds",
        "equation-18": "does not hold",
        "factor-free-cost": "holds only when iterations are 1 or fewer",
    }
    # Logits that jump have no second derivative.
    steps = lambda params: np.round(study.probe.logits(params), 1)
    jumps = dataclasses.replace(study, probe=dataclasses.replace(study.probe, logits=steps))
    assert verdicts(second_order.judge_fisher(jumps))["fisher-hessian"] == "does not hold"


@pytest.mark.unchecked
def test_brownian_paths_are_called_brownian_and_straight_ones_not(subject):
    shape = subject.captured.tokens.shape
    steps = np.random.default_rng(0).standard_normal((3, 100, *shape[1:]))

    def walking(steps):
        path = np.concatenate([np.zeros_like(steps[:1]), np.cumsum(steps, 0)])
        return with_blocks(subject, lambda index: {"tokens": path[index]}, tokens=path[-1])

    brownian, straight = walking(steps), walking(np.repeat(steps[:1], 3, 0))
    names = ["brownian", "brownian-growth", "brownian-independent"]
    others = dict.fromkeys(["brownian-normal", "brownian-centred"], "holds")
    found = verdicts(motion.judge_motion(study_of(brownian)))
    assert found == dict.fromkeys(names, "holds") | others
    found = verdicts(motion.judge_motion(study_of(straight)))
    assert {found[name] for name in names} == {"does not hold"}
    found = verdicts(motion.judge_motion(study_of(straight, untrained=brownian)))
    assert found["brownian-growth"] == "holds only when the network is untrained"
    # One block has neither a growth nor a cosine.
    zeros = {"tokens": np.zeros_like(steps[0])}
    single = with_blocks(subject, lambda _: zeros, count=1, tokens=steps[0])
    found = verdicts(motion.judge_motion(study_of(single)))
    assert found == dict.fromkeys(names, "not measured") | others


@pytest.mark.unchecked
def test_a_family_that_cannot_be_computed_leaves_the_others_standing():
    def measure(study):
        raise study

    sound = lambda study: Findings([dataclasses.replace(found, name="sound")], [])
    with CLAIMS.temporary():
        register_claims("broken", ADDER, of=object)(measure)
        register_claims("sound", ADDER, of=object)(sound)
        found = page._findings("broken", ZeroDivisionError("float division by zero")).claims[0]
        claims, _ = page._measure(IndexError("of no token"), ["broken", "sound"])[ADDER]
    assert found.verdict == NOT_MEASURED
    assert "ZeroDivisionError: float division by zero" in found.finding
    assert [claim.name for claim in claims] == ["broken", "sound"]


@pytest.mark.unchecked
def test_a_family_that_only_draws_has_a_page(subject, tmp_path):
    pictures = lambda study: Findings([], answers.judge(study).pictures[1:2])
    with CLAIMS.temporary():
        register_claims("drawn", ADDER, of=object)(pictures)
        written = page.write_study(study_of(subject), tmp_path, families=["drawn"])
    assert written.claims == []
    assert "class_accuracy" in written.page.read_text()
    [head] = (tmp_path / "claims.csv").read_text().splitlines()
    assert head.startswith("name,source,statement,verdict")


@pytest.mark.unchecked
def test_a_walk_that_does_not_mix_takes_more_than_any_number_of_steps(subject):
    """Between two halves it goes once in 10⁹ steps."""
    size = subject.maps[0].shape[-1]
    same = np.equal.outer(np.arange(size) < 8, np.arange(size) < 8)
    apart = np.where(same, 1.0, 1e-9)
    maps = np.broadcast_to(apart / apart.sum(-1, keepdims=True), subject.maps[0].shape)
    changed = with_blocks(subject, lambda _: {"map": maps})
    [claim, _] = walk._walk_claims(changed, walk._numbers(changed))
    assert claim.number == "rows sum to 1; does not mix"


@pytest.mark.unchecked
def test_a_model_without_a_class_token_is_not_said_to_have_one():
    for pooling, said in (("cls", "the class token"), ("mean", "patch")):
        study = study_of(observe("m", model_of(pooling=pooling), IMAGES))
        for picture in (walk._steps_picture(study), maps._attention_picture(study)):
            assert said in picture.caption
            assert ("class token" in picture.caption) == (pooling == "cls")
