r"""The answer of an approximation: magnetizations, thermodynamics, and the evidence for them.

Every approximation returns an :class:`Equilibrium`. All quantities follow from one function,
:math:`\log Z(\beta J, \beta h)`:

.. math::
    F = -\log Z / \beta,\quad U = -\partial_\beta \log Z,\quad S = \beta (U - F),\quad
    C = \beta^2 \partial_\beta^2 \log Z,\quad
    m_i = \frac{\partial \log Z}{\partial (\beta h_i)},\quad
    \chi_{ia,jb} = \frac{\partial m_{ia}}{\partial h_{jb}},\quad
    \langle S_i \cdot S_j \rangle = \frac1\beta \frac{\partial \log Z}{\partial J_{ij}}.

The measure is normalized, so entropies are relative to free spins: S <= 0, and zero without
couplings and fields.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from spinformer.errors import check_choice
from spinformer.solve.linear import symmetric_eigenvalues
from spinformer.solve.solution import Solution
from spinformer.spins.couplings import Dense
from spinformer.spins.system import SpinSystem

__all__ = [
    "CorrelationMethod",
    "DerivedEquilibrium",
    "Equilibrium",
    "in_solving_mode",
    "observable",
]

CorrelationMethod = Literal["linear_response", "product", "coupling"]
LogPartition = Callable[[Tensor, Tensor, Tensor], Tensor]

# Up to so many components all of a susceptibility is cheaper than one iterated product with it.
_DENSE_ROWS = 512

_Self = TypeVar("_Self", bound="Equilibrium")
_Value = TypeVar("_Value")
_Solve = TypeVar("_Solve", bound=Callable[..., Any])


def in_solving_mode(method: Callable[[_Self], _Value]) -> Callable[[_Self], _Value]:
    """A part of an equilibrium, computed in the gradient mode in which it was solved.

    Parts are remembered and built on each other: what is first looked at under ``no_grad``, in a
    log say, must not be missing from the graph of what is differentiated later.
    """

    @functools.wraps(method)
    def compute(self: _Self) -> _Value:
        with torch.set_grad_enabled(self.tracks_gradients):
            return method(self)

    return compute


def observable(method: Callable[[_Self], Tensor]) -> Callable[[_Self], Tensor]:
    """A quantity of an equilibrium: computed once, :func:`in_solving_mode`.

    In systems that were given broken (:meth:`~spinformer.SpinSystem.isolated`) a user sees NaN.
    Quantities see each other without it: the derivative of what came of NaN is NaN, also times the
    zero that a loss gives it.
    """
    name = method.__name__

    @functools.wraps(method)
    def compute(self: _Self) -> Tensor:
        if name not in self._remembered:
            self._inside += 1
            try:
                self._remembered[name] = in_solving_mode(method)(self)
            finally:
                self._inside -= 1
        return self._hide_broken(self._remembered[name])

    return compute


def outside_inference_mode(solve: _Solve) -> _Solve:
    """Solve in ``no_grad`` instead of inference mode, for answers that are derivatives of log Z."""

    @functools.wraps(solve)
    def solved(self: Any, system: SpinSystem, initial: Tensor | None = None) -> Any:
        if not torch.is_inference_mode_enabled():
            return solve(self, system, initial)
        with torch.inference_mode(False), torch.no_grad():
            normal = system.replace(
                couplings=system.couplings.with_tensors(
                    *(tensor.clone() for tensor in system.couplings.tensors())
                ),
                field=system.field.clone(),
                beta=system.beta.clone(),
                mask=None if system.mask is None else system.mask.clone(),
            )
            return solve(self, normal, None if initial is None else initial.clone())

    return solved  # type: ignore[return-value]


class Equilibrium(abc.ABC):
    """Magnetizations and thermodynamics of a :class:`~spinformer.SpinSystem`.

    Totals are over the present sites of one system; ``..._per_spin`` are densities. Everything is
    computed when first asked for, once, and is differentiable with respect to the couplings,
    fields and ``beta`` of the system if gradients were enabled when it was solved.

    Attributes:
        system: the system that was solved.
        solution: the evidence: residual, iterations and converged, one entry per system.
        broken: systems that were given with NaN or infinity (...) bool, or None.
        tracks_gradients: whether gradients were enabled when the system was solved, and asked for
            by one of its tensors.
    """

    def __init__(
        self, system: SpinSystem, solution: Solution, broken: Tensor | None = None
    ) -> None:
        self.system = system
        self.broken = broken
        given = (system.field, system.beta, solution.value, *system.couplings.tensors())
        self.tracks_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        self._remembered: dict[str, Tensor] = {}
        self._inside = 0  # how many quantities are being computed
        self.solution = solution
        if broken is not None:
            self.solution = Solution(
                solution.value,
                torch.where(broken, torch.nan, solution.residual),
                solution.iterations,
                solution.converged & ~broken,
            )

    # -- what an approximation gives ------------------------------------------------------------

    @property
    @abc.abstractmethod
    def magnetization(self) -> Tensor:
        """m_i = <S_i> = -dF/dh_i, (..., N, D); zero at absent sites."""

    @property
    @abc.abstractmethod
    def log_partition(self) -> Tensor:
        """log Z relative to free spins, (...)."""

    @property
    @abc.abstractmethod
    def internal_energy(self) -> Tensor:
        """U = <E>, (...)."""

    @abc.abstractmethod
    def specific_heat(self) -> Tensor:
        """C = dU/dT = beta^2 Var(E), the heat capacity of each whole system, (...)."""

    @abc.abstractmethod
    def _susceptibility_product(self, vector: Tensor) -> Tensor:
        """chi v for v (..., N, D) that is zero at absent sites."""

    @abc.abstractmethod
    def _susceptibility(self) -> Tensor:
        """chi of all pairs, (..., N, D, N, D)."""

    @abc.abstractmethod
    def _linear_response_correlations(self) -> Tensor:
        """<S_i . S_j> off the diagonal from a derivative of log Z, (..., N, N)."""

    @abc.abstractmethod
    def _coupling_correlations(self) -> Tensor:
        """2 d(-F)/dJ_ij off the diagonal, for a J that stays symmetric, (..., N, N)."""

    # -- what follows ---------------------------------------------------------------------------

    @property
    @observable
    def free_energy(self) -> Tensor:
        """F = -log Z / beta, (...)."""
        return -self.log_partition / self.system.beta

    @property
    @observable
    def entropy(self) -> Tensor:
        """S = beta (U - F), (...), relative to free spins."""
        return self.system.beta * self.internal_energy + self.log_partition

    @property
    @observable
    def free_energy_per_spin(self) -> Tensor:
        """F / (number of present sites), (...); zero without one."""
        return self.free_energy / self.system.num_present.clamp_min(1)

    @property
    @observable
    def internal_energy_per_spin(self) -> Tensor:
        """U / (number of present sites), (...); zero without one."""
        return self.internal_energy / self.system.num_present.clamp_min(1)

    @property
    @observable
    def entropy_per_spin(self) -> Tensor:
        """S / (number of present sites), (...); zero without one."""
        return self.entropy / self.system.num_present.clamp_min(1)

    @observable
    def specific_heat_per_spin(self) -> Tensor:
        """C / (number of present sites), (...); zero without one."""
        return self.specific_heat() / self.system.num_present.clamp_min(1)

    @property
    def converged(self) -> Tensor:
        """Which systems converged, (...) bool."""
        return self.solution.converged

    def correlations(self, method: CorrelationMethod = "linear_response") -> Tensor:
        r""":math:`\langle S_i \cdot S_j\rangle`, shape (..., N, N).

        Args:
            method: ``"linear_response"``: for mean field, TAP and Bethe
                :math:`m_i\cdot m_j + \operatorname{tr}\chi_{ij}/\beta`, which sees correlations
                along paths of couplings; of the others, whose Gaussian parts see them anyway, the
                derivative in the couplings. ``"coupling"``: always that derivative,
                :math:`-2\,\partial F/\partial J_{ij}` for a J that stays symmetric, what a change
                of J meets; for mean field the product. ``"product"``: the factorized
                :math:`m_i\cdot m_j`. On spheres the diagonal is R^2 in all three. An exact solution
                makes the first two equal.
        """
        check_choice("method", method, ("linear_response", "product", "coupling"))
        if method == "product":
            return self._product()
        return self._coupling() if method == "coupling" else self._linear_response()

    @observable
    def _product(self) -> Tensor:
        return self._with_diagonal(self.magnetization @ self.magnetization.mT)

    @observable
    def _linear_response(self) -> Tensor:
        return self._with_diagonal(self._linear_response_correlations())

    @observable
    def _coupling(self) -> Tensor:
        return self._with_diagonal(self._coupling_correlations())

    def susceptibility_product(self, vector: Tensor) -> Tensor:
        r""":math:`(\chi v)_{ia} = \sum_{jb} \chi_{ia,jb} v_{jb}`, shape (..., N, D).

        The response of all magnetizations to a small field along v, without the N^2 D^2 numbers of
        :math:`\chi`.

        Args:
            vector: v, broadcastable to (..., N, D).
        """
        vector = self._check_vector(vector)
        self._inside += 1
        try:
            with torch.set_grad_enabled(self.tracks_gradients):
                product = self._susceptibility_product(vector)
        finally:
            self._inside -= 1
        return self._hide_broken(product)

    def susceptibility(self, sites: Sequence[int] | None = None) -> Tensor:
        r""":math:`\chi_{ia,jb} = \partial m_{ia}/\partial h_{jb}`, shape (..., N, D, N, D).

        Args:
            sites: only the columns of these sites j, (..., N, D, len(sites), D), by one
                :meth:`susceptibility_product` for each of their components. A single pair is
                ``susceptibility([j])[..., i, :, 0, :]``. None: all, N^2 D^2 numbers a system.

        Raises:
            IndexError: a site that does not exist.
        """
        if sites is None:
            return self._all_susceptibilities()
        n, d = self.system.num_spins, self.system.dim
        columns = [self._column(_site(j, n), b) for j in sites for b in range(d)]
        if not columns:
            return self.system.field.new_zeros(*self.system.batch_shape, n, d, 0, d)
        return torch.stack(columns, -1).reshape(*columns[0].shape, len(columns) // d, d)

    @observable
    def _all_susceptibilities(self) -> Tensor:
        return self._susceptibility()

    def _column(self, site: int, component: int) -> Tensor:
        direction = torch.zeros_like(self.system.field)
        direction[..., site, component] = 1
        return self.susceptibility_product(direction)

    @property
    def _is_small(self) -> bool:
        """Whether products with chi are best taken from all of it."""
        return self.system.num_spins * self.system.dim <= _DENSE_ROWS

    def _dense_product(self, vector: Tensor) -> Tensor:
        """chi v from all of chi, which is remembered."""
        product: Tensor = torch.einsum("...iajb,...jb->...ia", self._all_susceptibilities(), vector)
        return product

    def _trace_of_chi(self) -> Tensor:
        """sum_a chi_ia,ja, (..., N, N); of a large system column by column."""
        if self._is_small:
            trace: Tensor = torch.einsum("...iaja->...ij", self._all_susceptibilities())
            return trace
        n, d = self.system.num_spins, self.system.dim
        columns = [
            sum((self._column(j, a)[..., a] for a in range(d)), self.system.field.new_zeros(()))
            for j in range(n)
        ]
        return torch.stack(columns, -1)

    @observable
    def local_susceptibility(self) -> Tensor:
        r""":math:`\chi_{ia,ib}`, the response of every site to its own field, (..., N, D, D).

        Where an approximation has no closed form: N D products, but no N^2 D^2 memory.
        """
        n, d = self.system.num_spins, self.system.dim
        blocks = [
            torch.stack([self._column(i, b)[..., i, :] for b in range(d)], -1) for i in range(n)
        ]
        if not blocks:
            return self.system.field.new_zeros(*self.system.batch_shape, 0, d, d)
        return torch.stack(blocks, -3)

    @observable
    def uniform_susceptibility(self) -> Tensor:
        r""":math:`\sum_{ij}\chi_{ia,jb}`, the total moment's response to a uniform field.

        Shape (..., D, D), a total over present sites; D products.
        """
        uniform = torch.zeros_like(self.system.field)
        columns = []
        for b in range(self.system.dim):
            direction = uniform.clone()
            direction[..., b] = 1
            if self.system.mask is not None:
                direction = direction.masked_fill(self.system.mask[..., None], 0.0)
            columns.append(self.susceptibility_product(direction).sum(-2))
        return torch.stack(columns, -1)

    @observable
    def order_ratio(self) -> Tensor:
        r""":math:`|\langle M\rangle|^2 / \langle |M|^2\rangle` of the total moment M, (...).

        With :math:`\langle|M|^2\rangle = \sum_{ij}\langle S_i\cdot S_j\rangle` in linear response:
        0 without order, towards 1 where the moment hardly fluctuates. It takes two derivatives of
        log Z; Binder's cumulant, the same question to the fourth moment, takes four, and is left
        to sampling. Zero without a present site.
        """
        moment = self.magnetization.sum(-2).square().sum(-1)
        square = self._linear_response().sum((-2, -1))
        return torch.where(square == 0, 0.0, moment / torch.where(square == 0, 1.0, square))

    @observable
    def stability(self) -> Tensor:
        r"""Smallest eigenvalue of the Hessian of :math:`\beta G(m)`, in units of a free spin's.

        G is the Gibbs free energy, the Legendre transform of F, and its Hessian
        :math:`\chi^{-1}`: this is the smallest :math:`\beta v / \chi_k` over the eigenvalues
        :math:`\chi_k` of the susceptibility, v the variance of a component of a free spin. 1
        without couplings and fields; zero for a mode without restoring force, as the rotations of
        an ordered state; negative for a saddle or a maximum, from which fluctuations lead away.
        (...); O((N D)^3) a system.
        """
        chi = self._all_susceptibilities().detach()
        n, d = self.system.num_spins, self.system.dim
        chi = chi.reshape(*self.system.batch_shape, n * d, n * d)
        values = symmetric_eigenvalues((chi + chi.mT) / 2)
        if not n:
            return torch.full_like(self.system.beta, torch.inf)
        # An absent site responds with zero, and a spin in a strong field with less than rounding,
        # of either sign: neither is soft.
        unit = self.system.beta.detach()[..., None] * self.system.site.scale**2
        largest = torch.maximum(values.abs().amax(-1, keepdim=True), unit)
        rounding = 10 * n * d * torch.finfo(values.dtype).eps * largest
        stiffness: Tensor = torch.where(values.abs() <= rounding, torch.inf, unit / values)
        return stiffness.amin(-1)

    @property
    def is_stable(self) -> Tensor:
        """Whether each system's solution is stable or marginal, (...) bool; see :meth:`stability`.

        Marginal eigenvalues come out at the size of the residual instead of zero, hence the margin
        of the square root of rounding.
        """
        margin: float = torch.finfo(self.system.field.dtype).eps ** 0.5
        return self.stability() > -margin

    def _check_vector(self, vector: Tensor) -> Tensor:
        """A vector of one entry a component in the shape of the field, zero at absent sites."""
        if not isinstance(vector, Tensor):
            raise TypeError(f"vector must be a tensor, not {type(vector).__name__}")
        field = self.system.field
        try:
            vector = vector.to(field.dtype).expand(field.shape)
        except RuntimeError as error:
            raise ValueError(
                f"vector has shape {tuple(vector.shape)}: it must broadcast to the field's "
                f"{tuple(field.shape)}"
            ) from error
        return self._clear(vector)

    def _clear(self, state: Tensor) -> Tensor:
        """Zero at absent sites."""
        mask = self.system.mask
        return state if mask is None else state.masked_fill(mask[..., None], 0.0)

    def _hide_broken(self, value: Tensor) -> Tensor:
        """NaN in systems that were given broken, as a user sees them."""
        if self.broken is None or self._inside:
            return value
        axes = value.ndim - self.broken.ndim
        return torch.where(self.broken.reshape(*self.broken.shape, *[1] * axes), torch.nan, value)

    def _with_diagonal(self, correlations: Tensor) -> Tensor:
        radius = self.system.site.radius
        if radius is None:
            return correlations
        square = torch.full_like(correlations.diagonal(dim1=-2, dim2=-1), radius**2)
        if self.system.present is not None:
            square = square * self.system.present
        identity = torch.eye(self.system.num_spins, dtype=torch.bool, device=correlations.device)
        return torch.where(identity, torch.diag_embed(square), correlations)

    def __repr__(self) -> str:
        solution = self.solution
        worst = float(solution.residual.max()) if solution.residual.numel() else 0.0
        most = int(solution.iterations.max()) if solution.iterations.numel() else 0
        return (
            f"{type(self).__name__}({self.system!r}, converged {int(solution.converged.sum())} of "
            f"{solution.converged.numel()}, worst residual {worst:.2g}, at most {most} iterations)"
        )


def _site(index: int, num_spins: int) -> int:
    """A site's number, counted from either end."""
    number = operator.index(index)
    if not -num_spins <= number < num_spins:
        raise IndexError(f"site {number} does not exist: there are {num_spins} sites")
    return number % num_spins


class DerivedEquilibrium(Equilibrium):
    """An equilibrium whose every quantity is a derivative of a given log-partition function.

    Args:
        system: the system.
        log_partition_function: differentiable ``(J (..., N, N), h (..., N, D), beta (...)) ->
            (...)``, of dense scalar couplings. Each system's value depends on its own arguments
            only.
        solution: the evidence of whatever the function stands on.

    Cost: one gradient each for magnetization, energy and correlations, two for the specific heat,
    one a susceptibility product, and N D for all of the susceptibility.
    """

    def __init__(
        self,
        system: SpinSystem,
        log_partition_function: LogPartition,
        solution: Solution,
        broken: Tensor | None = None,
    ) -> None:
        super().__init__(system, solution, broken)
        self._function = log_partition_function

    def _dense(self) -> Tensor:
        """J of every system, (..., N, N)."""
        dense = self.system.couplings.to_dense()
        return dense.expand(*self.system.batch_shape, *dense.shape[-2:])

    @cached_property
    def _graph(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(J, h, beta) under new names, and log Z of them: derivatives in these are partial."""
        system = self.system
        # Inference mode knows no derivatives, not even for a magnetization.
        with torch.inference_mode(False), torch.enable_grad():
            arguments = tuple(
                tensor.view_as(tensor) if self.tracks_gradients else tensor.detach().clone()
                for tensor in (self._dense(), system.field, system.beta)
            )
            j, h, beta = (
                tensor if tensor.requires_grad else tensor.requires_grad_() for tensor in arguments
            )
            dense = j
            if system.site.radius is not None:
                # A self coupling of a sphere is a constant. Built as couplings, so that neither it
                # nor an absent site gets a derivative; of a spin whose length varies, <S^2> is one.
                dense = Dense(j, check=False, mask=system.mask).to_dense()
            return j, h, beta, self._function(dense, h, beta)

    def _finish(self, tensor: Tensor) -> Tensor:
        return tensor if self.tracks_gradients else tensor.detach()

    @cached_property
    def _first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Derivatives of log Z in J, h and beta, with a graph for the second ones."""
        j, h, beta, log_z = self._graph
        with torch.inference_mode(False), torch.enable_grad():
            found = torch.autograd.grad(
                log_z.sum(), (j, h, beta), create_graph=True, allow_unused=True
            )
        return tuple(  # type: ignore[return-value]
            torch.zeros_like(tensor) if grad is None else grad
            for grad, tensor in zip(found, (j, h, beta), strict=True)
        )

    @property
    @observable
    def log_partition(self) -> Tensor:
        # Its own evaluation: a backward pass through it leaves the graph of the derivatives whole.
        return self._function(self._dense(), self.system.field, self.system.beta)

    @property
    @observable
    def magnetization(self) -> Tensor:
        return self._finish(self._first[1] / self.system.beta[..., None, None])

    @property
    @observable
    def internal_energy(self) -> Tensor:
        return self._finish(-self._first[2])

    @observable
    def specific_heat(self) -> Tensor:
        beta = self._graph[2]
        first = self._first[2]
        if not first.requires_grad:
            return torch.zeros_like(self.system.beta)
        with torch.inference_mode(False), torch.enable_grad():
            (second,) = torch.autograd.grad(
                first.sum(),
                beta,
                create_graph=self.tracks_gradients,
                retain_graph=True,
                materialize_grads=True,
            )
        return self._finish(self.system.beta**2 * second)

    @cached_property
    def _moment(self) -> Tensor:
        """m with a graph for its derivatives in the field."""
        with torch.inference_mode(False), torch.enable_grad():
            return self._first[1] / self.system.beta[..., None, None]

    def _response(self, direction: Tensor) -> Tensor:
        """Derivative of the moment along a direction: chi is symmetric."""
        with torch.inference_mode(False), torch.enable_grad():
            (row,) = torch.autograd.grad(
                self._moment,
                self._graph[1],
                direction,
                create_graph=self.tracks_gradients,
                retain_graph=True,
                materialize_grads=True,
            )
        return row

    def _susceptibility_product(self, vector: Tensor) -> Tensor:
        return self._finish(self._clear(self._response(vector)))

    def _susceptibility(self) -> Tensor:
        n, d = self._moment.shape[-2:]
        rows = []
        for i in range(n):
            for a in range(d):
                direction = torch.zeros_like(self._moment)
                direction[..., i, a] = 1
                rows.append(self._response(self._clear(direction)))
        shape = (*self.system.batch_shape, n, d, n, d)
        chi = torch.stack(rows, -3).reshape(shape) if rows else self._moment.new_zeros(shape)
        if self.system.present is not None:
            present = self.system.present[..., None].to(chi.dtype)
            chi = chi * present[..., None, None, :, :]
        return self._finish(chi)

    def _linear_response_correlations(self) -> Tensor:
        return self._coupling_correlations()

    def _coupling_correlations(self) -> Tensor:
        gradient = self._first[0]
        symmetric = (gradient + gradient.mT) / self.system.beta[..., None, None]
        if self.system.mask is not None:
            absent = self.system.mask[..., :, None] | self.system.mask[..., None, :]
            symmetric = symmetric.masked_fill(absent, 0.0)
        return self._finish(symmetric)
