r"""Which spins may be updated together, and the forces that they then feel.

Local moves treat one spin at a time, given the others. Spins that are not coupled do not feel each
other, so that a set of them can be updated at once without any change of the law:

* a lattice falls apart into two such sets (a checkerboard), or three where a periodic direction
  has an odd length; a sparse matrix into the colours of its graph;
* where everything is coupled to everything, spins are updated one after the other. Their forces
  come in blocks of consecutive sites: one matrix product gives those of a block as it starts, and
  what changes inside it is passed on by the few couplings of the block itself. A site costs
  O(N D), O(N D^2) with matrix-valued couplings, O(r D) of rank r and O(D) of Curie-Weiss type,
  for each chain, and most of it at the speed of a matrix product.

The systems of a batch share a schedule: that of all bonds of all of them.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from spinformer.sampling.chains import Chains
from spinformer.spins.couplings import Couplings, CurieWeiss, Lattice, LowRank, Masked
from spinformer.spins.system import SpinSystem

__all__ = ["Schedule", "Update", "colouring", "lattice_colours", "schedule"]

# New spins from the old ones and the forces on them, all (chains, systems, sites, D). The spins
# must not be changed in place.
Update = Callable[[Tensor, Tensor], Tensor]
Ahead = Callable[[int], None]

# Fewer sites a colour than this are not worth the colouring.
_LEAST_SITES = 4
# Sites whose forces are found together.
_BLOCK = 16


class Schedule(abc.ABC):
    """An order of updates that treats every spin of every chain once a sweep.

    Inside, the leading axes (chains, ``*batch``) are two: chains and systems.
    """

    def __init__(self, system: SpinSystem) -> None:
        sites = (system.batch_shape.numel(), system.num_spins)
        self.field = system.field.detach().reshape(*sites, system.dim)
        self.absent = None if system.mask is None else system.mask.reshape(sites)

    def sweep(
        self, chains: Chains, update: Update, count: int = 1, ahead: Ahead | None = None
    ) -> None:
        """Update all spins so many times, in place.

        Args:
            chains: whose spins; of the system of the schedule.
            update: called with every set of spins.
            count: of sweeps.
            ahead: where spins are updated one by one, called with the number of spins that come
                next: what does not depend on forces is cheaper for all of them at once.
        """
        if chains.spins.numel():
            spins = chains.spins.view(chains.num_chains, -1, *chains.spins.shape[-2:])
            self._sweep(spins, update, count, ahead)

    @abc.abstractmethod
    def _sweep(self, spins: Tensor, update: Update, count: int, ahead: Ahead | None) -> None:
        """As :meth:`sweep`, for spins (chains, systems, N, D)."""


def schedule(system: SpinSystem) -> Schedule:
    """The fastest schedule for the couplings of a system."""
    couplings, cut = _unmasked(system)
    lead = system.batch_shape
    if isinstance(couplings, Lattice):
        weight = _per_system(couplings.strength.detach(), lead, 0)
        groups = []
        for colour in lattice_colours(couplings.shape, couplings.periodic):
            found = lattice_neighbours(couplings.shape, couplings.periodic, colour)
            sites, neighbours, bond = (t.to(weight.device) for t in (colour, *found))
            weights = None if bool(bond.all()) else bond[None].to(weight)
            if cut is not None:
                there = ~cut
                weights = (bond & there[:, neighbours] & there[:, sites, None]).to(weight)
            groups.append(_Group(sites, neighbours, weights))
        return _Coloured(system, groups, weight)
    if isinstance(couplings, CurieWeiss | LowRank):
        return _Blocks(system, _Factors(*_factors(couplings, cut, lead)))
    matrix = couplings.to_dense().detach()
    if couplings.dim is not None:
        matrix = matrix.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)
        return _Blocks(system, _Matrix(_per_system(matrix, lead, 2)), couplings.dim)
    matrix = _per_system(matrix, lead, 2)
    # What is not finite in a broken system is no bond: it must not change the order of the others.
    bonds = ((matrix != 0) & matrix.isfinite()).any(0)
    colours = colouring(bonds, system.num_spins // _LEAST_SITES)
    if colours is None:
        return _Blocks(system, _Matrix(matrix))
    return _Coloured(system, [_neighbours(matrix, bonds, sites) for sites in colours], None)


# --- one by one ---------------------------------------------------------------------------------


class _Source(abc.ABC):
    """Forces of blocks of sites from the components of all spins (systems, N Q, columns).

    Q is the dimension of matrix-valued couplings, and 1 of scalar ones, for which the D components
    are columns. One system may serve several, as further columns.
    """

    systems: int

    def begin(self, spins: Tensor) -> None:  # noqa: B027 (a matrix has nothing to prepare)
        """A sweep begins."""

    @abc.abstractmethod
    def force(self, rows: slice, spins: Tensor) -> Tensor:
        """Of the couplings on the components of a block."""

    @abc.abstractmethod
    def inside(self, rows: slice) -> Tensor:
        """The couplings within a block; those of a site with itself are not read."""

    def moved(self, rows: slice, change: Tensor) -> None:  # noqa: B027
        """The spins of a block have changed."""


class _Matrix(_Source):
    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.systems = len(matrix)

    def force(self, rows: slice, spins: Tensor) -> Tensor:
        return self.matrix[:, rows] @ spins

    def inside(self, rows: slice) -> Tensor:
        return self.matrix[:, rows, rows]


class _Factors(_Source):
    """J = left right^T minus its diagonal, through the overlaps right^T S."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        self.own = (left * right).sum(-1, keepdim=True)
        self.systems = len(left)
        self.overlaps = left

    def begin(self, spins: Tensor) -> None:
        # Anew in every sweep, at the cost of the sweep: rounding errors do not pile up.
        self.overlaps = self.right.mT @ spins

    def force(self, rows: slice, spins: Tensor) -> Tensor:
        return self.left[:, rows] @ self.overlaps - self.own[:, rows] * spins[:, rows]

    def inside(self, rows: slice) -> Tensor:
        return self.left[:, rows] @ self.right[:, rows].mT

    def moved(self, rows: slice, change: Tensor) -> None:
        self.overlaps.baddbmm_(self.right[:, rows].mT, change)


class _Blocks(Schedule):
    def __init__(self, system: SpinSystem, source: _Source, components: int = 1) -> None:
        super().__init__(system)
        self.source = source
        # Q of the source.
        self.components = components
        self.blocks = [
            range(first, min(first + _BLOCK, system.num_spins))
            for first in range(0, system.num_spins, _BLOCK)
        ]
        self.inside = [source.inside(self._rows(block)) for block in self.blocks]

    def _rows(self, block: range) -> slice:
        return slice(block.start * self.components, block.stop * self.components)

    def _sweep(self, spins: Tensor, update: Update, count: int, ahead: Ahead | None) -> None:
        num_chains, systems, num_spins, dim = spins.shape
        # Site by site, and of each the columns of the source: a row is what one site needs.
        shared = self.source.systems == 1
        groups, members = (1, num_chains * systems) if shared else (systems, num_chains)
        if shared:
            grouped = spins.flatten(0, 1).movedim(0, 1).unsqueeze(0)
        else:
            grouped = spins.permute(1, 2, 0, 3)
        # (groups, N, members, D), or D before the members for matrix-valued couplings
        across = self.components > 1
        # A copy also where it is in order already: it is written back into the spins.
        grouped = (grouped.mT if across else grouped).clone(memory_format=torch.contiguous_format)
        state = grouped.view(groups, num_spins * self.components, -1)

        def outside(rows: Tensor) -> Tensor:
            """(groups, Q, columns) of one site as (chains, systems, 1, D)."""
            own = rows.view(groups, dim, members).mT if across else rows.view(groups, members, dim)
            if shared:
                return own.reshape(num_chains, systems, 1, dim)
            return own.transpose(0, 1).unsqueeze(2)

        def within(site: Tensor) -> Tensor:
            """The inverse of ``outside``."""
            site = site.squeeze(2)
            own = site.reshape(1, members, dim) if shared else site.transpose(0, 1)
            return (own.mT if across else own).reshape(groups, self.components, -1)

        for _ in range(count):
            self.source.begin(state)
            for block, inside in zip(self.blocks, self.inside, strict=True):
                if ahead is not None:
                    ahead(len(block))
                rows = self._rows(block)
                force = self.source.force(rows, state)
                change = torch.zeros_like(force)
                for place, site in enumerate(block):
                    first, last = place * self.components, (place + 1) * self.components
                    felt = force[:, first:last]
                    if place:
                        felt = torch.baddbmm(felt, inside[:, first:last, :first], change[:, :first])
                    here = slice(site * self.components, (site + 1) * self.components)
                    old = state[:, here]
                    total = outside(felt) + self.field[:, site : site + 1]
                    new = update(outside(old), total)
                    if self.absent is not None:
                        new = new.masked_fill(self.absent[:, site : site + 1, None], 0.0)
                    now = within(new)
                    torch.sub(now, old, out=change[:, first:last])
                    old.copy_(now)
                self.source.moved(rows, change)
        grouped = grouped.mT if across else grouped
        if shared:
            spins.copy_(grouped.view(num_spins, num_chains, systems, dim).permute(1, 2, 0, 3))
        else:
            spins.copy_(grouped.permute(2, 0, 1, 3))


def _factors(
    couplings: CurieWeiss | LowRank, cut: Tensor | None, lead: torch.Size
) -> tuple[Tensor, Tensor]:
    """J = left right^T minus its diagonal, each (systems or 1, N, r)."""
    if isinstance(couplings, CurieWeiss):
        bond = (couplings.strength.detach() / couplings.num_spins)[..., None, None]
        right = bond.new_ones(couplings.num_spins, 1)
        left = bond * right
    else:
        left, middle = (t.detach() for t in couplings.quadratic_form())
        left, right = left @ middle, left
    left, right = _per_system(left, lead, 2), _per_system(right, lead, 2)
    if cut is not None:
        left, right = (t.masked_fill(cut[..., None], 0.0) for t in (left, right))
    systems = max(len(left), len(right))
    return left.expand(systems, -1, -1), right.expand(systems, -1, -1)


# --- by colours ---------------------------------------------------------------------------------


class _Group:
    """Sites of one colour, their neighbours (sites, z), and how strongly each counts: None (all
    alike), or (systems or 1, sites, z)."""

    def __init__(self, sites: Tensor, neighbours: Tensor, weights: Tensor | None) -> None:
        self.sites = sites
        self.neighbours = [neighbour.contiguous() for neighbour in neighbours.unbind(-1)]
        # z times (sites, chains, systems, D)
        self.weights = (
            None if weights is None else list(weights.permute(2, 1, 0)[:, :, None, :, None])
        )


class _Coloured(Schedule):
    def __init__(self, system: SpinSystem, groups: list[_Group], weight: Tensor | None) -> None:
        """``weight`` (systems or 1), or None for one, multiplies the weights of all groups."""
        super().__init__(system)
        self.groups = groups
        self.weight = None if weight is None else weight[:, None]
        # Sites come first, here and in the sweep: to gather rows is to copy them, whole.
        self.fields = [self.field[:, group.sites].transpose(0, 1) for group in groups]
        self.away = [
            None if self.absent is None else self.absent[:, group.sites].T[:, None, :, None]
            for group in groups
        ]

    def _sweep(self, spins: Tensor, update: Update, count: int, ahead: Ahead | None) -> None:
        rows = spins.permute(2, 0, 1, 3).contiguous()
        for _ in range(count):
            for group, field, absent in zip(self.groups, self.fields, self.away, strict=True):
                force = self._felt(rows, group).add_(field[:, None])
                old = rows.index_select(0, group.sites)
                new = update(old.permute(1, 2, 0, 3), force.permute(1, 2, 0, 3))
                new = new.permute(2, 0, 1, 3)
                if absent is not None:
                    new = new.masked_fill(absent, 0.0)
                rows.index_copy_(0, group.sites, new)
        spins.copy_(rows.permute(1, 2, 0, 3))

    def _felt(self, rows: Tensor, group: _Group) -> Tensor:
        """The force of the neighbours on the sites of a colour, (sites, chains, systems, D)."""
        total: Tensor | None = None
        for place, neighbour in enumerate(group.neighbours):
            spin = rows.index_select(0, neighbour)
            if group.weights is not None:
                spin.mul_(group.weights[place])
            total = spin if total is None else total.add_(spin)
        if total is None:
            return rows.new_zeros(len(group.sites), *rows.shape[1:])
        return total if self.weight is None else total.mul_(self.weight)


def lattice_colours(shape: Sequence[int], periodic: Sequence[bool]) -> list[Tensor]:
    """Sites of a lattice of which no two are neighbours: two sets, or three where a periodic
    length is odd."""
    odd = any(length % 2 and wrap for length, wrap in zip(shape, periodic, strict=True))
    label = torch.zeros(*shape, dtype=torch.int64)
    for axis, (length, wrap) in enumerate(zip(shape, periodic, strict=True)):
        # Labels of neighbours along a direction differ modulo the number of colours: so do sums.
        along = torch.arange(length) % 2
        if wrap and length % 2:
            along[-1] = 2
        label += along.view(-1, *[1] * (len(shape) - 1 - axis))
    label = label.flatten() % (3 if odd else 2)
    found = [(label == colour).nonzero().flatten() for colour in range(3 if odd else 2)]
    return [sites for sites in found if len(sites)]


def lattice_neighbours(
    shape: Sequence[int], periodic: Sequence[bool], sites: Tensor
) -> tuple[Tensor, Tensor]:
    """Neighbours (sites, z), and whether each is there: an open edge names some other site."""
    number = torch.arange(math.prod(shape)).view(*shape)
    neighbours, there = [], []
    for axis, (length, wrap) in enumerate(zip(shape, periodic, strict=True)):
        for step, edge in ((1, 0), (-1, length - 1)):
            inner = torch.ones(*shape, dtype=torch.bool)
            if not wrap:
                inner.select(axis, edge).fill_(False)
            neighbours.append(number.roll(step, axis).flatten()[sites])
            there.append(inner.flatten()[sites])
    return torch.stack(neighbours, -1), torch.stack(there, -1)


def colouring(bonds: Tensor, most: int) -> list[Tensor] | None:
    """Colours of a graph by saturation, or None if they are more than ``most``.

    Two for every bipartite graph; else few, not always the fewest. O(N^2).

    Source: Brelaz, Comm. ACM 22, 251 (1979).

    Args:
        bonds: bool (N, N), symmetric.
        most: number of colours.
    """
    graph = bonds.cpu().numpy().copy()
    np.fill_diagonal(graph, False)
    num_sites = len(graph)
    colour = np.full(num_sites, -1)
    seen = np.zeros((num_sites, most + 1), dtype=bool)
    # The most different colours around, then the most neighbours, go first.
    urgency = graph.sum(1).astype(np.int64)
    for _ in range(num_sites):
        site = int(np.argmax(urgency))
        choice = int(np.argmin(seen[site]))
        if choice >= most:
            return None
        colour[site] = choice
        urgency[site] = -1
        fresh = graph[site] & ~seen[:, choice] & (colour < 0)
        urgency[fresh] += num_sites
        seen[graph[site], choice] = True
    sets = (np.flatnonzero(colour == c) for c in itertools.count())
    return [
        torch.from_numpy(s).to(bonds.device)
        for s in itertools.takewhile(lambda s: s.size > 0, sets)
    ]


def _neighbours(matrix: Tensor, bonds: Tensor, sites: Tensor) -> _Group:
    """The neighbours of a colour in a matrix (systems or 1, N, N)."""
    linked = bonds[sites]
    most = max(int(linked.sum(-1).max()), 1)
    neighbours = linked.int().topk(most, dim=-1).indices
    weights = matrix[:, sites].gather(-1, neighbours.expand(len(matrix), -1, -1))
    return _Group(sites, neighbours, weights)


# --- couplings ----------------------------------------------------------------------------------


def _unmasked(system: SpinSystem) -> tuple[Couplings, Tensor | None]:
    """The couplings without masks, and the sites (systems, N) that are cut off though present.

    An absent site has a spin of zero, which needs no mask.
    """
    couplings, cut = system.couplings, None
    while isinstance(couplings, Masked):
        absent = couplings.absent.expand(*system.batch_shape, system.num_spins)
        extra = absent if system.mask is None else absent & ~system.mask
        cut = extra if cut is None else cut | extra
        couplings = couplings.couplings
    if cut is None or not bool(cut.any()):
        return couplings, None
    if not isinstance(couplings, Lattice | CurieWeiss):
        return system.couplings, None
    return couplings, cut.reshape(system.batch_shape.numel(), system.num_spins)


def _per_system(tensor: Tensor, lead: torch.Size, tail: int) -> Tensor:
    """One leading axis: of length 1 where all systems share, else of all systems."""
    own = tensor.shape[tensor.ndim - tail :]
    if tensor.shape[: tensor.ndim - tail].numel() == 1:
        return tensor.reshape(1, *own)
    return tensor.expand(*lead, *own).reshape(lead.numel(), *own)
