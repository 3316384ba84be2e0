"""Position-wise and quadratic energies, and the activation as a proximal map."""

import pytest
import torch

from spinformer.descent import (
    FeedForwardEnergy,
    MemoryEnergy,
    QuadraticEnergy,
    prox_nonnegative,
)


def make(kind: str, generator: torch.Generator, scale: float = 1.0):
    def draw(*shape: int) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "linear":
        return FeedForwardEnergy(draw(4, 4), draw(4))
    return MemoryEnergy(draw(7, 4), draw(7), draw(4))


@pytest.mark.parametrize("kind", ["linear", "memory"])
def test_gradient_is_the_derivative(kind, generator):
    energy = make(kind, generator)
    Y = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False] * 5, [True] + [False] * 4])
    (by_autograd,) = torch.autograd.grad(energy.energy(Y, mask).sum(), Y)
    torch.testing.assert_close(energy.gradient(Y, mask), by_autograd)


@pytest.mark.parametrize("kind", ["linear", "memory"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_never_rises_below_the_bound(kind, scale, generator):
    for _ in range(50):
        energy = make(kind, generator, scale)
        bound = min(float(energy.step_bound()), 2.0)
        Y = 3 * torch.randn(20, 3, 4, generator=generator, dtype=torch.float64)
        for size in (0.3 * bound, 0.999 * bound):
            moved = energy.step(Y, size)
            rise = energy.energy(moved) - energy.energy(Y)
            # The energies are sums of |Y|^2 (1 + |W|^2) of either sign.
            size_of_sums = moved.square().sum((-2, -1)) * (1 + 50 * scale**2) + 1
            assert (rise <= 1e-14 * size_of_sums).all()


def test_linear_step_sees_the_symmetric_part(generator):
    W = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    Y = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    energy = FeedForwardEnergy(W)
    expected = Y @ (0.7 * torch.eye(4, dtype=torch.float64) - 0.3 * (W + W.mT) / 2)
    torch.testing.assert_close(energy.step(Y, 0.3), expected)
    by_trace = torch.trace(Y @ W @ Y.mT) / 2 + Y.square().sum() / 2
    torch.testing.assert_close(energy.energy(Y), by_trace)


def test_linear_bound_is_sharp(generator):
    W = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    energy = FeedForwardEnergy(W)
    values, vectors = torch.linalg.eigh(energy.symmetric_weight)
    steepest = vectors[:, -1:].mT
    bound = energy.step_bound()
    assert bound == pytest.approx(2 / (1 + float(values[-1])))
    assert energy.energy(energy.step(steepest, 1.01 * bound)) > energy.energy(steepest)
    assert energy.energy(energy.step(steepest, 0.99 * bound)) < energy.energy(steepest)
    assert FeedForwardEnergy(-2 * torch.eye(3)).step_bound() == torch.inf


def test_memory_step_is_a_two_layer_network(generator):
    xi = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    c, b = (
        torch.randn(7, generator=generator).double(),
        torch.randn(4, generator=generator).double(),
    )
    Y = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(MemoryEnergy(xi, c, b).step(Y, 1.0), (Y @ xi.mT + c).relu() @ xi + b)


@pytest.mark.parametrize("kind", ["linear", "memory"])
def test_absent_tokens_vanish(kind, generator):
    energy = make(kind, generator)
    Y = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([False, True, False, False, True])
    Y[mask] = torch.nan
    torch.testing.assert_close(energy.energy(Y, mask), energy.energy(Y[~mask]))
    moved = energy.step(Y, 0.5, mask)
    torch.testing.assert_close(moved[~mask], energy.step(Y[~mask], 0.5))
    assert (moved[mask] == 0).all()


def test_relu_is_the_proximal_map(generator):
    """Nearer than any other non-negative point, and a proximal gradient step descends from one."""
    Y = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    nearest = prox_nonnegative(Y)
    assert (nearest >= 0).all()
    others = (nearest + 0.5 * torch.randn(1000, 6, 4, generator=generator).double()).clamp_min(0)
    assert ((others - Y).square().sum((-2, -1)) >= (nearest - Y).square().sum()).all()
    energy = make("memory", generator)
    states = torch.rand(500, 3, 4, generator=generator, dtype=torch.float64)
    moved = prox_nonnegative(energy.step(states, 1.0))
    assert (energy.energy(moved) <= energy.energy(states) + 1e-10).all()


def test_errors():
    with pytest.raises(ValueError, match="must be square"):
        FeedForwardEnergy(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="one pattern a row"):
        MemoryEnergy(torch.zeros(3))


def yang(generator: torch.Generator) -> tuple[QuadraticEnergy, QuadraticEnergy, tuple]:
    """|S Y|^2 + |Y - B1|^2 and |Y W|^2 + |Y - B2|^2."""
    S, W = (torch.randn(n, n, generator=generator, dtype=torch.float64) for n in (5, 4))
    B1, B2 = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    f = QuadraticEnergy(S.mT @ S, center=B1, weight=1.0)
    g = QuadraticEnergy(channel=W @ W.mT, center=B2, weight=1.0)
    return f, g, (S, W, B1, B2)


def test_quadratic_energies_of_the_synthetic_experiment(generator):
    f, g, (S, W, B1, B2) = yang(generator)
    Y = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    by_hand = (S @ Y).square().sum((-2, -1)) + (Y - B1).square().sum((-2, -1))
    torch.testing.assert_close(f.energy(Y), by_hand)
    by_hand = (Y @ W).square().sum((-2, -1)) + (Y - B2).square().sum((-2, -1))
    torch.testing.assert_close(g.energy(Y), by_hand)


def test_minimum(generator):
    """Of each alone by a solve, of their sum by the Sylvester equation as one linear system."""
    f, g, (S, W, B1, B2) = yang(generator)
    eyes = torch.eye(5, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(f.minimum(), torch.linalg.solve(S.mT @ S + eyes[0], B1))
    torch.testing.assert_close(g.minimum(), B2 @ torch.linalg.inv(W @ W.mT + eyes[1]))
    both = f.merge(g)
    system = torch.kron(S.mT @ S + 2 * eyes[0], eyes[1]) + torch.kron(eyes[0], W @ W.mT)
    expected = torch.linalg.solve(system, (B1 + B2).flatten()).reshape(5, 4)
    torch.testing.assert_close(both.minimum(), expected)
    total = f + g
    assert total.gradient(both.minimum()).abs().max() < 1e-12
    Y = torch.randn(20, 5, 4, generator=generator, dtype=torch.float64)
    difference = total.energy(Y) - both.energy(Y)
    torch.testing.assert_close(difference, difference[:1].expand(20))
    torch.testing.assert_close(both.gradient(Y), total.gradient(Y))


def test_minimum_of_some_tokens(generator):
    f, g, _ = yang(generator)
    both = f.merge(g)
    mask = torch.tensor([[False] * 5, [True, False, False, True, False], [True] * 5])
    moved = both.minimum(mask)
    assert moved.shape == (3, 5, 4)
    assert (moved[mask] == 0).all()
    assert both.gradient(moved, mask).abs().max() < 1e-12
    torch.testing.assert_close(moved[0], both.minimum())
    # Channels that curve down, made up for by the tokens' mixing.
    saddle = QuadraticEnergy(3 * torch.eye(5).double(), -torch.eye(4).double(), f.center, 0.5)
    assert saddle.gradient(saddle.minimum(mask), mask).abs().max() < 1e-12


def test_derivative_of_the_minimum(generator):
    """Also where eigenvalues agree, whose eigenvectors have none."""
    B = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[False] * 3, [False, True, False]])
    inputs = torch.eye(3).double(), 2 * torch.eye(2).double(), B, torch.tensor(0.7).double()
    inputs = [x.requires_grad_() for x in inputs]

    def minimum(*inputs):
        return QuadraticEnergy(*inputs).minimum(mask)

    assert torch.autograd.gradcheck(minimum, inputs)
    assert torch.autograd.gradgradcheck(minimum, inputs)
    empty = QuadraticEnergy(center=torch.zeros(0, 2), weight=1.0)
    assert empty.minimum(torch.zeros(0, dtype=torch.bool)).shape == (0, 2)


def test_quadratic_bounds_are_attained(generator):
    energy = QuadraticEnergy(
        torch.randn(5, 5, generator=generator, dtype=torch.float64),
        torch.randn(4, 4, generator=generator, dtype=torch.float64),
        weight=0.3,
    )
    Y = torch.zeros(5, 4, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(energy.energy, Y).reshape(20, 20)
    eigenvalues = torch.linalg.eigvalsh(hessian)
    lower, upper = energy.hessian_bounds(5)
    torch.testing.assert_close(torch.stack([lower, upper]), eigenvalues[[0, -1]])
    steepest = torch.linalg.eigh(hessian)[1][:, -1].reshape(5, 4)
    assert energy.energy(energy.step(steepest, 1.99)) < energy.energy(steepest)
    assert energy.energy(energy.step(steepest, 2.01)) > energy.energy(steepest)


def test_linear_layers_are_quadratic(generator):
    """tr Y W Y^T / 2 + |Y|^2 / 2, without a bias."""
    W = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    Y = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    one, other = FeedForwardEnergy(W), QuadraticEnergy(channel=W / 2, weight=0.5)
    torch.testing.assert_close(one.energy(Y), other.energy(Y))
    torch.testing.assert_close(one.gradient(Y), other.gradient(Y))
    for mine, same in zip(one.hessian_bounds(5), other.hessian_bounds(5), strict=True):
        torch.testing.assert_close(mine, same)


def test_memory_bounds_are_attained():
    """All units open, or none."""
    xi = torch.tensor([[0.6, 0.0], [0.0, 0.9]], dtype=torch.float64)
    energy = MemoryEnergy(xi)
    lower, upper = energy.hessian_bounds(1)
    seen = []
    for sign in (1.0, -1.0):
        Y = sign * torch.ones(1, 2, dtype=torch.float64)
        hessian = torch.autograd.functional.hessian(energy.energy, Y).reshape(2, 2)
        seen.append(torch.linalg.eigvalsh(hessian))
    torch.testing.assert_close(lower, torch.cat(seen).min())
    torch.testing.assert_close(upper, torch.cat(seen).max())


def test_errors_of_quadratic_energies():
    with pytest.raises(ValueError, match=r"mixing has shape \(3, 2\): it must be square, \(N, N\)"):
        QuadraticEnergy(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"channel has shape \(2,\)"):
        QuadraticEnergy(channel=torch.zeros(2))
    with pytest.raises(ValueError, match="center is None"):
        QuadraticEnergy(torch.eye(3)).minimum()
    flat = QuadraticEnergy(-torch.eye(3), center=torch.ones(3, 2), weight=0.5)
    with pytest.raises(ValueError, match="least eigenvalue of the Hessian is -1:"):
        flat.minimum()
    with pytest.raises(ValueError, match=r"weights 0\.5 and -0\.5 add up to zero"):
        flat.merge(QuadraticEnergy(weight=-0.5))
