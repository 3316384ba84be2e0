r"""Random numbers of many Markov chains: a stream for each, in a fixed relation to its seed.

A number is a function of a chain's key and of how many were drawn before, and of nothing else:

.. math:: x_n = \mathrm{mix}(\mathrm{key} + n\,\gamma),

SplitMix64's output function and increment (Steele, Lea & Flood, OOPSLA 2014). So a chain of a batch
draws what it would draw alone, on any device; the state of a run is its keys and one integer; and
the numbers of all chains are computed by a few operations on whole tensors, as fast as torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Streams"]


def _signed(unsigned: int) -> int:
    """The same 64 bits as a two's complement number, which is what torch has."""
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


class Streams:
    """Independent streams of random numbers, one for each key.

    Every draw gives each stream the same number of numbers, so that one position serves all.
    Streams that were made from different keys are the same sequence of period 2^64 from different
    places: k streams of n numbers overlap with probability k^2 n / 2^64.

    Args:
        keys: int64 (...), one a stream.
        position: how many numbers each has drawn already.
    """

    def __init__(self, keys: Tensor, position: int = 0) -> None:
        if keys.dtype != torch.int64:
            raise TypeError(f"keys are {keys.dtype}: they must be torch.int64")
        self.keys = keys
        self.position = position

    @classmethod
    def from_seed(
        cls,
        seed: int | Sequence[int] | Tensor | torch.Generator,
        shape: Sequence[int],
        device: torch.device | str | None = None,
    ) -> Streams:
        """Streams of a shape.

        Args:
            seed: an integer, from which the keys are drawn; a generator, from which that integer
                is drawn; or the keys themselves, integers that expand to ``shape``: those of
                :attr:`keys` repeat single chains of an earlier run.
            shape: of the keys.
            device: of the keys.
        """
        if isinstance(seed, torch.Generator):
            seed = int(torch.randint(2**63 - 1, (), generator=seed, device=seed.device))
        if isinstance(seed, int) and not isinstance(seed, bool):
            return cls(cls(torch.tensor(_signed(seed % 2**64), device=device)).bits(*shape))
        keys = None if seed is None else torch.as_tensor(seed, device=device)
        if keys is None or keys.dtype != torch.int64:
            raise TypeError(
                f"seed={seed!r}: pass an integer, a torch.Generator, or the int64 keys of chains"
            )
        try:
            return cls(keys.expand(tuple(shape)).contiguous())
        except RuntimeError as error:
            raise ValueError(
                f"seed has shape {tuple(keys.shape)}: the keys of chains must expand to "
                f"{tuple(shape)}"
            ) from error

    def __getitem__(self, index: Tensor | tuple[Tensor | int | slice, ...] | int) -> Streams:
        """Some of the streams, at the same position."""
        return Streams(self.keys[index], self.position)

    def flatten(self) -> Streams:
        """The same streams in one axis."""
        return Streams(self.keys.flatten(), self.position)

    def bits(self, *shape: int) -> Tensor:
        """64 random bits each, int64 (*keys.shape, *shape)."""
        count = math.prod(shape)
        first = self.position
        self.position += count
        if not shape:
            return _mix(self.keys + _signed((first + 1) * _GAMMA % 2**64))
        counter = torch.arange(first + 1, first + 1 + count, device=self.keys.device)
        steps = counter.mul_(_GAMMA)
        return _mix(self.keys[..., None] + steps).reshape(*self.keys.shape, *shape)

    def words(self, *shape: int) -> Tensor:
        """32 random bits each, int32 (*keys.shape, *shape): half the price of :meth:`bits`."""
        count = math.prod(shape)
        halves = self.bits((count + 1) // 2)
        if not halves.numel():  # a view needs strides, which emptiness has not
            return halves.new_empty(*self.keys.shape, *shape, dtype=torch.int32)
        return halves.view(torch.int32)[..., :count].reshape(*self.keys.shape, *shape)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Uniform in the open interval (0, 1), (*keys.shape, *shape).

        On a grid of 2^-52 in float64 and 2^-23 in float32, at the middle of its cells.
        """
        if dtype == torch.float64:
            # The top 52 bits (a logical shift: torch's is arithmetic).
            cell = (self.bits(*shape) >> 12).bitwise_and_((1 << 52) - 1)
            return cell.to(dtype).add_(0.5).mul_(2.0**-52)
        if dtype != torch.float32:
            raise TypeError(f"dtype={dtype}: random numbers are float32 or float64")
        cell = (self.words(*shape) >> 9).bitwise_and_((1 << 23) - 1)
        return cell.to(dtype).add_(0.5).mul_(2.0**-23)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Standard normal, (*keys.shape, *shape): Box & Muller's polar pairs (1958)."""
        count = math.prod(shape)
        pairs = (count + 1) // 2
        uniform = self.uniform(2, pairs, dtype=dtype)
        radius = uniform[..., 0, :].log().mul_(-2).sqrt_()
        angle = uniform[..., 1, :] * (2 * math.pi)
        both = torch.cat([radius * angle.cos(), radius * angle.sin()], -1)
        return both[..., :count].reshape(*self.keys.shape, *shape)

    def child(self, *shape: int) -> Streams:
        """New streams (*keys.shape, *shape), each for the price of one number.

        For what takes a random number of numbers, such as rejection: a chain that needs more rounds
        than its neighbours uses up its child's, and leaves its own position where theirs is.
        """
        return Streams(self.bits(*shape))


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's output function, in place on a tensor that nobody else holds."""
    shifted = (state >> 30).bitwise_and_((1 << 34) - 1)
    state.bitwise_xor_(shifted).mul_(_FIRST)
    torch.bitwise_right_shift(state, 27, out=shifted).bitwise_and_((1 << 37) - 1)
    state.bitwise_xor_(shifted).mul_(_SECOND)
    torch.bitwise_right_shift(state, 31, out=shifted).bitwise_and_((1 << 33) - 1)
    return state.bitwise_xor_(shifted)
