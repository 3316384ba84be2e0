"""What every approximation that iterates asks of its start, its tolerance and its answer."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from spinformer.solve.fixed_point import FixedPoint
from spinformer.solve.solution import Solution
from spinformer.spins.site import SiteLaw
from spinformer.spins.system import SpinSystem

__all__ = ["check_initial", "natural_size", "refuse_overflow", "within_rounding"]


def check_initial(initial: Tensor, system: SpinSystem) -> Tensor:
    """Magnetizations to start from in the shape of the system's field, zero at absent sites."""
    if not isinstance(initial, Tensor):
        raise TypeError(f"initial must be a tensor, not {type(initial).__name__}")
    try:
        start = initial.to(system.field.dtype).expand(system.field.shape)
    except RuntimeError as error:
        raise ValueError(
            f"initial has shape {tuple(initial.shape)}: it must broadcast to the field's "
            f"{tuple(system.field.shape)}"
        ) from error
    if system.mask is None:
        return start
    return torch.where(system.mask[..., None], 0.0, start)


def within_rounding(options: FixedPoint, system: SpinSystem) -> FixedPoint:
    """Options whose tolerance, where none was given, rounding allows for spins of that size.

    A component may be sqrt(D) times the unit of the residual, and so may its rounding.
    """
    if options.tolerance is not None:
        return options
    finfo = torch.finfo(system.field.dtype)
    usual = 1e-10 if finfo.bits == 64 else 1e-5
    rounding = 4 * finfo.eps * math.sqrt(system.dim)
    return dataclasses.replace(options, tolerance=max(usual, rounding))


def natural_size(site: SiteLaw, square: Tensor, external: Tensor) -> Tensor:
    r"""Size of one component of the field on every spin, (..., N, 1).

    :math:`(|b_i| + R (\sum_j K_{ij}^2)^{1/2}) / \sqrt D`, and at least that to which a free spin
    answers.

    Args:
        site: the law.
        square: :math:`K_{ij}^2`, (..., N, N).
        external: :math:`\beta h`, (..., N, D).
    """
    strength = torch.linalg.vector_norm(external, dim=-1)
    if site.radius is not None:
        strength = strength + site.radius * square.sum(-1).sqrt()
    size: Tensor = strength / math.sqrt(site.dim)
    return size.clamp_min(1 / site.scale)[..., None]


def refuse_overflow(solution: Solution, *numbers: Tensor) -> Solution:
    """A solution with NaN for the residual of systems so cold that K or b has no square.

    The mean in an infinite field may be a number, and look like an answer; nothing else that
    follows from it does.

    Args:
        solution: as found.
        numbers: K, b, or what there is of them, (..., rows, columns).
    """
    with torch.no_grad():
        squares = sum((x.square().sum((-2, -1)) for x in numbers), solution.residual)
    residual = torch.where(torch.isfinite(squares), solution.residual, torch.nan)
    return dataclasses.replace(solution, residual=residual)
