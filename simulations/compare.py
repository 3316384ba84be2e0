"""Free-energy blocks, energy-descent blocks and a plain Transformer block, trained side by side.

The models of a task differ only in their block and have parameter counts within 5 %; they see the
same batches for the same number of steps. See ``docs/studies/compare.md``.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import spinformer
from simulations.data import (
    Dataset,
    describe,
    load_digits,
    load_sentiment,
)
from simulations.models import (
    BLOCKS,
    Classifier,
    Shape,
    Size,
    count_parameters,
    match_size,
    tokens_of,
)
from simulations.options import add_digits, add_fresh, add_jobs, add_seeds, add_texts
from simulations.runs import Outcome, RunStore, replaced, run_all, write_json
from simulations.tables import align
from simulations.training import Budget, Job

TASKS = ("sentiment", "digits")
TOLERANCE = 0.05


@dataclass(frozen=True)
class Plan:
    """The models and the budget of one task."""

    shape: Shape
    budget: Budget


PLANS: dict[str, Plan] = {
    "sentiment": Plan(
        Shape(d_model=64, nhead=4, reference=Size(width=128, layers=2), dropout=0.2),
        Budget(steps=700, batch_size=64, learning_rate=1e-3, weight_decay=0.2, label_smoothing=0.1),
    ),
    "digits": Plan(
        Shape(d_model=64, nhead=4, reference=Size(width=128, layers=2)),
        Budget(steps=1500, batch_size=64, learning_rate=3e-3, shift=2),
    ),
}
# Smaller models and few steps: shows that everything works, and nothing else.
_QUICK_SHAPE = Shape(d_model=32, nhead=4, reference=Size(width=64, layers=2))
QUICK_PLANS: dict[str, Plan] = {
    "sentiment": Plan(
        _QUICK_SHAPE, Budget(steps=30, batch_size=32, learning_rate=5e-3, evaluations=4)
    ),
    "digits": Plan(
        _QUICK_SHAPE, Budget(steps=40, batch_size=32, learning_rate=5e-3, evaluations=4, shift=1)
    ),
}


class Compare:
    """The study ``compare``."""

    name = "compare"
    description = "train each kind of block on texts and images, side by side"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the study."""
        parser.add_argument(
            "--task", choices=(*TASKS, "all"), default="all", help="default: %(default)s"
        )
        parser.add_argument(
            "--blocks",
            nargs="+",
            choices=tuple(BLOCKS),
            default=list(BLOCKS),
            metavar="BLOCK",
            help=f"any of {', '.join(BLOCKS)} (default: all)",
        )
        add_seeds(parser, 3, 1)
        add_jobs(parser)
        add_fresh(parser)
        add_texts(parser)
        add_digits(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Train what is not trained yet, then write the table, ``results.json`` and the figures."""
        started = time.monotonic()
        datasets, _, _, outcome = train(args, tuple(dict.fromkeys(args.blocks)))
        results = summarize(outcome, datasets)
        write_json(args.out / "results.json", results)
        table = "\n\n".join(render(results, task) for task in results["tasks"])
        if table:
            with replaced(args.out / "table.txt") as partial:
                partial.write_text(table + "\n", encoding="utf-8")
            print(f"\n{table}\n")
            # The figures' library is loaded by those who draw: workers import this package too.
            drawn = importlib.import_module("simulations.plots").draw(results, args.out)
            print("figures:", ", ".join(str(path) for path in drawn))
        print(f"results: {args.out / 'results.json'} ({time.monotonic() - started:.0f} s)")
        return outcome.status()


STUDY = Compare()


def train(
    args: argparse.Namespace, blocks: Sequence[str]
) -> tuple[dict[str, Dataset], list[Job], RunStore, Outcome]:
    """Train what is not trained yet of these blocks, on the tasks and seeds of the options."""
    tasks = TASKS if args.task == "all" else (args.task,)
    seeds = args.seeds if args.seeds is not None else (1 if args.quick else 3)
    plans = QUICK_PLANS if args.quick else PLANS
    datasets = load(tasks, args)
    for dataset in datasets.values():
        print(*describe(dataset), sep="\n")
    sizes = {task: match(plans[task].shape, datasets[task], blocks) for task in tasks}
    # Seed by seed, so that an interrupted study has every block at an equal number of seeds.
    jobs = [
        Job(task, block, args.seed + i, plans[task].shape, sizes[task][block], plans[task].budget)
        for i in range(seeds)
        for task in tasks
        for block in blocks
    ]
    store = RunStore(args.out, datasets)
    return datasets, jobs, store, run_all(jobs, store, args.jobs, fresh=args.fresh)


def load(tasks: Sequence[str], args: argparse.Namespace) -> dict[str, Dataset]:
    """The data of the tasks, from the user's files or from the packages."""
    loaders: dict[str, Callable[[], Dataset]] = {
        "sentiment": lambda: load_sentiment(args.reviews, args.vectors),
        "digits": lambda: load_digits(args.digits),
    }
    return {task: loaders[task]() for task in tasks}


def match(shape: Shape, dataset: Dataset, blocks: Sequence[str]) -> dict[str, Size]:
    """A size for each block at which all models have equal parameter counts, which are printed."""

    def count(block: str, size: Size) -> int:
        generator = torch.Generator().manual_seed(0)
        return count_parameters(Classifier.build(block, shape, size, dataset, generator))

    sizes = {block: match_size(block, shape, count, TOLERANCE) for block in blocks}
    target = count("plain", shape.reference)
    print(f"  d_model {shape.d_model}, {shape.nhead} heads, {tokens_of(dataset)} positions at most")
    for block, size in sizes.items():
        parameters = count(block, size)
        print(
            f"  {block:<17} {parameters:>8,} parameters ({parameters / target - 1:+.1%}): "
            f"{size.layers} layers, width {size.width}"
        )
    return sizes


# Results ----------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation (None for a single value) with the values themselves."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "values": list(values),
    }


def summarize(outcome: Outcome, datasets: Mapping[str, Dataset]) -> dict[str, Any]:
    """Everything that ``results.json`` holds: what was run on what, rows of the table, records."""
    tasks: dict[str, Any] = {}
    for task, dataset in datasets.items():
        records = [r for r in outcome.records if r["job"]["task"] == task]
        if not records:
            continue
        grouped: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            grouped.setdefault(record["job"]["block"], []).append(record)
        rows = {block: _row(group, grouped.get("plain", [])) for block, group in grouped.items()}
        tasks[task] = {
            "title": dataset.title,
            "classes": dataset.classes,
            "examples": {
                "train": len(dataset.train),
                "validation": len(dataset.validation),
                "test": len(dataset.test),
            },
            "facts": dataset.facts,
            "sources": dataset.sources,
            "blocks": rows,
        }
    return {
        "study": "compare",
        "versions": {
            "spinformer": spinformer.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "cores": os.cpu_count(),
        **outcome.summary(),
        "tasks": tasks,
        "runs": outcome.records,
    }


def _row(records: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    tests = [record["test"] for record in records]
    of_plain = {record["job"]["seed"]: record["test"]["accuracy"] for record in plain}
    paired = [
        record["test"]["accuracy"] - of_plain[record["job"]["seed"]]
        for record in records
        if record["job"]["seed"] in of_plain
    ]
    memory = [r["peak_memory_mib"] for r in records if r["peak_memory_mib"] is not None]
    solved = [test for test in tests if test["residual_worst"] is not None]
    return {
        "seeds": [record["job"]["seed"] for record in records],
        "parameters": records[0]["parameters"],
        "size": records[0]["job"]["size"],
        "accuracy": spread([test["accuracy"] for test in tests]),
        "over_plain": spread(paired) if paired else None,
        "loss": spread([test["loss"] for test in tests]),
        "ms_per_step": statistics.median(record["ms_per_step"] for record in records),
        "peak_memory_mib": max(memory) if memory else None,
        "iterations_mean": (
            statistics.fmean(test["iterations_mean"] for test in solved) if solved else None
        ),
        "residual_worst": max(test["residual_worst"] for test in solved) if solved else None,
        "converged": statistics.fmean(test["converged"] for test in solved) if solved else None,
        "threads": sorted({record["threads"] for record in records}),
        "at_once": sorted({record["at_once"] for record in records}),
    }


def render(results: dict[str, Any], task: str) -> str:
    """The table of one task, as text."""
    entry = results["tasks"][task]
    header = (
        "block",
        "parameters",
        "test acc. [%]",
        "over plain",
        "test loss",
        "ms/step",
        "peak [MiB]",
        "iterations",
        "worst res.",
        "converged",
    )
    rows = []
    for block, row in entry["blocks"].items():
        rows.append(
            (
                block,
                f"{row['parameters']:,}",
                _plus_minus(row["accuracy"], 100, ".2f"),
                "-"
                if block == "plain" or row["over_plain"] is None
                else _plus_minus(row["over_plain"], 100, "+.2f"),
                _plus_minus(row["loss"], 1, ".3f"),
                f"{row['ms_per_step']:.1f}",
                _or_dash(row["peak_memory_mib"], ".0f"),
                _or_dash(row["iterations_mean"], ".1f"),
                _or_dash(row["residual_worst"], ".1e"),
                _or_dash(row["converged"], ".1%"),
            )
        )
    table = align(header, rows)
    return "\n".join([f"{task}: {entry['title']}", table, *_footnotes(entry)])


def _footnotes(entry: dict[str, Any]) -> list[str]:
    rows = entry["blocks"].values()
    tests = entry["examples"]["test"]
    counts = {len(row["seeds"]) for row in rows}
    seeds = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    accuracy = statistics.fmean(row["accuracy"]["mean"] for row in rows)
    error = 100 * math.sqrt(accuracy * (1 - accuracy) / tests)
    threads = ", ".join(map(str, sorted({t for row in rows for t in row["threads"]})))
    at_once = ", ".join(map(str, sorted({n for row in rows for n in row["at_once"]})))
    return [
        f"mean ± standard deviation over seeds ({seeds} a block); 'over plain' is paired by seed, "
        "in points.",
        f"The test side has {tests} examples: its own sampling error is ± {error:.1f} points, the "
        "same for all blocks.",
        f"ms/step: median, {threads} thread(s), {at_once} run(s) at once. peak: growth of the "
        "process above data and libraries.",
    ]


def _plus_minus(entry: dict[str, Any], scale: float, form: str) -> str:
    text = f"{scale * entry['mean']:{form}}"
    if entry["std"] is None:
        return text
    return f"{text} ± {scale * entry['std']:{form.lstrip('+')}}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
