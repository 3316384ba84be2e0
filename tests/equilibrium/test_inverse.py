"""Inversions against planted couplings, through moments that are exact."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spinformer.equilibrium.exact import Exact
from spinformer.equilibrium.field_density import FieldDensity
from spinformer.equilibrium.inverse import (
    field_moments,
    fit_fields,
    fit_moments,
    mean_field_inversion,
    pair_inversion,
    spin_moments,
    tap_inversion,
)
from spinformer.equilibrium.steepest_descent import SteepestDescent
from spinformer.errors import ConvergenceError, ConvergenceWarning
from spinformer.spins.couplings import chain, sherrington_kirkpatrick
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem

N = 5


def planted(n: int = N, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return sherrington_kirkpatrick(n, generator=generator, dtype=torch.float64).to_dense()


def exact(
    j: Tensor, site: SiteLaw, beta: float, field: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Magnetization, correlations and covariance of one component, without sampling error."""
    field = torch.zeros(len(j), site.dim, dtype=torch.float64) if field is None else field
    equilibrium = Exact().solve(SpinSystem(j, field, beta, site))
    m, correlations = equilibrium.magnetization.detach(), equilibrium.correlations().detach()
    return m, correlations, (correlations - m @ m.mT) / site.dim


def uniform_field(n: int = N) -> Tensor:
    return torch.linspace(0.3, 0.9, n, dtype=torch.float64)[:, None]


def error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def test_moments_are_averages_over_samples(generator: torch.Generator) -> None:
    spins = torch.randn(50, 2, 4, 3, generator=generator, dtype=torch.float64)
    found = spin_moments(spins)
    assert found.correlations.shape == (2, 4, 4)
    assert torch.allclose(found.correlations, torch.einsum("mbia,mbja->bij", spins, spins) / 50)
    components = spins.movedim(-1, 0).movedim(1, -1)  # (D, B, N, M)
    mean = torch.stack(
        [torch.stack([torch.cov(x, correction=0) for x in batch]) for batch in components]
    ).mean(0)
    assert torch.allclose(found.covariance, mean)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_mean_field_inversion_is_exact_for_gaussian_spins(beta: float) -> None:
    site, j = Gaussian(2, 0.4), planted() / 2
    equilibrium = Exact().solve(SpinSystem(j, torch.ones(N, 2).double(), beta, site))
    covariance = equilibrium.susceptibility()[:, 0, :, 0].detach() / beta
    assert torch.allclose(mean_field_inversion(covariance, beta), j, atol=1e-12)


@pytest.mark.parametrize(("inversion", "ratio"), [("mean_field", 4), ("tap", 8)])
def test_errors_fall_as_the_order_of_the_theory(inversion: str, ratio: int) -> None:
    """Halving J divides the error of beta J by 4 (second order), TAP's by 8 (third order).

    The next order changes the ratio by O(beta J), here below 15 %.
    """
    errors = []
    for scale in (0.1, 0.05):
        j = scale * planted()
        m, _, covariance = exact(j, Ising(), 1.0, uniform_field())
        if inversion == "mean_field":
            found = mean_field_inversion(covariance)
        else:
            found = tap_inversion(covariance, m)
        errors.append(float((found - j).norm()))
    assert errors[0] / errors[1] == pytest.approx(ratio, rel=0.15)


def test_tap_inversion_solves_its_equation() -> None:
    m, _, covariance = exact(planted(), Ising(), 0.7, uniform_field())
    x = 0.7 * tap_inversion(covariance, m, 0.7)
    off = ~torch.eye(N, dtype=torch.bool)
    left = x + 2 * x**2 * (m @ m.mT)
    assert torch.allclose(left[off], -torch.linalg.inv(covariance)[off], atol=1e-12)


def test_tap_inversion_without_magnetization_is_mean_field() -> None:
    _, _, covariance = exact(planted(), Ising(), 0.7)
    found = tap_inversion(covariance, torch.zeros(N, dtype=torch.float64), 0.7)
    assert torch.equal(found, mean_field_inversion(covariance, 0.7))


def test_tap_inversion_says_where_it_has_no_root() -> None:
    """a = -(C^-1)_01 = -1 / 0.75 * 0.5 ... and 8 a m m = -3.2 < -1."""
    precision = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 1.0]]).double()
    m = torch.tensor([0.64, 0.64, 0.1]).double()
    covariance = torch.linalg.inv(precision)
    with pytest.raises(ValueError, match=r"1 pairs of spins \(the first: \[0, 1\].*-3\.277"):
        tap_inversion(covariance, m)
    found = tap_inversion(covariance, m, missing="nan")
    assert found.isnan().nonzero().tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("site", [Sphere(2), Sphere(3, radius=1.5), Sphere(8)], ids=str)
def test_mean_field_inversion_of_spheres_at_zero_field(site: Sphere) -> None:
    """Weak couplings come back from the covariance of one component, to second order."""
    errors = []
    for scale in (0.2, 0.1):
        j = chain(4, strength=scale, dtype=torch.float64).to_dense()
        errors.append(float((mean_field_inversion(exact(j, site, 0.6)[2], 0.6) - j).norm()))
    assert errors[0] < 0.05
    # Third order for spheres without a field: the loop of second order is absent on a chain.
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.2)


@pytest.mark.parametrize("site", [Ising(), Sphere(2), Sphere(5, radius=1.3)], ids=str)
def test_pair_inversion_is_exact_on_the_bonds_of_a_tree(site: SiteLaw) -> None:
    j = chain(4, strength=-0.7, dtype=torch.float64).to_dense()
    found = pair_inversion(exact(j, site, 1.2)[1], site, beta=1.2)
    assert torch.allclose(found[j != 0], j[j != 0], rtol=1e-9)
    assert float(found[0, 2].abs()) > 0.05  # a correlation without a bond


def test_pair_inversion_is_exact_for_two_ising_spins_in_fields() -> None:
    j = planted(2)
    m, correlations, _ = exact(j, Ising(), 0.8, uniform_field(2))
    found = pair_inversion(correlations, Ising(), m, 0.8)
    assert torch.allclose(found, j, rtol=1e-10)


def test_pair_inversion_of_inseparable_spins() -> None:
    correlations = torch.tensor([[1.0, 1.0, 0.2], [1.0, 1.0, 0.2], [0.2, 0.2, 1.0]]).double()
    for site in (Ising(), Sphere(2, radius=1.0)):
        with pytest.raises(ValueError, match=r"correlations\[0, 1\] = 1"):
            pair_inversion(correlations, site)
        found = pair_inversion(correlations, site, missing="nan")
        assert found.isnan().nonzero().tolist() == [[0, 1], [1, 0]]


# --- likelihood ---------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.5, 1.3])
def test_likelihood_recovers_couplings_and_fields_from_exact_moments(beta: float) -> None:
    """The maximum is where the moments agree: at the truth, to the residual times the largest
    inverse of the Fisher information (below 1e2 here)."""
    j, h = planted(), 0.3 * uniform_field()
    m, correlations, _ = exact(j, Ising(), beta, h)
    found = fit_moments(correlations, Ising(), m, beta, tolerance=1e-7)
    assert found.converged
    assert found.residual <= 1e-7
    assert torch.allclose(found.couplings, j, atol=1e-5)
    assert found.field is not None
    assert torch.allclose(found.field, h, atol=1e-5)
    # At the maximum the likelihood is minus the relative entropy of the law: S = beta (U - F)
    entropy = Exact().solve(SpinSystem(j, h, beta, Ising())).entropy.detach()
    assert found.log_likelihood == pytest.approx(-float(entropy), abs=1e-9)


def test_likelihood_on_a_tree_is_the_inversion_of_pairs() -> None:
    site = Sphere(3)
    j = chain(4, strength=0.6, dtype=torch.float64).to_dense()
    correlations = exact(j, site, 0.9)[1]
    noisy = correlations * 0.9  # no truth to hit: the two routes must agree on other data too
    found = fit_moments(noisy, site, beta=0.9, bonds=j != 0, tolerance=1e-7)
    expected = pair_inversion(noisy, site, beta=0.9).where(j != 0, 0.0)
    assert torch.allclose(found.couplings, expected, atol=1e-6)


def test_likelihood_by_steepest_descent_is_mean_field_inversion() -> None:
    """V = (D / beta) <S S>^-1 at its saddle: two derivations, one answer."""
    site, beta = LargeDSphere(6), 0.8
    spins = torch.randn(200, 4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    spins = spins + 0.3 * spins[:, :1]
    spins = site.radius * spins / spins.norm(dim=-1, keepdim=True)
    moments = spin_moments(spins)
    found = fit_moments(moments.correlations, site, beta=beta, approximation=SteepestDescent())
    expected = mean_field_inversion(moments.correlations / 6, beta)
    assert torch.allclose(found.couplings, expected, atol=1e-5)


@pytest.mark.stochastic
def test_likelihood_of_fields_has_the_error_of_its_fisher_information(
    generator: torch.Generator,
) -> None:
    """The squared error over 12 data sets, in units of the inverse information of the gradient.

    Each is a sum over 3 couplings, so that the mean is 1 +- sqrt(2 / 36) = 0.24: 4 sigma.
    """
    j, beta, variance, count = planted(3), 0.8, 9.0, 4000
    density = FieldDensity(j, Ising(), variance, beta)
    first, second = torch.triu_indices(3, 3, 1)
    solve = Exact().solve
    sample = density.sample(4000, generator=generator)
    clamped = solve(density.system(sample)).correlations().detach()
    free = solve(SpinSystem(j, torch.zeros(3, 1).double(), beta, Ising())).correlations().detach()
    gradient = beta * (clamped - free)[:, first, second]
    information = gradient.mT @ gradient / len(gradient)
    squares = []
    for _ in range(12):
        fields = density.sample(count, generator=generator)
        found = fit_fields(fields, Ising(), variance, beta)
        off = (found.couplings - j)[first, second]
        squares.append(count * float(off @ information @ off) / 3)
    assert abs(sum(squares) / 12 - 1) < 4 * math.sqrt(2 / 36)


def test_likelihood_of_fields_is_the_mean_log_prob() -> None:
    """The quick sum over states against the density, for the value and at the maximum."""
    j = planted(4)
    generator = torch.Generator().manual_seed(5)
    fields = FieldDensity(j, Ising(), 3.0, 0.7).sample(600, generator=generator)
    found = fit_fields(fields, Ising(), 3.0, 0.7)
    best = found.couplings.requires_grad_()
    mean = FieldDensity(best, Ising(), 3.0, 0.7).log_prob(fields).mean()
    assert found.log_likelihood == pytest.approx(float(mean.detach()), abs=1e-11)
    (gradient,) = torch.autograd.grad(mean, best)
    # one pair is two entries; the residual is in units of beta J
    assert float(gradient.abs().max()) <= 0.7 * found.residual


def test_likelihood_of_fields_of_two_spheres() -> None:
    """The maximum of the likelihood, against a scan of it on a grid around the answer."""
    site = Sphere(2, radius=1.0)
    j = torch.tensor([[0.0, 1.5], [1.5, 0.0]]).double()
    generator = torch.Generator().manual_seed(6)
    fields = FieldDensity(j, site, 6.0, 1.0).sample(60, generator=generator)
    found = fit_fields(fields, site, 6.0, tolerance=1e-5)
    best = float(found.couplings[0, 1])

    def mean(x: float) -> float:
        return float(FieldDensity(x * j / 1.5, site, 6.0).log_prob(fields).mean().detach())

    assert found.log_likelihood == pytest.approx(mean(best), abs=1e-10)
    assert mean(best) > max(mean(best - 0.02), mean(best + 0.02))


@pytest.mark.stochastic
def test_field_moments_are_those_of_the_spins(generator: torch.Generator) -> None:
    j = planted(4)
    density = FieldDensity(j, Ising(), 2.0, 0.7)
    fields = density.sample(40_000, generator=generator)
    found = field_moments(fields, 2.0, 0.7)
    expected = exact(j, Ising(), 0.7)[1]
    products = torch.einsum("mia,mja->mij", fields, fields) / (2.0 * 0.7) ** 2
    assert bool(((found.correlations - expected).abs() < 4.5 * products.std(0) / 200).all())


def test_data_that_do_not_bound_the_couplings() -> None:
    correlations = torch.tensor([[1.0, 1.0], [1.0, 1.0]]).double()
    with pytest.raises(ValueError, match="never part"):
        fit_moments(correlations, Ising())
    ridged = fit_moments(correlations, Ising(), ridge=0.1)
    x = float(ridged.couplings[0, 1])
    # 1 - tanh(x) = 0.1 x: the optimum of one pair by hand
    assert 1 - math.tanh(x) == pytest.approx(0.1 * x, abs=1e-6)
    # a frustrated triangle that no pair gives away: +1 +1 -1 is beyond the polytope
    impossible = torch.tensor([[1.0, 0.9, 0.9], [0.9, 1.0, -0.9], [0.9, -0.9, 1.0]]).double()
    with pytest.raises(ConvergenceError, match="ridge"):
        fit_moments(impossible, Ising())


def test_an_optimizer_that_stops_early_says_so() -> None:
    correlations = exact(planted(), Ising(), 1.0)[1]
    with pytest.raises(ConvergenceError, match="Raise max_iterations"):
        fit_moments(correlations, Ising(), max_iterations=1)
    with pytest.warns(ConvergenceWarning):
        found = fit_moments(correlations, Ising(), max_iterations=1, on_failure="warn")
    assert not found.converged
    assert found.residual > 1e-6


def test_wrong_input_is_named() -> None:
    covariance = torch.eye(3, dtype=torch.float64)
    singular = torch.ones(3, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="not positive definite.*shrinkage"):
        mean_field_inversion(singular)
    assert bool(mean_field_inversion(singular, shrinkage=0.1).isfinite().all())
    with pytest.raises(ValueError, match="differs from its transpose"):
        mean_field_inversion(torch.arange(9.0).reshape(3, 3))
    with pytest.raises(ValueError, match="shrinkage=2"):
        mean_field_inversion(covariance, shrinkage=2)
    with pytest.raises(ValueError, match="for Ising spins"):
        tap_inversion(covariance, torch.zeros(3, 2).double())
    with pytest.raises(ValueError, match="without a field only"):
        pair_inversion(covariance, Sphere(2), torch.zeros(3, 2).double())
    with pytest.raises(ValueError, match="mean_field_inversion"):
        pair_inversion(covariance, Gaussian(1))
    with pytest.raises(ValueError, match="mean_field_inversion"):
        fit_moments(covariance, Gaussian(1))
    with pytest.raises(ValueError, match="bonds is"):
        fit_moments(covariance, Ising(), bonds=torch.ones(3))
    with pytest.raises(ValueError, match="pass samples"):
        fit_fields(torch.zeros(3, 1), Ising(), 1.0)
    with pytest.raises(ValueError, match="pass samples"):
        spin_moments(torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"correlations have shape \(2, 3\)"):
        fit_moments(torch.zeros(2, 3), Ising())
    with pytest.raises(ValueError, match=r"magnetization has shape \(2, 1\)"):
        fit_moments(torch.eye(3), Ising(), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="tolerance=-1"):
        fit_moments(torch.eye(3), Ising(), tolerance=-1)
    with pytest.raises(ValueError, match="max_iterations=0"):
        fit_moments(torch.eye(3), Ising(), max_iterations=0)
    with pytest.raises(ValueError, match=r"variance=0\.0"):
        field_moments(torch.zeros(4, 3, 1), 0.0)
