r"""Overlaps of replicas: what order looks like where no field could point it out.

Two independent copies a, b of the same system have the overlaps

.. math::
    Q_{\mu\nu} = \frac1N \sum_i S^a_{i\mu} S^b_{i\nu},\qquad
    q = \operatorname{tr} Q = \frac1N \sum_i S^a_i \cdot S^b_i,\qquad
    q^2_{\rm inv} = \sum_{\mu\nu} Q_{\mu\nu}^2 ,\qquad
    q_{\rm link} = \frac1B \sum_{(ij)} (S^a_i \cdot S^a_j)(S^b_i \cdot S^b_j)

over the N present sites and B bonds. In zero field vectors turn freely, each copy in its own way,
and q averages to nothing; the sum of the squares of Q stays as it is when either copy is turned,
and of Ising spins it is :math:`q^2`. Its mean is the mean square correlation,

.. math:: \langle q^2_{\rm inv}\rangle
          = \frac1{N^2}\sum_{ij} \langle S_i \cdot S_j\rangle^2 ,

which a spin glass has and a paramagnet of many spins has not. Overlaps are in units of the spins:
two equal configurations have q = R^2.

Source: Edwards & Anderson, J. Phys. F 5, 965 (1975); Parisi, Phys. Rev. Lett. 50, 1946 (1983);
vectors: Hukushima & Kawamura, Phys. Rev. B 72, 144416 (2005), and Young & Lee, Phys. Rev. Lett. 91,
027203 (2003).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spinformer.errors import strict_options
from spinformer.sampling.cluster import lattice_bonds
from spinformer.sampling.observables import lattice_of
from spinformer.sampling.sampled import SampledEquilibrium
from spinformer.spins.couplings import Masked
from spinformer.spins.system import SpinSystem
from spinformer.thermo.statistics import Jackknife, bin_means, jackknife

__all__ = ["OverlapDistribution", "ReplicaOverlaps"]

# Ising overlaps of so few spins are shown value by value.
_MOST_VALUES = 100
_BINS = 51


class OverlapDistribution(NamedTuple):
    """A histogram of overlaps with unit area.

    Attributes:
        centres: (bins,), the middle of each bin.
        width: of all of them.
        density: (..., bins).
        error: (..., bins), its standard error.
    """

    centres: Tensor
    width: float
    density: Tensor
    error: Tensor


@strict_options
class ReplicaOverlaps:
    """Overlaps of all pairs of independent chains, time by time, and their averages with errors.

    Errors are those of a jackknife over blocks of time, each with all pairs in it, which are not
    independent of each other; blocks must be longer than the correlation time. Or, where axes of
    the batch are draws of the couplings (``disorder``), everything is averaged over these axes, and
    errors come from the scatter of the draws, which includes the noise of each.

    Args:
        system: what was sampled.
        samples: its configurations, (chains, *batch, k, N, D), of two or more independent chains:
            ``samples`` of an equilibrium solved with ``keep=k`` (:meth:`of`).
        disorder: axes of the batch that are draws of the disorder. None: each system by itself.
        blocks: of time, for the errors without ``disorder``; as many as there are configurations,
            if these are fewer.

    Attributes:
        overlap: q, (pairs, *batch, k).
        matrix: Q, (pairs, *batch, k, D, D).
        square: sum of the squares of Q, (pairs, *batch, k).

    Cost: N D^2 operations a pair of configurations; C (C - 1) / 2 pairs of C chains.

    Raises:
        ValueError: fewer than two chains or configurations, or fewer than two draws.
    """

    def __init__(
        self,
        system: SpinSystem,
        samples: Tensor,
        *,
        disorder: int | Sequence[int] | None = None,
        blocks: int = 16,
    ) -> None:
        batch = tuple(system.batch_shape)
        sites = (system.num_spins, system.dim)
        if samples.ndim != len(batch) + 4 or (*samples.shape[1:-3], *samples.shape[-2:]) != (
            *batch,
            *sites,
        ):
            raise ValueError(
                f"samples have shape {tuple(samples.shape)}: give (chains, *{batch}, k, *{sites})"
            )
        if len(samples) < 2:
            raise ValueError(
                f"samples have {len(samples)} chain: overlaps are between independent chains, "
                "sample two or more (four give six pairs)"
            )
        if disorder is None and samples.shape[-3] < 2:
            raise ValueError(
                f"samples have {samples.shape[-3]} configurations a chain: errors need two or "
                "more; ask for them with MonteCarlo(keep=...)"
            )
        if blocks < 2:
            raise ValueError(f"blocks={blocks}: a jackknife needs two or more")
        self.system = system
        self.samples = samples.detach()
        self.disorder = _axes(disorder, batch)
        self.blocks = min(blocks, samples.shape[-3])
        self.pairs = list(itertools.combinations(range(len(samples)), 2))
        number = system.num_present.clamp_min(1)[..., None, None, None]
        with torch.no_grad():
            self.matrix = torch.stack(
                [self.samples[a].mT @ self.samples[b] / number for a, b in self.pairs]
            )
        self.overlap = self.matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
        self.square = self.matrix.square().sum((-2, -1))

    @classmethod
    def of(
        cls,
        equilibrium: SampledEquilibrium,
        *,
        disorder: int | Sequence[int] | None = None,
        blocks: int = 16,
    ) -> ReplicaOverlaps:
        """The overlaps of the chains of a Monte Carlo run.

        Args:
            equilibrium: of ``MonteCarlo(keep=k, chains=C)``, or of ``ParallelTempering``, whose
                chains are independent ladders: overlaps are within each rung.
            disorder, blocks: see the class.
        """
        samples = equilibrium.samples
        if not samples.shape[-3]:
            raise ValueError(
                "the run kept no configurations, of which overlaps are made: solve again with "
                "keep=100, say"
            )
        if equilibrium.broken is not None:
            samples = samples.masked_fill(equilibrium.broken[..., None, None, None], torch.nan)
        return cls(equilibrium.system, samples, disorder=disorder, blocks=blocks)

    # -- averages ---------------------------------------------------------------------------------

    def mean(self) -> Jackknife:
        """<q>, (...): zero without fields, once the chains go everywhere."""
        return self._average(lambda q: q, self.overlap)

    def mean_absolute(self) -> Jackknife:
        r""":math:`\langle |q| \rangle`, (...), the order parameter of finite Ising spin glasses."""
        return self._average(lambda q: q, self.overlap.abs())

    def mean_square(self) -> Jackknife:
        """<q^2>, (...), of vectors that of the invariant sum of squares."""
        return self._average(lambda q: q, self.square)

    def spin_glass_susceptibility(self) -> Jackknife:
        r""":math:`\chi_{SG} = N \langle q^2 \rangle`, (...).

        :math:`\frac1N \sum_{ij} \langle S_i \cdot S_j \rangle^2`, which grows with N where a spin
        glass freezes. In fields the copies agree without any glass: it is the one of zero field.
        """
        number = self.system.num_present[..., None]
        return self._average(lambda q: q, number * self.square)

    def binder_cumulant(self) -> Jackknife:
        r"""Binder's cumulant of the n = D^2 components of Q, (...).

        .. math:: g = \frac12 \Big(n + 2
                  - n \frac{\langle q^4 \rangle}{\langle q^2 \rangle^2}\Big),

        0 for many independent spins, for which Q is Gaussian, and 1 where q^2 does not fluctuate:
        :math:`(3 - \langle q^4\rangle / \langle q^2\rangle^2) / 2` for Ising spins. With
        ``disorder``, a ratio of averages.
        """
        n = self.system.dim**2

        def cumulant(square: Tensor, fourth: Tensor) -> Tensor:
            return (n + 2 - n * fourth / square.square()) / 2

        return self._average(cumulant, self.square, self.square.square())

    def link_overlap(self) -> Jackknife:
        """<q_link>, (...), over the bonds of couplings that are not zero: what changes if domains
        have walls, whatever their size. N D operations a configuration of a lattice, N^2 D else."""
        return self._average(lambda q: q, self.link())

    def distribution(self, bins: int | None = None) -> OverlapDistribution:
        """P(q), of the trace of Q.

        Args:
            bins: so many equal ones between -R^2 and R^2. None: one for each possible value of
                up to 100 Ising spins that are all present, 51 else.
        """
        limit, count = self._limit(), bins
        if count is None:
            few = self.system.dim == 1 and 0 < self.system.num_spins <= _MOST_VALUES
            by_value = few and self.system.mask is None and self.system.site.radius is not None
            count = self.system.num_spins + 1 if by_value else _BINS
            if by_value:
                limit *= 1 + 1 / self.system.num_spins
        if count < 1:
            raise ValueError(f"bins={bins}: give 1 or more")
        width = 2 * limit / count
        # Values on an edge go to the bin above, whatever rounding says.
        place = torch.floor((self.overlap.double() + limit) / width + 1e-9).nan_to_num(-1)
        place = place.long().clamp(-1, count - 1)
        unknown = self.overlap.isnan()
        parts = [
            self._average(
                lambda q: q, torch.where(unknown, torch.nan, (place == number).double() / width)
            )
            for number in range(count)
        ]
        centres = torch.arange(count, dtype=torch.float64, device=place.device)
        centres = -limit + width * (centres + 0.5)
        return OverlapDistribution(
            centres,
            width,
            torch.stack([part.value for part in parts], -1),
            torch.stack([part.error for part in parts], -1),
        )

    @torch.no_grad()
    def link(self) -> Tensor:
        """The link overlap of all pairs, (pairs, *batch, k)."""
        first, second, there = _bonds(self.system)
        number = there.sum(-1).clamp_min(1)
        found = []
        for time in range(self.samples.shape[-3]):  # all bonds of all times would be too many
            spins = self.samples[..., time, :, :]
            bonds = (spins[..., first, :] * spins[..., second, :]).sum(-1) * there
            found.append(
                torch.stack([(bonds[a] * bonds[b]).sum(-1) / number for a, b in self.pairs])
            )
        return torch.stack(found, -1)

    def _limit(self) -> float:
        """The largest overlap there can be; of spins of any length, the largest there was."""
        radius = self.system.site.radius
        return radius**2 if radius is not None else float(self.overlap.abs().nan_to_num().max())

    def _average(self, function: Callable[..., Tensor], *series: Tensor) -> Jackknife:
        """A function of the means of series (pairs, *batch, k)."""
        means = [values.double().mean(0, keepdim=True) for values in series]
        if self.disorder is None:
            return jackknife(function, *(bin_means(values, self.blocks) for values in means))
        front = range(len(self.disorder))
        return jackknife(
            function,
            *(
                values[0].mean(-1).movedim(self.disorder, tuple(front)).flatten(0, len(front) - 1)
                for values in means
            ),
        )


def _axes(disorder: int | Sequence[int] | None, batch: Sequence[int]) -> tuple[int, ...] | None:
    """Axes of the batch, not negative."""
    if disorder is None:
        return None
    given = (disorder,) if isinstance(disorder, int) else tuple(disorder)
    if not given or any(not -len(batch) <= axis < len(batch) for axis in given):
        raise ValueError(
            f"disorder={disorder}: name axes of the batch {tuple(batch)}, from {-len(batch)} to "
            f"{len(batch) - 1}"
        )
    axes = tuple(sorted({axis % len(batch) for axis in given}))
    draws = torch.Size([batch[axis] for axis in axes]).numel()
    if draws < 2:
        raise ValueError(
            f"disorder={disorder}: these axes of the batch {tuple(batch)} have {draws} draw; an "
            "error needs two or more"
        )
    return axes


def _bonds(system: SpinSystem) -> tuple[Tensor, Tensor, Tensor]:
    """The two ends of all bonds (B,), and whether each system has them (..., B)."""
    lattice = lattice_of(system.couplings)
    if lattice is not None:
        first, second = lattice_bonds(lattice)
        present = _present(system)
        return first, second, present[..., first] & present[..., second]
    matrix = system.couplings.to_dense()
    linked = matrix != 0 if system.couplings.dim is None else (matrix != 0).any(-1).any(-1)
    linked = linked | linked.mT
    batch = linked.shape[:-2].numel()
    first, second = linked.reshape(batch, *linked.shape[-2:]).any(0).triu(1).nonzero().unbind(-1)
    return first, second, linked[..., first, second]


def _present(system: SpinSystem) -> Tensor:
    """The sites that are there and coupled, (..., N)."""
    present = torch.ones(system.num_spins, dtype=torch.bool, device=system.field.device)
    if system.present is not None:
        present = present & system.present
    couplings = system.couplings
    while isinstance(couplings, Masked):
        present = present & ~couplings.absent
        couplings = couplings.couplings
    return present
