"""Steepest descent: reference values, identities, rates in 1/D, derivatives, masks, evidence."""

import copy
import itertools
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import spinformer as sf
from spinformer.equilibrium.steepest_descent import SteepestDescent

F64 = torch.float64
DATA = Path(__file__).parents[1] / "data" / "steepest_descent.json"
AUXILIARY = ("site", "shared")


def records(name):
    found = [r for r in json.loads(DATA.read_text()) if r["name"] == name]
    assert found, name
    return found


def values(name, **params):
    (record,) = [r for r in records(name) if params.items() <= r["params"].items()]
    return record["value"]


def cosine_field(n, d, strength):
    """h_i[a] = strength cos(i a + i), 1-based."""
    i = torch.arange(1, n + 1, dtype=F64)[:, None]
    return strength * torch.cos(i * torch.arange(1, d + 1, dtype=F64) + i)


def cosine_couplings(n, strength):
    """J_ij = strength cos(i j), 1-based."""
    i = torch.arange(1, n + 1, dtype=F64)
    return strength * torch.cos(i[:, None] * i)


def law(dim, radius=None):
    return sf.Ising() if dim == 1 else sf.Sphere(dim, radius)


def draw(n, d, generator, *, batch=(), strength=1.0):
    j = strength * torch.randn(*batch, n, n, generator=generator, dtype=F64) / math.sqrt(n)
    h = torch.randn(*batch, n, d, generator=generator, dtype=F64)
    return (j + j.mT) / 2**0.5, h


def close(actual, expected, tolerance=1e-10):
    expected = torch.as_tensor(expected, dtype=F64)
    torch.testing.assert_close(actual.detach(), expected, rtol=tolerance, atol=tolerance)


# -- against reference values ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "record", records("sd_golden"), ids=lambda r: f"D={r['params']['D']} {r['params']['shared_t']}"
)
def test_golden_values(record):
    """Every quantity, from an independent Newton solver at |grad| = 1e-15."""
    p, v = record["params"], record["value"]
    n, d = p["N"], p["D"]
    assert p["J_formula"].startswith("J_ij=cos(i*j)/N")
    assert p["h_formula"] == "h_i[a]=0.5*cos(i*a+i)"
    system = sf.SpinSystem(
        cosine_couplings(n, 1 / n), cosine_field(n, d, 0.5), p["beta"], sf.Sphere(d, p["R"])
    )
    auxiliary = "shared" if p["shared_t"] else "site"
    eq = SteepestDescent(auxiliary).solve(system)
    close(eq.t, v["t"][0] if p["shared_t"] else v["t"])
    close(eq.log_partition, v["logZ_SD0"])
    close(eq.free_energy, v["F_SD0"])
    close(eq.internal_energy, v["U"])
    close(eq.entropy, v["entropy"])
    close(eq.specific_heat(), v["C"])
    close(eq.magnetization[:, 0], v["m_first_components"])
    # On the diagonal the convention is R^2; the values hold the Gaussian variance.
    close(eq.correlations()[0, 1:], v["corr_row0"][1:])
    chi = eq.susceptibility()
    close(torch.einsum("iaia", chi), v["chi_trace"])
    close(chi[0, 0, 0, 0], v["chi_0000"])
    close(chi[0, 0, 1, 0], v["chi_0010"])
    fluctuating = SteepestDescent(auxiliary, fluctuations=True).solve(system)
    close(fluctuating.log_partition, v["logZ_SD1"])


@pytest.mark.parametrize("record", records("sd_two_spin_field"), ids=lambda r: r["params"]["D"])
def test_two_spins_in_fields(record):
    d, v = record["params"]["D"], record["value"]
    j = torch.tensor([[0.0, 0.7], [0.7, 0.0]], dtype=F64)
    system = sf.SpinSystem(j, cosine_field(2, d, 0.6), 1.0, sf.Sphere(d))
    site = SteepestDescent().solve(system)
    close(site.t, v["t_site"])
    close(site.log_partition, v["logZ_SD0"])
    close(site.internal_energy, v["U_SD"])
    close(site.entropy, v["entropy_SD"])
    close(site.specific_heat(), v["C_SD"])
    close(site.correlations()[0, 1], v["S1S2_SD"])
    if v["m_SD"] is not None:  # not kept for large D
        close(site.magnetization, v["m_SD"])
    close(torch.einsum("iaia", site.susceptibility()), v["trace_chi_SD"])
    close(SteepestDescent(fluctuations=True).solve(system).log_partition, v["logZ_SD1"])
    shared = SteepestDescent("shared").solve(system)
    close(shared.t, v["t_shared"])
    close(shared.log_partition, v["logZ_SD0_shared"])
    if v["m_shared"] is not None:
        close(shared.magnetization, v["m_shared"])
    close(
        SteepestDescent("shared", fluctuations=True).solve(system).log_partition,
        v["logZ_SD1_shared"],
    )


@pytest.mark.parametrize("record", records("sd_convergence_pair"), ids=lambda r: str(r["params"]))
def test_pair_without_field(record):
    d, v = record["params"]["D"], record["value"]
    j = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
    system = sf.SpinSystem(j, torch.zeros(2, d, dtype=F64), record["params"]["betaJ"], law(d))
    eq = SteepestDescent().solve(system)
    close(eq.log_partition, v["logZ_SD0"])
    close(eq.correlations()[0, 1] / d, v["corr_SD0"])  # stored per component
    close(SteepestDescent(fluctuations=True).solve(system).log_partition, v["logZ_SD1"])


@pytest.mark.parametrize("record", records("sd_convergence_ring"), ids=lambda r: str(r["params"]))
def test_ring_without_field(record):
    p, v = record["params"], record["value"]
    d = p["D"]
    ring = sf.couplings.ring(p["N"], dtype=F64)
    system = sf.SpinSystem(ring, torch.zeros(p["N"], d, dtype=F64), p["betaJ"], law(d))
    for auxiliary in AUXILIARY:  # all sites are alike
        eq = SteepestDescent(auxiliary).solve(system)
        close(eq.log_partition, v["logZ_SD0"])
        close(eq.correlations()[0, 1] / d, v["bond_SD0"])
        close(p["betaJ"] * eq.t, torch.full_like(eq.t, v["tau"]))
    close(SteepestDescent(fluctuations=True).solve(system).log_partition, v["logZ_SD1"])


@pytest.mark.parametrize("record", records("spherical_sc_finite"), ids=lambda r: str(r["params"]))
def test_spherical_model_on_a_cubic_lattice(record):
    """Unit length per component: R^2 = D makes K = beta."""
    k, v = record["params"]["K"], record["value"]
    lattice = sf.couplings.cubic(4, dtype=F64)
    eq = SteepestDescent("shared").solve(
        sf.SpinSystem(lattice, torch.zeros(64, 2, dtype=F64), k, sf.Sphere(2))
    )
    close(k * eq.t, v["tau"])
    close(eq.log_partition / (64 * 2), v["logZ_SD0_per_spin"])
    bond = -eq.internal_energy / (3 * 64 * 2)
    close(bond, v["bond"])


@pytest.mark.parametrize("k", [0.25, 1.0])
def test_spherical_chain(k):
    """The infinite chain in closed form; a ring of 256 differs by exp(-256 / xi), xi < 2.1."""
    ring = sf.couplings.ring(256, dtype=F64)
    eq = SteepestDescent("shared").solve(
        sf.SpinSystem(ring, torch.zeros(256, 2, dtype=F64), k, sf.Sphere(2))
    )
    tau = math.sqrt(1 + 4 * k**2)
    close(k * eq.t, tau)
    close(eq.log_partition / 512, (tau - 1) / 2 - math.log((1 + tau) / 2) / 2)
    close(eq.correlations()[0, 1] / 2, 2 * k / (1 + tau))


@pytest.mark.parametrize(("dim", "site"), [(1, sf.Ising()), (5, sf.Sphere(5, 1.7))])
def test_one_spin_is_the_large_d_law(dim, site, generator):
    h = 3 * torch.randn(4, 1, dim, generator=generator, dtype=F64)
    system = sf.SpinSystem(torch.zeros(1, 1, dtype=F64), h, 0.8, site)
    for auxiliary in AUXILIARY:
        eq = SteepestDescent(auxiliary).solve(system)
        if dim == 1:
            q = torch.sqrt(1 + (2 * 0.8 * h) ** 2)
            expected = 2 * 0.8 * h / (1 + q)
        else:
            expected = sf.LargeDSphere(dim, 1.7).mean(0.8 * h)
            large = sf.LargeDSphere(dim, 1.7).log_partition(0.8 * h)[..., 0]
            torch.testing.assert_close(eq.log_partition, large)
        torch.testing.assert_close(eq.magnetization, expected)


# -- errors fall with D ---------------------------------------------------------------------------


def errors(name, fluctuations, solve, **params):
    """Errors of log Z per component at D = 16, 32, 64."""
    found = []
    for d in (16, 32, 64):
        exact = values(name, D=d, **params)["logZ_exact"]
        method = SteepestDescent(fluctuations=fluctuations)
        found.append(abs(float(method.solve(solve(d)).log_partition) - exact) / d)
    return found


def pair_system(d):
    j = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
    return sf.SpinSystem(j, torch.zeros(2, d, dtype=F64), 1.0, sf.Sphere(d))


def ring_system(d):
    ring = sf.couplings.ring(8, dtype=F64)
    return sf.SpinSystem(ring, torch.zeros(8, d, dtype=F64), 0.5, sf.Sphere(d))


def field_system(d):
    j = torch.tensor([[0.0, 0.7], [0.7, 0.0]], dtype=F64)
    return sf.SpinSystem(j, cosine_field(2, d, 0.6), 1.0, sf.Sphere(d))


def contour_system(d):
    return sf.SpinSystem(cosine_couplings(3, 0.8), cosine_field(3, d, 0.5), 1.0, sf.Sphere(d))


CASES = [
    ("sd_convergence_pair", pair_system, {"betaJ": 1.0}),
    ("sd_convergence_ring", ring_system, {"betaJ": 0.5}),
    ("sd_two_spin_field", field_system, {}),
    ("three_spin_contour_exact", contour_system, {}),
]


@pytest.mark.parametrize(("name", "solve", "params"), CASES, ids=[name for name, *_ in CASES])
def test_error_falls_as_one_power_of_d_and_with_fluctuations_as_two(name, solve, params):
    """Ratios of successive errors tend to 2 and 4; the fields' cosines change with D, which moves
    them by 15 %, and the next order is 1/D = 1/16 of the leading one."""
    for fluctuations, ratio in ((False, 2), (True, 4)):
        found = errors(name, fluctuations, solve, **params)
        for coarse, fine in itertools.pairwise(found):
            assert coarse / fine == pytest.approx(ratio, rel=0.2)


# -- identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fluctuations", [False, True])
@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_thermodynamic_identities_by_finite_differences(auxiliary, fluctuations, generator):
    j, h = draw(4, 3, generator)
    beta, step = 0.9, 1e-4
    site = sf.Sphere(3, 1.4)

    def solve(j=j, h=h, beta=beta):
        return SteepestDescent(auxiliary, fluctuations).solve(sf.SpinSystem(j, h, beta, site))

    eq = solve()
    # Central differences: step^2 = 1e-8 times third derivatives of order one, and rounding
    # 1e-15 / step = 1e-11, or / step^2 = 1e-7 for second differences.
    first, second = {"rtol": 1e-6, "atol": 1e-7}, {"rtol": 1e-5, "atol": 2e-6}
    up, down = solve(beta=beta + step), solve(beta=beta - step)
    slope = (up.log_partition - down.log_partition) / (2 * step)
    torch.testing.assert_close(eq.internal_energy, -slope, **first)
    curvature = (up.log_partition + down.log_partition - 2 * eq.log_partition) / step**2
    torch.testing.assert_close(eq.specific_heat(), beta**2 * curvature, **second)
    heat = -(beta**2) * (up.internal_energy - down.internal_energy) / (2 * step)
    torch.testing.assert_close(eq.specific_heat(), heat, **first)
    torch.testing.assert_close(eq.entropy, beta * (eq.internal_energy - eq.free_energy))

    chi, correlations = eq.susceptibility(), eq.correlations()
    for i in range(4):
        for a in range(3):
            kick = torch.zeros_like(h)
            kick[i, a] = step
            up, down = solve(h=h + kick), solve(h=h - kick)
            slope = (down.free_energy - up.free_energy) / (2 * step)
            torch.testing.assert_close(eq.magnetization[i, a], slope, **first)
            response = (up.magnetization - down.magnetization) / (2 * step)
            torch.testing.assert_close(chi[:, :, i, a], response, **first)
        for k in range(i):
            kick = torch.zeros_like(j)
            kick[i, k] = kick[k, i] = step
            up, down = solve(j=j + kick), solve(j=j - kick)
            slope = (up.log_partition - down.log_partition) / (2 * step * beta)
            torch.testing.assert_close(correlations[i, k], slope, **first)


@pytest.mark.parametrize("fluctuations", [False, True])
@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_magnetization_and_energy_are_derivatives_by_autograd(auxiliary, fluctuations, generator):
    j, h = draw(5, 2, generator)
    h.requires_grad_()
    beta = torch.tensor(0.7, dtype=F64, requires_grad=True)
    eq = SteepestDescent(auxiliary, fluctuations).solve(sf.SpinSystem(j, h, beta, sf.Sphere(2)))
    (m,) = torch.autograd.grad(-eq.free_energy, h, retain_graph=True)
    (u,) = torch.autograd.grad(-eq.log_partition, beta)
    torch.testing.assert_close(eq.magnetization, m)
    torch.testing.assert_close(eq.internal_energy, u)


def test_sum_rule_and_energy_from_correlations(generator):
    """|m_i|^2 and the Gaussian variance add up to R^2: A_ii = 1 - |mu_i|^2, seen through U."""
    j, h = draw(6, 4, generator)
    for auxiliary in AUXILIARY:
        system = sf.SpinSystem(j, h, 1.3, sf.Sphere(4, 1.1))
        eq = SteepestDescent(auxiliary).solve(system)
        correlations = eq.correlations()
        assert torch.equal(correlations.diagonal(), torch.full((6,), 1.1**2, dtype=F64))
        product = eq.correlations("product")
        off = ~torch.eye(6, dtype=torch.bool)
        outer = eq.magnetization @ eq.magnetization.mT
        torch.testing.assert_close(product[off], outer[off])
        pairs = (system.couplings.to_dense() * correlations).sum() / 2
        torch.testing.assert_close(eq.internal_energy, -pairs - (h * eq.magnetization).sum())
        # U = N D / (2 beta) - R^2 / 2 sum t - 1/2 sum h m holds by the sum rule alone.
        t = eq.t if auxiliary == "site" else 6 * eq.t
        work = (h * eq.magnetization).sum() / 2
        by_rule = 6 * 4 / (2 * 1.3) - 1.1**2 / 2 * t.sum() - work
        torch.testing.assert_close(eq.internal_energy, by_rule)


def test_units_of_energy_and_rotations(generator):
    """(J, h) -> c (J, h) with beta -> beta / c; and a rotation of all fields rotates m."""
    j, h = draw(5, 3, generator)
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=F64))[0]
    for auxiliary in AUXILIARY:
        method, site = SteepestDescent(auxiliary), sf.Sphere(3)
        eq = method.solve(sf.SpinSystem(j, h, 1.2, site))
        scaled = method.solve(sf.SpinSystem(8 * j, 8 * h, 1.2 / 8, site))
        torch.testing.assert_close(scaled.magnetization, eq.magnetization)
        torch.testing.assert_close(scaled.log_partition, eq.log_partition)
        torch.testing.assert_close(scaled.internal_energy, 8 * eq.internal_energy)
        rotated = method.solve(sf.SpinSystem(j, h @ rotation, 1.2, site))
        torch.testing.assert_close(rotated.magnetization, eq.magnetization @ rotation)


# -- derivatives ----------------------------------------------------------------------------------

MASKS = [None, torch.tensor([[False] * 4, [False, True, False, False]])]


@pytest.mark.parametrize("mask", MASKS, ids=["all", "masked"])
@pytest.mark.parametrize("fluctuations", [False, True])
@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_gradcheck(auxiliary, fluctuations, mask, generator):
    """First and second derivatives in couplings, fields and beta; one J for two systems."""
    j = torch.randn(4, 4, generator=generator, dtype=F64) / 2
    h = torch.randn(2, 4, 2, generator=generator, dtype=F64)
    beta = torch.tensor([0.7, 1.3], dtype=F64)
    inputs = [x.requires_grad_() for x in (j, h, beta)]

    def solve(name):
        def function(j, h, beta):
            system = sf.SpinSystem(j, h, beta, sf.Sphere(2), symmetrize=True, mask=mask)
            found = getattr(SteepestDescent(auxiliary, fluctuations).solve(system), name)
            return found() if callable(found) else found

        return function

    for name in ("magnetization", "log_partition"):
        assert gradcheck(solve(name), inputs)
        if not fluctuations:
            assert gradgradcheck(solve(name), inputs)
    if not fluctuations:
        for name in ("internal_energy", "entropy", "specific_heat", "correlations"):
            assert gradcheck(solve(name), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_gradcheck_of_the_rest(auxiliary, generator):
    j = torch.randn(3, 3, generator=generator, dtype=F64) / 2
    h = torch.randn(3, 2, generator=generator, dtype=F64)
    beta = torch.tensor(0.7, dtype=F64)
    inputs = [x.requires_grad_() for x in (j, h, beta)]
    rest = [(False, "susceptibility"), (True, "magnetization"), (True, "internal_energy")]
    for fluctuations, name in rest:

        def function(j, h, beta, name=name, fluctuations=fluctuations):
            system = sf.SpinSystem(j, h, beta, sf.Sphere(2), symmetrize=True)
            found = getattr(SteepestDescent(auxiliary, fluctuations).solve(system), name)
            return found() if callable(found) else found

        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_closed_form_gradient_is_the_general_one(auxiliary, batched, generator):
    """The hot path of training against the recursion that second derivatives use."""
    j, h = draw(6, 3, generator, batch=(2,))
    j = j if batched else j[0]
    beta = torch.tensor([0.6, 1.1], dtype=F64)
    inputs = [x.requires_grad_() for x in (j, h, beta)]
    cotangent = torch.randn(2, 6, 3, generator=generator, dtype=F64)

    def gradients(**options):
        eq = SteepestDescent(auxiliary).solve(sf.SpinSystem(*inputs, sf.Sphere(3)))
        return torch.autograd.grad(eq.magnetization, inputs, cotangent, **options)

    for fast, general in zip(gradients(), gradients(create_graph=True), strict=True):
        torch.testing.assert_close(fast, general.detach(), rtol=1e-10, atol=1e-10)
    symmetric = gradients()[0]
    torch.testing.assert_close(symmetric, symmetric.mT)


@pytest.mark.parametrize("kind", ["zero", "uniform", "ring", "identical blocks"])
@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_degenerate_couplings_have_finite_and_right_gradients(auxiliary, kind, generator):
    """Nothing is divided by differences of eigenvalues."""
    ones = torch.ones(4, 4, dtype=F64)
    j = {
        "zero": torch.zeros(4, 4, dtype=F64),
        "uniform": ones / 4,  # Curie-Weiss
        "ring": sf.couplings.ring(4, dtype=F64).to_dense(),
        "identical blocks": torch.block_diag(ones[:2, :2], ones[:2, :2]),
    }[kind]
    j = (j - torch.diag(j.diagonal())).requires_grad_()
    h = torch.randn(4, 2, generator=generator, dtype=F64).requires_grad_()

    def function(j, h):
        system = sf.SpinSystem(j, h, 0.8, sf.Sphere(2), symmetrize=True)
        return SteepestDescent(auxiliary).solve(system).magnetization

    assert gradcheck(function, (j, h))
    assert gradgradcheck(function, (j, h))


# -- cold, batches, masks, broken systems ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_cold_systems(auxiliary, dtype, generator):
    """T -> 0: a frustrated triangle reaches its 120-degree state, a ferromagnet lines up."""
    ones = torch.ones(3, 3, dtype=dtype)
    j = torch.stack([-ones, ones])
    eq = SteepestDescent(auxiliary).solve(
        sf.SpinSystem(j, torch.zeros(2, 3, 2, dtype=dtype), 1e4, sf.Sphere(2, 1.0))
    )
    assert bool(eq.converged.all())
    # U - U_0 is N D / 2 / beta = 3e-4 at most; the residual of float32 is 1e-5.
    expected = torch.tensor([-1.5, -3.0], dtype=dtype)
    torch.testing.assert_close(eq.internal_energy, expected, rtol=0, atol=4e-4)
    j, h = draw(8, 2, generator, strength=100.0)
    eq = SteepestDescent(auxiliary).solve(
        sf.SpinSystem(j.to(dtype), h.to(dtype).requires_grad_(), 10.0, sf.Sphere(2))
    )
    assert bool(eq.converged.all()) and eq.magnetization.dtype == dtype
    eq.magnetization.sum().backward()
    assert eq.system.field.isfinite().all()


@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_float32_agrees_with_float64(auxiliary, generator):
    j, h = draw(32, 16, generator, batch=(3,), strength=0.7)
    exact = SteepestDescent(auxiliary).solve(sf.SpinSystem(j, h, 1.0, sf.Sphere(16)))
    single = SteepestDescent(auxiliary).solve(
        sf.SpinSystem(j.float(), h.float(), 1.0, sf.Sphere(16))
    )
    assert single.solution.residual.dtype == torch.float32
    # The tolerance 1e-5 of the constraint, times R = 4 and the response of m to t.
    torch.testing.assert_close(
        single.magnetization, exact.magnetization.float(), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        single.log_partition, exact.log_partition.float(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_answer_and_gradient_of_a_batch_are_those_alone(auxiliary, generator):
    j, h = draw(6, 2, generator, batch=(3,))
    scale = torch.tensor([0.1, 1.0, 300.0], dtype=F64)
    cotangent = torch.randn(3, 6, 2, generator=generator, dtype=F64)
    j.requires_grad_()

    def solve(rows):
        system = sf.SpinSystem(j[rows], h[rows], scale[rows], sf.Sphere(2))
        eq = SteepestDescent(auxiliary).solve(system)
        (grad,) = torch.autograd.grad(eq.magnetization, j, cotangent[rows], retain_graph=True)
        return eq, grad[rows]

    together, gradient = solve(slice(None))
    for row in range(3):
        alone, alone_gradient = solve(row)
        close = {"rtol": 1e-9, "atol": 1e-9}  # rounding times the condition number, 1e4
        torch.testing.assert_close(alone.magnetization, together.magnetization[row], **close)
        torch.testing.assert_close(alone_gradient, gradient[row], **close)
        assert int(alone.solution.iterations) == int(together.solution.iterations[row])


@pytest.mark.parametrize("fluctuations", [False, True])
@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_padding_changes_nothing(auxiliary, fluctuations, generator):
    j, h = draw(4, 2, generator)
    wide_j = torch.full((7, 7), torch.nan, dtype=F64)
    wide_h = torch.full((7, 2), torch.nan, dtype=F64)
    here = torch.tensor([0, 2, 3, 6])
    wide_j[here[:, None], here] = j
    wide_h[here] = h
    mask = torch.ones(7, dtype=torch.bool)
    mask[here] = False
    wide_h.requires_grad_()
    method = SteepestDescent(auxiliary, fluctuations)
    small = method.solve(sf.SpinSystem(j, h, 1.1, sf.Sphere(2)))
    wide = method.solve(sf.SpinSystem(wide_j, wide_h, 1.1, sf.Sphere(2), mask=mask))
    for name in ("log_partition", "internal_energy", "entropy", "free_energy_per_spin"):
        torch.testing.assert_close(getattr(wide, name), getattr(small, name))
    torch.testing.assert_close(wide.specific_heat(), small.specific_heat())
    torch.testing.assert_close(wide.magnetization[here], small.magnetization)
    torch.testing.assert_close(wide.correlations()[here[:, None], here], small.correlations())
    chi = wide.susceptibility()
    torch.testing.assert_close(chi[here][:, :, here], small.susceptibility())
    assert not wide.magnetization[mask].any() and not wide.correlations()[mask].any()
    assert not chi[mask].any()
    wide.magnetization.square().sum().backward()
    assert not wide_h.grad[mask].any() and wide_h.grad.isfinite().all()


@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_nan_stays_in_its_system(auxiliary, generator):
    j, h = draw(5, 2, generator)
    h = torch.stack([h, h, h])
    h[1, 2, 0] = torch.nan
    j.requires_grad_()
    with pytest.raises(sf.ConvergenceError, match="1 of 3 systems"):
        SteepestDescent(auxiliary).solve(sf.SpinSystem(j, h, 1.0, sf.Sphere(2), check_finite=False))
    eq = SteepestDescent(auxiliary, on_failure="ignore").solve(
        sf.SpinSystem(j, h, 1.0, sf.Sphere(2), check_finite=False)
    )
    assert eq.converged.tolist() == [True, False, True]
    for value in (eq.magnetization, eq.log_partition, eq.internal_energy, eq.entropy):
        assert value[1].isnan().all() and value[::2].isfinite().all()
    clean = SteepestDescent(auxiliary).solve(sf.SpinSystem(j, h[0], 1.0, sf.Sphere(2)))
    torch.testing.assert_close(eq.magnetization[2], clean.magnetization)
    for name in ("magnetization", "log_partition"):
        (all_of_it,) = torch.autograd.grad(getattr(eq, name).sum(), j, retain_graph=True)
        (of_one,) = torch.autograd.grad(getattr(clean, name).sum(), j, retain_graph=True)
        torch.testing.assert_close(all_of_it, 2 * of_one)


@pytest.mark.parametrize("auxiliary", AUXILIARY)
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2), (2, 3, 2)])
def test_nothing_to_solve(auxiliary, shape):
    """No systems, no sites, no present sites."""
    n = shape[1]
    mask = torch.ones(n, dtype=torch.bool)
    h = torch.ones(shape, dtype=F64, requires_grad=True)
    j = torch.ones(n, n, dtype=F64)
    eq = SteepestDescent(auxiliary).solve(sf.SpinSystem(j, h, 1.0, sf.Sphere(2), mask=mask))
    assert eq.magnetization.shape == shape and not eq.magnetization.any()
    assert torch.equal(eq.log_partition, torch.zeros(shape[0], dtype=F64))
    assert torch.equal(eq.specific_heat(), torch.zeros(shape[0], dtype=F64))
    eq.magnetization.sum().backward()
    assert not h.grad.any()


# -- options and borders --------------------------------------------------------------------------


def test_eigenvectors_are_kept_for_the_same_matrix_only(generator):
    j, h = draw(5, 2, generator)
    couplings = sf.couplings.Dense(j)
    method = SteepestDescent("shared")

    def solve(couplings):
        return method.solve(sf.SpinSystem(couplings, h, 1.0, sf.Sphere(2))).magnetization

    matrix = couplings.to_dense()
    first = solve(couplings)
    kept = method._spectrum.of(matrix, F64)[1]
    assert torch.equal(solve(couplings), first)
    assert method._spectrum.of(matrix, F64)[1] is kept
    # Another tensor with the same entries, as a module assembles it in every forward pass.
    assert method._spectrum.of(matrix.clone(), F64)[1] is kept
    # In place: the same tensor with other values.
    matrix.mul_(2)
    changed = solve(couplings)
    fresh = SteepestDescent("shared").solve(sf.SpinSystem(matrix, h, 1.0, sf.Sphere(2)))
    torch.testing.assert_close(changed, fresh.magnetization)
    assert not torch.allclose(changed, first)
    for twin in (copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        torch.testing.assert_close(
            twin.solve(sf.SpinSystem(matrix, h, 1.0, sf.Sphere(2))).magnetization, changed
        )


def test_an_earlier_t_saves_steps(generator):
    j, h = draw(8, 2, generator)
    eq = SteepestDescent().solve(sf.SpinSystem(j, h, 1.0, sf.Sphere(2)))
    near = sf.SpinSystem(j, h, 1.01, sf.Sphere(2))
    cold, warm = SteepestDescent().solve(near), SteepestDescent().solve(near, initial=eq.t)
    assert int(warm.solution.iterations) < int(cold.solution.iterations)
    torch.testing.assert_close(warm.magnetization, cold.magnetization)
    with pytest.raises(ValueError, match="auxiliary='site'"):
        SteepestDescent("shared").solve(near, initial=eq.t)


def test_what_it_does_not_do_is_an_error():
    j, h = torch.zeros(2, 2), torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"use MeanField\(\)"):
        SteepestDescent().solve(sf.SpinSystem(j, h, 1.0, sf.Gaussian(2)))
    with pytest.raises(ValueError, match="symmetric couplings"):
        SteepestDescent().solve(
            sf.SpinSystem(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), h, 1.0, sf.Sphere(2))
        )
    with pytest.raises(ValueError, match="matrix-valued"):
        SteepestDescent().solve(sf.SpinSystem(torch.zeros(2, 2, 2, 2), h, 1.0, sf.Sphere(2)))
    with pytest.raises(ValueError, match="auxiliary='sites'.*nearest is 'site'"):
        SteepestDescent("sites")
    with pytest.raises(ValueError, match="on_failure"):
        SteepestDescent(on_failure="rise")
    with pytest.raises(ValueError, match="tolerance=0"):
        SteepestDescent(tolerance=0)
    with pytest.raises(ValueError, match="max_iterations=0"):
        SteepestDescent(max_iterations=0)
    with pytest.raises(TypeError, match="nearest is 'auxiliary'"):
        SteepestDescent(auxilary="site")


def test_too_few_iterations_raise_or_warn(generator):
    j, h = draw(6, 2, generator, strength=1e4)
    system = sf.SpinSystem(j, h, 1.0, sf.Sphere(2))
    with pytest.raises(sf.ConvergenceError, match="steepest descent"):
        SteepestDescent(max_iterations=3).solve(system)
    with pytest.warns(sf.ConvergenceWarning):
        eq = SteepestDescent(max_iterations=3, on_failure="warn").solve(system)
    assert not bool(eq.converged) and float(eq.solution.residual) > 1e-3


@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_couplings_that_overflow_with_beta_are_broken(auxiliary):
    """Finite J and beta whose product is not: NaN in every quantity, and only there."""
    j = torch.tensor([[0.0, 1e300], [1e300, 0.0]], dtype=F64)
    beta = torch.tensor([1e-300, 1e10], dtype=F64)
    system = sf.SpinSystem(j, torch.ones(2, 2, dtype=F64), beta, sf.Sphere(2))
    answer = SteepestDescent(auxiliary, on_failure="ignore").solve(system)
    assert answer.converged.tolist() == [True, False]
    for name in ("log_partition", "internal_energy", "entropy"):
        assert torch.isfinite(getattr(answer, name)).tolist() == [True, False]
    with pytest.raises(sf.ConvergenceError, match="1 of 2"):
        SteepestDescent(auxiliary).solve(system)
