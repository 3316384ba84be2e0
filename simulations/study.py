"""What a study is, and the list of them.

To add one, write a module with a class that satisfies :class:`Study` and an instance of it named
``STUDY``, and add a line to :data:`STUDIES`.
"""

from __future__ import annotations

import argparse
import importlib
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
}


def get_study(name: str) -> Study:
    """The study of that name."""
    if name not in STUDIES:
        raise ValueError(f"there is no study {name!r}{nearest(name, tuple(STUDIES))}")
    study: Study = importlib.import_module(STUDIES[name]).STUDY
    return study
