"""The Energy Transformer block follows the force of its energy."""

import random

import pytest
import torch
from torch import nn

from spinformer.descent import EnergyAttention, EnergyLayerNorm, EnergyTransformer, Verdict
from spinformer.nn.descent_block import energy_along_depth
from spinformer.nn.encoder import Encoder
from spinformer.nn.energy_transformer import EnergyTransformerBlock

D, H, N = 12, 3, 6


def make(**options: object) -> EnergyTransformerBlock:
    """A block away from its initialization."""
    block = EnergyTransformerBlock(D, H, dtype=torch.float64, **options)
    for parameter in block.parameters():
        nn.init.normal_(parameter, parameter.mean().item(), 0.4)
    return block


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (20, N, D)), dtype=torch.float64)


def by_hand(block: EnergyTransformerBlock, x: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """E(g) from the paper's formula; ``pairs`` (N, N), True where i sees j."""
    centered = x - x.mean(-1, keepdim=True)
    deviation = (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    g = block.log_gain.exp() * centered / deviation + block.bias
    total = -(g @ block.patterns.mT).relu().square().sum((-2, -1)) / 2
    for h in range(H):
        beta = block.log_beta[h].exp()
        scores = beta * (g @ block.query[h]) @ (g @ block.key[h]).mT
        total = total - (scores.exp() * pairs).sum(-1).log().sum(-1) / beta
    return total


def test_step_is_the_force_on_the_normalized_tokens():
    block = make(steps=1, step=0.07)
    x, pairs = tokens(2, N, D), ~torch.eye(N, dtype=torch.bool)
    out, report = block(x, return_report=True)
    torch.testing.assert_close(report.energy_before[0], by_hand(block, x, pairs))
    torch.testing.assert_close(report.energy_after[0], by_hand(block, out, pairs))
    # dE/dg by autograd: where the norm is the identity to first order it is read off directly.
    model = block._move(0, block._prepare(x, None, None, False, None)[0]).energy
    g = model.normalized(x).detach().requires_grad_()
    (slope,) = torch.autograd.grad(model.terms.energy(g).sum(), g)
    torch.testing.assert_close(out, x - 0.07 * slope)
    assert (report.couplings.diagonal(dim1=-2, dim2=-1) == 0).all()
    torch.testing.assert_close(report.couplings.sum(-1), torch.ones(2, H, N).double())


def test_gradient_in_the_tokens():
    block = make()
    x = tokens(3, N, D)
    padding = torch.rand(3, N) < 0.3
    energy = block._move(0, block._prepare(x, None, padding, False, None)[0]).energy
    assert isinstance(energy, EnergyTransformer)
    state = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy.energy(state, padding).sum(), state)
    torch.testing.assert_close(energy.gradient(x, padding), slope)


def test_safe_steps_never_rise_and_long_ones_may():
    rose = 0
    draw = random.Random(0)
    for seed in range(60):
        torch.manual_seed(seed)
        hidden, step = draw.choice([None, 0, 5]), draw.choice([0.1, 1.0, 100.0])
        block = make(dim_feedforward=hidden, step=step, steps=4, safe=True)
        x = draw.choice([0.1, 1.0, 5.0]) * tokens(4, N, D)
        masks = {"src_key_padding_mask": torch.rand(4, N) < 0.3}
        if draw.random() < 0.5:
            pairs = torch.rand(4 * H, N, N) < 0.4
            masks["src_mask"] = pairs | pairs.mT
        books = block.monitor(x, **masks)
        assert books.counts()["rose"] == books.counts()["broken"] == 0
        assert (books.verdict == Verdict.GUARANTEED).all()
        _, report = block(x, **masks, return_report=True)
        torch.testing.assert_close(report.energy_after, books.energy[1:])
        block.safe = False
        rose += block.monitor(x, **masks).counts()["rose"]
    assert rose > 5


def test_small_steps_are_not_shortened():
    """Away from the bound the two kinds of steps are one."""
    block = make(step=1e-3, steps=3)
    x = tokens()
    expected = block(x)
    block.safe = True
    torch.testing.assert_close(block(x), expected)
    assert block.monitor(x).counts()["guaranteed"] == 60


def test_causal_mask_has_an_energy_and_is_not_causal():
    """Why it is refused: a token feels those that attend to it."""
    block = make(steps=1)
    x = tokens(N, D)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    attention = EnergyAttention(
        block.query, block.key, block.log_beta.exp(), graph=causal, attend_self=True
    )
    model = EnergyTransformer(EnergyLayerNorm(block.log_gain.exp(), block.bias), attention)
    expected = by_hand(block, x, causal)
    memory = -(model.normalized(x) @ block.patterns.mT).relu().square().sum() / 2
    torch.testing.assert_close(model.energy(x) + memory, expected)
    jacobian = torch.autograd.functional.jacobian(lambda y: model.step(y, 0.1), x)
    future = jacobian.permute(0, 2, 1, 3)[torch.ones(N, N).triu(1).bool()]
    assert (future.abs().amax((-2, -1)) > 1e-4).all()
    for masks in ({"is_causal": True}, {"src_mask": ~causal}):
        for call in (block, block.energy, block.monitor):
            with pytest.raises(ValueError, match="hear, by the force on it as a key"):
                call(x, **masks)


def test_tied_stack_is_one_long_descent():
    block = make(steps=2, step=1e-3, tied=True)
    encoder, x = Encoder(block, 3), tokens(3, N, D)
    out, reports = encoder(x, return_report=True)
    books = energy_along_depth(encoder, x)
    torch.testing.assert_close(books.state, out)
    torch.testing.assert_close(books.energy[1:], torch.cat([r.energy_after for r in reports]))
    assert (books.rise < 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim_feedforward": -1}, "dim_feedforward=-1"),
        ({"beta": 0.0}, r"beta=0\.0 must be positive"),
        ({"step": 0.0}, r"step=0\.0 must be positive"),
        ({"steps": 0}, "steps=0"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        EnergyTransformerBlock(D, H, **options)


def test_learns():
    """Which of two kinds of token is the more frequent: needs the other tokens."""
    x = torch.randn(128, 5, 8)
    target = (x[:, :, 0] > 0).sum(-1).gt(2).long()
    model = nn.Sequential(EnergyTransformerBlock(8, 2, steps=4), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        loss = nn.functional.cross_entropy(model(x).mean(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (model(x).mean(1).argmax(-1) == target).double().mean()
    # Chance is 0.5.
    assert accuracy > 0.85
