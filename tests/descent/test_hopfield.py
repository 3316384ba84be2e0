"""Modern Hopfield networks: descent, and each theorem of Ramsauer et al. (2020) by experiment."""

import math

import hypothesis
import hypothesis.strategies as st
import mpmath
import pytest
import torch
import torch.nn.functional as F

from spinformer.descent.hopfield import (
    Capacity,
    HopfieldEnergy,
    retrieval,
    separation,
    storage_capacity,
)

EPS = torch.finfo(torch.float64).eps


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def on_sphere(generator, *shape, radius=1.0):
    return radius * F.normalize(draw(generator, *shape), dim=-1)


@pytest.mark.parametrize("size", [0.3, 1.0, 1.9])
def test_never_rises(size, generator):
    """4,500 random memories; and it falls by half the square of the step at size 1."""
    for K, d in ((1, 2), (4, 1), (3, 6), (20, 4), (50, 10)):
        patterns = torch.exp(draw(generator, 300, 1, 1)) * draw(generator, 300, K, d)
        beta = torch.exp(2 * draw(generator, 300))
        energy = HopfieldEnergy(patterns, beta)
        assert size <= energy.step_bound()
        Y = torch.exp(draw(generator, 300, 1, 1)) * draw(generator, 300, 3, d)
        moved = energy.step(Y, size)
        scale = 1 + Y.square().sum((-2, -1)) + patterns.square().sum((-2, -1)) + 1 / beta
        fall = energy.energy(Y) - energy.energy(moved)
        least = (1 / size - 1 / 2) * (moved - Y).square().sum((-2, -1))
        assert ((fall - least) / scale).min() >= -64 * EPS


def test_rises_beyond_the_bound(generator):
    energy = HopfieldEnergy(draw(generator, 300, 3, 4))
    Y = draw(generator, 300, 2, 4)
    assert (energy.energy(energy.step(Y, 2.5)) > energy.energy(Y)).any()


def test_theorems_1_and_2_steps_tend_to_zero(generator):
    """The falls sum to at most the range of the energy, hence min |step|^2 <= 2 (E_0 - E) / T."""
    patterns, beta = draw(generator, 500, 6, 3), torch.exp(draw(generator, 500))
    energy = HopfieldEnergy(patterns, beta)
    Y = 2 * draw(generator, 500, 1, 3)
    first = energy.energy(Y)
    lengths = []
    for _ in range(200):
        moved = energy.step(Y)
        lengths.append((moved - Y).square().sum((-2, -1)))
        Y = moved
    budget = 2 * (first - energy.energy(Y))
    steps = torch.stack(lengths)
    assert (steps.sum(0) <= budget + 1e-10).all()
    # Slow ones are near a bifurcation.
    assert (energy.gradient(Y).abs().amax((-2, -1)) < 1e-6).double().mean() > 0.95


def test_fixed_points_need_not_be_minima():
    """Two opposite patterns: the middle is a fixed point, and a saddle once beta |x|^2 > 1."""
    x = torch.tensor([[1.5, 0.0], [-1.5, 0.0]], dtype=torch.float64)
    energy = HopfieldEnergy(x, 1.0)
    middle = torch.zeros(1, 2, dtype=torch.float64)
    assert torch.equal(energy.step(middle), middle)
    aside = middle + torch.tensor([0.1, 0.0])
    assert energy.energy(aside) < energy.energy(middle)


def test_step_is_attention(generator):
    patterns, Y = draw(generator, 5, 4), draw(generator, 2, 3, 4)
    energy = HopfieldEnergy(patterns, 0.7)
    expected = F.scaled_dot_product_attention(Y, patterns[None], patterns[None], scale=0.7)
    torch.testing.assert_close(energy.step(Y), expected)
    torch.testing.assert_close(energy.step(Y, 0.4), 0.6 * Y + 0.4 * expected)


def test_gradient(generator):
    patterns = draw(generator, 2, 5, 4).requires_grad_()
    beta = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    Y = draw(generator, 2, 3, 4).requires_grad_()
    mask = torch.tensor([[False] * 3, [False, True, False]])
    absent = torch.tensor([[False] * 5, [False, True, False, False, True]])

    def value(y, patterns, beta):
        return HopfieldEnergy(patterns, beta, pattern_mask=absent, constants=True).energy(y, mask)

    energy = HopfieldEnergy(patterns, beta, pattern_mask=absent)
    (by_autograd,) = torch.autograd.grad(value(Y, patterns, beta).sum(), Y)
    torch.testing.assert_close(energy.gradient(Y, mask), by_autograd)
    assert torch.autograd.gradcheck(value, (Y, patterns, beta))
    assert torch.autograd.gradgradcheck(value, (Y, patterns, beta))


def test_hessian_bounds(generator):
    for _ in range(20):
        patterns = 2 * draw(generator, 6, 3)
        energy = HopfieldEnergy(patterns, 0.8)
        lower, upper = energy.hessian_bounds(1)
        for q in draw(generator, 10, 3):
            hessian = torch.autograd.functional.hessian(energy.energy, q[None]).squeeze()
            eigenvalues = torch.linalg.eigvalsh(hessian)
            assert lower <= eigenvalues.min() and eigenvalues.max() <= upper + 1e-12
    # Attained in the middle of two patterns, where both weigh the same.
    pair = HopfieldEnergy(torch.tensor([[2.0], [-1.0]], dtype=torch.float64), 1.0)
    middle = torch.zeros(1, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda y: pair.energy(y[None]), middle)
    torch.testing.assert_close(hessian.squeeze(), pair.hessian_bounds(1)[0])


def test_constants_bound_the_energy(generator):
    """(M - |q|)^2 / 2 <= E <= (M + |q|)^2 / 2: theirs, 0 <= E <= 2 M^2, is for |q| <= M."""
    patterns = torch.exp(draw(generator, 2000, 1, 1)) * draw(generator, 2000, 7, 3)
    energy = HopfieldEnergy(patterns, torch.exp(2 * draw(generator, 2000)), constants=True)
    Y = torch.exp(draw(generator, 2000, 1, 1)) * draw(generator, 2000, 1, 3)
    M = patterns.norm(dim=-1).amax(-1)
    length = Y.norm(dim=-1).squeeze(-1)
    value = energy.energy(Y)
    rounding = 64 * EPS * (M + length) ** 2
    assert (value >= (M - length) ** 2 / 2 - rounding).all()
    assert (value <= (M + length) ** 2 / 2 + rounding).all()
    beyond = HopfieldEnergy(torch.ones(1, 1), constants=True)
    assert beyond.energy(torch.full((1, 1), -5.0)) > 2


def test_absent_patterns_and_tokens_vanish(generator):
    patterns, Y = draw(generator, 2, 5, 3), draw(generator, 2, 4, 3)
    absent = torch.tensor([[False, True, False, False, True], [False] * 5])
    mask = torch.tensor([[False] * 4, [True, False, False, True]])
    patterns[absent], Y[mask] = torch.nan, torch.inf
    patterns.requires_grad_()
    Y.requires_grad_()
    energy = HopfieldEnergy(patterns, 1.3, pattern_mask=absent, constants=True)
    total, moved = energy.energy(Y, mask), energy.step(Y, 1.0, mask)
    for k in range(2):
        alone = HopfieldEnergy(patterns[k, ~absent[k]], 1.3, constants=True)
        torch.testing.assert_close(total[k], alone.energy(Y[k, ~mask[k]]))
        torch.testing.assert_close(moved[k, ~mask[k]], alone.step(Y[k, ~mask[k]]))
        bounds = energy.hessian_bounds(1)[0][k]
        torch.testing.assert_close(bounds, alone.hessian_bounds(1)[0])
        whole = retrieval(patterns, 1.3, absent)
        part = retrieval(patterns[k, ~absent[k]], 1.3)
        torch.testing.assert_close(whole.separation[k, ~absent[k]], part.separation)
        torch.testing.assert_close(whole.error(0.1)[k, ~absent[k]], part.error(0.1))
        torch.testing.assert_close(whole.required[k], part.required)
    assert (moved[mask] == 0).all()
    slopes = torch.autograd.grad(total.sum() + moved.sum(), (patterns, Y))
    assert all(slope.isfinite().all() for slope in slopes)
    assert (slopes[0][absent] == 0).all() and (slopes[1][mask] == 0).all()
    assert whole.separation[absent].isnan().all() and not whole.stored[absent].any()


def test_without_patterns(generator):
    Y = draw(generator, 4, 3)
    half = Y.square().sum() / 2
    nobody = HopfieldEnergy(draw(generator, 2, 3), pattern_mask=torch.ones(2, dtype=torch.bool))
    for energy in (HopfieldEnergy(torch.zeros(0, 3, dtype=torch.float64)), nobody):
        torch.testing.assert_close(energy.energy(Y), half)
        assert (energy.step(Y) == 0).all()
    assert separation(torch.zeros(0, 3)).shape == (0,)
    assert separation(torch.ones(1, 3)).tolist() == [torch.inf]
    single = retrieval(torch.ones(1, 3))
    assert single.stored.all()
    assert single.error(100.0) == 0 and single.fixed_point_error == 0


def test_separation_by_hand():
    x = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert separation(x).tolist() == [2.0, 0.0, 0.0]


def borderline(generator, count, N, d):
    """Random patterns, and the beta at which the least separated one is just well separated."""
    patterns = torch.exp(draw(generator, count, 1, 1)) * on_sphere(generator, count, N, d)
    patterns = patterns * (0.7 + 0.3 * torch.rand(count, N, 1, generator=generator))
    gap = separation(patterns)
    best = gap.argmax(-1)
    gap = gap.amax(-1)
    low, high = torch.full_like(gap, 1e-6), torch.full_like(gap, 1e9)
    for _ in range(200):
        beta = (low * high).sqrt()
        enough = gap >= retrieval(patterns, beta).required
        low, high = torch.where(enough, low, beta), torch.where(enough, beta, high)
    return patterns, high, best


@pytest.mark.parametrize(("N", "d"), [(2, 1), (2, 3), (3, 2), (5, 5), (20, 10)])
def test_well_separated_patterns_are_stored(N, d, generator):
    """At the threshold itself: the ball is mapped inside, contracted, and holds one fixed point.

    The ball that is printed, of radius 1 / (beta N M), is also disjoint from those of others.
    """
    patterns, beta, best = borderline(generator, 400, N, d)
    facts = retrieval(patterns, beta)
    index = best[:, None]
    assert facts.stored.gather(-1, index).all()
    x = patterns.gather(-2, index[..., None].expand(-1, 1, d))
    energy = HopfieldEnergy(patterns, beta)
    ball = facts.radius[:, None, None]
    starts = x + ball * on_sphere(generator, 400, 30, d)
    moved = energy.step(starts)
    away = (moved - x).norm(dim=-1)
    assert (away <= ball.squeeze(-1) * (1 + 1e-9)).all()
    distances = torch.cdist(moved, moved) / torch.cdist(starts, starts).clamp_min(1e-300)
    bound = facts.contraction(facts.radius[:, None].expand(-1, N)).gather(-1, index)
    # At the threshold 4 beta M^2 (1 - p) <= 2 / N; two patterns leave their own variance, p < 1.
    assert (bound <= 2 / N * (1 + 1e-9)).all()
    apart = torch.cdist(starts, starts) > 1e-3 * ball
    assert (distances[apart] < 1).all()
    fixed = starts
    for _ in range(300):
        fixed = energy.step(fixed)
    assert ((fixed - fixed[:, :1]).norm(dim=-1) <= 1e-6 * ball.squeeze(-1)).all()
    error = (fixed[:, 0] - x[:, 0]).norm(dim=-1)
    promised = facts.fixed_point_error.gather(-1, index).squeeze(-1)
    assert (error <= promised * (1 + 1e-9)).all()
    # Theorem 5 has e for e^(2 / N), for fixed points in a wider ball.
    leak = 2 * (N - 1) * facts.largest_norm * torch.exp(-beta * separation(patterns).amax(-1))
    assert (promised <= math.e * leak * (1 + 1e-12)).all()


def test_balls_of_stored_patterns_are_disjoint(generator):
    for beta in (0.01, 1.0, 5.0):
        patterns = torch.exp(draw(generator, 2000, 1, 1)) * draw(generator, 2000, 4, 3)
        facts = retrieval(patterns, beta)
        both = facts.stored[:, :, None] & facts.stored[:, None]
        both &= ~torch.eye(4, dtype=torch.bool)
        distances = (patterns[:, :, None] - patterns[:, None]).norm(dim=-1)
        assert both.any() or beta < 1
        assert (distances >= 2 * facts.radius[:, None, None])[both].all()


def test_printed_separation_lets_balls_overlap():
    """Lemmas A5 to A7 hold for two patterns near 0, which share their fixed point.

    The paper shows disjoint balls for 2 (N - 1) N beta M^2 > 1; here that is 0.04.
    """
    x = torch.tensor([[0.1], [-0.1]], dtype=torch.float64)
    condition = 2 / 2 + math.log(2 * 1 * 2 * 0.01)
    assert (separation(x) >= condition).all()
    facts = retrieval(x)
    assert not facts.stored.any()
    assert 2 * facts.radius > (x[0] - x[1]).abs()
    ball = x + facts.radius * torch.linspace(-1, 1, 41, dtype=torch.float64)
    moved = HopfieldEnergy(x).step(ball.reshape(-1, 1)).reshape(2, 41)
    assert ((moved - x).abs() <= facts.radius).all()
    assert (moved.diff(dim=-1).abs() < ball.diff(dim=-1).abs()).all()
    for _ in range(30):
        moved = HopfieldEnergy(x).step(moved.reshape(-1, 1)).reshape(2, 41)
    assert moved.abs().max() < 1e-15


def test_no_pattern_is_stored_where_balls_may_overlap(generator):
    """No separation exceeds 2 M^2, and the maximum with 0 asks for more."""
    for scale in (0.03, 0.1):
        patterns = scale * draw(generator, 3000, 3, 4)
        facts = retrieval(patterns)
        small = 2 * 2 * 3 * facts.largest_norm.square() < 1
        assert small.sum() > 100
        assert not facts.stored[small].any()


def test_the_factors_of_the_bounds_are_approached():
    """Two opposite patterns: the Jacobian at one of them and the error there, over their bounds."""
    for radius, least in ((1.0, 0.7), (2.0, 0.999)):
        x = torch.tensor([[radius], [-radius]], dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(HopfieldEnergy(x).step, x[:1]).squeeze()
        bound = retrieval(x).contraction(0.0)[0]
        assert least < jacobian / bound <= 1
        error = (HopfieldEnergy(x).step(x[:1]) - x[:1]).abs().squeeze()
        # The error is a difference of numbers of the size of the pattern.
        assert least < error / retrieval(x).error(0.0)[0] <= 1 + EPS * radius / error


def test_retrieval_at_several_temperatures(generator):
    patterns = 3 * draw(generator, 5, 6)
    beta = torch.tensor([0.5, 4.0], dtype=torch.float64)
    together = retrieval(patterns, beta)
    for k in range(2):
        alone = retrieval(patterns, float(beta[k]))
        assert torch.equal(together.stored[k], alone.stored)
        torch.testing.assert_close(together.fixed_point_error[k], alone.fixed_point_error)
        torch.testing.assert_close(together.contraction(0.1)[k], alone.contraction(0.1))


def test_weights_of_zero_have_no_gradient(generator):
    """Nor a NaN one: the logarithm of the weight is infinite there."""
    patterns, Y = draw(generator, 4, 3), draw(generator, 2, 3)
    graph = torch.tensor([[1.0, 0.0, 2.0, 0.5], [0.0] * 4], dtype=torch.float64, requires_grad=True)
    energy = HopfieldEnergy(patterns, 0.7, graph=graph)
    total = energy.energy(Y) + energy.step(Y).square().sum()
    (slope,) = torch.autograd.grad(total, graph)
    assert slope.isfinite().all()
    assert ((slope == 0) == (graph == 0)).all()
    seen = graph[0] > 0
    alone = HopfieldEnergy(patterns[seen], 0.7, graph=graph[:1, seen])
    torch.testing.assert_close(energy.step(Y)[:1], alone.step(Y[:1]))
    assert (energy.step(Y)[1] == 0).all()


def test_theorems_4_and_5_bound_the_error(generator):
    """20,000 queries at any distance: the bounds hold where nothing is well separated, too."""
    worst = 0.0
    for N, d in ((2, 2), (5, 3), (10, 8), (40, 20)):
        patterns = draw(generator, 500, N, d)
        beta = torch.exp(draw(generator, 500))
        facts = retrieval(patterns, beta)
        energy = HopfieldEnergy(patterns, beta)
        x = patterns[:, :1]
        queries = x + torch.exp(-2 + draw(generator, 500, 10, 1)) * on_sphere(generator, 500, 10, d)
        distance = (queries - x).norm(dim=-1)
        error = (energy.step(queries) - x).norm(dim=-1)
        for k in range(10):
            bound = facts.error(distance[:, k, None].expand(-1, N))[:, 0]
            assert (error[:, k] <= bound * (1 + 1e-9) + 1e-12).all()
            tight = bound > 1e-9
            worst = max(worst, float((error[:, k] / bound)[tight].max()))
        fixed = x
        for _ in range(500):
            fixed = energy.step(fixed)
        still = energy.gradient(fixed).abs().amax((-2, -1)) < 1e-9
        home = (fixed - x).norm(dim=-1)
        for k in range(10):
            delta = torch.maximum(distance[:, k], home[:, 0])
            factor = facts.contraction(delta[:, None].expand(-1, N))[:, 0]
            after = (energy.step(queries)[:, k] - fixed[:, 0]).norm(dim=-1)
            before = (queries[:, k] - fixed[:, 0]).norm(dim=-1)
            assert (after <= factor * before + 1e-8)[still].all()
    # Within a factor of a few of being attained (two opposite patterns).
    assert 0.3 < worst <= 1


def test_one_update_retrieves(generator):
    """The abstract's claim at the size of their first example: d = 20, K = 3, beta = 1."""
    x = on_sphere(generator, 7, 20, radius=3 * math.sqrt(19))
    energy = HopfieldEnergy(x)
    noisy = x + on_sphere(generator, 7, 20)
    assert ((energy.step(noisy) - x).norm(dim=-1) < 1e-8).all()


def test_capacity_of_their_examples():
    """a has the factor (d - 1) in its logarithm; without it neither example comes out."""
    first = storage_capacity(20, beta=1.0, scale=3.0, failure=0.001)
    assert first.applies
    assert 3.1546 <= first.base < 3.1547
    a = 2 / 19 * (1 + math.log(2 * 9 * 0.001 * 19))
    assert 1.27 < a + math.log(18 / 5) < 1.28
    without = 2 / 19 * (1 + math.log(2 * 9 * 0.001))
    assert 3.6 / float(mpmath.lambertw(mpmath.exp(without + math.log(3.6)))) > 3.6
    second = storage_capacity(75, beta=1.0, scale=1.0, failure=0.001)
    assert second.applies
    assert 1.3718 <= second.base < 1.3719
    assert 2 / 74 * (1 + math.log(2 * 0.001 * 74)) + math.log(0.4) < -0.94
    # What "exponentially many" amounts to there.
    assert first.count == pytest.approx(7.413, abs=1e-3)
    assert second.count == pytest.approx(10.973, abs=1e-3)


@hypothesis.given(
    st.integers(2, 2000), st.floats(0.01, 100), st.floats(0.1, 30), st.floats(1e-6, 1)
)
def test_capacity_solves_its_equation(dim, beta, scale, failure):
    """At N = count the least separation of the proof is what is required with 2 / N <= 1."""
    capacity = storage_capacity(dim, beta, scale, failure)
    M2 = scale**2 * (dim - 1)
    gap = M2 / (5 * capacity.base)
    required = (1 + math.log(2 * beta * M2) + 2 * capacity.log_count) / beta
    # In the logarithm of N, a rounding of log c counts (d - 1) / 4 times; log c is log b minus the
    # logarithm of W(e^a b), of which a (d - 1) / 2 and log b are summed before they may cancel.
    parts = abs(math.log(capacity.base)) + abs(math.log(2 * beta * scale**2 / 5))
    size = 1 + abs(math.log(2 * beta * M2)) + dim * parts + beta * gap
    size += abs(math.log(2 * beta * M2 * failure))
    assert beta * abs(gap - required) < 1e-14 * size
    # As printed: c >= (2 / sqrt(p))^(4 / (d - 1)).
    enough = math.log(capacity.base) - 4 / (dim - 1) * math.log(2 / math.sqrt(failure))
    spread = math.log(2 * beta * M2) + 2 * capacity.log_count
    close = min(abs(enough), abs(spread)) < 1e-9
    assert capacity.applies == (enough >= 0 and spread >= 0) or close
    assert capacity.count > 0


def test_capacity_is_reached_and_is_loose(generator):
    """All sets of N patterns are stored; so are all of a hundred times as many."""
    for dim, scale, count in ((20, 3.0, 7), (75, 1.0, 10)):
        for number, sets in ((count, 200), (1000, 20)):
            x = on_sphere(generator, sets, number, dim, radius=scale * math.sqrt(dim - 1))
            assert retrieval(x).stored.all()
    assert isinstance(storage_capacity(20), Capacity)
    # Where the proof says nothing: fewer than two patterns.
    assert not storage_capacity(5).applies


def test_printed_capacity_fails_at_small_beta(generator):
    """beta = 1e-4 in 20 dimensions: N = 9.8 by the formula, and one fixed point in truth.

    The proof assumes 2 (N - 1) N beta M^2 > 1, the statement does not.
    """
    capacity = storage_capacity(20, beta=1e-4, scale=1.0, failure=0.001)
    assert capacity.count == pytest.approx(9.8, abs=0.1)
    assert capacity.base > (2 / math.sqrt(0.001)) ** (4 / 19)
    assert not capacity.applies
    assert 2 * (capacity.count - 1) * capacity.count * 1e-4 * 19 < 0.34
    assert storage_capacity(20, beta=1e-8).count > 90 * capacity.count
    x = on_sphere(generator, 9, 20, radius=math.sqrt(19))
    energy = HopfieldEnergy(x, 1e-4)
    assert energy.hessian_bounds(9)[0] > 0.99
    moved = x
    for _ in range(30):
        moved = energy.step(moved)
    torch.testing.assert_close(moved, moved[:1].expand_as(moved))
    torch.testing.assert_close(moved[0], x.mean(0), rtol=0, atol=0.02)


def test_close_patterns_share_a_metastable_state(generator):
    """Nearly their average at intermediate beta; at large beta one of them, at small beta all."""
    center = 5 * F.normalize(draw(generator, 1, 8), dim=-1)
    cluster = center + 0.05 * draw(generator, 3, 8)
    others = on_sphere(generator, 10, 8, radius=5.0)
    others = others - (others @ center.mT).clamp_min(0) * center / 25  # on the other side
    patterns = torch.cat([cluster, others])

    def settle(beta, start):
        q = start
        for _ in range(2000):
            q = HopfieldEnergy(patterns, beta).step(q)
        return q

    start = cluster[:1]
    average = cluster.mean(0, keepdim=True)
    middle = settle(0.5, start)
    assert (middle - average).norm() < 0.02
    assert (middle - start).norm() > 0.05
    assert not retrieval(patterns, 0.5).stored[:3].any()
    weights = HopfieldEnergy(patterns, 0.5).attention(middle)[0]
    assert weights[:3].sum() > 0.999 and weights[:3].max() < 0.6
    far = retrieval(patterns, 1e5)
    assert far.stored[:3].any()
    for k in torch.nonzero(far.stored[:3]).flatten().tolist():
        assert (settle(1e5, cluster[k : k + 1]) - cluster[k]).norm() < 1e-6
    everywhere = settle(1e-4, start)
    assert (everywhere - patterns.mean(0)).norm() < 0.02


def test_large_overlaps_do_not_overflow():
    patterns = torch.tensor([[100.0, 0.0], [0.0, 100.0]])
    energy = HopfieldEnergy(patterns, 10.0)
    Y = torch.tensor([[90.0, 3.0]])
    torch.testing.assert_close(energy.step(Y), patterns[:1])
    torch.testing.assert_close(
        energy.energy(Y), HopfieldEnergy(patterns.double(), 10.0).energy(Y.double()).float()
    )
    assert storage_capacity(20, 1e6, 30.0).base > 0


def test_errors():
    with pytest.raises(ValueError, match=r"patterns has shape \(3,\)"):
        HopfieldEnergy(torch.ones(3))
    for beta in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be positive"):
            HopfieldEnergy(torch.ones(2, 3), beta)
    for beta in (0.0, torch.tensor([1.0, 0.0])):
        with pytest.raises(ValueError, match="must be positive"):
            retrieval(torch.ones(2, 3), beta)
    for options in ({"dim": 1}, {"failure": 0.0}, {"beta": -1.0}, {"scale": 0.0}):
        name = next(iter(options))
        with pytest.raises(ValueError, match=name):
            storage_capacity(**{"dim": 20, **options})
