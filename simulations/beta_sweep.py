r"""Free energy, energy and entropy against temperature: approximations, exact results, Monte Carlo.

Systems whose free energy is known, with spins of length sqrt(D), so that :math:`\beta J R^2 / D =
\beta J` is the strength of a bond:

* ``ring``: eight spins around a ring with J = 1, without a field, D = 1 and 3;
* ``pair``: two spins with J = 1 in fields :math:`h_{ia} = 0.7 \cos(i a + i)`, D = 3 and 64;
* ``glass``: ten Ising spins, Gaussian couplings of variance 1 / N and Gaussian fields of standard
  deviation 1/2, one instance.

The Monte Carlo points know nothing of the approximations: U is a mean over four chains, and F is
integrated over the strength of the couplings (:class:`~spinformer.sampling.free_energy
.ThermodynamicIntegration`); error bars are standard errors. Mean field has many solutions in the
cold and is shown at the one of lowest free energy; the other methods start from the fields alone.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

import spinformer as sf
from simulations.approximations import APPROXIMATIONS, ITERATION, exact_law
from simulations.figures import blank, clean, save
from simulations.options import natural
from simulations.results import collect, conclude
from simulations.tables import align
from spinformer.sampling.free_energy import ThermodynamicIntegration
from spinformer.sampling.monte_carlo import MonteCarlo

SHOWN = ("mean_field", "tap", "adaptive_tap", "bethe", "sd0", "sd1")
QUANTITIES = {
    "free_energy": "free energy F per spin",
    "internal_energy": "energy U per spin",
    "entropy": "entropy S per spin",
}
_STARTS = 6
_NODES = 8


@dataclass(frozen=True)
class Family:
    """A column of the figure."""

    name: str
    dim: int

    @property
    def title(self) -> str:
        """What stands above the column."""
        names = {
            "ring": f"ring of 8, no field, D = {self.dim}",
            "pair": f"pair in fields, D = {self.dim}",
            "glass": "spin glass, N = 10, Ising",
        }
        return names[self.name]

    def system(self, betas: Tensor, seed: int) -> sf.SpinSystem:
        """The same couplings and fields at every beta."""
        if self.name == "glass":
            generator = torch.Generator().manual_seed(seed)
            couplings: Tensor | sf.Couplings = sf.couplings.sherrington_kirkpatrick(
                10, generator=generator, dtype=torch.float64
            )
            field = torch.randn(10, 1, generator=generator, dtype=torch.float64) / 2
        elif self.name == "pair":
            index = torch.arange(1, 3, dtype=torch.float64)[:, None]
            component = torch.arange(self.dim, dtype=torch.float64)
            couplings = 1 - torch.eye(2, dtype=torch.float64)
            field = 0.7 * torch.cos(index * component + index)
        else:
            couplings = sf.couplings.ring(8, dtype=torch.float64)
            field = torch.zeros(8, self.dim, dtype=torch.float64)
        return sf.SpinSystem(couplings, field, betas, exact_law(self.dim))


FAMILIES = (
    Family("ring", 1),
    Family("ring", 3),
    Family("pair", 3),
    Family("pair", 64),
    Family("glass", 1),
)


def _solver(name: str, seed: int) -> Any:
    if name == "tap":
        # In the cold it has no solution near the field's, and steps would be spent in vain.
        return sf.TAP(**ITERATION | {"max_iterations": 300})
    if name != "mean_field":
        return APPROXIMATIONS[name].make()
    generator = torch.Generator().manual_seed(seed)
    return sf.LowestFreeEnergy(
        sf.MeanField(**ITERATION), starts=_STARTS, anneal=(0.5,), generator=generator
    )


def measure(family: Family, betas: Tensor, seed: int) -> dict[str, Any]:
    """Exact and approximate totals per spin at every beta, None where a method failed."""
    system = family.system(betas, seed)
    found = {"exact": _values(sf.Exact().solve(system))}
    for name in SHOWN:
        # Bethe knows the mean of a bond of spheres without fields, and of Ising spins.
        if name == "bethe" and family.name == "pair":
            continue
        with torch.no_grad():
            found[name] = _values(_solver(name, seed).solve(system))
    return found


def _values(equilibrium: sf.Equilibrium) -> dict[str, list[float | None]]:
    rows: dict[str, list[float | None]] = {}
    for quantity in QUANTITIES:
        value = getattr(equilibrium, f"{quantity}_per_spin").detach()
        kept = equilibrium.converged & value.isfinite()
        rows[quantity] = [
            x if good else None for x, good in zip(value.tolist(), kept.tolist(), strict=True)
        ]
    return rows


@torch.no_grad()
def sample(family: Family, betas: Tensor, seed: int, sweeps: int) -> dict[str, Any]:
    """Monte Carlo of F, U and S per spin with standard errors, and what the runs complained of."""
    notes: list[str] = []
    monte_carlo = MonteCarlo(sweeps=sweeps, seed=seed, correlations=False, on_failure=notes.append)
    system = family.system(betas, seed)
    found = ThermodynamicIntegration(monte_carlo, _NODES, on_failure=notes.append).solve(system)
    # The last node is the system itself.
    energy = found.sampled.internal_energy[-1]
    error = found.sampled.standard_error("internal_energy")[-1]
    # Whatever the rule of integration may add is added in full.
    log_error = found.error + found.quadrature_error
    n = system.num_spins
    values = {
        "free_energy": (found.free_energy, log_error / betas),
        "internal_energy": (energy, error),
        "entropy": (betas * energy + found.log_partition, torch.hypot(betas * error, log_error)),
    }
    row: dict[str, Any] = {"beta": betas.tolist(), "notes": notes}
    for quantity, (value, deviation) in values.items():
        row[quantity] = (value / n).tolist()
        row[f"{quantity}_error"] = (deviation / n).tolist()
    return row


def scores(column: dict[str, Any]) -> list[float]:
    """(Monte Carlo - exact) / standard error of F and U, both at every beta of the points."""
    if column["monte_carlo"] is None:
        return []
    points, found = column["monte_carlo"], []
    for quantity in ("free_energy", "internal_energy"):
        found += [
            (value - exact) / error
            for value, error, exact in zip(
                points[quantity],
                points[f"{quantity}_error"],
                points[f"{quantity}_exact"],
                strict=True,
            )
            # A run so cold and short that it saw one energy only knows no error.
            if error > 0
        ]
    return found


def draw(results: dict[str, Any], out: Path) -> Path:
    """A column a system; rows F, U, S and the error of F."""
    columns = results["columns"]
    figure = blank(1.4 + 3.1 * len(columns), 11.5)
    axes = figure.subplots(4, len(columns), squeeze=False, sharex=True)
    figure.suptitle(
        "From hot to cold: what each approximation makes of free energy, energy and entropy "
        r"(spins of length $\sqrt{D}$, J = 1)",
        fontsize=12,
    )
    handles: dict[str, Any] = {}
    for index, column in enumerate(columns):
        axes[0, index].set_title(column["title"], fontsize=10)
        axes[-1, index].set_xlabel(r"inverse temperature $\beta$", fontsize=9)
        for row, (quantity, label) in enumerate(QUANTITIES.items()):
            handles |= _draw_quantity(axes[row, index], column, results["beta"], quantity)
            if index == 0:
                axes[row, 0].set_ylabel(label, fontsize=9)
        _draw_errors(axes[-1, index], column, results["beta"])
        if index == 0:
            axes[-1, 0].set_ylabel(r"error of F per spin, $|F - F_{\rm exact}| / N$", fontsize=9)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=9
    )
    for axis in axes[-1]:
        axis.set_xticks([0.1, 0.2, 0.5, 1, 2, 4], ["0.1", "0.2", "0.5", "1", "2", "4"])
        axis.minorticks_off()
    (path,) = save({"beta_sweep.png": figure}, out)
    return path


def _draw_quantity(
    axis: Axes, column: dict[str, Any], betas: list[float], quantity: str
) -> dict[str, Any]:
    clean(axis)
    axis.set_xscale("log")
    handles: dict[str, Any] = {}
    exact = np.array(column["methods"]["exact"][quantity], dtype=float)
    (handles["exact"],) = axis.plot(betas, exact, color="0.75", linewidth=6, solid_capstyle="round")
    for name in SHOWN:
        if name not in column["methods"]:
            continue
        method = APPROXIMATIONS[name]
        values = np.array(column["methods"][name][quantity], dtype=float)
        (handles[method.label],) = axis.plot(betas, values, **_look(name))
    if column["monte_carlo"] is not None:
        points = column["monte_carlo"]
        handles["Monte Carlo"] = axis.errorbar(
            points["beta"],
            points[quantity],
            points[f"{quantity}_error"],
            fmt="o",
            color="black",
            markerfacecolor="white",
            markersize=5,
            capsize=2.5,
            zorder=5,
        )
    # The failure of one approximation must not hide what the others do.
    reach = float(np.ptp(exact)) or 1.0
    axis.set_ylim(float(exact.min()) - 0.35 * reach, float(exact.max()) + 0.35 * reach)
    return handles


def _look(name: str) -> dict[str, Any]:
    look = APPROXIMATIONS[name].look
    # Without a field adaptive TAP of a ring is steepest descent: one shows around the other.
    width = 4.0 if name == "adaptive_tap" else 1.5
    return {"color": look["color"], "linestyle": look["linestyle"], "linewidth": width}


def _draw_errors(axis: Axes, column: dict[str, Any], betas: list[float]) -> None:
    clean(axis)
    axis.set_xscale("log")
    axis.set_yscale("log")
    exact = np.array(column["methods"]["exact"]["free_energy"], dtype=float)
    for name in SHOWN:
        if name not in column["methods"]:
            continue
        error = np.abs(np.array(column["methods"][name]["free_energy"], dtype=float) - exact)
        error[error < 1e-8] = np.nan
        axis.plot(betas, error, **_look(name))
    if column["monte_carlo"] is not None:
        points = column["monte_carlo"]
        axis.plot(points["beta"], points["free_energy_error"], "_", color="black", markersize=11)
        axis.text(
            0.97, 0.03, "black dashes: standard error of Monte Carlo", ha="right", fontsize=7,
            transform=axis.transAxes,
        )  # fmt: skip
    axis.set_ylim(1e-7, max(3.0, float(np.nanmax(np.abs(exact)))))


def render(results: dict[str, Any]) -> str:
    """Errors of F per spin at three temperatures, and the scores of the points."""
    betas = results["beta"]
    chosen = [min(range(len(betas)), key=lambda i: abs(math.log(betas[i] / b))) for b in _CHOSEN]
    rows = []
    for column in results["columns"]:
        exact = column["methods"]["exact"]["free_energy"]
        for name in SHOWN:
            if name not in column["methods"]:
                continue
            values = column["methods"][name]["free_energy"]
            cells = [None if values[i] is None else values[i] - exact[i] for i in chosen]
            rows.append(
                (
                    f"{column['title']}: {APPROXIMATIONS[name].label}",
                    *("failed" if cell is None else f"{cell:+.1e}" for cell in cells),
                )
            )
    table = align(("F - exact, per spin", *(f"beta {betas[i]:.2g}" for i in chosen)), rows)
    lines = [table, ""]
    for column in results["columns"]:
        found = scores(column)
        if found:
            square = sum(z * z for z in found) / len(found)
            lines.append(
                f"Monte Carlo, {column['title']}: largest |z| of F and U "
                f"{max(map(abs, found)):.1f}, mean square {square:.2f} ({len(found)} values)"
            )
            lines += [f"  {note}" for note in column["monte_carlo"]["notes"]]
    return "\n".join(lines)


_CHOSEN = (0.2, 0.7, 2.0)


class _BetaSweep:
    name = "beta_sweep"
    description = "free energy, energy and entropy against beta, with exact and Monte Carlo results"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--sweeps",
            type=natural,
            metavar="K",
            help="Monte Carlo sweeps (default 600, quick 100; 0: no Monte Carlo)",
        )

    def run(self, args: argparse.Namespace) -> int:
        sweeps = args.sweeps
        if sweeps is None:
            sweeps = 100 if args.quick else 600
        steps, points = (9, 3) if args.quick else (31, 5)
        betas = torch.logspace(-1, math.log10(4.0), steps, dtype=torch.float64)
        at = torch.logspace(math.log10(0.2), math.log10(2.0), points, dtype=torch.float64)

        def column(family: Family) -> dict[str, Any]:
            row = None
            if sweeps:
                row = sample(family, at, args.seed, sweeps)
                exact = _values(sf.Exact().solve(family.system(at, args.seed)))
                row |= {f"{quantity}_exact": value for quantity, value in exact.items()}
            return {
                "family": family.name,
                "dim": family.dim,
                "title": family.title,
                "methods": measure(family, betas, args.seed),
                "monte_carlo": row,
            }

        columns, interruption = collect(FAMILIES, "system", column)
        content = {"sweeps": sweeps, "beta": betas.tolist(), "columns": columns}
        show = (lambda results: (render(results), [draw(results, args.out)])) if columns else None
        return conclude(self.name, args, interruption, content, show)


STUDY = _BetaSweep()
