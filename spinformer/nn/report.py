"""What a block did in one forward pass, for figures, tests and monitoring."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BlockReport:
    """The evidence of one forward pass; ``None`` where block or mask define no such quantity.

    Attributes:
        energy_before: ``(steps, B)``, the explicit energy of each system before each descent step,
            with the penalty of an activation where that is finite.
        energy_after: ``(steps, B)``, the same energy after that step.
        free_energy: ``(B, heads)``, of each head's spin system.
        residual: ``(B, heads)``, the undamped residual of the returned fixed point.
        iterations: ``(B, heads)`` int64.
        converged: ``(B, heads)`` bool.
        couplings: ``(B, heads, N, N)``, what mixed the tokens: couplings or attention weights.
        retrieval: ``(B, heads, N, K)``, the weights of K patterns that are no tokens of the block.
        magnetization: ``(B, heads, N, D)``.
        coupling_term: ``(B, N, d_model)``, what the dependence of the couplings on the tokens adds
            to the magnetization where it is the total derivative of the free energy.
    """

    energy_before: Tensor | None = None
    energy_after: Tensor | None = None
    free_energy: Tensor | None = None
    residual: Tensor | None = None
    iterations: Tensor | None = None
    converged: Tensor | None = None
    couplings: Tensor | None = None
    retrieval: Tensor | None = None
    magnetization: Tensor | None = None
    coupling_term: Tensor | None = None
