r"""Hamiltonian Monte Carlo: all spins move together along the forces between them.

Every spin gets a random velocity u and the pair follows Hamilton's equations for

.. math:: \mathcal H(S, u) = \beta E(S) + \tfrac12 \sum_i |u_i|^2,\qquad \dot S_i = s\, u_i,

with s the root mean square of a spin's component, :math:`R / \sqrt D` on spheres, so that times
mean the same for spins of any length and dimension. What the couplings do is a kick,
:math:`\dot u_i = s\,\beta H_i` (on spheres its part tangent to them, which the sphere leaves); what
a free spin does is known in closed form:

* **spheres**: a great circle, :math:`S(t) = S \cos\theta + (R / |u|)\, u \sin\theta` with
  :math:`\theta = t |u| / \sqrt D`, and u turns along. Nothing leaves the sphere, no constraint has
  to be solved for (the geodesic integrator of Byrne & Girolami, Scand. J. Stat. 40, 825 (2013)).
* **Gaussian spins**, of variance :math:`s^2`: a harmonic oscillator, :math:`S(t) = S \cos t +
  s\, u \sin t`; all of the one-spin law is in the free motion.

Kick, free motion, kick (each exact, preserving volume, and its own inverse when velocities are
turned round) make a step of error O(step^3), a path of error O(step^2); a Metropolis test on the
change of :math:`\mathcal H` removes it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spinformer.errors import strict_options
from spinformer.sampling.chains import Chains, Kernel, Move
from spinformer.spins.site import Gaussian, Ising, to_sphere
from spinformer.spins.system import SpinSystem

__all__ = ["Hamiltonian", "leapfrog"]

# Where the cost of a step, times the number of independent states, is least: Beskos et al.,
# Bernoulli 19, 1501 (2013) find 0.65 in the limit of many dimensions, few of them want more.
_TARGET = 0.8
# With the change of energy normal, of width x step^2: acceptance erfc(c step^2), whose slope in
# log(step) at 0.8 is -0.39.
_GAIN = 1 / 0.39
_MOST_STEPS = 1024
_LONGEST = 1.5  # of the mean path: no path is longer


@strict_options
class Hamiltonian(Move):
    r"""A path along the forces, accepted or refused as a whole; one a sweep.

    For spheres of any dimension and Gaussian spins, with any symmetric couplings, matrix-valued
    ones included. It moves all spins at once, in ``path / step_size`` products with J: for dense
    couplings and spins of many components it is the fast one; Ising spins have no velocity.

    Args:
        path: mean length of a path, in the time in which a free spin of many components turns by
            one radian. The default is a quarter turn, which forgets where it began. Each chain
            draws a length between half and one and a half of it for every path, against periodic
            orbits that would come back to where they started.
        step_size: longest step. None: adapted in every chain by itself while warming up, to accept
            0.8 of the paths, then fixed (stochastic approximation: Kesten, Ann. Math. Stat. 29, 41
            (1958)).

    A path takes at most 1024 steps and is cut short where ``step_size`` asks for more. A chain
    whose path is done waits for the others.

    Its kernel reports ``"acceptance"``, the mean acceptance probability; ``"step_size"``; and
    ``"steps"``, the mean number of steps of a path.

    Raises:
        ValueError: Ising spins, or asymmetric couplings.

    Source: Duane, Kennedy, Pendleton & Roweth, Phys. Lett. B 195, 216 (1987); Neal, Handbook of
    MCMC (2011), chapter 5.
    """

    def __init__(self, path: float = math.pi / 2, step_size: float | None = None) -> None:
        for name, value in (("path", path), ("step_size", step_size)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value!r} must be a positive finite number")
        self.path = float(path)
        self.step_size = None if step_size is None else float(step_size)

    def __repr__(self) -> str:
        return f"Hamiltonian(path={self.path!r}, step_size={self.step_size!r})"

    def start(self, chains: Chains) -> Kernel:
        system = chains.system
        system.require_symmetric("Hamiltonian")
        if isinstance(system.site, Ising):
            raise ValueError(
                "Hamiltonian moves spins along continuous paths, which Ising() has none of: use "
                "HeatBath(), or SwendsenWang() and Wolff() for couplings without frustration"
            )
        return _Paths(chains, self)


def leapfrog(
    system: SpinSystem,
    spins: Tensor,
    velocity: Tensor,
    beta: Tensor,
    step: Tensor,
    steps: Tensor,
    force: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the motion of :mod:`spinformer.sampling.hamiltonian` for so many steps.

    Args:
        system: of batch shape ``batch``, symmetric couplings.
        spins, velocity: (..., N, D), where ... broadcasts with ``batch``. On spheres velocities are
            tangent; at absent sites both are zero.
        beta, step, steps: (...), ``steps`` int64; each system does its own number.
        force: ``system.force(spins)``, if known.

    Returns:
        Spins, velocities and force at the end. Turned round, the same call leads back, to rounding.

    Cost: ``steps.max()`` products with J.
    """
    scale = system.site.scale
    radius = system.site.radius
    kick = (scale * beta * step)[..., None, None]
    step = step[..., None, None]
    root = math.sqrt(system.dim)
    force = system.force(spins) if force is None else force
    most = int(steps.max()) if steps.numel() else 0
    for number in range(most):
        turned = _kicked(velocity, spins, force, kick / 2, radius)
        if radius is not None:
            speed = turned.norm(dim=-1, keepdim=True) / root
            angle = step * speed
            # sin(angle) / speed, which has a limit for a spin at rest
            arc = step * torch.sinc(angle / math.pi)
            cosine = torch.cos(angle)
            moved = to_sphere(spins * cosine + scale * arc * turned, radius)
            turned = turned * cosine - spins * (arc * speed**2 / scale)
        else:
            cosine, sine = torch.cos(step), torch.sin(step)
            moved = spins * cosine + scale * sine * turned
            turned = turned * cosine - spins * (sine / scale)
        pull = system.force(moved)
        turned = _kicked(turned, moved, pull, kick / 2, radius)
        going = (number < steps)[..., None, None]
        spins = torch.where(going, moved, spins)
        velocity = torch.where(going, turned, velocity)
        force = torch.where(going, pull, force)
    return spins, velocity, force


class _Paths(Kernel):
    """Paths of all chains, with their step sizes."""

    def __init__(self, chains: Chains, move: Hamiltonian) -> None:
        super().__init__(chains)
        self._path = move.path
        self._adaptive = move.step_size is None
        self._absent = None if chains.system.mask is None else chains.system.mask[..., None]
        with torch.no_grad():
            step = self._first_step() if move.step_size is None else move.step_size
        self._step = torch.zeros_like(chains.beta) + step
        self._recent = torch.zeros_like(chains.beta)
        self._error = torch.zeros_like(chains.beta)
        self._reversals = torch.zeros_like(chains.beta)
        self._seen = 0
        self.reset_report()

    def _first_step(self) -> Tensor:
        """Short against the fastest oscillation of a spin in the force that it feels now."""
        chains, system = self.chains, self.chains.system
        if not system.num_spins:
            return torch.full_like(chains.beta, self._path)
        pull = chains.beta * chains.force().norm(dim=-1).amax(-1)
        square = 1 + pull * system.site.scale / math.sqrt(system.dim)
        components = (system.num_present * system.dim).clamp(min=1)
        first = 1 / (components**0.25 * square.sqrt())
        return torch.nan_to_num(first, nan=self._path).clamp(max=self._path)

    def reset_report(self) -> None:
        self._accepted = torch.zeros_like(self.chains.beta)
        self._steps = torch.zeros_like(self.chains.beta)
        self._count = 0

    def report(self) -> dict[str, Tensor]:
        count = max(self._count, 1)
        return {
            "acceptance": self._accepted / count,
            "step_size": self._step.clone(),
            "steps": self._steps / count,
        }

    @torch.no_grad()
    def sweep(self, count: int = 1) -> None:
        chains, system = self.chains, self.chains.system
        radius = system.site.radius
        spins = chains.spins
        force = system.force(spins)
        for _ in range(count):
            noise = chains.streams.normal(*spins.shape[-2:], dtype=spins.dtype)
            if self._absent is not None:
                noise = noise.masked_fill(self._absent, 0.0)
            velocity = noise if radius is None else _tangent(noise, spins, radius)
            length = self._path * (_LONGEST - chains.streams.uniform(dtype=spins.dtype))
            steps = (length / self._step).ceil().clamp(max=_MOST_STEPS)
            step = torch.minimum(length / steps, self._step)
            moved, arrived, pull = leapfrog(
                system, spins, velocity, chains.beta, step, steps.long(), force
            )
            start = self._by_site(spins, velocity, force)
            # Site by site: the totals are large, and rounding of them would decide.
            gain = (start - self._by_site(moved, arrived, pull)).sum(-1)
            probability = gain.exp().clamp(max=1.0).to(spins.dtype)
            # What is not a number is not above anything: such a path is refused.
            accepted = probability > chains.streams.uniform(dtype=spins.dtype)
            spins = torch.where(accepted[..., None, None], moved, spins)
            force = torch.where(accepted[..., None, None], pull, force)
            probability = torch.nan_to_num(probability, nan=0.0)
            self._accepted += probability
            # A system that is broken refuses everything, and would ask for ever shorter steps.
            broken = start.sum(-1).isnan()
            self._recent += torch.where(broken, _TARGET, probability)
            self._steps += steps
            self._count += 1
            self._seen += 1
        chains.spins.copy_(spins)

    def _by_site(self, spins: Tensor, velocity: Tensor, force: Tensor) -> Tensor:
        """What every site adds to beta E + u^2 / 2, in float64, (chains, *batch, N)."""
        system = self.chains.system
        spins, velocity = spins.double(), velocity.double()
        pair = torch.linalg.vecdot(spins, force.double() + system.field)
        value: Tensor = (velocity.square().sum(-1) - self.chains.beta[..., None] * pair) / 2
        if isinstance(system.site, Gaussian):
            value = value + spins.square().sum(-1) / (2 * system.site.variance)
        return value

    def adapt(self) -> None:
        if not self._adaptive or self._seen == 0:
            return
        error = self._recent / self._seen - _TARGET
        # A step of Newton's method at first, then ever smaller ones: their sum has no bound, the
        # sum of their squares has. They shrink when the error changes its sign (Kesten): a
        # step size that begins far off is not left there.
        self._reversals += error * self._error < 0
        self._error = error
        change = _GAIN * 2 / (2 + self._reversals) * error
        self._step = (self._step * change.exp()).clamp(
            self._path / _MOST_STEPS, _LONGEST * self._path
        )
        self._recent.zero_()
        self._seen = 0

    def state(self) -> dict[str, Tensor]:
        return {
            "step_size": self._step.clone(),
            "error": self._error.clone(),
            "reversals": self._reversals.clone(),
            "recent": self._recent.clone(),
            "seen": torch.tensor(self._seen),
            "accepted": self._accepted.clone(),
            "steps": self._steps.clone(),
            "count": torch.tensor(self._count),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        self._step, self._recent = state["step_size"].clone(), state["recent"].clone()
        self._accepted, self._steps = state["accepted"].clone(), state["steps"].clone()
        self._error, self._reversals = state["error"].clone(), state["reversals"].clone()
        self._seen, self._count = int(state["seen"]), int(state["count"])


def _tangent(vector: Tensor, spins: Tensor, radius: float) -> Tensor:
    """The part of a vector that is tangent to the sphere; spins of length zero take nothing off."""
    across: Tensor = torch.linalg.vecdot(vector, spins) / radius**2
    return vector - across[..., None] * spins


def _kicked(
    velocity: Tensor, spins: Tensor, force: Tensor, kick: Tensor, radius: float | None
) -> Tensor:
    """Velocities after a kick by the force, on spheres by its tangent part."""
    if radius is None:
        return velocity + kick * force
    return _tangent(velocity + kick * force, spins, radius)
