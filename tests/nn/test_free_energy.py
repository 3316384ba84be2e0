"""The free-energy block is the spin system that it says it is. (Contracts are elsewhere.)"""

import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import spinformer as sf
from spinformer.nn import Encoder, FreeEnergyBlock
from spinformer.nn.couplings import FusedHeads, HeadMixture, Heads

F64 = torch.float64
D, H, N = 8, 2, 5


@pytest.fixture
def x(generator):
    return torch.randn(3, N, D, generator=generator, dtype=F64)


def block_of(**options):
    return FreeEnergyBlock(D, H, **({"dtype": F64, "tolerance": 1e-12} | options))


def heads_of(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


VARIANTS = {
    "mean field": ({"couplings": "symmetric"}, sf.MeanField(tolerance=1e-12), sf.Sphere(D // H)),
    "large d": (
        {"couplings": "symmetric", "response": "large_d"},
        sf.MeanField(tolerance=1e-12),
        sf.LargeDSphere(D // H),
    ),
    "tap": (
        {"couplings": "symmetric", "approximation": "tap"},
        sf.TAP(tolerance=1e-12),
        sf.Sphere(D // H),
    ),
    "adaptive tap": (
        {"couplings": "symmetric", "approximation": "adaptive_tap", "response": "large_d"},
        sf.AdaptiveTAP(tolerance=1e-12),
        sf.LargeDSphere(D // H),
    ),
    "steepest descent": (
        {"couplings": "symmetric", "approximation": "steepest_descent"},
        sf.SteepestDescent(),
        sf.Sphere(D // H),
    ),
    "shared": (
        {"couplings": "symmetric", "approximation": "steepest_descent", "auxiliary": "shared"},
        sf.SteepestDescent(auxiliary="shared"),
        sf.Sphere(D // H),
    ),
    "fixed": (
        {"couplings": "fixed", "num_spins": N},
        sf.MeanField(tolerance=1e-12),
        sf.Sphere(D // H),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_output_and_free_energy_are_those_of_the_system(name, x):
    options, approximation, site = VARIANTS[name]
    block = block_of(beta=0.8, **options)
    out, report = block(x, return_report=True)
    system = sf.SpinSystem(report.couplings, heads_of(x), 0.8, site)
    equilibrium = approximation.solve(system)
    torch.testing.assert_close(heads_of(out), equilibrium.magnetization)
    torch.testing.assert_close(report.magnetization, equilibrium.magnetization)
    torch.testing.assert_close(report.free_energy, equilibrium.free_energy)
    assert report.converged.all() and report.residual.shape == (3, H)
    torch.testing.assert_close(report.couplings, report.couplings.mT)
    assert not report.couplings.diagonal(dim1=-2, dim2=-1).any()


def test_softmax_rows_sum_to_the_strength(x):
    block = block_of()
    torch.nn.init.constant_(block.self_attn.strength, 0.7)
    _, report = block(x, return_report=True)
    torch.testing.assert_close(report.couplings.sum(-1), torch.full((3, H, N), 0.7, dtype=F64))
    assert report.free_energy is None


@pytest.mark.parametrize("couplings", ["softmax", "symmetric", "fixed"])
def test_mixed_heads_are_matrix_valued_couplings(couplings, x):
    block = block_of(
        heads="mixed", couplings=couplings, num_spins=N if couplings == "fixed" else None, beta=0.5
    )
    out, report = block(x, return_report=True)
    value = block.value.unflatten(0, (H, -1))
    projection = value.mT if block.out is None else block.out.unflatten(1, (H, -1)).transpose(0, 1)
    dense = torch.einsum("bhij,hac,hcd->bijad", report.couplings, projection, value)
    system = sf.SpinSystem(sf.couplings.MatrixValued(dense), x, 0.5, sf.Sphere(D))
    equilibrium = sf.MeanField(tolerance=1e-12).solve(system)
    torch.testing.assert_close(out, equilibrium.magnetization)
    assert system.couplings.is_symmetric == (couplings != "softmax")
    if couplings != "softmax":
        torch.testing.assert_close(report.free_energy[:, 0], equilibrium.free_energy)


def test_head_mixture_keeps_the_couplings_interface(generator):
    weights = torch.rand(2, H, N, N, generator=generator, dtype=F64)
    weights = weights * (1 - torch.eye(N, dtype=F64))
    heads = Heads(weights, torch.tensor([0.5, 2.0], dtype=F64), symmetric=False)
    value, out = (torch.randn(D, D, generator=generator, dtype=F64) for _ in range(2))
    state = torch.randn(2, N, D, generator=generator, dtype=F64)
    mixture = HeadMixture(heads, value, out)
    dense = sf.couplings.MatrixValued(mixture.to_dense())
    for ours, theirs in ((mixture, dense), (mixture.transpose(), dense.transpose())):
        torch.testing.assert_close(ours.apply(state), theirs.apply(state))
    absent = torch.zeros(2, N, dtype=torch.bool)
    absent[:, 1] = True
    torch.testing.assert_close(mixture.mask(absent).apply(state), dense.mask(absent).apply(state))
    scalar = sf.couplings.Dense(heads.to_dense())
    split = heads_of(state)
    for ours, theirs in (
        (heads.transpose(), scalar.transpose()),
        (heads.symmetrize(), scalar.symmetrize()),
        (heads.mask(absent[:, None]), scalar.mask(absent[:, None])),
    ):
        torch.testing.assert_close(ours.apply(split), theirs.apply(split))


def test_one_step_is_the_response_to_one_round_of_attention(x):
    block = block_of(steps=1, beta=1.3)
    out, report = block(x, return_report=True)
    site, h = sf.Sphere(D // H), heads_of(x)
    start = site.mean(1.3 * h)
    torch.testing.assert_close(heads_of(out), site.mean(1.3 * (h + report.couplings @ start)))
    expected = block_of(beta=1.3)
    expected.load_state_dict(block.state_dict())
    change = site.mean(1.3 * (h + report.couplings @ heads_of(out))) - heads_of(out)
    torch.testing.assert_close(report.residual, change.abs().amax((-2, -1)))


@pytest.mark.parametrize("heads", ["split", "mixed"])
def test_fused_couplings_are_those_written_out(heads, x):
    block = block_of(steps=2, heads=heads, beta=0.5)
    written = block_of(steps=2, heads=heads, beta=0.5, fused=False)
    written.load_state_dict(block.state_dict())
    padding = torch.zeros(3, N, dtype=torch.bool)
    padding[1, 3:], padding[2, 1:] = True, True  # in the last sequence a token is alone
    bias = torch.randn(N, N, dtype=F64)
    for options in (
        {},
        {"src_key_padding_mask": padding},
        {"is_causal": True},
        {"src_mask": bias, "src_key_padding_mask": padding},
    ):
        leaf = x.clone().requires_grad_()
        one, two = block(leaf, **options), written(leaf, **options)
        torch.testing.assert_close(one, two)
        (slope,) = torch.autograd.grad(one.square().sum(), leaf)
        (expected,) = torch.autograd.grad(two.square().sum(), leaf)
        torch.testing.assert_close(slope, expected)
    torch.testing.assert_close(block(x, return_report=True)[0], block(x))


def test_fused_couplings_keep_the_couplings_interface(generator):
    query, key = (torch.randn(2, H, N, 4, generator=generator, dtype=F64) for _ in range(2))
    blocked = torch.zeros(N, N, dtype=torch.bool)
    blocked[0] = True
    fused = FusedHeads(query, key, torch.tensor([0.5, 2.0], dtype=F64), blocked, None)
    state = torch.randn(2, H, N, 4, generator=generator, dtype=F64)
    absent = torch.zeros(2, 1, N, dtype=torch.bool)
    absent[:, :, 1] = True
    dense = sf.couplings.Dense(fused.to_dense())
    for ours, theirs in (
        (fused, dense),
        (fused.transpose(), dense.transpose()),
        (fused.symmetrize(), dense.symmetrize()),
        (fused.with_tensors(*fused.tensors()), dense),
        (fused.mask(absent), dense.mask(absent)),
    ):
        torch.testing.assert_close(ours.apply(state), theirs.apply(state))
    assert fused.num_spins == N and fused.batch_shape == (2, H) and not fused.is_symmetric


def test_many_steps_reach_the_fixed_point(x):
    fixed = block_of()
    steps = block_of(steps=200)
    steps.load_state_dict(fixed.state_dict())
    torch.testing.assert_close(steps(x), fixed(x), rtol=0, atol=1e-10)


def test_where_the_solve_starts_does_not_move_the_fixed_point(x):
    block = block_of(beta=0.5)
    for initial in ("learned", torch.randn(N, D, dtype=F64)):
        other = block_of(beta=0.5, initial=initial)
        other.load_state_dict(block.state_dict(), strict=False)
        # Contracts with at most beta = 0.5 here, so the solution is unique.
        torch.testing.assert_close(other(x), block(x), rtol=0, atol=1e-10)


def test_field_stream_of_a_block_that_adds_nothing_is_the_identity(x):
    block = block_of(stream="field", beta=0.7)
    torch.nn.init.zeros_(block.self_attn.strength)
    torch.testing.assert_close(block(x), x)
    site = sf.Sphere(D // H)
    torch.testing.assert_close(heads_of(block.readout(x)), site.mean(0.7 * heads_of(x)))


def test_field_stream_carries_the_conjugate_field(x):
    block = block_of(stream="field", couplings="symmetric", beta=0.7)
    out, report = block(x, return_report=True)
    site = sf.Sphere(D // H)
    torch.testing.assert_close(site.mean(0.7 * heads_of(out)), report.magnetization)


def test_stack_of_fields_ends_with_the_response(x):
    encoder = Encoder(block_of(stream="field"), 2)
    first, last = encoder.layers
    torch.testing.assert_close(encoder(x), last.readout(last(first(x))))
    assert (encoder(x).unflatten(-1, (H, -1)).norm(dim=-1) < 2).all()  # the radius


def test_stack_of_magnetizations_starts_in_the_ball(x):
    encoder = Encoder(block_of(stream="magnetization"), 2)
    first, last = encoder.layers
    # 10 x is far outside the ball; its response is not.
    torch.testing.assert_close(encoder(10 * x), last(first(first.embed(10 * x))))


def test_nothing_outlives_a_forward_without_backward(x):
    """Without the help of the garbage collector: no cycle holds the graph."""
    block = block_of(dim_feedforward=6)
    hidden = x.requires_grad_() * 1
    alive = weakref.ref(hidden)
    gc.disable()
    try:
        out = block(hidden)
        del hidden, out
        assert alive() is None
    finally:
        gc.enable()


def test_magnetization_stream_lifts_what_it_reads(x):
    plain = block_of(beta=0.7)
    block = block_of(stream="magnetization", beta=0.7)
    torch.nn.init.zeros_(block.self_attn.strength)
    m = block.embed(x)
    torch.testing.assert_close(block(m), m)  # response after inverse response
    with pytest.raises(ValueError, match="strictly inside the ball of radius 2"):
        block(10 * x)
    assert torch.equal(plain.embed(x), x) and torch.equal(plain.readout(x), x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"couplings": "symmetric", "dim_feedforward": 6},
        {"heads": "mixed"},
        {"stream": "field", "dim_feedforward": 6},
        {"approximation": "steepest_descent", "couplings": "symmetric"},
        {"approximation": "steepest_descent", "couplings": "symmetric", "auxiliary": "shared"},
    ],
)
def test_gradients_of_first_and_second_order(options):
    block = FreeEnergyBlock(4, 2, dtype=F64, tolerance=1e-12, **options)
    x = torch.randn(2, 3, 4, dtype=F64, requires_grad=True)
    parameters = tuple(block.parameters())

    def run(x, *values):
        named = dict(zip(dict(block.named_parameters()), values, strict=True))
        return torch.func.functional_call(block, named, (x,))

    assert gradcheck(run, (x, *parameters), fast_mode=True)
    assert gradgradcheck(block, (x,), fast_mode=True)


def test_warns_once_and_goes_on(x):
    """Forward and backward of three passes, and of a copy, which remembers."""
    block = block_of(max_iterations=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            out = block(x)
            out.sum().backward()
        pickle.loads(pickle.dumps(block))(x)
    assert [w.category for w in caught] == [sf.ConvergenceWarning]
    assert torch.isfinite(out).all()
    with pytest.raises(sf.ConvergenceError):
        block_of(max_iterations=2, on_failure="raise")(x)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_a_sequence_that_cannot_be_squared_spoils_no_shared_weight(value):
    block = FreeEnergyBlock(D, H, dim_feedforward=6)
    x = torch.randn(2, N, D)
    block(x[:1]).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in block.named_parameters()}
    block.zero_grad()
    x[1, 0] = value
    out = block(x)
    assert torch.isnan(out[1]).all()
    out[0].square().sum().backward()
    for name, parameter in block.named_parameters():
        # Another batch size may round sums differently: float32.
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


def test_dropout_of_fixed_couplings():
    block = FreeEnergyBlock(D, H, couplings="fixed", num_spins=N, dropout=0.5)
    x = torch.randn(2, N, D)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))
    _, report = block.train()(x, return_report=True)
    torch.testing.assert_close(report.couplings, report.couplings.mT)


@pytest.mark.parametrize("couplings", ["fixed", "matrix", "mixer"])
def test_fixed_couplings_inside_torch_encoder(couplings):
    """It hands the padding mask on as numbers: these couplings have no logits to add them to."""
    block = FreeEnergyBlock(D, H, couplings=couplings, num_spins=N)
    encoder = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    x = torch.randn(2, N, D)
    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[1, 3:] = True
    expected = block(block(x, src_key_padding_mask=padding), src_key_padding_mask=padding)
    torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), expected)
    with pytest.raises(ValueError, match="biases"):
        block(x, src_key_padding_mask=torch.full((2, N), -0.5))


def test_a_sequence_with_nan_keeps_it(x):
    block = block_of(dim_feedforward=6)
    broken = x.clone()
    broken[1, 2, 0] = torch.nan
    out, report = block(broken, return_report=True)
    assert torch.isnan(out[1]).all() and report.converged.tolist() == [
        [True] * H,
        [False] * H,
        [True] * H,
    ]
    torch.testing.assert_close(out[[0, 2]], block(x)[[0, 2]])
    out[[0, 2]].sum().backward()
    found = {name: p.grad.clone() for name, p in block.named_parameters()}
    block.zero_grad()
    block(x[[0, 2]]).sum().backward()
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"approximation": "steepest_descent"}, "couplings='symmetric'"),
        (
            {"approximation": "steepest_descent", "couplings": "symmetric", "heads": "mixed"},
            "heads='split'",
        ),
        (
            {"approximation": "steepest_descent", "couplings": "symmetric", "steps": 2},
            "steps=None",
        ),
        (
            {"approximation": "steepest_descent", "couplings": "symmetric", "initial": "learned"},
            "initial=None",
        ),
        ({"approximation": "tap"}, "'tap' needs a free energy.*couplings='symmetric'"),
        (
            {"approximation": "adaptive_tap", "couplings": "symmetric", "heads": "mixed"},
            "'adaptive_tap' does not go with heads='mixed'.*heads='split'",
        ),
        ({"approximation": "tap", "couplings": "symmetric", "steps": 1}, "steps=None"),
        ({"auxiliary": "shard"}, "nearest is 'shared'"),
        ({"auxiliary": "shared"}, "'mean_field' with auxiliary='shared'"),
        ({"couplings": "fixed"}, "num_spins"),
        ({"couplings": "fixed", "num_spins": 0}, "num_spins=0 must be at least 1"),
        ({"num_spins": 4}, "num_spins=4"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"steps": True}, "steps=True"),
        ({"beta": 0.0}, "beta=0.0"),
        ({"beta": torch.inf}, "beta=inf"),
        ({"dropout": 1.5}, "dropout=1.5"),
        ({"activation": "tanh"}, "activation='tanh'"),
        ({"fused": 1}, "fused=1 must be True, False or 'auto'"),
        ({"fused": True, "couplings": "fixed", "num_spins": 4}, "couplings='softmax' or"),
        ({"fused": True, "couplings": "symmetric", "steps": 2}, "steps=2 with.*fused='auto'"),
        ({"fused": True, "couplings": "symmetric", "approximation": "tap"}, "'mean_field'"),
        ({"approximation": "meanfield"}, "nearest is 'mean_field'"),
        ({"initial": "learnt"}, "nearest is 'learned'"),
        ({"dim_feedforward": 0}, "dim_feedforward=0"),
        ({"radius": "big"}, "radius='big'"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        FreeEnergyBlock(D, H, **options)


def test_bad_initial(x):
    with pytest.raises(TypeError, match="initial is list"):
        block_of(initial=[0.0])
    with pytest.raises(ValueError, match=r"initial has shape \(3, 8\)"):
        block_of(initial=torch.zeros(3, D, dtype=F64))(x)
    padding = torch.zeros(3, N, dtype=torch.bool)
    padding[:, -1] = True
    initial = torch.zeros(N, D, dtype=F64)
    initial[-1] = torch.nan  # of a token that is not there
    for steps in (None, 2):
        block = block_of(initial=initial, steps=steps)
        assert torch.isfinite(block(x, src_key_padding_mask=padding)).all()


def test_bad_inputs(x):
    causal = torch.ones(N, N, dtype=torch.bool).triu(1)
    with pytest.raises(ValueError, match="couplings='softmax'"):
        block_of(couplings="symmetric")(x, causal)
    with pytest.raises(ValueError, match="couplings='softmax'"):
        block_of(couplings="symmetric", approximation="steepest_descent")(x, is_causal=True)
    fixed = block_of(couplings="fixed", num_spins=4, derivative="total")
    with pytest.raises(ValueError, match="derivative='total' needs"):
        fixed(x[:, :4], is_causal=True)
    with pytest.raises(ValueError, match="5 tokens.*num_spins=4"):
        fixed(x)
    with pytest.raises(ValueError, match="biases"):
        fixed(x[:, :4], torch.ones(4, 4, dtype=F64))
