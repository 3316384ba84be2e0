r"""Simulated annealing: states of low energy, by slow cooling and a quench that goes to the bottom.

Many chains are sampled while :math:`\beta` rises along a schedule, and what they hold at its end
follows the forces down to a local minimum of

.. math::
    E(S) = -\tfrac12 \sum_{i\ne j} S_i \cdot J_{ij} S_j - \sum_i h_i \cdot S_i ,

where every spin lies along its force, :math:`S_i = R H_i / |H_i|`: Ising spins align one after the
other until no flip lowers the energy; vectors do the same once, and then turn together by conjugate
gradients on the product of their spheres, which takes of the order of the square root of the
condition number of the Hessian iterations where aligning takes that number.

Source: Kirkpatrick, Gelatt & Vecchi, Science 220, 671 (1983); conjugate gradients on
manifolds: Absil, Mahony & Sepulchre, Optimization Algorithms on Matrix Manifolds (Princeton 2008),
section 8.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spinformer.errors import OnFailure, check_choice, check_on_failure, strict_options
from spinformer.sampling.chains import Chains, Move, Start
from spinformer.sampling.schedule import schedule
from spinformer.sampling.tempering import listed
from spinformer.solve.solution import Solution
from spinformer.spins.couplings.checks import check_count
from spinformer.spins.site import to_sphere
from spinformer.spins.system import SpinSystem

__all__ = ["AnnealingResult", "SimulatedAnnealing", "quench"]

# In units of the inverse force on a spin: nothing is ordered, everything is frozen.
_HOT, _COLD = 0.5, 50.0
# Sweeps between adaptations of the moves, which must follow the temperature.
_ADAPT = 10
# The most that a spin turns in one step of the descent, and halvings of a step that went up.
_LARGEST_TURN, _HALVINGS = 0.5, 30


@dataclass(frozen=True)
class AnnealingResult:
    """Local minima of the energy, and the evidence for them.

    Attributes:
        system: whose energy it is; its beta plays no part.
        energy: (chains, *batch), E at the minimum that each chain found.
        solution: those minima, ``value`` (chains, *batch, N, D), with the residuals, iterations and
            convergence of :func:`quench`, (chains, *batch).
        betas: (records, *batch), where energies were recorded while cooling.
        trajectory: (records, chains, *batch), those energies.
    """

    system: SpinSystem
    energy: Tensor
    solution: Solution
    betas: Tensor
    trajectory: Tensor

    @property
    def spins(self) -> Tensor:
        """The minimum that each chain found, (chains, *batch, N, D)."""
        return self.solution.value

    @property
    def best_energy(self) -> Tensor:
        """The lowest energy of all chains of a system, (*batch)."""
        return self.energy.amin(0)

    @property
    def best(self) -> Tensor:
        """The spins of lowest energy, (*batch, N, D)."""
        chain = self.energy.nan_to_num().argmin(0)[None, ..., None, None]
        return self.spins.gather(0, chain.expand(1, *self.spins.shape[1:]))[0]

    @property
    def success(self) -> Tensor:
        """The fraction of chains that found the lowest energy, (*batch).

        The evidence that it is that of the ground state: chains that agree would have to miss a
        lower one all together; if only one chain found it, expect that there are lower ones.
        Energies are equal if they differ by less than the square root of rounding, relative to the
        largest.
        """
        size = self.energy.abs().amax(0)
        margin = math.sqrt(torch.finfo(self.energy.dtype).eps) * size
        found = self.energy <= self.best_energy + margin
        return found.to(self.energy.dtype).mean(0)


@strict_options
class SimulatedAnnealing:
    r"""Ground states by simulated annealing.

    Args:
        betas: the schedule, one inverse temperature a sweep: ``"geometric"`` or ``"linear"`` in
            :math:`\beta` between ``beta_min`` and ``beta_max`` in ``sweeps`` sweeps; or the
            inverse temperatures themselves, (sweeps,) or (sweeps, *batch). Between the defaults a
            geometric schedule spends 15 % of its sweeps above the transition of mean field, a
            linear one 1 %.
        beta_min: where it begins. None: 0.5 / f with the natural scale of the force on a component
            of a spin, :math:`f = R/\sqrt D\,(\lambda_{\max}(J)\,R/\sqrt D + h_{\rm rms})`.
        beta_max: where it ends. None: 50 / f.
        sweeps: of the schedule.
        moves: what changes spins, one after the other in each sweep. None: :class:`HeatBath`.
        chains: of each system, all independent.
        seed: as of :class:`~spinformer.sampling.chains.Chains`.
        initial: ``"random"``, ``"ordered"`` or spins that broadcast to (chains, *batch, N, D).
        records: how many energies to keep on the way.
        tolerance: of the quench. None: 1e-9 in float64, 1e-4 in float32.
        max_iterations: of the quench.
        on_failure: where a chain's quench does not reach the tolerance: ``"raise"``, ``"warn"``,
            ``"ignore"``.

    Cost: the moves', and two products with J an iteration of the quench.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        betas: Literal["geometric", "linear"] | Sequence[float] | Tensor = "geometric",
        *,
        beta_min: float | Tensor | None = None,
        beta_max: float | Tensor | None = None,
        sweeps: int = 1000,
        moves: Move | Sequence[Move] | None = None,
        chains: int = 16,
        seed: int | Sequence[int] | Tensor | torch.Generator = 0,
        initial: Start | Tensor = "random",
        records: int = 100,
        tolerance: float | None = None,
        max_iterations: int = 10_000,
        on_failure: OnFailure = "warn",
    ) -> None:
        if isinstance(betas, str):
            check_choice("betas", betas, ("geometric", "linear"))
        elif beta_min is not None or beta_max is not None:
            raise ValueError("betas are given one by one: leave beta_min and beta_max out")
        for name, count in (("sweeps", sweeps), ("chains", chains), ("records", records)):
            check_count(name, count, 1)
        if tolerance is not None and not 0 < tolerance < 1:
            raise ValueError(f"tolerance={tolerance}: give a number between 0 and 1, or None")
        check_on_failure(on_failure)
        self.betas = betas
        self.beta_min, self.beta_max = beta_min, beta_max
        self.sweeps = sweeps
        self.moves = listed(moves)
        self.chains = chains
        self.seed = seed
        self.initial = initial
        self.records = records
        self.tolerance = tolerance
        self.max_iterations = max_iterations
        self.on_failure = on_failure

    @torch.no_grad()
    def minimize(self, system: SpinSystem) -> AnnealingResult:
        """Look for the ground state of every system of the batch.

        Args:
            system: symmetric couplings; its beta is not used.

        Raises:
            ValueError: asymmetric couplings; Gaussian spins, whose energy has no minimum; a
                schedule that does not fit.
            ConvergenceError: with ``on_failure="raise"``.
        """
        _require_length(system)
        given, (system, broken) = system, system.isolated()
        betas = self._schedule(system)
        chains = Chains.start(system, self.chains, self.seed, self.initial)
        kernels = [move.start(chains) for move in self.moves]
        records, last = min(self.records, len(betas)), len(betas) - 1
        recorded = [k * last // max(records - 1, 1) for k in range(records)]
        energies = []
        for step, beta in enumerate(betas):
            chains.beta.copy_(beta.expand_as(chains.beta))
            for kernel in kernels:
                kernel.sweep()
                # There is no invariant law to protect: moves learn all the way.
                if step % _ADAPT == _ADAPT - 1:
                    kernel.adapt()
            chains.sweeps += 1
            if step in recorded:
                energies.append(chains.energy())
        solution = quench(
            given,
            chains.spins,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            on_failure=self.on_failure,
        )
        energy = system.energy(solution.value)
        trajectory = torch.stack(energies)
        if broken is not None:
            energy, trajectory = (x.masked_fill(broken, torch.nan) for x in (energy, trajectory))
        return AnnealingResult(given, energy, solution, betas[recorded], trajectory)

    def _schedule(self, system: SpinSystem) -> Tensor:
        """(sweeps, *batch)."""
        field = system.field
        if not isinstance(self.betas, str):
            betas = torch.as_tensor(self.betas, dtype=field.dtype, device=field.device)
            if betas.ndim == 0 or len(betas) == 0:
                raise ValueError(f"betas={self.betas!r}: give one inverse temperature a sweep")
            if betas.ndim == 1:
                betas = betas.reshape(-1, *[1] * len(system.batch_shape))
            try:
                betas = betas.expand(len(betas), *system.batch_shape)
            except RuntimeError as error:
                raise ValueError(
                    f"betas have shape {tuple(betas.shape)}: give (sweeps,) or (sweeps, "
                    f"*{tuple(system.batch_shape)})"
                ) from error
        else:
            unit = _force_scale(system)
            first = _end("beta_min", self.beta_min, _HOT / unit)
            last = _end("beta_max", self.beta_max, _COLD / unit)
            parts = torch.linspace(0, 1, self.sweeps, dtype=field.dtype, device=field.device)
            parts = parts.reshape(-1, *[1] * unit.ndim)
            if self.betas == "geometric":
                betas = first * (last / first) ** parts
            else:
                betas = torch.lerp(first, last, parts)
        if not bool(((betas > 0) & betas.isfinite()).all()):
            raise ValueError(
                "betas, or beta_min and beta_max, must be positive and finite: the schedule has "
                f"{float(betas.min()):.6g}"
            )
        return betas


def _end(name: str, given: float | Tensor | None, otherwise: Tensor) -> Tensor:
    """One end of a schedule, (*batch)."""
    if given is None:
        return otherwise
    end = torch.as_tensor(given).to(otherwise)
    try:
        return end.expand_as(otherwise)
    except RuntimeError as error:
        raise ValueError(
            f"{name} has shape {tuple(end.shape)}: give a number, or one for each system of the "
            f"batch {tuple(otherwise.shape)}"
        ) from error


@torch.no_grad()
def quench(
    system: SpinSystem,
    spins: Tensor,
    *,
    tolerance: float | None = None,
    max_iterations: int = 10_000,
    on_failure: OnFailure = "warn",
) -> Solution:
    r"""The local minima of the energy below given configurations.

    The residual is that of the condition :math:`S_i = R H_i / |H_i|`,

    .. math:: \max_i \frac{\big|\, |H_i| S_i - R H_i \big|}{R \max_j |H_j|} ,

    for small angles the largest torque :math:`|S_i \times H_i|` in units of the largest there could
    be, and 2 where the spin in the strongest force stands against it. Of Ising spins it is zero
    where no flip lowers the energy.

    Args:
        system: symmetric couplings, spins of fixed length; its beta is not used.
        spins: where to start, (chains, *batch, N, D).
        tolerance: of the residual; None is 1e-9 in float64 and 1e-4 in float32.
        max_iterations: sweeps of Ising spins; conjugate gradient steps of vectors.
        on_failure: ``"raise"``, ``"warn"`` or ``"ignore"``.

    Returns:
        The minima (chains, *batch, N, D) and one residual, number of iterations and ``converged``
        for each chain of each system.

    Raises:
        ValueError: Gaussian spins; asymmetric couplings; wrong lengths.
        ConvergenceError: with ``on_failure="raise"``.
    """
    _require_length(system)
    given = tuple(spins.shape[1:])
    expected = (*system.batch_shape, system.num_spins, system.dim)
    if given != expected:
        raise ValueError(f"spins have shape {tuple(spins.shape)}: give (chains, *{expected})")
    if tolerance is None:
        tolerance = 1e-9 if spins.dtype == torch.float64 else 1e-4
    system, broken = system.isolated()
    # The seed is of no use: nothing is drawn.
    chains = Chains.start(system, len(spins), 0, spins)
    if system.dim == 1:
        iterations = _align(chains, max_iterations)
    else:
        # One pass, for the spins against their force: descent would leave them slowly, or never.
        _align(chains, 1)
        iterations = _turn(chains, tolerance, max_iterations)
    residual = _residual(chains.spins, chains.force())
    if broken is not None:
        residual = residual.masked_fill(broken, torch.nan)
    solution = Solution(chains.spins, residual, iterations, residual <= tolerance)
    solution.check(
        on_failure,
        "quench",
        "Raise max_iterations or tolerance, or cool more slowly before; a residual that is not a "
        "number comes from the system.",
    )
    return solution


def _require_length(system: SpinSystem) -> None:
    system.require_symmetric("A minimum of the energy")
    if system.site.radius is None:
        raise ValueError(
            f"site={system.site!r}: the energy of spins of any length has no minimum; use Sphere "
            "or Ising"
        )


def _force_scale(system: SpinSystem) -> Tensor:
    """R / sqrt(D) times the force on a component of a spin where couplings help each other."""
    scale = system.site.scale
    largest = system.couplings.largest_eigenvalue().detach().expand(system.batch_shape)
    present = (system.num_present * system.dim).clamp_min(1)
    field = (system.field.detach().square().sum((-2, -1)) / present).sqrt()
    unit = scale * (largest.clamp_min(0) * scale + field)
    # Without couplings and fields any temperature is as good as another.
    return torch.where(unit > 0, unit, 1.0)


def _largest(values: Tensor) -> Tensor:
    """Over the sites; zero of none."""
    return values.amax(-1) if values.shape[-1] else values.sum(-1)


def _residual(spins: Tensor, force: Tensor) -> Tensor:
    """As in :func:`quench`, (chains, *batch)."""
    size = force.norm(dim=-1, keepdim=True)
    radius = spins.norm(dim=-1, keepdim=True)
    off = _largest((size * spins - radius * force).norm(dim=-1))
    most = _largest((radius * size)[..., 0])
    residual: Tensor = off / torch.where(most > 0, most, 1.0)
    return residual


def _align(chains: Chains, max_sweeps: int) -> Tensor:
    """Put every spin along its force, one after the other, until none moves; sweeps of each chain.

    Spins in no force stay: rounding would turn them for ever. For vectors do one sweep.
    """
    order = schedule(chains.system)
    spins = chains.spins
    eps = torch.finfo(spins.dtype).eps
    least = 100 * eps * _largest(chains.force().norm(dim=-1))
    least = least.reshape(chains.num_chains, -1, 1, 1)

    def along(old: Tensor, force: Tensor) -> Tensor:
        size = force.norm(dim=-1, keepdim=True)
        length = old.norm(dim=-1, keepdim=True)
        return torch.where(size > least, force * (length / size), old)

    sweeps = torch.zeros(spins.shape[:-2], dtype=torch.int64, device=spins.device)
    for _ in range(max_sweeps):
        before = spins.clone()
        order.sweep(chains, along)
        moved = (spins != before).any(-1).any(-1)
        sweeps += moved
        if not bool(moved.any()):
            break
    return sweeps


def _turn(chains: Chains, tolerance: float, max_iterations: int) -> Tensor:
    """Conjugate gradients for all spins of a chain at once; iterations of each chain.

    Every spin turns on a great circle of its own, S cos(w t) + (d / w) sin(w t) with w = |d| / R.
    Directions are preconditioned by the force, the stiffness of a single spin. The step is
    Newton's along the curve, whose second derivative costs one product with J; where the energy is
    not convex, or would go up, the step is cut.
    """
    system, spins = chains.system, chains.spins
    radius: float = system.site.radius  # type: ignore[assignment]  # checked by quench
    eps = torch.finfo(spins.dtype).eps

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum((-2, -1))

    def across(vector: Tensor, at: Tensor) -> Tensor:
        """The part of a vector that turns the spins."""
        return vector - (vector * at).sum(-1, keepdim=True) / radius**2 * at

    def energy(at: Tensor, force: Tensor) -> Tensor:
        return -dot(at, force + system.field) / 2

    def wide(value: Tensor) -> Tensor:
        return value[..., None, None]

    force = chains.force()
    gradient = across(force, spins)
    direction, old_product = torch.zeros_like(spins), torch.ones_like(chains.beta)
    old_gradient = torch.zeros_like(spins)
    iterations = torch.zeros_like(chains.beta, dtype=torch.int64)
    for _ in range(max_iterations):
        active = _residual(spins, force) > tolerance
        if not bool(active.any()):
            break
        iterations += active
        size = force.norm(dim=-1, keepdim=True)
        stiffness = size.clamp_min(1e-3 * size.amax(-2, keepdim=True)) / radius
        downhill = gradient / torch.where(stiffness > 0, stiffness, 1.0)
        product = dot(downhill, gradient)
        # Polak and Ribiere's, never negative: it restarts by itself.
        keep = ((product - dot(downhill, old_gradient)) / old_product).clamp_min(0)
        direction = downhill + wide(keep) * across(direction, spins)
        slope = dot(gradient, direction)
        lost = ~(slope > 0)
        direction = torch.where(wide(lost), downhill, direction)
        slope = torch.where(lost, product, slope)

        rate = direction.norm(dim=-1, keepdim=True) / radius
        aligned = (spins * force).sum(-1, keepdim=True)
        curvature = (rate**2 * aligned).sum((-2, -1)) - dot(
            direction, system.couplings.apply(direction)
        )
        fastest = rate.amax((-2, -1))
        longest = _LARGEST_TURN / torch.where(fastest > 0, fastest, 1.0)
        newton = slope / torch.where(curvature > 0, curvature, 1.0)
        step = torch.where((curvature > 0) & (newton < longest), newton, longest)

        now = energy(spins, force)
        # Close to the minimum energies differ by less than they are rounded.
        slack = 10 * eps * (radius * size).sum((-2, -1))
        circle = direction / torch.where(rate > 0, rate, 1.0)
        waiting = active
        trial, trial_force = spins, force
        for _ in range(_HALVINGS):
            angle = rate * wide(step)
            moved = to_sphere(spins * angle.cos() + circle * angle.sin(), radius)
            moved_force = system.force(moved)
            down = energy(moved, moved_force) <= now - 1e-4 * step * slope + slack
            taken = wide(waiting & down)
            trial = torch.where(taken, moved, trial)
            trial_force = torch.where(taken, moved_force, trial_force)
            waiting = waiting & ~down
            if not bool(waiting.any()):
                break
            step = torch.where(waiting, step / 2, step)
        spins.copy_(trial)
        force = trial_force
        old_gradient, old_product = gradient, torch.where(product > 0, product, 1.0)
        gradient = across(force, spins)
    return iterations
