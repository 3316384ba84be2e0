"""The neural Onsager term and the MLP across tokens, against torch's own layers and iterations."""

import copy

import pytest
import torch
from torch import Tensor, nn

import spinformer as sf
from spinformer.nn import Encoder, FreeEnergyBlock
from spinformer.nn.masks import Masks

N, D, H, B = 4, 3, 2, 3

KINDS = {
    "softmax-mlp": {"correction": "mlp"},
    "mixed-mlp": {"correction": "mlp", "heads": "mixed", "beta": 0.5},
    "symmetric-mlp": {"correction": "mlp", "couplings": "symmetric", "bias": False},
    "fixed-mlp": {"correction": "mlp", "couplings": "fixed", "num_spins": N},
    "matrix-mlp": {
        "correction": "mlp",
        "couplings": "matrix",
        "num_spins": N,
        "dim_correction": 7,
        "activation": "silu",
    },
    "mixer": {"couplings": "mixer", "num_spins": N},
    "mixer-mlp": {"couplings": "mixer", "num_spins": N, "correction": "mlp", "dim_mixer": 5},
}


@pytest.fixture(params=KINDS)
def options(request) -> dict[str, object]:
    return KINDS[request.param]


def make(**options: object) -> FreeEnergyBlock:
    options = {"tolerance": None, "max_iterations": 1000, "dtype": torch.float64, **options}
    block = FreeEnergyBlock(D * H, H, **options)
    for name, parameter in block.named_parameters():
        if "bias" in name:  # zero at first, where a test could not see them
            nn.init.normal_(parameter, std=0.1)
    return block


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, N, D * H)), dtype=torch.float64)


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, D)).transpose(-2, -3)


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).sum() + out.square().sum()


def reaction_of(block: FreeEnergyBlock, head: int) -> nn.Sequential:
    """f of a head as torch's own layers."""
    own = block.correction
    hidden, width = own.weight1.shape[-2:]
    activation = {"gelu": nn.GELU(), "silu": nn.SiLU()}[own.activation]
    layers = nn.Sequential(nn.Linear(width, hidden), activation, nn.Linear(hidden, width)).double()
    state = {
        "0.weight": own.weight1[head],
        "2.weight": own.weight2[head],
        "0.bias": own.weight1.new_zeros(hidden) if own.bias1 is None else own.bias1[head],
        "2.bias": own.weight1.new_zeros(width) if own.bias2 is None else own.bias2[head],
    }
    layers.load_state_dict(state)
    return layers


def mixer_of(block: FreeEnergyBlock, head: int) -> nn.Sequential:
    """g of a head as the convolutions of width one that MLP-Mixers are written with."""
    own = block.self_attn
    hidden, sites = own.weight1.shape[-2:]
    layers = nn.Sequential(nn.Conv1d(sites, hidden, 1), nn.GELU(), nn.Conv1d(hidden, sites, 1))
    layers.double().load_state_dict(
        {
            "0.weight": own.weight1[head, ..., None],
            "2.weight": own.weight2[head, ..., None],
            "0.bias": own.bias1[head],
            "2.bias": own.bias2[head],
        }
    )
    return layers


@pytest.mark.parametrize("kind", ["softmax-mlp", "symmetric-mlp", "fixed-mlp", "matrix-mlp"])
def test_steady_state_with_reaction(kind):
    """m = phi(beta (h + J m - f(m))), every piece from elsewhere."""
    block, x = make(**KINDS[kind], beta=0.8), tokens()
    m, report = block(x, return_report=True)
    assert report.free_energy is None
    assert report.converged.all()
    m, field = heads_of(m), heads_of(x)
    if kind == "matrix-mlp":
        dense = block.self_attn(x, Masks()).to_dense()
        force = torch.einsum("hijac,nhjc->nhia", dense, m)
    else:
        force = report.couplings @ m
    reaction = torch.stack([reaction_of(block, h)(m[:, h]) for h in range(H)], dim=1)
    beta = block.log_beta.exp()[:, None, None]
    expected = sf.Sphere(D).mean(beta * (field + force - reaction))
    # The residual of the solve is at most 1e-10.
    torch.testing.assert_close(m, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["mixer", "mixer-mlp"])
def test_steady_state_of_the_mixer(kind):
    block, x = make(**KINDS[kind], beta=0.8), tokens()
    m, report = block(x, return_report=True)
    assert report.free_energy is None
    assert report.couplings is None
    assert report.converged.all()
    m = heads_of(m)
    force = torch.stack([mixer_of(block, h)(m[:, h]) for h in range(H)], dim=1)
    if block.correction is not None:
        force = force - torch.stack([reaction_of(block, h)(m[:, h]) for h in range(H)], dim=1)
    expected = sf.Sphere(D).mean(block.log_beta.exp()[:, None, None] * (heads_of(x) + force))
    torch.testing.assert_close(m, expected, rtol=0, atol=1e-9)


def test_no_reaction_is_the_block_without():
    """With f = 0 the answer is that of the spin system."""
    plain, corrected = make(), make(correction="mlp")
    corrected.load_state_dict(plain.state_dict(), strict=False)
    for parameter in corrected.correction.parameters():
        nn.init.zeros_(parameter)
    x = tokens()
    torch.testing.assert_close(corrected(x), plain(x), rtol=0, atol=1e-9)


def test_parameter_counts():
    """The lineage's mixer: N -> 2 N -> N across tokens, D -> 2 D -> D on each."""
    block = FreeEnergyBlock(16, 1, couplings="mixer", num_spins=9, correction="mlp")
    mixer, reaction = 2 * 9 * 18 + 18 + 9, 2 * 16 * 32 + 32 + 16
    beta = 1
    assert sum(p.numel() for p in block.parameters()) == mixer + reaction + beta


def test_slopes_at_first():
    """What the docstrings promise of the maps, so that the fixed point contracts."""
    block = FreeEnergyBlock(24, 1, couplings="mixer", num_spins=24, correction="mlp").double()
    m = torch.randn(24, 24, dtype=torch.float64)
    m = m / m.norm(dim=-1, keepdim=True) * 24**0.5
    g, f = mixer_of(block, 0), reaction_of(block, 0)
    across = torch.autograd.functional.jacobian(lambda v: g(v[:, None])[:, 0], m[:, 0].clone())
    alone = torch.autograd.functional.jacobian(f, m[0])
    assert torch.linalg.matrix_norm(across, 2) < 0.6
    assert torch.linalg.matrix_norm(alone, 2) < 0.3
    assert torch.linalg.matrix_norm(across, 2) > 0.1


def test_implicit_gradient_is_that_of_the_unrolled_iteration(options):
    solved = make(**options, solver="plain")
    unrolled = make(**options, steps=120, fused=False)
    unrolled.load_state_dict(solved.state_dict())
    x = tokens().requires_grad_()
    names = ["x", *(name for name, _ in solved.named_parameters())]
    found = [
        torch.autograd.grad(loss_of(block(x)), [x, *block.parameters()], allow_unused=True)
        for block in (solved, unrolled)
    ]
    for name, got, expected in zip(names, *found, strict=True):
        if expected is None:  # the norm of a block whose couplings don't look at the tokens
            assert "norm" in name
            assert got is None
            continue
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)
        # Nothing that the force depends on is captured, where it would have no gradient.
        assert got.abs().max() > 0


def test_gradient(options):
    block = make(**options)
    names = [name for name, _ in block.named_parameters()]

    def function(y: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(block, dict(zip(names, values, strict=True)), (y,))

    x = tokens(2, N, D * H).requires_grad_()
    assert torch.autograd.gradcheck(function, (x, *block.parameters()), fast_mode=True)


@pytest.mark.parametrize("kind", ["softmax-mlp", "mixer-mlp"])
def test_second_derivative(kind):
    block = make(**KINDS[kind])
    x = tokens(2, N, D * H).requires_grad_()
    padding = torch.tensor([[False, False, True, False], [True] * 4])
    assert torch.autograd.gradgradcheck(
        lambda y: block(y, src_key_padding_mask=padding), (x,), fast_mode=True
    )


def test_absent_sites(options):
    """They give and receive nothing, and whatever stands there leaves no trace."""
    block = make(**options, dim_feedforward=6)
    x = tokens()
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, 1] = padding[1, 2:] = padding[2] = True
    expected = block(x, src_key_padding_mask=padding)
    assert (expected[padding] == 0).all()
    assert (expected[~padding] != 0).all()
    loss_of(expected).backward()
    gradients = {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}
    block.zero_grad()
    x[padding] = torch.nan
    x.requires_grad_()
    out = block(x, src_key_padding_mask=padding)
    assert torch.equal(out, expected)
    loss_of(out).backward()
    assert (x.grad[padding] == 0).all()
    for name, gradient in gradients.items():
        assert torch.equal(dict(block.named_parameters())[name].grad, gradient)


def test_absent_sites_of_the_mixer_are_missing_inputs():
    """With their columns of W_1 and rows of W_2 left out the others' answer is the same."""
    block, alone = make(**KINDS["mixer-mlp"]), make(**{**KINDS["mixer-mlp"], "num_spins": 2})
    kept = [0, 3]
    state = dict(block.state_dict())
    state["self_attn.weight1"] = state["self_attn.weight1"][..., kept]
    state["self_attn.weight2"] = state["self_attn.weight2"][:, kept]
    state["self_attn.bias2"] = state["self_attn.bias2"][:, kept]
    alone.load_state_dict(state)
    x = tokens()
    padding = torch.tensor([False, True, True, False]).expand(B, N)
    out = block(x, src_key_padding_mask=padding)[:, kept]
    torch.testing.assert_close(out, alone(x[:, kept]), rtol=0, atol=1e-9)


def test_broken_sequence_stays_alone(options):
    block, x = make(**options), tokens()
    expected = block(x[1:])
    loss_of(expected).backward()
    gradients = {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}
    block.zero_grad()
    x[0, 2, 1] = torch.nan
    out, report = block(x, return_report=True)
    assert out[0].isnan().all()
    assert not report.converged[0].any()
    assert report.converged[1:].all()
    torch.testing.assert_close(out[1:], expected, rtol=0, atol=1e-9)
    loss_of(torch.where(out.isnan(), 0.0, out)).backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(dict(block.named_parameters())[name].grad, gradient)


@pytest.mark.parametrize("stream", ["magnetization", "field"])
def test_streams(options, stream):
    encoder = Encoder(make(**options, stream=stream), 2)
    out = encoder(tokens())
    assert out.isfinite().all()
    loss_of(out).backward()


def test_conjugate_field_of_the_field_stream():
    """What leaves is the field and the whole force: its response is the magnetization."""
    plain, field = make(**KINDS["mixer-mlp"]), make(**KINDS["mixer-mlp"], stream="field")
    field.load_state_dict(plain.state_dict())
    x = tokens()
    torch.testing.assert_close(field.readout(field(x)), plain(x), rtol=0, atol=1e-9)


def test_starts(options):
    """The same steady state from elsewhere; a start at an absent site is ignored."""
    block, x = make(**options), tokens()
    start = torch.rand(N, D * H, dtype=torch.float64) - 0.5
    other = make(**options, initial=start)
    other.load_state_dict({**block.state_dict(), "initial": start})
    torch.testing.assert_close(other(x), block(x), rtol=0, atol=1e-8)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[:, 1] = True
    other.initial[1] = torch.nan
    expected = block(x, src_key_padding_mask=padding)
    out = other(x, src_key_padding_mask=padding)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-8)


def test_failure_is_loud():
    block = make(**{**KINDS["mixer-mlp"], "max_iterations": 2, "on_failure": "raise"})
    with pytest.raises(sf.ConvergenceError, match="fixed-point iteration"):
        block(tokens())


def test_dropout_is_one_map_a_solve():
    """A random map would have no fixed point: with dropout the solve still converges."""
    block = make(**KINDS["mixer-mlp"], dropout=0.5, on_failure="raise")
    x = tokens()
    first, second = block(x), block(x)
    assert not torch.allclose(first, second)
    block.eval()
    assert torch.equal(block(x), block(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision(options, dtype):
    exact, block = make(**options), make(**{**options, "dtype": dtype})
    block.load_state_dict(exact.state_dict())
    exact.load_state_dict(block.state_dict())
    x = tokens().to(dtype)
    out = block(x)
    assert out.dtype == dtype
    # A few roundings of numbers of size one, and the tolerance of the solve.
    tolerance = 32 * torch.finfo(dtype).eps + 1e-4
    torch.testing.assert_close(out.double(), exact(x.double()), rtol=tolerance, atol=tolerance)
    assert torch.equal(copy.deepcopy(block)(x), out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "mlp", "approximation": "steepest_descent", "couplings": "symmetric"},
         "correction='mlp'.*use approximation='mean_field'"),
        ({"correction": "mlp", "derivative": "total", "couplings": "symmetric"},
         "correction='mlp' has none"),
        ({"couplings": "mixer", "num_spins": N, "heads": "mixed"}, "heads='split'"),
        ({"couplings": "mixer", "num_spins": N, "dim_mixer": 0}, "dim_mixer=0 must be at least 1"),
        ({"correction": "mlp", "dim_correction": 0}, "dim_correction=0 must be at least 1"),
        ({"dim_correction": 4}, "dim_correction=4 with correction='none'"),
        ({"correction": "mpl"}, "correction"),
    ],
)  # fmt: skip
def test_contradictions(options, message):
    with pytest.raises(ValueError, match=message):
        FreeEnergyBlock(D * H, H, **options)


def test_the_mixer_has_no_pairs_to_block():
    block = make(**KINDS["mixer"])
    with pytest.raises(ValueError, match="couplings='mixer' have no pairs"):
        block(tokens(), is_causal=True)
    with pytest.raises(ValueError, match=r"x has 5 tokens.*num_spins=4"):
        block(tokens(B, N + 1, D * H))
