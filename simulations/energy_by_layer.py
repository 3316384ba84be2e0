r"""The energy of real reviews, layer by layer: figures 5 and 6 of Yang, Huang & Wipf (2022).

Twelve layers with one set of weights are twelve steps of one descent, each review a system of its
own, and a classifier: the mean of the last tokens decides between two labels. Four variants:

* ``paper``: the printed pair of an energy and an update, which need not descend;
* ``corrected``: the same energy, and a majorize-minimize step of its sum, which must;
* ``data``: attention with the data term ``|Y - X|^2 / 2``, as one step ``(2D + 1)^-1 (2WY + X)``;
* ``free_energy``: one block of spins in a row, each time a new system in a new field.

A fifth, ``published``, is the authors' public code as it runs. See
``docs/studies/energy_by_layer.md``.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import spinformer
from simulations.data import PACKAGED_VECTORS, Dataset, Examples, describe, load_sentiment
from simulations.models import Batch
from simulations.options import add_fresh, add_jobs, positive
from simulations.runs import RunStore, run_all, write_json, write_text
from simulations.tables import align
from simulations.training import (
    Budget,
    Progress,
    Trained,
    generator_for,
    make_batch,
    optimize,
    training_batches,
)
from spinformer.descent import PairwiseEnergy, prox_nonnegative
from spinformer.descent.pairwise import Kernel
from spinformer.nn import FreeEnergyBlock

LAYERS = 12
SOURCES = {"imdb": "imdb", "snippets": "rotten_tomatoes"}
TITLES = {"imdb": "IMDB train reviews", "snippets": "Rotten Tomatoes snippets"}
INPUTS = ("unit", "raw")
# No direction of the feed-forward energy is flat: the bound of the public code.
LARGEST = 0.95
# In parts of what is added up, in double precision. What must fall does at 1e-12 too; a state that
# has settled wanders by some 1e-12, and is not to count as rising.
ROUNDING = 1e-10
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

# Streams of random numbers; training_batches has its own.
_INIT, _CHOICE = 200, 201


class Network(nn.Module, ABC):
    """Word vectors -> twelve tied layers -> mean over the tokens -> two classes.

    Attributes:
        steps: names of the updates that this energy is shown with; the first is the network's.
        residual: whether the data term holds the state to the input, as in all training; else to
            zero.
    """

    steps: tuple[str, ...] = ("",)

    def __init__(self, dim: int, relu: bool) -> None:
        super().__init__()
        self.relu = relu
        self.residual = True
        self.gain = dim**0.5
        self.head = nn.Linear(dim, 2)

    @abstractmethod
    def along(self, x: Tensor, absent: Tensor, step: str) -> Iterator[tuple[Tensor, Tensor]]:
        """States ``(B, N, d)`` and energies ``(B,)``, layer by layer."""

    @abstractmethod
    def last(self, x: Tensor, absent: Tensor) -> Tensor:
        """The state after the last layer."""

    def project(self) -> None:
        """Put the parameters back to where the layers are what they are said to be."""
        return

    def forward(self, x: Tensor, absent: Tensor) -> Tensor:
        """Logits ``(B, 2)`` of vectors ``(B, N, d)`` that are zero where ``absent``."""
        present = (~absent).sum(-1, keepdim=True).to(x.dtype)
        # Vectors of length one have components of size d^(-1/2).
        return self.head(self.last(x, absent).sum(-2) / present * self.gain)

    def loss(self, x: Tensor, absent: Tensor, labels: Tensor) -> Tensor:
        """What training lowers."""
        return F.cross_entropy(self(x, absent), labels)


class DescentNetwork(Network):
    r"""Layers that step down one energy, with ReLU as the constraint ``Y >= 0``.

    .. math::
        E(Y) = \sum_{ij} -e^{-|(y_i - y_j) W|^2 / 2} + \tfrac12 |(Y - C) W|^2
               + \tfrac12 \mathrm{tr}(Y S Y^T) + \tfrac12 |Y - D|^2

    C is zero, and D is X (the word vectors) or zero; the variant ``data`` has C = X and no second
    line. With the constraint the descent starts from ``max(X, 0)``: at X the energy is infinite.
    """

    def __init__(self, variant: str, dim: int, relu: bool) -> None:
        super().__init__(dim, relu)
        self.variant = variant
        self.steps = {
            "paper": ("printed",),
            "corrected": ("sum", "alternating"),
            "data": ("scalar", "closed") if relu else ("closed", "scalar"),
        }[variant]
        # The draws of the public code: Xavier, and a positive semi-definite feed-forward matrix.
        self.metric = nn.Parameter(torch.randn(dim, dim) / dim**0.5)
        self.mixing: nn.Parameter | None = None
        if variant != "data":
            factor = torch.randn(dim, dim) / dim**0.5
            self.mixing = nn.Parameter(factor @ factor.mT)
        self.project()

    def project(self) -> None:
        """The feed-forward matrix: symmetric, eigenvalues between -.95 and .95."""
        if self.mixing is None:
            return
        with torch.no_grad():
            values, frame = torch.linalg.eigh((self.mixing + self.mixing.mT) / 2)
            self.mixing.copy_(frame * values.clamp(-LARGEST, LARGEST) @ frame.mT)

    def _start(self, x: Tensor) -> Tensor:
        return prox_nonnegative(x) if self.relu else x

    def _targets(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """C and D of the energy."""
        zero = torch.zeros_like(x)
        if self.mixing is None:
            return x, zero
        return zero, x if self.residual else zero

    def energy(self, state: Tensor, x: Tensor, absent: Tensor) -> Tensor:
        """``E``, ``(B,)``."""
        held, target = self._targets(x)
        total = PairwiseEnergy(weights=self.metric[None]).energy(state, absent)
        total = total + ((state - held) @ self.metric).square().sum((-2, -1)) / 2
        if self.mixing is not None:
            total = total + (state @ self.mixing * state).sum((-2, -1)) / 2
            total = total + (state - target).square().sum((-2, -1)) / 2
        return total

    def last(self, x: Tensor, absent: Tensor) -> Tensor:
        state = self._start(x)
        sizes = self._sizes()
        for _ in range(LAYERS):
            state = self._layer(state, x, absent, self.steps[0], sizes)
        return state

    def along(self, x: Tensor, absent: Tensor, step: str) -> Iterator[tuple[Tensor, Tensor]]:
        state = self._start(x)
        sizes = self._sizes()
        yield state, self.energy(state, x, absent)
        for _ in range(LAYERS):
            state = self._layer(state, x, absent, step, sizes)
            yield state, self.energy(state, x, absent)

    def _sizes(self) -> tuple[Tensor, Tensor]:
        """Largest eigenvalues of ``W W^T`` and of ``1 + S``."""
        sharpest = torch.linalg.matrix_norm(self.metric, ord=2).square()
        if self.mixing is None:
            return sharpest, torch.zeros_like(sharpest)
        return sharpest, 1 + torch.linalg.eigvalsh(self.mixing)[-1]

    def _layer(
        self, state: Tensor, x: Tensor, absent: Tensor, step: str, sizes: tuple[Tensor, Tensor]
    ) -> Tensor:
        held, target = self._targets(x)
        kernel = PairwiseEnergy(weights=self.metric[None]).kernel(state, absent)
        if step in ("sum", "scalar"):
            state = self._majorize_minimize(state, held, target, kernel, sizes)
        else:
            if step == "printed":
                # softmax_beta: blind to the regularizer.
                state = kernel.attention.squeeze(-3) @ state
            else:
                heard = 2 * kernel.weights.squeeze(-3) @ state + held
                state = heard / (2 * kernel.degree.squeeze(-2) + 1).unsqueeze(-1)
            if self.mixing is not None:
                state = target - state @ self.mixing
        return prox_nonnegative(state) if self.relu else state

    def _majorize_minimize(
        self,
        state: Tensor,
        held: Tensor,
        target: Tensor,
        kernel: Kernel,
        sizes: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The minimum of a bound of the whole energy, one curvature a token, constraint or not."""
        weights, degree = kernel.weights.squeeze(-3), kernel.degree.squeeze(-2).unsqueeze(-1)
        pull = 2 * (degree * state - weights @ state) + state - held
        slope = pull @ self.metric @ self.metric.mT
        if self.mixing is not None:
            slope = slope + state @ self.mixing + state - target
        return state - slope / ((2 * degree + 1) * sizes[0] + sizes[1])


class PublishedNetwork(Network):
    """The authors' public code as it runs: model, loss, and what it does to its weights.

    The plain softmax, in another metric than the energy's; pairs counted once; a bias in place of
    the data term; logits of every token, of which the loss reads two as the classes; and a
    feed-forward matrix that is replaced by its own square (below .95) after every step of training.
    """

    steps = ("code",)

    def __init__(self, dim: int, relu: bool) -> None:
        super().__init__(dim, relu)
        self.metric = nn.Parameter(torch.randn(dim, dim) / dim**0.5)
        self.mixing = nn.Parameter(torch.randn(dim, dim) / dim**0.5)
        self.bias = nn.Parameter(torch.randn(dim) * (2 / (dim + 1)) ** 0.5)
        self.project()

    def project(self) -> None:
        with torch.no_grad():
            values, frame = torch.linalg.eigh(self.mixing @ self.mixing.mT)
            self.mixing.copy_(frame * values.clamp(max=LARGEST) @ frame.mT)

    def energy(self, state: Tensor, absent: Tensor) -> Tensor:
        """Their energy, ``(B,)``."""
        pairs = PairwiseEnergy(weights=self.metric[None]).energy(state, absent)
        present = (~absent).sum(-1)
        held = (state - self.bias).square().sum(-1).masked_fill(absent, 0.0).sum(-1) / 2
        linear = (state @ self.mixing * state).sum((-2, -1)) / 2
        # Our sum has every pair twice, and a token with itself: -1.
        return (
            (pairs + present) / 2 + (state @ self.metric).square().sum((-2, -1)) / 2 + held + linear
        )

    def _layer(self, state: Tensor, absent: Tensor) -> Tensor:
        logits = state @ self.metric.mT @ self.metric @ state.mT
        state = logits.masked_fill(absent.unsqueeze(-2), -torch.inf).softmax(-1) @ state
        state = self.bias - state @ (self.mixing + self.mixing.mT) / 2
        state = prox_nonnegative(state) if self.relu else state
        return state.masked_fill(absent.unsqueeze(-1), 0.0)

    def last(self, x: Tensor, absent: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = self._layer(x, absent)
        return x

    def along(self, x: Tensor, absent: Tensor, step: str) -> Iterator[tuple[Tensor, Tensor]]:
        yield x, self.energy(x, absent)
        for _ in range(LAYERS):
            x = self._layer(x, absent)
            yield x, self.energy(x, absent)

    def forward(self, x: Tensor, absent: Tensor) -> Tensor:
        """The two logits that the loss takes for the classes: those of the first token."""
        return self.head(self.last(x, absent)[:, 0])

    def loss(self, x: Tensor, absent: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.last(x, absent)).flatten(1), labels)


class SpinNetwork(Network):
    """One mean-field block with symmetric couplings, twelve times.

    Tokens are scaled so that a unit vector is a field as long as a spin. With ReLU the field has a
    position-wise network of that activation, which without it is left out. ``field``: what the
    spins feel is the next field, as in a residual network; ``plain``: their magnetization is.
    """

    steps = ("field", "plain")

    def __init__(
        self,
        dim: int,
        relu: bool,
        stream: Literal["plain", "field"] = "field",
        tolerance: float = 1e-3,
    ) -> None:
        super().__init__(dim, relu)
        heads = next(count for count in (6, 5, 4, 3, 2, 1) if dim % count == 0)
        self.scale, self.gain = dim**0.5, 1.0
        self.block = FreeEnergyBlock(
            dim,
            heads,
            couplings="symmetric",
            stream=stream,
            dim_feedforward=2 * dim if relu else None,
            activation="relu",
            tolerance=tolerance,
            on_failure="ignore",
        )

    def last(self, x: Tensor, absent: Tensor) -> Tensor:
        state = self.scale * x
        for _ in range(LAYERS):
            state = self.block(state, src_key_padding_mask=absent)
        return self.block.readout(state).masked_fill(absent.unsqueeze(-1), 0.0)

    def along(self, x: Tensor, absent: Tensor, step: str) -> Iterator[tuple[Tensor, Tensor]]:
        """After each layer: the energy belongs to what a block solved, not to what it reads."""
        state = self.scale * x
        for _ in range(LAYERS):
            state, report = self.block(state, src_key_padding_mask=absent, return_report=True)
            yield state, report.free_energy.sum(-1)


def build(variant: str, dim: int, relu: bool, generator: torch.Generator) -> Network:
    """A network with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        if variant == "published":
            return PublishedNetwork(dim, relu)
        if variant == "free_energy":
            return SpinNetwork(dim, relu)
        return DescentNetwork(variant, dim, relu)


# Energies by layer ------------------------------------------------------------------------------


def table_of(dataset: Dataset, inputs: str) -> Tensor:
    """The word vectors as they are, or of length one (the padding stays zero)."""
    assert dataset.vectors is not None
    table = torch.from_numpy(dataset.vectors)
    return F.normalize(table, dim=-1) if inputs == "unit" else table


def look_up(batch: Batch, table: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors ``(B, N, d)`` and what is absent ``(B, N)``."""
    absent = batch.absent
    if absent is None:
        absent = torch.zeros(batch.inputs.shape, dtype=torch.bool)
    return table[batch.inputs], absent


def measure(network: Network, step: str, dataset: Dataset, reviews: Examples, inputs: str) -> Fall:
    """Energies of the reviews by layer, in double precision."""
    exact = copy.deepcopy(network)
    if isinstance(network, SpinNetwork):
        stream: Literal["plain", "field"] = "plain" if step == "plain" else "field"
        exact = SpinNetwork(network.head.in_features, network.relu, stream, tolerance=1e-9)
        exact.load_state_dict(network.state_dict())
    exact = exact.double().eval()
    table = table_of(dataset, inputs).double()
    energies = []
    with torch.no_grad():
        for start in range(0, len(reviews), 50):
            chosen = np.arange(start, min(start + 50, len(reviews)))
            x, absent = look_up(make_batch(reviews, chosen, tokens=True), table)
            energies.append(torch.stack([e for _, e in exact.along(x, absent, step)], dim=-1))
    return Fall(torch.cat(energies).numpy(), reviews.lengths)


@dataclass(frozen=True)
class Fall:
    """Energies by layer.

    Attributes:
        energies: ``(reviews, layers)``.
        lengths: tokens of each review.
    """

    energies: NDArray[np.float64]
    lengths: NDArray[np.int64]

    @property
    def falls(self) -> NDArray[np.bool_]:
        """``(reviews, steps)``: no step up by more than rounding."""
        scale = self.lengths[:, None] ** 2 + np.abs(self.energies[:, :-1])
        return np.diff(self.energies) <= ROUNDING * scale

    def scaled(self) -> NDArray[np.float64]:
        """Each review's energies from its least, 0, to its largest, 1; zeros if all are equal."""
        low = self.energies.min(axis=1, keepdims=True)
        range_ = np.ptp(self.energies, axis=1, keepdims=True)
        return (self.energies - low) / np.where(range_ > 0, range_, 1.0)

    def summary(self) -> dict[str, Any]:
        """Numbers of a panel and of a row of the table, ready for JSON.

        Only ``reviews`` and ``all_fall = None`` where weights that diverged leave no energy.
        """
        if not np.isfinite(self.energies).all():
            return {"reviews": len(self.energies), "all_fall": None}
        falls, scaled = self.falls, self.scaled()
        rises = np.where(falls, 0.0, np.diff(scaled))
        return {
            "reviews": len(falls),
            "all_fall": int(falls.all(axis=1).sum()),
            "steps": int(falls.size),
            "steps_fall": int(falls.sum()),
            "largest_rise": float(rises.max()),
            "per_token": (self.energies / self.lengths[:, None]).mean(axis=0).tolist(),
            "mean": scaled.mean(axis=0).tolist(),
            "quantiles": np.quantile(scaled, QUANTILES, axis=0).tolist(),
        }


# Training ---------------------------------------------------------------------------------------

# How each training is done: AdamW with a cosine, or plain SGD of one review a step.
BUDGETS = {
    "adam": Budget(steps=400, batch_size=8, learning_rate=1e-2, weight_decay=0.0, evaluations=4),
    "spins": Budget(steps=300, batch_size=8, learning_rate=3e-3, weight_decay=0.0, evaluations=3),
    "sgd": Budget(steps=2000, batch_size=1, learning_rate=0.01, weight_decay=0.0, evaluations=4),
}
QUICK_BUDGETS = {
    "adam": Budget(steps=20, batch_size=8, learning_rate=1e-2, weight_decay=0.0, evaluations=2),
    "spins": Budget(steps=5, batch_size=8, learning_rate=3e-3, weight_decay=0.0, evaluations=1),
    "sgd": Budget(steps=60, batch_size=1, learning_rate=0.01, weight_decay=0.0, evaluations=2),
}
# Means over many tokens lie close together: the classifier sees them magnified, where the optimizer
# bears it.
MAGNIFIED = {"adam": 5.0, "sgd": 1.0}


def accuracy(network: Network, dataset: Dataset, side: Examples, table: Tensor) -> dict[str, float]:
    """Of a side of the split."""
    hits = 0
    network.eval()
    order = np.argsort(side.lengths, kind="stable")
    with torch.no_grad():
        for start in range(0, len(side), 64):
            batch = make_batch(side, order[start : start + 64], tokens=True)
            logits = network(*look_up(batch, table))
            hits += int((logits.argmax(-1) == batch.labels).sum())
    return {"accuracy": hits / len(side)}


def draw_reviews(side: Examples, count: int, seed: int) -> Examples:
    """Random examples, the same for every variant."""
    chosen = torch.randperm(len(side), generator=generator_for(seed, _CHOICE))[:count].numpy()
    return Examples(side.inputs[chosen], side.lengths[chosen], side.labels[chosen])


@dataclass(frozen=True)
class Run:
    """One run: energies at random weights, training, energies at those that came of it.

    It satisfies :class:`simulations.runs.Job`.
    """

    task: str
    variant: str
    relu: bool
    optimizer: str
    reviews: int
    tests: int
    vectors: str
    seed: int
    budget: Budget

    @property
    def label(self) -> str:
        """Variant, ReLU and optimizer."""
        return f"{self.variant}-{'relu' if self.relu else 'linear'}-{self.optimizer}"

    @property
    def recipe(self) -> str:
        """The networks' sources are part of every run's identity already."""
        return ""

    def settings(self) -> dict[str, Any]:
        """The run as plain numbers and strings."""
        return asdict(self)

    def train(self, dataset: Dataset, progress: Progress) -> Trained:
        """Measure, train, test, and measure again."""
        torch.set_num_threads(1)
        assert dataset.vectors is not None
        dim = dataset.vectors.shape[1]
        network = build(self.variant, dim, self.relu, generator_for(self.seed, _INIT))
        chosen = draw_reviews(dataset.test, self.reviews, self.seed)
        curves = []
        # The public code reads the vectors as they are.
        trained_on = "raw" if self.variant == "published" else "unit"
        # The run with the paper's own optimizer has the same random weights.
        if (self.variant, self.optimizer) != ("paper", "sgd"):
            network.residual = False
            for inputs in ("unit",) if self.variant == "free_energy" else INPUTS:
                curves += self._curves("random", network, dataset, chosen, inputs)
            network.residual = True
            if self.variant in ("paper", "corrected"):
                curves += self._curves("random, data term", network, dataset, chosen, "unit")
        network.gain *= MAGNIFIED[self.optimizer]

        table = table_of(dataset, trained_on)
        durations: list[float] = []
        curve: list[dict[str, float]] = []
        validation = draw_reviews(dataset.validation, self.tests // 2, self.seed)
        for step, loss, seconds in self._optimize(network, dataset, table):
            durations.append(seconds)
            network.project()
            point = None
            if step in self.budget.evaluate_at():
                found = accuracy(network, dataset, validation, table)
                point = {"step": step, "loss": loss, "validation_accuracy": found["accuracy"]}
                curve.append(point)
            progress(step, point)
        curves += self._curves("trained", network, dataset, chosen, trained_on)
        record = {
            **self.settings(),
            "curves": curves,
            "curve": curve,
            "test": accuracy(
                network, dataset, draw_reviews(dataset.test, self.tests, self.seed), table
            ),
            "ms_per_step": 1e3 * statistics.median(durations) if durations else 0.0,
            "diverged_at": len(durations) + 1 if len(durations) < self.budget.steps else None,
        }
        if isinstance(network, PublishedNetwork):
            norm = float(network.mixing.detach().norm())
            record["feedforward_norm"] = norm if math.isfinite(norm) else None
        return record, network.state_dict()

    def _curves(
        self, weights: str, network: Network, dataset: Dataset, chosen: Examples, inputs: str
    ) -> list[dict[str, Any]]:
        return [
            {
                "weights": weights,
                "inputs": inputs,
                "step": step,
                **measure(network, step, dataset, chosen, inputs).summary(),
            }
            for step in network.steps
        ]

    def _optimize(
        self, network: Network, dataset: Dataset, table: Tensor
    ) -> Iterator[tuple[int, float, float]]:
        """``(steps done, loss, seconds)`` after each step."""
        batches = training_batches(dataset, self.budget, self.seed)
        if self.optimizer == "adam":
            yield from optimize(
                network, self.budget, batches, lambda batch: network(*look_up(batch, table))
            )
            return
        sgd = torch.optim.SGD(network.parameters(), lr=self.budget.learning_rate)
        for step in range(1, self.budget.steps + 1):
            batch = next(batches)
            start = time.perf_counter()
            network.train()
            sgd.zero_grad()
            loss = network.loss(*look_up(batch, table), batch.labels)
            loss.backward()
            slopes = [p.grad for p in network.parameters() if p.grad is not None]
            # Squares, since those of the weights are taken next.
            if not all(bool(slope.square().sum().isfinite()) for slope in slopes):
                # A run that diverges is a finding here: what it was before is measured.
                return
            sgd.step()
            yield step, float(loss.detach()), time.perf_counter() - start


# The study --------------------------------------------------------------------------------------

LABELS = {
    "published": "public code",
    "paper": "as printed",
    "corrected": "corrected step",
    "data": "data term",
    "free_energy": "free energy",
}
STEPS = {
    "code": "plain softmax",
    "printed": "softmax, then feed-forward",
    "sum": "majorize-minimize of the sum",
    "alternating": "right steps in turn (AIM)",
    "closed": "(2D + 1)^-1 (2WY + X)",
    "scalar": "one curvature a token",
    "plain": "stream of magnetizations",
    "field": "stream of fields",
}


class EnergyByLayer:
    """The study ``energy_by_layer``."""

    name = "energy_by_layer"
    description = "energies of real reviews over twelve tied layers, random and trained"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the study."""
        parser.add_argument(
            "--task",
            choices=(*SOURCES, "all"),
            help="which reviews (default: all, with --quick the snippets)",
        )
        parser.add_argument(
            "--vectors",
            choices=tuple(PACKAGED_VECTORS),
            default="glove50",
            help="word vectors; spacy300 needs a package of its own (default: %(default)s)",
        )
        parser.add_argument(
            "--variants",
            nargs="+",
            choices=tuple(LABELS),
            default=list(LABELS),
            metavar="VARIANT",
            help=f"any of {', '.join(LABELS)} (default: all)",
        )
        parser.add_argument(
            "--tokens",
            type=positive,
            default=128,
            metavar="N",
            help="a longer review loses its end",
        )
        parser.add_argument(
            "--steps", type=positive, metavar="N", help="of every training, instead of its own"
        )
        add_jobs(parser)
        add_fresh(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Do what is not done yet, then write ``results.json``, the table and the figures."""
        started = time.monotonic()
        task = args.task or ("snippets" if args.quick else "all")
        tasks = tuple(SOURCES) if task == "all" else (task,)
        budgets = QUICK_BUDGETS if args.quick else BUDGETS
        if args.steps is not None:
            budgets = {name: replace(budget, steps=args.steps) for name, budget in budgets.items()}
        datasets = {
            task: load_sentiment(
                source=SOURCES[task], max_length=args.tokens, packaged=args.vectors
            )
            for task in tasks
        }
        for dataset in datasets.values():
            print(*describe(dataset), sep="\n")
        kinds = [
            (variant, optimizer, budgets[budget])
            for variant, optimizer, budget in (
                ("paper", "adam", "adam"),
                ("corrected", "adam", "adam"),
                ("data", "adam", "adam"),
                ("paper", "sgd", "sgd"),
                ("published", "sgd", "sgd"),
                ("free_energy", "adam", "spins"),
            )
            if variant in args.variants
        ]
        reviews, tests = (40, 100) if args.quick else (200, 1000)
        runs = [
            Run(
                task,
                variant,
                relu,
                optimizer,
                reviews,
                tests,
                args.vectors,
                args.seed,
                budget,
            )
            for variant, optimizer, budget in kinds
            for task in tasks
            for relu in (False, True)
        ]
        outcome = run_all(runs, RunStore(args.out, datasets), args.jobs, fresh=args.fresh)
        results = {
            "study": self.name,
            "versions": {"spinformer": spinformer.__version__, "torch": torch.__version__},
            **outcome.summary(),
            "vectors": PACKAGED_VECTORS[args.vectors],
            "tasks": {
                task: {"title": dataset.title, "sources": dataset.sources, "facts": dataset.facts}
                for task, dataset in datasets.items()
            },
            "runs": outcome.records,
        }
        write_json(args.out / "results.json", results)
        if outcome.records:
            table = render(outcome.records)
            write_text(args.out / "table.txt", table)
            print(f"\n{table}\n")
            # The figures' library is loaded by those who draw: workers import this module too.
            drawn = importlib.import_module("simulations.energy_by_layer_plots").draw(
                results, args.out
            )
            print("figures:", ", ".join(str(path) for path in drawn))
        print(f"results: {args.out / 'results.json'} ({time.monotonic() - started:.0f} s)")
        return outcome.status()


def render(records: list[dict[str, Any]]) -> str:
    """For how many reviews every step falls, and what the networks had learned."""
    rows = []
    accuracies = []
    for record in records:
        relu = "ReLU" if record["relu"] else "no ReLU"
        start = f"{TITLES[record['task']]}, {LABELS[record['variant']]}, {relu}"
        for curve in record["curves"]:
            numbers = ("not finite", "-", "-")
            if curve["all_fall"] is not None:
                numbers = (
                    f"{curve['all_fall']} of {curve['reviews']}",
                    f"{curve['steps_fall']} of {curve['steps']}",
                    f"{curve['largest_rise']:.1e}" if curve["largest_rise"] else "-",
                )
            weights = curve["weights"]
            if weights == "trained":
                weights = f"trained ({record['optimizer']})"
            rows.append((start, STEPS[curve["step"]], weights, curve["inputs"], *numbers))
        accuracies.append(
            (
                f"{start}, {record['optimizer']}",
                f"{record['test']['accuracy']:.1%}",
                "-" if record["diverged_at"] is None else str(record["diverged_at"]),
                f"{record['ms_per_step']:.0f}",
            )
        )
    return "\n\n".join(
        (
            align(
                (
                    "energy",
                    "step",
                    "weights",
                    "vectors",
                    "every step falls",
                    "steps that fall",
                    "rise",
                ),
                rows,
            ),
            align(("network", "test accuracy", "diverged at step", "ms/step"), accuracies),
        )
    )


STUDY = EnergyByLayer()
