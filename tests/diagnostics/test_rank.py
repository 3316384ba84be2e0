"""The rank residual: its definition, its limits, and the bound on what it leaves out."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.optimize import linprog

from spinformer.diagnostics import effective_rank, matrix_norm, rank_residual, residual

NORMS = ["1,inf", "fro"]


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def one_infinity(x):
    return math.sqrt(x.abs().sum(0).max().item() * x.abs().sum(1).max().item())


def weighted_minimum(tokens, weight):
    """min over x of (s |X - 1 x^T|_1 + |X - 1 x^T|_inf / s) / 2, a linear program.

    Variables: x (d), magnitudes (n d), the two norms. The minimum over s of it is the minimum of
    the geometric mean of the two norms.
    """
    n, d = tokens.shape
    spread = sparse.kron(np.ones((n, 1)), sparse.identity(d))
    size, none = sparse.identity(n * d), sparse.csr_matrix((n * d, 2))
    constraints = [
        sparse.hstack([-spread, -size, none]),
        sparse.hstack([spread, -size, none]),
        sparse.hstack(
            [
                sparse.csr_matrix((d, d)),
                sparse.kron(np.ones((1, n)), sparse.identity(d)),
                -np.ones((d, 1)),
                np.zeros((d, 1)),
            ]
        ),
        sparse.hstack(
            [
                sparse.csr_matrix((n, d)),
                sparse.kron(sparse.identity(n), np.ones((1, d))),
                np.zeros((n, 1)),
                -np.ones((n, 1)),
            ]
        ),
    ]
    flat = tokens.flatten()
    cost = np.concatenate([np.zeros(d + n * d), [0.5 * weight, 0.5 / weight]])
    program = linprog(
        cost,
        A_ub=sparse.vstack(constraints).tocsr(),
        b_ub=np.concatenate([-flat, flat, np.zeros(d + n)]),
        bounds=[(None, None)] * d + [(0.0, None)] * (n * d + 2),
        method="highs",
    )
    assert program.success
    return program.fun


class TestDefinition:
    def test_by_hand(self):
        """Four tokens 30 e_i: mean 7.5, so the columns of the residual hold 22.5 and three 7.5."""
        tokens = 30.0 * torch.eye(4)
        # Every choice but zero leaves 45 or more in each column and row; zero leaves 30.
        assert rank_residual(tokens).item() == 1.0
        assert rank_residual(tokens, norm="fro").item() == pytest.approx(math.sqrt(3.0) / 2.0)

    def test_two_tokens(self):
        """+-a around c: the midpoint is the minimizer in every norm."""
        common, apart = draw(5), draw(5, seed=1)
        tokens = torch.stack([common + apart, common - apart])
        expected = one_infinity(torch.stack([apart, -apart])) / one_infinity(tokens)
        assert rank_residual(tokens).item() == pytest.approx(min(expected, 1.0), rel=1e-14)

    def test_frobenius_is_the_spread_around_the_mean(self):
        tokens = draw(3, 7, 4) + 2.0
        centered = tokens - tokens.mean(1, keepdim=True)
        expected = centered.flatten(1).norm(dim=1) / tokens.flatten(1).norm(dim=1)
        torch.testing.assert_close(rank_residual(tokens, norm="fro"), expected)

    @pytest.mark.parametrize("center", ["median", "mid-range"])
    def test_the_better_center_is_taken(self, center):
        """One far token: the median ignores it in |.|_1; a mid-range can win for three tokens."""
        if center == "median":
            tokens = torch.cat([torch.full((9, 1), 5.0), torch.full((1, 1), 9.0)])
            # Columns: 4 around the median 5, against 0.4 * 9 + 3.6 = 7.2 around the mean.
            expected = math.sqrt(4.0 * 4.0) / math.sqrt(54.0 * 9.0)
        else:
            tokens = torch.tensor([[4.0, 4.0], [4.0, 6.0], [6.0, 4.0], [6.0, 6.0]])
            # Around (5, 5): columns 4, rows 2.
            expected = math.sqrt(4.0 * 2.0) / math.sqrt(20.0 * 12.0)
        assert rank_residual(tokens).item() == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize(("n", "d", "seed"), [(2, 3, 0), (3, 2, 1), (5, 4, 2), (9, 5, 3)])
    @pytest.mark.parametrize("law", ["gaussian", "offset", "heavy"])
    def test_against_the_minimum(self, n, d, seed, law):
        """Between the minimum and 2 (1 - 1/n) times it.

        The grid of weights has steps of 8 %: at the nearest of them the linear program is above
        the minimum by no more than 4 %.
        """
        tokens = draw(n, d, seed=seed)
        if law == "offset":
            tokens = tokens + 3.0 * draw(1, d, seed=seed + 1)
        elif law == "heavy":
            tokens = tokens * draw(n, 1, seed=seed + 2).exp()
        value = rank_residual(tokens).item() * one_infinity(tokens)
        # At the minimum the weight squared is the ratio of the norms, within [1/n, d].
        weights = np.exp(np.arange(math.log(1.0 / n) / 2.0, math.log(d) / 2.0 + 0.08, 0.08))
        minimum = min(weighted_minimum(tokens.numpy(), weight) for weight in weights)
        assert value >= minimum / 1.04 * (1.0 - 1e-9)
        assert value <= 2.0 * (1.0 - 1.0 / n) * minimum * (1.0 + 1e-9)
        # What the better of four choices is worth beyond the bound.
        assert value <= 1.25 * minimum


class TestLimits:
    @pytest.mark.parametrize("norm", NORMS)
    def test_equal_tokens(self, norm):
        tokens = draw(1, 6, dtype=torch.float64).expand(4, 6)
        # The mean of four equal numbers is exact.
        assert rank_residual(tokens, norm=norm).item() == 0.0
        assert rank_residual(draw(1, 6), norm=norm).item() == 0.0

    @pytest.mark.parametrize("norm", NORMS)
    def test_zero(self, norm):
        tokens = torch.zeros(2, 3, 4, requires_grad=True)
        residual = rank_residual(tokens, norm=norm)
        assert residual.eq(0.0).all()
        (gradient,) = torch.autograd.grad(residual.sum(), tokens)
        assert gradient.eq(0.0).all()

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("shape", [(2, 0, 3), (2, 3, 0), (0, 3, 4)])
    def test_empty(self, norm, shape):
        assert rank_residual(torch.zeros(shape), norm=norm).shape == shape[:1]

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_extreme_scales(self, norm, dtype):
        tokens = draw(5, 3, dtype=dtype) + 1.0
        expected = rank_residual(tokens, norm=norm)
        tiny, huge = torch.finfo(dtype).tiny * 1e3, torch.finfo(dtype).max / 1e2
        for scale in (tiny, huge):
            # Dividing by the largest entry costs a rounding.
            torch.testing.assert_close(rank_residual(scale * tokens, norm=norm), expected)

    @pytest.mark.parametrize("norm", NORMS)
    def test_nearly_collapsed(self, norm):
        """The residual of nearly equal tokens is resolved down to the rounding of the tokens."""
        for size in (1e-3, 1e-6, 1e-9):
            apart = draw(2, 5)
            apart = apart - apart.mean(0)
            tokens = torch.ones(2, 5, dtype=torch.float64) + size * apart
            expected = rank_residual(apart, norm=norm).item() * size
            measure = one_infinity if norm == "1,inf" else lambda x: x.norm().item()
            expected *= measure(apart) / measure(tokens)
            assert rank_residual(tokens, norm=norm).item() == pytest.approx(
                expected, rel=4.0 * 2.0**-52 / size
            )

    def test_half_precision(self):
        for dtype in (torch.bfloat16, torch.float16):
            tokens = draw(4, 3, dtype=dtype)
            residual = rank_residual(tokens)
            assert residual.dtype == torch.float32
            assert residual.equal(rank_residual(tokens.float()))

    @pytest.mark.parametrize("norm", NORMS)
    def test_not_finite(self, norm):
        tokens = draw(3, 4, 2)
        tokens[1, 0, 0] = math.nan
        tokens[2, 0, 0] = math.inf
        residual = rank_residual(tokens, norm=norm)
        assert residual[0].equal(rank_residual(tokens[0], norm=norm))
        assert residual[1:].isnan().all()


class TestInvariance:
    @settings(max_examples=25, deadline=None)
    @given(
        n=st.integers(1, 6),
        d=st.integers(1, 5),
        seed=st.integers(0, 1000),
        norm=st.sampled_from(NORMS),
    )
    def test_order_scale_batch_and_range(self, n, d, seed, norm):
        tokens = draw(3, n, d, seed=seed)
        residual = rank_residual(tokens, norm=norm)
        assert residual.shape == (3,)
        # Sums of at most 30 terms: rounding below 1e-13.
        assert (residual <= 1.0 + 1e-13).all()
        assert (residual >= 0.0).all()
        for other in (
            rank_residual(tokens.flip(-2), norm=norm),
            rank_residual(tokens.flip(-1), norm=norm),
            rank_residual(-7.0 * tokens, norm=norm),
            torch.stack([rank_residual(one, norm=norm) for one in tokens]),
        ):
            torch.testing.assert_close(residual, other, rtol=1e-13, atol=1e-13)


class TestMask:
    @pytest.mark.parametrize("norm", NORMS)
    def test_padding_changes_nothing(self, norm):
        tokens = draw(3, 4) + 0.5
        alone = rank_residual(tokens, norm=norm)
        for place in ([0, 1, 2], [4, 5, 6], [1, 3, 4]):
            padded = torch.full((7, 4), math.nan, dtype=torch.float64)
            padded[place] = tokens
            absent = torch.ones(7, dtype=torch.bool)
            absent[place] = False
            residual = rank_residual(padded, absent, norm=norm)
            torch.testing.assert_close(residual, alone, rtol=1e-14, atol=0)

    @pytest.mark.parametrize("norm", NORMS)
    def test_no_token_left(self, norm):
        tokens = draw(2, 3, 4).requires_grad_()
        absent = torch.tensor([[True] * 3, [False, True, False]])
        residual = rank_residual(tokens, absent, norm=norm)
        assert residual[0].item() == 0.0
        torch.testing.assert_close(residual[1], rank_residual(tokens[1, ::2], norm=norm))
        (gradient,) = torch.autograd.grad(residual.sum(), tokens)
        assert gradient.isfinite().all()
        assert gradient[absent].eq(0.0).all()

    def test_one_mask_for_a_batch(self):
        tokens = draw(2, 3, 4)
        absent = torch.tensor([False, True, False])
        expected = rank_residual(tokens[:, ::2])
        torch.testing.assert_close(rank_residual(tokens, absent), expected)


class TestGradient:
    @pytest.mark.parametrize("norm", NORMS)
    def test_gradcheck(self, norm):
        """Away from ties the value is smooth."""
        tokens = (draw(2, 5, 3) + 0.4).requires_grad_()
        absent = torch.zeros(2, 5, dtype=torch.bool)
        absent[1, 4] = True
        assert torch.autograd.gradcheck(lambda x: rank_residual(x, absent, norm), tokens)

    @pytest.mark.parametrize("norm", NORMS)
    def test_equal_tokens_have_a_finite_gradient(self, norm):
        tokens = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(rank_residual(tokens, norm=norm), tokens)
        assert gradient.eq(0.0).all()


class TestBadInput:
    def test_is_named(self):
        with pytest.raises(ValueError, match=r"norm='frobenius'.*nearest is 'fro'"):
            rank_residual(draw(3, 2), norm="frobenius")
        with pytest.raises(TypeError, match=r"torch\.int64: use x\.float"):
            rank_residual(torch.ones(3, 2, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"\(3,\).*\(\.\.\., n, d\)"):
            rank_residual(draw(3))
        with pytest.raises(TypeError, match="boolean tensor"):
            rank_residual(draw(3, 2), torch.zeros(3))
        with pytest.raises(ValueError, match=r"mask has shape \(4,\).*\(3,\)"):
            rank_residual(draw(3, 2), torch.zeros(4, dtype=torch.bool))


class TestResidual:
    @pytest.mark.parametrize("norm", NORMS)
    def test_is_the_numerator(self, norm):
        tokens = (
            draw(3, 6, 4) * torch.tensor([1e-200, 1.0, 1e200], dtype=torch.float64)[:, None, None]
        )
        expected = rank_residual(tokens, norm=norm) * matrix_norm(tokens, norm)
        torch.testing.assert_close(residual(tokens, norm=norm), expected, atol=0.0, rtol=1e-13)

    @pytest.mark.parametrize("norm", NORMS)
    def test_scales_with_the_tokens_and_ignores_what_they_share(self, norm):
        """By powers of two, which leave no rounding; the center 0 wins for none of these."""
        tokens = draw(5, 4)
        value = residual(tokens + 8.0, norm=norm)
        assert residual(4.0 * (tokens + 8.0), norm=norm).equal(4.0 * value)
        torch.testing.assert_close(residual(tokens + 64.0, norm=norm), value, rtol=1e-12, atol=0.0)

    def test_masks_and_empty(self):
        tokens = draw(2, 4, 3)
        mask = torch.tensor([[False, False, True, False], [True] * 4])
        tokens[mask] = math.nan
        value = residual(tokens, mask)
        assert value[0].equal(residual(tokens[0, [0, 1, 3]]))
        assert value[1] == 0.0
        assert residual(torch.zeros(2, 0, 3)).equal(torch.zeros(2))


class TestMatrixNorm:
    def test_is_no_norm(self):
        """A column of ones beside a row of ones: n, where the triangle would allow 2 sqrt(n)."""
        size = 400
        column, row = torch.zeros(size, size), torch.zeros(size, size)
        column[:, 0] = row[0] = 1.0
        # Their sum has a 2 in the corner.
        assert matrix_norm(column + row).item() == pytest.approx(size + 1.0)
        assert (matrix_norm(column) + matrix_norm(row)).item() == pytest.approx(2.0 * size**0.5)

    @pytest.mark.parametrize("norm", NORMS)
    def test_is_submultiplicative(self, norm):
        left, right = draw(500, 4, 3), draw(500, 3, 5, seed=1)
        product = matrix_norm(left @ right, norm)
        assert (product <= matrix_norm(left, norm) * matrix_norm(right, norm) * (1 + 1e-12)).all()


class TestEffectiveRank:
    def test_equal_singular_values(self):
        frame = torch.linalg.qr(draw(7, 4)).Q
        assert effective_rank(frame).item() == pytest.approx(4.0, rel=1e-13)

    def test_by_hand(self):
        """Singular values 3 and 1: exp of the entropy of (3/4, 1/4)."""
        expected = math.exp(0.75 * math.log(4.0 / 3.0) + 0.25 * math.log(4.0))
        assert effective_rank(torch.diag(torch.tensor([3.0, -1.0]))).item() == pytest.approx(
            expected, rel=1e-6
        )

    def test_between_one_and_the_rank(self):
        for rank in (1, 2, 3):
            tokens = draw(50, 8, rank, seed=rank) @ draw(50, rank, 6, seed=rank + 10)
            value = effective_rank(tokens)
            # Singular values that are zero up to 1e-16 weigh less than 1e-13.
            assert (value >= 1.0 - 1e-12).all()
            assert (value <= rank + 1e-12).all()

    def test_rank_collapse(self):
        tokens = draw(1, 5).expand(6, 5)
        assert effective_rank(tokens).item() == pytest.approx(1.0, rel=1e-13)
        assert effective_rank(tokens, centered=True).item() == 0.0
        assert effective_rank(draw(1, 5), centered=True).item() == 0.0

    def test_centered_is_that_of_the_residual(self):
        tokens = draw(3, 6, 4) + 5.0
        expected = effective_rank(tokens - tokens.mean(1, keepdim=True))
        # The center has a singular value of rounding, 1e-15, in either.
        torch.testing.assert_close(
            effective_rank(tokens, centered=True), expected, rtol=1e-11, atol=0.0
        )

    @pytest.mark.parametrize("centered", [False, True])
    def test_masks_scale_and_dtype(self, centered):
        tokens = draw(2, 6, 3) + 1.0
        mask = torch.zeros(2, 6, dtype=torch.bool)
        mask[0, [0, 4]] = True
        tokens[mask] = math.nan
        value = effective_rank(tokens, mask, centered=centered)
        alone = effective_rank(tokens[0, [1, 2, 3, 5]], centered=centered)
        torch.testing.assert_close(value[0], alone, rtol=1e-13, atol=0.0)
        torch.testing.assert_close(
            effective_rank(1e200 * tokens, mask, centered=centered), value, rtol=1e-12, atol=0.0
        )
        half = effective_rank(tokens.bfloat16(), mask, centered=centered)
        assert half.dtype == torch.float32
        torch.testing.assert_close(
            half, effective_rank(tokens.bfloat16().float(), mask, centered=centered)
        )

    @pytest.mark.parametrize("centered", [False, True])
    def test_limits(self, centered):
        assert effective_rank(torch.zeros(2, 3, 4), centered=centered).eq(0.0).all()
        for shape in ((2, 0, 3), (2, 3, 0), (0, 3, 4)):
            value = effective_rank(torch.zeros(shape), centered=centered)
            assert value.equal(torch.zeros(shape[:1]))
        absent = torch.ones(1, 3, dtype=torch.bool)
        assert effective_rank(torch.ones(1, 3, 2), absent, centered=centered).item() == 0.0

    def test_not_finite_stays_where_it_is(self):
        tokens = draw(3, 4, 2)
        tokens[1, 0, 0], tokens[2, 0, 0] = math.nan, math.inf
        tokens.requires_grad_()
        value = effective_rank(tokens)
        assert value[0].equal(effective_rank(tokens[0]))
        assert value[1:].isnan().all()
        (gradient,) = torch.autograd.grad(value[0], tokens)
        assert gradient.isfinite().all()

    @pytest.mark.parametrize("centered", [False, True])
    def test_gradients(self, centered):
        tokens = draw(2, 5, 3).requires_grad_()

        def rank(x):
            return effective_rank(x, centered=centered)

        assert torch.autograd.gradcheck(rank, tokens)
        assert torch.autograd.gradgradcheck(rank, tokens)
        nothing = torch.zeros_like(tokens).requires_grad_()
        (gradient,) = torch.autograd.grad(rank(nothing).sum(), nothing)
        assert gradient.eq(0.0).all()
