"""The description of attention layers: against the models it describes, and against loops."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from spinformer.diagnostics import (
    AttentionLayer,
    FeedForward,
    Normalization,
    attention_layers,
    collapse_curve,
    hidden_states,
    path_decomposition,
    rank_residual,
    residual,
    states_by_layer,
)
from spinformer.nn import Encoder, EnergyDescentBlock, FreeEnergyBlock, TransformerBlock

VARIANTS = ["full", "no_mlp", "no_skip", "attention"]
# The same sums in another order, some thousand roundings on entries of order one.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}


def absent(batch=2, count=7, left=4):
    mask = torch.zeros(batch, count, dtype=torch.bool)
    mask[-1, left:] = True
    return mask


def jolt(model):
    """Biases and gains leave 0 and 1, where a mistake in them would not show."""
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


class Classifier(nn.Module):
    """A model around a stack, with an embedding of its own."""

    def __init__(self, encoder):
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.dropout = nn.Dropout(0.5)
        self.encoder = encoder

    def forward(self, numbers):
        tokens = self.dropout(self.embedding(numbers))
        batch_first = self.encoder.layers[0].self_attn.batch_first
        return self.encoder(tokens if batch_first else tokens.transpose(0, 1))


def torch_encoder(norm_first=False, batch_first=True, bias=True, activation="gelu"):
    layer = nn.TransformerEncoderLayer(
        12, 3, 20, 0.1, activation, norm_first=norm_first, batch_first=batch_first, bias=bias
    )
    return jolt(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


def random_layer(heads=2, width=6, head=3, seed=0, **parts):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return AttentionLayer(
        draw(heads, width, head),
        draw(heads, width, head),
        draw(heads, width, head),
        draw(heads, head, width),
        query_bias=draw(heads, head),
        key_bias=draw(heads, head),
        value_bias=draw(heads, head),
        output_bias=draw(width),
        scale=head**-0.5,
        **parts,
    )


class TestAgainstTheModels:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("norm_first", [False, True])
    @pytest.mark.parametrize("batch_first", [False, True])
    def test_torch(self, norm_first, batch_first, dtype):
        model = torch_encoder(norm_first, batch_first).to(dtype)
        tokens, mask = torch.randn(2, 7, 12, dtype=dtype), absent()
        states = hidden_states(model, tokens, mask=mask)
        entering = tokens if batch_first else tokens.transpose(0, 1)
        own = states_by_layer(model, entering, src_key_padding_mask=mask)
        own = own if batch_first else own.transpose(1, 2)
        assert states.shape == (4, 2, 7, 12)
        assert (states - own)[:, ~mask].abs().max() < TOLERANCE[dtype]
        assert states[:, mask].eq(0.0).all()

    @pytest.mark.parametrize("activation", ["relu", nn.functional.silu, torch.sigmoid])
    def test_torch_without_biases(self, activation):
        model = torch_encoder(bias=False, activation=activation).double()
        tokens = torch.randn(2, 7, 12, dtype=torch.float64)
        own = states_by_layer(model, tokens)
        assert (hidden_states(model, tokens) - own).abs().max() < 1e-13

    @pytest.mark.parametrize(
        "options",
        [{}, {"qk_norm": True, "norm": "rms", "bias": False, "activation": "silu"}],
        ids=["default", "other"],
    )
    def test_own_blocks(self, options):
        model = jolt(Encoder(TransformerBlock(12, 3, **options), 3)).double()
        tokens, mask = torch.randn(2, 7, 12, dtype=torch.float64), absent()
        blocked = torch.ones(7, 7).triu(1).bool()
        for pairs in (None, blocked, torch.randn(7, 7).double().masked_fill(blocked, -math.inf)):
            states = hidden_states(model, tokens, mask=mask, src_mask=pairs)
            own = states_by_layer(model, tokens, src_mask=pairs, src_key_padding_mask=mask)
            assert (states - own)[1:].abs().max() < 1e-13

    def test_model_around_a_stack(self):
        """Token numbers go through the model's own embedding, in evaluation mode and back."""
        model, numbers = (
            Classifier(torch_encoder(batch_first=False)).train(),
            torch.randint(30, (2, 7)),
        )
        model.encoder.eval()
        states = hidden_states(model, numbers)
        assert model.training
        assert not model.encoder.training
        assert states[0].equal(model.embedding(numbers))
        assert states.equal(hidden_states(model.encoder, model.embedding(numbers)))

    def test_gradients_reach_the_parameters(self):
        model = torch_encoder().double()
        tokens = torch.randn(2, 5, 12, dtype=torch.float64)
        weight = model.layers[0].self_attn.in_proj_weight
        (gradient,) = torch.autograd.grad(hidden_states(model, tokens)[-1].square().sum(), weight)
        (own,) = torch.autograd.grad(model(tokens).square().sum(), weight)
        torch.testing.assert_close(gradient, own, rtol=1e-10, atol=1e-10)


class TestVariants:
    def test_attention_by_loops(self):
        layer, tokens = random_layer(), torch.randn(4, 6, dtype=torch.float64)
        expected = layer.output_bias.expand(4, 6).clone()
        for head in range(2):
            queries = tokens @ layer.query[head] + layer.query_bias[head]
            keys = tokens @ layer.key[head] + layer.key_bias[head]
            for i in range(4):
                logits = torch.stack([queries[i] @ keys[j] for j in range(4)]) / math.sqrt(3.0)
                weights = logits.exp() / logits.exp().sum()
                for j in range(4):
                    value = tokens[j] @ layer.value[head] + layer.value_bias[head]
                    expected[i] += weights[j] * (value @ layer.output[head])
        torch.testing.assert_close(layer.attend(tokens), expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("norm_first", [False, True])
    def test_table_of_the_module(self, norm_first):
        """Every variant is the formula that the module's table gives it."""
        generator = torch.Generator().manual_seed(3)
        first = torch.randn(6, 9, generator=generator, dtype=torch.float64)
        second = torch.randn(9, 6, generator=generator, dtype=torch.float64)
        layer = random_layer(
            mlp=FeedForward(first, second, torch.tanh),
            attention_norm=Normalization(1e-5, bias=torch.linspace(0, 1, 6).double()),
            mlp_norm=Normalization(1e-3, weight=torch.linspace(1, 2, 6).double()),
            norm_first=norm_first,
        )
        x = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
        a, f, n1, n2 = layer.attend, layer.mlp, layer.attention_norm, layer.mlp_norm
        if norm_first:
            z = x + a(n1(x))
            expected = {"full": z + f(n2(z)), "no_mlp": z, "no_skip": f(n2(a(n1(x))))}
        else:
            z = n1(x + a(x))
            expected = {"full": n2(z + f(z)), "no_mlp": z, "no_skip": n2(f(n1(a(x))))}
        expected["attention"] = a(x)
        for variant in VARIANTS:
            torch.testing.assert_close(layer(x, variant), expected[variant], rtol=0.0, atol=0.0)
        bare = {"full": x + a(x) + f(x + a(x)), "no_mlp": x + a(x), "no_skip": f(a(x))}
        for variant, value in bare.items():
            torch.testing.assert_close(layer(x, variant, norms=False), value, rtol=0.0, atol=0.0)
        with_norm = a(n1(x)) if norm_first else n1(a(x))
        assert layer(x, "attention", norms=True).equal(with_norm)

    def test_norms_against_torch(self):
        weight, bias = torch.rand(6).double(), torch.rand(6).double()
        x = torch.randn(3, 4, 6, dtype=torch.float64)
        layer = nn.functional.layer_norm(x, (6,), weight, bias, 1e-3)
        torch.testing.assert_close(Normalization(1e-3, weight, bias)(x), layer)
        rms = nn.functional.rms_norm(x, (6,), weight, 1e-3)
        torch.testing.assert_close(Normalization(1e-3, weight, centered=False)(x), rms)

    def test_frozen_mlp(self):
        """Linear with the gates of its own tokens; a unit at rest passes nothing on."""
        first, second = torch.randn(6, 4).double(), torch.randn(4, 6).double()
        mlp = FeedForward(first, second, torch.sigmoid, torch.ones(4).double())
        x = torch.randn(3, 6, dtype=torch.float64)
        gates = mlp.gates(x)
        torch.testing.assert_close(mlp.frozen(x, gates), mlp(x))
        hidden = x @ first + 1.0
        torch.testing.assert_close(gates, (hidden.sigmoid() - 0.5) / hidden)
        rest = replace(mlp, first_bias=None)
        assert rest.gates(torch.zeros_like(x)).eq(0.0).all()

    def test_biases_of_values_shift_all_tokens_alike(self):
        layer, tokens = random_layer(), torch.randn(3, 5, 6, dtype=torch.float64)
        with_bias, without = layer.attend(tokens), replace(layer, value_bias=None, output_bias=None)
        shift = with_bias - without.attend(tokens)
        assert (shift - shift[:, :1]).abs().max() < 1e-13
        assert shift.abs().max() > 0.1
        free = hidden_states([layer], tokens, "attention", biases=False)
        bare = replace(without, query_bias=None, key_bias=None)
        assert free[1].equal(bare.attend(tokens))

    def test_query_and_key_weights(self):
        layer, tokens = random_layer().without_biases(), torch.randn(5, 6, dtype=torch.float64)
        logits = layer.scale * (tokens @ layer.query_key @ tokens.T)
        torch.testing.assert_close(layer.weights(tokens), logits.softmax(-1))
        mixed = (layer.weights(tokens) @ tokens @ layer.value_output).sum(0)
        torch.testing.assert_close(layer.attend(tokens), mixed)
        assert (layer.heads, layer.width) == (2, 6)


class TestMasks:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_absent_tokens_change_nothing(self, variant):
        model, mask = torch_encoder(norm_first=True).double(), absent()
        tokens = torch.randn(2, 7, 12, dtype=torch.float64)
        tokens[mask] = math.nan
        tokens.requires_grad_()
        states = hidden_states(model, tokens, variant, mask)
        alone = hidden_states(model, tokens[1:, :4], variant)
        torch.testing.assert_close(states[:, 1:, :4], alone, rtol=1e-11, atol=1e-12)
        (gradient,) = torch.autograd.grad(states[-1].square().sum(), tokens)
        assert gradient.isfinite().all()
        curve = collapse_curve(model, tokens, variant, mask)
        torch.testing.assert_close(curve[:, 1:], rank_residual(alone), rtol=1e-6, atol=1e-12)

    def test_nan_stays_in_its_sequence(self):
        model = torch_encoder().double()
        tokens = torch.randn(3, 7, 12, dtype=torch.float64)
        tokens[1, 2, 3] = math.nan
        states = hidden_states(model, tokens)
        assert states[:, [0, 2]].isfinite().all()
        assert states[-1, 1].isnan().all()

    def test_token_that_hears_nobody(self):
        layer = random_layer()
        tokens = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
        blocked = torch.tensor([[True] * 3, [False] * 3, [False, True, True]])
        weights = layer.weights(tokens, src_mask=blocked)
        assert weights[:, 0].eq(0.0).all()
        torch.testing.assert_close(weights[:, 1:].sum(-1), torch.ones(2, 2).double())
        (gradient,) = torch.autograd.grad(weights.square().sum(), tokens)
        assert gradient.isfinite().all()


class TestStates:
    @pytest.mark.parametrize(
        "block",
        [
            lambda: FreeEnergyBlock(8, 2, approximation="mean_field", couplings="softmax"),
            lambda: EnergyDescentBlock(8, 2),
        ],
        ids=["free energy", "energy descent"],
    )
    def test_spin_and_energy_blocks(self, block):
        encoder, tokens = Encoder(block(), 3).double(), torch.randn(2, 5, 8, dtype=torch.float64)
        mask = absent(2, 5, 3)
        states = states_by_layer(encoder, tokens, src_key_padding_mask=mask)
        assert states.shape == (4, 2, 5, 8)
        assert states[-1].equal(encoder(tokens, src_key_padding_mask=mask))
        assert rank_residual(states, mask).isfinite().all()
        with pytest.raises(TypeError, match="is no layer that is known"):
            hidden_states(encoder, tokens)

    def test_functions_and_tuples(self):
        states = states_by_layer(
            [lambda x: (2.0 * x, None), lambda x: x + 1.0], torch.ones(1, 2, 3)
        )
        assert states[:, 0, 0, 0].tolist() == [1.0, 2.0, 3.0]

    def test_layer_that_changes_the_shape(self):
        with pytest.raises(ValueError, match=r"layer 1 maps tokens of shape \(1, 2, 3\)"):
            states_by_layer([lambda x: x, lambda x: x[..., :2]], torch.ones(1, 2, 3))


class TestCurve:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_is_the_residual_of_the_states(self, variant):
        model, tokens = torch_encoder().double(), torch.randn(2, 7, 12, dtype=torch.float64)
        states = hidden_states(model, tokens, variant)
        assert collapse_curve(model, tokens, variant).equal(rank_residual(states))
        absolute = collapse_curve(model, tokens, variant, norm="fro", relative=False)
        assert absolute.equal(residual(states, norm="fro"))

    def test_pure_attention_collapses_and_the_model_does_not(self):
        model, tokens = torch_encoder().double(), torch.randn(8, 7, 12, dtype=torch.float64)
        assert (collapse_curve(model, tokens, "attention")[-1] < 0.01).all()
        assert (collapse_curve(model, tokens, "full")[-1] > 0.1).all()

    def test_position_bias_keeps_tokens_apart(self):
        """The same layers with a term of the logits that knows the positions: slow, not cubic.

        Weights keep the length of the tokens. Without the term the residual is below 1e-5 after
        layer 3, and lost in rounding after the next; with it no layer takes more than 90 %.
        """
        generator = torch.Generator().manual_seed(0)
        layers = [random_layer(4, 16, 4, seed).without_biases() for seed in range(8)]
        layers = [
            replace(layer, query=0.1 * layer.query, value=layer.value / 16.0) for layer in layers
        ]
        bias = 2.0 * torch.randn(4, 9, 9, generator=generator, dtype=torch.float64)
        aware = [replace(layer, position=lambda queries: bias) for layer in layers]
        tokens = 0.5 * torch.randn(4, 9, 16, generator=generator, dtype=torch.float64)
        plain = collapse_curve(layers, tokens, "attention", norm="fro")
        slow = collapse_curve(aware, tokens, "attention", norm="fro")
        assert (plain[3] < 1e-5).all()
        assert (plain[4] < 1e-12).all()
        rates = slow[1:] / slow[:-1]
        assert (rates[3:] > 0.1).all()
        assert (slow[-1] > 1e-4).all()


class TestErrors:
    def test_unknown(self):
        with pytest.raises(
            TypeError, match=r"Linear is no model whose layers are known.* pass the stack itself"
        ):
            attention_layers(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="nearest is 'no_skip'"):
            hidden_states(torch_encoder(), torch.zeros(1, 2, 12), "no_skips")
        with pytest.raises(ValueError, match="no layers"):
            attention_layers([])

    def test_inputs(self):
        model = torch_encoder()
        with pytest.raises(ValueError, match=r"\(1, 2, 5\) for layers of width 12"):
            hidden_states(model, torch.zeros(1, 2, 5))
        with pytest.raises(ValueError, match="inputs are torch.float64, the weights torch.float32"):
            hidden_states(model, torch.zeros(1, 2, 12, dtype=torch.float64))
        with pytest.raises(TypeError, match="inputs is a list"):
            hidden_states(model, [[1, 2]])
        with pytest.raises(TypeError, match="layers alone have no embedding"):
            hidden_states(attention_layers(model), torch.zeros(1, 2, dtype=torch.long))
        with pytest.raises(TypeError, match="mask must be a boolean"):
            hidden_states(model, torch.zeros(1, 2, 12), mask=torch.zeros(1, 2))
        with pytest.raises(ValueError, match=r"mask has shape \(1, 3\)"):
            hidden_states(model, torch.zeros(1, 2, 12), mask=torch.zeros(1, 3).bool())
        both = {"src": torch.zeros(1, 2, 12), "attention_mask": torch.ones(1, 2)}
        with pytest.raises(ValueError, match="both given"):
            hidden_states(model, both, mask=torch.zeros(1, 2, dtype=torch.bool))

    def test_model_that_differs_from_its_description(self):
        """A mask that the model knows and the description doesn't: found where the model is run."""
        model, tokens, mask = torch_encoder(), torch.randn(2, 7, 12), absent()
        known = {"src": tokens, "src_key_padding_mask": mask}
        with pytest.raises(ValueError, match="TransformerEncoder differs from its description"):
            hidden_states(model, known)
        states = hidden_states(model, known, mask=mask)
        assert states.equal(hidden_states(model, tokens, mask=mask))
        causal = torch.ones(7, 7).triu(1).bool()
        known = {"src": tokens, "mask": causal}
        for function in (hidden_states, collapse_curve, path_decomposition):
            with pytest.raises(ValueError, match="differs from its description"):
                function(model, known)
        assert hidden_states(model, known, src_mask=causal).shape == (4, 2, 7, 12)

    def test_nothing_is_left_behind(self):
        """Whether the model succeeds or fails: no hook, and the mode of every module."""
        model = Classifier(torch_encoder()).train()
        model.encoder.layers[1].eval()
        modes = [module.training for module in model.modules()]
        hidden_states(model, torch.zeros(1, 3, dtype=torch.long))
        with pytest.raises(IndexError):
            hidden_states(model, torch.full((1, 3), 30))
        assert [module.training for module in model.modules()] == modes
        first = model.encoder.layers[0]
        assert not first._forward_hooks
        assert not first._forward_pre_hooks

    def test_options_that_are_not_described(self):
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 3), 1)
        with pytest.raises(ValueError, match="TransformerDecoderLayer is a decoder's"):
            attention_layers(decoder)
        layer = nn.TransformerEncoderLayer(12, 3)
        layer.self_attn = nn.MultiheadAttention(12, 3, add_zero_attn=True)
        with pytest.raises(ValueError, match="add_zero_attn"):
            attention_layers(layer)
