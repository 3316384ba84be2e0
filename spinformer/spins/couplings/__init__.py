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
:class:`Dense`         ``(..., N, N)``       one matmul          dense or ARPACK
:class:`MatrixValued`  ``(..., N, N, D, D)`` one matmul          dense or ARPACK
:class:`LowRank`       two ``(..., N, r)``   ``O(N r D)``        dense or ARPACK
:class:`Lattice`       one strength          ``O(N D)``          closed form
:class:`CurieWeiss`    one strength          ``O(N D)``          closed form
:class:`Masked`        another kind          as that kind        dense or ARPACK
====================== ===================== =================== ==========================

The factories :func:`chain`, :func:`ring`, :func:`square`, :func:`cubic`, :func:`curie_weiss`,
:func:`sherrington_kirkpatrick` and :func:`hopfield` build the models of the textbooks. Everything
is differentiable with respect to the tensors that it is made of.
"""

from spinformer.spins.couplings.base import Couplings, Masked
from spinformer.spins.couplings.factories import (
    chain,
    cubic,
    curie_weiss,
    hopfield,
    ring,
    sherrington_kirkpatrick,
    square,
)
from spinformer.spins.couplings.stored import Dense, MatrixValued
from spinformer.spins.couplings.structured import CurieWeiss, Lattice, LowRank

__all__ = [
    # the interface
    "Couplings",
    # kinds that keep every entry
    "Dense",
    "MatrixValued",
    # kinds that never form the matrix
    "LowRank",
    "Lattice",
    "CurieWeiss",
    # any kind with some of its sites removed
    "Masked",
    # the models of the textbooks
    "chain",
    "ring",
    "square",
    "cubic",
    "curie_weiss",
    "sherrington_kirkpatrick",
    "hopfield",
]
