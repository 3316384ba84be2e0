"""The study of relaxation: rates, errors and entropies against what is known otherwise."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import simulations.relaxation as study
import spinformer as sf
from simulations.study import parser_of
from spinformer.dynamics import ExactDynamics, KineticTAP

TINY = study.Plan(((1, 5),), 100, 10, 32, 100)


def run(out: Path, *words: str) -> int:
    words = ("--quick", "--out", str(out), *words)
    return study.STUDY.run(parser_of(study.STUDY).parse_args(words))


@pytest.mark.parametrize("kind", study.KINDS)
def test_couplings_are_what_the_titles_say(kind: str) -> None:
    matrix = study.couplings(kind, 40, 0)
    assert bool((matrix.diagonal() == 0).all())
    assert torch.equal(matrix, matrix.mT) == (kind == "symmetric")
    if kind == "attention":
        torch.testing.assert_close(matrix.sum(-1), torch.ones(40, dtype=torch.float64))
    else:
        # The sum of 39 entries of standard deviation 1/2 / sqrt(40), averaged over 40 rows that
        # are independent, or a pair of which shares an entry: 0.11 at most.
        assert float(matrix.sum(-1).mean()) == pytest.approx(1, abs=4 * 0.11)


def test_the_second_eigenvalue_of_a_pair() -> None:
    """S1' answers to S2 alone: in no field W shrinks S1 +- S2 by t = tanh(beta J), S1 S2 by t^2."""
    matrix = torch.tensor([[0.0, 0.7], [0.7, 0.0]], dtype=torch.float64)
    system = sf.SpinSystem(matrix, torch.zeros(2, 1, dtype=torch.float64), 1.3, sf.Ising())
    transition = ExactDynamics().steady_state(system).transition
    assert study.second_eigenvalue(transition) == pytest.approx(math.tanh(0.91), rel=1e-12)


def test_a_fitted_rate() -> None:
    curve = [0.9 * 0.6**t for t in range(12)]
    assert study.decay([*curve, None], [1e-4] * 13) == pytest.approx(0.6, rel=1e-12)
    assert study.decay(curve[:5], [1e-4] * 5) is None  # two points below 0.2
    assert study.decay(curve, [d / 2 for d in curve]) is None  # all in the noise


def test_a_length_without_what_noise_adds() -> None:
    """The mean over draws is the true length, and the scatter is the error that is told."""
    generator = torch.Generator().manual_seed(0)
    system = study.build("attention", 3, 30, 0)
    radius = 3**0.5
    truth = torch.full((30, 3), 0.2 * radius, dtype=torch.float64)
    errors = torch.full((400, 30, 3), 0.15, dtype=torch.float64)
    noise = errors * torch.randn(errors.shape, generator=generator, dtype=torch.float64)
    scores = []
    for one, error in zip(truth + noise, errors, strict=True):
        length, spread = study.noisy_length(one[None], error[None], system)
        scores.append(float((length - 0.2 * 3**0.5) / spread))
    z = torch.tensor(scores)
    # The mean of 400 has error 1/20, and the root of a square is low by half of its relative
    # variance, 0.04 of its error; the variance of 400 scores has error sqrt(2 / 400) = 0.07.
    assert abs(float(z.mean())) < 0.05 * 4 + 0.04
    assert float(z.var()) == pytest.approx(1, abs=4 * 0.07)
    quiet = study.noisy_length(truth[None], torch.zeros(1, 30, 3, dtype=torch.float64), system)
    assert float(quiet[0]) == pytest.approx(0.2 * 3**0.5, rel=1e-12)


def test_a_length_ends_where_noise_begins() -> None:
    system = study.build("attention", 1, 2, 0)
    vectors = torch.tensor([1.0, 1e-3, 1.0], dtype=torch.float64)[:, None, None].expand(3, 2, 1)
    length, _ = study.noisy_length(vectors, torch.full_like(vectors, 0.01), system)
    assert length.isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize(("kind", "dim"), [("symmetric", 1), ("asymmetric", 1), ("attention", 3)])
def test_a_transient_falls_at_the_predicted_rate(kind: str, dim: int) -> None:
    """The ratio of late distances against the spectral radius, which looks at no transient."""
    system = study.build(kind, dim, 12, 0)
    start = torch.zeros_like(system.field)
    start[:, -1] = dim**0.5
    for equation in study.EQUATIONS.values():
        solver = equation(tolerance=1e-14)
        fixed = solver.steady_state(system)
        curve = study._curves(solver.run(system, 40, start), fixed.magnetization)["distance"]
        # Complex eigenvalues make the distance beat: its mean fall over ten steps.
        fall = (curve[30] / curve[20]) ** 0.1
        # Where the second mode is not yet gone the fall is faster than the first, by little.
        assert fall == pytest.approx(float(fixed.spectral_radius()), rel=0.05)


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", study.KINDS)
def test_simulation_and_exact_chain(kind: str) -> None:
    plan = study.Plan((), 2000, 12, 64, 400)
    panel = study.measure(kind, 1, 5, plan, 0)
    sampled, exact = panel["sampled"], panel["exact"]
    for quantity, first in (("along", 2), ("entropy", 0)):
        for t in range(first, len(exact[quantity])):
            difference = sampled[quantity][t] - exact[quantity][t]
            assert abs(difference) < 4 * sampled[f"{quantity}_error"][t], (quantity, t)
    if kind == "symmetric":
        assert sampled["production"] == exact["production"] == 0
    else:
        assert exact["production"] > 0.01
        difference = sampled["production"] - exact["production"]
        assert abs(difference) < 4 * sampled["production_error"]
    # At the start all are the same: one configuration.
    assert sampled["along"][0] == panel["tap"]["along"][0] == exact["along"][0] == -1
    # What is shown of the mismatch is the change of what is shown of m, spins being alike or not.
    assert exact["mismatch"][0] >= abs(exact["along"][1] - exact["along"][0]) - 1e-12


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "QUICK", TINY)
    assert run(tmp_path, "--chains", "80") == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["chains"] == 80
    assert [(p["kind"], p["dim"]) for p in results["panels"]] == [(kind, 1) for kind in study.KINDS]
    assert (tmp_path / "d1_n5.png").stat().st_size > 10_000
    assert "exact Markov chain" in capsys.readouterr().out


def test_what_is_done_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, calls = study.measure, []

    def interrupted(*args: Any) -> dict[str, Any]:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(study, "QUICK", TINY)
    monkeypatch.setattr(study, "measure", interrupted)
    assert run(tmp_path) == 130
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["interrupted"] is True
    assert [panel["kind"] for panel in results["panels"]] == ["symmetric"]


def test_what_has_no_solution_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(study.EQUATIONS, "tap", lambda: KineticTAP(max_iterations=1))
    panel = study.measure("symmetric", 1, 5, study.Plan((), 64, 4, 32, 100), 0)
    assert panel["unsolved"] == ["tap"]
    assert "tap" not in panel
    assert "no solution" in study.render({"panels": [panel]})
    figure = study.draw([panel])
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert any("TAP" in text for text in texts)
