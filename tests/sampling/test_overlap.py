"""Overlaps of replicas against enumeration, closed forms and identities."""

import itertools
import math

import pytest
import torch

import spinformer as sf
from spinformer.sampling.local import HeatBath
from spinformer.sampling.monte_carlo import MonteCarlo
from spinformer.sampling.overlap import ReplicaOverlaps
from spinformer.sampling.tempering import ParallelTempering

F64 = torch.float64


def glass(n=6, batch=(), seed=4, beta=1.3):
    generator = torch.Generator().manual_seed(seed)
    j = sf.couplings.sherrington_kirkpatrick(n, generator=generator, batch_shape=batch, dtype=F64)
    return sf.SpinSystem(j, torch.zeros(*batch, n, 1, dtype=F64), beta, sf.Ising())


def enumerated(system):
    """All states (2^N, N) of a single Ising system, and their probabilities."""
    states = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=system.num_spins)), dtype=F64)
    return states, torch.softmax(-system.beta * system.energy(states[..., None]), 0)


def drawn(system, chains, k, seed=0):
    """Independent draws of the exact law, (chains, k, N, 1)."""
    states, probability = enumerated(system)
    generator = torch.Generator().manual_seed(seed)
    index = torch.multinomial(probability, chains * k, replacement=True, generator=generator)
    return states[index].reshape(chains, k, -1, 1)


def assert_agrees(found, exact):
    z = (found.value - exact) / found.error
    assert float(z.abs().max()) < 4, z.tolist()


@pytest.mark.stochastic
def test_every_average_by_enumeration_of_two_replicas():
    """Both copies run over all states of a glass of six spins, 4096 pairs of them."""
    system = glass()
    n = system.num_spins
    states, probability = enumerated(system)
    q = states @ states.mT / n
    weight = probability[:, None] * probability
    overlaps = ReplicaOverlaps(system, drawn(system, 6, 2000))
    square = (weight * q**2).sum()
    assert_agrees(overlaps.mean(), 0.0)
    assert_agrees(overlaps.mean_absolute(), (weight * q.abs()).sum())
    assert_agrees(overlaps.mean_square(), square)
    assert_agrees(overlaps.spin_glass_susceptibility(), n * square)
    assert_agrees(overlaps.binder_cumulant(), (3 - (weight * q**4).sum() / square**2) / 2)
    # The mean square overlap is the mean square correlation.
    correlations = states.mT @ (probability[:, None] * states)
    torch.testing.assert_close(square, correlations.square().mean())
    bonds = torch.triu_indices(n, n, 1)
    both = states[:, bonds[0]] * states[:, bonds[1]]
    link = (weight * (both @ both.mT)).sum() / bonds.shape[1]
    assert_agrees(overlaps.link_overlap(), link)

    found = overlaps.distribution()
    torch.testing.assert_close(found.centres, torch.linspace(-1, 1, n + 1, dtype=F64))
    exact = torch.stack([weight[(q - c).abs() < 1e-9].sum() for c in found.centres]) / found.width
    z = (found.density - exact) / found.error
    assert float(z.abs().max()) < 4, z.tolist()
    assert float(found.density.sum() * found.width) == pytest.approx(1, rel=1e-12)


@pytest.mark.stochastic
def test_errors_of_all_pairs_are_honest():
    """Six pairs of four chains are not six independent ones. Over 150 independent sets of draws the
    z-scores of <q^2> have unit variance, within its own error (of 16 blocks: t of 15 degrees)."""
    system = glass()
    states, probability = enumerated(system)
    exact = ((states.mT @ (probability[:, None] * states)) ** 2).mean()
    sets = 150
    many = drawn(system, 4 * sets, 64).reshape(4, sets, 64, 6, 1)
    copies = system.replace(field=system.field.expand(sets, 6, 1))
    found = ReplicaOverlaps(copies, many).mean_square()
    z = (found.value - exact) / found.error
    assert abs(float(z.mean())) < 4 / math.sqrt(sets)
    # A t law of 15 degrees has variance 15 / 13 and kurtosis 6 / 11 above 3.
    expected = 15 / 13
    error = expected * math.sqrt((2 + 6 / 11) / sets)
    assert abs(float(z.square().mean()) - expected) < 4 * error


@pytest.mark.stochastic
@pytest.mark.parametrize("dim", [2, 3])
def test_vectors_by_the_exact_dimer(dim):
    """<S_i . S_j> of two spheres is R^2 A_D(beta J R^2), and <q^2> the mean of its squares."""
    site, coupling, chains, k = sf.Sphere(dim), 0.8, 5, 3000
    generator = torch.Generator().manual_seed(3)
    first = site.sample(torch.zeros(chains, k, dim, dtype=F64), generator)
    second = site.sample(coupling * first, generator)
    j = torch.tensor([[0.0, coupling], [coupling, 0.0]], dtype=F64)
    system = sf.SpinSystem(j, torch.zeros(2, dim, dtype=F64), 1.0, site)
    overlaps = ReplicaOverlaps(system, torch.stack([first, second], -2))
    correlation = site.mean(coupling * site.radius * torch.eye(dim, dtype=F64)[0])[0] * site.radius
    exact = (2 * site.radius**4 + 2 * correlation**2) / 4
    assert_agrees(overlaps.mean_square(), exact)
    assert_agrees(overlaps.spin_glass_susceptibility(), 2 * exact)
    assert_agrees(overlaps.mean(), 0.0)
    # (S^a_1 . S^a_2)(S^b_1 . S^b_2) of independent copies.
    assert_agrees(overlaps.link_overlap(), correlation**2)


def test_turning_a_copy_changes_no_invariant():
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(3, 5, 7, 3, generator=generator, dtype=F64)
    turns = torch.linalg.qr(torch.randn(3, 1, 3, 3, generator=generator, dtype=F64)).Q
    j = sf.couplings.ring(7, dtype=F64)
    system = sf.SpinSystem(j, torch.zeros(7, 3, dtype=F64), 1.0, sf.Sphere(3))
    before, after = ReplicaOverlaps(system, samples), ReplicaOverlaps(system, samples @ turns)
    torch.testing.assert_close(after.square, before.square)
    torch.testing.assert_close(after.link(), before.link())
    assert not torch.allclose(after.overlap, before.overlap)
    # Against sums written out.
    q = torch.einsum("tia,tib->tab", samples[0], samples[2]) / 7
    torch.testing.assert_close(before.matrix[1], q)
    torch.testing.assert_close(before.overlap[1], torch.einsum("taa->t", q))
    torch.testing.assert_close(before.square[1], (q**2).sum((-2, -1)))


def test_binder_cumulant_of_free_and_of_frozen_spins():
    """Of N free Ising spins <q^4> / <q^2>^2 = 3 - 2 / N, over all pairs of states; of copies that
    are always the same q^2 does not fluctuate."""
    n = 4
    states = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n)), dtype=F64)[..., None]
    count = len(states)
    system = sf.SpinSystem(torch.zeros(n, n, dtype=F64), states[0] * 0, 1.0, sf.Ising())
    first, second = states.repeat_interleave(count, 0), states.repeat(count, 1, 1)
    # Sixteen blocks of all partners: each has the exact moments, and there is no error.
    free = ReplicaOverlaps(system, torch.stack([first, second])).binder_cumulant()
    assert float(free.value) == pytest.approx(1 / n, rel=1e-12) and float(free.error) < 1e-12
    same = torch.randn(1, 8, n, 3, dtype=F64).expand(2, 8, n, 3)
    vectors = sf.SpinSystem(torch.zeros(n, n, dtype=F64), same[0, 0] * 0, 1.0, sf.Gaussian(3))
    frozen = ReplicaOverlaps(vectors, same[:, :1].expand(2, 8, n, 3)).binder_cumulant()
    assert float(frozen.value) == pytest.approx(1.0, rel=1e-12)


def test_disorder_averages():
    """Means over draws, with the scatter of the draws as their error; Binder's ratio is one of
    averages, not an average of ratios."""
    system = glass(5, batch=(2, 7))
    samples = system.site.sample(torch.zeros(3, 2, 7, 9, 5, 1, dtype=F64))
    overlaps = ReplicaOverlaps(system, samples, disorder=-1)
    square = overlaps.square.mean((0, -1))
    found = overlaps.mean_square()
    torch.testing.assert_close(found.value, square.mean(-1))
    torch.testing.assert_close(found.error, square.std(-1) / math.sqrt(7))
    fourth = overlaps.square.square().mean((0, -1)).mean(-1)
    ratio = (3 - fourth / square.mean(-1) ** 2) / 2
    # The jackknife takes off the bias of order 1 / 7, which is less than a few errors.
    binder = overlaps.binder_cumulant()
    assert binder.value.shape == (2,)
    assert bool(((binder.value - ratio).abs() < 2 * binder.error).all())
    both = ReplicaOverlaps(system, samples, disorder=(0, 1))
    torch.testing.assert_close(both.mean_square().value, square.mean())
    torch.testing.assert_close(both.mean_square().error, square.flatten().std() / math.sqrt(14))
    apart = ReplicaOverlaps(system, samples)
    torch.testing.assert_close(apart.mean_square().value, square)
    assert apart.distribution(5).density.shape == (2, 7, 5)


def test_link_overlap_of_lattices_and_dense_couplings():
    """The bonds of a lattice by its structure and by its matrix; of SK, an identity with q."""
    lattice = sf.couplings.square((3, 4), periodic=(True, False), dtype=F64)
    field = torch.zeros(12, 2, dtype=F64)
    site = sf.Sphere(2)
    samples = site.sample(torch.zeros(3, 4, 12, 2, dtype=F64))
    by_structure = ReplicaOverlaps(sf.SpinSystem(lattice, field, 1.0, site), samples)
    by_matrix = ReplicaOverlaps(sf.SpinSystem(lattice.to_dense(), field, 1.0, site), samples)
    torch.testing.assert_close(by_structure.link(), by_matrix.link())
    mask = torch.zeros(12, dtype=torch.bool)
    mask[[2, 7]] = True
    there = samples.masked_fill(mask[:, None], 0.0)
    cut = ReplicaOverlaps(sf.SpinSystem(lattice, field, 1.0, site, mask=mask), there)
    dense = sf.SpinSystem(lattice.to_dense(), field, 1.0, site, mask=mask)
    torch.testing.assert_close(cut.link(), ReplicaOverlaps(dense, there).link())
    # Absent sites don't count.
    keep = ~mask
    small = sf.SpinSystem(lattice.to_dense()[keep][:, keep], field[keep], 1.0, site)
    alone = ReplicaOverlaps(small, samples[..., keep, :])
    torch.testing.assert_close(cut.overlap, alone.overlap)
    torch.testing.assert_close(cut.link(), alone.link())

    system = glass(7)
    found = ReplicaOverlaps(system, system.site.sample(torch.zeros(2, 5, 7, 1, dtype=F64)))
    torch.testing.assert_close(found.link(), (7 * found.overlap**2 - 1) / 6)


def test_a_system_without_spins_has_no_overlap():
    empty = sf.SpinSystem(torch.zeros(0, 0), torch.zeros(0, 1), 1.0, sf.Ising())
    overlaps = ReplicaOverlaps(empty, torch.zeros(2, 4, 0, 1))
    assert float(overlaps.mean_square().value) == 0
    assert float(overlaps.distribution(3).density[1]) == pytest.approx(3 / 2)


def test_systems_with_different_bonds_count_their_own():
    j = torch.zeros(2, 3, 3, dtype=F64)
    j[0, 0, 1] = j[0, 1, 0] = 1.0
    j[1, 1, 2] = j[1, 2, 1] = -1.0
    system = sf.SpinSystem(j, torch.zeros(2, 3, 1, dtype=F64), 1.0, sf.Ising())
    s = system.site.sample(torch.zeros(2, 2, 4, 3, 1, dtype=F64))
    link = ReplicaOverlaps(system, s).link()[0]
    bonds = s[..., 0]
    for index, (a, b) in enumerate(((0, 1), (1, 2))):
        product = (bonds[:, index, :, a] * bonds[:, index, :, b]).prod(0)
        torch.testing.assert_close(link[index], product)


@pytest.mark.stochastic
def test_overlaps_of_runs():
    """A glass by plain heat bath, and at each rung of a ladder, against the exact correlations."""
    system = glass(8, beta=1.0)
    options = {"chains": 16, "sweeps": 240, "warmup": 40, "keep": 120, "on_failure": "ignore"}
    run = MonteCarlo(HeatBath(), **options).solve(system)

    def exact(beta):
        states, probability = enumerated(system.replace(beta=beta))
        return ((states.mT @ (probability[:, None] * states)) ** 2).mean()

    assert_agrees(ReplicaOverlaps.of(run).mean_square(), exact(1.0))
    betas = [0.4, 0.8, 1.6]
    ladder = ParallelTempering(betas, **options).solve(system)
    found = ReplicaOverlaps.of(ladder, blocks=12).mean_square()
    assert_agrees(found, torch.stack([exact(beta) for beta in betas]))


def test_broken_systems_are_nan():
    system = glass(4, batch=(2,))
    field = system.field.clone()
    field[1, 0] = torch.nan
    options = {"chains": 2, "sweeps": 32, "keep": 16, "on_failure": "ignore"}
    run = MonteCarlo(HeatBath(), **options).solve(system.replace(field=field, check_finite=False))
    overlaps = ReplicaOverlaps.of(run)
    for found in (overlaps.mean_square(), overlaps.link_overlap(), overlaps.binder_cumulant()):
        assert bool(found.value[0].isfinite()) and bool(found.value[1].isnan())
    density = overlaps.distribution().density
    assert bool(density[0].isfinite().all()) and bool(density[1].isnan().all())


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 3, 4, 5, 2), {}, r"give \(chains, \*\(3,\), k, \*\(5, 1\)\)"),
        ((1, 3, 4, 5, 1), {}, "between independent chains"),
        ((2, 3, 1, 5, 1), {}, "1 configurations a chain"),
        ((2, 3, 4, 5, 1), {"blocks": 1}, "blocks=1"),
        ((2, 3, 4, 5, 1), {"disorder": 1}, "name axes of the batch"),
        ((2, 3, 4, 5, 1), {"disorders": 0}, "nearest is 'disorder'"),
    ],
)
def test_bad_input(shape, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ReplicaOverlaps(glass(5, batch=(3,)), torch.ones(shape, dtype=F64), **options)


def test_one_draw_and_runs_that_kept_nothing():
    with pytest.raises(ValueError, match="1 draw"):
        ReplicaOverlaps(glass(5, batch=(1,)), torch.ones(2, 1, 4, 5, 1, dtype=F64), disorder=0)
    run = MonteCarlo(HeatBath(), sweeps=32, on_failure="ignore").solve(glass(6))
    with pytest.raises(ValueError, match="keep=100"):
        ReplicaOverlaps.of(run)
    overlaps = ReplicaOverlaps(glass(5), torch.ones(2, 4, 5, 1, dtype=F64))
    with pytest.raises(ValueError, match="bins=0"):
        overlaps.distribution(0)
