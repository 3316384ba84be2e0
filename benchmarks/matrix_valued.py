"""Mean field with matrix-valued couplings: a learned block J_ij of D x D for every pair of sites.

    python benchmarks/matrix_valued.py [--sites 64 128] [--repeats 7] [--out FILE]

Batch 8, D = 64, float32, one thread, one head. Forward, and forward with backward (gradients of
couplings and tokens), of the block with its default options (to a residual of 1e-4), and of exactly
7 evaluations of the map in the solve and, at most, in its adjoint. The couplings are drawn with the
block's own scale (spectral norm 1/2) and with that of the public code (1 / (D sqrt(N)) an entry,
spectral norm 1/4). The ratios are to times of that code, mcbal/deep-implicit-attention, 7
iterations, on a machine of the same class: 2.9 s forward and 3.8 s with backward at N = 64, 17 s
and 26 s at N = 128.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from spinformer.nn import FreeEnergyBlock

BATCH, DIM = 8, 64
PUBLIC = {64: (2.9, 3.8), 128: (17.0, 26.0)}
VARIANTS: dict[str, dict[str, object]] = {
    "default": {},
    "default, plain solver": {"solver": "plain"},
    "7 evaluations": {
        "solver": "plain",
        "tolerance": 1e-30,
        "max_iterations": 7,
        "on_failure": "ignore",
    },
    "default, no symmetry": {"symmetric_between": False},
    "default, both symmetries": {"symmetric_within": True},
}


def blocks(sites: int, scale: float) -> dict[str, FreeEnergyBlock]:
    """What is timed, by name; ``scale`` multiplies the initial couplings."""
    made = {}
    for name, options in VARIANTS.items():
        torch.manual_seed(0)
        block = FreeEnergyBlock(DIM, 1, couplings="matrix", num_spins=sites, **options)
        with torch.no_grad():
            block.self_attn.weight.mul_(scale)
        made[name] = block
    return made


def time_once(block: FreeEnergyBlock, x: torch.Tensor) -> tuple[float, float]:
    """CPU seconds of a forward pass, and of it with the backward pass: one thread, no waiting."""
    start = time.process_time()
    y = block(x)
    middle = time.process_time()
    y.sum().backward()
    end = time.process_time()
    block.zero_grad()
    return middle - start, end - start


def measure(sites: int, scale: float, repeats: int) -> dict[str, dict[str, float]]:
    """Medians over alternating calls, and ratios to the public code where it was timed."""
    modules = blocks(sites, scale)
    x = torch.randn(BATCH, sites, DIM, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in modules}
    for repeat in range(repeats + 1):
        for name, block in modules.items():
            found = time_once(block, x)
            if repeat:  # the first pass pays for the allocator
                times[name].append(found)
    rows: dict[str, dict[str, float]] = {}
    for name, block in modules.items():
        forward, both = (statistics.median(column) for column in zip(*times[name], strict=True))
        with torch.no_grad():
            _, report = block(x, return_report=True)
        rows[name] = {
            "forward_ms": 1e3 * forward,
            "both_ms": 1e3 * both,
            "evaluations": int(report.iterations.max()),
            "residual": float(report.residual.max()),
        }
        if sites in PUBLIC:
            rows[name]["public_over_forward"] = PUBLIC[sites][0] / forward
            rows[name]["public_over_both"] = PUBLIC[sites][1] / both
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sites", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, float32, batch {BATCH}")
    results: dict[str, object] = {}
    # 1 / (D sqrt(N)) over the block's 1 / (4 sqrt(N D)).
    for label, scale in (("norm 1/2", 1.0), ("norm 1/4, as public", 4 / DIM**0.5)):
        for sites in args.sites:
            rows = measure(sites, scale, args.repeats)
            results[f"N={sites}, {label}"] = rows
            print(
                f"\nN = {sites}, {label}: forward ms (public over it), with backward ms (public "
                "over it), evaluations, residual"
            )
            for name, row in rows.items():
                forward = f"({row.get('public_over_forward', float('nan')):.0f} x)"
                both = f"({row.get('public_over_both', float('nan')):.0f} x)"
                print(
                    f"  {name:26s} {row['forward_ms']:8.1f} {forward:8s} {row['both_ms']:8.1f} "
                    f"{both:8s} {row['evaluations']:3.0f}  {row['residual']:.1e}"
                )
    if args.out:
        args.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
