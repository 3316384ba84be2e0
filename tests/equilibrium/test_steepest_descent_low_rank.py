"""Steepest descent on low-rank couplings: everything equals the dense method."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import spinformer as sf
from spinformer.equilibrium import steepest_descent
from spinformer.equilibrium.low_rank_saddle import LowRankSaddle
from spinformer.equilibrium.steepest_descent import SteepestDescent

F64 = torch.float64
AUXILIARY = ("site", "shared")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Factors are kept at every size here, and no failure is rescued in silence."""
    monkeypatch.setattr(steepest_descent, "_LOW_RANK_SITES", 0)
    monkeypatch.setattr(steepest_descent, "_LOW_RANK_SHARE", 2.0)
    monkeypatch.setattr(steepest_descent, "_LOW_RANK_RESCUE", 0)


def draw(n, rank, d, generator, *, batch=(), pair=False, positive=False):
    """Factors of rows of length one, weights of both signs, and fields."""
    left, right = torch.randn(2, *batch, n, rank, generator=generator, dtype=F64) / math.sqrt(rank)
    weights = torch.randn(rank, generator=generator, dtype=F64)
    weights = weights.abs() if positive else weights
    h = torch.randn(*batch, n, d, generator=generator, dtype=F64)
    if not pair:
        return sf.couplings.LowRank(left, weights=weights), h
    return sf.couplings.LowRank(left, 30 * right, weights / 30).symmetrize(), h


def both(auxiliary, couplings, h, beta, **options):
    """The same system by factors and as a matrix."""
    site = sf.Sphere(h.shape[-1])
    low = SteepestDescent(auxiliary).solve(sf.SpinSystem(couplings, h, beta, site, **options))
    matrix = couplings.to_dense()
    dense = SteepestDescent(auxiliary).solve(sf.SpinSystem(matrix, h, beta, site, **options))
    assert isinstance(low._saddle, LowRankSaddle)
    assert not isinstance(dense._saddle, LowRankSaddle)
    return low, dense


def same(low, dense, tolerance=1e-9):
    """All quantities; 1e-9 is the tolerance 1e-12 of t times a condition of up to 1e3."""
    close = {"rtol": tolerance, "atol": tolerance}
    assert bool(low.converged.all())
    for name in ("t", "magnetization", "log_partition", "internal_energy", "entropy"):
        torch.testing.assert_close(getattr(low, name), getattr(dense, name), **close)
    torch.testing.assert_close(low.specific_heat(), dense.specific_heat(), **close)
    torch.testing.assert_close(low.correlations(), dense.correlations(), **close)
    torch.testing.assert_close(low.correlations("coupling"), dense.correlations(), **close)
    vector = torch.randn(low.system.field.shape, generator=torch.Generator().manual_seed(1))
    chi = dense.susceptibility()
    torch.testing.assert_close(low.susceptibility(), chi, **close)
    torch.testing.assert_close(
        low.susceptibility_product(vector.to(F64)),
        torch.einsum("...iajb,...jb->...ia", chi, vector.to(F64)),
        **close,
    )
    for found in (low, dense):
        torch.testing.assert_close(
            found.local_susceptibility(), torch.einsum("...iaib->...iab", chi), **close
        )
        torch.testing.assert_close(found.uniform_susceptibility(), chi.sum((-4, -2)), **close)


@pytest.mark.parametrize("pair", [False, True], ids=["one factor", "pair"])
@pytest.mark.parametrize(("n", "rank"), [(12, 3), (40, 5)])
@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_every_quantity_is_that_of_the_matrix(auxiliary, n, rank, pair, generator):
    couplings, h = draw(n, rank, 2, generator, pair=pair)
    for beta in (0.05, 0.4):
        same(*both(auxiliary, couplings, h, beta))


@pytest.mark.parametrize("strength", [0.0, 0.01, 1.0], ids=lambda x: f"field {x}")
@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_cold_systems(auxiliary, strength, generator):
    """Deep in the order: through the central path, without and with fields."""
    couplings, h = draw(40, 5, 2, generator, positive=True)
    low, dense = both(auxiliary, couplings, strength * h, 30.0)
    assert bool(low.converged.all()) and int(low.solution.iterations) < 40
    # The condition of V is 1e4 here.
    close = {"rtol": 1e-8, "atol": 1e-8}
    for name in ("magnetization", "log_partition", "internal_energy", "entropy"):
        torch.testing.assert_close(getattr(low, name), getattr(dense, name), **close)


@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_masks_batches_and_temperatures(auxiliary, generator):
    couplings, h = draw(12, 3, 2, generator, batch=(3,))
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, 2] = mask[1, 7:] = True
    h[mask] = torch.nan
    beta = torch.tensor([0.1, 0.4, 0.2], dtype=F64)
    low, dense = both(auxiliary, couplings, h, beta, mask=mask)
    same(low, dense)
    # One system alone.
    alone = SteepestDescent(auxiliary).solve(
        sf.SpinSystem(
            couplings.with_tensors(couplings.tensors()[0][1], couplings.tensors()[1]).mask(mask[1]),
            h[1],
            beta[1],
            sf.Sphere(2),
            mask=mask[1],
        )
    )
    torch.testing.assert_close(alone.magnetization, low.magnetization[1], rtol=1e-10, atol=1e-10)
    assert int(alone.solution.iterations) == int(low.solution.iterations[1])


@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_shared_factors_serve_every_system(auxiliary, generator):
    couplings, h = draw(12, 3, 2, generator)
    fields = torch.stack([h, 2 * h, 0 * h])
    same(*both(auxiliary, couplings, fields, 0.3))


@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_weights_that_vanish_and_columns_that_repeat(auxiliary, generator):
    """A singular core and a singular Gram matrix."""
    left = torch.randn(12, 2, generator=generator, dtype=F64)
    left = torch.cat([left, left, 0 * left], -1)
    weights = torch.tensor([0.3, 0.0, -0.1, 0.2, 1.0, 0.0], dtype=F64)
    h = torch.randn(12, 2, generator=generator, dtype=F64)
    same(*both(auxiliary, sf.couplings.LowRank(left, weights=weights), h, 0.5))


@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_gradients(auxiliary, generator):
    """First and second derivatives in factors, weights, fields and beta; one mask."""
    left, right = torch.randn(2, 3, 2, generator=generator, dtype=F64) / 2
    weights = torch.tensor([0.4, 0.0], dtype=F64)
    h = torch.randn(2, 3, 1, generator=generator, dtype=F64)
    beta = torch.tensor([0.7, 1.1], dtype=F64)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[1, 2] = True
    inputs = [x.requires_grad_() for x in (left, right, weights, h, beta)]

    def solve(name):
        def function(left, right, weights, h, beta):
            couplings = sf.couplings.LowRank(left, right, weights)
            system = sf.SpinSystem(couplings, h, beta, sf.Ising(), symmetrize=True, mask=mask)
            equilibrium = SteepestDescent(auxiliary).solve(system)
            assert isinstance(equilibrium._saddle, LowRankSaddle)
            found = getattr(equilibrium, name)
            return found() if callable(found) else found

        return function

    for name in ("magnetization", "log_partition"):
        assert gradcheck(solve(name), inputs, fast_mode=True)
        assert gradgradcheck(solve(name), inputs, fast_mode=True)
    for name in ("internal_energy", "entropy", "specific_heat", "uniform_susceptibility"):
        assert gradcheck(solve(name), inputs, fast_mode=True)


@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_float32(auxiliary, generator):
    """Against float64; where digits run out it is solved in float64."""
    couplings, h = draw(40, 4, 2, generator, positive=True)
    rounded, method = couplings.to(dtype=torch.float32), SteepestDescent(auxiliary)
    for beta in (0.02, 100.0):
        exact = method.solve(
            sf.SpinSystem(rounded.to(dtype=F64), h.float().double(), beta, sf.Sphere(2))
        )
        single = method.solve(sf.SpinSystem(rounded, h.float(), beta, sf.Sphere(2)))
        assert single.magnetization.dtype == torch.float32
        if auxiliary == "site":
            assert (single._saddle.value.dtype == F64) == (beta == 100.0)
        torch.testing.assert_close(
            single.magnetization, exact.magnetization.float(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_broken_systems_stay_alone(auxiliary, generator):
    couplings, h = draw(12, 3, 2, generator)
    left, weights = couplings.tensors()
    left.requires_grad_()
    h = torch.stack([h, h])
    h[0, 3, 1] = torch.inf
    system = sf.SpinSystem(
        couplings.with_tensors(left, weights), h, 0.3, sf.Sphere(2), check_finite=False
    )
    with pytest.raises(sf.ConvergenceError, match="1 of 2"):
        SteepestDescent(auxiliary).solve(system)
    eq = SteepestDescent(auxiliary, on_failure="ignore").solve(system)
    assert eq.converged.tolist() == [False, True]
    for value in (eq.magnetization, eq.log_partition, eq.internal_energy, eq.entropy):
        assert value[0].isnan().all() and value[1].isfinite().all()
    (gradient,) = torch.autograd.grad(eq.magnetization[1].sum(), left)
    assert gradient.isfinite().all() and gradient.any()


@pytest.mark.parametrize("auxiliary", AUXILIARY)
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2), (2, 3, 2)])
def test_nothing_to_solve(auxiliary, shape):
    mask = torch.ones(shape[1], dtype=torch.bool)
    h = torch.ones(shape, dtype=F64, requires_grad=True)
    couplings = sf.couplings.LowRank(torch.ones(shape[1], 1, dtype=F64))
    eq = SteepestDescent(auxiliary).solve(sf.SpinSystem(couplings, h, 1.0, sf.Sphere(2), mask=mask))
    assert eq.magnetization.shape == shape and not eq.magnetization.any()
    assert torch.equal(eq.log_partition, torch.zeros(shape[0], dtype=F64))
    eq.magnetization.sum().backward()
    assert not h.grad.any()


def test_what_factors_cannot_do_is_done_by_the_matrix(monkeypatch, generator):
    """Cold and with negative weights, the diagonal part of V takes both signs."""
    left = torch.zeros(8, 1, dtype=F64)
    left[0], left[1:] = 10.0, 0.1
    couplings = sf.couplings.LowRank(left, weights=torch.tensor([-1.0], dtype=F64))
    h = torch.randn(8, 2, generator=generator, dtype=F64)
    system = sf.SpinSystem(couplings, h, 1.0, sf.Sphere(2))
    with pytest.raises(sf.ConvergenceError, match="steepest descent"):
        SteepestDescent().solve(system)
    monkeypatch.setattr(steepest_descent, "_LOW_RANK_RESCUE", 8)
    eq = SteepestDescent().solve(system)
    matrix = couplings.to_dense()
    dense = SteepestDescent().solve(sf.SpinSystem(matrix, h, 1.0, sf.Sphere(2)))
    torch.testing.assert_close(eq.magnetization, dense.magnetization)


@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_memory_is_linear_in_the_number_of_sites(auxiliary, generator):
    """Forward and backward at N = 20,000, where one N x N matrix would be 3.2 GB: no tensor of
    more than a few times N (q + D) numbers is made."""
    n, rank, d = 20_000, 4, 2
    couplings, h = draw(n, rank, d, generator)
    h.requires_grad_()
    # Eigenvalues of order one, as attention has them.
    beta = 1.0 / n

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    Largest.size = max(Largest.size, tensor.untyped_storage().nbytes() // 8)
            return out

    with Largest():
        eq = SteepestDescent(auxiliary).solve(sf.SpinSystem(couplings, h, beta, sf.Sphere(d)))
        loss = eq.magnetization.sum() + eq.log_partition + eq.internal_energy + eq.entropy
        loss = loss + eq.specific_heat() + eq.susceptibility_product(torch.ones_like(h)).sum()
        loss.backward()
    assert h.grad.isfinite().all()
    assert Largest.size <= 4 * n * (rank + d)
