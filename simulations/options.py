"""Options that several studies take, so that they read the same in each."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

__all__ = ["add_digits", "add_fresh", "add_jobs", "add_seeds", "add_texts", "natural", "positive"]


def natural(text: str) -> int:
    """A whole number from 0 on."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def positive(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def add_seeds(parser: argparse.ArgumentParser, full: int, quick: int) -> None:
    """``--seeds``, None unless given; the help names the study's own numbers."""
    parser.add_argument(
        "--seeds",
        type=positive,
        metavar="N",
        help=f"seeds S, S+1, ... (default: {full}, with --quick {quick})",
    )


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """``--jobs``."""
    parser.add_argument(
        "--jobs",
        type=natural,
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs at a time, each with one thread (default: %(default)s, the cores; "
        "0: in this process)",
    )


def add_fresh(parser: argparse.ArgumentParser) -> None:
    """``--fresh``, of studies that keep finished runs."""
    parser.add_argument(
        "--fresh", action="store_true", help="do finished runs again instead of reading them"
    )


def add_texts(parser: argparse.ArgumentParser) -> None:
    """``--reviews`` and ``--vectors``."""
    parser.add_argument(
        "--reviews", type=Path, metavar="CSV", help="own texts: columns text, label (0 or 1)"
    )
    parser.add_argument(
        "--vectors", type=Path, metavar="TXT", help="own word vectors, GloVe's text format"
    )


def add_digits(parser: argparse.ArgumentParser) -> None:
    """``--digits``."""
    parser.add_argument(
        "--digits", type=Path, metavar="CSV", help="own images: 784 pixels and a label a line"
    )
