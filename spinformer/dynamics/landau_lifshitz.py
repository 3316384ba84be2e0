r"""Landau-Lifshitz dynamics: classical spins of three components that precess, and are damped.

With the unit vectors :math:`n_i = S_i / R` and the local field :math:`B_i = h_i + \sum_j J_{ij}
S_j`,

.. math::
    \dot n = -\gamma\, [\, n \times B + \lambda\, n \times (n \times B)\,],

which for spins of length R reads :math:`\dot S = -\gamma\,[S \times B + (\lambda / R)\, S \times (S
\times B)]`: precession at the rate :math:`|B|` and damping at :math:`\lambda |B|`, whatever R. In
Landau and Lifshitz' form :math:`\gamma = 1`. Gilbert's, :math:`\dot n = -n \times B + \alpha\, n
\times \dot n`, is the same equation with :math:`\lambda = \alpha` and :math:`\gamma = 1 / (1 +
\alpha^2)`.

A step from :math:`S` to :math:`S'` with midpoint :math:`M = (S + S') / 2` is

.. math::
    S' - S = -\Delta t\; P \times \Omega(P),\qquad
    \Omega(P) = \gamma\,\big[B(P) + (\lambda / R)\, P \times B(P)\big],

at P = M (``"midpoint"``) or at :math:`P = R M / |M|` (``"spherical"``). As P is parallel to M,
lengths do not change. At P = M the energy, which is quadratic, changes by :math:`-B(M) \cdot (S' -
S)`: it is conserved exactly without damping, and falls at any step with it. The other is symplectic
on the product of spheres instead, and its energy error is bounded. Both conserve the total spin of
isotropic couplings without a field, are reversible and of second order.

Source: Landau & Lifshitz 1935, Phys. Z. Sowjetunion 8, 153; Gilbert 2004, IEEE Trans. Magn. 40,
3443; d'Aquino, Serpico & Miano 2005, J. Comput. Phys. 209, 730 (midpoint); McLachlan, Modin &
Verdier 2014, Phys. Rev. E 89, 061301 (spherical midpoint); Brown 1963, Phys. Rev. 130, 1677
(thermal noise).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spinformer.errors import (
    ConvergenceWarning,
    OnFailure,
    check_choice,
    check_on_failure,
    report_failure,
    strict_options,
)
from spinformer.sampling.progress import Progress, deferred_interrupt, reporting
from spinformer.spins.site import Sphere, to_sphere
from spinformer.spins.streams import Streams
from spinformer.spins.system import SpinSystem

__all__ = ["LandauLifshitz", "Trajectory"]

Method = Literal["midpoint", "spherical"]

# Default tolerance of the implicit equation, in units of the rounding error of one number: below
# it the iterates of a large force wander.
_TOLERANCE = 64.0


@dataclass(frozen=True)
class Trajectory:
    """Spins over time.

    Attributes:
        times: (T,).
        spins: (T, ..., N, 3).
        energies: E(S) (T, ...).
        iterations: most products with J that one step took (...).
        residual: largest residual of the implicit equation over all steps (...), as a share of R.
        converged: whether every step reached the tolerance (...).
    """

    times: Tensor
    spins: Tensor
    energies: Tensor
    iterations: Tensor
    residual: Tensor
    converged: Tensor

    @property
    def total_spin(self) -> Tensor:
        """The sum of the spins, (T, ..., 3)."""
        return self.spins.sum(-2)


@strict_options
class LandauLifshitz:
    r"""Landau-Lifshitz(-Gilbert) dynamics of ``Sphere(3)`` spins.

    .. math:: \dot S = -\gamma\,[\,S \times B + (\lambda / R)\, S \times (S \times B)\,]

    with the local field B and :math:`\gamma = 1` (:math:`1 / (1 + \alpha^2)` with ``gilbert``).

    Args:
        damping: :math:`\lambda \ge 0`, without a unit.
        method: ``"midpoint"`` keeps the energy (exactly, up to the tolerance); ``"spherical"`` is
            symplectic.
        gilbert: ``damping`` is Gilbert's :math:`\alpha`: both rates are divided by
            :math:`1 + \alpha^2`.
        thermal: add the noise of temperature 1 / beta to the field: in each step :math:`\Delta t`
            an independent normal vector of variance :math:`2 \lambda / (\gamma \beta R\, \Delta t)`
            a component (as Stratonovich means it). The stationary law is then Boltzmann's up to
            an error of first order in :math:`\Delta t`. It asks for damping and ``"midpoint"``.
        tolerance: largest change of a spin in the last iteration, in units of R; None is 64
            rounding errors (1.4e-14 in float64).
        max_iterations: products with J a step.
        on_failure: ``"raise"``, ``"warn"`` or ``"ignore"``.
        progress: True for a bar with the rate of spin updates, or a function of (steps done, steps
            in all).

    Ctrl-C ends a run after the step that it is in: the trajectory up to there is returned with a
    warning. A second Ctrl-C is raised at once.
    """

    def __init__(
        self,
        damping: float = 0.0,
        method: Method = "midpoint",
        *,
        gilbert: bool = False,
        thermal: bool = False,
        tolerance: float | None = None,
        max_iterations: int = 100,
        on_failure: OnFailure = "raise",
        progress: Progress = False,
    ) -> None:
        if not (damping >= 0 and damping < float("inf")):
            raise ValueError(f"damping={damping!r}: give a finite number from 0 on")
        check_choice("method", method, ("midpoint", "spherical"))
        check_on_failure(on_failure)
        if thermal and damping == 0:
            raise ValueError(
                "thermal=True with damping=0: noise alone heats without end; give a damping, or "
                "draw a start from equilibrium by Monte Carlo and let it run without noise"
            )
        if thermal and method == "spherical":
            raise ValueError(
                "thermal=True with method='spherical': large noise can turn a spin by more than "
                "its iteration bears, and leaves nothing symplectic; use method='midpoint'"
            )
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance={tolerance!r} must be positive, or None")
        if not (isinstance(max_iterations, int) and max_iterations >= 1):
            raise ValueError(f"max_iterations={max_iterations!r} must be an integer >= 1")
        self.damping, self.gilbert, self.thermal = float(damping), gilbert, thermal
        self.method: Method = method
        self.tolerance, self.max_iterations = tolerance, max_iterations
        self.on_failure: OnFailure = on_failure
        self.progress = progress

    @torch.no_grad()
    def run(
        self,
        system: SpinSystem,
        initial: Tensor,
        *,
        step: float,
        steps: int,
        every: int = 1,
        seed: int | Sequence[int] | Tensor | torch.Generator = 0,
    ) -> Trajectory:
        r"""Integrate from ``initial`` over a time ``step * steps``.

        Args:
            system: symmetric couplings, scalar or matrix-valued, between ``Sphere(3)`` spins.
            initial: spins (..., N, 3) of length R, for example configurations of a Monte Carlo run.
                Leading axes are systems of the batch, and before those any number of chains.
            step: :math:`\Delta t`, in units of 1 / field. The iteration of a step contracts for
                :math:`\Delta t\, R\, \lVert J \rVert_2 / 2` well below 1; for accuracy
                :math:`\Delta t |B| \approx 0.1`.
            steps: how many.
            every: steps between the configurations that are kept; the first and, if ``steps`` is a
                multiple, the last are among them.
            seed: of the noise, see :meth:`~spinformer.spins.streams.Streams.from_seed`; one
                stream for each trajectory.

        Cost: a product with J an iteration; 3 to 15 iterations a step at the steps above.

        Raises:
            ConvergenceError: with ``on_failure="raise"``, at the first step that does not reach the
                tolerance.
            TypeError: spins of another dtype than the system.
            ValueError: spins of other than three components or of another length, asymmetric
                couplings, a step that is not positive.
        """
        spins = self._check(system, initial, step, steps, every)
        streams = Streams.from_seed(seed, spins.shape[:-2], spins.device) if self.thermal else None
        stepper = _Stepper(self, system, step)
        kept, energies = [spins], [system.energy(spins)]
        iterations = torch.zeros(spins.shape[:-2], dtype=torch.int64, device=spins.device)
        residual = spins.new_zeros(spins.shape[:-2])
        failed = torch.zeros_like(iterations, dtype=torch.bool)
        lead = spins.shape[:-2].numel() // max(system.batch_shape.numel(), 1)
        moved = lead * int(system.num_present.sum())
        with (
            deferred_interrupt() as asked,
            reporting(self.progress, steps, spins=moved) as tell,
        ):
            for number in range(1, steps + 1):
                noise = None if streams is None else stepper.noise(streams)
                spins, error, count = stepper(spins, noise)
                iterations, residual = (
                    torch.maximum(iterations, count),
                    torch.maximum(residual, error),
                )
                missed = ~(error <= stepper.tolerance)
                if bool((missed & ~failed).any()):
                    self._report(missed & ~failed, error, number, step)
                failed |= missed
                if number % every == 0:
                    kept.append(spins)
                    energies.append(system.energy(spins))
                tell(number, steps)
                if asked() and number < steps:
                    warnings.warn(
                        f"LandauLifshitz was interrupted after {number} of {steps} steps, and "
                        "returns the trajectory up to there",
                        ConvergenceWarning,
                        stacklevel=3,
                    )
                    break
        times = torch.arange(len(kept), dtype=torch.float64, device=spins.device) * (step * every)
        return Trajectory(
            times.to(spins.dtype),
            torch.stack(kept),
            torch.stack(energies),
            iterations,
            residual,
            ~failed,
        )

    def _check(
        self, system: SpinSystem, initial: Tensor, step: float, steps: int, every: int
    ) -> Tensor:
        site = system.site
        if not (isinstance(site, Sphere) and site.dim == 3):
            raise ValueError(
                f"Landau-Lifshitz dynamics turns spins about a field, which needs three components "
                f"of fixed length: site={site!r} must be Sphere(3). For other spins use "
                "ParallelDynamics or Monte Carlo"
            )
        system.require_symmetric("Landau-Lifshitz dynamics")
        if not (step > 0 and step < float("inf")):
            raise ValueError(f"step={step!r}: give a positive number, about 0.1 / |local field|")
        for name, value in (("steps", steps), ("every", every)):
            if not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name}={value!r} must be an integer >= 1")
        return system.starting_spins(initial)

    def _report(self, missed: Tensor, error: Tensor, number: int, step: float) -> None:
        worst = float(error[missed].max())
        report_failure(
            self.on_failure,
            f"Landau-Lifshitz step {number} of {step:g}: {int(missed.sum())} of {missed.numel()} "
            f"systems did not converge (worst residual {worst:.3g} after {self.max_iterations} "
            "iterations). Take a smaller step, below 1 / (R |J|) with the spectral norm |J|, or "
            "raise max_iterations; a residual that is not a number comes from the system.",
        )


class _Stepper:
    """One step of all trajectories."""

    def __init__(self, dynamics: LandauLifshitz, system: SpinSystem, step: float) -> None:
        site = system.site
        assert isinstance(site, Sphere)
        self.system, self.radius = system, site.radius
        self.damping = dynamics.damping
        self.rate = 1 / (1 + dynamics.damping**2) if dynamics.gilbert else 1.0
        self.half = step * self.rate / 2
        self.spherical = dynamics.method == "spherical"
        self.max_iterations = dynamics.max_iterations
        eps = torch.finfo(system.field.dtype).eps
        self.tolerance = _TOLERANCE * eps if dynamics.tolerance is None else dynamics.tolerance
        # Of the field, so that gamma^2 variance dt = 2 gamma lambda / (beta R): the diffusion that
        # balances the damping.
        variance = 2 * self.damping / (self.rate * self.radius * step) / system.beta
        self.amplitude = variance.sqrt()[..., None, None]

    def noise(self, streams: Streams) -> Tensor:
        """The random field of one step."""
        return self.amplitude * streams.normal(
            *self.system.field.shape[-2:], dtype=self.system.field.dtype
        )

    def __call__(self, spins: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The spins after a step, the residual and the iterations of each trajectory."""
        middle, residual = spins, spins.new_full(spins.shape[:-2], torch.inf)
        count = torch.zeros(spins.shape[:-2], dtype=torch.int64, device=spins.device)
        # A NaN will not get better.
        going = torch.ones_like(count, dtype=torch.bool)
        while bool(going.any()):
            new = self._middle(spins, middle, noise)
            change = 2 * (new - middle).abs().flatten(-2).amax(-1) / self.radius
            # A finished trajectory is left alone: the others do not change its answer.
            residual = torch.where(going, change, residual)
            middle = torch.where(going[..., None, None], new, middle)
            count += going
            going &= (residual > self.tolerance) & (count < self.max_iterations)
        # Lengths are right to rounding, which must not add up over many steps.
        return to_sphere(2 * middle - spins, self.radius), residual, count

    def _middle(self, spins: Tensor, middle: Tensor, noise: Tensor | None) -> Tensor:
        r"""The midpoint of a turn about the axis that an earlier midpoint gives.

        :math:`M + M \times a = S` with :math:`a = \tfrac12 \Delta t\, \Omega` held fixed has the
        solution below, for which :math:`2 M - S` has the length of S. It leaves to the iteration
        what couplings and damping make of M, so that a field alone takes no iteration at all.
        """
        at, stretch = middle, self.half
        if self.spherical:
            factor = self.radius / middle.norm(dim=-1, keepdim=True).clamp_min(1e-30)
            at, stretch = factor * middle, self.half * factor
        force = self.system.force(at)
        turning = force
        if self.damping:
            turning = force + self.damping / self.radius * torch.linalg.cross(at, force)
        if noise is not None:
            turning = turning + noise
        a = stretch * turning
        along = (a * spins).sum(-1, keepdim=True)
        solved: Tensor = spins - torch.linalg.cross(spins, a) + along * a
        return solved / (1 + a.square().sum(-1, keepdim=True))
