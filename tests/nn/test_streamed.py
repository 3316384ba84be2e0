"""Couplings worked through in blocks: the matrices they stand for, and their derivatives."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from spinformer.nn import FreeEnergyBlock, streamed
from spinformer.nn.couplings import FusedHeads
from spinformer.nn.masks import merge_masks
from spinformer.nn.streamed import Bonds, StreamedHeads, attention_weights

F64 = torch.float64
B, H, N, D = 2, 2, 5, 3
MATRIX = 8 * N * N  # bytes of one head
# Everything at once, one sequence, one head, two rows of five, one row.
KEPT = (None, "weights", "softmax")
BLOCKS = (2**20, H * MATRIX, MATRIX, 2 * 8 * N, 8)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    query, key, state = torch.randn(3, B, H, N, D, generator=generator, dtype=F64)
    strength = torch.tensor([0.5, 2.0], dtype=F64)
    return [t.clone().requires_grad_() for t in (query, key, strength, state)]


def bonds(name):
    generator = torch.Generator().manual_seed(1)
    blocked, bias = None, None
    if name in ("causal", "biased"):  # the first token hears nobody
        blocked = torch.ones(N, N, dtype=torch.bool).triu(1)[None, None]
    if name == "padded":
        absent = torch.zeros(B, 1, N, dtype=torch.bool)
        absent[0, 0, 3] = True
        blocked = absent[..., None] | absent[..., None, :]
    if name == "biased":
        bias = torch.randn(B, 1, N, N, generator=generator, dtype=F64)
    return Bonds(N, blocked, bias)


def reference(query, key, strength, state, which, symmetric):
    """The textbook formula: a softmax over the neighbours, row by row."""
    logits = query @ key.mT / D**0.5
    if which.bias is not None:
        logits = logits + which.bias
    ignored = torch.eye(N, dtype=torch.bool)
    if which.blocked is not None:
        ignored = ignored | which.blocked
    weights = torch.where(ignored, 0.0, logits.exp())
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    if symmetric:
        weights = (weights + weights.mT) / 2
    return strength[:, None, None] * weights @ state


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", ["all", "causal", "padded", "biased"])
@pytest.mark.parametrize(("size", "kept"), [*itertools.product(BLOCKS, KEPT)])
def test_products_and_their_derivatives(tensors, monkeypatch, size, kept, name, symmetric):
    monkeypatch.setattr(streamed, "_BLOCK", size)
    which = bonds(name)
    couplings = StreamedHeads(*tensors[:3], which, symmetric)
    couplings = couplings if kept is None else couplings.kept(softmax=kept == "softmax")
    state = tensors[3]
    product, expected = couplings.apply(state), reference(*tensors, which, symmetric)
    close = {"rtol": 1e-12, "atol": 1e-14}  # sums of five terms of order one
    torch.testing.assert_close(product, expected, **close)
    with torch.no_grad():
        torch.testing.assert_close(couplings.apply(state), expected, **close)
    cotangent = torch.randn(product.shape, generator=torch.Generator().manual_seed(2), dtype=F64)
    torch.testing.assert_close(
        torch.autograd.grad(product, tensors, cotangent, retain_graph=True),
        torch.autograd.grad(expected, tensors, cotangent),
        **close,
    )
    # <c, J s> = <J^T c, s>, and the transpose has derivatives of its own.
    turned = couplings.transpose().apply(cotangent)
    assert (turned * state).sum().item() == pytest.approx((cotangent * product).sum().item())
    torch.testing.assert_close(
        torch.autograd.grad((turned * state.detach()).sum(), tensors[:3]),
        torch.autograd.grad((product * cotangent).sum(), tensors[:3]),
        **close,
    )


@pytest.mark.parametrize("symmetric", [False, True])
def test_two_derivatives(tensors, symmetric):
    def product(query, key, strength, state):
        heads = StreamedHeads(query, key, strength, bonds("causal"), symmetric)
        # The state depends on the queries too, as a solution does.
        return heads.kept().apply(state + query.sin())

    assert gradcheck(product, tensors)
    assert gradgradcheck(product, tensors)


def test_adjoint_of_the_state_leaves_queries_and_keys_alone(tensors, monkeypatch):
    couplings = StreamedHeads(*tensors[:3], Bonds(N), False).kept()
    product = couplings.apply(tensors[3])
    monkeypatch.setattr(StreamedHeads, "_pull", None)
    torch.autograd.grad(product.sum(), tensors[3])


def test_interface(tensors):
    which = bonds("padded")
    for symmetric in (False, True):
        couplings = StreamedHeads(*tensors[:3], which, symmetric).kept()
        dense = couplings.to_dense()
        assert couplings.num_spins == N and couplings.batch_shape == (B, H)
        assert couplings.is_symmetric == symmetric
        again = couplings.with_tensors(*couplings.tensors())
        for other, matrix in (
            (again, dense),
            (couplings.transpose(), dense.mT),
            (couplings.symmetrize(), (dense + dense.mT) / 2),
        ):
            torch.testing.assert_close(other.to_dense(), matrix)
            torch.testing.assert_close(other.apply(tensors[3]), matrix @ tensors[3])
        # More systems than couplings, and none at all.
        many = torch.stack([tensors[3], 2 * tensors[3]])
        torch.testing.assert_close(couplings.apply(many), dense @ many)
    nothing = StreamedHeads(*(t[..., :0, :] for t in tensors[:2]), tensors[2], Bonds(0), False)
    assert nothing.kept().apply(tensors[3][..., :0, :]).shape == (B, H, 0, D)


def test_one_token_has_no_neighbour(tensors):
    query, key, strength, state = (t[..., :1, :] if t.ndim == 4 else t for t in tensors)
    couplings = StreamedHeads(query, key, strength, Bonds(1), False)
    assert not couplings.apply(state).any() and not couplings.kept().apply(state).any()
    assert not couplings.to_dense().any()


def test_large_couplings_are_not_kept(tensors, monkeypatch):
    couplings = StreamedHeads(*tensors[:3], Bonds(N), False)
    monkeypatch.setattr(streamed, "_KEPT", B * H * MATRIX - 1)
    assert couplings.kept() is couplings
    assert len(couplings.kept(always=True).tensors()) == 4


def test_weights_agree_with_the_fused_kernel(tensors):
    query, key, strength, state = tensors
    masks = merge_masks(state[:, 0], H, is_causal=True)
    weights = attention_weights(query, key, Bonds(N, masks.unbonded()))
    fused = FusedHeads(query, key, strength, masks.unbonded(), None)
    torch.testing.assert_close(strength[:, None, None] * weights @ state, fused.apply(state))


@pytest.mark.parametrize("heads", ["split", "mixed"])
@pytest.mark.parametrize("couplings", ["softmax", "symmetric"])
def test_a_block_answers_alike_however_its_couplings_are_held(couplings, heads):
    """Forward, gradients and second derivatives, against couplings in the graph."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8, dtype=F64, requires_grad=True)
    results = []
    for fused, dropout in ((True, 0.0), (False, 0.0), ("auto", 0.0), ("auto", 1e-300)):
        torch.manual_seed(1)
        block = FreeEnergyBlock(
            8, 2, couplings=couplings, heads=heads, fused=fused, dropout=dropout,
            beta=0.5, tolerance=1e-12, dtype=F64,
        )  # fmt: skip
        y = block(x)
        parameters = [p for p in block.parameters() if p.requires_grad]
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        results.append([y, slope, *torch.autograd.grad(slope.sin().sum(), [x, *parameters])])
    for other in results[:-1]:
        # The adjoints are solved to 1e-12, relative to cotangents of up to some tens.
        torch.testing.assert_close(other, results[-1], rtol=1e-8, atol=1e-9)


def test_unknown_fused_is_refused():
    with pytest.raises(ValueError, match="fused='sometimes'"):
        FreeEnergyBlock(8, 2, fused="sometimes")
