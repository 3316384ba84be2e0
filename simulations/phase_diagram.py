r"""Order, response and fluctuations against temperature: every approximation on Monte Carlo points.

Four ways to couple N spins of length sqrt(D) in a weak uniform field: Curie-Weiss (everyone with
everyone), Sherrington-Kirkpatrick (a glass), and the square and the simple cubic lattice.
Temperatures are in units of :math:`T_0 = R^2 \sum_j J_{ij} / D`, where mean field orders (for the
glass, with couplings of variance 1/N, :math:`T_0 = R^2 / D`), and the field is the given share of
the largest force that neighbours can exert. Shown per spin: the order parameter (the magnetization
along the field, :math:`m / R`; for the glass
:math:`q = \sum_i |m_i|^2 / N R^2`), the susceptibility of the total moment to the field
:math:`\chi D T_0 / R^2`, and the specific heat. Free spins have :math:`\chi D T_0 / R^2 = T_0 / T`
and C = 0.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import spinformer as sf
from simulations.approximations import APPROXIMATIONS, exact_law
from simulations.figures import blank, clean, save
from simulations.options import positive
from simulations.results import collect, conclude
from simulations.tables import align
from spinformer.sampling import HeatBath, ParallelTempering, SampledEquilibrium

SHOWN = ("mean_field", "tap", "adaptive_tap", "sd0", "sd1")
KINDS = {
    "curie_weiss": "Curie-Weiss",
    "glass": "Sherrington-Kirkpatrick glass",
    "square": "square lattice",
    "cubic": "simple cubic lattice",
}
DIMS = (1, 2, 3, 8)
QUANTITIES = {
    "order": r"order parameter",
    "susceptibility": r"$\chi\, D T_0 / R^2$ per spin",
    "specific_heat": r"specific heat per spin",
}
# T_c / T_0 of infinite lattices: Onsager's for the square Ising lattice; K_c of the cubic ones of
# Ferrenberg, Xu & Landau (2018) and Deng, Bloete & Nightingale (2005), T_c / T_0 = D / (6 K_c).
CRITICAL = {
    ("square", 1): 1 / (4 * 0.44068679350977151),
    ("cubic", 1): 1 / (6 * 0.221654626),
    ("cubic", 2): 2 / (6 * 0.4541659),
    ("cubic", 3): 3 / (6 * 0.693003),
}


@dataclass(frozen=True)
class Plan:
    """How large the systems are, and how long they are sampled."""

    sizes: dict[str, int]
    instances: int
    temperatures: int
    chains: int
    sweeps: int


QUICK = Plan({"curie_weiss": 32, "glass": 24, "square": 6, "cubic": 4}, 2, 6, 4, 400)
FULL = Plan({"curie_weiss": 64, "glass": 64, "square": 16, "cubic": 6}, 2, 14, 8, 2000)


@dataclass(frozen=True)
class Panel:
    """One way to couple spins of one dimension: a column of a figure."""

    kind: str
    dim: int

    def systems(self, plan: Plan, temperatures: Tensor, field: float, seed: int) -> sf.SpinSystem:
        """All of its temperatures (axis 0) and instances (axis 1) as one batch."""
        size, dtype = plan.sizes[self.kind], torch.float64
        couplings: sf.Couplings
        total = 1.0  # sum_j J_ij, the largest force of neighbours in units of R
        instances = 1
        if self.kind == "curie_weiss":
            couplings = sf.couplings.curie_weiss(size, dtype=dtype)
        elif self.kind == "glass":
            instances = plan.instances
            couplings = sf.couplings.sherrington_kirkpatrick(
                size,
                generator=torch.Generator().manual_seed(seed),
                batch_shape=(instances,),
                dtype=dtype,
            )
        else:
            lattice = sf.couplings.square if self.kind == "square" else sf.couplings.cubic
            couplings = lattice(size, dtype=dtype)
            total = 2.0 * len(couplings.shape)
        site = exact_law(self.dim)
        assert site.radius is not None
        h = torch.zeros(instances, couplings.num_spins, self.dim, dtype=dtype)
        h[..., -1] = field * total * site.radius
        beta = self.dim / (site.radius**2 * total * temperatures)
        return sf.SpinSystem(couplings, h.expand(len(beta), *h.shape), beta[:, None], site)


def observe(equilibrium: sf.Equilibrium) -> dict[str, Tensor]:
    """The three quantities per spin, (temperatures, instances)."""
    m, radius = equilibrium.magnetization, _radius(equilibrium.system)
    glass = _is_glass(equilibrium.system)
    along = torch.zeros_like(equilibrium.system.field)
    along[..., -1] = 1
    chi = equilibrium.susceptibility_product(along)[..., -1].mean(-1)
    return {
        "order": m.square().sum(-1).mean(-1) / radius**2 if glass else m[..., -1].mean(-1) / radius,
        "susceptibility": chi * _unit(equilibrium.system),
        "specific_heat": equilibrium.specific_heat_per_spin(),
    }


def observe_sampled(equilibrium: SampledEquilibrium) -> dict[str, tuple[Tensor, Tensor]]:
    """The same with standard errors."""
    system, m = equilibrium.system, equilibrium.magnetization
    n, radius = system.num_spins, _radius(equilibrium.system)
    error = equilibrium.standard_error("magnetization")
    if _is_glass(system):
        # The square of a mean is too large by the square of its error.
        order = (m.square() - error.square()).sum(-1).mean(-1) / radius**2
        order_error = 2 * (m * error).square().sum((-2, -1)).sqrt() / (n * radius**2)
    else:
        order = equilibrium.moment[..., -1] / (n * radius)
        order_error = equilibrium.standard_error("moment")[..., -1] / (n * radius)
    unit = _unit(system) / n
    chi = equilibrium.uniform_susceptibility()[..., -1, -1] * unit
    chi_error = equilibrium.standard_error("uniform_susceptibility")[..., -1, -1] * unit
    return {
        "order": (order, order_error),
        "susceptibility": (chi, chi_error),
        "specific_heat": (
            equilibrium.specific_heat_per_spin(),
            equilibrium.standard_error("specific_heat_per_spin"),
        ),
    }


def _radius(system: sf.SpinSystem) -> float:
    assert system.site.radius is not None  # Ising spins and spheres
    return system.site.radius


def _is_glass(system: sf.SpinSystem) -> bool:
    return isinstance(system.couplings, sf.couplings.Dense)


def _unit(system: sf.SpinSystem) -> float:
    """D T_0 / R^2 = sum_j J_ij: what makes the susceptibility of a site a number."""
    couplings = system.couplings
    return 2.0 * len(couplings.shape) if isinstance(couplings, sf.couplings.Lattice) else 1.0


@torch.no_grad()
def measure(
    panel: Panel, plan: Plan, temperatures: Tensor, field: float, seed: int
) -> dict[str, Any]:
    """A panel's points and curves, averages over the instances."""
    system = panel.systems(plan, temperatures, field, seed)
    sampled: dict[str, Any] = {}
    # Spins that are all coupled go one by one, at a price that hardly depends on the chains.
    share = 1 if panel.kind in ("square", "cubic") else 4
    options: dict[str, Any] = {
        "chains": share * plan.chains,
        "sweeps": plan.sweeps // share,
        "seed": seed,
        "correlations": False,
        "on_failure": "ignore",  # shown as an open symbol
    }
    if panel.kind == "glass":
        one = system.replace(field=system.field[0], beta=1.0)
        equilibrium = ParallelTempering(system.beta, **options).solve(one)
    else:
        moves = HeatBath() if panel.kind == "curie_weiss" else None
        equilibrium = sf.MonteCarlo(moves, initial="ordered", **options).solve(system)
    for name, (value, error) in observe_sampled(equilibrium).items():
        instances = value.shape[1]
        sampled[name] = value.mean(1).tolist()
        sampled[f"{name}_error"] = (error.square().sum(1).sqrt() / instances).tolist()
    sampled["settled"] = equilibrium.diagnostics.passed.all(1).tolist()

    curves: dict[str, Any] = {}
    ordered = torch.zeros_like(system.field)
    ordered[..., -1] = 0.9 * _radius(system)
    for name in SHOWN:
        solver = APPROXIMATIONS[name].make()
        # Steepest descent has one solution. The others start where an ordered one would be found,
        # but for the glass, which has no order along the field.
        start = None if name in ("sd0", "sd1") or panel.kind == "glass" else ordered
        solved = solver.solve(system, start)
        # A mean over the systems that were solved alone would flatter.
        kept = solved.converged.all(1)
        curves[name] = {
            quantity: [
                float(mean) if use and bool(mean.isfinite()) else None
                for mean, use in zip(value.mean(1), kept, strict=True)
            ]
            for quantity, value in observe(solved).items()
        }
        curves[name]["converged"] = solved.converged.double().mean(1).tolist()
    return {"kind": panel.kind, "dim": panel.dim, "sampled": sampled, "curves": curves}


def draw(results: dict[str, Any], kind: str) -> Figure:
    """A way to couple: a column a dimension, a row a quantity, against temperature."""
    panels = [panel for panel in results["panels"] if panel["kind"] == kind]
    temperatures = results["temperature"]
    figure = blank(1.2 + 3.1 * len(panels), 8.6)
    size = results["sizes"][kind]
    sites = {"square": f"{size} x {size}", "cubic": f"{size} x {size} x {size}"}.get(
        kind, f"{size}"
    )
    figure.suptitle(
        f"{KINDS[kind]}, {sites} spins\n"
        f"in a field of {results['field']:.0%} of the neighbours' force; T$_0$: "
        + (
            "$R^2/D$, half of where mean field orders; curves end where equations were not solved"
            if kind == "glass"
            else "where mean field orders without a field"
        ),
        fontsize=12,
    )
    axes = figure.subplots(len(QUANTITIES), len(panels), squeeze=False, sharex=True, sharey="row")
    handles: dict[str, Any] = {}
    for column, panel in enumerate(panels):
        dim = panel["dim"]
        axes[0, column].set_title("Ising, D = 1" if dim == 1 else f"D = {dim}", fontsize=10)
        axes[-1, column].set_xlabel(r"temperature $T / T_0$", fontsize=9)
        critical = CRITICAL.get((kind, dim))
        for row, (quantity, label) in enumerate(QUANTITIES.items()):
            axis = axes[row, column]
            clean(axis)
            if column == 0:
                text = (
                    r"$q = \sum_i |m_i|^2 / N R^2$"
                    if kind == "glass"
                    else "$m / R$ along the field"
                )
                axis.set_ylabel(text if quantity == "order" else label, fontsize=9)
            if critical is not None:
                line = axis.axvline(critical, color="0.6", linestyle=":", linewidth=1.2)
                handles.setdefault("infinite lattice orders (no field)", line)
            for name, curve in panel["curves"].items():
                look = {**APPROXIMATIONS[name].look, "marker": "", "linewidth": 1.5}
                values = [float("nan") if v is None else v for v in curve[quantity]]
                (line,) = axis.plot(temperatures, values, **look)
                handles.setdefault(APPROXIMATIONS[name].label, line)
            sampled = panel["sampled"]
            for settled, face in ((True, "0.3"), (False, "white")):
                chosen = [i for i, ok in enumerate(sampled["settled"]) if ok is settled]
                if not chosen:
                    continue
                points = axis.errorbar(
                    [temperatures[i] for i in chosen],
                    [sampled[quantity][i] for i in chosen],
                    [sampled[f"{quantity}_error"][i] for i in chosen],
                    fmt="o",
                    color="0.3",
                    markerfacecolor=face,
                    markersize=4,
                    capsize=2,
                    linewidth=1,
                    zorder=5,
                )
                name = "Monte Carlo" if settled else "Monte Carlo, too short a run"
                handles.setdefault(name, points)
            top = 1.05 if quantity == "order" else max(sampled[quantity]) * 1.35
            axis.set_ylim(0, max(top, axis.get_ylim()[1] if column else 0))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=9)
    return figure


def render(results: dict[str, Any]) -> str:
    """Largest distance of every curve from the points, and where it is."""
    rows = []
    for panel in results["panels"]:
        for name, curve in panel["curves"].items():
            cells = []
            for quantity in QUANTITIES:
                exact = panel["sampled"][quantity]
                scale = max(exact)
                found = [
                    (abs(value - point) / scale, t)
                    for value, point, t in zip(
                        curve[quantity], exact, results["temperature"], strict=True
                    )
                    if value is not None
                ]
                cells.append("-" if not found else "{:.0%} at {:.2f}".format(*max(found)))
            solved = sum(curve["converged"]) / len(curve["converged"])
            label = f"{KINDS[panel['kind']]}, D = {panel['dim']}: {APPROXIMATIONS[name].label}"
            rows.append((label, *cells, f"{solved:.0%}"))
    header = ("largest error, in units of the largest value, and T / T_0", "order", "chi", "C")
    return align((*header, "solved"), rows)


class _PhaseDiagram:
    name = "phase_diagram"
    description = "order, susceptibility and specific heat against temperature, with Monte Carlo"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--field",
            type=float,
            default=0.05,
            metavar="H",
            help="field, in units of the neighbours' largest force (default: %(default)s)",
        )
        parser.add_argument(
            "--systems",
            nargs="+",
            choices=KINDS,
            default=list(KINDS),
            metavar="KIND",
            help=f"some of {', '.join(KINDS)} (default: all)",
        )
        parser.add_argument(
            "--sweeps",
            type=positive,
            metavar="N",
            help="of a chain of a lattice; a quarter of them, in four times as many chains, where "
            "all spins are coupled (default 2000, quick 400)",
        )

    def run(self, args: argparse.Namespace) -> int:
        plan = QUICK if args.quick else FULL
        if args.sweeps:
            plan = replace(plan, sweeps=args.sweeps)
        # Hottest first, as a ladder of tempering wants them. In the coldest glass iterations fail,
        # which takes them long.
        coldest = 0.5 if args.quick else 0.25
        temperatures = torch.linspace(1.7, coldest, plan.temperatures, dtype=torch.float64)
        dims = (1, 3) if args.quick else DIMS
        done, interruption = collect(
            [Panel(kind, dim) for kind in args.systems for dim in dims],
            "panel",
            lambda panel: measure(panel, plan, temperatures, args.field, args.seed),
        )
        content = {
            "field": args.field,
            **asdict(plan),
            "temperature": temperatures.tolist(),
            "panels": done,
        }

        def show(results: dict[str, Any]) -> tuple[str, list[Path]]:
            kinds = dict.fromkeys(panel["kind"] for panel in done)
            figures = {f"{kind}.png": draw(results, kind) for kind in kinds}
            return render(results), save(figures, args.out)

        return conclude(self.name, args, interruption, content, show if done else None)


STUDY = _PhaseDiagram()
