r"""Every approximation against exact results, over temperature and dimension of the spins.

Three families of systems whose partition function is known:

* ``glass``: ten Ising spins, Gaussian couplings of variance 1 / N, Gaussian fields of standard
  deviation 1/2, by enumeration; averages over instances;
* ``pair``: two coupled spins of D components in fields that are not parallel, by quadrature;
* ``ring``: eight spins around a ring without a field, by their transfer matrix.

Spins have length sqrt(D), and :math:`\beta J R^2 / D = \beta` is the strength of one bond. Errors:
of m the root mean square over sites and components, divided by that of the exact one; of log Z per
spin the size; of the bonds :math:`\langle S_i\cdot S_j\rangle` the root mean square in units of
:math:`R^2`, by linear response (``correlations()``).
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import spinformer as sf
from simulations.approximations import APPROXIMATIONS, exact_law
from simulations.figures import blank, clean, save
from simulations.options import positive
from simulations.results import collect, conclude
from simulations.tables import align

# Families of an approximation that does not apply to all.
_FAMILIES = {"tap_large_d": ("pair",), "bethe": ("glass", "ring")}
# Share of the instances that must be solved for a mean over them to be shown.
_SOLVED = 0.9
QUANTITIES = {
    "magnetization": "relative error of m",
    "log_partition": "error of log Z per spin",
    "bonds": r"error of $\langle S_i\cdot S_j\rangle/R^2$",
}
# What a ring without a field has no say in.
_SHOWN = {
    "glass": ("magnetization", "log_partition", "bonds"),
    "pair": ("magnetization", "log_partition", "bonds"),
    "ring": ("log_partition", "bonds"),
}


@dataclass(frozen=True)
class Panel:
    """Systems of one family and one dimension: a column of the figure."""

    family: str
    dim: int

    @property
    def title(self) -> str:
        """What stands above the column."""
        names = {
            "glass": "spin glass, N = 10, Ising",
            "pair": f"pair in fields, D = {self.dim}",
            "ring": f"ring of 8, no field, D = {self.dim}",
        }
        return names[self.family]


def panels(quick: bool) -> list[Panel]:
    """The columns of the figure."""
    dims = (
        {"pair": (3, 64), "ring": (1, 3)}
        if quick
        else {
            "pair": (2, 3, 8, 64),
            "ring": (1, 3, 64),
        }
    )
    return [Panel("glass", 1)] + [
        Panel(family, dim) for family, every in dims.items() for dim in every
    ]


def build(panel: Panel, instances: int, seed: int) -> tuple[Tensor | sf.Couplings, Tensor]:
    """Couplings and fields of a panel, a batch of instances where they are random."""
    if panel.family == "glass":
        generator = torch.Generator().manual_seed(seed)
        couplings = sf.couplings.sherrington_kirkpatrick(
            10, generator=generator, batch_shape=(instances,), dtype=torch.float64
        )
        noise = torch.randn(instances, 10, 1, generator=generator, dtype=torch.float64)
        return couplings, noise / 2
    if panel.family == "pair":
        index = torch.arange(1, 3, dtype=torch.float64)[:, None]
        component = torch.arange(panel.dim, dtype=torch.float64)
        field = 0.7 * torch.cos(index * component + index)
        bond = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
        return bond, field[None]
    ring = sf.couplings.ring(8, dtype=torch.float64)
    return ring, torch.zeros(1, 8, panel.dim, dtype=torch.float64)


@torch.no_grad()
def measure(panel: Panel, betas: Tensor, instances: int, seed: int) -> dict[str, Any]:
    """Errors of every method, for every beta: means over the instances that it solved."""
    couplings, field = build(panel, instances, seed)
    dense = couplings.to_dense() if isinstance(couplings, sf.Couplings) else couplings
    bonds = dense.abs().expand(len(field), *dense.shape[-2:]) > 0
    found: dict[str, Any] = {
        name: {"converged": [], "seconds": 0.0, **{quantity: [] for quantity in QUANTITIES}}
        for name in APPROXIMATIONS
        if panel.family in _FAMILIES.get(name, (panel.family,))
    }
    for beta in betas.tolist():
        exact = sf.Exact().solve(sf.SpinSystem(dense, field, beta, exact_law(panel.dim)))
        reference = _observables(exact, bonds)
        for name, row in found.items():
            system = sf.SpinSystem(dense, field, beta, APPROXIMATIONS[name].site(panel.dim))
            start = time.perf_counter()
            equilibrium = APPROXIMATIONS[name].make().solve(system)
            observables = _observables(equilibrium, bonds)
            row["seconds"] += time.perf_counter() - start
            converged = equilibrium.converged
            row["converged"].append(float(converged.double().mean()))
            for quantity, value in observables.items():
                error = value - reference[quantity]
                size = error.square().mean(-1).sqrt()
                if quantity == "magnetization":
                    size = size / reference[quantity].square().mean(-1).sqrt()
                kept = size[converged & size.isfinite()]
                # A mean over the easy instances alone would flatter.
                shown = quantity in _SHOWN[panel.family] and len(kept) >= _SOLVED * len(size)
                row[quantity].append(float(kept.mean()) if shown else None)
    return found


def _observables(equilibrium: sf.Equilibrium, bonds: Tensor) -> dict[str, Tensor]:
    """Rows (systems, entries) of what is compared."""
    system = equilibrium.system
    radius = system.site.radius
    assert radius is not None  # Ising spins and spheres
    pairs = equilibrium.correlations().masked_fill(~bonds, 0.0)
    share = bonds.double().mean((-2, -1)).sqrt()[..., None]
    return {
        "magnetization": equilibrium.magnetization.flatten(-2),
        "log_partition": equilibrium.log_partition[..., None] / system.num_spins,
        "bonds": pairs.flatten(-2) / radius**2 / share,
    }


def draw(results: dict[str, Any], out: Path) -> Path:
    """One column a panel, one row a quantity, errors on logarithmic axes."""
    columns = results["panels"]
    figure = blank(1.4 + 2.7 * len(columns), 9.2)
    axes = figure.subplots(len(QUANTITIES), len(columns), squeeze=False, sharex=True, sharey="row")
    figure.suptitle(
        "Errors of the approximations against exact results (spins of length $\\sqrt{D}$)",
        fontsize=12,
    )
    handles: dict[str, Any] = {}
    for column, panel in enumerate(columns):
        axes[0, column].set_title(panel["title"], fontsize=9)
        axes[-1, column].set_xlabel(r"$\beta J R^2 / D$ (glass: $\beta$)", fontsize=9)
        for row, (quantity, label) in enumerate(QUANTITIES.items()):
            axis = axes[row, column]
            if quantity not in _SHOWN[panel["family"]]:
                axis.text(
                    0.5,
                    0.5,
                    "m = 0 without a field",
                    ha="center",
                    transform=axis.transAxes,
                    fontsize=9,
                    color="0.4",
                )
            if column == 0:
                axis.set_ylabel(label, fontsize=9)
            clean(axis)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_ylim(1e-7, 3)
            for name, entry in panel["methods"].items():
                points = [
                    (beta, error)
                    for beta, error in zip(results["beta"], entry[quantity], strict=True)
                    if error is not None and error > 0
                ]
                if not points:
                    continue
                look = {"markersize": 3.5, "linewidth": 1.4, **APPROXIMATIONS[name].look}
                (line,) = axis.plot(*zip(*points, strict=True), **look)
                handles.setdefault(APPROXIMATIONS[name].label, line)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=9
    )
    (path,) = save({"accuracy.png": figure}, out)
    return path


def render(results: dict[str, Any]) -> str:
    """A table a quantity: rows are methods and panels' columns the errors at three strengths."""
    betas = results["beta"]
    chosen = [min(range(len(betas)), key=lambda i: abs(betas[i] - b)) for b in (0.1, 0.5, 1.0)]
    parts = []
    for quantity, label in QUANTITIES.items():
        rows = []
        for panel in results["panels"]:
            if quantity not in _SHOWN[panel["family"]]:
                continue
            for name, entry in panel["methods"].items():
                cells = [entry[quantity][i] for i in chosen]
                rows.append(
                    (
                        f"{panel['title']}: {APPROXIMATIONS[name].label}",
                        *("-" if cell is None else f"{cell:.1e}" for cell in cells),
                        f"{min(entry['converged'][i] for i in chosen):.0%}",
                    )
                )
        plain = label.replace("$", "").replace(r"\langle ", "<").replace(r"\rangle", ">")
        header = (
            plain.replace(r"\cdot ", " . "),
            *(f"beta {betas[i]:.2g}" for i in chosen),
            "solved",
        )
        parts.append(align(header, rows))
    return "\n\n".join(parts)


class _Accuracy:
    name = "accuracy"
    description = "every approximation against exact results, over beta and D"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--instances", type=positive, metavar="K", help="random glasses (default 40, quick 5)"
        )

    def run(self, args: argparse.Namespace) -> int:
        instances = args.instances or (5 if args.quick else 40)
        steps = 7 if args.quick else 17
        betas = torch.logspace(math.log10(0.05), math.log10(2.0), steps, dtype=torch.float64)

        def column(panel: Panel) -> dict[str, Any]:
            methods = measure(panel, betas, instances, args.seed)
            return {**asdict(panel), "title": panel.title, "methods": methods}

        rows, interruption = collect(panels(args.quick), "panel", column)
        content = {"instances": instances, "beta": betas.tolist(), "panels": rows}
        show = (lambda results: (render(results), [draw(results, args.out)])) if rows else None
        return conclude(self.name, args, interruption, content, show)


STUDY = _Accuracy()
