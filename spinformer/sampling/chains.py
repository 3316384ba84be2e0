"""The state of many Markov chains, and what changes it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from spinformer.errors import nearest
from spinformer.spins.streams import Streams
from spinformer.spins.system import SpinSystem

__all__ = ["Chains", "Kernel", "Move", "Start"]

Start = Literal["random", "ordered"]


class Chains:
    """Markov chains of one or many systems, advanced together.

    Attributes:
        system: what is sampled, of batch shape ``batch``.
        spins: (chains, *batch, N, D), changed in place; zero at absent sites.
        beta: (chains, *batch): that of the system, until tempering or annealing sets another.
        streams: the random numbers of every chain, keys (chains, *batch).
        sweeps: how many were done since the start.
    """

    def __init__(
        self, system: SpinSystem, spins: Tensor, streams: Streams, *, sweeps: int = 0
    ) -> None:
        self.system = system
        self.spins = spins
        self.beta = system.beta.detach().expand(spins.shape[:-2]).clone()
        self.streams = streams
        self.sweeps = sweeps

    @classmethod
    def start(
        cls,
        system: SpinSystem,
        chains: int,
        seed: int | Sequence[int] | Tensor | torch.Generator,
        initial: Start | Tensor = "random",
    ) -> Chains:
        """Chains at the beginning of a run.

        Args:
            system: what to sample.
            chains: how many of each system.
            seed: see :meth:`Streams.from_seed`, for keys of shape (chains, *batch).
            initial: ``"random"``: free spins. ``"ordered"``: all along the first axis. Or spins
                that broadcast to (chains, *batch, N, D).

        Raises:
            ValueError: an unknown start, or spins that are not of the site's length.
        """
        shape = (chains, *system.batch_shape, system.num_spins, system.dim)
        streams = Streams.from_seed(seed, shape[:-2], system.field.device)
        if isinstance(initial, Tensor):
            spins = system.starting_spins(initial, shape[:-2])
        elif initial == "random":
            free = torch.zeros(shape, dtype=system.field.dtype, device=system.field.device)
            spins = system.site.sample(free, streams)
        elif initial == "ordered":
            spins = torch.zeros(shape, dtype=system.field.dtype, device=system.field.device)
            spins[..., 0] = system.site.scale if system.site.radius is None else system.site.radius
        else:
            raise ValueError(f"initial={initial!r}{nearest(str(initial), ('random', 'ordered'))}")
        if system.mask is not None:
            spins = spins.masked_fill(system.mask[..., None], 0.0)
        return cls(system, spins, streams)

    @property
    def num_chains(self) -> int:
        """Chains of each system."""
        return self.spins.shape[0]

    def force(self) -> Tensor:
        """H_i = h_i + sum_j J_ij S_j of every chain, (chains, *batch, N, D)."""
        return self.system.force(self.spins)

    def energy(self) -> Tensor:
        """E(S) of every chain, (chains, *batch)."""
        return self.system.energy(self.spins)


class Move(abc.ABC):
    """A way to change spins that leaves the Boltzmann law of a system invariant; options only."""

    @abc.abstractmethod
    def start(self, chains: Chains) -> Kernel:
        """The move for these chains.

        Raises:
            ValueError: it does not apply to this system; the message names a move that does.
        """


class Kernel(abc.ABC):
    """A move at work on chains, with whatever it keeps from sweep to sweep.

    What a chain does may depend on its own spins and stream only: not on its neighbours in the
    batch, nor on how many there are.
    """

    def __init__(self, chains: Chains) -> None:
        self.chains = chains

    @abc.abstractmethod
    def sweep(self, count: int = 1) -> None:
        """Do so many sweeps: each treats every spin once on average. ``chains.spins`` is then
        current; ``chains.beta`` may have been changed by others since the last call."""

    def adapt(self) -> None:  # noqa: B027 (most moves have nothing to learn)
        """Learn from the sweeps since the last call. Called while warming up and never after:
        a step that depends on the past has no invariant law."""

    def report(self) -> dict[str, Tensor]:
        """Named statistics of the sweeps since warming up, each (chains, *batch)."""
        return {}

    def reset_report(self) -> None:  # noqa: B027
        """Forget the statistics: called when warming up ends."""

    def state(self) -> dict[str, Tensor]:
        """What a resumed run must find again, such as an adapted step size."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Take up what :meth:`state` gave."""
