"""The merged masks of a forward pass."""

import pytest
import torch

from spinformer.nn.masks import Layout, Masks, additive, check_heads, merge_masks

X = torch.zeros(2, 4, 6)


def test_nothing_to_merge():
    masks = merge_masks(X, 3)
    assert masks == Masks(None, None, None)
    assert masks.symmetric
    assert masks.ignored() is None
    assert masks.unbonded() is None
    assert additive(masks, torch.float32) is None
    assert masks.clear(X) is X


def test_causal_joins_the_mask_over_pairs():
    pairs = torch.zeros(4, 4, dtype=torch.bool)
    pairs[2, 0] = True
    masks = merge_masks(X, 3, pairs, is_causal=True)
    expected = torch.ones(4, 4).triu(1).bool() | pairs
    assert torch.equal(masks.blocked[0, 0], expected)
    assert not masks.symmetric


def test_heads_are_the_fast_axis_of_a_flat_mask():
    """As in torch: (B * nhead, N, N) holds all heads of the first sequence first."""
    flat = torch.rand(6, 4, 4) < 0.5
    masks = merge_masks(X, 3, flat)
    assert torch.equal(masks.blocked[1, 2], flat[5])


def test_symmetry_regards_present_tokens_only():
    pairs = torch.zeros(4, 4, dtype=torch.bool)
    pairs[0, 3] = True
    assert not merge_masks(X, 3, pairs).symmetric
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[:, 3] = True
    assert merge_masks(X, 3, pairs, padding).symmetric
    assert merge_masks(X, 3, pairs | pairs.mT).symmetric
    assert merge_masks(X, 3, src_key_padding_mask=padding).symmetric
    assert not merge_masks(X, 3, torch.rand(4, 4)).symmetric
    assert merge_masks(X, 3, torch.zeros(4, 4), padding).symmetric


def test_floating_masks_split():
    pairs = torch.tensor([[0.0, -torch.inf], [0.5, torch.finfo(torch.float32).min]])
    padding = torch.tensor([[0.0, -1.0], [-torch.inf, 0.0]])
    masks = merge_masks(X[:, :2], 3, pairs, padding)
    assert torch.equal(masks.absent, torch.tensor([[False, False], [True, False]]))
    assert torch.equal(masks.blocked[0, 0], torch.tensor([[False, True], [False, True]]))
    assert masks.bias.shape == (2, 1, 2, 2)
    assert torch.equal(masks.bias[0, 0], torch.tensor([[0.0, 0.0], [0.5, 0.0]]))
    assert not masks.symmetric
    logits = additive(masks, torch.float32)
    assert torch.equal(logits[0, 0], torch.tensor([[0.0, -torch.inf], [0.5, -torch.inf]]))
    assert (logits[1, 0] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_additive_mask_keeps_the_dtype(dtype):
    masks = merge_masks(X, 3, is_causal=True)
    assert additive(masks, dtype).dtype == dtype


def test_unbonded_holds_rows_and_columns_of_the_absent():
    padding = torch.tensor([[False, False, True, False]] * 2)
    masks = merge_masks(X, 3, src_key_padding_mask=padding)
    expected = padding[:, None, None, :] | padding[:, None, :, None]
    assert torch.equal(masks.unbonded(), expected)


def test_layouts():
    x = torch.randn(4, 2, 6)
    assert torch.equal(Layout(True, False).enter(x), x.transpose(0, 1))
    for layout in (Layout(True, False), Layout(True, True)):
        assert torch.equal(layout.leave(layout.enter(x)), x)
    assert torch.equal(Layout(False, True).leave(Layout(False, True).enter(x[0])), x[0])


def test_heads():
    assert check_heads(12, 4) == 3
    for d_model, nhead in ((12, 5), (12, 0), (0, 1)):
        with pytest.raises(ValueError, match=f"d_model={d_model} .* nhead={nhead}"):
            check_heads(d_model, nhead)
