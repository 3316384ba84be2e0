"""Cluster moves: exact laws with and without fields, the improved estimator, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import spinformer as sf
from spinformer.sampling import cluster
from spinformer.sampling.chains import Chains, Move
from spinformer.sampling.cluster import SwendsenWang, Wolff
from spinformer.spins.couplings import CurieWeiss, Dense, Lattice, MatrixValued

F64 = torch.float64
CRITICAL = math.log(1 + math.sqrt(2)) / 2
moves = pytest.mark.parametrize(
    "move", [SwendsenWang(), Wolff(), Wolff(1)], ids=["swendsen-wang", "wolff", "wolff-1"]
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def symmetric(n: int, seed: int = 0) -> Tensor:
    """Ferromagnetic couplings of all strengths, some of them missing."""
    J = normal(n, n, seed=seed).clamp(min=0)
    return (J + J.mT) / 2


def z_scores(samples: Tensor, exact: Tensor) -> Tensor:
    """How far the mean over independent chains (the first axis) is off, in its own errors."""
    error = samples.std(0) / len(samples) ** 0.5
    off = (samples.mean(0) - exact).abs()
    # What is the same in all chains, as |S|^2, has to be exact to rounding.
    return torch.where(error > 1e-12, off / error.clamp(min=1e-300), off * 1e9)


def averages(chains: Chains, move: Move, sweeps: int = 24, warmup: int = 16) -> dict[str, Tensor]:
    """Averages over time of every chain: independent of those of the other chains."""
    kernel = move.start(chains)
    for _ in range(4):
        kernel.sweep(warmup // 4)
        kernel.adapt()
    kernel.reset_report()
    totals: dict[str, Tensor] = {}
    for _ in range(sweeps):
        kernel.sweep()
        now = {
            "magnetization": chains.spins.clone(),
            "correlations": chains.spins @ chains.spins.mT,
            "energy": chains.energy(),
        }
        totals = {name: totals.get(name, 0.0) + value for name, value in now.items()}
    return {name: total / sweeps for name, total in totals.items()} | kernel.report()


def check_against_exact(system: sf.SpinSystem, move: Move, seed: int = 0) -> None:
    """Magnetizations, correlations, energy and squared moment of 1000 chains from random spins."""
    chains = Chains.start(system, 1000, seed)
    # A reflection changes one of D components: random spins are forgotten that much later.
    found = averages(chains, move, warmup=20 * system.dim)
    exact = sf.Exact().solve(system)
    correlations = exact.correlations(method="coupling")
    if system.present is not None:
        # The diagonal is that of the spins that are there.
        square = torch.diag_embed(system.present * float(system.site.radius or 0) ** 2)
        correlations = correlations.diagonal_scatter(
            square.diagonal(dim1=-2, dim2=-1), dim1=-2, dim2=-1
        )
    moment = correlations.sum((-2, -1)) / system.num_present
    for name, value in (
        ("magnetization", exact.magnetization),
        ("correlations", correlations),
        ("energy", exact.internal_energy),
        ("squared_moment", moment),
    ):
        worst = float(z_scores(found[name], value).max())
        assert worst < 4, f"{name}: z = {worst:.2f}"


SYSTEMS: dict[str, Callable[[], sf.SpinSystem]] = {
    "dense Ising": lambda: sf.SpinSystem(
        symmetric(6), torch.zeros(6, 1, dtype=F64), 0.9, sf.Ising()
    ),
    "dense Ising, a field at every site": lambda: sf.SpinSystem(
        symmetric(6), 0.7 * normal(6, 1, seed=2), 0.8, sf.Ising()
    ),
    "uniform field": lambda: sf.SpinSystem(
        Lattice((2, 4), periodic=False, strength=0.5, dtype=F64),
        torch.full((8, 1), 0.2, dtype=F64),
        1.0,
        sf.Ising(),
    ),
    "periodic lattice": lambda: sf.SpinSystem(
        sf.couplings.square(3, dtype=F64), torch.zeros(9, 1, dtype=F64), 0.35, sf.Ising()
    ),
    "antiferromagnet in a staggered field": lambda: sf.SpinSystem(
        Lattice((4,), strength=-0.8, dtype=F64),
        torch.tensor([[0.4], [-0.1], [0.0], [-0.6]], dtype=F64),
        1.0,
        sf.Ising(),
    ),
    "Curie-Weiss": lambda: sf.SpinSystem(
        CurieWeiss(7, dtype=F64), 0.1 * normal(7, 1, seed=3), 1.3, sf.Ising()
    ),
    "masked lattices": lambda: sf.SpinSystem(
        Lattice((2, 3), periodic=False, dtype=F64),
        0.5 * normal(2, 6, 1, seed=4),
        torch.tensor([0.4, 0.7], dtype=F64),
        sf.Ising(),
        mask=torch.tensor([[0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]], dtype=torch.bool),
    ),
    "ring of O(3)": lambda: sf.SpinSystem(
        sf.couplings.ring(5, dtype=F64), torch.zeros(5, 3, dtype=F64), 1.5, sf.Sphere(3, radius=1.0)
    ),
    "antiferromagnetic chain of O(2)": lambda: sf.SpinSystem(
        sf.couplings.chain(4, strength=-1.0, dtype=F64),
        torch.zeros(4, 2, dtype=F64),
        0.8,
        sf.Sphere(2),
    ),
    "chain of O(8)": lambda: sf.SpinSystem(
        sf.couplings.chain(3, dtype=F64), torch.zeros(3, 8, dtype=F64), 1.2, sf.Sphere(8)
    ),
    "pair of O(2) in fields": lambda: sf.SpinSystem(
        Dense(torch.tensor([[0.0, 0.7], [0.7, 0.0]], dtype=F64)),
        normal(2, 2, seed=5),
        0.9,
        sf.Sphere(2),
    ),
    "pair of O(3) in fields": lambda: sf.SpinSystem(
        torch.tensor([[0.0, 0.7], [0.7, 0.0]], dtype=F64), normal(2, 3, seed=6), 0.9, sf.Sphere(3)
    ),
    "opposed pairs of O(5) in fields": lambda: sf.SpinSystem(
        torch.tensor([[[0.0, -0.5], [-0.5, 0.0]], [[0.0, 1.5], [1.5, 0.0]]], dtype=F64),
        normal(2, 5, seed=7),
        torch.tensor([1.0, 0.5], dtype=F64),
        sf.Sphere(5),
    ),
    "free O(3) in fields": lambda: sf.SpinSystem(
        torch.zeros(3, 3, dtype=F64), normal(3, 3, seed=8), 1.0, sf.Sphere(3, radius=2.0)
    ),
}


@pytest.mark.stochastic
@moves
@pytest.mark.parametrize("name", SYSTEMS)
def test_exact_values(name: str, move: Move) -> None:
    check_against_exact(SYSTEMS[name](), move)


@pytest.mark.stochastic
@moves
@pytest.mark.parametrize("field", [0.0, 0.4])
def test_frustrated_couplings_when_asked_for(move: Move, field: float) -> None:
    """The antiferromagnetic triangle: bonds of both signs in one cluster, and a field on top."""
    system = sf.SpinSystem(
        sf.couplings.ring(3, strength=-1.0, dtype=F64),
        torch.full((3, 1), field, dtype=F64),
        0.7,
        sf.Ising(),
    )
    with pytest.raises(ValueError, match="frustrated.*HeatBath.*ParallelTempering"):
        move.start(Chains.start(system, 2, 0))
    clusters = {} if isinstance(move, SwendsenWang) else {"clusters": move.clusters}
    check_against_exact(system, type(move)(**clusters, frustrated="allow"))


@pytest.mark.stochastic
@moves
@pytest.mark.parametrize("dim", [1, 3])
def test_beta_may_change_from_outside(move: Move, dim: int) -> None:
    """Chains of one system at two temperatures that are not the system's."""
    site = sf.Ising() if dim == 1 else sf.Sphere(3)
    field = 0.5 * normal(2, dim, seed=9)
    pair = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
    system = sf.SpinSystem(pair, field, 5.0, site)
    chains = Chains.start(system, 3000, 1)
    betas = torch.tensor([0.3, 0.9], dtype=F64)
    chains.beta.copy_(betas.repeat(1500))
    found = averages(chains, move)["magnetization"].unflatten(0, (1500, 2))
    exact = sf.Exact().solve(system.replace(field=field.expand(2, 2, dim), beta=betas))
    assert z_scores(found, exact.magnetization).max() < 4


@pytest.mark.stochastic
@pytest.mark.parametrize("move", [SwendsenWang(), Wolff(2)], ids=["swendsen-wang", "wolff"])
def test_detailed_balance(move: Move) -> None:
    """From Boltzmann's law one sweep goes as often from state s to t as from t to s."""
    n, count = 3, 200_000
    states = 1 - 2 * torch.stack([torch.arange(2**n) >> i & 1 for i in range(n)], -1).to(F64)
    system = sf.SpinSystem(symmetric(n, 1), 0.6 * normal(n, 1, seed=1), 0.8, sf.Ising())
    weights = torch.softmax(-0.8 * system.energy(states[..., None]), 0)
    draw = torch.multinomial(weights, count, True, generator=torch.Generator().manual_seed(3))
    chains = Chains.start(system, count, 4, states[draw][..., None])
    move.start(chains).sweep()
    powers = 2 ** torch.arange(n)
    arrived = ((1 - chains.spins[..., 0]) / 2).long() @ powers
    flow = torch.bincount(draw * 2**n + arrived, minlength=4**n).reshape(2**n, 2**n).to(F64)
    total = flow + flow.T
    z = (flow - flow.T) / total.clamp(min=1).sqrt()
    assert z.abs().max() < 4
    # It is about something: nearly all pairs of states are joined by a sweep.
    assert (total > 100).double().mean() > 0.8


@pytest.mark.stochastic
@moves
def test_mean_cluster_is_the_susceptibility(move: Move) -> None:
    """<|C|> = chi / beta of Ising spins, from clusters, from moments, and from enumeration."""
    system = sf.SpinSystem(symmetric(6), torch.zeros(6, 1, dtype=F64), 0.9, sf.Ising())
    chains = Chains.start(system, 1500, 5)
    found = averages(chains, move)
    susceptibility = sf.Exact().solve(system).susceptibility().sum() / 6
    assert z_scores(found["cluster_size"], susceptibility / 0.9) < 4
    torch.testing.assert_close(found["cluster_size"], found["squared_moment"], rtol=1e-12, atol=0)
    # Improved: it knows the mean over the signs of clusters, of which a direct measurement sees
    # one choice a sweep; 1500 chains know the ratio to 0.03.
    direct = found["correlations"].sum((-2, -1)) / 6
    assert z_scores(direct, susceptibility / 0.9) < 4
    assert found["squared_moment"].std() < 0.95 * direct.std()


@pytest.mark.stochastic
def test_kaufman_torus() -> None:
    """The energy of the critical 16 x 16 Ising torus, u = -1.453064852813477 (Kaufman 1949)."""
    system = sf.SpinSystem(
        sf.couplings.square(16, dtype=F64), torch.zeros(256, 1, dtype=F64), CRITICAL, sf.Ising()
    )
    chains = Chains.start(system, 64, 6)
    kernel = SwendsenWang().start(chains)
    kernel.sweep(60)
    energy = torch.zeros(64, dtype=F64)
    for _ in range(100):
        kernel.sweep()
        energy += chains.energy() / 256 / 100
    assert z_scores(energy, torch.tensor(-1.453064852813477, dtype=F64)) < 4


@pytest.mark.stochastic
def test_critical_slowing_down_is_gone() -> None:
    """L = 32 at K_c: the squared moment forgets in a few sweeps, and hundreds of local ones.

    Integrated autocorrelation times, summed up to 60 sweeps: for the local move a lower bound, as
    it remembers for longer than that.
    """
    length, num_chains, window = 32, 24, 60
    system = sf.SpinSystem(
        sf.couplings.square(length), torch.zeros(length**2, 1), CRITICAL, sf.Ising()
    )
    chains = Chains.start(system, num_chains, 7)
    kernel = SwendsenWang().start(chains)
    kernel.sweep(60)
    colour = torch.arange(length)[:, None].add(torch.arange(length)).remainder(2).flatten() == 0

    def local() -> None:
        for part in (colour, ~colour):
            drawn = system.site.sample(CRITICAL * chains.force(), chains.streams)
            chains.spins.copy_(torch.where(part[:, None], drawn, chains.spins))

    def time(sweep: Callable[[], None]) -> float:
        series = []
        for _ in range(5 * window):
            sweep()
            series.append(chains.spins.sum((-2, -1)).double().square())
        moment = torch.stack(series)
        moment -= moment.mean()  # over all chains: that of one would take its slow part away
        variance = moment.square().mean()
        lagged = [(moment[:-lag] * moment[lag:]).mean() for lag in range(1, window)]
        return float(0.5 + torch.stack(lagged).sum() / variance)

    cluster_time, local_time = time(kernel.sweep), time(local)
    assert cluster_time < 10
    assert local_time > 5 * cluster_time


@moves
def test_chain_of_a_batch_is_that_chain_alone(move: Move, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same spins from the same key: whatever the neighbours, and however chains are blocked."""
    # Systems of different strengths, absent sites and missing bonds, and one without a field.
    strength = torch.tensor([0.3, 0.5, 0.9], dtype=F64)
    dense = torch.stack([symmetric(9, seed) for seed in range(3)])
    field = 0.3 * normal(3, 9, 1, seed=10)
    field[1] = 0
    mask = torch.zeros(3, 9, dtype=torch.bool)
    mask[1, 2:4] = True

    def run(chains: Chains) -> Tensor:
        kernel = move.start(chains)
        for _ in range(3):
            kernel.sweep(5)
            kernel.adapt()
        return chains.spins

    for site, stored in ((sf.Ising(), False), (sf.Ising(), True), (sf.Sphere(3), False)):
        fields = field.expand(3, 9, site.dim)
        system = sf.SpinSystem(
            dense if stored else Lattice((3, 3), strength=strength), fields, 1.0, site, mask=mask
        )
        many = Chains.start(system, 4, 11)
        start, keys = many.spins.clone(), many.streams.keys.clone()
        whole = run(many)
        with monkeypatch.context() as patch:
            patch.setattr(cluster, "_BLOCK", 5 * 36)
            torch.testing.assert_close(run(Chains.start(system, 4, 11)), whole, rtol=0, atol=1e-12)
        for c, i in ((2, 1), (0, 2)):
            one = sf.SpinSystem(
                dense[i] if stored else Lattice((3, 3), strength=strength[i]),
                fields[i],
                1.0,
                site,
                mask=mask[i],
            )
            alone = Chains.start(one, 1, keys[c, i][None])
            assert torch.equal(alone.spins[0], start[c, i])
            torch.testing.assert_close(run(alone)[0], whole[c, i], rtol=0, atol=1e-12)
            assert not torch.equal(whole[c, i], start[c, i])


@moves
def test_absent_and_broken_stay_apart(move: Move) -> None:
    """An absent site stays zero and breaks the bond through it; NaN stays in its own system."""
    field = torch.zeros(2, 5, 3, dtype=F64)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[:, 2] = True
    healthy = sf.SpinSystem(
        Lattice((5,), periodic=False, dtype=F64), field, 50.0, sf.Sphere(3), mask=mask
    )
    field = field.clone()
    field[0, 0, 0] = torch.nan
    broken = sf.SpinSystem(
        Lattice((5,), periodic=False, dtype=F64),
        field,
        50.0,
        sf.Sphere(3),
        mask=mask,
        check_finite=False,
    )
    results = []
    for system in (healthy, broken):
        chains = Chains.start(system, 6, 12, torch.tensor([0.0, 0.0, math.sqrt(3.0)], dtype=F64))
        kernel = move.start(chains)
        kernel.sweep(20)
        results.append((chains.spins, kernel.report()))
    (spins, report), (other, other_report) = results
    assert (spins[..., 2, :] == 0).all()
    # So cold that bonds are certain nearly always: two clusters of two, each a random one's.
    torch.testing.assert_close(
        report["cluster_size"], torch.full((6, 2), 2.0, dtype=F64), rtol=0.2, atol=0
    )
    # The system with a field nowhere else is the same with and without its broken neighbour.
    assert bool(other[:, 1].isfinite().all())
    assert bool(other_report["cluster_size"][:, 1].isfinite().all())


@moves
def test_the_ghost_holds(move: Move) -> None:
    """A field that no spin resists: nothing turns. None: Wolff's clusters always do."""
    pair = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
    for h, share in ((1e4, 0.0), (0.0, None)):
        field = torch.full((2, 1), h, dtype=F64)
        system = sf.SpinSystem(pair, field, 1e3, sf.Ising())
        chains = Chains.start(system, 8, 13, "ordered")
        kernel = move.start(chains)
        kernel.sweep(40)
        flipped = kernel.report()["flipped"]
        if share is not None:
            assert (flipped == share).all() and (chains.spins == 1).all()
        elif isinstance(move, Wolff):
            assert (flipped == 1).all()
        else:
            assert 0.3 < flipped.mean() < 0.7  # 320 fair coins: 0.5 +- 0.03


def test_number_of_clusters_adapts() -> None:
    """N / <|C|> sites a sweep in each system, learnt while warming up, kept by a resumed run."""
    beta = torch.tensor([0.05, 0.3, 1.0], dtype=F64)
    lattice = sf.couplings.square(8, dtype=F64)
    system = sf.SpinSystem(lattice, torch.zeros(64, 1, dtype=F64), beta, sf.Ising())
    chains = Chains.start(system, 5, 14, "ordered")
    kernel = Wolff().start(chains)
    assert (kernel.report()["clusters"] == 1).all()
    for _ in range(6):
        kernel.sweep(20)
        kernel.adapt()
    kernel.reset_report()
    kernel.sweep(50)
    report = kernel.report()
    # 20 sweeps know the size to a fifth; cold, all spins are one cluster.
    expected = 64 / report["cluster_size"]
    torch.testing.assert_close(report["clusters"][:, 0], expected[:, 0], rtol=0.2, atol=0)
    assert (report["clusters"][:, 2] == 1).all()
    assert (report["clusters"][:, 0] > 40).all()

    resumed = Chains(
        system,
        chains.spins.clone(),
        type(chains.streams)(chains.streams.keys, chains.streams.position),
    )
    again = Wolff().start(resumed)
    again.restore(kernel.state())
    for one in (kernel, again):
        one.sweep(7)
        one.adapt()
        one.sweep(7)
    assert torch.equal(chains.spins, resumed.spins)
    for name, value in kernel.report().items():
        assert torch.equal(value, again.report()[name])


def test_lengths_do_not_drift() -> None:
    """Hundreds of reflections in float32 leave the radius where it was, to rounding."""
    system = sf.SpinSystem(sf.couplings.chain(4), torch.zeros(4, 3), 1.0, sf.Sphere(3, radius=1.7))
    chains = Chains.start(system, 4, 15)
    SwendsenWang().start(chains).sweep(300)
    torch.testing.assert_close(
        chains.spins.norm(dim=-1), torch.full((4, 4), 1.7), rtol=1e-6, atol=0
    )


FRUSTRATED = {
    "odd antiferromagnetic ring": Lattice((5,), strength=-1.0, dtype=F64),
    "odd antiferromagnetic torus": Lattice((4, 3), strength=-1.0, dtype=F64),
    "antiferromagnetic Curie-Weiss": CurieWeiss(5, -1.0, dtype=F64),
    "one bond of a plaquette": Dense(
        torch.tensor([[0, 1, 0, -1], [1, 0, 1, 0], [0, 1, 0, 1], [-1, 0, 1, 0]], dtype=F64)
    ),
    "one of two systems": Lattice((3,), strength=torch.tensor([1.0, -1.0], dtype=F64)),
    "spin glass": sf.couplings.sherrington_kirkpatrick(8, dtype=F64),
}
_GAUGE = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0], dtype=F64)
UNFRUSTRATED = {
    "even antiferromagnetic torus": Lattice((4, 6), strength=-1.0, dtype=F64),
    "open antiferromagnet": Lattice((3, 3), periodic=False, strength=-1.0, dtype=F64),
    # Mattis: a ferromagnet with some of its axes turned round.
    "Mattis": Dense(symmetric(5) * _GAUGE * _GAUGE[:, None]),
    "loops cut by an absent site": Lattice((5,), strength=-1.0, dtype=F64).mask(
        torch.tensor([False, False, True, False, False])
    ),
    "no couplings": Dense(torch.zeros(3, 3, dtype=F64)),
    "no strength": Lattice((3,), strength=0.0, dtype=F64),
    "no spins": Dense(torch.zeros(0, 0, dtype=F64)),
}


@pytest.mark.parametrize("name", [*FRUSTRATED, *UNFRUSTRATED])
def test_frustration(name: str) -> None:
    couplings = (FRUSTRATED | UNFRUSTRATED)[name]
    system = sf.SpinSystem(
        couplings, torch.zeros(couplings.num_spins, 1, dtype=F64), 1.0, sf.Ising()
    )
    chains = Chains.start(system, 2, 0)
    if name in UNFRUSTRATED:
        SwendsenWang().start(chains).sweep()
        return
    with pytest.raises(ValueError, match="frustrated: site") as error:
        SwendsenWang().start(chains)
    if name == "one of two systems":
        assert "of system [1]" in str(error.value)
    SwendsenWang(frustrated="allow").start(chains).sweep()


def test_masked_triangle_of_couplings_is_listed_once() -> None:
    """Bonds: each pair once, in order; those of absent sites not at all."""
    mask = torch.tensor([False, True, False, False])
    field = torch.zeros(4, 1, dtype=F64)
    for couplings in (
        CurieWeiss(4, dtype=F64),
        Dense(CurieWeiss(4, dtype=F64).to_dense()),
        sf.couplings.hopfield(torch.ones(1, 4, dtype=F64)),
    ):
        system = sf.SpinSystem(couplings, field, 1.0, sf.Ising(), mask=mask)
        bonds = cluster._bonds(system, "Wolff", "refuse")
        assert bonds.first.tolist() == [0, 0, 2] and bonds.second.tolist() == [2, 3, 3]
        torch.testing.assert_close(bonds.strength.expand(1, 3), torch.full((1, 3), 0.25, dtype=F64))


def test_refusals() -> None:
    field = torch.zeros(3, 2, dtype=F64)

    def start(system: sf.SpinSystem, move: Move | None = None) -> None:
        (move or SwendsenWang()).start(Chains.start(system, 2, 0))

    with pytest.raises(ValueError, match="Gaussian.*HeatBath"):
        start(sf.SpinSystem(torch.zeros(3, 3, dtype=F64), field, 1.0, sf.Gaussian(2)))
    blocks = MatrixValued(torch.zeros(3, 3, 2, 2, dtype=F64))
    with pytest.raises(ValueError, match="Wolff takes scalar couplings.*Hamiltonian"):
        start(sf.SpinSystem(blocks, field, 1.0, sf.Sphere(2)), Wolff())
    skew = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=F64)
    with pytest.raises(ValueError, match="Wolff needs symmetric"):
        start(sf.SpinSystem(skew, field, 1.0, sf.Sphere(2)), Wolff())
    many = CurieWeiss(2049, dtype=F64)
    with pytest.raises(ValueError, match="2098176 bonds.*HeatBath"):
        start(sf.SpinSystem(many, torch.zeros(2049, 1, dtype=F64), 1.0, sf.Ising()))
    with pytest.raises(ValueError, match="clusters=0"):
        Wolff(0)
    with pytest.raises(ValueError, match="nearest is 'refuse'"):
        SwendsenWang(frustrated="refuze")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nearest is 'clusters'"):
        Wolff(cluster=3)  # type: ignore[call-arg]
