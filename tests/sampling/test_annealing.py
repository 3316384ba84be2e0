"""Simulated annealing and the quench: ground states by enumeration, closed forms and bounds."""

import itertools
import math

import pytest
import torch

import spinformer as sf
from spinformer.errors import ConvergenceError, ConvergenceWarning
from spinformer.sampling.annealing import SimulatedAnnealing, quench

F64 = torch.float64


def ising_states(n):
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n)), dtype=F64)[..., None]


def glass(n, *, batch=(), dim=1, seed=3):
    generator = torch.Generator().manual_seed(seed)
    j = sf.couplings.sherrington_kirkpatrick(n, generator=generator, batch_shape=batch, dtype=F64)
    site = sf.Ising() if dim == 1 else sf.Sphere(dim)
    return sf.SpinSystem(j, torch.zeros(*batch, n, dim, dtype=F64), 1.0, site)


@pytest.mark.parametrize(("n", "draws"), [(12, 12), (16, 2)])
def test_ground_states_of_sk_by_enumeration(n, draws):
    """All of them, with the number of chains that found each as evidence."""
    system = glass(n, batch=(draws,))
    result = SimulatedAnnealing(sweeps=150).minimize(system)
    states = ising_states(n)
    for draw in range(draws):
        one = sf.SpinSystem(system.couplings.to_dense()[draw], states[0] * 0, 1.0, sf.Ising())
        lowest = one.energy(states).min()
        torch.testing.assert_close(result.best_energy[draw], lowest, rtol=1e-13, atol=0)
        torch.testing.assert_close(one.energy(result.best[draw]), lowest, rtol=1e-13, atol=0)
    assert bool(result.solution.converged.all()) and bool((result.solution.residual == 0).all())
    assert bool((result.success > 0).all()) and bool((result.success <= 1).all())


def test_ising_quench_ends_where_no_flip_lowers_the_energy():
    """From random spins, where there is something to do; every single flip is tried."""
    system = glass(24, batch=(3,))
    spins = system.site.sample(torch.zeros(5, 3, 24, 1, dtype=F64))
    found = quench(system, spins)
    assert not torch.equal(found.value, spins) and int(found.iterations.min()) >= 1
    before, energy = system.energy(spins), system.energy(found.value)
    assert bool((energy <= before).all())
    for site in range(24):
        flipped = found.value.clone()
        flipped[..., site, :] *= -1
        assert bool((system.energy(flipped) >= energy).all())


def test_triangle_of_antiferromagnets_has_angles_of_120_degrees():
    j = -(torch.ones(3, 3, dtype=F64) - torch.eye(3, dtype=F64))
    system = sf.SpinSystem(j, torch.zeros(3, 2, dtype=F64), 1.0, sf.Sphere(2, radius=1.0))
    result = SimulatedAnnealing(sweeps=50, chains=4).minimize(system)
    # E + 3/2 and the cosines are quadratic and linear in the residual of 1e-9.
    torch.testing.assert_close(result.energy, torch.full((4,), -1.5, dtype=F64), rtol=1e-14, atol=0)
    cosines = result.spins @ result.spins.mT
    expected = torch.full((3, 3), -0.5, dtype=F64) + 1.5 * torch.eye(3, dtype=F64)
    torch.testing.assert_close(cosines, expected.expand(4, 3, 3), rtol=0, atol=1e-8)
    assert bool((result.success == 1).all())


@pytest.mark.parametrize(("n", "dim"), [(32, 3), (33, 3), (21, 8)])
def test_antiferromagnetic_rings_reach_the_bound_of_luttinger_and_tisza(n, dim):
    """E >= -N R^2 lambda_max(J) / 2, which a spiral in two dimensions attains: for odd rings at the
    wave number closest to pi."""
    j = sf.couplings.ring(n, strength=-1.0, dtype=F64)
    system = sf.SpinSystem(j, torch.zeros(n, dim, dtype=F64), 1.0, sf.Sphere(dim))
    result = SimulatedAnnealing(sweeps=100, chains=6).minimize(system)
    bound = -n * dim * float(j.largest_eigenvalue()) / 2
    assert bound == pytest.approx(n * dim * math.cos(2 * math.pi * (n // 2) / n), rel=1e-12)
    # The energy is quadratic in the residual of 1e-9 with a softest mode of 1 / n^2: rounding.
    assert float(result.best_energy) == pytest.approx(bound, rel=1e-12)
    assert bool((result.energy >= bound * (1 + 1e-12)).all())


def test_vector_quench_is_a_minimum_with_no_torque():
    """The torque as the antisymmetric product S H - H S, and the energy under small turns."""
    system = glass(40, dim=3).replace(field=torch.randn(40, 3, dtype=F64) / 2)
    spins = system.site.sample(torch.zeros(4, 40, 3, dtype=F64))
    found = quench(system, spins)
    assert bool(found.converged.all()) and bool((found.residual <= 1e-9).all())
    force = system.force(found.value)
    torque = torch.linalg.cross(found.value, force).norm(dim=-1).amax(-1)
    largest = force.norm(dim=-1).amax(-1) * math.sqrt(3)
    # A chord is an angle to second order.
    torch.testing.assert_close(torque / largest, found.residual, rtol=1e-4, atol=1e-14)
    energy = system.energy(found.value)
    assert bool((energy < system.energy(spins)).all())
    turned = found.value + 0.02 * torch.randn(200, 4, 40, 3, dtype=F64)
    turned = math.sqrt(3) * torch.nn.functional.normalize(turned, dim=-1)
    assert bool((system.energy(turned) > energy).all())
    lengths = found.value.norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, math.sqrt(3)))


def test_spins_against_their_force_are_no_answer():
    """A state without torque that is no minimum: all spins against their fields."""
    field = torch.randn(6, 3, dtype=F64)
    system = sf.SpinSystem(torch.zeros(6, 6, dtype=F64), field, 1.0, sf.Sphere(3))
    along = math.sqrt(3) * torch.nn.functional.normalize(field, dim=-1)
    found = quench(system, -along[None])
    torch.testing.assert_close(found.value[0], along)
    assert float(found.residual) < 1e-14


def test_matrix_valued_couplings_masks_and_broken_systems():
    """Two systems: the second's absent site has NaN and stays zero; a third one is broken."""
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randn(6, 6, 2, 2, generator=generator, dtype=F64)
    blocks = blocks + blocks.transpose(0, 1).transpose(2, 3)
    field = torch.randn(3, 6, 2, generator=generator, dtype=F64)
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[1, 4] = True
    given = field.clone()
    given[1, 4] = torch.nan
    given[2, 0, 0] = torch.nan
    system = sf.SpinSystem(
        sf.couplings.MatrixValued(blocks),
        given,
        1.0,
        sf.Sphere(2),
        mask=mask,
        check_finite=False,
    )
    with pytest.warns(ConvergenceWarning, match="not a number comes from the system"):
        result = SimulatedAnnealing(sweeps=40, chains=4).minimize(system)
    assert bool((result.spins[:, 1, 4] == 0).all())
    assert bool(result.energy[:, 2].isnan().all()) and not bool(
        result.solution.converged[:, 2].any()
    )
    assert bool(result.solution.converged[:, :2].all())
    keep = [0, 1, 2, 3, 5]
    alone = sf.SpinSystem(
        sf.couplings.MatrixValued(blocks[keep][:, keep]), field[1, keep], 1.0, sf.Sphere(2)
    )
    torch.testing.assert_close(alone.energy(result.spins[:, 1, keep]), result.energy[:, 1])
    other = SimulatedAnnealing(sweeps=40, chains=4, seed=1).minimize(alone)
    torch.testing.assert_close(other.best_energy, result.best_energy[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dim", [1, 3])
def test_a_chain_does_what_it_does_alone(dim):
    """Also its quench, which others leave earlier or later."""
    system = glass(10, batch=(3,), dim=dim)
    keys = torch.arange(12).reshape(4, 3) * 7919
    options = {"sweeps": 12, "records": 4}
    together = SimulatedAnnealing(chains=4, seed=keys, **options).minimize(system)
    one = sf.SpinSystem(
        system.couplings.to_dense()[1], system.field[1], system.beta[1], system.site
    )
    # beta_max depends on the largest eigenvalue, found in a batch or alone: to rounding.
    alone = SimulatedAnnealing(chains=1, seed=keys[2:3, 1], **options).minimize(one)
    torch.testing.assert_close(alone.trajectory[:, 0], together.trajectory[:, 2, 1])
    torch.testing.assert_close(alone.spins[0], together.spins[2, 1], rtol=0, atol=1e-7)
    assert int(alone.solution.iterations) == int(together.solution.iterations[2, 1])
    again = SimulatedAnnealing(chains=4, seed=keys, **options).minimize(system)
    assert torch.equal(again.spins, together.spins)


@pytest.mark.parametrize("dim", [1, 3])
def test_a_system_without_spins_is_at_its_minimum(dim):
    site = sf.Ising() if dim == 1 else sf.Sphere(dim)
    empty = sf.SpinSystem(torch.zeros(0, 0), torch.zeros(2, 0, dim), 1.0, site)
    result = SimulatedAnnealing(sweeps=3, chains=2, on_failure="raise").minimize(empty)
    assert torch.equal(result.best_energy, torch.zeros(2))


def test_schedules():
    system = glass(6, batch=(2,))
    hot = torch.tensor([0.5, 0.25], dtype=F64)
    result = SimulatedAnnealing(
        "geometric", beta_min=hot, beta_max=8.0, sweeps=5, records=5, chains=2
    ).minimize(system)
    expected = torch.tensor([[0.5, 1, 2, 4, 8], [0.25, 0.25 * 32**0.25, 2**0.5, 0, 8]], dtype=F64)
    torch.testing.assert_close(result.betas[:, 0], expected[0])
    torch.testing.assert_close(result.betas[[0, 1, 2, 4], 1], expected[1, [0, 1, 2, 4]])
    assert result.trajectory.shape == (5, 2, 2)
    linear = SimulatedAnnealing("linear", beta_min=1.0, beta_max=3.0, sweeps=5, records=3, chains=2)
    betas = linear.minimize(system).betas
    torch.testing.assert_close(betas[:, 0], torch.tensor([1.0, 2.0, 3.0], dtype=F64))
    own = SimulatedAnnealing([0.1, 0.2, 5.0], chains=2).minimize(system)
    torch.testing.assert_close(own.betas[:, 1], torch.tensor([0.1, 0.2, 5.0], dtype=F64))


def test_cooling_lowers_the_energy_and_beats_a_quench():
    """Slow cooling of one glass of 48 spins against quenches from the same random starts: 16 chains
    each, whose spread is several times smaller than the difference of their means."""
    system = glass(48)
    slow = SimulatedAnnealing(sweeps=200).minimize(system)
    fast = SimulatedAnnealing([1e-6]).minimize(system)
    assert float(slow.trajectory[0].mean()) > float(slow.trajectory[-1].mean()) + 10
    assert bool((slow.energy <= slow.trajectory[-1] + 1e-12).all())
    difference = fast.energy.mean() - slow.energy.mean()
    error = ((fast.energy.var() + slow.energy.var()) / 16).sqrt()
    assert float(difference / error) > 4
    assert float(slow.best_energy) <= float(fast.best_energy)


def test_failures_are_loud():
    vectors = glass(30, dim=3)
    with pytest.raises(ConvergenceError, match="max_iterations"):
        SimulatedAnnealing(sweeps=5, max_iterations=2, on_failure="raise").minimize(vectors)
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        result = SimulatedAnnealing(sweeps=5, max_iterations=2).minimize(vectors)
    assert not bool(result.solution.converged.all())
    gaussian = sf.SpinSystem(torch.zeros(2, 2), torch.zeros(2, 1), 1.0, sf.Gaussian(1))
    with pytest.raises(ValueError, match="no minimum; use Sphere"):
        SimulatedAnnealing().minimize(gaussian)
    asymmetric = sf.SpinSystem(torch.randn(3, 3), torch.zeros(3, 1), 1.0, sf.Ising())
    with pytest.raises(ValueError, match="symmetric couplings"):
        SimulatedAnnealing().minimize(asymmetric)
    with pytest.raises(ValueError, match=r"spins have shape \(2, 4, 3\)"):
        quench(vectors, torch.zeros(2, 4, 3, dtype=F64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": "geometrical"}, "nearest is 'geometric'"),
        ({"betas": [1.0], "beta_min": 0.1}, "leave beta_min"),
        ({"sweeps": 0}, "sweeps=0"),
        ({"records": 0}, "records=0"),
        ({"chains": 0}, "chains=0"),
        ({"moves": []}, "moves is empty"),
        ({"tolerance": 2.0}, "tolerance=2.0"),
        ({"betas": []}, "one inverse temperature a sweep"),
        ({"betas": [0.0, 1.0]}, "positive and finite"),
        ({"betas": torch.ones(4, 3, dtype=F64)}, r"\(4, 3\)"),
        ({"beta_max": torch.ones(3, dtype=F64)}, r"beta_max has shape \(3,\)"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        SimulatedAnnealing(**options).minimize(glass(4, batch=(2,)))
