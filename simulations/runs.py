"""Many runs: which are done already, the rest a few at a time, each in a process of its own.

A process of its own gives every run the same start, one thread count, and a peak memory that no
earlier run has blurred. A finished run is written to disk at once, under a name that holds a hash
of all that decides its outcome, so that an interrupted study goes on where it stopped.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

import spinformer
from simulations.data import Dataset
from simulations.training import Budget, DivergedError, Progress, Trained

_REPORT_EVERY = 0.2  # seconds between two messages of a worker


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` only when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write JSON that is there as a whole or not at all; a number that is not finite is refused."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write lines that are there as a whole or not at all."""
    with replaced(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


class Job(Protocol):
    """One run and all that decides its outcome; equal jobs are one run. It must go by pickle."""

    @property
    def task(self) -> str:
        """The name of its data set."""

    @property
    def label(self) -> str:
        """The name of what is trained."""

    @property
    def seed(self) -> int:
        """Of every random choice."""

    @property
    def budget(self) -> Budget:
        """Its steps, and how they are taken."""

    @property
    def recipe(self) -> str:
        """What the label stands for, as text: a run counts no longer when that has changed."""

    def settings(self) -> dict[str, Any]:
        """All else that decides the outcome, as plain numbers and strings."""

    def train(self, dataset: Dataset, progress: Progress) -> Trained:
        """Do it; a :class:`DivergedError` ends this run and no other.

        The record has ``record["test"]["accuracy"]`` and ``record["ms_per_step"]``, and an
        evaluation that is passed to ``progress`` has ``"validation_accuracy"``.
        """


@functools.lru_cache(maxsize=1)
def _code() -> str:
    """Hash of the library's and the studies' sources: after an edit, earlier runs don't count."""
    digest = hashlib.sha256()
    for package in (Path(spinformer.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


class RunStore:
    """The finished runs of a study in a directory: ``runs/NAME.json`` and ``runs/NAME.pt``.

    Args:
        out: the study's directory.
        datasets: the data of each task.
    """

    def __init__(self, out: Path, datasets: Mapping[str, Dataset]) -> None:
        self.directory = out / "runs"
        self.datasets = datasets

    def identity(self, job: Job) -> dict[str, Any]:
        """All that decides a run's outcome; two jobs with equal identities are one run."""
        return {
            "code": _code(),
            "torch": torch.__version__,
            "job": job.settings(),
            "recipe": job.recipe,
            "sources": self.datasets[job.task].sources,
        }

    def name(self, job: Job) -> str:
        """File name of a run, without ending."""
        text = json.dumps(self.identity(job), sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{job.task}-{job.label}-seed{job.seed}-{key}"

    def state_path(self, job: Job) -> Path:
        """Where the trained parameters of a run lie."""
        return self.directory / f"{self.name(job)}.pt"

    def load(self, job: Job) -> dict[str, Any] | None:
        """The record of a finished run, or None."""
        path = self.directory / f"{self.name(job)}.json"
        if not path.is_file() or not self.state_path(job).is_file():
            return None
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return record

    def save(self, job: Job, record: dict[str, Any]) -> None:
        """Keep the record of a run whose state is saved already: this is what makes it finished."""
        write_json(self.directory / f"{self.name(job)}.json", record)


def save_state(path: Path, state: Mapping[str, Tensor]) -> None:
    """``torch.save`` that leaves a whole file or none."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    with replaced(path) as partial:
        partial.write_bytes(buffer.getvalue())


@dataclass
class Outcome:
    """What came of a list of jobs.

    Attributes:
        jobs: the list.
        done: the records of the finished jobs, those found on disk included.
        failures: ``(job, reason)`` of the jobs that did not finish by a fault of their own.
        interrupted: True if the user stopped the study before all jobs were done.
    """

    jobs: Sequence[Job]
    done: dict[Job, dict[str, Any]] = field(default_factory=dict)
    failures: list[tuple[Job, str]] = field(default_factory=list)
    interrupted: bool = False

    @property
    def records(self) -> list[dict[str, Any]]:
        """Those of the finished jobs, in the order of the list."""
        return [self.done[job] for job in self.jobs if job in self.done]

    def summary(self) -> dict[str, Any]:
        """What ``results.json`` says of the runs as a whole."""
        return {
            "interrupted": self.interrupted,
            "jobs": len(self.jobs),
            "finished": len(self.done),
            "failures": [
                {"task": job.task, "label": job.label, "seed": job.seed, "reason": reason}
                for job, reason in self.failures
            ],
        }

    def status(self) -> int:
        """Exit status of the study; an interrupted one says how it goes on."""
        if self.interrupted:
            print(
                f"interrupted: {len(self.done)} of {len(self.jobs)} runs are done and kept; the "
                "same command goes on with the others"
            )
            return 130
        return 1 if self.failures else 0


def _title(job: Job) -> str:
    """How a run is called on the terminal."""
    return f"{job.task} {job.label} seed {job.seed}"


def run_all(jobs: Sequence[Job], store: RunStore, workers: int, *, fresh: bool) -> Outcome:
    """Do the jobs that are not done, ``workers`` at a time, and return the records of all.

    Args:
        jobs: what to run.
        store: where the data and the finished runs are.
        workers: processes at a time; 0 runs everything in this process, for a debugger (the peak
            memory then means little).
        fresh: do finished runs again.

    A key press of Ctrl-C ends the runs that are under way and returns what is finished.
    """
    outcome = Outcome(jobs)
    for job in jobs:
        record = None if fresh else store.load(job)
        if record is not None:
            outcome.done[job] = record
    if outcome.done:
        print(f"{len(outcome.done)} of {len(jobs)} runs were finished before and are not repeated")
    waiting = [job for job in jobs if job not in outcome.done]

    steps = sum(job.budget.steps for job in waiting)
    with tqdm(total=steps, unit="step", smoothing=0.05, mininterval=0.5) as bar:
        monitor = _Monitor(bar, store, outcome, at_once=max(1, min(workers, len(waiting))))
        try:
            if workers == 0:
                _run_here(waiting, monitor)
            else:
                _run_in_processes(waiting, workers, monitor)
        except KeyboardInterrupt:
            outcome.interrupted = True
    return outcome


@dataclass
class _Monitor:
    """What happens when a run moves on, ends or fails, wherever it runs."""

    bar: tqdm[Any]
    store: RunStore
    outcome: Outcome
    at_once: int
    steps: dict[Job, int] = field(default_factory=dict)

    def moved(self, job: Job, step: int, point: dict[str, float] | None) -> None:
        self.bar.update(step - self.steps.get(job, 0))
        self.steps[job] = step
        if point is not None:
            accuracy = 100 * point["validation_accuracy"]
            self.bar.set_postfix_str(f"{_title(job)}: {accuracy:.1f} % validation")

    def finished(self, job: Job, record: dict[str, Any]) -> None:
        record["at_once"] = self.at_once
        self.store.save(job, record)
        self.outcome.done[job] = record
        accuracy, pace = 100 * record["test"]["accuracy"], record["ms_per_step"]
        self.bar.write(f"{_title(job)}: {accuracy:.2f} % test accuracy, {pace:.1f} ms a step")

    def failed(self, job: Job, reason: str) -> None:
        self.outcome.failures.append((job, reason))
        # The bar counts what is still to come.
        self.bar.total -= job.budget.steps - self.steps.get(job, 0)
        self.bar.write(f"{_title(job)} FAILED: {reason}")


def _run_here(jobs: Sequence[Job], monitor: _Monitor) -> None:
    threads = torch.get_num_threads()
    try:
        for job in jobs:
            try:
                dataset = monitor.store.datasets[job.task]
                record, state = job.train(dataset, functools.partial(monitor.moved, job))
            except DivergedError as error:
                monitor.failed(job, str(error))
            else:
                save_state(monitor.store.state_path(job), state)
                monitor.finished(job, record)
    finally:
        torch.set_num_threads(threads)


def _run_in_processes(jobs: Sequence[Job], workers: int, monitor: _Monitor) -> None:
    context = multiprocessing.get_context("spawn")
    waiting = list(jobs)
    running: dict[Connection, tuple[Job, SpawnProcess]] = {}
    with tempfile.TemporaryDirectory() as directory:
        files = {task: Path(directory) / task for task in {job.task for job in jobs}}
        for task, file in files.items():
            file.write_bytes(pickle.dumps(monitor.store.datasets[task]))
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    job = waiting.pop(0)
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_work,
                        args=(sender, job, files[job.task], monitor.store.state_path(job)),
                        daemon=True,
                    )
                    running[receiver] = (job, process)
                    with _deaf_to_interrupts():
                        process.start()
                    # The child has its own copy; with this one closed, its death ends the pipe.
                    sender.close()
                for ready in wait(list(running)):
                    assert isinstance(ready, Connection)
                    if _listen(ready, *running[ready], monitor):
                        del running[ready]
        finally:
            for connection, (_, process) in running.items():
                process.terminate()
                process.join()
                connection.close()


def _listen(connection: Connection, job: Job, process: SpawnProcess, monitor: _Monitor) -> bool:
    """Handle one message of a worker; True when it was the last."""
    try:
        kind, content = connection.recv()
    except EOFError:
        process.join()
        reason = f"its process ended with exit code {process.exitcode}; the cause stands above"
        monitor.failed(job, reason)
        connection.close()
        return True
    if kind == "moved":
        monitor.moved(job, *content)
        return False
    process.join()
    connection.close()
    if kind == "finished":
        monitor.finished(job, content)
    else:
        monitor.failed(job, content)
    return True


def _work(sender: Connection, job: Job, data: Path, state_path: Path) -> None:
    """The life of a worker process: one run."""
    dataset: Dataset = pickle.loads(data.read_bytes())
    last = time.monotonic()

    def progress(step: int, point: dict[str, float] | None) -> None:
        nonlocal last
        now = time.monotonic()
        if point is not None or now - last >= _REPORT_EVERY:
            last = now
            sender.send(("moved", (step, point)))

    try:
        record, state = job.train(dataset, progress)
    except DivergedError as error:
        sender.send(("failed", str(error)))
    else:
        save_state(state_path, state)
        sender.send(("finished", record))
    sender.close()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Start a process that never hears Ctrl-C, which the terminal sends to all: the parent decides.

    The signal is blocked, which the new process inherits, not ignored: one that comes while a
    process starts waits, and interrupts the parent afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # started with the first process, it would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
