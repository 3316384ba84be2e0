"""Local moves: the exact law on solvable systems, chains that ignore each other, what is kept."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spinformer.equilibrium.exact import Exact
from spinformer.sampling.chains import Chains, Kernel, Move
from spinformer.sampling.local import HeatBath, Metropolis, OverRelaxation
from spinformer.spins.couplings import (
    Couplings,
    CurieWeiss,
    Dense,
    Lattice,
    LowRank,
    Masked,
    MatrixValued,
)
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.streams import Streams
from spinformer.spins.system import SpinSystem

CHAINS = 2000
MOVES: dict[str, Callable[[], Move]] = {
    "heat bath": HeatBath,
    "metropolis": Metropolis,
    "metropolis, fixed": lambda: Metropolis(0.7),
    "metropolis, uniform": lambda: Metropolis("uniform"),
}
every_move = pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def symmetric(n: int, seed: int = 0) -> Tensor:
    matrix = random(n, n, seed=seed) / math.sqrt(n)
    return (matrix + matrix.T) / 2


def settled(
    move: Move, system: SpinSystem, sweeps: int = 12, seed: int = 1, chains: int = CHAINS
) -> tuple[Chains, Kernel]:
    """Chains after so many sweeps with adaptation, and as many without."""
    found = Chains.start(system, chains, seed=seed)
    kernel = move.start(found)
    for _ in range(sweeps):
        kernel.sweep()
        kernel.adapt()
    kernel.reset_report()
    kernel.sweep(sweeps)
    return found, kernel


def z_scores(samples: Tensor, mean: Tensor) -> Tensor:
    """Of independent samples along the first axis, where they vary at all."""
    error = (samples.var(0) / len(samples)).sqrt()
    score = (samples.mean(0) - mean) / error
    return score[error > 1e-12].abs()


def check(samples: Chains, magnetization: Tensor, correlations: Tensor) -> None:
    """Means and products of all spins. Of a few hundred scores the largest is below 4 but for one
    seed in a hundred."""
    spins = samples.spins
    assert float(z_scores(spins, magnetization).max()) < 4
    products = torch.einsum("c...id,c...jd->c...ij", spins, spins)
    upper = torch.triu_indices(*products.shape[-2:], 1)
    some = products[..., upper[0], upper[1]]
    assert float(z_scores(some, correlations[..., upper[0], upper[1]]).max()) < 4


# --- the law ------------------------------------------------------------------------------------


@pytest.mark.stochastic
@every_move
@pytest.mark.parametrize("dim", [2, 3, 5, 16])
def test_two_spheres_in_fields(move: Callable[[], Move], dim: int) -> None:
    coupling = torch.tensor([[[0.0, 0.9], [0.9, 0.0]], [[0.0, -0.6], [-0.6, 0.0]]]).double()
    fields = random(2, 2, dim) / 2
    system = SpinSystem(coupling, fields, 0.8, Sphere(dim, radius=1.5))
    exact = Exact().solve(system)
    # A free proposal leaves the best aligned state, kappa = 4, with a probability of e^-4 or so.
    chosen = move()
    patient = isinstance(chosen, Metropolis) and chosen.cap == "uniform"
    samples, _ = settled(chosen, system, sweeps=80 if patient else 20)
    check(samples, exact.magnetization, exact.correlations())


@pytest.mark.stochastic
@pytest.mark.parametrize("move", [HeatBath, Metropolis])
def test_ising_on_all_kinds_of_couplings(move: type[Move]) -> None:
    """Against enumeration: 9 or 8 spins in random fields, three systems at once."""
    mask = torch.rand(3, 9, generator=torch.Generator().manual_seed(3)) < 0.3
    strength = torch.tensor([0.3, 0.5, -0.4], dtype=torch.float64)
    kinds: list[tuple[Couplings, Tensor | None]] = [
        (Dense(symmetric(9)), None),
        (Dense(symmetric(9)), mask),
        (Lattice((3, 3), True, strength), None),
        (Lattice((3, 3), (True, False), strength), mask),
        (Lattice((2, 4), (False, True), strength), None),
        (Lattice((2, 4), (False, True), strength), mask[:, :8]),
        (LowRank(random(9, 2) / 2, weights=torch.tensor([0.7, -0.9]).double()), None),
        (CurieWeiss(9, strength), mask),
        (Masked(CurieWeiss(9, strength), mask), None),
    ]
    for number, (couplings, absent) in enumerate(kinds):
        fields = 0.5 * random(3, couplings.num_spins, 1, seed=9)
        beta = torch.tensor([0.5, 0.8, 1.1], dtype=torch.float64)
        system = SpinSystem(couplings, fields, beta, Ising(), mask=absent)
        exact = Exact().solve(system)
        samples, _ = settled(move(), system, seed=number)
        check(samples, exact.magnetization, exact.correlations())
        if absent is not None:
            assert float(samples.spins[:, absent].abs().max()) == 0


@pytest.mark.stochastic
@every_move
def test_gaussian_spins(move: Callable[[], Move]) -> None:
    # Weak forces: free proposals hardly ever follow a spin into the tails of a strong one.
    system = SpinSystem(symmetric(5) / 2, random(5, 2) / 4, 0.9, Gaussian(2, variance=0.6))
    exact = Exact().solve(system)
    samples, _ = settled(move(), system, sweeps=30)
    check(samples, exact.magnetization, exact.correlations())


@pytest.mark.stochastic
@pytest.mark.parametrize("move", [HeatBath, Metropolis])
def test_matrix_valued_couplings(move: type[Move]) -> None:
    """J_12 = K O_1^T O_2 with rotations O is a scalar K between the spins O_i S_i in the fields
    O_i h_i, whose law is a quadrature."""
    rotations = torch.linalg.qr(random(2, 3, 3)).Q
    fields = random(2, 3, seed=1)
    block = 0.9 * rotations[0].T @ rotations[1]
    blocks = torch.zeros(2, 2, 3, 3, dtype=torch.float64)
    blocks[0, 1], blocks[1, 0] = block, block.T
    system = SpinSystem(MatrixValued(blocks), fields, site=Sphere(3))
    turned = torch.einsum("iab,ib->ia", rotations, fields)
    plain = SpinSystem(torch.tensor([[0, 0.9], [0.9, 0]]).double(), turned, site=Sphere(3))
    exact = Exact().solve(plain)
    samples, _ = settled(move(), system)
    samples.spins = torch.einsum("iab,cib->cia", rotations, samples.spins)
    check(samples, exact.magnetization, exact.correlations())


@pytest.mark.stochastic
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ring_of_spheres(dtype) -> None:
    """By colours, three of them; 5 spins of 3 components without a field."""
    system = SpinSystem(
        Lattice((5,), True, 0.8, dtype=dtype), torch.zeros(5, 3, dtype=dtype), site=Sphere(3, 1.0)
    )
    exact = Exact().solve(system)
    samples, _ = settled(HeatBath(), system)
    check(samples, exact.magnetization, exact.correlations())
    assert samples.spins.dtype == dtype


@pytest.mark.stochastic
def test_over_relaxation_with_a_heat_bath() -> None:
    """After every reflection of both spins, one of them is drawn anew: the law stays."""
    coupling = torch.tensor([[0.0, 0.9], [0.9, 0.0]]).double()
    system = SpinSystem(coupling, random(2, 4) / 2, site=Sphere(4))
    exact = Exact().solve(system)
    samples = Chains.start(system, CHAINS, seed=0)
    bath, reflections = HeatBath().start(samples), OverRelaxation().start(samples)
    for _ in range(20):
        bath.sweep()
        reflections.sweep(3)
    check(samples, exact.magnetization, exact.correlations())


@pytest.mark.stochastic
def test_a_beta_for_each_chain() -> None:
    """Uncoupled spins of one system at many temperatures, which others have set."""
    for site in (Ising(), Sphere(3, 1.0), LargeDSphere(8, 1.0), Gaussian(2)):
        law = Sphere(8, 1.0) if isinstance(site, LargeDSphere) else site
        field = torch.zeros(400, site.dim, dtype=torch.float64)
        field[:, 0] = 1
        for move in (HeatBath(), Metropolis()):
            lattice = Lattice((400,), False, 0.0, dtype=torch.float64)
            samples = Chains.start(SpinSystem(lattice, field, site=site), 5, seed=0)
            samples.beta = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
            kernel = move.start(samples)
            for _ in range(20):
                kernel.sweep()
                kernel.adapt()
            samples.beta = samples.beta.flip(0)
            kernel.sweep(30)
            b = samples.beta[:, None, None] * field[0]
            scores = z_scores(samples.spins.transpose(0, 1), law.mean(b)[:, 0])
            assert float(scores.max()) < 4


# --- chains do not see each other ---------------------------------------------------------------


def many_kinds() -> dict[str, SpinSystem]:
    """Batches of systems (3,) that differ in everything that may."""
    beta = torch.tensor([0.5, 0.8, 1.1], dtype=torch.float64)
    mask = torch.rand(3, 8, generator=torch.Generator().manual_seed(3)) < 0.3
    strength = torch.tensor([0.3, 0.5, 0.4], dtype=torch.float64)
    dense = torch.stack([symmetric(8, seed) for seed in range(3)])
    blocks = random(8, 8, 3, 3) / 8
    blocks = (blocks + blocks.permute(1, 0, 3, 2)) / 2
    uniform = torch.tensor([0.1, 0.0, -0.2]).double()[:, None, None].expand(3, 8, 1)
    square = Lattice((2, 4), (False, True), strength)

    def system(couplings: Couplings, site: SiteLaw, absent: Tensor | None = None) -> SpinSystem:
        return SpinSystem(couplings, random(3, 8, site.dim), beta, site, mask=absent)

    return {
        "dense, ising": system(Dense(dense), Ising()),
        "dense, circle": system(Dense(dense[0]), Sphere(2), mask),
        "matrices": system(MatrixValued(blocks), Sphere(3)),
        "low rank": system(LowRank(random(3, 8, 2) / 3), Sphere(7)),
        "lattice, sphere": system(square, Sphere(3), mask),
        "lattice, gaussian": system(Lattice((2, 4), (False, True), strength / 4), Gaussian(2)),
        "bytes": SpinSystem(square, uniform, beta, Ising()),
        "bytes, masked": SpinSystem(square, random(3, 8, 1), beta, Ising(), mask=mask),
    }


def one_of(system: SpinSystem, index: int) -> SpinSystem:
    """A system of the batch, alone."""
    couplings = system.couplings
    inner = couplings.couplings if isinstance(couplings, Masked) else couplings
    if isinstance(inner, Dense):  # with its mask inside
        return system.replace(
            couplings=inner.to_dense().expand(3, 8, 8)[index],
            field=system.field[index],
            beta=system.beta[index],
            mask=None if system.mask is None else system.mask[index],
        )
    tensors = (t[index] if inner.batch_shape else t for t in inner.tensors())
    mask = None if system.mask is None else system.mask[index]
    return SpinSystem(
        inner.with_tensors(*tensors),
        system.field[index],
        system.beta[index],
        system.site,
        mask=mask,
    )


@pytest.mark.parametrize("name", many_kinds())
@pytest.mark.parametrize("move", ["heat bath", "metropolis", "over-relaxation"])
def test_a_chain_of_a_batch_is_that_chain_alone(name: str, move: str) -> None:
    """Its numbers are the same; products of other shapes may round otherwise, by 1e-15 at first,
    which 10 sweeps of these small, warm systems do not blow up beyond 1e-9."""
    system = many_kinds()[name]
    if move == "over-relaxation" and isinstance(system.site, Ising | Gaussian):
        return
    chosen = {**MOVES, "over-relaxation": OverRelaxation}[move]
    batch = Chains.start(system, 4, seed=5)
    keys = batch.streams.keys[2, 1]
    alone = Chains.start(one_of(system, 1), 1, seed=keys[None])
    torch.testing.assert_close(alone.spins[0], batch.spins[2, 1], rtol=0, atol=1e-15)
    for chains in (batch, alone):
        kernel = chosen().start(chains)
        for _ in range(5):
            kernel.sweep(2)
            kernel.adapt()
    torch.testing.assert_close(alone.spins[0], batch.spins[2, 1], rtol=0, atol=1e-9)
    assert alone.streams.position == batch.streams.position


@pytest.mark.parametrize("name", many_kinds())
@pytest.mark.parametrize("move", [HeatBath, Metropolis])
def test_a_broken_system_is_alone_with_it(name: str, move: type[Move]) -> None:
    """It turns into NaN, and its neighbours do not notice."""
    system = many_kinds()[name]
    field = system.field.clone()
    field[1] = torch.nan
    broken = system.replace(field=field, check_finite=False)
    runs = [Chains.start(s, 2, seed=5) for s in (system, broken)]
    for chains in runs:
        move().start(chains).sweep(4)
    others = torch.tensor([0, 2])
    assert torch.equal(runs[0].spins[:, others], runs[1].spins[:, others])
    there = torch.ones(8, dtype=torch.bool) if system.mask is None else ~system.mask[1]
    assert bool(runs[1].spins[:, 1, there].isnan().all())
    assert bool((runs[1].spins[:, 1, ~there] == 0).all())


@pytest.mark.parametrize("move", [HeatBath, Metropolis])
@pytest.mark.parametrize("bad", ["couplings", "beta"])
def test_other_ways_to_be_broken(move: type[Move], bad: str) -> None:
    matrices = torch.stack([symmetric(6, seed) for seed in range(2)])
    beta = torch.ones(2, dtype=torch.float64)
    fields = random(2, 6, 3)
    sound = SpinSystem(matrices, fields, beta, Sphere(3))
    if bad == "couplings":
        matrices = matrices.clone()
        matrices[1, 2, 3] = matrices[1, 3, 2] = torch.inf
    else:
        beta = torch.tensor([1.0, torch.nan], dtype=torch.float64)
    broken = SpinSystem(matrices, fields, beta, Sphere(3), check_finite=False)
    runs = [Chains.start(s, 2, seed=5) for s in (sound, broken)]
    for chains in runs:
        move().start(chains).sweep(4)
    assert torch.equal(runs[0].spins[:, 0], runs[1].spins[:, 0])
    assert bool(runs[1].spins[:, 1].isnan().any(-1).any(-1).all())


# --- what is kept -------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_over_relaxation_keeps_the_energy(dim: int, dtype) -> None:
    """To the rounding of 20 reflections of 64 spins, each of which errs by a few units of the last
    place of the energy of a spin, up or down."""
    system = SpinSystem(
        Lattice((4, 4, 4), True, 1.0, dtype=dtype), random(64, dim).to(dtype), site=Sphere(dim)
    )
    chains = Chains.start(system, 4, seed=0)
    before, spins = chains.energy(), chains.spins.clone()
    kernel = OverRelaxation().start(chains)
    position = chains.streams.position
    kernel.sweep(20)
    scale = 10 * dim * math.sqrt(20 * 64) * torch.finfo(dtype).eps
    assert float((chains.energy() - before).abs().max()) < 4 * scale
    assert float((chains.spins - spins).norm(dim=-1).mean()) > 0.5 * math.sqrt(dim)
    lengths = chains.spins.norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, math.sqrt(dim)))
    assert chains.streams.position == position
    assert kernel.report() == {}


def test_over_relaxation_is_its_own_inverse() -> None:
    """Of one spin; and without a force it goes to the other side."""
    fields = random(6, 1, 3)
    fields[0] = 0
    system = SpinSystem(torch.zeros(1, 1).double(), fields, site=Sphere(3))
    chains = Chains.start(system, 2, seed=0)
    spins = chains.spins.clone()
    kernel = OverRelaxation().start(chains)
    kernel.sweep()
    torch.testing.assert_close(chains.spins[:, 0], -spins[:, 0])
    along = (fields * spins).sum(-1)
    torch.testing.assert_close((fields * chains.spins).sum(-1), along, rtol=1e-13, atol=1e-14)
    kernel.sweep()
    torch.testing.assert_close(chains.spins, spins, rtol=0, atol=1e-14)


def test_absent_spins_stay_away() -> None:
    mask = torch.rand(3, 8, generator=torch.Generator().manual_seed(3)) < 0.3
    fields = random(3, 8, 3)
    fields[mask] = torch.nan
    for couplings in (Dense(symmetric(8)), Lattice((8,), True, dtype=torch.float64)):
        system = SpinSystem(couplings, fields, site=Sphere(3), mask=mask)
        for move in (HeatBath(), Metropolis(), OverRelaxation()):
            chains = Chains.start(system, 2, seed=0)
            kernel = move.start(chains)
            kernel.sweep(5)
            assert float(chains.spins[:, mask].abs().max()) == 0
            assert bool(chains.spins.isfinite().all())
            if "acceptance" in kernel.report():
                assert float(kernel.report()["acceptance"].max()) <= 1


# --- acceptance and adaptation ------------------------------------------------------------------


@pytest.mark.stochastic
def test_acceptance_of_a_flip() -> None:
    """A lone spin is up with (1 + m) / 2, and then goes down with exp(-2 b): 1 - |m| in all."""
    b = 0.6
    field = torch.full((1000, 1), b, dtype=torch.float64)
    system = SpinSystem(Lattice((1000,), False, 0.0, dtype=torch.float64), field, site=Ising())
    _, kernel = settled(Metropolis(), system, chains=100)
    rate = kernel.report()["acceptance"]
    error = float(rate.std()) / math.sqrt(100)
    assert abs(float(rate.mean()) - (1 - math.tanh(b))) / error < 4
    assert set(kernel.report()) == {"acceptance"}


def test_caps_adapt_chain_by_chain() -> None:
    """To a rate of one half: 200 proposals a sweep scatter it by 0.035 in the last lessons."""
    system = SpinSystem(
        Lattice((200,), True, 1.0, dtype=torch.float64),
        torch.zeros(200, 3).double(),
        site=Sphere(3),
    )
    chains = Chains.start(system, 3, seed=0)
    chains.beta = torch.tensor([1.0, 20.0, 500.0], dtype=torch.float64)
    kernel = Metropolis().start(chains)
    for _ in range(80):
        kernel.sweep()
        kernel.adapt()
    kernel.reset_report()
    kernel.sweep(20)
    report = kernel.report()
    assert float((report["acceptance"] - 0.5).abs().max()) < 0.1
    widths = report["cap"].tolist()
    # The thermal angle goes as 1 / sqrt(beta).
    assert widths[1] / widths[2] == pytest.approx(5, rel=0.3)
    assert widths[0] > 3 * widths[1]
    fixed = Metropolis(0.7).start(chains)
    fixed.sweep()
    fixed.adapt()
    assert set(fixed.report()) == {"acceptance"}
    assert fixed.state()["cap"].tolist() == [0.7] * 3


@pytest.mark.parametrize("name", many_kinds())
@every_move
def test_resumed_runs_are_the_same(move: Callable[[], Move], name: str) -> None:
    system = many_kinds()[name]
    if isinstance(system.site, Ising) and move not in (HeatBath, Metropolis):
        return
    chains = Chains.start(system, 2, seed=0)
    kernel = move().start(chains)
    for _ in range(3):
        kernel.sweep()
        kernel.adapt()
    kernel.sweep()
    streams = Streams(chains.streams.keys.clone(), chains.streams.position)
    resumed = Chains(system, chains.spins.clone(), streams)
    again = move().start(resumed)
    again.restore({name: value.clone() for name, value in kernel.state().items()})
    for each in (kernel, again):
        each.adapt()
        each.sweep(3)
    assert torch.equal(chains.spins, resumed.spins)
    for name, value in kernel.report().items():
        assert torch.equal(value, again.report()[name])


def test_sweeps_add_up() -> None:
    """Five sweeps at once are five sweeps."""
    for name, system in many_kinds().items():
        runs = [Chains.start(system, 2, seed=0) for _ in range(2)]
        kernels = [HeatBath().start(chains) for chains in runs]
        kernels[0].sweep(5)
        for _ in range(5):
            kernels[1].sweep()
        assert torch.equal(runs[0].spins, runs[1].spins), name


def test_no_spins() -> None:
    for site in (Ising(), Sphere(3)):
        for sites, chains in ((0, 2), (3, 0)):
            system = SpinSystem(torch.zeros(sites, sites), torch.zeros(sites, site.dim), site=site)
            samples = Chains.start(system, chains, seed=0)
            for move in (HeatBath(), Metropolis()):
                kernel = move.start(samples)
                kernel.sweep()
                kernel.adapt()
                assert samples.spins.shape == (chains, sites, site.dim)


# --- refusals -----------------------------------------------------------------------------------


def test_refusals() -> None:
    def chains(site: SiteLaw, matrix: Tensor | None = None) -> Chains:
        matrix = symmetric(4) if matrix is None else matrix
        return Chains.start(SpinSystem(matrix, random(4, site.dim), site=site), 1, seed=0)

    for site in (Ising(), Gaussian(3)):
        with pytest.raises(ValueError, match="use HeatBath"):
            OverRelaxation().start(chains(site))
    for move in (HeatBath(), Metropolis(), OverRelaxation()):
        with pytest.raises(ValueError, match="needs symmetric couplings"):
            move.start(chains(Sphere(3), random(4, 4)))
    for cap in (0.3, "uniform"):
        with pytest.raises(ValueError, match="leave cap=None"):
            Metropolis(cap).start(chains(Ising()))
    for cap in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="give a positive number"):
            Metropolis(cap)
    with pytest.raises(ValueError, match="nearest is 'uniform'"):
        Metropolis("uniformly")
    with pytest.raises(TypeError, match="no option 'caps'; the nearest is 'cap'"):
        Metropolis(caps=1)
    assert repr(Metropolis(0.5)) == "Metropolis(cap=0.5)"
    assert repr(HeatBath()) == "HeatBath()" and repr(OverRelaxation()) == "OverRelaxation()"
