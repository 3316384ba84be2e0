"""Profiles: the named ones, a user's own, and what the check finds."""

import pickle

import pytest
import torch

from spinformer.descent import RHOS, PairwiseEnergy, Rho
from spinformer.descent.rho import as_rho

NORMS = [(0.3, 0.5), (0.5, 0.1), (1.0, 1e-3), (1.5, 1.0), (2.0, 0.2)]


def profiles() -> dict[str, Rho]:
    return dict(RHOS) | {f"norm{p}": Rho.smoothed_norm(p, scale) for p, scale in NORMS}


@pytest.mark.parametrize("name", profiles())
def test_named_profiles(name):
    rho = profiles()[name]
    rho.check()
    z = torch.cat([torch.zeros(1), torch.logspace(-4, 3, 500)]).double().requires_grad_()
    (slope,) = torch.autograd.grad(rho.value(z).sum(), z)
    torch.testing.assert_close(rho.derivative(z), slope)
    # Where finite differences are small against the scales of all profiles.
    assert torch.autograd.gradcheck(rho.derivative, (z[z > 0.1].detach()[::50].requires_grad_(),))


@pytest.mark.parametrize("name", profiles())
def test_least_curvature_is_attained(name):
    rho = profiles()[name]
    z = torch.logspace(-8, 4, 200001, dtype=torch.float64, requires_grad=True)
    slope = rho.derivative(z)
    (second,) = torch.autograd.grad(slope.sum(), z)
    slope = slope.detach()
    curvature = slope + 2 * z.detach() * second
    # On the grid, relative steps of 1.4e-4, the least is missed by its square.
    tolerance = 1e-6 * float(slope[0])
    assert curvature.min() >= rho.least_curvature - 1e-12 * float(slope[0])
    assert curvature.min() <= rho.least_curvature + tolerance or rho.least_curvature == 0


@pytest.mark.parametrize("name", profiles())
def test_promised_kernels_are_positive_semi_definite(name, generator):
    rho = profiles()[name]
    assert rho.completely_monotone
    for scale in (0.1, 1.0, 5.0):
        Y = scale * torch.randn(200, 6, 3, generator=generator, dtype=torch.float64)
        W = PairwiseEnergy(rho).kernel(Y).weights
        # eigvalsh: exact to eps times the largest eigenvalue, which is at most 6 rho'(0).
        eps = torch.finfo(torch.float64).eps
        slack = 64 * eps * float(rho.derivative(torch.zeros(1).double()))
        assert torch.linalg.eigvalsh(W).min() >= -slack


@pytest.mark.parametrize(
    ("name", "coefficient"),
    [
        ("exp", lambda overlap: torch.exp(overlap - 1)),
        ("log1p", lambda overlap: 1 / (2 - overlap)),
        ("log2p", lambda overlap: 1 / (3 - overlap)),
    ],
)
def test_weights_at_unit_norm(name, coefficient, generator):
    """Summaries of the paper print 1 / (2 - y_i . y_j) for log(2 + z): it belongs to log(1 + z)."""
    y = torch.randn(2, 1000, 3, generator=generator, dtype=torch.float64)
    y, x = torch.nn.functional.normalize(y, dim=-1)
    half = (y - x).square().sum(-1) / 2
    torch.testing.assert_close(RHOS[name].derivative(half), coefficient((y * x).sum(-1)))


def test_smoothed_norm_is_a_norm():
    distance = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    for power in (0.5, 1.0, 2.0):
        rho = Rho.smoothed_norm(power, 1e-6)
        expected = distance**power / power
        torch.testing.assert_close(rho.value(distance**2 / 2), expected, rtol=1e-9, atol=1e-9)
    uniform = Rho.smoothed_norm(2.0, 0.3)
    torch.testing.assert_close(uniform.derivative(distance), torch.ones_like(distance))


def mine(z: torch.Tensor) -> torch.Tensor:
    return torch.log(1 + z)


def test_from_value(generator):
    """The derivative by autograd is that of the named profile, twice differentiable."""
    own, named = Rho.from_value(mine, completely_monotone=True), RHOS["log1p"]
    own.check()
    z = torch.rand(5, generator=generator, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(own.derivative(z), named.derivative(z))
    assert torch.autograd.gradgradcheck(own.derivative, (z,))
    with torch.no_grad():
        plain = own.derivative(z)
    assert not plain.requires_grad
    assert not own.derivative(z.detach()).requires_grad
    torch.testing.assert_close(plain, named.derivative(z).detach())
    Y = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    again = pickle.loads(pickle.dumps(own))
    for rho in (own, again):
        torch.testing.assert_close(PairwiseEnergy(rho).step(Y), PairwiseEnergy("log1p").step(Y))


def test_from_value_learns(generator):
    """Parameters inside the profile get their gradients through the derivative."""
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    Y = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)

    def moved(s: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return PairwiseEnergy(Rho.from_value(lambda z: -torch.exp(-s * z) / s)).step(y)

    assert torch.autograd.gradcheck(moved, (scale, Y))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda z: -torch.exp(-z), None),
        (lambda z: z, None),
        (lambda z: torch.exp(-z), r"decreases at z = 0"),
        (lambda z: z.square(), "is not concave at z = 0:"),
        (lambda z: torch.tanh(z - 1), "is not concave at z = 0:"),
        (torch.sqrt, "is not finite, or has no finite slope, at z = 0"),
        (lambda z: z - 0.01 * z.square(), r"decreases at z = 50\."),
    ],
)
def test_check(value, message):
    rho = Rho.from_value(value)
    if message is None:
        rho.check()
    else:
        with pytest.raises(ValueError, match=f"rho {message}"):
            rho.check()


def test_check_of_a_wrong_derivative():
    with pytest.raises(ValueError, match="does not have the derivative that is given"):
        Rho(torch.log1p, lambda z: 1 / (2 + z)).check()
    Rho(torch.sqrt, lambda z: 0.5 / z.sqrt()).check(torch.linspace(0.1, 5, 100).double())


def test_errors():
    with pytest.raises(ValueError, match=r"power=3\.0 must be in \(0, 2\]"):
        Rho.smoothed_norm(3.0)
    with pytest.raises(ValueError, match="scale=0 must be positive"):
        Rho.smoothed_norm(1.0, 0)
    with pytest.raises(ValueError, match="'log1p'"):
        as_rho("log1")
