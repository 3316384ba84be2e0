"""What an iteration returns: its value, and the evidence for it, one entry per system."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spinformer.errors import OnFailure, check_on_failure, report_failure


@dataclass(frozen=True)
class Solution:
    """The value of a solve with the evidence for it.

    Attributes:
        value: the state that was found, ``(..., *state)``.
        residual: ``(...)``, the undamped residual **of that value** (not of an earlier or a later
            iterate), in the units that the solver documents.
        iterations: ``(...)`` int64, the number of iterations that each system used by itself.
        converged: ``(...)`` bool, residual at or below the tolerance.
    """

    value: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor

    def check(self, on_failure: OnFailure, what: str, remedy: str) -> None:
        """Raise, warn or stay silent if a system did not converge.

        Args:
            on_failure: ``"raise"`` (:class:`ConvergenceError`), ``"warn"``
                (:class:`ConvergenceWarning`), ``"ignore"``, or a function of the message.
            what: the name of the solve, for the message.
            remedy: what a user can change.
        """
        check_on_failure(on_failure)
        if on_failure == "ignore" or bool(self.converged.all()):
            return
        failed = int((~self.converged).sum())
        worst = torch.where(self.converged, torch.zeros_like(self.residual), self.residual)
        message = (
            f"{what}: {failed} of {self.converged.numel()} systems did not converge "
            f"(worst residual {float(worst.max()):.3g} after at most "
            f"{int(self.iterations.max())} iterations). {remedy}"
        )
        report_failure(on_failure, message)
