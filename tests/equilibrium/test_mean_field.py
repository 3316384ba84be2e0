"""Mean field: matrix-valued couplings, stability, Gaussian spins, broken systems."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import spinformer as sf

F64 = torch.float64


def ferromagnet(**options):
    j = torch.tensor([[0.0, 2.0], [2.0, 0.0]], dtype=F64)
    system = sf.SpinSystem(j, torch.zeros(2, 1, dtype=F64), 1.0, sf.Ising())
    return sf.MeanField(**options).solve(system, torch.full((2, 1), 1e-6, dtype=F64))


@pytest.mark.parametrize("solver", ["plain", "anderson", "broyden"])
def test_ferromagnet_is_ordered_or_reported_unstable(solver):
    equilibrium = ferromagnet(solver=solver)
    ordered = float(equilibrium.free_energy) < -0.1
    assert bool(equilibrium.is_stable) == ordered
    if solver == "plain":
        assert ordered


def test_stability_is_the_smallest_eigenvalue_of_the_free_energy_hessian(generator):
    """Against the Hessian of the variational functional, scaled by C^(1/2) on both sides."""
    j = torch.randn(4, 4, generator=generator, dtype=F64) / 4
    h = torch.randn(4, 2, generator=generator, dtype=F64)
    system = sf.SpinSystem(j, h, 0.8, sf.Sphere(2), symmetrize=True)
    equilibrium = sf.MeanField(tolerance=1e-13).solve(system)

    def negative_log_z(m):
        pairs = (m * system.couplings.apply(m)).sum() * system.beta / 2
        field = (m * h).sum() * system.beta
        return -system.site.entropy(m).sum() - pairs - field

    m = equilibrium.magnetization
    hessian = torch.autograd.functional.hessian(negative_log_z, m).reshape(8, 8)
    covariance = torch.block_diag(*system.site.covariance(system.beta * system.force(m)))
    values = torch.linalg.eigvals(covariance @ hessian).real
    torch.testing.assert_close(equilibrium.stability(), values.min(), rtol=1e-9, atol=0)
    gradient = torch.autograd.functional.jacobian(negative_log_z, m)
    assert float(gradient.abs().max()) < 1e-8


def test_rotation_mode_of_an_ordered_magnet_is_marginal():
    system = sf.SpinSystem(
        sf.couplings.curie_weiss(8, dtype=F64), torch.zeros(8, 3, dtype=F64), 3.0, sf.Sphere(3)
    )
    start = torch.zeros(8, 3, dtype=F64)
    start[:, 2] = 1.0
    ordered = sf.MeanField().solve(system, start)
    # The zero mode comes out at the size of the residual, 1e-10, times a condition number.
    assert abs(float(ordered.stability())) < 1e-8 and bool(ordered.is_stable)
    assert not bool(sf.MeanField().solve(system).is_stable)


def test_matrix_valued_couplings_of_multiples_of_one_are_scalar(generator):
    j = torch.randn(5, 5, generator=generator, dtype=F64) / 5
    h = torch.randn(5, 3, generator=generator, dtype=F64)
    blocks = j[:, :, None, None] * torch.eye(3, dtype=F64)
    scalar, matrix = (
        sf.MeanField(tolerance=1e-13).solve(
            sf.SpinSystem(couplings, h, 0.9, sf.Sphere(3), symmetrize=True)
        )
        for couplings in (j, blocks)
    )
    for name in ("magnetization", "free_energy", "internal_energy", "entropy"):
        torch.testing.assert_close(getattr(matrix, name), getattr(scalar, name))
    for name in ("susceptibility", "specific_heat", "correlations", "stability"):
        torch.testing.assert_close(getattr(matrix, name)(), getattr(scalar, name)())


def test_matrix_valued_susceptibility_is_the_derivative(generator):
    j = torch.randn(3, 3, 2, 2, generator=generator, dtype=F64) / 4
    h = torch.randn(3, 2, generator=generator, dtype=F64)

    def magnetization(h):
        system = sf.SpinSystem(j, h, 0.9, sf.Sphere(2), symmetrize=True)
        return sf.MeanField(tolerance=1e-13).solve(system)

    numeric = torch.autograd.functional.jacobian(lambda h: magnetization(h).magnetization, h)
    torch.testing.assert_close(magnetization(h).susceptibility(), numeric)


def test_gradients_of_steady_states_of_asymmetric_couplings(generator):
    j = (torch.randn(2, 3, 3, generator=generator, dtype=F64) / 4).requires_grad_()
    h = torch.randn(2, 3, 2, generator=generator, dtype=F64, requires_grad=True)
    beta = torch.tensor([0.5, 1.2], dtype=F64, requires_grad=True)

    def magnetization(j, h, beta):
        system = sf.SpinSystem(j, h, beta, sf.Sphere(2))
        return sf.MeanField(tolerance=1e-13).solve(system).magnetization

    assert gradcheck(magnetization, (j, h, beta))
    assert gradgradcheck(magnetization, (j, h, beta), fast_mode=True)


def test_gaussian_spins_end_at_the_largest_eigenvalue():
    ring = sf.couplings.ring(6, dtype=F64)  # largest eigenvalue 2
    field = torch.ones(6, 2, dtype=F64)
    m = sf.MeanField().solve(sf.SpinSystem(ring, field, 0.4, sf.Gaussian(2))).magnetization
    # Uniform field: m = beta h / (1 - 2 beta).
    torch.testing.assert_close(m, torch.full_like(field, 0.4 / 0.2), rtol=1e-9, atol=0)
    with pytest.raises(ValueError, match="largest eigenvalue is 1"):
        sf.MeanField().solve(sf.SpinSystem(ring, field, 0.5, sf.Gaussian(2)))


def test_a_broken_system_stays_alone():
    j = torch.full((3, 3), 0.2, dtype=F64, requires_grad=True)
    h = torch.ones(2, 3, 1, dtype=F64)
    h[1, 0] = torch.nan
    system = sf.SpinSystem(j, h, 1.0, sf.Ising(), check_finite=False)
    equilibrium = sf.MeanField(on_failure="ignore").solve(system)
    assert equilibrium.converged.tolist() == [True, False]
    assert torch.isnan(equilibrium.magnetization[1]).all()
    (grad,) = torch.autograd.grad(equilibrium.magnetization[0].sum(), j)
    alone = sf.MeanField().solve(sf.SpinSystem(j, h[0], 1.0, sf.Ising()))
    (expected,) = torch.autograd.grad(alone.magnetization.sum(), j)
    torch.testing.assert_close(grad, expected)
    with pytest.raises(sf.ConvergenceError, match="1 of 2"):
        sf.MeanField().solve(system)


def test_initial_state_must_fit():
    system = sf.SpinSystem(torch.zeros(3, 3), torch.zeros(3, 2), site=sf.Sphere(2))
    with pytest.raises(ValueError, match=r"initial has shape \(4, 2\)"):
        sf.MeanField().solve(system, torch.zeros(4, 2))


def test_default_tolerance_is_within_reach_of_large_spins():
    """float32 rounding grows as sqrt(D) in units of one component."""
    field = torch.zeros(8, 16384)
    field[:, 0] = 50.0
    system = sf.SpinSystem(sf.couplings.curie_weiss(8), field, 1.0, sf.Sphere(16384))
    assert sf.MeanField().solve(system).converged.all()


def test_no_present_site_has_no_density():
    mask = torch.tensor([[False, False], [True, True]])
    system = sf.SpinSystem(torch.zeros(2, 2), torch.ones(2, 2, 1), 1.0, sf.Ising(), mask=mask)
    assert float(sf.MeanField().solve(system).free_energy_per_spin[1]) == 0.0


def test_large_systems_answer_without_a_dense_susceptibility():
    """600 components: products by iteration, against the dense solve, in value and derivative."""
    generator = torch.Generator().manual_seed(7)
    matrix = torch.randn(200, 200, generator=generator, dtype=F64) / 200**0.5 / 5
    matrix.requires_grad_()
    field = torch.randn(200, 3, generator=generator, dtype=F64).requires_grad_()
    vector = torch.randn(200, 3, generator=generator, dtype=F64)
    for symmetrize in (True, False):
        system = sf.SpinSystem(matrix, field, 0.9, sf.Sphere(3), symmetrize=symmetrize)
        equilibrium = sf.MeanField(tolerance=1e-12).solve(system)
        found = equilibrium.susceptibility_product(vector)
        expected = torch.einsum("iajb,jb->ia", equilibrium.susceptibility(), vector)
        # The iteration stops at a relative residual of 1e-10.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        one, other = (
            torch.autograd.grad(x.square().sum(), (matrix, field), retain_graph=True)
            for x in (found, expected)
        )
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
        m = equilibrium.magnetization
        connected = torch.einsum("iaja->ij", equilibrium.susceptibility()) / 0.9
        off = ~torch.eye(200, dtype=torch.bool)
        torch.testing.assert_close(
            equilibrium.correlations()[off], (m @ m.mT + connected)[off], rtol=0, atol=1e-9
        )


def test_spectral_radius_is_the_rate_of_the_iteration():
    """An error shrinks by it an iteration, once its largest component is all that is left."""
    matrix = torch.tensor([[0.0, -1.0], [-1.0, 0.0]], dtype=F64)
    field = torch.tensor([[0.3], [0.1]], dtype=F64)
    system = sf.SpinSystem(matrix, field, 0.7, sf.Ising())
    equilibrium = sf.MeanField(tolerance=1e-14).solve(system)
    m = equilibrium.magnetization
    errors = []
    z = m + 1e-4 * torch.tensor([[1.0], [1.0]], dtype=F64)
    for _ in range(6):
        z = sf.Ising().mean(0.7 * system.force(z))
        errors.append(float((z - m).norm()))
    # Two iterations, as the leading eigenvalue is negative; corrections are of order 1e-4.
    rate = (errors[5] / errors[3]) ** 0.5
    assert rate == pytest.approx(float(equilibrium.spectral_radius()), rel=1e-3)


def test_an_empty_batch_of_large_systems():
    """Beyond the size up to which the susceptibility is dense."""
    field = torch.zeros(0, 14, 40, dtype=F64)
    equilibrium = sf.MeanField().solve(
        sf.SpinSystem(torch.zeros(14, 14, dtype=F64), field, 1.0, sf.Sphere(40))
    )
    assert equilibrium.specific_heat().shape == (0,)
    assert equilibrium.correlations().shape == (0, 14, 14)


@pytest.mark.parametrize("site", [sf.Ising(), sf.LargeDSphere(3)], ids=repr)
def test_a_system_too_cold_for_its_numbers_is_no_answer(site):
    """tanh of infinity is a number; log Z and its derivatives are none. Mates are not changed."""
    j = torch.full((3, 3), 40.0, dtype=F64, requires_grad=True)
    h = torch.ones(3, site.dim, dtype=F64)
    solver = sf.MeanField(on_failure="ignore")
    pair = solver.solve(sf.SpinSystem(j, h, torch.tensor([0.1, 1e308], dtype=F64), site))
    alone = solver.solve(sf.SpinSystem(j, h, 0.1, site))
    assert pair.converged.tolist() == [True, False]
    assert pair.magnetization[1].isnan().all() and pair.spectral_radius()[1].isnan()
    for name in ("log_partition", "internal_energy"):
        (found,) = torch.autograd.grad(getattr(pair, name)[0], j, retain_graph=True)
        (expected,) = torch.autograd.grad(getattr(alone, name), j, retain_graph=True)
        torch.testing.assert_close(found, expected)
