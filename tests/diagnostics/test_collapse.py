"""The theorem of rank collapse: where it holds, what breaks it, how fast tokens become equal."""

import math
from dataclasses import replace

import pytest
import torch

from spinformer.diagnostics import (
    AttentionLayer,
    FeedForward,
    Normalization,
    collapse_bound,
    collapse_curve,
    hidden_states,
    lipschitz_bound,
    log_residuals,
    matrix_norm,
    rank_residual,
    residual,
)
from spinformer.diagnostics.collapse import ROW_RANGE


def random_net(depth, heads, width, head, strength=1.0, seed=0, **parts):
    """Weights of order one in every direction; ``strength`` multiplies W_QK."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [
        AttentionLayer(
            strength * draw(heads, width, head) / width**0.5,
            draw(heads, width, head) / width**0.5,
            draw(heads, width, head) / width**0.5,
            draw(heads, head, width) / (heads * head) ** 0.5,
            query_bias=draw(heads, head),
            key_bias=draw(heads, head),
            value_bias=draw(heads, head),
            output_bias=draw(width),
            scale=head**-0.5,
            **parts,
        )
        for _ in range(depth)
    ]


def identity_layer(query_key, value, width, **parts):
    eye = torch.eye(width, dtype=torch.float64).unsqueeze(0)
    return AttentionLayer(query_key * eye, eye, value * eye, eye, scale=width**-0.5, **parts)


class TestLogResiduals:
    @pytest.mark.parametrize("strength", [0.3, 1.0, 10.0])
    def test_against_the_tokens_themselves(self, strength):
        """As long as the tokens resolve it: their rounding is 1e-15 of their size."""
        layers = random_net(3, 3, 8, 4, strength)
        tokens = torch.randn(5, 6, 8, dtype=torch.float64)
        states = hidden_states(layers, tokens, "attention")
        size, direct = matrix_norm(states, "fro"), residual(states, norm="fro")
        error = (log_residuals(layers, tokens, norm="fro").exp() / direct - 1.0).abs()
        assert (error < 1e-12 + 1e-14 * size / direct).all()
        # The center is one of five in place of four.
        direct, value = residual(states), log_residuals(layers, tokens).exp()
        slack = 1e-12 * direct + 1e-13 * matrix_norm(states)
        assert (value <= direct + slack).all()
        assert (value >= direct / (2.0 * (1.0 - 1.0 / 6.0)) - slack).all()

    def test_against_a_closed_form(self):
        """Two tokens +-a, W_V = I / 2: each layer makes them +-tanh(|a|^2 / 2) a / 2.

        The attention of a token to itself is 1 / (1 + exp(-2 e)), to the other 1 / (1 + exp(2 e)),
        with e = |a|^2 / sqrt(4).
        """
        apart = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64)
        tokens = torch.stack([apart, -apart])
        square, expected = (apart @ apart).item(), [math.log(residual(tokens).item())]
        while square > 1e-200:
            gain = 0.5 * math.tanh(square / 2.0)
            expected.append(expected[-1] + math.log(gain))
            square *= gain**2
        assert expected[-1] < -300.0
        layers = [identity_layer(1.0, 0.5, 4)] * (len(expected) - 1)
        # A layer triples the logarithm, and its error with it.
        assert log_residuals(layers, tokens).tolist() == pytest.approx(expected, rel=1e-12)

    def test_cubes(self):
        """From where the logits are small each layer triples the fall of the one before.

        Twelve layers: exp(-300 000) is far below the smallest number.
        """
        layers = random_net(12, 4, 32, 8)
        logs = log_residuals(layers, torch.randn(6, 16, 32, dtype=torch.float64))
        falls = logs[1:] - logs[:-1]
        ratios = falls[5:] / falls[4:-1]
        torch.testing.assert_close(ratios, torch.full_like(ratios, 3.0), rtol=0.05, atol=0.0)
        assert (logs[-1] < -1e5).all()

    def test_order_of_one_layer(self):
        """|res(SA(X))| ~ |res(X)|^3 as X shrinks: Richardson's slope between 1e-3 and 1e-4."""
        layers = random_net(1, 4, 16, 4)
        tokens = torch.randn(20, 8, 16, dtype=torch.float64)
        logs = torch.stack([log_residuals(layers, size * tokens) for size in (1e-3, 1e-4)])
        slopes = (logs[0, 1] - logs[1, 1]) / (logs[0, 0] - logs[1, 0])
        torch.testing.assert_close(slopes, torch.full_like(slopes, 3.0), rtol=2e-3, atol=0.0)

    def test_masks_and_limits(self):
        layers = random_net(3, 2, 6, 3)
        tokens = torch.randn(3, 5, 6, dtype=torch.float64)
        mask = torch.zeros(3, 5, dtype=torch.bool)
        mask[1, 3:], mask[2] = True, True
        tokens[mask] = math.nan
        logs = log_residuals(layers, tokens, mask)
        alone = log_residuals(layers, tokens[1, :3])
        torch.testing.assert_close(logs[:, 1], alone, rtol=1e-11, atol=1e-11)
        assert logs[:, 2].eq(-math.inf).all()
        same = log_residuals(layers, torch.ones(4, 6, dtype=torch.float64))
        assert same.eq(-math.inf).all()
        assert log_residuals(layers, tokens[0, :1]).eq(-math.inf).all()
        tokens[0, 0, 0] = math.nan
        logs = log_residuals(layers, tokens, mask)
        assert logs[:, 0].isnan().all()
        torch.testing.assert_close(logs[:, 1], alone, rtol=1e-11, atol=1e-11)

    def test_gradient(self):
        layers = random_net(2, 2, 5, 3)
        tokens = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: log_residuals(layers, x, norm="fro"), tokens)

    def test_not_covered(self):
        (layer,) = random_net(1, 2, 5, 3)
        tokens = torch.randn(4, 5, dtype=torch.float64)
        with pytest.raises(ValueError, match="know positions"):
            log_residuals([replace(layer, position=lambda queries: queries[..., :1])], tokens)
        with pytest.raises(ValueError, match="are normalized"):
            collapse_bound([replace(layer, key_norm=Normalization(1e-5))], tokens)
        with pytest.raises(ValueError, match="torch.bfloat16: cast it"):
            log_residuals(
                torch.nn.TransformerEncoderLayer(4, 1).bfloat16(), torch.ones(2, 4).bfloat16()
            )
        with pytest.raises(ValueError, match="variant='full' is not an option"):
            collapse_bound([layer], tokens, variant="full")


class TestBound:
    def test_by_hand(self):
        """One head: 4 beta / sqrt(d_qk) = 4 * 2 * 3 / sqrt(4), and its powers."""
        layers = [identity_layer(2.0, 3.0, 4)] * 3
        tokens = 0.05 * torch.eye(4, dtype=torch.float64)
        bound = collapse_bound(layers, tokens)
        assert bound.beta.item() == pytest.approx(6.0)
        assert bound.factor.item() == pytest.approx(12.0)
        expected = [
            (3.0**depth - 1.0) / 2.0 * math.log(12.0) + 3.0**depth * math.log(0.05)
            for depth in range(4)
        ]
        assert bound.log_bound.tolist() == pytest.approx(expected)
        assert bound.log_composed.tolist() == pytest.approx(expected)
        # The bound that holds has sqrt(min(n, d) / 2) = sqrt(2) in place of 4.
        expected = [
            (3.0**depth - 1.0) / 2.0 * math.log(3.0 * 2.0**0.5) + 3.0**depth * math.log(0.05)
            for depth in range(4)
        ]
        assert bound.log_proved.tolist() == pytest.approx(expected)
        assert bound.forces_collapse
        assert bound.within_range.all()

    def test_holds_for_random_networks(self):
        """Hundreds of networks of one to four layers: none is beyond any of the bounds.

        Few tokens and heads, so that the theorem holds with any logits.
        """
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def whole(low, high):
            return int(torch.randint(low, high + 1, (), generator=generator))

        inside = 0
        for trial in range(600):
            n, d, heads, head = whole(2, 8), whole(1, 5), whole(1, 3), whole(1, 4)

            def weights(*shape, law=trial % 3):
                x = draw(*shape)
                if law == 1:
                    return x * draw(*shape).exp()
                return x * (torch.rand(shape, generator=generator) < 0.5) if law == 2 else x

            strength = (2.0 * draw(1) - 2.0).exp()
            layers = [
                AttentionLayer(
                    strength * weights(heads, d, head),
                    weights(heads, d, head),
                    weights(heads, d, head),
                    weights(heads, head, d),
                    query_bias=3.0 * draw(heads, head),
                    scale=head**-0.5,
                )
                for _ in range(whole(1, 4))
            ]
            bound = collapse_bound(layers, 0.5 * weights(n, d))
            for log in (bound.log_bound, bound.log_composed, bound.log_proved):
                # A head of zeros gives -inf on both sides.
                assert (bound.log_residual <= log + 1e-9).all()
            assert (bound.log_composed <= bound.log_bound + 1e-9).all()
            inside += int(bound.within_range.all())
        assert 150 < inside < 450

    def test_bound_that_holds_is_nearly_attained(self):
        """Tokens +-r of width 1: the residual is s r^3 sqrt(2), the bound twice s r^3, for small r.

        Of the square root of a half, the column sums give nothing away, the row sums a factor 2.
        """
        tokens = torch.tensor([[1e-3], [-1e-3]], dtype=torch.float64)
        bound = collapse_bound([identity_layer(1.0, 1.0, 1)], tokens)
        slack = (bound.log_proved - bound.log_residual)[1].item()
        assert slack == pytest.approx(0.5 * math.log(2.0), abs=1e-5)

    def test_bound_that_holds_counts_the_tokens_or_the_columns(self):
        """c = min(n, d) / 2 for wide rows and of the tokens present, at most 2 within the range."""
        layer = identity_layer(1.0, 1.0, 6)
        tokens = torch.randn(1, 20, 6, dtype=torch.float64).expand(4, -1, -1).clone()
        tokens[2:] *= 1e-3
        mask = torch.zeros(4, 20, dtype=torch.bool)
        mask[1::2, 3:] = True
        bound = collapse_bound([layer], tokens, mask)
        constant = (bound.log_proved[1] - 3.0 * bound.log_residual[0]).exp() / layer.scale
        expected = torch.tensor([3.0, 1.5, 2.0, 1.5], dtype=torch.float64).sqrt()
        torch.testing.assert_close(constant, expected)

    def test_heads_of_different_shape(self):
        """One head with a column of ones, one with a row: the bound has their norms apart."""
        eye = torch.eye(5, dtype=torch.float64).expand(2, 5, 5)
        value = torch.zeros(2, 5, 5, dtype=torch.float64)
        value[0, :, 0], value[1, 0, :] = 1.0, 1.0
        layer = AttentionLayer(eye, eye, value, eye)
        tokens = 1e-3 * torch.randn(2, 5, dtype=torch.float64)
        bound = collapse_bound([layer], tokens)
        constant = (bound.log_proved[1] - 3.0 * bound.log_residual[0]).exp().item()
        assert constant == pytest.approx(1.0 * (5.0 + 1.0))

    def test_composed_is_sharper(self):
        """One strong layer among weak ones: the common beta takes all for strong."""
        weak, strong = identity_layer(0.1, 1.0, 4), identity_layer(2.0, 1.0, 4)
        tokens = torch.randn(3, 5, 4, dtype=torch.float64)
        bound = collapse_bound([weak, strong, weak], tokens)
        assert (bound.log_composed[1:] < bound.log_bound[1:] - 2.0).all()
        assert (bound.log_residual <= bound.log_composed).all()

    def test_mlp_multiplies_by_its_constant(self):
        generator = torch.Generator().manual_seed(1)
        first = torch.randn(6, 9, generator=generator, dtype=torch.float64)
        second = torch.randn(9, 6, generator=generator, dtype=torch.float64)
        mlp = FeedForward(first, second, torch.relu)
        layers = random_net(3, 2, 6, 3, mlp=mlp)
        tokens = 1e-3 * torch.randn(4, 5, 6, dtype=torch.float64)
        bare, whole = (
            collapse_bound(layers, tokens),
            collapse_bound(layers, tokens, variant="no_skip"),
        )
        gain = (matrix_norm(first) * matrix_norm(second)).log()
        torch.testing.assert_close(whole.log_constants, bare.log_constants + gain)
        torch.testing.assert_close(whole.factor.log(), bare.factor.log() + gain)
        assert (whole.log_residual[1] <= whole.log_proved[1]).all()
        # The condition for the proof, and the logits, are those of the first layer in both.
        torch.testing.assert_close(whole.row_range[0], bare.row_range[0])

    @pytest.mark.parametrize(
        ("activation", "slope"),
        [(torch.relu, 1.0), (torch.tanh, 1.0), (torch.nn.functional.gelu, 1.128904)],
    )
    def test_lipschitz(self, activation, slope):
        generator = torch.Generator().manual_seed(2)
        first = torch.randn(4, 7, generator=generator, dtype=torch.float64)
        second = torch.randn(7, 4, generator=generator, dtype=torch.float64)
        mlp = FeedForward(first, second, activation)
        constant = lipschitz_bound(mlp)
        assert constant.item() == pytest.approx(
            slope * (matrix_norm(first) * matrix_norm(second)).item(), rel=1e-5
        )
        x = torch.randn(2000, 5, 4, generator=generator, dtype=torch.float64)
        y = x + torch.randn(2000, 5, 4, generator=generator, dtype=torch.float64)
        assert (matrix_norm(mlp(x) - mlp(y)) <= constant * matrix_norm(x - y)).all()


def certified(tokens):
    """A lower bound of min_x |Y - 1 x^T|_{1,inf}: medians, and half the distance of two rows."""
    ordered, count = tokens.sort(0).values, len(tokens)
    columns = (ordered[(count + 1) // 2 :].sum(0) - ordered[: count // 2].sum(0)).max()
    return (columns * 0.5 * torch.cdist(tokens, tokens, p=1.0).max()).sqrt().item()


def suppressing_layer(pairs, weight, share):
    """Tokens e_0, e_1 ... e_m, and m zeros; all attend to e_0, except that e_i attends to itself.

    Attention that all have in common: 1 - share on token 0, share / m on each e_i. W_QK is
    ``weight`` times the identity on the channels 1 to m, W_V the identity.
    """
    width, place = pairs + 1, torch.arange(1, pairs + 1)
    rows = torch.zeros(2 * pairs + 1, width, dtype=torch.float64)
    rows[:width] = torch.eye(width, dtype=torch.float64)
    query = torch.zeros(1, width, width, dtype=torch.float64)
    query[0, place, place] = weight
    bias = torch.full((1, width), 60.0, dtype=torch.float64)
    bias[0, 0] += math.log((1.0 - share) / (share / pairs))
    eye = torch.eye(width, dtype=torch.float64).unsqueeze(0)
    return AttentionLayer(query, eye, eye, eye, query_bias=bias), rows


class TestClaims:
    """The sentences of the paper, one by one."""

    def test_small_constants_alone_do_not_collapse(self):
        """4 beta H < sqrt(d_qk), and the tokens stay apart: the size of the residual counts."""
        layers = [identity_layer(0.1, 1.1, 4)] * 40
        bound = collapse_bound(layers, 30.0 * torch.eye(4, dtype=torch.float64))
        assert bound.factor.item() == pytest.approx(0.22)
        assert 4.0 * bound.beta.item() < 4.0**0.5
        assert not bound.forces_collapse
        assert not bound.within_range.any()
        growth = bound.log_residual[1:] - bound.log_residual[:-1]
        torch.testing.assert_close(growth, torch.full_like(growth, math.log(1.1)))

    def test_heads_may_not_be_added_in_a_product_of_norms(self):
        """Two heads beyond the theorem, with logits well within the range that its proof needs.

        Tokens e_0 / 2, -e_0 / 2, which share the attention, and e_1 / 2, which alone prefers the
        first, by tanh(1/4). One head gives a single entry 1, the other a row of entries d^-1/2:
        |W_V W_O|_{1,inf} = 1 for both, but the column sums come from one, the row sums from the
        other. It takes a width of a million to outweigh what the theorem gives away elsewhere.
        """
        width = 2_000_000
        tokens = torch.zeros(3, width, dtype=torch.float64)
        tokens[0, 0], tokens[1, 0], tokens[2, 1] = 0.5, -0.5, 0.5
        query, key = torch.zeros(2, 2, width, 2, dtype=torch.float64)
        # W_QK = e_1 e_0^T; the other channel takes the third token out of the attention.
        query[:, 1, 0], key[:, 0, 0], key[:, 1, 1] = 1.0, 1.0, 1.0
        value = torch.zeros(2, width, 1, dtype=torch.float64)
        value[:, 0] = 1.0
        output = torch.full((2, 1, width), width**-0.5, dtype=torch.float64)
        output[0] = 0.0
        output[0, 0, 0] = 1.0
        bias = torch.tensor([0.0, -120.0], dtype=torch.float64).expand(2, 2)
        layer = AttentionLayer(query, key, value, output, query_bias=bias)
        weights = layer.weights(tokens)[0]
        expected = torch.tensor([[0.5, 0.5, 0.0]] * 3, dtype=torch.float64)
        expected[2, :2] += 0.5 * math.tanh(0.25) * torch.tensor([1.0, -1.0])
        torch.testing.assert_close(weights, expected)
        theorem = 4.0 * 2.0 * 1.0 * residual(tokens).item() ** 3
        result = certified(layer.attend(tokens))
        assert result > 1.1 * theorem
        # With two norms apart, and min(n, d) / 2 = 3 / 2.
        sums = (1.0 + width**-0.5) * (1.0 + width**0.5)
        assert result < math.sqrt(1.5 * sums) * residual(tokens).item() ** 3

    def test_wide_rows_break_a_single_head(self):
        """The condition of lemma A.3 matters: one head, W_V = I, beyond the theorem at n = 8001.

        Half of the tokens let go of token 0, each for itself, with logits of log n: a column sum of
        n / 2 where the theorem has log n. The tokens have |X|_{1,inf} = 1, and their images are of
        two kinds, whose formulas are checked against the layer for few tokens.
        """

        def by_kind(pairs, weight, share):
            each, rise = share / pairs, 1.0 + share / pairs * (math.exp(weight) - 1.0)
            fall = (1.0 - share) * (1.0 - 1.0 / rise)
            own = each * math.exp(weight) / rise
            # Row of e_i: less of token 0 and of the others, more of itself.
            across = fall + (pairs - 1) * each * (1.0 - 1.0 / rise) + own - each
            among = 2.0 * (own - each / rise)
            return pairs * fall, max(across, among)

        layer, tokens = suppressing_layer(50, 5.0, 0.3)
        result = layer.attend(tokens)
        columns, diameter = by_kind(50, 5.0, 0.3)
        ordered = result.sort(0).values
        assert (ordered[51:].sum(0) - ordered[:50].sum(0)).max().item() == pytest.approx(columns)
        assert torch.cdist(result, result, p=1.0).max().item() == pytest.approx(diameter)

        columns, diameter = by_kind(4000, 12.6, 0.15)
        result = math.sqrt(columns * diameter / 2.0)
        assert result > 1.05 * (4.0 * 12.6)
        assert ROW_RANGE < 12.6
        assert result < math.sqrt(4001 / 2) * 12.6

    def test_condition_alone_does_not_collapse(self):
        """Logits within the range, and strong values: tokens +-a grow by W tanh(|a|^2 / 2) a layer.

        From below tanh(|a|^2 / 2) = 1 / W they collapse, from above they grow out of the range.
        """
        layers = [identity_layer(1.0, 20.0, 4)] * 6
        apart = torch.tensor([0.1, -0.1, 0.1, 0.1], dtype=torch.float64)
        tokens = torch.stack([apart, -apart])
        # |a|^2 / 2: 0.02, 0.045 and 0.055 about 1 / 20.
        bound = collapse_bound(layers, torch.stack([tokens, 1.5 * tokens, 2.75**0.5 * tokens]))
        assert bound.within_range[0].all()
        assert not bound.forces_collapse.any()
        assert (bound.log_residual[-1, :2] < bound.log_residual[0, :2]).all()
        assert bound.log_residual[-1, 2] > bound.log_residual[0, 2] + 5.0
        assert not bound.within_range[-1, 2]

    def test_collapse_waits_for_the_condition(self):
        """Strong attention holds the tokens until their logits are within the range, then cubes."""
        layers = random_net(9, 4, 32, 8, strength=100.0)
        tokens = torch.randn(8, 16, 32, dtype=torch.float64)
        bound = collapse_bound(layers, 0.2 * tokens)
        falls = bound.log_residual[1:] - bound.log_residual[:-1]
        assert (bound.row_range[0] > 10.0 * ROW_RANGE).all()
        assert (falls[0] > -1.0).all()
        assert bound.within_range[-1].all()
        assert (falls[-1] < -100.0).all()
        # Here, where values shrink the tokens, layers stay within the range once they are.
        within = bound.within_range
        assert (within[1:] | ~within[:-1]).all()

    def test_skips_keep_the_absolute_residual(self):
        """Equal for W_V = 0, as the paper's lower bound says: it is one of existence.

        For random weights the residual grows in nearly all, not in all, of 800 cases.
        """
        tokens = torch.randn(8, 6, 8, dtype=torch.float64)
        (layer,) = random_net(1, 2, 8, 4)
        off = replace(layer, value=torch.zeros_like(layer.value), value_bias=None)
        off = replace(off, output_bias=None)
        assert hidden_states([off] * 6, tokens, "no_mlp")[-1].equal(tokens)
        grown = []
        for seed in range(100):
            layers = random_net(4, 2, 8, 4, 2.0, seed)
            values = residual(hidden_states(layers, tokens, "no_mlp"), norm="fro")
            grown.append(values[-1] > values[0])
        share = torch.stack(grown).double().mean().item()
        assert 0.9 < share < 1.0

    def test_skips_do_not_keep_the_relative_residual(self):
        """Uniform attention with W_V = I and a skip: the mean doubles, the rest stays.

        So the relative residual halves with every layer: no double exponential, but a collapse.
        """
        eye = torch.eye(5, dtype=torch.float64).unsqueeze(0)
        layer = AttentionLayer(0.0 * eye, eye, eye, eye)
        tokens = torch.randn(7, 5, dtype=torch.float64)
        states = hidden_states([layer] * 30, tokens, "no_mlp")
        absolute = residual(states, norm="fro")
        torch.testing.assert_close(absolute, absolute[:1].expand(31), rtol=1e-6, atol=0.0)
        relative = rank_residual(states, norm="fro")
        torch.testing.assert_close(relative[20:] / relative[19:-1], torch.full((11,), 0.5).double())

    def test_layer_norm_can_prevent_the_collapse(self):
        """It sets the length of the tokens anew: strong logits stay strong. W_V = I / 2.

        Without it the same layers shrink the tokens, until the logits are small and cubing begins.
        """
        layer = identity_layer(4.0, 0.5, 16, attention_norm=Normalization(1e-5))
        tokens = torch.randn(4, 8, 16, dtype=torch.float64)
        with_norm = collapse_curve([layer] * 60, tokens, "attention", norms=True)
        assert (with_norm > 0.5).all()
        without = log_residuals([layer] * 20, tokens)
        assert (without[-1] < -1000.0).all()

    def test_layer_norm_does_not_prevent_it_for_random_weights(self):
        layers = random_net(12, 4, 32, 8, 3.0, attention_norm=Normalization(1e-5))
        tokens = torch.randn(8, 16, 32, dtype=torch.float64)
        assert (collapse_curve(layers, tokens, "attention", norms=True)[-1] < 1e-9).all()
