"""Matrix-valued couplings of a fixed number of sites: what a parameter means, and the products."""

import copy
import io
import itertools

import pytest
import torch
from torch import Tensor

import spinformer as sf
from spinformer.nn import FreeEnergyBlock, matrix_valued
from spinformer.nn.masks import Masks
from spinformer.nn.matrix_valued import BlockMatrix, BlockStrips, MatrixCouplings

N, D, H, B = 5, 3, 2, 4
SYMMETRIES = list(itertools.product((True, False), repeat=2))


@pytest.fixture(params=["matrix", "strips"])
def strips(request, monkeypatch) -> bool:
    """Both ways to multiply, whatever the size."""
    found = request.param == "strips"
    monkeypatch.setattr(matrix_valued, "_WRITTEN_ROWS", 0 if found else 10**6)
    return found


def make(between: bool = True, within: bool = False, **options: object) -> FreeEnergyBlock:
    """Well converged, and with couplings strong enough to matter."""
    options = {"tolerance": None, "dtype": torch.float64, "num_spins": N, **options}
    return FreeEnergyBlock(
        D * H,
        H,
        couplings="matrix",
        symmetric_between=between,
        symmetric_within=within,
        **options,
    )


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, N, D * H)), dtype=torch.float64)


def dense_of(block: FreeEnergyBlock) -> Tensor:
    module = block.self_attn
    assert isinstance(module, MatrixCouplings)
    return module(torch.empty(1, module.num_spins, 1), Masks()).to_dense()


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).sum() + out.square().sum()


# -- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("between", "within"), SYMMETRIES)
def test_parameters_are_the_independent_entries(between, within):
    pairs = N * (N - 1) // 2 if between else N * (N - 1)
    entries = D * (D + 1) // 2 if within else D * D
    assert MatrixCouplings(N, D, H, between, within).weight.numel() == H * pairs * entries
    # Each one moves J: none is idle, and there are no two directions that do the same.
    module = MatrixCouplings(3, 2, 1, between, within, dtype=torch.float64)
    masks, x = Masks(), torch.empty(1, 3, 1)

    def dense(weight: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": weight}, (x, masks)).to_dense()

    jacobian = torch.autograd.functional.jacobian(dense, module.weight.detach())
    jacobian = jacobian.reshape(-1, module.weight.numel())
    assert torch.linalg.matrix_rank(jacobian) == module.weight.numel()


def test_parameters_of_a_block():
    block = FreeEnergyBlock(16, 1, couplings="matrix", num_spins=17, symmetric_within=True)
    beta = 1
    assert sum(p.numel() for p in block.parameters()) == 17 * 16 // 2 * 16 * 17 // 2 + beta


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("between", "within"), SYMMETRIES)
def test_symmetry_is_exact_after_training(strips, between, within, dropout):
    block = make(between, within, dropout=dropout)
    x = tokens()
    optimizer = torch.optim.Adam(block.parameters(), lr=0.05)
    before = dense_of(block).detach()
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(block(x)).backward()
        optimizer.step()
    after = dense_of(block)
    assert not torch.equal(before, after)
    assert (after.diagonal(dim1=1, dim2=2) == 0).all()
    assert torch.equal(after, after.transpose(1, 2).mT) == between
    assert torch.equal(after, after.mT) == within


@pytest.mark.parametrize(("between", "within"), SYMMETRIES)
def test_couplings_contract_at_first(between, within):
    module = MatrixCouplings(32, 8, 1, between, within)
    matrix = module(torch.empty(1, 32, 1), Masks())
    assert isinstance(matrix, BlockMatrix)
    norm = torch.linalg.matrix_norm(matrix.tensors()[0][0].detach(), 2)
    # 1/2 up to the fluctuation of the edge, of relative size (N D)^(-2/3) = 0.025.
    assert 0.4 < norm < 0.55


# -- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [1, 2])
def test_strips_multiply_as_their_matrix(kinds):
    blocks = torch.randn(H, kinds, N * (N - 1) // 2, D, D, dtype=torch.float64)
    strips = BlockStrips(blocks, N)
    dense = strips.to_dense()
    assert strips.is_symmetric == (kinds == 1) == torch.equal(dense, dense.transpose(1, 2).mT)
    for shape in [(H, N, D), (B, H, N, D), (2, B, H, N, D), (B, 1, N, D), (0, H, N, D)]:
        state = torch.randn(shape, dtype=torch.float64)
        for couplings, matrix in (
            (strips, dense),
            (strips.transpose(), dense.transpose(1, 2).mT),
            (strips.symmetrize(), (dense + dense.transpose(1, 2).mT) / 2),
        ):
            expected = torch.einsum("hijab,...hjb->...hia", matrix, state)
            torch.testing.assert_close(couplings.apply(state), expected)
            torch.testing.assert_close(couplings.written_out().apply(state), expected)
            torch.testing.assert_close(couplings.to_dense(), matrix)
            torch.testing.assert_close(couplings.norms(), matrix.flatten(-2).norm(dim=-1))
            torch.testing.assert_close(couplings.written_out().norms(), couplings.norms())


@pytest.mark.parametrize("kinds", [1, 2])
def test_derivatives_of_strips(kinds):
    blocks = torch.randn(H, kinds, 3, D, D, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, H, 3, D, dtype=torch.float64, requires_grad=True)

    def apply(b: Tensor, s: Tensor) -> Tensor:
        return BlockStrips(b, 3).apply(s)

    assert torch.autograd.gradcheck(apply, (blocks, state))
    assert torch.autograd.gradgradcheck(apply, (blocks, state))


def test_derivatives_of_symmetric_blocks():
    packed = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def unpack(x: Tensor) -> Tensor:
        return matrix_valued._Unpack.apply(x, 3).square()  # with a second derivative

    assert torch.autograd.gradcheck(unpack, (packed,))
    assert torch.autograd.gradgradcheck(unpack, (packed,))


def test_gradient_of_the_couplings_is_taken_once(monkeypatch):
    """Not in every step of the adjoint iteration, which only wants that of the state."""
    monkeypatch.setattr(matrix_valued, "_WRITTEN_ROWS", 0)
    calls = []
    outer = matrix_valued._outer
    monkeypatch.setattr(matrix_valued, "_outer", lambda *a: calls.append(None) or outer(*a))
    loss_of(make()(tokens())).backward()
    assert len(calls) == 1


# -- the block -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("between", "within"), SYMMETRIES)
def test_block_is_mean_field_of_the_spin_system(strips, between, within):
    block = make(between, within, beta=1.3)
    x = tokens()
    m, report = block(x, return_report=True)
    dense = dense_of(block)
    for head in range(H):
        system = sf.SpinSystem(
            sf.couplings.MatrixValued(dense[head]),
            x[..., head * D : (head + 1) * D],
            block.log_beta.detach().exp()[head],
            sf.Sphere(D),
        )
        equilibrium = sf.MeanField().solve(system)
        # Two solutions with a residual of 1e-10 each, in contractions of at most 0.7.
        torch.testing.assert_close(
            m[..., head * D : (head + 1) * D], equilibrium.magnetization, rtol=0, atol=1e-9
        )
        if between:
            torch.testing.assert_close(report.free_energy[:, head], equilibrium.free_energy)
    assert (report.free_energy is None) == (not between)
    expected = dense.flatten(-2).norm(dim=-1).expand(B, -1, -1, -1)
    torch.testing.assert_close(report.couplings, expected)


@pytest.mark.parametrize(("between", "within"), SYMMETRIES)
def test_implicit_gradient_is_that_of_the_unrolled_iteration(strips, between, within):
    solved = make(between, within, solver="plain", max_iterations=1000)
    unrolled = make(between, within, steps=80)
    unrolled.load_state_dict(solved.state_dict())
    x = tokens().requires_grad_()
    gradients = [
        torch.autograd.grad(loss_of(block(x)), [x, *block.parameters()], allow_unused=True)
        for block in (solved, unrolled)
    ]
    for got, expected in zip(*gradients, strict=True):
        if expected is None:  # the norm, which nothing reads
            assert got is None
            continue
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("between", "within"), SYMMETRIES)
def test_gradient(strips, between, within):
    block = make(between, within, num_spins=3)
    names = [name for name, _ in block.named_parameters()]

    def function(y: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(block, dict(zip(names, values, strict=True)), (y,))

    x = tokens(2, 3, D * H).requires_grad_()
    assert torch.autograd.gradcheck(function, (x, *block.parameters()), fast_mode=True)
    if between and within:  # all that there is between parameter and product
        assert torch.autograd.gradgradcheck(function, (x, *block.parameters()), fast_mode=True)


def test_absent_sites(strips):
    """As a block of the others alone; and what stands there, NaN included, changes nothing."""
    block, alone = make(), make(num_spins=3)
    kept = [0, 2, 3]
    first, second = torch.triu_indices(N, N, 1).tolist()
    chosen = [p for p in range(len(first)) if first[p] in kept and second[p] in kept]
    with torch.no_grad():
        alone.self_attn.weight.copy_(block.self_attn.weight[:, :, chosen])
    x = tokens()
    padding = torch.tensor([i not in kept for i in range(N)]).expand(B, N)
    x[padding] = torch.nan
    x.requires_grad_()
    out, report = block(x, src_key_padding_mask=padding, return_report=True)
    expected, expected_report = alone(x.detach()[:, kept], return_report=True)
    torch.testing.assert_close(out[:, kept], expected, rtol=0, atol=1e-9)
    assert (out[padding] == 0).all()
    torch.testing.assert_close(report.free_energy, expected_report.free_energy)
    torch.testing.assert_close(report.couplings[:, :, kept][..., kept], expected_report.couplings)
    assert (report.couplings[:, :, padding[0]] == 0).all()
    loss_of(out).backward()
    assert (x.grad[padding] == 0).all()
    loss_of(expected).backward()
    gradient = block.self_attn.weight.grad
    torch.testing.assert_close(gradient[:, :, chosen], alone.self_attn.weight.grad)
    rest = [p for p in range(len(first)) if p not in chosen]
    assert (gradient[:, :, rest] == 0).all()


def test_masks_over_pairs(strips):
    block, x = make(), tokens()
    pairs = torch.rand(B * H, N, N) < 0.4
    pairs = pairs | pairs.mT
    m, report = block(x, src_mask=pairs, return_report=True)
    dense = dense_of(block).expand(B, -1, -1, -1, -1, -1)
    dense = dense.masked_fill(pairs.view(B, H, N, N, 1, 1), 0.0)
    field = x.unflatten(-1, (H, D)).transpose(1, 2)
    system = sf.SpinSystem(sf.couplings.MatrixValued(dense), field, 1.0, sf.Sphere(D))
    equilibrium = sf.MeanField().solve(system)
    expected = equilibrium.magnetization.transpose(1, 2).flatten(-2)
    torch.testing.assert_close(m, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(report.free_energy, equilibrium.free_energy)
    causal, report = block(x, is_causal=True, return_report=True)
    assert report.free_energy is None
    jacobian = torch.autograd.functional.jacobian(lambda y: block(y, is_causal=True), x[0])
    assert (jacobian.permute(0, 2, 1, 3)[torch.ones(N, N).triu(1).bool()] == 0).all()
    assert not torch.allclose(causal, m)


def test_broken_sequence_stays_alone(strips):
    block, x = make(), tokens()
    expected = block(x[1:])
    loss_of(expected).backward()
    gradient = block.self_attn.weight.grad.clone()
    block.zero_grad()
    x[0, 2, 1] = torch.nan
    out, report = block(x, return_report=True)
    assert out[0].isnan().all()
    assert report.converged.tolist() == [[False] * H] + [[True] * H] * (B - 1)
    torch.testing.assert_close(out[1:], expected)
    loss_of(torch.where(out.isnan(), 0.0, out)).backward()
    torch.testing.assert_close(block.self_attn.weight.grad, gradient)


@pytest.mark.parametrize("shape", [(0, N, D * H), (N, D * H)])
def test_shapes(strips, shape):
    block = make(within=True)
    out = block(tokens(*shape))
    assert out.shape == shape
    loss_of(out).backward()
    assert block.self_attn.weight.grad.isfinite().all()


@pytest.mark.parametrize("within", [True, False])
def test_one_site_has_no_couplings(strips, within):
    block, x = make(within=within, num_spins=1), tokens(B, 1, D * H)
    assert block.self_attn.weight.numel() == 0
    free = sf.Sphere(D).mean(x.unflatten(-1, (H, D)))
    torch.testing.assert_close(block(x), free.flatten(-2))
    loss_of(block(x)).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_precision(strips, dtype):
    exact, block = make(), make(dtype=dtype, tolerance=1e-5)
    block.load_state_dict(exact.state_dict())
    exact.load_state_dict(block.state_dict())
    x = tokens().to(dtype)
    out = block(x)
    assert out.dtype == dtype
    # A few roundings of numbers of size one, and the tolerance of the solve.
    tolerance = 16 * torch.finfo(dtype).eps + 1e-4
    torch.testing.assert_close(out.double(), exact(x.double()), rtol=tolerance, atol=tolerance)


def test_copies(strips):
    block, x = make(within=True), tokens()
    loss_of(block(x)).backward()
    expected = block(x)
    assert torch.equal(copy.deepcopy(block)(x), expected)
    buffer = io.BytesIO()
    torch.save(block, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), expected)
    other = make(within=True)
    other.load_state_dict(block.state_dict())
    assert torch.equal(other(x), expected)
    meta = make(device="meta", dtype=torch.bfloat16)
    assert {p.device.type for p in meta.parameters()} == {"meta"}


@pytest.mark.parametrize("stream", ["plain", "magnetization", "field"])
def test_streams(strips, stream):
    block = make(stream=stream)
    x = block.embed(tokens())
    out = block.readout(block(x))
    assert out.isfinite().all()
    spins = out.unflatten(-1, (H, D)).norm(dim=-1)
    assert (spins < D**0.5).all()


# -- what is refused -----------------------------------------------------------------------------


def test_another_number_of_tokens():
    with pytest.raises(ValueError, match=r"x has 4 tokens.*'matrix'.*num_spins=5"):
        make()(tokens(B, N - 1, D * H))


def test_finite_masks():
    with pytest.raises(ValueError, match="finite entries.*couplings='matrix'"):
        make()(tokens(), src_mask=-torch.rand(N, N))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"couplings": "matrix"}, "num_spins=None: num_spins goes with"),
        ({"couplings": "softmax", "num_spins": 5}, "num_spins goes with .*'fixed', 'matrix'"),
        ({"couplings": "matrix", "num_spins": 0}, "num_spins=0 must be at least 1"),
        ({"couplings": "fixed", "num_spins": 5, "symmetric_within": True}, "couplings='matrix'"),
        ({"symmetric_between": False}, "symmetric_between=False with couplings='softmax'"),
        ({"couplings": "matrix", "num_spins": 5, "dim_mixer": 3}, "couplings='mixer'"),
        ({"couplings": "matrix", "num_spins": 5, "heads": "mixed"}, "heads='split'"),
        (
            {"couplings": "matrix", "num_spins": 5, "approximation": "steepest_descent"},
            "approximation='mean_field'",
        ),
    ],
)
def test_contradictions(options, message):
    with pytest.raises(ValueError, match=message):
        FreeEnergyBlock(6, 2, **options)
