"""Parallel tempering: swaps by closed forms, ladders by enumeration, and what happens without."""

import itertools
import math

import pytest
import torch
from scipy.special import betainc

import spinformer as sf
from spinformer.errors import ConvergenceError, ConvergenceWarning
from spinformer.sampling.chains import Chains
from spinformer.sampling.local import HeatBath, OverRelaxation
from spinformer.sampling.monte_carlo import MonteCarlo
from spinformer.sampling.tempering import (
    ParallelTempering,
    ReplicaExchange,
    default_rungs,
    disordered_beta,
    equalized,
    geometric,
    swap_length,
    swap_statistics,
)

F64 = torch.float64


def curie_weiss(n=16, beta=2.0):
    couplings = sf.couplings.curie_weiss(n, dtype=F64)
    return sf.SpinSystem(couplings, torch.zeros(n, 1, dtype=F64), beta, sf.Ising())


def glass(n=10, beta=3.0, batch=(), seed=2):
    generator = torch.Generator().manual_seed(seed)
    j = sf.couplings.sherrington_kirkpatrick(n, generator=generator, batch_shape=batch, dtype=F64)
    return sf.SpinSystem(j, torch.zeros(*batch, n, 1, dtype=F64), beta, sf.Ising())


def uncoupled(betas, n, variance=1.0, field=1.0):
    """Gaussian spins in fields alone, which one sweep of heat bath draws anew, independently."""
    fields = torch.full((len(betas), n, 1), field, dtype=F64)
    site = sf.Gaussian(1, variance)
    return sf.SpinSystem(torch.zeros(n, n, dtype=F64), fields, torch.tensor(betas, dtype=F64), site)


def enumerated(system, betas):
    """U, Var E, <|M|> and <M^2> of Ising spins at every beta, from all states."""
    states = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=system.num_spins)), dtype=F64)
    energy = system.energy(states[..., None])
    moment = states.sum(-1)
    weights = torch.softmax(-betas[:, None] * energy, -1)
    mean = weights @ energy
    return mean, weights @ energy**2 - mean**2, weights @ moment.abs(), weights @ moment**2


def assert_agrees(equilibrium, name, value, exact):
    z = (value - exact) / equilibrium.standard_error(name)
    assert float(z.abs().max()) < 4, z.tolist()


# -- a swap ----------------------------------------------------------------------------------------


@pytest.mark.stochastic
def test_swaps_balance_in_detail():
    """One Ising spin in a field at two temperatures. From the exact joint law, the flow of
    probability from (s, t) to (t, s) is that of min(1, e^Delta), the same both ways."""
    field, betas, count = 0.7, torch.tensor([0.4, 1.5], dtype=F64), 40_000
    system = sf.SpinSystem(
        torch.zeros(1, 1, dtype=F64), torch.full((2, 1, 1), field, dtype=F64), betas, sf.Ising()
    )
    chains = Chains.start(system, count, 5)
    HeatBath().start(chains).sweep()  # independent of the start: the exact law
    before = chains.spins[..., 0, 0].clone()
    ReplicaExchange().start(chains).sweep()
    after = chains.spins[..., 0, 0]
    up = 1 / (1 + torch.exp(-2 * betas * field))  # probability of +1 on each rung
    unchanged = (before == after).all(-1)
    for hot in (1.0, -1.0):
        flow = ((before[:, 0] == hot) & (before[:, 1] == -hot) & ~unchanged).sum().item() / count
        # Delta = (beta_1 - beta_0) (E_1 - E_0) = -(beta_1 - beta_0) h (t - s) of the state (s, t)
        delta = float((betas[1] - betas[0]) * field * 2 * hot)
        state = float((up[0] if hot > 0 else 1 - up[0]) * (1 - up[1] if hot > 0 else up[1]))
        exact = state * min(1.0, math.exp(delta))
        assert abs(flow - exact) < 4 * math.sqrt(exact * (1 - exact) / count)
        # The same from the other side: detailed balance.
        other = float((1 - up[0] if hot > 0 else up[0]) * (up[1] if hot > 0 else 1 - up[1]))
        assert exact == pytest.approx(other * min(1.0, math.exp(-delta)), rel=1e-12)


@pytest.mark.stochastic
@pytest.mark.parametrize("spread", [0.5, 1.5, 3.0])
def test_acceptance_of_gaussian_energies(spread):
    """E = -h S of a Gaussian spin is Gaussian with standard deviation |h|, so that swaps are
    accepted with erfc(h (beta_1 - beta_0) / 2); and draws are independent in every round."""
    system = uncoupled([1.0, 1.0 + spread], 1)
    chains = Chains.start(system, 200, 3)
    bath, exchange = HeatBath().start(chains), ReplicaExchange().start(chains)
    rounds = 60
    for _ in range(rounds):
        bath.sweep()
        exchange.sweep()
    report = exchange.report()
    exact = math.erfc(spread / 2)
    assert float(swap_length(torch.tensor(exact))) == pytest.approx(spread, rel=1e-6)
    assert bool(report["swap_acceptance"][:, 1].isnan().all())
    probability = report["swap_acceptance"][:, 0]
    error = float(probability.std() / math.sqrt(len(probability)))
    assert abs(float(probability.mean()) - exact) < 4 * error
    # One pair: its turn is every second round.
    tries = 200 * rounds / 2
    swapped = float(report["swaps"][:, 0].sum()) / tries
    assert abs(swapped - exact) < 4 * math.sqrt(exact * (1 - exact) / tries)


def test_replicas_go_straight_through_a_ladder_that_always_swaps():
    """Without energies every swap is accepted. With even and odd pairs in turn a replica moves one
    rung a round and waits one at each end: K rungs are crossed and come back in 2 K rounds, where
    pairs at random would take of the order of K^2."""
    rungs = 6
    system = uncoupled([1.0 + k for k in range(rungs)], 1, field=0.0)
    chains = Chains.start(system, 1, 0)
    exchange = ReplicaExchange().start(chains)
    marked = torch.arange(float(rungs), dtype=F64).reshape(1, rungs, 1, 1)
    chains.spins.copy_(marked)
    for turn in range(1, 4):
        exchange.sweep(2 * rungs)
        report = exchange.report()
        assert torch.equal(report["replica"][0], torch.arange(rungs))
        assert torch.equal(chains.spins, marked)
        # Replica 0 began at the hottest rung; the others reach it first without having been there.
        assert int(report["round_trips"][0, 0]) == turn
        assert set(report["round_trips"][0, 1:].tolist()) == {turn - 1}
    flow = report["flow"][0]
    assert float(flow[0]) == 1 and float(flow[-1]) == 0
    assert bool((report["swap_acceptance"][0, :-1] == 1).all())
    exchange.sweep(3)
    assert torch.equal(chains.spins[0, :, 0, 0], exchange.report()["replica"][0].double())


def test_labels_follow_configurations():
    """Each Gaussian configuration is marked by a value of its own, and kept: no move but swaps."""
    system = uncoupled([0.5, 0.7, 1.0, 1.3], 1)
    chains = Chains.start(system, 7, 1)
    first = chains.spins.clone()
    exchange = ReplicaExchange(every=3).start(chains)
    exchange.sweep(2)
    assert torch.equal(chains.spins, first)  # no round yet
    exchange.sweep(40)
    replica = exchange.report()["replica"]
    assert not torch.equal(replica, torch.arange(4).expand(7, 4))
    assert torch.equal(first.gather(1, replica[..., None, None]), chains.spins)


def test_a_resumed_exchange_goes_on_bit_by_bit():
    system = uncoupled([0.5, 0.7, 1.0, 1.3], 2)
    chains = Chains.start(system, 3, 1)
    bath, exchange = HeatBath().start(chains), ReplicaExchange(every=2).start(chains)

    def go_on(chains, bath, exchange):
        for _ in range(9):
            bath.sweep()
            exchange.sweep()
        return exchange.report()

    go_on(chains, bath, exchange)
    exchange.reset_report()
    go_on(chains, bath, exchange)
    state = {name: value.clone() for name, value in exchange.state().items()}
    streams = type(chains.streams)(chains.streams.keys, chains.streams.position)
    other = Chains(system, chains.spins.clone(), streams)
    resumed = ReplicaExchange(every=2).start(other)
    resumed.restore(state)
    report = go_on(chains, bath, exchange)
    again = go_on(other, HeatBath().start(other), resumed)
    assert torch.equal(chains.spins, other.spins)
    for name, value in report.items():
        assert torch.equal(value.nan_to_num(7), again[name].nan_to_num(7)), name


# -- ladders ---------------------------------------------------------------------------------------


def test_equalized_ladders_of_harmonic_energies_are_geometric():
    """n harmonic modes have energies of a Gamma law, for which the acceptance is a regularized
    incomplete beta function of the ratio of temperatures: P(E_cold > E_hot), twice."""
    modes = 12.0

    def acceptance(betas):
        share = betas[:-1] / (betas[:-1] + betas[1:])
        return torch.from_numpy(2 * betainc(modes, modes, share.numpy()))

    ends = torch.tensor([0.2, 5.0], dtype=F64)
    best = geometric(ends[0], ends[1], 9)
    torch.testing.assert_close(best[1:] / best[:-1], torch.full((8,), 25.0**0.125, dtype=F64))
    torch.testing.assert_close(equalized(best, acceptance(best)), best, rtol=1e-12, atol=0)
    betas = torch.linspace(0.2, 5.0, 9, dtype=F64)
    spread = []
    for _ in range(6):
        spread.append(float(acceptance(betas).max() - acceptance(betas).min()))
        betas = equalized(betas, acceptance(betas))
    assert spread[0] > 0.7 and spread[-1] < 1e-3
    # Two ladders at once are each what it is alone.
    torch.testing.assert_close(betas, best, rtol=1e-4, atol=0)
    both = torch.stack([best, torch.linspace(0.2, 5.0, 9, dtype=F64)], 1)
    two = equalized(both, torch.stack([acceptance(both[:, k].contiguous()) for k in (0, 1)], 1))
    torch.testing.assert_close(
        two[:, 1], equalized(both[:, 1], acceptance(both[:, 1].contiguous()))
    )
    assert torch.equal(two[[0, -1]], both[[0, -1]])


def test_default_ladders_swap_every_second_time_if_all_modes_are_harmonic():
    """N (D - 1) / 2 modes of k_B each: a Gamma law of that shape, on a geometric ladder."""
    system = sf.SpinSystem(torch.zeros(40, 40), torch.zeros(40, 3), 1.0, sf.Sphere(3))
    hottest, coldest = torch.tensor(0.2), torch.tensor(4.0)
    betas = geometric(hottest, coldest, default_rungs(system, hottest, coldest))
    share = float(betas[0] / (betas[0] + betas[1]))
    # 0.5 but for the rounding up of the number of rungs, one in twenty, and the law's skewness.
    assert 2 * betainc(40, 40, share) == pytest.approx(0.5, abs=0.03)


def test_equalized_keeps_the_order_where_nothing_is_known():
    """Pairs that never or always swap."""
    betas = torch.linspace(0.5, 2.0, 5, dtype=F64)
    ladder = equalized(betas, torch.tensor([0.0, 1.0, 1.0, 0.5], dtype=F64))
    assert bool((ladder.diff() > 0).all())
    # Nearly all of the length is in the pair that never swaps, and so are the rungs.
    assert float(ladder[3]) < float(betas[1]) * 1.2
    torch.testing.assert_close(equalized(betas, torch.ones(4, dtype=F64))[[0, -1]], betas[[0, -1]])


def test_the_hottest_rung_is_disordered():
    """Half of where mean field orders, beta lambda_max R^2 / D = 1: here lambda_max = 1."""
    n = 20
    j = sf.couplings.curie_weiss(n, strength=n / (n - 1), dtype=F64)
    system = sf.SpinSystem(j, torch.zeros(n, 3, dtype=F64), 4.0, sf.Sphere(3, radius=2.0))
    assert float(disordered_beta(system)) == pytest.approx(0.5 * 3 / 4)
    free = sf.SpinSystem(torch.zeros(2, 2), torch.ones(2, 1), 1.0, sf.Ising())
    assert float(disordered_beta(free)) == math.inf


# -- parallel tempering ----------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize("name", ["curie_weiss", "glass"])
def test_every_rung_has_the_exact_values(name):
    """Two deep valleys, and a glass, on the ladder that a pilot run found."""
    system = curie_weiss() if name == "curie_weiss" else glass()
    tempering = ParallelTempering(chains=64, rungs=6, sweeps=200, warmup=80, seed=1)
    equilibrium = tempering.solve(system)
    betas = equilibrium.system.beta
    assert float(betas[-1]) == float(system.beta)
    assert float(betas[0]) == pytest.approx(float(disordered_beta(system)))
    energy, variance, absolute, square = enumerated(system, betas)
    assert_agrees(equilibrium, "internal_energy", equilibrium.internal_energy, energy)
    assert_agrees(equilibrium, "specific_heat", equilibrium.specific_heat(), betas**2 * variance)
    assert_agrees(equilibrium, "absolute_moment", equilibrium.absolute_moment(), absolute)
    assert_agrees(equilibrium, "magnetization", equilibrium.magnetization, 0.0)
    response = equilibrium.uniform_susceptibility()[..., 0, 0]
    error = equilibrium.standard_error("uniform_susceptibility")[..., 0, 0]
    assert float(((response - betas * square) / error).abs().max()) < 4
    # The adapted ladder has no bottleneck, and replicas travel all of it.
    found = swap_statistics(equilibrium)
    assert float(found.acceptance.max() - found.acceptance.min()) < 0.08
    assert bool((found.round_trips.sum(1) > 8).all())
    assert bool((found.flow.diff() < 0).all())


@pytest.mark.stochastic
def test_every_rung_of_a_vector_system():
    """An odd antiferromagnetic ring of O(3) spins, exact by transfer matrices, at given rungs and
    with over-relaxation between swaps."""
    ring = sf.couplings.ring(5, strength=-1.0, dtype=F64)
    system = sf.SpinSystem(ring, torch.zeros(5, 3, dtype=F64), 1.0, sf.Sphere(3))
    betas = torch.tensor([0.2, 0.5, 1.0], dtype=F64)
    moves = [HeatBath(), OverRelaxation()]
    run = ParallelTempering(betas, moves=moves, chains=32, sweeps=100, warmup=20, seed=1)
    equilibrium = run.solve(system)
    assert torch.equal(equilibrium.system.beta, betas)
    exact = sf.Exact().solve(system.replace(beta=betas))
    assert_agrees(
        equilibrium, "internal_energy", equilibrium.internal_energy, exact.internal_energy
    )
    assert_agrees(equilibrium, "specific_heat", equilibrium.specific_heat(), exact.specific_heat())


@pytest.mark.stochastic
def test_without_exchange_the_cold_rung_is_stuck():
    """A ferromagnet far below T_c: its moment turns only by way of a barrier of e^20."""
    system = curie_weiss(beta=3.0)
    options = {"chains": 4, "sweeps": 300, "warmup": 50, "initial": "ordered", "seed": 1}
    alone = MonteCarlo(HeatBath(), on_failure="ignore", **options).solve(system)
    assert bool((alone.series["moment"] > 0).all())
    ladder = torch.tensor([0.5, 0.9, 1.2, 1.5, 1.9, 3.0], dtype=F64)
    tempered = ParallelTempering(ladder, **options).solve(system)
    up = (tempered.series["moment"][:, -1, :, 0] > 0).double()
    assert bool((up.mean(-1) > 0.2).all()) and bool((up.mean(-1) < 0.8).all())


@pytest.mark.stochastic
def test_adaptation_equalizes_the_acceptance():
    """On a ladder that crosses the transition with three of four pairs on one side of it."""
    system = curie_weiss(16, 3.0)
    bad = torch.tensor([0.3, 1.5, 2.0, 2.5, 3.0], dtype=F64)
    options = {"chains": 32, "sweeps": 80, "warmup": 40, "on_failure": "ignore", "seed": 1}
    before = swap_statistics(ParallelTempering(bad, **options).solve(system)).acceptance
    after = swap_statistics(ParallelTempering(bad, adapt=True, **options).solve(system))
    assert float(before.max() - before.min()) > 0.5
    assert float(after.acceptance.max() - after.acceptance.min()) < 0.1
    torch.testing.assert_close(after.betas[[0, -1]], bad[[0, -1]])


def test_a_ladder_does_what_it_does_alone():
    """Chain k of a batch of two glasses, by its keys, and the whole run again by its seed."""
    system = glass(8, torch.tensor([2.0, 2.5], dtype=F64), batch=(2,))
    options = {"sweeps": 64, "warmup": 40, "rungs": 4, "on_failure": "ignore"}
    run = ParallelTempering(chains=3, seed=4, **options)
    together, again = run.solve(system), run.solve(system)
    assert torch.equal(together.series["energy"], again.series["energy"])
    assert torch.equal(together.system.beta, again.system.beta)
    one = sf.SpinSystem(
        system.couplings.to_dense()[1], system.field[1], system.beta[1], system.site
    )
    fixed = {"sweeps": 64, "warmup": 40, "on_failure": "ignore"}
    alone = ParallelTempering(
        together.system.beta[:, 1], chains=1, seed=together.keys[2:3, :, 1], **fixed
    ).solve(one)
    torch.testing.assert_close(alone.series["energy"][0], together.series["energy"][2, :, 1])


@pytest.mark.parametrize("what", ["field", "beta", "couplings"])
def test_a_broken_system_stays_alone(what):
    """Its neighbour has the ladder and the answer that it has with a sound one beside it: a twin,
    which asks for as many rungs."""
    parts = {
        "couplings": glass(6).couplings.to_dense().expand(2, 6, 6).clone(),
        "field": torch.zeros(2, 6, 1, dtype=F64),
        "beta": torch.full((2,), 2.0, dtype=F64),
    }
    system = sf.SpinSystem(**parts, site=sf.Ising())
    parts[what] = parts[what].clone()
    parts[what][0] = torch.nan
    broken = system.replace(**parts, check_finite=False)
    run = ParallelTempering(chains=2, sweeps=32, warmup=8, on_failure="ignore")
    hurt, sound = run.solve(broken), run.solve(system)
    assert torch.equal(hurt.series["energy"][:, :, 1], sound.series["energy"][:, :, 1])
    assert bool(hurt.internal_energy[:, 0].isnan().all())
    assert bool(hurt.internal_energy[:, 1].isfinite().all())


def test_swaps_outlive_files(tmp_path):
    """A run that is asked for again takes all from its checkpoint; a saved one keeps its swaps."""
    run = ParallelTempering(
        moves=HeatBath(),
        rungs=3,
        chains=2,
        sweeps=32,
        warmup=8,
        checkpoint=tmp_path / "run.npz",
        on_failure="ignore",
    )
    first, second = run.solve(curie_weiss(6)), run.solve(curie_weiss(6))
    first.save(tmp_path / "result.npz")
    loaded = type(first).load(tmp_path / "result.npz")
    for other in (second, loaded):
        assert torch.equal(other.series["energy"], first.series["energy"])
        for one, two in zip(swap_statistics(first), swap_statistics(other), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("dim", [1, 3])
def test_a_system_without_spins(dim):
    site = sf.Ising() if dim == 1 else sf.Sphere(dim)
    empty = sf.SpinSystem(torch.zeros(0, 0), torch.zeros(0, dim), 1.0, site)
    found = ParallelTempering(chains=2, sweeps=32, warmup=0, on_failure="ignore").solve(empty)
    assert torch.equal(found.internal_energy, torch.zeros(2))


def test_ends_are_numbers_or_one_a_system():
    for system in (curie_weiss(4), glass(4, batch=(2,))):
        run = ParallelTempering(
            beta_min=0.25, beta_max=4.0, rungs=5, adapt=False, sweeps=16, on_failure="ignore"
        )
        betas = run.solve(system).system.beta
        expected = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0], dtype=F64)
        torch.testing.assert_close(betas.movedim(0, -1), expected.expand(*system.batch_shape, 5))
    each = torch.tensor([0.25, 0.5], dtype=F64)
    run = ParallelTempering(
        beta_min=each, beta_max=1.0, rungs=3, adapt=False, sweeps=16, on_failure="ignore"
    )
    torch.testing.assert_close(run.solve(system).system.beta[0], each)


def test_bottlenecks_are_named():
    system = curie_weiss(40, 3.0)
    run = ParallelTempering([0.1, 3.0, 3.1], sweeps=32, warmup=0)
    with pytest.warns(ConvergenceWarning) as caught:
        run.solve(system)
    messages = [str(w.message) for w in caught if "ParallelTempering" in str(w.message)]
    assert len(messages) == 1
    assert "rungs 0 and 1 (beta 0.1 and 3) swap with probability" in messages[0]
    two = system.replace(field=torch.zeros(2, 40, 1, dtype=F64))
    strict = ParallelTempering([0.1, 3.0], sweeps=16, warmup=0, on_failure=only_tempering)
    with pytest.raises(ConvergenceError, match=r"ParallelTempering, system \(0,\): rungs 0 and 1"):
        strict.solve(two)


def only_tempering(message):
    """A policy that raises for messages of parallel tempering, not for those of MonteCarlo."""
    if message.startswith("ParallelTempering"):
        raise ConvergenceError(message)


def test_a_ladder_without_round_trips_is_loud():
    """A round trip of twelve rungs takes 24 rounds; there are 16."""
    run = ParallelTempering(rungs=12, adapt=False, sweeps=16, warmup=0, on_failure=only_tempering)
    with pytest.raises(ConvergenceError, match="no replica went from the hottest"):
        run.solve(curie_weiss(8))


def test_bad_ladders():
    system = glass(5, 1.0, batch=(3,))
    chains = Chains.start(curie_weiss(), 2, 0)
    with pytest.raises(ValueError, match="use ParallelTempering"):
        ReplicaExchange().start(chains)
    falling = curie_weiss(beta=torch.tensor([2.0, 1.0], dtype=F64))
    with pytest.raises(ValueError, match="must rise, hottest first"):
        ReplicaExchange().start(Chains.start(falling, 2, 0))
    with pytest.raises(ValueError, match="differ: only beta may"):
        ReplicaExchange().start(Chains.start(system, 2, 0))
    mask = torch.tensor([[False] * 5, [True] + [False] * 4])
    masked = sf.SpinSystem(
        torch.zeros(5, 5), torch.zeros(5, 1), torch.tensor([1.0, 2.0]), sf.Ising(), mask=mask
    )
    with pytest.raises(ValueError, match="masks of this system differ"):
        ReplicaExchange().start(Chains.start(masked, 2, 0))
    asymmetric = sf.SpinSystem(torch.randn(3, 3), torch.zeros(3, 1), 1.0, sf.Ising())
    with pytest.raises(ValueError, match="ParallelTempering needs symmetric"):
        ParallelTempering().solve(asymmetric)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": [0.5, 1.0], "rungs": 3}, "leave rungs out"),
        ({"rungs": 1}, "rungs=1"),
        ({"exchange_every": 0}, "every=0"),
        ({"chains": 0}, "chains=0"),
        ({"moves": []}, "moves is empty"),
        ({"betas": [1.0]}, "two rungs or more"),
        ({"betas": [1.0, 0.5]}, "rise, hottest first"),
        ({"betas": [0.0, 0.5]}, "rise, hottest first"),
        ({"beta_min": 5.0}, "choose beta_min below beta_max"),
        ({"beta_max": torch.ones(2, dtype=F64)}, "does not fit the batch"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ParallelTempering(**options).solve(glass(4, batch=(3,)))


def test_statistics_of_a_run_without_swaps():
    run = MonteCarlo(HeatBath(), sweeps=64, on_failure="ignore").solve(curie_weiss(4))
    with pytest.raises(ValueError, match="no move of this run swapped"):
        swap_statistics(run)
