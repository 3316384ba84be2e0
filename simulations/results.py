"""What a study does with what it found, finished or not: numbers, pictures, a table, a status."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

import spinformer as sf
from simulations.runs import write_json

__all__ = ["Interruption", "collect", "conclude", "until_interrupted"]

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


class Interruption:
    """Whether Ctrl-C came."""

    happened = False


@contextmanager
def until_interrupted() -> Iterator[Interruption]:
    """Ctrl-C ends the block, and not the study: what it has by then is written."""
    interruption = Interruption()
    try:
        yield interruption
    except KeyboardInterrupt:
        interruption.happened = True


def collect(
    items: Iterable[_Item], unit: str, measure: Callable[[_Item], _Found]
) -> tuple[list[_Found], Interruption]:
    """Measure one item after the other under a bar; Ctrl-C keeps those that are done."""
    found: list[_Found] = []
    with until_interrupted() as interruption:
        for item in tqdm(list(items), desc=f"{unit}s", unit=unit):
            found.append(measure(item))
    return found, interruption


def conclude(
    name: str,
    args: argparse.Namespace,
    interruption: Interruption,
    content: Mapping[str, Any],
    show: Callable[[dict[str, Any]], tuple[str, Sequence[Path]]] | None,
) -> int:
    """Write ``results.json``, show what is in it, and return the exit status.

    Args:
        name: of the study.
        args: its arguments: ``seed`` and ``out``.
        interruption: whether it was stopped.
        content: the numbers.
        show: takes all results, returns a table and the files that it wrote beside them. None if
            there is nothing to show yet.
    """
    results: dict[str, Any] = {
        "study": name,
        "versions": {"spinformer": sf.__version__, "torch": torch.__version__},
        "seed": args.seed,
        "interrupted": interruption.happened,
        **content,
    }
    numbers = args.out / "results.json"
    write_json(numbers, results)
    if show is not None:
        table, files = show(results)
        print(table)
        print(f"\nwrote {', '.join(str(file) for file in (numbers, *files))}")
    return 130 if interruption.happened else 0
