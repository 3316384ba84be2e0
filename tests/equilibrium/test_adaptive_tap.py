"""Adaptive TAP: where it is exact, how fast it errs, and what it improves on."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from spinformer.equilibrium import adaptive_tap
from spinformer.equilibrium.adaptive_tap import AdaptiveTAP
from spinformer.equilibrium.exact import Exact
from spinformer.equilibrium.mean_field import MeanField
from spinformer.equilibrium.steepest_descent import SteepestDescent
from spinformer.errors import ConvergenceError
from spinformer.solve.newton import minimize_in_cone
from spinformer.spins.couplings import curie_weiss, sherrington_kirkpatrick
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem
from spinformer.thermo import equilibrium

TIGHT = AdaptiveTAP(tolerance=1e-13)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spin_glass(n: int, seed: int) -> Tensor:
    upper = torch.triu(normal(n, n, seed=seed), 1) / math.sqrt(n)
    return upper + upper.mT


def system(
    site: SiteLaw, n: int, beta: float = 0.8, strength: float = 0.7, seed: int = 0
) -> SpinSystem:
    field = strength * normal(n, site.dim, seed=seed + 1000)
    return SpinSystem(spin_glass(n, seed), field, beta, site)


def close(found: Tensor, expected: Tensor, rtol: float = 1e-10, atol: float = 1e-11) -> None:
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=rtol, atol=atol)


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


# --- exact for Gaussian spins --------------------------------------------------------------------


def test_gaussian_spins_are_exact() -> None:
    field = normal(3, 6, 2, seed=1)
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[1, 2] = True
    beta = torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)
    given = SpinSystem(spin_glass(6, 0), field, beta, Gaussian(2, 0.6), mask=mask)
    found, exact = TIGHT.solve(given), Exact().solve(given)
    for name in ("log_partition", "magnetization", "internal_energy", "entropy"):
        close(getattr(found, name), getattr(exact, name))
    for name in ("specific_heat", "susceptibility", "correlations"):
        close(getattr(found, name)(), getattr(exact, name)())
    # One sweep, and one to see that nothing changes.
    assert found.solution.iterations.tolist() == [2, 2, 2]
    # Lambda = V + 1/chi is the inverse variance of the free spin.
    k = beta[:, None, None] * given.couplings.to_dense()
    own = torch.linalg.inv(eye(6) / 0.6 - k).diagonal(dim1=-2, dim2=-1)
    close(found.cavity_variance, 1 / 0.6 - 1 / own)


def test_matrix_valued_gaussian_spins_are_exact() -> None:
    """Against the dense Gaussian model of all N D components."""
    n, d, v = 4, 3, 0.7
    square = normal(2, n * d, n * d, seed=3) / 4
    blocks = ((square + square.mT) / 2).reshape(2, n, d, n, d).transpose(-3, -2).clone()
    blocks.diagonal(dim1=1, dim2=2).zero_()
    field = normal(2, n, d, seed=4)
    mask = torch.zeros(2, n, dtype=torch.bool)
    mask[1, 2] = True
    beta = torch.tensor([0.5, 0.9], dtype=torch.float64)
    couplings = blocks.clone().requires_grad_()
    found = TIGHT.solve(SpinSystem(couplings, field, beta, Gaussian(d, v), mask=mask))

    present = (~mask).double()[..., None].expand(2, n, d).reshape(2, n * d)
    flat = blocks.transpose(-3, -2).reshape(2, n * d, n * d)
    flat = flat * present[:, :, None] * present[:, None, :]
    precision = eye(n * d) / v - beta[:, None, None] * flat
    covariance = torch.linalg.inv(precision)
    b = (beta[:, None, None] * field).reshape(2, -1) * present
    m = (covariance @ b[..., None])[..., 0]
    close(found.magnetization.flatten(1), m)
    close(found.log_partition, ((b * m).sum(-1) - torch.logdet(v * precision)) / 2)
    chi = beta[:, None, None] * covariance * present[:, :, None] * present[:, None, :]
    chi = chi.reshape(2, n, d, n, d)
    close(found.susceptibility(), chi)
    vector = normal(2, n, d, seed=5)
    close(found.susceptibility_product(vector), torch.einsum("siajb,sjb->sia", chi, vector))
    m = m.reshape(2, n, d)
    connected = torch.einsum("siaja->sij", chi) / beta[:, None, None]
    close(found.correlations(), m @ m.mT + connected)
    own = torch.stack([covariance.reshape(2, n, d, n, d)[:, i, :, i] for i in range(n)], 1)
    cavities = (eye(d) / v - torch.linalg.inv(own)) * (~mask)[..., None, None]
    close(found.cavity_variance, cavities)
    # U = -1/2 sum J <S S> - h m, by the trace over all components.
    second = covariance + m.flatten(1)[..., :, None] * m.flatten(1)[..., None, :]
    energy = -(flat * second).sum((-2, -1)) / 2 - (b * m.flatten(1)).sum(-1) / beta
    close(found.internal_energy, energy)
    (gradient,) = torch.autograd.grad(found.free_energy.sum(), couplings)
    assert bool(gradient.isfinite().all())


# --- the equations and their functional ----------------------------------------------------------


@pytest.mark.parametrize(
    "site", [Ising(), Sphere(4), LargeDSphere(4, 1.3), Gaussian(3, 0.5)], ids=repr
)
def test_the_free_energy_is_stationary_at_the_solution(site: SiteLaw) -> None:
    """The textbook form in m, V and Lambda, written here, and the coded one in 1/(Lambda - V)."""
    given = system(site, 6)
    found = TIGHT.solve(given)
    k = 0.8 * given.couplings.to_dense()
    m = found.magnetization.detach().requires_grad_()
    v = found.cavity_variance.detach().requires_grad_()
    if site.radius is None:
        chi = 1 / (1 / 0.5 - v.detach())
    else:
        chi = (site.radius**2 - m.detach().square().sum(-1)) / site.dim
    precision = (v.detach() + 1 / chi).requires_grad_()

    b = 0.8 * given.field + k @ m - v[:, None] * m
    if site.radius is None:
        free = 1 - 0.5 * v
        sites = (0.5 * b.square().sum(-1) / free - site.dim * free.log()) / 2
    else:
        sites = site.log_partition(b) + v * site.radius**2 / 2
    pairs = (m * (v[:, None] * m - k @ m)).sum() / 2
    log_det = torch.logdet(torch.diag(precision) - k)
    log_z = sites.sum() + pairs + site.dim / 2 * ((precision - v).log().sum() - log_det)
    close(log_z, found.log_partition, rtol=1e-12)
    for gradient in torch.autograd.grad(log_z, (m, v, precision)):
        assert float(gradient.abs().max()) < 1e-8

    law, scale = adaptive_tap._Law(site), site.scale
    state = [m / scale, v * scale**2, chi / scale**2]
    state = [tensor.detach().requires_grad_() for tensor in state]
    coded = adaptive_tap.functional(
        law, *state, k * scale**2, 0.8 * scale * given.field, torch.logdet
    )
    close(coded, log_z, rtol=1e-12)
    for gradient in torch.autograd.grad(coded, state):
        assert float(gradient.abs().max()) < 1e-8


@pytest.mark.parametrize("site", [Ising(), Sphere(4)], ids=repr)
def test_correlations_and_moments(site: SiteLaw) -> None:
    """<S_i . S_j> = m_i . m_j + D A_ij, with D A_ii = R^2 - m_i^2."""
    given = system(site, 6)
    found = TIGHT.solve(given)
    m = found.magnetization
    variance = (site.radius**2 - m.square().sum(-1)) / site.dim
    precision = torch.diag(found.cavity_variance + 1 / variance)
    a = torch.linalg.inv(precision - 0.8 * given.couplings.to_dense())
    close(a.diagonal(), variance)
    for method in ("linear_response", "coupling"):
        close(found.correlations(method), m @ m.mT + site.dim * a)


@pytest.mark.parametrize("site", [Ising(), Sphere(3)], ids=repr)
def test_products_with_the_susceptibility(site: SiteLaw, monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form of chi against implicit derivatives, which large systems take."""
    given = system(site, 5)
    vector = normal(5, site.dim, seed=9)
    dense = TIGHT.solve(given).susceptibility_product(vector)
    monkeypatch.setattr(equilibrium, "_DENSE_ROWS", 0)
    close(TIGHT.solve(given).susceptibility_product(vector), dense)


def test_second_derivatives() -> None:
    matrix, field = spin_glass(3, 2).requires_grad_(), normal(3, 1, seed=3).requires_grad_()

    def solved(matrix: Tensor, field: Tensor) -> tuple[Tensor, Tensor]:
        found = TIGHT.solve(SpinSystem(matrix, field, 0.7, Ising(), symmetrize=True))
        return found.magnetization, found.cavity_variance

    assert gradcheck(solved, (matrix, field), fast_mode=True, atol=1e-6)
    assert gradgradcheck(solved, (matrix, field), fast_mode=True, atol=1e-6)


# --- relatives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [None, 1.3])
def test_the_large_d_law_gives_steepest_descent(radius: float | None) -> None:
    given = system(LargeDSphere(5, radius), 6)
    found, other = TIGHT.solve(given), SteepestDescent().solve(given)
    for name in ("log_partition", "magnetization", "internal_energy", "entropy"):
        close(getattr(found, name), getattr(other, name))
    for name in ("specific_heat", "susceptibility", "correlations", "stability"):
        close(getattr(found, name)(), getattr(other, name)())


@pytest.mark.parametrize("site", [Ising(), Sphere(3), Sphere(64)], ids=repr)
def test_without_magnetization_it_is_steepest_descent(site: SiteLaw) -> None:
    given = system(site, 6, strength=0.0)
    found, other = TIGHT.solve(given), SteepestDescent().solve(given)
    close(found.log_partition, other.log_partition)
    close(found.correlations(), other.correlations())


def test_spheres_approach_steepest_descent_as_the_dimension_grows() -> None:
    """At fixed fields a component the site laws differ by O(1/D), and so do magnetizations."""
    gaps = []
    for dim in (8, 32, 128):
        given = system(Sphere(dim), 4, strength=0.7)
        one, other = TIGHT.solve(given), SteepestDescent().solve(given)
        gaps.append(float((one.magnetization - other.magnetization).norm().detach() / dim**0.5))
    # 4 in the limit; fields differ between dimensions.
    assert all(2.5 < a / b < 6.0 for a, b in itertools.pairwise(gaps)), gaps


def onsager(matrix: Tensor, field: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """m, V and log Z of the TAP equations of Ising spins, by damped iteration."""
    k, m = beta * matrix, torch.tanh(beta * field)
    for _ in range(400):
        v = k.square() @ (1 - m * m)
        m = 0.6 * m + 0.4 * torch.tanh(beta * field + k @ m - v * m)
    chi = 1 - m * m
    entropy = sum(torch.special.entr((1 + sign * m) / 2).sum() for sign in (1, -1))
    entropy = entropy - len(m) * math.log(2)
    log_z = entropy + m @ k @ m / 2 + beta * (field @ m) + chi @ k.square() @ chi / 4
    return m, v, log_z


def test_many_weak_unrelated_couplings_give_tap() -> None:
    """V -> sum_j K_ij^2 chi_j in the Sherrington-Kirkpatrick model, with a gap of N^(-1/2)."""
    beta, gaps = 0.4, []
    for n, seeds in ((32, 4), (128, 4), (512, 1)):
        gap = torch.zeros(2, dtype=torch.float64)
        for seed in range(seeds):
            matrix, field = spin_glass(n, seed), 0.4 * normal(n, seed=seed + 50)
            found = AdaptiveTAP().solve(SpinSystem(matrix, field[:, None], beta, Ising()))
            m, v, _ = onsager(matrix, field, beta)
            gap[0] += (found.magnetization[:, 0] - m).norm() / n**0.5 / seeds
            gap[1] += (found.cavity_variance - v).norm() / n**0.5 / seeds
        gaps.append(gap)
    # 2 in the limit, 1.5 to 1.9 at these sizes.
    assert bool((gaps[0] / gaps[1] > 1.3).all()), gaps
    assert bool((gaps[1] / gaps[2] > 1.5).all()), gaps
    assert bool((gaps[2] < torch.tensor([2e-3, 1e-2])).all()), gaps
    # The replicon eigenvalue of de Almeida and Thouless, up to terms of the same order.
    chi = 1 - found.magnetization[:, 0].square()
    almeida_thouless = 1 - beta**2 * (matrix.square() @ chi.square()).mean()
    close(found.replicon(), almeida_thouless, rtol=5e-3, atol=0.0)


@pytest.mark.parametrize("patterns", [3, 6])
def test_hopfield_couplings(patterns: int) -> None:
    """Few patterns make couplings that know of each other: better than TAP and mean field."""
    n, beta = 12, 0.5
    errors = torch.zeros(3, 2, dtype=torch.float64)
    for seed in range(6):
        xi = torch.sign(normal(patterns, n, seed=seed))
        matrix = xi.mT @ xi / n
        matrix = matrix - torch.diag(matrix.diagonal())
        field = 0.3 * normal(n, seed=seed + 50)
        given = SpinSystem(matrix, field[:, None], beta, Ising())
        exact = Exact().solve(given)
        m, _, log_z = onsager(matrix, field, beta)
        answers = [(m, log_z)]
        for solver in (MeanField(), AdaptiveTAP()):
            found = solver.solve(given)
            answers.append((found.magnetization[:, 0], found.log_partition))
        for row, (m, log_z) in enumerate(answers):
            errors[row, 0] += (m - exact.magnetization[:, 0]).abs().max().detach() / 6
            errors[row, 1] += (log_z - exact.log_partition).abs().detach() / 6
    tap, mean_field, adaptive = errors
    assert bool((tap < mean_field).all())
    # 2.5 to 5 in m and 10 to 30 in log Z; half of the least is asked for.
    assert bool((adaptive < tap / torch.tensor([1.25, 5.0])).all()), errors


# --- errors --------------------------------------------------------------------------------------


def error(site: SiteLaw, n: int, scale: float, strength: float, seed: int = 0) -> float:
    given = SpinSystem(
        scale * spin_glass(n, seed), strength * normal(n, site.dim, seed=seed + 1), 1.0, site
    )
    gap = Exact().solve(given).log_partition - TIGHT.solve(given).log_partition
    return float(gap.detach())


def test_errors_at_weak_couplings() -> None:
    """Third order in fields (ratio 8 on halving J), fourth without (16)."""
    for seed in range(3):
        assert 7 < error(Ising(), 6, 5e-3, 1.0, seed) / error(Ising(), 6, 2.5e-3, 1.0, seed) < 9
        assert 14 < error(Ising(), 6, 0.04, 0.0, seed) / error(Ising(), 6, 0.02, 0.0, seed) < 18
        assert 14 < error(Sphere(3), 2, 0.2, 0.0, seed) / error(Sphere(3), 2, 0.1, 0.0, seed) < 18


def test_error_of_spheres_in_fields() -> None:
    """Second order, by what an isotropic cavity does not see: tr Q_i Q_j of the covariances."""
    site, field = Sphere(3), normal(2, 3, seed=1)
    covariance = site.covariance(field)
    part = covariance - torch.einsum("iaa->i", covariance)[:, None, None] / 3 * eye(3)
    scale = 2e-3
    k = scale * float(spin_glass(2, 0)[0, 1])
    predicted = k**2 / 2 * float((part[0] * part[1]).sum())
    assert error(site, 2, scale, 1.0) == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("dim", [3, 16, 64])
@pytest.mark.parametrize("coupling", [0.4, 0.8])
def test_two_spheres(dim: int, coupling: float) -> None:
    """Against quadrature: better than SD0 in m and log Z, and far better than mean field."""
    matrix = coupling * (1 - eye(2))
    index = torch.arange(1, dim + 1, dtype=torch.float64)
    field = torch.stack([0.7 * torch.cos(i * index + i) for i in range(2)])
    given = SpinSystem(matrix, field, 1.0, Sphere(dim))
    exact = Exact().solve(given)

    def errors(solver: AdaptiveTAP | MeanField | SteepestDescent) -> Tensor:
        found = solver.solve(given)
        m = (found.magnetization - exact.magnetization).abs().max()
        return torch.stack([m, (found.log_partition - exact.log_partition).abs()]).detach()

    adaptive = errors(AdaptiveTAP())
    assert bool((adaptive < errors(SteepestDescent())).all())
    assert bool((adaptive < errors(MeanField()) / 10).all())
    # Of m 1 / D, of log Z O(1): 0.021 and 0.010 at D = 3, 8.7e-4 and 0.040 at D = 64.
    assert bool((adaptive < torch.tensor([0.07 / dim, 0.06])).all()), adaptive


# --- how it is solved ----------------------------------------------------------------------------


@pytest.mark.parametrize("site", [Ising(), Sphere(3), Sphere(64)], ids=repr)
@pytest.mark.parametrize("kind", ["ferromagnet", "spin glass", "Hopfield", "antiferromagnet"])
def test_iterations(site: SiteLaw, kind: str) -> None:
    """In tens, above transitions; 5 to 18 when this was written."""
    n = 32
    xi = torch.sign(normal(n // 4, n, seed=2))
    matrix, beta = {
        "ferromagnet": (curie_weiss(n, dtype=torch.float64).to_dense(), 0.95),
        "spin glass": (spin_glass(n, 0), 0.9),
        "Hopfield": (xi.mT @ xi / n, 0.5),
        "antiferromagnet": (-curie_weiss(n, dtype=torch.float64).to_dense(), 10.0),
    }[kind]
    given = SpinSystem(matrix, 0.3 * normal(n, site.dim, seed=3), beta, site)
    found = AdaptiveTAP().solve(given)
    assert bool(found.converged)
    assert int(found.solution.iterations) <= 25
    assert float(found.solution.residual) <= 1e-10


def test_cold_systems_come_back_into_the_cone(monkeypatch: pytest.MonkeyPatch) -> None:
    returns = []

    def counted(*arguments, **options):
        returns.append(len(arguments[0]))
        return minimize_in_cone(*arguments, **options)

    monkeypatch.setattr(adaptive_tap, "minimize_in_cone", counted)
    for site in (Ising(), Sphere(3)):
        returns.clear()
        cold, warm = system(site, 16, beta=4.0, strength=0.3), system(site, 16, beta=0.5)
        both = SpinSystem(
            torch.stack([cold.couplings.to_dense(), warm.couplings.to_dense()]),
            torch.stack([cold.field, warm.field]),
            torch.stack([cold.beta, warm.beta]),
            site,
        )
        found = AdaptiveTAP().solve(both)
        # Only ever the cold one.
        assert set(returns) == {1}
        m = found.magnetization
        variance = (site.radius**2 - m.square().sum(-1)) / site.dim
        precision = torch.diag_embed(found.cavity_variance + 1 / variance)
        precision = precision - both.beta[:, None, None] * both.couplings.to_dense()
        assert float(torch.linalg.eigvalsh(precision.detach()).min()) > 0


def test_an_ordered_start_finds_the_ordered_state() -> None:
    """Curie-Weiss below its transition: m = tanh(beta m) up to 1/N, with the lower free energy."""
    n, beta = 64, 1.5
    given = SpinSystem(
        curie_weiss(n, dtype=torch.float64), torch.zeros(n, 1).double(), beta, Ising()
    )
    plain = AdaptiveTAP().solve(given)
    ordered = AdaptiveTAP().solve(given, torch.full((n, 1), 0.8, dtype=torch.float64))
    assert float(plain.magnetization.detach().abs().max()) == 0
    root = 1.0
    for _ in range(100):
        root = math.tanh(beta * root)
    assert float(ordered.magnetization[0].detach()) == pytest.approx(root, abs=2 / n)
    assert float(ordered.free_energy.detach()) < float(plain.free_energy.detach())
    assert bool(ordered.is_stable)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("site", [Ising(), Sphere(3)], ids=repr)
@pytest.mark.parametrize("strength", [30.0, 1000.0])
def test_saturated_spins(site: SiteLaw, dtype: torch.dtype, strength: float) -> None:
    """chi underflows, and nothing that it divides may."""
    matrix = spin_glass(6, 0).to(dtype).requires_grad_()
    direction = torch.nn.functional.normalize(normal(6, site.dim, seed=1), dim=-1)
    field = (strength * direction).to(dtype).requires_grad_()
    found = AdaptiveTAP().solve(SpinSystem(matrix, field, 1.0, site))
    total = found.log_partition + found.magnetization.square().sum() + found.specific_heat()
    for gradient in torch.autograd.grad(total, (matrix, field)):
        assert bool(gradient.isfinite().all())
    assert bool(found.susceptibility().isfinite().all())
    aligned = (direction * found.magnetization).sum(-1) / site.radius
    assert float((1 - aligned).abs().max().detach()) < 3 / strength


def test_failures_are_loud() -> None:
    given = system(Ising(), 8)
    with pytest.raises(ConvergenceError, match="adaptive TAP.*damping"):
        AdaptiveTAP(max_iterations=3).solve(given)
    found = AdaptiveTAP(max_iterations=3, on_failure="ignore").solve(given)
    assert not bool(found.converged)
    assert bool(found.magnetization.isfinite().all())
    skew = torch.triu(spin_glass(4, 0))
    with pytest.raises(ValueError, match="symmetric couplings"):
        AdaptiveTAP().solve(SpinSystem(skew, normal(4, 1, seed=1), 1.0, Ising()))
    blocks = torch.zeros(4, 4, 3, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="between Gaussian spins only"):
        AdaptiveTAP().solve(SpinSystem(blocks, normal(4, 3, seed=1), 1.0, Sphere(3)))
    with pytest.raises(ValueError, match="largest eigenvalue"):
        AdaptiveTAP().solve(system(Gaussian(2), 8, beta=3.0))
    with pytest.raises(TypeError, match="damping"):
        AdaptiveTAP(dampin=0.5)


@pytest.mark.parametrize("seed", [0, 11, 12])
def test_a_failure_in_a_cold_system_is_an_answer_that_has_not_converged(seed):
    """Its last state lies outside the cone: it is not taken for a system that was given broken."""
    generator = torch.Generator().manual_seed(seed)
    glass = sherrington_kirkpatrick(6, strength=4.0, dtype=torch.float64, generator=generator)
    field = 0.05 * torch.randn(6, 8, dtype=torch.float64, generator=generator)
    system = SpinSystem(glass, field, 2.0, Sphere(8))
    found = AdaptiveTAP(on_failure="ignore").solve(system)
    assert found.broken is None
    assert not found.converged
    assert float(found.solution.residual) > 0
    assert found.magnetization.isfinite().all()
    with pytest.raises(ConvergenceError, match="adaptive TAP"):
        AdaptiveTAP().solve(system)


def test_the_response_of_a_failed_iteration_reaches_no_other_system() -> None:
    """Where it stopped, A o A with chi for its diagonal is not positive definite."""
    generator = torch.Generator().manual_seed(1)
    J = sherrington_kirkpatrick(6, generator=generator, dtype=torch.float64).to_dense()
    field = torch.full((2, 6, 1), 0.1, dtype=torch.float64)
    pair = SpinSystem(torch.stack([J, 0.1 * J]), field, 8.0, Ising())
    solver = AdaptiveTAP(max_iterations=3, on_failure="ignore")
    both = solver.solve(pair)
    chi = both.susceptibility()
    assert bool(chi[0].isnan().all())
    alone = solver.solve(pair.replace(couplings=0.1 * J, field=field[1]))
    torch.testing.assert_close(chi[1], alone.susceptibility())
