r"""Cluster moves: spins that stand together turn together, and criticality costs little.

**Bonds.** A reflection across the plane normal to a unit vector r, :math:`S_i \to S_i - 2 a_i r`
with :math:`a_i = S_i \cdot r`, changes the sign of :math:`a_i` and nothing else. What stays of the
weight is an Ising model in these signs, with couplings :math:`J_{ij} |a_i| |a_j|` and fields
:math:`(h_i \cdot r) |a_i|` (Wolff, PRL 62, 361 (1989)); for Ising spins r = 1 and it is the model
itself. With the signs as they are, bonds are laid with probability

.. math::
    p_{ij} = 1 - e^{-2 \beta J_{ij} a_i a_j},\qquad
    p_{i0} = 1 - e^{-2 \beta (h_i \cdot r) a_i}\qquad\text{(where positive, else none)} .

**Why this is exact.** A pair's weight is, up to a constant, :math:`e^{-2\beta |J a_i a_j|}` plus
:math:`(1 - e^{-2\beta |J a_i a_j|})` times [the pair is satisfied, :math:`J_{ij} a_i a_j > 0`].
Taking the two terms for "no bond" and "bond" gives spins and bonds a common law whose spins have
Boltzmann's (Fortuin & Kasteleyn 1972; Edwards & Swendsen, PRD 38, 2009 (1988)). Given the spins,
bonds are laid as above; given the bonds, every state in which bonded pairs are satisfied weighs the
same: reflecting any whole cluster leaves it so. A field is a coupling to one more spin, the ghost
0, which points along it: :math:`h_i \cdot S_i = J_{i0}\, a_i a_0 + \dots` with
:math:`J_{i0} = h_i \cdot r` and :math:`a_0 = 1`. The field does not turn, so that the cluster that
holds the ghost stays; all others are free. Fields of any direction, different at each site, are
allowed. The coins and sites that choose what turns must not look at the spins, and do not.

**Improved estimator.** Given the bonds, the signs of clusters without ghost are fair coins: cross
terms vanish in the mean, with the ghost's cluster too, and with :math:`A_C = \sum_{i \in C} a_i`

.. math::
    \Big\langle \Big|\sum_i S_i\Big|^2 \Big\rangle = D\,\Big\langle \sum_C A_C^2 \Big\rangle .

For a ferromagnet of Ising spins it is N times the mean size of the cluster of a random site, which
is the susceptibility over beta, :math:`\langle |C| \rangle = \chi / \beta` without field.

**Where it pays.** Bonds respect every satisfied pair. Where not all pairs can be satisfied (a
closed loop of couplings with a negative product: frustration) clusters percolate above the
temperature at which anything interesting happens, and turning nearly all spins at once does
nothing: exact and useless. Such couplings are refused, unless asked for. Antiferromagnets on
bipartite lattices are fine. In a strong field most spins belong to the ghost: ``"flipped"`` of the
report shows it, and a local move beside this one helps.
"""

from __future__ import annotations

import abc
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from spinformer.errors import check_choice, strict_options
from spinformer.sampling.chains import Chains, Kernel, Move
from spinformer.spins.couplings import Couplings, CurieWeiss, Dense, Lattice, Masked
from spinformer.spins.couplings.checks import check_count
from spinformer.spins.site import Gaussian, to_sphere
from spinformer.spins.streams import Streams
from spinformer.spins.system import SpinSystem

__all__ = ["SwendsenWang", "Wolff", "lattice_bonds"]

Frustrated = Literal["refuse", "allow"]

# All pairs of 2048 spins: 17 MB of random numbers a chain and sweep.
_MOST_BONDS = 2048 * 2047 // 2
# Bonds of chains that are treated at once: enough to amortize the calls, few enough for the cache.
_BLOCK = 1 << 19
# Between the keys of two bonds: odd, so that no two are the same, with bits in no pattern.
_STRIDE = 0x2545F4914F6CDD1D


@strict_options
class SwendsenWang(Move):
    r"""Every cluster is reflected, or not, by the toss of a coin; one set of bonds a sweep.

    For :class:`~spinformer.Ising` spins, and spheres of any dimension by reflections in a random
    direction, a new one each sweep. The coin of a cluster is that of its first site. In a field
    the ghost's cluster stays. At the critical point of the square Ising lattice the
    autocorrelation time grows like :math:`L^{0.2}` instead of :math:`L^{2.17}`.

    Args:
        frustrated: ``"refuse"``: couplings with a frustrated loop raise. ``"allow"``: exact all the
            same, but slow to mix.

    A sweep costs O(N + bonds) for every chain: a random number a bond, and
    :func:`scipy.sparse.csgraph.connected_components` on the CPU. Bonds are the pairs with a
    coupling, at most 2.1e6 of them (all pairs of 2048 spins).

    Its kernel reports ``"cluster_size"``, the mean number of sites in the cluster of a random
    site; ``"squared_moment"``, the improved estimator of :math:`|\sum_i S_i|^2 / N`; and
    ``"flipped"``, the share of sites reflected in a sweep.

    Raises:
        ValueError: matrix-valued or asymmetric couplings, Gaussian spins, frustration, or too many
            bonds.

    Source: Swendsen & Wang, PRL 58, 86 (1987).
    """

    def __init__(self, *, frustrated: Frustrated = "refuse") -> None:
        check_choice("frustrated", frustrated, ("refuse", "allow"))
        self.frustrated = frustrated

    def __repr__(self) -> str:
        return f"SwendsenWang(frustrated={self.frustrated!r})"

    def start(self, chains: Chains) -> Kernel:
        return _AllClusters(chains, _bonds(chains.system, "SwendsenWang", self.frustrated))


@strict_options
class Wolff(Move):
    r"""The clusters of sites chosen at random are reflected, each for certain.

    The cluster of a random site is a large one more often than a small one, and it is turned
    always, not half the time: Wolff's single-cluster move with ``clusters=1``. In a field a cluster
    that holds the ghost stays.

    Where clusters are small one of them a sweep is little. So that sweeps of all moves compare,
    a sweep chooses :math:`k \approx N / \langle |C| \rangle` sites, whose clusters hold N sites if
    those in two of them count twice; their number adapts while warming up, in every chain by
    itself, and is fixed from then on. The k clusters are of one set of bonds: the sites are
    chosen without a look at the spins, which is all that :mod:`spinformer.sampling.cluster` asks
    for, and it makes a sweep in the disordered phase one pass instead of hundreds.

    The clusters are found by labelling all of a set of bonds, those of Wolff's site by site growth
    in law. Growing them on tensors costs a dozen calls for every shell of neighbours, and a
    critical cluster of the L = 64 Ising lattice has 170 shells: for 16 chains on one core it took
    15 ms where labelling takes 7, and in the disordered phase it treated 1e5 spins a second where
    a pass with k sites treats 1e7.

    Args:
        clusters: k, the same for all chains and fixed; None: adapted as above.
        frustrated: as :class:`SwendsenWang`.

    Cost, report (with ``"clusters"``, k) and errors as :class:`SwendsenWang`.

    Source: Wolff, PRL 62, 361 (1989).
    """

    def __init__(self, clusters: int | None = None, *, frustrated: Frustrated = "refuse") -> None:
        if clusters is not None:
            check_count("clusters", clusters, 1)
        check_choice("frustrated", frustrated, ("refuse", "allow"))
        self.clusters = clusters
        self.frustrated = frustrated

    def __repr__(self) -> str:
        return f"Wolff(clusters={self.clusters!r}, frustrated={self.frustrated!r})"

    def start(self, chains: Chains) -> Kernel:
        bonds = _bonds(chains.system, "Wolff", self.frustrated)
        return _ChosenClusters(chains, bonds, self.clusters)


class _Bonds:
    """Pairs of sites with a coupling, each once, in the order of their first site.

    Attributes:
        first, second: int64 (E,), the sites.
        strength: (systems or 1, E or 1), their couplings in every system, 0 where there is none.
        offset: int64 (E,), what tells their random numbers from each other.
    """

    def __init__(self, first: Tensor, second: Tensor, strength: Tensor, num_spins: int) -> None:
        self.first, self.second, self.strength = first, second, strength
        self.offset = (first * num_spins + second) * _STRIDE

    def __len__(self) -> int:
        return len(self.first)


class _Clusters:
    """Who stands with whom, in a block of m chains.

    Attributes:
        label: (m, N), of the cluster, counted through all chains.
        root: (clusters,), the first site of each, counted through all chains.
        held: (clusters,) bool, of the ghost.
    """

    def __init__(self, label: np.ndarray, count: int, ghost: np.ndarray | None) -> None:
        self.label = label
        flat = label.reshape(-1)
        self.root = np.empty(count, dtype=np.int64)
        # Of several writes to one place the last stands: from the end, that is the first site.
        self.root[flat[::-1]] = np.arange(flat.size - 1, -1, -1)
        self.held = np.zeros(count, dtype=bool)
        if ghost is not None:
            self.held[flat[ghost.reshape(-1)]] = True

    def sums_of_squares(self, values: np.ndarray | None) -> np.ndarray:
        """Sum over the clusters of a chain of (the sum of values (m, N) of its sites)^2, (m,).

        Without values every site counts 1.
        """
        count = len(self.root)
        m = len(self.label)
        weights = None if values is None else values.reshape(-1)
        totals = np.bincount(self.label.reshape(-1), weights, count).astype(np.float64)
        chain = self.root // self.label.shape[1]
        # All that the ghost holds is one cluster, through the ghost.
        held = np.bincount(chain, totals * self.held, m)
        return held**2 + np.bincount(chain, totals**2 * ~self.held, m)


class _Kernel(Kernel):
    """Bonds, clusters and reflections; which clusters turn is left open."""

    def __init__(self, chains: Chains, bonds: _Bonds) -> None:
        super().__init__(chains)
        system = chains.system
        # All chains are rows of one matrix, which must be the spins themselves.
        chains.spins = chains.spins.contiguous()
        self._rows = chains.spins.shape[:-2].numel()
        self._bonds = bonds
        self._systems = max(system.batch_shape.numel(), 1)
        sites = (system.batch_shape.numel(), system.num_spins)
        self._field = system.field.detach().reshape(*sites, system.dim)
        self._in_field = bool((self._field != 0).any())
        self._present = None
        if system.present is not None:
            self._present = system.present.reshape(sites)
        self._sites = system.num_present.double().expand(chains.spins.shape[:-2]).reshape(-1)
        # Where the bonds of a site begin, and behind the last one's end.
        every = torch.arange(system.num_spins, device=bonds.first.device)
        self._starts = torch.searchsorted(bonds.first, every).cpu().numpy()
        self._block = max(1, min(self._rows, _BLOCK // max(len(bonds), system.num_spins, 1)))
        chain = np.arange(self._block, dtype=np.int32)[:, None]
        # Second sites, counted through all chains of a block.
        self._second = bonds.second.cpu().numpy().astype(np.int32) + system.num_spins * chain
        self.reset_report()

    def reset_report(self) -> None:
        # size, squared moment, flipped
        self._total = torch.zeros(3, self._rows, dtype=torch.float64)
        self._count = 0

    def report(self) -> dict[str, Tensor]:
        shape = self.chains.spins.shape[:-2]
        mean = (self._total / max(self._count, 1)).reshape(3, *shape)
        return dict(zip(("cluster_size", "squared_moment", "flipped"), mean, strict=True))

    def state(self) -> dict[str, Tensor]:
        return {"total": self._total.clone(), "count": torch.tensor(self._count)}

    def restore(self, state: dict[str, Tensor]) -> None:
        self._total = state["total"].clone()
        self._count = int(state["count"])

    @torch.no_grad()
    def sweep(self, count: int = 1) -> None:
        if not self.chains.spins.numel():
            return
        for _ in range(count):
            # A stream for the sweep: what a chain draws from it, and when, moves no other.
            streams = self.chains.streams.child().flatten()
            for begin in range(0, self._rows, self._block):
                rows = slice(begin, min(begin + self._block, self._rows))
                self._turn(rows, streams[(rows,)])
            self._count += 1

    @abc.abstractmethod
    def _chosen(self, clusters: _Clusters, rows: slice, streams: Streams) -> np.ndarray:
        """Which clusters are to be reflected, (clusters,) bool, without a look at the spins.

        The streams are for this choice alone: a chain may leave any number of their numbers unused.
        """

    def _turn(self, rows: slice, streams: Streams) -> None:
        """Bonds, clusters and reflections for a block of chains."""
        chains, system = self.chains, self.chains.system
        spins = chains.spins.view(self._rows, system.num_spins, system.dim)[rows]
        twice_beta = 2 * chains.beta.reshape(-1, 1)[rows]
        systems = torch.arange(rows.start, rows.stop, device=spins.device) % self._systems
        along = spins[..., 0]
        if system.dim > 1:
            direction = streams.normal(system.dim, dtype=spins.dtype)
            direction /= direction.norm(dim=-1, keepdim=True)
            along = (spins @ direction[..., None])[..., 0]
        # One stream for each purpose: a system without field draws no ghost's bonds, alone or in a
        # batch of systems that have one.
        parts = streams.child(3)

        ghost = None
        if self._in_field:
            field = self._field if len(self._field) == 1 else self._field[systems]
            pull = field[..., 0] if system.dim == 1 else (field @ direction[..., None])[..., 0]
            exponent = twice_beta * pull * along
            uniform = parts[:, 0].uniform(system.num_spins, dtype=spins.dtype)
            ghost = (uniform > exponent.neg_().exp_()).cpu().numpy()
        strength = self._bonds.strength
        strength = strength if len(strength) == 1 else strength[systems]
        pairs = along.index_select(1, self._bonds.first)
        pairs *= along.index_select(1, self._bonds.second)
        pairs *= twice_beta * strength
        # A stream for each bond, by its sites: what is drawn for it does not depend on which bonds
        # the other systems of a batch have.
        keys = parts.keys[:, 1, None] + self._bonds.offset
        uniform = Streams(keys).uniform(dtype=spins.dtype)
        bonded = (uniform > pairs.neg_().exp_()).cpu().numpy()
        label, number = self._label(bonded)
        clusters = _Clusters(label, number, ghost)

        chosen = self._chosen(clusters, rows, parts[:, 2]) & ~clusters.held
        turned = torch.from_numpy(chosen[label]).to(spins.device)
        squared = clusters.sums_of_squares(along.double().cpu().numpy())
        sizes = clusters.sums_of_squares(None)
        if system.dim == 1:
            spins.copy_(torch.where(turned[..., None], -spins, spins))
        else:
            shift = torch.where(turned, -2 * along, 0.0)
            reflected = spins + shift[..., None] * direction[:, None, :]
            # Rounding errors of the length would add up over a run. Absent spins stay zero.
            assert system.site.radius is not None
            spins.copy_(to_sphere(reflected, system.site.radius))

        sites = self._sites[rows].cpu().clamp(min=1)
        if self._present is not None:
            # An absent site is a cluster by itself, which adds 1 to the sum, and may be chosen.
            sizes = sizes - (system.num_spins - self._sites[rows].cpu().numpy())
            turned = turned & self._present[systems]
        self._total[0, rows] += torch.from_numpy(sizes) / sites
        self._total[1, rows] += system.dim * torch.from_numpy(squared) / sites
        self._total[2, rows] += turned.sum(-1).cpu() / sites
        self._learn(torch.from_numpy(sizes) / sites, rows)

    def _learn(self, sizes: Tensor, rows: slice) -> None:
        """Take note of the mean sizes of the clusters of random sites."""

    def _label(self, bonded: np.ndarray) -> tuple[np.ndarray, int]:
        """The clusters of bonds (m, E): labels (m, N), and how many clusters there are."""
        from scipy.sparse import csr_array  # noqa: PLC0415
        from scipy.sparse.csgraph import connected_components  # noqa: PLC0415

        m, num_spins = len(bonded), self.chains.system.num_spins
        # The list is in order of its first sites, as the rows of a sparse matrix are.
        before = np.zeros(bonded.size + 1, dtype=np.int32)
        np.cumsum(bonded.reshape(-1), out=before[1:])
        row_starts = np.arange(m)[:, None] * bonded.shape[1] + self._starts
        pointers = np.append(before[row_starts.reshape(-1)], before[-1])
        columns = self._second[:m][bonded]
        size = m * num_spins
        graph = csr_array((np.ones(len(columns)), columns, pointers), shape=(size, size))
        number, label = connected_components(graph, directed=False)
        return label.reshape(m, num_spins), int(number)


class _AllClusters(_Kernel):
    """A coin for every cluster."""

    def _chosen(self, clusters: _Clusters, rows: slice, streams: Streams) -> np.ndarray:
        coins = streams.words(clusters.label.shape[1]) < 0
        return coins.cpu().numpy().reshape(-1)[clusters.root]


class _ChosenClusters(_Kernel):
    """The clusters of k random sites a chain."""

    def __init__(self, chains: Chains, bonds: _Bonds, number: int | None) -> None:
        super().__init__(chains, bonds)
        self._adaptive = number is None
        self._number = torch.full((self._rows,), number or 1)
        self._sizes = torch.zeros(self._rows, dtype=torch.float64)
        self._seen = 0

    def _chosen(self, clusters: _Clusters, rows: slice, streams: Streams) -> np.ndarray:
        m, num_spins = clusters.label.shape
        number = self._number[rows].to(streams.keys.device)
        most = int(number.max())
        place = streams.uniform(most) * self._sites[rows].to(streams.keys.device)[:, None]
        site = place.long().clamp_(max=num_spins - 1)
        if self._present is not None:
            systems = torch.arange(rows.start, rows.stop, device=site.device) % self._systems
            # The n-th site that is there: absent ones sort to the end.
            order = (~self._present).byte().sort(dim=-1, stable=True).indices[systems]
            site = order.gather(1, site)
        used = torch.arange(most, device=site.device) < number[:, None]
        chain = torch.arange(m, device=site.device)[:, None].expand_as(site)
        chosen = np.zeros(len(clusters.root), dtype=bool)
        chosen[clusters.label[chain[used].cpu().numpy(), site[used].cpu().numpy()]] = True
        return chosen

    def _learn(self, sizes: Tensor, rows: slice) -> None:
        self._sizes[rows] += sizes
        self._seen += int(rows.start == 0)

    def adapt(self) -> None:
        if not self._adaptive or self._seen == 0:
            return
        size = (self._sizes / self._seen).clamp(min=1.0)
        self._number = (self._sites.cpu() / size).round().long().clamp(min=1)
        self._sizes.zero_()
        self._seen = 0

    def report(self) -> dict[str, Tensor]:
        number = self._number.double().reshape(self.chains.spins.shape[:-2])
        return super().report() | {"clusters": number}

    def state(self) -> dict[str, Tensor]:
        return super().state() | {
            "clusters": self._number.clone(),
            "sizes": self._sizes.clone(),
            "seen": torch.tensor(self._seen),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        self._number = state["clusters"].clone()
        self._sizes = state["sizes"].clone()
        self._seen = int(state["seen"])


def _bonds(system: SpinSystem, move: str, frustrated: Frustrated) -> _Bonds:
    """The bonds of a system that the cluster moves can treat; ``ValueError`` for any other."""
    system.require_symmetric(move)
    if isinstance(system.site, Gaussian):
        raise ValueError(
            f"{move} reflects spins of fixed length, not {system.site!r}: use HeatBath() or "
            "Hamiltonian() for Gaussian spins"
        )
    if system.couplings.dim is not None:
        raise ValueError(
            f"{move} takes scalar couplings J (..., N, N), not {system.couplings!r}: a reflection "
            "does not leave a matrix-valued bond alone; use HeatBath() or Hamiltonian()"
        )
    with torch.no_grad():
        first, second, strength = _listed(system.couplings, move)
        used = (strength != 0).flatten(0, -2).any(0) if strength.ndim > 1 else strength != 0
        if len(used) == len(first):
            first, second, strength = first[used], second[used], strength[..., used]
        elif not bool(used):  # one strength for all bonds, and it is zero
            first, second = first[:0], second[:0]
        shape = (*system.batch_shape, strength.shape[-1])
        alone = strength.numel() == strength.shape[-1]
        strength = strength.reshape(1, -1) if alone else strength.expand(shape).flatten(0, -2)
        order = first.argsort(stable=True)
        if strength.shape[-1] == len(first):
            strength = strength[:, order]
        bonds = _Bonds(first[order], second[order], strength.contiguous(), system.num_spins)
        if frustrated == "refuse":
            _refuse_frustration(bonds, system, move)
    return bonds


def _listed(couplings: Couplings, move: str) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of sites (E,), (E,) and their couplings (..., E) or, if all alike, (..., 1)."""
    n = couplings.num_spins
    if isinstance(couplings, Masked):
        first, second, strength = _listed(couplings.couplings, move)
        there = ~couplings.absent
        both = there[..., first] & there[..., second]
        return first, second, torch.where(both, strength, 0.0)
    if isinstance(couplings, Lattice):
        return *lattice_bonds(couplings), couplings.strength.detach()[..., None]
    if not isinstance(couplings, Dense):
        _check_number(n * (n - 1) // 2, couplings, move)
    if isinstance(couplings, CurieWeiss):
        first, second = torch.triu_indices(n, n, 1, device=couplings.device)
        return first, second, couplings.strength.detach()[..., None] / n
    matrix = couplings.to_dense().detach()
    pattern = (matrix != 0).reshape(matrix.shape[:-2].numel(), n, n).any(0)
    first, second = (pattern | pattern.mT).triu(1).nonzero(as_tuple=True)
    _check_number(len(first), couplings, move)
    return first, second, matrix[..., first, second]


def _check_number(number: int, couplings: Couplings, move: str) -> None:
    if number > _MOST_BONDS:
        raise ValueError(
            f"{move} would draw {number} bonds a sweep and chain for {couplings!r}: it stops at "
            f"{_MOST_BONDS} (all pairs of 2048 spins); use HeatBath(), whose cost a sweep does not "
            "grow with a random number for every pair"
        )


def lattice_bonds(lattice: Lattice) -> tuple[Tensor, Tensor]:
    """Both ends of all bonds (B,), each once: a site and the next one in every direction."""
    sites = torch.arange(lattice.num_spins, device=lattice.device).reshape(lattice.shape)
    first, second = [], []
    for axis, (length, wrap) in enumerate(zip(lattice.shape, lattice.periodic, strict=True)):
        here, there = sites, sites.roll(-1, axis)
        if not wrap:
            here, there = here.narrow(axis, 0, length - 1), there.narrow(axis, 0, length - 1)
        first.append(here.flatten())
        second.append(there.flatten())
    return torch.cat(first), torch.cat(second)


def _refuse_frustration(bonds: _Bonds, system: SpinSystem, move: str) -> None:
    """``ValueError`` if a closed loop of couplings has a negative product, in any system.

    Every site stands twice in a graph, with either colour. A ferromagnetic bond joins equal
    colours and an antiferromagnetic one unequal colours: a site whose two copies are connected
    lies on a frustrated loop, or is tied to one. O(bonds).
    """
    from scipy.sparse import coo_array  # noqa: PLC0415
    from scipy.sparse.csgraph import connected_components  # noqa: PLC0415

    # NaN has no sign; it is the sampler's caller who looks for it.
    sign = torch.nan_to_num(bonds.strength, nan=0.0).sign().cpu().numpy()
    if not (sign < 0).any() or not len(bonds):
        return
    n = system.num_spins
    first, second = bonds.first.cpu().numpy(), bonds.second.cpu().numpy()
    for number, row in enumerate(sign):
        signs = np.broadcast_to(row, first.shape)
        there = signs != 0
        here, other, crossed = first[there], second[there], signs[there] < 0
        rows = np.concatenate([here, here + n])
        columns = np.concatenate([other + n * crossed, other + n * ~crossed])
        graph = coo_array((np.ones(len(rows)), (rows, columns)), shape=(2 * n, 2 * n))
        _, label = connected_components(graph, directed=False)
        clash = label[:n] == label[n:]
        if clash.any():
            where = ""
            if len(sign) > 1:
                index: Any = np.unravel_index(number, tuple(system.batch_shape))
                where = f" of system {[int(i) for i in index]}"
            raise ValueError(
                f"the couplings{where} are frustrated: site {int(clash.argmax())} is connected to "
                "a closed loop whose product of couplings is negative. Clusters percolate there, "
                f"so that {move} would be exact and useless: use HeatBath(), or ParallelTempering "
                'at low temperature; frustrated="allow" does it all the same'
            )
