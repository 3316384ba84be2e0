r"""Partition functions that are known: one class for each kind of connected component.

Each is called as ``(K, b) -> log Z`` with :math:`K = \beta J` (systems, N, N), symmetric, and
:math:`b = \beta h` (systems, N, D), both in float64, of the whole system, and looks at its own
sites only. With :math:`\nu = D/2 - 1`, :math:`k = K R^2` and the functions :math:`z_D, A_D` of
:mod:`spinformer.spins.special`.

Sources: Stanley 1969, Phys. Rev. 179, 570 (chains and rings of D-vector spins); NIST Digital
Library of Mathematical Functions, sections 3.5 (Gauss rules) and 10.35 (expansion in harmonics).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spinformer.errors import ConvergenceError
from spinformer.spins.special import log_normalizer_squared, reduced_ratio

__all__ = ["Enumeration", "Forest", "Pair", "Ring", "gaussian"]

# Numbers held at once by an enumeration or a quadrature (32 MiB in float64); what needs more is
# computed in chunks of systems, and its backward pass computes each chunk again.
_CHUNK = 2**22
_MOST_HARMONICS = 4096
# Terms of the expansion in harmonics below exp(-45) of the largest cannot move the last digit.
_NEGLIGIBLE = 45.0
# Points per axis up to which the Gauss rule of the sphere's own weight is used.
_MOST_MATCHED = 64


def _chunked(function: Callable[..., Tensor], size: int, *tensors: Tensor) -> Tensor:
    """``function`` of the systems along the first axis, holding about ``_CHUNK`` numbers."""
    count = len(tensors[0])
    rows = max(1, _CHUNK // size)
    if count <= rows:
        return function(*tensors)
    chunks = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
    return torch.cat(
        [
            checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks
        ]
    )


# --- Ising spins and Gaussian spins -------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def _states(num_spins: int, device: torch.device) -> Tensor:
    """All (2^N, N) states of +-1 spins."""
    index = torch.arange(2**num_spins, device=device)
    bits = (index[:, None] >> torch.arange(num_spins, device=device)) & 1
    return 2.0 * bits.double() - 1.0


class Enumeration:
    """The sum over the states of Ising spins, as a matrix over two halves of the sites."""

    def __init__(self, sites: Sequence[int]) -> None:
        self.sites = list(sites)

    def __call__(self, couplings: Tensor, b: Tensor) -> Tensor:
        k = couplings[:, self.sites][:, :, self.sites]
        return _chunked(self._sum, 2 ** len(self.sites), k, b[:, self.sites, 0])

    def _sum(self, k: Tensor, b: Tensor) -> Tensor:
        num_spins = len(self.sites)
        half = num_spins // 2
        first = _states(half, b.device)
        second = _states(num_spins - half, b.device)
        exponent = first @ k[:, :half, half:] @ second.T
        for states, part, axis in ((first, slice(0, half), 2), (second, slice(half, None), 1)):
            own = ((states @ k[:, part, part]) * states).sum(-1) / 2 + b[:, part] @ states.T
            exponent = exponent + own.unsqueeze(axis)
        return exponent.flatten(1).logsumexp(-1) - num_spins * math.log(2.0)


def gaussian(couplings: Tensor, b: Tensor, *, variance: float) -> Tensor:
    """Gaussian spins; :meth:`~spinformer.Gaussian.check_stable` comes first."""
    num_spins, dim = b.shape[-2:]
    eye = torch.eye(num_spins, dtype=b.dtype, device=b.device)
    factor = torch.linalg.cholesky(eye - variance * couplings)
    log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    half = torch.linalg.solve_triangular(factor, b, upper=False)
    log_z: Tensor = (variance * half.square().sum((-1, -2)) - dim * log_det) / 2
    return log_z


# --- spheres without fields ---------------------------------------------------------------------


def _with_responses(log_z: Tensor, corr: Tensor, bonds: Tensor, k: Tensor, b: Tensor) -> Tensor:
    r"""log Z with what its derivatives need and its value does not.

    ``corr`` is :math:`c_{ij} = \langle S_i S_j\rangle/R^2`, ``k`` and ``b`` carry their factors
    of R. The second order in the field, :math:`b^T c\, b / 2D`, holds the susceptibility, and
    :math:`k_{ij} c_{ij}` on pairs without a bond holds their correlation; both vanish here.
    """
    response = (b * (corr @ b)).sum((-1, -2)) / (2 * b.shape[-1])
    missing = (k * corr * ~bonds).sum((-1, -2)) / 2
    return log_z + response + missing


class Forest:
    """Spheres (or Ising spins) on one tree."""

    def __init__(self, dim: int, radius: float, tree: dict[int, int]) -> None:
        self.dim, self.radius = dim, radius
        self.sites = list(tree)
        place = {site: index for index, site in enumerate(self.sites)}
        self.parents = [place[tree[site]] for site in self.sites[1:]]

    def __call__(self, couplings: Tensor, b: Tensor) -> Tensor:
        k = self.radius**2 * couplings[:, self.sites][:, :, self.sites]
        num_spins = len(self.sites)
        child = torch.arange(1, num_spins, device=k.device)
        parent = torch.tensor(self.parents, device=k.device)
        bond = k[:, child, parent]
        square = bond.square()
        alignment = bond * reduced_ratio(square, self.dim)
        # Products along paths: S_child = A S_parent + noise of variance 1 - A^2 has these
        # correlations, and a triangular solve gives them all at once.
        eye = torch.eye(num_spins, dtype=k.dtype, device=k.device).expand_as(k)
        lower = eye.index_put((torch.arange(len(k))[:, None], child, parent), -alignment)
        noise = torch.cat([eye[:, 0, :1], 1 - alignment.square()], dim=-1)
        paths = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
        corr = (paths * noise[:, None]) @ paths.mT
        bonds = torch.eye(num_spins, dtype=torch.bool, device=k.device)
        bonds[child, parent] = True
        bonds[parent, child] = True
        log_z = log_normalizer_squared(square, self.dim).sum(-1)
        return _with_responses(log_z, corr, bonds, k, self.radius * b[:, self.sites])


class Ring:
    r"""Spheres (or Ising spins) on one ring, by the expansion in harmonics.

    With :math:`\lambda_\ell/\lambda_0 = \prod_{j<\ell} A_{D+2j}` everything is relative to the
    open ring, and in logarithms. Between the two arcs of a pair, the product of two spins
    raises or lowers :math:`\ell` by one with weight :math:`d_\ell (\ell+D-2)/(2\ell+D-2)`.
    """

    def __init__(self, dim: int, radius: float, sites: list[int], tolerance: float) -> None:
        self.dim, self.radius, self.sites, self.tolerance = dim, radius, sites, tolerance

    def __call__(self, couplings: Tensor, b: Tensor) -> Tensor:
        k = self.radius**2 * couplings[:, self.sites][:, :, self.sites]
        num_spins = len(self.sites)
        here = torch.arange(num_spins, device=k.device)
        ahead = here.roll(-1)
        bond = k[:, here, ahead]
        ratios, log_degeneracy = self._harmonics(bond)  # (systems, L + 1, N), (L,)
        sign = bond.sign()
        frustrated = sign.prod(-1)
        length = len(log_degeneracy)
        whole = ratios.sum(-1)
        parity = torch.ones_like(whole[:, :-1])
        parity[:, 1::2] = frustrated[:, None]  # the sign of the product of all bonds, to the l
        exponent = whole[:, :-1] + log_degeneracy
        top = exponent.detach().amax(-1, keepdim=True)
        terms = (exponent - top).exp()
        series = (parity * terms).sum(-1)
        self._check_cancellation(terms.detach().sum(-1), series.detach())
        log_z = log_normalizer_squared(bond.square(), self.dim).sum(-1) + series.log() + top[:, 0]

        start = torch.cat([torch.zeros_like(ratios[..., :1]), ratios.cumsum(-1)[..., :-1]], -1)
        arc = (start[..., None, :] - start[..., :, None]).triu()  # from i < j, ahead to j
        rest = whole[..., None, None] - arc
        order = torch.arange(length, device=k.device, dtype=k.dtype)
        weight = (order + self.dim - 2) / (2 * order + self.dim - 2)
        weight[0] = 1.0  # also where 0 / 0 (D = 2) and where its limit differs (D = 1)
        scale = log_degeneracy[:, None, None] - top[..., None, None]
        raised = (arc[:, :-1] + rest[:, 1:] + scale).exp() * frustrated[:, None, None, None]
        lowered = (arc[:, 1:] + rest[:, :-1] + scale).exp()
        product = ((weight * parity)[..., None, None] * (raised + lowered)).sum(1)
        upper = (_arc_signs(sign) * product / series[:, None, None]).triu(1)
        corr = upper + upper.mT + torch.eye(num_spins, dtype=k.dtype, device=k.device)
        bonds = torch.eye(num_spins, dtype=torch.bool, device=k.device)
        bonds[here, ahead] = True
        bonds[ahead, here] = True
        return _with_responses(log_z, corr, bonds, k, self.radius * b[:, self.sites])

    def _harmonics(self, bond: Tensor) -> tuple[Tensor, Tensor]:
        """log of |lambda_l / lambda_0| for l = 0 ... L, and of the degeneracies for l < L."""
        square, dim = bond.square(), self.dim
        length = 8
        while True:
            # All ratios A_{D+2j} / k from the highest, by the recurrence that damps errors.
            reduced = [reduced_ratio(square, dim + 2 * length)]
            for j in range(length - 1, -1, -1):
                reduced.append(1 / (dim + 2 * j + square * reduced[-1]))
            factors = (bond.abs()[:, None] * torch.stack(reduced[:0:-1], dim=1)).log()
            logs = torch.cat([torch.zeros_like(bond)[:, None], factors.cumsum(1)], dim=1)
            degeneracies = torch.tensor(
                [_log_degeneracy(order, dim) for order in range(length + 1)],
                dtype=bond.dtype,
                device=bond.device,
            )
            terms = logs.detach().sum(-1) + degeneracies
            if bool((terms[:, -1] < terms.amax(-1) - _NEGLIGIBLE).all()):
                return logs, degeneracies[:-1]
            length *= 2
            if length > _MOST_HARMONICS:
                raise ConvergenceError(
                    f"Exact: a ring with beta |J| R^2 up to {float(bond.detach().abs().max()):.3g} "
                    f"needs more than {_MOST_HARMONICS} harmonics. Raise the temperature or use "
                    "SteepestDescent."
                )

    def _check_cancellation(self, absolute: Tensor, series: Tensor) -> None:
        rounding = torch.finfo(series.dtype).eps * absolute / series
        bad = ~(rounding <= self.tolerance) | (series <= 0)
        if bool(bad.any()):
            raise ConvergenceError(
                f"Exact: {int(bad.sum())} of {len(bad)} frustrated rings are so cold that their "
                "alternating sum loses its digits. Raise tolerance or the temperature, or use "
                "SteepestDescent."
            )


@functools.lru_cache(maxsize=65536)
def _log_degeneracy(order: int, dim: int) -> float:
    """log of the number of independent harmonics (D = 1 has two orders, with one each)."""
    number = math.comb(order + dim - 1, order)
    if order >= 2:
        number -= math.comb(order + dim - 3, order - 2)
    return math.log(number) if number else -math.inf


def _arc_signs(sign: Tensor) -> Tensor:
    """Products of the signs of the bonds i ... j - 1 of a ring, for i < j."""
    start = torch.cat([torch.ones_like(sign[:, :1]), sign.cumprod(-1)[:, :-1]], dim=-1)
    return start[:, :, None] * start[:, None, :]


# --- two spheres in fields ----------------------------------------------------------------------


class Pair:
    r"""Two coupled spheres in fields, by quadrature over the first.

    Only the plane of the two fields is integrated over: with an orthonormal frame of it (any
    frame that contains it, if the fields are parallel or zero),
    :math:`u = x e_1 + y e_2 + \zeta w`, the integrand does not depend on the direction w. The
    frame is held fixed under differentiation; the dependence on field components
    :math:`\delta_1, \delta_2` out of the plane, whose value is zero, is the average over w to
    second order,

    .. math:: \frac{R^2\zeta^2}{2(D-2)} \left[\delta_1^2 + 2 a_D K R^2\, \delta_1 \delta_2
              + a_D a_{D+2} K^2 R^4\, \delta_2^2\right] + \frac{a_D R^2}2 \delta_2^2,
              \qquad a_D(x) = A_D(\sqrt x)/\sqrt x,\ x = R^2 |b_2 + K R u|^2,

    so that derivatives with respect to the fields are right to the third order, with no
    division by a field.
    """

    def __init__(self, dim: int, radius: float, sites: tuple[int, int]) -> None:
        self.dim, self.radius, self.sites = dim, radius, sites
        self.points = 2

    def __call__(self, couplings: Tensor, b: Tensor) -> Tensor:
        i, j = self.sites
        nodes = _plane_rule(self.dim, self.points, b.device)
        return _chunked(
            functools.partial(self._integral, nodes),
            len(nodes[0]),
            couplings[:, i, j],
            b[:, [i, j]],
        )

    def _integral(self, nodes: tuple[Tensor, Tensor], k: Tensor, b: Tensor) -> Tensor:
        plane, log_weight = nodes  # (points, 2), (points,)
        radius, dim = self.radius, self.dim
        frame = torch.linalg.qr(b.detach().mT)[0]
        inside = b @ frame  # (systems, 2, 2)
        out = b @ b.mT - inside @ inside.mT
        out = (out - out.detach())[..., None]  # zero to the last digit, with its derivatives
        first, second = inside[:, 0], inside[:, 1]
        pull = radius * k[:, None]  # K R
        zeta = (1 - plane.square().sum(-1)).clamp_min(0)
        total = second[:, None] + pull[..., None] * plane
        x = radius**2 * (total.square().sum(-1) + pull.square() * zeta)
        exponent = log_weight + radius * (first @ plane.T) + log_normalizer_squared(x, dim)
        if dim > 2:
            a = reduced_ratio(x, dim)
            lever = a * radius * pull
            curvature = (
                out[:, 0, 0]
                + 2 * lever * out[:, 0, 1]
                + lever * reduced_ratio(x, dim + 2) * radius * pull * out[:, 1, 1]
            )
            exponent = exponent + radius**2 / 2 * (zeta / (dim - 2) * curvature + a * out[:, 1, 1])
        log_z: Tensor = exponent.logsumexp(-1)
        return log_z


@functools.lru_cache(maxsize=64)
def _plane_rule(dim: int, points: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Points (x, y) and logarithms of weights for the projection of the unit sphere on a plane."""
    if dim == 2:
        angle = torch.arange(4 * points, dtype=torch.float64) * (math.pi / (2 * points))
        plane = torch.stack([angle.cos(), angle.sin()], dim=-1)
        log_weight = torch.full((4 * points,), -math.log(4 * points), dtype=torch.float64)
    else:
        t, log_t = _axis_rule(points, dim / 2 - 1)
        s, log_s = _axis_rule(points, (dim - 3) / 2)
        y = ((1 - t) * (1 + t)).sqrt()[:, None] * s
        plane = torch.stack([t[:, None].expand_as(y), y], dim=-1).flatten(0, 1)
        log_weight = (log_t[:, None] + log_s).flatten()
    return plane.to(device), log_weight.to(device)


def _axis_rule(points: int, alpha: float) -> tuple[Tensor, Tensor]:
    r"""Nodes and log weights on [-1, 1] for :math:`(1-t^2)^{\alpha-1/2}`, normalized to one.

    The Gauss rule of that weight needs the fewest points, but at large :math:`\alpha` none of them
    is where a strong field pulls the spin. Where few points did not suffice, the weight is part of
    the integrand and the points are spread evenly in angle.
    """
    power = 0 if points <= _MOST_MATCHED else math.floor(alpha)
    t, log_weight = _gauss_gegenbauer(points, alpha - power)
    step = torch.arange(power, dtype=torch.float64)
    norm = torch.log1p(0.5 / (alpha - power + 0.5 + step)).sum()
    return t, log_weight + power * torch.log((1 - t) * (1 + t)) + norm


def _gauss_gegenbauer(points: int, alpha: float) -> tuple[Tensor, Tensor]:
    r"""Nodes and log weights for the weight :math:`(1-t^2)^{\alpha-1/2}`, normalized to one.

    Nodes are the eigenvalues of the recurrence. Weights are the Christoffel numbers
    :math:`1/\sum_k p_k(t)^2`, which keep their relative accuracy where they are tiny and a steep
    integrand makes them count (the squared eigenvectors do not), with a running scale.
    """
    k = torch.arange(1, points, dtype=torch.float64)
    square = k * (k + 2 * alpha - 1) / (4 * (k + alpha) * (k + alpha - 1))
    square[:1] = 1 / (2 * (1 + alpha))  # also where the formula is 0 / 0
    off = square.sqrt()
    t = torch.linalg.eigvalsh(torch.diag(off, 1) + torch.diag(off, -1))
    t = (t - t.flip(0)) / 2
    previous, current, total = torch.zeros_like(t), torch.ones_like(t), torch.ones_like(t)
    log_scale = torch.zeros_like(t)
    for n in range(points - 1):
        below = off[n - 1] if n else 0.0
        previous, current = current, (t * current - below * previous) / off[n]
        total = total + current.square()
        shrink = total.sqrt()
        previous, current, total = previous / shrink, current / shrink, total / shrink.square()
        log_scale = log_scale + shrink.log()
    return t, -(total.log() + 2 * log_scale)
