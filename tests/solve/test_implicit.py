"""The implicit derivative, at every order, against finite differences and unrolled loops."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from spinformer.solve import envelope, implicit

STEPS = 200  # contraction 0.6 at worst: 0.6^200 = 4e-45, far below rounding


def step(m, h, j):
    return torch.tanh(h + j @ m)


def fixed_point(h, j):
    with torch.no_grad():
        m = torch.zeros_like(h)
        for _ in range(STEPS):
            m = step(m, h, j)

    def adjoint(vjp, rhs):
        u = rhs
        for _ in range(STEPS):
            u = u - vjp(u) + rhs
        return u

    return implicit(m, lambda z, h, j: z - step(z, h, j), (h, j), adjoint)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    j = torch.randn(3, 3, generator=generator, dtype=torch.float64)  # not symmetric
    j = 0.6 * j / torch.linalg.matrix_norm(j, 2)
    return h.requires_grad_(), j.requires_grad_()


def test_first_and_second_derivatives(inputs):
    assert gradcheck(fixed_point, inputs)
    assert gradgradcheck(fixed_point, inputs)


def test_third_derivative(inputs):
    h, j = inputs

    def second(h):
        (first,) = torch.autograd.grad((fixed_point(h, j) ** 2).sum(), h, create_graph=True)
        (second,) = torch.autograd.grad((first**3).sum(), h, create_graph=True)
        return second

    assert gradcheck(second, (h,))


def test_equals_the_unrolled_derivative_when_used_twice(inputs):
    h, j = inputs
    z = torch.zeros_like(h)
    for _ in range(STEPS):
        z = step(z, h, j)
    m = fixed_point(h, j)
    again = fixed_point(m, j)
    z2 = torch.zeros_like(h)
    for _ in range(STEPS):
        z2 = step(z2, z, j)
    for ours, unrolled in zip(
        torch.autograd.grad((m * again).sum(), (h, j)),
        torch.autograd.grad((z * z2).sum(), (h, j)),
        strict=True,
    ):
        torch.testing.assert_close(ours, unrolled, rtol=1e-8, atol=1e-10)


def test_non_symmetric_adjoint_is_the_dense_solve(inputs):
    h, j = inputs
    m = fixed_point(h, j)
    (grad,) = torch.autograd.grad(m.sum(), h)
    slope = (1 - m.detach() ** 2).flatten()
    dense = torch.diag(slope) @ torch.kron(j.detach(), torch.eye(2, dtype=torch.float64))
    eye = torch.eye(6, dtype=torch.float64)
    expected = slope * torch.linalg.solve((eye - dense).mT, torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(grad.flatten(), expected, rtol=1e-8, atol=0)


def test_frozen_inputs_get_no_gradient_and_change_no_other(inputs):
    h, j = inputs
    (both, _) = torch.autograd.grad(fixed_point(h, j).sum(), (h, j))
    (alone,) = torch.autograd.grad(fixed_point(h, j.detach()).sum(), h)
    assert torch.equal(both, alone)


def test_no_graph_without_grad(inputs):
    with torch.no_grad():
        assert not fixed_point(*inputs).requires_grad
    assert not fixed_point(*(tensor.detach() for tensor in inputs)).requires_grad


def free_energy(m, h, j):
    """Stationary in m where m = tanh(h + j m), for symmetric j."""
    b = h + j @ m
    return torch.log(torch.cosh(b)).sum() - (m * (j @ m)).sum() / 2


def stationary_value(h, j):
    j = (j + j.mT) / 2
    return envelope(free_energy, fixed_point(h, j), (h, j))


def test_derivatives_of_a_stationary_value(inputs):
    """First, second and third ones against finite differences of the value alone."""
    assert gradcheck(stationary_value, inputs)
    assert gradgradcheck(stationary_value, inputs, fast_mode=True)

    def slope(h):
        (first,) = torch.autograd.grad(stationary_value(h, inputs[1]), h, create_graph=True)
        (second,) = torch.autograd.grad((first**3).sum(), h, create_graph=True)
        return second

    assert gradcheck(slope, (inputs[0],))


def test_first_derivative_of_a_stationary_value_solves_nothing(inputs):
    h, j = (tensor.detach() for tensor in inputs)
    j = (j + j.mT) / 2
    m = fixed_point(h, j).requires_grad_()  # no adjoint to solve: it would be the leaf's gradient
    h.requires_grad_()
    (gradient,) = torch.autograd.grad(envelope(free_energy, m, (h, j)), h)
    torch.testing.assert_close(gradient, m.detach(), rtol=1e-12, atol=1e-14)
    # The value's own derivative in the state is not taken, however wrong the state.
    envelope(free_energy, m, (h, j)).backward()
    assert m.grad is None


def test_a_stationary_value_without_gradients(inputs):
    h, j = (tensor.detach() for tensor in inputs)
    value = envelope(free_energy, fixed_point(h, j), (h, j))
    assert not value.requires_grad
