"""Stacks of blocks."""

import pytest
import torch
from torch import Tensor, nn

from spinformer.nn.encoder import Encoder
from spinformer.nn.energy_descent import EnergyDescentBlock
from spinformer.nn.transformer import TransformerBlock


def test_layers_are_independent():
    block = TransformerBlock(8, 2)
    encoder = Encoder(block, 3)
    weights = [layer.mlp.linear1.weight for layer in encoder.layers]
    assert torch.equal(weights[0], block.mlp.linear1.weight)
    assert weights[0] is not block.mlp.linear1.weight
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    x = torch.randn(2, 4, 8)
    expected = x
    for layer in encoder.layers:
        expected = layer(expected)
    torch.testing.assert_close(encoder(x), expected)


def test_layers_of_torch():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = Encoder(layer, 2)
    first, second = (dict(layer.named_parameters()) for layer in encoder.layers)
    assert not torch.equal(first["linear1.weight"], second["linear1.weight"])
    assert not torch.equal(first["self_attn.in_proj_weight"], second["self_attn.in_proj_weight"])
    assert encoder(torch.randn(2, 4, 8)).shape == (2, 4, 8)


def test_tied_block_is_one_layer():
    encoder = Encoder(EnergyDescentBlock(8, 2, tied=True), 3)
    assert encoder.layers[0] is encoder.layers[2]
    count = sum(p.numel() for p in EnergyDescentBlock(8, 2).parameters())
    assert sum(p.numel() for p in encoder.parameters()) == count


def test_source_is_the_input_of_the_stack():
    encoder = Encoder(EnergyDescentBlock(8, 2, data_term="network"), 2)
    x = torch.randn(2, 4, 8)
    first, second = encoder.layers
    torch.testing.assert_close(encoder(x), second(first(x, source=x), source=x))
    assert not torch.allclose(encoder(x), second(first(x)))


class Hooked(nn.Module):
    """Doubles, between a logarithm and an exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Identity()
        self.self_attn.batch_first = True
        self.gain = nn.Parameter(torch.tensor(2.0))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 2.0)

    def embed(self, x: Tensor) -> Tensor:
        return (x + self.gain).log()

    def readout(self, x: Tensor) -> Tensor:
        return (x * self.gain / 2).exp()

    def forward(self, x: Tensor, **masks: object) -> Tensor:
        return x * self.gain


def test_embed_and_readout_run_once():
    encoder = Encoder(Hooked(), 3)
    x = torch.rand(2, 4, 8)
    x[1, 2:] = torch.nan
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[1, 2:] = True
    out = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(out[~padding], (x[~padding] + 2) ** 8)
    assert (out[padding] == 0).all()
    gradients = torch.autograd.grad(out.sum(), list(encoder.parameters()))
    assert all(gradient.isfinite() for gradient in gradients)


def test_final_norm_leaves_the_absent_at_zero():
    norm = nn.LayerNorm(8)
    nn.init.ones_(norm.bias)
    encoder = Encoder(TransformerBlock(8, 2), 1, norm)
    padding = torch.tensor([[False, True], [True, True]])
    x = torch.randn(2, 2, 8)
    out = encoder(x, src_key_padding_mask=padding)
    assert (out[padding] == 0).all()
    torch.testing.assert_close(out[0, 0], norm(encoder.layers[0](x[0, :1]))[0])


class Bare(nn.Module):
    """Holds a parameter that nothing redraws."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(()))


def test_errors():
    with pytest.raises(ValueError, match="num_layers=0"):
        Encoder(TransformerBlock(8, 2), 0)
    with pytest.raises(ValueError, match="'gain' of Bare: give the block a method"):
        Encoder(Bare(), 2)
    with pytest.raises(
        TypeError, match=r"is no module: .* Encoder\(TransformerBlock\(64, 4\), 3\)"
    ):
        Encoder(TransformerBlock, 3)
    with pytest.raises(TypeError, match=r"block='block' is no module: .*FreeEnergyBlock"):
        Encoder("block", 3)
    with pytest.raises(TypeError, match="the nearest is 'num_layers'"):
        Encoder(TransformerBlock(8, 2), num_layer=2)
