r"""Alternating inexact minimization (AIM): where it must fall, where it rises, and where it ends.

The synthetic problem of Yang, Huang & Wipf (2022), two quadratic energies of the same tokens,

.. math::
    f(Y) = |S Y|^2 + |Y - B_1|^2 ,\qquad g(Y) = |Y W|^2 + |Y - B_2|^2 ,\qquad h = f + g ,

whose gradient steps are taken in turn: :math:`u = y - a_1 \nabla f(y)`, then
:math:`y^+ = u - a_2 \nabla g(u)`. Figures 1 to 4 of the paper, with numbers:

* ``regions``: where one step is guaranteed to lower h (Lemma 4.3, Theorem 4.1), where it falls
  anyway, and where it rises, in the plane through the minima of f, g and h;
* ``trajectory``: where AIM ends, against the fixed point from linear algebra; its energy beside
  algorithms that never rise; and how many of many random starts rise;
* ``proximal``: the regions of Theorem 5.1, with ReLU as the proximal map;
* ``attention``: the update of the printed Theorem 3.1, which can raise its energy;
* ``counts``: rises among random systems.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from simulations.aim_plots import draw
from simulations.aim_problem import (
    DTYPE,
    Arrays,
    Found,
    Plane,
    Problem,
    aim_step,
    problem,
    proximal_step,
)
from simulations.results import collect, conclude
from simulations.runs import replaced
from simulations.tables import align
from spinformer.descent import (
    AIM,
    Backtracking,
    Gradient,
    MajorizeMinimize,
    PairwiseEnergy,
    ProximalAIM,
    QuadraticEnergy,
    Verdict,
    descend,
    gradient_ratio,
)
from spinformer.descent.report import monitor

# (a1 / a2, a2 L_h) of the maps: the ratio of distances is below one in three of them.
SIZES = ((0.1, 1.0), (0.5, 1.0), (1.0, 1.0), (1.0, 0.7), (1.0, 0.4), (1.0, 0.2))
HALF_WIDTH = 4.0
STEPS = 60
COUNTEREXAMPLE = (12.0, 12.0, 10.0)
EXTENT = 16.0
SCALES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def main_problem(seed: int) -> Problem:
    """The problem of the maps and of the trajectory."""
    return problem(torch.Generator().manual_seed(seed))


# --- figure 1 ------------------------------------------------------------------------------------


def regions(args: argparse.Namespace) -> Found:
    """Maps of the plane through the minima, wide and around that of h, for several sizes."""
    case = main_problem(args.seed)
    minima = case.minima()
    plane = Plane.through(minima["h"], minima["g"], minima["f"])
    points = 81 if args.quick else 401
    numbers: dict[str, Any] = {
        "constants": {name: float(x) for name, x in vars(case.constants).items()},
        "minima": {name: plane.coordinates(y).tolist() for name, y in minima.items()},
        "panels": [],
    }
    arrays: Arrays = {}
    for index, (ratio, share) in enumerate(SIZES):
        sizes = case.sizes(ratio, share)
        end, _ = case.fixed_point(sizes)
        gap = float((end - minima["h"]).norm())
        panel: dict[str, Any] = {"a1/a2": ratio, "a2 L_h": share, "gap": gap}
        panel["end"] = plane.coordinates(end).tolist()
        for window, half in (("wide", HALF_WIDTH), ("zoom", 2.0 * gap)):
            x, y, states = plane.grid(torch.zeros(2, dtype=DTYPE), half, points)
            panel[window], maps = aim_step(case, sizes, states)
            arrays |= {
                f"{window}{index}_x": x.numpy(),
                f"{window}{index}_y": y.numpy(),
                f"{window}{index}_kind": maps["kind"],
            }
        numbers["panels"].append(panel)
    return numbers, arrays


# --- figures 2 and 3 -----------------------------------------------------------------------------


def trajectory(args: argparse.Namespace) -> Found:
    """AIM from the data of f, its end and its energy; other algorithms; many random starts."""
    case = main_problem(args.seed)
    sizes = case.sizes(1.0, 1.0)
    lowest = case.minima()["h"]
    floor = float(case.h.energy(lowest))
    end, eigenvalues = case.fixed_point(sizes)
    algorithms = {
        "AIM": AIM(sizes),
        "majorize-minimize": MajorizeMinimize(),
        "gradient": Gradient(2 / float(case.constants.lipschitz_h + case.constants.convexity_h)),
        "backtracking": Backtracking(8 * sizes[1], own=False, sufficient=0.3),
    }
    generator = torch.Generator().manual_seed(args.seed + 1)
    count = 100 if args.quick else 10_000
    starts = 3 * torch.randn(count, *lowest.shape, generator=generator, dtype=DTYPE)
    numbers: dict[str, Any] = {
        "size": sizes[0],
        "gap": float((end - lowest).norm()),
        "gap_energy": float(case.h.energy(end)) - floor,
        "eigenvalues": [float(eigenvalues.real.min()), float(eigenvalues.real.max())],
        "eigenvalues_imaginary": float(eigenvalues.imag.abs().max()),
        "starts": count,
        "runs": {},
        "gaps": [
            [share, float((case.fixed_point(case.sizes(1.0, share))[0] - lowest).norm())]
            for share in (1.0, 0.5, 0.25, 0.125)
        ],
    }
    arrays: Arrays = {}
    for name, algorithm in algorithms.items():
        report = descend(case.h, case.B1, algorithm, STEPS, keep_states=True)
        many = descend(case.h, starts, algorithm, STEPS).verdict == Verdict.ROSE
        assert report.states is not None
        above = report.energy - floor
        numbers["runs"][name] = {
            "rose": int((report.verdict == Verdict.ROSE).sum()),
            "lowest_step": int(above.argmin()),
            "lowest": float(above.min()),
            "last": float(above[-1]),
            "end_to_fixed_point": float((report.state - end).norm()),
            "end_to_minimum": float((report.state - lowest).norm()),
            "starts_that_rose": int(many.any(0).sum()),
            "steps_that_rose": int(many.sum()),
        }
        arrays[f"{name}_energy"] = above.numpy()
        arrays[f"{name}_states"] = report.states.numpy()
    path = torch.from_numpy(arrays["AIM_states"])
    steps, maps = aim_step(case, sizes, path[:-1])
    numbers["steps"] = steps
    arrays["AIM_kind"] = maps["kind"]
    _planes(case, path, {"minimum": lowest, "end": end}, numbers, arrays, args.quick)
    return numbers, arrays


def _planes(
    case: Problem,
    path: Tensor,
    marks: dict[str, Tensor],
    numbers: dict[str, Any],
    arrays: Arrays,
    quick: bool,
) -> None:
    """What the two pictures of the trajectory show: its principal plane, and that of its end."""
    gap = (marks["end"] - marks["minimum"]).norm()
    near = (path - marks["end"]).norm(dim=(-2, -1)) < 2 * gap
    floor = case.h.energy(marks["minimum"])
    other = torch.from_numpy(arrays["gradient_states"])
    for window, shown in (("whole", path), ("end", path[near])):
        plane = Plane.through(marks["minimum"], *shown)
        drawn = {
            "path": plane.coordinates(path),
            "gradient": plane.coordinates(other),
            **{name: plane.coordinates(state) for name, state in marks.items()},
        }
        inside = plane.coordinates(shown)
        corners = torch.stack([inside.amin(0), inside.amax(0), drawn["minimum"], drawn["end"]])
        low, high = corners.amin(0), corners.amax(0)
        half = 0.65 * float((high - low).max())
        x, y, states = plane.grid((low + high) / 2, half, 60 if quick else 160)
        numbers[f"share_{window}"] = plane.share(shown)
        arrays |= {f"{window}_{name}": value.numpy() for name, value in drawn.items()}
        arrays |= {f"{window}_x": x.numpy(), f"{window}_y": y.numpy()}
        arrays[f"{window}_h"] = (case.h.energy(states) - floor).numpy()


# --- figure 4 ------------------------------------------------------------------------------------


def flat_problem(second: float) -> Problem:
    """One token of two channels, its minimum inside the quadrant or, pulled down, on its border."""
    return Problem(
        S=torch.tensor([[1.0]], dtype=DTYPE),
        W=torch.tensor([[1.2, 0.3], [0.0, 0.6]], dtype=DTYPE),
        B1=torch.tensor([[3.0, second]], dtype=DTYPE),
        B2=torch.tensor([[1.0, 1.5]], dtype=DTYPE),
    )


def proximal(args: argparse.Namespace) -> Found:
    """Maps of two channels, and of the plane through three minima of the larger problem."""
    points = 81 if args.quick else 401
    axis = torch.linspace(-0.1, 2.5, points, dtype=DTYPE)
    shares = torch.linspace(-0.1, 1.4, points, dtype=DTYPE)
    numbers: dict[str, Any] = {"panels": {}}
    arrays: Arrays = {}
    for name, case in {
        "inside": flat_problem(2.0),
        "border": flat_problem(-3.5),
        "slice": main_problem(args.seed),
    }.items():
        minima = {key: constrained_minimum(energy) for key, energy in case.energies().items()}
        if name == "slice":
            s, t = torch.meshgrid(shares, shares, indexing="xy")
            corners = {"f": [1.0, 0.0], "g": [0.0, 1.0], "h": [0.0, 0.0]}
            weights = {"f": s, "g": t, "h": 1 - s - t}
            # Not as differences from a corner: what is zero in all three must stay exactly zero.
            parts = [weights[key][..., None, None] * y for key, y in minima.items()]
            states = torch.stack(parts).sum(0)
        else:
            corners = {key: y[0].tolist() for key, y in minima.items()}
            states = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)[..., None, :]
        panel, maps = proximal_step(case, case.sizes(1.0, 1.0), states)
        numbers["panels"][name] = {"minima": corners, **panel}
        arrays[f"{name}_axis"] = (shares if name == "slice" else axis).numpy()
        arrays |= {f"{name}_{key}": value for key, value in maps.items()}
    return numbers, arrays


def constrained_minimum(energy: QuadraticEnergy) -> Tensor:
    """The minimum of an energy among states without a negative entry, ``(N, d)``."""
    assert energy.center is not None
    start = torch.zeros_like(energy.center)
    _, upper = energy.hessian_bounds(len(start))
    algorithm = ProximalAIM(1 / float(upper), "relu")
    for _ in range(1000):
        start = algorithm.step(energy, start)
    return start


# --- the printed Theorem 3.1 ---------------------------------------------------------------------


def rose(energy: PairwiseEnergy, before: Tensor, after: Tensor) -> Tensor:
    """Whether a step raised the energy by more than rounding, ``(...)``."""
    return monitor([before, after], energy).verdict[0] == Verdict.ROSE


def attention(args: argparse.Namespace) -> Found:
    """Three scalar tokens: along one update, over several, and which triples (a, a, b) rise."""
    right, printed = PairwiseEnergy(data_weight=1.0), PairwiseEnergy()
    start = torch.tensor(COUNTEREXAMPLE, dtype=DTYPE)[:, None]
    height = float(right.energy(start))
    along = torch.linspace(0, 1, 101, dtype=DTYPE)
    arrays: Arrays = {"along": along.numpy()}
    numbers: dict[str, Any] = {"tokens": COUNTEREXAMPLE, "energy": height, "change": {}}
    for name, energy in (("printed", printed), ("corrected", right)):
        step = energy.step(start) - start
        line = right.energy(start + along[:, None, None] * step) - height
        states = [start]
        for _ in range(10):
            states.append(energy.step(states[-1]))
        arrays[f"{name}_along"] = line.numpy()
        arrays[f"{name}_run"] = (right.energy(torch.stack(states)) - height).numpy()
        numbers["change"][name] = float(line[-1])
    points = 81 if args.quick else 401
    first = torch.linspace(0, EXTENT, points, dtype=DTYPE)
    second = torch.linspace(-EXTENT / 4, EXTENT, 5 * (points - 1) // 4 + 1, dtype=DTYPE)
    a, b = torch.meshgrid(first, second, indexing="xy")
    triples = torch.stack([a, a, b], -1)[..., None]
    change = right.energy(printed.step(triples)) - right.energy(triples)
    up = rose(right, triples, printed.step(triples))
    numbers |= {
        "cells": up.numel(),
        "rose": int(up.sum()),
        "largest": float(change.max()),
        "rose_corrected": int(rose(right, triples, right.step(triples)).sum()),
    }
    arrays |= {"a": first.numpy(), "b": second.numpy(), "change": change.numpy()}
    return numbers, arrays


# --- counts --------------------------------------------------------------------------------------


def systems(n: int, d: int, count: int, generator: torch.Generator, offset: float = 10.0) -> Tensor:
    """Gaussian tokens at every scale; half of the systems lie around a point far from zero.

    The point is Gaussian as well, ``offset`` times as far as the tokens are apart.
    """
    tokens = torch.randn(len(SCALES), 2, count, n, d, generator=generator, dtype=DTYPE)
    points = torch.randn(len(SCALES), 2, count, 1, d, generator=generator, dtype=DTYPE)
    points[:, 0] = 0.0
    scales = torch.tensor(SCALES, dtype=DTYPE)[:, None, None, None, None]
    return (scales * (tokens + offset * points)).flatten(0, 2)


def count_attention(each: int, generator: torch.Generator) -> list[dict[str, Any]]:
    """How many systems rise in one step, by energy and step."""
    plain, squared = PairwiseEnergy(), PairwiseEnergy(data_weight=1.0)
    E, E1, EX = "E_rho", "E_rho + |Y|^2 / 2", "E_rho + |Y - X|^2 / 2"
    rows: dict[tuple[str, str], int] = {}
    total = 0
    for n, d in tqdm(list(product(range(2, 9), range(1, 5))), desc="systems", unit="shape"):
        Y = systems(n, d, each, generator)
        total += len(Y)
        data = torch.randn(Y.shape, generator=generator, dtype=DTYPE)
        anchored = PairwiseEnergy(data_weight=1.0, data=data)
        for name, energy, step, moved in (
            (E1, squared, "printed", plain.step(Y)),
            (E, plain, "printed", plain.step(Y)),
            (E, plain, "printed, a = 1.9", plain.step(Y, 1.9)),
            (E, plain, "printed, a = 2.5", plain.step(Y, 2.5)),
            (E, plain, "softmax without beta", plain.plain_softmax_step(Y)),
            (E1, squared, "softmax without beta", plain.plain_softmax_step(Y)),
            (E1, squared, "corrected", squared.step(Y)),
            (E1, squared, "corrected, a = 1.9", squared.step(Y, 1.9)),
            (EX, anchored, "corrected", anchored.step(Y)),
            (EX, anchored, "corrected, a = 1.9", anchored.step(Y, 1.9)),
        ):
            rows[name, step] = rows.get((name, step), 0) + int(rose(energy, Y, moved).sum())
    return [
        {"energy": energy, "step": step, "systems": total, "rose": count}
        for (energy, step), count in rows.items()
    ]


def count_quadratics(
    problems: int, states: int, generator: torch.Generator
) -> dict[str, dict[str, int]]:
    """Of random problems and states: how many a theorem covers, and how many of those rise."""
    names = ("Lemma 4.3", "Theorem 4.1", "4.1 with the noise", "Theorem 5.1", "5.1, sharp")
    found = {name: {"covered": 0, "rose": 0} for name in names}

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    for _ in tqdm(range(problems), desc="quadratics", unit="problem"):
        tokens, channels = torch.randint(1, 5, (2,), generator=generator).tolist()
        scales = uniform(0, 2), uniform(0, 2)
        case = problem(generator, tokens, channels, scales, shift=uniform(-1, 1))
        sizes = case.sizes(uniform(0.05, 1.0) ** (1 / 3), uniform(0.05, 1.0))
        # From far away to next to the minimum, where AIM rises.
        spread = 10 ** torch.empty(states, 1, 1, dtype=DTYPE).uniform_(-2, 1, generator=generator)
        noise = torch.randn(states, tokens, channels, generator=generator, dtype=DTYPE)
        Y = case.minima()["h"] + spread * noise
        for inner, outer, numbers in (
            ("Lemma 4.3", "Theorem 4.1", aim_step(case, sizes, Y)[0]),
            ("Theorem 5.1", "5.1, sharp", proximal_step(case, sizes, Y.clamp_min(0.0))[0]),
        ):
            for name, key in ((inner, "inner"), (outer, "outer")):
                found[name]["covered"] += numbers[f"in_{key}"]
                found[name]["rose"] += numbers[f"rose_in_{key}"]
        covered, rose = with_noise(case, sizes, Y)
        found["4.1 with the noise"]["covered"] += int(covered.sum())
        found["4.1 with the noise"]["rose"] += int((covered & rose).sum())
    return found


def with_noise(case: Problem, sizes: tuple[float, float], Y: Tensor) -> tuple[Tensor, Tensor]:
    """Which states ``|Delta| <= L |grad h|`` covers, and which rise.

    Theorem 4.1 has the size of grad f on the left; with that of the noise it is false.
    """
    report = descend(case.h, Y, AIM(sizes), 1, keep_states=True)
    assert report.states is not None
    gradient = case.h.gradient(Y)
    # The step is y+ = y - a2 (grad h - Delta).
    noise = (report.states[1] - Y) / sizes[1] + gradient
    covered = gradient_ratio(noise, gradient) <= report.bound[0]
    return covered, report.verdict[0] == Verdict.ROSE


def counts(args: argparse.Namespace) -> Found:
    """Rises among random systems of tokens, and among random quadratic problems."""
    generator = torch.Generator().manual_seed(args.seed + 2)
    return {
        "attention": count_attention(10 if args.quick else 300, generator),
        "quadratics": count_quadratics(*((60, 50) if args.quick else (1000, 1000)), generator),
    }, {}


# --- the study -----------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "regions": regions,
    "trajectory": trajectory,
    "proximal": proximal,
    "attention": attention,
    "counts": counts,
}


def render(results: dict[str, Any]) -> str:
    """What was checked, how often, how often it rose, and what follows."""
    rows = [row for name, part in results["sections"].items() for row in _ROWS[name](part)]
    return align(("claim, on what", "states", "rose", "verdict"), rows)


def _row(claim: str, states: int, rose: int, verdict: str = "") -> tuple[str, ...]:
    found = "fails" if rose else "never rises"
    return claim, f"{states:,}", f"{rose:,}", verdict or found


def _map_rows(inner: str, outer: str, maps: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Two nested claims, and what none of them covers, summed over maps."""
    total = {key: sum(cells[key] for cells in maps) for key in ("fell", "rose")}
    rows = []
    for claim, key in ((inner, "inner"), (outer, "outer")):
        covered = sum(cells[f"in_{key}"] for cells in maps)
        rows.append(_row(claim, covered, sum(cells[f"rose_in_{key}"] for cells in maps)))
    rest = total["fell"] + total["rose"]
    return [*rows, _row("  not covered", rest, total["rose"], "not claimed")]


def _region_rows(section: dict[str, Any]) -> list[tuple[str, ...]]:
    maps = [panel[window] for panel in section["panels"] for window in ("wide", "zoom")]
    where = f"{len(maps)} maps"
    return _map_rows(f"Lemma 4.3, {where}", f"Theorem 4.1, {where}", maps)


def _trajectory_rows(section: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for name, run in section["runs"].items():
        ends = f"ends {run['end_to_minimum']:.1e} from y_h*"
        rows.append(_row(f"{name} from B1, steps", STEPS, run["rose"], ends))
        count = section["starts"]
        verdict = "rises, late" if run["starts_that_rose"] else ""
        rows.append(_row("  random starts that rise", count, run["starts_that_rose"], verdict))
    return rows


def _proximal_rows(section: dict[str, Any]) -> list[tuple[str, ...]]:
    where = f"{len(section['panels'])} maps"
    outer = f"  with the sharp constant, {where}"
    return _map_rows(f"Theorem 5.1, {where}", outer, list(section["panels"].values()))


def _attention_rows(section: dict[str, Any]) -> list[tuple[str, ...]]:
    tokens = ", ".join(f"{token:g}" for token in section["tokens"])
    change = section["change"]
    claims = {"printed": f"Theorem 3.1, tokens {tokens}", "corrected": "  the corrected step"}
    return [
        *(_row(claims[key], 1, int(x > 0), f"{x:+.4f}") for key, x in change.items()),
        _row("Theorem 3.1, triples a, a, b", section["cells"], section["rose"]),
        _row("  the corrected step", section["cells"], section["rose_corrected"]),
    ]


def _count_rows(section: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [
        _row(f"{row['step']}: {row['energy']}", row["systems"], row["rose"])
        for row in section["attention"]
    ]
    return rows + [
        _row(f"{name}, random quadratics", cells["covered"], cells["rose"])
        for name, cells in section["quadratics"].items()
    ]


_ROWS: dict[str, Callable[[dict[str, Any]], list[tuple[str, ...]]]] = {
    "regions": _region_rows,
    "trajectory": _trajectory_rows,
    "proximal": _proximal_rows,
    "attention": _attention_rows,
    "counts": _count_rows,
}


class _Aim:
    name = "aim"
    description = (
        "alternating steps of two energies: where they fall, where they rise, where they end"
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, args: argparse.Namespace) -> int:
        arrays: dict[str, Arrays] = {}

        def section(name: str) -> tuple[str, dict[str, Any]]:
            numbers, arrays[name] = SECTIONS[name](args)
            return name, numbers

        found, interruption = collect(SECTIONS, "section", section)

        def show(results: dict[str, Any]) -> tuple[str, list[Path]]:
            flat = {f"{name}/{key}": a for name, part in arrays.items() for key, a in part.items()}
            with replaced(args.out / "maps.npz") as partial, partial.open("wb") as file:
                np.savez_compressed(file, **flat)  # type: ignore[arg-type]
            return render(results), [args.out / "maps.npz", *draw(results, arrays, args.out)]

        content = {"sections": dict(found)}
        return conclude(self.name, args, interruption, content, show if found else None)


STUDY = _Aim()
