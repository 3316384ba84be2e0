"""The mean-field block against torch's encoder layer: time, and memory against iterations.

    python benchmarks/blocks.py [--tokens 128 512 1024] [--out FILE]

Both layers have d = 256, 4 heads and 1,024 hidden units, batch 8, float32, one thread. Calls
alternate, so that a drift of the machine's speed meets both, and the medians' ratio is printed.
Memory is the growth of the process's peak over what it held before the first pass, in a process of
its own for every number of iterations.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from simulations.measure import PeakMemory
from spinformer.nn import FreeEnergyBlock

D_MODEL, HEADS, HIDDEN, BATCH = 256, 4, 1024, 8


def layers() -> dict[str, nn.Module]:
    """The layers that are timed, by name."""
    torch.manual_seed(0)
    block = {"dim_feedforward": HIDDEN}
    return {
        "TransformerEncoderLayer": nn.TransformerEncoderLayer(
            D_MODEL, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=True
        ),
        "mean field, one step": FreeEnergyBlock(D_MODEL, HEADS, steps=1, **block),
        "mean field, fixed point": FreeEnergyBlock(D_MODEL, HEADS, tolerance=1e-4, **block),
        "mean field, fixed point, plain solver": FreeEnergyBlock(
            D_MODEL, HEADS, tolerance=1e-4, solver="plain", **block
        ),
    }


def time_once(layer: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Seconds of a forward pass, and of it with the backward pass."""
    start = time.perf_counter()
    y = layer(x)
    middle = time.perf_counter()
    y.sum().backward()
    return middle - start, time.perf_counter() - start


def compare(tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Medians in milliseconds, and ratios to torch's layer."""
    x = torch.randn(BATCH, tokens, D_MODEL)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in layers()}
    modules = layers()
    for repeat in range(repeats + 1):
        for name, layer in modules.items():
            times = time_once(layer, x)
            if repeat:  # the first pass pays for the allocator
                found[name].append(times)
    rows: dict[str, dict[str, float]] = {}
    for name, times in found.items():
        forward, both = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        rows[name] = {"forward_ms": forward, "both_ms": both}
        if name.startswith("mean field, fixed"):
            _, report = modules[name](x, return_report=True)
            rows[name]["iterations"] = int(report.iterations.max())
    base = rows["TransformerEncoderLayer"]
    for row in rows.values():
        row["forward_ratio"] = row["forward_ms"] / base["forward_ms"]
        row["both_ratio"] = row["both_ms"] / base["both_ms"]
    return rows


def peak_of(iterations: int, tokens: int, solver: str) -> float:
    """MiB by which a forward and backward pass of so many iterations raises the peak."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block = FreeEnergyBlock(
        D_MODEL,
        HEADS,
        tolerance=1e-30,
        max_iterations=iterations,
        on_failure="ignore",
        dim_feedforward=HIDDEN,
        solver=solver,
    )
    x = torch.randn(BATCH, tokens, D_MODEL)
    memory = PeakMemory()
    block(x).sum().backward()
    return memory.read() or float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, float32, batch {BATCH}")
    results: dict[str, object] = {}
    for tokens in args.tokens:
        rows = compare(tokens, args.repeats)
        results[f"N={tokens}"] = rows
        print(f"\nN = {tokens}: forward ms (ratio), forward + backward ms (ratio), iterations")
        for name, row in rows.items():
            print(
                f"  {name:38s} {row['forward_ms']:8.1f} ({row['forward_ratio']:.2f})"
                f"  {row['both_ms']:8.1f} ({row['both_ratio']:.2f})  {row.get('iterations', '')}"
            )
    print("\npeak MiB of forward + backward at N = 512")
    context = multiprocessing.get_context("spawn")
    for solver in ("anderson", "plain"):
        peaks = {}
        for iterations in (5, 100):
            with context.Pool(1) as pool:
                peaks[iterations] = pool.apply(peak_of, (iterations, 512, solver))
        results[f"peak_mib_{solver}"] = peaks
        print(
            f"  {solver:9s} 5 iterations {peaks[5]:.0f}, 100 iterations {peaks[100]:.0f}, "
            f"ratio {peaks[100] / peaks[5]:.3f}"
        )
    if args.out:
        args.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
