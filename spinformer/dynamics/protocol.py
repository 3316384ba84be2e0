"""Protocols: what is done to a system while it moves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spinformer.spins.system import SpinSystem

__all__ = ["Field", "Protocol", "Undergoing", "triangle_wave"]

Field = Tensor | Callable[[int], Tensor] | None
Undergoing = SpinSystem | Sequence[SpinSystem]


def triangle_wave(field: Tensor, period: int, cycles: int = 1) -> Tensor:
    """A schedule that takes a field from itself to its opposite and back, at constant speed.

    Args:
        field: the external field at the turning points, for example (N, D) or (..., N, D).
        period: steps of a cycle, an even number >= 2.
        cycles: how many.

    Returns:
        (period * cycles, ..., N, D), for the ``field`` of a run.
    """
    if not isinstance(period, int) or isinstance(period, bool) or period < 2 or period % 2:
        raise ValueError(f"period={period!r} must be an even integer >= 2")
    if not isinstance(cycles, int) or isinstance(cycles, bool) or cycles < 1:
        raise ValueError(f"cycles={cycles!r} must be an integer >= 1")
    step = torch.arange(period * cycles, device=field.device) % period
    height = (4 * (step - period / 2).abs() / period - 1).to(field.dtype)
    return height.reshape(-1, *[1] * field.ndim) * field


class Protocol(Sequence[tuple[SpinSystem, Tensor]]):
    """The system and the external field (..., N, D) of every step.

    Args:
        system: one for all steps, or a sequence of one a step, of one batch shape, mask and law.
        steps: how many, at least 1.
        field: external fields that take the place of the system's: a tensor whose first axis is
            the step, (steps, ...), or a function of the step; they broadcast to (..., N, D).
        broken: further systems to take for broken (...) bool.

    Attributes:
        systems: one, or one a step, without the broken ones.
        broken: systems that were given with NaN or infinity (...) bool, or None. Here they are
            free; their answers are NaN.
    """

    def __init__(
        self,
        system: Undergoing,
        steps: int,
        field: Field = None,
        *,
        broken: Tensor | None = None,
    ) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps={steps!r}: the number of steps is an integer >= 1")
        systems = [system] if isinstance(system, SpinSystem) else list(system)
        if not isinstance(system, SpinSystem) and len(systems) != steps:
            raise ValueError(
                f"system is a sequence of {len(systems)} systems for steps={steps}: give one a step"
            )
        first = systems[0]
        for other in systems[1:]:
            if first.mask is None or other.mask is None:
                same_mask = first.mask is other.mask
            else:
                same_mask = torch.equal(first.mask, other.mask)
            same_law = repr(other.site) == repr(first.site)
            if other.field.shape != first.field.shape or not (same_law and same_mask):
                raise ValueError(
                    f"the systems of a protocol differ, {first!r} and {other!r}: only couplings, "
                    "fields and beta may"
                )
        self._steps, self._field = steps, field
        self.systems: list[SpinSystem] = []
        for other in systems:
            sound, lost = other.isolated()
            self.systems.append(sound)
            if lost is not None:
                broken = lost if broken is None else broken | lost
        self.broken = broken
        if isinstance(field, Tensor) and (field.ndim < 1 or len(field) != steps):
            raise ValueError(
                f"field has shape {tuple(field.shape)}: its first axis is the step, of length "
                f"steps={steps}"
            )

    @property
    def system(self) -> SpinSystem:
        """That of the first step."""
        return self.systems[0]

    def hide_broken(self, answer: Tensor, trailing: int) -> Tensor:
        """NaN in the systems that were given broken, which have ``trailing`` axes of their own."""
        if self.broken is None:
            return answer
        return answer.masked_fill(self.broken[(...,) + (None,) * trailing], torch.nan)

    def until(self, steps: int) -> Protocol:
        """The first so many steps of it."""
        part = copy.copy(self)
        part._steps = steps
        if len(self.systems) > 1:
            part.systems = self.systems[:steps]
        return part

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> tuple[SpinSystem, Tensor]:  # type: ignore[override]
        if not 0 <= step < self._steps:
            raise IndexError(step)
        system = self.systems[step if len(self.systems) > 1 else 0]
        if self._field is None:
            return system, system.field
        field = self._field[step] if isinstance(self._field, Tensor) else self._field(step)
        try:
            field = field.to(system.field.dtype).expand(system.field.shape)
        except RuntimeError as error:
            raise ValueError(
                f"field of step {step} has shape {tuple(field.shape)}: it must broadcast to the "
                f"system's {tuple(system.field.shape)}"
            ) from error
        if system.mask is not None:
            field = torch.where(system.mask[..., None], 0.0, field)
        if self.broken is not None:
            field = torch.where(self.broken[..., None, None], 0.0, field)
        if not bool(torch.isfinite(field).all()):
            raise ValueError(f"field of step {step} is not finite: fields of a protocol must be")
        return system, field
