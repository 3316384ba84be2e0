r"""A quench: spins that a strong field had aligned, in a weak field that points elsewhere.

All spins are drawn anew at once in every step (parallel heat bath), as the tokens of a Transformer
are. The new field is at a right angle to the old one (opposite for Ising spins).
Three ways to couple them, in units of their mean coupling to all others: random and symmetric,
random and asymmetric, and attention (a row-wise softmax). Many chains give the averages m(t); the
kinetic mean field and TAP equations give them at once, and of few Ising spins the Markov chain of
all states gives them exactly. Shown against the step:

* the magnetization along the new field, and how far the equations are from the chains;
* the distance to the steady state, :math:`d(t) = \sqrt{\sum_i |m_i(t) - m_i^*|^2 / N R^2}`, each
  from its own, next to :math:`\rho^t`: the spectral radius of a step's derivative at the fixed
  point, or the second eigenvalue of the Markov chain;
* the mismatch :math:`\sqrt{\sum_i |m_i(t+1) - m_i(t)|^2 / N R^2}` between the state and the
  response to its own field;
* the entropy given to the heat bath since the quench.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import spinformer as sf
from simulations.approximations import APPROXIMATIONS, exact_law
from simulations.figures import blank, clean, save
from simulations.options import positive
from simulations.results import collect, conclude
from simulations.tables import align
from spinformer.dynamics import (
    ExactDynamics,
    KineticMeanField,
    KineticTAP,
    ParallelDynamics,
)
from spinformer.dynamics.steady_state import Transient

KINDS = {
    "symmetric": "random couplings, symmetric",
    "asymmetric": "random couplings, asymmetric",
    "attention": "attention (rows of softmax)",
}
# beta R^2 / D times the mean force of all neighbours; the field in units of that force; the spread
# of random couplings; and the spread of the scores of attention, which looks at about five spins.
STRENGTH, FIELD, SPREAD, SHARPNESS = 0.8, 0.3, 0.5, 1.4
WIDTH = 8  # of the features that attention compares
EQUATIONS = {"mean_field": KineticMeanField, "tap": KineticTAP}
LABELS = {"mean_field": "kinetic mean field", "tap": "kinetic TAP", "exact": "exact Markov chain"}
SHORT = {"mean_field": "mean field", "tap": "TAP", "exact": "exact"}
LOOKS: dict[str, dict[str, Any]] = {
    **{name: {**APPROXIMATIONS[name].look, "marker": ""} for name in EQUATIONS},
    "exact": {"color": "black", "linestyle": "-"},
}
LOOKS["tap"] = {**LOOKS["tap"], "linestyle": "-"}


@dataclass(frozen=True)
class Plan:
    """How many spins, how many chains of them, and how long they are followed."""

    cases: tuple[tuple[int, int], ...]  # (D, N)
    chains: int
    steps: int
    steady_chains: int
    steady: int


QUICK = Plan(((1, 6), (1, 32), (3, 32)), 1000, 24, 128, 400)
FULL = Plan(((1, 8), (1, 48), (3, 48), (16, 48)), 3000, 28, 128, 800)


def couplings(kind: str, size: int, seed: int) -> Tensor:
    """J (N, N), with rows that add up to about one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if kind == "attention":
        queries, keys = normal(size, WIDTH), normal(size, WIDTH)
        scores = SHARPNESS * queries @ keys.mT / math.sqrt(WIDTH)
        return scores.fill_diagonal_(-math.inf).softmax(-1)
    noise = normal(size, size)
    if kind == "symmetric":
        noise = noise.triu(1) + noise.triu(1).mT
    matrix = 1 / (size - 1) + SPREAD * noise / math.sqrt(size)
    return matrix.fill_diagonal_(0.0)


def build(kind: str, dim: int, size: int, seed: int) -> sf.SpinSystem:
    """The system after the quench, in a field against the first axis."""
    site = exact_law(dim)
    assert site.radius is not None
    field = torch.zeros(size, dim, dtype=torch.float64)
    field[:, 0] = -FIELD * site.radius
    beta = STRENGTH * dim / site.radius**2
    return sf.SpinSystem(couplings(kind, size, seed), field, beta, site)


def length(vectors: Tensor, system: sf.SpinSystem) -> Tensor:
    """Root mean square over spins in units of R: (..., N, D) -> (...)."""
    assert system.site.radius is not None
    return vectors.square().sum(-1).mean(-1).sqrt() / system.site.radius


def noisy_length(vectors: Tensor, errors: Tensor, system: sf.SpinSystem) -> tuple[Tensor, Tensor]:
    """The same of vectors with errors, without what the errors add, and its own error.

    From the first on that doesn't stand out of the noise (three errors of the square) both are NaN.
    """
    assert system.site.radius is not None
    unit = system.num_spins * system.site.radius**2
    variance = errors.square()
    square = (vectors.square() - variance).sum((-2, -1)) / unit
    # Var (x + e)^2 = 4 x^2 s^2 + 2 s^4, with x^2 replaced by its unbiased value.
    spread = 4 * (vectors.square() - variance).clamp_min(0) * variance + 2 * variance.square()
    error = spread.sum((-2, -1)).sqrt() / unit
    # Later ones would be shown only where noise lifts them.
    clear = (square > 3 * error).to(torch.int64).cumprod(0).bool()
    size = torch.where(clear, square, torch.nan).sqrt()
    return size, error / (2 * size)


def along(transient: Transient) -> Tensor:
    """Mean magnetization along the new field in units of R, (steps + 1)."""
    system = transient.protocol.system
    assert system.site.radius is not None
    return -transient.magnetization[..., 0].mean(-1) / system.site.radius


def second_eigenvalue(transition: Tensor) -> float:
    """Largest modulus below one of the eigenvalues of a transition matrix: its slowest decay."""
    return float(torch.linalg.eigvals(transition).abs().sort().values[-2])


def decay(
    distance: list[float | None], error: list[float | None], near: float = 0.2
) -> float | None:
    """The factor a step by which a measured distance falls, by a fit of its logarithm.

    Where it is below ``near``, and deviations are small enough to be linear, and well above its
    error. None with less than three such points.
    """
    points = [
        (t, math.log(d), e / d)
        for t, (d, e) in enumerate(zip(distance, error, strict=True))
        if d is not None and e is not None and d < near and 0 < e < d / 5
    ]
    if len(points) < 3:
        return None
    t, y, s = torch.tensor(points, dtype=torch.float64).unbind(-1)
    weight = s**-2
    centre = (weight * t).sum() / weight.sum()
    slope = (weight * (t - centre) * y).sum() / (weight * (t - centre) ** 2).sum()
    return math.exp(float(slope))


@torch.no_grad()
def measure(kind: str, dim: int, size: int, plan: Plan, seed: int) -> dict[str, Any]:
    """All curves of one system."""
    system = build(kind, dim, size, seed)
    assert system.site.radius is not None
    # Across the new field, so that turning modes are excited; one component can only flip.
    start = torch.zeros_like(system.field)
    start[:, -1] = system.site.radius
    result: dict[str, Any] = {
        "kind": kind,
        "dim": dim,
        "size": size,
        "unsolved": [],
        "neighbours": float(1 / system.couplings.to_dense().square().sum(-1).mean()),
    }

    sampled = ParallelDynamics(chains=plan.chains, seed=seed).run(system, plan.steps, start)
    # Few of them, for long: a time average at rest costs less than so many chains in step.
    followed = sampled.spins[: plan.steady_chains]
    steady = ParallelDynamics(
        chains=len(followed),
        steps=plan.steady,
        warmup=0,
        correlations=False,
        seed=seed + 1,  # random numbers of their own
    ).steady_state(system, followed)
    m, error = sampled.magnetization, sampled.standard_error("magnetization")
    rest, rest_error = steady.magnetization, steady.standard_error("magnetization")
    moment_error = sampled.standard_error("moment")[..., 0] / (size * system.site.radius)
    distance, distance_error = noisy_length(m - rest, torch.hypot(error, rest_error), system)
    change, change_error = noisy_length(m.diff(dim=0), torch.hypot(error[1:], error[:-1]), system)
    heat = sampled.flows.cumsum(0) / size
    result["sampled"] = {
        "along": along(sampled).tolist(),
        "along_error": moment_error.tolist(),
        "distance": _listed(distance),
        "distance_error": _listed(distance_error),
        "mismatch": _listed(change),
        "mismatch_error": _listed(change_error),
        "entropy": heat.mean(1).tolist(),
        "entropy_error": (heat.std(1) / math.sqrt(plan.chains)).tolist(),
        "production": float(steady.entropy_production) / size,
        "production_error": float(steady.standard_error("entropy_production")) / size,
    }
    result["sampled"]["rate"] = decay(
        result["sampled"]["distance"], result["sampled"]["distance_error"]
    )

    for name, equation in EQUATIONS.items():
        solver = equation()
        try:
            fixed = solver.steady_state(system)
            transient = solver.run(system, plan.steps, start)
        except sf.ConvergenceError:  # too strong a coupling of some draw for the expansion
            result["unsolved"].append(name)
            continue
        result[name] = {
            **_curves(transient, fixed.magnetization),
            "rate": float(fixed.spectral_radius()),
            "production": float(fixed.entropy_production) / size,
        }
    chain = ExactDynamics()
    if dim == 1 and size <= chain.max_spins:
        stationary = chain.steady_state(system)
        result["exact"] = {
            **_curves(chain.run(system, plan.steps, start), stationary.magnetization),
            "rate": second_eigenvalue(stationary.transition),
            "production": float(stationary.entropy_production) / size,
        }
    return result


def _curves(transient: Transient, rest: Tensor) -> dict[str, list[float]]:
    system = transient.protocol.system
    m = transient.magnetization
    return {
        "along": along(transient).tolist(),
        "distance": length(m - rest, system).tolist(),
        "mismatch": length(m.diff(dim=0), system).tolist(),
        "entropy": (transient.entropy_flow.cumsum(0) / system.num_spins).tolist(),
    }


def _listed(values: Tensor) -> list[float | None]:
    """None for NaN, which JSON has no word for."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def _numbers(values: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


ROWS = {
    "along": "$m / R$ along the new field",
    "error": "equation $-$ simulation",
    "distance": r"distance from rest $d(t)$",
    "mismatch": r"mismatch $|m(t{+}1) - m(t)| / R$",
    "entropy": "entropy given to the bath,\nper spin, since the quench",
}


def draw(panels: list[dict[str, Any]]) -> Figure:
    """Systems of one D and N: a column a kind of coupling, a row a quantity."""
    dim, size = panels[0]["dim"], panels[0]["size"]
    figure = blank(1 + 3.1 * len(panels), 11)
    spins = "Ising spins" if dim == 1 else f"spins of {dim} components"
    change = "reversed" if dim == 1 else "turned by 90 degrees"
    figure.suptitle(
        f"{size} {spins} after the field is {change}: all answer at once, step by step",
        fontsize=12,
    )
    axes = figure.subplots(len(ROWS), len(panels), squeeze=False, sharex=True, sharey="row")
    handles: dict[str, Any] = {}
    for column, panel in enumerate(panels):
        axes[0, column].set_title(KINDS[panel["kind"]], fontsize=10)
        axes[-1, column].set_xlabel("step $t$ after the quench", fontsize=9)
        for (row, label), axis in zip(ROWS.items(), axes[:, column], strict=True):
            clean(axis)
            axis.tick_params(labelleft=column == 0)
            if column == 0:
                axis.set_ylabel(label, fontsize=9)
            _draw_row(axis, row, panel, handles)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _draw_row(axis: Axes, row: str, panel: dict[str, Any], handles: dict[str, Any]) -> None:
    sampled = panel["sampled"]
    key = "along" if row == "error" else row
    first = 1 if row == "entropy" else 0
    steps = range(first, first + len(sampled[key]))
    errors = _numbers(sampled[f"{key}_error"])
    names = [name for name in LOOKS if name in panel]
    if row == "error":
        axis.axhline(0, color="0.6", linewidth=0.8)
        band = axis.fill_between(
            steps,
            [-2 * e for e in errors],
            [2 * e for e in errors],
            color="0.3",
            alpha=0.25,
            linewidth=0,
        )
        handles.setdefault("two standard errors of the simulation", band)
    else:
        points = axis.errorbar(
            steps,
            _numbers(sampled[key]),
            errors,
            fmt="o",
            color="0.3",
            markersize=3.2,
            linewidth=1,
            zorder=5,
        )
        handles.setdefault("simulation", points)
    for name in names:
        values = panel[name][key]
        if row == "error":
            values = [value - point for value, point in zip(values, sampled[key], strict=True)]
        (line,) = axis.plot(steps, values, **LOOKS[name], linewidth=1.5)
        handles.setdefault(LABELS[name], line)
    if row == "along" and panel["unsolved"]:
        lost = ", ".join(SHORT[name] for name in panel["unsolved"])
        axis.text(0.97, 0.06, f"no solution of {lost}", transform=axis.transAxes, ha="right")
    if row in ("distance", "mismatch"):
        axis.set_yscale("log")
        axis.set_ylim(1e-4, 3)
    if row == "distance":
        _predict(axis, panel, names, handles)
    if row == "entropy":
        rate = sampled["production"]
        text = f"at rest: {rate:.3f} a step" if rate else "at rest: nothing more"
        axis.text(0.03, 0.9, text, transform=axis.transAxes, fontsize=9)


def _predict(axis: Axes, panel: dict[str, Any], names: list[str], handles: dict[str, Any]) -> None:
    """rho^t through a late point of every curve."""
    for name in names:
        curve, rate = panel[name]["distance"], panel[name]["rate"]
        last = max((t for t, d in enumerate(curve) if d > 3e-4), default=0)
        steps = range(last + 1)
        values = [curve[last] * rate ** (t - last) for t in steps]
        # Wide and pale, under the curve that it predicts.
        (line,) = axis.plot(steps, values, color=LOOKS[name]["color"], linewidth=6, alpha=0.25)
        handles.setdefault(r"predicted rate $\rho^t$, in the equation's colour", line)
    lines = [rf"$\rho$ = {panel[name]['rate']:.3f}  {SHORT[name]}" for name in names]
    if panel["sampled"]["rate"] is not None:
        lines.append(f"fitted {panel['sampled']['rate']:.3f}  simulation")
    axis.text(
        0.97,
        0.95,
        "\n".join(lines),
        transform=axis.transAxes,
        ha="right",
        va="top",
        fontsize=8,
    )


def render(results: dict[str, Any]) -> str:
    """Rates, largest errors on the way, and the entropy production at rest."""
    rows = []
    for panel in results["panels"]:
        label = f"{KINDS[panel['kind']]}, D = {panel['dim']}, N = {panel['size']}"
        sampled = panel["sampled"]
        rate = "-" if sampled["rate"] is None else f"{sampled['rate']:.3f}"
        production = f"{sampled['production']:.5f} ± {sampled['production_error']:.5f}"
        rows.append((label, "simulation", rate, "", production))
        rows += [("", LABELS[name], "no solution", "", "") for name in panel["unsolved"]]
        for name in LOOKS:
            if name not in panel:
                continue
            error = max(
                abs(value - point)
                for value, point in zip(panel[name]["along"], sampled["along"], strict=True)
            )
            rows.append(
                (
                    "",
                    LABELS[name],
                    f"{panel[name]['rate']:.3f}",
                    f"{error:.4f}",
                    f"{panel[name]['production']:.5f}",
                )
            )
    header = ("system", "by", "decay a step", "largest error of m / R", "entropy a spin and step")
    return align(header, rows)


class _Relaxation:
    name = "relaxation"
    description = "a quench of the field: the way to the steady state, its rate and its entropy"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--chains", type=positive, metavar="N", help="of each system (default 3000, quick 1000)"
        )

    def run(self, args: argparse.Namespace) -> int:
        plan = QUICK if args.quick else FULL
        if args.chains:
            plan = replace(plan, chains=args.chains)
        todo = [(kind, dim, size) for dim, size in plan.cases for kind in KINDS]
        done, interruption = collect(todo, "system", lambda case: measure(*case, plan, args.seed))
        content = {"strength": STRENGTH, "field": FIELD, **asdict(plan), "panels": done}

        def show(results: dict[str, Any]) -> tuple[str, list[Path]]:
            groups: dict[str, list[dict[str, Any]]] = {}
            for panel in done:
                groups.setdefault(f"d{panel['dim']}_n{panel['size']}.png", []).append(panel)
            figures = {name: draw(panels) for name, panels in groups.items()}
            return render(results), save(figures, args.out)

        return conclude(self.name, args, interruption, content, show if done else None)


STUDY = _Relaxation()
