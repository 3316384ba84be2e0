r"""Kinds that keep every entry: :class:`Dense` and :class:`MatrixValued`."""

from __future__ import annotations

import functools
import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from spinformer.errors import strict_options
from spinformer.spins.couplings.base import Couplings
from spinformer.spins.couplings.checks import check_absent, check_finite, check_floating
from spinformer.spins.couplings.entries import clear, flatten_blocks, is_symmetric, remove

__all__ = ["Dense", "MatrixValued", "block_matrix_product"]


def block_matrix_product(matrix: Tensor, state: Tensor) -> Tensor:
    """A matrix ``(..., N D, N D)`` times the components of a state ``(..., N, D)``.

    Leading axes broadcast. The systems that share a matrix are the rows of one product with it:
    broadcast as they stand, the matrix would be read, or even copied, once a system.
    """
    batch, rows = matrix.shape[:-2], matrix.shape[-1]
    shape = torch.broadcast_shapes(state.shape[:-2], batch)
    components = state.flatten(-2)
    if math.prod(batch) == 1:
        force = F.linear(components, matrix.reshape(rows, rows))
        return force.reshape(*shape, *state.shape[-2:])
    while batch[0] == 1:
        matrix, batch = matrix.squeeze(0), batch[1:]
    shared = components.ndim - 1 - len(batch)
    if shared > 0:
        systems = components.flatten(0, shared - 1).movedim(0, -2)
        force = (systems @ matrix.mT).movedim(-2, 0)
    else:
        force = (matrix @ components.unsqueeze(-1)).squeeze(-1)
    return force.reshape(*shape, *state.shape[-2:])


class _Stored(Couplings):
    """One matrix ``(..., N D, N D)`` that acts on the components of all spins of a system.

    The diagonal and the absent sites are removed once, when the couplings are built.
    """

    _matrix: Tensor
    _num_spins: int
    _components: int
    _absent: Tensor | None
    _known_symmetric: bool

    def _set(
        self,
        matrix: Tensor,
        num_spins: int,
        components: int,
        absent: Tensor | None,
        known_symmetric: bool,
    ) -> Self:
        absent = None if absent is None else absent.to(matrix.device)
        self._matrix = remove(matrix, absent, components)
        self._num_spins, self._components = num_spins, components
        self._absent, self._known_symmetric = absent, known_symmetric
        return self

    def _remade(self, matrix: Tensor, absent: Tensor | None, known_symmetric: bool) -> Self:
        couplings = type(self).__new__(type(self))
        return couplings._set(matrix, self._num_spins, self._components, absent, known_symmetric)

    @property
    def num_spins(self) -> int:
        return self._num_spins

    @property
    def batch_shape(self) -> torch.Size:
        return self._matrix.shape[:-2]

    @functools.cached_property
    def is_symmetric(self) -> bool:
        return self._known_symmetric or is_symmetric(self._matrix)

    def tensors(self) -> tuple[Tensor, ...]:
        """One matrix ``(..., N D, N D)``, the components of a spin next to each other."""
        return (self._matrix,)

    def with_tensors(self, *tensors: Tensor) -> Self:
        (matrix,) = tensors
        if matrix is self._matrix:
            # Nothing to remove again: a solve comes here in every iteration, and a copy would cost
            # as much as the product.
            return self
        return self._remade(matrix, self._absent, self._known_symmetric)

    def transpose(self) -> Self:
        return self._remade(self._matrix.mT, self._absent, self._known_symmetric)

    def symmetrize(self) -> Self:
        # Not skipped when the *values* happen to be symmetric: the gradient has to be, too.
        if self._known_symmetric:
            return self
        return self._remade(0.5 * (self._matrix + self._matrix.mT), self._absent, True)

    def mask(self, absent: Tensor) -> Self:
        absent = check_absent(absent, self.num_spins, self.batch_shape, self.device)
        absent = absent if self._absent is None else self._absent | absent
        return self._remade(self._matrix, absent, self._known_symmetric)

    def _apply_one(self, state: Tensor, index: tuple[int, ...]) -> Tensor:
        return (self._matrix[index] @ state.reshape(-1, 1)).reshape(state.shape)


@strict_options
class Dense(_Stored):
    """Couplings given by a matrix, symmetric or not.

    ``apply`` is one matmul, ``O(N^2 D)``.

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
        check_floating("matrix", matrix)
        if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
            raise ValueError(
                f"matrix has shape {tuple(matrix.shape)}: couplings are square, (..., N, N)"
            )
        batch, n = matrix.shape[:-2], matrix.shape[-1]
        absent = None if mask is None else check_absent(mask, n, batch, matrix.device)
        self._set(matrix, n, 1, absent, known_symmetric=False)
        if check:
            check_finite("matrix", self._matrix)

    def apply(self, state: Tensor) -> Tensor:
        """``J S``, one matmul."""
        self._check_state(state)
        return self._matrix @ clear(state, self._absent)

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
        check_floating("tensor", tensor)
        shape = tensor.shape
        square = tensor.ndim >= 4 and shape[-4] == shape[-3] and shape[-2] == shape[-1]
        if not square or shape[-1] < 1:
            raise ValueError(
                f"tensor has shape {tuple(shape)}: matrix-valued couplings are (..., N, N, D, D), "
                "D >= 1"
            )
        batch, n = shape[:-4], shape[-4]
        absent = None if mask is None else check_absent(mask, n, batch, tensor.device)
        # Stored as the matrix (site i, component) x (site j, component): a contraction of two axes
        # that are not next to each other would copy the whole tensor at every call.
        self._set(flatten_blocks(tensor), n, shape[-1], absent, known_symmetric=False)
        if check:
            check_finite("tensor", self.to_dense())

    @property
    def dim(self) -> int:
        """Dimension ``D`` of the spins."""
        return self._components

    def apply(self, state: Tensor) -> Tensor:
        """``J S``, one product with the ``N D`` components of the state."""
        self._check_state(state)
        return block_matrix_product(self._matrix, clear(state, self._absent))

    def to_dense(self) -> Tensor:
        """``(..., N, N, D, D)``, a view."""
        sizes = (self._num_spins, self._components)
        return self._matrix.reshape(*self.batch_shape, *sizes, *sizes).transpose(-3, -2)
