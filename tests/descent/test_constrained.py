"""Steps of an energy with a penalty, and on spheres."""

import pytest
import torch
from torch import Tensor

from spinformer.descent import (
    PROXES,
    MemoryEnergy,
    PairwiseEnergy,
    Proximal,
    ProximalBacktracking,
    ProximalGradient,
    QuadraticEnergy,
    SphereStep,
    Verdict,
    descend,
)
from spinformer.descent.activation import ACTIVATIONS
from spinformer.descent.constrained import penalty_of

N, D = 5, 4


def draw(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("name", PROXES)
@pytest.mark.parametrize("kind", ["own", "plain", "backtracking"])
def test_never_rises(name, kind, generator):
    """Attention with a memory, from 20 states each, at the bounds."""
    prox = PROXES[name]
    for _ in range(2):
        weights = draw(2, D, 2, generator=generator)
        energy = PairwiseEnergy("exp", weights, data_weight=0.3) + MemoryEnergy(
            0.5 * draw(6, D, generator=generator)
        )
        Y = 2 * draw(10, N, D, generator=generator)
        mask = torch.rand(10, N, generator=generator) < 0.2
        for size in (2.0, 0.6):
            if kind == "own":
                algorithm = ProximalGradient(prox, size)
            elif kind == "backtracking":
                algorithm = ProximalBacktracking(prox, 20 * size if prox.convexity >= 0 else size)
            else:
                _, upper = energy.hessian_bounds(N)
                steepest = float(upper) + max(-prox.convexity, 0.0)
                algorithm = ProximalGradient(prox, size / steepest, own=False)
            books = descend(energy, Y, algorithm, 4, mask)
            assert books.counts()["rose"] == books.counts()["broken"] == 0
            assert (books.verdict == Verdict.GUARANTEED).all()
            assert books.energy[1:].isfinite().all()
            assert (books.terms[-1, -1] == penalty_of(prox, books.state, mask)).all()


def test_longer_steps_rise(generator):
    energy = QuadraticEnergy(weight=1.0, center=draw(6, N, D, generator=generator))
    Y = energy.center + draw(6, N, D, generator=generator)
    algorithm = ProximalGradient(PROXES["identity"], 2.1)
    assert not algorithm.guaranteed(energy, N)
    assert descend(energy, Y, algorithm, 1).counts()["rose"] == 6
    assert not ProximalGradient(PROXES["identity"], 1.1, own=False).guaranteed(energy, N)
    assert ProximalGradient(PROXES["identity"], 0.9, own=False).guaranteed(energy, N)


def test_weakly_convex_penalty_at_the_bound(generator):
    """Both curve everywhere as much as they may: without its share of p the step would rise."""
    energy = QuadraticEnergy(weight=1.0)
    prox = Proximal.from_penalty(lambda z: -z.square() / 2, convexity=-1.0)
    Y = draw(6, N, D, generator=generator)
    # p = 2 + 3 and s = 2: 5 / 2 (z - y) - z + 2 y = 0.
    state = ProximalGradient(prox, 2.0).step(energy, Y)
    torch.testing.assert_close(state, Y / 3)
    assert descend(energy, Y, ProximalGradient(prox, 2.0), 3).counts()["rose"] == 0


@pytest.mark.parametrize("algorithm", [ProximalGradient, ProximalBacktracking])
def test_finds_the_minimum(algorithm, generator):
    """|Y - B|^2 with a soft threshold: known in closed form, and reached in one step."""
    center = 2 * draw(3, N, D, generator=generator)
    energy = QuadraticEnergy(weight=1.5, center=center)
    expected = center.sign() * (center.abs() - 1 / 3).clamp_min(0.0)
    state = algorithm(PROXES["soft_threshold"]).step(energy, draw(3, N, D, generator=generator))
    torch.testing.assert_close(state, expected)
    again = algorithm(PROXES["soft_threshold"]).step(energy, expected)
    torch.testing.assert_close(again, expected)


def test_stationary_on_the_orthant(generator):
    """Many steps lead to where the projected gradient vanishes."""
    C = draw(D, D, generator=generator)
    energy = QuadraticEnergy(
        channel=C @ C.mT, weight=1.0, center=draw(2, N, D, generator=generator)
    )
    for algorithm in (ProximalGradient(PROXES["relu"]), ProximalBacktracking(PROXES["relu"], 3.0)):
        state = energy.center
        for _ in range(200):
            state = algorithm.step(energy, state)
        slope = energy.gradient(state)
        assert (state >= 0).all()
        assert slope[state > 0].abs().max() < 1e-5
        assert slope[state == 0].min() > -1e-5


def test_penalties_by_name(generator):
    energy, Y = PairwiseEnergy(), draw(N, D, generator=generator)
    for algorithm in (ProximalGradient, ProximalBacktracking):
        for prox in ("soft_threshold", ACTIVATIONS["soft_threshold"]):
            expected = algorithm(PROXES["soft_threshold"]).step(energy, Y)
            assert torch.equal(algorithm(prox).step(energy, Y), expected)
        with pytest.raises(ValueError, match="the nearest is 'relu'"):
            algorithm("rleu")
        with pytest.raises(ValueError, match="at most 3 where the penalty is weakly convex"):
            algorithm("monotone_gelu", 3.1)
        assert algorithm("monotone_gelu", 3.0).step(energy, Y).isfinite().all()


def test_systems_do_not_mix(generator):
    energy = PairwiseEnergy("log1p", data_weight=0.5)
    Y = draw(3, N, D, generator=generator)
    for prox in (PROXES["relu"], PROXES["monotone_gelu"]):
        for algorithm in (ProximalGradient(prox, 1.7), ProximalBacktracking(prox, 3.0)):
            expected = algorithm.step(energy, Y)
            broken = Y.clone()
            broken[1] = torch.nan
            out = algorithm.step(energy, broken)
            torch.testing.assert_close(out[[0, 2]], expected[[0, 2]])
            assert out[1].isnan().all()
            torch.testing.assert_close(algorithm.step(energy, Y[0]), expected[0])


@pytest.mark.parametrize("algorithm", [ProximalGradient, ProximalBacktracking])
def test_derivatives(algorithm, generator):
    Y = draw(2, N, D, generator=generator).requires_grad_()
    mask = torch.tensor([[False] * N, [False] * (N - 1) + [True]])
    energy = PairwiseEnergy("exp", data_weight=0.5)
    step = algorithm(PROXES["softplus"]).step
    assert torch.autograd.gradcheck(lambda y: step(energy, y, mask), Y, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda y: step(energy, y, mask), Y, fast_mode=True)


def test_nothing_curves(generator):
    """Without bonds the penalty acts alone."""
    energy = PairwiseEnergy(graph=torch.zeros(N, N, dtype=torch.float64))
    Y = draw(N, D, generator=generator)
    moved = ProximalGradient(PROXES["relu"]).step(energy, Y)
    torch.testing.assert_close(moved, Y.relu())


def test_sphere_steps_fall(generator):
    for _ in range(50):
        energy = PairwiseEnergy("exp", draw(2, D, 2, generator=generator)) + MemoryEnergy(
            draw(6, D, generator=generator)
        )
        Y = draw(8, N, D, generator=generator)
        books = descend(energy, Y, SphereStep(), 5)
        assert books.region["algorithm"].all()
        assert books.counts()["rose"] == 0
        torch.testing.assert_close(books.state.norm(dim=-1), Y.norm(dim=-1))
    assert not SphereStep(1.1).guaranteed(energy, N)


@pytest.mark.parametrize("size", [0.0, -1.0])
def test_errors(size):
    for make in (
        lambda: ProximalGradient(PROXES["relu"], size),
        lambda: ProximalBacktracking(PROXES["relu"], size),
        lambda: SphereStep(size),
    ):
        with pytest.raises(ValueError, match="must be positive"):
            make()


@pytest.mark.parametrize("options", [{"shrink": 1.0}, {"sufficient": 0.0}, {"trials": 0}])
def test_errors_of_backtracking(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*must"):
        ProximalBacktracking("relu", **options)
