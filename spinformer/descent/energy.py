"""What an energy of tokens is, and sums of them."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from spinformer.spins.couplings.entries import clear

__all__ = [
    "Energy",
    "SumEnergy",
    "check_data_weight",
    "check_tokens",
    "clear",
    "onto_sphere",
    "reciprocal",
]


class Energy(ABC):
    r"""A function of the tokens ``Y`` ``(..., N, d)`` of a system, and the step that descends it.

    Everything else that it depends on (weights, data, bonds, patterns) is bound when it is made.
    Tokens that a mask says are absent neither contribute nor receive; what stands there, NaN
    included, changes nothing.

    A subclass says its value, its gradient, and how sharply it curves at a state: token curvatures
    ``p_i`` with

    .. math::
        E(Z) \le E(Y) + \langle \nabla E(Y), Z - Y \rangle + \tfrac12 \sum_i p_i |z_i - y_i|^2 .

    The minimum of the right side, ``Y - P^-1 grad E(Y)``, is one majorize-minimize step; ``size``
    times it descends for ``0 < size <= 2``. Attention (p = 2 D), the update of a modern Hopfield
    network (p = 1) and a gradient step with the inverse Lipschitz constant are all this step.
    """

    @abstractmethod
    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``E(Y)``, ``(...)``: the total of each system.

        Args:
            Y: tokens ``(..., N, d)``.
            mask: boolean ``(..., N)``, True where there is no token.
        """

    @abstractmethod
    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``dE/dY``, ``(..., N, d)``; zero where there is no token."""

    @abstractmethod
    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``p_i >= 0`` of the quadratic upper bound at ``Y``, ``(..., N)``."""

    @abstractmethod
    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        """Bounds for all eigenvalues of the Hessian, over all states of ``count`` tokens.

        The larger of their magnitudes is a Lipschitz constant of the gradient, the lower, where it
        is positive, a constant of strong convexity. Infinite where there is no bound. The bounds
        need not be attained.
        """

    def step(self, Y: Tensor, size: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
        """One step of this energy's own kind, ``(..., N, d)``: here ``Y - size P^-1 grad E(Y)``.

        It cannot raise the energy for ``0 < size <= step_bound()``. A token that nothing curves
        stays where it is.
        """
        state = check_tokens(Y, mask)
        curvature = self.curvature(Y, mask).unsqueeze(-1)
        return state - size * reciprocal(curvature) * self.gradient(Y, mask)

    def step_bound(self) -> float | Tensor:
        """The largest size at which :meth:`step` is proven not to raise the energy."""
        return 2.0

    def sphere_step(
        self,
        Y: Tensor,
        radius: float | Tensor | None = None,
        mask: Tensor | None = None,
        *,
        size: float | Tensor = 1.0,
    ) -> Tensor:
        r"""One step along spheres: ``y_i <- r_i u_i / |u_i|`` with ``u = Y - size P^-1 grad E(Y)``.

        Where no norm changes, the quadratic bound of this class is linear in ``Z``, and this is its
        minimum: from tokens that have the norms r, no step of ``0 < size <= 1`` raises the energy.

        Args:
            Y: tokens ``(..., N, d)``.
            radius: ``r_i``, broadcastable to ``(..., N)``; None for each token's own norm. A first
                step that changes norms may rise.
            mask: boolean ``(..., N)``, True where there is no token; those come out as zero.
            size: above 1 nothing is known.
        """
        state, slope = check_tokens(Y, mask), self.gradient(Y, mask)
        curvature = self.curvature(Y, mask).unsqueeze(-1)
        # Where nothing curves the bound is linear as it stands.
        direction = torch.where(
            curvature == 0, -slope, state - size * reciprocal(curvature) * slope
        )
        return onto_sphere(direction, state, radius)

    def __radd__(self, other: int) -> Energy:
        """``0 + energy``, with which ``sum([f, g])`` starts."""
        return self if other == 0 else NotImplemented

    def __add__(self, other: Energy) -> SumEnergy:
        """The sum, whose terms stay visible."""
        if not isinstance(other, Energy):
            return NotImplemented
        return SumEnergy(self, other)


class SumEnergy(Energy):
    """The sum of energies of the same tokens; sums among them are taken apart.

    Its own step is the majorize-minimize step of the whole sum, with the sum of the curvatures:
    unlike steps of its terms in turn, it never raises the sum.

    Args:
        terms: at least one energy; their order is that in which alternating algorithms take them.

    Raises:
        ValueError: without terms.
        TypeError: a term that is no energy.
    """

    terms: tuple[Energy, ...]

    def __init__(self, *terms: Energy) -> None:
        if not terms:
            raise ValueError("SumEnergy() needs at least one energy")
        flat: list[Energy] = []
        for term in terms:
            if not isinstance(term, Energy):
                raise TypeError(
                    f"SumEnergy() got a {type(term).__name__}: pass energies, one by one"
                )
            flat.extend(term.terms if isinstance(term, SumEnergy) else (term,))
        self.terms = tuple(flat)

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.energies(Y, mask).sum(0)

    def energies(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The value of each term, ``(terms, ...)``."""
        values = [term.energy(Y, mask) for term in self.terms]
        return torch.stack(torch.broadcast_tensors(*values))

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        return _total(term.gradient(Y, mask) for term in self.terms)

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        return _total(term.curvature(Y, mask) for term in self.terms)

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        lower, upper = zip(*(term.hessian_bounds(count) for term in self.terms), strict=True)
        return _total(lower), _total(upper)


def _total(terms: Iterable[Tensor]) -> Tensor:
    """The sum of what may have other batch axes each."""
    return functools.reduce(torch.add, terms)


def check_data_weight(data_weight: float | Tensor | None, data: Tensor | None) -> float | Tensor:
    """The weight of ``|Y - X|^2 / 2``; None is 1 with data, 0 without. It is not negative."""
    if data_weight is None:
        return 0.0 if data is None else 1.0
    if not isinstance(data_weight, Tensor) and data_weight < 0:
        raise ValueError(f"data_weight={data_weight} is negative: the energy is not bounded below")
    return data_weight


def check_tokens(
    Y: Tensor, mask: Tensor | None, width: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """:func:`clear` of what a user passed: tokens ``(..., N, d)`` and their mask ``(..., N)``.

    It looks at shapes and types, never at values.

    Args:
        Y: tokens.
        mask: which of them are absent, or None.
        width: d; None for any.
        dtype: of the weights that multiply ``Y``, outside autocast; None for any.

    Raises:
        TypeError: what is no tensor, tokens that are not floating, a mask that is not boolean.
        ValueError: another shape, or another dtype.
    """
    if not isinstance(Y, Tensor):
        raise TypeError(f"Y is {type(Y).__name__}: pass tokens, a tensor (..., N, d)")
    if not Y.is_floating_point():
        raise TypeError(f"Y has dtype {Y.dtype}: pass floating tokens, (..., N, d)")
    if Y.dim() < 2:
        raise ValueError(
            f"Y has shape {tuple(Y.shape)}: pass tokens (..., N, d), one as Y.unsqueeze(0)"
        )
    if width is not None and Y.shape[-1] != width:
        raise ValueError(f"Y has shape {tuple(Y.shape)}: the weights are for width {width}")
    if dtype is not None and Y.dtype != dtype and not torch.is_autocast_enabled(Y.device.type):
        raise ValueError(f"Y has dtype {Y.dtype}, the weights {dtype}: cast one")
    if mask is None:
        return Y
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask is {found}: pass a boolean tensor, True where there is no token")
    if mask.shape != Y.shape[:-1] and not _fits(mask.shape, Y.shape[:-1]):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}: pass one entry a token, {tuple(Y.shape[:-1])}"
        )
    return clear(Y, mask)


def _fits(mask: torch.Size, tokens: torch.Size) -> bool:
    """Whether a mask has an entry a token, and leading axes that broadcast."""
    return mask[-1:] == tokens[-1:] and all(
        one == other or 1 in (one, other)
        for one, other in zip(mask[::-1], tokens[::-1], strict=False)
    )


def onto_sphere(direction: Tensor, state: Tensor, radius: float | Tensor | None) -> Tensor:
    """``direction`` with the norm ``radius``, or that of ``state``, which is kept where it is 0."""
    norm = _norm(direction)
    if radius is None:
        radius = _norm(state)
    elif isinstance(radius, Tensor):
        radius = radius.unsqueeze(-1)
    return torch.where(norm == 0, state, direction * reciprocal(norm) * radius)


def _norm(x: Tensor) -> Tensor:
    """``|x|``, ``(..., 1)``, with zero derivatives of all orders at x = 0."""
    squares = x.square().sum(-1, keepdim=True)
    zero = squares == 0
    return squares.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def reciprocal(x: Tensor) -> Tensor:
    """``1 / x``, and 0 with zero gradient at x = 0: a token that nothing curves does not move."""
    zero = x == 0
    return torch.where(zero, 0.0, 1 / x.masked_fill(zero, 1.0))
