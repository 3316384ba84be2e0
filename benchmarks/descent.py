"""Descent layers against torch's encoder layer, and the pairwise energy against its differences.

    python benchmarks/descent.py [--tokens 128 512] [--repeats 7] [--out FILE]

Layers have d = 256, 4 heads and batch 8, in float32 on one thread; those with an MLP-like part have
1,024 hidden units, as torch's layer. The pairwise energy of one system of N tokens, one head, is
computed from one Gram matrix; "differences" writes all N x N x d of them, as published code does.
Calls alternate, so that a drift of the machine's speed meets all of them, and the least processor
times are printed, with their ratio to the first. Memory is the growth of the process's peak, in a
process of its own for every number.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from simulations.measure import PeakMemory
from spinformer.descent import PairwiseEnergy
from spinformer.nn import EnergyDescentBlock, EnergyTransformerBlock, HopfieldBlock

D_MODEL, HEADS, HIDDEN, BATCH = 256, 4, 1024, 8
MEMORY = {"feedforward": "memory", "dim_feedforward": HIDDEN}


def layers() -> dict[str, Callable[[Tensor], Tensor]]:
    """The layers that are timed, by name; torch's is the first."""
    torch.manual_seed(0)
    return {
        "TransformerEncoderLayer": nn.TransformerEncoderLayer(
            D_MODEL, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=True
        ),
        "descent, alternating": EnergyDescentBlock(D_MODEL, HEADS, **MEMORY),
        "descent, step of the sum": EnergyDescentBlock(
            D_MODEL, HEADS, algorithm="majorize_minimize", **MEMORY
        ),
        "descent, backtracking": EnergyDescentBlock(
            D_MODEL, HEADS, algorithm="backtracking", activation=None, **MEMORY
        ),
        "Hopfield, 1,024 patterns": HopfieldBlock(D_MODEL, HEADS, num_patterns=HIDDEN),
        "Energy Transformer, 1 step": EnergyTransformerBlock(
            D_MODEL, HEADS, dim_feedforward=HIDDEN, steps=1
        ),
    }


def by_gram_matrix(Y: Tensor) -> Tensor:
    """The energy of the library."""
    return PairwiseEnergy().energy(Y)


def by_differences(Y: Tensor) -> Tensor:
    """The same number, from every difference."""
    return -torch.exp(-(Y.unsqueeze(-2) - Y.unsqueeze(-3)).square().sum(-1) / 2).sum()


ENERGIES: dict[str, Callable[[Tensor], Tensor]] = {
    "differences": by_differences,
    "one Gram matrix": by_gram_matrix,
}


def time_all(
    calls: dict[str, Callable[[Tensor], Tensor]], x: Tensor, repeats: int
) -> dict[str, dict[str, float]]:
    """Least processor milliseconds of a forward pass, and with the backward pass; ratios."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            start = time.process_time()
            y = call(x)
            middle = time.process_time()
            y.sum().backward()
            if repeat:  # the first pass pays for the allocator
                found[name].append((middle - start, time.process_time() - start))
    least = {
        name: {"forward_ms": 1e3 * min(f for f, _ in t), "both_ms": 1e3 * min(b for _, b in t)}
        for name, t in found.items()
    }
    base = dict(next(iter(least.values())))
    for row in least.values():
        row["forward_ratio"] = row["forward_ms"] / base["forward_ms"]
        row["both_ratio"] = row["both_ms"] / base["both_ms"]
    return least


def peak_of(name: str, tokens: int) -> float:
    """MiB by which a forward and backward pass of an energy raises the peak of a fresh process."""
    torch.set_num_threads(1)
    x = torch.randn(tokens, D_MODEL, requires_grad=True)
    memory = PeakMemory()
    ENERGIES[name](x).backward()
    return memory.read() or float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, float32, d = {D_MODEL}")
    context = multiprocessing.get_context("spawn")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for tokens in args.tokens:
        block = time_all(layers(), torch.randn(BATCH, tokens, D_MODEL), args.repeats)
        system = torch.randn(tokens, D_MODEL, requires_grad=True)
        energy = time_all(ENERGIES, system, args.repeats)
        for name, row in energy.items():
            with context.Pool(1) as pool:
                row["peak_mib"] = pool.apply(peak_of, (name, tokens))
        for title, rows in (("layers", block), ("pairwise energy", energy)):
            results[f"{title}, N={tokens}"] = rows
            print(f"\n{title}, N = {tokens}: forward ms (ratio), with backward ms (ratio)")
            for name, row in rows.items():
                print(
                    f"  {name:28s} {row['forward_ms']:8.2f} ({row['forward_ratio']:.2f})"
                    f"  {row['both_ms']:8.2f} ({row['both_ratio']:.2f})"
                    + (f"  peak {row['peak_mib']:.0f} MiB" if "peak_mib" in row else "")
                )
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
