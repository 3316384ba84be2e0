"""The lowest free energy of many solutions: which wins, the evidence, and what a batch is to it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import spinformer as sf
from spinformer.equilibrium import search
from spinformer.equilibrium.adaptive_tap import AdaptiveTAP
from spinformer.equilibrium.bethe import Bethe
from spinformer.equilibrium.search import LowestFreeEnergy
from spinformer.equilibrium.tap import TAP
from spinformer.solve.fixed_point import FixedPoint
from spinformer.thermo.equilibrium import Equilibrium

F64 = torch.float64


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def magnet(site: sf.SiteLaw, num_spins: int = 13, ratio: float = 2.0) -> sf.SpinSystem:
    """Curie-Weiss at T = T_c / ratio without a field; odd, so that no pattern of signs balances."""
    assert site.radius is not None
    return sf.SpinSystem(
        sf.couplings.curie_weiss(num_spins, dtype=F64),
        torch.zeros(num_spins, site.dim, dtype=F64),
        ratio * site.dim / site.radius**2,
        site,
    )


def glass(systems: int = 3, num_spins: int = 10, beta: float = 3.0) -> sf.SpinSystem:
    """Sherrington-Kirkpatrick, deep below its freezing temperature of 1, in weak fields."""
    generator = seeded(3)
    j = torch.randn(systems, num_spins, num_spins, generator=generator, dtype=F64)
    h = 0.1 * torch.randn(systems, num_spins, 1, generator=generator, dtype=F64)
    return sf.SpinSystem(j / math.sqrt(num_spins / 2), h, beta, sf.Ising(), symmetrize=True)


MEAN_FIELD = sf.MeanField(damping=0.5)


# --- who wins ------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", [sf.Ising(), sf.Sphere(3)], ids=repr)
def test_ordered_magnet_is_found_from_zero_field(site: sf.SiteLaw) -> None:
    """m = R A_D(R beta J_0 (1 - 1/N) m), by bisection; the approximation alone stays at zero."""
    system = magnet(site)
    strength = float(system.beta) * 12 / 13
    low, high = 0.01, site.radius
    for _ in range(100):
        middle = (low + high) / 2
        response = float(site.mean(torch.tensor([strength * middle], dtype=F64)))
        low, high = (middle, high) if response > middle else (low, middle)

    alone = sf.MeanField().solve(system)
    assert float(alone.magnetization.abs().max()) == 0 and not bool(alone.is_stable)
    found = LowestFreeEnergy(sf.MeanField(), generator=seeded()).explore(system)
    best = found.equilibrium
    assert bool(best.is_stable) and bool(best.converged)
    length = torch.linalg.vector_norm(best.magnetization, dim=-1)
    torch.testing.assert_close(length, torch.full_like(length, low), rtol=1e-8, atol=0)
    assert float(best.free_energy) < -1
    # The first start is the approximation's own.
    assert float(found.free_energy[0]) == 0 and float(found.stability[0]) < -0.5
    assert int(found.winner) > 0
    if site.dim == 1:
        assert int(found.num_distinct) == 3  # zero, up and down
    else:
        # Each random start ends in an order of its own axis, all of them equally good.
        ordered = found.is_stable
        assert int(found.num_distinct) >= 6
        energies = found.free_energy[ordered]
        torch.testing.assert_close(energies, energies[:1].expand_as(energies))
        assert float(found.stability[ordered].abs().max()) < 1e-7


def test_antiferromagnetic_pair() -> None:
    """beta J = -2: m_1 = -m_2 = tanh(2 m_1)."""
    j = torch.tensor([[0.0, -2.0], [-2.0, 0.0]], dtype=F64)
    system = sf.SpinSystem(j, torch.zeros(2, 1, dtype=F64), 1.0, sf.Ising())
    best = LowestFreeEnergy(MEAN_FIELD, generator=seeded()).solve(system)
    m = best.magnetization[:, 0]
    assert float(m[0] + m[1]) == pytest.approx(0, abs=1e-9)
    assert float(m[0].abs()) == pytest.approx(0.957504024077, rel=1e-9)  # root of m = tanh 2m
    assert bool(best.is_stable)
    assert float(best.free_energy) < float(MEAN_FIELD.solve(system).free_energy)


@pytest.mark.parametrize(
    "approximation",
    [MEAN_FIELD, TAP(damping=0.3), AdaptiveTAP(damping=0.3), Bethe(damping=0.5)],
    ids=lambda x: type(x).__name__,
)
def test_every_approximation(approximation: search.StartedApproximation) -> None:
    """The order of a magnet, twice; m is that of the plain iteration from an ordered start."""
    system = magnet(sf.Ising(), num_spins=32, ratio=1.5)
    found = LowestFreeEnergy(approximation, starts=4, generator=seeded()).explore(system)
    assert bool(found.converged.all())
    # The paramagnet of adaptive TAP, which holds <S^2> = 1 by itself, stays a local minimum.
    metastable = isinstance(approximation, AdaptiveTAP)
    assert found.is_stable.tolist()[:3] == [metastable, True, True]
    assert float(found.free_energy[0]) > float(found.free_energy[1]) + 0.1
    start = torch.full((32, 1), 0.9, dtype=F64)
    expected = approximation.solve(system, start)
    best = found.equilibrium
    torch.testing.assert_close(best.free_energy, expected.free_energy)
    torch.testing.assert_close(
        best.magnetization.abs(), expected.magnetization.abs(), rtol=1e-7, atol=0
    )
    # Where magnetizations are all of the state, one; adaptive TAP finds its variances again.
    assert int(best.solution.iterations) <= 10
    torch.testing.assert_close(best.free_energy.detach(), found.free_energy.min())


def test_glass_and_its_winner() -> None:
    """No candidate is lower than the winner, and the one that wins is the equilibrium."""
    system = glass()
    found = LowestFreeEnergy(MEAN_FIELD, starts=12, generator=seeded()).explore(system)
    assert found.free_energy.shape == found.stability.shape == found.converged.shape == (3, 12)
    assert found.residual.shape == found.iterations.shape == found.is_stable.shape == (3, 12)
    assert found.magnetization.shape == (3, 12, 10, 1)
    assert bool(found.converged.all())
    best = found.equilibrium.free_energy
    assert bool((best[:, None] <= found.free_energy + 1e-6).all())
    assert bool((found.num_distinct >= 2).all())
    for row, k in enumerate(found.winner.tolist()):
        torch.testing.assert_close(
            found.equilibrium.magnetization[row], found.magnetization[row, k], rtol=0, atol=1e-9
        )
    lone = MEAN_FIELD.solve(system).free_energy
    # Mean field is a bound, and the search comes nearer to what it bounds.
    exact = sf.Exact().solve(system).free_energy
    assert bool((exact < best).all()) and bool((best <= lone + 1e-9).all())
    assert bool((best < lone - 1e-3).any())
    assert "12 starts" in repr(found)


def test_same_numbers_same_answer_alone_or_in_a_batch() -> None:
    system = glass()
    found = LowestFreeEnergy(MEAN_FIELD, starts=9, generator=seeded(5)).explore(system)
    again = LowestFreeEnergy(MEAN_FIELD, starts=9, generator=seeded(5)).explore(system)
    assert torch.equal(found.magnetization, again.magnetization)
    j = system.couplings.to_dense()
    for row in range(3):
        alone = sf.SpinSystem(j[row], system.field[row], 3.0, sf.Ising())
        one = LowestFreeEnergy(MEAN_FIELD, starts=9, generator=seeded(5)).explore(alone)
        assert int(one.winner) == int(found.winner[row])
        torch.testing.assert_close(one.magnetization, found.magnetization[row], rtol=0, atol=1e-8)
        torch.testing.assert_close(one.free_energy, found.free_energy[row])
    other = LowestFreeEnergy(MEAN_FIELD, starts=9, generator=seeded(6)).explore(system)
    assert not torch.equal(found.iterations, other.iterations)


def test_choice() -> None:
    """Converged before lower; stable before equal; else the first; else the least unfinished."""
    system = sf.SpinSystem(torch.zeros(4, 2, 2), torch.zeros(2, 1), 1.0, sf.Ising())
    free_energy = torch.tensor(
        [[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0], [-1.0, -2.0, -3.0], [1.0, 1.0, 1.0]]
    )
    converged = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]]).bool()
    is_stable = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 1], [0, 0, 0]]).bool()
    residual = torch.tensor([[0.0, 0, 1], [0, 0, 0], [3, 1, torch.nan], [0, 0, 0]])
    winner = search._winner(system, free_energy, is_stable, residual, converged)
    assert winner.tolist() == [1, 1, 1, 0]


def test_distinct_states() -> None:
    state = torch.tensor([0.0, 0.5, 1e-9, 0.5, -0.5, 0.3], dtype=F64).reshape(6, 1, 1)
    converged = torch.tensor([True, True, True, True, True, False])
    assert int(search._count_distinct(state, converged, 1.0)) == 3


# --- annealing -----------------------------------------------------------------------------------


def test_order_survives_annealing_from_above_the_transition() -> None:
    """At 0.3 beta = 0.4 beta_c every state loses its magnetization, down to the tolerance.

    So small a one passes for converged at beta too: it has to be kicked to grow again.
    """
    system = magnet(sf.Ising(), ratio=1.3)
    found = LowestFreeEnergy(MEAN_FIELD, anneal=(0.3, 0.7), generator=seeded()).explore(system)
    assert found.is_stable.tolist() == [False] + 7 * [True]
    assert bool((found.free_energy[1:] < -0.1).all())
    quench = LowestFreeEnergy(MEAN_FIELD, generator=seeded()).explore(system)
    torch.testing.assert_close(found.equilibrium.free_energy, quench.equilibrium.free_energy)
    assert bool((found.iterations > quench.iterations).all())


def test_cooling_slowly_leads_lower_than_a_quench() -> None:
    system = glass(systems=6, num_spins=20)
    quench, cooled = (
        LowestFreeEnergy(MEAN_FIELD, 8, anneal, seeded()).explore(system)
        for anneal in ((), (0.2, 0.3, 0.4, 0.6, 0.8))
    )
    # On the average over starts by far; of the best of eight hardly.
    assert float((quench.free_energy - cooled.free_energy).mean()) > 0.1
    assert bool((cooled.num_distinct <= quench.num_distinct).all())


# --- starts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["glass", "antiferromagnet", "matrix-valued", "none", "square"])
def test_leading_eigenvector(kind: str) -> None:
    if kind == "glass":
        couplings = sf.couplings.Dense(glass(2).couplings.to_dense())
    elif kind == "antiferromagnet":
        couplings = sf.couplings.ring(6, strength=-1.0, dtype=F64)
    elif kind == "matrix-valued":
        blocks = torch.randn(4, 4, 3, 3, generator=seeded(), dtype=F64)
        couplings = sf.couplings.MatrixValued(blocks).symmetrize()
    elif kind == "none":
        couplings = sf.couplings.Dense(torch.zeros(4, 4, dtype=F64))
    else:
        couplings = sf.couplings.square(4, dtype=F64)
    v = search._leading(couplings)
    assert v.shape == (*couplings.batch_shape, couplings.num_spins, couplings.dim or 1)
    square = v.square().sum((-2, -1))
    torch.testing.assert_close(square, torch.ones_like(square))
    quotient = (v * couplings.apply(v)).sum((-2, -1))
    # A start needs the direction in which order sets in, not its last digits.
    largest = couplings.largest_eigenvalue()
    torch.testing.assert_close(quotient, largest, rtol=0.02, atol=1e-12)


def test_ordered_starts_point_along_and_against_the_field() -> None:
    field = torch.zeros(13, 3, dtype=F64)
    field[:, 1] = 0.01
    system = magnet(sf.Sphere(3)).replace(field=field)
    one = LowestFreeEnergy(MEAN_FIELD, starts=3, spread=0.5)._starts(system, None)
    expected = torch.zeros(13, 3, dtype=F64)
    expected[:, 1] = 0.5 * math.sqrt(3)
    torch.testing.assert_close(one[1].abs(), expected, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(one[2], -one[1])
    assert bool((one[1][:, 1] > 0).all())
    found = LowestFreeEnergy(MEAN_FIELD, starts=3).explore(system)
    assert float(found.free_energy[0]) < float(found.free_energy[2])


def test_random_starts_lie_inside_the_ball() -> None:
    system = magnet(sf.Sphere(3, 1.4))
    starts = LowestFreeEnergy(MEAN_FIELD, starts=40, generator=seeded(), spread=0.3)._starts(
        system, None
    )
    assert starts.shape == (40, 13, 3)
    length = torch.linalg.vector_norm(starts[3:], dim=-1)
    torch.testing.assert_close(length, torch.full_like(length, 0.3 * 1.4))
    # 481 independent directions: mean components have a standard deviation of 1 / sqrt(3 * 481).
    mean = (starts[3:] / (0.3 * 1.4)).mean((0, 1))
    assert float(mean.abs().max()) < 4 / math.sqrt(3 * 481)


def test_given_starts_and_one_more() -> None:
    system = magnet(sf.Ising())
    up = torch.full((13, 1), 0.5, dtype=F64)
    found = LowestFreeEnergy(MEAN_FIELD, starts=torch.stack([0 * up, -up])).explore(system)
    assert int(found.winner) == 1
    assert bool((found.equilibrium.magnetization < -0.5).all())
    found = LowestFreeEnergy(MEAN_FIELD, starts=torch.stack([0 * up, -up])).explore(system, up)
    assert found.free_energy.shape == (3,)
    assert int(found.winner) == 0 and bool((found.equilibrium.magnetization > 0.5).all())
    # One start for all systems of a batch, or one each.
    batch = system.replace(field=torch.zeros(2, 13, 1, dtype=F64))
    each = LowestFreeEnergy(MEAN_FIELD, starts=torch.stack([up, -up])[None]).solve(batch)
    assert each.magnetization.sign()[..., 0, 0].tolist() == [1, -1]
    both = LowestFreeEnergy(MEAN_FIELD, starts=up[None]).solve(batch)
    assert both.magnetization.sign()[..., 0, 0].tolist() == [1, 1]


# --- as an approximation -------------------------------------------------------------------------


def test_derivatives_are_those_of_the_winner() -> None:
    base = magnet(sf.Ising(), num_spins=5)
    j = base.couplings.to_dense().clone().requires_grad_()
    h = torch.full((5, 1), 0.01, dtype=F64, requires_grad=True)

    def solve(j: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        system = sf.SpinSystem(j, h, 2.0, sf.Ising(), symmetrize=True)
        approximation = sf.MeanField(tolerance=1e-13)
        best = LowestFreeEnergy(approximation, starts=3).solve(system)
        return best.free_energy, best.magnetization

    assert float(solve(j, h)[1].detach().min()) > 0.5
    assert gradcheck(solve, (j, h), fast_mode=True)
    with torch.no_grad():
        assert not solve(j, h)[1].requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(solve(j.detach(), h.detach())[1], solve(j, h)[1].detach())


def test_absent_sites_and_broken_systems() -> None:
    system = glass()
    field = system.field.clone()
    field[1, 0] = torch.nan
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[2, 4:] = True
    mixed = sf.SpinSystem(
        system.couplings.to_dense(), field, 3.0, sf.Ising(), mask=mask, check_finite=False
    )
    quiet = sf.MeanField(damping=0.5, on_failure="ignore")
    found = LowestFreeEnergy(quiet, generator=seeded()).explore(mixed)
    assert found.equilibrium.converged.tolist() == [True, False, True]
    assert bool(found.free_energy[1].isnan().all()) and not bool(found.converged[1].any())
    assert int(found.num_distinct[1]) == 0
    assert float(found.magnetization[2, :, 4:].abs().max()) == 0
    alone = sf.SpinSystem(
        system.couplings.to_dense()[2, :4, :4], system.field[2, :4], 3.0, sf.Ising()
    )
    expected = LowestFreeEnergy(quiet, generator=seeded()).explore(alone)
    torch.testing.assert_close(
        found.equilibrium.free_energy[2], expected.equilibrium.free_energy, rtol=1e-9, atol=0
    )
    with pytest.raises(sf.ConvergenceError, match="1 of 3"):
        LowestFreeEnergy(MEAN_FIELD, generator=seeded()).solve(mixed)


@pytest.mark.parametrize("empty", ["batch", "sites"])
def test_empty(empty: str) -> None:
    shape = (0, 3, 1) if empty == "batch" else (2, 0, 1)
    n = shape[1]
    system = sf.SpinSystem(torch.zeros(n, n), torch.zeros(shape), 1.0, sf.Ising())
    found = LowestFreeEnergy(sf.MeanField()).explore(system)
    assert found.equilibrium.magnetization.shape == shape
    assert found.free_energy.shape == (shape[0], 8)
    assert "starts" in repr(found)


def test_failure_is_as_loud_as_the_approximation_says() -> None:
    system = magnet(sf.Ising()).replace(field=torch.full((13, 1), 0.1, dtype=F64))
    short = sf.MeanField(max_iterations=4)
    with pytest.raises(sf.ConvergenceError, match="did not converge"):
        LowestFreeEnergy(short, generator=seeded()).solve(system)
    short.fixed_point = dataclasses.replace(short.fixed_point, on_failure="ignore")
    found = LowestFreeEnergy(short, generator=seeded()).explore(system)
    assert not bool(found.equilibrium.converged)
    assert int(found.winner) == int(found.residual.argmin())
    # Some starts fail, others win: that is what a search is for.
    start = torch.stack([torch.zeros(13, 1), torch.full((13, 1), 0.970)]).double()
    found = LowestFreeEnergy(sf.MeanField(max_iterations=12), starts=start).explore(system)
    assert found.converged.tolist() == [False, True]


class Forgetful:
    """An approximation that does not stay where it starts."""

    def __init__(self) -> None:
        self.fixed_point = FixedPoint()

    def solve(self, system: sf.SpinSystem, initial: Tensor | None = None) -> Equilibrium:
        return sf.MeanField().solve(system, initial if system.batch_shape else None)


def test_a_winner_that_is_lost_again_is_loud() -> None:
    with pytest.raises(sf.ConvergenceError, match="ended in a higher one"):
        LowestFreeEnergy(Forgetful(), generator=seeded()).solve(magnet(sf.Ising()))


def test_refusals() -> None:
    j = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match="symmetric"):
        LowestFreeEnergy(sf.MeanField()).solve(sf.SpinSystem(j, torch.zeros(2, 1), site=sf.Ising()))
    for approximation in (sf.SteepestDescent(), sf.Exact(), sf.MeanField):
        with pytest.raises(TypeError, match="MeanField"):
            LowestFreeEnergy(approximation)
    for starts in (0, 1.5, torch.zeros(3, 1), torch.zeros(2, 3, 1, dtype=torch.int64)):
        with pytest.raises(ValueError, match="starts"):
            LowestFreeEnergy(sf.MeanField(), starts=starts)
    for anneal in ((0.5, 0.2), (0.5, 1.0), (0.0, 0.5)):
        with pytest.raises(ValueError, match="anneal"):
            LowestFreeEnergy(sf.MeanField(), anneal=anneal)
    with pytest.raises(ValueError, match="spread"):
        LowestFreeEnergy(sf.MeanField(), spread=1.0)
    with pytest.raises(ValueError, match=r"starts has shape \(2, 5, 1\)"):
        LowestFreeEnergy(sf.MeanField(), starts=torch.zeros(2, 5, 1)).solve(magnet(sf.Ising()))
    with pytest.raises(TypeError, match="'anneal'"):
        LowestFreeEnergy(sf.MeanField(), aneal=(0.5,))
