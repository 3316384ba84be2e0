"""Attention on a list of edges against the dense energy and an independent minimizer."""

import numpy as np
import pytest
import scipy.optimize
import torch

from spinformer.descent import GraphEnergy, PairwiseEnergy, Rho

N, D = 6, 3


def draw(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_edges(generator: torch.Generator, count: int = 12) -> torch.Tensor:
    """Self loops, repeated edges, isolated tokens: what comes."""
    return torch.randint(N, (2, count), generator=generator)


def dense(edges: torch.Tensor, bonds: torch.Tensor) -> torch.Tensor:
    """``(A + A^T) / 2``, edge by edge."""
    A = torch.zeros(N, N, dtype=torch.float64)
    for i, j, bond in zip(*edges.tolist(), bonds.tolist(), strict=True):
        A[i, j] += bond
    return (A + A.mT) / 2


@pytest.mark.parametrize("rho", ["exp", "log1p", "norm"])
@pytest.mark.parametrize("data_weight", [0.0, 0.8])
def test_equals_the_dense_energy(rho, data_weight, generator):
    profile = Rho.smoothed_norm(1.0, 0.1) if rho == "norm" else rho
    for _ in range(30):
        edges = random_edges(generator)
        bonds = torch.rand(12, generator=generator, dtype=torch.float64)
        X = draw(N, D, generator=generator)
        data = {"data_weight": data_weight, "data": X}
        sparse = GraphEnergy(edges, bonds, profile, **data)
        full = PairwiseEnergy(profile, graph=dense(edges, bonds), **data)
        Y = draw(4, N, D, generator=generator)
        mask = torch.rand(4, N, generator=generator) < 0.2
        assert sparse.step_bound() == full.step_bound()
        for name in ("energy", "gradient", "curvature"):
            one, other = (getattr(energy, name)(Y, mask) for energy in (sparse, full))
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(sparse.step(Y, 0.7, mask), full.step(Y, 0.7, mask))
        # The sparse bound is looser, and never tighter than the exact one.
        for one, other, sign in zip(
            sparse.hessian_bounds(N), full.hessian_bounds(N), (-1, 1), strict=True
        ):
            assert sign * (one - other) >= -1e-12


def test_both_directions_are_an_adjacency(generator):
    """As graph libraries list them: the boolean graph of PairwiseEnergy; once, it is half."""
    upper = torch.triu(torch.rand(N, N, generator=generator) < 0.5, 1)
    once = upper.nonzero().mT
    both = torch.cat([once, once.flip(0)], -1)
    Y = draw(N, D, generator=generator)
    full = PairwiseEnergy("log1p", graph=upper | upper.mT)
    torch.testing.assert_close(GraphEnergy(both, rho="log1p").energy(Y), full.energy(Y))
    torch.testing.assert_close(GraphEnergy(once, rho="log1p").energy(Y), full.energy(Y) / 2)
    torch.testing.assert_close(GraphEnergy(once, rho="log1p").step(Y), full.step(Y))


def test_step_is_a_weighted_average():
    """A star by hand: its center goes to the mean of what it hears, weighted by exp(-z)."""
    edges = torch.tensor([[0, 0, 0], [1, 2, 3]])
    Y = torch.tensor([[0.0], [1.0], [-2.0], [0.5], [9.0]], dtype=torch.float64)
    w = torch.exp(-Y[1:4].square() / 2)
    moved = GraphEnergy(edges).step(Y)
    torch.testing.assert_close(moved[0], (w * Y[1:4]).sum(0) / w.sum())
    torch.testing.assert_close(moved[1:4], torch.zeros(3, 1, dtype=torch.float64))
    torch.testing.assert_close(moved[4], Y[4])


def test_isolated_tokens_and_self_loops(generator):
    X, Y = draw(2, N, D, generator=generator)
    loops = torch.arange(N).expand(2, N)
    nothing = torch.zeros(2, 0, dtype=torch.long)
    for edges in (nothing, loops):
        energy = GraphEnergy(edges)
        torch.testing.assert_close(energy.step(Y), Y)
        assert (energy.gradient(Y) == 0).all()
        torch.testing.assert_close(energy.energy(Y), -torch.tensor(float(edges.shape[1])).double())
        assert energy.hessian_bounds(N) == (0, 0)
    torch.testing.assert_close(GraphEnergy(nothing, data_weight=0.3, data=X).step(Y), X)
    # A self loop leaves the energy's slope alone and shortens the step.
    edge = torch.tensor([[0], [1]])
    looped = torch.tensor([[0, 0, 1], [1, 0, 1]])
    plain, slow = GraphEnergy(edge), GraphEnergy(looped)
    torch.testing.assert_close(plain.gradient(Y), slow.gradient(Y))
    move, slower = plain.step(Y) - Y, slow.step(Y) - Y
    assert ((slower.norm(dim=-1) < move.norm(dim=-1)) == (move.norm(dim=-1) > 0)).all()


@pytest.mark.parametrize("rho", ["exp", "log1p", "log2p", "norm"])
def test_never_rises(rho, generator):
    profile = Rho.smoothed_norm(0.7, 0.05) if rho == "norm" else rho
    for _ in range(40):
        edges = random_edges(generator)
        bonds = 3 * torch.rand(50, 12, generator=generator, dtype=torch.float64)
        X = draw(N, D, generator=generator)
        energy = GraphEnergy(edges, bonds, profile, data_weight=0.2, data=X)
        Y = 3 * draw(50, N, D, generator=generator)
        before = energy.energy(Y)
        for size in (0.3, 1.0):
            rise = energy.energy(energy.step(Y, size)) - before
            assert (rise <= 1e-13 * (1 + before.abs() + Y.square().sum((-2, -1)))).all()


def test_above_the_bound_two_tokens_leap_over_each_other():
    energy = GraphEnergy(torch.tensor([[0], [1]]))
    Y = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    torch.testing.assert_close(energy.energy(energy.step(Y, 1.0)), energy.energy(Y))
    assert energy.energy(energy.step(Y, 1.01)) > energy.energy(Y)


def minimize(energy: GraphEnergy, start: torch.Tensor) -> torch.Tensor:
    """By quasi-Newton steps on values and slopes from autograd."""

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        y = torch.tensor(flat).reshape(start.shape).requires_grad_()
        total = energy.energy(y)
        (slope,) = torch.autograd.grad(total, y)
        return total.item(), slope.numpy().ravel()

    options = {"gtol": 1e-10, "ftol": 1e-15, "maxiter": 5000}
    result = scipy.optimize.minimize(
        value, start.numpy().ravel(), jac=True, method="L-BFGS-B", options=options
    )
    return torch.tensor(result.x).reshape(start.shape)


@pytest.mark.parametrize("power", [1.0, 1.4])
def test_converges_to_the_minimum(power, generator):
    """Convex profiles with a data term have one minimum, whatever finds it."""
    for _ in range(3):
        X = draw(N, D, generator=generator)
        edges = random_edges(generator, 8)
        rho = Rho.smoothed_norm(power, 0.05)
        energy = GraphEnergy(edges, rho=rho, data_weight=1.0, data=X)
        Y = draw(N, D, generator=generator)
        for _ in range(3000):
            Y = energy.step(Y)
        assert energy.gradient(Y).abs().max() < 1e-9
        # The Hessian is at least 1: a slope of g is at most g away from the minimum. scipy stops
        # at changes of 1e-15 of the energy, hence at 1e-7 in the state.
        torch.testing.assert_close(Y, minimize(energy, X), rtol=0, atol=1e-6)


def test_concave_profiles_converge_to_a_stationary_point(generator):
    for rho in ("exp", "log1p"):
        X = 2 * draw(N, D, generator=generator)
        edges = random_edges(generator)
        energy = GraphEnergy(edges, rho=rho, data_weight=1.0, data=X)
        Y = X
        for _ in range(3000):
            Y = energy.step(Y)
        assert energy.gradient(Y).abs().max() < 1e-9
        nearby = minimize(energy, Y + 1e-3 * draw(N, D, generator=generator))
        assert energy.energy(Y) <= energy.energy(nearby) + 1e-9


def test_edges_may_break():
    """The median of a cluster and an outlier stays in the cluster; the mean does not."""
    edges = torch.tensor([[0, 0, 0, 0, 0], [1, 2, 3, 4, 5]])
    X = torch.tensor([[0.0], [0.0], [0.1], [-0.1], [0.05], [50.0]], dtype=torch.float64)
    centers = {}
    for power in (1.0, 2.0):
        Y = X.clone()
        energy = GraphEnergy(edges, rho=Rho.smoothed_norm(power, 1e-3))
        for _ in range(200):
            # The others are data; only the center moves.
            Y = torch.cat([energy.step(Y)[:1], X[1:]])
        centers[power] = float(Y[0, 0])
    assert centers[1.0] == pytest.approx(0.05, abs=1e-3)
    assert centers[2.0] == pytest.approx(float(X[1:].mean()))


def test_removing_absent_tokens(generator):
    """A mask is the graph without the token's edges."""
    edges = random_edges(generator)
    mask = torch.tensor([False, True, False, False, True, False])
    kept = ~(mask[edges[0]] | mask[edges[1]])
    Y, X = draw(2, N, D, generator=generator)
    energy = GraphEnergy(edges, data_weight=0.5, data=X)
    numbers = torch.cumsum(~mask, 0) - 1
    rest = GraphEnergy(numbers[edges[:, kept]], data_weight=0.5, data=X[~mask])
    torch.testing.assert_close(energy.energy(Y, mask), rest.energy(Y[~mask]))
    torch.testing.assert_close(energy.step(Y, 1.0, mask)[~mask], rest.step(Y[~mask]))


def test_bonds_of_absent_tokens_change_nothing(generator):
    edges = random_edges(generator)
    mask = torch.tensor([False, True, False, False, True, False])
    cut = mask[edges[0]] | mask[edges[1]]
    bonds = torch.rand(12, generator=generator, dtype=torch.float64)
    Y = draw(N, D, generator=generator).requires_grad_()
    found = []
    for b in (bonds, bonds.masked_fill(cut, torch.nan)):
        energy = GraphEnergy(edges, b)
        total = energy.energy(Y, mask) + energy.step(Y, 0.7, mask).sum()
        found.append(torch.stack([*torch.autograd.grad(total, Y), energy.gradient(Y, mask)]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_errors():
    with pytest.raises(ValueError, match=r"edges has shape \(3, 2\)"):
        GraphEnergy(torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(TypeError, match=r"dtype torch\.float32"):
        GraphEnergy(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"bonds has shape \(2,\)"):
        GraphEnergy(torch.zeros(2, 3, dtype=torch.long), torch.ones(2))
    with pytest.raises(ValueError, match="data_weight=-1 is negative"):
        GraphEnergy(torch.zeros(2, 3, dtype=torch.long), data_weight=-1)
