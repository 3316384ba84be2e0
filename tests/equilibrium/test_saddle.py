"""First derivatives of mu and A at a saddle in closed form, against implicit differentiation."""

import pytest
import torch

from spinformer import Sphere, SpinSystem, SteepestDescent

F64 = torch.float64
N, D = 5, 3


@pytest.fixture
def inputs(generator):
    """Couplings, one matrix for three systems or one each, fields and inverse temperatures."""

    def draw(shared):
        j = torch.randn(*([] if shared else [3]), N, N, generator=generator, dtype=F64)
        h = torch.randn(3, N, D, generator=generator, dtype=F64)
        beta = 0.5 + torch.rand(3, generator=generator, dtype=F64)
        return [x.requires_grad_() for x in (j, h, beta)]

    return draw


def pieces(auxiliary, masked, j, h, beta):
    """(mu, A) of the answer and a weight for each of their entries."""
    j = (j + j.mT) / 2
    j = j - torch.diag_embed(j.diagonal(dim1=-2, dim2=-1))
    mask = None
    if masked:
        mask = torch.zeros(3, N, dtype=torch.bool)
        mask[0, 1] = mask[2, 0] = mask[2, 4] = True
        if j.ndim == 2:
            mask = mask[:1].expand(3, N)
    system = SpinSystem(j, h, beta, Sphere(D), mask=mask)
    equilibrium = SteepestDescent(auxiliary, tolerance=1e-13).solve(system)
    generator = torch.Generator().manual_seed(3)
    of_mean = torch.randn(3, N, D, generator=generator, dtype=F64)
    # Without a symmetry of its own: only its symmetric part may count.
    of_pairs = torch.randn(3, N, N, generator=generator, dtype=F64)
    return equilibrium, of_mean, of_pairs


@pytest.mark.parametrize("auxiliary", ["site", "shared"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("asked", ["mean", "pairs", "both"])
def test_closed_form_is_implicit_differentiation(auxiliary, masked, shared, asked, inputs):
    given = inputs(shared)
    equilibrium, of_mean, of_pairs = pieces(auxiliary, masked, *given)
    response = equilibrium._response
    radius = D**0.5
    values, matrices = [], []
    if asked != "pairs":
        values.append((of_mean * equilibrium.magnetization).sum())
        matrices.append(radius * (of_mean * response.mu).sum())
    if asked != "mean":
        values.append((of_pairs * equilibrium.connected_correlations).sum())
        matrices.append(radius**2 * (of_pairs * response.inverse).sum())
    assert sum(values).item() == pytest.approx(sum(matrices).item())
    found = torch.autograd.grad(sum(values), given, retain_graph=True)
    expected = torch.autograd.grad(sum(matrices), given, retain_graph=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    # And with a graph, for one derivative more.
    slopes = torch.autograd.grad(sum(values), given, create_graph=True)
    torch.testing.assert_close(slopes, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("auxiliary", ["site", "shared"])
def test_derivatives_of_the_correlations_by_finite_differences(auxiliary, inputs):
    """Steps of 1e-5: errors of 1e-10 from the third derivative, 1e-10 from the solver's 1e-13 and
    rounding, times a direction of some tens."""
    given = inputs(False)
    generator = torch.Generator().manual_seed(4)
    moves = [torch.randn(x.shape, generator=generator, dtype=F64) for x in given]

    def value(step):
        moved = [x + step * move for x, move in zip(given, moves, strict=True)]
        equilibrium, _, of_pairs = pieces(auxiliary, True, *moved)
        return (of_pairs * equilibrium.connected_correlations).sum()

    slopes = torch.autograd.grad(value(0.0), given)
    along = sum((slope * move).sum() for slope, move in zip(slopes, moves, strict=True))
    with torch.no_grad():
        difference = (value(1e-5) - value(-1e-5)) / 2e-5
    assert along.item() == pytest.approx(difference.item(), rel=1e-7, abs=1e-7)
