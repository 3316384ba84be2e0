"""TAP: error rates, golden points, functional and equation, the Hessian, awkward systems."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import spinformer as sf
from spinformer.equilibrium.tap import TAP, TAPEquilibrium
from spinformer.spins.site import SiteLaw
from spinformer.thermo.equilibrium import DerivedEquilibrium, Equilibrium

F64 = torch.float64
DATA = Path(__file__).parents[1] / "data"
PRECISE = TAP(tolerance=1e-13)
LAWS = [sf.Ising(), sf.Sphere(2), sf.Sphere(4), sf.LargeDSphere(3, 1.3), sf.Gaussian(2, 0.6)]
each_law = pytest.mark.parametrize("site", LAWS, ids=repr)


def records(file: str, name: str) -> list[dict[str, Any]]:
    found = [r for r in json.loads((DATA / file).read_text()) if r["name"] == name]
    assert found, name
    return found


def law(dim: int, radius: float | None = None) -> SiteLaw:
    return sf.Ising() if dim == 1 else sf.Sphere(dim, radius)


def cosine_couplings(num_spins: int) -> Tensor:
    """cos(i j), 1-based; the diagonal is ignored."""
    i = torch.arange(1, num_spins + 1, dtype=F64)
    return torch.cos(i[:, None] * i)


def field(num_spins: int, dim: int, strength: float) -> Tensor:
    """strength cos(i a + i), 1-based."""
    i = torch.arange(1, num_spins + 1, dtype=F64)[:, None]
    return strength * torch.cos(i * torch.arange(1, dim + 1, dtype=F64) + i)


def sine_field(num_spins: int) -> Tensor:
    """sin(i) / 2, 1-based, for Ising spins."""
    return torch.sin(torch.arange(1, num_spins + 1, dtype=F64))[:, None] / 2


def random_system(
    site: SiteLaw, num_spins: int = 4, strength: float = 0.3, seed: int = 0, **options: Any
) -> sf.SpinSystem:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(num_spins, num_spins, generator=generator, dtype=F64)
    h = 0.7 * torch.randn(num_spins, site.dim, generator=generator, dtype=F64)
    matrix = strength * (matrix + matrix.mT) / 2
    return sf.SpinSystem(matrix - matrix.diagonal().diag(), h, 0.8, site, **options)


def close(found: Tensor, expected: Any, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    expected = torch.as_tensor(expected, dtype=F64)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=rtol, atol=atol)


def errors(equilibrium: Equilibrium, exact: Equilibrium) -> tuple[float, float]:
    """Of log Z and of m."""
    log_z = exact.log_partition - equilibrium.log_partition
    return float(log_z.detach().abs()), float(
        (exact.magnetization - equilibrium.magnetization).detach().norm()
    )


# --- how good it is ------------------------------------------------------------------------------


def test_golden_points() -> None:
    for record in records("tap.json", "mf_golden"):
        params, value = record["params"], record["value"]
        num_spins, dim = params["N"], params["D"]
        large = params["method"] == "tap_largeD"
        site = sf.LargeDSphere(dim, params["R"]) if large else law(dim, params["R"])
        assert params["J_formula"] == "J_ij=cos(i*j)/N"
        system = sf.SpinSystem(
            cosine_couplings(num_spins) / num_spins,
            sine_field(num_spins) if dim == 1 else field(num_spins, dim, 0.5),
            params["beta"],
            site,
        )
        equilibrium = PRECISE.solve(system)
        # The records stop at residuals of 1e-14 with damping 1/2, hence errors of a few 1e-14.
        close(equilibrium.log_partition, value["logZ"], rtol=1e-12, atol=0)
        close(equilibrium.magnetization.norm(dim=-1), value["m_norm"], rtol=1e-12, atol=0)
        close(equilibrium.magnetization[:, 0], value["m_first"], rtol=1e-12, atol=1e-13)


def recorded_system(name: str, eps: float, site: SiteLaw) -> sf.SpinSystem:
    dim = site.dim
    if name.startswith("N=3"):
        return sf.SpinSystem(
            eps * cosine_couplings(3), field(3, dim, 1 / math.sqrt(dim)), 1.0, site
        )
    if name.startswith("Ising"):
        return sf.SpinSystem(eps / math.sqrt(8) * cosine_couplings(8), sine_field(8), 1.0, site)
    return sf.SpinSystem(eps * torch.ones(2, 2, dtype=F64), field(2, dim, 0.7), 1.0, site)


def test_recorded_errors_and_their_rate() -> None:
    """The error of every entry of the table; N = 3: it goes as the third power of J."""
    found: dict[str, dict[float, float]] = {}
    for record in records("mean_field.json", "mf_tap_error_scaling"):
        name, eps = record["params"]["system"], record["params"]["eps"]
        value, radius = record["value"], record["params"]["R"]
        dim = int(name.split("D=")[1].split()[0]) if "D=" in name else 1
        # At eps = 0.8 the plain map oscillates.
        solver = TAP(tolerance=1e-12, damping=0.5)
        sites = {"TAP": law(dim, radius)}
        if "TAP_largeD" in value:
            sites["TAP_largeD"] = sf.LargeDSphere(dim, radius)
        for key, site in sites.items():
            equilibrium = solver.solve(recorded_system(name, eps, site))
            error = value["logZ_exact"] - float(equilibrium.log_partition.detach())
            # The exact values of N = 3 have 1e-12, of N = 2 1e-13; both totals are below 40.
            assert error == pytest.approx(value[key]["dlogZ"], rel=1e-7, abs=1e-11), (name, key)
            if name.startswith("N=3"):
                found.setdefault(name, {})[eps] = error
    assert len(found) == 3
    for name, errors_of in found.items():
        (coarse, one), (fine, two) = list(errors_of.items())[-2:]
        # The exponent's remainder is O(eps): the ratio is 8.05 where the coarser eps is 0.05.
        exponent = math.log(one / two) / math.log(coarse / fine)
        assert exponent == pytest.approx(3, abs=0.02), (name, exponent)


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 64])
def test_errors_are_of_third_order(dim: int) -> None:
    """Of log Z and m, against the exact solution; mean field's are of second order."""
    num_spins = 3 if dim == 1 else 2
    generator = torch.Generator().manual_seed(3)
    # In strong fields: at weak ones the third order is small against the fourth for two spins.
    h = 0.4 * torch.randn(num_spins, dim, generator=generator, dtype=F64)
    h[:, 0] += math.sqrt(dim)
    matrix = torch.ones(num_spins, num_spins, dtype=F64)
    largest = 0.04 if dim < 10 else 0.005
    table = []
    for eps in (largest, largest / 2, largest / 4):
        system = sf.SpinSystem(eps * matrix, h, 1.0, law(dim))
        exact = sf.Exact().solve(system)
        mean_field = sf.MeanField(tolerance=1e-13).solve(system)
        table.append((*errors(PRECISE.solve(system), exact), *errors(mean_field, exact)))
    coarse, fine = (
        [one / two for one, two in zip(*rows, strict=True)] for rows in (table[:2], table[1:])
    )
    # The ratio's own error is O(eps) and goes in 2 fine - coarse; what is left is O(eps^2).
    limits = [2 * two - one for one, two in zip(coarse, fine, strict=True)]
    for limit, expected in zip(limits, (8, 8, 4, 4), strict=True):
        assert limit == pytest.approx(expected, rel=0.04)


def test_spin_glass_at_high_temperature_and_the_sign_of_the_reaction() -> None:
    """Better than mean field by far; with the other sign of O worse than with none."""
    generator = torch.Generator().manual_seed(5)
    num_spins = 12
    matrix = sf.couplings.sherrington_kirkpatrick(num_spins, generator=generator, dtype=F64)
    h = 0.5 * torch.randn(num_spins, 1, generator=generator, dtype=F64)
    system = sf.SpinSystem(matrix, h, 0.4, sf.Ising())
    exact = sf.Exact().solve(system)
    ours = errors(PRECISE.solve(system), exact)
    mean_field = errors(sf.MeanField().solve(system), exact)
    assert ours[0] < 0.1 * mean_field[0]
    assert ours[1] < 0.2 * mean_field[1]

    k = 0.4 * matrix.to_dense()
    m = torch.zeros(num_spins, 1, dtype=F64)
    for sign, ordering in ((-1, "right"), (1, "wrong")):
        for _ in range(200):
            m = torch.tanh(0.4 * h + k @ m + sign * m * (k * k @ (1 - m * m)))
        error = float((exact.magnetization - m).norm().detach())
        if ordering == "right":
            assert error == pytest.approx(ours[1], rel=1e-9)
        else:
            assert error > 1.5 * mean_field[1]


def test_large_d_form_is_the_limit_of_the_bessel_form() -> None:
    """At fixed fields and couplings per component, with a relative difference of order 1 / D."""
    differences = []
    for dim in (32, 64, 128, 256):
        generator = torch.Generator().manual_seed(2)
        h = torch.randn(3, 4, generator=generator, dtype=F64).repeat(1, dim // 4)
        matrix = 0.4 * cosine_couplings(3)
        exact, large = (
            PRECISE.solve(sf.SpinSystem(matrix, h, 1.0, site))
            for site in (sf.Sphere(dim), sf.LargeDSphere(dim))
        )
        differences.append(
            [
                float((exact.log_partition - large.log_partition).detach()) / dim,
                float((exact.magnetization - large.magnetization).detach().abs().max()),
                float((exact.onsager - large.onsager).detach().abs().max()),
            ]
        )
    for one, two in zip(differences[-2], differences[-1], strict=True):
        assert one / two == pytest.approx(2, rel=0.03)


def test_gaussian_spins() -> None:
    """The exact magnetization and responses; log Z to second order."""
    found = []
    for strength in (0.04, 0.02, 0.01):
        system = random_system(sf.Gaussian(2, 0.6), strength=strength)
        exact, equilibrium = sf.Exact().solve(system), PRECISE.solve(system)
        close(equilibrium.magnetization, exact.magnetization)
        found.append(errors(equilibrium, exact)[0])
        close(equilibrium.correlations(), exact.correlations())
        own = equilibrium.correlations("coupling").diagonal()
        close(own, equilibrium.magnetization.square().sum(-1) + 2 * 0.6)
    # As in the test of the third order.
    limit = 2 * found[1] / found[2] - found[0] / found[1]
    assert limit == pytest.approx(8, rel=0.04)


# --- the functional and its equation -------------------------------------------------------------


def functional(m: Tensor, system: sf.SpinSystem) -> Tensor:
    """log Z of magnetizations, in the formulas of m: an inverse response and its derivatives."""
    site, dim = system.site, system.dim
    k = system.beta * system.couplings.to_dense()
    b = site.inverse_response(m)
    if isinstance(site, sf.LargeDSphere):
        assert site.radius is not None
        rest = site.radius**2 - m.square().sum(-1)
        traces = rest[:, None] * rest / dim
    else:
        covariance = site.covariance(b)
        traces = torch.einsum("iab,jba->ij", covariance, covariance)
    energy = (m * (k @ m)).sum() / 2 + system.beta * (system.field * m).sum()
    return site.entropy(m).sum() + energy + (k.square() * traces).sum() / 4


@each_law
def test_the_equation_is_the_stationary_point_of_the_functional(site: SiteLaw) -> None:
    system = random_system(site)
    equilibrium = PRECISE.solve(system)
    m = equilibrium.magnetization.detach()
    close(equilibrium.log_partition, functional(m, system), rtol=1e-12)
    # By autograd, and by a central difference of step 1e-4 along a random direction: error 1e-8.
    gradient = torch.autograd.functional.jacobian(lambda m: functional(m, system), m)
    assert float(gradient.abs().max()) < 1e-8
    direction = torch.randn(m.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    up, down = (functional(m + e * direction, system) for e in (1e-4, -1e-4))
    assert abs(float(up - down)) / 2e-4 < 1e-7
    # And by autograd of the coded functional in its own state.
    equations = equilibrium._equations
    inputs = equations.inputs(*equations.arguments)
    state = (equilibrium.solution.value / equations.unit).detach()
    own = torch.autograd.functional.jacobian(lambda z: equations.functional(z, *inputs), state)
    assert float(own.abs().max()) < 1e-8


def test_reaction_in_the_formulas_of_the_magnetization() -> None:
    """O against the published form in m, tau = m / b and w = (rho - tau) / m^2."""
    system = random_system(sf.Sphere(4), strength=0.3)
    equilibrium = PRECISE.solve(system)
    m, b = equilibrium.magnetization.detach(), equilibrium.cavity_field.detach()
    tau, rho = system.site.response(b)
    square = m.square().sum(-1)
    w = (rho - tau) / square
    tau_star = w * tau / rho
    w_star = -(2 + 4 * tau_star + 2 * w) / square
    k2 = (system.beta * system.couplings.to_dense()).square()
    gram = m @ m.mT
    along = tau_star[:, None] * (4 * tau + w * square)
    along = along + (w_star * square + 2 * w)[:, None] * tau + w_star[:, None] * w * gram**2
    across = 2 * w[:, None] * w * gram
    expected = ((k2 * along).sum(-1)[:, None] * m + (k2 * across) @ m) / 2
    close(equilibrium.onsager, expected)


@pytest.mark.parametrize("site", [sf.Ising(), sf.LargeDSphere(6)], ids=repr)
def test_reaction_of_the_isotropic_laws(site: SiteLaw) -> None:
    """O_i = -m_i sum_j K_ij^2 (R^2 - m_j^2) / D."""
    system = random_system(site)
    equilibrium = PRECISE.solve(system)
    m = equilibrium.magnetization.detach()
    k2 = (system.beta * system.couplings.to_dense()).square()
    assert site.radius is not None
    rest = (site.radius**2 - m.square().sum(-1, keepdim=True)) / site.dim
    close(equilibrium.onsager, -m * (k2 @ rest))
    force = system.beta * system.force(m)
    close(equilibrium.cavity_field, force + equilibrium.onsager)


# --- response and stability ----------------------------------------------------------------------


@each_law
def test_response_in_closed_form(site: SiteLaw) -> None:
    """Against implicit derivatives of log Z, and against the Hessian of the functional of m."""
    system = random_system(site, num_spins=3)
    equilibrium = PRECISE.solve(system)
    chi = equilibrium.susceptibility()
    close(chi, DerivedEquilibrium._susceptibility(equilibrium))
    derived = DerivedEquilibrium(
        system, equilibrium._function, equilibrium.solution, equilibrium.broken
    )
    close(equilibrium.specific_heat(), derived.specific_heat())
    close(equilibrium.stability(), derived.stability())
    close(equilibrium.magnetization, derived.magnetization)

    m = equilibrium.magnetization.detach()
    hessian = -torch.autograd.functional.hessian(lambda m: functional(m, system), m)
    hessian = hessian.reshape(m.numel(), m.numel())
    inverse = torch.linalg.inv(chi.detach().reshape(hessian.shape)) * system.beta
    close(inverse, hessian, rtol=1e-7, atol=1e-8)
    least = torch.linalg.eigvalsh(hessian).min() * site.scale**2
    close(equilibrium.stability(), least, rtol=1e-7)

    equations = equilibrium._equations
    inputs = equations.inputs(*equations.arguments)
    state = (equilibrium.solution.value / equations.unit).detach()
    jacobian = torch.autograd.functional.jacobian(lambda z: equations.step(z, *inputs), state)
    values = torch.linalg.eigvals(jacobian.reshape(hessian.shape))
    close(equilibrium.spectral_radius(), values.abs().max(), rtol=1e-8)


def test_response_beyond_the_dense_size() -> None:
    """One implicit derivative a product, above 512 components."""
    site = sf.Sphere(65)
    system = random_system(site, num_spins=8, strength=0.05)
    equilibrium = PRECISE.solve(system)
    vector = torch.randn(8, 65, generator=torch.Generator().manual_seed(4), dtype=F64)
    expected = torch.einsum("iajb,jb->ia", equilibrium.susceptibility(), vector)
    close(equilibrium.susceptibility_product(vector), expected, rtol=1e-8)


def test_iterations_follow_the_spectral_radius() -> None:
    """A plain iteration shrinks the deviation by the radius."""
    system = random_system(sf.Sphere(3), strength=0.3)
    equilibrium = PRECISE.solve(system)
    equations = equilibrium._equations
    inputs = equations.inputs(*equations.arguments)
    end = (equilibrium.solution.value / equations.unit).detach()
    z, sizes = end + 1e-3, []
    for _ in range(12):
        z = equations.step(z, *inputs)
        sizes.append(float((z - end).norm()))
    # Two eigenvalues of nearly equal size may alternate: the mean rate over steps counts.
    rate = (sizes[-1] / sizes[3]) ** (1 / 8)
    assert rate == pytest.approx(float(equilibrium.spectral_radius()), rel=0.1)


@pytest.mark.parametrize("solver", ["plain", "anderson", "broyden"])
def test_ferromagnet_is_ordered_or_reported_unstable(solver: Any) -> None:
    system = sf.SpinSystem(
        torch.full((8, 8), 0.25, dtype=F64), torch.zeros(8, 1, dtype=F64), 1.0, sf.Ising()
    )
    start = torch.full((8, 1), 1e-3, dtype=F64)
    equilibrium = TAP(solver=solver).solve(system, start)
    ordered = float(equilibrium.magnetization.detach().abs().max()) > 0.5
    assert bool(equilibrium.is_stable) == ordered
    if solver == "plain":
        assert ordered
    unordered = TAP().solve(system)
    assert not bool(unordered.is_stable)
    # At m = 0 the Hessian is 1 + sum_j K_ij^2 - K, its lowest mode uniform.
    close(unordered.stability(), 1 + 7 / 16 - 7 / 4)


def test_rotation_mode_of_an_ordered_magnet_is_marginal() -> None:
    system = sf.SpinSystem(
        sf.couplings.curie_weiss(32, dtype=F64), torch.zeros(32, 3, dtype=F64), 2.0, sf.Sphere(3)
    )
    start = torch.zeros(32, 3, dtype=F64)
    start[:, 2] = 1.0
    ordered = TAP().solve(system, start)
    assert float(ordered.magnetization[0, 2].detach()) > 0.5
    # The zero mode comes out at the size of the residual, 1e-10, times a condition number.
    assert abs(float(ordered.stability())) < 1e-8 and bool(ordered.is_stable)
    assert not bool(TAP().solve(system).is_stable)


# --- derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("site", [sf.Ising(), sf.Sphere(3), sf.LargeDSphere(3)], ids=repr)
def test_first_and_second_derivatives(site: SiteLaw) -> None:
    system = random_system(site, num_spins=2)
    inputs = [
        tensor.clone().requires_grad_()
        for tensor in (system.couplings.to_dense(), system.field, system.beta)
    ]

    def solve(j: Tensor, h: Tensor, beta: Tensor) -> TAPEquilibrium:
        solver = TAP("anderson", tolerance=1e-14)
        return solver.solve(sf.SpinSystem(j, h, beta, site, symmetrize=True))

    def state(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        equilibrium = solve(*inputs)
        return equilibrium.log_partition, equilibrium.magnetization

    def responses(*inputs: Tensor) -> tuple[Tensor, ...]:
        equilibrium = solve(*inputs)
        return (
            equilibrium.internal_energy,
            equilibrium.specific_heat(),
            equilibrium.susceptibility(),
            equilibrium.correlations(),
        )

    # Finite differences of step 1e-6: errors of 1e-8.
    assert gradcheck(state, inputs, atol=1e-6, fast_mode=True)
    assert gradgradcheck(state, inputs, atol=1e-6, fast_mode=True)
    assert gradcheck(responses, inputs, atol=1e-6, fast_mode=True)


# --- how it is asked -----------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["plain", "anderson", "broyden"])
def test_every_solver_and_damping_has_one_answer(solver: Any) -> None:
    system = random_system(sf.Sphere(3), num_spins=6)
    expected = PRECISE.solve(system).magnetization
    for damping in (1.0, 0.5):
        found = TAP(solver=solver, damping=damping, tolerance=1e-12).solve(system)
        close(found.magnetization, expected)


def test_starts() -> None:
    """A solution is its own start; a start on the sphere or beyond is drawn inside."""
    system = random_system(sf.Sphere(3))
    first = TAP().solve(system)
    again = TAP().solve(system, first.magnetization.detach())
    assert int(again.solution.iterations) <= 2
    far = torch.full_like(system.field, 10.0)
    close(
        TAP(tolerance=1e-12).solve(system, far).magnetization, PRECISE.solve(system).magnetization
    )
    with pytest.raises(ValueError, match=r"initial has shape \(3, 3\)"):
        TAP().solve(system, torch.zeros(3, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_residuals_have_a_natural_unit(dtype: torch.dtype) -> None:
    """In fields from nothing to 1e4 the default tolerance can be reached, and means the same."""
    for dim, size in ((2, 1e4), (64, 1e2), (1024, 1e3), (3, 0.0)):
        h = torch.zeros(6, dim, dtype=dtype)
        h[:3, 0] = size
        h[3:, 1] = 0.1
        system = sf.SpinSystem(sf.couplings.ring(6, dtype=dtype), h, 0.2, sf.Sphere(dim))
        equilibrium = TAP().solve(system)
        precise = PRECISE.solve(
            sf.SpinSystem(sf.couplings.ring(6, dtype=F64), h.double(), 0.2, sf.Sphere(dim))
        )
        error = (equilibrium.magnetization.double() - precise.magnetization).detach().abs().max()
        tolerance = 1e-5 if dtype == torch.float32 else 1e-10
        # The map shrinks deviations by 0.4 here; rounding of m itself is sqrt(D) of its unit.
        assert float(error) < 2 * tolerance + 4 * math.sqrt(dim) * torch.finfo(dtype).eps


def test_broken_systems_stay_alone() -> None:
    """NaN in the field, and couplings that are finite but overflow with beta."""
    j = (0.2 * cosine_couplings(3)).requires_grad_()
    h = torch.ones(3, 3, 3, dtype=F64)
    h[1, 0] = torch.nan
    beta = torch.tensor([1.0, 1.0, 1e200], dtype=F64)
    h[2] = 1e200
    site = sf.Sphere(3)
    system = sf.SpinSystem(j, h, beta, site, check_finite=False)
    equilibrium = TAP(on_failure="ignore").solve(system)
    assert equilibrium.converged.tolist() == [True, False, False]
    alone = TAP().solve(sf.SpinSystem(j, h[0], 1.0, site))
    for name in ("magnetization", "log_partition", "internal_energy"):
        found, expected = getattr(equilibrium, name), getattr(alone, name)
        assert bool(found[1:].isnan().all())
        close(found[0], expected)
        gradients = (
            torch.autograd.grad(value.sum(), j, retain_graph=True)[0]
            for value in (found[0], expected)
        )
        close(*gradients)
    assert bool(equilibrium.susceptibility()[1:].isnan().all())
    assert equilibrium.is_stable.tolist() == [True, False, False]
    with pytest.raises(sf.ConvergenceError, match="2 of 3"):
        TAP().solve(system)


@pytest.mark.parametrize("site", [sf.Ising(), sf.Sphere(3)], ids=repr)
def test_stability_beside_stiff_spins(site: SiteLaw) -> None:
    """The softest mode of an unstable state keeps its digits beside a spin that a field holds."""
    matrix = torch.full((10, 10), 0.25, dtype=F64)
    matrix[-1], matrix[:, -1] = 0.0, 0.0
    h = torch.zeros(10, site.dim, dtype=F64)
    alone = TAP().solve(sf.SpinSystem(matrix[:-1, :-1], h[:-1], 1.0, site))
    close(alone.stability(), 1 + 8 / 16 - 8 / 4)
    h[-1, 0] = 30.0
    close(TAP().solve(sf.SpinSystem(matrix, h, 1.0, site)).stability(), -0.5)
    # Where all are stiff: cosh(30)^2 for Ising spins, and the direction across the field else.
    stiff = TAP().solve(sf.SpinSystem(0 * matrix, h[-1:].expand(10, -1), 1.0, site))
    close(stiff.stability(), site.scale**2 / site.response(h[-1])[0])


def test_stability_counts_present_sites_only() -> None:
    """Spins in strong fields are stiffer than the absent ones beside them."""
    h = torch.full((4, 3), 5.0, dtype=F64)
    matrix = 0.1 * cosine_couplings(4)
    mask = torch.tensor([[False, False, True, True], [True, True, True, True]])
    stability = TAP().solve(sf.SpinSystem(matrix, h, 1.0, sf.Sphere(3), mask=mask)).stability()
    alone = TAP().solve(sf.SpinSystem(matrix[:2, :2], h[:2], 1.0, sf.Sphere(3)))
    assert float(alone.stability()) > 1.5
    close(stability[0], alone.stability())
    assert float(stability[1]) == math.inf


def test_what_it_refuses() -> None:
    h = torch.ones(3, 2, dtype=F64)
    skew = torch.triu(torch.ones(3, 3, dtype=F64), 1)
    with pytest.raises(ValueError, match="TAP at equilibrium needs symmetric couplings"):
        TAP().solve(sf.SpinSystem(skew, h, 1.0, sf.Sphere(2)))
    blocks = 0.1 * torch.eye(2, dtype=F64).expand(3, 3, 2, 2)
    with pytest.raises(ValueError, match=r"scalar couplings.*MeanField"):
        TAP().solve(sf.SpinSystem(blocks, h, 1.0, sf.Sphere(2)))
    with pytest.raises(ValueError, match="largest eigenvalue is 1"):
        TAP().solve(
            sf.SpinSystem(sf.couplings.ring(6, dtype=F64), h.repeat(2, 1), 0.5, sf.Gaussian(2))
        )
    with pytest.raises(TypeError, match="damping"):
        TAP(dampin=0.5)
    with pytest.raises(sf.ConvergenceError, match="1 of 1 systems"):
        TAP(max_iterations=2).solve(random_system(sf.Sphere(2)))


def test_spins_that_a_field_holds_answer_with_nothing() -> None:
    """At beta = 1e4 the variance of an Ising spin is below the smallest number."""
    system = random_system(sf.Ising(), num_spins=4).replace(beta=1e4)
    equilibrium = TAP("anderson", on_failure="ignore").solve(system)
    assert float(equilibrium.susceptibility().abs().max()) < 1e-100
    for name in ("specific_heat", "spectral_radius"):
        assert abs(float(getattr(equilibrium, name)())) < 1e-100, name
    assert float(equilibrium.stability()) > 0 and bool(equilibrium.is_stable)


def test_correlations_follow_paths() -> None:
    """The ends of a chain of three are correlated by the site between: m = 0, t^2 = tanh(K)^2."""
    chain = sf.couplings.chain(3, dtype=torch.float64)
    system = sf.SpinSystem(chain, torch.zeros(3, 1).double(), 0.3, sf.Ising())
    equilibrium = PRECISE.solve(system)
    exact = math.tanh(0.3) ** 2
    # Wrong from the fourth order of K on; the derivative in the missing bond sees nothing at all.
    assert float(equilibrium.correlations()[0, 2]) == pytest.approx(exact, abs=2 * 0.3**4)
    assert float(equilibrium.correlations("coupling")[0, 2]) == 0
