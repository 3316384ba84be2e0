"""Kinds that never form the matrix: :class:`LowRank`, :class:`Lattice`, :class:`CurieWeiss`."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from spinformer.errors import strict_options
from spinformer.spins.couplings.base import Couplings
from spinformer.spins.couplings.checks import (
    check_absent,
    check_count,
    check_finite,
    check_floating,
    check_lengths,
    check_strength,
    describe,
)
from spinformer.spins.couplings.entries import clear, remove, rounding

__all__ = ["CurieWeiss", "Lattice", "LowRank"]


@strict_options
class LowRank(Couplings):
    r"""Couplings of low rank: :math:`J = A\,\mathrm{diag}(w)\,B^\top` minus its diagonal.

    ``apply`` costs ``O(N r D)`` and never forms the matrix.

    Args:
        left: ``A``, ``(..., N, r)``.
        right: ``B``, ``(..., N, r)``. None: ``B = A``, symmetric by construction.
        weights: ``w``, ``(..., r)``, of either sign. None: ones.
        check: look at the values and reject those that are not finite.
        mask: bool ``(..., N)``, True = this site is absent (before the check).

    Raises:
        TypeError: not real floating-point tensors of one dtype.
        ValueError: shapes that do not fit, or values that are not finite at present sites.
    """

    def __init__(
        self,
        left: Tensor,
        right: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        check: bool = True,
        mask: Tensor | None = None,
    ) -> None:
        check_floating("left", left)
        if left.ndim < 2:
            raise ValueError(f"left has shape {tuple(left.shape)}: it must be (..., N, r)")
        for name, tensor, shape in (
            ("right", right, left.shape[-2:]),
            ("weights", weights, left.shape[-1:]),
        ):
            if tensor is None:
                continue
            check_floating(name, tensor)
            if tensor.dtype != left.dtype:
                raise TypeError(
                    f"{name} has dtype {tensor.dtype}, left has {left.dtype}: convert one of them"
                )
            if tensor.shape[-len(shape) :] != shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}: with left {tuple(left.shape)} it "
                    f"must end in {tuple(shape)}"
                )
        batches = [left.shape[:-2]]
        batches += [] if right is None else [right.shape[:-2]]
        batches += [] if weights is None else [weights.shape[:-1]]
        try:
            batch = torch.Size(torch.broadcast_shapes(*batches))
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(shape)) for shape in batches)
            raise ValueError(
                f"the leading axes of the factors do not broadcast: {shapes}"
            ) from error
        absent = None
        if mask is not None:
            absent = check_absent(mask, left.shape[-2], batch, left.device)
        self._set(left, right, weights, absent, known_symmetric=right is None)
        if check:
            check_finite("left", self._left)
            if self._right is not None:
                check_finite("right", self._right)
            if self._weights is not None:
                check_finite("weights", self._weights)

    def _set(
        self,
        left: Tensor,
        right: Tensor | None,
        weights: Tensor | None,
        absent: Tensor | None,
        known_symmetric: bool,
    ) -> LowRank:
        if absent is not None:
            absent = absent.to(left.device)
            left = clear(left, absent)
            right = None if right is None else clear(right, absent)
        self._left, self._right, self._weights, self._absent = left, right, weights, absent
        self._known_symmetric = known_symmetric
        self._weighted = left if weights is None else left * weights.unsqueeze(-2)
        self._right_or_left = left if right is None else right
        # What A diag(w) B^T has on its diagonal, to be taken off again.
        self._self_coupling = (self._weighted * self._right_or_left).sum(-1)
        return self

    def _remade(self, *parts: Any) -> LowRank:
        """The same kind of other parts, those of :meth:`_set`."""
        return LowRank.__new__(LowRank)._set(*parts)

    @property
    def num_spins(self) -> int:
        """Number of sites ``N``."""
        return self._left.shape[-2]

    @property
    def rank(self) -> int:
        """Number of columns ``r`` of the factors."""
        return self._left.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """Leading axes of the factors, broadcast."""
        return self._self_coupling.shape[:-1]

    @functools.cached_property
    def is_symmetric(self) -> bool:
        """By construction, or to rounding from the factors: ``O(N r^2)``."""
        if self._known_symmetric or self._right is None:
            return True
        # J - J^T = [A w, B] [[0, 1], [-1, 0]] [A w, B]^T (the diagonals cancel): its Frobenius
        # norm is that of a 2r x 2r matrix once [A w, B] = Q R, without a difference of large
        # squares as the Gram matrices would give.
        working = torch.promote_types(self.dtype, torch.float32)
        with torch.no_grad():
            pair = torch.cat(torch.broadcast_tensors(self._weighted, self._right), -1).to(working)
            factor = torch.linalg.qr(pair, mode="r").R
            first, second = factor[..., : self.rank], factor[..., self.rank :]
            product = first @ second.mT
            asymmetry = torch.linalg.matrix_norm(product - product.mT)
            scale = torch.linalg.matrix_norm(first) * torch.linalg.matrix_norm(second)
            return not bool((asymmetry > rounding(self.num_spins, self.dtype) * scale).any())

    def tensors(self) -> tuple[Tensor, ...]:
        """``left``, then ``right`` and ``weights`` where they were given."""
        given = (self._left, self._right, self._weights)
        return tuple(tensor for tensor in given if tensor is not None)

    def with_tensors(self, *tensors: Tensor) -> LowRank:
        """The same kind of other factors, in the order of :meth:`tensors`."""
        left, *others = tensors
        right = None if self._right is None else others.pop(0)
        weights = None if self._weights is None else others.pop(0)
        return self._remade(left, right, weights, self._absent, self._known_symmetric)

    def apply(self, state: Tensor) -> Tensor:
        """``J S`` through the factors, ``O(N r D)``."""
        self._check_state(state)
        state = clear(state, self._absent)
        overlap = self._right_or_left.mT @ state
        return self._weighted @ overlap - self._self_coupling.unsqueeze(-1) * state

    def to_dense(self) -> Tensor:
        """``(..., N, N)``, the product of the factors without its diagonal."""
        return remove(self._weighted @ self._right_or_left.mT, None)

    def transpose(self) -> LowRank:
        """Left and right exchanged."""
        if self._right is None:
            return self
        return self._remade(
            self._right, self._left, self._weights, self._absent, self._known_symmetric
        )

    def symmetrize(self) -> LowRank:
        """``(J + J^T) / 2``, of twice the rank where ``right`` was given."""
        if self._known_symmetric or self._right is None:
            return self
        # Rank 2r. (A + B)(A + B)^T - (A - B)(A - B)^T would do with one factor, but loses the
        # smaller of A and B to rounding where their scales differ.
        left, right = torch.broadcast_tensors(self._left, self._right)
        half = left.new_full((self.rank,), 0.5) if self._weights is None else 0.5 * self._weights
        return self._remade(
            torch.cat([left, right], -1),
            torch.cat([right, left], -1),
            torch.cat([half, half], -1),
            self._absent,
            True,
        )

    def mask(self, absent: Tensor) -> LowRank:
        """The rows of absent sites are zero in both factors."""
        absent = check_absent(absent, self.num_spins, self.batch_shape, self.device)
        absent = absent if self._absent is None else self._absent | absent
        return self._remade(self._left, self._right, self._weights, absent, self._known_symmetric)

    def quadratic_form(self) -> tuple[Tensor, Tensor]:
        r"""G (..., N, q) and a symmetric M (..., q, q) of the symmetric part of J.

        :math:`(J + J^\top)/2 = G M G^\top` minus its diagonal. q is r, or 2r where ``right`` was
        given; of :meth:`symmetrize` no more.
        """
        weights = self._left.new_ones(self.rank) if self._weights is None else self._weights
        if self._right is None:
            return self._left, torch.diag_embed(weights)
        left, right = torch.broadcast_tensors(self._left, self._right)
        if self._known_symmetric:
            # [A, B] and [B, A], with two equal halves of weights.
            half = self.rank // 2
            factor = (left + right.roll(half, -1)) / 2
            weights = (weights[..., :half] + weights[..., half:]) / 2
        else:
            factor, weights = torch.cat([left, right], -1), weights / 2
        block = torch.diag_embed(weights)
        none = torch.zeros_like(block)
        return factor, torch.cat([torch.cat([none, block], -1), torch.cat([block, none], -1)], -2)

    def _details(self) -> list[str]:
        return [f"rank={self.rank}"]


class _OneStrength(Couplings):
    """Symmetric kinds that are one number times a fixed geometry."""

    _strength: Tensor

    @property
    def strength(self) -> Tensor:
        """The number, one per system ``(...)``."""
        return self._strength

    @property
    def batch_shape(self) -> torch.Size:
        return self._strength.shape

    @property
    def is_symmetric(self) -> bool:
        return True

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._strength,)

    def with_tensors(self, *tensors: Tensor) -> Self:
        couplings = copy.copy(self)
        (couplings._strength,) = tensors
        return couplings

    def transpose(self) -> Self:
        return self

    def symmetrize(self) -> Self:
        return self

    def _details(self) -> list[str]:
        return [f"strength={describe(self._strength)}"]


@strict_options
class Lattice(_OneStrength):
    r"""Nearest neighbours on a hypercubic lattice in any number of directions.

    Sites are numbered row-major: site ``(x, y)`` of shape ``(a, b)`` is number ``x b + y``.
    ``apply`` shifts the state along each direction, ``O(N D)``; nothing of size ``N^2`` is formed
    unless :meth:`to_dense` is called. The modes are products of waves, with eigenvalues
    :math:`2 K \sum_a \cos k_a`, where :math:`k_a = 2\pi n / L_a` in a periodic direction
    (n = 0 ... L - 1) and :math:`\pi n / (L_a + 1)` in an open one (n = 1 ... L).

    Args:
        shape: lengths ``(L_1, L_2, ...)``, each at least 1, at least 3 where periodic.
        periodic: for every direction, or one bool a direction.
        strength: ``K``, the coupling of a bond: a number, or a tensor ``(...)`` with one entry per
            system. Differentiable.
        dtype, device: of the couplings. None: those of ``strength``, else torch's defaults.

    Raises:
        ValueError: a length below these, ``periodic`` of another number of directions, or a
            strength that is not finite.
    """

    def __init__(
        self,
        shape: Sequence[int],
        periodic: bool | Sequence[bool] = True,
        strength: float | Tensor = 1.0,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(shape, Sequence) or not shape:
            raise ValueError(f"shape={shape!r}: give one length a direction, for example (8, 8)")
        names = [f"shape[{axis}]" for axis in range(len(shape))]
        lengths, wraps = check_lengths(names, shape, periodic)
        self._lengths, self._periodic = lengths, wraps
        self._strength = check_strength(strength, dtype, device)

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the directions."""
        return self._lengths

    @property
    def periodic(self) -> tuple[bool, ...]:
        """Which directions wrap around."""
        return self._periodic

    @property
    def num_spins(self) -> int:
        """Number of sites, the product of the lengths."""
        return math.prod(self._lengths)

    def apply(self, state: Tensor) -> Tensor:
        """``J S``: the strength times the sum of the neighbours, by shifts."""
        self._check_state(state)
        grid = state.reshape(*state.shape[:-2], *self._lengths, state.shape[-1])
        # Axes of the grid from the end: the last one holds the components.
        first = -1 - len(self._lengths)
        total = torch.zeros_like(grid)
        for offset, wrap in enumerate(self._periodic):
            axis = first + offset
            for step in (1, -1):
                total = total + (grid.roll(step, axis) if wrap else _shift(grid, step, axis))
        return self._strength[..., None, None] * total.flatten(first, -2)

    def largest_eigenvalue(self) -> Tensor:
        """Closed form: the uniform or the most alternating wave, by the sign of the strength."""
        highest = lowest = 0.0
        for length, wrap in zip(self._lengths, self._periodic, strict=True):
            if wrap:
                highest += 2.0
                # The wave that alternates most: k = pi fits only in an even length.
                lowest += 2.0 * math.cos(2.0 * math.pi * (length // 2) / length)
            elif length > 1:
                edge = 2.0 * math.cos(math.pi / (length + 1))
                highest += edge
                lowest -= edge
        return torch.maximum(self._strength * highest, self._strength * lowest)

    def _details(self) -> list[str]:
        return [f"shape={self._lengths}", f"periodic={self._periodic}", *super()._details()]


@strict_options
class CurieWeiss(_OneStrength):
    """Every pair coupled alike: ``J_ij = strength / N`` for i != j.

    ``apply`` is one sum over sites, ``O(N D)``. The eigenvalues are ``strength (N - 1) / N`` once
    and ``-strength / N``.

    Args:
        num_spins: ``N``, at least 1. It stays the divisor when sites are masked.
        strength: a number, or a tensor ``(...)`` with one entry per system. Differentiable.
        dtype, device: of the couplings. None: those of ``strength``, else torch's defaults.

    Raises:
        ValueError: ``num_spins`` below 1, or a strength that is not finite.
    """

    def __init__(
        self,
        num_spins: int,
        strength: float | Tensor = 1.0,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._num_spins = check_count("num_spins", num_spins, 1)
        self._strength = check_strength(strength, dtype, device)

    @property
    def num_spins(self) -> int:
        """Number of sites ``N``."""
        return self._num_spins

    def apply(self, state: Tensor) -> Tensor:
        """``J S``: ``strength / N`` times the sum of the other spins."""
        self._check_state(state)
        bond = (self._strength / self._num_spins)[..., None, None]
        return bond * (state.sum(-2, keepdim=True) - state)

    def largest_eigenvalue(self) -> Tensor:
        """Closed form: of the uniform mode, or of any other where the strength is negative."""
        n = self._num_spins
        if n == 1:
            return 0.0 * self._strength
        return torch.maximum(self._strength * ((n - 1) / n), self._strength * (-1.0 / n))


def _shift(grid: Tensor, step: int, axis: int) -> Tensor:
    """Move the content one site along an open direction; nothing comes in at the edge."""
    length = grid.shape[axis]
    edge = torch.zeros_like(grid.narrow(axis, 0, 1))
    kept = grid.narrow(axis, 0 if step > 0 else 1, length - 1)
    return torch.cat([edge, kept] if step > 0 else [kept, edge], axis)
