"""The study of trained couplings: it takes from blocks what they solve, and measures that."""

import argparse
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import simulations.trained_couplings as study
import spinformer as sf
from simulations import fidelity
from simulations.maps import Sampling
from simulations.study import parser_of
from simulations.training import Job
from spinformer.spins.couplings import Dense

TINY = fidelity.Plan(
    coupling=(0.3, 1.0, 3.0),
    field=(0.4, 2.5),
    num_spins=6,
    dims=(16,),
    families=("attention",),
    sampling=lambda dim: Sampling(6, 30, 10),
    steady=lambda dim: Sampling(6, 60, 10),
)


@pytest.fixture(autouse=True)
def tiny_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = study.Plan(2, 1, Sampling(6, 30, 10), Sampling(6, 60, 10), TINY)
    monkeypatch.setattr(study, "QUICK", plan)
    monkeypatch.setattr(study, "FULL", plan)


@pytest.fixture
def trained(files: dict[str, Path]) -> Callable[..., argparse.Namespace]:
    """Options of the study on the small files."""

    def options(out: Path, *words: str) -> argparse.Namespace:
        own = [part for name, path in files.items() for part in (f"--{name}", str(path))]
        return parser_of(study.STUDY).parse_args(["--jobs", "0", "--out", str(out), *own, *words])

    return options


def test_the_command_trains_its_own_models(
    trained: Callable[..., argparse.Namespace],
    tiny_plans: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With --quick and nothing there; then the same models by their directory."""
    monkeypatch.chdir(tmp_path)
    assert study.STUDY.run(trained(tmp_path / "out", "--quick")) == 0
    results = json.loads((tmp_path / "out/results.json").read_text(encoding="utf-8"))
    assert len(results["models"]) == 2 * len(study.BLOCKS)
    # Two tasks, three blocks, two layers, before and after.
    assert len(results["rows"]) == 24
    for name in ("trained_couplings", "loop_strength"):
        assert (tmp_path / f"out/{name}.png").stat().st_size > 20_000
    points = np.load(tmp_path / "out/points.npz")
    # Two inputs and two heads; one system for all heads where they are mixed.
    assert points["digits/mean_field/1/trained/coupling"].shape == (4,)
    assert points["digits/mean_field_mixed/2/initial/block/squared"].shape == (2,)
    printed = capsys.readouterr().out
    assert "sentiment, steepest_descent (SD0), 2" in printed

    found = study.checkpoints(tmp_path / "out/models")
    assert {(job.task, job.block) for job, _ in found} == {
        (task, block) for task in ("sentiment", "digits") for block in study.BLOCKS
    }
    _same_system(found, trained(tmp_path))
    _one_run_a_job(found, tmp_path)


def _same_system(found: list[tuple[Job, Path]], args: argparse.Namespace) -> None:
    """A layer's systems, solved anew, give the block's own output."""
    datasets = study.load(("digits",), args)
    outputs: list[torch.Tensor] = []
    for block in study.BLOCKS:
        job, path = next((j, p) for j, p in found if (j.task, j.block) == ("digits", block))
        model = study.restored(job, path, datasets["digits"])
        batch = study._inputs(datasets["digits"], 2, 0)
        outputs.clear()
        hooks = [
            layer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
            for layer in model.encoder.layers
        ]
        layers = study.posed(model, batch)
        for hook in hooks:
            hook.remove()
        assert len(layers) == job.size.layers
        for layer, output in zip(layers, outputs, strict=True):
            m = layer.magnetization
            if m.ndim == 4:
                m = m.transpose(1, 2).flatten(-2)
            torch.testing.assert_close(m, output)
            solver = sf.SteepestDescent() if block == "steepest_descent" else sf.MeanField()
            again = solver.solve(study._double(layer.system)).magnetization
            # The block stops at a residual of 1e-4.
            torch.testing.assert_close(layer.magnetization.double(), again, atol=3e-3, rtol=0)
        # The watch is taken off again.
        with torch.no_grad():
            model(batch)
        assert len(layers) == job.size.layers
        assert all("solve" not in vars(layer.approximation) for layer in model.encoder.layers)


def _one_run_a_job(found: list[tuple[Job, Path]], directory: Path) -> None:
    """Of two runs of one job the later one; a run without its parameters is none."""
    runs = directory / "copies" / "runs"
    runs.mkdir(parents=True)
    job, path = found[0]
    for name in ("a", "b"):
        shutil.copy(path, runs / f"{name}.pt")
        shutil.copy(path.with_suffix(".json"), runs / f"{name}.json")
    shutil.copy(path.with_suffix(".json"), runs / "c.json")
    stamp = (runs / "a.pt").stat().st_mtime + 10
    os.utime(runs / "a.pt", (stamp, stamp))
    assert study.checkpoints(directory / "copies") == [(job, runs / "a.pt")]


def test_without_models_the_message_says_how_to_train_them(
    trained: Callable[..., argparse.Namespace], tmp_path: Path
) -> None:
    args = trained(tmp_path, "--checkpoints", str(tmp_path / "none"))
    with pytest.raises(study.NoCheckpointsError, match="python -m simulations compare --out"):
        study.STUDY.run(args)


def posed(seed: int, symmetric: bool) -> study.Posed:
    """Two inputs and three heads of five spins, answered by mean field."""
    generator = torch.Generator().manual_seed(seed)
    couplings = torch.rand(2, 3, 5, 5, generator=generator) / 4
    if symmetric:
        couplings = (couplings + couplings.mT) / 2
    field = torch.randn(2, 3, 5, 4, generator=generator)
    mask = torch.tensor([False] * 4 + [True]).expand(2, 3, 5)
    site = sf.LargeDSphere(4) if symmetric else sf.Sphere(4)
    system = sf.SpinSystem(Dense(couplings), field, 1.0, site, mask=mask)
    solver = sf.SteepestDescent() if symmetric else sf.MeanField()
    answer = solver.solve(system)
    return study.Posed(system, answer.magnetization.detach(), answer.converged)


@pytest.mark.parametrize("symmetric", [False, True])
def test_layers_that_are_sampled_together_keep_their_places(symmetric: bool) -> None:
    layers = [posed(1, symmetric), posed(2, symmetric)]
    sampling = Sampling(8, 200, 20)
    plan = dataclasses.replace(study.FULL, equilibrium=sampling, steady=sampling)
    together = study.measure(layers, plan, 0)
    for number, layer in enumerate(layers):
        (alone,) = study.measure([layer], plan, 0)
        found = together[number]
        for name in ("coupling", "field", "loop", "beta", "spins"):
            np.testing.assert_allclose(found[name], alone[name], rtol=1e-6)
        assert found["head"].tolist() == [0, 1, 2, 0, 1, 2]
        assert found["spins"].tolist() == [4] * 6
        both = (found["errors"]["block"], alone["errors"]["block"])
        # Other chains, the same error: within four of the two standard errors together.
        gap = np.abs(both[0].squared - both[1].squared)
        assert (gap < 4 * np.hypot(both[0].noise, both[1].noise)).all()


def test_an_approximation_that_is_off_is_seen_to_be() -> None:
    """Two tenths taken off the answer, which was some per cent too small already."""
    layer = posed(3, symmetric=True)
    sampling = Sampling(8, 300, 20)
    plan = dataclasses.replace(study.FULL, equilibrium=sampling)
    wrong = dataclasses.replace(layer, magnetization=0.8 * layer.magnetization)
    (found,) = study.measure([layer], plan, 0)
    (off,) = study.measure([wrong], plan, 0)
    assert (off["errors"]["block"].size > 0.15).all()
    exact = study.typical(found["errors"]["SD1"])
    assert exact is not None
    error, resolution = exact
    assert error < 0.05
    assert resolution < 0.05
