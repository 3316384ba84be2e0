"""Position-wise energies and the activation as a proximal map."""

import pytest
import torch

from spinformer.descent import FeedForwardEnergy, MemoryEnergy, prox_nonnegative


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
