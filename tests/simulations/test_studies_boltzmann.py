"""The study ``boltzmann``: its own enumeration, and a run of it from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from simulations import boltzmann
from simulations.boltzmann import Boltzmann, Enumerated, Plan, area_under_curve, planted
from simulations.study import parser_of
from spinformer import Exact, Ising, SpinSystem


def test_the_enumeration_agrees_with_the_library(generator: torch.Generator) -> None:
    for kind in boltzmann.KINDS:
        j = planted(kind, 5, generator)
        assert torch.equal(j, j.mT)
        assert bool((j.diagonal() == 0).all())
        h = torch.randn(5, generator=generator, dtype=torch.float64)
        moments = Enumerated(j, h, 0.7).moments()
        exact = Exact().solve(SpinSystem(j, h[:, None], 0.7, Ising()))
        assert torch.allclose(moments.magnetization, exact.magnetization, rtol=1e-12, atol=1e-12)
        assert torch.allclose(moments.correlations, exact.correlations(), rtol=1e-12, atol=1e-12)


def test_predicted_errors_of_one_pair_are_those_by_hand() -> None:
    """Two spins without fields: the correlation c = tanh(beta J) has variance (1 - c^2) / M, and
    dc / dJ = beta (1 - c^2), so that M Var(J) = 1 / (beta^2 (1 - c^2))."""
    beta = 0.8
    j = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
    law = Enumerated(j, torch.zeros(2).double(), beta)
    c = torch.tanh(torch.tensor(beta, dtype=torch.float64))
    assert law.error_of_spins() == pytest.approx(float(1 / (beta**2 * (1 - c**2))), rel=1e-10)
    # Strong fields show the spins themselves.
    spins = law.sample(20_000, torch.Generator().manual_seed(0))
    assert law.error_of_fields(50 * spins) == pytest.approx(law.error_of_spins(), rel=0.05)


def test_area_under_the_curve_counts_ties_as_halves() -> None:
    inside, outside = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0])
    # of 6 pairs 4 are right (1 > 0, 2 > 0, 3 > 0, 3 > 2), 2 = 2 is a half
    assert area_under_curve(inside, outside) == pytest.approx(4.5 / 6)


def test_study_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(
        num_spins=4,
        num_behind=3,
        seeds=2,
        spin_samples=(2000, 8000),
        field_samples=(2000, 4000),
        betas=(0.2, 0.5),
        samples_over_beta=4000,
        signals=(1.0,),
        detected=100,
        trained_on=200,
    )
    monkeypatch.setattr(boltzmann, "_QUICK", plan)
    study = Boltzmann()
    args = parser_of(study).parse_args(["--quick", "--seed", "3", "--out", str(tmp_path)])
    threads = torch.get_num_threads()
    assert study.run(args) == 0
    assert torch.get_num_threads() == threads
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json",
        "reconstruction.png",
        "detection.png",
    }
    for data in ("spins", "fields"):
        for kind in boltzmann.KINDS:
            entry = results[data][kind]
            # Within a factor of three of what the Fisher information predicts, seed by seed.
            for found, predicted in zip(entry["likelihood"], entry["fisher"], strict=True):
                assert found[-1] < 3 * predicted[-1]
    assert "slope" in capsys.readouterr().out
