"""Bessel ratio, its slope and the log-normalizer against 25-digit values and against mpmath."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mpmath
import pytest
import torch

from spinformer.spins.special import (
    bessel_ratio,
    bessel_ratio_derivative,
    inverse_reduced_ratio,
    log_normalizer,
    log_normalizer_squared,
    reduced_jet,
    reduced_ratio,
    reduced_slope,
)

RECORDS = json.loads((Path(__file__).parents[1] / "data" / "special.json").read_text())
SINGLE_SPIN = [r for r in RECORDS if r["name"] == "single_spin"]

# What the module promises; float32 inputs are compared with the function at the rounded input.
TOLERANCE = {torch.float64: 2e-12, torch.float32: 1e-6}


def reference(dim: int, kappa: float) -> dict[str, mpmath.mpf]:
    """log z, A, A' and A'' by Bessel functions at 40 digits more than cancellations take."""
    # A' and A'' lose up to three times the digits of kappa and of D.
    with mpmath.workdps(40 + 3 * max(0, int(math.log10(kappa))) + 8):
        k, nu = mpmath.mpf(kappa), mpmath.mpf(dim) / 2 - 1
        low, high = mpmath.besseli(nu, k), mpmath.besseli(nu + 1, k)
        a = high / low
        slope = 1 - a * a - (dim - 1) * a / k
        curvature = -2 * a * slope - (dim - 1) * (slope / k - a / k**2)
        log_z = mpmath.loggamma(nu + 1) + nu * mpmath.log(2 / k) + mpmath.log(low)
        return {"log_z": log_z, "a": a, "slope": slope, "curvature": curvature}


def relative(found: torch.Tensor, expected: mpmath.mpf) -> float:
    return float(abs(mpmath.mpf(float(found)) - expected) / abs(expected))


def test_records() -> None:
    for record in SINGLE_SPIN:
        dim = record["params"]["D"]
        kappa = torch.tensor(record["params"]["kappa"], dtype=torch.float64)
        expected = record["value"]
        for function, key in (
            (log_normalizer, "logz_str"),
            (bessel_ratio, "A_str"),
            (bessel_ratio_derivative, "A_prime_str"),
        ):
            value = mpmath.mpf(expected[key])
            if value == 0:  # the record rounds 1 / cosh^2 of 255 and more to zero
                assert float(function(kappa, dim)) < 2e-221
                continue
            error = relative(function(kappa, dim), value)
            assert error < TOLERANCE[torch.float64], (function.__name__, record["params"], error)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_against_mpmath_over_the_whole_range(dtype: torch.dtype) -> None:
    # The orders around 24 and 6, where the recurrence takes over from the expansion, are D = 50 and
    # 14; below them every D takes a different number of steps. kappa = sqrt(8 (D + 2)) is where a
    # power series would stop serving.
    draw = torch.Generator().manual_seed(0)
    dims = [2, 3, 4, 5, 7, 13, 14, 15, 48, 49, 50, 51, 64, 128, 511, 512, 1000, 4095, 4096]
    for dim in dims:
        kappas = [10 ** (-12 + 18 * float(u)) for u in torch.rand(3, generator=draw)]
        kappas += [1e-30, dim / 2, math.sqrt(8 * (dim + 2)), 1e10]
        for value in kappas:
            kappa = torch.tensor(value, dtype=dtype)
            # In float32 kappa^2 of 1e-30 is not a number any more, and neither is log z.
            if dtype == torch.float32 and value < 1e-15:
                continue
            expected = reference(dim, float(kappa))
            for function, key in (
                (log_normalizer, "log_z"),
                (bessel_ratio, "a"),
                (bessel_ratio_derivative, "slope"),
            ):
                if key == "log_z" and value < 1e-15:  # kappa^2 / 2 D underflows its own rounding
                    continue
                error = relative(function(kappa, dim), expected[key])
                assert error < TOLERANCE[dtype], (function.__name__, dim, value, error)


def test_second_derivative_against_mpmath() -> None:
    for dim in (2, 3, 8, 50, 64, 512, 4096):
        for value in (0.3, dim / 3, float(dim), 40.0 * dim):
            kappa = torch.tensor(value, dtype=torch.float64, requires_grad=True)
            (slope,) = torch.autograd.grad(bessel_ratio(kappa, dim), kappa, create_graph=True)
            (curvature,) = torch.autograd.grad(slope, kappa)
            expected = reference(dim, value)
            assert relative(slope.detach(), expected["slope"]) < 2e-12
            # A'' changes sign nowhere; the tolerance is that of A' times the terms it adds up from.
            assert relative(curvature, expected["curvature"]) < 2e-11, (dim, value)


def reduced_derivatives(dim: int, x: float) -> list[mpmath.mpf]:
    """a and four derivatives, from the series about x of Riccati's 2 x a' = 1 - x a^2 - D a."""
    # Each coefficient is a difference of terms that are as large as 1 / x times it.
    with mpmath.workdps(200):
        point, nu = mpmath.mpf(x), mpmath.mpf(dim) / 2 - 1
        root = mpmath.sqrt(point)
        c = [mpmath.besseli(nu + 1, root) / mpmath.besseli(nu, root) / root]
        for k in range(4):
            square = [sum(c[i] * c[j - i] for i in range(j + 1)) for j in range(k + 1)]
            right = (k == 0) - point * square[k] - (square[k - 1] if k else 0) - dim * c[k]
            c.append((right - 2 * k * c[k]) / (2 * point * (k + 1)))
        return [mpmath.factorial(k) * value for k, value in enumerate(c)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_jet_and_its_derivatives_against_mpmath(dtype: torch.dtype) -> None:
    """a, a', a'' and F of the jet; two more derivatives of a from it by autograd."""
    # A derivative loses digits to the expansion's truncation, most for D near 50 at weak fields.
    losses = [1.0, 1.0, 1.0, 100.0, 5e3]
    for dim in (2, 3, 14, 49, 50, 64, 512):
        for value in (1e-4, 0.3, dim / 3, float(dim), 40.0 * dim):
            x = torch.tensor(value**2, dtype=dtype, requires_grad=True)
            a, first, second, slope = reduced_jet(x, dim)
            (third,) = torch.autograd.grad(second, x, create_graph=True)
            (fourth,) = torch.autograd.grad(third, x)
            expected = reduced_derivatives(dim, float(x.detach()))
            found = (a, first, second, third, fourth)
            for order, (one, two) in enumerate(zip(found, expected, strict=True)):
                if dtype == torch.float32 and abs(two) < 1e-37:  # no number of full precision
                    continue
                # In float32 all is computed in float64 and rounded.
                limit = 2e-12 * losses[order] if dtype == torch.float64 else 2e-7
                assert relative(one.detach(), two) < limit, (dim, value, order)
            exact = reduced_slope(x.detach(), dim)
            torch.testing.assert_close(slope.detach(), exact, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("dim", [1, 2, 3, 64])
def test_derivatives_of_the_jet(dim: int) -> None:
    """Every order that is asked of it, at zero field too; beyond the last it says so."""
    x = torch.tensor([0.01, 0.3, 5.0, 60.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reduced_jet(x, dim), x)
    assert torch.autograd.gradgradcheck(lambda x: reduced_jet(x, dim), x)
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    a, first, second, slope = reduced_jet(zero, dim)
    expected = (1 / dim, -1 / (dim**2 * (dim + 2)), 4 / (dim**3 * (dim + 2) * (dim + 4)), 1 / dim)
    for one, two in zip((a, first, second, slope), expected, strict=True):
        assert float(one.detach()) == pytest.approx(two, rel=1e-12)
    (third,) = torch.autograd.grad(second, zero, create_graph=True)
    (fourth,) = torch.autograd.grad(third, zero, create_graph=True)
    with pytest.raises(NotImplementedError, match="fourth order"):
        torch.autograd.grad(fourth, zero, create_graph=True)


@pytest.mark.parametrize(
    ("order", "kappa", "expected"),
    [
        (255, 1.0, 0.00195311757846617),
        (511, 50.0, 0.0487124852322949),
        (0.5, 1e10, 0.9999999999),
        (31, 1e-30, 1.5625e-32),
    ],
)
def test_ratios_where_scaled_bessel_functions_underflow(
    order: float, kappa: float, expected: float
) -> None:
    ratio = bessel_ratio(torch.tensor(kappa, dtype=torch.float64), int(2 * order + 2))
    assert float(ratio) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("dim", [1, 2, 3, 17, 64, 4096])
def test_derivatives_at_zero_field(dim: int) -> None:
    """A = k/D - k^3 / D^2 (D+2) + ..., log z = k^2 / 2D - ...: exact coefficients."""
    kappa = torch.zeros((), dtype=torch.float64, requires_grad=True)
    derivatives = [bessel_ratio(kappa, dim)]
    for _ in range(3):
        derivatives += torch.autograd.grad(derivatives[-1], kappa, create_graph=True)
    expected = [0.0, 1 / dim, 0.0, -6 / (dim**2 * (dim + 2))]
    for found, value in zip(derivatives, expected, strict=True):
        assert float(found.detach()) == pytest.approx(value, rel=1e-14, abs=0)
    (slope,) = torch.autograd.grad(log_normalizer(kappa, dim), kappa, create_graph=True)
    assert float(slope.detach()) == 0
    assert float(torch.autograd.grad(slope, kappa)[0]) == pytest.approx(1 / dim, rel=1e-14)

    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(log_normalizer_squared(x, dim), x)
    assert float(slope) == pytest.approx(1 / (2 * dim), rel=1e-14)
    (slope,) = torch.autograd.grad(reduced_ratio(x, dim), x)
    assert float(slope) == pytest.approx(-1 / (dim**2 * (dim + 2)), rel=1e-14)
    (slope,) = torch.autograd.grad(inverse_reduced_ratio(x, dim), x)
    # kappa / r = D + D^2 r^2 / (D + 2) + ...
    assert float(slope) == pytest.approx(dim**2 / (dim + 2), rel=1e-13)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 49, 64, 512])
@pytest.mark.parametrize(
    "function",
    [
        bessel_ratio,
        bessel_ratio_derivative,
        log_normalizer,
        log_normalizer_squared,
        reduced_ratio,
        reduced_slope,
    ],
)
def test_gradcheck_twice(function, dim: int) -> None:
    # Zero, weak and strong; scaled with D, where the functions bend.
    # Finite differences step to the other side of zero, where D = 1 takes a square root.
    points = torch.tensor([0.0, 0.4, 1.0, 5.0], dtype=torch.float64) * (1 + dim / 4)
    points[0] = 0.1 if dim == 1 else 0.0
    points.requires_grad_()
    assert torch.autograd.gradcheck(lambda k: function(k, dim), points)
    assert torch.autograd.gradgradcheck(lambda k: function(k, dim), points)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 64, 1024])
def test_inverse(dim: int) -> None:
    kappa = dim * torch.tensor([1e-8, 1e-3, 0.1, 1.0, 10.0], dtype=torch.float64)
    ratio = bessel_ratio(kappa, dim)
    inverse = inverse_reduced_ratio(ratio**2, dim) * ratio
    # d kappa / d r = 1 / A': a rounding of r is amplified by r / (kappa A').
    amplified = ratio / (kappa * bessel_ratio_derivative(kappa, dim))
    eps = torch.finfo(torch.float64).eps
    assert bool(((inverse / kappa - 1).abs() < 8 * eps * (1 + amplified)).all())
    y = torch.tensor([0.01, 0.2, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: inverse_reduced_ratio(t, dim), y)
    outside = torch.tensor([-0.1, 1.0, 1.5], dtype=torch.float64)
    assert bool(inverse_reduced_ratio(outside, dim).isnan().all())


def test_amos_bounds() -> None:
    for dim in (2, 3, 16, 512, 4096):
        kappa = torch.logspace(-6, 9, 200, dtype=torch.float64)
        nu = dim / 2 - 1
        ratio = bessel_ratio(kappa, dim)
        lower = kappa / (nu + 0.5 + torch.sqrt((nu + 1.5) ** 2 + kappa**2))
        upper = kappa / (nu + torch.sqrt((nu + 2) ** 2 + kappa**2))
        slack = 4 * torch.finfo(torch.float64).eps  # the bounds meet the ratio at both ends
        assert bool((ratio >= lower * (1 - slack)).all())
        assert bool((ratio <= upper * (1 + slack)).all())


def test_one_dimension_is_hyperbolic() -> None:
    kappa = torch.linspace(0.01, 30, 50, dtype=torch.float64)
    torch.testing.assert_close(bessel_ratio(kappa, 1), torch.tanh(kappa), rtol=1e-14, atol=0)
    expected = kappa + torch.log1p(torch.exp(-2 * kappa)) - math.log(2)
    # log cosh at small kappa cancels in the formula on the right, not in the library.
    torch.testing.assert_close(log_normalizer(kappa, 1), expected, rtol=1e-13, atol=2e-16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_float32(dtype: torch.dtype) -> None:
    kappa = torch.tensor([0.0, 0.5, 3.0, 40.0]).to(dtype)
    for dim in (2, 64):
        found = bessel_ratio(kappa, dim)
        assert found.dtype == dtype
        torch.testing.assert_close(found, bessel_ratio(kappa.float(), dim).to(dtype))


@pytest.mark.parametrize("dim", [0, -3, 2.5, True])
def test_bad_dimension(dim: object) -> None:
    with pytest.raises(ValueError, match="dim="):
        bessel_ratio(torch.ones(2), dim)  # type: ignore[arg-type]


def test_shapes() -> None:
    assert bessel_ratio(torch.zeros(0, 3), 5).shape == (0, 3)
    assert log_normalizer(torch.ones(2, 1, 3), 5).shape == (2, 1, 3)


def test_half_precision_squares_in_float32():
    kappa = torch.tensor([0.5, 300.0, 60000.0], dtype=torch.float16)
    for function in (bessel_ratio, log_normalizer):
        found = function(kappa, 3)
        assert found.dtype == torch.float16
        torch.testing.assert_close(found, function(kappa.double(), 3).half())
