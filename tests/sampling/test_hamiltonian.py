"""Hamiltonian Monte Carlo: reversible, volume preserving, of second order, and exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import spinformer as sf
from spinformer.sampling.chains import Chains
from spinformer.sampling.hamiltonian import Hamiltonian, leapfrog
from spinformer.spins.couplings import LowRank, MatrixValued
from spinformer.spins.streams import Streams

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def symmetric(n: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    J = scale * normal(n, n, seed=seed)
    return (J + J.mT) / 2


def blocks(n: int, dim: int, scale: float = 1.0) -> MatrixValued:
    J = scale * normal(n, n, dim, dim, seed=1)
    return MatrixValued((J + J.permute(1, 0, 3, 2)) / 2)


def z_scores(samples: Tensor, exact: Tensor) -> Tensor:
    """How far the mean over independent chains (the first axis) is off, in its own errors."""
    return (samples.mean(0) - exact).abs() / (samples.std(0) / len(samples) ** 0.5)


def averages(chains: Chains, move: Hamiltonian, sweeps: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Magnetizations, <S_i . S_j> and energies averaged over time, independent between chains."""
    kernel = move.start(chains)
    for _ in range(10):
        kernel.sweep(3)
        kernel.adapt()
    kernel.reset_report()
    moment, pairs, energy = (torch.zeros((), dtype=F64) for _ in range(3))
    for _ in range(sweeps):
        kernel.sweep()
        moment = moment + chains.spins / sweeps
        pairs = pairs + chains.spins @ chains.spins.mT / sweeps
        energy = energy + chains.energy() / sweeps
    # Adapted: one call in ten learns from 4500 paths, the last with a gain of 0.8.
    assert 0.7 < float(kernel.report()["acceptance"].mean()) <= 1
    return moment, pairs, energy


def motion(system: sf.SpinSystem, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Typical spins and velocities."""
    streams = Streams.from_seed(seed, ())
    spins = system.site.sample(torch.zeros_like(system.field), streams)
    velocity = streams.normal(*spins.shape)
    if system.site.radius is not None:
        across = (velocity * spins).sum(-1, keepdim=True) / system.site.radius**2
        velocity = velocity - across * spins
    return spins, velocity


def total(system: sf.SpinSystem, spins: Tensor, velocity: Tensor) -> Tensor:
    """The Hamiltonian, written down once more."""
    value = system.beta * system.energy(spins) + velocity.square().sum((-2, -1)) / 2
    if isinstance(system.site, sf.Gaussian):
        value = value + spins.square().sum((-2, -1)) / (2 * system.site.variance)
    return value


def follow(
    system: sf.SpinSystem, spins: Tensor, velocity: Tensor, time: float, steps: int
) -> tuple[Tensor, Tensor]:
    step = torch.full_like(system.beta, time / steps)
    number = torch.full_like(system.beta, steps, dtype=torch.int64)
    return leapfrog(system, spins, velocity, system.beta, step, number)[:2]


MOTIONS: dict[str, Callable[[], sf.SpinSystem]] = {
    "circles": lambda: sf.SpinSystem(symmetric(5), normal(5, 2), 0.8, sf.Sphere(2)),
    "spheres": lambda: sf.SpinSystem(symmetric(5), normal(5, 3), 0.8, sf.Sphere(3, radius=0.6)),
    "large D": lambda: sf.SpinSystem(
        LowRank(normal(5, 2)), normal(5, 16), 0.4, sf.LargeDSphere(16)
    ),
    "matrix-valued": lambda: sf.SpinSystem(blocks(4, 3), normal(4, 3), 0.7, sf.Sphere(3)),
    "Gaussian": lambda: sf.SpinSystem(symmetric(5, 0.3), normal(5, 2), 0.5, sf.Gaussian(2, 0.7)),
    "Gaussian, one component": lambda: sf.SpinSystem(
        symmetric(5, 0.3), normal(5, 1), 0.5, sf.Gaussian(1)
    ),
}
motions = pytest.mark.parametrize("name", MOTIONS)


@motions
def test_turned_round_it_goes_back(name: str) -> None:
    system = MOTIONS[name]()
    spins, velocity = motion(system)
    end, speed = follow(system, spins, velocity, 3.0, 20)
    assert (end - spins).norm() > 0.5 * spins.norm()
    back, turned = follow(system, end, -speed, 3.0, 20)
    # 20 steps of a few roundings each, little amplified in a time of 3.
    torch.testing.assert_close(back, spins, rtol=0, atol=1e-12)
    torch.testing.assert_close(turned, -velocity, rtol=0, atol=1e-12)


@motions
def test_energy_error_is_of_second_order(name: str) -> None:
    """The error of the Hamiltonian over a path falls by 4 when steps are halved."""
    system = MOTIONS[name]()
    spins, velocity = motion(system, 1)
    start = total(system, spins, velocity)
    errors = [
        float((total(system, *follow(system, spins, velocity, 1.5, n)) - start).abs())
        for n in (32, 64, 128)
    ]
    rates = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    # The next order of an even expansion is a quarter of itself at each halving.
    assert all(abs(rate - 2) < 0.1 for rate in rates), rates
    assert errors[-1] > 1e-9  # not rounding


@motions
def test_spheres_are_not_left(name: str) -> None:
    system = MOTIONS[name]()
    spins, velocity = follow(system, *motion(system, 2), 20.0, 200)
    if system.site.radius is None:
        return
    torch.testing.assert_close(
        spins.norm(dim=-1),
        torch.full((system.num_spins,), system.site.radius, dtype=F64),
        rtol=1e-14,
        atol=0,
    )
    assert (spins * velocity).sum(-1).abs().max() < 1e-12


def test_volume_is_preserved_on_circles() -> None:
    """det d(angles, rates at the end) / d(angles, rates at the start) = 1."""
    system = MOTIONS["circles"]()
    root = math.sqrt(2.0)  # the radius, and |u| of an angle's rate of 1

    def flow(state: Tensor) -> Tensor:
        angle, rate = state.unflatten(0, (2, 5))
        spins = root * torch.stack([angle.cos(), angle.sin()], -1)
        velocity = rate[:, None] * torch.stack([-angle.sin(), angle.cos()], -1)
        end, speed = follow(system, spins, velocity, 2.0, 7)
        turn = torch.atan2(end[:, 1], end[:, 0])
        return torch.cat([turn, (end[:, 0] * speed[:, 1] - end[:, 1] * speed[:, 0]) / root])

    state = normal(10, seed=3)
    jacobian = torch.autograd.functional.jacobian(flow, state)
    assert (jacobian - torch.eye(10)).norm() > 1
    torch.testing.assert_close(
        torch.linalg.det(jacobian), torch.ones((), dtype=F64), rtol=1e-11, atol=0
    )


def test_volume_is_preserved_in_flat_space() -> None:
    system = MOTIONS["Gaussian"]()
    scale = system.site.scale

    def flow(state: Tensor) -> Tensor:
        position, velocity = state.unflatten(0, (2, 5, 2))
        end, speed = follow(system, scale * position, velocity, 2.0, 7)
        return torch.cat([(end / scale).flatten(), speed.flatten()])

    jacobian = torch.autograd.functional.jacobian(flow, normal(20, seed=4))
    torch.testing.assert_close(
        torch.linalg.det(jacobian), torch.ones((), dtype=F64), rtol=1e-11, atol=0
    )


@pytest.mark.parametrize(
    "site", [sf.Sphere(2), sf.Sphere(7, radius=3.0), sf.Gaussian(3, 0.5)], ids=repr
)
def test_free_motion_is_exact(site: sf.Sphere | sf.Gaussian) -> None:
    """Without forces one step is as good as many, and every path is accepted."""
    system = sf.SpinSystem(
        torch.zeros(4, 4, dtype=F64), torch.zeros(4, site.dim, dtype=F64), 1.0, site
    )
    start = motion(system, 5)
    for one, many in zip(
        follow(system, *start, 2.5, 1), follow(system, *start, 2.5, 50), strict=True
    ):
        torch.testing.assert_close(one, many, rtol=0, atol=1e-13)
    chains = Chains.start(system, 50, 0)
    kernel = Hamiltonian(step_size=1.0).start(chains)
    kernel.sweep(10)
    torch.testing.assert_close(
        kernel.report()["acceptance"], torch.ones(50, dtype=F64), rtol=0, atol=1e-12
    )


EXACT: dict[str, Callable[[], sf.SpinSystem]] = {
    "pair of O(2) in fields": lambda: sf.SpinSystem(
        torch.tensor([[0.0, 0.7], [0.7, 0.0]], dtype=F64), normal(2, 2, seed=5), 0.9, sf.Sphere(2)
    ),
    "pair of O(3) in fields": lambda: sf.SpinSystem(
        torch.tensor([[0.0, 0.7], [0.7, 0.0]], dtype=F64), normal(2, 3, seed=6), 0.9, sf.Sphere(3)
    ),
    "two pairs of O(5) in fields, at two temperatures": lambda: sf.SpinSystem(
        torch.tensor([[[0.0, -0.5], [-0.5, 0.0]], [[0.0, 1.5], [1.5, 0.0]]], dtype=F64),
        normal(2, 5, seed=7),
        torch.tensor([1.0, 0.5], dtype=F64),
        sf.Sphere(5),
    ),
    "frustrated ring of O(3)": lambda: sf.SpinSystem(
        sf.couplings.ring(3, strength=-1.0, dtype=F64),
        torch.zeros(3, 3, dtype=F64),
        0.8,
        sf.Sphere(3),
    ),
    "ring of O(8)": lambda: sf.SpinSystem(
        sf.couplings.ring(6, dtype=F64), torch.zeros(6, 8, dtype=F64), 1.0, sf.Sphere(8)
    ),
    "free O(3) in strong fields": lambda: sf.SpinSystem(
        torch.zeros(3, 3, dtype=F64), 10 * normal(3, 3, seed=8), 1.0, sf.Sphere(3, radius=2.0)
    ),
    "masked chains of O(4)": lambda: sf.SpinSystem(
        sf.couplings.chain(5, dtype=F64),
        torch.zeros(2, 5, 4, dtype=F64),
        0.7,
        sf.Sphere(4),
        mask=torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool),
    ),
    "Gaussian": lambda: sf.SpinSystem(
        symmetric(5, 0.5), normal(5, 3, seed=9), 0.5, sf.Gaussian(3, variance=0.8)
    ),
}


@pytest.mark.stochastic
@pytest.mark.parametrize("name", EXACT)
def test_exact_values(name: str) -> None:
    system = EXACT[name]()
    moment, pairs, energy = averages(Chains.start(system, 1500, 0), Hamiltonian())
    exact = sf.Exact().solve(system)
    present = (
        torch.ones(system.num_spins, dtype=torch.bool) if system.present is None else system.present
    )
    assert z_scores(moment, exact.magnetization)[..., present, :].max() < 4
    assert z_scores(energy, exact.internal_energy).max() < 4
    off = present[..., :, None] & present[..., None, :]
    if system.site.radius is not None:
        off = off & ~torch.eye(system.num_spins, dtype=torch.bool)
    assert z_scores(pairs, exact.correlations())[off.expand(pairs.shape[1:])].max() < 4
    if system.mask is not None:
        assert (moment[:, system.mask] == 0).all()


@pytest.mark.stochastic
def test_matrix_valued_couplings() -> None:
    """A coupling by a rotation is a scalar one, seen by a spin whose axes are turned."""
    rotation = torch.linalg.qr(normal(3, 3, seed=10)).Q
    field = normal(2, 3, seed=11)
    J = torch.zeros(2, 2, 3, 3, dtype=F64)
    J[0, 1], J[1, 0] = 0.8 * rotation, 0.8 * rotation.mT
    system = sf.SpinSystem(MatrixValued(J), field, 0.9, sf.Sphere(3))
    scalar = torch.tensor([[0.0, 0.8], [0.8, 0.0]], dtype=F64)
    turned = sf.SpinSystem(scalar, torch.stack([field[0], rotation @ field[1]]), 0.9, sf.Sphere(3))
    exact = sf.Exact().solve(turned)
    moment, _, energy = averages(Chains.start(system, 1500, 1), Hamiltonian())
    expected = torch.stack([exact.magnetization[0], rotation.mT @ exact.magnetization[1]])
    assert z_scores(moment, expected).max() < 4
    assert z_scores(energy, exact.internal_energy) < 4


@pytest.mark.stochastic
def test_matrix_valued_gaussian_spins() -> None:
    """m = (1 / v - beta J)^-1 beta h."""
    system = sf.SpinSystem(blocks(3, 2, 0.3), normal(3, 2, seed=12), 0.8, sf.Gaussian(2, 0.9))
    J = system.couplings.to_dense().transpose(-3, -2).reshape(6, 6)
    precision = torch.eye(6, dtype=F64) / 0.9 - 0.8 * J
    expected = torch.linalg.solve(precision, 0.8 * system.field.reshape(6)).reshape(3, 2)
    moment = averages(Chains.start(system, 1500, 2), Hamiltonian())[0]
    assert z_scores(moment, expected).max() < 4


@pytest.mark.stochastic
def test_beta_may_change_from_outside() -> None:
    field = 0.5 * normal(2, 3, seed=9)
    pair = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
    system = sf.SpinSystem(pair, field, 5.0, sf.Sphere(3))
    chains = Chains.start(system, 3000, 1)
    betas = torch.tensor([0.3, 0.9], dtype=F64)
    chains.beta.copy_(betas.repeat(1500))
    found = averages(chains, Hamiltonian())[0].unflatten(0, (1500, 2))
    exact = sf.Exact().solve(system.replace(field=field.expand(2, 2, 3), beta=betas))
    assert z_scores(found, exact.magnetization).max() < 4


@pytest.mark.stochastic
@pytest.mark.parametrize("first", [0.03, 2.0])
def test_step_size_adapts_to_the_system(first: float) -> None:
    """From a bad start to 0.8, in each system and chain by itself; given, it stays."""
    beta = torch.tensor([0.5, 4.0], dtype=F64)
    system = sf.SpinSystem(
        sf.couplings.square(4, dtype=F64), torch.zeros(16, 3, dtype=F64), beta, sf.Sphere(3)
    )
    chains = Chains.start(system, 8, 3)
    kernel = Hamiltonian().start(chains)
    kernel.restore(kernel.state() | {"step_size": torch.full((8, 2), first, dtype=F64)})
    for _ in range(30):
        kernel.sweep(8)
        kernel.adapt()
    kernel.reset_report()
    kernel.sweep(60)
    report = kernel.report()
    # The last gains are a tenth: a chain's step is known to a few percent, acceptances to 0.05.
    assert ((report["acceptance"] - 0.8).abs() < 0.15).all()
    assert ((report["acceptance"].mean(0) - 0.8).abs() < 0.06).all()
    assert (report["step_size"][:, 0] > 1.5 * report["step_size"][:, 1]).all()

    fixed = Hamiltonian(step_size=0.2).start(chains)
    fixed.sweep(3)
    fixed.adapt()
    assert (fixed.report()["step_size"] == 0.2).all()


def test_chain_of_a_batch_is_that_chain_alone() -> None:
    couplings, field = symmetric(4), normal(3, 4, 3)
    beta = torch.tensor([0.1, 0.7, 2.0], dtype=F64)
    many = Chains.start(sf.SpinSystem(couplings, field, beta, sf.Sphere(3)), 5, 4)
    one = sf.SpinSystem(couplings, field[1], 0.7, sf.Sphere(3))
    alone = Chains.start(one, 1, many.streams.keys[3, 1][None].clone())
    for chains in (many, alone):
        kernel = Hamiltonian().start(chains)
        for _ in range(5):
            kernel.sweep(4)
            kernel.adapt()
    # 20 paths; what is rounded differently grows by some powers of ten in a moving system.
    torch.testing.assert_close(alone.spins[0], many.spins[3, 1], rtol=0, atol=1e-8)


def test_resumed_run_is_the_same() -> None:
    system = sf.SpinSystem(symmetric(4), normal(4, 3), 0.7, sf.Sphere(3))
    chains = Chains.start(system, 5, 5)
    kernel = Hamiltonian().start(chains)
    kernel.sweep(3)
    kernel.adapt()
    kernel.sweep(2)
    streams = Streams(chains.streams.keys, chains.streams.position)
    resumed = Chains(system, chains.spins.clone(), streams)
    again = Hamiltonian().start(resumed)
    again.restore(kernel.state())
    for one in (kernel, again):
        one.sweep(3)
        one.adapt()
        one.sweep(3)
    assert torch.equal(chains.spins, resumed.spins)
    for name, value in kernel.report().items():
        assert torch.equal(value, again.report()[name])


def test_a_broken_system_stays_alone() -> None:
    field = normal(2, 4, 3)
    healthy = Chains.start(sf.SpinSystem(symmetric(4), field, 0.7, sf.Sphere(3)), 3, 6)
    field = field.clone()
    field[0, 2, 1] = torch.nan
    broken = Chains.start(
        sf.SpinSystem(symmetric(4), field, 0.7, sf.Sphere(3), check_finite=False), 3, 6
    )
    for chains in (healthy, broken):
        kernel = Hamiltonian().start(chains)
        for _ in range(4):
            kernel.sweep(5)
            kernel.adapt()
    torch.testing.assert_close(broken.spins[:, 1], healthy.spins[:, 1], rtol=0, atol=1e-9)
    report = kernel.report()
    assert (report["acceptance"][:, 0] == 0).all()
    # It does not ask for short steps either, for which all others would wait.
    assert (report["steps"][:, 0] < 10).all()


def test_a_system_without_spins_has_nothing_to_refuse() -> None:
    empty = sf.SpinSystem(torch.zeros(0, 0), torch.zeros(2, 0, 3), 1.0, sf.Sphere(3))
    kernel = Hamiltonian().start(Chains.start(empty, 3, 0))
    kernel.sweep(2)
    kernel.adapt()
    assert (kernel.report()["acceptance"] == 1).all()


def test_a_long_path_is_cut() -> None:
    """1024 steps at most: a chain of tiny steps takes them as they are, for a shorter time."""
    system = sf.SpinSystem(
        torch.zeros(1, 1, dtype=F64), torch.zeros(1, 2, dtype=F64), 1.0, sf.Sphere(2)
    )
    chains = Chains.start(system, 2, 7)
    before = chains.spins.clone()
    kernel = Hamiltonian(step_size=1e-6).start(chains)
    kernel.sweep()
    assert (kernel.report()["steps"] == 1024).all()
    assert 0 < float((chains.spins - before).norm(dim=-1).max()) < 1e-2


def test_refusals() -> None:
    field = torch.zeros(3, 1, dtype=F64)
    ising = sf.SpinSystem(torch.zeros(3, 3, dtype=F64), field, 1.0, sf.Ising())
    with pytest.raises(ValueError, match="Ising.*HeatBath"):
        Hamiltonian().start(Chains.start(ising, 2, 0))
    skew = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=F64)
    system = sf.SpinSystem(skew, torch.zeros(2, 2, dtype=F64), 1.0, sf.Sphere(2))
    with pytest.raises(ValueError, match="Hamiltonian needs symmetric"):
        Hamiltonian().start(Chains.start(system, 2, 0))
    for options in ({"path": 0.0}, {"path": math.inf}, {"step_size": -0.1}):
        with pytest.raises(ValueError, match="must be a positive finite number"):
            Hamiltonian(**options)
    with pytest.raises(TypeError, match="nearest is 'step_size'"):
        Hamiltonian(stepsize=0.1)  # type: ignore[call-arg]
