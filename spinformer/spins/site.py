r"""Site laws: one spin alone in a field.

A site law answers for one spin S with weight :math:`\exp(b \cdot S)` under its own normalized
measure, where :math:`b = \beta H` is the dimensionless field. All methods act on the last axis
(the D components) and treat every other axis as independent sites. A site with :math:`b = 0` has
zero mean and zero log-partition, which is why an absent site needs no special case.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
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
Noise = tuple[Tensor, ...]


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

    def sample(self, b: Tensor, generator: Streams | torch.Generator | None = None) -> Tensor:
        """One independent draw per site, shape (..., D).

        Args:
            b: dimensionless fields (..., D).
            generator: the source of random numbers, or the
                :class:`~spinformer.spins.streams.Streams` of chains, whose axes are the first of b.

        Raises:
            ValueError: a field that is not finite.
        """
        _check_field(b)
        if not isinstance(generator, Streams):
            source = torch.default_generator if generator is None else generator
            generator = Streams.from_seed(source, (), b.device)
        return self.draw(b, generator)

    def draw(self, b: Tensor, streams: Streams) -> Tensor:
        """:meth:`sample` of chains, without a look at the values: for the innermost loop.

        A spin in a field that is not finite is not finite either, and disturbs no other one. The
        work is done in the dtype of ``b``, in float32 at least.
        """
        dtype = torch.promote_types(b.dtype, torch.float32)
        noise = self.noise(b.shape[streams.keys.ndim : -1], streams, dtype)
        return self.place(b.detach().to(dtype), noise).to(b.dtype)

    @abc.abstractmethod
    def noise(self, sites: Sequence[int], streams: Streams, dtype: torch.dtype) -> Noise:
        """All of a draw that does not depend on the field: tensors (*keys, *sites, ...).

        Spins that are drawn one after the other have their noise made at once.
        """

    @abc.abstractmethod
    def place(self, b: Tensor, noise: Noise) -> Tensor:
        """The spins that a noise makes in the fields b (*keys, *sites, D), in the noise's dtype."""

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

    def noise(self, sites: Sequence[int], streams: Streams, dtype: torch.dtype) -> Noise:
        return (streams.uniform(*sites, 1, dtype=dtype),)

    def place(self, b: Tensor, noise: Noise) -> Tensor:
        up = (noise[0] < torch.sigmoid(2 * b)).to(b.dtype)
        # Zero times a field is zero, or NaN where it is not finite.
        return up.mul_(2).sub_(1).add_(b * 0)


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

    def noise(self, sites: Sequence[int], streams: Streams, dtype: torch.dtype) -> Noise:
        return _sphere_noise(self.dim, sites, streams, dtype)

    def place(self, b: Tensor, noise: Noise) -> Tensor:
        return _von_mises_fisher(b, self.radius, noise)

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

    def noise(self, sites: Sequence[int], streams: Streams, dtype: torch.dtype) -> Noise:
        return _sphere_noise(self.dim, sites, streams, dtype)

    def place(self, b: Tensor, noise: Noise) -> Tensor:
        return _von_mises_fisher(b, self.radius, noise)

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

    def noise(self, sites: Sequence[int], streams: Streams, dtype: torch.dtype) -> Noise:
        return (streams.normal(*sites, self.dim, dtype=dtype),)

    def place(self, b: Tensor, noise: Noise) -> Tensor:
        return self.variance * b + math.sqrt(self.variance) * noise[0]


def to_sphere(vectors: Tensor, radius: float) -> Tensor:
    """Vectors (..., D) scaled to length R; a zero vector, as of an absent site, stays zero."""
    length = vectors.norm(dim=-1, keepdim=True)
    return vectors * (radius / torch.where(length > 0, length, radius))


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


def _sphere_noise(dim: int, sites: Sequence[int], streams: Streams, dtype: torch.dtype) -> Noise:
    """D = 3: a uniform number, and the cosine and sine of the angle about the field. D = 2: tries
    of :func:`_tries`. Else those, and the direction across the field."""
    if dim == 3:
        chosen, angle = streams.uniform(2, *sites, dtype=dtype).movedim(streams.keys.ndim, 0)
        angle = angle * (2 * math.pi)
        return chosen, angle.cos(), angle.sin()
    child = streams.child(*sites)
    count = child.keys.numel()
    tries = (child.keys, *_tries(dim, child, 4 if count < _FEW_SITES else 1, dtype))
    if dim == 2:
        return tries
    tangent = streams.normal(*sites, dim - 1, dtype=dtype)
    tangent /= torch.linalg.vecdot(tangent, tangent).sqrt_()[..., None]
    return *tries, tangent


def _von_mises_fisher(b: Tensor, radius: float, noise: Noise) -> Tensor:
    """Exact draws of density exp(b . S) on |S| = R, for any D >= 2 and field.

    A spin is drawn about the first axis: its alignment w with that axis as the gap 1 - w, and the
    part across, of length sqrt(1 - w^2), isotropic; both keep their digits in a strong field. Then
    the first axis is turned to the field, by a reflection.
    """
    dim = b.shape[-1]
    if dim > 3:
        kappa, axis = _polar(b, torch.linalg.vecdot(b, b).sqrt_(), radius, -1)
        gap, side = _gap(kappa, dim, noise)
        tangent = noise[-1] * side[..., None]
        first, rest = axis[..., 0], axis[..., 1:]
        along, shift = _reflection(gap, torch.linalg.vecdot(rest, tangent), first)
        tangent.addcmul_(rest, shift[..., None], value=-1)
        return torch.cat([along[..., None], tangent], -1).mul_(radius)
    # Component by component: two or three numbers are too few for a loop of their own.
    planes = b.movedim(-1, 0).contiguous()
    kappa, axis = _polar(planes, planes.square().sum(0).sqrt_(), radius, 0)
    first, *others = axis
    if dim == 2:
        gap, side = _gap(kappa, dim, noise)
        across = [side]
    else:
        chosen, cosine, sine = noise
        gap = _gap_of_three(kappa, chosen)
        side = gap.mul(2 - gap).sqrt_()
        across = [side * cosine, side * sine]
    product = across[0] * others[0]
    if dim == 3:
        product.addcmul_(across[1], others[1])
    along, shift = _reflection(gap, product, first)
    spins = torch.empty_like(planes)
    torch.mul(along, radius, out=spins[0])
    for spin, part, direction in zip(spins[1:], across, others, strict=True):
        torch.mul(part.addcmul_(direction, shift, value=-1), radius, out=spin)
    return spins.movedim(0, -1)


def _polar(field: Tensor, length: Tensor, radius: float, components: int) -> tuple[Tensor, Tensor]:
    """kappa and the direction of a field, whose components are along an axis of its tensor."""
    # A field of 1e-15 is as good as none, and of shorter ones the squares may lose their digits.
    free = length < 1e-15
    kappa = (radius * length).clamp_(min=1e-15)
    if not bool(free.any()):
        return kappa, field / length.unsqueeze(components)
    axis = field / length.masked_fill_(free, torch.inf).unsqueeze(components)
    axis.select(components, 0).masked_fill_(free, 1.0)  # any direction will do
    return kappa, axis


def _reflection(gap: Tensor, product: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """A reflection that takes the first axis, or its negative, to the axis n of a field.

    It goes along n + s e, s the sign of n's first component, which is never short. Reflected is
    what has -s w along e, with w = 1 - gap, and a part across e whose product with n is given.

    Returns:
        The first component of the image, and the multiple of n to be taken off the others.
    """
    sign = torch.ones_like(first).copysign_(first)
    alignment = 1 - gap
    shift = product.div(first.abs().add_(1)).sub_(alignment)
    return (first + sign).mul_(shift).addcmul_(sign, alignment).neg_(), shift


def _gap_of_three(kappa: Tensor, uniform: Tensor) -> Tensor:
    """1 - w in three dimensions, where the density exp(kappa w) has a closed distribution."""
    return (kappa * -2).expm1_().mul_(uniform).log1p_().div_(kappa).neg_()


def _gap(kappa: Tensor, dim: int, noise: Noise) -> tuple[Tensor, Tensor]:
    r"""1 - w and sqrt(1 - w^2) by rejection from Wood's envelope (1994, Comm. Stat. Sim. 23, 157).

    The envelope is a symmetric beta variate y of density (1 - y^2)^((D - 3) / 2), seen through the
    map of (-1, 1) that moves 0 to x, where it touches the law:

    .. math:: 1 - w = \frac{(1 - x)(1 - y)}{1 + x y},\quad
              \log p = (D - 1)\Big[\frac{x y}{1 + x y} - \log(1 + x y)\Big],\quad
              x = \frac{2\kappa}{D - 1 + \sqrt{4\kappa^2 + (D - 1)^2}},

    with p the probability to accept. Written so, nothing large cancels at any kappa. The rate is
    above 2 / 3 for every D and kappa.
    """
    keys, *tries = noise[:4]
    twice = 2 * kappa
    root = (twice * twice).add_((dim - 1) ** 2).sqrt_()
    touch = twice / (root + (dim - 1))
    rest = (2 * (dim - 1)) / (twice + root + (dim - 1))  # 1 - x
    gap, side, rejected = _first_accepted(touch, rest, dim, *tries)
    if not bool(rejected.any()):
        return gap, side
    shape = gap.shape
    touch, rest, gap, side = (t.flatten() for t in (touch, rest, gap, side))
    pending = rejected.flatten().nonzero().flatten()
    position = tries[0].shape[-1] * (4 if dim > 2 else 2)
    position = position // 2 if kappa.dtype == torch.float32 else position
    streams = Streams(keys.flatten()[pending], position)
    while len(pending):
        # A few sites cost the same whether they try once or four times; the numbers of a try are
        # the same either way.
        more = _tries(dim, streams, 4 if len(pending) < _FEW_SITES else 1, kappa.dtype)
        gap[pending], side[pending], rejected = _first_accepted(
            touch[pending], rest[pending], dim, *more
        )
        again = rejected.nonzero().flatten()
        pending, streams = pending[again], streams[again]
    return gap.reshape(shape), side.reshape(shape)


_FEW_SITES = 500


def _tries(dim: int, streams: Streams, count: int, dtype: torch.dtype) -> Noise:
    """Variates y of the envelope, sqrt(1 - y^2), and logarithms of uniform numbers, (..., count).

    y comes from two uniform numbers (Ulrich 1984, Appl. Stat. 33, 158); for D = 2 it is the cosine
    of an angle, whose sine gives the part across its sign.
    """
    # Four where three would do: in float32 they come in pairs, which must not be torn.
    uniform = streams.uniform(count, 4 if dim > 2 else 2, dtype=dtype)
    angle, accept, *width = uniform.unbind(-1)
    angle = angle * (2 * math.pi)
    y = angle.cos()
    if dim == 2:
        return y, angle.sin(), accept.log()
    # The square of the width is 1 - u^(2 / (D - 2)).
    y.mul_(width[0].log().mul_(2 / (dim - 2)).expm1_().neg_().sqrt_())
    return y, torch.addcmul(torch.ones_like(y), y, y, value=-1).sqrt_(), accept.log()


def _first_accepted(
    touch: Tensor, rest: Tensor, dim: int, y: Tensor, wide: Tensor, accept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """1 - w and sqrt(1 - w^2) of the first of some tries that is accepted, and whether none is."""
    shift = touch[..., None] * y
    scale = shift + 1
    log_accept = (shift / scale).sub_(shift.log1p_()).mul_(dim - 1)
    # At the end of the range an infinity meets its opposite: not a number, and not accepted.
    accepted = accept <= log_accept
    if y.shape[-1] == 1:
        y, wide, scale, found = y[..., 0], wide[..., 0], scale[..., 0], accepted[..., 0]
    else:
        found, first = accepted.to(torch.int8).max(-1, keepdim=True)
        y, wide, scale = (t.gather(-1, first)[..., 0] for t in (y, wide, scale))
        found = found[..., 0].bool()
    gap = (1 - y).mul_(rest).div_(scale)
    # 1 - x^2 = (1 - x)(1 + x)
    side = (touch + 1).mul_(rest).sqrt_().mul_(wide).div_(scale)
    # In a broken field nothing else is ever found.
    return gap, side, ~(found | touch.isnan())
