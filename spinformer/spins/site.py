r"""Site laws: one spin alone in a field.

A site law answers for one spin S with weight :math:`\exp(b \cdot S)` under its own normalized
measure, where :math:`b = \beta H` is the dimensionless field. All methods act on the last axis
(the D components) and treat every other axis as independent sites. A site with :math:`b = 0` has
zero mean and zero log-partition, which is why an absent site needs no special case.
"""

from __future__ import annotations

import abc
import math
from typing import Literal

import torch
from torch import Tensor

from spinformer.errors import strict_options
from spinformer.spins.special import (
    inverse_reduced_ratio,
    log_normalizer_squared,
    reduced_jet,
    reduced_ratio,
    reduced_ratio_derivative,
    reduced_slope,
)
from spinformer.spins.streams import Streams

__all__ = ["Gaussian", "Ising", "LargeDSphere", "SiteLaw", "Sphere"]

Radius = float | Literal["large_d"] | None


class SiteLaw(abc.ABC):
    """One spin in a field.

    Attributes:
        dim: number of components D.
        radius: length R of the spin, or None where it is free to vary (:class:`Gaussian`).
    """

    dim: int
    radius: float | None

    @property
    def scale(self) -> float:
        """Root mean square of one component of a free spin: the unit of residuals."""
        assert self.radius is not None
        return self.radius / math.sqrt(self.dim)

    @abc.abstractmethod
    def log_partition(self, b: Tensor) -> Tensor:
        r""":math:`\log \langle e^{b\cdot S}\rangle_0`, shape ``(...)`` for ``b`` (..., D)."""

    @abc.abstractmethod
    def mean(self, b: Tensor) -> Tensor:
        r"""Magnetization :math:`m = \partial \log z / \partial b`, shape (..., D)."""

    @abc.abstractmethod
    def response(self, b: Tensor) -> tuple[Tensor, Tensor]:
        r"""Transverse and longitudinal variance :math:`(\tau, \rho)`, each (...).

        The covariance is :math:`\tau (1 - n n^{\mathsf T}) + \rho\, n n^{\mathsf T}` with
        :math:`n = b / |b|`; at zero field both are the variance of a free component.
        """

    @abc.abstractmethod
    def inverse_response(self, m: Tensor) -> Tensor:
        """The field b with ``mean(b) = m``, shape (..., D).

        Raises:
            ValueError: a magnetization on or outside the ball of radius R has no such field.
        """

    @abc.abstractmethod
    def covariance(self, b: Tensor) -> Tensor:
        r""":math:`\partial m_a / \partial b_c`, shape (..., D, D)."""

    @abc.abstractmethod
    def sample(self, b: Tensor, generator: Streams | torch.Generator | None = None) -> Tensor:
        """One independent draw per site, shape (..., D).

        Args:
            b: dimensionless fields (..., D).
            generator: the source of random numbers, or the
                :class:`~spinformer.spins.streams.Streams` of chains, whose axes are the first of b.

        Raises:
            ValueError: a field that is not finite.
        """

    def entropy(self, m: Tensor) -> Tensor:
        r"""Entropy of the law with mean m relative to the free spin,
        :math:`\log z(b(m)) - b(m)\cdot m \le 0`, shape (...)."""
        b = self.inverse_response(m)
        return self.log_partition(b) - (b * m).sum(-1)

    def check_components(self, field: Tensor) -> None:
        """Raise unless the last axis of ``field`` has D components."""
        if field.shape[-1] != self.dim:
            raise ValueError(
                f"field has {field.shape[-1]} components a site, but site={self!r} has "
                f"dim={self.dim}: give a field of shape (..., N, {self.dim})"
            )


@strict_options
class Ising(SiteLaw):
    r"""Spins :math:`\pm 1` (D = 1): :math:`\log z = \log\cosh b`, :math:`m = \tanh b`."""

    dim = 1
    radius = 1.0

    def __init__(self) -> None:
        pass

    def __repr__(self) -> str:
        return "Ising()"

    def log_partition(self, b: Tensor) -> Tensor:
        return log_normalizer_squared((b * b).sum(-1), 1)

    def mean(self, b: Tensor) -> Tensor:
        return torch.tanh(b)

    def response(self, b: Tensor) -> tuple[Tensor, Tensor]:
        # 4 s(2b) s(-2b) = 1 / cosh^2 without the cancellation of 1 - tanh^2.
        variance = 4 * torch.sigmoid(2 * b) * torch.sigmoid(-2 * b)
        return variance[..., 0], variance[..., 0]

    def covariance(self, b: Tensor) -> Tensor:
        return self.response(b)[0][..., None, None]

    def inverse_response(self, m: Tensor) -> Tensor:
        _check_inside(m, 1.0)
        return torch.atanh(m)

    def sample(self, b: Tensor, generator: Streams | torch.Generator | None = None) -> Tensor:
        streams = _streams(b, generator)
        dtype = torch.promote_types(b.dtype, torch.float32)
        uniform = streams.uniform(*b.shape[streams.keys.ndim :], dtype=dtype)
        return torch.where(uniform < torch.sigmoid(2 * b), 1.0, -1.0).to(b.dtype)


@strict_options
class Sphere(SiteLaw):
    r"""Vectors of length R in D dimensions, uniformly distributed without a field.

    .. math:: \log z_D(\kappa),\quad m = R A_D(\kappa)\,\hat b,\quad \kappa = R|b|,

    exact for every D >= 2 through Bessel functions (:mod:`spinformer.spins.special`). In a field it
    is the von Mises-Fisher law.

    Args:
        dim: number of components, D >= 2 (:class:`Ising` is D = 1).
        radius: length of the spin; None is sqrt(D), the norm of a layer-normalized token, and
            ``"large_d"`` is sqrt(D/2 - 1), for D > 2.
    """

    radius: float

    def __init__(self, dim: int, radius: Radius = None) -> None:
        self.dim, self.radius = _sphere(dim, radius)

    def __repr__(self) -> str:
        return f"Sphere(dim={self.dim}, radius={self.radius:g})"

    def log_partition(self, b: Tensor) -> Tensor:
        return log_normalizer_squared(self._x(b), self.dim)

    def mean(self, b: Tensor) -> Tensor:
        return self.radius**2 * reduced_ratio(self._x(b), self.dim)[..., None] * b

    def response(self, b: Tensor) -> tuple[Tensor, Tensor]:
        x = self._x(b)
        square = self.radius**2
        return square * reduced_ratio(x, self.dim), square * reduced_slope(x, self.dim)

    def covariance(self, b: Tensor) -> Tensor:
        x, square = self._x(b), self.radius**2
        # rho - tau = 2 R^2 x a'(x) without dividing by the field, nor cancelling.
        weight = 2 * square**2 * reduced_ratio_derivative(x, self.dim)
        return _covariance(square * reduced_ratio(x, self.dim), weight, b)

    def jet(self, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r""":math:`(\tau, \rho, w, w')` of mean :math:`\tau b` and covariance
        :math:`\tau + w\,b b^{\mathsf T}`, each (...).

        :math:`\rho` is the longitudinal variance :math:`\tau + w|b|^2` of :meth:`response`,
        :math:`w = 2\,d\tau/d|b|^2` and :math:`w' = dw/d|b|^2`: all that products of two
        covariances and their derivatives in the field are made of, smooth at zero field.
        """
        square = self.radius**2
        a, a1, a2, slope = reduced_jet(self._x(b), self.dim)
        return square * a, square * slope, 2 * square**2 * a1, 2 * square**3 * a2

    def inverse_response(self, m: Tensor) -> Tensor:
        _check_inside(m, self.radius)
        y = (m * m).sum(-1) / self.radius**2
        return inverse_reduced_ratio(y, self.dim)[..., None] * m / self.radius**2

    def sample(self, b: Tensor, generator: Streams | torch.Generator | None = None) -> Tensor:
        return _von_mises_fisher(b, self.radius, _streams(b, generator))

    def _x(self, b: Tensor) -> Tensor:
        return self.radius**2 * (b * b).sum(-1)


@strict_options
class LargeDSphere(SiteLaw):
    r"""The sphere of :class:`Sphere` with its leading large-D response in closed form.

    .. math:: \log z = \tfrac D2\Big[(q - 1) - \log\tfrac{1+q}2\Big],\quad
              m = \frac{2 R^2 b}{D (1 + q)},\quad q = \sqrt{1 + (2\kappa/D)^2},\quad \kappa = R|b|.

    It is the saddle point of the one-spin integral (steepest descent), with relative error O(1/D)
    of m: 1.8e-2 at D = 8 and 1.6e-3 at D = 128 for :math:`\kappa` near D / 2. Its inverse is
    :math:`b = D m / (R^2 - m^2)` and its entropy :math:`\tfrac D2 \log(1 - m^2/R^2)`. Samples are
    drawn from the exact von Mises-Fisher law of the same field, whose mean differs from m by that
    error. Arguments as :class:`Sphere`.
    """

    radius: float

    def __init__(self, dim: int, radius: Radius = None) -> None:
        self.dim, self.radius = _sphere(dim, radius)

    def __repr__(self) -> str:
        return f"LargeDSphere(dim={self.dim}, radius={self.radius:g})"

    def log_partition(self, b: Tensor) -> Tensor:
        # q - 1 without cancellation at weak field
        x = self._x(b)
        excess = x / (1 + torch.sqrt(1 + x))
        return self.dim / 2 * (excess - torch.log1p(excess / 2))

    def mean(self, b: Tensor) -> Tensor:
        q = torch.sqrt(1 + self._x(b))
        return (2 * self.radius**2 / self.dim / (1 + q))[..., None] * b

    def response(self, b: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.sqrt(1 + self._x(b))
        transverse = 2 * self.radius**2 / self.dim / (1 + q)
        return transverse, transverse / q

    def covariance(self, b: Tensor) -> Tensor:
        q = torch.sqrt(1 + self._x(b))
        transverse = 2 * self.radius**2 / self.dim / (1 + q)
        weight = -transverse * (2 * self.radius / self.dim) ** 2 / (q * (1 + q))
        return _covariance(transverse, weight, b)

    def inverse_response(self, m: Tensor) -> Tensor:
        _check_inside(m, self.radius)
        return self.dim * m / (self.radius**2 - (m * m).sum(-1, keepdim=True))

    def entropy(self, m: Tensor) -> Tensor:
        _check_inside(m, self.radius)
        return self.dim / 2 * torch.log1p(-(m * m).sum(-1) / self.radius**2)

    def sample(self, b: Tensor, generator: Streams | torch.Generator | None = None) -> Tensor:
        return _von_mises_fisher(b, self.radius, _streams(b, generator))

    def _x(self, b: Tensor) -> Tensor:
        return (2 * self.radius / self.dim) ** 2 * (b * b).sum(-1)


@strict_options
class Gaussian(SiteLaw):
    r"""Free Gaussian vectors of variance v a component: :math:`\log z = v b^2/2`, :math:`m = v b`.

    A system of Gaussian spins exists only while :math:`\beta J < 1/v` (positive definite).

    Args:
        dim: number of components, D >= 1.
        variance: v > 0.
    """

    radius = None

    def __init__(self, dim: int, variance: float = 1.0) -> None:
        if not isinstance(dim, int) or dim < 1:
            raise ValueError(f"dim={dim!r}: the spin dimension must be an integer >= 1")
        if not (variance > 0 and math.isfinite(variance)):
            raise ValueError(f"variance={variance!r} must be a positive finite number")
        self.dim = dim
        self.variance = float(variance)

    def __repr__(self) -> str:
        return f"Gaussian(dim={self.dim}, variance={self.variance:g})"

    @property
    def scale(self) -> float:
        return math.sqrt(self.variance)

    def check_stable(self, largest: Tensor) -> None:
        """Raise ``ValueError`` unless coupled spins exist.

        Args:
            largest: the largest eigenvalue of beta J of every system, any shape.
        """
        strength = self.variance * largest.detach()
        if bool((strength >= 1).any()):
            raise ValueError(
                "Gaussian spins exist while variance * beta * J has no eigenvalue above 1: the "
                f"largest eigenvalue is {float(strength.max()):.6g}. Lower beta, the couplings or "
                "the variance, or use Sphere, whose spins cannot grow"
            )

    def log_partition(self, b: Tensor) -> Tensor:
        return self.variance / 2 * (b * b).sum(-1)

    def mean(self, b: Tensor) -> Tensor:
        return self.variance * b

    def response(self, b: Tensor) -> tuple[Tensor, Tensor]:
        variance = torch.full_like(b[..., 0], self.variance)
        return variance, variance

    def covariance(self, b: Tensor) -> Tensor:
        eye = torch.eye(self.dim, dtype=b.dtype, device=b.device)
        return (self.variance * eye).expand(*b.shape, self.dim)

    def inverse_response(self, m: Tensor) -> Tensor:
        return m / self.variance

    def sample(self, b: Tensor, generator: Streams | torch.Generator | None = None) -> Tensor:
        streams = _streams(b, generator)
        dtype = torch.promote_types(b.dtype, torch.float32)
        noise = streams.normal(*b.shape[streams.keys.ndim :], dtype=dtype).to(b.dtype)
        return self.variance * b + math.sqrt(self.variance) * noise


def _sphere(dim: int, radius: Radius) -> tuple[int, float]:
    """The dimension and the length of a sphere's spins, checked."""
    if not isinstance(dim, int) or dim < 2:
        raise ValueError(f"dim={dim!r}: a sphere needs an integer dim >= 2; use Ising() for 1")
    if radius is None:
        return dim, math.sqrt(dim)
    if radius == "large_d":
        if dim <= 2:
            raise ValueError(f"radius='large_d' is sqrt(D/2 - 1) and needs dim > 2, got dim={dim}")
        return dim, math.sqrt(dim / 2 - 1)
    if isinstance(radius, str) or not (radius > 0 and math.isfinite(radius)):
        raise ValueError(f"radius={radius!r} must be None, 'large_d' or a positive finite number")
    return dim, float(radius)


def _check_inside(m: Tensor, radius: float) -> None:
    square = (m.detach() ** 2).sum(-1)
    outside = square >= radius**2
    if bool(outside.any()):
        worst = float(square.max().sqrt())
        raise ValueError(
            f"magnetization of length {worst:.6g} is not strictly inside the ball of radius "
            f"{radius:.6g}: only a shorter one has a field; scale it down"
        )


def _covariance(transverse: Tensor, weight: Tensor, b: Tensor) -> Tensor:
    """transverse * 1 + weight * b b^T, smooth at zero field."""
    eye = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device)
    outer = b[..., :, None] * b[..., None, :]
    return transverse[..., None, None] * eye + weight[..., None, None] * outer


def _check_field(b: Tensor) -> None:
    if not bool(torch.isfinite(b).all()):
        index = tuple((~torch.isfinite(b)).nonzero()[0].tolist())
        raise ValueError(
            f"b{list(index)} = {float(b[index])}: spins can be drawn in finite fields only"
        )


def _streams(b: Tensor, generator: Streams | torch.Generator | None) -> Streams:
    """The streams of a draw in fields b, whose leading axes are those of the streams."""
    _check_field(b)
    if isinstance(generator, Streams):
        return generator
    source = torch.default_generator if generator is None else generator
    return Streams.from_seed(source, (), b.device)


def _von_mises_fisher(b: Tensor, radius: float, streams: Streams) -> Tensor:
    """Exact draws of density exp(b . S) on |S| = R, for any D >= 2 and field.

    The alignment w = S . b / (R |b|) is drawn as the gap 1 - w, which keeps its digits at strong
    field; what is across the field is isotropic.
    """
    dim = b.shape[-1]
    work = b.detach().double()
    length = work.norm(dim=-1)
    site = work.shape[streams.keys.ndim : -1]
    if dim == 3:
        gap = _gap_of_three(radius * length, streams.uniform(*site))
    else:
        gap = _gap(radius * length, dim, streams.child(*site))

    # At zero field the alignment is measured along any axis: take the first.
    axis = work / torch.where(length > 0, length, 1.0)[..., None]
    axis[..., 0] += (length == 0).to(axis.dtype)
    tangent = streams.normal(*site, dim)
    for _ in range(2):  # twice: where little is left, the first projection leaves rounding errors
        tangent.addcmul_(torch.linalg.vecdot(tangent, axis)[..., None], axis, value=-1)
    across = radius * torch.sqrt(gap * (2 - gap)) / tangent.norm(dim=-1)
    axis.mul_(radius * (1 - gap)[..., None])
    return axis.addcmul_(across[..., None], tangent).to(b.dtype)


def _gap_of_three(kappa: Tensor, uniform: Tensor) -> Tensor:
    """1 - w in three dimensions, where the density exp(kappa w) has a closed distribution."""
    safe = torch.where(kappa > 0, kappa, 1.0)
    gap = -torch.log1p(uniform * torch.expm1(-2 * safe)) / safe
    return torch.where(kappa > 0, gap, 2 * uniform)


def _gap(kappa: Tensor, dim: int, streams: Streams) -> Tensor:
    """1 - w by rejection from Wood's envelope (1994, Comm. Stat. Sim. 23, 157).

    The acceptance rate is above 2 / 3 for every D and kappa. The symmetric beta variate of the
    envelope comes from two uniform numbers (Ulrich 1984, Appl. Stat. 33, 158).
    """
    root = torch.sqrt(4 * kappa**2 + (dim - 1) ** 2)
    ratio = (dim - 1) / (2 * kappa + root)  # in (0, 1], 1 at zero field
    x0 = (1 - ratio) / (1 + ratio)
    # log(1 - x0^2) with 1 - x0^2 = 4 ratio / (1 + ratio)^2
    log_bound = (dim - 1) * torch.log(4 * ratio / (1 + ratio) ** 2)

    gap = torch.empty_like(kappa).flatten()
    streams = streams.flatten()
    pending = torch.arange(len(gap), device=gap.device)
    constants = torch.stack([ratio, kappa, x0, log_bound]).flatten(1)
    while len(pending):
        r, k, x, bound = constants[:, pending]
        first, second, third = streams.uniform(3).unbind(-1)
        width = torch.sqrt(-torch.expm1(2 / (dim - 2) * torch.log(first))) if dim > 2 else 1.0
        z = (1 + width * torch.cos(2 * math.pi * second)) / 2
        proposal = 2 * r * z / (1 - (1 - r) * z)
        # 1 - x0 w = (1 - x0) + x0 (1 - w)
        log_accept = (
            k * (1 - proposal - x) + (dim - 1) * torch.log(2 * r / (1 + r) + x * proposal) - bound
        )
        accepted = torch.log(third) <= log_accept
        gap[pending[accepted]] = proposal[accepted]
        pending, streams = pending[~accepted], streams[~accepted]
    return gap.reshape(kappa.shape)
