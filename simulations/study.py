"""What a study is, and the list of them.

To add one, write a module with a class that satisfies :class:`Study` and an instance of it named
``STUDY``, and add a line to :data:`STUDIES`.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Protocol

from spinformer.errors import nearest


class Study(Protocol):
    """A study that ``python -m simulations NAME`` can run."""

    name: str
    description: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the study's own options; ``--quick``, ``--seed`` and ``--out`` are there already."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it, write to ``args.out``, and return the exit status (0 success, 130 interrupted)."""


def parser_of(study: Study, prog: str | None = None) -> argparse.ArgumentParser:
    """The options of a study, its own and those that every one has."""
    parser = argparse.ArgumentParser(prog=prog, description=study.description)
    parser.add_argument("--quick", action="store_true", help="a minute on two cores")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="first seed (default 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results") / study.name,
        metavar="DIR",
        help="where results go (default: %(default)s)",
    )
    study.add_arguments(parser)
    return parser


# By module name, so that one study's needs (figures, data) are not loaded for another, nor in the
# worker processes, which import this package too.
STUDIES: dict[str, str] = {
    "compare": "simulations.compare",
    "accuracy": "simulations.accuracy",
    "phase_diagram": "simulations.phase_diagram",
    "fidelity": "simulations.fidelity",
    "trained_couplings": "simulations.trained_couplings",
    "large_d": "simulations.large_d",
    "landscape": "simulations.landscape",
    "beta_sweep": "simulations.beta_sweep",
    "relaxation": "simulations.relaxation",
    "hysteresis": "simulations.hysteresis",
    "total_derivative": "simulations.total_derivative",
    "boltzmann": "simulations.boltzmann",
    "class_token": "simulations.class_token",
    "aim": "simulations.aim",
    "energy_by_layer": "simulations.energy_by_layer",
    "rank_collapse": "simulations.rank_collapse",
    "path_tasks": "simulations.path_tasks",
}


def get_study(name: str) -> Study:
    """The study of that name."""
    if name not in STUDIES:
        raise ValueError(f"there is no study {name!r}{nearest(name, tuple(STUDIES))}")
    study: Study = importlib.import_module(STUDIES[name]).STUDY
    return study
