"""Free energies from sampling, against enumeration and the exact rings and chains of spheres."""

import logging
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import spherical_in
from torch import Tensor

import spinformer as sf
from spinformer.errors import ConvergenceError, ConvergenceWarning
from spinformer.sampling.chains import Chains
from spinformer.sampling.free_energy import (
    MultiHistogram,
    ThermodynamicIntegration,
    _clenshaw_curtis,
)
from spinformer.sampling.local import HeatBath
from spinformer.sampling.monte_carlo import MonteCarlo
from spinformer.thermo.statistics import BinnedMean


def glass(n: int = 8, seed: int = 3) -> Tensor:
    """Dense couplings of a spin glass."""
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(n, n, generator=generator, dtype=torch.float64)
    return (J + J.T).fill_diagonal_(0) / math.sqrt(2 * n)


def fields(*shape: int, seed: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Enumeration:
    """A Monte Carlo run without noise: every measurement is the exact mean.

    Gives thermodynamic integration of small Ising systems all that it reads, so that what is left
    is the error of the quadrature.
    """

    def solve(self, system: sf.SpinSystem) -> SimpleNamespace:
        exact = sf.Exact().solve(system)
        spin = BinnedMean()
        for _ in range(8):
            spin.add(exact.magnetization.expand(2, *exact.magnetization.shape))
        energy = exact.internal_energy[None, ..., None].expand(2, *system.batch_shape, 8)
        record = SimpleNamespace(series={"energy": energy}, means={"spin": spin})
        return SimpleNamespace(record=record, broken=exact.broken)


# -- thermodynamic integration ------------------------------------------------------------------


@pytest.mark.parametrize("order", [2, 4, 6, 8, 12])
def test_the_rule_and_its_nested_one_integrate_polynomials(order: int) -> None:
    nodes, weights, nested = _clenshaw_curtis(order, torch.device("cpu"))
    assert nodes[0] == 0 and nodes[-1] == 1
    assert bool((weights > 0).all())
    for power in range(order + 1):
        assert float(weights @ nodes**power) == pytest.approx(1 / (power + 1), abs=1e-14)
        if power <= order // 2:
            assert float(nested @ nodes**power) == pytest.approx(1 / (power + 1), abs=1e-14)


def test_without_noise_the_quadrature_converges_geometrically() -> None:
    """Fields, batches of fields and temperatures, and an absent site with NaN in its field."""
    mask = torch.zeros(8, dtype=torch.bool)
    mask[5] = True
    h = 0.7 * fields(3, 8, 1)
    h[0] = 0
    h[:, 5] = torch.nan
    beta = torch.tensor([0.8, 1.0, 2.0], dtype=torch.float64)
    system = sf.SpinSystem(glass(), h, beta, sf.Ising(), mask=mask)
    exact = sf.Exact().solve(system).log_partition
    errors = []
    for nodes in (4, 8, 16):
        found = ThermodynamicIntegration(Enumeration(), nodes, on_failure="ignore").solve(system)
        error = (found.log_partition - exact).abs()
        # From rules of four and two nodes it is a guess; from the default on it holds.
        slack = 5 if nodes == 4 else 1
        assert bool((error <= slack * found.quadrature_error + 1e-12).all())
        assert bool((found.error < 1e-12).all())
        errors.append(error)
    # The integrand is analytic: doubling the order squares the error, up to a constant.
    assert bool((errors[1] < 0.05 * errors[0] + 1e-12).all())
    assert bool((errors[2] < 1e-3 * errors[1] + 1e-12).all())
    torch.testing.assert_close(found.free_energy, -found.log_partition / beta)
    # The start is that of independent spins, and the first node the first order in J.
    free = torch.tanh(beta[:, None] * h[..., 0].nan_to_num())
    pairs = torch.einsum("bi,ij,bj->b", free, glass(), free) / 2
    torch.testing.assert_close(found.integrand[0], beta * pairs)


def test_too_few_nodes_are_loud() -> None:
    system = sf.SpinSystem(glass(), torch.zeros(8, 1).double(), 4.0, sf.Ising())
    with pytest.warns(ConvergenceWarning, match=r"nodes=2 .* double the nodes"):
        ThermodynamicIntegration(Enumeration(), 2).solve(system)
    with pytest.raises(ConvergenceError, match="1 of 1 systems"):
        ThermodynamicIntegration(Enumeration(), 2, on_failure="raise").solve(system)
    with pytest.raises(ValueError, match="nodes=5"):
        ThermodynamicIntegration(Enumeration(), 5)
    with pytest.raises(TypeError, match="nearest is 'nodes'"):
        ThermodynamicIntegration(Enumeration(), node=4)
    asymmetric = sf.SpinSystem(glass().triu(), torch.zeros(8, 1).double(), site=sf.Ising())
    with pytest.raises(ValueError, match="symmetric"):
        ThermodynamicIntegration(Enumeration()).solve(asymmetric)


@pytest.mark.stochastic
@pytest.mark.parametrize("conditional", [True, False])
def test_z_scores_of_repeated_integrations(conditional: bool) -> None:
    runs, h = 40, 0.7 * fields(2, 8, 1)
    h[1] = 0
    exact = sf.Exact().solve(sf.SpinSystem(glass(), h, 1.0, sf.Ising())).log_partition
    system = sf.SpinSystem(glass(), h.expand(runs, 2, 8, 1), 1.0, sf.Ising())
    run = MonteCarlo(
        sweeps=160, correlations=False, conditional=conditional, seed=7, on_failure="ignore"
    )
    found = ThermodynamicIntegration(run, nodes=6, on_failure="ignore").solve(system)
    z = (found.log_partition - exact) / found.error
    # The variance of z^2 is 2, for a normal z.
    assert abs(float(z.square().mean()) - 1) < 4 * math.sqrt(2 / z.numel())
    assert abs(float(z.mean())) < 4 / math.sqrt(z.numel())
    # The quadrature adds nothing to speak of.
    assert float(found.quadrature_error.mean()) < float(found.error.mean()) / 3
    # The last node is the system itself.
    torch.testing.assert_close(found.sampled.system.beta[-1], system.beta)
    torch.testing.assert_close(found.sampled.system.field[-1], system.field)


@pytest.mark.stochastic
def test_a_ring_of_spheres() -> None:
    """Z of a ring in three dimensions is a sum over angular momenta l of their transfer matrix's
    eigenvalues i_l(K) to the power N, 2 l + 1 of each, for K = beta J R^2."""
    n, strength = 6, 2.0
    ring = sf.couplings.ring(n, strength=strength / 3, dtype=torch.float64)  # R^2 = 3
    exact = math.log(sum((2 * l + 1) * spherical_in(l, strength) ** n for l in range(30)))
    system = sf.SpinSystem(ring, torch.zeros(n, 3).double(), 1.0, sf.Sphere(3))
    run = MonteCarlo(sweeps=600, correlations=False, seed=1)
    found = ThermodynamicIntegration(run, nodes=8).solve(system)
    assert abs(float(found.log_partition) - exact) < 4 * float(found.error)
    assert float(found.error) < 0.02 * exact


def test_a_broken_system_leaves_the_others_alone() -> None:
    h = fields(2, 8, 1)
    broken = h.clone()
    broken[1, 3] = torch.nan
    run = MonteCarlo(sweeps=64, correlations=False, seed=1, on_failure="ignore")
    method = ThermodynamicIntegration(run, nodes=4, on_failure="ignore")
    sound = method.solve(sf.SpinSystem(glass(), h, 1.0, sf.Ising()))
    found = method.solve(sf.SpinSystem(glass(), broken, 1.0, sf.Ising(), check_finite=False))
    assert float(found.log_partition[0]) == float(sound.log_partition[0])
    assert math.isnan(found.log_partition[1])


# -- reweighting --------------------------------------------------------------------------------


def draw(betas: Tensor, count: int, seed: int, h: Tensor) -> tuple[Tensor, Tensor]:
    """Independent energies and moments of the glass, (1, K, count), drawn from all 256 states."""
    states = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 8)[..., None]
    energy = sf.SpinSystem(glass(), h, 1.0, sf.Ising()).energy(states)
    law = torch.softmax(-betas[:, None] * energy, -1)
    drawn = torch.multinomial(
        law, count, replacement=True, generator=torch.Generator().manual_seed(seed)
    )
    return energy[drawn][None], states.sum((-2, -1))[drawn][None]


BETAS = torch.tensor([0.2, 0.5, 0.9, 1.4], dtype=torch.float64)


@pytest.mark.stochastic
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.7, 1.2, 1.5])
def test_every_mean_between_the_temperatures(beta: float) -> None:
    h = 0.3 * fields(8, 1)
    energies, moments = draw(BETAS, 4000, 2, h)
    joined = MultiHistogram(energies, BETAS)
    exact = sf.Exact().solve(sf.SpinSystem(glass(), h, beta, sf.Ising()))
    for found, right in (
        (joined.log_partition(beta), exact.log_partition),
        (joined.free_energy(beta), exact.free_energy),
        (joined.internal_energy(beta), exact.internal_energy),
        (joined.specific_heat(beta), exact.specific_heat()),
        (joined.mean(moments, beta), exact.magnetization.sum()),
    ):
        assert abs(float((found.value - right) / found.error)) < 4
        assert 0 < float(found.error) < 0.2 * max(1.0, abs(float(right)))


@pytest.mark.stochastic
def test_z_scores_of_repeated_correlated_runs() -> None:
    """Markov chains of a few hundred sweeps, with autocorrelation times up to ten."""
    runs, h = 40, 0.3 * fields(8, 1)
    betas = torch.tensor([0.2, 0.7, 1.4, 2.2], dtype=torch.float64)
    system = sf.SpinSystem(glass(), h, betas[:, None].expand(4, runs), sf.Ising())
    chains = Chains.start(system, 4, 5)
    kernel = HeatBath().start(chains)
    kernel.sweep(30)
    series = []
    for _ in range(200):
        kernel.sweep()
        series.append((chains.energy(), chains.spins.sum((-2, -1))))
    energies, moments = (torch.stack(values, -1) for values in zip(*series, strict=True))
    joined = MultiHistogram(energies, betas, on_failure="ignore")
    asked = torch.tensor([0.1, 1.0, 2.2], dtype=torch.float64)
    exact = sf.Exact().solve(sf.SpinSystem(glass(), h.expand(3, 8, 1), asked, sf.Ising()))
    for found, right in (
        (joined.log_partition(asked), exact.log_partition),
        (joined.internal_energy(asked), exact.internal_energy),
        (joined.mean(moments, asked), exact.magnetization.sum((-2, -1))),
    ):
        assert found.value.shape == (3, runs)
        square = ((found.value - right[:, None]) / found.error).square()
        # The variance of z^2 is 2, for a normal z.
        assert bool(((square.mean(1) - 1).abs() < 4 * math.sqrt(2 / runs)).all())


@pytest.mark.stochastic
def test_for_independent_draws_the_errors_are_those_of_pymbar() -> None:
    from pymbar import MBAR  # noqa: PLC0415 (loads scipy)

    energies, _ = draw(BETAS, 3000, 6, torch.zeros(8, 1).double())
    joined = MultiHistogram(energies, BETAS)
    theirs = MBAR(
        (BETAS[:, None] * energies.flatten()).numpy(),
        np.full(4, 3000),
        solver_protocol=({"method": "adaptive"},),
    ).compute_free_energy_differences()
    anchored = MultiHistogram(energies, BETAS, anchor=(0.2, 0.0)).log_partition(BETAS)
    torch.testing.assert_close(anchored.value, -torch.as_tensor(theirs["Delta_f"][0]))
    # The noise of a window on 3000 draws: sqrt(2 (2 W + 1) / n) / 2 is 3 percent for W = 3.
    ratio = anchored.error[1:] / torch.as_tensor(theirs["dDelta_f"][0, 1:])
    assert bool((ratio - 1).abs().lt(0.12).all())
    assert float(anchored.error[0]) == 0
    # beta = 0 is no temperature of the ladder, but its log Z is known.
    assert float(joined.log_partition(0.0).value) == 0


@pytest.mark.stochastic
def test_a_chain_of_spheres() -> None:
    """An open chain, log Z = (N - 1) log z(beta J S), whose configurations are drawn one spin after
    the other."""
    n, count, site = 5, 3000, sf.Sphere(3)
    betas = torch.tensor([0.2, 0.4, 0.7], dtype=torch.float64)
    generator = torch.Generator().manual_seed(8)
    spins = [site.sample(torch.zeros(3, count, 3).double(), generator)]
    for _ in range(n - 1):
        spins.append(site.sample(betas[:, None, None] * spins[-1], generator))
    configurations = torch.stack(spins, -2)
    chain = sf.couplings.chain(n, dtype=torch.float64)
    system = sf.SpinSystem(chain, torch.zeros(n, 3).double(), 1.0, site)
    joined = MultiHistogram(system.energy(configurations)[None], betas)
    asked = torch.tensor([0.1, 0.4, 0.6], dtype=torch.float64)
    along = torch.zeros(3, 3, dtype=torch.float64)
    along[:, 0] = asked * math.sqrt(3)
    found = joined.log_partition(asked)
    z = (found.value - (n - 1) * site.log_partition(along)) / found.error
    assert bool((z.abs() < 4).all())
    energy = joined.internal_energy(asked)
    right = -(n - 1) * math.sqrt(3) * site.mean(along)[:, 0]
    assert bool(((energy.value - right) / energy.error).abs().lt(4).all())


def test_temperatures_in_any_order_and_systems_side_by_side() -> None:
    energies, moments = draw(BETAS, 400, 2, 0.3 * fields(8, 1))
    straight = MultiHistogram(energies, BETAS).mean(moments, 0.6)
    order = torch.tensor([2, 0, 3, 1])
    both = torch.stack([energies[:, order], energies.flip(-1)[:, order]], 2)
    both[0, 1, 1, 7] = torch.nan
    other = MultiHistogram(both, BETAS[order])
    found = other.mean(torch.stack([moments[:, order]] * 2, 2), torch.tensor([0.6]))
    # The solver starts elsewhere in its own rounding.
    torch.testing.assert_close(found.value[0, 0], straight.value, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.error[0, 0], straight.error, rtol=1e-6, atol=1e-8)
    assert math.isnan(found.value[0, 1]) and math.isnan(found.error[0, 1])
    assert bool(torch.isnan(other.overlap[:, 1]).all()) and other.overlap.shape == (3, 2)
    # What is far below zero is as good: only differences of energies count.
    lower = MultiHistogram(energies - 1e4, BETAS, anchor=(0.2, 2000.0))
    near = MultiHistogram(energies, BETAS, anchor=(0.2, 0.0)).log_partition(1.4)
    assert float(lower.log_partition(1.4).value) == pytest.approx(float(near.value) + 14000)


@pytest.mark.stochastic
def test_the_ladder_of_a_run() -> None:
    """Parallel tempering of three ferromagnets, of which one is broken and has no ladder."""
    h = torch.tensor([0.1, torch.nan, 0.3], dtype=torch.float64)[:, None, None].expand(3, 9, 1)
    lattice = sf.couplings.square(3, dtype=torch.float64)
    system = sf.SpinSystem(lattice, h, 0.6, sf.Ising(), check_finite=False)
    ladder = [0.05, 0.3, 0.6]
    run = sf.ParallelTempering(ladder, sweeps=200, seed=2, on_failure="ignore").solve(system)
    joined = MultiHistogram.of(run, on_failure="raise")
    exact = sf.Exact().solve(system.replace(field=h.nan_to_num()))
    magnetization = joined.mean(run.series["moment"][..., 0], 0.6)
    for found, right in (
        (joined.log_partition(0.6), exact.log_partition),
        (joined.internal_energy(0.6), exact.internal_energy),
        (magnetization, exact.magnetization.sum((-2, -1))),
    ):
        z = (found.value - right) / found.error
        assert bool((z[[0, 2]].abs() < 4).all()) and math.isnan(found.value[1])


def test_a_ladder_with_a_hole_and_questions_outside_it_are_loud() -> None:
    energies, _ = draw(torch.tensor([0.1, 12.0]).double(), 300, 2, fields(8, 1))
    with pytest.raises(ConvergenceError, match=r"overlap\[0\]"):
        MultiHistogram(energies, torch.tensor([0.1, 12.0]), on_failure="raise")
    energies, _ = draw(BETAS, 200, 2, fields(8, 1))
    with pytest.warns(ConvergenceWarning, match="fewer than 50"):
        MultiHistogram(energies[:, :2], BETAS[:2]).internal_energy(8.0)


def test_what_cannot_be_joined_is_refused(monkeypatch) -> None:
    energies, moments = draw(BETAS, 100, 2, fields(8, 1))
    with pytest.raises(ValueError, match="C, K"):
        MultiHistogram(energies[0, 0], BETAS)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        MultiHistogram(energies, BETAS[:3])
    with pytest.raises(ValueError, match="two or more"):
        MultiHistogram(energies[:, :1], BETAS[:1])
    with pytest.raises(ValueError, match="twice"):
        MultiHistogram(energies, BETAS[[0, 1, 1, 2]])
    with pytest.raises(ValueError, match=r"anchor has log Z of shape \(3,\)"):
        MultiHistogram(energies, BETAS, anchor=(0.0, torch.zeros(3)))
    joined = MultiHistogram(energies, BETAS, on_failure="ignore")
    with pytest.raises(ValueError, match="one value"):
        joined.mean(moments[..., :50], 0.5)
    monkeypatch.setitem(sys.modules, "pymbar", None)
    with pytest.raises(ImportError, match=r"pip install 'spinformer\[sampling\]'"):
        MultiHistogram(energies, BETAS)


def test_pymbar_is_quiet_and_leaves_the_global_generator_alone(caplog) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "pymbar"]:
        del sys.modules[name]  # its advertisements come with the import
    energies, _ = draw(BETAS, 100, 2, fields(8, 1))
    before = np.random.get_state()[1].copy()  # noqa: NPY002 (what pymbar would touch)
    with caplog.at_level(logging.DEBUG):
        MultiHistogram(energies, BETAS, on_failure="ignore")
    assert not caplog.records
    assert (before == np.random.get_state()[1]).all()  # noqa: NPY002
