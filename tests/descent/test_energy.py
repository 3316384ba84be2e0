"""Sums of energies, the step that every energy inherits, and spheres."""

import ast
import inspect

import pytest
import torch

from spinformer.descent import (
    ACTIVATIONS,
    AIM,
    PROXES,
    RHOS,
    AsymmetricAttention,
    EnergyAttention,
    EnergyHopfield,
    EnergyLayerNorm,
    EnergyTransformer,
    FeedForwardEnergy,
    Gradient,
    GraphEnergy,
    HopfieldEnergy,
    MemoryEnergy,
    NetworkEnergy,
    PairwiseEnergy,
    QuadraticEnergy,
    SumEnergy,
    TiedEnergy,
    activation,
    descend,
    proximal,
    rho,
    symmetric_embedding,
)
from spinformer.descent.energy import check_tokens, onto_sphere, reciprocal


def draw(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_sums_are_taken_apart(generator):
    f, g, h = PairwiseEnergy(), MemoryEnergy(draw(3, 2, generator=generator)), QuadraticEnergy()
    assert SumEnergy(f, g + h).terms == ((f + g) + h).terms == (f, g, h)
    assert sum([f, g, h]).terms == (f, g, h)
    assert sum([f]) is f
    with pytest.raises(ValueError, match="at least one energy"):
        SumEnergy()
    with pytest.raises(TypeError, match="got a list: pass energies, one by one"):
        SumEnergy([f, g])
    with pytest.raises(TypeError, match="unsupported operand"):
        f + 1.0
    with pytest.raises(TypeError, match="unsupported operand"):
        1.0 + f


def test_sum_adds_up(generator):
    Y, B = draw(2, 3, 5, 4, generator=generator)
    f = PairwiseEnergy("log1p")
    g = QuadraticEnergy(weight=0.5, center=B)
    both = f + g
    # |Y - B|^2 / 2 is the data term at weight 1.
    same = PairwiseEnergy("log1p", data_weight=1.0, data=B)
    torch.testing.assert_close(both.energy(Y), same.energy(Y))
    torch.testing.assert_close(both.energies(Y), torch.stack([f.energy(Y), g.energy(Y)]))
    torch.testing.assert_close(both.gradient(Y), same.gradient(Y))
    torch.testing.assert_close(both.curvature(Y), same.curvature(Y))
    torch.testing.assert_close(both.step(Y, 1.3), same.step(Y, 1.3))
    for one, other in zip(both.hessian_bounds(5), same.hessian_bounds(5), strict=True):
        torch.testing.assert_close(one, other)


def test_terms_may_have_batches_of_their_own(generator):
    """One state, bonds of three systems."""
    bonds = draw(3, 1, 5, 5, generator=generator).abs()
    both = PairwiseEnergy(graph=bonds + bonds.mT) + FeedForwardEnergy(torch.eye(2).double())
    Y = draw(5, 2, generator=generator)
    assert both.energies(Y).shape == (2, 3)
    assert both.gradient(Y).shape == both.step(Y).shape == (3, 5, 2)
    assert both.curvature(Y).shape == (3, 5)
    lower, upper = both.hessian_bounds(5)
    assert lower.shape == upper.shape == (3,)


def test_alternating_steps_may_raise_what_the_sum_s_own_does_not(generator):
    """Why a sum has a step: each of its terms is blind to the other."""
    f = QuadraticEnergy(weight=1.0, center=torch.ones(1, 1, dtype=torch.float64))
    g = QuadraticEnergy(weight=1.0)
    both, Y = f + g, torch.full((1, 1), 0.5, dtype=torch.float64)
    assert both.energy(g.step(f.step(Y))) > both.energy(Y)
    torch.testing.assert_close(both.step(Y), Y)


def test_nothing_curves():
    """A token without curvature stays, and is no trouble to autograd."""
    zero = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    x = reciprocal(zero)
    assert (x == 0).all()
    (slope,) = torch.autograd.grad(x.sum(), zero)
    assert (slope == 0).all()
    nobody_bonded = PairwiseEnergy(graph=torch.zeros(3, 3))
    Y = torch.ones(3, 2, requires_grad=True)
    for moved in (nobody_bonded.step(Y), nobody_bonded.sphere_step(Y)):
        torch.testing.assert_close(moved, Y)
        (slope,) = torch.autograd.grad(moved.sum(), Y)
        assert slope.isfinite().all()


def test_onto_sphere(generator):
    direction, state = draw(2, 3, 4, generator=generator)
    direction[1] = 0
    moved = onto_sphere(direction, state, None)
    torch.testing.assert_close(moved.norm(dim=-1), state.norm(dim=-1))
    torch.testing.assert_close(moved[1], state[1])
    cosine = torch.nn.functional.cosine_similarity(moved[::2], direction[::2], dim=-1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine))
    radius = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert onto_sphere(direction, state, radius)[2].norm() == pytest.approx(3.0)
    assert onto_sphere(direction, state, 0.5)[0].norm() == pytest.approx(0.5)


def test_sphere_step_finds_the_leading_eigenvector(generator):
    """-tr Y C Y^T on the sphere: the step is one of the power method."""
    root = draw(4, 4, generator=generator)
    C = root @ root.mT
    Y = draw(3, 4, generator=generator)
    energy = QuadraticEnergy(channel=-C)
    for _ in range(500):
        moved = energy.sphere_step(Y, 1.0)
        torch.testing.assert_close(moved, torch.nn.functional.normalize(Y @ C, dim=-1))
        Y = moved
    torch.testing.assert_close(energy.energy(Y), -3 * torch.linalg.eigvalsh(C)[-1])


def energies() -> list:
    """Each of every kind, for tokens (5, 2)."""
    square, head = torch.eye(2), torch.eye(2).unsqueeze(0)
    memory = EnergyHopfield(torch.ones(3, 2))
    return [
        PairwiseEnergy(),
        PairwiseEnergy(weights=head),
        PairwiseEnergy(weights=head, orthonormal=True),
        GraphEnergy(torch.tensor([[0, 1], [1, 4]])),
        FeedForwardEnergy(square),
        MemoryEnergy(torch.ones(3, 2)),
        QuadraticEnergy(torch.eye(5), square),
        NetworkEnergy(square, "tanh"),
        HopfieldEnergy(torch.ones(3, 2)),
        EnergyAttention(head, head),
        memory,
        EnergyTransformer(EnergyLayerNorm(), memory),
        TiedEnergy(square, square),
        PairwiseEnergy() + FeedForwardEnergy(square),
    ]


WRONG = [
    ([[1.0, 2.0]] * 5, None, TypeError, "Y is list: pass tokens"),
    (torch.ones(5, 2, dtype=torch.int64), None, TypeError, "Y has dtype torch.int64: pass float"),
    (torch.ones(2), None, ValueError, r"Y has shape \(2,\): pass tokens"),
    (torch.ones(5, 2), torch.zeros(5), TypeError, "mask is torch.float32: pass a boolean"),
    (torch.ones(5, 2), [False] * 5, TypeError, "mask is list: pass a boolean"),
    (torch.ones(3, 5, 2), torch.zeros(3, dtype=torch.bool), ValueError, r"mask has shape \(3,\)"),
    (torch.ones(5, 2), torch.zeros(5, 2, dtype=torch.bool), ValueError, r"mask has shape \(5, 2\)"),
    (
        torch.ones(3, 5, 2),
        torch.zeros(2, 5, dtype=torch.bool),
        ValueError,
        r"mask has shape \(2, 5\): pass one entry a token, \(3, 5\)",
    ),
]


@pytest.mark.parametrize(("Y", "mask", "error", "message"), WRONG)
def test_wrong_tokens_and_masks_are_named(Y, mask, error, message):
    for energy in energies():
        calls = [energy.energy, energy.gradient, lambda y, m, e=energy: e.step(y, 1.0, m)]
        calls.append(lambda y, m, e=energy: e.sphere_step(y, 1.0, m))
        calls.append(lambda y, m, e=energy: descend(e, y, AIM(0.1), 1, m))
        calls.append(lambda y, m, e=energy: descend(e, y, Gradient(0.1), 1, m))
        if isinstance(energy, PairwiseEnergy):
            calls.append(energy.kernel)
        for call in calls:
            with pytest.raises(error, match=message):
                call(Y, mask)
    eye = torch.eye(2)
    attention = AsymmetricAttention(eye, eye)
    for call in (
        attention.attention,
        attention.increment,
        lambda y, m: attention.step(y, 1.0, m),
        lambda y, m: symmetric_embedding(y, eye, eye, m),
    ):
        with pytest.raises(error, match=message):
            call(Y, mask)


def test_tokens_of_another_kind_than_the_weights():
    for energy in energies():
        # Those without weights take any tokens, and a norm any width.
        bare = isinstance(energy, PairwiseEnergy) and energy.weights is None
        if not bare and not isinstance(energy, GraphEnergy | EnergyTransformer):
            for call in (energy.energy, energy.gradient, energy.step):
                with pytest.raises(ValueError, match=r"Y has shape \(5, 3\): the weights are for"):
                    call(torch.ones(5, 3))
                if not isinstance(energy, QuadraticEnergy):
                    with pytest.raises(ValueError, match=r"float64, the weights torch.float32"):
                        call(torch.ones(5, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"Y has shape \(4, 2\): mixing is for 5 tokens"):
        QuadraticEnergy(torch.eye(5)).energy(torch.ones(4, 2))


def test_masks_that_fit():
    """Leading axes broadcast, both ways; under autocast the products choose their precision."""
    Y = torch.ones(3, 5, 2)
    for shape in ((5,), (1, 5), (3, 5), (2, 1, 5)):
        mask = torch.ones(shape, dtype=torch.bool)
        assert (check_tokens(Y, mask) == 0).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_tokens(Y.bfloat16(), None, 2, torch.float32)


@pytest.mark.parametrize(
    ("module", "name", "choices"),
    [(rho, "RHOS", RHOS), (proximal, "PROXES", PROXES), (activation, "ACTIVATIONS", ACTIVATIONS)],
)
def test_the_reference_lists_the_names(module, name, choices):
    """What stands after the assignment is what autodoc shows."""
    body = ast.parse(inspect.getsource(module)).body
    place = next(
        k
        for k, node in enumerate(body)
        if isinstance(node, ast.AnnAssign) and node.target.id == name
    )
    text = body[place + 1].value.value
    assert all(f'``"{choice}"``' in text for choice in choices)
