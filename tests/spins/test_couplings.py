"""Couplings: one contract over every kind, then what each kind and each factory is alone."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spinformer.errors import ConvergenceError
from spinformer.spins.couplings import (
    Couplings,
    CurieWeiss,
    Dense,
    Lattice,
    LowRank,
    Masked,
    MatrixValued,
    chain,
    cubic,
    curie_weiss,
    hopfield,
    ring,
    sherrington_kirkpatrick,
    spectrum,
    square,
)

# Sums of at most 30 terms of order one, in another order than the reference sums them: the
# rounding is below 30 eps times the sum of the magnitudes, about 1e3 eps.
ROUNDING = {torch.float64: 1e3 * 2.0**-52, torch.float32: 1e3 * 2.0**-23}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def random_mask(*shape, seed=0):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[..., 0] = False
    mask[..., 1] = True
    return mask


class Alternating(Couplings):
    """A kind of a user's own, the least that the interface asks for: J_ij = c (-1)^(i + j)."""

    def __init__(self, n, c):
        self.n, self.c = n, c

    @property
    def num_spins(self):
        return self.n

    @property
    def batch_shape(self):
        return self.c.shape

    @property
    def is_symmetric(self):
        return True

    def tensors(self):
        return (self.c,)

    def with_tensors(self, *tensors):
        return Alternating(self.n, *tensors)

    def apply(self, state):
        self._check_state(state)
        sign = torch.ones(self.n, 1, dtype=state.dtype)
        sign[1::2] = -1.0
        total = (sign * state).sum(-2, keepdim=True)
        return self.c[..., None, None] * (sign * total - state)

    def transpose(self):
        return self

    def symmetrize(self):
        return self


def symmetric(*shape, dtype, seed=0):
    matrix = draw(*shape, seed=seed, dtype=dtype)
    return matrix + matrix.mT


def symmetric_blocks(*batch, n, dim, dtype):
    tensor = draw(*batch, n, n, dim, dim, dtype=dtype)
    return tensor + tensor.transpose(-4, -3).transpose(-2, -1)


# name: (builder, symmetric)
KINDS = {
    "dense": (lambda d: Dense(symmetric(7, 7, dtype=d)), True),
    "dense, asymmetric": (lambda d: Dense(draw(7, 7, dtype=d)), False),
    "dense, batch": (lambda d: Dense(symmetric(2, 3, 6, 6, dtype=d)), True),
    "dense, masked": (
        lambda d: Dense(symmetric(7, 7, dtype=d)).mask(random_mask(3, 7)),
        True,
    ),
    "dense, one spin": (lambda d: Dense(draw(1, 1, dtype=d)), True),
    "matrix-valued": (lambda d: MatrixValued(symmetric_blocks(n=5, dim=3, dtype=d)), True),
    "matrix-valued, asymmetric": (lambda d: MatrixValued(draw(2, 5, 5, 3, 3, dtype=d)), False),
    "matrix-valued, masked": (
        lambda d: MatrixValued(symmetric_blocks(2, n=5, dim=3, dtype=d), mask=random_mask(2, 5)),
        True,
    ),
    "low rank": (lambda d: LowRank(draw(8, 3, dtype=d)), True),
    "low rank, two factors": (
        lambda d: LowRank(draw(2, 8, 3, dtype=d), draw(8, 3, seed=1, dtype=d)),
        False,
    ),
    "low rank, all": (
        lambda d: LowRank(
            draw(8, 2, dtype=d), draw(8, 2, seed=1, dtype=d), draw(3, 2, seed=2, dtype=d)
        ),
        False,
    ),
    "low rank, symmetrized": (
        lambda d: LowRank(draw(8, 2, dtype=d), draw(8, 2, seed=1, dtype=d)).symmetrize(),
        True,
    ),
    "low rank, masked": (
        lambda d: LowRank(draw(8, 3, dtype=d), draw(8, 3, seed=1, dtype=d)).mask(random_mask(2, 8)),
        False,
    ),
    "rank zero": (lambda d: LowRank(draw(4, 0, dtype=d)), True),
    "one site": (lambda d: chain(1, dtype=d), True),
    "ring": (lambda d: ring(7, strength=-0.7, dtype=d), True),
    "cylinder": (lambda d: square((4, 2), (True, False), strength=draw(3, dtype=d)), True),
    "four directions": (lambda d: Lattice((3, 2, 1, 3), (True, False, False, True), dtype=d), True),
    "lattice, masked": (
        lambda d: square(4, strength=draw(2, 1, dtype=d)).mask(random_mask(3, 16)),
        True,
    ),
    "curie-weiss, both signs": (lambda d: curie_weiss(6, strength=draw(4, dtype=d)), True),
    "curie-weiss, masked": (
        lambda d: curie_weiss(6, strength=2.0, dtype=d).mask(random_mask(6)),
        True,
    ),
    "hopfield": (lambda d: hopfield(draw(3, 10).sign(), strength=draw(2, dtype=d), dtype=d), True),
    "a user's own": (lambda d: Alternating(7, draw(2, dtype=d)), True),
    "a user's own, masked": (
        lambda d: Alternating(7, draw(2, dtype=d)).mask(random_mask(7)),
        True,
    ),
}


@pytest.fixture(params=KINDS, ids=lambda name: name.replace(" ", "-"))
def kind(request):
    build, is_symmetric = KINDS[request.param]
    return build, is_symmetric


@pytest.fixture
def couplings(kind):
    return kind[0](torch.float64)


def state_for(couplings, *, seed=5, batch=None):
    batch = couplings.batch_shape if batch is None else batch
    dim = couplings.dim or 3
    return draw(*batch, couplings.num_spins, dim, seed=seed, dtype=couplings.dtype)


def flat(matrix, dim):
    """A dense form as one matrix (..., n, n)."""
    if dim is None:
        return matrix
    return matrix.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)


def product(matrix, state, dim):
    if dim is None:
        return torch.einsum("...ij,...ja->...ia", matrix, state)
    return torch.einsum("...ijab,...jb->...ia", matrix, state)


class TestContract:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_apply_is_the_product_with_the_dense_form(self, kind, dtype):
        couplings = kind[0](dtype)
        state, dense = state_for(couplings), couplings.to_dense()
        force = couplings.apply(state)
        assert couplings.dtype == dense.dtype == force.dtype == dtype
        blocks = () if couplings.dim is None else (couplings.dim,) * 2
        n = couplings.num_spins
        assert dense.shape == (*couplings.batch_shape, n, n, *blocks)
        assert force.shape == state.shape
        expected = product(dense, state, couplings.dim)
        torch.testing.assert_close(force, expected, rtol=0.0, atol=10 * ROUNDING[dtype])

    def test_leading_axes_broadcast(self, couplings):
        state = state_for(couplings, batch=(2, *([1] * len(couplings.batch_shape))))
        force = couplings.apply(state)
        assert force.shape[:-2] == (2, *couplings.batch_shape)
        expected = product(couplings.to_dense(), state, couplings.dim)
        torch.testing.assert_close(force, expected, rtol=0.0, atol=10 * ROUNDING[torch.float64])

    def test_self_coupling_is_zero(self, couplings):
        dense = couplings.to_dense()
        site = torch.arange(couplings.num_spins)
        in_place = dense[..., site, site] if couplings.dim is None else dense[..., site, site, :, :]
        assert torch.equal(in_place, torch.zeros_like(in_place))
        assert torch.equal(couplings.diagonal(), torch.zeros_like(in_place))
        assert couplings.diagonal().shape == in_place.shape

    def test_symmetry_is_told(self, kind):
        build, is_symmetric = kind
        couplings = build(torch.float64)
        assert couplings.is_symmetric is is_symmetric
        assert build(torch.float32).is_symmetric is is_symmetric
        dense = flat(couplings.to_dense(), couplings.dim)
        assert torch.allclose(dense, dense.mT, atol=1e-12, rtol=0) is is_symmetric

    def test_transpose_and_symmetrize(self, couplings):
        dense = flat(couplings.to_dense(), couplings.dim)
        transposed = flat(couplings.transpose().to_dense(), couplings.dim)
        torch.testing.assert_close(transposed, dense.mT, rtol=0, atol=ROUNDING[torch.float64])
        half_sum = couplings.symmetrize()
        assert half_sum.is_symmetric
        torch.testing.assert_close(
            flat(half_sum.to_dense(), couplings.dim),
            0.5 * (dense + dense.mT),
            rtol=0,
            atol=ROUNDING[torch.float64],
        )
        state = state_for(couplings)
        torch.testing.assert_close(
            half_sum.apply(state),
            0.5 * (couplings.apply(state) + couplings.transpose().apply(state)),
            rtol=0,
            atol=10 * ROUNDING[torch.float64],
        )

    @pytest.mark.parametrize("route", ["own", "arpack"])
    def test_largest_eigenvalue(self, couplings, route, monkeypatch):
        if route == "arpack":
            monkeypatch.setattr(spectrum, "DENSE_ROWS", 1)
        dense = flat(couplings.to_dense(), couplings.dim)
        expected = torch.linalg.eigvalsh(0.5 * (dense + dense.mT))
        largest = couplings.largest_eigenvalue()
        assert largest.shape == couplings.batch_shape
        # Backward stable routes: rounding times the norm of the matrix.
        norm = float(expected.abs().max())
        torch.testing.assert_close(
            largest, expected[..., -1], rtol=0, atol=ROUNDING[torch.float64] * max(norm, 1.0)
        )

    def test_tensors_make_the_same_couplings(self, couplings):
        tensors = couplings.tensors()
        again = couplings.with_tensors(*tensors)
        assert type(again) is type(couplings)
        assert torch.equal(again.to_dense(), couplings.to_dense())
        assert again.is_symmetric is couplings.is_symmetric
        assert again.batch_shape == couplings.batch_shape
        doubled = couplings.with_tensors(2.0 * tensors[0], *tensors[1:])
        factor = 2.0
        if isinstance(couplings, LowRank) and len(tensors) < 3 and couplings._right is None:
            factor = 4.0
        torch.testing.assert_close(doubled.to_dense(), factor * couplings.to_dense())

    def test_no_values_are_looked_at_in_with_tensors(self, couplings):
        broken = [torch.full_like(tensor, math.nan) for tensor in couplings.tensors()]
        assert couplings.with_tensors(*broken).num_spins == couplings.num_spins

    def test_derivatives_of_apply(self, couplings):
        state = state_for(couplings).requires_grad_()
        tensors = [tensor.clone().requires_grad_() for tensor in couplings.tensors()]

        def force(state, *tensors):
            return couplings.with_tensors(*tensors).apply(state)

        assert torch.autograd.gradcheck(force, (state, *tensors), fast_mode=True)
        assert torch.autograd.gradgradcheck(force, (state, *tensors), fast_mode=True)

    @pytest.mark.parametrize("route", ["own", "arpack"])
    def test_derivative_of_the_largest_eigenvalue(self, couplings, route, monkeypatch):
        """Along the ray through the couplings, where a degenerate eigenvalue stays together."""
        if route == "arpack":
            monkeypatch.setattr(spectrum, "DENSE_ROWS", 1)
        tensors = [tensor.clone().requires_grad_() for tensor in couplings.tensors()]

        value = couplings.with_tensors(*tensors).largest_eigenvalue().sum()
        # J is homogeneous in its tensors: Euler's identity gives the derivative along the ray.
        degree = 1
        if isinstance(couplings, LowRank):
            degree = len(tensors) + (couplings._right is None)
        gradients = torch.autograd.grad(value, tensors)
        along = sum(float((g * t.detach()).sum()) for g, t in zip(gradients, tensors, strict=True))
        assert along == pytest.approx(degree * value.item(), rel=1e-10, abs=1e-10)

    def test_batching_changes_nothing(self, couplings):
        state = state_for(couplings)
        largest, force = couplings.largest_eigenvalue(), couplings.apply(state)
        for where in itertools.product(*map(range, couplings.batch_shape)):
            matrix = couplings.to_dense()[where]
            alone = Dense(matrix) if couplings.dim is None else MatrixValued(matrix)
            assert float(alone.largest_eigenvalue()) == pytest.approx(
                float(largest[where]), abs=1e-12
            )
            torch.testing.assert_close(
                alone.apply(state[where]), force[where], rtol=0, atol=10 * ROUNDING[torch.float64]
            )

    @pytest.mark.parametrize("batch", [(), (2,)])
    def test_absent_sites(self, couplings, batch):
        n = couplings.num_spins
        lead = (*batch, *([1] * len(couplings.batch_shape))) if batch else ()
        absent = random_mask(*lead, n) if n > 1 else torch.ones(*lead, n, dtype=torch.bool)
        masked = couplings.mask(absent)
        dense = masked.to_dense()
        removed = absent[..., :, None] | absent[..., None, :]
        if couplings.dim is not None:
            removed = removed[..., None, None]
        expected = torch.where(removed, 0.0, couplings.to_dense())
        torch.testing.assert_close(dense, expected, rtol=0, atol=ROUNDING[torch.float64])
        assert masked.mask(absent).to_dense().equal(dense)

        state = state_for(masked)
        clean = torch.where(absent[..., None], 0.0, state)
        dirty = torch.where(absent[..., None], math.nan, state).requires_grad_()
        force = masked.apply(dirty)
        torch.testing.assert_close(
            force, product(dense, clean, couplings.dim), rtol=0, atol=10 * ROUNDING[torch.float64]
        )
        assert torch.where(absent[..., None], force, 0.0).eq(0.0).all()
        (gradient,) = torch.autograd.grad(force.sum(), dirty)
        assert gradient.isfinite().all()
        assert torch.where(absent[..., None], gradient, 0.0).eq(0.0).all()

    def test_moves_to_another_dtype(self, couplings):
        single = couplings.to(dtype=torch.float32)
        assert type(single) is type(couplings)
        assert single.dtype == torch.float32
        assert couplings.dtype == torch.float64
        torch.testing.assert_close(single.to_dense(), couplings.to_dense().float())

    def test_half_precision(self, kind):
        couplings = kind[0](torch.bfloat16)
        state = state_for(couplings)
        assert couplings.apply(state).dtype == torch.bfloat16
        largest = couplings.largest_eigenvalue()
        assert largest.dtype == torch.bfloat16
        assert largest.isfinite().all()

    def test_copies_and_pickles(self, couplings):
        for twin in (copy.deepcopy(couplings), pickle.loads(pickle.dumps(couplings))):
            assert torch.equal(twin.to_dense(), couplings.to_dense())

    def test_says_what_it_is(self, couplings):
        text = repr(couplings)
        assert text.startswith(type(couplings).__name__)
        assert f"num_spins={couplings.num_spins}" in text
        assert "float64" in text

    def test_wrong_states_are_refused(self, couplings):
        n = couplings.num_spins
        with pytest.raises(ValueError, match=rf"\({n + 1}, 3\).*{n} spins"):
            couplings.apply(draw(n + 1, 3))
        with pytest.raises(ValueError, match="state has shape"):
            couplings.apply(draw(n))
        with pytest.raises(TypeError, match=r"float32.*couplings.to"):
            couplings.apply(state_for(couplings).float())

    def test_wrong_masks_are_refused(self, couplings):
        n = couplings.num_spins
        with pytest.raises(TypeError, match="boolean tensor"):
            couplings.mask(torch.zeros(n))
        with pytest.raises(ValueError, match=rf"\({n + 1},\).*one entry per site"):
            couplings.mask(torch.zeros(n + 1, dtype=torch.bool))
        if couplings.batch_shape:
            with pytest.raises(ValueError, match="must broadcast"):
                couplings.mask(torch.zeros(7, n, dtype=torch.bool))


class TestLargestEigenvalue:
    def test_a_broken_system_stays_in_its_row(self, monkeypatch):
        matrix = symmetric(3, 8, 8, dtype=torch.float64)
        expected = Dense(matrix).largest_eigenvalue()
        broken = matrix.clone()
        broken[1, 2, 3] = math.nan
        broken.requires_grad_()
        for rows in (512, 1):
            monkeypatch.setattr(spectrum, "DENSE_ROWS", rows)
            couplings = Dense(broken, check=False)
            assert couplings.is_symmetric
            largest = couplings.largest_eigenvalue()
            assert largest[1].isnan()
            torch.testing.assert_close(largest[::2], expected[::2], rtol=1e-12, atol=0)
            (gradient,) = torch.autograd.grad(largest[::2].sum(), broken)
            assert gradient[::2].isfinite().all()

    def test_no_couplings(self, monkeypatch):
        for rows in (512, 1):
            monkeypatch.setattr(spectrum, "DENSE_ROWS", rows)
            assert float(Dense(torch.zeros(5, 5)).largest_eigenvalue()) == 0.0

    @pytest.mark.parametrize("couplings", [Dense(torch.zeros(2, 0, 0)), LowRank(torch.zeros(0, 3))])
    def test_no_sites(self, couplings):
        assert couplings.largest_eigenvalue().eq(0.0).all()
        assert couplings.apply(torch.zeros(*couplings.batch_shape, 0, 4)).shape[-2:] == (0, 4)
        assert couplings.is_symmetric

    def test_no_systems(self):
        couplings = Dense(torch.zeros(0, 4, 4))
        assert couplings.largest_eigenvalue().shape == (0,)
        assert couplings.apply(torch.zeros(0, 4, 2)).shape == (0, 4, 2)
        assert couplings.is_symmetric

    @pytest.mark.parametrize("rows", [512, 1])
    def test_hellmann_feynman(self, rows, monkeypatch):
        """gradcheck on a spectrum with a gap."""
        monkeypatch.setattr(spectrum, "DENSE_ROWS", rows)
        matrix = symmetric(2, 6, 6, dtype=torch.float64).requires_grad_()
        assert torch.autograd.gradcheck(lambda J: Dense(J).largest_eigenvalue(), matrix)

    def test_second_derivative_is_right_or_raises(self, monkeypatch):
        matrix = symmetric(6, 6, dtype=torch.float64).requires_grad_()

        def largest(J):
            return Dense(J).largest_eigenvalue()

        assert torch.autograd.gradgradcheck(largest, matrix)
        monkeypatch.setattr(spectrum, "DENSE_ROWS", 1)
        (first,) = torch.autograd.grad(largest(matrix.exp()), matrix, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"no second derivative.*eigvalsh"):
            torch.autograd.grad(first.sum(), matrix)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_arpack_on_large_systems(self, dtype):
        """Against the dense routine; a spectrum edge without a gap to speak of."""
        glass = sherrington_kirkpatrick(
            600, generator=torch.Generator().manual_seed(0), dtype=dtype
        )
        diluted = square(25, dtype=dtype).mask(
            torch.rand(2, 625, generator=torch.Generator().manual_seed(3)) < 0.2
        )
        # A quotient of 600 terms, about sqrt(600) eps, with a factor of 4 to spare.
        rounding = 100 * torch.finfo(dtype).eps
        for couplings in (glass, diluted):
            expected = torch.linalg.eigvalsh(couplings.to_dense().double())[..., -1]
            largest = couplings.largest_eigenvalue()
            assert largest.dtype == dtype
            torch.testing.assert_close(largest.double(), expected, rtol=rounding, atol=0)

    @pytest.mark.parametrize("scale", [1e-30, 1e30])
    def test_arpack_at_any_scale(self, scale, monkeypatch):
        monkeypatch.setattr(spectrum, "DENSE_ROWS", 1)
        matrix = symmetric(40, 40, dtype=torch.float64)
        expected = scale * torch.linalg.eigvalsh(Dense(matrix).to_dense())[-1]
        largest = Dense(scale * matrix).largest_eigenvalue()
        torch.testing.assert_close(largest, expected, rtol=1e-12, atol=0)

    def test_arpack_that_does_not_converge_says_so(self, monkeypatch):
        monkeypatch.setattr(spectrum, "DENSE_ROWS", 1)
        monkeypatch.setattr(spectrum, "_RESTARTS", 1)
        with pytest.raises(ConvergenceError, match=r"couplings of 60 rows.*eigvalsh"):
            Dense(symmetric(60, 60, dtype=torch.float64)).largest_eigenvalue()

    def test_global_random_state_is_left_alone(self, monkeypatch):
        monkeypatch.setattr(spectrum, "DENSE_ROWS", 1)
        before = torch.get_rng_state()
        Dense(symmetric(9, 9, dtype=torch.float64)).largest_eigenvalue()
        assert torch.equal(before, torch.get_rng_state())


class TestDense:
    def test_the_diagonal_changes_nothing(self):
        matrix, state = draw(5, 5), draw(5, 2, seed=1)
        for c in (1e3, math.nan, math.inf):
            shifted = matrix.clone()
            shifted.diagonal().fill_(c)
            assert torch.equal(Dense(shifted).apply(state), Dense(matrix).apply(state))

    def test_the_input_is_left_alone(self):
        """Also where it is a view whose entries share memory."""
        matrix = torch.ones(1).expand(2, 3, 3)
        expected = 1.0 - torch.eye(3).expand(2, 3, 3)
        assert Dense(matrix).to_dense().equal(expected)
        assert matrix.eq(1.0).all()
        for turned in (draw(3, 3).mT, draw(3, 3, 2)[..., 0], draw(1, 3, 3).expand(2, 3, 3)):
            before = turned.clone()
            dense = Dense(turned).to_dense()
            assert turned.equal(before)
            assert dense.equal(before - torch.diag_embed(before.diagonal(dim1=-2, dim2=-1)))

    def test_the_diagonal_gets_no_gradient(self):
        matrix = draw(4, 4).requires_grad_()
        (gradient,) = torch.autograd.grad(Dense(matrix).apply(draw(4, 2)).sum(), matrix)
        assert gradient.diagonal().eq(0.0).all()
        assert gradient.triu(1).ne(0.0).sum() == 6

    def test_nan_at_absent_sites_leaves_no_trace(self):
        matrix = symmetric(5, 5, dtype=torch.float64)
        absent = torch.tensor([False, True, False, False, True])
        dirty = matrix.clone()
        dirty[absent] = math.nan
        dirty[:, absent] = math.inf
        dirty.requires_grad_()
        state = draw(5, 3)
        clean = Dense(matrix).mask(absent)
        for couplings in (Dense(dirty, mask=absent), Dense(dirty, check=False).mask(absent)):
            assert couplings.is_symmetric
            assert torch.equal(couplings.apply(state), clean.apply(state))
            (gradient,) = torch.autograd.grad(couplings.apply(state).square().sum(), dirty)
            assert gradient.isfinite().all()
            assert gradient[absent].eq(0.0).all()
            assert gradient[:, absent].eq(0.0).all()

    def test_symmetry_to_rounding(self):
        """A product that is symmetric but for the order of its sums counts as symmetric."""
        for dtype in (torch.float32, torch.float64):
            basis = torch.linalg.qr(draw(60, 60, dtype=dtype)).Q
            matrix = basis @ torch.diag(draw(60, dtype=dtype)) @ basis.mT
            assert Dense(matrix).is_symmetric
            off = matrix.clone()
            off[0, 1] += 1e3 * torch.finfo(dtype).eps
            assert not Dense(off).is_symmetric

    def test_one_asymmetric_system_is_found(self):
        matrix = symmetric(3, 5, 5, dtype=torch.float64)
        # Judged on its own scale, not on that of its neighbours.
        matrix[0] *= 1e20
        matrix[2, 0, 1] += 0.1
        assert not Dense(matrix).is_symmetric

    def test_symmetrize_has_a_symmetric_gradient(self):
        matrix = symmetric(4, 4, dtype=torch.float64).requires_grad_()
        force = Dense(matrix).symmetrize().apply(draw(4, 2))
        (gradient,) = torch.autograd.grad((force * draw(4, 2, seed=3)).sum(), matrix)
        torch.testing.assert_close(gradient, gradient.mT)

    def test_bad_input_is_named(self):
        with pytest.raises(TypeError, match=r"matrix must be a torch tensor, not list.*as_tensor"):
            Dense([[0.0, 1.0], [1.0, 0.0]])
        with pytest.raises(TypeError, match=r"matrix has dtype torch.int64.*matrix.to"):
            Dense(torch.ones(2, 2, dtype=torch.int64))
        with pytest.raises(TypeError, match="complex64"):
            Dense(torch.ones(2, 2, dtype=torch.complex64))
        with pytest.raises(ValueError, match=r"\(2, 3\).*square"):
            Dense(torch.ones(2, 3))
        with pytest.raises(ValueError, match="square"):
            Dense(torch.ones(3))
        with pytest.raises(ValueError, match=r"matrix\[0, 1\] = inf.*finite.*mask"):
            Dense(torch.full((2, 2), math.inf))
        with pytest.raises(TypeError, match=r"no option 'chek'; the nearest is 'check'"):
            Dense(torch.ones(2, 2), chek=False)


class TestMatrixValued:
    def test_scalar_blocks_are_scalar_couplings(self):
        matrix, state = symmetric(5, 5, dtype=torch.float64), draw(2, 5, 3, seed=1)
        blocks = matrix[:, :, None, None] * torch.eye(3, dtype=torch.float64)
        couplings = MatrixValued(blocks)
        torch.testing.assert_close(couplings.apply(state), Dense(matrix).apply(state))
        torch.testing.assert_close(
            couplings.largest_eigenvalue(), Dense(matrix).largest_eigenvalue()
        )

    def test_symmetric_means_the_transposed_block(self):
        blocks = symmetric_blocks(n=4, dim=2, dtype=torch.float64)
        assert MatrixValued(blocks).is_symmetric
        swapped = blocks.clone()
        swapped[0, 1] = blocks[0, 1].mT
        assert not MatrixValued(swapped).is_symmetric
        dense = MatrixValued(swapped).symmetrize().to_dense()
        torch.testing.assert_close(dense, dense.transpose(0, 1).mT)

    def test_the_tensor_gets_the_gradient(self):
        blocks = draw(3, 3, 2, 2).requires_grad_()
        state = draw(3, 2, seed=1)
        assert torch.autograd.gradcheck(lambda J: MatrixValued(J).apply(state), blocks)

    def test_bad_input_is_named(self):
        with pytest.raises(ValueError, match=r"\(3, 3, 2, 1\).*\(\.\.\., N, N, D, D\)"):
            MatrixValued(torch.ones(3, 3, 2, 1))
        with pytest.raises(ValueError, match=r"tensor\[0, 1, 0, 0\] = nan"):
            MatrixValued(torch.full((2, 2, 2, 2), math.nan))
        with pytest.raises(ValueError, match="last axis must be the spin dimension 2"):
            MatrixValued(torch.ones(3, 3, 2, 2)).apply(torch.ones(3, 4))


class TestLowRank:
    def test_formula(self):
        left, right, weights = draw(6, 2), draw(6, 2, seed=1), draw(2, seed=2)
        expected = torch.einsum("ir,r,jr->ij", left, weights, right)
        expected.fill_diagonal_(0.0)
        torch.testing.assert_close(LowRank(left, right, weights).to_dense(), expected)
        expected = left @ left.mT
        expected.fill_diagonal_(0.0)
        torch.testing.assert_close(LowRank(left).to_dense(), expected)

    def test_symmetry_of_two_factors(self):
        """Two different factors may make a symmetric matrix; 1e-9 of a difference is seen."""
        left = draw(7, 2)
        rotation = torch.linalg.qr(draw(2, 2, seed=1)).Q
        assert LowRank(left, left).is_symmetric
        # (A R)(A R)^T = A A^T, written with unlike factors.
        assert LowRank(left @ rotation, left @ rotation).is_symmetric
        swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
        assert LowRank(left @ swap, left, weights=torch.ones(2, dtype=left.dtype)).is_symmetric
        nudged = left.clone()
        nudged[0, 0] += 1e-9
        assert not LowRank(left, nudged).is_symmetric

    def test_symmetrize_keeps_factors_of_unlike_scale(self):
        left, right = 1e9 * draw(6, 2), 1e-9 * draw(6, 2, seed=1)
        dense = LowRank(left, right).to_dense()
        torch.testing.assert_close(
            LowRank(left, right).symmetrize().to_dense(), 0.5 * (dense + dense.mT)
        )

    def test_nan_at_absent_sites_leaves_no_trace(self):
        left, absent = draw(5, 2), torch.tensor([False, True, False, False, False])
        dirty = left.clone()
        dirty[absent] = math.nan
        dirty.requires_grad_()
        state = draw(5, 3, seed=1)
        couplings = LowRank(dirty, mask=absent)
        assert torch.equal(couplings.apply(state), LowRank(left).mask(absent).apply(state))
        (gradient,) = torch.autograd.grad(couplings.apply(state).square().sum(), dirty)
        assert gradient.isfinite().all()
        assert gradient[absent].eq(0.0).all()

    def test_bad_input_is_named(self):
        left = torch.ones(4, 2)
        with pytest.raises(ValueError, match=r"left has shape \(3,\)"):
            LowRank(torch.ones(3))
        with pytest.raises(ValueError, match=r"right has shape \(4, 3\).*end in \(4, 2\)"):
            LowRank(left, torch.ones(4, 3))
        with pytest.raises(ValueError, match=r"weights has shape \(3,\)"):
            LowRank(left, weights=torch.ones(3))
        with pytest.raises(TypeError, match=r"right has dtype torch.float64, left has"):
            LowRank(left, torch.ones(4, 2, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"do not broadcast: \(2,\), \(3,\)"):
            LowRank(torch.ones(2, 4, 2), torch.ones(3, 4, 2))
        with pytest.raises(ValueError, match=r"weights\[1\] = nan"):
            LowRank(left, weights=torch.tensor([1.0, math.nan]))


class TestLattice:
    def test_bonds_of_a_chain_and_a_ring(self):
        path = torch.diag(torch.ones(3), 1) + torch.diag(torch.ones(3), -1)
        assert torch.equal(chain(4, strength=2.0).to_dense(), 2.0 * path)
        path[0, 3] = path[3, 0] = 1.0
        assert torch.equal(ring(4, strength=2.0).to_dense(), 2.0 * path)

    def test_sites_are_numbered_row_major(self):
        """Neighbours by coordinates, one site after the other."""
        shape, wraps = (3, 4, 2), (True, True, False)
        dense = Lattice(shape, wraps).to_dense()
        expected = torch.zeros(24, 24)
        for site, place in enumerate(torch.cartesian_prod(*map(torch.arange, shape)).tolist()):
            for axis, (length, wrap) in enumerate(zip(shape, wraps, strict=True)):
                for step in (-1, 1):
                    there = list(place)
                    there[axis] += step
                    if wrap:
                        there[axis] %= length
                    if 0 <= there[axis] < length:
                        x, y, z = there
                        expected[site, (x * 4 + y) * 2 + z] += 1.0
        assert torch.equal(dense, expected)

    @pytest.mark.parametrize(
        ("couplings", "neighbours"), [(ring(5), 2), (square(3), 4), (cubic((3, 4, 5)), 6)]
    )
    def test_coordination(self, couplings, neighbours):
        assert couplings.to_dense().sum(-1).eq(neighbours).all()
        assert float(couplings.largest_eigenvalue()) == neighbours

    @settings(max_examples=30, deadline=None)
    @given(
        shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        wraps=st.lists(st.booleans(), min_size=3, max_size=3),
        strength=st.floats(-2.0, 2.0),
    )
    def test_closed_form_of_the_largest_eigenvalue(self, shape, wraps, strength):
        periodic = [wrap and n >= 3 for wrap, n in zip(wraps, shape, strict=False)]
        couplings = Lattice(shape, periodic, strength, dtype=torch.float64)
        expected = torch.linalg.eigvalsh(couplings.to_dense())[-1]
        assert float(couplings.largest_eigenvalue()) == pytest.approx(float(expected), abs=1e-12)

    @settings(max_examples=20, deadline=None)
    @given(
        shape=st.lists(st.integers(3, 5), min_size=1, max_size=3),
        data=st.data(),
    )
    def test_translations_change_nothing(self, shape, data):
        shifts = [data.draw(st.integers(0, n - 1)) for n in shape]
        couplings = Lattice(shape, strength=0.3, dtype=torch.float64)
        n, axes = couplings.num_spins, tuple(range(len(shape)))
        sites = torch.arange(n).reshape(shape).roll(shifts, axes).flatten()
        state = draw(n, 2)
        # Sums of at most six neighbours, in another order.
        torch.testing.assert_close(
            couplings.apply(state[sites]), couplings.apply(state)[sites], rtol=0, atol=1e-14
        )

    def test_large_lattices_are_never_dense(self, monkeypatch):
        """32^3 sites: the matrix would take 4 GiB in float32."""

        def forbidden(*arguments, **options):
            raise AssertionError("the dense form was asked for")

        monkeypatch.setattr(Couplings, "to_dense", forbidden)
        couplings = cubic(32)
        state = draw(32**3, 3, dtype=torch.float32).requires_grad_()
        uniform = couplings.apply(torch.ones_like(state))
        assert uniform.eq(6.0).all()
        couplings.apply(state).sum().backward()
        assert state.grad.eq(6.0).all()
        assert float(couplings.largest_eigenvalue()) == 6.0
        holes = torch.zeros(32**3, dtype=torch.bool)
        holes[::7] = True
        assert couplings.mask(holes).apply(state)[::7].eq(0.0).all()

    def test_a_mask_keeps_the_structure(self):
        holes = random_mask(2, 9)
        couplings = square(3).mask(holes)
        assert isinstance(couplings, Masked)
        assert isinstance(couplings.couplings, Lattice)
        assert couplings.absent.equal(holes)
        more = torch.zeros(9, dtype=torch.bool)
        more[0] = True
        assert couplings.mask(more).absent.equal(holes | more)
        assert "absent=" in repr(couplings)

    def test_strength_gets_a_gradient(self):
        strength = torch.tensor([0.5, -0.5], dtype=torch.float64, requires_grad=True)
        state = draw(12, 2)
        assert torch.autograd.gradcheck(
            lambda k: square((3, 4), strength=k).apply(state), (strength,)
        )
        square((3, 4), strength=strength).largest_eigenvalue().sum().backward()
        # 2 cos 0 + 2 cos 0, and -(2 cos(2 pi / 3) + 2 cos pi) where the strength is negative.
        torch.testing.assert_close(strength.grad, torch.tensor([4.0, -3.0], dtype=torch.float64))

    @pytest.mark.parametrize("length", [1, 2])
    def test_short_periodic_directions_are_refused(self, length):
        with pytest.raises(ValueError, match=rf"n={length} is too short.*at least 3"):
            ring(length)
        with pytest.raises(ValueError, match=rf"l={length} is too short"):
            square(length)
        with pytest.raises(ValueError, match=rf"l\[2\]={length} is too short"):
            cubic((3, 4, length))
        with pytest.raises(ValueError, match=rf"shape\[1\]={length} is too short"):
            Lattice((3, length), periodic=(False, True))
        assert square((3, length), (True, False)).num_spins == 3 * length

    def test_doubled_bonds_as_the_message_says(self):
        """The periodic 2 x 2 lattice with bond multiplicity 2 is an open one, twice as strong."""
        dense = square(2, periodic=False, strength=2.0).to_dense()
        expected = [[0, 2, 2, 0], [2, 0, 0, 2], [2, 0, 0, 2], [0, 2, 2, 0]]
        assert dense.tolist() == expected

    def test_bad_input_is_named(self):
        with pytest.raises(ValueError, match=r"shape=\(\)"):
            Lattice(())
        with pytest.raises(ValueError, match="shape=5"):
            Lattice(5)
        with pytest.raises(ValueError, match=r"n=0 must be at least 1"):
            chain(0)
        with pytest.raises(TypeError, match=r"n=3.5 must be a whole number"):
            chain(3.5)
        with pytest.raises(ValueError, match=r"l=\(3, 3, 3\) has 3 lengths"):
            square((3, 3, 3))
        with pytest.raises(ValueError, match="has 2 entries for 3 directions"):
            cubic(3, periodic=(True, False))
        with pytest.raises(ValueError, match="strength=nan must be finite"):
            ring(3, strength=math.nan)
        with pytest.raises(TypeError, match="strength='1' must be a number"):
            ring(3, strength="1")
        with pytest.raises(TypeError, match=r"strength has dtype torch.int64"):
            ring(3, strength=torch.tensor(1))
        with pytest.raises(TypeError, match="no option 'strenght'; the nearest is 'strength'"):
            Lattice((3,), strenght=1.0)


class TestFactories:
    def test_curie_weiss(self):
        couplings = curie_weiss(4, strength=2.0)
        assert torch.equal(couplings.to_dense(), 0.5 * (torch.ones(4, 4) - torch.eye(4)))
        assert float(couplings.largest_eigenvalue()) == 1.5
        assert float(curie_weiss(4, strength=-2.0).largest_eigenvalue()) == 0.5
        assert float(curie_weiss(1).largest_eigenvalue()) == 0.0
        with pytest.raises(ValueError, match="num_spins=0 must be at least 1"):
            CurieWeiss(0)

    @pytest.mark.stochastic
    def test_sherrington_kirkpatrick(self):
        n, draws, strength = 40, 50, 1.5
        generator = torch.Generator().manual_seed(7)
        couplings = sherrington_kirkpatrick(
            n, strength=strength, generator=generator, batch_shape=(draws,), dtype=torch.float64
        )
        dense = couplings.to_dense()
        assert torch.equal(dense, dense.mT)
        i, j = torch.triu_indices(n, n, 1)
        entries = dense[:, i, j] * math.sqrt(n) / strength
        count = entries.numel()
        # Five standard errors of the mean, and of the variance of a Gaussian (sqrt(2 / count)).
        assert abs(float(entries.mean())) < 5.0 / math.sqrt(count)
        assert abs(float(entries.var()) - 1.0) < 5.0 * math.sqrt(2.0 / count)
        # Semicircle: the edge 2 s, up to the Tracy-Widom correction of order n^(-2/3).
        edge = float(couplings.largest_eigenvalue().mean())
        assert edge == pytest.approx(2.0 * strength, rel=2.0 * n ** (-2 / 3))

    def test_sherrington_kirkpatrick_is_reproducible(self):
        before = torch.get_rng_state()
        first, second = (
            sherrington_kirkpatrick(6, generator=torch.Generator().manual_seed(3)).to_dense()
            for _ in range(2)
        )
        assert torch.equal(first, second)
        assert torch.equal(before, torch.get_rng_state())
        strength = torch.tensor(1.0, requires_grad=True)
        model = sherrington_kirkpatrick(
            6, strength=strength, generator=torch.Generator().manual_seed(3)
        )
        assert torch.equal(model.to_dense(), first)
        # J is linear in the strength.
        (gradient,) = torch.autograd.grad(model.to_dense().square().sum(), strength)
        torch.testing.assert_close(gradient, 2.0 * first.square().sum())

    def test_hopfield(self):
        patterns = torch.tensor([[1, 1, -1, 1], [1, -1, -1, -1]])
        couplings = hopfield(patterns, strength=2.0)
        xi = patterns.float()
        expected = 0.5 * xi.mT @ xi
        expected.fill_diagonal_(0.0)
        assert torch.equal(couplings.to_dense(), expected)
        assert couplings.dtype == torch.get_default_dtype()
        assert couplings.rank == 2

    def test_a_stored_pattern_is_recalled(self):
        """One pattern: the force at it is (N - 1) / N of it, exactly."""
        pattern = draw(16).sign()
        force = hopfield(pattern[None]).apply(pattern[:, None])
        torch.testing.assert_close(force, 15 / 16 * pattern[:, None])

    def test_hopfield_refuses_what_is_no_pattern(self):
        with pytest.raises(TypeError, match="patterns must be a tensor"):
            hopfield([[1.0, -1.0]])
        with pytest.raises(TypeError, match=r"torch.bool.*-1 and 1"):
            hopfield(torch.ones(2, 3, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"\(3,\).*single pattern is \(1, N\)"):
            hopfield(torch.ones(3))

    @pytest.mark.parametrize(
        "build",
        [
            lambda **o: chain(4, **o),
            lambda **o: ring(4, **o),
            lambda **o: square(3, **o),
            lambda **o: cubic(3, **o),
            lambda **o: curie_weiss(4, **o),
            lambda **o: sherrington_kirkpatrick(4, **o),
            lambda **o: hopfield(torch.ones(2, 4), **o),
        ],
    )
    def test_dtype_and_strength(self, build):
        assert build().dtype == torch.get_default_dtype()
        assert build(dtype=torch.float64).dtype == torch.float64
        assert build(device="cpu").device.type == "cpu"
        strength = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        couplings = build(strength=strength, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(couplings.to_dense().sum(), strength)
        # Linear in the strength.
        assert float(gradient) == pytest.approx(couplings.to_dense().sum().item() / 2.0)
