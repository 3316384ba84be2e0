"""Couplings learned from data: planted ones recovered from spins and from fields, and put to use.

The truth is known by enumeration of all states, done here once more: samples, moments and the
Fisher information do not come from the code that is tried. See ``docs/studies/boltzmann.md``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import spinformer
from simulations.figures import blank, clean, save
from simulations.options import add_seeds
from simulations.runs import write_json
from simulations.tables import align
from spinformer import Ising, MeanField, SteepestDescent
from spinformer.equilibrium.field_density import Approximation, FieldDensity
from spinformer.equilibrium.inverse import (
    Moments,
    field_moments,
    fit_fields,
    fit_moments,
    mean_field_inversion,
    pair_inversion,
    spin_moments,
    tap_inversion,
)
from spinformer.spins.couplings import hopfield, sherrington_kirkpatrick

KINDS = ("SK", "sparse", "Hopfield")


@dataclass(frozen=True)
class Plan:
    """Sizes of the study.

    Attributes:
        num_spins: N where spins are seen; 2^N states are listed.
        num_behind: N where fields are seen.
        seeds: draws of couplings and data for each kind of couplings.
        beta: inverse temperature where the number of samples varies.
        field: standard deviation of the external fields on spins that are seen.
        spin_samples, field_samples: numbers of samples.
        betas: inverse temperatures where that varies.
        samples_over_beta: samples at each of them.
        signal: sigma * beta of the fields, the signal-to-noise ratio of one field.
        signals: those of the detection.
        detected, trained_on: fields of each law to tell apart; fields to learn from for it.
    """

    num_spins: int = 10
    num_behind: int = 8
    seeds: int = 5
    beta: float = 0.6
    field: float = 0.3
    spin_samples: tuple[int, ...] = (256, 1024, 4096, 16384, 65536)
    field_samples: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    betas: tuple[float, ...] = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.5)
    samples_over_beta: int = 10_000
    signal: float = 1.5
    signals: tuple[float, ...] = (0.4, 0.7, 1.0, 1.5, 2.0, 3.0)
    detected: int = 2000
    trained_on: int = 2000


_QUICK = Plan(
    num_spins=6,
    num_behind=5,
    seeds=2,
    spin_samples=(1024, 4096, 16384),
    field_samples=(1024, 4096),
    betas=(0.2, 0.6, 1.2),
    signals=(0.7, 1.5),
    detected=500,
    trained_on=500,
)

_LOOKS: dict[str, dict[str, Any]] = {
    "likelihood": {"color": "#000000", "marker": "o", "label": "exact likelihood"},
    "mean_field": {"color": "#0072B2", "marker": "s", "label": "mean-field inversion"},
    "tap": {"color": "#D55E00", "marker": "^", "label": "TAP inversion"},
    "pairs": {"color": "#009E73", "marker": "D", "label": "independent pairs"},
}
_SCORES: dict[str, dict[str, Any]] = {
    "ratio": {"color": "#999999", "marker": "x", "label": "likelihood ratio (knows both laws)"},
    "exact": {"color": "#000000", "marker": "o", "label": "exact log p(h), true J"},
    "learned": {"color": "#CC79A7", "marker": "v", "label": "exact log p(h), learned J"},
    "steepest_descent": {"color": "#D55E00", "marker": "^", "label": "steepest-descent score"},
    "mean_field": {"color": "#0072B2", "marker": "s", "label": "mean-field score"},
    "gaussian": {"color": "#009E73", "marker": "D", "label": "Gaussian of the same covariance"},
    "length": {"color": "#E69F00", "marker": "+", "label": "|h| alone"},
}


class Boltzmann:
    """The study ``boltzmann``."""

    name = "boltzmann"
    description = "recover planted couplings from spins and from fields; tell fields apart"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the study."""
        add_seeds(parser, Plan().seeds, _QUICK.seeds)

    def run(self, args: argparse.Namespace) -> int:
        """Everything, then the table, the figures and ``results.json``."""
        plan = _QUICK if args.quick else Plan()
        if args.seeds is not None:
            plan = replace(plan, seeds=args.seeds)
        start = time.perf_counter()
        # Small matrices: threads that wait for each other cost more than they do.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            results = study(plan, args.seed)
        except KeyboardInterrupt:
            print("\ninterrupted: nothing is written")
            return 130
        finally:
            torch.set_num_threads(threads)
        results["seconds"] = time.perf_counter() - start
        write_json(args.out / "results.json", results)
        print(_table(results))
        for path in draw(results, args.out):
            print(f"figure: {path}")
        print(f"numbers: {args.out / 'results.json'}  ({results['seconds']:.0f} s)")
        return 0


# --- planted systems, by enumeration ------------------------------------------------------------


def planted(kind: str, n: int, generator: torch.Generator) -> Tensor:
    """J (N, N) in float64 of one of :data:`KINDS`."""
    if kind == "SK":
        return sherrington_kirkpatrick(n, generator=generator, dtype=torch.float64).to_dense()
    if kind == "Hopfield":
        patterns = torch.randint(2, (2, n), generator=generator).double() * 2 - 1
        return hopfield(patterns).to_dense()
    # Three bonds a spin on average, of either sign; as strong together as those of SK.
    present = torch.rand(n, n, generator=generator) < 3 / (n - 1)
    sign = torch.randint(2, (n, n), generator=generator).double() * 2 - 1
    upper = (present * sign).triu(1) / math.sqrt(3)
    # A draw without any bond has nothing to recover.
    return upper + upper.mT if bool(upper.any()) else planted(kind, n, generator)


class Enumerated:
    """Ising spins of energy -1/2 S J S - h S, with every state written out."""

    def __init__(self, couplings: Tensor, field: Tensor, beta: float) -> None:
        n = len(couplings)
        self.states = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=n))).double()
        self.beta = beta
        energy = -((self.states @ couplings) * self.states).sum(-1) / 2 - self.states @ field
        self.law = torch.softmax(-beta * energy, 0)
        first, second = torch.triu_indices(n, n, 1)
        self.pairs = self.states[:, first] * self.states[:, second]

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, N, 1)."""
        index = torch.multinomial(self.law, count, replacement=True, generator=generator)
        return self.states[index].unsqueeze(-1)

    def moments(self) -> Moments:
        """Without sampling error."""
        mean = self.law @ self.states
        correlations = self.states.mT @ (self.law[:, None] * self.states)
        return Moments(mean[:, None], correlations, correlations - torch.outer(mean, mean))

    def error_of_spins(self) -> float:
        """Sum over pairs of the variance of the J that maximizes the likelihood, times samples.

        The inverse Fisher information; the fields are unknown too.
        """
        features = torch.cat([self.pairs, self.states], -1)
        centred = features - self.law @ features
        information = centred.mT @ (self.law[:, None] * centred)
        inverse = torch.linalg.inv(information)
        return float(inverse.diagonal()[: self.pairs.shape[1]].sum()) / self.beta**2

    def error_of_fields(self, fields: Tensor) -> float:
        """The same for spins that are seen through fields, averaged over given ones."""
        gradients = []
        for chunk in fields[..., 0].split(2048):
            posterior = torch.softmax(self.law.log() + self.beta * chunk @ self.states.mT, -1)
            gradients.append(posterior @ self.pairs - self.law @ self.pairs)
        gradient = torch.cat(gradients)
        information = gradient.mT @ gradient / len(gradient)
        return float(torch.linalg.inv(information).diagonal().sum()) / self.beta**2


def _generator(*key: int) -> torch.Generator:
    (state,) = np.random.SeedSequence(key).generate_state(1)
    return torch.Generator().manual_seed(int(state))


def _error(found: Tensor, truth: Tensor) -> float:
    """|found - J| / |J| (Frobenius)."""
    return float((found - truth).norm() / truth.norm())


# --- the experiments ----------------------------------------------------------------------------


def study(plan: Plan, seed: int) -> dict[str, Any]:
    """All numbers."""
    results: dict[str, Any] = {
        "version": spinformer.__version__,
        "plan": asdict(plan),
        "first_seed": seed,
        "spins": {},
        "temperatures": {},
        "fields": {},
    }
    seeds = range(seed, seed + plan.seeds)
    for number, kind in enumerate(KINDS):
        print(f"{kind}: spins", flush=True)
        results["spins"][kind] = _gather(
            _from_spins(plan, kind, _generator(s, number, 0)) for s in seeds
        )
        print(f"{kind}: temperatures", flush=True)
        results["temperatures"][kind] = _gather(
            _over_beta(plan, kind, _generator(s, number, 1)) for s in seeds
        )
        print(f"{kind}: fields", flush=True)
        results["fields"][kind] = _gather(
            _from_fields(plan, kind, _generator(s, number, 2)) for s in seeds
        )
    for data, counts in (("spins", plan.spin_samples), ("fields", plan.field_samples)):
        for entry in results[data].values():
            entry["check"] = _check(entry, counts)
    print("detection", flush=True)
    results["detection"] = _gather(_detect(plan, _generator(s, len(KINDS))) for s in seeds)
    return results


def _gather(rows: Any) -> dict[str, Any]:
    """{name: [values at each point]} of every seed -> {name: [seed][point]}; NaN is None."""
    gathered: dict[str, Any] = {}
    for row in rows:
        for name, values in row.items():
            clean = [None if math.isnan(value) else value for value in values]
            gathered.setdefault(name, []).append(clean)
    return gathered


def _invert(moments: Moments, beta: float) -> dict[str, Tensor]:
    """The closed forms, for spins in fields."""
    mean = moments.magnetization
    return {
        "mean_field": mean_field_inversion(moments.covariance, beta),
        "tap": tap_inversion(moments.covariance, mean, beta, missing="nan"),
        "pairs": pair_inversion(moments.correlations, Ising(), mean, beta, missing="nan"),
    }


def _planted_in_field(plan: Plan, kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    truth = planted(kind, plan.num_spins, generator)
    field = plan.field * torch.randn(plan.num_spins, generator=generator, dtype=torch.float64)
    return truth, field


def _from_spins(plan: Plan, kind: str, generator: torch.Generator) -> dict[str, list[float]]:
    truth, field = _planted_in_field(plan, kind, generator)
    law = Enumerated(truth, field, plan.beta)
    rows: dict[str, list[float]] = {}
    # Each pair counts twice in the norm of J.
    predicted = 2 * law.error_of_spins() / float(truth.square().sum())
    for count in plan.spin_samples:
        moments = spin_moments(law.sample(count, generator))
        found = _invert(moments, plan.beta)
        found["likelihood"] = fit_moments(
            moments.correlations, Ising(), moments.magnetization, plan.beta
        ).couplings
        for name, couplings in found.items():
            rows.setdefault(name, []).append(_error(couplings, truth))
        rows.setdefault("fisher", []).append(math.sqrt(predicted / count))
    return rows


def _over_beta(plan: Plan, kind: str, generator: torch.Generator) -> dict[str, list[float]]:
    truth, field = _planted_in_field(plan, kind, generator)
    rows: dict[str, list[float]] = {}
    count = plan.samples_over_beta
    for beta in plan.betas:
        law = Enumerated(truth, field, beta)
        moments = spin_moments(law.sample(count, generator))
        found = _invert(moments, beta)
        # Cold spins may be parallel in every sample; one more sample's worth of prior bounds J.
        found["likelihood"] = fit_moments(
            moments.correlations, Ising(), moments.magnetization, beta, ridge=1 / count
        ).couplings
        limit = _invert(law.moments(), beta)
        found |= {f"{name}_limit": couplings for name, couplings in limit.items()}
        for name, couplings in found.items():
            rows.setdefault(name, []).append(_error(couplings, truth))
        predicted = 2 * law.error_of_spins() / count / float(truth.square().sum())
        rows.setdefault("fisher", []).append(math.sqrt(predicted))
    return rows


def _from_fields(plan: Plan, kind: str, generator: torch.Generator) -> dict[str, list[float]]:
    n, beta = plan.num_behind, plan.beta
    truth = planted(kind, n, generator)
    variance = (plan.signal / beta) ** 2
    density = FieldDensity(truth, Ising(), variance, beta)
    law = Enumerated(truth, torch.zeros(n, dtype=torch.float64), beta)
    information = law.error_of_fields(density.sample(20_000, generator=generator))
    predicted = 2 * information / float(truth.square().sum())
    rows: dict[str, list[float]] = {}
    for count in plan.field_samples:
        fields = density.sample(count, generator=generator)
        found = {"likelihood": fit_fields(fields, Ising(), variance, beta).couplings}
        # Without a field the mean is zero, and a spin's square is one.
        covariance = field_moments(fields, variance, beta).correlations
        covariance = covariance.diagonal_scatter(covariance.new_ones(n))
        # Noise may leave it without an inverse that means anything.
        sound = bool(torch.linalg.eigvalsh(covariance)[0] > 0)
        found["mean_field"] = (
            mean_field_inversion(covariance, beta)
            if sound
            else torch.full_like(covariance, torch.nan)
        )
        for name, couplings in found.items():
            rows.setdefault(name, []).append(_error(couplings, truth))
        rows.setdefault("fisher", []).append(math.sqrt(predicted / count))
    return rows


def _detect(plan: Plan, generator: torch.Generator) -> dict[str, list[float]]:
    """Areas under the ROC curve: fields of one J against those of another, over the signal."""
    n, beta, site = plan.num_behind, 1.0, Ising()
    own, other = (planted("SK", n, generator) for _ in range(2))
    law = Enumerated(own, torch.zeros(n, dtype=torch.float64), beta)
    rows: dict[str, list[float]] = {}
    for signal in plan.signals:
        variance = (signal / beta) ** 2
        density = FieldDensity(own, site, variance, beta)
        alien = FieldDensity(other, site, variance, beta)
        fitted = fit_fields(
            density.sample(plan.trained_on, generator=generator),
            site,
            variance,
            beta,
            ridge=1 / plan.trained_on,
            on_failure="warn",
        )
        learned = FieldDensity(fitted.couplings, site, variance, beta)
        of_inside, of_outside = (
            _scores(law, density, alien, learned, d.sample(plan.detected, generator=generator))
            for d in (density, alien)
        )
        for name, values in of_inside.items():
            rows.setdefault(name, []).append(area_under_curve(values, of_outside[name]))
    return rows


def _scores(
    law: Enumerated,
    density: FieldDensity,
    alien: FieldDensity,
    learned: FieldDensity,
    fields: Tensor,
) -> dict[str, Tensor]:
    """What each detector makes of fields (M, N, 1); higher is more like those of ``density``."""
    couplings, variance = density.couplings, density.variance

    def score(approximation: Approximation) -> Tensor:
        approximate = FieldDensity(couplings, Ising(), variance, law.beta, approximation)
        return approximate.score(fields)

    spins = law.moments().correlations
    covariance = variance * torch.eye(len(spins)).double() + (variance * law.beta) ** 2 * spins
    gaussian = torch.distributions.MultivariateNormal(torch.zeros_like(spins[0]), covariance)
    exact = density.log_prob(fields)
    return {
        "ratio": exact - alien.log_prob(fields),
        "exact": exact,
        "learned": learned.log_prob(fields),
        "steepest_descent": score(SteepestDescent()),
        "mean_field": score(
            # Next to a transition it is slow; the score feels the square of the residual.
            MeanField(damping=0.5, tolerance=1e-6, max_iterations=20_000, on_failure="warn")
        ),
        "gaussian": gaussian.log_prob(fields[..., 0]),
        "length": -fields.square().sum((-2, -1)),
    }


def area_under_curve(inside: Tensor, outside: Tensor) -> float:
    """Share of pairs in which the score of the inside is the higher (Mann and Whitney)."""
    ordered = outside.detach().sort().values
    below = torch.searchsorted(ordered, inside.detach(), right=False)
    ties = torch.searchsorted(ordered, inside.detach(), right=True) - below
    return float((below + ties / 2).double().mean() / len(outside))


# --- what comes of it ---------------------------------------------------------------------------


def _array(rows: Sequence[Sequence[float | None]]) -> Any:
    """(seeds, points), NaN where there was nothing."""
    return np.array(rows, dtype=float)


def _check(entry: dict[str, Any], counts: Sequence[int]) -> dict[str, float]:
    """The likelihood's error against samples: the power law, and Fisher's prediction.

    A line through log error against log samples, seed by seed; the mean of the slopes has the
    standard error over seeds. ``ratio`` is the squared error over the predicted one.
    """
    error, predicted = _array(entry["likelihood"]), _array(entry["fisher"])
    slopes = np.polyfit(np.log(counts), np.log(error).T, 1)[0]
    ratio = (error**2 / predicted**2).mean(1)
    largest = error[:, -1] ** 2 / predicted[:, -1] ** 2
    return {
        "slope": float(slopes.mean()),
        "slope_error": _standard_error(slopes),
        "ratio": float(ratio.mean()),
        "ratio_error": _standard_error(ratio),
        "ratio_at_most_samples": float(largest.mean()),
        "ratio_at_most_samples_error": _standard_error(largest),
    }


def _standard_error(values: Any) -> float:
    """Over seeds; zero for a single one."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _table(results: dict[str, Any]) -> str:
    rows = []
    for data in ("spins", "fields"):
        for kind, entry in results[data].items():
            check = entry["check"]
            cells = [
                f"{check[name]:.3f} +- {check[name + '_error']:.3f}"
                for name in ("slope", "ratio", "ratio_at_most_samples")
            ]
            rows.append((f"{data}, {kind}", *cells))
    scores = []
    for name, look in _SCORES.items():
        values = _array(results["detection"][name])
        cells = [f"{v.mean():.3f} +- {_standard_error(v):.3f}" for v in values.T]
        scores.append((look["label"], *cells))
    signals = [f"{signal:g}" for signal in results["plan"]["signals"]]
    return "\n".join(
        (
            "",
            "error of the exact likelihood: slope against samples (-1/2 expected), and its square "
            "over that of the Fisher information (1 expected)",
            align(("data, J", "slope", "ratio, all", "ratio, most"), rows),
            "",
            "area under the ROC curve (mean over seeds +- standard error)",
            align(("sigma beta", *signals), scores),
            "",
        )
    )


# --- figures ------------------------------------------------------------------------------------


def draw(results: dict[str, Any], out: Path) -> list[Path]:
    """Both figures; returns the files."""
    return save(
        {"reconstruction.png": _reconstruction(results), "detection.png": _detection(results)}, out
    )


def _line(axis: Axes, x: Sequence[float], rows: Any, look: dict[str, Any], **more: Any) -> None:
    """Mean over seeds with its standard error; points that some seed lacks are left out."""
    values = _array(rows)
    whole = ~np.isnan(values).any(0)
    values, points = values[:, whole], np.asarray(x)[whole]
    bar = [_standard_error(column) for column in values.T]
    style = {"markersize": 4.5, "linewidth": 1.4, "capsize": 2, **look, **more}
    axis.errorbar(points, values.mean(0), yerr=bar, **style)


def _reconstruction(results: dict[str, Any]) -> Figure:
    plan = results["plan"]
    figure = blank(11.5, 9)
    axes = figure.subplots(3, 3, sharex="col", sharey="row")
    figure.suptitle(
        "Error of recovered couplings, |found - J| / |J| "
        f"(mean and standard error over {plan['seeds']} seeds)",
        fontsize=11,
    )
    titles = (
        f"spins (N = {plan['num_spins']}, beta = {plan['beta']:g}, fields unknown)",
        f"{plan['samples_over_beta']:,} spins; dashed: no sampling error",
        f"fields (N = {plan['num_behind']}, sigma beta = {plan['signal']:g})",
    )
    for row, kind in enumerate(KINDS):
        left, middle, right = axes[row]
        panels = (
            (left, results["spins"][kind], plan["spin_samples"]),
            (middle, results["temperatures"][kind], plan["betas"]),
            (right, results["fields"][kind], plan["field_samples"]),
        )
        for axis, entry, x in panels:
            for name, look in _LOOKS.items():
                if name in entry:
                    _line(axis, x, entry[name], look)
                if f"{name}_limit" in entry:
                    dashed = {"linestyle": "--", "marker": None, "label": None, "linewidth": 1.0}
                    _line(axis, x, entry[f"{name}_limit"], look, **dashed)
            # As the errors themselves: the mean over seeds of what is predicted for each.
            axis.plot(
                x,
                _array(entry["fisher"]).mean(0),
                color="0.45",
                linestyle=":",
                linewidth=2.2,
                label="Fisher information",
            )
            axis.set_xscale("log")
            axis.set_yscale("log")
            clean(axis)
        left.set_ylabel(f"{kind}\nrelative error", fontsize=9)
        for axis in (left, right):
            entry = results["spins" if axis is left else "fields"][kind]["check"]
            axis.text(
                0.03,
                0.04,
                f"slope {entry['slope']:.3f} ± {entry['slope_error']:.3f}",
                transform=axis.transAxes,
                fontsize=8,
            )
    labels = ("samples", "beta", "samples")
    for column, (title, label) in enumerate(zip(titles, labels, strict=True)):
        axes[0, column].set_title(title, fontsize=9)
        axes[-1, column].set_xlabel(label, fontsize=9)
    # These axes span little more than a decade: name the values.
    for column, values in ((1, plan["betas"]), (2, plan["field_samples"])):
        axes[-1, column].set_xticks(values, [f"{value:g}" for value in values])
        axes[-1, column].minorticks_off()
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    return figure


def _detection(results: dict[str, Any]) -> Figure:
    plan = results["plan"]
    figure = blank(6.6, 6)
    axis = figure.subplots()
    for name, look in _SCORES.items():
        _line(axis, plan["signals"], results["detection"][name], look)
    axis.axhline(0.5, color="0.6", linewidth=0.8)
    axis.set_xlabel("sigma beta, the signal-to-noise ratio of a field", fontsize=9)
    axis.set_ylabel("area under the ROC curve", fontsize=9)
    axis.set_title(
        f"Fields of one SK system against those of another (N = {plan['num_behind']}, "
        f"beta = 1, {plan['seeds']} seeds)",
        fontsize=10,
    )
    clean(axis)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


STUDY = Boltzmann()
