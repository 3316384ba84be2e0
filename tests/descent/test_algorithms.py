"""Each algorithm never raises the energy where it says so, and each step is what its name says."""

import pytest
import torch

from spinformer.descent.algorithms import (
    AIM,
    Backtracking,
    Gradient,
    MajorizeMinimize,
    ProximalAIM,
    rounding,
)
from spinformer.descent.energy import Energy, SumEnergy, clear
from spinformer.descent.feed_forward import FeedForwardEnergy
from spinformer.descent.pairwise import PairwiseEnergy
from spinformer.descent.proximal import Proximal
from spinformer.errors import ConvergenceError, ConvergenceWarning

SCALES = (0.1, 0.5, 1.0, 2.0, 5.0)


def infinite_below_zero(Y):
    return torch.where(Y < 0, torch.inf, 0.0)


RELU = Proximal(infinite_below_zero, lambda Y, size: Y.clamp_min(0.0))


class Wrong(Energy):
    """A quadratic whose gradient has the wrong sign."""

    def energy(self, Y, mask=None):
        return clear(Y, mask).square().sum((-2, -1)) / 2

    def gradient(self, Y, mask=None):
        return -clear(Y, mask)

    def curvature(self, Y, mask=None):
        return torch.ones_like(Y[..., 0])

    def hessian_bounds(self, count):
        return torch.tensor(1.0), torch.tensor(1.0)


class Uphill(Wrong):
    """Its gradient is right, its own step goes the other way."""

    def gradient(self, Y, mask=None):
        return clear(Y, mask)

    def step(self, Y, size=1.0, mask=None):
        return (1 + size) * clear(Y, mask)


class High(Uphill):
    """|Y|^2 / 2 far above zero: what is left of a small slope drowns in the constant."""

    def energy(self, Y, mask=None):
        return 1e6 + super().energy(Y, mask)


def systems(count, generator):
    """Batches of ``count`` systems of every size and scale, half of them with an offset."""
    for n in (1, 2, 5, 8):
        for d in (1, 3):
            draw = {"generator": generator, "dtype": torch.float64}
            scale = torch.tensor(SCALES, dtype=torch.float64).repeat(count)[:count, None, None]
            offset = 3 * torch.randn(count, 1, d, **draw)
            offset = offset * torch.randint(2, (count, 1, 1), generator=generator)
            yield scale * (torch.randn(count, n, d, **draw) + offset)


def problems(Y, generator):
    """Sums of attention and a linear layer, the latter convex, indefinite and with a bias."""
    d = Y.shape[-1]
    for strength in (0.3, 2.0):
        weight = strength * torch.randn(d, d, generator=generator, dtype=torch.float64)
        bias = torch.randn(d, generator=generator, dtype=torch.float64)
        for rho in ("exp", "log1p"):
            yield PairwiseEnergy(rho) + FeedForwardEnergy(weight, bias)


def rises(algorithm, energy, Y, mask=None):
    moved = algorithm.step(energy, Y, mask)
    rise = energy.energy(moved, mask) - energy.energy(Y, mask)
    return rise > rounding(energy.energies(Y, mask), clear(Y, mask))


def test_guaranteed_algorithms_never_rise(generator):
    """0 of 16,000 for each of six algorithms."""
    total, above = 0, 0
    for Y in systems(500, generator):
        for energy in problems(Y, generator):
            count = Y.shape[-2]
            _, upper = energy.hessian_bounds(count)
            largest = 2 / upper.clamp_min(1e-3).item()
            for algorithm in (
                Gradient(0.999 * largest),
                Gradient(0.3 * largest),
                MajorizeMinimize(),
                MajorizeMinimize(1.99),
                Backtracking(3.0),
                Backtracking(3.0, own=False),
            ):
                assert algorithm.guaranteed(energy, count).all()
                assert not rises(algorithm, energy, Y).any()
            above += rises(MajorizeMinimize(2.6), energy, Y).sum().item()
            assert not MajorizeMinimize(2.6).guaranteed(energy, count)
            assert not Gradient(1.01 * largest).guaranteed(energy, count) or upper <= 1e-3
            total += len(Y)
    assert total == 16_000
    assert above > 100


def test_alternating_own_steps_can_rise(generator):
    """Attention, then feed-forward, each lowers its own term; their sum need not fall."""
    rose = sum(
        rises(AIM(1.0, own=True), energy, Y).sum().item()
        for Y in systems(100, generator)
        for energy in problems(Y, generator)
    )
    assert rose > 50


def test_steps_are_their_formulas(generator):
    Y = torch.randn(3, 5, 2, generator=generator, dtype=torch.float64)
    f, g = PairwiseEnergy(), FeedForwardEnergy(torch.randn(2, 2, dtype=torch.float64))
    energy = f + g
    half = Y - 0.1 * f.gradient(Y)
    expected = half - 0.2 * g.gradient(half)
    torch.testing.assert_close(AIM((0.1, 0.2)).step(energy, Y), expected)
    torch.testing.assert_close(
        ProximalAIM((0.1, 0.2), RELU).step(energy, Y), expected.clamp_min(0.0)
    )
    by_name = ProximalAIM((0.1, 0.2), "relu")
    assert torch.equal(by_name.step(energy, Y), ProximalAIM((0.1, 0.2), RELU).step(energy, Y))
    own = g.step(f.step(Y), 0.5)
    torch.testing.assert_close(AIM((1.0, 0.5), own=True).step(energy, Y), own)
    torch.testing.assert_close(MajorizeMinimize().step(f, Y), f.step(Y))
    torch.testing.assert_close(
        Gradient(0.3).step(energy, Y), Y - 0.3 * (f.gradient(Y) + g.gradient(Y))
    )
    # One term: AIM is a gradient step.
    torch.testing.assert_close(AIM(0.3).step(f, Y), Gradient(0.3).step(f, Y))
    # The prox is that of the last size times the penalty.
    seen = []

    def spy(Y, size):
        seen.append(size)
        return Y

    ProximalAIM((0.1, 0.2), Proximal(torch.zeros_like, spy)).step(energy, Y)
    assert seen == [0.2]


def test_sizes_of_systems(generator):
    """One size a system: each is what it would be alone."""
    Y = torch.randn(3, 5, 2, generator=generator, dtype=torch.float64)
    energy = PairwiseEnergy() + FeedForwardEnergy(torch.eye(2, dtype=torch.float64))
    sizes = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    for make in (Gradient, MajorizeMinimize, AIM, lambda s: AIM((s, s), own=True)):
        together = make(sizes).step(energy, Y)
        alone = [make(float(s)).step(energy, y) for s, y in zip(sizes, Y, strict=True)]
        torch.testing.assert_close(together, torch.stack(alone))


def test_backtracking_shrinks_each_system_on_its_own(generator):
    """The quadratic |Y|^2 / 2 times k needs steps of 2 / k; the batch mixes mild and steep."""

    class Steep(Energy):
        def __init__(self, slopes):
            self.slopes = slopes

        def energy(self, Y, mask=None):
            return self.slopes / 2 * clear(Y, mask).square().sum((-2, -1))

        def gradient(self, Y, mask=None):
            return self.slopes[..., None, None] * clear(Y, mask)

        def curvature(self, Y, mask=None):
            return self.slopes[..., None].expand(Y.shape[:-1])

        def hessian_bounds(self, count):
            return self.slopes, self.slopes

    slopes = torch.tensor([0.5, 3.0, 40.0, 1000.0], dtype=torch.float64)
    Y = torch.randn(4, 3, 2, generator=generator, dtype=torch.float64)
    algorithm = Backtracking(1.0, own=False)
    moved = algorithm.step(Steep(slopes), Y)
    factors = (moved / Y)[:, 0, 0]
    # s = 1, 1/2, 1/32 (2 / 40 = .05 allows 1/32), 1/512.
    expected = 1 - slopes * torch.tensor([1.0, 0.5, 1 / 32, 1 / 512], dtype=torch.float64)
    torch.testing.assert_close(factors, expected)
    for k in range(4):
        alone = algorithm.step(Steep(slopes[k]), Y[k])
        assert torch.equal(alone, moved[k])
    # A fall of a share c of the slope's allows s up to 2 (1 - c) / k: 1.98 or 1.4 here.
    for sufficient, size in ((0.01, 1.9), (0.3, 0.95)):
        once = Backtracking(1.9, own=False, sufficient=sufficient).step(
            Steep(slopes[:1] * 2), Y[:1]
        )
        torch.testing.assert_close(once, (1 - size) * Y[:1])


def test_backtracking_stays_and_fails_loudly(generator):
    Y = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    for own in (True, False):
        with pytest.raises(ConvergenceError, match="3 of 3 systems"):
            Backtracking(own=own).step(Wrong(), Y)
        with pytest.warns(ConvergenceWarning, match="gradient is its derivative"):
            assert torch.equal(Backtracking(own=own, on_failure="warn").step(Wrong(), Y), Y)
    # A step that ascends a gradient which is right.
    with pytest.raises(ConvergenceError, match="3 of 3 systems"):
        Backtracking().step(Uphill(), Y)
    # Too few trials is a failure as well, not a silent stop.
    steep = FeedForwardEnergy(1e6 * torch.eye(2, dtype=torch.float64))
    with pytest.raises(ConvergenceError):
        Backtracking(own=False, trials=3).step(steep, Y)
    # A slope that rounding hides is none: 1e-11 beside 1e6.
    assert torch.equal(Backtracking(own=False).step(High(), 1e-6 * Y), 1e-6 * Y)
    # A stationary state is none; NaN stays where it is and touches nobody else.
    equal = torch.ones(2, 4, 2, dtype=torch.float64)
    assert torch.equal(Backtracking().step(PairwiseEnergy(), equal), equal)
    bad = Y.clone()
    bad[1] = torch.nan
    moved = Backtracking().step(PairwiseEnergy(), bad)
    assert moved[1].isnan().all()
    assert torch.equal(moved[[0, 2]], Backtracking().step(PairwiseEnergy(), Y)[[0, 2]])


def test_backtracking_converges_in_float32(generator):
    """To where rounding hides the slope, without a failure."""
    Y = torch.randn(20, 6, 3, generator=generator)
    energy = PairwiseEnergy("log1p", data_weight=1.0)
    values = [energy.energy(Y)]
    for _ in range(60):
        Y = Backtracking(1.5).step(energy, Y)
        values.append(energy.energy(Y))
    falls = torch.stack(values).diff(dim=0)
    assert (falls <= 0).all()
    # E is 0 at the minimum, p = 2 * 6 + 1 there: a fall |grad E|^2 / p below 64 eps may be none.
    assert energy.gradient(Y).norm(dim=(-2, -1)).max() < 0.02


@pytest.mark.parametrize(
    "algorithm",
    [
        Gradient(0.05),
        MajorizeMinimize(1.5),
        AIM((0.05, 0.1)),
        AIM(0.5, own=True),
        ProximalAIM((0.05, 0.1), RELU),
        Backtracking(),
    ],
    ids=lambda x: type(x).__name__,
)
def test_masks_and_derivatives(algorithm, generator):
    energy = PairwiseEnergy() + FeedForwardEnergy(torch.eye(2, dtype=torch.float64))
    Y = torch.randn(2, 5, 2, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    Y[1, 3:] = torch.nan
    moved = algorithm.step(energy, Y, mask)
    torch.testing.assert_close(moved[1, :3], algorithm.step(energy, Y[1, :3]))
    assert (moved[1, 3:] == 0).all()
    state = torch.randn(5, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: algorithm.step(energy, y), state)
    assert torch.autograd.gradgradcheck(lambda y: algorithm.step(energy, y), state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gradient(-0.1), "size=-0.1 must be positive"),
        (lambda: MajorizeMinimize(0.0), "size=0.0"),
        (lambda: AIM((0.1, -1.0)), "sizes=-1.0"),
        (lambda: ProximalAIM(0.0, RELU), "sizes=0.0"),
        (lambda: ProximalAIM(0.1, "rellu"), "nearest is 'relu'"),
        (lambda: Gradient(torch.tensor([0.1, 0.0])), "must be positive"),
        (lambda: Backtracking(shrink=1.0), "shrink=1.0"),
        (lambda: Backtracking(sufficient=0.0), "sufficient=0.0"),
        (lambda: Backtracking(trials=0), "trials=0"),
        (lambda: Backtracking(on_failure="rais"), "raise"),
    ],
)
def test_bad_input_raises(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_number_of_sizes():
    energy = SumEnergy(PairwiseEnergy(), PairwiseEnergy())
    with pytest.raises(ValueError, match="3 entries for 2 terms"):
        AIM((0.1, 0.1, 0.1)).step(energy, torch.zeros(2, 1))
