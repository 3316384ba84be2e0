"""The study of hysteresis: areas and coercive fields against closed forms."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import simulations.hysteresis as study
from simulations.study import parser_of
from spinformer.dynamics import ParallelDynamics

TINY = study.Plan(8, 4, (8, 16, 32), 2, 8)


def run(out: Path, *words: str) -> int:
    words = ("--quick", "--out", str(out), *words)
    return study.STUDY.run(parser_of(study.STUDY).parse_args(words))


@pytest.mark.parametrize("temperature", [0.2, 0.6, 0.95])
def test_the_spinodal_is_where_a_branch_ends(temperature: float) -> None:
    """h(m) = T artanh m - m of the branch has its lowest point there."""
    m = torch.linspace(0, 1, 100_001, dtype=torch.float64)[:-1]
    lowest = (temperature * m.atanh() - m).min()
    # The grid misses a minimum of curvature below 2 / (T (1 - T)) by its square times 1e-10.
    assert study.spinodal(temperature) == pytest.approx(-float(lowest), abs=1e-8)


def test_the_carried_state_leaves_at_the_spinodal() -> None:
    temperatures = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    found = study.carried_coercive(temperatures)
    for temperature, field in zip(temperatures.tolist(), found.tolist(), strict=True):
        # Half of the last interval.
        assert field == pytest.approx(study.spinodal(temperature), abs=study.AMPLITUDE / 2**15)


def test_above_ordering_nothing_is_carried() -> None:
    assert study.spinodal(1.0) == study.spinodal(1.3) == 0
    warm = torch.tensor([1.3], dtype=torch.float64)
    assert float(study.carried_coercive(warm)) < study.AMPLITUDE / 2**13
    loop = study.carried_loop(study.Case(1, 1.3, ""), 16)
    assert abs(loop["area"]) < 1e-6


def test_ising_spins_jump_and_vectors_turn() -> None:
    grid = 8
    ising = study.carried_loop(study.Case(1, 0.6, ""), grid)
    vectors = study.carried_loop(study.Case(3, 0.6, ""), grid)
    # On a grid the jump comes with the first field beyond h_s = 0.185.
    down = ising["m"][: grid // 2 + 1]
    jump = next(h for h, m in zip(ising["h"], down, strict=False) if m < 0)
    assert -jump == pytest.approx(0.25)
    # Up and down differ at h = 0 alone, by 2 m(0), m = tanh(m / T): a triangle of base 2 * 0.25.
    m = 1.0
    for _ in range(200):
        m = math.tanh(m / 0.6)
    assert ising["area"] == pytest.approx(2 * m * 0.25, rel=1e-6)
    assert abs(vectors["area"]) < 1e-5


@pytest.mark.parametrize("phase", [0.0, 0.4, -0.4])
def test_the_area_of_a_loop_that_lags(phase: float) -> None:
    """m = cos(wt - phase) in h = cos(wt): an ellipse of area pi sin(phase)."""
    t = 2 * math.pi * torch.arange(2000, dtype=torch.float64) / 2000
    h, m = t.cos(), (t - phase).cos()
    # The polygon misses a share of 2 pi^2 / (3 * 2000^2).
    area = study.enclosed(h.tolist(), m.tolist())
    assert area == pytest.approx(math.pi * math.sin(phase), rel=2e-6, abs=1e-9)


def test_the_coercive_field_of_a_loop() -> None:
    t = 2 * math.pi * torch.arange(4000, dtype=torch.float64) / 4000
    # On the way down m is zero at wt = pi / 2 + 0.3, where h = -sin(0.3).
    found = study.crossing(t.cos().tolist(), (t - 0.3).cos().tolist())
    assert found == pytest.approx(math.sin(0.3), abs=1e-6)
    assert math.isnan(study.crossing([1.0, 0.0, -1.0, 0.0], [1.0] * 4))


def test_the_area_of_hot_spins() -> None:
    """m(t+1) = h(t) / T of free spins: -sum dh m = sum dh^2 / 2T = 8 A^2 / (T period)."""
    temperature, period = 200.0, 64
    area = study.kinetic_area(study.Case(1, temperature, ""), period)
    free = 8 * study.AMPLITUDE**2 / (temperature * period)
    # Couplings add a share of 1 / T of a response that is late by another step: 3 / T in all.
    assert area == pytest.approx(free, rel=4 / temperature)
    assert area > free


def test_the_area_is_that_of_the_chains() -> None:
    period = 16
    system = study.build(3, 0.6, 8)
    fields = study.schedule(system, period)
    transient = ParallelDynamics(chains=6).run(system, 2 * period, "ordered", field=fields)
    area, error = study.chain_areas(transient, period)
    own = []
    for chain in range(6):
        work = 0.0
        for t in range(period - 1, 2 * period - 1):
            work -= float((fields[t + 1, 0] - fields[t, 0]) @ transient.moments[t + 1, chain])
        own.append(work / (8 * 3))
    values = torch.tensor(own)
    assert area == pytest.approx(float(values.mean()), rel=1e-6)
    assert error == pytest.approx(float(values.std()) / 6**0.5, rel=1e-5)


@pytest.mark.stochastic
def test_a_large_system_follows_the_kinetic_mean_field() -> None:
    """All coupled alike: fluctuations are of order 1/N, here against an error of about 0.01."""
    plan = study.Plan(400, 16, (32,), 1, 8)
    case = study.Case(1, 1.4, "")
    loop = study.sampled_loop(case, 32, plan, 0)
    assert abs(loop["area"] - study.kinetic_area(case, 32)) < 4 * loop["area_error"]
    assert loop["area_error"] < 0.03


def test_only_the_block_that_carries_its_state_remembers() -> None:
    found = study.sequence(0)
    first = 0
    expected = None
    for height, count in study.PULSES:
        answers = found["carried"][first : first + count]
        if abs(height) > study.spinodal(study.COLD):
            expected = math.copysign(1, height)
        if expected is not None:
            assert all(answer * expected > 0.8 for answer in answers), height
        first += count
    for given, answer in zip(found["input"], found["forgotten"], strict=True):
        assert abs(answer) > 0.8
        if abs(given) > 0.05:
            assert answer * given > 0
    # In silence it follows the noise: both answers are there.
    silence = found["forgotten"][-study.PULSES[-1][1] :]
    assert min(silence) < 0 < max(silence)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "QUICK", TINY)
    monkeypatch.setattr(study, "CASES", study.CASES[:2])  # vectors have a test of their own
    assert run(tmp_path, "--chains", "5") == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["chains"] == 5
    assert [loop["dim"] for loop in results["loops"]] == [1, 1]
    assert [len(loop["sampled"]) for loop in results["loops"]] == [3, 3]
    assert [one["period"] for one in results["coercive"]["sampled"]] == [16]
    assert (tmp_path / "hysteresis.png").stat().st_size > 10_000
    assert "closed form" in capsys.readouterr().out


def test_what_is_done_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, calls = study.sampled_loop, []

    def interrupted(*args: Any) -> dict[str, Any]:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sampled(*args)

    monkeypatch.setattr(study, "QUICK", TINY)
    monkeypatch.setattr(study, "sampled_loop", interrupted)
    assert run(tmp_path) == 130
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["interrupted"] is True
    assert len(results["loops"][0]["sampled"]) == 1
    assert (tmp_path / "hysteresis.png").exists()
