"""Proximal maps: of names, activations, and one's own penalty."""

import math
import pickle

import pytest
import torch

from spinformer.descent.activation import ACTIVATIONS
from spinformer.descent.proximal import PROXES, Proximal, as_prox

Y = torch.linspace(-6, 6, 97, dtype=torch.float64) + 0.017
EPS = torch.finfo(torch.float64).eps


def absolute(z):
    return z.abs()


def quadratic(z, weight, center):
    return weight * (z - center).square() / 2


def double_well(z):
    return (z.square() - 1).square() / 4


def test_names():
    torch.testing.assert_close(PROXES["relu"](Y, 3.0), Y.clamp_min(0))
    torch.testing.assert_close(PROXES["box"](Y, 3.0), Y.clamp(-1, 1))
    shrunk = Y.sign() * (Y.abs() - 0.5).clamp_min(0)
    torch.testing.assert_close(PROXES["soft_threshold"](Y, 0.5), shrunk)
    torch.testing.assert_close(PROXES["tanh"](Y), torch.tanh(Y))
    assert as_prox("box") is PROXES["box"]
    assert as_prox(PROXES["box"]) is PROXES["box"]
    assert as_prox(ACTIVATIONS["tanh"])(Y).equal(torch.tanh(Y))
    outside = torch.tensor([-1.5, 0.5], dtype=torch.float64)
    assert PROXES["box"].value(outside).tolist() == [torch.inf, 0.0]
    with pytest.raises(ValueError, match="nearest is 'soft_threshold'"):
        as_prox("soft_thresh")
    with pytest.raises(ValueError, match="use 'monotone_gelu'"):
        as_prox("gelu")
    with pytest.raises(ValueError, match="must be positive"):
        PROXES["relu"](Y, 0.0)


@pytest.mark.parametrize("name", PROXES)
def test_firmly_nonexpansive(name):
    """What proximal maps of convex penalties are: |P - P'|^2 <= (P - P') (Y - Y')."""
    prox = PROXES[name]
    for size in (0.3, 2.0):
        moved = prox(Y, size)
        change, distance = moved[:, None] - moved, Y[:, None] - Y
        strong = prox.strong_convexity(size)
        # Strong convexity of the objective: c |P - P'|^2.
        assert (change * distance - strong * change.square() >= -1e-13).all()


@pytest.mark.parametrize("size", [0.2, 1.0, 3.0])
def test_own_penalties_against_closed_forms(size):
    torch.testing.assert_close(
        Proximal.from_penalty(absolute)(Y, size), PROXES["soft_threshold"](Y, size)
    )
    interval = Proximal.from_penalty(torch.zeros_like, lower=-1, upper=1)
    assert torch.equal(interval(Y, size), Y.clamp(-1, 1))
    # -log z: z^2 - y z = size.
    barrier = Proximal.from_penalty(lambda z: -z.log(), lower=0.0)
    torch.testing.assert_close(barrier(Y, size), (Y + (Y.square() + 4 * size).sqrt()) / 2)
    torch.testing.assert_close(
        barrier.value(torch.tensor([-1.0, 1.0])), torch.tensor([math.inf, 0])
    )
    # The penalty of tanh, by its formula.
    entropy = Proximal.from_penalty(
        lambda z: (
            (torch.special.xlogy(1 + z, 1 + z) + torch.special.xlogy(1 - z, 1 - z)) / 2
            - z.square() / 2
        ),
        lower=-1,
        upper=1,
    )
    torch.testing.assert_close(entropy(Y, size), PROXES["tanh"](Y, size), rtol=1e-9, atol=1e-9)


def test_minimum_on_a_fine_grid():
    """A penalty without a closed form, with a kink, weakly convex, on a bounded domain."""

    def penalty(z):
        return 0.5 * (z - 0.3).abs() + torch.cos(2 * z) / 8

    prox = Proximal.from_penalty(penalty, lower=-2.0, upper=3.0)
    assert prox.convexity == pytest.approx(-0.5, abs=1e-3)
    grid = torch.linspace(-2, 3, 500001, dtype=torch.float64)
    for size in (0.4, 1.5):
        moved = prox(Y[::6], size)
        for y, z in zip(Y[::6], moved, strict=True):
            values = size * penalty(grid) + (grid - y).square() / 2
            assert abs(float(grid[values.argmin()] - z)) < 1.1e-5
        # Held at the kink and at both ends.
        everywhere = prox(Y, size)
        for held in (-2.0, 0.3, 3.0):
            assert ((everywhere - held).abs() < 1e-14).sum() > 1
    with pytest.raises(ValueError, match="not strictly convex"):
        prox(Y, 2.1)


def test_derivatives_are_implicit(generator):
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    center = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    size = torch.rand(4, 1, generator=generator, dtype=torch.float64).add(0.1).requires_grad_()

    def moved(y, size, weight, center):
        return Proximal.from_penalty(quadratic, parameters=(weight, center))(y, size)

    expected = (y + size * weight * center) / (1 + size * weight)
    torch.testing.assert_close(moved(y, size, weight, center), expected)
    assert torch.autograd.gradcheck(moved, (y, size, weight, center))
    assert torch.autograd.gradgradcheck(moved, (y, size, weight, center))

    def quartic(y, size):
        return Proximal.from_penalty(lambda z: z**4 / 4)(y, size)

    assert torch.autograd.gradgradcheck(quartic, (y, size))
    at = y.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(quartic(at, 0.7).sum(), at)
    z = quartic(at, 0.7).detach()
    torch.testing.assert_close(slope, 1 / (1 + 3 * 0.7 * z.square()))


def test_derivative_where_the_minimum_is_held():
    """Zero at a kink and at an end, one beside them; from a Newton iteration none would be."""
    y = torch.tensor([-3.0, -0.4, 0.0, 0.9, 1.7, 6.0], dtype=torch.float64, requires_grad=True)
    prox = Proximal.from_penalty(absolute, upper=4.0)
    (slope,) = torch.autograd.grad(prox(y).sum(), y)
    assert slope.tolist() == [1, 0, 0, 0, 1, 0]


def test_nonconvex_penalties():
    prox = Proximal.from_penalty(double_well, window=(-3.0, 3.0))
    assert prox.convexity == pytest.approx(-1.0, abs=1e-4)
    with pytest.raises(ValueError, match="choose a size below 1"):
        prox(Y, 1.01)
    moved = prox(Y, 0.9)
    assert (0.9 * (moved**3 - moved) + moved - Y).abs().max() < 1e-13
    # A kink that points upwards is no convexity at any size.
    peak = Proximal.from_penalty(lambda z: -z.abs())
    with pytest.raises(ValueError, match="not strictly convex"):
        peak(Y, 0.1)
    # Promised too much: the bracket grows until it holds a root.
    promised = Proximal.from_penalty(double_well, convexity=10.0)
    torch.testing.assert_close(promised(Y, 0.9), moved)


def test_nan_stays_in_its_entry():
    prox = Proximal.from_penalty(absolute)
    y = torch.tensor([torch.nan, 2.0], dtype=torch.float64, requires_grad=True)
    moved = prox(y)
    assert moved.isnan().tolist() == [True, False]
    (slope,) = torch.autograd.grad(moved[1], y)
    assert slope[1] == 1
    assert prox.value(y).isnan().tolist() == [True, False]


def test_steep_penalties_in_float32():
    """From 1e4 the slope says 4e15, the root is 1.36: 4e3 z^3 + z = 1e4."""
    y = torch.tensor([1e4, -1e4, 0.5])
    z = Proximal.from_penalty(lambda z: z**4)(y, 1e3).double()
    # Relative to the larger of the terms that cancel.
    residual = 4e3 * z**3 + z - y
    assert (residual.abs() <= 8 * torch.finfo(torch.float32).eps * y.abs()).all()


def test_float32_and_pickle():
    prox = pickle.loads(pickle.dumps(Proximal.from_penalty(absolute)))
    torch.testing.assert_close(prox(Y.float(), 0.5), PROXES["soft_threshold"](Y.float(), 0.5))
    assert prox(torch.zeros(0)).shape == (0,)


def test_errors():
    with pytest.raises(ValueError, match="must be below"):
        Proximal.from_penalty(absolute, lower=1.0, upper=1.0)
    with pytest.raises(ValueError, match="does not meet the domain"):
        Proximal.from_penalty(absolute, lower=30.0)
    with pytest.raises(ValueError, match="name its domain"):
        Proximal.from_penalty(lambda z: -z.log())
