r"""Entropy production of parallel dynamics, from single transitions.

A step of parallel heat bath goes from S to S' with probability

.. math:: W(S'|S) = \prod_i \frac{e^{b_i(S)\cdot S'_i}}{z(b_i(S))},\qquad
          b_i(S) = \beta\Big(h_i + \sum_j J_{ij} S_j\Big),

so that the log-ratio of a transition and its reverse is the change of one function and one term
that is antisymmetric in time,

.. math:: \log\frac{W(S'|S)}{W(S|S')}
          &= L(S') - L(S) + \beta\sum_{ij} S'_i\cdot(J_{ij} - J_{ji}) S_j, \\
          L(S) & = \beta\sum_i h_i\cdot S_i + \sum_i \log z(b_i(S)).

For symmetric J the second term is zero: the dynamics is reversible with respect to
:math:`\pi \propto e^{L}`, Peretto's law (1984, Biol. Cybern. 50, 51), which is not that of Gibbs.
At rest the change of L averages to zero, and what is left is the entropy production.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spinformer.spins.site import LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem

__all__ = ["antisymmetric_flow", "entropy_flow", "peretto_log_weight", "sampled_law"]


def sampled_law(site: SiteLaw) -> SiteLaw:
    """The law that a site's draws follow: of the closed form at large D the sphere itself."""
    return Sphere(site.dim, site.radius) if isinstance(site, LargeDSphere) else site


def peretto_log_weight(system: SpinSystem, spins: Tensor) -> Tensor:
    r""":math:`L(S) = \beta\sum_i h_i\cdot S_i + \sum_i \log z(\beta|h_i + \sum_j J_{ij} S_j|)`.

    For symmetric couplings the stationary law of parallel dynamics is :math:`\propto e^{L}` with
    respect to the measure of free spins. Its normalizer is a sum over all states: known for small
    Ising systems (:class:`~spinformer.dynamics.ExactDynamics`), not for vectors.

    Args:
        system: any couplings and law.
        spins: (..., N, D); more leading axes than the system's are chains of it.

    Returns:
        (...), of the leading axes of both, broadcast.
    """
    return _log_weight(system, spins, system.field)


def _log_weight(system: SpinSystem, spins: Tensor, field: Tensor) -> Tensor:
    beta = system.beta[..., None, None]
    b = beta * (field + system.couplings.apply(spins))
    if system.mask is not None:
        spins = spins.masked_fill(system.mask[..., None], 0.0)
    own = system.beta * (field * spins).sum((-2, -1))
    return own + sampled_law(system.site).log_partition(b).sum(-1)


def antisymmetric_flow(system: SpinSystem, after: Tensor, before: Tensor) -> Tensor:
    r""":math:`\beta\sum_{ij} S'_i\cdot(J_{ij} - J_{ji}) S_j`, (...): zero for symmetric J.

    Its average over the steps of a steady state is the entropy production. S' may be replaced by
    its mean at given S, which leaves the average and takes most of the noise.

    Args:
        system: any couplings.
        after, before: S' and S, (..., N, D).
    """
    couplings = system.couplings
    if couplings.is_symmetric:
        shape = torch.broadcast_shapes(after.shape[:-2], before.shape[:-2], system.batch_shape)
        return after.new_zeros(shape)
    force = couplings.apply(before) - couplings.transpose().apply(before)
    if system.mask is not None:
        after = after.masked_fill(system.mask[..., None], 0.0)
    return system.beta * (after * force).sum((-2, -1))


def entropy_flow(
    system: SpinSystem, after: Tensor, before: Tensor, field: Tensor | None = None
) -> Tensor:
    r""":math:`\log W(S'|S) / W(S|S')` of single transitions, (...).

    Args:
        system: any couplings and law.
        after, before: S' and S, (..., N, D).
        field: external fields of the step, in the place of the system's.
    """
    field = system.field if field is None else field
    change = _log_weight(system, after, field) - _log_weight(system, before, field)
    return change + antisymmetric_flow(system, after, before)
