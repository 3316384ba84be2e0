"""Conjugate gradients, low-rank changes of diagonals, and the size from which CG is used."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import spinformer as sf
from spinformer.equilibrium import saddle
from spinformer.solve import newton
from spinformer.solve.conjugate_gradient import conjugate_gradient
from spinformer.solve.low_rank import (
    LowRankCone,
    core,
    core_log_det,
    hessian_product,
    signed_factor,
)

F64 = torch.float64


def positive(n, generator, batch=()):
    a = torch.randn(*batch, n, n, generator=generator, dtype=F64)
    return a @ a.mT + torch.eye(n, dtype=F64)


def solve(matrix, right, **options):
    return conjugate_gradient(
        lambda x: (matrix @ x[..., None])[..., 0],
        right,
        matrix.diagonal(dim1=-2, dim2=-1),
        **({"tolerance": 1e-13, "max_iterations": 100} | options),
    )


def test_conjugate_gradients_solve(generator):
    """Against a factorization, one system with zero on the right and one that is broken."""
    matrix = positive(8, generator, (4,))
    right = torch.randn(4, 8, generator=generator, dtype=F64)
    right[1] = 0
    right[2, 3] = torch.nan
    found = solve(matrix, right)
    assert found.converged.tolist() == [True, True, False, True]
    assert int(found.iterations[1]) == 0 and found.value[1].eq(0).all()
    for row in (0, 3):
        expected = torch.cholesky_solve(right[row, :, None], torch.linalg.cholesky(matrix[row]))
        torch.testing.assert_close(found.value[row], expected[:, 0])
        alone = solve(matrix[row], right[row])
        torch.testing.assert_close(alone.value, found.value[row])
        assert int(alone.iterations) == int(found.iterations[row])


def test_conjugate_gradients_end_early_and_say_so(generator):
    """In descent, with the residual of what they return; an indefinite matrix is refused."""
    matrix, right = positive(12, generator), torch.randn(12, generator=generator, dtype=F64)
    found = solve(matrix, right, max_iterations=3)
    assert not bool(found.converged) and int(found.iterations) == 3
    defect = torch.linalg.vector_norm(matrix @ found.value - right) / torch.linalg.vector_norm(
        right
    )
    torch.testing.assert_close(found.residual, defect)
    assert float(found.value @ right) > float(found.value @ matrix @ found.value) / 2
    indefinite = torch.diag(torch.tensor([1.0, -1.0], dtype=F64))
    refused = conjugate_gradient(
        lambda x: x @ indefinite,
        torch.tensor([0.1, 1.0], dtype=F64),
        torch.ones(2, dtype=F64),
        tolerance=1e-10,
        max_iterations=10,
    )
    assert not bool(refused.converged) and refused.residual.isnan()


def low_rank(generator):
    """G with two equal columns and a singular M of both signs: nothing in here is invertible."""
    factor = torch.randn(9, 4, generator=generator, dtype=F64)
    factor[:, 3] = factor[:, 0]
    middle = torch.diag(torch.tensor([0.05, -0.3, 0.0, 0.02], dtype=F64))
    middle[0, 1] = middle[1, 0] = 0.03
    b = torch.randn(9, 2, generator=generator, dtype=F64)
    tau = 2 + torch.rand(9, generator=generator, dtype=F64)
    return factor, middle, b, tau


def test_a_point_of_the_cone_is_that_of_the_matrix(generator):
    factor, middle, b, tau = low_rank(generator)
    basis, signs = signed_factor(factor, middle)
    torch.testing.assert_close(basis @ torch.diag(signs) @ basis.mT, middle)
    k = factor @ middle @ factor.mT
    k = k - torch.diag(k.diagonal())
    cone = LowRankCone.of((factor @ basis)[None], signs[None], b[None])
    point, inside = cone.evaluate(tau[None])
    assert bool(inside)
    v = torch.diag(tau) - k
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(v))
    vector = torch.randn(9, generator=generator, dtype=F64)
    torch.testing.assert_close(point.apply(vector[None])[0], inverse @ vector)
    torch.testing.assert_close(point.own[0], inverse.diagonal())
    torch.testing.assert_close(point.mu[0], inverse @ b)
    torch.testing.assert_close(point.log_det[0], torch.logdet(v))
    torch.testing.assert_close(cone.apply(vector[None])[0], k @ vector)
    torch.testing.assert_close(cone.square(vector[None])[0], k.square() @ vector)
    assert bool((cone.row_sums()[0] >= k.abs().sum(-1)).all())
    assert float(point.condition) >= float(torch.linalg.cond(v))
    mu = inverse @ b
    hessian = inverse * (3 * inverse + 2 * mu @ mu.mT)
    weight = torch.tensor([3.0], dtype=F64)
    torch.testing.assert_close(point.hessian(vector[None], weight)[0], hessian @ vector)
    torch.testing.assert_close(point.hessian_diagonal(weight)[0], hessian.diagonal())
    plain = hessian_product(
        point.diagonal[0], point.own[0], point.left[0], point.right[0], mu, vector
    )
    torch.testing.assert_close(plain, (inverse * (inverse + 2 * mu @ mu.mT)) @ vector)
    log_det, field, inside = cone.value(tau[None])
    torch.testing.assert_close(log_det, point.log_det)
    torch.testing.assert_close(field[0], (b * mu).sum())
    # Outside: V indefinite, and V with a negative entry in its diagonal part.
    largest = torch.linalg.eigvalsh(k)[-1]
    assert not bool(cone.evaluate(torch.full_like(tau, largest * 0.99)[None])[1])
    assert bool(cone.evaluate(torch.full_like(tau, largest * 1.01)[None])[1])
    assert not bool(cone.evaluate(-10 * tau[None])[1])


def test_core_and_its_determinant_to_second_order(generator):
    factor, middle, _, tau = low_rank(generator)
    factor = factor[:, [0, 1, 2]].requires_grad_()
    middle = middle[:3, :3].clone().requires_grad_()

    def parts(factor, middle):
        middle = (middle + middle.mT) / 2
        gram = factor.mT @ (factor / tau[:, None])
        identity = torch.eye(3, dtype=F64)
        known = (middle @ torch.linalg.inv(identity - gram @ middle)).detach()
        z = core(gram, middle, known)
        value = torch.logdet(identity - gram @ middle).detach()
        return z, core_log_det(gram, middle, z, value)

    assert gradcheck(parts, (factor, middle))
    assert gradgradcheck(parts, (factor, middle))


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_large_systems_solve_the_newton_equation_by_products(dtype, generator, monkeypatch):
    """The same answer and gradient, without a Cholesky factor of the Hessian."""
    j = torch.randn(24, 24, generator=generator, dtype=dtype) / 5
    j = (j + j.mT).requires_grad_()
    h = torch.randn(2, 24, 4, generator=generator, dtype=dtype, requires_grad=True)

    def run(sites):
        monkeypatch.setattr(newton, "ITERATIVE_SITES", sites)
        monkeypatch.setattr(saddle, "ITERATIVE_SITES", sites)
        equilibrium = sf.SteepestDescent().solve(sf.SpinSystem(j, h, 0.5, sf.Sphere(4)))
        loss = equilibrium.magnetization.sin().sum()
        (first,) = torch.autograd.grad(loss, h, create_graph=True)
        gradients = torch.autograd.grad(loss, (j, h), retain_graph=True)
        assert ("_factor" in vars(equilibrium._saddle)) == (sites > 24)
        (second,) = torch.autograd.grad(first.square().sum(), j)
        return equilibrium.magnetization, *gradients, second

    # The tolerance of the constraint times conditions below 100.
    close = 1e-10 if dtype == F64 else 1e-3
    for products, factors in zip(run(0), run(25), strict=True):
        torch.testing.assert_close(products, factors, rtol=close, atol=close)


@pytest.mark.parametrize("kind", ["one factor", "pair", "symmetrized", "symmetrized masked"])
def test_quadratic_form_of_low_rank_couplings(kind, generator):
    left, right = torch.randn(2, 2, 5, 2, generator=generator, dtype=F64)
    weights = torch.randn(2, generator=generator, dtype=F64)
    couplings = sf.couplings.LowRank(left, None if kind == "one factor" else right, weights)
    if kind.startswith("symmetrized"):
        couplings = couplings.symmetrize()
    if kind.endswith("masked"):
        couplings = couplings.mask(torch.tensor([False, True, False, False, False]))
    factor, middle = couplings.quadratic_form()
    assert factor.shape[-1] == (2 if kind == "one factor" else 4)
    product = factor @ middle @ factor.mT
    product = product - torch.diag_embed(product.diagonal(dim1=-2, dim2=-1))
    dense = couplings.to_dense()
    torch.testing.assert_close(product, (dense + dense.mT) / 2)
