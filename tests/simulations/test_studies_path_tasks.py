"""The study ``path_tasks``: its tasks, what it takes networks apart into, and its commands."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from simulations import path_tasks as study
from simulations import path_tasks_circle as circle
from simulations.data import DataError, load_sentiment
from simulations.study import parser_of
from spinformer.diagnostics import attention_layers
from spinformer.nn.masks import Masks

TINY = study.Plan(
    counts=(150, 30, 40),
    snippets=8,
    length=3,
    depth=2,
    depths=(3,),
    width=dict.fromkeys(study.TASKS, 8),
    budget=study._budgets(10, 10, 10),
    seeds=1,
    circle=circle.Plan({0.0: (8,), 0.1: (8,)}, moments=(2, 4), rollout=20),
)


@pytest.fixture(autouse=True)
def tiny_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "QUICK", TINY)


@pytest.fixture
def options(files: dict[str, Path]) -> Callable[..., argparse.Namespace]:
    def parse(out: Path, *words: str) -> argparse.Namespace:
        own = ["--reviews", str(files["reviews"]), "--vectors", str(files["vectors"])]
        words = ("--quick", "--jobs", "0", "--out", str(out), *own, *words)
        return parser_of(study.STUDY).parse_args(words)

    return parse


def untrained(model: str, task: str = "sort", depth: int = 3) -> tuple[study.TokenModel, Any]:
    torch.manual_seed(0)
    dataset = study.sequences(task, (60, 10, 20), 0)
    return study.TokenModel(dataset, model, 12, 2, depth).double().eval(), dataset


def tokens(model: study.TokenModel, dataset: Any) -> torch.Tensor:
    with torch.no_grad():
        inputs = torch.from_numpy(dataset.test.inputs)
        return model.embed(inputs.double() if inputs.is_floating_point() else inputs)


# --- tasks --------------------------------------------------------------------------------------


def test_corners_of_the_hull() -> None:
    """Against the definition: a corner is no convex combination, so a direction singles it out."""
    random = np.random.default_rng(0)
    points = random.normal(size=(40, 8, 2))
    angle = np.linspace(0, 2 * np.pi, 20_000, endpoint=False)
    directions = np.stack([np.cos(angle), np.sin(angle)])
    expected = np.zeros((40, 8), bool)
    for row, corners in zip(points @ directions, expected, strict=True):
        corners[np.unique(row.argmax(0))] = True
    # 0.3 mrad between directions: no corner of 40 random hulls is as blunt.
    np.testing.assert_array_equal(study.on_hull(points), expected)


def test_known_hull() -> None:
    square = np.array([[[0.0, 0], [1, 0], [1, 1], [0, 1], [0.5, 0.6], [0.2, 0.5]]])
    np.testing.assert_array_equal(study.on_hull(square), [[1, 1, 1, 1, 0, 0]])


def test_sequences() -> None:
    sort = study.sequences("sort", (50, 5, 5), 3)
    for inputs, labels in zip(sort.train.inputs, sort.train.labels, strict=True):
        assert sorted(inputs.tolist()) == labels.tolist()
    again = study.sequences("sort", (50, 5, 5), 3)
    np.testing.assert_array_equal(sort.test.inputs, again.test.inputs)
    assert (study.sequences("sort", (50, 5, 5), 4).train.inputs != sort.train.inputs).any()
    hull = study.sequences("hull", (2000, 5, 5), 0)
    corners = hull.train.labels.sum(1)
    assert corners.min() >= 3
    assert corners.max() <= 10
    # Variance 1 of the points within a square: 36,000 degrees of freedom.
    assert hull.train.inputs.var(axis=1, ddof=1).mean() == pytest.approx(1.0, abs=0.03)


def test_labels_to_memorize(files: dict[str, Path]) -> None:
    texts = load_sentiment(files["reviews"], files["vectors"], max_length=3)
    dataset = study.snippets(texts, 20, 3)
    assert dataset.train.inputs.shape == (20, 3)
    assert (dataset.train.inputs != 0).all()
    first, second = (study.random_labels(dataset, seed).train.labels for seed in (0, 1))
    assert set(np.unique(first)) == {0, 1}
    assert (first != second).any()
    with pytest.raises(DataError, match="texts of 3 tokens; 10000 are needed"):
        study.snippets(texts, 10_000, 3)


def test_baselines() -> None:
    dataset = study.sequences("sort", (20_000, 5, 2000), 0)
    # The most frequent k-th smallest of 8 digits, exactly, by counting.
    share = []
    for k in range(8):
        below = [_at_least(8, k + 1, (v + 1) / 10) - _at_least(8, k + 1, v / 10) for v in range(10)]
        share.append(max(below))
    # 16,000 labels: standard error below 0.004, four of them.
    assert study.baseline(dataset, 2000) == pytest.approx(np.mean(share), abs=0.016)


def _at_least(count: int, successes: int, p: float) -> float:
    return sum(
        len(list(itertools.combinations(range(count), k))) * p**k * (1 - p) ** (count - k)
        for k in range(successes, count + 1)
    )


# --- networks and their paths -------------------------------------------------------------------


@pytest.mark.parametrize("model", ["attention", "transformer"])
def test_paths_sum_to_the_model(model: str) -> None:
    network, dataset = untrained(model)
    x = tokens(network, dataset)
    with torch.no_grad():
        out = x
        for layer in network.layers:
            out = layer(out)
        sums = study.decompose(network, x).by_length()
    # No norm, MLP or projection has a bias: nothing is left over.
    torch.testing.assert_close(sums.sum(0), out, rtol=1e-10, atol=1e-10)
    assert sums.shape[0] == 4


def test_attention_has_no_mlp() -> None:
    network, dataset = untrained("attention")
    x = tokens(network, dataset)
    layer = network.layers[0]
    with torch.no_grad():
        attended, _ = layer.self_attn(layer.norm1(x), Masks(), True)
        torch.testing.assert_close(layer(x), x + attended, rtol=1e-12, atol=1e-12)
    # Training must not bring one back.
    assert not any(p.requires_grad for p in layer.mlp.parameters())


def test_walk_is_the_path_where_nothing_came_before() -> None:
    """With skips up to some layer, the tokens that it sees are the input in both measures."""
    network, dataset = untrained("attention")
    x = tokens(network, dataset)
    layers = attention_layers(network.layers)
    with torch.no_grad():
        paths = study.decompose(network, x)
        first, later = (1, None, None), (None, 1, None)
        torch.testing.assert_close(study.walk(layers, x, first), paths.output(first))
        alone = study.TokenModel.__new__(study.TokenModel)
        torch.nn.Module.__init__(alone)
        alone.layers = network.layers[1:2]
        other = study.decompose(alone, x).output((1,))
        torch.testing.assert_close(study.walk(layers, x, later), other)
        # The model's own attention there is that of tokens which the first layer has changed.
        assert (paths.output(later) - other).abs().max() > 1e-3


@pytest.mark.parametrize("model", list(study.MODELS))
def test_couplings_off(model: str) -> None:
    """Where all are off, no token hears another; where none is, the model is itself."""
    network, dataset = untrained(model)
    inputs = torch.from_numpy(dataset.test.inputs)
    with torch.no_grad():
        changed = inputs.clone()
        changed[:, 3] = (changed[:, 3] + 1) % 10
        off, moved = (network(x, off=(0, 1, 2)) for x in (inputs, changed))
        kept = [0, 1, 2, 4, 5, 6, 7]
        torch.testing.assert_close(off[:, kept], moved[:, kept], rtol=0, atol=0)
        assert (network(inputs)[:, kept] - network(changed)[:, kept]).abs().max() > 1e-4
        assert (network(inputs, off=(1,)) - network(inputs)).abs().max() > 1e-4


def test_refit_finds_what_is_there() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, 6, generator=generator)
    labels = (x[..., 0] > 0).long()
    assert study.refit((x[:150], labels[:150]), (x[150:], labels[150:]), 2) > 0.95
    coin = torch.randint(2, labels.shape, generator=generator)
    # 150 tosses: standard deviation 0.041, four of them.
    assert abs(study.refit((x[:150], coin[:150]), (x[150:], coin[150:]), 2) - 0.5) < 0.17


# --- the circle ---------------------------------------------------------------------------------


def test_arcs() -> None:
    start, target = circle.arcs()
    torch.testing.assert_close(start.norm(dim=-1), torch.full((500, 2), circle.RADIUS))
    torch.testing.assert_close(start[:, 0], -start[:, 1])
    angle = torch.atan2(target[..., 1], target[..., 0]) - torch.atan2(start[..., 1], start[..., 0])
    turn = 2 * torch.pi / circle.POINTS
    expected = torch.full((500, 2), turn)
    # float32 angles of size pi.
    torch.testing.assert_close(
        torch.remainder(angle + 1, 2 * torch.pi) - 1, expected, atol=2e-6, rtol=0
    )


def test_attention_pulls_together() -> None:
    """Uniform attention makes the two points one in one step, whatever the rest."""
    torch.manual_seed(0)
    model = circle.CircleModel("mlp", 8)
    with torch.no_grad():
        model.layer.attention.in_proj.weight[:8] = 0.0
        path = circle.roll(model, 3)
    assert path.shape == (4, 2, 2)
    # Rounding of numbers of order one.
    assert (path[1:, 0] - path[1:, 1]).abs().max() < 1e-6
    assert (path[0, 0] - path[0, 1]).norm() == pytest.approx(2 * circle.RADIUS)


def test_growth_of_the_middle() -> None:
    """Of a linear model it is the norm of its matrix; of the difference alone it knows nothing."""
    torch.manual_seed(0)
    model = circle.CircleModel("mlp", 8)
    model.layer = torch.nn.Identity()
    matrix = model.leave.weight @ model.enter.weight
    expected = float(torch.linalg.matrix_norm(matrix, ord=2).detach())
    # A product of two float32 matrices of eight channels.
    assert circle.middle_growth(model) == pytest.approx(expected, rel=1e-5)

    class Difference(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(1, keepdim=True)

    model.layer = Difference()
    assert circle.middle_growth(model) == pytest.approx(0.0, abs=1e-5)


def test_two_spins_exchange() -> None:
    """A spin does not hear itself: without a field two spins take each other's place, no mean."""
    torch.manual_seed(0)
    layer = circle.Fieldless(8)
    x = torch.randn(5, 2, 8)
    with torch.no_grad():
        out = layer(x)
        other = x.clone()
        other[:, 0] = torch.randn(5, 8)
        torch.testing.assert_close(layer(other)[:, 0], out[:, 0])
        assert (layer(other)[:, 1] - out[:, 1]).abs().max() > 1e-3


def test_field_is_what_fieldless_lacks() -> None:
    """With the couplings off, spins in their field are free, and without it they are zero."""
    torch.manual_seed(0)
    layer = circle.Fieldless(8)
    assert layer.block.value is not None
    x = torch.randn(5, 2, 8)
    with torch.no_grad():
        layer.block.value.zero_()
        torch.testing.assert_close(layer(x), torch.zeros_like(x))
        free = layer.block.site.mean(layer.block.log_beta.exp() * x)
        torch.testing.assert_close(layer.block(x), free)


# --- the command --------------------------------------------------------------------------------


def test_everything(
    options: Callable[..., argparse.Namespace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.STUDY.run(options(tmp_path)) == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    kinds = [(run["task"], run["model"], run["depth"]) for run in results["runs"]]
    expected = {(task, model, 2) for task in study.TASKS for model in study.MODELS}
    assert set(kinds) == expected | {("sort", "attention", 3)}
    for run in results["runs"]:
        # The whole model is one point of each of its curves.
        assert run["switches"]["mean"][-1] == pytest.approx(run["test"]["accuracy"])
        if run["model"] == "attention":
            paths = run["paths"]
            assert paths["count"] == ([1, 4, 4] if run["depth"] == 2 else [1, 6, 12, 8])
            assert paths["up_to"][-1] == pytest.approx(run["test"]["accuracy"], abs=0.01)
            assert paths["only"][0] == paths["up_to"][0] == paths["frozen"]["5"][0]
            # Nothing but its couplings is missing where they are off.
            assert run["switches"]["mean"][0] == pytest.approx(paths["only"][0], abs=0.01)
    assert len(results["circle"]) == 2 * len(circle.VARIANTS)
    assert [moment["step"] for moment in results["circle"][0]["moments"]] == [2, 4]
    names = ("paths_attention", "paths_transformer", "switched_off", "depth")
    for name in (*names, "circle_distance", "circle_trajectories"):
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000
    printed = capsys.readouterr().out
    assert "hull, spins_mlp, 2" in printed
    assert "0.1, 8, spins_no_field" in printed


def test_same_seed_same_numbers() -> None:
    dataset = study.sequences("hull", TINY.counts, 0)
    run = study.Run("hull", "attention", 2, 1, 8, 2, 40, TINY.budget["hull"])
    (first, _), (second, _) = (run.train(dataset, lambda *_: None) for _ in range(2))
    other, _ = dataclasses.replace(run, seed=2).train(dataset, lambda *_: None)
    for name in ("curve", "test", "paths", "switches"):
        assert first[name] == second[name]
        assert first[name] != other[name]
    noisy = ("skip", 8, 0.1, 0)
    assert circle.train(TINY.circle, noisy) == circle.train(TINY.circle, noisy)


def test_interruption_keeps_what_is_done(
    options: Callable[..., argparse.Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the circle, the other tasks are left out; in the others, the circle is kept."""
    train, calls = circle.train, []

    def stopped(*args: Any) -> dict[str, Any]:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(*args)

    monkeypatch.setattr(circle, "train", stopped)
    assert study.STUDY.run(options(tmp_path / "a")) == 130
    results = json.loads((tmp_path / "a/results.json").read_text(encoding="utf-8"))
    assert results["interrupted"]
    assert (len(results["circle"]), len(results["runs"])) == (2, 0)
    assert (tmp_path / "a/circle_distance.png").is_file()

    monkeypatch.undo()
    monkeypatch.setattr(study, "QUICK", TINY)
    measure, seen = study.measure_switches, []

    def later(*args: Any) -> dict[str, Any]:
        seen.append(args)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(study, "measure_switches", later)
    assert study.STUDY.run(options(tmp_path / "b", "--tasks", "circle", "sort")) == 130
    results = json.loads((tmp_path / "b/results.json").read_text(encoding="utf-8"))
    assert (len(results["circle"]), len(results["runs"])) == (2 * len(circle.VARIANTS), 1)
    assert (tmp_path / "b/paths_attention.png").is_file()


@pytest.mark.data
def test_real_snippets() -> None:
    dataset = study.snippets(load_sentiment(max_length=16), 100, 16)
    assert dataset.train.inputs.shape == (100, 16)
    assert dataset.title == "Rotten Tomatoes snippets, GloVe 6B 50d"
