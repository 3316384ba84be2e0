from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from simulations.__main__ import main
from simulations.models import BLOCKS, Classifier, Shape, Size
from simulations.runs import replaced
from simulations.study import STUDIES, get_study
from simulations.training import DivergedError, Job

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ("learning_curves.png", "accuracy_over_time.png", "rank_along_depth.png")


def results_in(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "results.json").read_text())
    return content


def test_from_data_to_figures(
    compare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path, "--seeds", "2") == 0
    results = results_in(tmp_path)
    assert set(results["tasks"]) == {"sentiment", "digits"}
    assert results["finished"] == results["jobs"] == 2 * 2 * len(BLOCKS)
    for entry in results["tasks"].values():
        assert set(entry["blocks"]) == set(BLOCKS)
        parameters = [row["parameters"] for row in entry["blocks"].values()]
        plain = entry["blocks"]["plain"]["parameters"]
        assert max(abs(count - plain) for count in parameters) <= 0.05 * plain
        for row in entry["blocks"].values():
            assert row["seeds"] == [0, 1]
            values = row["accuracy"]["values"]
            assert row["accuracy"]["mean"] == pytest.approx(np.mean(values))
            assert row["accuracy"]["std"] == pytest.approx(np.std(values, ddof=1))
        # What a block defines, it reports.
        assert entry["blocks"]["plain"]["residual_worst"] is None
        assert entry["blocks"]["steepest_descent"]["residual_worst"] is not None
    table = capsys.readouterr().out
    assert "over plain" in table
    assert (tmp_path / "table.txt").read_text().strip() in table
    for name in (*FIGURES, "energy_along_depth.png"):
        pixels = imread(tmp_path / name)
        assert pixels.shape[1] > 800
        assert pixels.std() > 0.05
    assert not list(tmp_path.rglob(".*")), "partial files are left over"


def test_finished_runs_are_not_repeated(
    compare: Callable[..., int],
    files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[tuple[str, int]] = []
    train = Job.train

    def counted(job: Job, *rest: Any) -> Any:
        calls.append((job.block, job.seed))
        return train(job, *rest)

    monkeypatch.setattr(Job, "train", counted)
    common = ("--task", "digits", "--blocks", "plain")
    compare(tmp_path, *common)
    compare(tmp_path, *common, "energy_descent")
    assert calls == [("plain", 0), ("energy_descent", 0)]
    assert "1 of 2 runs were finished before" in capsys.readouterr().out
    compare(tmp_path, *common, "--seeds", "2")
    assert calls[2:] == [("plain", 1)]
    compare(tmp_path, *common, "--fresh")
    assert calls[3:] == [("plain", 0)]
    # Other data: another run.
    other = tmp_path / "other.csv"
    other.write_text("\n".join(files["digits"].read_text().splitlines()[:150]))
    compare(tmp_path, *common, "--digits", str(other))
    assert calls[4:] == [("plain", 0)]


def test_a_changed_factory_is_another_run(
    compare: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--task", "digits", "--blocks", "plain")
    compare(tmp_path, *words)
    plain = BLOCKS["plain"]

    def changed(d_model: int, nhead: int, width: int, num_spins: int) -> torch.nn.Module:
        return plain(d_model, nhead, width, num_spins)

    monkeypatch.setitem(BLOCKS, "plain", changed)
    compare(tmp_path, *words)
    assert len(list((tmp_path / "runs").glob("*.json"))) == 2


def test_saved_state_loads(compare: Callable[..., int], tmp_path: Path) -> None:
    compare(tmp_path, "--task", "digits", "--blocks", "plain")
    (record,) = results_in(tmp_path)["runs"]
    (path,) = (tmp_path / "runs").glob("*.pt")
    state = torch.load(path, weights_only=True)
    shape = dict(record["job"]["shape"])
    shape["reference"] = Size(**shape["reference"])
    model = Classifier("plain", Shape(**shape), Size(**record["job"]["size"]), 10, 16)
    model.load_state_dict(state)


def test_interrupt_keeps_what_is_done(
    compare: Callable[..., int],
    failing_on: Callable[..., Callable[[], int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    count = failing_on(Job, 2, KeyboardInterrupt)
    words = ("--task", "digits", "--blocks", "plain", "energy_descent")
    assert compare(tmp_path, *words) == 130
    assert "1 of 2 runs are done and kept" in capsys.readouterr().out
    results = results_in(tmp_path)
    assert results["interrupted"]
    assert list(results["tasks"]["digits"]["blocks"]) == ["plain"]
    for name in FIGURES:
        assert (tmp_path / name).is_file()
    assert compare(tmp_path, *words) == 0
    assert count() == 3


def test_interrupt_before_anything_is_done(
    compare: Callable[..., int], failing_on: Callable[..., Callable[[], int]], tmp_path: Path
) -> None:
    failing_on(Job, 1, KeyboardInterrupt)
    assert compare(tmp_path, "--task", "digits", "--blocks", "plain") == 130
    assert results_in(tmp_path)["tasks"] == {}


def test_a_failed_run_stops_no_other(
    compare: Callable[..., int], failing_on: Callable[..., Callable[[], int]], tmp_path: Path
) -> None:
    failing_on(Job, 1, DivergedError)
    words = ("--task", "digits", "--blocks", "plain", "energy_descent")
    assert compare(tmp_path, *words) == 1
    results = results_in(tmp_path)
    assert [failure["label"] for failure in results["failures"]] == ["plain"]
    assert list(results["tasks"]["digits"]["blocks"]) == ["energy_descent"]


def test_a_process_of_its_own_gives_the_same_run(
    compare: Callable[..., int], tmp_path: Path
) -> None:
    words = ("--task", "digits", "--blocks", "plain")
    compare(tmp_path / "here", *words)
    compare(tmp_path / "there", *words, "--jobs", "1")
    here, there = (results_in(tmp_path / name)["runs"][0] for name in ("here", "there"))
    assert here["test"] == there["test"]
    assert there["at_once"] == there["threads"] == 1


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with replaced(path) as partial:
            partial.write_text("half")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_list_and_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(STUDIES)
    for name in STUDIES:
        assert get_study(name).name == name
    with pytest.raises(SystemExit) as caught:
        main(["comprae"])
    assert caught.value.code == 2
    assert "the nearest is 'compare'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
    assert "name a study" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--blocks", "plane"], "invalid choice: 'plane'"),
        (["--seeds", "0"], "0 is not at least 1"),
        (["--jobs", "-1"], "-1 is negative"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compare", *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_data_ends_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--task", "digits", "--digits", str(tmp_path / "none.csv")]
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "none.csv is not a file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals to one process group")
def test_ctrl_c_from_the_terminal(files: dict[str, Path], tmp_path: Path) -> None:
    words = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "simulations",
            "compare",
            "--quick",
            "--seeds",
            "20",
            "--jobs",
            "2",
            "--out",
            str(tmp_path),
            *words,
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Where the tests run in the background the signal is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if list(tmp_path.glob("runs/*.json")):
            break
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert results_in(tmp_path)["interrupted"]
    assert results_in(tmp_path)["finished"] >= 1
