"""The Hopfield block retrieves, and never climbs."""

import random

import pytest
import torch
from torch import nn

from spinformer.descent import HopfieldEnergy, Verdict
from spinformer.nn.descent_block import energy_along_depth
from spinformer.nn.encoder import Encoder
from spinformer.nn.hopfield import HopfieldBlock

D, H, N = 12, 3, 6


def make(**options: object) -> HopfieldBlock:
    """A block away from its initialization."""
    block = HopfieldBlock(D, H, dtype=torch.float64, **options)
    for parameter in block.parameters():
        nn.init.normal_(parameter, parameter.mean().item(), 0.4)
    return block


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (20, N, D)), dtype=torch.float64)


def test_never_rises():
    """Any masks over pairs, causal ones and biases too: patterns do not move."""
    draw = random.Random(0)
    for seed in range(100):
        torch.manual_seed(seed)
        stored = draw.choice([None, None, 7])
        block = make(
            num_patterns=stored,
            data_term=draw.choice(["input", "network", None]),
            step=draw.choice([0.5, 1.0, 2.0]),
            steps=4,
            norm=draw.choice(["layer", None]),
        )
        # Sharp and flat memories.
        nn.init.uniform_(block.log_beta, -3, 3)
        x, source = 2 * tokens(4, N, D), tokens(4, N, D)
        masks = {"src_key_padding_mask": torch.rand(4, N) < 0.3}
        choice = draw.choice(["none", "pairs", "bias", "causal"])
        if choice == "pairs" or (choice == "bias" and stored):
            masks["src_mask"] = torch.rand(4 * H, N, N) < 0.4
        elif choice == "bias":
            masks["src_mask"] = torch.randn(N, N, dtype=torch.float64)
        masks["is_causal"] = choice == "causal"
        out, report = block(x, **masks, source=source, return_report=True)
        books = block.monitor(x, **masks, source=source)
        assert books.counts()["rose"] == books.counts()["broken"] == 0
        assert (books.verdict == Verdict.GUARANTEED).all()
        torch.testing.assert_close(report.energy_before, books.energy[:-1])
        torch.testing.assert_close(report.energy_after, books.energy[1:])
        torch.testing.assert_close(books.state, out)
        torch.testing.assert_close(block.energy(x, **masks, source=source), report.energy_before[0])


def test_each_head_is_a_hopfield_network():
    """Its own update, in an orthogonal subspace of the channels."""
    block = make(num_patterns=7, data_term=None, norm=None)
    x = tokens(2, N, D)
    out, report = block(x, return_report=True)
    frames = block._move(0, block._prepare(x, None, None, False, None)[0]).energy.frames
    joint = frames.permute(1, 0, 2).reshape(D, D)
    torch.testing.assert_close(joint @ joint.mT, torch.eye(D, dtype=torch.float64))
    for head in range(H):
        beta, patterns = block.log_beta[head].exp(), block.patterns[head]
        weights = (beta * x @ frames[head] @ patterns.mT).softmax(-1)
        torch.testing.assert_close(out @ frames[head], weights @ patterns)
        torch.testing.assert_close(report.retrieval[:, head], weights)
    assert report.couplings is None
    total = sum(
        HopfieldEnergy(block.patterns[h], block.log_beta[h].exp()).energy(x @ frames[h])
        for h in range(H)
    )
    torch.testing.assert_close(report.energy_before[0], total)


def test_association_of_tokens():
    """Softmax attention whose values are its keys; the data term is the skip connection."""
    block = make()
    x = tokens(2, N, D)
    out, report = block(x, return_report=True)
    state = block.norm(x)
    frames = block._move(0, block._prepare(x, None, None, False, None)[0]).energy.terms[0].frames
    weight = block.log_data_weight.exp()
    for head in range(H):
        keys = state @ block.patterns[head]
        attention = (block.log_beta[head].exp() * state @ frames[head] @ keys.mT).softmax(-1)
        torch.testing.assert_close(report.couplings[:, head], attention)
        expected = (attention @ keys + weight * state @ frames[head]) / (1 + weight)
        torch.testing.assert_close(out @ frames[head], expected)


def test_stored_tokens_are_retrieved():
    """Sharp memory: a token near a pattern falls onto it, in one step."""
    block = HopfieldBlock(
        D, 1, num_patterns=5, data_term=None, norm=None, beta=40.0, dtype=torch.float64
    )
    nn.init.zeros_(block.generator)  # the frame is then the identity
    stored = 2 * torch.eye(5, D, dtype=torch.float64)
    block.patterns.data[0] = stored
    noisy = stored + 0.1 * torch.randn_like(stored)
    # Weights of other patterns are exp(-40 (4 - O(0.1))).
    torch.testing.assert_close(block(noisy), stored, rtol=0, atol=1e-8)


def test_memory():
    block = make(data_term=None, steps=2)
    x, memory = tokens(3, N, D), tokens(3, 9, D)
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[1, 4:] = True
    memory[padding] = torch.nan
    out, report = block(x, memory=memory, memory_key_padding_mask=padding, return_report=True)
    assert report.retrieval.shape == (3, H, N, 9)
    assert (report.retrieval[1, :, :, 4:] == 0).all()
    assert (report.energy_after <= report.energy_before).all()
    torch.testing.assert_close(out[1], block(x[1], memory=memory[1, :4]))
    # Every token finds for itself, and the tokens' own memory is the default.
    torch.testing.assert_close(
        out[:, 2:3], block(x[:, 2:3], memory=memory, memory_key_padding_mask=padding)
    )
    torch.testing.assert_close(block(x, memory=x), block(x))
    nobody = block(x, memory=memory, memory_key_padding_mask=torch.ones_like(padding))
    torch.testing.assert_close(nobody, torch.zeros_like(x))
    second = HopfieldBlock(D, H, data_term=None, steps=2, batch_first=False, dtype=torch.float64)
    second.load_state_dict(block.state_dict())
    flipped = second(
        x.transpose(0, 1), memory=memory.transpose(0, 1), memory_key_padding_mask=padding
    )
    torch.testing.assert_close(flipped.transpose(0, 1), out)


def test_stack_of_stored_patterns_is_one_descent():
    block = make(num_patterns=5, tied=True, norm=None, data_term="network")
    encoder, x = Encoder(block, 4), tokens(3, N, D)
    out, reports = encoder(x, return_report=True)
    books = energy_along_depth(encoder, x)
    torch.testing.assert_close(books.state, out)
    torch.testing.assert_close(books.energy[1:], torch.cat([r.energy_after for r in reports]))
    assert (books.rise < 0).all()
    alone = Encoder(make(steps=3), 1)
    books = energy_along_depth(alone, x)
    torch.testing.assert_close(books.state, alone(x))
    torch.testing.assert_close(books.energy, alone.layers[0].monitor(x).energy)
    with pytest.raises(ValueError, match="depends on the layer's input"):
        energy_along_depth(Encoder(make(tied=True, norm=None, data_term="network"), 2), x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_patterns": 0}, "num_patterns=0 must be at least 1"),
        ({"beta": 0.0}, r"beta=0\.0 must be positive"),
        ({"step": 2.1}, r"step=2\.1 must be in \(0, 2\]"),
        ({"steps": 0}, "steps=0"),
        ({"data_term": "zero"}, "data_term='zero' is not an option"),
        ({"data_weight": -1.0}, r"data_weight=-1\.0"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        HopfieldBlock(D, H, **options)


def test_errors_of_memory():
    x, memory = tokens(2, N, D), tokens(2, 4, D)
    with pytest.raises(ValueError, match="the block has stored patterns"):
        make(num_patterns=3)(x, memory=memory)
    block = make()
    with pytest.raises(ValueError, match="a mask over pairs with memory"):
        block(x, is_causal=True, memory=memory)
    with pytest.raises(ValueError, match="memory has 1 systems and x has 2"):
        block(x, memory=memory[:1])
    with pytest.raises(ValueError, match="without memory"):
        block(x, memory_key_padding_mask=torch.zeros(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="has finite entries"):
        block(x, memory=memory, memory_key_padding_mask=torch.rand(2, 4))


@pytest.mark.parametrize("options", [{}, {"data_term": None}])
def test_learns(options):
    """Which of two kinds of token is the more frequent: needs the other tokens."""
    x = torch.randn(128, 5, 8)
    target = (x[:, :, 0] > 0).sum(-1).gt(2).long()
    block = HopfieldBlock(8, 2, **options)
    model = nn.Sequential(Encoder(block, 2), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        loss = nn.functional.cross_entropy(model(x).mean(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (model(x).mean(1).argmax(-1) == target).double().mean()
    # Chance is 0.5.
    assert accuracy > 0.85


def test_stored_patterns_learn_the_tokens():
    """Two clusters, two patterns: what is retrieved becomes what was seen."""
    centers = torch.tensor([[2.0], [-2.0]]).expand(2, 8)
    x = (centers[torch.arange(64) % 2] + 0.2 * torch.randn(64, 8)).unsqueeze(0)
    # A sharp memory would leave the pattern that nobody finds where it is.
    block = HopfieldBlock(8, 1, num_patterns=2, data_term=None, norm=None, beta=0.1)
    optimizer = torch.optim.Adam(block.parameters(), 5e-2)
    losses = []
    for _ in range(300):
        loss = (block(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # The noise is 0.04; one pattern for both would leave the centers' spread.
    assert losses[-1] < 0.06 < losses[0]
