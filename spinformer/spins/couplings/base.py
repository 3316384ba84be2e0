"""The interface of all couplings, and any kind of them with some of its sites removed."""

from __future__ import annotations

import abc
import functools
import itertools

import torch
from torch import Tensor

from spinformer.errors import strict_options
from spinformer.spins.couplings import spectrum
from spinformer.spins.couplings.checks import check_absent
from spinformer.spins.couplings.entries import clear, flatten_blocks

__all__ = ["Couplings", "Masked"]


class Couplings(abc.ABC):
    """The linear map from the spins to the force that they exert on each other.

    A kind of your own implements ``num_spins``, ``batch_shape``, ``is_symmetric``, ``tensors``,
    ``with_tensors``, ``apply``, ``transpose`` and ``symmetrize``; the rest follows from those (for
    matrix-valued couplings also ``dim`` and ``to_dense``). Call ``_check_state`` at the head of
    ``apply``, and leave the self coupling out.
    """

    @property
    @abc.abstractmethod
    def num_spins(self) -> int:
        """Number of sites ``N``."""

    @property
    @abc.abstractmethod
    def batch_shape(self) -> torch.Size:
        """Leading axes: independent systems, each with its own couplings."""

    @property
    @abc.abstractmethod
    def is_symmetric(self) -> bool:
        """Whether ``J = J^T`` in every system, by construction or to rounding."""

    @abc.abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The differentiable tensors that the couplings are made of."""

    @abc.abstractmethod
    def with_tensors(self, *tensors: Tensor) -> Couplings:
        """The same couplings made of other tensors, in the order and shapes of :meth:`tensors`.

        No values are looked at. This is how implicit differentiation passes the couplings as
        explicit inputs. Diagonal and absent sites are removed again, and a matrix that was
        symmetric by construction is taken to be so still.
        """

    @abc.abstractmethod
    def apply(self, state: Tensor) -> Tensor:
        """``J S`` for a state ``(..., N, D)``, with the self coupling removed.

        Leading axes of state and couplings broadcast.

        Raises:
            ValueError: the state does not have ``N`` sites.
            TypeError: the state has another dtype than the couplings.
        """

    @abc.abstractmethod
    def transpose(self) -> Couplings:
        """Couplings with ``J^T``."""

    @abc.abstractmethod
    def symmetrize(self) -> Couplings:
        """Couplings with ``(J + J^T) / 2``, the only part of ``J`` that an energy sees."""

    @property
    def dim(self) -> int | None:
        """Dimension ``D`` of the spins that the couplings act on; None when any will do."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensors."""
        return self.tensors()[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.tensors()[0].device

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Couplings:
        """The same couplings in another dtype or on another device."""
        return self.with_tensors(
            *(tensor.to(dtype=dtype, device=device) for tensor in self.tensors())
        )

    def to_dense(self) -> Tensor:
        """``J`` as a matrix ``(..., N, N)`` with a zero diagonal.

        Matrix-valued couplings give ``(..., N, N, D, D)``. Costs ``O(N^2)`` memory: a lattice of
        32^3 sites has no dense form worth asking for.
        """
        identity = torch.eye(self.num_spins, dtype=self.dtype, device=self.device)
        return self.apply(identity)

    def diagonal(self) -> Tensor:
        """Self couplings ``(..., N)``, zero by the convention of the library.

        Matrix-valued couplings give ``(..., N, D, D)``.
        """
        shape: tuple[int, ...] = (*self.batch_shape, self.num_spins)
        if self.dim is not None:
            shape = (*shape, self.dim, self.dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def mask(self, absent: Tensor) -> Couplings:
        """Couplings in which some sites are not there: their rows and columns are zero.

        Args:
            absent: bool ``(..., N)``, True = this site is absent. What couplings and states hold
                there (NaN included) leaves no trace in any result or gradient.
        """
        return Masked(self, absent)

    def largest_eigenvalue(self) -> Tensor:
        """Largest eigenvalue of the symmetric part ``(J + J^T) / 2``, one per system ``(...)``.

        It sets the temperature below which free spins order, and bounds ``beta`` for Gaussian
        ones. It is never negative, as the trace is zero.

        Closed form for lattices and Curie-Weiss. Else ``O(N^3)`` by a dense symmetric eigenvalue
        problem up to N = 512, above by ARPACK's restarted Lanczos iteration, one system after the
        other, to the rounding of the dtype. The first derivative is right on each route (where the
        largest eigenvalue is degenerate: one of its subgradients); a second derivative raises on
        the ARPACK route.

        A system with an entry that is not finite gets NaN. Half precision is worked out in
        float32.

        Raises:
            ConvergenceError: ARPACK gives up: the next eigenvalue is too close.

        Source: Lehoucq, Sorensen & Yang, ARPACK Users' Guide (SIAM 1998).
        """
        dim = self.dim or 1
        rows = self.num_spins * dim
        if rows == 0:
            return torch.zeros(self.batch_shape, dtype=self.dtype, device=self.device)
        working = torch.promote_types(self.dtype, torch.float32)
        if working != self.dtype:
            return self.to(dtype=working).largest_eigenvalue().to(self.dtype)
        if rows <= spectrum.DENSE_ROWS:
            matrix = self.to_dense()
            return spectrum.largest_eigenvalue(
                matrix if self.dim is None else flatten_blocks(matrix)
            )
        symmetric = self.symmetrize()
        shape = (*self.batch_shape, self.num_spins, dim)
        leading = torch.empty(shape, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            for index in itertools.product(*map(range, self.batch_shape)):
                leading[index] = spectrum.leading_eigenvector(
                    functools.partial(symmetric._apply_one, index=index),
                    shape[-2:],
                    dtype=self.dtype,
                    device=self.device,
                )
        # At an eigenvector the quotient v^T J v is stationary in v: its derivative with v held
        # fixed (for a matrix, v v^T) is the derivative of the eigenvalue. That is true once, not
        # twice.
        quotient = (leading * symmetric.apply(leading)).sum((-2, -1))
        return spectrum.differentiable_once(quotient)

    def _apply_one(self, state: Tensor, index: tuple[int, ...]) -> Tensor:
        """``J S`` in one system of the batch, for a state ``(N, D)``."""
        # Kinds whose apply costs most, or whose batch may be one of masks only, do less than this.
        return self.apply(state)[index]

    def _check_state(self, state: Tensor) -> None:
        """Shapes and dtypes only: cheap enough for the innermost loop."""
        if state.ndim < 2 or state.shape[-2] != self.num_spins:
            raise ValueError(
                f"state has shape {tuple(state.shape)}: couplings of {self.num_spins} spins act on "
                f"(..., {self.num_spins}, D); give Ising spins a last axis of length 1"
            )
        if self.dim is not None and state.shape[-1] != self.dim:
            raise ValueError(
                f"state has shape {tuple(state.shape)}: its last axis must be the spin dimension "
                f"{self.dim} of the matrix-valued couplings"
            )
        if state.dtype != self.dtype:
            raise TypeError(
                f"state has dtype {state.dtype}, the couplings have {self.dtype}: convert one of "
                f"them, for example couplings.to(dtype={state.dtype})"
            )

    def __repr__(self) -> str:
        details = [f"num_spins={self.num_spins}"]
        if self.dim is not None:
            details.append(f"dim={self.dim}")
        details.extend(self._details())
        if self.batch_shape:
            details.append(f"batch_shape={tuple(self.batch_shape)}")
        details.append(f"dtype={self.dtype}")
        return f"{type(self).__name__}({', '.join(details)})"

    def _details(self) -> list[str]:
        """What a kind adds to its representation."""
        return []


@strict_options
class Masked(Couplings):
    """Couplings of any kind from which some sites are removed, without touching their structure.

    Costs what the couplings inside cost. :meth:`Couplings.mask` builds it where the kind has no
    form of its own for absent sites.

    Args:
        couplings: the couplings of all sites; their entries at absent sites must be finite.
        absent: bool ``(..., N)``, True = this site is absent. It neither gives nor receives, and
            its state (NaN included) changes nothing.

    Raises:
        TypeError: ``absent`` is not boolean.
        ValueError: ``absent`` has another number of sites.
    """

    def __init__(self, couplings: Couplings, absent: Tensor) -> None:
        self._inner = couplings
        batch = couplings.batch_shape
        self._absent = check_absent(absent, couplings.num_spins, batch, couplings.device)

    @property
    def couplings(self) -> Couplings:
        """The couplings of all sites."""
        return self._inner

    @property
    def absent(self) -> Tensor:
        """bool ``(..., N)``, True = this site is absent."""
        return self._absent

    @property
    def num_spins(self) -> int:
        """Number of sites ``N``, absent ones included."""
        return self._inner.num_spins

    @property
    def dim(self) -> int | None:
        """As the couplings inside."""
        return self._inner.dim

    @property
    def batch_shape(self) -> torch.Size:
        """Leading axes of couplings and mask, broadcast."""
        return torch.Size(torch.broadcast_shapes(self._inner.batch_shape, self._absent.shape[:-1]))

    @property
    def is_symmetric(self) -> bool:
        """As the couplings inside."""
        return self._inner.is_symmetric

    def tensors(self) -> tuple[Tensor, ...]:
        """Those of the couplings inside."""
        return self._inner.tensors()

    def with_tensors(self, *tensors: Tensor) -> Masked:
        """The same mask over the couplings inside, made of other tensors."""
        return self._around(self._inner.with_tensors(*tensors))

    def apply(self, state: Tensor) -> Tensor:
        """``J S`` with absent sites neither giving nor receiving."""
        self._check_state(state)
        return clear(self._inner.apply(clear(state, self._absent)), self._absent)

    def to_dense(self) -> Tensor:
        """The matrix inside, with zero rows and columns at absent sites."""
        removed = self._absent[..., :, None] | self._absent[..., None, :]
        if self.dim is not None:
            removed = removed[..., None, None]
        return self._inner.to_dense().masked_fill(removed, 0.0)

    def transpose(self) -> Masked:
        """The same mask over the transposed couplings."""
        return self._around(self._inner.transpose())

    def symmetrize(self) -> Masked:
        """The same mask over the symmetrized couplings."""
        return self._around(self._inner.symmetrize())

    def mask(self, absent: Tensor) -> Masked:
        """Absent in either mask."""
        absent = check_absent(absent, self.num_spins, self.batch_shape, self.device)
        return Masked(self._inner, self._absent | absent)

    def _around(self, inner: Couplings) -> Masked:
        return Masked(inner, self._absent)

    def _apply_one(self, state: Tensor, index: tuple[int, ...]) -> Tensor:
        absent = self._absent[_own(index, self._absent.shape[:-1])]
        inside = _own(index, self._inner.batch_shape)
        return clear(self._inner._apply_one(clear(state, absent), inside), absent)

    def _details(self) -> list[str]:
        return [f"couplings={self._inner!r}", f"absent={int(self._absent.sum())}"]


def _own(index: tuple[int, ...], batch_shape: torch.Size) -> tuple[int, ...]:
    """Index into leading axes that were broadcast."""
    last = index[len(index) - len(batch_shape) :]
    return tuple(0 if n == 1 else i for i, n in zip(last, batch_shape, strict=True))
