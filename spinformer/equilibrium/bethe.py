r"""The Bethe approximation: belief propagation, exact where the bonds form no loops.

For Ising spins every spin i tells every neighbour j the field :math:`u_{i\to j}` that it exerts on
it, computed from all that i hears from the others. With :math:`K = \beta J`, :math:`b = \beta h`,

.. math::
    H_i = b_i + \sum_k u_{k\to i},\qquad \theta_{i\to j} = H_i - u_{j\to i},\qquad
    u_{i\to j} = \operatorname{atanh}(\tanh K_{ij} \tanh\theta_{i\to j}),

and :math:`m_i = \tanh H_i`. Written in the messages, the free energy

.. math::
    \log Z_B = \sum_i \log\cosh H_i
        + \sum_{i<j} \log\frac{z_{ij}}{\cosh H_i \cosh H_j},\qquad
    z_{ij} = \langle e^{K_{ij} s_i s_j + \theta_{i\to j} s_i + \theta_{j\to i} s_j}\rangle_0

is stationary at every fixed point of them, so that its first derivatives are those at fixed
messages. A pair without a bond has u = 0 and contributes nothing: all pairs can be summed over.

Spheres without fields have a solution that needs no iteration, the paramagnetic one, in which no
spin exerts a field: :math:`\log Z_B = \sum_{i<j} \log z_D(k_{ij})` with
:math:`k = K R^2`. The correlation of a bond is :math:`R^2 A_D(k)`.

In both, the fluctuations of the magnetizations follow from those of the bonds alone. With the
variances :math:`v_i` of a component (:math:`1/\cosh^2 H_i`, or :math:`R^2/D`) and the correlation
coefficients :math:`r_{ij}` of the bonds (:math:`A_D(k_{ij})` for spheres),

.. math::
    \chi = \beta \sqrt{v}\,M^{-1} \sqrt{v},\qquad
    M_{ij} = \delta_{ij}\Big(1 + \sum_k \frac{r_{ik}^2}{1 - r_{ik}^2}\Big)
        - \frac{r_{ij}}{1 - r_{ij}^2}.

Sources: Bethe 1935, Proc. R. Soc. A 150, 552; Yedidia, Freeman & Weiss 2005, IEEE Trans. Inf.
Theory 51, 2282 (fixed points are stationary points); Welling & Teh 2004, Neural Comput. 16, 197,
and Ricci-Tersenghi 2012, J. Stat. Mech. P08015 (linear response, messages of magnetizations).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from spinformer.equilibrium.iteration import check_initial, refuse_overflow
from spinformer.errors import OnFailure, strict_options
from spinformer.solve.fixed_point import FixedPoint, FixedPointSolver
from spinformer.solve.implicit import envelope
from spinformer.solve.linear import symmetric_eigenvalues
from spinformer.solve.solution import Solution
from spinformer.spins.site import Ising, LargeDSphere, Sphere
from spinformer.spins.system import SpinSystem
from spinformer.thermo.equilibrium import (
    DerivedEquilibrium,
    LogPartition,
    observable,
    outside_inference_mode,
)

__all__ = ["Bethe", "BetheEquilibrium"]


class _Functions(NamedTuple):
    """The answer as functions of J, h and beta, of dense couplings in every system."""

    log_partition: LogPartition
    magnetization: LogPartition
    # standard deviations of a component (..., N), and M (..., N, N)
    fluctuations: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@strict_options
class Bethe:
    r"""The Bethe approximation of a :class:`~spinformer.SpinSystem`, by belief propagation.

    Exact on trees and forests; on other graphs the error of log Z begins with the shortest loop,
    :math:`D \prod_{loop} (K R^2/D)`, and of an Ising magnetization in a field with the same order.
    For ``Ising`` spins in any fields; for ``Sphere`` and ``LargeDSphere`` without fields.

    *Ising.* Below the ordering temperature there are several fixed points. ``initial`` selects one,
    :class:`~spinformer.LowestFreeEnergy` the best. On frustrated loops at low temperature the
    messages may never settle: damp them.

    *Spheres* are solved in closed form, with m = 0. This is the paramagnetic solution; in an
    ordered phase it is unstable: :meth:`~spinformer.Equilibrium.stability`, here the smallest
    eigenvalue of M, is negative. It is positive whenever messages die out on the graph, that is,
    while the non-backtracking matrix :math:`B_{(i\to j),(k\to i)} = A_D(k_{ij})`,
    :math:`k \ne j`, of the bonds has a spectral radius below 1; for ferromagnets the two change
    sign together.

    Args:
        solver: ``"plain"``, ``"anderson"`` or ``"broyden"``
            (:class:`~spinformer.solve.fixed_point.FixedPoint`).
        damping: step in (0, 1]; below 1 for frustrated systems.
        tolerance: of the residual, the largest change of a message in units of the largest field
            possible in that system, :math:`\max_i (1 + |b_i| + \sum_j |K_{ij}|)`; None is 1e-10 in
            float64 and 1e-5 in float32.
        max_iterations: updates of all messages.
        on_failure: ``"raise"``, ``"warn"`` or ``"ignore"``.

    Cost: O(N^2) time and memory an iteration, whatever the number of bonds: messages are kept as a
    matrix (..., N, N) in which a missing bond is a zero. On a tree the number of iterations is its
    diameter. Susceptibilities: O(N^3), or an implicit derivative a site where bonds are so strong
    (:math:`\beta J` above 5) that spins flip together.
    """

    def __init__(
        self,
        solver: FixedPointSolver = "plain",
        damping: float = 1.0,
        tolerance: float | None = None,
        max_iterations: int = 1000,
        on_failure: OnFailure = "raise",
    ) -> None:
        self.fixed_point = FixedPoint(solver, damping, tolerance, max_iterations, on_failure)

    @outside_inference_mode
    def solve(self, system: SpinSystem, initial: Tensor | None = None) -> BetheEquilibrium:
        """Solve for the messages.

        Args:
            system: symmetric scalar couplings; Ising spins, or spheres without fields.
            initial: magnetizations (..., N, 1) between -1 and 1 to start from. Those of a solution
                are turned into its very messages. None: no messages. Spheres have nothing to
                start.

        Raises:
            ConvergenceError: with ``on_failure="raise"``.
            ValueError: asymmetric or matrix-valued couplings, Gaussian spins, spheres in a field.
        """
        _check(system)
        if initial is not None:
            initial = check_initial(initial, system)
        kind = _ising if isinstance(system.site, Ising) else _spheres
        equilibrium = kind(system, initial, self.fixed_point)
        lost = ~torch.isfinite(equilibrium.solution.residual)
        if bool(lost.any()):
            # Given broken, or finite and too large for beta J to be.
            system, broken = system.isolated(lost)
            equilibrium = kind(system, initial, self.fixed_point, broken)
        self.fixed_point.check(equilibrium.solution)
        return equilibrium


def _check(system: SpinSystem) -> None:
    site = system.site
    if not isinstance(site, Ising | Sphere | LargeDSphere):
        raise ValueError(
            f"Bethe is for Ising spins and spheres, not {site!r}: use AdaptiveTAP() or Exact(), "
            "which are exact for Gaussian spins"
        )
    system.require_symmetric("Bethe")
    if system.couplings.dim is not None:
        raise ValueError(
            "Bethe needs scalar couplings (..., N, N), and these are matrix-valued: use MeanField()"
        )
    if not isinstance(site, Ising) and bool((system.field > 0).logical_or(system.field < 0).any()):
        raise ValueError(
            f"Bethe solves {site!r} without fields only: messages between spheres in a field are "
            "functions, not numbers. Use TAP(), AdaptiveTAP() or SteepestDescent(), or Exact() for "
            "two spins"
        )


class BetheEquilibrium(DerivedEquilibrium):
    r"""The Bethe answer: derivatives of log Z_B, with its fluctuations in closed form.

    ``correlations("coupling")`` is the correlation of every bond, and :math:`m_i\cdot m_j` for a
    pair without one; ``"linear_response"`` is
    :math:`m_i\cdot m_j + \operatorname{tr}\chi_{ij}/\beta`, on trees exact for all pairs.
    """

    def __init__(
        self,
        system: SpinSystem,
        functions: _Functions,
        solution: Solution,
        broken: Tensor | None = None,
    ) -> None:
        super().__init__(system, functions.log_partition, solution, broken)
        self._functions = functions

    @property
    @observable
    def magnetization(self) -> Tensor:
        """m_i = tanh H_i (..., N, D), inside the ball also where messages have not converged."""
        return self._functions.magnetization(*self._arguments)

    @property
    def _arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._dense(), self.system.field, self.system.beta

    @property
    @observable
    def messages(self) -> Tensor:
        """u_{i->j} without derivatives, (..., N, N), from row to column; zero between spheres."""
        return self.solution.value

    @property
    @observable
    def _modes(self) -> Tensor:
        """sqrt(v) M^-1 sqrt(v), the covariances of one component, (..., N, N)."""
        deviation, matrix = self._functions.fluctuations(*self._arguments)
        if _is_stiff(matrix):
            chi = super()._susceptibility()[..., :, 0, :, 0]
            return chi / self.system.beta[..., None, None]
        if self.system.present is not None:
            deviation = deviation * self.system.present
        return deviation[..., :, None] * _inverse(matrix, torch.inf) * deviation[..., None, :]

    def _susceptibility(self) -> Tensor:
        identity = torch.eye(self.system.dim, dtype=self._modes.dtype, device=self._modes.device)
        chi = self.system.beta[..., None, None] * self._modes
        return torch.einsum("...ij,ab->...iajb", chi, identity)

    def _susceptibility_product(self, vector: Tensor) -> Tensor:
        return self.system.beta[..., None, None] * (self._modes @ vector)

    def _linear_response_correlations(self) -> Tensor:
        m = self.magnetization
        return m @ m.mT + self.system.dim * self._modes

    @observable
    def stability(self) -> Tensor:
        r"""Smallest eigenvalue of the Hessian of :math:`\beta G(m)`, in units of a free spin's.

        That of :meth:`Equilibrium.stability`, with its sign taken from M: in strong fields
        susceptibilities spread over more decades than rounding leaves room for, and the entries of
        M don't. O(N^3).
        """
        if not self.system.num_spins:
            return torch.full_like(self.system.beta, torch.inf)
        with torch.no_grad():
            deviation, matrix = self._functions.fluctuations(*self._arguments)
            unit = self.system.site.scale
            modes = symmetric_eigenvalues(self._modes)
            positive = unit**2 / modes[..., -1]
            if _is_stiff(matrix):
                rounding = torch.finfo(modes.dtype).eps ** 0.5 * modes[..., -1]
                return torch.where(modes[..., 0] >= -rounding, positive, unit**2 / modes[..., 0])
            lowest = symmetric_eigenvalues(matrix)[..., 0]
            scale = unit / deviation
            hessian = scale[..., :, None] * matrix * scale[..., None, :]
            curvature = symmetric_eigenvalues(hessian)[..., 0]
        # No variance is above that of a free spin, so that a negative curvature of the whole is at
        # least that of M.
        return torch.where(lowest > 0, positive, torch.minimum(lowest, curvature))


# -- Ising spins ----------------------------------------------------------------------------------


def _ising(
    system: SpinSystem,
    initial: Tensor | None,
    options: FixedPoint,
    broken: Tensor | None = None,
) -> BetheEquilibrium:
    def dimensionless(j: Tensor, h: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """K and b, (..., N, N) and (..., N), in every system."""
        fields = h[..., 0]
        if system.mask is not None:
            # Zero already; the derivative there shall be so too, to the last digit.
            fields = fields.masked_fill(system.mask, 0.0)
        k, b = beta[..., None, None] * (j + j.mT) / 2, beta[..., None] * fields
        if broken is not None:
            b = torch.where(broken[..., None], 0.0, b)
            k = torch.where(broken[..., None, None], 0.0, k)
        return k, b

    k, b = dimensionless(system.couplings.to_dense(), system.field, system.beta)
    with torch.no_grad():
        largest = (1 + b.abs() + k.abs().sum(-1)).amax(-1) if system.num_spins else system.beta
        unit = largest[..., None, None]
        start = torch.zeros_like(k) if initial is None else _messages_of(initial[..., 0], k) / unit

    def update(state: Tensor, k: Tensor, b: Tensor) -> Tensor:
        return _transmit(k, _cavity(unit * state, b)) / unit

    solution = options.solve(update, start, (k.detach(), b.detach()), check=False)
    solution = refuse_overflow(solution, k, b[..., None])

    def attach(k: Tensor, b: Tensor) -> Tensor:
        return options.attach(solution, update, (k, b))

    def log_partition(j: Tensor, h: Tensor, beta: Tensor) -> Tensor:
        inputs = dimensionless(j, h, beta)
        return envelope(
            lambda state, *given: _log_partition(unit * state, *given), attach(*inputs), inputs
        )

    def magnetization(j: Tensor, h: Tensor, beta: Tensor) -> Tensor:
        inputs = dimensionless(j, h, beta)
        return torch.tanh(_total(unit * attach(*inputs), inputs[1]))[..., None]

    def fluctuations(j: Tensor, h: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        inputs = dimensionless(j, h, beta)
        return _ising_fluctuations(unit * attach(*inputs), *inputs)

    shown = Solution(
        unit * solution.value, solution.residual, solution.iterations, solution.converged
    )
    functions = _Functions(log_partition, magnetization, fluctuations)
    return BetheEquilibrium(system, functions, shown, broken)


def _total(u: Tensor, b: Tensor) -> Tensor:
    """H_i from the messages u_{i->j}; rows are senders."""
    return b + u.sum(-2)


def _cavity(u: Tensor, b: Tensor) -> Tensor:
    """theta_{i->j}."""
    return _total(u, b)[..., :, None] - u.mT


def _transmit(k: Tensor, theta: Tensor) -> Tensor:
    """atanh(tanh K tanh theta), which stays finite where a tanh rounds to one."""
    return k + (logsigmoid(2 * (theta - k)) - logsigmoid(2 * (theta + k))) / 2


def _log_2cosh(x: Tensor) -> Tensor:
    return x - logsigmoid(2 * x)


def _log_sum(x: Tensor, y: Tensor) -> Tensor:
    """log(exp x + exp y); torch's own has no second derivative where x and y are far apart."""
    return x - logsigmoid(x - y)


def _messages_of(m: Tensor, k: Tensor) -> Tensor:
    r"""The messages of a fixed point with magnetizations m.

    Two magnetizations and their coupling determine what each would be without the other: from
    :math:`m_i = (M_i + t M_j)/(1 + t M_i M_j)` and its mirror image, :math:`t = \tanh K`.
    """
    if bool((m.abs() > 1).any()):
        raise ValueError(
            f"initial holds {float(m.abs().max()):.6g}: magnetizations of Ising spins lie between "
            "-1 and 1"
        )
    t = torch.tanh(k)
    alone, other = m[..., :, None] - t * m[..., None, :], m[..., None, :] - t * m[..., :, None]
    rest = 4 * torch.sigmoid(2 * k) * torch.sigmoid(-2 * k)  # 1 - t^2
    root = (rest.square() - 4 * t * alone * other).clamp_min(0).sqrt()
    edge = 1 - torch.finfo(m.dtype).eps
    cavity = (2 * alone / (rest + root)).nan_to_num(0.0, 1.0, -1.0).clamp(-edge, edge)
    return _transmit(k, torch.atanh(cavity))


def _log_partition(u: Tensor, k: Tensor, b: Tensor) -> Tensor:
    """log Z_B at any messages; stationary in each of them where they are a fixed point."""
    identity = torch.eye(k.shape[-1], dtype=torch.bool, device=k.device)
    u = u.masked_fill(identity, 0.0)
    theta = _cavity(u, b)
    own = _log_2cosh(_total(u, b))
    pairs = _log_sum(_log_2cosh(theta + theta.mT) + k, _log_2cosh(theta - theta.mT) - k) - (
        own[..., :, None] + own[..., None, :]
    )
    return (own - math.log(2)).sum(-1) + pairs.masked_fill(identity, 0.0).sum((-2, -1)) / 2


def _ising_fluctuations(u: Tensor, k: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""Standard deviations, and M.

    A pair with probabilities p(s, s') has :math:`r = (p_{++}p_{--} - p_{+-}p_{-+}) /
    \sqrt{p_{+\cdot}p_{-\cdot}p_{\cdot+}p_{\cdot-}}`, and :math:`1 - r^2` is the sum of the
    products of three of them over the product under the root: no differences.
    """
    theta = _cavity(u, b)
    even, odd = _log_2cosh(theta + theta.mT), _log_2cosh(theta - theta.mT)
    sides = _log_2cosh(theta + k) + _log_2cosh(theta - k)
    marginals = sides + sides.mT
    remainder = _log_sum(even + k, odd - k) + _log_sum(even - k, odd + k) - marginals
    half = -marginals / 2
    r = torch.exp(2 * k + half) - torch.exp(half - 2 * k)
    ratio = torch.exp(2 * k + half - remainder) - torch.exp(half - 2 * k - remainder)
    return torch.exp(math.log(2) - _log_2cosh(_total(u, b))), _fluctuation_matrix(r, ratio)


def _fluctuation_matrix(r: Tensor, ratio: Tensor) -> Tensor:
    """M from r and r / (1 - r^2)."""
    identity = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
    own = 1 + (r * ratio).sum(-1)
    return identity * own[..., :, None] - ratio


def _is_stiff(matrix: Tensor) -> bool:
    """Whether inverting M loses digits, to some bond of spins that only flip together.

    Its entries are up to cosh(K)^2, and those of the inverse of order one. Then chi is taken from
    the derivatives of the messages, at one implicit derivative a site.
    """
    largest = matrix.detach().abs().amax() if matrix.numel() else 0.0
    return bool(largest > torch.finfo(matrix.dtype).eps ** -0.25)


def _inverse(matrix: Tensor, singular: float) -> Tensor:
    """One LU a system; ``singular`` everywhere in one that is.

    Batched LU on CPUs is known to hang for N >= 160 with several threads; single ones don't.
    """
    if matrix.numel() == 0:
        return matrix
    flat = matrix.reshape(-1, *matrix.shape[-2:])
    inverses = []
    for one in flat:
        inverse, failed = torch.linalg.inv_ex(one)
        inverses.append(inverse if int(failed) == 0 else torch.full_like(one, singular))
    return torch.stack(inverses).reshape(matrix.shape)


# -- spheres --------------------------------------------------------------------------------------


def _spheres(
    system: SpinSystem,
    initial: Tensor | None,
    options: FixedPoint,
    broken: Tensor | None = None,
) -> BetheEquilibrium:
    """The paramagnetic solution; nothing depends on how it is asked for."""
    site, radius = system.site, system.site.radius
    assert radius is not None  # _check

    def bonds(j: Tensor, beta: Tensor) -> Tensor:
        """One spin's field R K on the other, as a vector of one component."""
        fields = radius * beta[..., None, None] * (j + j.mT) / 2
        if broken is not None:
            fields = torch.where(broken[..., None, None], 0.0, fields)
        return fields[..., None]

    def fluctuations(j: Tensor, h: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        r = site.mean(bonds(j, beta))[..., 0] / radius
        deviation = torch.full_like(h[..., 0], site.scale)
        return deviation, _fluctuation_matrix(r, r / ((1 - r) * (1 + r)))

    def log_partition(j: Tensor, h: Tensor, beta: Tensor) -> Tensor:
        value = site.log_partition(bonds(j, beta)).sum((-2, -1)) / 2
        # Zero without a field; what it adds is derivatives in the field, to the third order.
        response = beta[..., None, None] * h * magnetization(j, h, beta)
        return value + response.sum((-2, -1)) / 2

    def magnetization(j: Tensor, h: Tensor, beta: Tensor) -> Tensor:
        """The linear response to h, which is zero."""
        wanted = any(tensor.requires_grad for tensor in (j, h, beta))
        if not (torch.is_grad_enabled() and wanted):
            return torch.zeros_like(h)
        inverse = _inverse(fluctuations(j, h, beta)[1], 0.0)
        return site.scale**2 * (inverse @ (beta[..., None, None] * h))

    with torch.no_grad():
        log_z = log_partition(system.couplings.to_dense(), system.field, system.beta)
        log_z = log_z.expand(system.batch_shape)
    sound = torch.isfinite(log_z) & torch.isfinite(system.field).all(-1).all(-1)
    residual = torch.where(sound, torch.zeros_like(log_z), torch.nan)
    n = system.num_spins
    solution = Solution(
        system.field.new_zeros(*system.batch_shape, n, n),
        residual,
        torch.zeros_like(residual, dtype=torch.int64),
        residual == 0,
    )
    functions = _Functions(log_partition, magnetization, fluctuations)
    return BetheEquilibrium(system, functions, solution, broken)
