"""The magnetization as the total derivative: what the couplings add, and how it is computed."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from spinformer.nn import FreeEnergyBlock, amortized
from spinformer.nn.amortized import norm_pullback
from spinformer.nn.streamed import Bonds, StreamedHeads, attention_weights

F64 = torch.float64
D, H, N = 8, 2, 5

VARIANTS = {
    "mean field": {},
    "mean field, closed form": {"response": "large_d", "norm": "rms"},
    "mean field, mixed heads": {"heads": "mixed"},
    "mean field, Ising": {"nhead": D},
    "tap": {"approximation": "tap"},
    "tap, closed form": {"approximation": "tap", "response": "large_d"},
    "adaptive tap": {"approximation": "adaptive_tap"},
    "steepest descent": {"approximation": "steepest_descent"},
    "steepest descent, shared": {"approximation": "steepest_descent", "auxiliary": "shared"},
}


@pytest.fixture
def x(generator):
    return torch.randn(2, N, D, generator=generator, dtype=F64)


def total(**options):
    """A block with couplings of a size that matters, and no parameter at zero."""
    defaults = {"nhead": H, "couplings": "symmetric", "derivative": "total", "beta": 0.8}
    defaults |= {"tolerance": 1e-12, "max_iterations": 2000, "dtype": F64}
    block = FreeEnergyBlock(D, **(defaults | options))
    for parameter in block.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.3)
    nn.init.constant_(block.self_attn.strength, 0.6)
    return block


def free_energy(block, x, **masks):
    """F of all heads together, (B,)."""
    return block(x, return_report=True, **masks)[1].free_energy.sum(-1)


@pytest.mark.parametrize("name", VARIANTS)
def test_output_is_the_slope_of_the_free_energy(name, x):
    """Central differences of the block's own F: their error is h^2 F''' / 6 = 1e-9, and rounding of
    F, 1e-15 / h = 1e-11."""
    block, step = total(**VARIANTS[name]), 1e-4
    moves = step * torch.eye(N * D, dtype=F64).view(N * D, N, D)
    with torch.no_grad():
        out, report = block(x[0], return_report=True)
        slope = (free_energy(block, x[0] - moves) - free_energy(block, x[0] + moves)) / (2 * step)
    torch.testing.assert_close(out.flatten(), slope, rtol=0, atol=2e-8)
    # It is the second term that is being tested.
    assert report.coupling_term.norm() > 0.02 * out.norm()


@pytest.mark.parametrize("name", ["mean field", "mean field, mixed heads", "steepest descent"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_masks_and_dropout(name, masked, dropout, x):
    """Against autograd through F, solve and couplings, with the same dropped weights."""
    block = total(dropout=dropout, **VARIANTS[name])
    masks = {}
    if masked:
        bias = torch.randn(N, N, dtype=F64)
        bias = bias + bias.mT
        bias[0, 3] = bias[3, 0] = -torch.inf
        absent = torch.zeros(2, N, dtype=torch.bool)
        absent[1, 1] = True
        masks = {"src_mask": bias, "src_key_padding_mask": absent}
    x.requires_grad_(True)
    torch.manual_seed(0)
    out = block(x, **masks)
    torch.manual_seed(0)
    (slope,) = torch.autograd.grad(free_energy(block, x, **masks).sum(), x)
    torch.testing.assert_close(out, -slope, rtol=1e-9, atol=1e-9)


def test_the_mlp_shifts_the_field(x):
    """Its output is a given part of the field, so that F is differentiated with it held fixed."""
    block = total(dim_feedforward=6)
    shift = block.mlp(block.norm2(x)).detach()
    alone = total()
    alone.load_state_dict(block.state_dict(), strict=False)
    # Couplings of x in the field x + shift, written as one graph with two leaves.
    tokens, field = x.clone().requires_grad_(True), (x + shift).requires_grad_(True)
    _, with_shift = block(x, return_report=True)
    couplings = alone(tokens, return_report=True)[1].couplings
    m = with_shift.magnetization.transpose(1, 2).flatten(-2)
    pairs = with_shift.magnetization @ with_shift.magnetization.mT
    (term,) = torch.autograd.grad((couplings * pairs.detach()).sum() / 2, tokens)
    torch.testing.assert_close(with_shift.coupling_term, term)
    torch.testing.assert_close(block(x), m + term)
    assert not torch.allclose(alone(field), block(x))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_second_term_is_orthogonal_to_the_tokens(norm, x):
    """A normalized token does not know its length, and a layer-normalized one not its mean."""
    for layer in (block := total(norm=norm)).modules():
        if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
            layer.eps = 0.0
    term = block(x, return_report=True)[1].coupling_term
    torch.testing.assert_close((x * term).sum(-1), torch.zeros(2, N, dtype=F64))
    if norm == "layer":
        torch.testing.assert_close(term.sum(-1), torch.zeros(2, N, dtype=F64))


def test_report(x):
    out, report = total()(x, return_report=True)
    m = report.magnetization.transpose(1, 2).flatten(-2)
    torch.testing.assert_close(out, m + report.coupling_term)
    assert total(derivative="partial")(x, return_report=True)[1].coupling_term is None
    first = total(batch_first=False)(x.transpose(0, 1), return_report=True)[1]
    assert first.coupling_term.shape == (2, N, D)


def test_fixed_couplings_add_nothing(x):
    block = total(couplings="fixed", num_spins=N)
    partial = total(couplings="fixed", num_spins=N, derivative="partial")
    partial.load_state_dict(block.state_dict())
    out, report = block(x, return_report=True)
    assert torch.equal(out, partial(x))
    assert not report.coupling_term.any()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"couplings": "softmax"}, "couplings='softmax'.*'symmetric'"),
        ({"stream": "field"}, "stream='field'.*'plain'"),
        ({"stream": "magnetization"}, "stream='magnetization'.*'plain'"),
        ({"steps": 3}, "steps=3.*solved equilibrium"),
        ({"derivative": "totl"}, "nearest is 'total'"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        total(**options)


def test_a_system_that_overflows_spoils_no_shared_weight():
    """A field whose square is finite, and whose product with beta is not to be worked with."""
    options = {"dtype": torch.float32, "tolerance": 1e-4, "on_failure": "ignore", "beta": 1e4}
    block = total(**options, **VARIANTS["steepest descent"])
    block.log_beta.requires_grad_(False)  # its own derivative overflows, as it must
    x = torch.randn(3, N, D)
    x[1] *= 1e18
    out = block(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    out[[0, 2]].sum().backward()
    weights = [parameter for parameter in block.parameters() if parameter.requires_grad]
    assert all(weight.grad.isfinite().all() for weight in weights)


@pytest.mark.parametrize("size", [1, 3 * N, N * N, 3 * N * N, 2**18])
@pytest.mark.parametrize("parts", ["values", "matrix", "both"])
def test_blocks_of_rows_change_nothing(size, parts, generator, monkeypatch):
    """One row at a time, parts of a matrix, several matrices, all: values and derivatives."""
    monkeypatch.setattr(amortized, "_BLOCK", size)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64).requires_grad_(True)

    query, key, logits = draw(2, 3, N, 2), draw(2, 3, N, 2), draw(2, 3, N, N)
    attention = logits.softmax(-1).detach().requires_grad_(True)
    values = None if parts == "matrix" else draw(2, 3, N, 4)
    matrix = None if parts == "values" else draw(2, 3, N, N)
    arguments = (query, key, attention, values, matrix)
    slopes = amortized._LogitPullback.apply(*arguments, None)

    # Logits q k^T, of which the softmax has A: T is what autograd makes of C.
    pairs = 0.0 if matrix is None else matrix
    pairs = pairs if values is None else pairs + values @ values.mT
    free = attention.detach().log().requires_grad_(True)
    (t,) = torch.autograd.grad(free.softmax(-1), free, pairs.detach())
    expected = torch.stack([t @ key, t.mT @ query]).permute(1, 3, 0, 2, 4)
    torch.testing.assert_close(slopes, expected)
    given = [x for x in arguments if x is not None]

    def function(*given):
        rest = iter(given)
        return amortized._LogitPullback.apply(
            *(None if x is None else next(rest) for x in arguments), None
        )

    assert gradcheck(function, given, fast_mode=True)
    assert gradgradcheck(function, given, fast_mode=True)


@pytest.mark.parametrize("size", [1, 3 * N, N * N, 2**18])
@pytest.mark.parametrize("kept", [False, True])
def test_couplings_in_blocks_pull_back_as_matrices_do(size, kept, generator, monkeypatch):
    """With a softmax that nobody has written down: values, derivatives, second derivatives."""
    monkeypatch.setattr(amortized, "_BLOCK", size)
    query, key = torch.randn(2, 2, 3, N, 2, generator=generator, dtype=F64)
    values = torch.randn(2, 3, N, 4, generator=generator, dtype=F64)
    given = [x.clone().requires_grad_(True) for x in (query, key, values)]
    blocked = torch.zeros(1, 1, N, N, dtype=torch.bool)
    blocked[..., 0, 3] = blocked[..., 3, 0] = True
    strength, bonds = torch.ones(3, dtype=F64), Bonds(N, blocked)

    def streamed(query, key, values):
        heads = StreamedHeads(query, key, strength, bonds, True)
        heads = heads.kept(softmax=True) if kept else heads
        return amortized._LogitPullback.apply(query, key, None, values, None, heads)

    def written(query, key, values):
        attention = attention_weights(query, key, bonds)
        return amortized._LogitPullback.apply(query, key, attention, values, None, None)

    torch.testing.assert_close(streamed(*given), written(*given))
    cotangent = torch.randn(2, N, 2, 3, 2, generator=generator, dtype=F64)
    for graph in (False, True):
        found, expected = (
            torch.autograd.grad(function(*given), given, cotangent, create_graph=graph)
            for function in (streamed, written)
        )
        torch.testing.assert_close(found, expected)
    assert gradgradcheck(streamed, given, fast_mode=True)


@pytest.mark.parametrize("norm", [nn.LayerNorm(D, dtype=F64), nn.RMSNorm(D, 1e-5, dtype=F64)])
def test_norm_pullback_is_that_of_autograd(norm, x):
    nn.init.normal_(norm.weight)
    x.requires_grad_(True)
    cotangent = torch.randn_like(x).requires_grad_(True)
    (expected,) = torch.autograd.grad(norm(x), x, cotangent)
    torch.testing.assert_close(norm_pullback(norm, x, cotangent), expected)

    def function(x, cotangent, weight):
        return torch.func.functional_call(
            _Pull(norm), {"norm.weight": weight}, (x, cotangent), strict=False
        )

    assert gradcheck(function, (x, cotangent, norm.weight), fast_mode=True)
    assert gradgradcheck(function, (x, cotangent, norm.weight), fast_mode=True)


class _Pull(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, cotangent):
        return norm_pullback(self.norm, x, cotangent)
