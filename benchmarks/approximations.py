"""What every approximation costs on the same systems: time of a solve, and with its backward pass.

    python benchmarks/approximations.py [--spins 64 256] [--dim 64] [--out FILE]

Eight symmetric systems with Gaussian couplings of spectral radius 1/2 (in units of the response of
a free spin) in Gaussian fields of unit variance a component; float32, one thread, tolerance 1e-4.
Calls alternate, so that a drift of the machine's speed meets all, and medians are printed, with the
ratio to mean field.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import spinformer as sf
from simulations.tables import align

BATCH, TOLERANCE = 8, 1e-4

SOLVERS: dict[str, tuple[Callable[[], Any], type[sf.Sphere] | type[sf.LargeDSphere]]] = {
    "mean field": (lambda: sf.MeanField("anderson", tolerance=TOLERANCE), sf.Sphere),
    "mean field, large-D form": (
        lambda: sf.MeanField("anderson", tolerance=TOLERANCE),
        sf.LargeDSphere,
    ),
    "TAP": (lambda: sf.TAP("anderson", tolerance=TOLERANCE), sf.Sphere),
    "TAP, large-D form": (lambda: sf.TAP("anderson", tolerance=TOLERANCE), sf.LargeDSphere),
    "adaptive TAP": (lambda: sf.AdaptiveTAP(tolerance=TOLERANCE), sf.Sphere),
    "steepest descent, site": (lambda: sf.SteepestDescent(tolerance=TOLERANCE), sf.Sphere),
    "steepest descent, shared": (
        lambda: sf.SteepestDescent("shared", tolerance=TOLERANCE),
        sf.Sphere,
    ),
    "steepest descent, fluctuations": (
        lambda: sf.SteepestDescent(fluctuations=True, tolerance=TOLERANCE),
        sf.Sphere,
    ),
}


def measure(spins: int, dim: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a solve, and of it with the backward pass of magnetization and log Z."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(BATCH, spins, spins, generator=generator)
    noise = (noise + noise.mT) / 2
    # The semicircle of entries of variance s^2 / 2 ends at sqrt(2 N) s.
    couplings = (0.5 / (2 * spins) ** 0.5 * noise).requires_grad_()
    field = torch.randn(BATCH, spins, dim, generator=generator).requires_grad_()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SOLVERS}
    iterations: dict[str, int] = {}
    for repeat in range(repeats + 1):
        for name, (make, site) in SOLVERS.items():
            start = time.perf_counter()
            # New every time: what is kept of the last J is not what is timed.
            system = sf.SpinSystem(couplings + 0.0, field, 1.0, site(dim))
            equilibrium = make().solve(system)
            total = equilibrium.magnetization.sum() + equilibrium.log_partition.sum()
            middle = time.perf_counter()
            total.backward()
            if repeat:  # the first pass pays for the allocator
                found[name].append((middle - start, time.perf_counter() - start))
            iterations[name] = int(equilibrium.solution.iterations.max())
    rows = {}
    for name, times in found.items():
        forward, both = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        rows[name] = {"forward_ms": forward, "both_ms": both, "iterations": iterations[name]}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--spins", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for spins in args.spins:
        rows = measure(spins, args.dim, args.repeats)
        results[f"N={spins}"] = rows
        base = rows["mean field"]
        print(f"\nN = {spins}, D = {args.dim}, {BATCH} systems, float32, one thread")
        print(
            align(
                ("approximation", "solve [ms]", "with backward", "ratio", "", "iterations"),
                [
                    (
                        name,
                        f"{row['forward_ms']:.1f}",
                        f"{row['both_ms']:.1f}",
                        f"{row['forward_ms'] / base['forward_ms']:.1f}",
                        f"{row['both_ms'] / base['both_ms']:.1f}",
                        str(row["iterations"]),
                    )
                    for name, row in rows.items()
                ],
            )
        )
    if args.out:
        args.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
