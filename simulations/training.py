"""Training one classifier: the schedule, the batches, and the measurements of a run.

Every random choice comes from generators that are seeded by the run's seed and by what they are
for. The order of the batches, the shifts of the images and the dropped entries are therefore the
same for every block with that seed, and a run gives the same numbers on its own as among others.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from simulations.data import Dataset, Examples
from simulations.measure import PeakMemory
from simulations.models import Batch, Classifier, Shape, Size, Trace, count_parameters, recipe

Progress = Callable[[int, dict[str, float] | None], None]
"""Called as ``progress(steps_done, evaluation or None)`` after every step."""

Trained = tuple[dict[str, Any], dict[str, Tensor]]
"""The record of a run, ready for JSON, and the state of its model."""

# Mean and standard deviation of the pixels of MNIST's training images.
_PIXEL_MEAN, _PIXEL_STD = 0.1307, 0.3081

# Without a graph to keep, larger batches than in training cost no memory and save time.
_EVALUATION_BATCH = 128

# One stream of random numbers for each purpose.
_INIT, _ORDER, _AUGMENT, _DROPOUT, _BLOCKS = range(5)


@dataclass(frozen=True)
class Budget:
    """What every block gets: steps, batches, and the optimizer.

    Attributes:
        steps: optimizer steps.
        batch_size: examples a step.
        learning_rate: the peak, after a linear warm-up; a cosine leads from there to zero.
        warmup: share of the steps that warm up.
        weight_decay: of the matrices; vectors and scalars are not decayed.
        clip: largest norm of the gradient.
        evaluations: how many times the validation side is evaluated on the way, evenly spaced.
        shift: images are moved by up to so many pixels along each axis in training.
        label_smoothing: of the training loss.
    """

    steps: int
    batch_size: int
    learning_rate: float
    warmup: float = 0.1
    weight_decay: float = 0.05
    clip: float = 1.0
    evaluations: int = 12
    shift: int = 0
    label_smoothing: float = 0.0

    def evaluate_at(self) -> set[int]:
        """The steps after which the validation side is evaluated."""
        return {round(self.steps * (i + 1) / self.evaluations) for i in range(self.evaluations)}


@dataclass(frozen=True)
class Job:
    """One run: a block on a data set with a seed. It satisfies :class:`simulations.runs.Job`."""

    task: str
    block: str
    seed: int
    shape: Shape
    size: Size
    budget: Budget
    threads: int = 1

    @property
    def label(self) -> str:
        """The name of the block."""
        return self.block

    @property
    def recipe(self) -> str:
        """The source of the block's factory."""
        return recipe(self.block)

    def settings(self) -> dict[str, Any]:
        """The job as plain numbers and strings; threads are left out: they change no outcome."""
        settings = asdict(self)
        del settings["threads"]
        return settings

    def initial(self, dataset: Dataset) -> Classifier:
        """The classifier before training."""
        generator = generator_for(self.seed, _INIT)
        return Classifier.build(self.block, self.shape, self.size, dataset, generator)

    def train(self, dataset: Dataset, progress: Progress) -> Trained:
        """Train one classifier; select the step by the validation accuracy; test that one once.

        The median time of a step is reported, since other programs on the machine only ever add
        to it.

        Raises:
            DivergedError: if the loss is no longer finite.
        """
        # Dropout inside a block draws from the global state, which is put back.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_for(self.seed, _BLOCKS).initial_seed())
            return _train(self, dataset, progress)


class DivergedError(RuntimeError):
    """The loss of a run is no longer a finite number."""


def generator_for(seed: int, purpose: int) -> torch.Generator:
    """An independent stream of random numbers for each seed and purpose."""
    state = np.random.SeedSequence([seed, purpose]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


# Batches ----------------------------------------------------------------------------------------


def bucketed_order(
    lengths: NDArray[np.int64], batch_size: int, generator: torch.Generator, pool: int = 16
) -> list[NDArray[np.int64]]:
    """Indices of the batches of one epoch, each of examples of similar length.

    The examples are shuffled, ``pool`` batches of them at a time are sorted by length and cut, and
    the batches are shuffled. An incomplete last batch is left out; its examples, the longest of
    their pool, differ from epoch to epoch.
    """
    order = torch.randperm(len(lengths), generator=generator).numpy()
    batches: list[NDArray[np.int64]] = []
    for start in range(0, len(order), pool * batch_size):
        chunk = order[start : start + pool * batch_size]
        chunk = chunk[np.argsort(lengths[chunk], kind="stable")]
        batches += [
            chunk[i : i + batch_size] for i in range(0, len(chunk) - batch_size + 1, batch_size)
        ]
    if not batches:
        return [order]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def make_batch(
    examples: Examples, chosen: NDArray[np.int64], tokens: bool, shifts: Tensor | None = None
) -> Batch:
    """Tensors of the chosen examples; texts are cut to the longest of them."""
    labels = torch.from_numpy(examples.labels[chosen])
    if tokens:
        lengths = torch.from_numpy(examples.lengths[chosen])
        longest = int(lengths.max())
        inputs = torch.from_numpy(examples.inputs[chosen, :longest]).long()
        absent = torch.arange(longest) >= lengths[:, None]
        return Batch(inputs, absent if bool(absent.any()) else None, labels)
    images = torch.from_numpy(examples.inputs[chosen]).float() / 255.0
    if shifts is not None:
        images = shifted(images, shifts)
    return Batch((images - _PIXEL_MEAN) / _PIXEL_STD, None, labels)


def shifted(images: Tensor, shifts: Tensor) -> Tensor:
    """Images ``(B, H, W)`` moved by ``shifts`` ``(B, 2)`` pixels (down, right), zeros coming in."""
    margin = int(shifts.abs().max())
    height, width = images.shape[1:]
    padded = F.pad(images, (margin, margin, margin, margin))
    rows = torch.arange(height) + margin - shifts[:, :1]
    columns = torch.arange(width) + margin - shifts[:, 1:]
    return padded[torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]


def training_batches(dataset: Dataset, budget: Budget, seed: int) -> Iterator[Batch]:
    """Endless batches of the training side; the sequence depends on seed and budget only."""
    order, augment = generator_for(seed, _ORDER), generator_for(seed, _AUGMENT)
    tokens = dataset.vectors is not None
    while True:
        for chosen in bucketed_order(dataset.train.lengths, budget.batch_size, order):
            shifts = None
            if budget.shift and not tokens:
                size = (len(chosen), 2)
                shifts = torch.randint(-budget.shift, budget.shift + 1, size, generator=augment)
            yield make_batch(dataset.train, chosen, tokens, shifts)


def evaluation_batches(dataset: Dataset, examples: Examples) -> Iterator[Batch]:
    """All examples once, in order of length."""
    order = np.argsort(examples.lengths, kind="stable")
    for start in range(0, len(order), _EVALUATION_BATCH):
        chosen = order[start : start + _EVALUATION_BATCH]
        yield make_batch(examples, chosen, dataset.vectors is not None)


# Training ---------------------------------------------------------------------------------------


def learning_rate_factor(step: int, steps: int, warmup: float) -> float:
    """Share of the peak learning rate at a step (from 0): linear warm-up, then a cosine to zero."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def make_optimizer(model: nn.Module, budget: Budget) -> torch.optim.AdamW:
    """AdamW that decays matrices only: gains, biases, temperatures have a meaningful scale."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": budget.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=budget.learning_rate)


def evaluate(model: Classifier, dataset: Dataset, examples: Examples) -> dict[str, float]:
    """Mean cross-entropy (nats) and accuracy over one side of the split."""
    loss, hits = 0.0, 0
    model.eval()
    with torch.no_grad():
        for batch in evaluation_batches(dataset, examples):
            logits = model(batch)
            loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
            hits += int((logits.argmax(dim=-1) == batch.labels).sum())
    return {"loss": loss / len(examples), "accuracy": hits / len(examples)}


def examine(model: Classifier, dataset: Dataset, examples: Examples) -> dict[str, Any]:
    """Test numbers together with what the blocks report along depth.

    Energies and free energies are totals of a system; they are divided by the number of its tokens
    and averaged over the examples. An entry that no block defines is None.
    """
    loss, hits = 0.0, 0
    ranks: list[Tensor] = []
    collected: list[list[dict[str, Tensor]]] = []
    model.eval()
    with torch.no_grad():
        for batch in evaluation_batches(dataset, examples):
            trace = model.trace(batch)
            loss += float(F.cross_entropy(trace.logits, batch.labels, reduction="sum"))
            hits += int((trace.logits.argmax(dim=-1) == batch.labels).sum())
            ranks.append(trace.rank)
            collected.append(_reported(trace, batch))
    layers = [
        {name: torch.cat([entry[name] for entry in entries], dim=-1) for name in entries[0]}
        for entries in zip(*collected, strict=True)
    ]
    solved = [layer for layer in layers if "residual" in layer]
    worst = max((float(layer["residual"].max()) for layer in solved), default=math.nan)
    return {
        "loss": loss / len(examples),
        "accuracy": hits / len(examples),
        "examples": len(examples),
        "iterations_mean": _mean([layer["iterations"].double().mean() for layer in solved]),
        "iterations_max": max((int(layer["iterations"].max()) for layer in solved), default=None),
        "residual_worst": worst if math.isfinite(worst) else None,
        "converged": _mean([layer["converged"].double().mean() for layer in solved]),
        "depth": {
            "rank": torch.cat(ranks, dim=-1).double().mean(dim=-1).tolist(),
            "free_energy": _along_depth(layers, "free_energy"),
            "energy_before": _along_depth(layers, "energy_before"),
            "energy_after": _along_depth(layers, "energy_after"),
        },
    }


def _reported(trace: Trace, batch: Batch) -> list[dict[str, Tensor]]:
    """Per layer, the fields of the report that exist, with the examples along the last axis."""
    count = len(batch.labels)
    if batch.absent is None:
        tokens = torch.full((count,), float(trace.tokens))
    else:
        tokens = (~batch.absent).sum(dim=1).float()
    layers = []
    for report in trace.reports:
        entry: dict[str, Tensor] = {}
        if report.residual is not None:
            entry["residual"] = report.residual.flatten()
        if report.iterations is not None:
            entry["iterations"] = report.iterations.flatten()
        if report.converged is not None:
            entry["converged"] = report.converged.flatten()
        if report.free_energy is not None:
            entry["free_energy"] = report.free_energy.reshape(count, -1).sum(dim=-1) / tokens
        if report.energy_before is not None and report.energy_after is not None:
            entry["energy_before"] = report.energy_before.reshape(-1, count)[0] / tokens
            entry["energy_after"] = report.energy_after.reshape(-1, count)[-1] / tokens
        layers.append(entry)
    return layers


def _mean(values: list[Tensor]) -> float | None:
    return float(torch.stack(values).mean()) if values else None


def _along_depth(layers: list[dict[str, Tensor]], name: str) -> list[float] | None:
    if not all(name in layer for layer in layers):
        return None
    return [float(layer[name].double().mean()) for layer in layers]


def optimize(
    model: nn.Module,
    budget: Budget,
    batches: Iterator[Batch],
    logits: Callable[[Batch], Tensor],
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[int, float, float]]:
    """Take the steps of a budget; yields ``(steps done, loss, seconds)`` after each.

    The time of a step is the time of its forward pass, backward pass and update; drawing the batch
    is left out, and what is done between two steps.

    Raises:
        DivergedError: if the loss is no longer finite.
    """
    optimizer = make_optimizer(model, budget)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, budget.steps, budget.warmup)
    )
    for step in range(1, budget.steps + 1):
        batch = next(batches)
        model.train()
        start = clock()
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(batch), batch.labels, label_smoothing=budget.label_smoothing)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), budget.clip)
        optimizer.step()
        schedule.step()
        value = float(loss.detach())
        seconds = clock() - start
        if not math.isfinite(value):
            raise DivergedError(
                f"the loss is {value} at step {step}: lower the learning rate "
                f"({budget.learning_rate})"
            )
        yield step, value, seconds


def _train(job: Job, dataset: Dataset, progress: Progress) -> Trained:
    torch.set_num_threads(job.threads)
    budget = job.budget
    model = job.initial(dataset)
    dropout = generator_for(job.seed, _DROPOUT)
    batches = training_batches(dataset, budget, job.seed)

    curve: list[dict[str, float]] = []
    durations: list[float] = []
    losses: list[float] = []
    best: dict[str, Tensor] = {}
    best_point: dict[str, float] = {}
    memory = PeakMemory()
    for step, loss, seconds in optimize(model, budget, batches, lambda b: model(b, dropout)):
        durations.append(seconds)
        losses.append(loss)
        point = None
        if step in budget.evaluate_at():
            validation = evaluate(model, dataset, dataset.validation)
            point = {
                "step": step,
                "seconds": sum(durations),
                "train_loss": statistics.fmean(losses),
                "validation_loss": validation["loss"],
                "validation_accuracy": validation["accuracy"],
            }
            losses.clear()
            curve.append(point)
            if not best_point or _better(point, best_point):
                best_point = point
                best = {name: value.clone() for name, value in model.state_dict().items()}
        progress(step, point)
    peak = memory.read()

    model.load_state_dict(best)
    record = {
        "job": job.settings(),
        "parameters": count_parameters(model),
        "curve": curve,
        "selected": best_point,
        "test": examine(model, dataset, dataset.test),
        "ms_per_step": 1e3 * float(np.median(durations)),
        "train_seconds": sum(durations),
        "peak_memory_mib": peak,
        "threads": job.threads,
    }
    return record, best


def _better(point: dict[str, float], than: dict[str, float]) -> bool:
    """Higher validation accuracy, and at equal accuracy the lower loss."""
    return (point["validation_accuracy"], -point["validation_loss"]) > (
        than["validation_accuracy"],
        -than["validation_loss"],
    )
