r"""How errors fall as spins get more components, at fixed couplings.

Spins have length sqrt(D), so that :math:`\beta J R^2 / D = \beta J` is the strength of a bond and
log Z grows as D. Steepest descent is an expansion in 1/D: per component, log Z of the saddle (SD0)
is wrong by O(1/D), with fluctuations (SD1) by :math:`O(1/D^2)`. Mean field and TAP expand in J
instead, and more components do not help them. Three systems whose log Z is known for every D:

* ``pair``: two spins without a field, :math:`\beta J = 1`;
* ``ring``: eight spins around a ring without a field, :math:`\beta J = 1`;
* ``fields``: two spins with :math:`\beta J = 0.7` in fields :math:`h_{ia} = 0.6 \cos(i a + i)`,
  which are not parallel.

Errors: of log Z per spin and component; of the bond :math:`\langle S_i\cdot S_j\rangle / R^2`, by
the derivative of log Z in J (linear response of mean field is infinite at its transition, which is
where ``pair`` is); and :math:`|\Delta m| / |m|`. Slopes are fitted to the last points on log-log
axes.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

import spinformer as sf
from simulations.approximations import APPROXIMATIONS, exact_law
from simulations.figures import blank, clean, save
from simulations.options import positive
from simulations.results import collect, conclude
from simulations.tables import align

SYSTEMS = {
    "pair": r"pair, no field, $\beta J = 1$",
    "ring": r"ring of 8, no field, $\beta J = 1$",
    "fields": r"pair in fields, $\beta J = 0.7$",
}
SHOWN = ("sd0", "sd1", "tap", "mean_field")
QUANTITIES = {
    "log_partition": r"error of $\log Z$ per spin and component",
    "bond": r"error of $\langle S_i\cdot S_j\rangle / R^2$",
    "magnetization": "relative error of m",
}
# The order in 1/D that theory gives the error of a quantity, as slopes on log-log axes; None where
# it does not vanish. Correlations and m with fluctuations gain one order as log Z does.
EXPECTED = {
    "log_partition": {"sd0": -1, "sd1": -2, "tap": 0, "mean_field": 0},
    "bond": {"sd0": -1, "sd1": -2, "tap": 0, "mean_field": 0},
    "magnetization": {"sd0": -1, "sd1": -2, "tap": 0, "mean_field": 0},
}
# An error below this share of the exact value is rounding and the quadrature's, not 1/D.
_ROUNDING = 1e-11


def build(name: str, dim: int) -> sf.SpinSystem:
    """The system of that name with spins of ``dim`` components."""
    site = exact_law(dim)
    if name == "ring":
        return sf.SpinSystem(
            sf.couplings.ring(8, dtype=torch.float64),
            torch.zeros(8, dim, dtype=torch.float64),
            site=site,
        )
    strength = 1.0 if name == "pair" else 0.7
    bond = torch.tensor([[0.0, strength], [strength, 0.0]], dtype=torch.float64)
    field = torch.zeros(2, dim, dtype=torch.float64)
    if name == "fields":
        index = torch.arange(1, 3, dtype=torch.float64)[:, None]
        component = torch.arange(1, dim + 1, dtype=torch.float64)
        field = 0.6 * torch.cos(index * component + index)
    return sf.SpinSystem(bond, field, site=site)


def observables(equilibrium: sf.Equilibrium) -> dict[str, Tensor]:
    """log Z per spin and component, the first bond over R^2, and m."""
    system = equilibrium.system
    return {
        "log_partition": equilibrium.log_partition.detach() / (system.num_spins * system.dim),
        "bond": equilibrium.correlations("coupling")[0, 1].detach() / system.dim,
        "magnetization": equilibrium.magnetization.detach(),
    }


@torch.no_grad()
def measure(name: str, dim: int) -> dict[str, Any]:
    """Signed errors (exact - approximate) of every method for one system and D; of m the size."""
    system = build(name, dim)
    exact = observables(sf.Exact().solve(system))
    row: dict[str, Any] = {
        "dim": dim,
        "exact": float(exact["log_partition"]),
        "exact_bond": float(exact["bond"]),
        "fluctuations": _fluctuations(system),
    }
    for method in SHOWN:
        found = APPROXIMATIONS[method].make().solve(system)
        if not bool(found.converged.all()):
            row[method] = dict.fromkeys(QUANTITIES)
            continue
        values = observables(found)
        errors: dict[str, float | None] = {
            quantity: _resolved(exact[quantity] - values[quantity], exact[quantity])
            for quantity in ("log_partition", "bond")
        }
        errors["magnetization"] = None
        if name == "fields":
            difference = (exact["magnetization"] - values["magnetization"]).norm()
            size = exact["magnetization"].norm()
            errors["magnetization"] = _resolved(difference / size, torch.ones_like(size))
        row[method] = errors
    return row


def _fluctuations(system: sf.SpinSystem) -> float:
    r"""What :math:`D` times the error of SD0 tends to, per spin:
    :math:`-\tfrac1{2N} \log\det[A \circ (A + 2\mu\mu^T)]`, worked out from t and m."""
    found = sf.SteepestDescent().solve(system)
    # With R^2 = D and beta = 1: A^-1 = diag(t) - J and mu = m / sqrt(D).
    inverse = torch.linalg.inv(torch.diag(found.solution.value) - system.couplings.to_dense())
    gram = found.magnetization @ found.magnetization.mT / system.dim
    return -float(torch.logdet(inverse * (inverse + 2 * gram))) / (2 * system.num_spins)


def _resolved(error: Tensor, scale: Tensor) -> float | None:
    """The error, None where rounding is all that is left of it."""
    return float(error) if float(error.abs()) > _ROUNDING * float(scale.abs()) else None


def slope(dims: list[int], errors: list[float | None], points: int) -> tuple[float, float] | None:
    """Least squares of log |error| against log D over the last points, and its standard error.

    The error is what scatter about the line says, which is curvature here: the next order in 1/D.
    """
    kept = [
        (math.log(dim), math.log(abs(error)))
        for dim, error in zip(dims, errors, strict=True)
        if error is not None
    ][-points:]
    if len(kept) < 3:
        return None
    x, y = torch.tensor(kept, dtype=torch.float64).T
    x = x - x.mean()
    value = (x * y).sum() / x.square().sum()
    scatter = (y - y.mean() - value * x).square().sum() / (len(kept) - 2)
    return float(value), float((scatter / x.square().sum()).sqrt())


def slopes(rows: dict[str, list[dict[str, Any]]], points: int) -> list[dict[str, Any]]:
    """A record for each system, quantity and method that has one."""
    found = []
    for name, entries in rows.items():
        dims = [entry["dim"] for entry in entries]
        for quantity, expected in EXPECTED.items():
            for method in SHOWN:
                errors = [entry[method][quantity] for entry in entries]
                fit = slope(dims, errors, points)
                if fit is None:
                    continue
                found.append(
                    {
                        "system": name,
                        "quantity": quantity,
                        "method": method,
                        "slope": fit[0],
                        "standard_error": fit[1],
                        "expected": expected[method],
                        "last_error": errors[-1],
                    }
                )
    return found


def draw(results: dict[str, Any], out: Path) -> Path:
    """A column a system, a row a quantity; below what is constant in the limit."""
    rows = results["systems"]
    figure = blank(13.0, 9.8)
    axes = figure.subplots(3, len(SYSTEMS), squeeze=False)
    figure.suptitle(
        "More components, smaller error: steepest descent is an expansion in $1/D$, mean field and "
        "TAP are not\n(spins of length $\\sqrt{D}$, fixed couplings; powers are fitted to the last "
        f"{results['fitted']} points)",
        fontsize=12,
    )
    clean(*axes.flat)
    handles: dict[str, Any] = {}
    last = results["dims"][-1]
    for axis in axes.flat:
        axis.set_xscale("log", base=2)
        axis.set_xticks([4**k for k in range(last.bit_length() // 2 + 1)])
        axis.get_xaxis().set_major_formatter("{x:.0f}")
        axis.minorticks_off()
    for column, (name, entries) in enumerate(rows.items()):
        axes[0, column].set_title(SYSTEMS[name], fontsize=10)
        places = {"log_partition": axes[0, column], "bond": axes[1, column]}
        if name == "fields":  # without a field m = 0
            places["magnetization"] = axes[2, column]
        for quantity, axis in places.items():
            axis.set_yscale("log")
            axis.minorticks_off()
            # Room for the powers at the ends of the lines.
            axis.set_xlim(right=last * 6)
            for method in SHOWN:
                points = [
                    (entry["dim"], abs(entry[method][quantity]))
                    for entry in entries
                    if entry[method][quantity] is not None
                ]
                if not points:
                    continue
                look = {"markersize": 4.5, "linewidth": 1.5, **APPROXIMATIONS[method].look}
                (line,) = axis.plot(*zip(*points, strict=True), **look)
                handles.setdefault(APPROXIMATIONS[method].label, line)
                if method in ("sd0", "sd1"):
                    _label_slope(axis, points[-1], results["slopes"], name, quantity, method)
    for row in (0, 1):
        drawn = axes[row, : len(rows)]
        low = min(axis.get_ylim()[0] for axis in drawn)
        for axis in drawn:
            axis.set_ylim(low, 3)
    axes[0, 0].set_ylabel(QUANTITIES["log_partition"], fontsize=9)
    axes[1, 0].set_ylabel(QUANTITIES["bond"], fontsize=9)
    axes[2, 2].set_ylabel(QUANTITIES["magnetization"], fontsize=9)
    axes[2, 2].set_title("pair in fields (without a field m = 0)", fontsize=10)
    _draw_constants(axes[2, 0], results, "sd0", 1)
    _draw_constants(axes[2, 1], results, "sd1", 2)
    for axis in axes[2]:
        axis.set_xlabel("number of components $D$", fontsize=9)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=9
    )
    (path,) = save({"large_d.png": figure}, out)
    return path


def _draw_constants(axis: Axes, results: dict[str, Any], method: str, power: int) -> None:
    """The error of log Z with its power of D taken out, which tends to a constant."""
    times = "D" if power == 1 else f"D^{power}"
    axis.set_title(
        f"{'SD0' if method == 'sd0' else 'SD1'}: error of $\\log Z$ (top row) times ${times}$",
        fontsize=10,
    )
    for name, mark in zip(SYSTEMS, ("o", "s", "D"), strict=True):
        entries = results["systems"].get(name, [])
        points = [
            (entry["dim"], entry["dim"] ** power * entry[method]["log_partition"])
            for entry in entries
            if entry[method]["log_partition"] is not None
        ]
        if not points:
            continue
        label = SYSTEMS[name].split(",")[0]
        look = {"color": APPROXIMATIONS[method].look["color"], "marker": mark, "markersize": 4.5}
        axis.plot(*zip(*points, strict=True), label=label, linewidth=1.2, **look)
        if method == "sd0":
            axis.axhline(entries[-1]["fluctuations"], color="0.4", linestyle=":", linewidth=1.2)
    if method == "sd0":
        axis.plot([], [], color="0.4", linestyle=":", label="theory, $D\\to\\infty$")
    # Where no curve is.
    axis.legend(
        fontsize=8,
        loc="center right",
        bbox_to_anchor=(1.0, 0.68 if method == "sd0" else 0.45),
    )


def _label_slope(
    axis: Axes,
    point: tuple[int, float],
    fits: list[dict[str, Any]],
    name: str,
    quantity: str,
    method: str,
) -> None:
    """The fitted power at the end of a line."""
    for fit in fits:
        if (fit["system"], fit["quantity"], fit["method"]) == (name, quantity, method):
            axis.annotate(
                f"$D^{{{fit['slope']:.2f}}}$",
                point,
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=APPROXIMATIONS[method].look["color"],
            )


def render(results: dict[str, Any]) -> str:
    """The table of slopes."""
    rows = [
        (
            f"{fit['system']}: {fit['quantity']}, {APPROXIMATIONS[fit['method']].label}",
            f"{fit['slope']:.4f} +- {fit['standard_error']:.4f}",
            str(fit["expected"]),
            f"{abs(fit['last_error']):.2e}" if fit["last_error"] is not None else "rounding",
        )
        for fit in results["slopes"]
    ]
    return align(("error", "slope", "theory", f"at D = {results['dims'][-1]}"), rows)


class _LargeD:
    name = "large_d"
    description = "errors against the number of components, with fitted powers of 1/D"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--largest",
            type=positive,
            metavar="D",
            help="most components (default 4096, quick 64); powers of two from 1 on up to it",
        )
        parser.add_argument(
            "--fitted",
            type=positive,
            default=4,
            metavar="K",
            help="the last so many D that slopes are fitted to (default: %(default)s)",
        )

    def run(self, args: argparse.Namespace) -> int:
        largest = args.largest or (64 if args.quick else 4096)
        dims = [2**k for k in range(largest.bit_length())]
        todo = [(name, dim) for name in SYSTEMS for dim in dims]
        found, interruption = collect(todo, "system", lambda case: measure(*case))
        rows: dict[str, list[dict[str, Any]]] = {}
        for (name, _), entry in zip(todo, found, strict=False):  # fewer, if interrupted
            rows.setdefault(name, []).append(entry)
        content = {
            "dims": dims,
            "fitted": args.fitted,
            "systems": rows,
            "slopes": slopes(rows, args.fitted),
        }
        show = (lambda results: (render(results), [draw(results, args.out)])) if rows else None
        return conclude(self.name, args, interruption, content, show)


STUDY = _LargeD()
