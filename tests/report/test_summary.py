"""The table before training against published DeiT figures and a count by hand."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from adder_flax.models import VisionTransformer
from adder_flax.ops import _backend
from adder_flax.report import summary_rows, summary_text
from tests.report.small import SIZES

IMAGENET, DIGIT = (
    jax.ShapeDtypeStruct((1, *shape), jnp.float32) for shape in ((224, 224, 3), (8, 8, 1))
)
ADDER = {"score": "adder", "qkv_linear": "adder", "proj_linear": "adder", "mlp_linear": "adder"}


def abstract(**options):
    return nnx.eval_shape(lambda: VisionTransformer(rngs=nnx.Rngs(0), **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "heads", "parameters", "gmacs"),
    [(192, 3, 5.7e6, 1.26), (384, 6, 22.1e6, 4.6), (768, 12, 86.6e6, 17.6)],
)
def test_deit_against_published_numbers(width, heads, parameters, gmacs):
    rows = {row.part: row for row in summary_rows(abstract(width=width, num_heads=heads), IMAGENET)}
    total = rows["total"]
    assert total.parameters == pytest.approx(parameters, rel=0.005)
    # Elementwise products (LayerNorm, GELU) are the 0.3 % that published MACs leave out.
    assert total.operations.multiplications == pytest.approx(gmacs * 1e9, rel=0.01)
    assert rows["patch embedding"].operations.multiplications == 196 * 16 * 16 * 3 * width
    of = lambda part: rows[f"blocks: {part}"].operations.multiplications
    assert of("query, key, value") == 3 * of("projection") == 3 * 12 * 197 * width * width
    assert rows["head"].parameters == 1000 * width + 1000
    assert not total.operations.uncounted


SMALL = SIZES | {"depth": 2}


def test_parts_sum_to_the_whole_and_adder_elements_are_those_by_hand():
    model = abstract(**SMALL, **ADDER)
    [*parts, total] = summary_rows(model, DIGIT)
    assert sum(row.parameters for row in parts) == total.parameters
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert total.parameters == sum(leaf.size for leaf in leaves)
    for kind in ("additions", "multiplications", "comparisons", "exponentials", "l1_elements"):
        of = lambda row, kind=kind: getattr(row.operations, kind)
        assert sum(map(of, parts)) == of(total)
    assert sum(row.joules for row in parts) == pytest.approx(total.joules)
    rows = {row.part: row for row in parts}
    tokens, width, head_dim = 17, 16, 8
    elements = lambda part: rows[f"blocks: {part}"].operations.l1_elements
    assert elements("query, key, value") == 2 * 3 * tokens * width * width
    assert elements("attention map") == 2 * 2 * tokens * tokens * head_dim
    assert elements("MLP") == 2 * 2 * tokens * width * 4 * width
    # Of the attention map only its product with the values and its scale multiply.
    per_map = 2 * 2 * tokens * tokens
    assert rows["blocks: attention map"].operations.multiplications == per_map * head_dim + per_map


def test_text_is_aligned_and_says_its_conventions():
    sizes = SMALL | {"depth": 1}
    text = summary_text(abstract(**sizes, **ADDER), DIGIT).splitlines()
    rule = next(i for i, line in enumerate(text) if set(line) == {"-"})
    assert len({len(line) for line in text[: rule + 2]}) == 1
    assert text[rule + 1].startswith("total")
    assert any("at 1 addition" in line for line in text)
    assert "at 1 addition" not in summary_text(abstract(**sizes), DIGIT)


def test_summaries_wait_for_no_kernels(monkeypatch):
    def answer(name):
        assert name == "reference", f"asked whether {name} can run, which may build it"

    monkeypatch.setattr(_backend, "_why_unavailable", answer)
    model = abstract(**SMALL | {"depth": 1, "score": "adder"})
    assert summary_rows(model, DIGIT)[-1].operations.l1_elements > 0


def test_parts_of_a_model_that_names_none():
    """Its own top-level names, in the order of its parameters; what belongs to no layer is
    elsewhere."""

    class Perceptron(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(64, 8, rngs=rngs)
            self.head = nnx.Linear(8, 10, rngs=rngs)

        def __call__(self, images):
            return self.head(jnp.maximum(self.hidden(images.reshape(1, -1)), 0.0))

    model = nnx.eval_shape(lambda: Perceptron(nnx.Rngs(0)))
    rows = {row.part: row for row in summary_rows(model, DIGIT)}
    assert [*rows] == ["head", "hidden", "elsewhere", "total"]
    assert rows["hidden"].operations.multiplications == 64 * 8
    assert rows["elsewhere"].operations.comparisons == 8
