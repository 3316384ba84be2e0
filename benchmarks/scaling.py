r"""How time and memory grow: with tokens, batch, spin dimension and iterations; and which solver.

    python benchmarks/scaling.py [--quick] [--out DIR]

Float32, one thread, 4 heads. Calls alternate, and least processor times are kept. Four tables, a
figure ``scaling.png`` and the numbers ``scaling.json``:

* times of torch's layer and of blocks without MLP against N, B and D, the dimension of a head, with
  the exponents p of time ~ size^p, fitted by least squares to the logarithms of the larger half of
  the sizes; peak memory against N, in a fresh process each;
* mean field against the number of iterations: the milliseconds of one, and the memory;
* ``derivative="total"`` in units of ``"partial"``, forward and with backward;
* the three fixed-point solvers: evaluations of the map and milliseconds for one solve to 1e-5, and
  for it with its adjoint, against N and against the spectral radius of the map at the fixed point,
  which scaled Sherrington-Kirkpatrick couplings are tuned to (beta = 1, D = 16, weak random fields;
  8 systems of the same couplings).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

import spinformer as sf
from simulations.measure import PeakMemory
from spinformer.nn import FreeEnergyBlock

HEADS = 4
BLOCKS: dict[str, dict[str, Any]] = {
    "torch's layer": {},
    "mean field, one step": {"steps": 1},
    "mean field, fixed point": {},
    "mean field, never written": {"fused": True},
    "steepest descent, site": {"approximation": "steepest_descent", "couplings": "symmetric"},
    "steepest descent, shared": {
        "approximation": "steepest_descent",
        "couplings": "symmetric",
        "auxiliary": "shared",
    },
}
# A factorization of every head's N x N matrix, O(N^3).
CUBIC = ("steepest descent, site", "steepest descent, shared")
SOLVERS = ("plain", "anderson", "broyden")
COLORS = ("#000000", "#56B4E9", "#0072B2", "#CC79A7", "#D55E00", "#E69F00")

Rows = list[dict[str, Any]]


def make(name: str, dim: int, **options: Any) -> nn.Module:
    """A layer of 4 heads of so many channels."""
    torch.manual_seed(0)
    width = HEADS * dim
    if name == "torch's layer":
        return nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True)
    return FreeEnergyBlock(width, HEADS, **BLOCKS[name], **options)


def least(calls: dict[str, Callable[[], tuple[float, float]]], repeats: int) -> Rows:
    """Least milliseconds, forward and with backward, of calls that alternate."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            took = call()
            if repeat:  # the first pays for the allocator
                times[name].append(took)
    return [
        {"name": name, "forward_ms": min(f for f, _ in row), "both_ms": min(b for _, b in row)}
        for name, row in times.items()
    ]


def clocked(function: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Processor milliseconds of a call, and of it with its backward pass."""
    start = time.process_time()
    y = function()
    middle = time.process_time()
    y.sum().backward()
    return 1e3 * (middle - start), 1e3 * (time.process_time() - start)


def pass_of(layer: nn.Module, x: torch.Tensor) -> Callable[[], tuple[float, float]]:
    """A forward and backward pass, clocked, of new tokens like x every time.

    Of the same tokens again, steepest descent with a shared t would know the eigenvectors.
    """

    def call() -> tuple[float, float]:
        tokens = torch.randn_like(x)
        return clocked(lambda: layer(tokens))

    return call


def sweep(axis: str, sizes: Sequence[int], repeats: int) -> Rows:
    """Times of all layers against ``"N"``, ``"B"`` or ``"D"``, the others at 128, 8 and 32."""
    rows: Rows = []
    for size in sizes:
        n, b, d = ({"N": 128, "B": 8, "D": 32} | {axis: size}).values()
        x = torch.randn(b, n, HEADS * d)
        calls = {
            name: pass_of(make(name, d), x) for name in BLOCKS if name not in CUBIC or n <= 512
        }
        for row in least(calls, repeats):
            rows.append({axis: size, **row})
    return rows


def exponents(rows: Rows, axis: str, value: str) -> dict[str, float]:
    """Slopes of log(value) over log(size), by name, in the larger half of the sizes."""
    found = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        points = [(math.log(r[axis]), math.log(r[value])) for r in rows if r["name"] == name]
        points = points[len(points) // 2 - (len(points) == 2) :]
        x, y = torch.tensor(points, dtype=torch.float64).T
        x, y = x - x.mean(), y - y.mean()
        found[name] = float((x * y).sum() / (x * x).sum())
    return found


def peak_of(name: str, n: int, b: int, d: int, options: dict[str, Any]) -> float:
    """MiB by which a forward and backward pass raises the peak of a fresh process."""
    torch.set_num_threads(1)
    layer, x = make(name, d, **options), torch.randn(b, n, HEADS * d)
    layer(x[:, :2]).sum().backward()  # what a first pass takes once and for all
    memory = PeakMemory()
    layer(x).sum().backward()
    return memory.read() or math.nan


def fresh(*arguments: Any) -> float:
    """:func:`peak_of` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_of, arguments)


def memory(sizes: Sequence[int]) -> Rows:
    """Peaks against N, at B = 1 and D = 16."""
    return [
        {"N": n, "name": name, "mib": fresh(name, n, 1, 16, {})}
        for n in sizes
        for name in BLOCKS
        if name not in CUBIC or n <= 1024
    ]


def iterations(counts: Sequence[int], repeats: int) -> Rows:
    """Mean field stopped after so many evaluations, at N = 256, B = 8, D = 32."""
    rows: Rows = []
    x = torch.randn(8, 256, HEADS * 32)
    for count in counts:
        calls = {}
        stop = {"tolerance": 1e-30, "max_iterations": count, "on_failure": "ignore"}
        for solver in SOLVERS:
            layer = make("mean field, fixed point", 32, solver=solver, **stop)
            calls[solver] = pass_of(layer, x)
        for row in least(calls, repeats):
            options = {"solver": row["name"], **stop}
            mib = fresh("mean field, fixed point", 256, 8, 32, options)
            rows.append({"iterations": count, **row, "mib": mib})
    return rows


def derivatives(sizes: Sequence[int], repeats: int) -> Rows:
    """The cost of the total derivative in units of the partial one, at B = 8, D = 32."""
    rows: Rows = []
    for n in sizes:
        x = torch.randn(8, n, HEADS * 32)
        for name in ("mean field, fixed point", *CUBIC):
            if name in CUBIC and n > 256:
                continue
            calls = {}
            for kind in ("partial", "total"):
                options: dict[str, Any] = {"derivative": kind, "couplings": "symmetric"}
                torch.manual_seed(0)
                layer = FreeEnergyBlock(HEADS * 32, HEADS, **(BLOCKS[name] | options))
                calls[kind] = pass_of(layer, x)
            partial, total = least(calls, repeats)
            rows.append(
                {"N": n, "name": name}
                | {key: total[key] / partial[key] for key in ("forward_ms", "both_ms")}
            )
    return rows


def tuned(n: int, radius: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Couplings and fields in float64 whose mean-field map has this spectral radius."""
    generator = torch.Generator().manual_seed(n)
    matrix = torch.randn(n, n, generator=generator, dtype=torch.float64)
    matrix = (matrix + matrix.T) / (2 * n) ** 0.5
    matrix.fill_diagonal_(0.0)
    field = 0.1 * torch.randn(1, n, 16, generator=generator, dtype=torch.float64)
    low, high = 0.0, 2.0  # the largest eigenvalue of the matrix is near 2: radius 2 scale at most
    for _ in range(12):
        scale = (low + high) / 2
        above = _spectral_radius(scale * matrix, field) > radius
        low, high = (low, scale) if above else (scale, high)
    return low * matrix, field


def _spectral_radius(matrix: torch.Tensor, field: torch.Tensor) -> float:
    """By power iteration with the transposed derivative, whose spectrum is real."""
    site = sf.Sphere(16)
    solver = sf.MeanField("anderson", tolerance=1e-6, on_failure="ignore")
    m = solver.solve(sf.SpinSystem(matrix, field, 1.0, site)).magnetization.requires_grad_()
    out = site.mean(field + matrix @ m)
    v = torch.randn(m.shape, generator=torch.Generator().manual_seed(0), dtype=m.dtype)
    size = 0.0
    for _ in range(100):
        v = v / v.norm()
        (v,) = torch.autograd.grad(out, m, v, retain_graph=True)
        size = float(v.norm())
    return size


def solvers(sizes: Sequence[int], radii: Sequence[float], repeats: int) -> Rows:
    """Evaluations and times of the solvers, by size and contraction."""
    rows: Rows = []
    for n in sizes:
        for radius in radii:
            matrix, field = (t.float() for t in tuned(n, radius))
            field = field.expand(8, -1, -1).contiguous().requires_grad_()
            couplings = sf.couplings.Dense(matrix.requires_grad_())
            system = sf.SpinSystem(couplings, field, 1.0, sf.Sphere(16))
            # The rounding of a float32 residual is a few 1e-7: 1e-5 is within reach of all.
            methods = {
                name: sf.MeanField(name, tolerance=1e-5, max_iterations=2000) for name in SOLVERS
            }

            def solve(method: sf.MeanField, system: sf.SpinSystem = system) -> torch.Tensor:
                return method.solve(system).magnetization

            calls = {
                name: functools.partial(clocked, functools.partial(solve, method))
                for name, method in methods.items()
            }
            for row in least(calls, repeats):
                solution = methods[row["name"]].solve(system).solution
                count = int(solution.iterations.max())
                rows.append({"N": n, "radius": radius, **row, "evaluations": count})
    return rows


# -- figure ---------------------------------------------------------------------------------------


def draw(results: dict[str, Any], path: Path) -> None:
    """Six panels: time against N, B and D, memory, total against partial, solvers."""
    figure = Figure(figsize=(13, 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3)
    for ax, axis in zip(axes[0], "NBD", strict=True):
        _lines(ax, results[f"time_{axis}"], axis, "both_ms", list(BLOCKS))
        slopes = results[f"exponents_{axis}"]
        labels = [f"{name}: {slopes[name]:.2f}" for name in BLOCKS if name in slopes]
        _legend(ax, labels, "exponents")
        name = {"N": "tokens N", "B": "batch B", "D": "dimension of a head D"}[axis]
        ax.set(xlabel=name, ylabel="forward and backward, ms")
    _lines(axes[1, 0], results["memory"], "N", "mib", list(BLOCKS))
    slopes = results["exponents_memory"]
    labels = [f"{name}: {slopes[name]:.2f}" for name in BLOCKS if name in slopes]
    _legend(axes[1, 0], labels, "exponents")
    axes[1, 0].set(xlabel="tokens N (B = 1, D = 16)", ylabel="peak memory, MiB")
    kinds = list(dict.fromkeys(row["name"] for row in results["derivatives"]))
    _lines(axes[1, 1], results["derivatives"], "N", "both_ms", kinds)
    axes[1, 1].set(xlabel="tokens N", ylabel="total / partial, with backward", yscale="linear")
    axes[1, 1].axhline(1.6, color="#999999", linestyle=":")
    axes[1, 1].set_ylim(bottom=1.0)
    _legend(axes[1, 1], kinds, "layer")
    ax, rows = axes[1, 2], results["solvers"]
    sizes = list(dict.fromkeys(row["N"] for row in rows))
    for index, name in enumerate(SOLVERS):
        for size, marker in zip(sizes, "osD^v", strict=False):
            line = [r for r in rows if r["name"] == name and r["N"] == size]
            ax.plot(
                [1 / (1 - r["radius"]) for r in line],
                [r["both_ms"] for r in line],
                color=COLORS[(0, 2, 4)[index]],
                marker=marker,
                label=f"{name}, N = {size}",
            )
    ax.set(xscale="log", yscale="log", ylabel="solve and adjoint, ms")
    ax.set_xlabel("spectral radius r of the map, at 1 / (1 - r)")
    _legend(ax, [line.get_label() for line in ax.lines], "solver", columns=len(SOLVERS))
    radii = list(dict.fromkeys(row["radius"] for row in rows))
    ax.set_xticks([1 / (1 - radius) for radius in radii], [f"{radius:g}" for radius in radii])
    ax.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    figure.savefig(path, dpi=150)


def _lines(ax: Axes, rows: Rows, axis: str, value: str, names: Sequence[str]) -> None:
    for name in names:
        line = [row for row in rows if row["name"] == name]
        if line:
            color = COLORS[list(BLOCKS).index(name)]
            ax.plot([r[axis] for r in line], [r[value] for r in line], color=color, marker="o")
    ax.set(xscale="log", yscale="log")
    sizes = list(dict.fromkeys(row[axis] for row in rows))
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)


def _legend(ax: Axes, labels: Sequence[Any], title: str, columns: int = 2) -> None:
    """Below the panel, out of the way of its lines."""
    ax.legend(
        ax.lines[: len(labels)],
        labels,
        title=title,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=columns,
        fontsize=8,
        title_fontsize=8,
        frameon=False,
    )


# -- tables ---------------------------------------------------------------------------------------


def table(title: str, rows: Rows, columns: Sequence[str]) -> None:
    """Print the columns of the rows."""
    print(f"\n{title}\n  " + "".join(f"{column:>14s}" for column in columns) + "  name", flush=True)
    for row in rows:
        cells = (
            f"{row[c]:14.2f}" if isinstance(row[c], float) else f"{row[c]:14d}" for c in columns
        )
        print("  " + "".join(cells) + f"  {row['name']}")


def main() -> None:
    """Measure, print and, with --out, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    parser.add_argument("--out", type=Path, help="folder of scaling.json and scaling.png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quick = options.quick
    repeats = 2 if quick else 7
    sizes = {
        "N": (32, 64, 128) if quick else (32, 64, 128, 256, 512, 1024),
        "B": (1, 4) if quick else (1, 2, 4, 8, 16, 32, 64),
        "D": (8, 32) if quick else (4, 8, 16, 32, 64, 128),
    }
    long = (256, 512) if quick else (512, 1024, 2048, 4096)
    results: dict[str, Any] = {"torch": torch.__version__, "repeats": repeats}
    for axis, values in sizes.items():
        rows = results[f"time_{axis}"] = sweep(axis, values, repeats)
        table(f"times against {axis}", rows, (axis, "forward_ms", "both_ms"))
        slopes = results[f"exponents_{axis}"] = exponents(rows, axis, "both_ms")
        print("  exponents: " + ", ".join(f"{name} {p:.2f}" for name, p in slopes.items()))
    rows = results["memory"] = memory(long)
    table("memory against N", rows, ("N", "mib"))
    slopes = results["exponents_memory"] = exponents(rows, "N", "mib")
    print("  exponents: " + ", ".join(f"{name} {p:.2f}" for name, p in slopes.items()))
    results["iterations"] = iterations((4, 8) if quick else (5, 10, 20, 40, 80), repeats)
    columns = ("iterations", "forward_ms", "both_ms", "mib")
    table("mean field against iterations", results["iterations"], columns)
    results["derivatives"] = derivatives((32, 64) if quick else (32, 64, 128, 256, 512), repeats)
    table("total / partial", results["derivatives"], ("N", "forward_ms", "both_ms"))
    results["solvers"] = solvers(
        (32,) if quick else (32, 128, 512), (0.3, 0.9) if quick else (0.3, 0.6, 0.9, 0.97), repeats
    )
    table("solvers", results["solvers"], ("N", "radius", "evaluations", "forward_ms", "both_ms"))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "scaling.json").write_text(json.dumps(results, indent=1) + "\n")
        draw(results, options.out / "scaling.png")


if __name__ == "__main__":
    main()
