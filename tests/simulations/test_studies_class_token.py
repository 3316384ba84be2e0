"""The study ``class_token`` on small files, and the reader of Fashion-MNIST's format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from simulations import class_token, data
from simulations.class_token import SITES, ClassToken, ClassTokenClassifier, Run
from simulations.data import DataError, load_fashion, read_idx
from simulations.models import count_parameters
from simulations.study import parser_of
from simulations.training import Budget


def write_idx(path: Path, array: np.ndarray) -> str:
    """Write gzipped IDX; returns its sha256."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    with gzip.open(path, "wb") as file:
        file.write(header + array.astype(np.uint8).tobytes())
    return data.sha256_of(path)


@pytest.fixture
def fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with four small files under the names of the release, taken for it."""
    folder = tmp_path / "fashion"
    folder.mkdir()
    random = np.random.default_rng(0)
    hashes = {}
    for side, count in (("train", 120), ("t10k", 40)):
        labels = random.integers(0, 10, count)
        images = random.integers(0, 40, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 2 : 2 * label + 8, 4:24] += 200
        for name, array in ((f"{side}-images-idx3", images), (f"{side}-labels-idx1", labels)):
            hashes[f"{name}-ubyte.gz"] = write_idx(folder / f"{name}-ubyte.gz", array)
    monkeypatch.setattr(data, "FASHION_FILES", hashes)
    return folder


# -- data ----------------------------------------------------------------------------------------


def test_idx_round_trip(tmp_path: Path) -> None:
    array = np.arange(2 * 3 * 5).reshape(2, 3, 5)
    write_idx(tmp_path / "a.gz", array)
    np.testing.assert_array_equal(read_idx(tmp_path / "a.gz"), array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x08\x01\0\0\0\x05abc", r"holds 3 bytes of data for shape \(5,\)"),
        (b"\0\0\x0d\x01\0\0\0\x01abcd", "not an IDX file of bytes"),
        (b"", "not an IDX file of bytes"),
    ],
)
def test_malformed_idx(tmp_path: Path, content: bytes, message: str) -> None:
    with gzip.open(tmp_path / "a.gz", "wb") as file:
        file.write(content)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "a.gz")


def test_idx_that_is_not_compressed(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"plain")
    with pytest.raises(DataError, match="not a gzip file"):
        read_idx(tmp_path / "a.gz")


def test_fashion_sides(fashion: Path) -> None:
    dataset = load_fashion(fashion, training=100, test=30)
    assert len(dataset.train) + len(dataset.validation) == 100
    assert len(dataset.train) > len(dataset.validation) > 0
    images = read_idx(fashion / "t10k-images-idx3-ubyte.gz")[:30]
    np.testing.assert_array_equal(dataset.test.inputs, images)
    np.testing.assert_array_equal(
        dataset.test.labels, read_idx(fashion / "t10k-labels-idx1-ubyte.gz")[:30]
    )
    assert dataset.sources == data.FASHION_FILES


def test_missing_fashion_says_how_to_install(fashion: Path) -> None:
    (fashion / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"t10k-labels.* is missing[\s\S]*apt-get install"):
        load_fashion(fashion)


def test_other_fashion_is_refused(fashion: Path) -> None:
    write_idx(fashion / "train-labels-idx1-ubyte.gz", np.zeros(120))
    with pytest.raises(DataError, match=r"train-labels.* has sha256"):
        load_fashion(fashion)


@pytest.mark.data
def test_released_fashion() -> None:
    if not data.FASHION.is_dir():
        pytest.skip(f"needs the Debian package: {data.INSTALL_FASHION}")
    dataset = load_fashion()
    assert len(dataset.train) + len(dataset.validation) == 12_000
    assert len(dataset.test) == 10_000
    np.testing.assert_array_equal(np.bincount(dataset.test.labels), np.full(10, 1000))


# -- models --------------------------------------------------------------------------------------


def test_models_have_equal_counts() -> None:
    counts = {name: count_parameters(build(name)) for name in class_token.VARIANTS}
    assert all(abs(count - 26_000) < 0.06 * 26_000 for count in counts.values()), counts
    # The bonds of 17 sites of dimension 16, symmetric within and between.
    matrix = build("matrix").block.self_attn.weight.numel()
    assert matrix == 17 * 16 // 2 * 16 * 17 // 2


def build(variant: str) -> ClassTokenClassifier:
    return ClassTokenClassifier(variant, 10)


@pytest.mark.parametrize("variant", class_token.VARIANTS)
def test_class_is_read_off_the_class_token(variant: str) -> None:
    """Without the block's mixing no image would change the logits."""
    model = build(variant)
    images = torch.randn(3, 28, 28)
    assert model.fields(images).shape == (3, SITES, class_token.DIM)
    assert torch.equal(model.fields(images)[:, -1], model.class_token.expand(3, -1))
    logits, report = model.trace(images)
    torch.testing.assert_close(logits, model(images))
    assert report.converged.all()
    assert not torch.allclose(logits[0], logits[1])
    with torch.no_grad():
        for parameter in model.block.self_attn.parameters():
            parameter.zero_()
    torch.testing.assert_close(model(images)[0], model(images)[1])


@pytest.mark.parametrize("variant", class_token.VARIANTS)
def test_every_trained_parameter_matters(variant: str) -> None:
    model = build(variant)
    model(torch.randn(2, 28, 28)).square().sum().backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in model.parameters())


def test_bonds_are_those_of_the_report() -> None:
    model = build("matrix")
    _, report = model.trace(torch.randn(1, 28, 28))
    torch.testing.assert_close(torch.tensor(model.bonds()), report.couplings[0, 0])
    assert build("mixer_mlp").bonds() is None


# -- the study -----------------------------------------------------------------------------------


@pytest.fixture
def study(
    files: dict[str, Path], fashion: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """``study(OUT, ...)`` runs ``class_token --quick`` on the small files."""
    budget = Budget(steps=10, batch_size=16, learning_rate=1e-3, evaluations=2)
    monkeypatch.setattr(class_token, "QUICK_BUDGET", budget)

    def run(out: Path, *words: str) -> int:
        own = ("--digits", str(files["digits"]), "--fashion", str(fashion))
        words = ("--quick", "--out", str(out), "--jobs", "0", *own, *words)
        return ClassToken().run(parser_of(ClassToken()).parse_args(words))

    return run


def test_study(
    study: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study(tmp_path / "a", "--seeds", "2", "--variants", "matrix", "mixer_mlp") == 0
    results = json.loads((tmp_path / "a" / "results.json").read_text())
    assert {(r["task"], r["variant"], r["seed"]) for r in results["runs"]} == {
        (task, variant, seed)
        for task in ("digits", "fashion")
        for variant in ("matrix", "mixer_mlp")
        for seed in (0, 1)
    }
    for run in results["runs"]:
        assert [point["step"] for point in run["curve"]] == [5, 10]
        if run["variant"] == "matrix":
            assert [moment["step"] for moment in run["moments"]] == [0, 1, 3, 10]
            first, last = (np.array(run["moments"][i]["bonds"]) for i in (0, -1))
            assert first.shape == (SITES, SITES)
            assert (last == last.T).all()
            assert not np.array_equal(first, last)
        else:
            assert run["moments"] is None
    # Something is learned: ten steps lower the training loss.
    first, last = results["runs"][0]["curve"]
    assert last["train_loss"] < first["train_loss"]
    for name in ("accuracy.png", "couplings_matrix.png"):
        assert (tmp_path / "a" / name).stat().st_size > 10_000
    assert not (tmp_path / "a" / "couplings_mixer_mlp.png").exists()
    assert "mixer_mlp" in capsys.readouterr().out


def test_seed_decides(study: Callable[..., int], tmp_path: Path) -> None:
    words = ("--task", "digits", "--variants", "matrix_mlp", "--seeds", "1")
    found = []
    for out in ("a", "b"):
        study(tmp_path / out, *words)
        (run,) = json.loads((tmp_path / out / "results.json").read_text())["runs"]
        found.append({name: run[name] for name in ("curve", "moments", "test")})
    assert found[0] == found[1]


def test_interrupt_keeps_what_is_done(
    study: Callable[..., int],
    failing_on: Callable[..., Callable[[], int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    count = failing_on(Run, 2, KeyboardInterrupt)
    words = ("--task", "all", "--variants", "matrix")
    assert study(tmp_path, *words) == 130
    assert "1 of 2 runs are done and kept" in capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["interrupted"]
    assert list(results["tasks"]) == ["digits"]
    (kept,) = results["runs"]
    assert (tmp_path / "accuracy.png").is_file()
    # The model that was tested is there.
    (path,) = (tmp_path / "runs").glob("*.pt")
    model = build("matrix")
    model.load_state_dict(torch.load(path, weights_only=True))
    assert model.bonds() == kept["moments"][-1]["bonds"]

    assert study(tmp_path, *words) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert not results["interrupted"]
    assert results["runs"][0] == kept
    assert [run["task"] for run in results["runs"]] == ["digits", "fashion"]
    assert count() == 3
    study(tmp_path, "--task", "digits", "--variants", "matrix", "--fresh")
    assert count() == 4


def test_interrupt_before_anything_is_done(
    study: Callable[..., int], failing_on: Callable[..., Callable[[], int]], tmp_path: Path
) -> None:
    failing_on(Run, 1, KeyboardInterrupt)
    assert study(tmp_path, "--task", "digits", "--variants", "matrix") == 130
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["tasks"] == {}
    assert results["runs"] == []


def test_a_changed_variant_is_another_run(
    study: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--task", "digits", "--variants", "matrix")
    study(tmp_path, *words)
    changed = {"couplings": "matrix", "symmetric_within": False}
    monkeypatch.setitem(class_token.VARIANTS, "matrix", changed)
    study(tmp_path, *words)
    assert len(list((tmp_path / "runs").glob("*.json"))) == 2


def test_a_failed_run_stops_no_other(
    study: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = ClassTokenClassifier.fields
    # A block without bonds gives logits that are not numbers.
    monkeypatch.setattr(
        ClassTokenClassifier,
        "forward",
        lambda self, images: (
            self.head(fields(self, images)[:, -1]) * (1.0 if self.bonds() else float("nan"))
        ),
    )
    words = ("--task", "digits", "--variants", "mixer_mlp", "matrix")
    assert study(tmp_path, *words) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    (failure,) = results["failures"]
    assert failure["label"] == "mixer_mlp"
    assert "the loss is nan at step 1" in failure["reason"]
    assert [run["variant"] for run in results["runs"]] == ["matrix"]
