"""The block descends what it says it descends."""

import copy
import itertools
import pickle
import random

import pytest
import torch
from torch import nn

from spinformer.descent import (
    MemoryEnergy,
    NetworkEnergy,
    PairwiseEnergy,
    Proximal,
    Rho,
    Verdict,
)
from spinformer.descent.activation import SoftThreshold
from spinformer.nn.descent_block import energy_along_depth
from spinformer.nn.encoder import Encoder
from spinformer.nn.energy_descent import EnergyDescentBlock

D, H, N = 12, 3, 6


def make(**options: object) -> EnergyDescentBlock:
    """A block away from its initialization."""
    block = EnergyDescentBlock(D, H, dtype=torch.float64, **options)
    for parameter in block.parameters():
        nn.init.normal_(parameter, parameter.mean().item(), 0.3)
    return block


def tokens(batch: int = 20) -> torch.Tensor:
    return torch.randn(batch, N, D, dtype=torch.float64)


@pytest.mark.parametrize("rho", ["exp", "log1p", "log2p"])
@pytest.mark.parametrize("data_term", ["input", "network", None])
@pytest.mark.parametrize("step", [1.0, 1.9])
def test_attention_never_raises_the_energy(rho, data_term, step):
    options = {"feedforward": False, "activation": None, "steps": 5}
    x, source = tokens(), tokens()
    padding = torch.rand(20, N) < 0.3
    for _ in range(10):
        block = make(rho=rho, data_term=data_term, step=step, **options)
        _, report = block(x, src_key_padding_mask=padding, source=source, return_report=True)
        assert report.energy_before.shape == (5, 20)
        # Sums of at most H N^2 + N D terms of size one.
        assert (report.energy_after <= report.energy_before + 1e-12).all()
        assert (report.energy_after < report.energy_before)[:, (~padding).sum(-1) > 1].any(0).all()


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 220), marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", ["majorize_minimize", "backtracking"])
def test_sum_never_rises(algorithm, seeds):
    """Random options, parameters, tokens and symmetric masks; judged by the true energy."""
    draw = random.Random(seeds.start)
    fell = 0
    for seed in seeds:
        torch.manual_seed(seed)
        block = make(
            rho=draw.choice(["exp", "log1p", "log2p"]),
            data_term=draw.choice(["input", "network", "zero", None]),
            heads=draw.choice(["orthonormal", "free"]),
            feedforward=draw.choice(["linear", "memory", "network", False]),
            activation=draw.choice(
                ["relu", "soft_threshold", "monotone_gelu", "leaky_relu", "box", "softplus", "tanh"]
            ),
            step=draw.choice([0.3, 1.0, 1.9, 2.0]),
            norm=draw.choice(["layer", None]),
            algorithm=algorithm,
            tied=True,
            steps=3,
        )
        if draw.random() < 0.4 and block.steps[0].feedforward != "network":
            options = {"activation": None, "norm": None, "steps": 3, "tied": True}
            plain = make(**options, algorithm=algorithm, step=block.step, feedforward=False)
            block = draw.choice([plain, make(**options, algorithm=algorithm, step=block.step)])
        x, source = 2 * tokens(4), tokens(4)
        masks = {"src_key_padding_mask": torch.rand(4, N) < 0.3}
        if draw.random() < 0.5:
            pairs = torch.rand(4 * H, N, N) < 0.3
            masks["src_mask"] = pairs | pairs.mT
        _, report = block(x, **masks, source=source, return_report=True)
        books = block.monitor(x, **masks, source=source)
        assert books.counts()["rose"] == books.counts()["broken"] == 0, block
        assert (books.verdict != Verdict.UNDEFINED).all(), block
        assert books.region["algorithm"].all(), block
        fell += int((books.rise < -books.threshold).sum())
        # From the second state on it is in the domain, and the report tells the same.
        torch.testing.assert_close(report.energy_after, books.energy[1:])
        torch.testing.assert_close(report.energy_before[1:], books.energy[1:-1])
    # Of 12 steps a block; few start at a minimum (systems without tokens, say).
    assert fell > 8 * len(seeds)


def test_turns_may_raise_what_the_sum_s_step_does_not():
    """Why there is a choice of algorithms: the parts' own steps are blind to each other."""
    rose = {"aim": 0, "majorize_minimize": 0}
    for seed in range(40):
        for algorithm in rose:
            torch.manual_seed(seed)
            block = make(algorithm=algorithm, activation=None, steps=4, tied=True)
            for part in (block.steps[0].weight, block.steps[0].bias):
                nn.init.normal_(part, std=2.0)
            rose[algorithm] += block.monitor(tokens(5)).counts()["rose"]
    assert rose["aim"] > 0
    assert rose["majorize_minimize"] == 0


def test_systems_keep_their_step_beside_masked_ones():
    """A graph halves the step of the systems that have one, and of no other."""
    block = make(algorithm="majorize_minimize", activation=None, norm=None)
    x = tokens(2)
    pairs = torch.zeros(2, H, N, N, dtype=torch.bool)
    pairs[1, :, 0, 1] = pairs[1, :, 1, 0] = True
    out = block(x, src_mask=pairs)
    torch.testing.assert_close(out[0], block(x[0]))
    assert not torch.allclose(out[1], block(x[1]))
    # What stands at an absent token makes no mask asymmetric.
    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[:, 2] = True
    pairs[0, :, 2, 3] = True
    torch.testing.assert_close(
        block(x, src_mask=pairs, src_key_padding_mask=padding)[0],
        block(x[0], src_key_padding_mask=padding[0]),
    )
    block.algorithm = "gradient"
    block.monitor(x, src_mask=pairs, src_key_padding_mask=padding)


@pytest.mark.parametrize("algorithm", ["majorize_minimize", "gradient", "aim_gradient"])
@pytest.mark.parametrize("activation", ["soft_threshold", None])
def test_steps_of_the_sum(algorithm, activation):
    """By hand, from values and curvatures of the energies."""
    block = make(
        feedforward="memory", algorithm=algorithm, activation=activation, step=0.3, norm=None
    )
    x, step = tokens(2), block.steps[0]
    pairwise = step.pairwise(torch.float64, data=x)
    memory = step.position_wise(torch.float64)
    assert isinstance(memory, MemoryEnergy)
    slope = torch.func.grad(lambda y: (pairwise + memory).energy(y).sum())(x)
    size = torch.tensor(0.3, dtype=torch.float64)
    if algorithm == "majorize_minimize":
        squares = step.log_scale.exp().square()
        degree = pairwise.kernel(x).degree * squares[:, None]
        p = 2 * degree.amax(-2) + step.log_data_weight.exp() + 1
        size = (0.3 / p).unsqueeze(-1)
    if algorithm == "aim_gradient":
        moved = x - 0.3 * pairwise.gradient(x)
        size = torch.tensor(0.5, dtype=torch.float64)
        moved = moved - 0.5 * memory.gradient(moved)
    else:
        moved = x - size * slope
    if activation is not None:
        moved = moved.sign() * (moved.abs() - size).clamp_min(0.0)
    torch.testing.assert_close(block(x), moved)


def test_gradient_descends_below_its_bound_only():
    x = tokens(8)
    options = {"algorithm": "gradient", "activation": None, "tied": True, "steps": 5}
    for step, always in ((1e-3, True), (2.0, False)):
        torch.manual_seed(1)
        books = make(**options, step=step).monitor(x)
        assert books.region["algorithm"].all() == always
        assert (books.counts()["rose"] == 0) == always


@pytest.mark.parametrize("activation", ["relu", "softplus", "tanh", "monotone_gelu"])
def test_network_is_the_mlp_energy(activation):
    """Without attention: its concave-convex step, and its energy with the conjugate."""
    block = make(
        feedforward="network",
        activation=activation,
        feedforward_step=1.0,
        data_term=None,
        dim_feedforward=5,
        steps=3,
        tied=True,
    )
    step = block.steps[0]
    network = NetworkEnergy(step.weight.mT, activation, step.bias)
    alone = torch.ones(N, N, dtype=torch.bool).fill_diagonal_(False)
    x = tokens(4)
    out, report = block(x, src_mask=alone, return_report=True)
    state = block.norm(x)
    for index in range(3):
        state = network.step(state)
        # The pairs of a token with itself are a constant.
        own = PairwiseEnergy("exp", step.pairwise(torch.float64).weights).energy(state[:, :1])
        torch.testing.assert_close(report.energy_after[index], network.energy(state) + N * own)
    torch.testing.assert_close(out, state)
    assert (report.energy_after.diff(dim=0) <= 1e-10).all()


@pytest.mark.parametrize("activation", ["relu", "soft_threshold", "monotone_gelu", "sigmoid"])
@pytest.mark.parametrize("size", [1.0, 0.4])
def test_activation_is_a_proximal_map(activation, size):
    """The nearest point of least penalty, found on a grid; at size 1 the activation."""
    block = make(activation=activation, feedforward=False, feedforward_step=size, data_term=None)
    bare = make(activation=None, feedforward=False, data_term=None)
    bare.load_state_dict(block.state_dict())
    x = tokens(1)
    before, after = bare(x).flatten()[:40], block(x).flatten()[:40]
    grid = torch.linspace(-4, 4, 160_001, dtype=torch.float64)
    penalty = block._algorithm.penalty.value(grid)
    objective = size * penalty + (grid - before.unsqueeze(-1)).square() / 2
    # The grid's spacing is 5e-5.
    torch.testing.assert_close(after, grid[objective.argmin(-1)], rtol=0, atol=6e-5)


def test_activations_of_a_user():
    x = tokens(2)
    threshold = make(activation=SoftThreshold(0.3), feedforward_step=1.0)
    named = make(activation=Proximal.from_activation(SoftThreshold(0.3)), feedforward_step=1.0)
    named.load_state_dict(threshold.state_dict())
    torch.testing.assert_close(threshold(x), named(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(named))(x), named(x))


@pytest.mark.parametrize("algorithm", ["aim", "majorize_minimize"])
def test_spheres(algorithm):
    """Norms stay, of each head's part or of each token, and the energy falls."""
    for seed in range(30):
        torch.manual_seed(seed)
        block = make(
            normalizer="sphere",
            algorithm=algorithm,
            feedforward=False,
            activation=None,
            norm=None,
            tied=True,
            steps=4,
        )
        x = tokens()
        out = block(x)
        books = block.monitor(x, keep_states=True)
        assert books.counts()["rose"] == 0
        assert books.region["algorithm"].all()
        assert (books.rise < 0).all()
        torch.testing.assert_close(books.states[-1], out)
        step = block.steps[0]
        frames = step.pairwise(torch.float64).weights / step.log_scale.exp()[:, None, None]
        parts = [x, out] if algorithm != "aim" else [y.unsqueeze(1) @ frames for y in (x, out)]
        torch.testing.assert_close(*(part.norm(dim=-1) for part in parts))
    # On a graph half a step of a part is what is proven.
    apart = torch.eye(N, dtype=torch.bool).flip(0)
    for step in (1.0, 0.5):
        block.step = step
        proven = block.monitor(x, src_mask=apart).region["algorithm"]
        assert proven.all() == (step == 0.5 or algorithm != "aim")


def test_one_free_head_is_whole_attention():
    """A square matrix of all heads: each token becomes the mean that it attends to."""
    block = EnergyDescentBlock(
        D, 1, heads="free", data_term=None, feedforward=False, activation=None, dtype=torch.float64
    )
    x = tokens(2)
    out, report = block(x, return_report=True)
    torch.testing.assert_close(out, report.couplings[:, 0] @ block.norm(x))
    several = make(heads="free", feedforward=False, activation=None, steps=4, step=2.0)
    _, report = several(x, return_report=True)
    assert (report.energy_after <= report.energy_before + 1e-12).all()


def test_regularizer_is_data_at_zero():
    zero, network = make(data_term="zero"), make(data_term="network")
    network.load_state_dict(zero.state_dict())
    nn.init.zeros_(network.norm.bias)
    nn.init.zeros_(zero.norm.bias)
    x = tokens(2)
    torch.testing.assert_close(zero(x), network(x, source=torch.zeros_like(x)))


def test_energy_along_depth():
    options = {"tied": True, "norm": None, "data_term": "network", "steps": 2}
    block = make(algorithm="majorize_minimize", activation="soft_threshold", **options)
    encoder, x = Encoder(block, 3), tokens(3)
    padding = torch.rand(3, N) < 0.3
    out, reports = encoder(x, src_key_padding_mask=padding, return_report=True)
    books = energy_along_depth(encoder, x, src_key_padding_mask=padding)
    assert books.terms.shape == (3, 7, 3)
    torch.testing.assert_close(books.energy[1:], torch.cat([r.energy_after for r in reports]))
    torch.testing.assert_close(books.state, out)
    assert books.counts()["guaranteed"] == 18
    for changed, message in (
        ({"tied": False}, r"parameters of their own \(tied=False, say\)"),
        ({"norm": "layer"}, "a norm between the layers"),
        ({"data_term": "input"}, "depends on the layer's input"),
    ):
        other = Encoder(make(**{**options, **changed}), 2)
        with pytest.raises(ValueError, match=message):
            energy_along_depth(other, x)
    # torch copies the layer, tied or not: copies may differ.
    copies = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    with pytest.raises(ValueError, match="parameters of their own"):
        energy_along_depth(copies, x)
    with pytest.raises(TypeError, match="layers TransformerEncoderLayer"):
        energy_along_depth(Encoder(nn.TransformerEncoderLayer(D, H), 2), x)
    with pytest.raises(ValueError, match="each step descends an energy of its own"):
        make(steps=2).monitor(x)


def test_theorems_are_watched():
    """Gradient steps in turn are what Theorems 4.1 and 5.1 are about."""
    for activation, theorem in ((None, "theorem_4_1"), ("relu", "theorem_5_1")):
        block = make(
            algorithm="aim_gradient",
            step=0.01,
            feedforward_step=0.02,
            activation=activation,
            feedforward="memory",
            tied=True,
            steps=4,
        )
        books = block.monitor(tokens())
        assert theorem in books.region
        assert books.counts()["broken"] == 0
        assert (books.verdict == Verdict.GUARANTEED).any()


def test_copies_share_nothing():
    block = make(algorithm="backtracking", activation="monotone_gelu")
    x, other = tokens(2), copy.deepcopy(block)
    expected = block(x)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    torch.testing.assert_close(block(x), expected)


def test_sizes_can_be_changed():
    short, long = make(step=0.3, feedforward_step=0.2), make()
    long.load_state_dict(short.state_dict())
    long.step, long.feedforward_step = 0.3, 0.2
    x = tokens(2)
    assert torch.equal(long(x), short(x))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"algorithm": "majorize_minimize", "activation": None, "tied": True, "steps": 2},
        {"algorithm": "aim_gradient", "feedforward": "memory", "activation": "soft_threshold"},
    ],
)
@pytest.mark.compile
def test_compiles_without_a_break(options):
    block, x = make(**options), tokens(2)
    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[0, 4:] = True
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for call, y in zip((compiled, block), inputs, strict=True):
        call(y, src_key_padding_mask=padding).square().sum().backward()
    torch.testing.assert_close(compiled(x), block(x))
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


def test_tied_stack_is_one_long_descent():
    block = make(
        tied=True, norm=None, data_term="network", feedforward=False, activation=None, steps=2
    )
    _, reports = Encoder(block, 6)(tokens(), return_report=True)
    path = torch.cat([reports[0].energy_before[:1], *[report.energy_after for report in reports]])
    assert path.shape == (13, 20)
    assert (path.diff(dim=0) <= 1e-12).all()
    for report, following in itertools.pairwise(reports):
        torch.testing.assert_close(report.energy_after[-1], following.energy_before[0])


def test_memory_step_with_activation_descends_from_the_second_step_on():
    """The energy of a non-negative state; attention is left out by isolating the tokens."""
    for seed in range(20):
        torch.manual_seed(seed)
        block = make(feedforward="memory", feedforward_step=1.0, data_term=None, steps=6, tied=True)
        alone = torch.ones(N, N, dtype=torch.bool).fill_diagonal_(False)
        _, report = block(tokens(), src_mask=alone, return_report=True)
        rise = (report.energy_after - report.energy_before)[1:]
        assert (rise <= 1e-10 * (1 + report.energy_before[1:].abs())).all()


def test_heads_are_softmax_attention():
    """rho = "exp" without other terms: every head moves its channels to their weighted mean."""
    block = make(data_term=None, feedforward=False, activation=None)
    x = tokens(2)
    out, report = block(x, return_report=True)
    step = block.steps[0]
    frame = step.pairwise(torch.float64).weights / step.log_scale.exp()[:, None, None]
    joint = frame.permute(1, 0, 2).reshape(D, D)
    torch.testing.assert_close(joint @ joint.mT, torch.eye(D, dtype=torch.float64))
    state = block.norm(x)
    for head, scale in enumerate(step.log_scale.exp()):
        local = state @ frame[head]
        logits = scale**2 * (local @ local.mT - local.square().sum(-1).unsqueeze(-2) / 2)
        torch.testing.assert_close(report.couplings[:, head], logits.softmax(-1))
        torch.testing.assert_close(out @ frame[head], logits.softmax(-1) @ local)


def test_data_term_pulls_to_the_data():
    """lambda to infinity: the token is its data; lambda to 0: it is the mean that it attends to."""
    x, source = tokens(2), tokens(2)
    options = {"data_term": "network", "feedforward": False, "activation": None, "norm": None}
    strong, weak, none = make(**options), make(**options), make(**{**options, "data_term": None})
    shared = none.state_dict()
    for block, value in ((strong, 40.0), (weak, -40.0)):
        block.load_state_dict(shared, strict=False)
        nn.init.constant_(block.steps[0].log_data_weight, value)
    torch.testing.assert_close(strong(x, source=source), source)
    torch.testing.assert_close(weak(x, source=source), none(x))


@pytest.mark.parametrize("feedforward", [True, "memory"])
def test_parts_of_a_step(feedforward):
    """Attention, feed-forward step, activation, one after the other, by the energies' own steps."""
    block = make(feedforward=feedforward, step=0.7, feedforward_step=0.3)
    x = tokens(2)
    step, state = block.steps[0], block.norm(x)
    moved = step.pairwise(torch.float64, data=state).step(state, 0.7)
    moved = step.position_wise(torch.float64).step(moved, 0.3)
    torch.testing.assert_close(block(x), moved.relu())


def test_energy_is_that_of_the_report():
    block, x = make(steps=2), tokens(3)
    padding = torch.rand(3, N) < 0.3
    out, report = block(x, src_key_padding_mask=padding, return_report=True)
    energy = block.energy(x, src_key_padding_mask=padding)
    torch.testing.assert_close(energy, report.energy_before[0])
    assert out.shape == x.shape
    assert block.energy(x[0]).shape == ()
    state = block.norm(x[0])
    step = block.steps[0]
    pairs = PairwiseEnergy("exp", step.pairwise(torch.float64).weights).energy(state)
    expected = pairs + step.position_wise(torch.float64).energy(state)
    torch.testing.assert_close(block.energy(x[0]), expected)


def test_masks_over_pairs():
    block, x = make(), tokens(2)
    _, report = block(x, is_causal=True, return_report=True)
    assert report.energy_before is None
    assert report.energy_after is None
    with pytest.raises(ValueError, match="the mask over pairs is not symmetric"):
        block.energy(x, is_causal=True)
    pairs = torch.rand(N, N) < 0.4
    quiet = make(feedforward=False, activation=None)
    _, report = quiet(x, src_mask=pairs | pairs.mT, return_report=True)
    assert (report.energy_after <= report.energy_before + 1e-12).all()
    bias = torch.randn(N, N)
    _, report = quiet(x, src_mask=bias + bias.mT, return_report=True)
    # The bonds are exponentials of the bias: the energy is a sum of terms of up to exp(max).
    slack = 1e-12 * float((bias + bias.mT).exp().sum())
    assert (report.energy_after <= report.energy_before + slack).all()


def test_steps_have_their_own_parameters_unless_tied():
    count = {
        (tied, steps): sum(
            p.numel() for p in EnergyDescentBlock(D, H, tied=tied, steps=steps).parameters()
        )
        for tied in (False, True)
        for steps in (1, 3)
    }
    norm = 2 * D
    assert count[True, 3] == count[True, 1] == count[False, 1]
    assert count[False, 3] - norm == 3 * (count[False, 1] - norm)


def test_own_profile_of_a_network():
    profile = Rho(torch.sqrt, lambda z: 0.5 * (z + 1e-6).rsqrt())
    assert EnergyDescentBlock(D, H, rho=profile)(torch.randn(2, N, D)).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 0.0}, r"step=0\.0 must be in \(0, 2\]"),
        ({"step": 2.5}, r"step=2\.5 must be in \(0, 2\]"),
        ({"feedforward_step": -1.0}, r"feedforward_step=-1\.0"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"data_weight": 0.0}, r"data_weight=0\.0 must be positive"),
        ({"data_term": "inputs"}, "the nearest is 'input'"),
        ({"activation": "gelu"}, "activation='gelu' is not monotone.*'monotone_gelu'"),
        ({"activation": "rleu"}, "activation='rleu' is not an option; the nearest is 'relu'"),
        ({"feedforward": "linaer"}, "the nearest is 'linear'"),
        ({"dim_feedforward": 8}, "dim_feedforward=8 with feedforward=True"),
        ({"dim_feedforward": 0, "feedforward": "memory"}, "dim_feedforward=0"),
        ({"rho": "log"}, "rho='log' is not an option"),
        ({"heads": "fre"}, "the nearest is 'free'"),
        ({"algorithm": "majorise_minimise"}, "the nearest is 'majorize_minimize'"),
        ({"normalizer": "spheer"}, "the nearest is 'sphere'"),
        ({"feedforward": "network", "activation": None}, "the network needs one"),
        ({"feedforward_step": 0.3, "algorithm": "gradient"}, "feedforward_step=0.3 with algorithm"),
        ({"normalizer": "sphere", "step": 1.5}, r"step=1\.5 must be in \(0, 1\]"),
        ({"normalizer": "sphere", "algorithm": "gradient"}, "'sphere' with algorithm='gradient'"),
        (
            {"normalizer": "sphere", "algorithm": "majorize_minimize"},
            "activation='relu': the proximal map leaves the spheres",
        ),
        ({"algorithm": "aim_gradient", "feedforward": False}, "Use algorithm='gradient'"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        EnergyDescentBlock(D, H, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": "free", "activation": "monotone_gelu", "feedforward_step": 1.0},
        {"algorithm": "majorize_minimize", "steps": 2},
        {"algorithm": "backtracking", "feedforward": "memory", "activation": "leaky_relu"},
        {"feedforward": "network", "activation": "softplus", "feedforward_step": 1.0},
        {"normalizer": "sphere"},
    ],
)
def test_learns(options):
    """Which of two kinds of token is the more frequent: needs the other tokens."""
    x = torch.randn(128, 5, 8)
    target = (x[:, :, 0] > 0).sum(-1).gt(2).long()
    model = nn.Sequential(Encoder(EnergyDescentBlock(8, 2, **options), 2), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        loss = nn.functional.cross_entropy(model(x).mean(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (model(x).mean(1).argmax(-1) == target).double().mean()
    # Chance is 0.5.
    assert accuracy > 0.85
