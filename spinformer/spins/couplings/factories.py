"""The models of the textbooks, each with a ``strength``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spinformer.spins.couplings.checks import check_count, check_lengths, check_strength
from spinformer.spins.couplings.stored import Dense
from spinformer.spins.couplings.structured import CurieWeiss, Lattice, LowRank

__all__ = [
    "chain",
    "cubic",
    "curie_weiss",
    "hopfield",
    "ring",
    "sherrington_kirkpatrick",
    "square",
]


def chain(
    n: int,
    *,
    strength: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Lattice:
    """Open chain of ``n`` spins: n - 1 bonds of the given strength."""
    return Lattice((check_count("n", n, 1),), False, strength, dtype=dtype, device=device)


def ring(
    n: int,
    *,
    strength: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Lattice:
    """Closed chain of ``n >= 3`` spins: n bonds of the given strength."""
    return Lattice(check_lengths(["n"], [n], True)[0], True, strength, dtype=dtype, device=device)


def square(
    l: int | tuple[int, int],
    periodic: bool | tuple[bool, bool] = True,
    *,
    strength: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Lattice:
    """Square lattice ``l x l``, or ``l = (rows, columns)``; a cylinder is ``(True, False)``."""
    return Lattice(_hypercube(l, 2, periodic), periodic, strength, dtype=dtype, device=device)


def cubic(
    l: int | tuple[int, int, int],
    periodic: bool | tuple[bool, bool, bool] = True,
    *,
    strength: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Lattice:
    """Simple cubic lattice ``l x l x l``, or ``l = (a, b, c)``."""
    return Lattice(_hypercube(l, 3, periodic), periodic, strength, dtype=dtype, device=device)


def curie_weiss(
    n: int,
    *,
    strength: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> CurieWeiss:
    """Every pair of ``n`` spins coupled by ``strength / n``; mean field is exact for large n."""
    return CurieWeiss(check_count("n", n, 1), strength, dtype=dtype, device=device)


def sherrington_kirkpatrick(
    n: int,
    *,
    strength: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
    batch_shape: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Dense:
    r"""Gaussian spin glass: independent :math:`J_{ij} = J_{ji} \sim \mathcal N(0, s^2 / n)`.

    Its spectrum is the semicircle on ``[-2 s, 2 s]`` for large n.

    Args:
        n: number of spins.
        strength: ``s``, a number or a tensor that broadcasts with ``batch_shape``.
        generator: source of the random numbers; on its device they are drawn.
        batch_shape: independent draws.
        dtype, device: of the couplings. None: those of ``strength``, else torch's defaults.

    Source: Sherrington & Kirkpatrick, Phys. Rev. Lett. 35, 1792 (1975).
    """
    n = check_count("n", n, 1)
    scale = check_strength(strength, dtype, device) / math.sqrt(n)
    gaussian = torch.randn(
        (*batch_shape, n, n),
        generator=generator,
        dtype=scale.dtype,
        device=scale.device if generator is None else generator.device,
    ).to(scale.device)
    upper = gaussian.triu(1)
    matrix = scale[..., None, None] * (upper + upper.mT)
    return Dense(matrix, check=False).symmetrize()


def hopfield(
    patterns: Tensor,
    *,
    strength: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> LowRank:
    r"""Hebb's rule: :math:`J_{ij} = \frac{s}{N} \sum_\mu \xi^\mu_i \xi^\mu_j`, zero diagonal.

    Args:
        patterns: ``xi``, ``(..., P, N)``: P patterns of N sites. Integers (-1, 1) are converted.
        strength: ``s``, a number or a tensor ``(...)``.
        dtype, device: of the couplings. None: those of ``patterns`` where it is floating point,
            else torch's defaults.

    Source: Hopfield, Proc. Natl. Acad. Sci. 79, 2554 (1982).
    """
    if not isinstance(patterns, Tensor):
        raise TypeError(f"patterns must be a tensor (P, N), not {type(patterns).__name__}")
    if patterns.dtype == torch.bool or patterns.is_complex():
        raise TypeError(
            f"patterns have dtype {patterns.dtype}: give real numbers, for example -1 and 1"
        )
    if patterns.ndim < 2:
        raise ValueError(
            f"patterns have shape {tuple(patterns.shape)}: they must be (..., P, N); "
            "a single pattern is (1, N)"
        )
    if dtype is None:
        dtype = patterns.dtype if patterns.is_floating_point() else torch.get_default_dtype()
    left = patterns.to(dtype=dtype, device=device).mT
    num_spins, rank = left.shape[-2:]
    scale = check_strength(strength, dtype, left.device) / max(num_spins, 1)
    return LowRank(left, weights=scale.unsqueeze(-1).expand(*scale.shape, rank))


def _hypercube(
    l: int | Sequence[int],
    directions: int,
    periodic: bool | Sequence[bool],
) -> tuple[int, ...]:
    """One length for every direction, or one each."""
    if isinstance(l, Sequence):
        if len(l) != directions:
            raise ValueError(
                f"l={tuple(l)} has {len(l)} lengths: give one number or {directions} of them"
            )
        names, lengths = [f"l[{axis}]" for axis in range(directions)], l
    else:
        names, lengths = ["l"] * directions, [l] * directions
    return check_lengths(names, lengths, periodic)[0]
