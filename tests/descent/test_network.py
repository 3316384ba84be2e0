"""The multilayer perceptron as descent in its hidden units."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from spinformer.descent.activation import ACTIVATIONS, LeakyReLU, NumericActivation
from spinformer.descent.network import NetworkEnergy

# A sum of up to 8 tokens of 7 units, in float64.
ROUNDING = 64 * torch.finfo(torch.float64).eps


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def rise(energy, Z, size):
    before, after = energy.energy(Z), energy.energy(energy.step(Z, size))
    scale = 1 + Z.square().sum((-2, -1)) + energy.step(Z, size).square().sum((-2, -1))
    return (after - before) / (scale * (1 + energy.weight.square().sum((-2, -1))))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("size", [0.2, 0.7, 1.0])
def test_never_rises(name, size, generator):
    """400 networks of all shapes and scales, 3 steps each: also those without a lower bound."""
    sigma = ACTIVATIONS[name]
    for m, d in ((1, 1), (3, 7), (7, 3), (5, 5)):
        scales = torch.exp(1.5 * draw(generator, 100, 1, 1))
        weight = scales * draw(generator, 100, m, d) / d**0.5
        energy = NetworkEnergy(weight, name, 2 * draw(generator, 100, 4, m))
        assert size <= energy.step_bound()
        Z = sigma(3 * draw(generator, 100, 4, m))
        assert energy.energy(Z).isfinite().all()
        for _ in range(3):
            assert rise(energy, Z, size).max() <= ROUNDING
            Z = energy.step(Z, size)


def test_rises_beyond_the_bound(generator):
    """Twice the step is where a quadratic would come back to its height; tanh leaves its range."""
    energy = NetworkEnergy(draw(generator, 500, 4, 4), LeakyReLU(0.2), draw(generator, 500, 3, 4))
    Z = 3 * draw(generator, 500, 3, 4)
    assert (rise(energy, Z, 2.5) > 1e-3).any()
    tanh = NetworkEnergy(draw(generator, 4, 4), "tanh", 3 * draw(generator, 3, 4))
    Z = torch.tanh(draw(generator, 3, 4))
    assert tanh.energy(tanh.step(Z, 2.5)) == torch.inf


def test_steps_beyond_one_rise_with_one_unit():
    """E = z^2 / 2 for z > 0 and 5 z^2 / 2 below: from 1, a step of 1.9 leads to -0.9: 4 times E."""
    energy = NetworkEnergy(torch.zeros(1, 1), LeakyReLU(0.2))
    Z = torch.ones(1, 1)
    assert energy.energy(energy.step(Z, 1.9)) == pytest.approx(5 * 0.81 / 2)
    assert energy.energy(Z) == 0.5


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_step_is_the_network(name, generator):
    weight, bias, Z = draw(generator, 5, 3), draw(generator, 5), draw(generator, 2, 4, 5)
    energy = NetworkEnergy(weight, name, bias)
    Z = ACTIVATIONS[name](Z)
    y = Z @ weight
    torch.testing.assert_close(energy.output(Z), y)
    expected = ACTIVATIONS[name](torch.nn.functional.linear(y, weight, bias))
    torch.testing.assert_close(energy.step(Z), expected)
    half = energy.step(Z, torch.tensor(0.5, dtype=torch.float64))
    torch.testing.assert_close(half, (Z + expected) / 2)


# The corner of the soft threshold is beyond L-BFGS: see the test after this one.
@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"soft_threshold"}))
def test_minimum_against_a_bounded_minimizer(name, generator):
    """Below |W| = 1 / sqrt(L) there is one minimum; L-BFGS in a box knows the energy only."""
    sigma = ACTIVATIONS[name]
    weight = draw(generator, 4, 3)
    weight = 0.8 * weight / torch.linalg.matrix_norm(weight, 2) / sigma.slopes[1] ** 0.5
    energy = NetworkEnergy(weight, name, draw(generator, 2, 4))
    assert energy.is_bounded()
    assert energy.hessian_bounds(2)[0] > 0
    Z = sigma(draw(generator, 2, 4))
    for _ in range(400):
        Z = energy.step(Z)
    assert energy.gradient(Z).abs().max() < 1e-9

    def flat(z):
        state = torch.from_numpy(z).reshape(2, 4).requires_grad_()
        value = energy.energy(state)
        (slope,) = torch.autograd.grad(value, state)
        return float(value.detach()), slope.numpy().ravel()

    margin = 1e-9 if name in ("tanh", "sigmoid", "softplus") else 0.0
    start = np.clip(np.full(8, 0.3), sigma.lower + margin, sigma.upper - margin)
    box = [(sigma.lower + margin, sigma.upper - margin)] * 8
    found = minimize(flat, start, jac=True, method="L-BFGS-B", bounds=box, tol=1e-15)
    # L-BFGS ends where the energy no longer falls in float64: sqrt(eps) from the minimum.
    torch.testing.assert_close(Z, torch.from_numpy(found.x).reshape(2, 4), rtol=1e-5, atol=1e-5)
    assert float(energy.energy(Z)) <= found.fun + 1e-12


def test_lasso_against_a_bounded_minimizer(generator):
    """The soft threshold: |z| is u + v with z = u - v and u, v >= 0, which has no corner."""
    weight, bias = 0.3 * draw(generator, 4, 3), 2 * draw(generator, 2, 4)
    energy = NetworkEnergy(weight, "soft_threshold", bias)
    assert energy.is_bounded()
    Z = torch.zeros(2, 4, dtype=torch.float64)
    for _ in range(400):
        Z = energy.step(Z)
    assert (Z == 0).any() and (Z != 0).any()

    def split(parts):
        parts = torch.from_numpy(parts).requires_grad_()
        z = (parts[:8] - parts[8:]).reshape(2, 4)
        value = z.square().sum() / 2 - (bias * z).sum() - (z @ weight).square().sum() / 2
        value = value + parts.sum()
        (slope,) = torch.autograd.grad(value, parts)
        return float(value.detach()), slope.numpy()

    found = minimize(
        split, np.ones(16), jac=True, method="L-BFGS-B", bounds=[(0, None)] * 16, tol=0
    )
    solution = torch.from_numpy(found.x[:8] - found.x[8:]).reshape(2, 4)
    torch.testing.assert_close(Z, solution, rtol=1e-5, atol=1e-5)
    assert float(energy.energy(Z)) == pytest.approx(found.fun, abs=1e-10)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradient(name, generator):
    sigma = ACTIVATIONS[name]
    weight = 0.5 * draw(generator, 3, 2)
    bias = draw(generator, 2, 3, 3)
    energy = NetworkEnergy(weight, name, bias)
    mask = torch.tensor([[False] * 3, [False] * 2 + [True]])
    # Away from the kinks, where all activations have a slope.
    Z = sigma(draw(generator, 2, 3, 3)) * 0.5 + 0.25 * sigma(torch.tensor(2.0))
    Z.requires_grad_()
    (by_autograd,) = torch.autograd.grad(energy.energy(Z, mask).sum(), Z, create_graph=True)
    torch.testing.assert_close(energy.gradient(Z, mask), by_autograd)
    assert torch.autograd.gradcheck(lambda z: energy.step(z, 0.6, mask), (Z,))

    def by_weight(w, b):
        return NetworkEnergy(w, name, b).energy(Z.detach(), mask)

    assert torch.autograd.gradgradcheck(by_weight, (weight.requires_grad_(), bias.requires_grad_()))


def test_gradient_vanishes_at_fixed_points_only(generator):
    """At a kink it is the smallest slope: a ReLU unit held at 0 by its field is at rest."""
    for name in ("relu", "soft_threshold", "hard_tanh", "monotone_gelu"):
        weight = draw(generator, 6, 4)
        weight = 0.7 * weight / torch.linalg.matrix_norm(weight, 2)
        energy = NetworkEnergy(weight, name, draw(generator, 3, 6))
        Z = ACTIVATIONS[name](draw(generator, 3, 6))
        for _ in range(300):
            Z = energy.step(Z)
        held = torch.zeros_like(Z, dtype=torch.bool)
        for value, *_ in energy.activation.flats:
            held |= value == Z
        assert held.any()
        torch.testing.assert_close(energy.gradient(Z), torch.zeros_like(Z))
        pushed = NetworkEnergy(energy.weight, name, energy.bias + 5)
        moved = (pushed.step(Z) - Z).abs() > 1e-12
        assert torch.equal(moved, pushed.gradient(Z).abs() > 1e-12)


def test_relu_has_no_bound_with_large_weights():
    energy = NetworkEnergy(torch.full((1, 1), 2.0))
    assert not energy.is_bounded()
    Z = torch.ones(1, 1)
    assert energy.step(Z) == 4
    assert energy.energy(energy.step(Z)) == -24
    # Bounded ranges are bounded whatever the weights are.
    assert NetworkEnergy(torch.full((1, 1), 2.0), "tanh").is_bounded()
    batch = NetworkEnergy(torch.tensor([[[0.5]], [[2.0]]]))
    assert batch.is_bounded().tolist() == [True, False]


def test_outside_the_range():
    energy = NetworkEnergy(torch.eye(2), "relu")
    Z = torch.tensor([[[-1.0, 1.0]], [[1.0, 1.0]]])
    assert energy.energy(Z).tolist() == [torch.inf, 0.0]
    assert energy.gradient(Z)[0].isnan().tolist() == [[True, False]]
    assert energy.energy(energy.step(Z)).isfinite().all()


def test_square_weights_have_the_form_in_the_output(generator):
    """Only they: of (m, d) = (4, 2) many Z have one output and different energies."""
    weight, bias, Z = draw(generator, 3, 3), draw(generator, 3), draw(generator, 5, 3)
    energy = NetworkEnergy(weight, "leaky_relu", bias)
    y = energy.output(Z)
    back = y @ torch.linalg.inv(weight)
    conjugate = energy.activation.conjugate(back)
    in_output = (conjugate - back * bias).sum() - y.square().sum() / 2
    torch.testing.assert_close(energy.energy(Z), in_output)
    tall = NetworkEnergy(draw(generator, 4, 2), "leaky_relu")
    kernel = torch.linalg.svd(tall.weight.mT).Vh[-1]
    Z = draw(generator, 5, 4)
    torch.testing.assert_close(tall.output(Z + kernel), tall.output(Z))
    assert (tall.energy(Z + kernel) - tall.energy(Z)).abs() > 0.1


def test_curvature_bounds(generator):
    """Where the activation has slopes above zero a quadratic lies above the energy everywhere."""
    weight = draw(generator, 4, 3)
    energy = NetworkEnergy(weight, LeakyReLU(0.1), draw(generator, 4))
    Z, V = draw(generator, 500, 2, 4), 3 * draw(generator, 500, 2, 4)
    bound = energy.energy(Z) + (energy.gradient(Z) * V).sum((-2, -1))
    bound = bound + (energy.curvature(Z)[..., None] * V.square()).sum((-2, -1)) / 2
    assert (energy.energy(Z + V) <= bound + 1e-10).all()
    lower, upper = energy.hessian_bounds(2)
    assert upper == 10
    hessian = torch.autograd.functional.hessian(lambda z: energy.energy(z[None]), Z[0, 0])
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert lower - 1e-12 <= eigenvalues.min() and eigenvalues.max() <= upper
    wide = NetworkEnergy(draw(generator, 2, 5), LeakyReLU(0.1))
    s = torch.linalg.svdvals(wide.weight)[-1]
    torch.testing.assert_close(wide.hessian_bounds(1)[1], 10 - s.square())
    assert (NetworkEnergy(weight, "relu").curvature(Z) == torch.inf).all()
    assert NetworkEnergy(weight, "relu").hessian_bounds(2)[1] == torch.inf


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_absent_tokens_vanish(name, generator):
    sigma = ACTIVATIONS[name]
    weight, bias = draw(generator, 3, 2), draw(generator, 2, 6, 3)
    Z = sigma(draw(generator, 2, 6, 3)) * 0.9
    mask = torch.tensor([[False, True, False, False, True, False]] * 2)
    Z[mask], bias[mask] = torch.nan, torch.inf
    Z.requires_grad_()
    energy = NetworkEnergy(weight, name, bias)
    alone = NetworkEnergy(weight, name, bias[:, ~mask[0]])
    there = Z[:, ~mask[0]]
    total = energy.energy(Z, mask)
    torch.testing.assert_close(total, alone.energy(there))
    for size in (1.0, 0.5):
        moved = energy.step(Z, size, mask)
        torch.testing.assert_close(moved[:, ~mask[0]], alone.step(there, size))
        assert (moved[mask] == 0).all()
    assert (energy.gradient(Z, mask)[mask] == 0).all()
    assert (energy.curvature(Z, mask)[mask] == 0).all()
    (slope,) = torch.autograd.grad(total.sum() + moved.sum(), Z)
    assert slope.isfinite().all() and (slope[mask] == 0).all()


def test_batch_and_errors(generator):
    sigma = NumericActivation(lambda x: 3 * torch.tanh(x), lower=-3, upper=3)
    weight = draw(generator, 3, 5, 2)
    Z = sigma(draw(generator, 3, 4, 5))
    energy = NetworkEnergy(weight, sigma)
    for k in range(3):
        alone = NetworkEnergy(weight[k], sigma)
        torch.testing.assert_close(energy.energy(Z)[k], alone.energy(Z[k]))
        torch.testing.assert_close(energy.step(Z)[k], alone.step(Z[k]))
    Z[0, 0, 0] = torch.nan
    assert energy.energy(Z).isnan().tolist() == [True, False, False]
    assert NetworkEnergy(weight[0].float(), "tanh").energy(torch.zeros(0, 5)).shape == ()
    with pytest.raises(ValueError, match="weight has shape"):
        NetworkEnergy(torch.ones(3))
    with pytest.raises(ValueError, match="bias has shape"):
        NetworkEnergy(torch.ones(3, 2), "relu", torch.ones(2))
    with pytest.raises(ValueError, match="use 'monotone_gelu'"):
        NetworkEnergy(torch.ones(3, 2), "gelu")
