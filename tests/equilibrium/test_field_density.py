"""The density of fields against quadrature, moments, draws and identities."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from spinformer.equilibrium.exact import Exact
from spinformer.equilibrium.field_density import FieldDensity, ising_states
from spinformer.equilibrium.mean_field import MeanField
from spinformer.equilibrium.steepest_descent import SteepestDescent
from spinformer.errors import ConvergenceError, ConvergenceWarning
from spinformer.spins.couplings import chain, ring, sherrington_kirkpatrick
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem

# (site, number of spins): all that Exact solves in fields. At most four components to integrate.
CASES = [
    (Ising(), 1),
    (Ising(), 2),
    (Ising(), 3),
    (Sphere(2), 1),
    (Sphere(2, radius=0.8), 2),
    (Sphere(3), 1),
    (Gaussian(1, variance=0.5), 2),
    (Gaussian(2, variance=0.5), 1),
]
BETA, VARIANCE = 0.9, 0.7


def couplings(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return sherrington_kirkpatrick(n, generator=generator, dtype=torch.float64).to_dense()


def hermite(components: int, points: int | None = None) -> tuple[Tensor, Tensor]:
    """Nodes (P, components) and weights of Gauss's rule for a standard normal law."""
    points = (60, 40, 20, 8)[components - 1] if points is None else points
    x, w = np.polynomial.hermite_e.hermegauss(points)
    nodes = torch.tensor(list(itertools.product(x, repeat=components)), dtype=torch.float64)
    weights = torch.tensor(list(itertools.product(w, repeat=components)), dtype=torch.float64)
    return nodes, weights.prod(-1) / (2 * math.pi) ** (components / 2)


@pytest.mark.parametrize(("site", "n"), CASES, ids=str)
def test_log_prob_integrates_to_one(site: SiteLaw, n: int) -> None:
    """By a Gauss rule for a normal law, which never sees the closed form of Z_0.

    With as few points as 8 along each of four axes it is off by 1.2e-7; what it is to find, a
    normalizer that is wrong in any of its factors, changes the mass by 0.1 and more.
    """
    density = FieldDensity(couplings(n), site, VARIANCE, BETA)
    # A wider law than the base holds the tails, where the fields of aligned spins lie.
    width = math.sqrt(1.3 * VARIANCE)
    nodes, weights = hermite(n * site.dim)
    field = width * nodes.reshape(-1, n, site.dim)
    log_rule = -nodes.square().sum(-1) / 2 - n * site.dim * math.log(width * math.sqrt(2 * math.pi))
    mass = weights * (density.log_prob(field) - log_rule).exp()
    assert float(mass.sum()) == pytest.approx(1, abs=1e-6)
    # The same rule gives the mean and the covariance that the docs state.
    assert torch.allclose(
        torch.einsum("p,pia->ia", mass, field), torch.zeros(n, site.dim).double(), atol=1e-12
    )
    if site.radius is not None:
        free = SpinSystem(couplings(n), torch.zeros(n, site.dim).double(), BETA, site)
        spins = Exact().solve(free).correlations()
        expected = (VARIANCE * BETA) ** 2 * spins + site.dim * VARIANCE * torch.eye(n)
        found = torch.einsum("p,pia,pja->ij", mass, field, field)
        assert torch.allclose(found, expected, atol=1e-5)


def test_closed_form_is_the_average_of_z_over_the_base() -> None:
    """Z_0 = E[Z(J, h)] over the base: a mixture over the spins, summed by hand."""
    j = couplings(3)
    density = FieldDensity(j, Ising(), VARIANCE, BETA)
    states = ising_states(3)
    # E exp(beta h . S) = exp(beta^2 sigma^2 |S|^2 / 2), one spin after the other
    weight = BETA / 2 * ((states @ j) * states).sum(-1) + 3 * VARIANCE * BETA**2 / 2
    expected = weight.exp().mean().log()
    found = density.log_normalizer()
    assert torch.allclose(found.value, expected, rtol=1e-13)
    assert float(found.standard_error) == 0
    assert math.isinf(float(found.effective_sample_size))


@pytest.mark.parametrize(("site", "n"), [*CASES, (Gaussian(2, 0.4), 5), (Ising(), 6)], ids=str)
def test_importance_sampling_agrees_with_the_closed_form(site: SiteLaw, n: int) -> None:
    """Within 4 standard errors; the error itself is right: z-scores of 20 runs have spread 1."""
    density = FieldDensity(couplings(n), site, VARIANCE, BETA)
    exact = density.log_normalizer().value
    scores = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        found = density.log_normalizer("importance", num_samples=300, generator=generator)
        error = float(found.standard_error)
        if n == 1:  # the proposal is the density itself: no error at all
            assert error < 1e-6
            assert float(found.value) == pytest.approx(float(exact), abs=1e-12)
            return
        scores.append((float(found.value) - float(exact)) / error)
    spread = math.sqrt(np.mean(np.square(scores)))
    # the root of a mean of 20 squares: 1 +- 0.16
    assert 0.4 < spread < 1.7
    assert max(map(abs, scores)) < 5


def test_importance_sampling_says_when_it_fails() -> None:
    density = FieldDensity(couplings(8) * 6, Ising(), 4.0, 1.0)
    options = {"num_samples": 150, "generator": torch.Generator().manual_seed(0)}
    with pytest.raises(ConvergenceError, match="raise num_samples"):
        density.log_normalizer("importance", **options)  # type: ignore[arg-type]
    with pytest.warns(ConvergenceWarning, match="are worth"):
        density.log_normalizer("importance", on_failure="warn", **options)  # type: ignore[arg-type]
    messages: list[str] = []
    density.log_normalizer("importance", on_failure=messages.append, **options)  # type: ignore[arg-type]
    assert len(messages) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        density.log_normalizer("importance", on_failure="ignore", **options)  # type: ignore[arg-type]


@pytest.mark.stochastic
@pytest.mark.parametrize(
    ("site", "n"),
    [(Ising(), 5), (Sphere(3), 4), (Sphere(2), 1), (Gaussian(2, 0.4), 5), (LargeDSphere(5), 3)],
    ids=str,
)
def test_ancestral_draws_have_the_moments_of_the_law(
    site: SiteLaw, n: int, generator: torch.Generator
) -> None:
    """Means of 40,000 draws within 4.5 of their standard errors of the exact second moments."""
    j = chain(n, strength=0.8, dtype=torch.float64).to_dense() if site.dim > 1 else couplings(n)
    density = FieldDensity(j, site, VARIANCE, BETA)
    spins = density.sample_spins(40_000, generator=generator)
    field = density.observe(spins, generator=generator)
    if isinstance(site, Gaussian):
        tilt = site.variance * VARIANCE * BETA**2
        inverse = (1 - tilt) * torch.eye(n).double() - site.variance * BETA * j
        expected = site.dim * site.variance * torch.linalg.inv(inverse)
    else:
        true_site = Sphere(site.dim, site.radius) if isinstance(site, LargeDSphere) else site
        free = SpinSystem(j, torch.zeros(n, site.dim).double(), BETA, true_site)
        expected = Exact().solve(free).correlations()
    noise = site.dim * VARIANCE * torch.eye(n)
    for draws, moments in (
        (spins, expected),
        (field, (VARIANCE * BETA) ** 2 * expected + noise),
    ):
        products = torch.einsum("mia,mja->mij", draws, draws)
        error = products.std(0) / math.sqrt(len(draws))
        # (a spin's length has no spread)
        assert bool(((products.mean(0) - moments).abs() <= 4.5 * error + 1e-9).all())
        assert bool((draws.mean(0).abs() <= 4.5 * draws.std(0) / 200).all())


@pytest.mark.stochastic
def test_draws_follow_log_prob(generator: torch.Generator) -> None:
    """E[exp(log q - log p)] = 1 over draws of p, for the density q of other couplings: draws and
    density must be those of each other for every function, and this one reads all of both."""
    density = FieldDensity(couplings(5), Ising(), VARIANCE, BETA)
    other = FieldDensity(couplings(5, seed=1), Ising(), VARIANCE, BETA)
    field = density.sample(20_000, generator=generator)
    ratio = (other.log_prob(field) - density.log_prob(field)).exp()
    assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / math.sqrt(len(ratio))
    # and it is no identity: with the roles mixed up it fails
    wrong = (density.log_prob(field) - other.log_prob(field)).exp()
    assert abs(float(wrong.mean()) - 1) > 4 * float(wrong.std()) / math.sqrt(len(wrong))


def test_gradient_in_the_field_is_the_denoising_identity() -> None:
    field = torch.randn(3, 4, 1, dtype=torch.float64).requires_grad_()
    density = FieldDensity(couplings(4), Ising(), VARIANCE, BETA)
    (gradient,) = torch.autograd.grad(density.log_prob(field).sum(), field)
    m = Exact().solve(density.system(field.detach())).magnetization
    assert torch.allclose(gradient, BETA * m - field / VARIANCE, atol=1e-12)


def test_gradient_in_the_couplings_is_that_of_boltzmann_learning() -> None:
    field = torch.randn(4, 1, dtype=torch.float64)
    j = couplings(4).requires_grad_()
    log_p = FieldDensity(j, Ising(), VARIANCE, BETA).log_prob(field)
    (gradient,) = torch.autograd.grad(log_p, j)
    solve = Exact().solve
    clamped = solve(SpinSystem(j.detach(), field, BETA, Ising())).correlations()
    free = solve(SpinSystem(j.detach(), 0 * field, BETA, Ising())).correlations()
    symmetric = (gradient + gradient.mT) / 2
    assert torch.allclose(symmetric, BETA / 2 * (clamped - free), atol=1e-12)


def test_log_prob_is_differentiable_in_everything() -> None:
    field = torch.randn(2, 3, 1, dtype=torch.float64).requires_grad_()
    j, beta = couplings(3).requires_grad_(), torch.tensor(0.8).double().requires_grad_()

    def log_prob(j: Tensor, field: Tensor, beta: Tensor) -> Tensor:
        return FieldDensity((j + j.mT) / 2, Ising(), VARIANCE, beta).log_prob(field)

    assert gradcheck(log_prob, (j, field, beta))


def test_score_ranks_and_estimates_what_log_prob_knows() -> None:
    field = torch.randn(6, 4, 1, dtype=torch.float64)
    density = FieldDensity(couplings(4), Ising(), VARIANCE, BETA)
    difference = density.score(field) - density.log_prob(field)
    assert torch.allclose(difference, density.log_normalizer().value.expand(6), atol=1e-12)


@pytest.mark.parametrize("approximation", [MeanField(), SteepestDescent()])
def test_an_approximation_gives_a_score_only(
    approximation: MeanField | SteepestDescent, generator: torch.Generator
) -> None:
    density = FieldDensity(couplings(3) / 2, Ising(), 0.3, 0.5, approximation)
    field = torch.randn(3, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"log_prob: .* Use score\(field\)"):
        density.log_prob(field)
    with pytest.raises(ValueError, match="Use method='importance'"):
        density.log_normalizer()
    # The estimate is the integral of that score: by a Gauss rule over the base.
    nodes, weights = hermite(3, points=12)
    log_z = approximation.solve(density.system(math.sqrt(0.3) * nodes[..., None])).log_partition
    expected = float((weights * log_z.exp()).sum().log())
    found = density.log_normalizer("importance", num_samples=2000, generator=generator)
    assert abs(float(found.value) - expected) < 4 * float(found.standard_error)


def test_amortized_couplings_give_a_score_only(generator: torch.Generator) -> None:
    def amortized(field: Tensor) -> Tensor:
        return torch.tanh(field @ field.mT) / 4

    density = FieldDensity(amortized, Ising(), 0.5, torch.ones(()).double(), num_spins=2)
    field = torch.randn(5, 2, 1, dtype=torch.float64)
    by_hand = Exact().solve(SpinSystem(amortized(field), field, 1.0, Ising())).log_partition
    base = torch.distributions.Normal(0, math.sqrt(0.5)).log_prob(field).sum((-1, -2))
    assert torch.allclose(density.score(field), base + by_hand, atol=1e-12)
    with pytest.raises(ValueError, match="couplings that depend on the field"):
        density.log_prob(field)
    with pytest.raises(ValueError, match="fixed couplings"):
        density.sample(3)
    nodes, weights = hermite(2, points=40)
    expected = float(
        (
            weights
            * (
                density.score(nodes[..., None] * math.sqrt(0.5))
                - torch.distributions.Normal(0, math.sqrt(0.5))
                .log_prob(nodes * math.sqrt(0.5))
                .sum(-1)
            ).exp()
        )
        .sum()
        .log()
    )
    found = density.log_normalizer("importance", num_samples=3000, generator=generator)
    assert abs(float(found.value) - expected) < 4 * float(found.standard_error)
    with pytest.raises(ValueError, match="num_spins=N"):
        FieldDensity(amortized, Ising(), 0.5).log_normalizer("importance")


def test_absent_sites_have_no_field(generator: torch.Generator) -> None:
    j = couplings(4)
    mask = torch.tensor([False, True, False, False])
    density = FieldDensity(j, Ising(), VARIANCE, BETA, mask=mask)
    keep = ~mask
    smaller = FieldDensity(j[keep][:, keep], Ising(), VARIANCE, BETA)
    field = torch.randn(5, 4, 1, dtype=torch.float64)
    field[:, 1] = torch.nan
    assert torch.allclose(density.log_prob(field), smaller.log_prob(field[:, keep]), atol=1e-12)
    assert bool((density.sample(7, generator=generator)[:, 1] == 0).all())
    site = Gaussian(2, 0.4)
    whole = FieldDensity(j / 2, site, VARIANCE, BETA, mask=mask).log_normalizer().value
    part = FieldDensity(j[keep][:, keep] / 2, site, VARIANCE, BETA).log_normalizer().value
    assert torch.allclose(whole, part, rtol=1e-13)


def test_a_batch_of_systems_is_each_of_them_alone() -> None:
    j = torch.stack([couplings(3, seed) for seed in range(4)])
    beta = torch.tensor([0.3, 0.6, 0.9, 1.2], dtype=torch.float64)
    field = torch.randn(4, 3, 1, dtype=torch.float64)
    whole = FieldDensity(j, Ising(), VARIANCE, beta)
    found = whole.log_prob(field)
    for i in range(4):
        alone = FieldDensity(j[i], Ising(), VARIANCE, float(beta[i])).log_prob(field[i])
        assert torch.allclose(found[i], alone, atol=1e-12)
    assert whole.sample(6).shape == (6, 4, 3, 1)
    estimate = whole.log_normalizer("importance", num_samples=2000)
    gap = (estimate.value - whole.log_normalizer().value).abs()
    assert bool((gap < 4.5 * estimate.standard_error).all())


def test_it_says_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="variance=0"):
        FieldDensity(couplings(3), Ising(), 0.0)
    with pytest.raises(ValueError, match="symmetric"):
        FieldDensity(couplings(3).triu(), Ising(), 1.0)
    with pytest.raises(TypeError, match="no option 'sigma'"):
        FieldDensity(couplings(3), Ising(), 1.0, sigma=2)  # type: ignore[call-arg]
    field = torch.randn(3, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="SteepestDescent"):
        FieldDensity(couplings(3), Sphere(3), 1.0).log_prob(field)
    with pytest.raises(ValueError, match="form loops"):
        FieldDensity(ring(4, dtype=torch.float64), Sphere(3), 1.0).sample(2)
    with pytest.raises(ValueError, match="no average over spins"):
        FieldDensity(couplings(3), LargeDSphere(3), 1.0).log_prob(field)
    # v sigma^2 beta^2 = 1.2: not even uncoupled Gaussian spins have a density of fields
    with pytest.raises(ValueError, match=r"the largest is 1\.2"):
        FieldDensity(0 * couplings(3), Gaussian(3, 1.2), 1.0).log_normalizer()
    with pytest.raises(ValueError, match="method='exact'"):
        FieldDensity(couplings(3), Ising(), 1.0).log_normalizer("exact")  # type: ignore[arg-type]


def test_nobody_has_a_density_of_one() -> None:
    for site in (Ising(), Sphere(3), Gaussian(2, 0.5)):
        density = FieldDensity(torch.zeros(0, 0, dtype=torch.float64), site, 0.4)
        assert density.log_prob(density.sample(3)).tolist() == [0.0] * 3


def test_options_are_named() -> None:
    with pytest.raises(TypeError, match="site=None"):
        FieldDensity(torch.zeros(2, 2), None, 0.4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_samples=-1"):
        FieldDensity(torch.zeros(2, 2), Ising(), 0.4).sample(-1)
