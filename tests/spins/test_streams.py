"""Streams: the published generator, uniform, independent of the batch, and of their neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from spinformer.spins.streams import Streams

# The first outputs of SplitMix64 from the state 1234567, as its authors' code prints them.
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]
DTYPES = [torch.float32, torch.float64]


def uint64(bits: torch.Tensor) -> list[int]:
    return bits.numpy().view(np.uint64).tolist()


def test_published_sequence() -> None:
    streams = Streams(torch.tensor(1234567))
    assert uint64(streams.bits(5)) == PUBLISHED
    one_by_one = Streams(torch.tensor(1234567))
    assert [uint64(one_by_one.bits()[None])[0] for _ in range(5)] == PUBLISHED
    assert uint64(Streams(torch.tensor([1234567]), position=3).bits(2)[0]) == PUBLISHED[3:]
    assert streams.position == 5


def test_words_are_the_halves_of_the_bits() -> None:
    bits = Streams(torch.tensor([5, 6])).bits(4)
    words = Streams(torch.tensor([5, 6])).words(7)
    halves = torch.stack([(bits << 32) >> 32, bits >> 32], -1).flatten(1)  # little-endian
    assert words.dtype == torch.int32
    assert torch.equal(words.long(), halves[:, :7])


@pytest.mark.parametrize(
    "draw",
    [
        lambda s: s.bits(3, 5),
        lambda s: s.words(3, 5),
        lambda s: s.uniform(3, 5),
        lambda s: s.uniform(3, 5, dtype=torch.float32),
        lambda s: s.normal(3, 5),
        lambda s: s.normal(3, 5, dtype=torch.float32),
        lambda s: s.child(3, 5).uniform(2),
        lambda s: s.bits(),
        lambda s: s.uniform(0, 2),
        lambda s: s.words(2, 0),
    ],
)
def test_a_stream_does_not_know_its_batch(draw) -> None:
    streams = Streams.from_seed(1, (4, 2))
    alone = Streams.from_seed(streams.keys[2, 1], ())
    flat = streams.flatten()
    streams.bits(3), alone.bits(3), flat.bits(3)
    some = streams[1:3]
    batch = draw(streams)
    assert batch.shape[:2] == (4, 2)
    assert torch.equal(batch[2, 1], draw(alone))
    assert torch.equal(batch[1:3], draw(some))
    assert torch.equal(batch.flatten(0, 1), draw(flat))
    assert streams.position == alone.position == some.position == flat.position


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_grid_of_uniform_numbers(dtype) -> None:
    """The middles of cells of 2^-23 and 2^-52: never 0 nor 1, whose logarithms are wanted."""
    cell = 2.0**-23 if dtype == torch.float32 else 2.0**-52
    uniform = Streams.from_seed(0, (100,)).uniform(1000, dtype=dtype)
    assert uniform.dtype == dtype
    place = uniform.double() / cell
    assert torch.equal(place, place.floor() + 0.5)
    assert float(uniform.min()) > 0
    assert float(uniform.max()) < 1
    # The bits that are kept are the top ones: the extreme cells are reached.
    ends = [0, -1]
    for bits, expected in zip(ends, (cell / 2, 1 - cell / 2), strict=True):
        streams = Streams(torch.tensor(0))
        streams.bits = lambda *shape, bits=bits: torch.full(shape, bits)  # type: ignore[method-assign]
        assert float(streams.uniform(2, dtype=dtype)[0]) == expected


@pytest.mark.stochastic
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("across", [False, True])
def test_uniform(dtype, across: bool) -> None:
    """Along a stream, and over streams of neighbouring keys: chi^2 of 1,000 cells within 4 sigma
    (its variance is 2 per degree of freedom), Kolmogorov-Smirnov at a significance of 1e-4."""
    if across:
        u = Streams(torch.arange(10**6)).uniform(dtype=dtype)
    else:
        u = Streams(torch.tensor(12345)).uniform(10**6, dtype=dtype)
    counts = torch.histc(u.double(), 1000, 0, 1)
    chi2 = float(((counts - 1000) ** 2 / 1000).sum())
    assert abs(chi2 - 999) / math.sqrt(2 * 999) < 4
    ordered = u.double().sort().values
    steps = torch.arange(10**6 + 1).double() / 10**6
    distance = max(
        float((ordered - steps[:-1]).abs().max()), float((ordered - steps[1:]).abs().max())
    )
    # P(distance > x / sqrt(n)) = 2 exp(-2 x^2) to leading order
    assert distance < math.sqrt(-math.log(1e-4 / 2) / 2) / 1000


@pytest.mark.stochastic
def test_every_bit_is_fair() -> None:
    bits = Streams.from_seed(2, (10,)).bits(100_000).flatten()
    for place in range(64):
        ones = int(((bits >> place) & 1).sum())
        assert abs(ones - 500_000) < 4.5 * 500  # 64 tries: beyond is 4e-4


@pytest.mark.stochastic
def test_neighbouring_streams_are_uncorrelated() -> None:
    """Keys that follow each other, that differ in the top bit only, and from one seed."""
    n = 100_000
    top = torch.tensor([7, 7 - 2**63])
    for keys in (torch.arange(4), top, Streams.from_seed(0, (4,)).keys):
        normal = Streams(keys).normal(n)
        products = normal @ normal.T / n
        off = products - torch.diag(products.diagonal())
        assert float(off.abs().max()) < 4 / math.sqrt(n)
        lagged = (normal[:, 1:] * normal[:, :-1]).mean(-1)
        assert float(lagged.abs().max()) < 4 / math.sqrt(n)


@pytest.mark.stochastic
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [100_000, 99_999])
def test_normal(dtype, count: int) -> None:
    """Moments 1 to 4 within 4 sigma; their variances are 1, 2, 15 and 96."""
    x = Streams.from_seed(8, ()).normal(count, dtype=dtype).double()
    assert x.shape == (count,)
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        z = (float((x**power).mean()) - mean) / math.sqrt(variance / count)
        assert abs(z) < 4
    # The two halves are the two coordinates of the same pairs, and independent all the same.
    half = count // 2
    first, second = x[:half], x[-half:]
    for a, b in ((first, second), (first**2 - 1, second**2 - 1)):
        z = (a * b).mean() / ((a * b).std() / math.sqrt(half))
        assert abs(float(z)) < 4


def test_children_differ_from_their_parents_and_each_other() -> None:
    streams = Streams.from_seed(4, (3,))
    child = streams.child(50)
    assert child.keys.shape == (3, 50) and streams.position == 50 and child.position == 0
    numbers = torch.cat(
        [child.bits(20).flatten(), streams.bits(1000).flatten(), child.keys.flatten()]
    )
    assert len(numbers.unique()) == len(numbers)


def test_seeds() -> None:
    streams = Streams.from_seed(3, (2, 3))
    assert streams.keys.shape == (2, 3) and streams.position == 0
    assert len(streams.keys.unique()) == 6
    assert torch.equal(Streams.from_seed(3, (6,)).keys, streams.keys.flatten())
    # Any integer is a seed; only its 64 lowest bits count.
    assert torch.equal(Streams.from_seed(3 + 2**64, (2, 3)).keys, streams.keys)
    assert not torch.equal(Streams.from_seed(-3, (2, 3)).keys, streams.keys)
    again = [Streams.from_seed(torch.Generator().manual_seed(s), (4,)).keys for s in (1, 1, 2)]
    assert torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])
    # Keys repeat chains of another run.
    assert torch.equal(Streams.from_seed(streams.keys, (2, 3)).keys, streams.keys)
    assert Streams.from_seed([5, 6], (2,)).keys.tolist() == [5, 6]
    assert Streams.from_seed(torch.tensor([[5], [6]]), (2, 3)).keys[:, 2].tolist() == [5, 6]


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"keys are torch\.int32"):
        Streams(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"seed=0\.5"):
        Streams.from_seed(0.5, (2,))
    with pytest.raises(TypeError, match="seed=None"):
        Streams.from_seed(None, (2,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed=True"):
        Streams.from_seed(True, (2,))
    with pytest.raises(ValueError, match=r"seed has shape \(3,\).*\(2,\)"):
        Streams.from_seed([1, 2, 3], (2,))
    with pytest.raises(TypeError, match=r"dtype=torch\.bfloat16"):
        Streams.from_seed(0, (2,)).uniform(3, dtype=torch.bfloat16)
