"""The mean-field block against torch's encoder layer and the public neqnn: time and memory.

    python benchmarks/blocks.py [--tokens 128 512 1024] [--repeats 7] [--out FILE]

All layers have d = 256, 4 heads and batch 8, in float32 on one thread. Calls alternate, so that a
drift of the machine's speed meets all of them, and the least processor times are printed, with
their ratio to torch's layer. Layers "with MLP" have 1,024 hidden units and relu, as torch's layer;
the others are couplings, fields and response alone, as the public mcbal/neqnn is.

The wanted times are those of torch's layer for one step, and half of neqnn's for the fixed point:
measured on another machine of this class, and scaled by what torch's layer took there and takes
here.

Memory is the growth of the process's peak over what it held before the first pass, in a process of
its own for every number.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simulations.measure import PeakMemory
from spinformer.nn import FreeEnergyBlock

D_MODEL, HEADS, HIDDEN, BATCH = 256, 4, 1024, 8
MLP = {"dim_feedforward": HIDDEN, "activation": "relu"}
TORCH = "TransformerEncoderLayer"
# Milliseconds forward, and with backward, by number of tokens.
TORCH_THEN = {128: (16, 54), 512: (94, 281), 1024: (268, 757)}
NEQNN_THEN = {128: (48, 116), 512: (280, 824), 1024: (921, 2339)}
NEQNN_MB = 1041  # at 1,024 tokens
BLOCKS: dict[str, dict[str, Any]] = {
    "one step, with MLP": {"steps": 1, **MLP},
    "fixed point, with MLP": MLP,
    "fixed point": {},
    "fixed point, plain solver": {"solver": "plain"},
    "fixed point, symmetric": {"couplings": "symmetric"},
    "fixed point, never written": {"fused": True},
}


def layers() -> dict[str, nn.Module]:
    """The layers that are timed, by name."""
    torch.manual_seed(0)
    found: dict[str, nn.Module] = {
        TORCH: nn.TransformerEncoderLayer(
            D_MODEL, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=True
        )
    }
    for name, options in BLOCKS.items():
        found[name] = FreeEnergyBlock(D_MODEL, HEADS, **options)
    return found


def time_once(layer: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Processor seconds of a forward pass, and of it with the backward pass."""
    start = time.process_time()
    y = layer(x)
    middle = time.process_time()
    y.sum().backward()
    return middle - start, time.process_time() - start


def wanted(name: str, tokens: int, base: tuple[float, float]) -> tuple[float, float] | None:
    """Milliseconds that a block may take where torch's layer takes ``base``."""
    if name.startswith("one step"):
        return base
    if name == "fixed point" and tokens in NEQNN_THEN:
        forward, both = (
            here / there * neqnn / 2
            for here, there, neqnn in zip(base, TORCH_THEN[tokens], NEQNN_THEN[tokens], strict=True)
        )
        return forward, both
    return None


def compare(tokens: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Least milliseconds, ratios to torch's layer, and what is wanted."""
    x = torch.randn(BATCH, tokens, D_MODEL)
    modules = layers()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in modules}
    for repeat in range(repeats + 1):
        for name, layer in modules.items():
            times = time_once(layer, x)
            if repeat:  # the first pass pays for the allocator
                found[name].append(times)
    least = {
        name: (min(f for f, _ in times) * 1e3, min(b for _, b in times) * 1e3)
        for name, times in found.items()
    }
    base = least[TORCH]
    rows: dict[str, dict[str, Any]] = {}
    for name, (forward, both) in least.items():
        rows[name] = {
            "forward_ms": forward,
            "both_ms": both,
            "forward_ratio": forward / base[0],
            "both_ratio": both / base[1],
            "wanted_ms": wanted(name, tokens, base),
        }
        if name.startswith("fixed"):
            _, report = modules[name](x, return_report=True)
            rows[name]["iterations"] = int(report.iterations.max())
    return rows


def peak_of(options: dict[str, Any], batch: int, tokens: int) -> float:
    """MiB by which a forward and backward pass raises the peak of a fresh process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block = FreeEnergyBlock(D_MODEL, HEADS, **options)
    x = torch.randn(batch, tokens, D_MODEL)
    memory = PeakMemory()
    block(x).sum().backward()
    return memory.read() or float("nan")


def peaks() -> dict[str, float]:
    """Peak MiB of a forward and backward pass, by what was run."""
    context = multiprocessing.get_context("spawn")
    cases: dict[str, tuple[dict[str, Any], int, int]] = {}
    for name in ("fixed point", "fixed point, symmetric", "fixed point, never written"):
        cases[f"{name}, N = 1024"] = (BLOCKS[name], BATCH, 1024)
        cases[f"{name}, N = 4096, batch 1"] = (BLOCKS[name], 1, 4096)
    for solver in ("anderson", "plain"):
        for iterations in (10, 100):  # the window of Anderson mixing is full at 10
            options = {"tolerance": 1e-30, "max_iterations": iterations, "on_failure": "ignore"}
            cases[f"{solver}, {iterations} iterations, N = 512"] = (
                {"solver": solver, **options},
                BATCH,
                512,
            )
    found = {}
    for name, case in cases.items():
        with context.Pool(1) as pool:
            found[name] = pool.apply(peak_of, case)
    return found


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
        print(f"\nN = {tokens}: forward ms (ratio), with backward ms (ratio), [wanted], iterations")
        for name, row in rows.items():
            goal = row["wanted_ms"]
            print(
                f"  {name:28s} {row['forward_ms']:8.1f} ({row['forward_ratio']:.2f})"
                f"  {row['both_ms']:8.1f} ({row['both_ratio']:.2f})"
                + ("" if goal is None else f"  [{goal[0]:.0f}, {goal[1]:.0f}]")
                + (f"  {row['iterations']}" if "iterations" in row else "")
            )
    print(f"\npeak MiB of forward and backward (wanted at N = 1024: {NEQNN_MB / 2:.0f} MB)")
    results["peak_mib"] = peaks()
    for name, peak in results["peak_mib"].items():  # type: ignore[attr-defined]
        print(f"  {name:44s} {peak:7.0f}")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
