"""Steepest descent, forward and with backward, in units of a batched Cholesky factorization.

    python benchmarks/steepest_descent.py [--sites 32 64 128 256 512] [--repeats 30] [--out FILE]
    python benchmarks/steepest_descent.py --crossover [--sites 256 512 1024 2048] [--repeats 3]

Batch 8, D = 64, R^2 = D, beta = 1, float32, one thread. The couplings are one symmetric Gaussian
matrix of variance 1/N for all systems, the fields standard normal. Gradients are taken in both.
The unit is one ``torch.linalg.cholesky`` of 8 matrices of 256 x 256, measured between the calls,
so that a drift of the machine's speed meets both; medians are printed. With one shared t the
eigendecomposition of the couplings, once a change of theirs, is a row of its own. A block with
fixed couplings assembles J in every forward pass and finds its eigenvectors again: evaluating it
repeatedly is a row too, in training mode (where a step changes J) one forward with backward.

--crossover times one t a site with the Newton equation solved by Cholesky factors against conjugate
gradients, alternating, for one system and for two: milliseconds, the least of the repeats.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import spinformer as sf
from spinformer.equilibrium import saddle
from spinformer.equilibrium.steepest_descent import SteepestDescent
from spinformer.nn import FreeEnergyBlock
from spinformer.solve import newton

BATCH, DIM = 8, 64
STANDARD = [32, 64, 128, 256, 512]


def problem(sites: int) -> tuple[sf.couplings.Dense, torch.Tensor, torch.Tensor]:
    """Couplings, fields and a cotangent of the magnetizations."""
    generator = torch.Generator().manual_seed(sites)
    matrix = torch.randn(sites, sites, generator=generator) / sites**0.5
    matrix = (matrix + matrix.T) / 2**0.5
    field, cotangent = torch.randn(2, BATCH, sites, DIM, generator=generator)
    return sf.couplings.Dense(matrix.requires_grad_()), field.requires_grad_(), cotangent


def calls(sites: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    couplings, field, cotangent = problem(sites)
    site = sf.Sphere(DIM)
    inputs = (*couplings.tensors(), field)
    eigen = couplings.to_dense().detach()

    def solve(method: SteepestDescent) -> torch.Tensor:
        system = sf.SpinSystem(couplings, field, 1.0, site, check_finite=False)
        return method.solve(system).magnetization

    found: dict[str, Callable[[], object]] = {}
    for auxiliary in ("site", "shared"):
        method = SteepestDescent(auxiliary=auxiliary)

        def forward(method: SteepestDescent = method) -> object:
            with torch.no_grad():
                return solve(method)

        def both(method: SteepestDescent = method) -> object:
            return torch.autograd.grad(solve(method), inputs, cotangent)

        found[f"{auxiliary}, forward"] = forward
        found[f"{auxiliary}, forward + backward"] = both
    found["eigh of the couplings"] = lambda: torch.linalg.eigh(eigen)
    evaluated, trained = (
        FreeEnergyBlock(DIM, 1, "steepest_descent", "fixed", num_spins=sites, auxiliary="shared")
        for _ in range(2)
    )

    def evaluate() -> object:
        with torch.no_grad():
            return evaluated(field)

    def train() -> object:
        parameters = list(trained.self_attn.parameters())
        gradients = torch.autograd.grad(trained(field), parameters, cotangent)
        with torch.no_grad():
            parameters[0].mul_(1.0001)
        return gradients

    found["fixed block, shared, evaluated"] = evaluate
    found["fixed block, shared, trained"] = train
    return found


def unit() -> Callable[[], object]:
    """One batched Cholesky factorization."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(BATCH, 256, 256, generator=generator) / 16
    matrix = matrix @ matrix.mT + torch.eye(256)
    return lambda: torch.linalg.cholesky(matrix)


def measure(sites: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds and units of every call at one size."""
    functions = calls(sites) | {"unit": unit()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 2):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if repeat >= 2:  # the first calls pay for allocation and for the eigenvectors
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(row) * 1e3 for name, row in times.items()}
    return {
        name: {"ms": value, "units": value / medians["unit"]} for name, value in medians.items()
    }


def steps(sites: int) -> int:
    """Newton steps of the hardest of the systems."""
    couplings, field, _ = problem(sites)
    system = sf.SpinSystem(couplings, field.detach(), 1.0, sf.Sphere(DIM))
    return int(SteepestDescent().solve(system).solution.iterations.max())


def crossover(sites: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds, forward and with backward, by factors and by conjugate gradients."""
    found: dict[str, dict[str, float]] = {}
    usual = newton.ITERATIVE_SITES
    couplings, fields, cotangents = problem(sites)
    for batch in (1, 2):
        field, cotangent = fields[:batch].detach().requires_grad_(), cotangents[:batch]
        for _ in range(repeats):
            for name, least in (("Cholesky", sites + 1), ("conjugate gradients", 0)):
                newton.ITERATIVE_SITES = saddle.ITERATIVE_SITES = least
                start = time.perf_counter()
                system = sf.SpinSystem(couplings, field, 1.0, sf.Sphere(DIM), check_finite=False)
                m = SteepestDescent().solve(system).magnetization
                forward = 1e3 * (time.perf_counter() - start)
                torch.autograd.grad(m, (*couplings.tensors(), field), cotangent)
                both = 1e3 * (time.perf_counter() - start)
                row = found.setdefault(
                    f"B = {batch}, {name}", {"forward": math.inf, "both": math.inf}
                )
                row["forward"] = min(row["forward"], forward)
                row["both"] = min(row["both"], both)
    newton.ITERATIVE_SITES = saddle.ITERATIVE_SITES = usual
    return found


def main() -> None:
    """Print the table; with --out, write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sites", type=int, nargs="+")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--crossover", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for sites in options.sites or ([256, 512, 1024, 2048] if options.crossover else STANDARD):
        if options.crossover:
            results[sites] = crossover(sites, options.repeats or 3)
            for name, row in results[sites].items():
                times = f"{row['forward']:9.2f} ms, with backward {row['both']:9.2f} ms"
                print(f"N = {sites:5d}, {name:27s} {times}")
            continue
        rows = measure(sites, options.repeats or 30)
        results[sites] = rows
        print(f"N = {sites}, {steps(sites)} Newton steps, unit {rows['unit']['ms']:.2f} ms")
        for name, row in rows.items():
            if name != "unit":
                print(f"  {name:30s} {row['ms']:9.2f} ms {row['units']:8.2f} units")
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
