r"""Moves of one spin at a time in the force of the others: heat bath, Metropolis, over-relaxation.

All of them see one spin S with weight :math:`e^{b \cdot S}`, :math:`b = \beta H`, under its own
measure, and leave that law invariant. Which spins are updated together is the matter of
:mod:`spinformer.sampling.schedule`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from spinformer.errors import nearest, strict_options
from spinformer.sampling.chains import Chains, Kernel, Move
from spinformer.sampling.checkerboard import IsingCheckerboard, fits
from spinformer.sampling.schedule import schedule
from spinformer.spins.site import Gaussian, Ising, Noise, to_sphere
from spinformer.spins.streams import Streams

__all__ = ["HeatBath", "Metropolis", "OverRelaxation"]


@strict_options
class HeatBath(Move):
    r"""Every spin is drawn anew from its law in the force of the others.

    .. math:: S_i \sim e^{\beta H_i \cdot S}\, d\mu(S)

    exactly: von Mises-Fisher on spheres of any dimension, a biased coin for Ising spins. It has no
    parameter and rejects nothing. The choice wherever nothing is known.
    """

    def __init__(self) -> None:
        pass

    def __repr__(self) -> str:
        return "HeatBath()"

    def start(self, chains: Chains) -> Kernel:
        chains.system.require_symmetric("HeatBath")
        return IsingCheckerboard(chains) if fits(chains.system) else _HeatBath(chains)


@strict_options
class Metropolis(Move):
    r"""A proposal near the spin, accepted with probability
    :math:`\min(1, e^{\beta H_i \cdot (S' - S)})`.

    For Ising spins the proposal is a flip. For vectors the heat bath moves further in the same
    time; this is the check on it.

    Args:
        cap: how far proposals go: the root-mean-square length of a Gaussian step, in units of that
            of the spin; on a sphere, the end of the step is scaled back to it. None: learned while
            warming up, for each chain, such that half of the proposals are accepted. ``"uniform"``:
            proposals do not depend on the spin; they are free spins. Ising spins have but one
            other state and take None only.

    Raises:
        ValueError: a cap that is no positive number, or one for Ising spins.
    """

    def __init__(self, cap: float | Literal["uniform"] | None = None) -> None:
        if isinstance(cap, str):
            if cap != "uniform":
                raise ValueError(f"cap={cap!r}{nearest(cap, ('uniform',))}, a number or None")
        elif cap is not None and not (cap > 0 and math.isfinite(cap)):
            raise ValueError(
                f"cap={cap!r}: give a positive number, 'uniform', or None, which adapts"
            )
        self.cap = cap

    def __repr__(self) -> str:
        return f"Metropolis(cap={self.cap!r})"

    def start(self, chains: Chains) -> Kernel:
        chains.system.require_symmetric("Metropolis")
        if isinstance(chains.system.site, Ising) and self.cap is not None:
            raise ValueError(
                f"cap={self.cap!r}: an Ising spin has one other state to go to; leave cap=None"
            )
        return _Metropolis(chains, self.cap)


@strict_options
class OverRelaxation(Move):
    r"""Every spin is reflected in the direction of its force,

    .. math:: S_i \to 2\,\frac{S_i \cdot H_i}{H_i \cdot H_i} H_i - S_i,

    which keeps the energy to rounding and goes as far as that allows. Without random numbers it is
    several times as fast as a heat bath, and carries long waves on instead of letting them diffuse.
    **Alone it is not ergodic**: the energy never changes. Combine it with :class:`HeatBath`.

    Source: Creutz, Phys. Rev. D 36, 515 (1987).

    Raises:
        ValueError: Ising spins, which it would leave as they are, or Gaussian ones, whose length
            it would never change.
    """

    def __init__(self) -> None:
        pass

    def __repr__(self) -> str:
        return "OverRelaxation()"

    def start(self, chains: Chains) -> Kernel:
        site = chains.system.site
        if isinstance(site, Ising | Gaussian):
            raise ValueError(
                f"OverRelaxation reflects spins on a sphere, not {site!r}: use HeatBath"
            )
        chains.system.require_symmetric("OverRelaxation")
        return _OverRelaxation(chains)


class _Local(Kernel):
    """A kernel that treats spins given the force on them."""

    def __init__(self, chains: Chains) -> None:
        super().__init__(chains)
        self._schedule = schedule(chains.system)
        self._site = chains.system.site

    @torch.no_grad()
    def sweep(self, count: int = 1) -> None:
        if not self.chains.spins.numel():
            return
        own = self.chains.streams
        axes = (self.chains.num_chains, -1)
        self._streams = Streams(own.keys.reshape(axes), own.position)
        self._beta = self.chains.beta.reshape(*axes, 1, 1)
        self._schedule.sweep(self.chains, self._update, count, self._ahead)
        own.position = self._streams.position

    def _ahead(self, sites: int) -> None:
        """So many sites follow, one by one."""

    @abc.abstractmethod
    def _update(self, spins: Tensor, force: Tensor) -> Tensor:
        """New spins, see :data:`~spinformer.sampling.schedule.Update`."""


class _HeatBath(_Local):
    def __init__(self, chains: Chains) -> None:
        super().__init__(chains)
        self._noises: Iterator[Noise] = iter(())

    def _ahead(self, sites: int) -> None:
        noise = self._site.noise((sites,), self._streams, self.chains.spins.dtype)
        self._noises = zip(*(part.split(1, 2) for part in noise), strict=True)

    def _update(self, spins: Tensor, force: Tensor) -> Tensor:
        b = self._beta * force
        noise = next(self._noises, None)
        return self._site.draw(b, self._streams) if noise is None else self._site.place(b, noise)


class _OverRelaxation(_Local):
    def sweep(self, count: int = 1) -> None:
        super().sweep(count)
        # A reflection keeps lengths to rounding only, and every one adds to the last.
        spins = self.chains.spins
        assert self._site.radius is not None
        spins.copy_(to_sphere(spins, self._site.radius))

    def _update(self, spins: Tensor, force: Tensor) -> Tensor:
        square = torch.linalg.vecdot(force, force)
        # Without a force every reflection is as good: S goes to -S.
        square = square.masked_fill_(square == 0, 1.0)
        along = torch.linalg.vecdot(spins, force).mul_(2).div_(square)
        return torch.addcmul(-spins, along[..., None], force)


# Rates to which caps are adapted, and between which they stay: beyond 8 a proposal is as good as
# uniform, and 1e-4 is the thermal motion at beta H R = 1e8.
_WANTED, _NARROWEST, _WIDEST = 0.5, 1e-4, 8.0


class _Metropolis(_Local):
    def __init__(self, chains: Chains, cap: float | Literal["uniform"] | None) -> None:
        super().__init__(chains)
        shape = chains.beta.shape
        self._uniform = cap == "uniform"
        self._flips = isinstance(self._site, Ising)
        self._adapts = cap is None and not self._flips
        start = 1.0 if cap is None or isinstance(cap, str) else cap
        self._cap = torch.full(shape, start, dtype=chains.spins.dtype, device=chains.spins.device)
        # Counts are exact in float64 up to 9e15.
        self._accepted = torch.zeros(shape, dtype=torch.float64, device=chains.spins.device)
        self._sweeps = 0
        self._lessons = 0
        present = chains.system.num_present.double().expand(shape)
        self._per_sweep = present.clamp(min=1)  # of nothing, nothing is accepted

    def sweep(self, count: int = 1) -> None:
        axes = (self.chains.num_chains, -1)
        if self.chains.spins.numel():
            self._width = (self._cap * self._site.scale).reshape(*axes, 1, 1)
            self._count = self._accepted.view(axes)
        super().sweep(count)
        self._sweeps += count

    def _update(self, spins: Tensor, force: Tensor) -> Tensor:
        b = self._beta * force
        proposal, log_accept = self._propose(spins)
        log_accept = torch.linalg.vecdot(b, proposal - spins).add_(log_accept)
        sites = spins.shape[2:-1]
        threshold = self._streams.uniform(*sites, dtype=spins.dtype).log_()
        accepted = threshold < log_accept
        new = torch.where(accepted[..., None], proposal, spins)
        # In a force that is not finite no spin stays as it was, as if all were well.
        new.masked_fill_(log_accept.isnan()[..., None], torch.nan)
        if self.chains.system.mask is not None:
            accepted &= torch.linalg.vecdot(spins, spins) > 0
        self._count += accepted.sum(-1)
        return new

    def _propose(self, spins: Tensor) -> tuple[Tensor, Tensor | float]:
        """Proposals, and the logarithm of the ratio of their measures."""
        if self._flips:
            return -spins, 0.0
        if self._uniform:
            return self._site.draw(torch.zeros_like(spins), self._streams), 0.0
        step = self._streams.normal(*spins.shape[2:], dtype=spins.dtype)
        moved = step.mul_(self._width).add_(spins)
        square = torch.linalg.vecdot(moved, moved)
        if isinstance(self._site, Gaussian):
            change = torch.linalg.vecdot(spins, spins).sub_(square)
            return moved, change.div_(2 * self._site.variance)
        assert self._site.radius is not None
        return moved.mul_(self._site.radius * square.rsqrt_()[..., None]), 0.0

    def adapt(self) -> None:
        if not (self._adapts and self._sweeps):
            return
        self._lessons += 1
        # Steps that add up to infinity, and shrink: Robbins & Monro, Ann. Math. Stat. 22, 400.
        gain = 3 / math.sqrt(self._lessons)
        change = torch.exp(gain * (self._rate() - _WANTED)).to(self._cap)
        self._cap.mul_(change).clamp_(_NARROWEST, _WIDEST)
        self.reset_report()

    def _rate(self) -> Tensor:
        return self._accepted / (self._per_sweep * max(self._sweeps, 1))

    def report(self) -> dict[str, Tensor]:
        rate = self._rate() if self._sweeps else torch.full_like(self._accepted, torch.nan)
        found = {"acceptance": rate}
        return found | {"cap": self._cap.clone()} if self._adapts else found

    def reset_report(self) -> None:
        self._accepted.zero_()
        self._sweeps = 0

    def state(self) -> dict[str, Tensor]:
        return {
            "cap": self._cap.clone(),
            "accepted": self._accepted.clone(),
            "sweeps": torch.tensor(self._sweeps),
            "lessons": torch.tensor(self._lessons),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        self._cap.copy_(state["cap"])
        self._accepted.copy_(state["accepted"])
        self._sweeps, self._lessons = int(state["sweeps"]), int(state["lessons"])
