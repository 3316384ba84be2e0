"""Newton in the cone: it ends for every K and b, at the minimum, within the stated limits."""

import itertools
import math

import pytest
import torch

from spinformer.solve.newton import MAX_ITERATIONS, minimize_in_cone
from spinformer.solve.positive import cone_hessian, positive_factor, positive_inverse_
from spinformer.solve.secular import minimize_shared

F64 = torch.float64
EPS = torch.finfo(F64).eps
SCALES = (1e-3, 1.0, 1e1, 1e2, 1e4, 1e6)


def symmetric(upper):
    upper = upper.triu(1)
    return upper + upper.mT


def matrices(n):
    """Kinds of K, by name, with entries of order one or rows of order one."""
    generator = torch.Generator().manual_seed(n)

    def normal():
        return torch.randn(n, n, generator=generator, dtype=F64)

    ones = symmetric(torch.ones(n, n, dtype=F64))
    star = torch.zeros(n, n, dtype=F64)
    star[0, 1:] = 1.0
    ring = torch.zeros(n, n, dtype=F64)
    for i in range(n - 1):
        ring[i, i + 1] = 1.0
    if n > 2:
        ring[0, -1] = 1.0
    patterns = torch.randn(n, 3, generator=generator, dtype=F64).sign()
    heavy = symmetric(torch.exp(3 * normal()) * normal().sign())
    blocks = torch.zeros(n, n, dtype=F64)
    blocks[: n // 2, : n // 2] = 1.0
    sparse = torch.rand(n, n, generator=generator, dtype=F64) < 3 / n
    return {
        "gaussian": symmetric(normal()) / math.sqrt(n),
        "ferromagnet": ones / n,
        "frustrated": -ones / n,
        "star": symmetric(star),
        "random star": symmetric(star * normal()),
        "ring": symmetric(ring),
        "frustrated ring": -symmetric(ring),
        "patterns": symmetric(patterns @ patterns.mT) / n,
        "sparse": symmetric(sparse * normal()),
        "heavy tails": heavy / heavy.abs().max().clamp_min(1e-300),
        "blocks": symmetric(blocks),
    }


def vectors(n, scale):
    """Kinds of b (N, 4) for a K of size ``scale``."""
    generator = torch.Generator().manual_seed(n + 1)
    noise = torch.randn(n, 4, generator=generator, dtype=F64)
    one, even = torch.zeros(2, n, 4, dtype=F64)
    one[0] = scale
    even[:, 0] = 0.3 * scale
    return {
        "zero": torch.zeros(n, 4, dtype=F64),
        "normal": scale * noise / 2,
        "weak": 1e-3 * noise,
        "one site": one,
        "strong": torch.full((n, 4), 1e3 * scale, dtype=F64),
        "even": even,
    }


def grid(n, scales=SCALES, kinds=None, fields=None):
    """All K and b of size n, or those of the named kinds, as one batch with their names."""
    names, k, b = [], [], []
    for kind, matrix in matrices(n).items():
        for scale in scales if kinds is None or kind in kinds else ():
            for field, vector in vectors(n, scale).items():
                if fields is not None and field not in fields:
                    continue
                names.append((kind, scale, field))
                k.append(scale * matrix)
                b.append(vector)
    return names, torch.stack(k), torch.stack(b)


def independent_residual(k, b, tau):
    """Residual by one Cholesky factorization, and eps cond(V) bounded by row sums."""
    v = torch.diag_embed(tau) - k
    a = torch.cholesky_inverse(torch.linalg.cholesky(v))
    residual = (a.diagonal(dim1=-2, dim2=-1) + (a @ b).square().sum(-1) - 1).abs().amax(-1)
    return residual, EPS * v.abs().sum(-1).amax(-1) * a.abs().sum(-1).amax(-1)


def check_grid(n, scales=SCALES, kinds=None, fields=None):
    names, k, b = grid(n, scales, kinds, fields)
    found = minimize_in_cone(k, b)
    failed = [name for name, ok in zip(names, found.solution.converged, strict=True) if not ok]
    assert not failed
    assert int(found.solution.iterations.max()) <= MAX_ITERATIONS == 60
    residual, rounding = independent_residual(k, b, found.solution.value)
    # Ten times the rounding limit is what the solver allows itself; a second evaluation by another
    # elimination differs from it by rounding once more.
    assert bool((residual <= (20 * rounding).clamp_min(1e-11)).all())


@pytest.mark.parametrize("n", [1, 2, 3, 8, 32])
def test_converges_for_every_matrix_and_field(n):
    check_grid(n)


@pytest.mark.slow
@pytest.mark.parametrize("n", [64, 128])
def test_converges_for_every_large_matrix_and_field(n):
    check_grid(n)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e2, 1e6])
def test_converges_for_the_largest_and_coldest(scale):
    check_grid(256, (scale,))
    hardest = ("gaussian", "frustrated", "star", "random star", "sparse")
    check_grid(512, (scale,), hardest, ("zero", "normal"))


def test_zero_field_star_is_quick():
    """From the shared root it takes 180 Newton steps."""
    k = 100 * matrices(128)["star"]
    found = minimize_in_cone(k, torch.zeros(128, 1, dtype=F64))
    assert bool(found.solution.converged) and int(found.solution.iterations) <= 25


@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["gaussian", "ferromagnet", "frustrated", "patterns", "softmax"])
@pytest.mark.parametrize("n", [8, 128])
def test_ordinary_temperatures_take_six_steps(beta, kind, n, generator):
    if kind == "softmax":
        k = torch.softmax(2 * torch.randn(n, n, generator=generator, dtype=F64), -1)
        k = symmetric((k + k.mT) / 2)
    else:
        k = matrices(n)[kind]
    b = torch.randn(n, 16, generator=generator, dtype=F64) / 4
    for dtype in (F64, torch.float32):
        found = minimize_in_cone((beta * k).to(dtype), (beta * b).to(dtype))
        assert int(found.solution.iterations) <= 6
        assert found.inverse.dtype == dtype


def test_it_is_the_minimum(generator):
    k = symmetric(torch.randn(5, 5, generator=generator, dtype=F64))
    b = torch.randn(5, 3, generator=generator, dtype=F64)

    def phi(tau):
        v = torch.diag(tau) - k
        return ((tau - 1).sum() - torch.logdet(v) + (b * torch.linalg.solve(v, b)).sum()) / 2

    found = minimize_in_cone(k, b)
    tau = found.solution.value
    torch.testing.assert_close(found.value, phi(tau))
    torch.testing.assert_close(found.log_det, torch.logdet(torch.diag(tau) - k))
    gradient = torch.autograd.functional.jacobian(phi, tau)
    assert float(gradient.abs().max()) < 1e-12  # the tolerance of the residual, halved
    hessian = torch.autograd.functional.hessian(phi, tau)
    torch.testing.assert_close(cone_hessian(found.inverse, found.response) / 2, hessian)


def test_one_site_is_exact():
    b = torch.tensor([0.0, 1e-8, 1.0, 1e8], dtype=F64)[:, None, None]
    k = torch.tensor([[3.0]], dtype=F64)  # an entry on the diagonal shifts tau
    found = minimize_in_cone(k, b)
    expected = 3 + (1 + torch.sqrt(1 + 4 * b.square())) / 2
    torch.testing.assert_close(found.solution.value, expected[..., 0], rtol=1e-14, atol=0)
    assert int(found.solution.iterations.max()) == 0


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_answer_of_a_batch_is_the_answer_alone(dtype):
    names, k, b = grid(8)
    k, b = k.to(dtype), b.to(dtype)
    together = minimize_in_cone(k, b)
    for row in range(0, len(names), 23):
        alone = minimize_in_cone(k[row], b[row])
        assert int(alone.solution.iterations) == int(together.solution.iterations[row])
        for name in ("inverse", "response", "log_det", "value"):
            got, expected = getattr(alone, name), getattr(together, name)[row]
            # Equal to the last digit where the products of a batch are those of its members; the
            # margin, the rounding limit of the coldest, is for machines where they are not.
            close = {"rtol": 1e-6, "atol": 1e-6}
            torch.testing.assert_close(got.to(dtype), expected.to(dtype), **close)


def test_broken_systems_stay_in_their_rows(generator):
    k = symmetric(torch.randn(4, 6, 6, generator=generator, dtype=F64))
    b = torch.randn(4, 6, 2, generator=generator, dtype=F64)
    clean = minimize_in_cone(k, b)
    k[1, 0, 3] = torch.nan
    b[2, 5, 1] = torch.inf
    found = minimize_in_cone(k, b)
    assert found.broken.tolist() == [False, True, True, False]
    assert found.solution.converged.tolist() == [True, False, False, True]
    assert found.solution.value[1:3].isnan().all() and found.solution.residual[1:3].isnan().all()
    assert found.inverse.isfinite().all() and found.response.isfinite().all()
    for row in (0, 3):
        assert torch.equal(found.inverse[row], clean.inverse[row])
        assert torch.equal(found.solution.value[row], clean.solution.value[row])


@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_absent_sites_change_nothing(scale, generator):
    k = scale * symmetric(torch.randn(5, 5, generator=generator, dtype=F64))
    b = scale * torch.randn(5, 2, generator=generator, dtype=F64)
    small = minimize_in_cone(k, b)
    padded_k = torch.full((8, 8), torch.nan, dtype=F64)
    padded_b = torch.full((8, 2), torch.inf, dtype=F64)
    padded_k[:5, :5], padded_b[:5] = k, b
    absent = torch.arange(8) >= 5
    padded = minimize_in_cone(padded_k, padded_b, absent=absent)
    # Elimination in another order: rounding times the condition number.
    rounding = float(independent_residual(k, b, small.solution.value)[1])
    close = {"rtol": 10 * rounding + 1e-12, "atol": 10 * rounding + 1e-12}
    torch.testing.assert_close(padded.solution.value[:5], small.solution.value, **close)
    torch.testing.assert_close(padded.inverse[:5, :5], small.inverse, **close)
    torch.testing.assert_close(padded.value, small.value, **close)
    assert torch.equal(padded.solution.value[5:], torch.ones(3, dtype=F64))
    assert torch.equal(padded.inverse[5:], torch.eye(8, dtype=F64)[5:])
    assert not padded.response[5:].any()


def test_a_good_start_saves_steps_and_a_bad_one_does_no_harm(generator):
    k = symmetric(torch.randn(6, 6, generator=generator, dtype=F64))
    b = torch.randn(6, 2, generator=generator, dtype=F64)
    cold = minimize_in_cone(k, b)
    tau = cold.solution.value
    again = minimize_in_cone(k, b, initial=tau)
    assert int(again.solution.iterations) == 0
    outside = minimize_in_cone(k, b, initial=torch.full_like(tau, -5.0))
    assert bool(outside.solution.converged)
    torch.testing.assert_close(outside.solution.value, tau, rtol=1e-11, atol=0)


def test_float32_hands_cold_systems_to_float64():
    _, k, b = grid(8)
    exact = minimize_in_cone(k.float().double(), b.float().double())
    found = minimize_in_cone(k.float(), b.float())
    assert bool(found.solution.converged.all())
    assert float(found.solution.residual.max()) <= 1e-5
    assert found.inverse.dtype == F64
    # An error of 1e-5 in the constraint, or of 1e-4 in A, is what float32 is allowed; mu follows
    # with the inverse of P, which at these sizes costs less than a factor of ten.
    for name in ("inverse", "response"):
        error = (getattr(found, name) - getattr(exact, name)).abs().flatten(1).amax(1)
        assert float(error.max()) < 1e-3


def test_too_few_steps_are_reported():
    k = 1e6 * matrices(8)["gaussian"]
    found = minimize_in_cone(k, torch.zeros(8, 1, dtype=F64), max_iterations=5)
    assert not bool(found.solution.converged)
    assert int(found.solution.iterations) == 5
    # The residual is that of the tau that is returned.
    residual, _ = independent_residual(k, torch.zeros(8, 1, dtype=F64), found.solution.value)
    torch.testing.assert_close(residual, found.solution.residual, rtol=1e-6, atol=0)


def test_every_step_that_is_allowed_leads_further_down():
    """The path, for which too few are left, must not put its own start in their place."""
    k, b = 2 * matrices(8)["gaussian"], torch.ones(8, 4, dtype=F64)
    values = [float(minimize_in_cone(k, b, max_iterations=n).value) for n in range(1, 5)]
    assert all(after < before for before, after in itertools.pairwise(values))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 100, 130])
def test_positive_inverse(n, generator):
    x = torch.randn(3, n, n, generator=generator, dtype=F64)
    matrix = x @ x.mT / n + 0.1 * torch.eye(n, dtype=F64)
    matrix[1, n // 2, n // 2] = -1.0
    expected = torch.stack([torch.linalg.inv(m) for m in matrix])
    work = matrix.clone()
    log_det, good = positive_inverse_(work)
    assert good.tolist() == [True, False, True]
    # eps times the square of the condition number, about 40
    torch.testing.assert_close(work[::2], expected[::2], rtol=0, atol=1e-11)
    torch.testing.assert_close(log_det[::2], torch.stack([m.logdet() for m in matrix[::2]]))


def test_positive_factor_raises_what_rounding_broke():
    x = torch.ones(2, 2, dtype=F64)
    matrix = torch.stack([x - 1e-15 * torch.eye(2, dtype=F64), x + torch.eye(2, dtype=F64)])
    factor = positive_factor(matrix)
    torch.testing.assert_close(factor @ factor.mT, matrix, rtol=0, atol=1e-13)


# -- one tau for all ------------------------------------------------------------------------------


def shared(k, b, **options):
    return minimize_shared(*torch.linalg.eigh(k), b, **options)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 32])
def test_shared_converges_for_every_matrix_and_field(n):
    _, k, b = grid(n)
    found = shared(k, b)
    solution = found.solution
    assert bool(solution.converged.all())
    assert int(solution.iterations.max()) <= MAX_ITERATIONS
    assert float(solution.residual.max()) <= 1e-12
    # Of tau as it is returned, the condition holds to the rounding of V.
    tau = solution.value[:, None].expand(-1, n)
    v = torch.diag_embed(tau) - k
    values, vectors = torch.linalg.eigh(v)
    rotated = (vectors.mT @ b).square().sum(-1)
    mean = (1 / values + rotated / values.square()).mean(-1)
    rounding = EPS * values[:, -1] / values[:, 0]
    assert bool(((mean - 1).abs() <= 100 * rounding.clamp_min(EPS)).all())


def test_shared_is_the_minimum_over_equal_tau(generator):
    k = symmetric(torch.randn(6, 6, generator=generator, dtype=F64))
    b = torch.randn(6, 3, generator=generator, dtype=F64)
    found = shared(k, b)

    def phi(tau):
        v = tau * torch.eye(6, dtype=F64) - k
        return (6 * (tau - 1) - torch.logdet(v) + (b * torch.linalg.solve(v, b)).sum()) / 2

    tau = found.solution.value
    torch.testing.assert_close(found.value, phi(tau))
    assert float(torch.autograd.functional.jacobian(phi, tau).abs()) < 1e-12
    site = minimize_in_cone(k, b)
    assert float(site.value) <= float(found.value)


@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_shared_counts_present_sites_only(scale, generator):
    k = symmetric(torch.randn(5, 5, generator=generator, dtype=F64))
    b = scale * torch.randn(5, 2, generator=generator, dtype=F64)
    small = shared(k, b, scale=torch.tensor(scale, dtype=F64))
    padded_k, padded_b = torch.zeros(8, 8, dtype=F64), torch.zeros(8, 2, dtype=F64)
    padded_k[:5, :5], padded_b[:5] = k, b
    padded = shared(
        padded_k, padded_b, scale=torch.tensor(scale, dtype=F64), absent=torch.arange(8) >= 5
    )
    torch.testing.assert_close(padded.solution.value, small.solution.value)
    torch.testing.assert_close(padded.value, small.value)
    torch.testing.assert_close(padded.log_det, small.log_det)
    assert float(padded.count) == 5


def test_shared_broken_systems_stay_in_their_rows(generator):
    k = symmetric(torch.randn(6, 6, generator=generator, dtype=F64))
    b = torch.randn(3, 6, 2, generator=generator, dtype=F64)
    clean = shared(k, b)
    b[1, 0, 0] = torch.nan
    found = shared(k, b)
    assert found.solution.converged.tolist() == [True, False, True]
    assert bool(found.solution.value[1].isnan())
    assert torch.equal(found.solution.value[::2], clean.solution.value[::2])
