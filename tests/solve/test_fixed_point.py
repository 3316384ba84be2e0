"""Fixed points: honest evidence, systems that don't feel their batch, gradients of any scale."""

import warnings

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from spinformer.errors import ConvergenceError, ConvergenceWarning
from spinformer.solve import FixedPoint, unroll

SOLVERS = ("plain", "anderson", "broyden")
F64 = torch.float64


def scalar(value):
    return torch.tensor(value, dtype=F64)


def tanh_map(z, a, b):
    return torch.tanh(a * z + b)


def coupled(m, h, j):
    return torch.tanh(h + j @ m)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(2, 3, 1, generator=generator, dtype=F64)
    j = torch.randn(3, 3, generator=generator, dtype=F64)
    return h.requires_grad_(), (0.7 * j / torch.linalg.matrix_norm(j, 2)).requires_grad_()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("damping", [1.0, 0.1, 0.01, 0.001])
def test_converged_means_the_undamped_residual(solver, damping):
    # Enough for plain iteration at damping .01 (rate 1 - .01 * .5), not at .001.
    options = FixedPoint(solver, damping, 1e-9, 5000, on_failure="ignore")
    solution = options.solve(tanh_map, torch.zeros(1, 1, dtype=F64), (scalar(0.5), scalar(1.0)))
    z = solution.value
    residual = (tanh_map(z, 0.5, 1.0) - z).abs().max()
    assert float(residual) == float(solution.residual)
    assert bool(solution.converged) == bool(residual <= 1e-9)
    assert bool(solution.converged) == (solver != "plain" or damping > 0.001)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_system_does_not_feel_its_batch(solver):
    a = torch.tensor([0.5, 0.98, torch.nan], dtype=F64)[:, None, None]
    b = torch.full((3, 4, 1), 0.3, dtype=F64)
    options = FixedPoint(solver, tolerance=1e-10, on_failure="ignore")
    together = options.solve(tanh_map, torch.zeros(3, 4, 1, dtype=F64), (a, b))
    for row in range(2):
        alone = options.solve(tanh_map, torch.zeros(1, 4, 1, dtype=F64), (a[[row]], b[[row]]))
        assert int(together.iterations[row]) == int(alone.iterations[0])
        # 1e-12: matrix products of another batch size may round differently.
        torch.testing.assert_close(together.value[row], alone.value[0], rtol=0, atol=1e-12)
    assert together.converged.tolist() == [True, True, False]


@pytest.mark.parametrize("solver", SOLVERS)
def test_gradients(solver, inputs):
    def solve(h, j):
        start = torch.zeros_like(h)
        return FixedPoint(solver, tolerance=1e-12).solve(coupled, start, (h, j)).value

    assert gradcheck(solve, inputs)
    assert gradgradcheck(solve, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("solver", SOLVERS)
def test_gradient_is_linear_in_the_cotangent(solver, dtype, inputs):
    h, j = (tensor.detach().to(dtype).requires_grad_() for tensor in inputs)
    value = FixedPoint(solver, tolerance=1e-5).solve(coupled, torch.zeros_like(h), (h, j)).value
    (unit,) = torch.autograd.grad(value.sum(), h, retain_graph=True)
    for c in (1e-12, 1e-8, 1e-4, 1e5):
        (scaled,) = torch.autograd.grad(c * value.sum(), h, retain_graph=True)
        torch.testing.assert_close(scaled / c, unit, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_nan_stays_in_its_row_of_the_gradient(solver):
    h = torch.tensor([[[0.3]], [[torch.nan]]], dtype=F64)
    w = torch.ones((), dtype=F64, requires_grad=True)
    keep = torch.tensor([True, False])[:, None, None]
    options = FixedPoint(solver, on_failure="ignore")
    clean = torch.where(keep, h, 0.0)
    value = options.solve(tanh_map, torch.zeros(2, 1, 1, dtype=F64), (0.5 * w, clean)).value
    value = torch.where(keep, value, h)
    (grad,) = torch.autograd.grad(value[0].sum(), w)
    (alone,) = torch.autograd.grad(
        options.solve(tanh_map, torch.zeros(1, 1, 1, dtype=F64), (0.5 * w, h[:1])).value.sum(), w
    )
    torch.testing.assert_close(grad, alone, rtol=1e-9, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_given_linearization_replaces_autograd(solver, inputs):
    """The same derivatives, with one call for the adjoint and no other product with J^T."""
    calls = []

    def linearize(m, h, j):
        calls.append("made")
        new = coupled(m, h, j)
        slope = (1 - new**2).detach()

        def transposed(u):
            calls.append("applied")
            return j.detach().mT @ (slope * u)

        return new, transposed

    def solve(linearize):
        def function(h, j):
            options = FixedPoint(solver, tolerance=1e-12)
            return options.solve(coupled, torch.zeros_like(h), (h, j), linearize=linearize).value

        return function

    assert gradcheck(solve(linearize), inputs)
    assert gradgradcheck(solve(linearize), inputs)
    calls.clear()
    given = torch.autograd.grad(solve(linearize)(*inputs).sin().sum(), inputs)
    assert calls.count("made") == 1 and calls.count("applied") >= 2
    expected = torch.autograd.grad(solve(None)(*inputs).sin().sum(), inputs)
    torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-11)


def test_two_cycle_is_not_convergence():
    j = torch.tensor([[0.0, -2.0], [-2.0, 0.0]], dtype=F64)
    start = torch.tensor([[0.5], [0.4999]], dtype=F64)
    zero = torch.zeros_like(start)
    with pytest.raises(ConvergenceError, match="1 of 1 systems"):
        FixedPoint(max_iterations=200).solve(coupled, start, (zero, j))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solution = FixedPoint(max_iterations=200, on_failure="warn").solve(
            coupled, start, (zero, j)
        )
    assert [w.category for w in caught] == [ConvergenceWarning]
    assert not bool(solution.converged)
    damped = FixedPoint(damping=0.5, tolerance=1e-12).solve(coupled, start, (zero, j)).value
    expected = torch.tensor([[0.957504024077], [-0.957504024077]], dtype=F64)
    torch.testing.assert_close(damped, expected, rtol=0, atol=1e-9)


def test_adjoint_failure_is_loud(inputs):
    h, _ = inputs
    # At the largest contraction the forward solve starts at its solution and takes one step.
    j = torch.full((3, 3), 0.999 / 3, dtype=F64)
    solution = FixedPoint(max_iterations=30, tolerance=1e-8).solve(
        coupled, torch.zeros_like(h), (0 * h, j)
    )
    with pytest.raises(ConvergenceError, match="adjoint"):
        solution.value.sum().backward()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2)])
def test_empty_batches_and_systems(solver, shape):
    h = torch.zeros(shape, requires_grad=True)
    value = (
        FixedPoint(solver)
        .solve(lambda z, h: torch.tanh(0.5 * z + h), torch.zeros(shape), (h,))
        .value
    )
    value.sum().backward()
    assert value.shape == shape and h.grad.shape == shape


def test_memory_does_not_grow_with_iterations(inputs):
    """Bytes that the graph saves for backward after 5 and after 500 iterations."""
    h, j = inputs
    saved = []

    def pack(tensor):
        saved[-1] += tensor.numel() * tensor.element_size()
        return tensor

    for iterations in (5, 500):
        options = FixedPoint(tolerance=1e-300, max_iterations=iterations, on_failure="ignore")
        saved.append(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            solution = options.solve(coupled, torch.zeros_like(h), (h, j))
        assert int(solution.iterations.max()) == iterations
    assert saved[0] == saved[1] > 0


def test_unroll_is_the_loop(inputs):
    h, j = inputs
    z = torch.zeros_like(h)
    for _ in range(3):
        z = 0.5 * z + 0.5 * coupled(z, h, j)
    torch.testing.assert_close(
        unroll(coupled, torch.zeros_like(h), (h, j), steps=3, damping=0.5), z
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"damping": 0.0}, "damping=0.0"),
        ({"damping": 1.5}, "damping=1.5"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
        ({"max_iterations": 0}, "max_iterations=0"),
        ({"solver": "newton"}, "solver='newton'"),
        ({"on_failure": "panic"}, "on_failure='panic'"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        FixedPoint(**options)


def test_unknown_option_names_the_nearest():
    with pytest.raises(TypeError, match="'toleranse'; the nearest is 'tolerance'"):
        FixedPoint(toleranse=1e-3)


def test_a_failed_solve_returns_the_best_that_it_met():
    """z <- 2 z runs away from its unstable fixed point: the start is the best."""
    options = FixedPoint(max_iterations=20, on_failure="ignore")
    start = torch.full((1, 1, 1), 1e-3, dtype=F64)
    solution = options.solve(lambda z: 2 * z, start)
    assert torch.equal(solution.value, start) and not bool(solution.converged)
    assert float(solution.residual) == 1e-3


@pytest.mark.parametrize("solver", SOLVERS)
def test_also_where_it_runs_away_to_infinity(solver):
    """z <- z^3 + 2 z from 0.1 overflows within 20 steps; the residual is smallest at the start."""
    options = FixedPoint(solver, max_iterations=100, on_failure="ignore")
    start = torch.full((1, 1, 1), 0.1, dtype=F64)
    solution = options.solve(lambda z: z**3 + 2 * z, start)
    assert bool(solution.value.isfinite()) and float(solution.residual) <= 0.101 + 1e-15


def test_a_gradient_is_finite_where_its_adjoint_runs_away():
    """f' = 3 at the fixed point 1, where the solve starts: the adjoint grows threefold a step."""
    a = scalar(-2.0).requires_grad_()
    options = FixedPoint(max_iterations=2000, on_failure="ignore")
    value = options.solve(
        lambda z, a: 3 * z + a, torch.ones(1, 1, 1, dtype=F64), (a.reshape(1, 1, 1),)
    ).value
    (gradient,) = torch.autograd.grad(value.sum(), a)
    assert bool(gradient.isfinite())
