"""What every test shares: draws that do not depend on the order of tests, figures off screen."""

import os
import signal
from collections.abc import Iterator

import hypothesis
import matplotlib
import pytest
import torch

matplotlib.use("Agg")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests fill the cores by their number: threads of one would wait for those of another.
    torch.set_num_threads(1)

# Derandomized: a failure is the doing of a change, not of the day. No deadline: the first call of
# an operator pays for its set-up, which says nothing about the property under test.
hypothesis.settings.register_profile("spinformer", deadline=None, derandomize=True)
hypothesis.settings.load_profile("spinformer")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Modules draw their parameters from torch's global generator: each test finds it the same."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A generator of its own for tests that pass one on."""
    return torch.Generator().manual_seed(1)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own answer to Ctrl-C, also where a shell made its background jobs deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
