"""Entropy of single transitions and of sampled dynamics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spinformer.dynamics import (
    ExactDynamics,
    KineticTAP,
    ParallelDynamics,
    entropy_flow,
    peretto_log_weight,
)
from spinformer.dynamics.entropy_production import antisymmetric_flow
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def system_of(site: SiteLaw, *, symmetric: bool = False, matrix_valued: bool = False) -> SpinSystem:
    shape = (4, 4, site.dim, site.dim) if matrix_valued else (4, 4)
    matrix = draw(*shape, seed=1) / 4
    if symmetric and matrix_valued:
        matrix = (matrix + matrix.transpose(-4, -3).mT) / 2
    elif symmetric:
        matrix = (matrix + matrix.mT) / 2
    return SpinSystem(matrix, draw(4, site.dim, seed=2), 0.7, site)


def log_transition(system: SpinSystem, after: Tensor, before: Tensor) -> Tensor:
    """log W(S'|S), term by term."""
    b = system.beta * (system.field + system.couplings.apply(before))
    return ((b * after).sum(-1) - system.site.log_partition(b)).sum(-1)


@pytest.mark.parametrize("matrix_valued", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("site", [Sphere(3), Gaussian(2, 0.3)], ids=repr)
def test_flow_of_a_transition(site: SiteLaw, symmetric: bool, matrix_valued: bool) -> None:
    system = system_of(site, symmetric=symmetric, matrix_valued=matrix_valued)
    zero = torch.zeros(7, 4, site.dim, dtype=torch.float64)
    before, after = (site.sample(zero, torch.Generator().manual_seed(s)) for s in (3, 4))
    forward = log_transition(system, after, before)
    backward = log_transition(system, before, after)
    flow = entropy_flow(system, after, before)
    torch.testing.assert_close(flow, forward - backward)
    change = peretto_log_weight(system, after) - peretto_log_weight(system, before)
    rest = antisymmetric_flow(system, after, before)
    torch.testing.assert_close(flow, change + rest)
    assert bool((rest == 0).all()) == symmetric
    # Another field of the step, as in a protocol.
    other = 2 * system.field
    torch.testing.assert_close(
        entropy_flow(system, after, before, other),
        entropy_flow(system.replace(field=other), after, before),
    )


def test_closed_form_at_large_d_has_the_weight_of_the_spins_that_are_drawn() -> None:
    sphere, closed = (system_of(site) for site in (Sphere(5, 2.0), LargeDSphere(5, 2.0)))
    spins = sphere.site.sample(draw(4, 5))
    torch.testing.assert_close(peretto_log_weight(closed, spins), peretto_log_weight(sphere, spins))


def test_absent_sites_count_nothing() -> None:
    system = system_of(Sphere(3))
    mask = torch.tensor([False, False, True, False])
    kept = ~mask
    masked = system.replace(mask=mask)
    cut = SpinSystem(system.couplings.to_dense()[kept][:, kept], system.field[kept], 0.7, Sphere(3))
    before, after = (system.site.sample(draw(4, 3, seed=s)) for s in (3, 4))
    expected = entropy_flow(cut, after[kept], before[kept])
    before[2], after[2] = torch.nan, torch.nan
    torch.testing.assert_close(entropy_flow(masked, after, before), expected)


@pytest.mark.stochastic
def test_average_of_a_trajectory_is_the_exact_production() -> None:
    """Also of single transitions, whose change of L averages to zero at rest."""
    i = torch.arange(1, 5, dtype=torch.float64)
    matrix = torch.sin(i[:, None] + 2 * i) / 2
    system = SpinSystem(matrix, 0.5 * torch.sin(i)[:, None], 1.0, Ising())
    exact = ExactDynamics().steady_state(system).entropy_production
    state = ParallelDynamics(chains=64, steps=400, seed=1).steady_state(system)
    z = (state.entropy_production - exact) / state.standard_error("entropy_production")
    assert abs(float(z)) < 4
    # Conditional means take the noise of the draws: 64 * 400 raw draws would be this uncertain.
    run = ParallelDynamics(chains=64).run(system, 100, state)
    z = (run.entropy_flow - exact) / run.standard_error("entropy_flow")
    assert float(z.abs().max()) < 4
    raw = run.flows.std() / math.sqrt(64 * 400)
    assert float(state.standard_error("entropy_production")) < float(raw)


@pytest.mark.stochastic
def test_production_of_gaussian_spins() -> None:
    """S' = v (b + K S) + noise has a covariance that solves a linear equation."""
    site = Gaussian(2, 0.5)
    system = system_of(site)
    k = 0.7 * system.couplings.to_dense()
    a = 0.5 * k
    # One component: C = v + A C A^T, <S' S^T> = A C; and two of them.
    identity = torch.eye(16, dtype=torch.float64)
    noise = 0.5 * torch.eye(4, dtype=torch.float64)
    c = torch.linalg.solve(identity - torch.kron(a, a), noise.reshape(-1)).reshape(4, 4)
    exact = 2 * ((k - k.T) * (a @ c)).sum()
    state = ParallelDynamics(chains=64, steps=400, seed=2).steady_state(system)
    z = (state.entropy_production - exact) / state.standard_error("entropy_production")
    assert abs(float(z)) < 4
    for lag, pairs in ((0, c), (1, a @ c)):
        found = state.delayed_correlations(lag, connected=True)
        error = state.standard_error("delayed_correlations", lag, connected=True)
        assert float(((found - 2 * pairs) / error).abs().max()) < 4
    # The mean-field proxy is right to its order, here with a coupling of 0.1: 2 %.
    proxy = KineticTAP().steady_state(system).entropy_production
    assert abs(float(proxy / exact) - 1) < 0.1


def test_symmetric_couplings_produce_none() -> None:
    state = ParallelDynamics(chains=32, steps=20, on_failure="ignore").steady_state(
        system_of(Sphere(3), symmetric=True)
    )
    assert float(state.entropy_production) == 0
    assert float(state.standard_error("entropy_production")) == 0
