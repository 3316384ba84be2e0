r"""Which paths through an attention network carry what it has learned, and what recurrence does.

A network of attention layers with skips, :math:`X \leftarrow X + \sum_h A_h(X) X W_h`, is a sum
over paths: each chooses a head or the skip in every layer, and its length is the number of its
heads. Networks are trained to sort digits, to find the convex hull of points, and to memorize
random labels of the words of Rotten Tomatoes snippets; then their read-out is given the paths of
one length alone. Every model, those of spin blocks too, is also run with its couplings switched off
in some of the layers. :mod:`simulations.path_tasks_circle` applies one layer again and again to two
points on a circle. See ``docs/studies/path_tasks.md``.

Source of the tasks: Dong, Cordonnier & Loukas, "Attention is not all you need: pure attention loses
rank doubly exponentially with depth" (2021), section 4.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import spinformer
from simulations import path_tasks_circle as circle
from simulations.data import DataError, Dataset, Examples, load_sentiment
from simulations.models import Batch, count_parameters
from simulations.options import add_fresh, add_jobs, add_seeds, add_texts
from simulations.results import collect
from simulations.runs import Outcome, RunStore, run_all, write_json
from simulations.tables import align
from simulations.training import Budget, Progress, Trained, generator_for, optimize
from spinformer.diagnostics import (
    AttentionLayer,
    PathDecomposition,
    attention_layers,
    path_decomposition,
)
from spinformer.diagnostics.paths import Path as Route
from spinformer.nn import FreeEnergyBlock, TransformerBlock

__all__ = ["STUDY", "Run", "TokenModel", "decompose", "on_hull", "walk"]

TASKS = ("sort", "hull", "memorization")
TITLES = {
    "sort": "sorting 8 digits",
    "hull": "convex hull of 10 points",
    "memorization": "random labels of words",
}
CLASSES = {"sort": 10, "hull": 2, "memorization": 2}
# What is sampled: sums of so many paths, how often, and for how many examples.
SAMPLES, DRAWS, SAMPLED = (5, 20), 5, 200
# Subsets of layers for each number of them, at most.
SUBSETS = 20
# Streams of random numbers of a run.
_INIT, _BATCHES, _LABELS, _PATHS, _CHOICE = range(5)


# --- data ---------------------------------------------------------------------------------------


def on_hull(points: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which points (n, N, 2) are corners of the convex hull of their N points, (n, N).

    A point is one where another one exists such that all points lie on one side of the line
    through both. O(n N^3).
    """
    delta = points[:, None, :, :] - points[:, :, None, :]  # from i to j
    turn = (
        delta[:, :, :, None, 0] * delta[:, :, None, :, 1]
        - delta[:, :, :, None, 1] * delta[:, :, None, :, 0]
    )
    others = ~np.eye(points.shape[1], dtype=bool)
    one_sided: NDArray[np.bool_] = np.all(turn >= 0, axis=-1)
    corners: NDArray[np.bool_] = np.any(one_sided & others, axis=-1)
    return corners


def sequences(task: str, counts: Sequence[int], seed: int) -> Dataset:
    """Random digits with the sorted ones as labels, or random points and which are on the hull.

    Points are uniform in a square of side :math:`2\\sqrt 3` (variance 1 along each axis) whose
    center is Gaussian with a third of the side as standard deviation: where a point lies does not
    say whether it is on the hull.
    """
    random = np.random.default_rng([seed, TASKS.index(task)])
    sides = []
    for count in counts:
        inputs: NDArray[Any]
        if task == "sort":
            inputs = random.integers(0, 10, (count, 8))
            labels = np.sort(inputs, axis=1)
        else:
            side = 2 * np.sqrt(3.0)
            inputs = side * (random.random((count, 10, 2)) - 0.5)
            inputs += side / 3 * random.normal(size=(count, 1, 2))
            labels = on_hull(inputs).astype(np.int64)
            inputs = inputs.astype(np.float32)
        sides.append(Examples(inputs, np.full(count, inputs.shape[1]), labels))
    source = f"{tuple(counts)} examples of seed {seed}"
    train, validation, test = sides
    return Dataset(
        task,
        TITLES[task],
        CLASSES[task],
        train,
        validation,
        test,
        sources={"generated": source},
    )


def snippets(texts: Dataset, count: int, length: int) -> Dataset:
    """The first ``count`` texts of at least ``length`` tokens, cut to that; no labels yet.

    All three sides are the same texts: what is measured is memory.
    """
    long = np.flatnonzero(texts.train.lengths >= length)[:count]
    if len(long) < count:
        raise DataError(f"there are {len(long)} texts of {length} tokens; {count} are needed")
    inputs = texts.train.inputs[long, :length]
    side = Examples(inputs, np.full(count, length), np.zeros(inputs.shape, np.int64))
    sources = {**texts.sources, "chosen": f"{count} texts of {length} tokens"}
    return replace(
        texts, task="memorization", train=side, validation=side, test=side, sources=sources
    )


def random_labels(dataset: Dataset, seed: int) -> Dataset:
    """A fair coin for every token."""
    shape = dataset.train.inputs.shape
    labels = torch.randint(2, shape, generator=generator_for(seed, _LABELS)).numpy()
    side = replace(dataset.train, labels=labels)
    return replace(dataset, train=side, validation=side, test=side)


# --- models -------------------------------------------------------------------------------------


def attention_layer(width: int, heads: int, mlp: bool) -> TransformerBlock:
    """A layer of plain attention with its skip, with or without an MLP.

    A root-mean-square norm and no biases: nothing in it is constant, so that paths are all there
    is. Where there is no MLP, one hidden unit stands in its place whose output weights stay zero.
    """
    layer = TransformerBlock(width, heads, 2 * width if mlp else 1, norm="rms", bias=False)
    if not mlp:
        nn.init.zeros_(layer.mlp.linear2.weight)
        layer.mlp.requires_grad_(False)
        layer.norm2.requires_grad_(False)
    return layer


def spin_layer(width: int, heads: int, mlp: bool) -> FreeEnergyBlock:
    """One step of mean field with mixed heads: a residual stream of fields and magnetizations."""
    return FreeEnergyBlock(
        width,
        heads,
        heads="mixed",
        steps=1,
        response="large_d",
        norm="rms",
        bias=False,
        dim_feedforward=2 * width if mlp else None,
    )


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "attention": partial(attention_layer, mlp=False),
    "transformer": partial(attention_layer, mlp=True),
    "spins": partial(spin_layer, mlp=False),
    "spins_mlp": partial(spin_layer, mlp=True),
}


class TokenModel(nn.Module):
    """Tokens to a label for each: an embedding, layers, a norm, and one linear read-out.

    Args:
        dataset: for its task, its classes, its length and its word vectors, which stay frozen.
        model: of :data:`MODELS`.
        width, heads, depth: of the layers.
    """

    def __init__(self, dataset: Dataset, model: str, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.heads = heads
        self.embedding: nn.Module
        if dataset.task == "sort":
            self.embedding = nn.Embedding(10, width)
        elif dataset.task == "hull":
            self.embedding = nn.Linear(2, width)
        else:
            assert dataset.vectors is not None
            words = nn.Embedding.from_pretrained(torch.from_numpy(dataset.vectors))
            self.embedding = nn.Sequential(words, nn.Linear(words.embedding_dim, width))
        # The hull does not depend on the order of its points.
        length = dataset.train.inputs.shape[1]
        self.position: nn.Parameter | None = None
        if dataset.task != "hull":
            self.position = nn.Parameter(torch.randn(length, width))
        self.layers = nn.ModuleList(MODELS[model](width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width, 1e-5)
        self.head = nn.Linear(width, dataset.classes)

    def embed(self, inputs: Tensor) -> Tensor:
        """Inputs to tokens (B, N, d)."""
        x: Tensor = self.embedding(inputs)
        return x if self.position is None else x + self.position

    def read(self, x: Tensor) -> Tensor:
        """Tokens to logits (B, N, classes)."""
        logits: Tensor = self.head(self.norm(x))
        return logits

    def forward(self, inputs: Tensor, off: Sequence[int] = ()) -> Tensor:
        """Logits (B, N, classes), with the couplings switched off in the layers ``off``."""
        x = self.embed(inputs)
        silence = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        for index, layer in enumerate(self.layers):
            x = layer(x, src_mask=silence if index in off else None)
        return self.read(x)


# --- paths --------------------------------------------------------------------------------------


def decompose(model: TokenModel, x: Tensor) -> PathDecomposition:
    """The paths of a model of plain attention at the tokens x; norms and MLPs held as they are."""
    return path_decomposition(model.layers, x, variant="full")


def _without_mlp(model: TokenModel) -> bool:
    return not any(p.requires_grad for name, p in model.named_parameters() if ".mlp." in name)


def walk(layers: Sequence[AttentionLayer], x: Tensor, path: Route) -> Tensor:
    """One path as a network of its own: attention and norms are those of the path's own tokens.

    This is no term of a sum that gives the model's output.
    """
    for layer, head in zip(layers, path, strict=True):
        if head is not None:
            assert layer.attention_norm is not None
            read = layer.attention_norm(x)
            mixed = layer.weights(read)[..., head, :, :] @ (read @ layer.value[head])
            x = mixed @ layer.output[head]
    return x


# --- measurements -------------------------------------------------------------------------------


def _tensors(side: Examples, count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.from_numpy(side.inputs[:count])
    inputs = inputs if inputs.is_floating_point() else inputs.long()
    return inputs, torch.from_numpy(side.labels[:count])


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of the tokens that get their label."""
    return float((logits.argmax(-1) == labels).double().mean())


def refit(known: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor], classes: int) -> float:
    """Accuracy of a linear read-out that is fitted (ridge) to tokens and labels, on others.

    Tokens are brought to root mean square 1, as by the model's own norm, and have a constant.
    """

    def features(x: Tensor) -> Tensor:
        x = F.rms_norm(x.flatten(0, 1).double(), x.shape[-1:], eps=1e-12)
        return torch.cat([x, torch.ones_like(x[:, :1])], dim=1)

    rows = features(known[0])
    target = F.one_hot(known[1].flatten(), classes).double()
    ridge = 1e-4 * len(rows) * torch.eye(rows.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(rows.mT @ rows + ridge, rows.mT @ target)
    return accuracy(features(asked[0]) @ weight, asked[1].flatten())


@torch.no_grad()
def measure_paths(model: TokenModel, dataset: Dataset, count: int, seed: int) -> dict[str, Any]:
    """Accuracies of parts of a model of plain attention, all by the length of paths, from 0 on.

    ``only``, ``up_to``, ``without``: all paths of a length, up to it, and all others, through the
    model's read-out. ``refit``: all of a length through a read-out fitted to them on the training
    side. ``frozen``, ``walked``: sums of 5 and 20 random paths, with the model's attention, and
    (where there are no MLPs) each with its own, :func:`walk`: means over draws, for 200 examples.
    ``rank``, ``share``: the rank residual of the sum of all paths of a length, and its size over
    that of the output.
    """
    model.eval()
    generator = generator_for(seed, _PATHS)
    inputs, labels = _tensors(dataset.test, count)
    paths = decompose(model, model.embed(inputs))
    sums = paths.by_length()
    whole = paths.result
    known_inputs, known_labels = _tensors(dataset.train, 2 * count)
    known = decompose(model, model.embed(known_inputs))
    known_sums = known.by_length()
    # MLPs have no part in a walk.
    kinds = ("frozen", "walked") if _without_mlp(model) else ("frozen",)
    sampled: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    layers = attention_layers(model.layers)
    some, some_labels = decompose(model, paths.tokens[:SAMPLED]), labels[:SAMPLED]
    for size in SAMPLES:
        for kind in kinds:
            sampled[kind][str(size)] = []
        for length in range(some.depth + 1):
            found: dict[str, list[float]] = {kind: [] for kind in kinds}
            # There is one path of length 0.
            for _ in range(DRAWS if length else 1):
                drawn = some.sample(length, size if length else 1, generator)
                outputs = {"frozen": drawn.outputs}
                if "walked" in kinds:
                    walks = [walk(layers, some.tokens, path) for path in drawn.paths]
                    outputs["walked"] = torch.stack(walks)
                for kind in kinds:
                    logits = model.read(outputs[kind].sum(0))
                    found[kind].append(accuracy(logits, some_labels))
            for kind, values in found.items():
                sampled[kind][str(size)].append(statistics.fmean(values))
    return {
        "count": [paths.count(length) for length in range(paths.depth + 1)],
        "only": [accuracy(model.read(s), labels) for s in sums],
        "up_to": [accuracy(model.read(s), labels) for s in sums.cumsum(0)],
        "without": [accuracy(model.read(whole - s), labels) for s in sums],
        "refit": [
            refit((k, known_labels), (s, labels), dataset.classes)
            for k, s in zip(known_sums, sums, strict=True)
        ],
        "refit_whole": refit((known.result, known_labels), (whole, labels), dataset.classes),
        "rank": paths.residuals("fro").mean(-1).tolist(),
        "share": [float(s.norm() / whole.norm()) for s in sums],
        **sampled,
    }


@torch.no_grad()
def measure_switches(model: TokenModel, dataset: Dataset, count: int, seed: int) -> dict[str, Any]:
    """Accuracy with the couplings on in k of the layers only, k from 0 on, over subsets of layers.

    All subsets, or a random choice where there are more than :data:`SUBSETS` of a size.
    """
    model.eval()
    inputs, labels = _tensors(dataset.test, count)
    depth = len(model.layers)
    generator = generator_for(seed, _CHOICE)
    found: dict[str, Any] = {"mean": [], "best": [], "worst": []}
    for on in range(depth + 1):
        subsets = list(itertools.combinations(range(depth), depth - on))
        chosen = torch.randperm(len(subsets), generator=generator)[:SUBSETS].tolist()
        values = [accuracy(model(inputs, off=subsets[i]), labels) for i in chosen]
        found["mean"].append(statistics.fmean(values))
        found["best"].append(max(values))
        found["worst"].append(min(values))
    return found


def baseline(dataset: Dataset, count: int) -> float:
    """The most frequent label: of each position where positions have a meaning, else of all."""
    known, (_, asked) = dataset.train.labels, _tensors(dataset.test, count)
    if dataset.task != "sort":
        most = np.bincount(known.flatten()).argmax()
        return float((asked == int(most)).double().mean())
    modes = torch.from_numpy(np.array([np.bincount(column).argmax() for column in known.T]))
    return float((asked == modes).double().mean())


# --- runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run: a model on a task with a seed. It satisfies :class:`simulations.runs.Job`."""

    task: str
    model: str
    depth: int
    seed: int
    width: int
    heads: int
    evaluated: int
    budget: Budget

    @property
    def label(self) -> str:
        """The model and its depth."""
        return f"{self.model}_{self.depth}"

    @property
    def recipe(self) -> str:
        """The model's name: the sources' hash covers the rest."""
        return self.model

    def settings(self) -> dict[str, Any]:
        """The run as plain numbers and strings."""
        return asdict(self)

    def train(self, dataset: Dataset, progress: Progress) -> Trained:
        """Train one model and take it apart."""
        torch.set_num_threads(1)
        if self.task == "memorization":
            dataset = random_labels(dataset, self.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_for(self.seed, _INIT).initial_seed())
            model = TokenModel(dataset, self.model, self.width, self.heads, self.depth)

        def logits(batch: Batch) -> Tensor:
            return model(batch.inputs).flatten(0, 1)

        inputs, labels = _tensors(dataset.validation, self.evaluated)
        curve: list[dict[str, float]] = []
        durations: list[float] = []
        batches = _batches(dataset, self.budget.batch_size, self.seed)
        for step, loss, seconds in optimize(model, self.budget, batches, logits, time.process_time):
            durations.append(seconds)
            point = None
            if step in self.budget.evaluate_at():
                with torch.no_grad():
                    value = accuracy(model(inputs), labels)
                point = {"step": step, "loss": loss, "validation_accuracy": value}
                curve.append(point)
            progress(step, point)

        inputs, labels = _tensors(dataset.test, self.evaluated)
        with torch.no_grad():
            whole = accuracy(model.eval()(inputs), labels)
        paths = None
        if self.model in ("attention", "transformer"):
            paths = measure_paths(model, dataset, self.evaluated, self.seed)
        record = {
            **self.settings(),
            "parameters": count_parameters(model),
            "curve": curve,
            "test": {"accuracy": whole},
            "baseline": baseline(dataset, self.evaluated),
            "paths": paths,
            "switches": measure_switches(model, dataset, self.evaluated, self.seed),
            "ms_per_step": 1e3 * statistics.median(durations),
        }
        return record, model.state_dict()


def _batches(dataset: Dataset, size: int, seed: int) -> Iterator[Batch]:
    """Endless batches of the training side; the labels of all tokens in one row."""
    generator = generator_for(seed, _BATCHES)
    inputs, labels = _tensors(dataset.train, len(dataset.train))
    while True:
        order = torch.randperm(len(inputs), generator=generator)
        for chosen in order.split(size):
            if len(chosen) == min(size, len(inputs)):
                yield Batch(inputs[chosen], None, labels[chosen].flatten())


@dataclass(frozen=True)
class Plan:
    """How much is trained.

    Attributes:
        counts: examples for training, validation and test of the generated tasks.
        snippets, length: texts to be memorized, and their tokens.
        depth: layers of every model.
        depths: other numbers of layers, of attention on sorting.
        width: of each task.
        budget: of each task.
        seeds: of every model.
        circle: the circle task.
    """

    counts: tuple[int, int, int]
    snippets: int
    length: int
    depth: int
    depths: tuple[int, ...]
    width: dict[str, int]
    budget: dict[str, Budget]
    seeds: int
    circle: circle.Plan


def _budgets(sort: int, hull: int, memorization: int) -> dict[str, Budget]:
    options: dict[str, Any] = {"learning_rate": 2e-3, "weight_decay": 0.0, "evaluations": 10}
    return {
        "sort": Budget(sort, 64, **options),
        "hull": Budget(hull, 64, **options),
        "memorization": Budget(memorization, 50, **options),
    }


WIDTH = {"sort": 48, "hull": 48, "memorization": 64}
FULL = Plan(
    counts=(20_000, 500, 500),
    snippets=100,
    length=16,
    depth=6,
    depths=(3, 12),
    width=WIDTH,
    budget=_budgets(1000, 1000, 500),
    seeds=3,
    circle=circle.FULL,
)
QUICK = Plan(
    counts=(4_000, 200, 200),
    snippets=20,
    length=16,
    depth=3,
    depths=(),
    width={"sort": 32, "hull": 32, "memorization": 32},
    budget=_budgets(200, 200, 100),
    seeds=1,
    circle=circle.QUICK,
)
HEADS = 2


# --- the study ----------------------------------------------------------------------------------


class _PathTasks:
    name = "path_tasks"
    description = (
        "which paths through attention carry sorting, hulls and memory; points on a circle"
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--tasks",
            nargs="+",
            choices=("circle", *TASKS),
            default=["circle", *TASKS],
            metavar="TASK",
            help=f"any of circle, {', '.join(TASKS)} (default: all)",
        )
        add_seeds(parser, FULL.seeds, QUICK.seeds)
        add_jobs(parser)
        add_fresh(parser)
        add_texts(parser)

    def run(self, args: argparse.Namespace) -> int:
        started = time.monotonic()
        plan = QUICK if args.quick else FULL
        seeds = [args.seed + i for i in range(args.seeds or plan.seeds)]
        tasks = [task for task in TASKS if task in args.tasks]
        datasets = {task: _dataset(task, plan, args) for task in tasks}
        points: list[dict[str, Any]] = []
        outcome = Outcome(())
        if "circle" in args.tasks:
            points, stopped = collect(
                circle.runs(plan.circle, seeds), "circle", partial(circle.train, plan.circle)
            )
            outcome.interrupted = stopped.happened
        if not outcome.interrupted:
            outcome = run_all(
                list(_runs(plan, tasks, seeds)),
                RunStore(args.out, datasets),
                args.jobs,
                fresh=args.fresh,
            )
        results = {
            "study": self.name,
            "versions": {"spinformer": spinformer.__version__, "torch": torch.__version__},
            "seeds": seeds,
            **outcome.summary(),
            "tasks": {task: _facts(datasets[task]) for task in tasks},
            "runs": outcome.records,
            "circle": points,
        }
        write_json(args.out / "results.json", results)
        if outcome.records:
            print(f"\n{table(outcome.records)}")
        if points:
            print(f"\n{circle.table(points)}")
        if outcome.records or points:
            # The figures' library is loaded by those who draw: workers import this module too.
            drawn = importlib.import_module("simulations.path_tasks_plots").draw(results, args.out)
            print("\nfigures:", ", ".join(str(path) for path in drawn))
        seconds = time.monotonic() - started
        print(f"results: {args.out / 'results.json'} ({seconds:.0f} s)")
        return outcome.status()


def _dataset(task: str, plan: Plan, args: argparse.Namespace) -> Dataset:
    if task != "memorization":
        return sequences(task, plan.counts, args.seed)
    texts = load_sentiment(args.reviews, args.vectors, max_length=plan.length)
    return snippets(texts, plan.snippets, plan.length)


def _facts(dataset: Dataset) -> dict[str, Any]:
    return {
        "title": dataset.title,
        "classes": dataset.classes,
        "examples": len(dataset.train),
        "length": dataset.train.inputs.shape[1],
        "sources": dataset.sources,
    }


def _runs(plan: Plan, tasks: Sequence[str], seeds: Sequence[int]) -> Iterator[Run]:
    """Seed by seed, so that an interrupted study has every model at an equal number of seeds."""
    for seed in seeds:
        for task in tasks:
            kinds = [(model, plan.depth) for model in MODELS]
            if task == "sort":
                kinds += [("attention", depth) for depth in plan.depths]
            for model, depth in kinds:
                yield Run(
                    task,
                    model,
                    depth,
                    seed,
                    plan.width[task],
                    HEADS,
                    plan.counts[2],
                    plan.budget[task],
                )


def table(records: Sequence[dict[str, Any]]) -> str:
    """A line for each task, model and depth: means over seeds and their standard errors."""
    header = ["task, model, layers", "seeds", "parameters", "accuracy [%]", "couplings off [%]"]
    header += ["length 0", "1", "2", "last", "ms/step"]
    rows = []
    for kind in dict.fromkeys((r["task"], r["model"], r["depth"]) for r in records):
        group = [r for r in records if (r["task"], r["model"], r["depth"]) == kind]
        cells = [
            _cell([r["test"]["accuracy"] for r in group]),
            _cell([r["switches"]["mean"][0] for r in group]),
        ]
        for length in (0, 1, 2, -1):
            known = [r["paths"]["only"][length] for r in group if r["paths"] is not None]
            cells.append(_cell(known) if known else "")
        pace = statistics.median(r["ms_per_step"] for r in group)
        name = ", ".join(map(str, kind))
        rows.append((name, str(len(group)), f"{group[0]['parameters']:,}", *cells, f"{pace:.1f}"))
    return align(header, rows)


def _cell(values: Sequence[float]) -> str:
    mean = 100 * statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.1f}"
    return f"{mean:.1f} +- {100 * statistics.stdev(values) / len(values) ** 0.5:.1f}"


STUDY = _PathTasks()
