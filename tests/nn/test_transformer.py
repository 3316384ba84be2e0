"""The plain block against torch's own layer, and its options."""

import pytest
import torch
from torch import nn

from spinformer.nn.transformer import TransformerBlock


def twin(block: TransformerBlock) -> nn.TransformerEncoderLayer:
    """torch's pre-norm layer with the parameters of ``block``."""
    peer = nn.TransformerEncoderLayer(
        block.d_model,
        block.nhead,
        block.mlp.linear1.out_features,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
        dtype=torch.float64,
    )
    own = block.state_dict()
    names = {
        "self_attn.in_proj_weight": "self_attn.in_proj.weight",
        "self_attn.in_proj_bias": "self_attn.in_proj.bias",
        "linear1.weight": "mlp.linear1.weight",
        "linear1.bias": "mlp.linear1.bias",
        "linear2.weight": "mlp.linear2.weight",
        "linear2.bias": "mlp.linear2.bias",
    }
    peer.load_state_dict({name: own[names.get(name, name)] for name in peer.state_dict()})
    return peer


@pytest.mark.parametrize("fused", [True, False])
def test_equals_the_layer_of_torch(fused):
    block = TransformerBlock(12, 3, 20, fused=fused, dtype=torch.float64)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    peer = twin(block)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(block(x), peer(x))
    pairs = torch.randn(6, 5, 5, dtype=torch.float64)
    pairs[:, 0, 3] = -torch.inf
    torch.testing.assert_close(block(x, src_mask=pairs), peer(x, src_mask=pairs))
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = peer(x, src_key_padding_mask=padding)
    torch.testing.assert_close(block(x, src_key_padding_mask=padding)[~padding], expected[~padding])


def test_report_holds_the_attention():
    block = TransformerBlock(8, 2, dtype=torch.float64)
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    padding = torch.tensor([[False] * 4, [True] * 4])
    out, report = block(x, None, padding, True, return_report=True)
    torch.testing.assert_close(out, block(x, None, padding, True))
    torch.testing.assert_close(report.couplings[0].sum(-1), torch.ones(2, 4, dtype=torch.float64))
    assert (report.couplings[0].triu(1) == 0).all()
    assert (report.couplings[1] == 0).all()


def test_dropout_is_for_training():
    block = TransformerBlock(8, 2, dropout=0.5)
    x = torch.randn(2, 4, 8)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_query_key_norm_bounds_the_logits():
    """With unit gains |q| = |k| = sqrt(d_h) = 2, so that logits are between -2 and 2."""
    block = TransformerBlock(8, 2, qk_norm=True)
    _, report = block(1e3 * torch.randn(2, 4, 8), return_report=True)
    assert report.couplings.min() >= torch.tensor([-2.0, 2, 2, 2]).softmax(0)[0] * (1 - 1e-5)


@pytest.mark.parametrize("options", [{"norm": "batch"}, {"activation": "tanh"}])
def test_choices(options):
    with pytest.raises(ValueError, match=r"is not an option \(choose from '"):
        TransformerBlock(8, 2, **options)


def test_options_change_the_parameters():
    names = {name for name, _ in TransformerBlock(8, 2, bias=False, norm="rms").named_parameters()}
    assert not any("bias" in name for name in names)
    assert TransformerBlock(8, 2).mlp.linear1.out_features == 32
