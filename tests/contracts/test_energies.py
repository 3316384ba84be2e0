"""What every energy of ``spinformer.descent`` keeps, whatever it is.

A new energy, or an option that changes the computation, joins by one line in ``FACTORIES``.
"""

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spinformer.descent import (
    Energy,
    EnergyAttention,
    EnergyHopfield,
    FeedForwardEnergy,
    GraphEnergy,
    HopfieldEnergy,
    MemoryEnergy,
    NetworkEnergy,
    PairwiseEnergy,
    QuadraticEnergy,
    Rho,
)
from spinformer.descent.activation import LeakyReLU

N, D = 5, 4

# Of `count` tokens of D channels.
Factory = Callable[[int, torch.dtype], Energy]


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 7) -> Tensor:
    """The same numbers in every precision."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def frames(dtype: torch.dtype, width: int = 2) -> Tensor:
    """Two orthonormal heads, at two scales."""
    q = torch.linalg.qr(draw(D, D))[0].reshape(D, 2, 2).permute(1, 0, 2)[..., :width]
    return (q * torch.tensor([0.6, 1.7], dtype=torch.float64)[:, None, None]).to(dtype)


def symmetric_graph(n: int, dtype: torch.dtype) -> Tensor:
    bonds = draw(n, n)
    bonds = (bonds + bonds.mT).clamp_min(0.0)
    return bonds.to(dtype)


def own(z: Tensor) -> Tensor:
    """A profile of a user's: rho' = 1 / (1 + z)^2, completely monotone."""
    return z / (1 + z)


def edges(n: int) -> Tensor:
    """Not a connected graph, with a self loop and an edge twice."""
    chosen = (draw(n, n, seed=3) > 0.4).nonzero().mT
    return torch.cat([chosen, chosen[:, :1]], -1)


def sum_of_three(n: int, t: torch.dtype) -> Energy:
    pairwise = PairwiseEnergy("log1p", draw(2, D, 3, dtype=t), data_weight=0.5)
    return pairwise + (FeedForwardEnergy(draw(D, D, dtype=t)) + MemoryEnergy(draw(7, D, dtype=t)))


FACTORIES: dict[str, Factory] = {
    "pairwise": lambda n, t: PairwiseEnergy(),
    "pairwise-log1p-data": lambda n, t: PairwiseEnergy(
        "log1p", data_weight=0.7, data=draw(n, D, dtype=t)
    ),
    "pairwise-heads": lambda n, t: PairwiseEnergy("log2p", draw(3, D, 3, dtype=t)),
    "pairwise-heads-data": lambda n, t: PairwiseEnergy(
        "exp", draw(2, D, 2, dtype=t), data_weight=0.3, data=draw(n, D, dtype=t, seed=8)
    ),
    "pairwise-single": lambda n, t: PairwiseEnergy("exp", draw(1, D, D, dtype=t)),
    "pairwise-single-data": lambda n, t: PairwiseEnergy(
        "exp", draw(1, D, D, dtype=t), data_weight=0.3, data=draw(n, D, dtype=t, seed=8)
    ),
    "pairwise-orthonormal": lambda n, t: PairwiseEnergy("exp", frames(t), orthonormal=True),
    "pairwise-orthonormal-narrow": lambda n, t: PairwiseEnergy(
        "exp", frames(t, 1), data_weight=0.4, data=draw(n, D, dtype=t), orthonormal=True
    ),
    "pairwise-graph": lambda n, t: PairwiseEnergy("exp", graph=symmetric_graph(n, t)),
    "pairwise-adjacency": lambda n, t: PairwiseEnergy(
        "log1p", frames(t), data_weight=0.2, graph=symmetric_graph(n, t) > 0.5, orthonormal=True
    ),
    "pairwise-graph-a-head": lambda n, t: PairwiseEnergy(
        "exp",
        draw(2, D, 3, dtype=t),
        graph=torch.stack([symmetric_graph(n, t), symmetric_graph(n, t).sign()]),
    ),
    "pairwise-own": lambda n, t: PairwiseEnergy(
        Rho.from_value(own, completely_monotone=True), data_weight=1.0
    ),
    "pairwise-norm": lambda n, t: PairwiseEnergy(Rho.smoothed_norm(0.5, 0.3)),
    "graph": lambda n, t: GraphEnergy(edges(n)),
    "graph-data": lambda n, t: GraphEnergy(
        edges(n),
        draw(edges(n).shape[1], dtype=t).abs(),
        Rho.smoothed_norm(1.0, 0.1),
        data_weight=0.5,
        data=draw(n, D, dtype=t),
    ),
    "feed-forward": lambda n, t: FeedForwardEnergy(draw(D, D, dtype=t), draw(D, dtype=t)),
    "memory": lambda n, t: MemoryEnergy(
        draw(7, D, dtype=t), draw(7, dtype=t), draw(D, dtype=t, seed=8)
    ),
    "quadratic": lambda n, t: QuadraticEnergy(
        draw(n, n, dtype=t), draw(D, D, dtype=t), draw(n, D, dtype=t), 0.7
    ),
    "quadratic-channel": lambda n, t: QuadraticEnergy(channel=-draw(D, D, dtype=t)),
    # Of the activations those with a range without ends: elsewhere the energy is infinite.
    "network": lambda n, t: NetworkEnergy(
        draw(D, 3, dtype=t), LeakyReLU(0.3), draw(n, D, dtype=t, seed=8)
    ),
    "network-identity": lambda n, t: NetworkEnergy(draw(D, 6, dtype=t), "identity"),
    "hopfield": lambda n, t: HopfieldEnergy(draw(6, D, dtype=t), 0.8),
    "hopfield-mask": lambda n, t: HopfieldEnergy(
        draw(6, D, dtype=t),
        torch.tensor(0.8, dtype=t),
        pattern_mask=torch.tensor([False, True, False, False, False, True]),
        constants=True,
    ),
    "hopfield-graph": lambda n, t: HopfieldEnergy(
        draw(6, D, dtype=t),
        0.8,
        pattern_mask=torch.tensor([False, True, False, False, False, True]),
        graph=draw(n, 6, seed=9) > 0,
    ),
    "hopfield-weights": lambda n, t: HopfieldEnergy(
        draw(6, D, dtype=t), 0.8, graph=draw(n, 6, dtype=t, seed=9).clamp_min(0.0)
    ),
    "energy-attention": lambda n, t: EnergyAttention(
        draw(2, D, 3, dtype=t), draw(2, D, 3, dtype=t, seed=8)
    ),
    "energy-attention-graph": lambda n, t: EnergyAttention(
        draw(2, D, 3, dtype=t),
        draw(2, D, 3, dtype=t, seed=8),
        torch.tensor([0.5, 1.5], dtype=t),
        graph=(draw(n, n, seed=9) > -0.5).tril(),
        attend_self=True,
    ),
    "energy-hopfield": lambda n, t: EnergyHopfield(draw(7, D, dtype=t)),
    "energy-transformer": lambda n, t: (
        EnergyAttention(draw(2, D, 3, dtype=t), draw(2, D, 3, dtype=t, seed=8))
        + EnergyHopfield(draw(7, D, dtype=t, seed=9))
    ),
    "sum": sum_of_three,
}


@pytest.fixture(params=FACTORIES)
def factory(request: pytest.FixtureRequest) -> Factory:
    return FACTORIES[request.param]


@pytest.fixture
def energy(factory: Factory) -> Energy:
    return factory(N, torch.float64)


def states(count: int, generator: torch.Generator) -> Tensor:
    """Systems at many scales."""
    scales = torch.tensor([0.1, 0.5, 1.0, 2.0, 5.0], dtype=torch.float64)
    pick = torch.randint(len(scales), (count, 1, 1), generator=generator)
    return scales[pick] * torch.randn(count, N, D, generator=generator, dtype=torch.float64)


def masks(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, N, generator=generator) < 0.25


def slack(*states: Tensor) -> Tensor:
    """Rounding of sums of N^2 + N D terms, each at most quadratic with coefficients of up to 50."""
    squares = torch.stack([state.square().sum((-2, -1)) for state in states]).sum(0)
    return 1e-13 * (10 + 50 * squares)


def cleared(Y: Tensor, mask: Tensor) -> Tensor:
    return Y.masked_fill(mask.unsqueeze(-1), 0.0)


# -- value and derivatives ---------------------------------------------------------------------


def test_gradient_is_the_derivative(energy, generator):
    Y, mask = states(20, generator).requires_grad_(), masks(20, generator)
    (by_autograd,) = torch.autograd.grad(energy.energy(Y, mask).sum(), Y)
    torch.testing.assert_close(energy.gradient(Y, mask), by_autograd)


def test_derivatives_of_the_step(energy, generator):
    Y = torch.randn(N, D, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([False, True, False, False, False])
    assert torch.autograd.gradgradcheck(lambda y: energy.energy(y, mask), (Y,))
    assert torch.autograd.gradcheck(lambda y: energy.gradient(y, mask), (Y,))
    assert torch.autograd.gradcheck(lambda y: energy.step(y, 0.7, mask), (Y,))
    assert torch.autograd.gradgradcheck(lambda y: energy.step(y, 0.7, mask), (Y,))


def test_hessian_bounds_hold(energy, generator):
    lower, upper = energy.hessian_bounds(N)
    assert (lower <= upper).all()
    for Y in states(15, generator):
        hessian = torch.autograd.functional.hessian(energy.energy, Y).reshape(N * D, N * D)
        eigenvalues = torch.linalg.eigvalsh(hessian)
        # eigvalsh is exact to eps times the largest eigenvalue; these are below a few hundred.
        assert eigenvalues[0] >= lower - 1e-11
        assert eigenvalues[-1] <= upper + 1e-11


def test_step_is_along_no_other_way_than_down(energy, generator):
    """A small step lowers the energy wherever there is a gradient: the step is no fixed point."""
    Y = torch.randn(50, N, D, generator=generator, dtype=torch.float64)
    step = energy.step(Y, 1e-6) - Y
    slope = energy.gradient(Y)
    assert ((step * slope).sum((-2, -1)) < 0).all()


# -- descent -----------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_own_step_never_rises(energy, masked, generator):
    Y = states(2000, generator)
    mask = masks(2000, generator) if masked else None
    start = Y if mask is None else cleared(Y, mask)
    bound = torch.as_tensor(energy.step_bound()).clamp_max(2.0)
    for fraction in (0.1, 0.5, 0.95, 1.0):
        moved = energy.step(Y, fraction * bound, mask)
        rise = energy.energy(moved, mask) - energy.energy(Y, mask)
        assert (rise <= slack(start, moved)).all()


def test_quadratic_upper_bound(energy, generator):
    """E(Z) <= E(Y) + <grad E(Y), Z - Y> + sum_i p_i |z_i - y_i|^2 / 2 for every Z."""
    Y, mask = states(1000, generator), masks(1000, generator)
    start, slope, p = cleared(Y, mask), energy.gradient(Y, mask), energy.curvature(Y, mask)
    assert p.shape == Y.shape[:-1]
    assert (p >= 0).all()
    newton = energy.step(Y, 1.0, mask)
    for Z in (
        *(start + scale * states(1000, generator) for scale in (1e-3, 0.1, 1.0)),
        states(1000, generator),
        start.flip(1),
        start[:, [1, 0, 2, 3, 4]],
        -start,
        2 * newton - start,
    ):
        other = cleared(Z, mask)
        move = other - start
        bound = energy.energy(Y, mask) + (slope * move).sum((-2, -1))
        bound = bound + (p * move.square().sum(-1)).sum(-1) / 2
        assert (energy.energy(other, mask) <= bound + slack(start, other)).all()


def test_majorize_minimize_step_never_rises(energy, generator):
    """``Energy.step`` with the curvatures, also of those that have a step of their own."""
    Y, mask = states(1000, generator), masks(1000, generator)
    for size in (0.5, 1.0, 2.0):
        moved = Energy.step(energy, Y, size, mask)
        rise = energy.energy(moved, mask) - energy.energy(Y, mask)
        assert (rise <= slack(cleared(Y, mask), moved)).all()


def test_step_on_spheres_never_rises(energy, generator):
    Y, mask = states(1000, generator), masks(1000, generator)
    start = cleared(Y, mask)
    size = torch.as_tensor(energy.step_bound() / 2).clamp_max(1.0)
    for step in (energy.sphere_step, lambda *a, **o: Energy.sphere_step(energy, *a, **o)):
        moved = step(Y, None, mask, size=size)
        norms = torch.linalg.vector_norm(moved, dim=-1)
        if not isinstance(energy, PairwiseEnergy) or not energy.orthonormal:
            torch.testing.assert_close(norms, torch.linalg.vector_norm(start, dim=-1))
        rise = energy.energy(moved, mask) - energy.energy(Y, mask)
        assert (rise <= slack(start, moved)).all()


def test_sum_never_rises(energy, generator):
    """The step of a sum with another energy, and its parts."""
    other = FeedForwardEnergy(draw(D, D, seed=11), draw(D, seed=12))
    both = energy + other
    Y, mask = states(500, generator), masks(500, generator)
    for size in (0.7, both.step_bound()):
        moved = both.step(Y, size, mask)
        rise = both.energy(moved, mask) - both.energy(Y, mask)
        assert (rise <= slack(cleared(Y, mask), moved)).all()
    terms = both.energies(Y, mask)
    torch.testing.assert_close(terms[-1], other.energy(Y, mask))
    torch.testing.assert_close(terms.sum(0), energy.energy(Y, mask) + other.energy(Y, mask))


# -- masks and batches -------------------------------------------------------------------------


def everything(energy: Energy, Y: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    return [
        energy.energy(Y, mask),
        energy.gradient(Y, mask),
        energy.curvature(Y, mask),
        energy.step(Y, 0.8, mask),
        energy.sphere_step(Y, None, mask, size=0.4),
    ]


def test_absent_content_changes_nothing(energy, generator):
    Y, mask = states(10, generator), masks(10, generator)
    assert mask.any()
    spoilt = Y.masked_fill(mask.unsqueeze(-1), torch.nan).requires_grad_()
    clean = everything(energy, cleared(Y, mask), mask)
    for one, other in zip(everything(energy, spoilt, mask), clean, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for states_like in (clean[1], clean[3], clean[4]):
        assert (states_like[mask] == 0).all()
    total = sum(part.sum() for part in everything(energy, spoilt, mask))
    (slope,) = torch.autograd.grad(total, spoilt)
    assert slope.isfinite().all()
    assert (slope[mask] == 0).all()


def test_nobody_there(energy, generator):
    Y = torch.full((3, N, D), torch.nan, dtype=torch.float64)
    nobody = torch.ones(3, N, dtype=torch.bool)
    values = everything(energy, Y, nobody)
    assert all(value.isfinite().all() for value in values)
    assert (values[0] == 0).all()
    assert (values[3] == 0).all()


def test_systems_are_independent(energy, generator):
    Y, mask = states(6, generator).reshape(2, 3, N, D), masks(6, generator).reshape(2, 3, N)
    together = everything(energy, Y, mask)
    alone = everything(energy, Y[1, 2], mask[1, 2])
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one[1, 2], other)


def test_nan_stays_in_its_system(energy, generator):
    Y = states(3, generator)
    clean = everything(energy, Y)
    spoilt = Y.clone()
    spoilt[1] = torch.nan
    spoilt.requires_grad_()
    values = everything(energy, spoilt)
    for one, other in zip(values, clean, strict=True):
        torch.testing.assert_close(one[::2], other[::2], rtol=0, atol=0)
    (slope,) = torch.autograd.grad(sum(value.sum() for value in values), spoilt)
    assert slope[::2].isfinite().all()


def test_empty(factory):
    energy = factory(0, torch.float64)
    Y = torch.zeros(2, 0, D, dtype=torch.float64)
    values = everything(energy, Y)
    assert (values[0] == 0).all()
    assert [value.shape for value in values] == [(2,), Y.shape, Y.shape[:2], Y.shape, Y.shape]
    assert all(bound.isfinite().all() for bound in energy.hessian_bounds(0))
    no_system = everything(factory(N, torch.float64), torch.zeros(0, N, D, dtype=torch.float64))
    assert [value.shape[0] for value in no_system] == [0] * 5


# -- form --------------------------------------------------------------------------------------


def test_step_leaves_its_input_alone(energy, generator):
    Y = states(3, generator)
    before = Y.clone()
    everything(energy, Y)
    assert torch.equal(Y, before)


def test_float32(factory, generator):
    single, double = factory(N, torch.float32), factory(N, torch.float64)
    Y = torch.randn(4, N, D, generator=generator, dtype=torch.float64)
    for one, other in zip(everything(single, Y.float()), everything(double, Y), strict=True):
        assert one.dtype == torch.float32
        # Sums of N^2 + N D terms of up to ten, over curvatures of about one.
        torch.testing.assert_close(one, other.float(), rtol=3e-4, atol=3e-4)


def test_pickle(energy, generator):
    Y = states(3, generator)
    again = pickle.loads(pickle.dumps(energy))
    for one, other in zip(everything(again, Y), everything(energy, Y), strict=True):
        assert torch.equal(one, other)
