"""The study of errors: what it prints is what a direct calculation gives."""

import json
from pathlib import Path

import pytest
import torch

import simulations.accuracy as study
import spinformer as sf
from simulations import approximations
from simulations.study import parser_of


def run(out: Path, *words: str) -> int:
    words = ("--quick", "--out", str(out), *words)
    return study.STUDY.run(parser_of(study.STUDY).parse_args(words))


def test_errors_fall_as_the_order_of_each_approximation() -> None:
    """Mean field's error of log Z is of second order in J, TAP's of third, by halving beta."""
    betas = torch.tensor([0.025, 0.05], dtype=torch.float64)
    found = study.measure(study.Panel("pair", 3), betas, 1, 0)
    ratio = {
        name: entry["log_partition"][1] / entry["log_partition"][0] for name, entry in found.items()
    }
    # Fields scale with beta too: two more powers of it come from the field's own m^2.
    assert ratio["mean_field"] == pytest.approx(4, rel=0.2)
    for name in ("tap", "adaptive_tap"):
        assert ratio[name] > 7, name


def test_an_error_is_what_it_says() -> None:
    panel, beta = study.Panel("pair", 2), torch.tensor([0.4], dtype=torch.float64)
    found = study.measure(panel, beta, 1, 0)["mean_field"]
    couplings, field = study.build(panel, 1, 0)
    system = sf.SpinSystem(couplings, field, 0.4, sf.Sphere(2))
    exact, approximate = sf.Exact().solve(system), sf.MeanField().solve(system)
    m, reference = approximate.magnetization.detach(), exact.magnetization.detach()
    assert found["magnetization"][0] == pytest.approx(
        float((m - reference).norm() / reference.norm()), rel=1e-6
    )
    difference = float((approximate.log_partition - exact.log_partition).detach().abs()) / 2
    assert found["log_partition"][0] == pytest.approx(difference, rel=1e-6)
    bond = approximate.correlations()[0, 0, 1] - exact.correlations()[0, 0, 1]
    assert found["bonds"][0] == pytest.approx(float(bond.detach().abs()) / 2, rel=1e-6)


def test_a_mean_over_the_easy_instances_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = {"max_iterations": 2, "on_failure": "ignore"}
    monkeypatch.setattr(approximations, "ITERATION", lazy)
    found = study.measure(study.Panel("glass", 1), torch.tensor([2.0]), 3, 0)["tap"]
    assert found["converged"] == [0.0]
    assert found["magnetization"] == found["log_partition"] == [None]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    panels = [study.Panel("pair", 3), study.Panel("ring", 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "panels", lambda quick: panels)
        # What oscillates in the cold does so for long; a failure is shown as one either way.
        patched = {**approximations.ITERATION, "max_iterations": 100}
        patch.setattr(approximations, "ITERATION", patched)
        assert run(tmp_path, "--instances", "2") == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [panel["dim"] for panel in results["panels"]] == [3, 1]
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "adaptive TAP" in printed
    assert "$" not in printed
