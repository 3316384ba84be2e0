"""Landau-Lifshitz dynamics against exact motions, conservation laws and Boltzmann's law."""

import itertools
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

import spinformer as sf
from spinformer.dynamics.landau_lifshitz import LandauLifshitz

DATA = Path(__file__).parents[1] / "data" / "landau_lifshitz.json"
METHODS = ("midpoint", "spherical")


def pair(strength: float, radius: float = 1.0, field: Tensor | None = None) -> sf.SpinSystem:
    bond = torch.tensor([[0.0, strength], [strength, 0.0]], dtype=torch.float64)
    field = torch.zeros(2, 3, dtype=torch.float64) if field is None else field
    return sf.SpinSystem(bond, field, 1.0, sf.Sphere(3, radius))


def glass(num_spins: int = 12) -> tuple[sf.SpinSystem, Tensor]:
    """A chaotic system in fields, and five random configurations of it."""
    generator = torch.Generator().manual_seed(4)
    couplings = sf.couplings.sherrington_kirkpatrick(
        num_spins, generator=generator, dtype=torch.float64
    )
    field = torch.randn(num_spins, 3, generator=generator, dtype=torch.float64)
    system = sf.SpinSystem(couplings, field, 1.0, sf.Sphere(3))
    return system, random_spins(5, num_spins, generator)


def random_spins(chains: int, num_spins: int, generator: torch.Generator) -> Tensor:
    spins = torch.randn(chains, num_spins, 3, generator=generator, dtype=torch.float64)
    return spins * (math.sqrt(3) / spins.norm(dim=-1, keepdim=True))


def polar(theta: float, phi: float, radius: float) -> Tensor:
    x, y = math.sin(theta) * math.cos(phi), math.sin(theta) * math.sin(phi)
    return radius * torch.tensor([[x, y, math.cos(theta)]], dtype=torch.float64)


def orders(errors: list[float]) -> list[float]:
    return [math.log2(coarse / fine) for coarse, fine in itertools.pairwise(errors)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gilbert", [False, True])
def test_one_spin_turns_and_falls_as_the_exact_solution(method: str, gilbert: bool) -> None:
    """tan(theta/2) falls as exp(-lambda B t) while phi grows as B t, whatever the radius."""
    radius, strength, damping, time, theta, phi = 2.0, 1.5, 0.3, 3.0, 2.5, 0.4
    field = torch.tensor([[0.0, 0.0, strength]], dtype=torch.float64)
    system = sf.SpinSystem(torch.zeros(1, 1).double(), field, 1.0, sf.Sphere(3, radius))
    rate = 1 / (1 + damping**2) if gilbert else 1.0
    later = 2 * math.atan(math.tan(theta / 2) * math.exp(-damping * rate * strength * time))
    expected = polar(later, phi + rate * strength * time, radius)
    errors = []
    for steps in (50, 100, 200):
        dynamics = LandauLifshitz(damping, method, gilbert=gilbert)
        found = dynamics.run(system, polar(theta, phi, radius), step=time / steps, steps=steps)
        errors.append(float((found.spins[-1] - expected).abs().max()))
    # Second order: the next term is of relative size (B dt)^2, 0.008 at the coarsest step.
    assert orders(errors) == pytest.approx([2, 2], abs=0.02)
    assert errors[-1] < 1e-3


def test_a_spin_alone_takes_no_iteration_and_any_step() -> None:
    """Undamped, the midpoint solves for one rotation: by 2 atan(B dt / 2), however large."""
    field = torch.tensor([[0.0, 0.0, 7.0]], dtype=torch.float64)
    system = sf.SpinSystem(torch.zeros(1, 1).double(), field, 1.0, sf.Sphere(3, 1.0))
    found = LandauLifshitz().run(system, polar(1.0, 0.0, 1.0), step=3.0, steps=4)
    angle = 4 * 2 * math.atan(7.0 * 3.0 / 2)
    torch.testing.assert_close(found.spins[-1], polar(1.0, angle, 1.0), rtol=0, atol=1e-14)
    assert int(found.iterations) == 2  # the rotation, and that it is one


@pytest.mark.parametrize("method", METHODS)
def test_two_spins_precess_about_their_sum(method: str) -> None:
    record = json.loads(DATA.read_text(encoding="utf-8"))[0]
    given, value = record["params"], record["value"]
    start = torch.tensor([given["S1"], given["S2"]], dtype=torch.float64)
    expected = torch.tensor([value["S1_t"], value["S2_t"]], dtype=torch.float64)
    errors = []
    for steps in (100, 200, 400):
        found = LandauLifshitz(method=method).run(
            pair(given["J"]), start, step=given["t"] / steps, steps=steps
        )
        errors.append(float((found.spins[-1] - expected).abs().max()))
        # omega from the turn itself, by Rodrigues' formula about the axis: a second route.
        axis = torch.tensor(value["axis"], dtype=torch.float64)
        turned = rotated(start, axis, value["omega"] * given["t"])
        torch.testing.assert_close(turned, expected, rtol=0, atol=1e-14)
    assert orders(errors) == pytest.approx([2, 2], abs=0.01)
    # The angle of a step is 2 atan(omega dt / 2): an error of omega^3 dt^2 t / 12 at most.
    assert errors[-1] < value["omega"] ** 3 * (given["t"] / 400) ** 2 * given["t"] / 12


def rotated(spins: Tensor, axis: Tensor, angle: float) -> Tensor:
    axis = axis.expand_as(spins)
    along = (axis * spins).sum(-1, keepdim=True) * axis
    turned = math.cos(angle) * (spins - along)
    return along + turned + math.sin(angle) * torch.linalg.cross(axis, spins)


def test_the_midpoint_keeps_energy_and_length_to_rounding() -> None:
    system, start = glass()
    found = LandauLifshitz().run(system, start, step=0.1, steps=1000, every=10)
    drift = (found.energies - found.energies[:1]).abs().max()
    # A step leaves 1e-14 of a spin, in a force of about 2, over 12 spins: below 1e-12 at random
    # signs over 1000 steps, 1e-10 if all had one sign.
    assert float(drift) < 1e-11
    lengths = found.spins.norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, math.sqrt(3)), rtol=4e-16, atol=0)
    assert bool(found.converged.all())


def test_the_spherical_midpoint_bounds_the_error_of_energy() -> None:
    system, start = glass()
    ranges = []
    for step in (0.1, 0.05):
        found = LandauLifshitz(method="spherical").run(
            system, start, step=step, steps=round(50 / step), every=5
        )
        error = (found.energies - found.energies[:1]).abs()
        half = len(error) // 2
        # No drift: the later half errs no more than the earlier one, up to the luck of extremes.
        assert float(error[half:].max()) < 2 * float(error[:half].max())
        ranges.append(float(error.square().mean().sqrt()))
        torch.testing.assert_close(
            found.spins.norm(dim=-1),
            torch.full_like(found.spins[..., 0], math.sqrt(3)),
            rtol=4e-16,
            atol=0,
        )
    # Second order; chaos makes other trajectories of the two steps, which moves the mean square.
    assert 1.5 < math.log2(ranges[0] / ranges[1]) < 2.5


@pytest.mark.parametrize("method", METHODS)
def test_total_spin_is_conserved_without_a_field(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    couplings = sf.couplings.square(4, dtype=torch.float64)
    system = sf.SpinSystem(couplings, torch.zeros(16, 3).double(), 1.0, sf.Sphere(3))
    start = random_spins(2, 16, generator)
    found = LandauLifshitz(method=method).run(system, start, step=0.05, steps=400, every=40)
    change = (found.total_spin - found.total_spin[0]).abs().max()
    assert float(change) < 1e-11  # 400 steps of 16 spins, 1e-14 each
    assert float((found.spins[-1] - found.spins[0]).abs().max()) > 1  # it moved


@pytest.mark.parametrize("method", METHODS)
def test_motion_is_reversible(method: str) -> None:
    """Spins and fields turned over run back along the same path, by the same steps."""
    system, start = glass(6)
    dynamics = LandauLifshitz(method=method)
    there = dynamics.run(system, start, step=0.1, steps=50)
    back = dynamics.run(system.replace(field=-system.field), -there.spins[-1], step=0.1, steps=50)
    # Rounding of 1e-14 a step grows with the chaos of five units of time, by much less than 1e4.
    torch.testing.assert_close(-back.spins[-1], start, rtol=0, atol=1e-10)


def test_damping_lowers_the_energy_at_every_step_even_a_large_one() -> None:
    system, start = glass()
    found = LandauLifshitz(0.5).run(system, start, step=0.4, steps=400)
    assert bool((found.energies.diff(dim=0) < 1e-12).all())
    # What it comes to is a local minimum: every spin along its force.
    end = found.spins[-1]
    force = system.force(end)
    along = (end * force).sum(-1) / (end.norm(dim=-1) * force.norm(dim=-1))
    assert float(along.min()) > 0.999


def test_matrix_couplings_conserve_the_energy_and_absent_sites_stay_out(
    generator: torch.Generator,
) -> None:
    blocks = torch.randn(4, 4, 3, 3, generator=generator, dtype=torch.float64) / 4
    blocks = blocks + blocks.permute(1, 0, 3, 2)
    blocks = torch.where(torch.eye(4, dtype=torch.bool)[..., None, None], 0.0, blocks)
    field = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    mask = torch.tensor([False, False, False, True])
    system = sf.SpinSystem(blocks, field, 1.0, sf.Sphere(3), mask=mask)
    start = random_spins(1, 4, generator)[0]
    found = LandauLifshitz().run(system, start, step=0.05, steps=200)
    assert float((found.energies - found.energies[0]).abs().max()) < 1e-12
    assert not bool(found.spins[:, 3].any())
    three = sf.couplings.MatrixValued(blocks[:3, :3].contiguous())
    alone = sf.SpinSystem(three, field[:3], 1.0, sf.Sphere(3))
    expected = LandauLifshitz().run(alone, start[:3], step=0.05, steps=200)
    torch.testing.assert_close(found.spins[-1, :3], expected.spins[-1], rtol=0, atol=1e-12)


def test_a_broken_system_and_the_batch_change_no_other() -> None:
    _, start = glass(4)
    field = torch.zeros(3, 4, 3, dtype=torch.float64)
    field[0, :, 2], field[1, 0, 0], field[2, :, 0] = 1.0, math.nan, 0.3
    bonds = sf.couplings.ring(4, dtype=torch.float64).to_dense()
    system = sf.SpinSystem(bonds, field, 1.0, sf.Sphere(3), check_finite=False)
    with pytest.warns(sf.ConvergenceWarning, match="1 of 3 systems"):
        found = LandauLifshitz(on_failure="warn").run(system, start[:3], step=0.1, steps=30)
    assert found.converged.tolist() == [True, False, True]
    for row in (0, 2):
        alone = sf.SpinSystem(bonds, field[row], 1.0, sf.Sphere(3))
        expected = LandauLifshitz().run(alone, start[row], step=0.1, steps=30)
        torch.testing.assert_close(found.spins[:, row], expected.spins, rtol=0, atol=1e-13)
        assert int(found.iterations[row]) == int(expected.iterations)


def test_chains_of_a_batch_and_what_is_kept() -> None:
    system, start = glass(4)
    batch = system.replace(field=torch.stack([system.field, 2 * system.field]))
    found = LandauLifshitz().run(batch, start[:, None], step=0.05, steps=10, every=4)
    assert found.spins.shape == (3, 5, 2, 4, 3)
    assert found.energies.shape == (3, 5, 2)
    assert found.times.tolist() == pytest.approx([0, 0.2, 0.4])
    torch.testing.assert_close(found.energies[2], batch.energy(found.spins[2]))


@pytest.mark.stochastic
@pytest.mark.parametrize("gilbert", [False, True])
def test_noise_and_damping_balance_at_boltzmanns_law(gilbert: bool) -> None:
    """From far away to the law of a spin in a field, R and beta not one.

    Measured with 4e4 chains, the error of first order in the step is 0.1 dt to 0.2 dt standard
    deviations of the energy: here up to 0.01, where the standard error is 0.016.
    """
    beta, radius, chains = 1.3, 1.7, 4000
    field = torch.tensor([[0.0, 0.0, 0.8]], dtype=torch.float64)
    system = sf.SpinSystem(torch.zeros(1, 1).double(), field, beta, sf.Sphere(3, radius))
    exact = sf.Exact().solve(system)
    start = -radius * field / field.norm()
    dynamics = LandauLifshitz(1.0, gilbert=gilbert, thermal=True, tolerance=1e-8)
    # Twenty times the time 1 / (lambda gamma B) of the damping.
    found = dynamics.run(
        system, start.expand(chains, 1, 3), step=0.05, steps=500, every=500, seed=2
    )
    energy = found.energies[-1]
    error = energy.std() / math.sqrt(chains)
    assert abs(float((energy.mean() - exact.internal_energy) / error)) < 4
    across = found.spins[-1, :, 0, :2]
    # The fluctuations across the field: <S_x^2> = R A(kappa) / (beta h).
    m = float(exact.magnetization[0, 2])
    square = across.square()
    assert (
        abs(float((square.mean() - m / (beta * 0.8)) / (square.std() / math.sqrt(2 * chains)))) < 4
    )


@pytest.mark.stochastic
def test_a_thermal_pair_has_the_correlation_of_langevins_function() -> None:
    strength, radius, chains = 0.9, 1.2, 3000
    system = pair(strength, radius)
    start = polar(0.0, 0.0, radius).expand(chains, 2, 3)
    found = LandauLifshitz(0.8, thermal=True, tolerance=1e-8).run(
        system, start, step=0.05, steps=400, every=400, seed=5
    )
    k = strength * radius**2
    expected = -strength * radius**2 * (1 / math.tanh(k) - 1 / k)
    energy = found.energies[-1]
    assert abs(float((energy.mean() - expected) / (energy.std() / math.sqrt(chains)))) < 4


def test_a_thermal_chain_of_many_is_that_chain_alone() -> None:
    system, start = glass(3)
    dynamics = LandauLifshitz(0.5, thermal=True)
    keys = torch.arange(5)
    every = dynamics.run(system, start, step=0.05, steps=20, seed=keys)
    alone = dynamics.run(system, start[3:4], step=0.05, steps=20, seed=keys[3:4])
    torch.testing.assert_close(every.spins[:, 3:4], alone.spins, rtol=0, atol=1e-12)
    assert float((every.spins[-1, 0] - every.spins[-1, 1]).abs().max()) > 0.1


def test_a_step_that_is_too_large_is_loud() -> None:
    system, start = glass()
    with pytest.raises(sf.ConvergenceError, match=r"step 1 of 50: 2 of 5 .* smaller step"):
        LandauLifshitz().run(system, start, step=50.0, steps=3)
    found = LandauLifshitz(on_failure="ignore").run(system, start, step=50.0, steps=1)
    assert found.converged.tolist() == (found.residual < 1.5e-14).tolist()
    assert int((~found.converged).sum()) == 2
    assert found.iterations[~found.converged].tolist() == [100, 100]


def test_wrong_calls() -> None:
    system, start = glass(3)
    run = LandauLifshitz().run
    four = sf.SpinSystem(torch.zeros(3, 3), torch.zeros(3, 4), 1.0, sf.Sphere(4))
    with pytest.raises(ValueError, match=r"three components.*Sphere\(dim=4"):
        run(four, torch.zeros(3, 4), step=0.1, steps=1)
    twisted = sf.SpinSystem(
        torch.ones(3, 3).double().triu(1), torch.zeros(3, 3).double(), 1.0, sf.Sphere(3)
    )
    with pytest.raises(ValueError, match="symmetric couplings"):
        run(twisted, start, step=0.1, steps=1)
    with pytest.raises(ValueError, match=r"initial\[0, 0\] has length 3.46.*length 1.73"):
        run(system, 2 * start, step=0.1, steps=1)
    with pytest.raises(TypeError, match="float32"):
        run(system, start.float(), step=0.1, steps=1)
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        run(system, torch.zeros(2, 3).double(), step=0.1, steps=1)
    with pytest.raises(ValueError, match=r"step=-0.1"):
        run(system, start, step=-0.1, steps=1)
    with pytest.raises(ValueError, match="every=0"):
        run(system, start, step=0.1, steps=1, every=0)
    for options, message in (
        ({"damping": -1.0}, "damping=-1.0"),
        ({"method": "midpint"}, "nearest is 'midpoint'"),
        ({"thermal": True}, "heats without end"),
        ({"thermal": True, "damping": 1.0, "method": "spherical"}, "use method='midpoint'"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
        ({"max_iterations": 0}, "max_iterations=0"),
    ):
        with pytest.raises(ValueError, match=message):
            LandauLifshitz(**options)
    with pytest.raises(TypeError, match="nearest is 'damping'"):
        LandauLifshitz(dampig=1.0)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_keeps_the_trajectory() -> None:
    system, spins = glass()

    def press(done: int, total: int) -> None:
        if done == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.warns(sf.ConvergenceWarning, match="interrupted after 5 of 20 steps"):
        part = LandauLifshitz(progress=press).run(system, spins, step=0.05, steps=20, every=2)
    whole = LandauLifshitz().run(system, spins, step=0.05, steps=4, every=2)
    assert torch.equal(part.spins, whole.spins) and torch.equal(part.times, whole.times)
    with pytest.raises(TypeError, match="initial must be a tensor of spins, not 'random'"):
        LandauLifshitz().run(system, "random", step=0.05, steps=1)  # type: ignore[arg-type]
