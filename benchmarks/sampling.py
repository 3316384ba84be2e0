"""Spin updates per second of the local moves, against compiled and plain code.

    python benchmarks/sampling.py [--seconds 0.5] [--repeats 5] [--out FILE]

One thread, processor time, the best of some runs that alternate with their peers, so that a drift
of the machine's speed meets all of them. What is timed:

* Ising, heat bath: 64 x 64 sites, 16 chains; 16^3 sites; against the compiled `peapods` (if it is
  installed; its Gibbs sweeps, which also measure energy and magnetization);
* O(3), heat bath: 64 x 64 sites, 16 chains; against numpy, site by site as in a textbook, and by
  checkerboard on whole arrays, for as many chains;
* other dimensions and moves on the same lattice;
* dense couplings, N = 64 spins of D = 64 components, 16 chains; against numpy, site by site with
  the same number of chains, by the same rejection.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from spinformer.sampling.chains import Chains, Move
from spinformer.sampling.local import HeatBath, Metropolis, OverRelaxation
from spinformer.spins.couplings import Couplings, cubic, sherrington_kirkpatrick, square
from spinformer.spins.site import Ising, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem

CHAINS = 16
# Does so many sweeps, and says how many spins one sweep updates.
Run = tuple[Callable[[int], None], int]


def ours(couplings: Couplings, site: SiteLaw, beta: float, move: Move) -> Run:
    field = torch.zeros(couplings.num_spins, site.dim)
    system = SpinSystem(couplings, field, beta, site)
    chains = Chains.start(system, CHAINS, seed=0)
    return move.start(chains).sweep, CHAINS * couplings.num_spins


def peapods_run(shape: tuple[int, ...], beta: float) -> Run | None:
    try:
        import peapods  # noqa: PLC0415
    except ImportError:
        return None
    model = peapods.Ising(shape, temperatures=np.full(CHAINS, 1 / beta))

    def sweep(count: int) -> None:
        model.sample(count, sweep_mode="gibbs", sequential=True, warmup_ratio=0.0)

    return sweep, CHAINS * int(np.prod(shape))


def numpy_three(kappa: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Alignment and angle of von Mises-Fisher draws in three dimensions."""
    w = 1 + np.log1p(draw.random(kappa.shape) * np.expm1(-2 * kappa)) / kappa
    return w, 2 * np.pi * draw.random(kappa.shape)


def numpy_site_by_site(length: int, beta: float) -> Run:
    """One lattice of unit vectors, one site after the other."""
    draw = np.random.default_rng(0)
    spins = draw.standard_normal((length, length, 3))
    spins /= np.linalg.norm(spins, axis=-1, keepdims=True)

    def sweep(count: int) -> None:
        for _ in range(count):
            for x in range(length):
                for y in range(length):
                    force = spins[x - 1, y] + spins[(x + 1) % length, y]
                    force = force + spins[x, y - 1] + spins[x, (y + 1) % length]
                    norm = np.sqrt(force @ force)
                    axis = force / norm
                    w, angle = numpy_three(beta * norm, draw)
                    other = np.array([1.0, 0, 0]) if abs(axis[0]) < 0.9 else np.array([0, 1.0, 0])
                    first = np.cross(axis, other)
                    first /= np.sqrt(first @ first)
                    second = np.cross(axis, first)
                    across = np.sqrt(max(1 - w * w, 0.0))
                    spins[x, y] = w * axis + across * (
                        np.cos(angle) * first + np.sin(angle) * second
                    )

    return sweep, length**2


def numpy_checkerboard(length: int, beta: float) -> Run:
    """Many lattices, one colour at a time, on whole arrays of float32."""
    draw = np.random.default_rng(0)
    spins = draw.standard_normal((CHAINS, length, length, 3)).astype(np.float32)
    spins /= np.linalg.norm(spins, axis=-1, keepdims=True)
    colours = [np.nonzero(np.indices((length, length)).sum(0) % 2 == c) for c in (0, 1)]

    def sweep(count: int) -> None:
        for _ in range(count):
            for x, y in colours:
                force = spins[:, x - 1, y] + spins[:, (x + 1) % length, y]
                force += spins[:, x, y - 1] + spins[:, x, (y + 1) % length]
                norm = np.sqrt((force * force).sum(-1))
                axis = force / norm[..., None]
                w, angle = numpy_three(beta * norm, draw)
                other = np.where(np.abs(axis[..., :1]) < 0.9, [1.0, 0, 0], [0, 1.0, 0])
                first = np.cross(axis, other)
                first /= np.linalg.norm(first, axis=-1, keepdims=True)
                second = np.cross(axis, first)
                across = np.sqrt(np.maximum(1 - w * w, 0))[..., None]
                angle = angle[..., None]
                spins[:, x, y] = w[..., None] * axis + across * (
                    np.cos(angle) * first + np.sin(angle) * second
                )

    return sweep, CHAINS * length**2


def numpy_dense(num_spins: int, dim: int, matrix: np.ndarray, beta: float) -> Run:
    """Site by site, all chains at once; Wood's rejection from numpy's beta variates."""
    draw = np.random.default_rng(0)
    radius = np.sqrt(dim)
    spins = draw.standard_normal((CHAINS, num_spins, dim))
    spins *= radius / np.linalg.norm(spins, axis=-1, keepdims=True)
    m = dim - 1

    def sweep(count: int) -> None:
        for _ in range(count):
            for site in range(num_spins):
                force = matrix[site] @ spins
                norm = np.linalg.norm(force, axis=-1)
                axis, kappa = force / norm[:, None], beta * radius * norm
                b = m / (2 * kappa + np.sqrt(4 * kappa**2 + m**2))
                x = (1 - b) / (1 + b)
                c = kappa * x + m * np.log(1 - x**2)
                w, todo = np.empty(CHAINS), np.ones(CHAINS, bool)
                while todo.any():
                    z = draw.beta(m / 2, m / 2, todo.sum())
                    v = (1 - (1 + b[todo]) * z) / (1 - (1 - b[todo]) * z)
                    log_accept = kappa[todo] * v + m * np.log(1 - x[todo] * v) - c[todo]
                    good = log_accept >= np.log(draw.random(len(z)))
                    where = np.flatnonzero(todo)[good]
                    w[where], todo[where] = v[good], False
                tangent = draw.standard_normal((CHAINS, dim))
                tangent -= (tangent * axis).sum(-1, keepdims=True) * axis
                tangent *= (np.sqrt(1 - w * w) / np.linalg.norm(tangent, axis=-1))[:, None]
                spins[:, site] = radius * (w[:, None] * axis + tangent)

    return sweep, CHAINS * num_spins


def rates(runs: dict[str, Run], seconds: float, repeats: int) -> dict[str, float]:
    """Updates per second, the best of alternating runs of about so many seconds."""
    counts = {}
    for name, (sweep, _) in runs.items():
        sweep(1)  # pays for the allocator
        start = time.process_time()
        sweep(1)
        counts[name] = max(1, round(seconds / max(time.process_time() - start, 1e-6)))
    best = dict.fromkeys(runs, 0.0)
    for _ in range(repeats):
        for name, (sweep, spins) in runs.items():
            start = time.process_time()
            sweep(counts[name])
            taken = time.process_time() - start
            best[name] = max(best[name], counts[name] * spins / taken)
    return best


def groups() -> dict[str, dict[str, Run]]:
    """What is compared with what; the first of each group is ours."""
    three = Sphere(3, radius=1.0)
    generator = torch.Generator().manual_seed(0)
    glass = sherrington_kirkpatrick(64, generator=generator)
    matrix = glass.to_dense().double().numpy()
    found = {}
    for name, couplings, shape, beta in (
        ("Ising, 64 x 64", square(64), (64, 64), 0.44),
        ("Ising, 16 x 16 x 16", cubic(16), (16, 16, 16), 0.22),
    ):
        found[name] = {"heat bath": ours(couplings, Ising(), beta, HeatBath())}
        peer = peapods_run(shape, beta)
        if peer is None:
            print(f"{name}: peapods is not installed (pip install peapods): no ratio to it")
        else:
            found[name]["peapods, compiled"] = peer
    found["O(3), 64 x 64"] = {
        "heat bath": ours(square(64), three, 1.0, HeatBath()),
        "over-relaxation": ours(square(64), three, 1.0, OverRelaxation()),
        "Metropolis": ours(square(64), three, 1.0, Metropolis()),
        "numpy, site by site": numpy_site_by_site(64, 1.0),
        "numpy, checkerboard": numpy_checkerboard(64, 1.0),
    }
    for dim in (2, 8, 64):
        site = Sphere(dim)
        found[f"O({dim}), 64 x 64"] = {
            "heat bath": ours(square(64), site, 0.5, HeatBath()),
            "over-relaxation": ours(square(64), site, 0.5, OverRelaxation()),
        }
    found["dense, N = 64, D = 64"] = {
        "heat bath": ours(glass, Sphere(64), 1.0, HeatBath()),
        "over-relaxation": ours(glass, Sphere(64), 1.0, OverRelaxation()),
        "numpy, site by site": numpy_dense(64, 64, matrix, 1.0),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="of one run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, float32, {CHAINS} chains")
    results = {}
    for group, runs in groups().items():
        found = rates(runs, args.seconds, args.repeats)
        results[group] = found
        print(f"\n{group:24s} {'10^6 updates/s':>16s}  heat bath / it")
        for name, rate in found.items():
            print(f"  {name:22s} {rate / 1e6:16.3f}  {found['heat bath'] / rate:14.2f}")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
