"""Schedules: nobody is updated with a neighbour, everybody once, in the force of the moment."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from spinformer.sampling.chains import Chains
from spinformer.sampling.checkerboard import IsingCheckerboard, _Fields, _Thresholds, fits
from spinformer.sampling.schedule import colouring, lattice_colours, lattice_neighbours, schedule
from spinformer.spins.couplings import (
    Couplings,
    CurieWeiss,
    Dense,
    Lattice,
    LowRank,
    Masked,
    MatrixValued,
)
from spinformer.spins.site import Gaussian, Ising
from spinformer.spins.system import SpinSystem

SHAPES = [
    ((4, 6), (True, True)),
    ((3, 5), (True, True)),
    ((3, 5), (False, True)),
    ((5, 4), (False, True)),
    ((4, 3, 5), (True, False, True)),
    ((7,), (True,)),
    ((1,), (False,)),
    ((1, 4), (False, True)),
]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("shape", "periodic"), SHAPES)
def test_colours_and_neighbours_of_a_lattice(shape, periodic) -> None:
    lattice = Lattice(shape, periodic, 0.7, dtype=torch.float64)
    matrix = lattice.to_dense()
    colours = lattice_colours(shape, periodic)
    odd = any(n % 2 and wrap for n, wrap in zip(shape, periodic, strict=True))
    assert len(colours) <= (3 if odd else 2)
    assert torch.cat(colours).sort().values.tolist() == list(range(lattice.num_spins))
    for sites in colours:
        assert float(matrix[sites][:, sites].abs().max()) == 0
        neighbours, there = lattice_neighbours(shape, periodic, sites)
        rows = torch.zeros(len(sites), lattice.num_spins, dtype=torch.float64)
        rows.scatter_add_(1, neighbours, there.to(rows))
        torch.testing.assert_close(rows * 0.7, matrix[sites], rtol=1e-15, atol=0)


def test_colouring_of_graphs() -> None:
    for lattice in (Lattice((5, 5), False), Lattice((6, 8), True), Lattice((9,), False)):
        bonds = lattice.to_dense() != 0
        # Whatever the order of the sites: two colours for a bipartite graph.
        order = torch.randperm(len(bonds), generator=torch.Generator().manual_seed(0))
        colours = colouring(bonds[order][:, order], 2)
        assert colours is not None and len(colours) == 2
    graph = torch.rand(40, 40, generator=torch.Generator().manual_seed(1)) < 0.1
    graph = graph | graph.T
    colours = colouring(graph, 40)
    assert colours is not None
    assert torch.cat(colours).sort().values.tolist() == list(range(40))
    off = graph & ~torch.eye(40, dtype=torch.bool)
    assert not any(bool(off[sites][:, sites].any()) for sites in colours)
    complete = torch.ones(6, 6, dtype=torch.bool)
    assert colouring(complete, 5) is None
    found = colouring(complete, 6)
    assert found is not None and len(found) == 6
    assert colouring(torch.zeros(4, 4, dtype=torch.bool), 0) is None


class Own(Couplings):
    """A kind that only says what its users must."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    num_spins = property(lambda self: self.matrix.shape[-1])
    batch_shape = property(lambda self: self.matrix.shape[:-2])
    is_symmetric = True

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.matrix,)

    def with_tensors(self, *tensors: Tensor) -> Own:
        return Own(*tensors)

    def apply(self, state: Tensor) -> Tensor:
        return self.matrix @ state

    def transpose(self) -> Own:
        return self

    def symmetrize(self) -> Own:
        return self


def couplings() -> dict[str, Couplings]:
    """One of each kind, for 20 spins of 3 components; some for each of 2 x 3 systems."""
    full = random(20, 20) / 10
    full = full + full.T
    ours = random(2, 3, 20, 20, seed=1) / 10
    row = random(3, 20, 20, seed=2) / 10
    blocks = random(20, 20, 3, 3, seed=3) / 20
    blocks = blocks + blocks.permute(1, 0, 3, 2)
    many = random(2, 1, 20, 20, 3, 3, seed=4) / 20
    many = many + many.transpose(-4, -3).mT
    cut = torch.rand(3, 20, generator=torch.Generator().manual_seed(5)) < 0.3
    strength = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)
    sparse = full * (torch.rand(20, 20, generator=torch.Generator().manual_seed(6)) < 0.04)
    bare = full - torch.diag(full.diagonal())
    return {
        "dense": Dense(full),
        "dense, each": Dense(ours + ours.mT),
        "dense, some": Dense(row + row.mT),
        "sparse": Dense(sparse + sparse.T),
        "sparse, each": Dense(strength[:, None, None] * (sparse + sparse.T)),
        "matrices": MatrixValued(blocks),
        "matrices, some": MatrixValued(many),
        "low rank": LowRank(random(20, 2) / 5),
        "low rank, each": LowRank(random(3, 20, 2) / 5, weights=random(3, 2)),
        "low rank, two factors": LowRank(random(20, 2) / 5, random(20, 2, seed=1) / 5).symmetrize(),
        "curie-weiss": CurieWeiss(20, strength, dtype=torch.float64),
        "curie-weiss, cut": Masked(CurieWeiss(20, strength), cut),
        "lattice": Lattice((4, 5), True, strength),
        "lattice, open": Lattice((5, 4), (False, True), 0.2, dtype=torch.float64),
        "lattice, cut": Masked(Lattice((4, 5), (True, False), strength), cut),
        "dense, cut twice": Masked(Masked(Dense(full), cut), cut.roll(1, -1)),
        "own": Own(bare),
    }


@pytest.mark.parametrize("name", couplings())
@pytest.mark.parametrize("masked", [False, True])
def test_forces_are_those_of_the_moment(name: str, masked: bool) -> None:
    """With S_i -> H_i / 2 as the move, sweeps are the Gauss-Seidel iteration: each site in turn,
    colour by colour, with the system's own force. Rounding errors do not grow, as the map
    contracts; after 6 sweeps they are a few of the sums of 20 terms of order 1."""
    mask = (
        torch.rand(2, 3, 20, generator=torch.Generator().manual_seed(7)) < 0.3 if masked else None
    )
    system = SpinSystem(couplings()[name], random(3, 20, 3), site=Gaussian(3), mask=mask)
    if not masked:
        system = system.replace(beta=torch.ones(2, 3, dtype=torch.float64))
    chains = Chains.start(system, 2, seed=0)
    order = schedule(system)
    spins = chains.spins.clone()
    groups = getattr(order, "groups", None)
    sets = [[i] for i in range(20)] if groups is None else [g.sites.tolist() for g in groups]
    assert (len(sets) < 20) == name.startswith(("sparse", "lattice"))
    for _ in range(6):
        for sites in sets:
            new = system.force(spins)[..., sites, :] / 2
            if mask is not None:
                new = new.masked_fill(system.mask[..., sites, None], 0.0)
            spins[..., sites, :] = new

    def half(old: Tensor, force: Tensor) -> Tensor:
        assert old.shape == force.shape and old.shape[:2] == (2, 6) and old.shape[3] == 3
        return force / 2

    order.sweep(chains, half, 2)
    order.sweep(chains, half, 4)
    torch.testing.assert_close(chains.spins, spins, rtol=0, atol=1e-14)


def test_the_old_spins_are_those_of_the_sites() -> None:
    """S_i -> 2 S_i, blind to forces, doubles everything in every layout."""
    for name, kind in couplings().items():
        system = SpinSystem(kind, random(2, 3, 20, 3), site=Gaussian(3))
        chains = Chains.start(system, 2, seed=0)
        expected = 4 * chains.spins
        schedule(system).sweep(chains, lambda old, force: 2 * old, 2)
        assert torch.equal(chains.spins, expected), name


@pytest.mark.parametrize("shape", [(0, 1), (2, 0)])
def test_nothing_to_do(shape) -> None:
    num, count = shape
    system = SpinSystem(torch.zeros(num, num), torch.zeros(num, 1), site=Ising())
    chains = Chains.start(system, count, seed=0)
    schedule(system).sweep(chains, lambda old, force: force)
    assert chains.spins.shape == (count, num, 1)


# --- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "periodic"),
    [
        ((6,), (True,)),
        ((2,), (False,)),
        ((4, 6), (True, True)),
        ((3, 4), (False, True)),
        ((5, 2), (False, False)),
        ((4, 3, 6), (True, False, True)),
        ((4, 4, 2), (True, True, False)),
    ],
)
def test_neighbours_of_bytes(shape, periodic) -> None:
    lattice = Lattice(shape, periodic, 1.0, dtype=torch.float64)
    system = SpinSystem(lattice, torch.zeros(lattice.num_spins, 1).double(), site=Ising())
    assert fits(system)
    kernel = IsingCheckerboard(Chains.start(system, 3, seed=0))
    assert torch.cat(kernel._sites).sort().values.tolist() == list(range(lattice.num_spins))
    spins = kernel.chains.spins
    expected = lattice.apply(spins)[..., 0]
    halves = [spins[:, s, 0].to(torch.int8) for s in kernel._sites]
    grid = (*shape[:-1], shape[-1] // 2)
    for colour, other in ((0, 1), (1, 0)):
        around = kernel._around(halves[other].view(3, *grid), colour)
        assert torch.equal(around.flatten(1).double(), expected[:, kernel._sites[colour]])


def test_what_does_not_fit_in_bytes() -> None:
    def system(kind: Couplings, **options) -> SpinSystem:
        return SpinSystem(kind, torch.zeros(kind.num_spins, 1), site=Ising(), **options)

    assert not fits(system(Lattice((4, 5))))
    assert not fits(system(Lattice((3, 4))))
    assert not fits(system(Lattice((4, 4)).mask(torch.arange(16) < 2)))
    assert not fits(system(CurieWeiss(4)))
    assert not fits(SpinSystem(Lattice((4, 4)), torch.zeros(16, 1), site=Gaussian(1)))
    assert fits(system(Lattice((4, 4)), mask=torch.arange(16) < 2))


@pytest.mark.parametrize("periodic", list(itertools.product([True, False], repeat=2)))
def test_bytes_with_and_without_a_table(periodic) -> None:
    """Of one uniform field, the few thresholds and those of every site make the same chains, to the
    last spin: from frozen (beta J = 40) to free, and in one batch."""
    beta = torch.tensor([1e-3, 0.4, 3.0, 40.0], dtype=torch.float64)
    field = torch.tensor([[0.3], [-0.2], [0.0], [0.1]], dtype=torch.float64)
    lattice = Lattice((4, 6), periodic, 1.0, dtype=torch.float64)
    system = SpinSystem(lattice, field[:, None].expand(4, 24, 1), beta, Ising())
    chains = [Chains.start(system, 50, seed=1) for _ in range(2)]
    kernels = [IsingCheckerboard(c) for c in chains]
    assert kernels[0]._uniform_field is not None
    kernels[1]._uniform_field = None
    for kernel in kernels:
        kernel.sweep(3)
        kernel.sweep(2)
    assert torch.equal(chains[0].spins, chains[1].spins)
    assert chains[0].streams.position == chains[1].streams.position == 24 + 5 * 2 * 6


@pytest.mark.parametrize("uniform", [True, False])
def test_bytes_at_no_temperature(uniform: bool) -> None:
    """Probabilities of exactly 0 and 1 are kept: ordered spins stay, whatever word comes."""
    lattice = Lattice((4, 4), True, 1.0, dtype=torch.float64)
    field = torch.zeros(2, 16, 1, dtype=torch.float64)
    if not uniform:
        field[:, 3] = 0.1
    system = SpinSystem(lattice, field, 20.0, Ising())
    up = torch.ones(16, 1, dtype=torch.float64)
    words = torch.tensor([2**31 - 1, -(2**31), 0, -1]).to(torch.int32).repeat(2).view(1, 4, 2)
    strength = torch.tensor([20.0], dtype=torch.float64)
    fields = torch.zeros(1, 8, dtype=torch.float64)
    if uniform:
        rule = _Thresholds(strength, fields[:, 0], 4, all_there=True)
    else:
        rule = _Fields(strength, fields, None)
    for sign in (1, -1):
        chains = Chains.start(system, 5, seed=0, initial=sign * up)
        IsingCheckerboard(chains).sweep(20)
        assert torch.equal(chains.spins, (sign * up).expand_as(chains.spins))
        spins = torch.zeros(1, 4, 2, dtype=torch.int8)
        rule.apply(words, torch.full_like(spins, 4 * sign), spins)
        assert bool((spins == sign).all())
