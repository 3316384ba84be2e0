"""Theorems 4.1 and 5.1 and Lemma 4.3 on random problems, sharpness included, and their misprint."""

import pytest
import torch

from spinformer.descent.guarantees import (
    aim_bound,
    apollonius,
    gradient_ratio,
    proximal_bound,
    proximal_deficit,
    proximal_kappa,
)

COUNT = 40_000
# Energies of a few quadratic terms in float64: 1e-15 of their size, with a margin for curvatures.
ROUNDING = 1e-10


class Quadratics:
    """f and g, one pair a system, minima not shared; g need not be convex."""

    def __init__(self, d, convex, generator):
        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.F, self.G = (A @ A.mT / d for A in 2 * draw(2, COUNT, d, d))
        eye = torch.eye(d, dtype=torch.float64)
        uniform = torch.rand(3, COUNT, 1, 1, generator=generator, dtype=torch.float64)
        self.F = self.F + uniform[0] * eye
        if not convex:
            self.G = self.G - 2 * uniform[1] * eye
        self.y_f, self.y_g = draw(2, COUNT, 1, d)
        self.lipschitz_f = torch.linalg.eigvalsh(self.F)[:, -1]
        self.lipschitz_g = torch.linalg.eigvalsh(self.G).abs().amax(-1)
        eigenvalues = torch.linalg.eigvalsh(self.F + self.G)
        self.convexity_h, self.lipschitz_h = eigenvalues[:, 0], eigenvalues[:, -1].clamp_min(1e-3)
        self.Y = 2 * draw(COUNT, 1, d)
        # Up to 2.2 / L_h: beyond the paper's 1 / L_h and beyond any guarantee.
        self.a2 = 2.2 * uniform[2, :, 0, 0] / self.lipschitz_h
        share = torch.rand(COUNT, generator=generator, dtype=torch.float64)
        self.a1 = 1.5 * share * self.a2

    def f(self, Y):
        return (Y - self.y_f) @ self.F

    def g(self, Y):
        return (Y - self.y_g) @ self.G

    def h(self, Y):
        each = (Y - self.y_f) * self.f(Y) + (Y - self.y_g) * self.g(Y)
        return each.sum((-2, -1)) / 2

    def aim(self, Y):
        half = Y - self.a1[:, None, None] * self.f(Y)
        return half - self.a2[:, None, None] * self.g(half)

    def rose(self, Y, moved):
        size = 1 + Y.square().sum((-2, -1))
        return self.h(moved) - self.h(Y) > ROUNDING * size


@pytest.mark.parametrize("convex", [True, False])
@pytest.mark.parametrize("d", [1, 3])
def test_theorem_4_1_and_its_extensions(d, convex, generator):
    problem = Quadratics(d, convex, generator)
    delta = gradient_ratio(problem.f(problem.Y), problem.f(problem.Y) + problem.g(problem.Y))
    inside = delta <= aim_bound(problem.a1, problem.a2, problem.lipschitz_g, problem.lipschitz_h)
    rose = problem.rose(problem.Y, problem.aim(problem.Y))
    printed = (problem.a1 <= problem.a2) & (problem.a2 * problem.lipschitz_h <= 1)
    for part in (inside & printed, inside & ~printed):
        assert part.sum() > COUNT / 10
        assert not (rose & part).any()
    assert rose.sum() > 50


def test_theorem_4_1_is_sharp(generator):
    """In one dimension, at a1 = a2 = 1 / L_h: rises if and only if delta > L."""
    problem = Quadratics(1, True, generator)
    problem.a1 = problem.a2 = 1 / problem.lipschitz_h
    f = problem.f(problem.Y)
    delta = gradient_ratio(f, f + problem.g(problem.Y))
    bound = aim_bound(problem.a1, problem.a2, problem.lipschitz_g)
    clear = (delta / bound - 1).abs() > 1e-6
    rose = problem.rose(problem.Y, problem.aim(problem.Y))
    assert (delta > bound).sum() > 1000
    beyond = (delta > bound) & clear
    # Close to a stationary point a rise drowns in the threshold.
    drowned = (f + problem.g(problem.Y)).abs().flatten() < 1e-3
    assert torch.equal(rose[~drowned], beyond[~drowned])


def test_the_misprint_is_false():
    """|Delta| in place of |grad f| satisfies the bound, and the energy rises."""
    y, size = torch.zeros(1, 1, dtype=torch.float64), 0.5
    f, g = y + 1, y - 0.7
    half = y - size * f
    moved = half - size * (half - 0.7)
    noise = (f + g) - f - (half - 0.7)
    bound = aim_bound(size, size, 1.0, 2.0)
    assert bound == 2
    assert gradient_ratio(noise, f + g) <= bound
    assert gradient_ratio(f, f + g) > bound

    def h(x):
        return ((x + 1) ** 2 + (x - 0.7) ** 2).item() / 2

    assert h(moved) - h(y) == pytest.approx(0.04)


def test_bounds_at_the_edges():
    assert aim_bound(0.1, 0.1, torch.inf) == 0
    assert aim_bound(0.1, 0.1, 1.0, 20.0) == 0
    assert aim_bound(0.1, 0.1, 1.0, 30.0) == -torch.inf
    # Not even delta = 0, a plain gradient step of g, is promised beyond 2 / L_h.
    assert aim_bound(0.1, 0.1, torch.inf, 30.0) == -torch.inf
    # g is linear: no noise, whatever delta is; at 2 / L_h as documented.
    assert aim_bound(0.1, 0.1, 0.0, 5.0) == torch.inf
    assert aim_bound(0.1, 0.1, 0.0, 20.0) == 0
    assert aim_bound(0.1, 0.1, 1.0, -3.0) == aim_bound(0.1, 0.1, 1.0)
    assert proximal_bound(0.1, 0.1, 1.0, 0.2, 30.0) == -torch.inf
    assert proximal_bound(0.1, 0.1, 1.0, 1.0) == 0
    sharp = proximal_bound(0.1, 0.2, 1.0, 0.3)
    assert proximal_bound(0.1, 0.2, 1.0, 0.3, printed=True) == pytest.approx(sharp.item() / 2**0.5)
    zero = torch.zeros(1, 2)
    assert gradient_ratio(zero, zero) == 0
    assert gradient_ratio(zero + 1, zero) == torch.inf
    assert proximal_deficit(zero, zero) == 0
    # Where grad h = 0 the penalty may move the state: a share of nothing promises nothing.
    assert proximal_kappa(zero, zero, zero) == proximal_kappa(zero, zero + 1, zero) == 1
    with pytest.raises(ValueError, match=r"size_g=-0.1"):
        aim_bound(0.1, -0.1, 1.0)
    with pytest.raises(ValueError, match=r"lipschitz_g=-1"):
        proximal_bound(0.1, 0.1, -1.0, 0.5)


@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0, 1.7])
def test_the_region_is_a_ball(ratio, generator):
    near, far = torch.randn(2, 5, 2, 3, generator=generator, dtype=torch.float64)
    ball = apollonius(near, far, ratio)
    Y = 3 * torch.randn(2000, 5, 2, 3, generator=generator, dtype=torch.float64)
    contains = ball.contains(Y)
    assert contains.shape == (2000, 5)
    if ratio == 1:
        middle = (near + far) / 2
        assert ball.radius.isinf().all()
        expected = ((Y - middle) * (near - far)).sum((-2, -1)) >= 0
    else:
        distance = (Y - ball.center).square().sum((-2, -1)).sqrt()
        expected = (distance <= ball.radius) == ball.inside
    assert ball.inside.all() == (ratio <= 1)
    assert torch.equal(contains, expected)
    assert ratio == 0 or 0 < contains.double().mean() < 1
    if 0 < ratio != 1:
        direction = torch.nn.functional.normalize(Y.flatten(-2), dim=-1).unflatten(-1, (2, 3))
        surface = ball.center + ball.radius[..., None, None] * direction
        quotient = (surface - near).square().sum((-2, -1)) / (surface - far).square().sum((-2, -1))
        torch.testing.assert_close(quotient, torch.full_like(quotient, ratio**2))


def test_regions_at_the_edges(generator):
    near, far = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)
    Y = torch.cat((torch.stack((near, far)), torch.randn(9, 2, 3, generator=generator).double()))
    everywhere = apollonius(near, far, torch.inf)
    assert everywhere.contains(Y).all() and everywhere.radius == 0
    torch.testing.assert_close(everywhere.center, far)
    # One point for two: it alone, or all states.
    for ratio, count in ((0.5, 1), (1.0, 11), (2.0, 11)):
        same = apollonius(near, near, ratio)
        assert same.contains(Y).sum() == count
        assert same.radius == (torch.inf if ratio == 1 else 0)
    # Nearly a half space: the distances decide, where center and radius have no digits left.
    middle = (near + far) / 2
    for ratio in (1 - 1e-13, 1 + 1e-13):
        ball = apollonius(near, far, ratio)
        assert ball.contains(middle + 1e-6 * (near - far))
        assert not ball.contains(middle - 1e-6 * (near - far))
    with pytest.raises(ValueError, match="ratio=-1"):
        apollonius(near, far, -1.0)
    # Of systems, one without a region leaves the others theirs.
    some = apollonius(near, far, torch.tensor([-torch.inf, -0.5, 0.5], dtype=torch.float64))
    assert some.contains(near).tolist() == [False, False, True]
    assert some.radius.isnan().tolist() == [True, True, False]


def test_lemma_4_3(generator):
    problem = Quadratics(3, True, generator)
    y_h = torch.linalg.solve(
        problem.F + problem.G,
        problem.y_f @ problem.F + problem.y_g @ problem.G,
        left=False,
    )
    bound = aim_bound(problem.a1, problem.a2, problem.lipschitz_g, problem.lipschitz_h)
    ratio = problem.convexity_h * bound / problem.lipschitz_f
    # Lest none of the states lie inside: start near the minimum of f.
    Y = problem.y_f + 0.2 * (problem.Y - problem.y_f)
    inside = apollonius(problem.y_f, y_h, ratio).contains(Y)
    assert inside.sum() > COUNT / 50
    assert not (inside & problem.rose(Y, problem.aim(Y))).any()
    f = problem.f(Y)
    # The region suffices for Theorem 4.1, never the other way round.
    assert (gradient_ratio(f, f + problem.g(Y))[inside] <= bound[inside] * (1 + 1e-9)).all()


@pytest.mark.parametrize("convex", [True, False])
@pytest.mark.parametrize("d", [1, 3])
def test_theorem_5_1(d, convex, generator):
    """Sharp and printed constants hold; the printed one with c_P lambda = 2 does not."""
    problem = Quadratics(d, convex, generator)
    Y = problem.Y.clamp_min(0.0)
    moved = problem.aim(Y).clamp_min(0.0)
    gradient = problem.f(Y) + problem.g(Y)
    delta = gradient_ratio(problem.f(Y), gradient)
    step = problem.a2[:, None, None] * gradient
    kappa = proximal_kappa(Y, (Y - step).clamp_min(0.0), step)
    coarse = -proximal_deficit(step, Y)
    # A difference of nearly equal numbers where a step is short beside the state.
    assert (kappa <= coarse + 1e-6).all()
    assert (kappa >= -1e-6).all() and (coarse <= 1).all()
    rose = problem.rose(Y, moved)
    sizes = problem.a1, problem.a2, problem.lipschitz_g
    sharp = delta <= proximal_bound(*sizes, kappa, problem.lipschitz_h)
    by_deficit = delta <= proximal_bound(*sizes, coarse, problem.lipschitz_h)
    printed = proximal_bound(*sizes, coarse, problem.lipschitz_h, printed=True)
    for inside in (sharp, by_deficit, delta <= printed):
        assert inside.sum() > COUNT / 20
        assert not (inside & rose).any()
    assert ((delta <= 2 * printed) & rose).sum() > 5


def test_theorem_5_1_for_a_strongly_convex_penalty(generator):
    """The elastic net, |y|_1 + mu |y|^2 / 2: c_P lambda = 1 + a2 mu widens the region, rightly."""
    problem = Quadratics(2, True, generator)
    mu = 3.0
    a2 = problem.a2[:, None, None]

    def prox(Y):
        return Y.sign() * (Y.abs() - a2).clamp_min(0.0) / (1 + a2 * mu)

    def total(Y):
        penalty = Y.abs().sum((-2, -1)) + mu / 2 * Y.square().sum((-2, -1))
        return problem.h(Y) + penalty

    Y = problem.Y
    gradient = problem.f(Y) + problem.g(Y)
    step = a2 * gradient
    kappa = proximal_kappa(Y, prox(Y - step), step)
    delta = gradient_ratio(problem.f(Y), gradient)
    sizes = problem.a1, problem.a2, problem.lipschitz_g, kappa, problem.lipschitz_h
    inside = delta <= proximal_bound(*sizes, convexity=mu)
    rise = total(prox(problem.aim(Y))) - total(Y)
    assert (inside & ~(delta <= proximal_bound(*sizes))).sum() > 50
    assert (rise[inside] <= ROUNDING * (1 + Y.square().sum((-2, -1)))[inside]).all()
    assert (kappa < 0).any()
