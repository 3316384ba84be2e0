r"""Heat bath of Ising spins on lattices that two colours suffice for, a byte a spin.

The colours are stored apart: site (x, y) of colour c, with y along the last direction, is entry
(x, k) of its array, y = 2k + q, where q = (x + c) mod 2. Then the neighbours in other directions
are the neighbouring rows of the other colour, at the same k, and those along the last direction are
at k and, by q, at k - 1 or k + 1: all sums are additions of shifted arrays.

A spin is up if a random word of 32 bits is below a threshold, which depends on the sum of its
neighbours. In a uniform field that makes few thresholds; how many of them a word exceeds says which
sum the spin needs to be up, and no table is looked up for a spin.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spinformer.sampling.chains import Chains, Kernel
from spinformer.spins.couplings import Lattice, Masked
from spinformer.spins.site import Ising
from spinformer.spins.streams import Streams
from spinformer.spins.system import SpinSystem

__all__ = ["IsingCheckerboard", "fits"]

# Spins of one colour that are treated together: their words, and what becomes of them, stay in the
# second cache (1 MiB), and there are enough of them to pay for the calls.
_TOGETHER = 2**15


def _lattice(system: SpinSystem) -> Lattice | None:
    """The lattice of a system, where spins that are absent are all that a mask removes."""
    couplings = system.couplings
    while isinstance(couplings, Masked):
        if system.mask is None or not bool((couplings.absent == system.mask).all()):
            return None
        couplings = couplings.couplings
    return couplings if isinstance(couplings, Lattice) else None


def fits(system: SpinSystem) -> bool:
    """Whether :class:`IsingCheckerboard` can treat a system: it does not depend on the values."""
    lattice = _lattice(system)
    if lattice is None or not isinstance(system.site, Ising):
        return False
    *outer, last = zip(lattice.shape, lattice.periodic, strict=True)
    return last[0] % 2 == 0 and not any(length % 2 and wrap for length, wrap in outer)


class IsingCheckerboard(Kernel):
    """A sweep is every spin of one colour, then every spin of the other.

    Probabilities are rounded down to multiples of 2^-32.
    """

    def __init__(self, chains: Chains) -> None:
        super().__init__(chains)
        system = chains.system
        lattice = _lattice(system)
        assert lattice is not None
        self._shape, self._periodic = lattice.shape, lattice.periodic
        *outer, last = self._shape
        device = system.field.device
        parity = torch.zeros(*outer, 1, dtype=torch.int64, device=device)
        for axis, length in enumerate(outer):
            along = torch.arange(length, device=device) % 2
            parity += along.view(-1, *[1] * (len(outer) - axis))
        column = torch.arange(0, last, 2, device=device)
        number = torch.arange(math.prod(outer) or 1, device=device).view(*outer, 1) * last
        # Whether y is odd, and the numbers of the sites, of either colour.
        odd = [((parity + colour) % 2).expand(*outer, last // 2) for colour in (0, 1)]
        self._sites = [(number + column + q).flatten() for q in odd]
        # All bits where the second neighbour along y is at k - 1, and where it is at k + 1.
        self._before = [(q - 1).to(torch.int8) for q in odd]
        self._after = [(-q).to(torch.int8) for q in odd]

        batch = system.batch_shape
        self._field = system.field[..., 0].detach().double().reshape(-1, system.num_spins)
        self._strength = lattice.strength.detach().double().expand(batch).reshape(-1)
        self._absent = None
        if system.mask is not None:
            self._absent = system.mask.reshape(-1, system.num_spins)
        first = self._field[:, :1]
        finite = self._field.isfinite().all(-1) & self._strength.isfinite()
        uniform = ((self._field == first).all(-1) | ~finite).all() and self._absent is None
        ordered = bool((self._strength[finite] >= 0).all())
        self._uniform_field = first[:, 0] if bool(uniform) and ordered else None

    @torch.no_grad()
    def sweep(self, count: int = 1) -> None:
        chains = self.chains
        if not chains.spins.numel():
            return
        spins = chains.spins.view(-1, *self._shape[:-1], self._shape[-1] // 2, 2)
        total = len(spins)
        keys, beta = chains.streams.keys.flatten(), chains.beta.flatten().double()
        # Systems repeat from chain to chain.
        member = torch.arange(total, device=spins.device) % len(self._field)
        together = max(1, _TOGETHER // len(self._sites[0]))
        position = chains.streams.position
        for first in range(0, total, together):
            some = slice(first, first + together)
            streams = Streams(keys[some], position)
            self._advance(spins[some], member[some], beta[some], streams, count)
        chains.streams.position = streams.position

    def _advance(
        self, spins: Tensor, member: Tensor, beta: Tensor, streams: Streams, count: int
    ) -> None:
        """Sweeps of some systems, spins (systems, ..., L / 2, 2)."""
        halves = self._apart(*spins.to(torch.int8).unbind(-1))
        rules: list[_Rule] = []
        strength = beta * self._strength[member]
        if self._uniform_field is not None:
            field = beta * self._uniform_field[member]
            degree = 2 * len(self._shape)
            rules += [_Thresholds(strength, field, degree, all(self._periodic))] * 2
            broken = ~(strength.isfinite() & field.isfinite())
        else:
            fields = beta[:, None] * self._field[member]
            absent = None if self._absent is None else self._absent[member]
            rules += [
                _Fields(strength, fields[:, s], None if absent is None else absent[:, s])
                for s in self._sites
            ]
            broken = ~(strength.isfinite() & fields.isfinite().all(-1))
        for _ in range(count):
            for colour, rule in enumerate(rules):
                around = self._around(halves[1 - colour], colour)
                words = streams.words(*halves[colour].shape[1:])
                rule.apply(words, around, halves[colour])
        # The way back is the same choice.
        for place, half in enumerate(self._apart(*halves)):
            spins[..., place].copy_(half)
        if bool(broken.any()):
            spins[broken] += torch.where(spins[broken] == 0, 0.0, torch.nan)

    def _apart(self, first: Tensor, second: Tensor) -> list[Tensor]:
        """Where y of the first colour is even, the two as they are; else in exchange.

        Even and odd places become the two colours, and the colours even and odd places.
        """
        even, odd = self._before[0], self._after[0]
        return [(first & even) | (second & odd), (first & odd) | (second & even)]

    def _around(self, other: Tensor, colour: int) -> Tensor:
        """The sum of the neighbours of one colour, from the spins of the other."""
        total = other.clone()
        for axis, periodic in enumerate(self._periodic[:-1], 1):
            length = other.shape[axis]
            for to, origin in ((1, 0), (0, 1)):
                total.narrow(axis, to, length - 1).add_(other.narrow(axis, origin, length - 1))
            if periodic:
                total.select(axis, 0).add_(other.select(axis, length - 1))
                total.select(axis, length - 1).add_(other.select(axis, 0))
        # Shifted as if all rows were one, which is fast, and mended at the ends of the rows.
        moved = torch.empty_like(other)
        flat, source = moved.view(-1), other.view(-1)
        for step, kept in ((1, self._before[colour]), (-1, self._after[colour])):
            if step > 0:
                flat[1:].copy_(source[:-1])
            else:
                flat[:-1].copy_(source[1:])
            end, start = (0, -1) if step > 0 else (-1, 0)
            if self._periodic[-1]:
                moved[..., end].copy_(other[..., start])
            else:
                moved[..., end].zero_()
            total.add_(moved.bitwise_and_(kept))
        return total


class _Rule:
    """Makes new spins of random words and the sums of the neighbours."""

    def apply(self, words: Tensor, around: Tensor, spins: Tensor) -> None:
        """Fill in the spins, +1 or -1 in int8."""
        raise NotImplementedError


class _Thresholds(_Rule):
    """Of a uniform field and couplings that are not negative."""

    def __init__(self, strength: Tensor, field: Tensor, degree: int, all_there: bool) -> None:
        # Where no neighbour is missing, sums have the parity of their number.
        self.step = 2 if all_there else 1
        sums = torch.arange(-degree, degree + 1, self.step, device=field.device)
        threshold, never = _threshold(field[:, None] + strength[:, None] * sums)
        shape = (-1, *[1] * (degree // 2))
        self.levels = [level.view(shape) for level in threshold.unbind(-1)]
        # The least sum with which the spin can be up at all.
        self.least = (self.step * never.sum(-1) - degree).to(torch.int8).view(shape)

    def apply(self, words: Tensor, around: Tensor, spins: Tensor) -> None:
        needed = spins.copy_(self.least)
        above = torch.empty_like(spins, dtype=torch.bool)
        for level in self.levels:
            torch.gt(words, level, out=above)
            needed.add_(above.view(torch.int8), alpha=self.step)
        torch.ge(around, needed, out=above)
        torch.mul(above.view(torch.int8), 2, out=spins).sub_(1)


class _Fields(_Rule):
    """Of any field, with absent spins: the same spins from the same words, but slower."""

    def __init__(self, strength: Tensor, fields: Tensor, absent: Tensor | None) -> None:
        self.strength, self.fields, self.absent = strength[:, None], fields, absent

    def apply(self, words: Tensor, around: Tensor, spins: Tensor) -> None:
        force = around.flatten(1).double().mul_(self.strength).add_(self.fields)
        threshold, never = _threshold(force)
        up = (words.flatten(1) <= threshold).logical_and_(never.logical_not_()).view_as(spins)
        torch.mul(up.view(torch.int8), 2, out=spins).sub_(1)
        if self.absent is not None:
            spins.masked_fill_(self.absent.view_as(spins), 0)


def _threshold(b: Tensor) -> tuple[Tensor, Tensor]:
    """The largest word of a spin that is up in the field b, and where none is small enough."""
    share = torch.sigmoid(2 * b.nan_to_num(0.0)).mul_(2.0**32).floor_()
    never = share == 0
    # As 2^32 + 1 probabilities do not fit in 32 bits, "never" is told apart.
    return share.sub_(2.0**31 + 1).masked_fill_(never, 2.0**31 - 1).to(torch.int32), never
