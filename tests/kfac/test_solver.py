"""The solvers against NumPy in float64, and their behaviour where a matrix or a start is bad."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kfac.solve import _solvers as solver
from kfac.solve._inverses import _damped_inverse, _root_and_inverse
from tests.kfac.reference import close

pytestmark = pytest.mark.usefixtures("x64")


def spd(size, rank, seed=0):
    u = np.random.default_rng(seed).normal(size=(rank, size))
    return u.T @ u / rank


# Three lanes of unequal rank.
MATRICES = np.stack([spd(7, rank, seed) for seed, rank in enumerate((7, 3, 1))])
B = np.random.default_rng(9).normal(size=(3, 7))
GAMMA = np.array([0.1, 0.5, 1.0])
EXACT = np.linalg.solve(MATRICES + GAMMA[:, None, None] * np.eye(7), B[..., None])[..., 0]


def solved(matrices=MATRICES, b=B, **options):
    matvec = lambda v: jnp.einsum("lij,lj->li", matrices, v)
    return solver.cg(matvec, jnp.asarray(b), jnp.asarray(GAMMA), **options)


def model(x):
    quadratic = np.einsum("li,lij,lj->l", x, MATRICES, x) + GAMMA * (x * x).sum(1)
    return 0.5 * quadratic - (B * x).sum(1)


def test_cg_run_to_the_end_is_the_dense_solution():
    solution = solved(max_iterations=30, tolerance=1e-14)
    close(solution.x, EXACT, rtol=1e-10, atol=1e-12)


def test_lanes_stop_by_themselves_after_rank_plus_one_iterations():
    solution = solved(max_iterations=30, tolerance=1e-10)
    assert np.asarray(solution.iterations).tolist() == [7, 4, 2]
    assert np.all(solution.residual <= 1e-10)


def test_fixed_length_and_early_stopping_agree_where_nothing_converges():
    runs = [solved(max_iterations=2, tolerance=t).x for t in (0.0, 1e-30)]
    np.testing.assert_array_equal(*runs)


def test_model_value_and_residual_are_those_of_the_iterate():
    for k in (1, 2, 5):
        solution = solved(max_iterations=k)
        x = np.asarray(solution.x)
        close(solution.model, model(x), rtol=1e-12)
        r = B - np.einsum("lij,lj->li", MATRICES, x) - GAMMA[:, None] * x
        true_residual = np.linalg.norm(r, axis=1) / np.linalg.norm(B, axis=1)
        close(solution.residual, true_residual, atol=1e-13)


def test_every_iterate_descends_and_the_model_only_falls():
    values = []
    for k in range(1, 8):
        x = np.asarray(solved(max_iterations=k).x)
        assert np.all((B * x).sum(1) > 0)
        values.append(model(x))
    assert np.all(np.diff(np.stack(values), axis=0) <= 1e-13)


def test_preconditioner_changes_the_path_and_not_the_solution():
    inverse = np.stack([np.linalg.inv(m + 0.3 * np.eye(7)) for m in MATRICES])
    precondition = lambda r: jnp.einsum("lij,lj->li", inverse, r)
    solution = solved(max_iterations=40, tolerance=1e-13, precondition=precondition)
    close(solution.x, EXACT, rtol=1e-9, atol=1e-11)
    plain, helped = (solved(max_iterations=1, precondition=p) for p in (None, precondition))
    assert np.all(np.asarray(helped.residual)[0] < np.asarray(plain.residual)[0])


@pytest.mark.parametrize("tolerance", [0.0, 1e-30])
def test_nothing_is_preconditioned_behind_the_last_iteration(tolerance):
    """Which costs as much as a product: a fifth of a solve of two iterations."""
    calls = []

    def counted(v):
        jax.debug.callback(lambda: calls.append(1))
        return v

    solution = solved(max_iterations=2, tolerance=tolerance, precondition=counted)
    jax.block_until_ready(solution)
    jax.effects_barrier()
    assert len(calls) == 2


def test_safeguarded_warm_start_never_ascends():
    starts = -5 * EXACT + 0.1 * np.random.default_rng(3).normal(size=(50, *EXACT.shape))

    def ascents(safeguard):
        run = lambda x0: solved(max_iterations=1, x0=x0, safeguard=safeguard).x
        return int(((B * np.asarray(jax.jit(jax.vmap(run))(starts))).sum(-1) <= 0).sum())

    assert ascents(True) == 0
    assert ascents(False) > 0  # or the safeguard would guard against nothing


def test_warm_start_at_the_solution_stays_there():
    solution = solved(max_iterations=5, tolerance=1e-8, x0=jnp.asarray(EXACT))
    assert np.asarray(solution.iterations).tolist() == [0, 0, 0]
    close(solution.x, EXACT, rtol=1e-9)


def test_one_bad_lane_leaves_the_others_alone():
    bad = MATRICES.copy()
    bad[1] = -np.eye(7)  # negative curvature
    bad[2] = np.nan
    solution = solved(bad, max_iterations=30, tolerance=1e-12)
    close(solution.x[0], EXACT[0], rtol=1e-9)
    assert np.asarray(solution.iterations)[1:].tolist() == [0, 0]
    np.testing.assert_array_equal(solution.x[1:], 0)


def test_zero_gradient_gives_zero():
    solution = solved(b=np.zeros((3, 7)), max_iterations=3)
    np.testing.assert_array_equal(solution.x, 0)
    np.testing.assert_array_equal(solution.residual, 0)


def test_no_iterations_is_an_error():
    with pytest.raises(ValueError, match="max_iterations >= 1"):
        solved(max_iterations=0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("examples", [1, 5, 11])
def test_dual_is_the_dense_solution(examples):
    u = np.random.default_rng(examples).normal(size=(3, examples, 7))
    gamma, b = np.array([0.2, 1.0, 0.0]), B.copy()
    # As below a head that begins at zero: of this layer alone, the others take their step.
    u[2] = b[2] = 0
    solution = solver.solve_dual(*map(jnp.asarray, (u, b, gamma)), examples)
    for lane in range(2):
        dense = u[lane].T @ u[lane] / examples + gamma[lane] * np.eye(7)
        close(solution.x[lane], np.linalg.solve(dense, b[lane]), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(solution.x[2], 0)
    close(solution.residual[:2], 0, atol=1e-10)
    assert np.isfinite(solution.residual[2])


def test_dual_factorizes_one_by_one_on_cpus():
    lanes = jnp.ones((3, 5, 7)), jnp.ones((3, 7)), jnp.ones(3)
    program = jax.jit(lambda *lanes: solver.solve_dual(*lanes, 5)).lower(*lanes).as_text()
    shapes = [
        re.findall(r"tensor<([\dx]+)xf64>", line)
        for line in program.splitlines()
        if "getrf" in line
    ]
    assert {shape for found in shapes for shape in found} == {"5x5"}


def test_sums_are_float32_for_bfloat16_operands():
    u = jnp.ones((1, 4096), jnp.bfloat16)
    assert solver.lane_dot(u, u).dtype == jnp.float32
    assert float(solver.lane_dot(u, u)[0]) == 4096.0  # bfloat16 counts to 256


@pytest.mark.parametrize("platform", ["cpu", "rocm", "tpu"])
def test_inverses_are_one_batch_on_accelerators_and_one_by_one_on_cpus(platform):
    lanes = jnp.asarray(np.stack([spd(200, 300, seed) for seed in range(3)]), jnp.float32)
    traced = jax.jit(_damped_inverse).trace(lanes, jnp.asarray(GAMMA, jnp.float32))
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" in program) == (platform == "cpu")
    factorized = {
        tuple(map(int, shape.split("x")))
        for line in program.splitlines()
        if "potrf" in line or "stablehlo.cholesky" in line
        for shape in re.findall(r"tensor<([\dx]+)x\d+xf32>", line)
    }
    *batches, rows = zip(*factorized, strict=True)
    assert [set(batch) for batch in batches] == ([] if platform == "cpu" else [{3}])
    assert max(rows) <= 96
    # Else old inverses may be turned at every step; XLA for CPUs computes them row by row anyway.
    assert ("LayoutConstraint" in program) == (platform != "cpu")


@pytest.mark.cases(1)
@pytest.mark.parametrize("size", [1, 7, 96, 97, 193, 321])
def test_roots_and_inverses_are_those_of_numpy(size):
    lanes = np.stack([spd(size, size + 3, seed) + 1e-3 * np.eye(size) for seed in range(2)])
    roots, inverses = _root_and_inverse(jnp.asarray(lanes))
    assert not np.triu(roots, 1).any()
    close(roots, np.linalg.inv(np.linalg.cholesky(lanes)), atol=1e-9)
    exact = np.linalg.inv(lanes)
    close(inverses, exact, rtol=1e-9, atol=1e-9 * abs(exact).max())
    _, single = _root_and_inverse(jnp.asarray(lanes, jnp.float32))
    np.testing.assert_array_equal(single, single.mT)
    error = np.linalg.norm(np.asarray(single, np.float64) - exact) / np.linalg.norm(exact)
    # Of one number half an eps each for the matrix, its root, the root's reciprocal and the square
    # of that, where the square doubles what came before: 5/2 + 1/2 of an eps.
    assert error < 3 * np.finfo(np.float32).eps * np.linalg.cond(lanes).max()


def test_inverses_in_float32_are_positive_where_they_barely_exist():
    columns = np.random.default_rng(0).normal(size=(64, 200)) * np.logspace(0, 1, 200)
    matrix = columns.T @ columns / 64
    lanes = (matrix + 1e-5 * np.trace(matrix) / 200 * np.eye(200))[None]
    assert np.linalg.cond(lanes[0]) > 1e6
    inverse = _damped_inverse(jnp.asarray(lanes, jnp.float32), jnp.zeros(1, jnp.float32))[0]
    assert np.linalg.eigvalsh(np.asarray(inverse, np.float64)).min() > 0
    assert not np.array_equal(inverse, np.eye(200))


@pytest.mark.slow
def test_what_has_no_root_gives_nan_by_halves_and_the_identity_as_an_inverse():
    lanes = np.stack([spd(130, 150), spd(130, 150)])
    lanes[1, 129, 129] = -1.0
    for array in _root_and_inverse(jnp.asarray(lanes)):
        assert np.isfinite(array[0]).all()
        assert np.isnan(array[1]).any()
    inverses = _damped_inverse(jnp.asarray(lanes), jnp.full(2, 1e-3))
    close(inverses[0], np.linalg.inv(lanes[0] + 1e-3 * np.eye(130)), 1e-9)
    np.testing.assert_array_equal(inverses[1], np.eye(130))
