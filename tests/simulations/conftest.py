"""Small files in the formats of the real data, with something in them to learn."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulations.compare import QUICK_PLANS, Compare, Plan
from simulations.models import Shape, Size
from simulations.study import parser_of
from simulations.training import Budget

GOOD = ("fine", "warm", "clever", "moving")
BAD = ("dull", "cold", "silly", "tedious")
NEUTRAL = ("the", "film", "is", "a", "story", ",", ".", "n't")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``reviews``, ``vectors`` and ``digits`` of a few hundred examples."""
    directory = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)

    reviews = directory / "reviews.csv"
    with reviews.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(300):
            label = int(random.integers(2))
            words = [*random.choice(NEUTRAL, random.integers(2, 7)), *random.choice(BAD, 1)]
            if label:
                words[-1] = str(random.choice(GOOD))
            random.shuffle(words)
            writer.writerow([" ".join(words), label])

    vectors = directory / "vectors.txt"
    with vectors.open("w", encoding="utf-8") as file:
        for word in (*GOOD, *BAD, *NEUTRAL):
            tone = 2.0 * ((word in GOOD) - (word in BAD))
            row = [tone, *random.normal(size=5)]
            file.write(f"{word} {' '.join(f'{x:.4f}' for x in row)}\n")

    digits = directory / "digits.csv"
    lines = []
    for _ in range(200):
        label = int(random.integers(10))
        image = random.integers(0, 40, (28, 28))
        # Which rows are bright says which digit it is.
        image[2 * label + 2 : 2 * label + 8, 4:24] += 200
        lines.append(",".join(map(str, [*image.flatten(), label])))
    digits.write_text("\n".join(lines) + "\n", encoding="ascii")
    return {"reviews": reviews, "vectors": vectors, "digits": digits}


@pytest.fixture
def tiny_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets of a fraction of a second in place of those of ``--quick``."""
    shape = Shape(d_model=16, nhead=2, reference=Size(width=32, layers=2), dropout=0.1)
    budget = Budget(steps=6, batch_size=16, learning_rate=3e-3, evaluations=3, shift=1)
    for task in QUICK_PLANS:
        monkeypatch.setitem(QUICK_PLANS, task, Plan(shape, budget))


@pytest.fixture
def compare(files: dict[str, Path], tiny_plans: None) -> Callable[..., int]:
    """``compare(OUT, ...)`` runs ``compare --quick --out OUT ...`` on the small files, in here."""
    study = Compare()

    def run(out: Path, *words: str) -> int:
        own = [part for name, path in files.items() for part in (f"--{name}", str(path))]
        words = ("--quick", "--jobs", "0", "--out", str(out), *own, *words)
        return study.run(parser_of(study).parse_args(words))

    return run


@pytest.fixture
def failing_on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], int]]:
    """``failing_on(JOBS, N, ERROR)``: the N-th training of such jobs (from 1) raises.

    Returns the count of trainings begun.
    """

    def prepare(jobs: type, number: int, error: type[BaseException]) -> Callable[[], int]:
        train = jobs.train
        count = 0

        def wrapped(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                raise error("on purpose")
            return train(*args)

        monkeypatch.setattr(jobs, "train", wrapped)
        return lambda: count

    return prepare
