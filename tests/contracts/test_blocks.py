"""What every block of ``spinformer.nn`` keeps, whatever it computes.

A new block, or an option that changes the computation, joins by one line in ``FACTORIES``.
"""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from spinformer.nn.encoder import Encoder
from spinformer.nn.energy_descent import EnergyDescentBlock
from spinformer.nn.energy_transformer import EnergyTransformerBlock
from spinformer.nn.free_energy import FreeEnergyBlock
from spinformer.nn.hopfield import HopfieldBlock
from spinformer.nn.transformer import TransformerBlock

D, H, B, N = 8, 2, 3, 5

Factory = Callable[..., nn.Module]


def option(cls: type[nn.Module], **options: object) -> Factory:
    return lambda **more: cls(D, H, **options, **more)


def free_energy(**options: object) -> Factory:
    # tolerance=None is 1e-10 in float64, below the comparisons' 1e-7, and 1e-5 in float32. A batch
    # that a test drives to a slow fixed point is given the iterations it needs.
    return option(FreeEnergyBlock, tolerance=None, max_iterations=1000, **options)


FACTORIES: dict[str, Factory] = {
    "transformer": option(TransformerBlock),
    "transformer-written-out": option(TransformerBlock, fused=False, norm="rms", qk_norm=True),
    "descent": option(EnergyDescentBlock),
    "descent-smooth": option(EnergyDescentBlock, activation=None, data_term=None, steps=2),
    "descent-memory": option(EnergyDescentBlock, rho="log1p", feedforward="memory", norm="rms"),
    "descent-tied": option(EnergyDescentBlock, rho="log2p", tied=True, steps=3, norm=None),
    "descent-network": option(EnergyDescentBlock, data_term="network", feedforward=False),
    "descent-free": option(
        EnergyDescentBlock, heads="free", data_term="zero", activation="soft_threshold"
    ),
    "descent-mlp": option(
        EnergyDescentBlock, feedforward="network", feedforward_step=1.0, activation="softplus"
    ),
    "descent-numeric": option(EnergyDescentBlock, data_term=None, activation="monotone_gelu"),
    "descent-sphere": option(
        EnergyDescentBlock, normalizer="sphere", feedforward=False, activation=None, steps=2
    ),
    "descent-sphere-sum": option(
        EnergyDescentBlock, normalizer="sphere", activation=None, algorithm="majorize_minimize"
    ),
    "descent-sum": option(
        EnergyDescentBlock, algorithm="majorize_minimize", activation=None, steps=2
    ),
    "descent-sum-prox": option(
        EnergyDescentBlock, heads="free", algorithm="majorize_minimize", activation="tanh", step=1.5
    ),
    "descent-gradient": option(EnergyDescentBlock, algorithm="gradient", step=0.1),
    "descent-aim-gradient": option(EnergyDescentBlock, algorithm="aim_gradient", step=0.1),
    "descent-backtracking": option(EnergyDescentBlock, algorithm="backtracking", steps=2),
    "descent-backtracking-smooth": option(
        EnergyDescentBlock, algorithm="backtracking", activation=None, tied=True, steps=2
    ),
    "hopfield": option(HopfieldBlock),
    "hopfield-pure": option(HopfieldBlock, data_term=None, norm="rms", step=1.5, steps=2),
    "hopfield-network": option(HopfieldBlock, data_term="network", tied=True),
    "hopfield-stored": option(HopfieldBlock, num_patterns=6, steps=2, norm=None),
    "energy-transformer": option(EnergyTransformerBlock, steps=2),
    "energy-transformer-safe": option(
        EnergyTransformerBlock, dim_feedforward=0, steps=2, step=0.5, safe=True
    ),
    "mean-field": free_energy(),
    "mean-field-plain": free_energy(solver="plain", response="large_d", norm="rms"),
    "mean-field-mlp": free_energy(dim_feedforward=6, initial="learned", beta=0.5),
    "mean-field-step": free_energy(steps=2, radius=1.0),
    "mean-field-written-out": free_energy(steps=2, fused=False),
    "mean-field-mixed-step": free_energy(steps=1, heads="mixed"),
    "mean-field-mixed": free_energy(heads="mixed", beta=0.5),
    "mean-field-streamed": free_energy(fused=True),
    "mean-field-linear": free_energy(couplings="linear"),
    "mean-field-reaction": free_energy(correction="mlp", beta=0.5),
    "mean-field-mixed-reaction": free_energy(correction="mlp", heads="mixed", steps=2),
    "mean-field-field": free_energy(stream="field", dim_feedforward=6),
    "mean-field-symmetric": free_energy(couplings="symmetric", beta=0.5),
    "mean-field-tied": free_energy(couplings="symmetric", heads="mixed", beta=0.3),
    "steepest-descent": free_energy(approximation="steepest_descent", couplings="symmetric"),
    "steepest-descent-total": free_energy(
        approximation="steepest_descent", couplings="symmetric", derivative="total"
    ),
    "mean-field-total": free_energy(couplings="symmetric", derivative="total", beta=0.5),
    "mean-field-mixed-total": free_energy(
        couplings="symmetric", heads="mixed", derivative="total", dim_feedforward=6, beta=0.3
    ),
    "tap": free_energy(approximation="tap", couplings="symmetric", beta=0.5),
    "adaptive-tap-total": free_energy(
        approximation="adaptive_tap", couplings="symmetric", derivative="total", beta=0.5
    ),
    "steepest-descent-shared": free_energy(
        approximation="steepest_descent", couplings="symmetric", auxiliary="shared", stream="field"
    ),
}

BLOCKS = (
    TransformerBlock,
    EnergyDescentBlock,
    HopfieldBlock,
    EnergyTransformerBlock,
    FreeEnergyBlock,
)

# Those that can be differentiated twice everywhere near a random point (no kink, no fused kernel).
SMOOTH = (
    "transformer-written-out",
    "descent-smooth",
    "descent-sphere",
    "descent-sum",
    "hopfield",
    "hopfield-stored",
    "energy-transformer-safe",
    "mean-field",
    "mean-field-written-out",
    "mean-field-mixed",
    "mean-field-streamed",
    "mean-field-linear",
    "mean-field-reaction",
    "steepest-descent",
    "steepest-descent-total",
    "mean-field-total",
    "adaptive-tap-total",
    "steepest-descent-shared",
)

# Those that have no answer to an asymmetric mask over pairs, a causal one say, and refuse it.
SYMMETRIC = (
    "descent-sphere-sum",
    "descent-sum",
    "descent-sum-prox",
    "descent-gradient",
    "descent-aim-gradient",
    "descent-backtracking",
    "descent-backtracking-smooth",
    "energy-transformer",
    "energy-transformer-safe",
    "mean-field-linear",
    "mean-field-symmetric",
    "mean-field-tied",
    "mean-field-total",
    "mean-field-mixed-total",
    "tap",
    "adaptive-tap-total",
    "steepest-descent",
    "steepest-descent-total",
    "steepest-descent-shared",
)

# Those that have no pairs a mask could act on, and refuse all masks but padding.
PADDING_ONLY = ("mean-field-linear",)

# Those whose tokens don't see each other: they keep every mask that forbids it.
ALONE = ("hopfield-stored",)

masked_pairs = pytest.mark.parametrize("name", [n for n in FACTORIES if n not in PADDING_ONLY])


@pytest.fixture(params=FACTORIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def factory(name: str) -> Factory:
    return FACTORIES[name]


@pytest.fixture
def causal(name: str) -> bool:
    """Whether the block takes asymmetric masks."""
    return name not in SYMMETRIC


@pytest.fixture
def block(factory: Factory) -> nn.Module:
    return factory(dtype=torch.float64)


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*(shape or (B, N, D)), dtype=dtype)


def parameter_gradients(block: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*block.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, gradients, strict=True))


def probe(out: Tensor) -> Tensor:
    """A loss that treats every entry differently."""
    weights = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)
    return (out * weights).sum() + out.square().sum() / 2


# -- construction ------------------------------------------------------------------------------


def test_unknown_option_names_the_nearest(factory):
    with pytest.raises(TypeError, match=r"no option 'batch_frist'; the nearest is 'batch_first'"):
        factory(batch_frist=True)


@pytest.mark.parametrize("cls", BLOCKS)
def test_heads_divide_the_width(cls):
    with pytest.raises(ValueError, match=r"d_model=10.*nhead=3"):
        cls(10, 3)


@pytest.mark.parametrize("nhead", [8, 4, 1])
@pytest.mark.parametrize("cls", BLOCKS)
def test_narrow_heads(cls, nhead):
    assert cls(8, nhead)(tokens(dtype=torch.float32)).isfinite().all()


def test_device_and_dtype(factory):
    block = factory(device="meta", dtype=torch.bfloat16)
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in block.parameters()} == {"meta"}


@pytest.mark.parametrize("cls", BLOCKS)
def test_made_without_memory(cls):
    with torch.device("meta"):
        block = cls(8, 2)
    assert {p.device.type for p in block.parameters()} == {"meta"}


def test_parameters_are_redrawn(factory):
    block = factory()
    before = copy.deepcopy(block.state_dict())
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(1.0)
    block.reset_parameters()
    for name, value in block.state_dict().items():
        # Same law: constants return to their value, random entries to their scale.
        assert (value - before[name]).abs().max() < 1e-6 or value.std() < 2 * before[name].std()


# -- shapes ------------------------------------------------------------------------------------


def test_unbatched_is_a_batch_of_one(block):
    x = tokens(N, D)
    torch.testing.assert_close(block(x), block(x[None])[0])
    padding = torch.tensor([False, True, False, False, True])
    expected = block(x[None], src_key_padding_mask=padding[None])[0]
    torch.testing.assert_close(block(x, src_key_padding_mask=padding), expected)


def test_batch_axis(factory):
    first, second = factory(dtype=torch.float64), factory(dtype=torch.float64, batch_first=False)
    second.load_state_dict(first.state_dict())
    assert first.self_attn.batch_first
    assert not second.self_attn.batch_first
    x, padding = tokens(N, N, D), torch.rand(N, N) < 0.3
    out = second(x.transpose(0, 1), src_key_padding_mask=padding).transpose(0, 1)
    torch.testing.assert_close(out, first(x, src_key_padding_mask=padding))


def test_systems_do_not_mix(block):
    x = tokens()
    out = block(x)
    for system in range(B):
        torch.testing.assert_close(block(x[system]), out[system])


@pytest.mark.parametrize("shape", [(0, N, D), (B, 0, D), (0, 0, D), (0, D)])
def test_empty(block, causal, shape):
    x = tokens(*shape).requires_grad_(True)
    padding = torch.zeros(shape[:-1], dtype=torch.bool)
    for options in ({}, {"src_key_padding_mask": padding}, {"is_causal": causal}):
        out = block(x, **options)
        assert out.shape == shape
        (slope,) = torch.autograd.grad(out.sum(), x)
        assert slope.shape == shape
        assert all(g.isfinite().all() for g in parameter_gradients(block, block(x).sum()).values())


@pytest.mark.parametrize(
    ("shape", "message"),
    [((D,), "x has shape"), ((1, B, N, D), "x has shape"), ((B, N, D + 1), f"d_model={D}")],
)
def test_wrong_shapes(block, shape, message):
    with pytest.raises(ValueError, match=message):
        block(tokens(*shape))


def test_wrong_dtype(block):
    with pytest.raises(ValueError, match=r"x has dtype torch\.float32"):
        block(tokens(dtype=torch.float32))


def test_wrong_masks(block):
    x = tokens()
    with pytest.raises(ValueError, match=r"src_key_padding_mask has shape \(5, 3\)"):
        block(x, src_key_padding_mask=torch.zeros(N, B, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"src_mask has shape \(3, 5, 5\)"):
        block(x, src_mask=torch.zeros(B, N, N, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"src_mask has dtype torch\.int64"):
        block(x, src_mask=torch.zeros(N, N, dtype=torch.int64))


# -- masks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_padding_equals_alone(block, side):
    """Outputs, and gradients for inputs and parameters."""
    alone = tokens(2, 3, D).requires_grad_(True)
    place = {"left": [4, 5, 6], "right": [0, 1, 2], "inside": [1, 3, 6]}[side]
    padded = torch.full((2, 7, D), torch.nan, dtype=torch.float64)
    padded[:, place] = alone.detach()
    padded.requires_grad_(True)
    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[:, place] = False

    expected, out = block(alone), block(padded, src_key_padding_mask=padding)
    torch.testing.assert_close(out[:, place], expected)
    assert (out[padding] == 0).all()

    (slope,) = torch.autograd.grad(probe(out), padded, retain_graph=True)
    (expected_slope,) = torch.autograd.grad(probe(expected), alone, retain_graph=True)
    torch.testing.assert_close(slope[:, place], expected_slope)
    assert (slope[padding] == 0).all()
    torch.testing.assert_close(
        parameter_gradients(block, probe(out)), parameter_gradients(block, probe(expected))
    )


def test_ignored_content_changes_nothing(block):
    x = tokens()
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, 2:4] = True
    out = block(x, src_key_padding_mask=padding)
    assert torch.equal(block(x + 1e3 * padding.unsqueeze(-1), src_key_padding_mask=padding), out)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("return_report", [True, False])
def test_fully_masked_sequence(block, training, grad, return_report):
    x = tokens(2, N, D).requires_grad_(grad)
    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[1] = True
    block.train(training)
    with torch.set_grad_enabled(grad):
        out = block(x, src_key_padding_mask=padding, return_report=return_report)
    if return_report:
        out, _ = out
    assert out.isfinite().all()
    assert (out[1] == 0).all()
    torch.testing.assert_close(out[0], block(x[0]))
    if grad:
        (slope,) = torch.autograd.grad(probe(out), x, retain_graph=True)
        assert slope.isfinite().all()
        assert (slope[1] == 0).all()
        torch.testing.assert_close(
            parameter_gradients(block, probe(out)), parameter_gradients(block, probe(block(x[0])))
        )


@masked_pairs
def test_token_that_hears_nobody(block, causal):
    """A row of the mask over pairs may be full: finite, in the gradients too."""
    x = tokens().requires_grad_(True)
    mask = torch.zeros(N, N, dtype=torch.bool)
    mask[2] = True
    if not causal:
        mask = mask | mask.mT
    out = block(x, src_mask=mask)
    (slope,) = torch.autograd.grad(probe(out), x, retain_graph=True)
    for value in (out, slope, *parameter_gradients(block, probe(out)).values()):
        assert value.isfinite().all()


@masked_pairs
@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_boolean_mask_is_minus_infinity(block, lowest):
    x = tokens()
    pairs = torch.rand(B * H, N, N) < 0.3
    pairs = pairs | pairs.mT  # every block takes a symmetric mask
    padding = torch.rand(B, N) < 0.3
    expected = block(x, src_mask=pairs, src_key_padding_mask=padding)
    out = block(
        x,
        src_mask=torch.zeros(pairs.shape).masked_fill(pairs, lowest),
        src_key_padding_mask=torch.zeros(padding.shape).masked_fill(padding, lowest),
    )
    torch.testing.assert_close(out, expected)
    full = pairs.view(B, H, N, N)
    torch.testing.assert_close(block(x, src_mask=full, src_key_padding_mask=padding), expected)


@pytest.mark.parametrize("name", [n for n in FACTORIES if n not in (*PADDING_ONLY, *ALONE)])
def test_finite_mask_is_a_bias(block):
    """Zero changes nothing, and a very negative entry approaches a blocked pair."""
    x = tokens()
    torch.testing.assert_close(block(x, src_mask=torch.zeros(N, N)), block(x))
    blocked = torch.zeros(N, N, dtype=torch.bool)
    blocked[0, 1:3] = blocked[1:3, 0] = blocked[3, 4] = blocked[4, 3] = True
    # exp(-60) is below the rounding of float64 beside the bonds that are left.
    biased = block(x, src_mask=torch.zeros(N, N).masked_fill(blocked, -60.0))
    torch.testing.assert_close(biased, block(x, src_mask=blocked))
    bias = -torch.rand(N, N)
    assert not torch.allclose(block(x, src_mask=bias + bias.mT), block(x))


def test_asymmetric_mask_is_refused_where_it_has_no_answer(block, causal):
    if causal:
        block(tokens(), is_causal=True)
        return
    with pytest.raises(ValueError, match="mask.*('softmax'|algorithm='aim')"):
        block(tokens(), is_causal=True)


@pytest.mark.parametrize("name", ALONE)
def test_tokens_alone(block):
    x = tokens()
    apart = torch.stack([block(token) for token in x.flatten(0, 1).unsqueeze(1)]).view_as(x)
    torch.testing.assert_close(block(x), apart)
    torch.testing.assert_close(block(x, is_causal=True), apart)
    torch.testing.assert_close(block(x, torch.zeros(N, N)), apart)
    with pytest.raises(ValueError, match="Pass a boolean mask"):
        block(x, -torch.rand(N, N))


@pytest.mark.parametrize("name", PADDING_ONLY)
def test_mask_over_pairs_is_refused_where_there_are_none(block):
    for mask in (torch.eye(N, dtype=torch.bool), torch.zeros(N, N)):
        with pytest.raises(ValueError, match="pass a boolean padding mask"):
            block(tokens(), mask)


@pytest.mark.parametrize("name", [n for n in FACTORIES if n not in (*SYMMETRIC, *ALONE)])
def test_causal(block):
    x = tokens(N, D)
    jacobian = torch.autograd.functional.jacobian(lambda y: block(y, is_causal=True), x)
    future = torch.ones(N, N).triu(1).bool()
    assert (jacobian.permute(0, 2, 1, 3)[future] == 0).all()
    past = jacobian.permute(0, 2, 1, 3)[torch.ones(N, N).tril(-1).bool()]
    assert (past.abs().amax((-2, -1)) > 0).all()
    perturbed = x.clone()
    perturbed[3:] += 1e3
    # A solve stops when its last token is done: earlier ones move within the tolerance.
    torch.testing.assert_close(
        block(perturbed, is_causal=True)[:3], block(x, is_causal=True)[:3], rtol=0, atol=1e-8
    )
    mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    torch.testing.assert_close(block(x, src_mask=mask), block(x, is_causal=True))
    torch.testing.assert_close(block(x, src_mask=mask, is_causal=True), block(x, is_causal=True))
    prefix = block(x[:3], is_causal=True)
    torch.testing.assert_close(block(x, is_causal=True)[:3], prefix)


def test_permutation(block):
    x, order = tokens(), torch.randperm(N)
    torch.testing.assert_close(block(x[:, order]), block(x)[:, order])


# -- derivatives -------------------------------------------------------------------------------


def test_gradient(block):
    x = tokens(2, 3, D).requires_grad_(True)
    names = [name for name, _ in block.named_parameters()]

    def function(y: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(block, dict(zip(names, values, strict=True)), (y,))

    assert torch.autograd.gradcheck(function, (x, *block.parameters()), fast_mode=True)


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivative(name):
    block = FACTORIES[name](dtype=torch.float64)
    x = tokens(2, 3, D).requires_grad_(True)
    padding = torch.tensor([[False, False, True], [True, True, True]])
    assert torch.autograd.gradgradcheck(
        lambda y: block(y, src_key_padding_mask=padding), (x,), fast_mode=True
    )


def test_second_derivative_of_the_fused_kernel_raises():
    block = FACTORIES["transformer"](dtype=torch.float64)
    x = tokens().requires_grad_(True)
    (slope,) = torch.autograd.grad(probe(block(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative"):
        slope.sum().backward()


def test_modes(block):
    x = tokens()
    with torch.no_grad():
        assert not block(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(block(x), block.eval()(x))
    assert block.eval()(x).requires_grad


def test_frozen_parameter_leaves_the_others(block):
    x = tokens()
    expected = parameter_gradients(block, probe(block(x)))
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(False)
        others = [(n, p) for n, p in block.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(
            probe(block(x)), [p for _, p in others], allow_unused=True, materialize_grads=True
        )
        for (other, _), gradient in zip(others, gradients, strict=True):
            torch.testing.assert_close(gradient, expected[other])
        parameter.requires_grad_(True)
        assert name in expected


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_degenerate_tokens(block, value):
    """Zero tokens and equal tokens: finite, with gradients not far from generic ones."""
    for parameter in block.parameters():
        # Biases start at zero, where the norms of a pre-norm layer all meet zero tokens and their
        # gains of 1 / sqrt(1e-5) multiply. That point is passed in the first step of training.
        if (parameter == 0).all():
            nn.init.normal_(parameter, std=0.1)
    x = torch.full((B, N, D), value, dtype=torch.float64, requires_grad=True)
    generic = tokens().requires_grad_(True)
    (slope,) = torch.autograd.grad(block(x).sum(), x)
    (reference,) = torch.autograd.grad(block(generic).sum(), generic)
    assert block(x).isfinite().all()
    assert slope.norm() <= 1e4 * reference.norm()


# -- precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(factory, name, dtype):
    exact, block = factory(), factory(dtype=dtype)
    x = tokens(dtype=torch.float32).to(dtype)
    block.load_state_dict(exact.state_dict())
    exact.load_state_dict(block.state_dict())
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1], padding[2, 3:] = True, True
    pairs = torch.zeros(N, N, dtype=torch.bool)
    pairs[0, 1] = pairs[1, 0] = True
    pairs = None if name in PADDING_ONLY else pairs
    out = block(x, src_mask=pairs, src_key_padding_mask=padding)
    expected = exact(x.float(), src_mask=pairs, src_key_padding_mask=padding)
    assert out.dtype == dtype
    assert out.isfinite().all()
    # A few roundings of numbers of size one: 16 eps.
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
def test_autocast(factory, causal, input_dtype):
    block = factory()
    x = tokens(dtype=torch.float32).to(input_dtype)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1], padding[2, 3:] = True, True
    expected = block(x.float(), src_key_padding_mask=padding, is_causal=causal)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(x, src_key_padding_mask=padding, is_causal=causal)
    assert out.dtype == input_dtype
    tolerance = 16 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    gradients = parameter_gradients(block, probe(out.float()))
    reference = parameter_gradients(block, probe(expected))
    for name, gradient in gradients.items():
        error = (gradient - reference[name]).norm()
        # The roundings of bfloat16, relative to the largest gradient.
        assert error <= tolerance * max(g.norm() for g in reference.values()), name


# -- a module among modules --------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True])
def test_copies(block, used):
    x = tokens()
    if used:
        probe(block(x)).backward()
    expected = block(x)
    assert torch.equal(copy.deepcopy(block)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(block))(x), expected)
    buffer = io.BytesIO()
    torch.save(block, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), expected)


def test_state_dict(factory):
    first, second = factory(dtype=torch.float64), factory(dtype=torch.float64)
    x = tokens()
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize("training", [True, False])
def test_hooks(block, training):
    seen = []
    block.train(training)
    block.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    x = tokens()
    with torch.no_grad():
        block(x)
    block(x)
    Encoder(block, 2)(x)
    assert seen == [(B, N, D)] * 4


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_inside_torch_encoder(factory, causal, training, grad):
    block = factory()
    encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False).train(training)
    x = tokens(dtype=torch.float32)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1], padding[2, 3:] = True, True
    with torch.set_grad_enabled(grad):
        out = encoder(x, src_key_padding_mask=padding)
        expected = block(block(x, src_key_padding_mask=padding), src_key_padding_mask=padding)
        torch.testing.assert_close(out, expected)
        if causal:
            mask = nn.Transformer.generate_square_subsequent_mask(N)
            out = encoder(x, mask=mask, is_causal=True)
            torch.testing.assert_close(out, block(block(x, is_causal=True), is_causal=True))


def test_as_encoder_layer_of_torch_transformer(factory):
    encoder = nn.TransformerEncoder(factory(), 1, enable_nested_tensor=False)
    model = nn.Transformer(
        D, H, num_decoder_layers=1, dim_feedforward=D, custom_encoder=encoder, batch_first=True
    )
    x = tokens(dtype=torch.float32)
    assert model(x, x).isfinite().all()


def test_report(block):
    x = tokens()
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, 3:] = True
    out, report = block(x, src_key_padding_mask=padding, return_report=True)
    torch.testing.assert_close(out, block(x, src_key_padding_mask=padding))
    if report.couplings is not None:
        assert report.couplings.shape == (B, H, N, N)
        assert (report.couplings[1, :, :, 3:] == 0).all()


def test_encoder(factory, causal):
    block = factory(dtype=torch.float64)
    encoder = Encoder(block, 3)
    assert len(encoder.layers) == 3
    x = tokens()
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1], padding[2, 3:] = True, True
    x[padding] = torch.nan
    x.requires_grad_(True)
    out, reports = encoder(x, src_key_padding_mask=padding, is_causal=causal, return_report=True)
    assert len(reports) == 3
    assert (out[padding] == 0).all()
    again = encoder(x, src_key_padding_mask=padding, is_causal=causal)
    torch.testing.assert_close(again, out)
    gradients = parameter_gradients(encoder, probe(out))
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    flipped = Encoder(factory(dtype=torch.float64, batch_first=False), 3)
    flipped.load_state_dict(encoder.state_dict())
    transposed = flipped(x.transpose(0, 1), src_key_padding_mask=padding, is_causal=causal)
    torch.testing.assert_close(transposed.transpose(0, 1), out)
