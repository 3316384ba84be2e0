"""The block descends what it says it descends."""

import itertools

import pytest
import torch
from torch import nn

from spinformer.descent import PairwiseEnergy, Rho
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
    moved = step.pairwise(torch.float64).step(state, 0.7, data=state)
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
        ({"activation": "gelu"}, "activation='gelu' is not an option"),
        ({"feedforward": "linaer"}, "the nearest is 'linear'"),
        ({"dim_feedforward": 8}, "dim_feedforward=8 with feedforward=True"),
        ({"dim_feedforward": 0, "feedforward": "memory"}, "dim_feedforward=0"),
        ({"rho": "log"}, "rho='log' is not an option"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        EnergyDescentBlock(D, H, **options)


def test_learns():
    """Which of two kinds of token is the more frequent: needs the other tokens."""
    x = torch.randn(128, 5, 8)
    target = (x[:, :, 0] > 0).sum(-1).gt(2).long()
    model = nn.Sequential(Encoder(EnergyDescentBlock(8, 2), 2), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        loss = nn.functional.cross_entropy(model(x).mean(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (model(x).mean(1).argmax(-1) == target).double().mean()
    # Chance is 0.5.
    assert accuracy > 0.85
