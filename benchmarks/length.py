"""Steepest descent on low-rank couplings: time and memory, forward with backward, against length.

    python benchmarks/length.py [--sites 1024 4096 16384] [--rank 64] [--dim 64] [--crossover]

One system in float32, one thread. The couplings are A diag(w) A^T without its diagonal, their
largest eigenvalue set by --strength (1 is where free spins order by themselves), the fields
standard normal with beta = 1 and R^2 = D. Gradients are taken in factors, weights and fields. Each
row is a process of its own, so that its peak memory is; what the libraries take is subtracted.
--crossover times factors against the matrix instead, to set where each is used.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

import spinformer as sf
from spinformer.equilibrium import steepest_descent


def problem(
    sites: int, rank: int, dim: int, strength: float
) -> tuple[sf.couplings.LowRank, torch.Tensor]:
    """Couplings and fields."""
    generator = torch.Generator().manual_seed(sites)
    factor = torch.randn(sites, rank, generator=generator) / math.sqrt(sites)
    weights = torch.randn(rank, generator=generator)
    largest = torch.linalg.eigvalsh(
        (factor.T @ factor) * weights.abs().sqrt().outer(weights.abs().sqrt())
    )[-1]
    weights = weights * (strength / largest)
    field = torch.randn(sites, dim, generator=generator).requires_grad_()
    return sf.couplings.LowRank(factor.requires_grad_(), weights=weights.requires_grad_()), field


def peak() -> int:
    """Bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run(
    sites: int, rank: int, dim: int, strength: float, auxiliary: str, repeats: int
) -> dict[str, float]:
    """Least seconds of forward and of forward with backward, and the memory of both in MB."""
    couplings, field = problem(sites, rank, dim, strength)
    inputs = (*couplings.tensors(), field)
    method = sf.SteepestDescent(auxiliary)
    before = peak()
    forward, both = math.inf, math.inf
    steps = 0
    for _ in range(repeats):
        start = time.perf_counter()
        answer = method.solve(sf.SpinSystem(couplings, field, 1.0, sf.Sphere(dim)))
        m = answer.magnetization
        forward = min(forward, time.perf_counter() - start)
        torch.autograd.grad(m.square().sum() + answer.log_partition, inputs)
        both = min(both, time.perf_counter() - start)
        steps = int(answer.solution.iterations.max())
    return {
        "forward_s": forward,
        "both_s": both,
        "memory_mb": (peak() - before) / 2**20,
        "steps": steps,
    }


def alone(*arguments: object) -> dict[str, float]:
    """:func:`run` in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(output)
    return found


def crossover(options: argparse.Namespace) -> list[dict[str, float]]:
    """Milliseconds by factors and by the matrix, alternating."""
    rows = []
    share = steepest_descent._LOW_RANK_SHARE
    for sites in options.sites:
        for rank in (sites // 16, sites // 8, sites // 4, sites // 2):
            for auxiliary in ("site", "shared"):
                least = {True: math.inf, False: math.inf}
                for _ in range(options.repeats):
                    for factors in least:
                        steepest_descent._LOW_RANK_SITES = 0 if factors else sites + 1
                        steepest_descent._LOW_RANK_SHARE = 1.0
                        found = run(sites, rank, options.dim, options.strength, auxiliary, 1)
                        least[factors] = min(least[factors], 1e3 * found["both_s"])
                row = {"factors_ms": least[True], "matrix_ms": least[False]}
                rows.append({"sites": sites, "rank": rank, "auxiliary": auxiliary, **row})
                print(
                    f"N = {sites:5d}, rank {rank:4d}, {auxiliary:6s}: factors {least[True]:8.1f} "
                    f"ms, matrix {least[False]:8.1f} ms"
                )
    steepest_descent._LOW_RANK_SHARE = share
    return rows


def main() -> None:
    """Print the table; with --out, write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sites", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--strength", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--crossover", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(run(*json.loads(options.one))))
        return
    rows = []
    if options.crossover:
        rows = crossover(options)
    else:
        for auxiliary in ("shared", "site"):
            for sites in options.sites:
                found = alone(
                    sites, options.rank, options.dim, options.strength, auxiliary, options.repeats
                )
                rows.append({"sites": sites, "auxiliary": auxiliary, **found})
                print(
                    f"{auxiliary:6s} N = {sites:6d}: forward {found['forward_s']:7.3f} s, with "
                    f"backward {found['both_s']:7.3f} s, {found['memory_mb']:7.0f} MB, "
                    f"{found['steps']} steps"
                )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
