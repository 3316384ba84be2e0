r"""What is measured on the spins of Markov chains, and its sums over bins of a run.

A spin's neighbours fix its law, so that its mean given them,
:math:`\mu_i = \langle S_i \mid S_{j \ne i}\rangle = m(\beta H_i)`, has the expectation of the spin
itself and less noise (Rao & Blackwell):

.. math::
    \langle S_i\rangle = \langle \mu_i\rangle,\qquad
    \langle S_{ia} S_{jb}\rangle = \langle \mu_{ia} S_{jb}\rangle \quad (i \ne j),\qquad
    U = -\tfrac12 \sum_i \langle \mu_i \cdot (H_i + h_i)\rangle .

These *conditional* estimators and the plain ones, with :math:`S_i` for :math:`\mu_i`, are the same
code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from spinformer.sampling.chains import Chains
from spinformer.spins.couplings import Couplings, Lattice, Masked
from spinformer.spins.site import LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem
from spinformer.thermo.statistics import BinnedMean

__all__ = [
    "SCALARS",
    "Look",
    "Observables",
    "Pairs",
    "Record",
    "Recorder",
    "binned_means",
    "lattice_of",
    "scalar_means",
    "structure_of",
]

Pairs = Literal["none", "scalar", "components"]

# Bins of a chain, and the fewest that pairs are kept in.
_BINS, _FEWEST_BINS = 32, 4


@dataclass
class Look:
    """One configuration, or many, as it is measured.

    Attributes:
        spins: S, (..., N, D).
        means: the mean of each spin given the others, or S itself, (..., N, D).
        fields: beta H, (..., N, D).
        energy: E(S), (...).
        smooth_energy: the conditional estimator of U, or E(S), (...).
        moment: sum of all spins, (..., D).
    """

    spins: Tensor
    means: Tensor
    fields: Tensor
    energy: Tensor
    smooth_energy: Tensor
    moment: Tensor


class Observables:
    """What to measure on the configurations of a system.

    Args:
        system: the system.
        conditional: use the mean of each spin given the others.
        pairs: ``"scalar"``: :math:`S_i \\cdot S_j` of all pairs, N^2 numbers and N^2 D operations a
            measurement. ``"components"``: :math:`S_{ia} S_{jb}`, N^2 D^2 of both.
        structure: squared amplitudes of the waves of a lattice.
    """

    def __init__(
        self, system: SpinSystem, *, conditional: bool, pairs: Pairs, structure: bool
    ) -> None:
        self.system = system
        self.conditional = conditional
        self.pairs = pairs
        self.structure = structure
        self._site = sampled_law(system.site)

    def of(self, system: SpinSystem) -> Observables:
        """The same observables of another system of the same shape."""
        return Observables(
            system, conditional=self.conditional, pairs=self.pairs, structure=self.structure
        )

    def look(self, spins: Tensor) -> Look:
        """Look at configurations (..., *batch, N, D)."""
        system = self.system
        force = system.force(spins)
        fields = system.beta[..., None, None] * force
        # S (H + h) = S J S + 2 h S
        both = force + system.field
        energy = -(spins * both).sum((-2, -1)) / 2
        means, smooth = spins, energy
        if self.conditional:
            means = self._site.mean(fields)
            smooth = -(means * both).sum((-2, -1)) / 2
        return Look(spins, means, fields, energy, smooth, spins.sum(-2))

    def arrays(self, look: Look) -> dict[str, Tensor]:
        """What is measured at every site, (..., *batch, *shape).

        ``spin`` (N, D), and where asked for ``pair`` (N, N), ``components`` (N D, N D) and
        ``structure`` (*lattice).
        """
        found = {"spin": look.means}
        if self.pairs != "none":
            own = self._own(look)
            found["pair"] = self._pair(look.means @ look.spins.mT, own)
            if self.pairs == "components":
                left, right = look.means.flatten(-2), look.spins.flatten(-2)
                found["components"] = self._components(
                    left[..., :, None] * right[..., None, :], own
                )
        if self.structure:
            found["structure"] = self._structure(look)
        return found

    def averages(self, look: Look, weights: Tensor) -> dict[str, Tensor]:
        """The means of :meth:`arrays` over configurations (S, *batch) of given weights.

        (*batch, *shape), without N^2 numbers for each of them.
        """
        found = {"spin": _weighted(look.means, weights)}
        if self.pairs != "none":
            own = _weighted(self._own(look), weights)
            left = look.means * weights[..., None, None]
            found["pair"] = self._pair(_beside(left) @ _beside(look.spins).mT, own)
            if self.pairs == "components":
                both = _beside(left.flatten(-2)[..., None])
                both = both @ _beside(look.spins.flatten(-2)[..., None]).mT
                found["components"] = self._components(both, own)
        if self.structure:
            found["structure"] = _weighted(self._structure(look), weights)
        return found

    def _own(self, look: Look) -> Tensor:
        """S_ia S_ib of every site given the others, (..., N, D, D), or S_i^2 if no more is used,
        (..., N)."""
        present = self.system.present
        if self.pairs == "components":
            own = look.means[..., :, None] * look.means[..., None, :]
            if self.conditional:
                own = own + self._site.covariance(look.fields)
            return own if present is None else own * present[..., None, None]
        if self._site.radius is not None:
            square = torch.full_like(look.means[..., 0], self._site.radius**2)
        else:
            square = look.means.square().sum(-1)
            if self.conditional:
                square = square + self._site.covariance(look.fields).diagonal(dim1=-2, dim2=-1).sum(
                    -1
                )
        return square if present is None else square * present

    def _pair(self, products: Tensor, own: Tensor) -> Tensor:
        """Symmetric, with the true square of every spin on the diagonal."""
        if self.pairs == "components":
            own = own.diagonal(dim1=-2, dim2=-1).sum(-1)
        products = (products + products.mT) / 2
        products.diagonal(dim1=-2, dim2=-1).copy_(own)
        return products

    def _components(self, products: Tensor, own: Tensor) -> Tensor:
        n, d = own.shape[-3:-1]
        products = (products + products.mT) / 2
        blocks = products.unflatten(-1, (n, d)).unflatten(-3, (n, d))
        blocks.diagonal(dim1=-4, dim2=-2).copy_(own.movedim(-3, -1))
        return products

    def _structure(self, look: Look) -> Tensor:
        lattice = lattice_of(self.system.couplings)
        assert lattice is not None
        return structure_of(look.spins, lattice.shape)


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Sum over the first axis of values (S, *batch, *shape) times weights (S, *batch)."""
    axes = [1] * (values.ndim - weights.ndim)
    return (values * weights.reshape(*weights.shape, *axes)).sum(0)


def _beside(values: Tensor) -> Tensor:
    """(S, *batch, N, D) -> (*batch, N, S D): a product of two of these also sums over S."""
    return values.movedim(0, -2).flatten(-2)


def sampled_law(site: SiteLaw) -> SiteLaw:
    """The law that is sampled: of a large-D sphere, whose response is approximate, the exact."""
    return Sphere(site.dim, site.radius) if isinstance(site, LargeDSphere) else site


def lattice_of(couplings: Couplings) -> Lattice | None:
    """The lattice that the couplings are on, if they are."""
    while isinstance(couplings, Masked):
        couplings = couplings.couplings
    return couplings if isinstance(couplings, Lattice) else None


def structure_of(spins: Tensor, shape: Sequence[int]) -> Tensor:
    r""":math:`|\sum_i S_i e^{-i q r_i}|^2 / N` of every wave q of a lattice, (..., *shape)."""
    grid = spins.reshape(*spins.shape[:-2], *shape, spins.shape[-1])
    waves = torch.fft.fftn(grid, dim=tuple(range(-1 - len(shape), -1)))
    power: Tensor = (waves.real.square() + waves.imag.square()).sum(-1) / spins.shape[-2]
    return power


SCALARS = (
    "energy",
    "smooth_energy",
    "energy_square",
    "moment",
    "moment_outer",
    "absolute",
    "square",
    "fourth",
)


def scalar_means(
    names: Sequence[str],
    series: Mapping[str, Tensor],
    centre: Mapping[str, Tensor],
    weights: Tensor | None = None,
) -> list[Tensor]:
    """Means over time of the quantities that all scalar observables are made of.

    Energies and moments are measured from ``centre``: the difference of two large squares would
    lose its digits.

    Args:
        names: which, of :data:`SCALARS`.
        series: ``energy`` and ``smooth_energy`` (..., T), ``moment`` (..., T, D).
        centre: ``energy`` (...) and ``moment`` (..., D).
        weights: (..., T), of sum one; None: all alike.
    """
    moment = series["moment"]
    turned = moment - centre["moment"][..., None, :]
    square = moment.square().sum(-1)
    share = torch.full_like(square, 1 / max(square.shape[-1], 1)) if weights is None else weights

    def mean(values: Tensor) -> Tensor:
        return (share * values).sum(-1)

    def energy(name: str) -> Tensor:
        return series[name] - centre["energy"][..., None]

    found: dict[str, Callable[[], Tensor]] = {
        "energy": lambda: mean(energy("energy")),
        "smooth_energy": lambda: mean(energy("smooth_energy")),
        "energy_square": lambda: mean(energy("energy").square()),
        "moment": lambda: (share[..., None, :] @ turned)[..., 0, :],
        "moment_outer": lambda: (share[..., None] * turned).mT @ turned,
        "absolute": lambda: mean(moment.norm(dim=-1)),
        "square": lambda: mean(square),
        "fourth": lambda: mean(square.square()),
    }
    return [found[name]() for name in names]


class Recorder:
    """Takes down what chains do: series of scalars, means of arrays over bins, configurations.

    Args:
        chains: the chains.
        observables: what to measure.
        measurements: how many there will be.
        keep: how many configurations to keep of each chain, evenly spaced.
    """

    def __init__(
        self, chains: Chains, observables: Observables, measurements: int, keep: int = 0
    ) -> None:
        self.chains = chains
        self.observables = observables
        self.measurements = measurements
        self.keep = min(keep, measurements)
        self.done = 0
        lead, dim = chains.spins.shape[:-2], chains.spins.shape[-1]

        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=chains.spins.device)

        self._series = {
            "energy": empty(measurements, *lead),
            "moment": empty(measurements, *lead, dim),
        }
        if observables.conditional:
            self._series["smooth_energy"] = empty(measurements, *lead)
        self.means: dict[str, BinnedMean] = {}
        self._kept = chains.spins.new_zeros(self.keep, *chains.spins.shape)

    @torch.no_grad()
    def record(self) -> None:
        """Measure the chains as they are now."""
        t = self.done
        look = self.observables.look(self.chains.spins)
        self._series["energy"][t] = look.energy
        self._series["moment"][t] = look.moment
        if self.observables.conditional:
            self._series["smooth_energy"][t] = look.smooth_energy
        for name, value in self.observables.arrays(look).items():
            if name not in self.means:
                self.means[name] = BinnedMean(self._bins(name))
            self.means[name].add(value)
        self.done += 1
        if self.num_kept > t * self.keep // self.measurements:
            self._kept[self.num_kept - 1] = self.chains.spins

    def _bins(self, name: str) -> int:
        """Bins of every chain: N^2 numbers are kept as often as an error over all chains needs."""
        if name not in ("pair", "components"):
            return _BINS
        return min(_BINS, max(_FEWEST_BINS, 2 * _BINS // self.chains.num_chains // 2 * 2))

    @property
    def num_kept(self) -> int:
        """Configurations of each chain that were kept so far."""
        return self.done * self.keep // self.measurements

    @property
    def series(self) -> dict[str, Tensor]:
        """What was measured at every time, (chains, *batch, T) and (chains, *batch, T, D)."""
        axes = self.chains.spins.ndim - 2
        return {name: values[: self.done].movedim(0, axes) for name, values in self._series.items()}

    @property
    def samples(self) -> Tensor:
        """Configurations that were kept, (chains, *batch, k, N, D)."""
        return self._kept[: self.num_kept].movedim(0, -3)

    def state(self) -> dict[str, Tensor]:
        """All that was taken down so far."""
        found = {f"series.{name}": values[: self.done] for name, values in self._series.items()}
        found["kept"] = self._kept[: self.num_kept]
        for name, mean in self.means.items():
            found |= {f"means.{name}.{part}": value for part, value in mean.state().items()}
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave."""
        self.done = len(state["series.energy"])
        for name, values in self._series.items():
            values[: self.done] = state[f"series.{name}"]
        self._kept[: self.num_kept] = state["kept"]
        self.means = binned_means(state)


@dataclass
class Record:
    """What a run took down.

    Attributes:
        series: name -> (chains, *batch, T) or (chains, *batch, T, D): ``energy``, ``moment`` and,
            of conditional estimators, ``smooth_energy``.
        means: arrays in bins.
        samples: configurations that were kept, (chains, *batch, k, N, D).
        keys: the seeds of all chains, (chains, *batch).
        every: sweeps between measurements.
        interrupted: whether the run was stopped by the user.
        reports: what the moves counted, name -> (chains, *batch).
        configuration: how the run was made, for the record.
    """

    series: dict[str, Tensor]
    means: dict[str, BinnedMean]
    samples: Tensor
    keys: Tensor
    every: int
    interrupted: bool
    reports: dict[str, Tensor]
    configuration: dict[str, Any]


def binned_means(state: Mapping[str, Tensor]) -> dict[str, BinnedMean]:
    """The means of arrays in what :meth:`Recorder.state` gave."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        if key.startswith("means."):
            _, name, part = key.split(".")
            parts.setdefault(name, {})[part] = value
    means = {}
    for name, state_of_one in parts.items():
        means[name] = BinnedMean()
        means[name].restore(state_of_one)
    return means
