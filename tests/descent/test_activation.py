"""Activations as proximal maps: conjugacy, minimization, and what GELU lacks."""

import math
import pickle

import mpmath
import pytest
import torch
import torch.nn.functional as F

from spinformer.descent.activation import (
    ACTIVATIONS,
    HardTanh,
    LeakyReLU,
    NumericActivation,
    Softplus,
    SoftThreshold,
    as_activation,
    check_size,
    increasing_root,
)

EPS = torch.finfo(torch.float64).eps
X = torch.linspace(-7, 7, 141, dtype=torch.float64) + 0.013  # off the kinks


def slope(function, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_and_range(name):
    sigma = ACTIVATIONS[name]
    x = torch.linspace(-30, 30, 20001, dtype=torch.float64)
    steepness = slope(sigma, x)
    least, largest = sigma.slopes
    assert steepness.min() >= least - EPS
    assert steepness.max() <= largest + EPS
    # The bounds are approached on this grid: flatness beyond x = 30, steepness within a cell.
    assert steepness.min() - least < 1e-12
    assert largest - steepness.max() < 1e-5
    for dtype in (torch.float32, torch.float64):
        values = sigma(x.to(dtype))
        assert (values >= sigma.lower).all() and (values <= sigma.upper).all()
        assert sigma.penalty(values).isfinite().all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_conjugates(name):
    """Fenchel: antiderivative(x) + conjugate(z) >= x z, with equality only at z = sigma(x)."""
    sigma = ACTIVATIONS[name]
    z = sigma(X)
    rounding = 32 * EPS * (1 + X.square())
    assert ((sigma.antiderivative(X) + sigma.conjugate(z) - X * z).abs() <= rounding).all()
    excess = sigma.antiderivative(X[:, None]) + sigma.conjugate(z) - X[:, None] * z
    assert (excess >= -rounding[:, None]).all()
    apart = (sigma(X[:, None]) - z).abs() > 0.1
    # A slope of at most L costs (z - sigma(x))^2 / (2 L) at least.
    assert (excess[apart] >= 0.99 * 0.01 / (2 * sigma.slopes[1])).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_are_those_of_the_values(name):
    """The graph is closed form; central differences see the values only."""
    sigma = ACTIVATIONS[name]
    h = 1e-5  # error h^2 / 6 of the third derivative, and EPS x^2 / h
    rise = (sigma.antiderivative(X + h) - sigma.antiderivative(X - h)) / (2 * h)
    torch.testing.assert_close(rise, sigma(X), rtol=0, atol=1e-8)
    torch.testing.assert_close(slope(sigma.antiderivative, X), sigma(X))
    inside = X[(sigma.lower + 1e-3 < X) & (sigma.upper - 1e-3 > X)]
    rise = (sigma.conjugate(inside + h) - sigma.conjugate(inside - h)) / (2 * h)
    torch.testing.assert_close(rise, sigma.inverse(inside), rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(slope(sigma.conjugate, inside), sigma.inverse(inside))
    point = inside[:: max(len(inside) // 3, 1)].requires_grad_()
    assert torch.autograd.gradgradcheck(sigma.conjugate, (point,))
    assert torch.autograd.gradgradcheck(sigma.antiderivative, (X[::40].clone().requires_grad_(),))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_inverse(name):
    """Where an interval has one value, the point nearest to the one that is asked for."""
    sigma = ACTIVATIONS[name]
    x = X[X.abs() < 5]
    # At |x| = 5 the slope of tanh is 2e-4: the rounding of its value costs that much more.
    torch.testing.assert_close(sigma.inverse(sigma(x), nearest=x), x, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(sigma(sigma.inverse(sigma(x))), sigma(x))
    outside = torch.tensor([sigma.lower - 1, sigma.upper + 1], dtype=torch.float64)
    finite = outside[outside.isfinite()]
    assert sigma.inverse(finite).isnan().all()
    assert (sigma.penalty(finite) == torch.inf).all()
    assert sigma.penalty(torch.tensor([torch.nan, sigma._inner])).isnan().tolist() == [True, False]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("size", [0.2, 1.0, 4.0])
def test_prox_is_the_minimum(name, size):
    """The objective is convex in one variable: nowhere lower nearby is nowhere lower at all."""
    sigma = ACTIVATIONS[name]
    moved = sigma.prox(X, size)

    def objective(z):
        return size * sigma.penalty(z) + (z - X).square() / 2

    least = objective(moved)
    assert least.isfinite().all()
    strong = 1 + size * sigma.convexity
    for step in (1e-4, 1e-2, 1.0):
        for other in (moved + step, moved - step):
            rounding = 32 * EPS * (1 + X.square())
            assert (objective(other) - least >= 0.99 * strong * step**2 / 2 - rounding).all()
    if size == 1.0:
        assert torch.equal(moved, sigma(X))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_prox_derivatives(name, generator):
    sigma = ACTIVATIONS[name]
    Y = (3 * torch.randn(3, 2, generator=generator, dtype=torch.float64)).requires_grad_()
    size = torch.tensor([[0.3], [0.9], [1.7]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sigma.prox, (Y, size))
    assert torch.autograd.gradgradcheck(sigma.prox, (Y, size))
    rows = sigma.prox(Y, size)
    for index, s in enumerate((0.3, 0.9, 1.7)):
        torch.testing.assert_close(rows[index], sigma.prox(Y[index], s))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_extremes_stay_where_they_are(name):
    sigma = ACTIVATIONS[name]
    Y = torch.tensor([torch.nan, 0.3, -1e4, 1e4], dtype=torch.float64, requires_grad=True)
    moved = sigma.prox(Y, 0.5)
    assert moved.isnan().tolist() == [True, False, False, False]
    torch.testing.assert_close(moved[1:], sigma.prox(Y[1:], 0.5))
    (grad,) = torch.autograd.grad(moved[1:].sum(), Y)
    assert grad[1:].isfinite().all()


def test_numeric_agrees_with_closed_forms():
    for function, closed in (
        (torch.tanh, ACTIVATIONS["tanh"]),
        (torch.sigmoid, ACTIVATIONS["sigmoid"]),
        (Softplus(), Softplus()),
        (LeakyReLU(0.2), LeakyReLU(0.2)),
        (HardTanh(-2, 1), HardTanh(-2, 1)),
        (SoftThreshold(0.7), SoftThreshold(0.7)),
    ):
        numeric = NumericActivation(
            function,
            lower=closed.lower,
            upper=closed.upper,
            flats=closed.flats,
            kinks=(0.0,),
        )
        assert numeric.slopes[1] == pytest.approx(closed.slopes[1], rel=1e-4)
        # Their constants differ by one of the antiderivative at zero.
        constant = closed.antiderivative(torch.zeros(1, dtype=torch.float64))
        torch.testing.assert_close(
            numeric.antiderivative(X) + constant, closed.antiderivative(X), rtol=1e-11, atol=1e-11
        )
        z = closed(X[X.abs() < 5])
        torch.testing.assert_close(
            numeric.penalty(z) - constant, closed.penalty(z), rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(numeric.prox(X, 0.4), closed.prox(X, 0.4))


def test_quadrature_near_and_far():
    """Relative accuracy near 0 on both sides, and beyond the last panel of either."""
    numeric = NumericActivation(torch.tanh, lower=-1, upper=1)
    x = torch.tensor([1e-8, 1e-4, 0.499, 0.501, 7.0, 1e4], dtype=torch.float64)
    x = torch.cat([-x, x])
    # log cosh without cancellation: x^2 / 2 - x^4 / 12 is exact to rounding below 1e-3.
    small = x.abs() < 1e-3
    expected = torch.where(small, x.square() / 2 - x**4 / 12, torch.logaddexp(x, -x) - math.log(2))
    torch.testing.assert_close(numeric.antiderivative(x), expected, rtol=1e-12, atol=0)
    assert numeric.antiderivative(torch.zeros(1)) == 0


def test_dilogarithm():
    """Against mpmath, on both sides of where the series are joined."""
    sigma = Softplus()
    points = [0.0, 1e-9, 0.01, 0.7, 1.4999, 1.5, 1.5001, 3.0, 20.0]
    z = torch.tensor(points, dtype=torch.float64)
    expected = [float(mpmath.polylog(2, mpmath.exp(-p)) - mpmath.pi**2 / 6) for p in points]
    torch.testing.assert_close(
        sigma.penalty(z), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=4 * EPS
    )
    for x in (-30.0, -2.0, 0.0, 0.5, 40.0):
        expected = float(mpmath.re(-mpmath.polylog(2, -mpmath.exp(x))))
        value = sigma.antiderivative(torch.tensor(x, dtype=torch.float64))
        assert float(value) == pytest.approx(expected, rel=4e-15, abs=4 * EPS)


@pytest.mark.parametrize(
    ("function", "name", "least", "fall", "steepest"),
    [
        (F.gelu, "monotone_gelu", -0.75179, 0.16997, 1.12890),
        (F.silu, "monotone_silu", -1.27846, 0.27846, 1.09984),
    ],
)
def test_gelu_is_no_proximal_map(function, name, least, fall, steepest):
    """A proximal map never decreases; these do, from 0 at -infinity to their least value."""
    x = torch.linspace(-12, 12, 240001, dtype=torch.float64)
    assert slope(function, x).min() < -0.09
    assert slope(function, x).max() == pytest.approx(steepest, abs=1e-5)
    assert float(x[function(x).argmin()]) == pytest.approx(least, abs=1e-4)
    sigma = ACTIVATIONS[name]
    right = x >= least + 1e-4
    torch.testing.assert_close(sigma(x[right]), function(x[right]))
    gap = function(x) - sigma(x)
    assert gap.min() >= 0
    assert gap.max() == pytest.approx(fall, abs=1e-4)
    # Half of the fall is the distance of the nearest non-decreasing function: the middle between
    # the running maximum from the left and the running minimum from the right.
    middle = (function(x).cummax(0).values + function(x).flip(0).cummin(0).values.flip(0)) / 2
    assert (middle.diff() >= 0).all()
    assert (middle - function(x)).abs().max() == pytest.approx(fall / 2, abs=1e-4)
    with pytest.raises(ValueError, match="function falls near"):
        NumericActivation(function)
    with pytest.raises(ValueError, match="function is NaN near"):
        NumericActivation(torch.log)
    with pytest.raises(ValueError, match="use 'monotone_"):
        as_activation(name.removeprefix("monotone_"))


def test_weak_convexity_bounds_the_size():
    sigma = ACTIVATIONS["monotone_gelu"]
    limit = -1 / sigma.convexity
    assert limit == pytest.approx(8.7577, abs=1e-3)
    below = sigma.prox(X, 0.99 * limit)
    assert (below.diff() >= 0).all()
    with pytest.raises(ValueError, match="not strictly convex"):
        sigma.prox(X, 1.01 * limit)
    with pytest.raises(ValueError, match="not strictly convex"):
        sigma.prox(X, torch.tensor(9.0))


def test_any_monotone_function_is_a_proximal_map_of_a_nonconvex_penalty():
    """Slopes up to 3: at sizes below 3/2 the objective is convex all the same."""
    sigma = NumericActivation(lambda x: 3 * torch.tanh(x), lower=-3, upper=3)
    assert sigma.convexity == pytest.approx(-2 / 3, abs=1e-4)
    z = torch.linspace(-2.9, 2.9, 101, dtype=torch.float64)
    assert sigma.penalty(z).diff(n=2).min() < 0
    for size in (0.5, 1.0, 1.4):
        moved = sigma.prox(X, size)
        # x = artanh(z / 3) is the inverse.
        slope_there = size * (torch.atanh(moved / 3) - moved) + moved - X
        inside = moved.abs() < 2.99
        assert slope_there[inside].abs().max() < 1e-11
    with pytest.raises(ValueError, match="not strictly convex"):
        sigma.prox(X, 1.6)


def test_float32():
    for sigma in ACTIVATIONS.values():
        torch.testing.assert_close(sigma.prox(X.float(), 0.3), sigma.prox(X, 0.3).float())
        assert sigma.prox(X.float(), 0.3).dtype == torch.float32


def test_increasing_root_finds_jumps_and_ends():
    jump = torch.tensor([-1.5, 0.0, 0.3, 2.5], dtype=torch.float64)
    low, high = torch.full_like(jump, -10), torch.full_like(jump, 7)
    found = increasing_root(
        lambda x: ((x - jump).sign() + 0.01 * x.clamp(-1, 1), torch.full_like(x, 0.01)), low, high
    )
    torch.testing.assert_close(found, jump, rtol=0, atol=1e-14)
    always = increasing_root(lambda x: (x + 100, torch.ones_like(x)), low, high)
    torch.testing.assert_close(always, low)
    steep = increasing_root(lambda x: (torch.expm1(50 * x), 50 * torch.exp(50 * x)), low, high)
    assert steep.abs().max() < 1e-15
    # A bracket of 1e15 around a root of size 1, in float32: the far end says nothing of its scale.
    far = increasing_root(
        lambda x: (x**3 + x - 2, 3 * x**2 + 1), torch.tensor([-4e15]), torch.tensor([1e4])
    )
    torch.testing.assert_close(far, torch.ones(1))
    cube = increasing_root(lambda x: (x**3 - jump, 3 * x**2), low, high)
    torch.testing.assert_close(cube**3, jump, rtol=1e-12, atol=1e-12)


def test_pickle_and_errors():
    for sigma in ACTIVATIONS.values():
        copy = pickle.loads(pickle.dumps(sigma))
        assert torch.equal(copy.prox(X, 0.5), sigma.prox(X, 0.5))
    assert as_activation(ACTIVATIONS["tanh"]) is ACTIVATIONS["tanh"]
    with pytest.raises(ValueError, match="nearest is 'sigmoid'"):
        as_activation("sigmoi")
    with pytest.raises(ValueError, match="slope=1.5"):
        LeakyReLU(1.5)
    with pytest.raises(ValueError, match="threshold=-1"):
        SoftThreshold(-1)
    with pytest.raises(ValueError, match="must be below"):
        HardTanh(1, 1)
    for size in (0.0, -1.0, math.nan, torch.tensor([1.0, 0.0])):
        with pytest.raises(ValueError, match="must be positive"):
            check_size(size)
    check_size(torch.ones(0))
    assert LeakyReLU(0.0).prox(torch.zeros(0)).shape == (0,)
