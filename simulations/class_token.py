"""An image classifier around one implicit block, whose couplings are drawn while it trains.

Convolutional features of an image are the fields on a grid of sites; a learned class token is the
field on one more. The block is solved to its fixed point, and the class is read off the class
token's magnetization. See ``docs/studies/class_token.md``.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spinformer
from simulations.data import Dataset, Examples, describe, load_digits, load_fashion
from simulations.models import count_parameters
from simulations.options import add_digits, add_fresh, add_jobs, add_seeds
from simulations.runs import RunStore, run_all, write_json
from simulations.tables import align
from simulations.training import (
    Budget,
    Progress,
    Trained,
    evaluation_batches,
    generator_for,
    optimize,
    training_batches,
)
from spinformer.nn import BlockReport, FreeEnergyBlock
from spinformer.nn.masks import Masks
from spinformer.nn.matrix_valued import MatrixCouplings

TASKS = ("digits", "fashion")
TITLES = {"digits": "digits (MNIST)", "fashion": "clothes (Fashion-MNIST)"}
GRID = 4
SITES = GRID * GRID + 1  # the class token stands last
CHANNELS, DIM = 24, 16

# The rows of the table in the docs that are layers. The widths give equal parameter counts.
VARIANTS: dict[str, dict[str, Any]] = {
    "matrix": {"couplings": "matrix", "symmetric_within": True},
    "matrix_mlp": {"couplings": "matrix", "symmetric_within": True, "correction": "mlp"},
    "mixer_mlp": {"couplings": "mixer", "dim_mixer": 528, "correction": "mlp"},
}

MAX_ITERATIONS = 30

# When the couplings are looked at, as shares of the training steps.
MOMENTS = (0.0, 0.1, 0.3, 1.0)

# Adam moves every entry of J by the learning rate, 1/15 of its size at first. At four times this
# rate the couplings pass, in some ten steps, the strength at which spins order by themselves.
BUDGET = Budget(steps=600, batch_size=64, learning_rate=1e-3, evaluations=12, shift=1)
QUICK_BUDGET = Budget(steps=30, batch_size=32, learning_rate=2e-3, evaluations=3, shift=1)

# The stream of random numbers of the initial parameters; training_batches has its own.
_INIT = 100


class ClassTokenClassifier(nn.Module):
    """Convolutions -> a grid of fields and a class token -> one implicit block -> labels.

    Args:
        variant: name in :data:`VARIANTS`.
        classes: number of labels.
    """

    def __init__(self, variant: str, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, CHANNELS, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),  # 14 x 14
            nn.Conv2d(CHANNELS, CHANNELS, 3),
            nn.ReLU(),
            nn.MaxPool2d(3),  # 4 x 4
        )
        self.field = nn.Linear(CHANNELS, DIM)
        # Fields of the length of the spins: in much weaker ones spins order by themselves.
        self.norm = nn.LayerNorm(DIM)
        self.class_token = nn.Parameter(torch.randn(DIM))
        # A batch waits for its slowest image. Where training drives the couplings to the strength
        # at which spins order, that one would take hundreds of evaluations: its last iterate does.
        self.block = FreeEnergyBlock(
            DIM,
            1,
            num_spins=SITES,
            max_iterations=MAX_ITERATIONS,
            on_failure="ignore",
            **VARIANTS[variant],
        )
        self.head = nn.Linear(DIM, classes)

    def fields(self, images: Tensor) -> Tensor:
        """Images (B, 28, 28) to the fields (B, 17, 16), the grid row by row and the class token."""
        grid = self.features(images.unsqueeze(1)).flatten(2).mT
        grid = self.norm(self.field(grid))
        return torch.cat([grid, self.class_token.expand(len(images), 1, -1)], dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes)."""
        return self.head(self.block(self.fields(images))[:, -1])

    def trace(self, images: Tensor) -> tuple[Tensor, BlockReport]:
        """Logits, and what the block did."""
        m, report = self.block(self.fields(images), return_report=True)
        return self.head(m[:, -1]), report

    def bonds(self) -> list[list[float]] | None:
        """|J_ij| (Frobenius) between all sites; None for a block without couplings."""
        couplings = self.block.self_attn
        if not isinstance(couplings, MatrixCouplings):
            return None
        with torch.no_grad():
            return couplings(torch.empty(1, SITES, DIM), Masks()).norms()[0].tolist()


def evaluate(model: ClassTokenClassifier, dataset: Dataset, side: Examples) -> dict[str, Any]:
    """Loss (nats), accuracy, and how the solves went, over one side of the split."""
    loss, hits = 0.0, 0
    iterations: list[Tensor] = []
    residuals: list[Tensor] = []
    converged: list[Tensor] = []
    model.eval()
    with torch.no_grad():
        for batch in evaluation_batches(dataset, side):
            logits, report = model.trace(batch.inputs)
            loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
            hits += int((logits.argmax(dim=-1) == batch.labels).sum())
            assert report.iterations is not None
            assert report.residual is not None
            assert report.converged is not None
            iterations.append(report.iterations)
            residuals.append(report.residual)
            converged.append(report.converged)
    return {
        "loss": loss / len(side),
        "accuracy": hits / len(side),
        "iterations_mean": float(torch.cat(iterations).double().mean()),
        "residual_worst": float(torch.cat(residuals).max()),
        "converged": float(torch.cat(converged).double().mean()),
    }


@dataclass(frozen=True)
class Run:
    """One run: a variant on a data set with a seed. It satisfies :class:`simulations.runs.Job`."""

    task: str
    variant: str
    seed: int
    budget: Budget

    @property
    def label(self) -> str:
        """The name of the variant."""
        return self.variant

    @property
    def recipe(self) -> str:
        """The options of the variant's block."""
        return repr(VARIANTS[self.variant])

    def settings(self) -> dict[str, Any]:
        """The run as plain numbers and strings."""
        return asdict(self)

    def train(self, dataset: Dataset, progress: Progress) -> Trained:
        """Train one classifier; its last state is tested once.

        The same seed gives every variant the same batches and shifts.
        """
        torch.set_num_threads(1)
        budget = self.budget
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_for(self.seed, _INIT).initial_seed())
            model = ClassTokenClassifier(self.variant, dataset.classes)
        batches = training_batches(dataset, budget, self.seed)
        look_at = {round(share * budget.steps) for share in MOMENTS}
        curve: list[dict[str, float]] = []
        moments = [{"step": 0, "bonds": model.bonds()}]
        durations: list[float] = []
        losses: list[float] = []
        # Time on the processor, which other programs on the machine don't add to.
        steps = optimize(
            model, budget, batches, lambda batch: model(batch.inputs), time.process_time
        )
        for step, loss, seconds in steps:
            durations.append(seconds)
            losses.append(loss)
            point = None
            if step in budget.evaluate_at():
                found = evaluate(model, dataset, dataset.validation)
                point = {
                    "step": step,
                    "train_loss": statistics.fmean(losses),
                    "validation_loss": found["loss"],
                    "validation_accuracy": found["accuracy"],
                    "iterations": found["iterations_mean"],
                }
                losses.clear()
                curve.append(point)
            if step in look_at:
                moments.append({"step": step, "bonds": model.bonds()})
            progress(step, point)
        record = {
            **self.settings(),
            "parameters": count_parameters(model),
            "curve": curve,
            "moments": moments if model.bonds() is not None else None,
            "test": evaluate(model, dataset, dataset.test),
            "ms_per_step": 1e3 * statistics.median(durations),
        }
        return record, model.state_dict()


class ClassToken:
    """The study ``class_token``."""

    name = "class_token"
    description = "an image classifier around one implicit block; its couplings drawn as it trains"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the study."""
        parser.add_argument(
            "--task", choices=(*TASKS, "all"), default="all", help="default: %(default)s"
        )
        parser.add_argument(
            "--variants",
            nargs="+",
            choices=tuple(VARIANTS),
            default=list(VARIANTS),
            metavar="VARIANT",
            help=f"any of {', '.join(VARIANTS)} (default: all)",
        )
        add_seeds(parser, 2, 1)
        add_jobs(parser)
        add_fresh(parser)
        add_digits(parser)
        parser.add_argument(
            "--fashion", type=Path, metavar="DIR", help="folder of Fashion-MNIST's four .gz files"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Train what is not trained yet, then write ``results.json`` and the figures."""
        started = time.monotonic()
        tasks = TASKS if args.task == "all" else (args.task,)
        budget = QUICK_BUDGET if args.quick else BUDGET
        seeds = args.seeds if args.seeds is not None else (1 if args.quick else 2)
        datasets: dict[str, Dataset] = {}
        if "digits" in tasks:
            datasets["digits"] = load_digits(args.digits)
        if "fashion" in tasks:
            datasets["fashion"] = load_fashion(
                args.fashion, *((1_200, 500) if args.quick else (12_000, 10_000))
            )
        for dataset in datasets.values():
            print(*describe(dataset), sep="\n")
        # Seed by seed, so that an interrupted study has every variant at an equal number of seeds.
        runs = [
            Run(task, variant, args.seed + i, budget)
            for i in range(seeds)
            for task in tasks
            for variant in dict.fromkeys(args.variants)
        ]
        outcome = run_all(runs, RunStore(args.out, datasets), args.jobs, fresh=args.fresh)
        finished = {record["task"] for record in outcome.records}
        results = {
            "study": self.name,
            "versions": {"spinformer": spinformer.__version__, "torch": torch.__version__},
            **outcome.summary(),
            "tasks": {
                task: {
                    "title": TITLES[task],
                    "examples": {
                        "train": len(dataset.train),
                        "validation": len(dataset.validation),
                        "test": len(dataset.test),
                    },
                    "sources": dataset.sources,
                }
                for task, dataset in datasets.items()
                if task in finished
            },
            "grid": GRID,
            "runs": outcome.records,
        }
        write_json(args.out / "results.json", results)
        if outcome.records:
            print(f"\n{table(outcome.records)}\n")
            # The figures' library is loaded by those who draw: workers import this module too.
            drawn = importlib.import_module("simulations.class_token_plots").draw(results, args.out)
            print("figures:", ", ".join(str(path) for path in drawn))
        print(f"results: {args.out / 'results.json'} ({time.monotonic() - started:.0f} s)")
        return outcome.status()


def table(records: Sequence[dict[str, Any]]) -> str:
    """A line for each task and variant: mean over seeds, and the extremes."""
    header = (
        "task, variant",
        "parameters",
        "test accuracy [%]",
        "iterations",
        "converged",
        "ms/step",
    )
    rows = []
    for task, variant in dict.fromkeys((r["task"], r["variant"]) for r in records):
        group = [r for r in records if (r["task"], r["variant"]) == (task, variant)]
        accuracy = [100 * r["test"]["accuracy"] for r in group]
        rows.append(
            (
                f"{task}, {variant}",
                f"{group[0]['parameters']:,}",
                f"{statistics.fmean(accuracy):.2f} ({min(accuracy):.2f} to {max(accuracy):.2f})",
                f"{statistics.fmean(r['test']['iterations_mean'] for r in group):.1f}",
                f"{statistics.fmean(r['test']['converged'] for r in group):.1%}",
                f"{statistics.median(r['ms_per_step'] for r in group):.1f}",
            )
        )
    return align(header, rows)


STUDY = ClassToken()
