"""The study ``energy_by_layer``: energies and steps by other routes, a run on small files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from simulations import data, energy_by_layer
from simulations.energy_by_layer import (
    LAYERS,
    STUDY,
    DescentNetwork,
    Fall,
    Network,
    PublishedNetwork,
    SpinNetwork,
    build,
    draw_reviews,
    measure,
)
from simulations.study import parser_of
from simulations.training import Budget
from spinformer.descent import PairwiseEnergy

DIM, TOKENS = 4, 6


def systems(count: int, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random reviews of two to six tokens, zero where absent."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, TOKENS + 1, (count, 1), generator=generator)
    absent = torch.arange(TOKENS) >= lengths
    x = scale * torch.randn(count, TOKENS, DIM, generator=generator, dtype=torch.float64)
    return x.masked_fill(absent[..., None], 0.0), absent


def network_of(variant: str, relu: bool = False, seed: int = 0) -> Network:
    return build(variant, DIM, relu, torch.Generator().manual_seed(seed)).double()


def energies(network: Network, x: Tensor, absent: Tensor, step: str) -> Tensor:
    with torch.no_grad():
        return torch.stack([energy for _, energy in network.along(x, absent, step)], dim=-1)


def falls(network: Network, x: Tensor, absent: Tensor, step: str) -> np.ndarray:
    lengths = (~absent).sum(-1).numpy()
    return Fall(energies(network, x, absent, step).numpy(), lengths).falls


@pytest.mark.parametrize("variant", ["paper", "corrected", "data"])
@pytest.mark.parametrize("residual", [True, False])
def test_energy_is_the_sum_that_is_written(variant: str, residual: bool) -> None:
    network = network_of(variant)
    assert isinstance(network, DescentNetwork)
    network.residual = residual
    (x,), (absent,) = systems(1)
    state = torch.randn_like(x).masked_fill(absent[:, None], 0.0)
    tokens = [i for i in range(TOKENS) if not absent[i]]
    W = network.metric
    expected = torch.zeros((), dtype=torch.float64)
    for i in tokens:
        for j in tokens:
            expected = expected - torch.exp(-((state[i] - state[j]) @ W).square().sum() / 2)
        held = x[i] if variant == "data" else torch.zeros(DIM)
        expected = expected + ((state[i] - held) @ W).square().sum() / 2
        if network.mixing is not None:
            target = x[i] if residual else torch.zeros(DIM)
            expected = expected + state[i] @ network.mixing @ state[i] / 2
            expected = expected + (state[i] - target).square().sum() / 2
    found = network.energy(state[None], x[None], absent[None])
    torch.testing.assert_close(found, expected[None])


def test_published_energy_counts_a_pair_once() -> None:
    network = network_of("published")
    assert isinstance(network, PublishedNetwork)
    (x,), (absent,) = systems(1)
    tokens = x[~absent]
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(len(tokens)):
        for j in range(i):
            apart = (tokens[i] - tokens[j]) @ network.metric
            expected = expected - torch.exp(-apart.square().sum() / 2)
        expected = expected + (tokens[i] @ network.metric).square().sum() / 2
        expected = expected + tokens[i] @ network.mixing @ tokens[i] / 2
        expected = expected + (tokens[i] - network.bias).square().sum() / 2
    torch.testing.assert_close(network.energy(x[None], absent[None]), expected[None])


@pytest.mark.parametrize("variant", ["corrected", "data"])
def test_bounded_step_is_the_gradient_over_one_curvature(variant: str) -> None:
    network = network_of(variant)
    assert isinstance(network, DescentNetwork)
    x, absent = systems(3)
    state = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(network.energy(state, x, absent).sum(), state)
    step = {"corrected": "sum", "data": "scalar"}[variant]
    moved = next(s for i, (s, _) in enumerate(network.along(x, absent, step)) if i == 1)
    change = x - moved
    # Each token moves along its own slope; how far depends on its degree, which is at least 1.
    ratio = change.norm(dim=-1) / slope.norm(dim=-1)
    torch.testing.assert_close(change, (ratio.nan_to_num()[..., None] * slope))
    weights = PairwiseEnergy(weights=network.metric[None]).kernel(x, absent).degree.squeeze(1)
    sharpest = torch.linalg.eigvalsh(network.metric @ network.metric.mT)[-1]
    curvature = (2 * weights + 1) * sharpest
    if network.mixing is not None:
        curvature = curvature + 1 + torch.linalg.eigvalsh(network.mixing)[-1]
    torch.testing.assert_close(1 / ratio[~absent], curvature[~absent])


def test_closed_step_is_the_librarys_in_the_coordinates_of_the_head() -> None:
    network = network_of("data")
    assert isinstance(network, DescentNetwork)
    x, absent = systems(3)
    states = [state for state, _ in network.along(x, absent, "closed")]
    seen = x @ network.metric
    library = PairwiseEnergy(data_weight=1.0, data=seen)
    for state in states:
        torch.testing.assert_close(state @ network.metric, seen)
        seen = library.step(seen, mask=absent)


@pytest.mark.parametrize(
    ("variant", "step", "relu"),
    [
        ("corrected", "sum", False),
        ("corrected", "sum", True),
        ("data", "closed", False),
        ("data", "scalar", False),
        ("data", "scalar", True),
    ],
)
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_what_must_fall_falls(variant: str, step: str, relu: bool, scale: float) -> None:
    for seed in range(5):
        x, absent = systems(200, scale, seed)
        assert falls(network_of(variant, relu, seed), x, absent, step).all()


@pytest.mark.parametrize(
    ("variant", "step", "relu"),
    [
        ("paper", "printed", False),
        ("paper", "printed", True),
        ("corrected", "alternating", False),
        ("data", "closed", True),  # ReLU is the proximal map in no metric that mixes channels
    ],
)
def test_what_need_not_fall_rises_somewhere(variant: str, step: str, relu: bool) -> None:
    rises = 0
    for seed in range(5):
        x, absent = systems(200, 1.0, seed)
        rises += int((~falls(network_of(variant, relu, seed), x, absent, step)).sum())
    assert rises > 0


@pytest.mark.parametrize("variant", ["paper", "corrected", "data", "published", "free_energy"])
@pytest.mark.parametrize("relu", [False, True])
def test_padding_and_neighbours_change_nothing(variant: str, relu: bool) -> None:
    network = network_of(variant, relu)
    x, absent = systems(4)
    together = energies(network, x, absent, network.steps[0])
    logits = network(x, absent)
    for i in range(4):
        length = int((~absent[i]).sum())
        alone, nothing = x[i : i + 1, :length], absent[i : i + 1, :length]
        # The spins' equations are solved to 1e-3.
        near = {"rtol": 1e-2, "atol": 1e-2} if variant == "free_energy" else {}
        found = energies(network, alone, nothing, network.steps[0])
        torch.testing.assert_close(found, together[i : i + 1], **near)
        torch.testing.assert_close(network(alone, nothing), logits[i : i + 1], **near)


def test_feed_forward_matrices() -> None:
    ours, theirs = network_of("paper"), network_of("published")
    ours.project()  # drawn in single precision
    assert isinstance(ours, DescentNetwork)
    assert isinstance(theirs, PublishedNetwork)
    assert ours.mixing is not None
    before = ours.mixing.detach().clone()
    ours.project()
    torch.testing.assert_close(ours.mixing, before)
    # The public code squares the eigenvalues: .95^(2^k) after k steps of training.
    for _ in range(7):
        theirs.project()
    assert torch.linalg.matrix_norm(theirs.mixing, ord=2) < 1.01 * 0.95**128


def test_free_energy_is_that_of_each_layers_own_system() -> None:
    network = SpinNetwork(DIM, relu=False, tolerance=1e-10).double()
    x, absent = systems(2)
    with torch.no_grad():
        (state, energy), *rest = network.along(x, absent, "field")
        _, report = network.block(state, src_key_padding_mask=absent, return_report=True)
    assert len(rest) == LAYERS - 1
    torch.testing.assert_close(rest[0][1], report.free_energy.sum(-1))
    assert not torch.allclose(energy, rest[0][1])


# -- counting ------------------------------------------------------------------------------------


def test_counts() -> None:
    lengths = np.full(3, 2)
    fall = Fall(np.array([[3.0, 2.0, 1.0], [3.0, 1.0, 2.0], [1.0, 1.0, 1.0 + 1e-13]]), lengths)
    np.testing.assert_array_equal(fall.falls, [[True, True], [True, False], [True, True]])
    found = fall.summary()
    assert (found["all_fall"], found["steps_fall"], found["steps"]) == (2, 5, 6)
    assert found["largest_rise"] == 0.5  # of the range of that review
    assert found["per_token"] == pytest.approx([7 / 6, 4 / 6, 4 / 6])
    assert Fall(np.array([[1.0, np.nan]]), np.ones(1)).summary() == {
        "reviews": 1,
        "all_fall": None,
    }


# -- the study -----------------------------------------------------------------------------------


@pytest.fixture
def small(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[data.Dataset, Path]:
    dataset = data.load_sentiment(files["reviews"], files["vectors"], max_length=8)
    monkeypatch.setattr(energy_by_layer, "load_sentiment", lambda **_: dataset)
    for name, budget in (
        ("adam", Budget(3, 8, 1e-2)),
        ("spins", Budget(1, 8, 1e-2)),
        ("sgd", Budget(4, 1, 1e-2)),
    ):
        monkeypatch.setitem(energy_by_layer.QUICK_BUDGETS, name, budget)
    return dataset, tmp_path / "out"


def run(out: Path, *words: str) -> int:
    return STUDY.run(
        parser_of(STUDY).parse_args(["--quick", "--jobs", "0", "--out", str(out), *words])
    )


def check(out: Path, runs: int) -> None:
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    assert results["finished"] == results["jobs"] == runs
    for record in results["runs"]:
        sides = {curve["weights"] for curve in record["curves"]}
        assert sides - {"random", "random, data term"} == {"trained"}
        assert ("random" in sides) == ((record["variant"], record["optimizer"]) != ("paper", "sgd"))
        for curve in record["curves"]:
            if curve["step"] in ("sum", "scalar") or (
                curve["step"] == "closed" and not record["relu"]
            ):
                assert curve["all_fall"] == curve["reviews"]
                assert curve["steps_fall"] == curve["steps"] == LAYERS * curve["reviews"]
    for task in results["tasks"]:
        assert (out / f"{task}.png").stat().st_size > 10_000
    assert "every step falls" in (out / "table.txt").read_text()


def test_study_writes_counts_and_figures(
    small: tuple[data.Dataset, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = small
    words = ("--variants", "corrected", "published")
    assert run(out, *words) == 0
    check(out, 4)
    capsys.readouterr()
    assert run(out, *words) == 0
    assert "4 of 4 runs were finished before" in capsys.readouterr().out


@pytest.mark.slow
def test_study_with_all_variants(small: tuple[data.Dataset, Path]) -> None:
    _, out = small
    assert run(out, "--task", "all") == 0
    check(out, 24)


def test_interrupted_study_keeps_what_is_done(
    small: tuple[data.Dataset, Path], failing_on: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = small
    failing_on(energy_by_layer.Run, 2, KeyboardInterrupt)
    assert run(out, "--variants", "data", "--steps", "2") == 130
    results = json.loads((out / "results.json").read_text())
    assert results["interrupted"]
    assert results["finished"] == 1
    assert results["runs"][0]["budget"]["steps"] == 2
    assert (out / "snippets.png").is_file()


def test_measuring_leaves_the_network_as_it_is(small: tuple[data.Dataset, Path]) -> None:
    dataset, _ = small
    network = build("paper", 6, False, torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    measure(network, "printed", dataset, draw_reviews(dataset.test, 5, 0), "unit")
    for name, value in network.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


def test_training_moves_all_weights(small: tuple[data.Dataset, Path]) -> None:
    dataset, _ = small
    job = energy_by_layer.Run(
        "snippets", "corrected", True, "adam", 5, 20, "glove50", 0, Budget(3, 8, 1e-2)
    )
    _, state = job.train(dataset, lambda *_: None)
    initial = build("corrected", 6, True, energy_by_layer.generator_for(0, energy_by_layer._INIT))
    for name, value in initial.state_dict().items():
        assert not torch.equal(value, state[name])
