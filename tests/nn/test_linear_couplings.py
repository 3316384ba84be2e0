"""Linear-attention couplings: the kernel, its spectrum, masks, and blocks that keep the factors."""

import pytest
import torch
from torch.nn import functional as F

import spinformer as sf
from spinformer.equilibrium import steepest_descent
from spinformer.equilibrium.low_rank_saddle import LowRankSaddle
from spinformer.nn import FreeEnergyBlock
from spinformer.nn.couplings import LinearCouplings
from spinformer.nn.masks import Masks

F64 = torch.float64


def made(generator, length=7, nhead=2):
    torch.manual_seed(0)
    module = LinearCouplings(8, nhead, dtype=F64)
    return module, torch.randn(3, length, 8, generator=generator, dtype=F64)


def test_kernel_by_its_definition(generator):
    """Written out entry by entry."""
    module, tokens = made(generator)
    with torch.no_grad():
        module.strength.copy_(torch.tensor([0.5, 0.9]))
    found = module(tokens, Masks())
    assert isinstance(found, sf.couplings.LowRank) and found.is_symmetric
    query, key = module.in_proj(tokens).chunk(2, -1)
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)
        q, k = 1 + F.elu(query[..., part]), 1 + F.elu(key[..., part])
        kernel = (q @ k.mT + k @ q.mT) / 2
        kernel = kernel * (1 - torch.eye(7, dtype=F64))
        degree = kernel.sum(-1)
        expected = module.strength[head] * kernel / (degree[:, :, None] * degree[:, None]).sqrt()
        torch.testing.assert_close(found.to_dense()[:, head], expected)
    largest = torch.linalg.eigvalsh(found.to_dense().detach())[..., -1]
    torch.testing.assert_close(largest, module.strength.detach().expand(3, 2))


def test_padding_and_lone_tokens(generator):
    module, tokens = made(generator)
    absent = torch.zeros(3, 7, dtype=torch.bool)
    absent[0, 4:] = absent[1, 1:] = absent[2] = True
    dense = module(tokens, Masks(absent=absent)).to_dense()
    short = module(tokens[:1, :4], Masks()).to_dense()
    torch.testing.assert_close(dense[:1, :, :4, :4], short)
    assert not dense[0, :, 4:].any() and not dense[1:].any()
    grads = torch.autograd.grad(dense.square().sum(), list(module.parameters()))
    assert all(grad.isfinite().all() for grad in grads)
    for wrong in (
        Masks(blocked=torch.ones(1, 1, 7, 7, dtype=torch.bool).triu(1)),
        Masks(bias=torch.full((1, 1, 7, 7), -0.1, dtype=F64)),
    ):
        with pytest.raises(ValueError, match="couplings='linear'"):
            module(tokens, wrong)


@pytest.mark.parametrize(
    ("approximation", "auxiliary"),
    [("mean_field", "site"), ("steepest_descent", "site"), ("steepest_descent", "shared")],
)
def test_block_is_that_of_the_matrix(approximation, auxiliary, generator, monkeypatch):
    """Output and gradients of every parameter, with factors and with the matrix."""
    torch.manual_seed(1)
    block = FreeEnergyBlock(
        8, 2, approximation, "linear", auxiliary=auxiliary, tolerance=1e-12, dtype=F64
    )
    x = torch.randn(2, 24, 8, generator=generator, dtype=F64)
    padding = torch.zeros(2, 24, dtype=torch.bool)
    padding[1, 20:] = True
    monkeypatch.setattr(steepest_descent, "_LOW_RANK_SHARE", 2.0)

    def gradients(sites):
        monkeypatch.setattr(steepest_descent, "_LOW_RANK_SITES", sites)
        y, report = block(x, src_key_padding_mask=padding, return_report=True)
        assert bool(report.converged.all()) and report.couplings.shape == (2, 2, 24, 24)
        return y, torch.autograd.grad(y.sin().sum(), list(block.parameters()))

    factors, matrix = gradients(0), gradients(10_000)
    torch.testing.assert_close(factors, matrix, rtol=1e-9, atol=1e-9)
    # 1e-9 as above; the block alone for the first, unpadded sequence.
    torch.testing.assert_close(block(x[:1]), factors[0][:1], rtol=1e-9, atol=1e-9)


def test_long_sequences_keep_their_factors(generator):
    """The size at which a block leaves the matrix out, and what it refuses."""
    block = FreeEnergyBlock(16, 2, "steepest_descent", "linear", dtype=F64)
    x = torch.randn(1, 600, 16, generator=generator, dtype=F64)
    tokens = block.norm1(x)
    system = sf.SpinSystem(block.self_attn(tokens, Masks()), block._systems(x), 1.0, sf.Sphere(8))
    assert isinstance(block.approximation.solve(system)._saddle, LowRankSaddle)
    assert block(x).isfinite().all()
    with pytest.raises(ValueError, match="causal"):
        block(x, is_causal=True)
    with pytest.raises(ValueError, match="heads='split'"):
        FreeEnergyBlock(16, 2, couplings="linear", heads="mixed")
    with pytest.raises(ValueError, match="couplings='linear'"):
        FreeEnergyBlock(16, 2, couplings="linear", derivative="total")
