r"""Couplings: which spins feel each other, and how strongly.

Every kind stands behind one interface, :class:`Couplings`. It acts on a state ``S`` of shape
``(..., N, D)`` as

.. math:: (J S)_i = \sum_{j \ne i} J_{ij} S_j ,

the part of the force that the other spins exert. The energy is
:math:`-\tfrac12 \sum_{i \ne j} S_i \cdot J_{ij} S_j - \dots`, so ``J_ij > 0`` is ferromagnetic
and a bond counts once. **The self coupling is always removed**: adding ``c`` to the diagonal of a
matrix changes nothing.

====================== ===================== =================== ==========================
kind                   made of               cost of ``apply``   largest eigenvalue
====================== ===================== =================== ==========================
:class:`Dense`         ``(..., N, N)``       one matmul          dense or Lanczos
:class:`MatrixValued`  ``(..., N, N, D, D)`` one matmul          dense or Lanczos
:class:`LowRank`       two ``(..., N, r)``   ``O(N r D)``        dense or Lanczos
:class:`Lattice`       one strength          ``O(N D)``          closed form
:class:`CurieWeiss`    one strength          ``O(N D)``          closed form
:class:`Masked`        another kind          as that kind        dense or Lanczos
====================== ===================== =================== ==========================

The factories :func:`chain`, :func:`ring`, :func:`square`, :func:`cubic`, :func:`curie_weiss`,
:func:`sherrington_kirkpatrick` and :func:`hopfield` build the models of the textbooks. Everything
is differentiable with respect to the tensors that it is made of.
"""

from __future__ import annotations

import abc
import copy
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spinformer.errors import ConvergenceError, strict_options

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Couplings",
    "CurieWeiss",
    "Dense",
    "Lattice",
    "LowRank",
    "Masked",
    "MatrixValued",
    "chain",
    "cubic",
    "curie_weiss",
    "hopfield",
    "ring",
    "sherrington_kirkpatrick",
    "square",
]

# Up to this many rows one dense symmetric eigenvalue problem is cheaper than building a Krylov
# space through ``apply`` (and, unlike that one, differentiable twice).
_DENSE_ROWS = 512

# Size of that Krylov space, and how often it is rebuilt from its best third.
_KRYLOV = 48
_RESTARTS = 400


class Couplings(abc.ABC):
    """The linear map from the spins to the force that they exert on each other.

    A kind of your own implements ``num_spins``, ``batch_shape``, ``is_symmetric``, ``tensors``,
    ``with_tensors``, ``apply``, ``transpose`` and ``symmetrize``; the rest follows from those. Call
    ``_check_state`` at the head of ``apply``, and leave the self coupling out.
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
        problem up to N = 512, above by a restarted Lanczos iteration through :meth:`apply`, to the
        rounding of the dtype. The first derivative is right on each route
        (where the largest eigenvalue is degenerate: one of its subgradients); a second derivative
        raises on the Lanczos route.

        A system with an entry that is not finite gets NaN. Half precision is worked out in
        float32.

        Raises:
            ConvergenceError: the Lanczos iteration gives up: the next eigenvalue is too close.
        """
        rows = self.num_spins * (self.dim or 1)
        if rows == 0:
            return torch.zeros(self.batch_shape, dtype=self.dtype, device=self.device)
        working = torch.promote_types(self.dtype, torch.float32)
        if working != self.dtype:
            return self.to(dtype=working).largest_eigenvalue().to(self.dtype)
        if rows <= _DENSE_ROWS:
            matrix = self.to_dense()
            return _largest_eigenvalue_dense(
                matrix if self.dim is None else _flatten_blocks(matrix)
            )
        return _largest_eigenvalue_lanczos(self)

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


# --------------------------------------------------------------------------------------------------
# kinds
# --------------------------------------------------------------------------------------------------


class _Stored(Couplings):
    """Kinds that keep every entry, as one matrix that acts on the flat state of a system."""

    _matrix: Tensor
    _absent: Tensor | None
    _known_symmetric: bool

    @abc.abstractmethod
    def _remade(self, matrix: Tensor, absent: Tensor | None, known_symmetric: bool) -> Self:
        """The same kind around another matrix, from which what has to go is removed."""

    @property
    def batch_shape(self) -> torch.Size:
        return torch.Size(self._matrix.shape[:-2])

    @functools.cached_property
    def is_symmetric(self) -> bool:
        return self._known_symmetric or _is_symmetric(self._matrix)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._matrix,)

    def with_tensors(self, *tensors: Tensor) -> Self:
        (matrix,) = tensors
        absent = None if self._absent is None else self._absent.to(matrix.device)
        return self._remade(matrix, absent, self._known_symmetric)

    def transpose(self) -> Self:
        return self._remade(self._matrix.mT, self._absent, self._known_symmetric)

    def symmetrize(self) -> Self:
        # Not skipped when the *values* happen to be symmetric: the gradient has to be, too.
        if self._known_symmetric:
            return self
        return self._remade(0.5 * (self._matrix + self._matrix.mT), self._absent, True)

    def mask(self, absent: Tensor) -> Self:
        absent = _check_absent(absent, self.num_spins, self.batch_shape, self.device)
        return self._remade(self._matrix, _either(self._absent, absent), self._known_symmetric)


@strict_options
class Dense(_Stored):
    """Couplings given by a matrix, symmetric or not.

    ``apply`` is one matmul, ``O(N^2 D)``. The diagonal and the absent sites are removed once, when
    the couplings are built.

    Args:
        matrix: ``(..., N, N)``, floating point. Its diagonal is ignored (NaN included).
        check: look at the values and reject those that are not finite. Shapes and dtypes are
            always checked.
        mask: bool ``(..., N)``, True = this site is absent, before the check: the entries of an
            absent site need not be finite.

    Raises:
        TypeError: not a real floating-point tensor.
        ValueError: not square, or not finite between present sites.
    """

    def __init__(self, matrix: Tensor, *, check: bool = True, mask: Tensor | None = None) -> None:
        _check_floating("matrix", matrix)
        if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
            raise ValueError(
                f"matrix has shape {tuple(matrix.shape)}: couplings are square, (..., N, N)"
            )
        batch, n = matrix.shape[:-2], matrix.shape[-1]
        self._absent = None if mask is None else _check_absent(mask, n, batch, matrix.device)
        self._matrix = _remove(matrix, self._absent)
        self._known_symmetric = False
        if check:
            _check_finite("matrix", self._matrix)

    def _remade(self, matrix: Tensor, absent: Tensor | None, known_symmetric: bool) -> Self:
        couplings = type(self).__new__(type(self))
        couplings._absent = absent
        couplings._matrix = _remove(matrix, absent)
        couplings._known_symmetric = known_symmetric
        return couplings

    @property
    def num_spins(self) -> int:
        """Number of sites ``N``."""
        return self._matrix.shape[-1]

    def apply(self, state: Tensor) -> Tensor:
        """``J S``, one matmul."""
        self._check_state(state)
        return self._matrix @ _clear(state, self._absent)

    def to_dense(self) -> Tensor:
        """The stored matrix ``(..., N, N)``; no copy."""
        return self._matrix


@strict_options
class MatrixValued(_Stored):
    r"""Couplings whose bonds are matrices: :math:`S_i \mapsto \sum_{j \ne i} J_{ij} S_j`.

    Symmetric means :math:`J_{ij} = J_{ji}^\top`. Multi-head attention with its output projection
    has this form. ``apply`` is one product with a matrix of ``N D`` rows, ``O(N^2 D^2)``.

    Args:
        tensor: ``(..., N, N, D, D)``, axes (site i, site j, component of i, component of j). The
            blocks with i = j are ignored.
        check: look at the values and reject those that are not finite.
        mask: bool ``(..., N)``, True = this site is absent (before the check).

    Raises:
        TypeError: not a real floating-point tensor.
        ValueError: not of that shape, or not finite between present sites.
    """

    def __init__(self, tensor: Tensor, *, check: bool = True, mask: Tensor | None = None) -> None:
        _check_floating("tensor", tensor)
        shape = tensor.shape
        if tensor.ndim < 4 or shape[-4] != shape[-3] or shape[-2] != shape[-1]:
            raise ValueError(
                f"tensor has shape {tuple(shape)}: matrix-valued couplings are (..., N, N, D, D)"
            )
        batch, n = shape[:-4], shape[-4]
        self._shape = (n, shape[-1])
        self._absent = None if mask is None else _check_absent(mask, n, batch, tensor.device)
        blocks = _remove_blocks(tensor, self._absent)
        # Stored as the matrix (site i, component) x (site j, component): a contraction of two axes
        # that are not next to each other would copy the whole tensor at every call.
        self._matrix = _flatten_blocks(blocks)
        self._known_symmetric = False
        if check:
            _check_finite("tensor", blocks)

    def _remade(self, matrix: Tensor, absent: Tensor | None, known_symmetric: bool) -> Self:
        couplings = type(self).__new__(type(self))
        couplings._shape = self._shape
        couplings._absent = absent
        blocks = _unflatten_blocks(matrix, *self._shape)
        couplings._matrix = _flatten_blocks(_remove_blocks(blocks, absent))
        couplings._known_symmetric = known_symmetric
        return couplings

    @property
    def num_spins(self) -> int:
        """Number of sites ``N``."""
        return self._shape[0]

    @property
    def dim(self) -> int:
        """Dimension ``D`` of the spins."""
        return self._shape[1]

    def tensors(self) -> tuple[Tensor, ...]:
        """One matrix ``(..., N D, N D)``, the components of a spin next to each other."""
        return super().tensors()

    def apply(self, state: Tensor) -> Tensor:
        """``J S``, one product with the ``N D`` components of the state."""
        self._check_state(state)
        components = _clear(state, self._absent).flatten(-2, -1)
        force = self._matrix @ components.unsqueeze(-1)
        return force.reshape(*force.shape[:-2], *self._shape)

    def to_dense(self) -> Tensor:
        """``(..., N, N, D, D)``, a view."""
        return _unflatten_blocks(self._matrix, *self._shape)


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
        _check_floating("left", left)
        if left.ndim < 2:
            raise ValueError(f"left has shape {tuple(left.shape)}: it must be (..., N, r)")
        for name, tensor, shape in (
            ("right", right, left.shape[-2:]),
            ("weights", weights, left.shape[-1:]),
        ):
            if tensor is None:
                continue
            _check_floating(name, tensor)
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
            absent = _check_absent(mask, left.shape[-2], batch, left.device)
        self._set(left, right, weights, absent, known_symmetric=right is None)
        if check:
            for name, tensor in (
                ("left", self._left),
                ("right", self._right),
                ("weights", self._weights),
            ):
                if tensor is not None:
                    _check_finite(name, tensor)

    def _set(
        self,
        left: Tensor,
        right: Tensor | None,
        weights: Tensor | None,
        absent: Tensor | None,
        known_symmetric: bool,
    ) -> None:
        if absent is not None:
            absent = absent.to(left.device)
            left = _clear(left, absent)
            right = None if right is None else _clear(right, absent)
        self._left, self._right, self._weights, self._absent = left, right, weights, absent
        self._known_symmetric = known_symmetric
        self._weighted = left if weights is None else left * weights.unsqueeze(-2)
        self._right_or_left = left if right is None else right
        # What A diag(w) B^T has on its diagonal, to be taken off again.
        self._self_coupling = (self._weighted * self._right_or_left).sum(-1)

    @classmethod
    def _build(
        cls,
        left: Tensor,
        right: Tensor | None,
        weights: Tensor | None,
        absent: Tensor | None,
        known_symmetric: bool,
    ) -> LowRank:
        couplings = cls.__new__(cls)
        couplings._set(left, right, weights, absent, known_symmetric)
        return couplings

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
            return not bool((asymmetry > _rounding(self.num_spins, self.dtype) * scale).any())

    def tensors(self) -> tuple[Tensor, ...]:
        """``left``, then ``right`` and ``weights`` where they were given."""
        given = (self._left, self._right, self._weights)
        return tuple(tensor for tensor in given if tensor is not None)

    def with_tensors(self, *tensors: Tensor) -> LowRank:
        """The same kind of other factors, in the order of :meth:`tensors`."""
        left, *others = tensors
        right = None if self._right is None else others.pop(0)
        weights = None if self._weights is None else others.pop(0)
        return self._build(left, right, weights, self._absent, self._known_symmetric)

    def apply(self, state: Tensor) -> Tensor:
        """``J S`` through the factors, ``O(N r D)``."""
        self._check_state(state)
        state = _clear(state, self._absent)
        overlap = self._right_or_left.mT @ state
        return self._weighted @ overlap - self._self_coupling.unsqueeze(-1) * state

    def to_dense(self) -> Tensor:
        """``(..., N, N)``, the product of the factors without its diagonal."""
        return _remove(self._weighted @ self._right_or_left.mT, None)

    def transpose(self) -> LowRank:
        """Left and right exchanged."""
        if self._right is None:
            return self
        return self._build(
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
        return self._build(
            torch.cat([left, right], -1),
            torch.cat([right, left], -1),
            torch.cat([half, half], -1),
            self._absent,
            True,
        )

    def mask(self, absent: Tensor) -> LowRank:
        """The rows of absent sites are zero in both factors."""
        absent = _check_absent(absent, self.num_spins, self.batch_shape, self.device)
        return self._build(
            self._left,
            self._right,
            self._weights,
            _either(self._absent, absent),
            self._known_symmetric,
        )

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
        return [f"strength={_describe(self._strength)}"]


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
        lengths, wraps = _check_lengths(names, shape, periodic)
        self._lengths, self._periodic = lengths, wraps
        self._strength = _check_strength(strength, dtype, device)

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
        self._num_spins = _check_count("num_spins", num_spins, 1)
        self._strength = _check_strength(strength, dtype, device)

    @property
    def num_spins(self) -> int:
        """Number of sites ``N``."""
        return self._num_spins

    def apply(self, state: Tensor) -> Tensor:
        """``J S``: ``strength / N`` times the sum of the other spins."""
        self._check_state(state)
        bond = (self._strength / self._num_spins)[..., None, None]
        return bond * (state.sum(-2, keepdim=True) - state)

    def to_dense(self) -> Tensor:
        """``(..., N, N)``, ``strength / N`` off the diagonal."""
        n = self._num_spins
        bond = (self._strength / n)[..., None, None].expand(*self.batch_shape, n, n)
        return _remove(bond, None)

    def largest_eigenvalue(self) -> Tensor:
        """Closed form: of the uniform mode, or of any other where the strength is negative."""
        n = self._num_spins
        if n == 1:
            return 0.0 * self._strength
        return torch.maximum(self._strength * ((n - 1) / n), self._strength * (-1.0 / n))


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
        self._absent = _check_absent(absent, couplings.num_spins, batch, couplings.device)
        self._batch_shape = torch.broadcast_shapes(batch, self._absent.shape[:-1])

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
        return torch.Size(self._batch_shape)

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
        return _clear(self._inner.apply(_clear(state, self._absent)), self._absent)

    def to_dense(self) -> Tensor:
        """The matrix inside, with zero rows and columns at absent sites."""
        if self.dim is None:
            return _remove(self._inner.to_dense(), self._absent)
        return _remove_blocks(self._inner.to_dense(), self._absent)

    def transpose(self) -> Masked:
        """The same mask over the transposed couplings."""
        return self._around(self._inner.transpose())

    def symmetrize(self) -> Masked:
        """The same mask over the symmetrized couplings."""
        return self._around(self._inner.symmetrize())

    def mask(self, absent: Tensor) -> Masked:
        """Absent in either mask."""
        absent = _check_absent(absent, self.num_spins, self.batch_shape, self.device)
        return Masked(self._inner, self._absent | absent)

    def _around(self, inner: Couplings) -> Masked:
        return Masked(inner, self._absent.to(inner.device))

    def _details(self) -> list[str]:
        return [f"couplings={self._inner!r}", f"absent={int(self._absent.sum())}"]


# --------------------------------------------------------------------------------------------------
# the models of the textbooks
# --------------------------------------------------------------------------------------------------


def chain(
    n: int,
    *,
    strength: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Lattice:
    """Open chain of ``n`` spins: n - 1 bonds of the given strength."""
    return Lattice((_check_count("n", n, 1),), False, strength, dtype=dtype, device=device)


def ring(
    n: int,
    *,
    strength: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Lattice:
    """Closed chain of ``n >= 3`` spins: n bonds of the given strength."""
    return Lattice(_check_lengths(["n"], [n], True)[0], True, strength, dtype=dtype, device=device)


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
    return CurieWeiss(_check_count("n", n, 1), strength, dtype=dtype, device=device)


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
    n = _check_count("n", n, 1)
    scale = _check_strength(strength, dtype, device) / math.sqrt(n)
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
    scale = _check_strength(strength, dtype, left.device) / max(num_spins, 1)
    return LowRank(left, weights=scale.unsqueeze(-1).expand(*scale.shape, rank))


# --------------------------------------------------------------------------------------------------
# the largest eigenvalue
# --------------------------------------------------------------------------------------------------


def _largest_eigenvalue_dense(matrix: Tensor) -> Tensor:
    """Of the symmetric part of ``(..., n, n)``, n >= 1."""
    # The eigenvalue routine fails for the whole batch where one system has a NaN.
    finite = matrix.isfinite().all(-1).all(-1)
    matrix = torch.where(finite[..., None, None], matrix, torch.zeros_like(matrix))
    largest = torch.linalg.eigvalsh(0.5 * (matrix + matrix.mT))[..., -1]
    return torch.where(finite, largest, torch.full_like(largest, math.nan))


def _largest_eigenvalue_lanczos(couplings: Couplings) -> Tensor:
    """Through ``apply`` alone."""
    shape = (*couplings.batch_shape, couplings.num_spins, couplings.dim or 1)
    transposed = couplings if couplings.is_symmetric else couplings.transpose()

    def symmetric_part(states: Tensor) -> Tensor:
        return 0.5 * (couplings.apply(states) + transposed.apply(states))

    def product(vectors: Tensor) -> Tensor:
        return symmetric_part(vectors.reshape(shape)).reshape(vectors.shape)

    with torch.no_grad():
        # A fixed start: the same couplings give the same answer, alone or in a batch, and the
        # global random state is left alone. A Gaussian is orthogonal to no eigenvector.
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(math.prod(shape[-2:]), generator=generator, dtype=torch.float64)
        start = start.to(dtype=couplings.dtype, device=couplings.device)
        leading = _leading_eigenvectors(product, start, math.prod(couplings.batch_shape))
        leading = leading.reshape(shape)
    # At an eigenvector the quotient v^T J v is stationary in v: its derivative with v held fixed
    # is the derivative of the eigenvalue. That is true once, not twice.
    quotient: Tensor = _FirstDerivative.apply((leading * symmetric_part(leading)).sum((-2, -1)))
    return quotient


def _leading_eigenvectors(
    product: Callable[[Tensor], Tensor], start: Tensor, systems: int
) -> Tensor:
    """Eigenvectors ``(systems, n)`` of the largest eigenvalues of symmetric maps, zero trace.

    Lanczos with full orthogonalization, restarted with the best Ritz vectors (thick restart, Wu &
    Simon 2000). The projected matrix is filled column by column instead of by the three-term
    recurrence, so that a restart needs no case of its own. A system is frozen once its residual
    is at the rounding level; one that is not finite comes back as zeros.
    """
    size, device, dtype = start.numel(), start.device, start.dtype
    width, kept = min(size, _KRYLOV), min(size, _KRYLOV) // 3
    basis = torch.zeros((systems, width, size), dtype=dtype, device=device)
    projected = torch.zeros((systems, width, width), dtype=dtype, device=device)
    leading = torch.zeros((systems, size), dtype=dtype, device=device)
    nothing = leading.new_zeros(())

    vector = (start / torch.linalg.vector_norm(start)).expand(systems, size)
    broken = ~product(vector).isfinite().all(-1)
    pending = ~broken
    vector = torch.where(broken[:, None], nothing, vector)
    residual, bound = leading.new_zeros(systems), leading.new_zeros(systems)
    first = 0
    for _ in range(_RESTARTS):
        for column in range(first, width):
            basis[:, column] = vector
            image = torch.where(broken[:, None], nothing, product(vector))
            spanned = basis[:, : column + 1]
            overlap = (spanned @ image[:, :, None])[:, :, 0]
            projected[:, column, : column + 1] = overlap
            projected[:, : column + 1, column] = overlap
            # An empty direction (below) must not pass for an eigenvector of eigenvalue zero.
            empty = torch.linalg.vector_norm(vector, dim=-1) < 0.5
            bound = torch.maximum(bound, torch.linalg.vector_norm(image, dim=-1))
            projected[:, column, column] = torch.where(empty, -1.0 - bound, overlap[:, -1])
            # Twice is enough to be orthogonal to rounding.
            for _ in range(2):
                image = image - (spanned.mT @ (spanned @ image[:, :, None]))[:, :, 0]
            residual = torch.linalg.vector_norm(image, dim=-1)
            # Nothing left: the space is invariant, go on with an empty direction.
            alive = residual > _rounding(size, dtype) * bound
            residual = torch.where(alive, residual, nothing)
            vector = torch.where(
                alive[:, None], image / torch.where(alive, residual, 1.0)[:, None], nothing
            )
        values, rotations = torch.linalg.eigh(projected)
        ritz = rotations.mT @ basis
        # All residuals are along the next vector, by the last component of each Ritz vector.
        error = residual * rotations[:, -1, -1].abs()
        done = pending & (error <= _rounding(size, dtype) * bound)
        leading = torch.where(done[:, None], ritz[:, -1], leading)
        pending = pending & ~done
        if not bool(pending.any()):
            return leading
        first = kept
        basis[:, :kept] = ritz[:, width - kept :]
        projected = torch.zeros_like(projected)
        projected[:, range(kept), range(kept)] = values[:, width - kept :]
    raise ConvergenceError(
        f"the largest eigenvalue of {int(pending.sum())} of {systems} couplings of {size} rows did "
        f"not converge in {_RESTARTS * (width - kept)} products: its neighbours are too close; "
        "use torch.linalg.eigvalsh on couplings.symmetrize().to_dense()"
    )


class _FirstDerivative(torch.autograd.Function):
    """Identity that can be differentiated once; a second derivative raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (value,) = ctx.saved_tensors
        return _NoSecondDerivative.apply(gradient, value)


class _NoSecondDerivative(torch.autograd.Function):
    """The gradient as it is, tied to ``value`` so that its own backward is reached, and raises.

    torch's ``once_differentiable`` raises only where the incoming gradient requires one; here the
    missing term is in the eigenvector, whatever the gradient that comes in.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, value: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise NotImplementedError(
            f"the largest eigenvalue of couplings with more than {_DENSE_ROWS} rows has no second "
            "derivative: use torch.linalg.eigvalsh on couplings.symmetrize().to_dense()"
        )


# --------------------------------------------------------------------------------------------------
# helpers
# --------------------------------------------------------------------------------------------------


def _remove(matrix: Tensor, absent: Tensor | None) -> Tensor:
    """Zero the diagonal, and the rows and columns of absent sites, of ``(..., N, N)``."""
    return _remove_blocks(matrix[..., None, None], absent)[..., 0, 0]


def _remove_blocks(tensor: Tensor, absent: Tensor | None) -> Tensor:
    """The same for ``(..., N, N, D, D)``."""
    # Writes and fills, not products: NaN times zero is NaN, in the value and in the gradient.
    # Writing the diagonal costs a copy; a fill by an identity mask measured 7 times as much.
    place = tensor.diagonal(dim1=-4, dim2=-3)
    tensor = torch.diagonal_scatter(tensor, torch.zeros_like(place), dim1=-4, dim2=-3)
    if absent is None:
        return tensor
    removed = absent.unsqueeze(-1) | absent.unsqueeze(-2)
    return tensor.masked_fill(removed[..., None, None], 0.0)


def _clear(state: Tensor, absent: Tensor | None) -> Tensor:
    """Zero at absent sites, whatever stands there: zero times NaN would still be NaN."""
    return state if absent is None else state.masked_fill(absent.unsqueeze(-1), 0.0)


def _flatten_blocks(tensor: Tensor) -> Tensor:
    """``(..., N, N, D, D)`` to ``(..., N D, N D)``."""
    return tensor.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)


def _unflatten_blocks(matrix: Tensor, num_spins: int, dim: int) -> Tensor:
    """``(..., N D, N D)`` to ``(..., N, N, D, D)``, a view."""
    blocks = matrix.reshape(*matrix.shape[:-2], num_spins, dim, num_spins, dim)
    return blocks.transpose(-3, -2)


def _shift(grid: Tensor, step: int, axis: int) -> Tensor:
    """Move the content one site along an open direction; nothing comes in at the edge."""
    length = grid.shape[axis]
    edge = torch.zeros_like(grid.narrow(axis, 0, 1))
    kept = grid.narrow(axis, 0 if step > 0 else 1, length - 1)
    return torch.cat([edge, kept] if step > 0 else [kept, edge], axis)


def _rounding(num_spins: int, dtype: torch.dtype) -> float:
    """Asymmetry, relative to the largest entry, that the rounding of an N-term sum can leave.

    Rounding errors of N terms add up to about sqrt(N) eps; 8 leaves room for a few such sums in a
    row. An asymmetry of this size is below the rounding of the energy itself.
    """
    return 8.0 * math.sqrt(max(num_spins, 1)) * torch.finfo(dtype).eps


def _is_symmetric(matrix: Tensor) -> bool:
    """Whether every system of ``(..., n, n)`` equals its transpose to rounding.

    A system with an entry that is not finite is not judged (it compares false), and hides nothing
    in another one.
    """
    if matrix.numel() == 0:
        return True
    with torch.no_grad():
        asymmetry = (matrix - matrix.mT).abs().amax((-2, -1))
        scale = matrix.abs().amax((-2, -1))
        return not bool((asymmetry > _rounding(matrix.shape[-1], matrix.dtype) * scale).any())


def _either(first: Tensor | None, second: Tensor) -> Tensor:
    """Absent in one or the other."""
    return second if first is None else first.to(second.device) | second


def _describe(strength: Tensor) -> str:
    return (
        f"{strength.detach().item():g}" if strength.ndim == 0 else f"tensor{tuple(strength.shape)}"
    )


def _check_floating(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a torch tensor, not {type(tensor).__name__}: use torch.as_tensor"
        )
    if not tensor.is_floating_point():
        raise TypeError(
            f"{name} has dtype {tensor.dtype}: couplings are real floating-point numbers; use "
            f"{name}.to(torch.float64) or torch.float32"
        )


def _check_finite(name: str, tensor: Tensor) -> None:
    finite = tensor.isfinite()
    if bool(finite.all()):
        return
    index = tuple(int(i) for i in (~finite).nonzero()[0])
    raise ValueError(
        f"{name}{list(index)} = {tensor[index].detach().item()}: couplings must be finite; "
        "replace the value, or mark its site as absent with a mask"
    )


def _check_absent(
    absent: Tensor, num_spins: int, batch_shape: torch.Size, device: torch.device
) -> Tensor:
    """A mask ``(..., N)`` that broadcasts with the batch axes of the couplings."""
    if not isinstance(absent, Tensor) or absent.dtype != torch.bool:
        kind = absent.dtype if isinstance(absent, Tensor) else type(absent).__name__
        raise TypeError(
            f"the mask of absent sites must be a boolean tensor (True = absent), not {kind}"
        )
    batch = absent.shape[:-1]
    fits = all(
        a == b or 1 in (a, b) for a, b in zip(reversed(batch), reversed(batch_shape), strict=False)
    )
    if absent.ndim < 1 or absent.shape[-1] != num_spins or not fits:
        raise ValueError(
            f"the mask of absent sites has shape {tuple(absent.shape)}: it must be "
            f"(..., {num_spins}), one entry per site, and its leading axes must broadcast with the "
            f"batch shape {tuple(batch_shape)} of the couplings"
        )
    return absent.to(device)


def _check_count(name: str, value: int, minimum: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be a whole number") from None
    if count < minimum:
        raise ValueError(f"{name}={count} must be at least {minimum}")
    return count


def _check_strength(
    strength: float | Tensor, dtype: torch.dtype | None, device: torch.device | str | None
) -> Tensor:
    if isinstance(strength, Tensor):
        _check_floating("strength", strength)
        tensor = strength.to(dtype=dtype, device=device)
    elif isinstance(strength, (int, float)) and not isinstance(strength, bool):
        dtype = torch.get_default_dtype() if dtype is None else dtype
        tensor = torch.tensor(float(strength), dtype=dtype, device=device)
    else:
        raise TypeError(f"strength={strength!r} must be a number or a tensor")
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"strength={_describe(tensor)} must be finite")
    return tensor


def _check_lengths(
    names: Sequence[str], shape: Sequence[int], periodic: bool | Sequence[bool]
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Lengths and wrap-around of the directions of a lattice, called by the caller's names."""
    lengths = tuple(_check_count(name, n, 1) for name, n in zip(names, shape, strict=True))
    wraps = (
        tuple(bool(wrap) for wrap in periodic)
        if isinstance(periodic, Sequence)
        else (bool(periodic),) * len(lengths)
    )
    if len(wraps) != len(lengths):
        raise ValueError(
            f"periodic={wraps} has {len(wraps)} entries for {len(lengths)} directions: give one "
            "bool, or one a direction"
        )
    for name, length, wrap in zip(names, lengths, wraps, strict=True):
        if wrap and length < 3:
            trouble = (
                "couple each site with itself"
                if length == 1
                else "coincide with the bonds that are there already"
            )
            raise ValueError(
                f"{name}={length} is too short for a periodic direction: below length 3 the "
                f"wrap-around bonds {trouble}; use a length of at least 3, or an open direction "
                "(with twice the strength, if doubled bonds are meant)"
            )
    return lengths, wraps


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
    return _check_lengths(names, lengths, periodic)[0]
