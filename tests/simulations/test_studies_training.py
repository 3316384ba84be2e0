from __future__ import annotations

import itertools
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from simulations import training
from simulations.data import Dataset, load_digits, load_sentiment
from simulations.models import Classifier, Shape, Size
from simulations.training import (
    Budget,
    DivergedError,
    Job,
    bucketed_order,
    generator_for,
    learning_rate_factor,
    shifted,
    training_batches,
)

SHAPE = Shape(d_model=16, nhead=2, reference=Size(width=32, layers=1), dropout=0.1)
BUDGET = Budget(steps=60, batch_size=32, learning_rate=5e-3, evaluations=4, shift=1)


@pytest.fixture(scope="module")
def sentiment(files: dict[str, Path]) -> Dataset:
    return load_sentiment(files["reviews"], files["vectors"], max_length=12)


@pytest.fixture(scope="module")
def digits(files: dict[str, Path]) -> Dataset:
    return load_digits(files["digits"])


@pytest.fixture(autouse=True)
def _keep_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def job(task: str, seed: int = 0, budget: Budget = BUDGET) -> Job:
    return Job(task, "plain", seed, SHAPE, SHAPE.reference, budget)


def silent(step: int, point: dict[str, float] | None) -> None:
    pass


@pytest.mark.parametrize(("task", "chance"), [("sentiment", 0.5), ("digits", 0.1)])
def test_training_learns(task: str, chance: float, request: pytest.FixtureRequest) -> None:
    record, _ = job(task).train(request.getfixturevalue(task), silent)
    assert record["test"]["accuracy"] > chance + 0.2
    assert [point["step"] for point in record["curve"]] == [15, 30, 45, 60]
    assert record["selected"]["validation_accuracy"] == max(
        point["validation_accuracy"] for point in record["curve"]
    )


def test_same_seed_same_run_and_other_seed_other_run(digits: Dataset) -> None:
    short = Budget(steps=5, batch_size=16, learning_rate=1e-3, evaluations=1, shift=1)
    torch.manual_seed(0)
    first, state = job("digits", 0, short).train(digits, silent)
    torch.manual_seed(1)  # the global state plays no part
    second, _ = job("digits", 0, short).train(digits, silent)
    other, _ = job("digits", 1, short).train(digits, silent)
    for record in (first, second, other):
        for point in record["curve"]:
            del point["seconds"]
    assert first["curve"] == second["curve"]
    assert first["test"] == second["test"]
    assert first["curve"] != other["curve"]
    # The saved state is the model that was tested.
    model = job("digits", 9).initial(digits)
    model.load_state_dict(state)
    result = training.evaluate(model, digits, digits.test)
    assert result["accuracy"] == first["test"]["accuracy"]


def test_batches_do_not_depend_on_the_block(sentiment: Dataset) -> None:
    a, b = (training_batches(sentiment, BUDGET, seed=4) for _ in range(2))
    for _ in range(12):
        assert torch.equal(next(a).inputs, next(b).inputs)


def test_bucketed_order_covers_an_epoch_in_batches_of_like_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 1000)
    batches = bucketed_order(lengths, 10, torch.Generator().manual_seed(0))
    chosen = np.concatenate(batches)
    assert len(batches) == 100
    assert sorted(chosen) == list(range(1000))
    padded = sum(lengths[batch].max() * len(batch) for batch in batches)
    # Batches at random pad to 1.8 times the tokens.
    assert padded / lengths.sum() < 1.15


def test_fewer_examples_than_a_batch() -> None:
    batches = bucketed_order(np.array([3, 1, 2]), 10, torch.Generator().manual_seed(0))
    assert [sorted(batch) for batch in batches] == [[0, 1, 2]]


def test_shift_moves_and_fills_with_zeros() -> None:
    images = torch.rand(3, 28, 28)
    moved = shifted(images, torch.tensor([[0, 0], [2, -1], [-1, 2]]))
    assert torch.equal(moved[0], images[0])
    assert torch.equal(moved[1], F.pad(images[1], (0, 1, 2, 0))[:28, 1:])
    assert torch.equal(moved[2], F.pad(images[2], (2, 0, 0, 1))[1:, :28])


def test_learning_rate() -> None:
    factors = [learning_rate_factor(step, 100, 0.1) for step in range(100)]
    np.testing.assert_allclose(factors[:10], np.arange(1, 11) / 10)
    assert max(factors) == 1.0
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))
    assert factors[55] == pytest.approx(0.5)
    # The last step is one step short of the zero of the cosine.
    assert factors[-1] == pytest.approx(0.5 * (1 - math.cos(math.pi / 90)))


def test_only_matrices_decay(digits: Dataset) -> None:
    model = Classifier.build("plain", SHAPE, SHAPE.reference, digits, generator_for(0, 0))
    decayed, free = training.make_optimizer(model, BUDGET).param_groups
    assert decayed["weight_decay"] == BUDGET.weight_decay
    assert free["weight_decay"] == 0.0
    assert all(p.dim() >= 2 for p in decayed["params"])
    assert all(p.dim() < 2 for p in free["params"])


def test_a_loss_that_is_not_finite_is_loud(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Classifier, "classify", lambda self, x, absent: self.head(x.mean(dim=1)) * math.nan
    )
    with pytest.raises(DivergedError, match="the loss is nan at step 1: lower the learn"):
        job("digits").train(digits, silent)


def test_peak_memory_sees_what_was_held_and_freed() -> None:
    """In a fresh process, as it says: what this one has freed before it could use again."""
    code = """
        import numpy as np
        from simulations.measure import PeakMemory
        memory = PeakMemory()
        block = np.ones(64 * 2**20, dtype=np.uint8)  # written to, so that it is resident
        del block
        print(memory.read() if memory.exact else None)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if peak == "None":
        pytest.skip("the system does not tell")
    assert 60 < float(peak) < 96
