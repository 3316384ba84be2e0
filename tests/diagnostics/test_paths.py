"""Paths: their number, their sum, what one of them gives, and random ones."""

import itertools
import math

import pytest
import torch
from torch import nn

from spinformer.diagnostics import (
    AttentionLayer,
    attention_layers,
    hidden_states,
    path_decomposition,
    rank_residual,
    residual,
)
from spinformer.nn import Encoder, TransformerBlock

VARIANTS = ["full", "no_mlp", "no_skip", "attention"]


def jolt(model):
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def post_norm():
    layer = nn.TransformerEncoderLayer(8, 2, 10, batch_first=True, activation="gelu")
    return jolt(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


def pre_norm():
    return jolt(Encoder(TransformerBlock(8, 2, 10), 3))


def random_layers(depth=3, heads=(2, 2, 2), width=5, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64) / width**0.5

    return [
        AttentionLayer(
            draw(count, width, 3),
            draw(count, width, 3),
            draw(count, width, 3),
            draw(count, 3, width),
            query_bias=draw(count, 3),
            value_bias=draw(count, 3) if bias else None,
            output_bias=draw(width) if bias else None,
            scale=3**-0.5,
        )
        for count in heads[:depth]
    ]


def tokens_and_mask():
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    return torch.randn(2, 6, 8, dtype=torch.float64), mask


class TestSum:
    @pytest.mark.parametrize("norms", [None, False, True])
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("model", [post_norm, pre_norm])
    def test_all_paths_give_the_network(self, model, variant, norms):
        """Up to rounding: sums of up to 27 terms of order ten."""
        model, (tokens, mask) = model(), tokens_and_mask()
        expected = hidden_states(model, tokens, variant, mask, norms=norms)[-1]
        split = path_decomposition(model, tokens, mask, variant=variant, norms=norms)
        paths, outputs = split.enumerate()
        assert len(paths) == (27 if split.skips else 8)
        for total in (outputs.sum(0), split.by_length().sum(0)):
            torch.testing.assert_close(split.bias + total, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(split.result, expected, rtol=1e-12, atol=1e-12)
        assert outputs[:, mask].eq(0.0).all()

    def test_mask_over_pairs(self):
        model, (tokens, mask) = pre_norm(), tokens_and_mask()
        blocked = torch.ones(6, 6).triu(1).bool()
        expected = hidden_states(model, tokens, "full", mask, src_mask=blocked)[-1]
        split = path_decomposition(model, tokens, mask, variant="full", src_mask=blocked)
        total = split.bias + split.by_length().sum(0)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)

    def test_single_layer_without_a_batch(self):
        (layer,) = random_layers(1)
        tokens = torch.randn(4, 5, dtype=torch.float64)
        split = path_decomposition(layer, tokens)
        assert split.result.shape == (4, 5)
        assert split.by_length().shape == (2, 4, 5)
        torch.testing.assert_close(split.result, layer.attend(tokens))

    def test_bias_is_one_vector_without_norms(self):
        split = path_decomposition(random_layers(), torch.randn(4, 5, dtype=torch.float64))
        assert (split.bias - split.bias[:1]).abs().max() < 1e-14
        assert split.bias.abs().max() > 0.1
        none = path_decomposition(random_layers(bias=False), split.tokens)
        assert none.bias.eq(0.0).all()
        dropped = path_decomposition(random_layers(), split.tokens, biases=False)
        assert dropped.bias.eq(0.0).all()

    def test_gradients(self):
        layers = random_layers()
        tokens = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)

        def total(x):
            split = path_decomposition(layers, x, variant="no_mlp")
            return split.bias + split.by_length().sum(0)

        def forward(x):
            return hidden_states(layers, x, "no_mlp")[-1]

        weight = torch.randn(4, 5, dtype=torch.float64)
        (ours,) = torch.autograd.grad((total(tokens) * weight).sum(), tokens)
        (own,) = torch.autograd.grad((forward(tokens) * weight).sum(), tokens)
        torch.testing.assert_close(ours, own, rtol=1e-11, atol=1e-12)


class TestPath:
    def test_is_a_product_of_matrices(self):
        """Products of attention matrices from the left, of weights from the right, by hand."""
        layers = random_layers()
        tokens = torch.randn(2, 4, 5, dtype=torch.float64)
        split = path_decomposition(layers, tokens, variant="no_mlp")
        states = hidden_states(layers, tokens, "no_mlp")
        attention = [layer.weights(state) for layer, state in zip(layers, states, strict=False)]
        for path in itertools.product([0, 1, None], repeat=3):
            mixing, weight = torch.eye(4).double(), torch.eye(5).double()
            for place, head in enumerate(path):
                if head is not None:
                    mixing = attention[place][:, head] @ mixing
                    weight = weight @ layers[place].value_output[head]
            torch.testing.assert_close(split.output(path), mixing @ tokens @ weight)
            ours, own = split.mixing(path)
            torch.testing.assert_close(ours, mixing.expand_as(ours))
            torch.testing.assert_close(own, weight)
            torch.testing.assert_close(ours.sum(-1), torch.ones_like(ours[..., 0]))

    @pytest.mark.parametrize("model", [post_norm, pre_norm])
    def test_enumerated_and_by_length(self, model):
        model, (tokens, mask) = model(), tokens_and_mask()
        split = path_decomposition(model, tokens, mask, variant="full")
        by_length = split.by_length()
        for length in range(4):
            paths, outputs = split.enumerate(length)
            assert paths == tuple(split.paths(length))
            assert outputs.shape == (len(paths), 2, 6, 8)
            single = torch.stack([split.output(path) for path in paths])
            torch.testing.assert_close(outputs, single, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(by_length[length], outputs.sum(0), rtol=1e-11, atol=1e-12)

    def test_residuals(self):
        model, (tokens, mask) = pre_norm(), tokens_and_mask()
        split = path_decomposition(model, tokens, mask, variant="no_mlp", norms=False)
        assert split.residuals().equal(rank_residual(split.by_length(), mask))
        absolute = split.residuals("fro", relative=False)
        assert absolute.equal(residual(split.by_length(), mask, "fro"))
        assert split.residuals()[0].equal(rank_residual(tokens, mask))

    def test_longer_paths_are_nearer_to_rank_one(self):
        """Small logits: every head is nearly an average, and few are enough."""
        layers = random_layers(3)
        split = path_decomposition(
            layers, 0.3 * torch.randn(8, 6, 5, dtype=torch.float64), variant="no_mlp"
        )
        typical = split.residuals("fro").median(1).values
        assert typical[0] > 0.8
        assert (typical[1:] < 0.3 * typical[:-1]).all()


class TestCount:
    @pytest.mark.parametrize(("depth", "heads"), [(1, 1), (4, 3), (12, 12)])
    def test_binomial(self, depth, heads):
        layers = random_layers(1, (heads,)) * depth
        tokens = torch.randn(3, 5, dtype=torch.float64)
        split = path_decomposition(layers, tokens, variant="no_mlp")
        for length in range(depth + 1):
            assert split.count(length) == math.comb(depth, length) * heads**length
        assert split.count() == (heads + 1) ** depth
        pure = path_decomposition(layers, tokens)
        assert pure.count(depth) == pure.count() == heads**depth
        assert pure.count(depth - 1) == 0

    def test_layers_of_different_heads(self):
        split = path_decomposition(
            random_layers(3, (1, 2, 4)), torch.randn(3, 5, dtype=torch.float64), variant="no_mlp"
        )
        assert [split.count(length) for length in range(4)] == [1, 7, 14, 8]
        assert [len(list(split.paths(length))) for length in range(4)] == [1, 7, 14, 8]
        assert split.heads == (1, 2, 4)
        assert split.depth == 3


class TestSample:
    @pytest.mark.stochastic
    @pytest.mark.parametrize("length", [1, 2, None])
    def test_uniform(self, length, generator):
        """Chi-square over all paths, at five standard deviations."""
        split = path_decomposition(
            random_layers(3, (1, 2, 3)), torch.randn(3, 5, dtype=torch.float64), variant="no_mlp"
        )
        number, draws = split.count(length), 3000
        sample = split.sample(length, draws, generator)
        counts = dict.fromkeys(split.paths(length), 0)
        for path in sample.paths:
            counts[path] += 1
        expected = draws / number
        chi = sum((count - expected) ** 2 / expected for count in counts.values())
        assert chi < (number - 1) + 5.0 * math.sqrt(2.0 * (number - 1))

    @pytest.mark.stochastic
    def test_estimates(self, generator):
        """Unbiased, and as wrong as they say: the mean square of 300 x 20 z-scores is near 1.

        The entries of one estimate are correlated, so that it counts as one: a standard deviation
        of the mean is at most sqrt(2 / 300) = 0.08; Student's 39 degrees of freedom add 5 %.
        """
        tokens = torch.randn(4, 5, dtype=torch.float64)
        split = path_decomposition(random_layers(), tokens, variant="no_mlp")
        exact = split.by_length()[2]
        scores = []
        for _ in range(300):
            sample = split.sample(2, 40, generator)
            assert sample.number == 12
            scores.append((sample.total - exact) / sample.standard_error)
        square = torch.stack(scores).square().mean().item()
        assert abs(square - 1.05) < 5 * 0.08

    def test_outputs_and_generator(self):
        split = path_decomposition(
            random_layers(), torch.randn(2, 4, 5, dtype=torch.float64), variant="no_mlp"
        )
        sample = split.sample(2, 5, torch.Generator().manual_seed(7))
        again = split.sample(2, 5, torch.Generator().manual_seed(7))
        assert sample.paths == again.paths
        assert sample.outputs.equal(torch.stack([split.output(path) for path in sample.paths]))
        assert split.sample(3, 1).standard_error.isnan().all()
        only = split.sample(0, 4)
        assert only.total.equal(split.tokens)
        assert only.standard_error.eq(0.0).all()

    def test_many_layers(self):
        """13^12 paths: their sums by length are exact without any enumeration."""
        layers = random_layers(1, (12,)) * 12
        tokens = 0.1 * torch.randn(4, 5, dtype=torch.float64)
        split = path_decomposition(layers, tokens, variant="no_mlp")
        total = split.bias + split.by_length().sum(0)
        torch.testing.assert_close(total, split.result, rtol=1e-10, atol=1e-10)
        with pytest.raises(ValueError, match="23298085122481 paths, more than limit=100000"):
            split.enumerate()
        assert split.sample(11, 3).outputs.isfinite().all()


class TestErrors:
    def test_paths(self):
        tokens = torch.randn(3, 5, dtype=torch.float64)
        split = path_decomposition(random_layers(), tokens)
        with pytest.raises(ValueError, match="has 2 entries for 3 layers"):
            split.output((0, 1))
        with pytest.raises(ValueError, match="skips layer 1, which has no skip"):
            split.output((0, None, 1))
        with pytest.raises(ValueError, match="head 2 of layer 2 does not exist"):
            split.output((0, 0, 2))
        with pytest.raises(ValueError, match="paths have 0 to 3 heads"):
            split.count(4)
        with pytest.raises(ValueError, match="no path of length 2"):
            split.sample(2, 1)
        with pytest.raises(ValueError, match="at least one path"):
            split.sample(3, 0)
        with_norms = path_decomposition(post_norm(), torch.randn(3, 8).double(), variant="full")
        with pytest.raises(ValueError, match="not of the form P X W"):
            with_norms.mixing((0, 0, 0))
        assert attention_layers(post_norm())[0].heads == 2


def test_repr():
    _, mask = tokens_and_mask()
    found = path_decomposition(
        random_layers(), torch.randn(2, 6, 5, dtype=torch.float64), mask=mask
    )
    assert repr(found) == ("PathDecomposition(tokens=(2, 6, 5), depth=3, heads=(2, 2, 2), paths=8)")
