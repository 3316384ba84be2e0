r"""Hysteresis: a field goes up and down, and spins carry their state from one value to the next.

Spins that are all coupled alike (Curie-Weiss), with a field along one axis that follows a triangle
wave. Temperatures are in units of that where they order. Shown:

* loops m(h) of parallel dynamics at some periods, and of the mean-field solution that is carried
  along: every solve starts from the last magnetization. Ising spins below ordering, above it, and
  spins of three components below, which can turn instead of jump (a weak field across the axis
  shows them the way).
* the area of the loop against the period: the work that a cycle costs a spin;
* the coercive field, where m changes its sign. That of the carried mean field is its spinodal, for
  Ising spins at :math:`m_s = \sqrt{1 - T}`,
  :math:`h_s = m_s - T \operatorname{artanh} m_s` (J = 1);
* the same memory in a Transformer block, which starts every solve from the answer to its last
  input, and one that forgets.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import spinformer as sf
from simulations.approximations import APPROXIMATIONS, exact_law
from simulations.figures import blank, clean, save
from simulations.options import positive
from simulations.results import conclude, until_interrupted
from simulations.tables import align
from spinformer.dynamics import KineticMeanField, ParallelDynamics, triangle_wave
from spinformer.dynamics.steady_state import Transient
from spinformer.nn import FreeEnergyBlock
from spinformer.nn.couplings import FixedCouplings

# The field at the turning points and the one across, in units of the force of ordered neighbours.
AMPLITUDE, ACROSS = 0.5, 0.02
CYCLES = 2  # the first forgets the start
COLD, WARM = 0.6, 1.4
PAIR = 2  # spins of a mean-field system: in a uniform field all are alike
# A map that creeps past the end of a branch needs many steps, and is meant to take them.
CARRIED: dict[str, Any] = {"tolerance": 1e-9, "max_iterations": 50_000}


@dataclass(frozen=True)
class Case:
    """Spins of one dimension at one temperature."""

    dim: int
    temperature: float
    title: str


CASES = (
    Case(1, COLD, f"Ising spins below ordering, $T = {COLD}$"),
    Case(1, WARM, f"Ising spins above ordering, $T = {WARM}$"),
    Case(3, COLD, f"spins of 3 components, $T = {COLD}$"),
)


@dataclass(frozen=True)
class Plan:
    """How many spins and chains, and how slowly the field goes."""

    size: int
    chains: int
    periods: tuple[int, ...]
    temperatures: int
    grid: int


QUICK = Plan(64, 16, (16, 64, 256), 6, 60)
FULL = Plan(200, 24, (16, 48, 128, 512, 2048), 8, 120)


def build(dim: int, temperature: float | Tensor, size: int) -> sf.SpinSystem:
    """Spins that order at T = 1, in the field of a turning point."""
    site = exact_law(dim)
    assert site.radius is not None
    couplings = sf.couplings.curie_weiss(size, strength=size / (size - 1), dtype=torch.float64)
    field = torch.zeros(size, dim, dtype=torch.float64)
    field[:, 0] = AMPLITUDE * site.radius
    temperature = torch.as_tensor(temperature, dtype=torch.float64)
    return sf.SpinSystem(couplings, field, dim / (site.radius**2 * temperature), site)


def schedule(system: sf.SpinSystem, period: int, cycles: int = CYCLES) -> Tensor:
    """Fields of all steps, (steps, N, D): a triangle wave along the first axis."""
    assert system.site.radius is not None
    field = system.field.reshape(-1, *system.field.shape[-2:])[0]
    fields = triangle_wave(field, period, cycles)
    if system.dim > 1:
        fields[..., -1] = ACROSS * system.site.radius
    return fields


def loop(transient: Transient, period: int) -> tuple[Tensor, Tensor]:
    """h and m of the last cycle in units of R, (period) and (period, ...).

    m is the response to h: the magnetization after the step in that field.
    """
    system = transient.protocol.system
    assert system.site.radius is not None
    h = transient.fields[-period:].reshape(period, -1, system.dim)[:, 0, 0]
    m = transient.magnetization[-period:, ..., 0].mean(-1)
    return h / system.site.radius, m / system.site.radius


def enclosed(h: list[float], m: list[float]) -> float:
    """The area inside a closed loop, by the trapezoidal rule.

    Of a steady answer: the work of a field that goes in finite steps is larger by half a step times
    the range of m, even where nothing is carried.
    """
    return sum(
        (h[i - 1] - h[i]) * (m[i - 1] + m[i]) / 2  # from the last point to the first, and on
        for i in range(len(h))
    )


def crossing(h: list[float], m: list[float]) -> float:
    """The coercive field: where m, on the way down of a cycle, goes through zero."""
    half = len(h) // 2 + 1
    for before, after in zip(range(half - 1), range(1, half), strict=True):
        if m[before] > 0 >= m[after]:
            share = m[before] / (m[before] - m[after])
            return -(h[before] + share * (h[after] - h[before]))
    return math.nan


@torch.no_grad()
def sampled_loop(case: Case, period: int, plan: Plan, seed: int) -> dict[str, Any]:
    """Loop and area of parallel dynamics, with errors over chains."""
    system = build(case.dim, case.temperature, plan.size)
    fields = schedule(system, period)
    transient = ParallelDynamics(chains=plan.chains, seed=seed).run(
        system, len(fields), "ordered", field=fields
    )
    h, m = loop(transient, period)
    assert system.site.radius is not None
    unit = system.num_spins * system.site.radius
    spread = transient.standard_error("moment")[-period:, 0] / unit
    area, error = chain_areas(transient, period)
    return {
        "period": period,
        "h": h.tolist(),
        "m": m.tolist(),
        "m_error": spread.tolist(),
        "area": area,
        "area_error": error,
        "coercive": crossing(h.tolist(), m.tolist()),
    }


def chain_areas(transient: Any, period: int) -> tuple[float, float]:
    """Work of the last cycle per spin, in units of J R^2, and its error over chains."""
    system = transient.protocol.system
    radius = system.site.radius
    area = float(transient.work[-period:].sum(0)) / (system.num_spins * radius**2)
    # The field is uniform: the work on a chain needs its moment only.
    change = transient.fields.diff(dim=0)[-period:, 0]
    work = -(change[:, None] * transient.moments[1:-1][-period:]).sum((0, -1))
    error = float(work.std()) / math.sqrt(len(work)) / (system.num_spins * radius**2)
    return area, error


@torch.no_grad()
def kinetic_area(case: Case, period: int) -> float:
    """Area of the loop of the kinetic mean field, in the same units."""
    system = build(case.dim, case.temperature, PAIR)
    fields = schedule(system, period)
    transient = KineticMeanField().run(system, len(fields), "ordered", field=fields)
    assert system.site.radius is not None
    return float(transient.work[-period:].sum(0)) / (PAIR * system.site.radius**2)


@torch.no_grad()
def carried_loop(case: Case, grid: int) -> dict[str, Any]:
    """The mean-field solution carried from field to field, and the area of its loop."""
    system = build(case.dim, case.temperature, PAIR)
    radius = system.site.radius
    assert radius is not None
    solver = sf.MeanField(**CARRIED)
    state = torch.zeros_like(system.field)
    state[..., 0] = 0.99 * radius
    h, m = [], []
    for field in schedule(system, grid, 1):
        state = solver.solve(system.replace(field=field), state).magnetization
        h.append(float(field[0, 0]) / radius)
        m.append(float(state[..., 0].mean()) / radius)
    return {"h": h, "m": m, "area": enclosed(h, m)}


def spinodal(temperature: float) -> float:
    """Coercive field of carried mean field, Ising spins, J = 1: the closed form; 0 above T = 1."""
    if temperature >= 1:
        return 0.0
    m = math.sqrt(1 - temperature)
    return m - temperature * math.atanh(m)


@torch.no_grad()
def carried_coercive(temperatures: Tensor, halvings: int = 14) -> Tensor:
    """The same by halving: where the carried state first leaves its branch, (T)."""
    system = build(1, temperatures, PAIR)
    solver = sf.MeanField(**CARRIED)
    low, high = torch.zeros_like(temperatures), torch.full_like(temperatures, AMPLITUDE)
    state = torch.full_like(system.field, 0.99)
    for _ in range(halvings):
        middle = (low + high) / 2
        field = -middle[:, None, None].expand_as(system.field)
        answer = solver.solve(system.replace(field=field), state).magnetization
        stays = answer[:, 0, 0] > 0
        state = torch.where(stays[:, None, None], answer, state)
        low, high = torch.where(stays, middle, low), torch.where(stays, high, middle)
    return (low + high) / 2


@torch.no_grad()
def sampled_coercive(temperatures: Tensor, period: int, plan: Plan, seed: int) -> list[float]:
    """Coercive fields of parallel dynamics, all temperatures as one batch."""
    system = build(1, temperatures, plan.size)
    fields = schedule(system, period)[:, None]
    transient = ParallelDynamics(chains=plan.chains, seed=seed).run(
        system, len(fields), "ordered", field=fields
    )
    h, m = loop(transient, period)
    return [crossing(h.tolist(), column.tolist()) for column in m.unbind(1)]


# A sequence of inputs: what comes first, and how many of them.
PULSES = ((0.0, 12), (0.35, 5), (0.0, 20), (-0.08, 10), (0.0, 10), (-0.35, 5), (0.0, 20))
TOKENS, NOISE = 16, 0.05


@torch.no_grad()
def sequence(seed: int) -> dict[str, list[float]]:
    """Inputs that a block gets one after another; its answers with and without a carried state."""
    generator = torch.Generator().manual_seed(seed)
    signal = torch.cat([torch.full((count,), height) for height, count in PULSES]).double()
    noise = NOISE * torch.randn(len(signal), TOKENS, generator=generator, dtype=torch.float64)
    inputs = signal[:, None] + noise

    def make() -> FreeEnergyBlock:
        block = FreeEnergyBlock(
            d_model=1,
            nhead=1,
            couplings="fixed",
            num_spins=TOKENS,
            beta=1 / COLD,
            solver="plain",
            max_iterations=CARRIED["max_iterations"],
            tolerance=1e-8,
            dtype=torch.float64,
        )
        assert isinstance(block.self_attn, FixedCouplings)
        block.self_attn.weight.fill_(1 / (TOKENS - 1))
        return block

    carrying, forgetting = make(), make()
    with_state, without = [], []
    for tokens in inputs:
        answer = carrying(tokens[None, :, None])
        carrying.initial = answer
        with_state.append(float(answer.mean()))
        without.append(float(forgetting(tokens[None, :, None]).mean()))
    return {"input": inputs.mean(1).tolist(), "carried": with_state, "forgotten": without}


def _colour(index: int, count: int) -> Any:
    return colormaps["plasma"](0.85 - 0.8 * index / max(count - 1, 1))


MEAN_FIELD = APPROXIMATIONS["mean_field"].look["color"]


def draw(results: dict[str, Any]) -> Figure:
    """Loops above; below areas, coercive fields and the block."""
    figure = blank(13, 8)
    axes = figure.subplots(2, 3)
    clean(*axes.flat)
    periods = results["periods"]
    for axis, entry in zip(axes[0], results["loops"], strict=False):
        _draw_loops(axis, entry, periods)
    axes[0, 0].set_ylabel("$m / R$ along the field")
    if len(results["loops"]) > 1:  # where there is room for it
        axes[0, 1].legend(
            *axes[0, 0].get_legend_handles_labels(), loc="upper left", fontsize=7.5, frameon=False
        )
    figure.suptitle(
        f"{results['size']} spins, all coupled alike, in a field that goes up and down: "
        "Ising spins must jump, vectors can turn",
        fontsize=12,
    )
    _draw_areas(axes[1, 0], results["loops"])
    if "coercive" in results:
        _draw_coercive(axes[1, 1], results["coercive"], periods)
    if "sequence" in results:
        _draw_sequence(axes[1, 2], results["sequence"])
    return figure


def _draw_loops(axis: Axes, entry: dict[str, Any], periods: list[int]) -> None:
    axis.set_title(entry["title"], fontsize=10)
    axis.set_xlabel("field $h / J R$")
    axis.set_ylim(-1.05, 1.05)
    for one in entry["sampled"]:
        colour = _colour(periods.index(one["period"]), len(periods))
        h, m = [*one["h"], one["h"][0]], [*one["m"], one["m"][0]]
        axis.plot(h, m, color=colour, linewidth=1.3, label=f"simulation, period {one['period']}")
    if "carried" in entry:
        h, m = entry["carried"]["h"], entry["carried"]["m"]
        axis.plot(
            [*h, h[0]],
            [*m, m[0]],
            color=MEAN_FIELD,
            linestyle="--",
            linewidth=2,
            label="mean field, carried (infinitely slow)",
        )
    if entry["dim"] == 1 and entry["temperature"] < 1:
        for sign in (-1, 1):
            axis.axvline(
                sign * spinodal(entry["temperature"]), color="0.5", linestyle=":", linewidth=1.2
            )
        axis.text(
            spinodal(entry["temperature"]) + 0.01, -0.98, "spinodal $h_s$", fontsize=8, color="0.4"
        )


def _draw_areas(axis: Axes, loops: list[dict[str, Any]]) -> None:
    axis.set_title("the work of a cycle", fontsize=10)
    axis.set_xlabel("period in steps")
    axis.set_ylabel("work per spin in units of $J R^2$")
    axis.set_xscale("log")
    axis.set_yscale("log")
    periods = sorted({one["period"] for entry in loops for one in entry["sampled"]})
    axis.set_xticks(periods, [str(period) for period in periods])
    axis.minorticks_off()
    for entry, (colour, marker) in zip(
        loops, (("#0072B2", "s"), ("#999999", "o"), ("#D55E00", "^")), strict=False
    ):
        axis.errorbar(
            [one["period"] for one in entry["sampled"]],
            [one["area"] for one in entry["sampled"]],
            [one["area_error"] for one in entry["sampled"]],
            fmt=marker,
            color=colour,
            markersize=5,
            capsize=2,
            label=entry["title"],
        )
        if "kinetic" in entry:
            axis.plot(*zip(*entry["kinetic"], strict=True), color=colour, linewidth=1.3)
        if "carried" in entry and entry["dim"] == 1 and entry["temperature"] < 1:
            axis.axhline(entry["carried"]["area"], color=colour, linestyle="--", linewidth=1.2)
            axis.text(
                0.02,
                entry["carried"]["area"] * 0.95,
                "mean field, carried",
                transform=axis.get_yaxis_transform(),
                color=colour,
                fontsize=8,
                va="top",
            )
    axis.plot([], [], color="0.3", linewidth=1.3, label="lines: kinetic mean field")
    axis.legend(loc="lower left", fontsize=7.5)


def _draw_coercive(axis: Axes, entry: dict[str, Any], periods: list[int]) -> None:
    axis.set_title("where Ising spins jump", fontsize=10)
    axis.set_xlabel("temperature $T / T_0$")
    axis.set_ylabel("coercive field $h_c / J$")
    dense = torch.linspace(0.01, 1.6, 300).tolist()
    axis.plot(
        dense, [spinodal(t) for t in dense], color="black", linewidth=1.3, label="closed form $h_s$"
    )
    axis.plot(
        entry["temperature"],
        entry["carried"],
        color=MEAN_FIELD,
        marker="s",
        linestyle="",
        label="mean field, carried",
    )
    for one in entry["sampled"]:
        axis.plot(
            entry["temperature"],
            [math.nan if h is None else h for h in one["h"]],
            color=_colour(periods.index(one["period"]), len(periods)),
            marker="o",
            markersize=3.5,
            linewidth=1,
            label=f"simulation, period {one['period']}",
        )
    axis.set_xlim(0.25, 1.45)
    axis.set_ylim(-0.02, AMPLITUDE)
    axis.legend(loc="upper right", fontsize=7.5)


def _draw_sequence(axis: Axes, entry: dict[str, list[float]]) -> None:
    axis.set_title("a Transformer block that carries its state remembers", fontsize=10)
    first = 0
    for height, count in PULSES:
        if height:
            word = "strong" if abs(height) > spinodal(COLD) else "weak"
            axis.text(
                first + count / 2,
                height + math.copysign(0.06, height),
                word,
                ha="center",
                va="bottom" if height > 0 else "top",
                fontsize=8,
                color="0.35",
            )
        first += count
    axis.set_xlabel(f"inputs of {TOKENS} tokens, one after another")
    axis.set_ylabel("mean over tokens")
    steps = range(len(entry["input"]))
    axis.bar(steps, entry["input"], width=1, color="0.75", label="input")
    axis.plot(
        steps,
        entry["forgotten"],
        color="#E69F00",
        marker=".",
        linewidth=0.8,
        label="output, every solve from scratch",
    )
    axis.plot(steps, entry["carried"], color=MEAN_FIELD, linewidth=2, label="output, state carried")
    axis.set_ylim(-1.05, 1.6)
    axis.legend(loc="upper right", fontsize=7.5, ncols=1)


def render(results: dict[str, Any]) -> str:
    """Areas and coercive fields."""
    rows = []
    for entry in results["loops"]:
        kinetic = dict(entry.get("kinetic", []))
        for one in entry["sampled"]:
            area = kinetic.get(one["period"])
            rows.append(
                (
                    entry["title"].replace("$", ""),
                    str(one["period"]),
                    f"{one['area']:.4f} ± {one['area_error']:.4f}",
                    "-" if area is None else f"{area:.4f}",
                    "-" if one["coercive"] is None else f"{one['coercive']:.4f}",
                )
            )
        if "carried" in entry:
            rows.append(("", "carried", "", f"{entry['carried']['area']:.4f}", ""))
    text = align(("spins", "period", "area", "kinetic mean field", "coercive field"), rows)
    if "coercive" in results:
        entry = results["coercive"]
        header = ("T / T_0", "closed form", "carried mean field")
        lines = [
            (f"{t:.2f}", f"{spinodal(t):.5f}", f"{found:.5f}")
            for t, found in zip(entry["temperature"], entry["carried"], strict=True)
        ]
        text += "\n\n" + align(header, lines)
    return text


class _Hysteresis:
    name = "hysteresis"
    description = "a field that goes up and down: loops, their area, and a state that is carried"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--chains", type=positive, metavar="N", help="of each system (default 24, quick 16)"
        )

    def run(self, args: argparse.Namespace) -> int:
        plan = QUICK if args.quick else FULL
        if args.chains:
            plan = replace(plan, chains=args.chains)
        content: dict[str, Any] = {
            "amplitude": AMPLITUDE,
            "across": ACROSS,
            **asdict(plan),
            "periods": list(plan.periods),
            "loops": [],
        }
        with until_interrupted() as interruption:
            self._measure(content, plan, args.seed)

        def show(results: dict[str, Any]) -> tuple[str, list[Path]]:
            return render(results), save({"hysteresis.png": draw(results)}, args.out)

        return conclude(self.name, args, interruption, content, show)

    def _measure(self, results: dict[str, Any], plan: Plan, seed: int) -> None:
        """Fill in the results, one by one."""
        total = len(CASES) * sum(plan.periods) + sum(plan.periods[1:-1])
        progress = tqdm(total=total, desc="cycles", unit="step")
        with progress:
            for case in CASES:
                entry: dict[str, Any] = {**asdict(case), "sampled": []}
                results["loops"].append(entry)
                entry["carried"] = carried_loop(case, plan.grid)
                entry["kinetic"] = [(period, kinetic_area(case, period)) for period in plan.periods]
                for period in plan.periods:
                    entry["sampled"].append(_written(sampled_loop(case, period, plan, seed)))
                    progress.update(period)
            results["sequence"] = sequence(seed)
            temperatures = torch.linspace(0.3, WARM, plan.temperatures, dtype=torch.float64)
            found: dict[str, Any] = {
                "temperature": temperatures.tolist(),
                "carried": carried_coercive(temperatures).tolist(),
                "sampled": [],
            }
            results["coercive"] = found
            for period in plan.periods[1:-1]:  # the slowest of all temperatures would take long
                h = sampled_coercive(temperatures, period, plan, seed)
                found["sampled"].append({"period": period, "h": [_or_none(x) for x in h]})
                progress.update(period)


def _or_none(value: float) -> float | None:
    """None for NaN, which JSON has no word for."""
    return None if math.isnan(value) else value


def _written(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "coercive": _or_none(entry["coercive"])}


STUDY = _Hysteresis()
