"""Files of runs: what is read is what was written, and what is something else is refused."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spinformer.sampling import HeatBath, Metropolis, MonteCarlo, SampledEquilibrium, storage
from spinformer.spins.couplings import (
    Couplings,
    CurieWeiss,
    Dense,
    Lattice,
    LowRank,
    MatrixValued,
    sherrington_kirkpatrick,
)
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem

F64 = torch.float64
ENDINGS = ("npz", "h5", "hdf5")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def system(dim: int = 2) -> SpinSystem:
    couplings = sherrington_kirkpatrick(
        5, generator=torch.Generator().manual_seed(0), dtype=F64
    ).to_dense()
    field = 0.3 * normal(3, 5, dim)
    field[1, 0] = torch.nan
    mask = torch.tensor([False, False, False, True, False])
    return SpinSystem(couplings, field, 0.6, Sphere(dim), mask=mask, check_finite=False)


def run(given: SpinSystem, **options: Any) -> SampledEquilibrium:
    options = {"chains": 3, "sweeps": 40, "seed": 4, "keep": 6, "on_failure": "ignore"} | options
    return MonteCarlo([HeatBath(), Metropolis()], **options).solve(given)


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_read_is_what_was_written(tmp_path: Path, ending: str) -> None:
    if ending != "npz":
        pytest.importorskip("h5py")
    first = run(system(), every=2)
    path = tmp_path / f"run.{ending}"
    first.save(path)
    second = SampledEquilibrium.load(path)
    for name in ("magnetization", "internal_energy"):
        torch.testing.assert_close(
            getattr(second, name), getattr(first, name), rtol=0, atol=0, equal_nan=True
        )
    for name in (
        "specific_heat",
        "correlations",
        "susceptibility",
        "binder_cumulant",
        "local_susceptibility",
    ):
        torch.testing.assert_close(
            getattr(second, name)(), getattr(first, name)(), rtol=0, atol=0, equal_nan=True
        )
        if name != "binder_cumulant":
            torch.testing.assert_close(
                second.standard_error(name), first.standard_error(name), equal_nan=True
            )
    for name, series in first.series.items():
        assert torch.equal(second.series[name], series)
    assert torch.equal(second.samples, first.samples)
    assert torch.equal(second.keys, first.keys)
    assert second.converged.tolist() == first.converged.tolist()
    assert second.broken is not None
    assert second.broken.tolist() == [False, True, False]
    assert second.record.configuration == first.record.configuration
    assert second.record.configuration["moves"] == ["HeatBath()", "Metropolis(cap=None)"]
    assert second.record.reports.keys() == first.record.reports.keys()
    assert second.record.every == 2
    # Analysed further as if it had just been run.
    again = MonteCarlo(
        [HeatBath(), Metropolis()], chains=1, sweeps=40, seed=second.keys[1:2], on_failure="ignore"
    ).solve(second.system)
    torch.testing.assert_close(again.series["energy"][0, ..., 1::2], second.series["energy"][1])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_log_partition_is_kept(tmp_path: Path) -> None:
    value, error = normal(3), normal(3).abs()
    first = run(system()).with_log_partition(value, error)
    first.save(tmp_path / "run.npz")
    second = SampledEquilibrium.load(tmp_path / "run.npz")
    assert torch.equal(second.log_partition[[0, 2]], value[[0, 2]])
    assert torch.equal(second.standard_error("log_partition")[[0, 2]], error[[0, 2]])


@pytest.mark.parametrize(
    "couplings",
    [
        Dense(normal(4, 4)),
        Dense(normal(2, 4, 4), mask=torch.tensor([True, False, False, False])),
        MatrixValued(normal(4, 4, 3, 3)),
        Lattice((2, 2), (False, False), torch.tensor([0.3, 0.4], dtype=F64)),
        Lattice((4,), True, 0.7, dtype=F64).mask(torch.tensor([True, False, False, False])),
        CurieWeiss(4, 1.3, dtype=F64),
        LowRank(normal(4, 2)),
        LowRank(normal(4, 2), normal(4, 2, seed=1)),
        LowRank(normal(4, 2), weights=normal(2)),
        LowRank(normal(4, 2), normal(4, 2, seed=1), normal(2)).symmetrize(),
    ],
    ids=repr,
)
def test_couplings(tmp_path: Path, couplings: Couplings) -> None:
    given = SpinSystem(couplings, normal(4, 3), 0.5, Sphere(3))
    arrays, description = storage.pack_system(given)
    storage.save(tmp_path / "system.npz", arrays, {"system": description})
    arrays, read = storage.load(tmp_path / "system.npz")
    found = storage.unpack_system(arrays, read["system"])
    assert type(found.couplings) is type(couplings)
    spins = normal(4, 3, seed=5)
    assert torch.equal(found.force(spins), given.force(spins))
    assert found.couplings.is_symmetric == couplings.is_symmetric


@pytest.mark.parametrize(
    "site", [Ising(), Sphere(3, radius=1.1), LargeDSphere(4, "large_d"), Gaussian(2, 0.3)], ids=repr
)
def test_sites(site: SiteLaw) -> None:
    given = SpinSystem(CurieWeiss(4, dtype=F64), normal(4, site.dim), 0.5, site)
    assert repr(storage.unpack_system(*storage.pack_system(given)).site) == repr(site)


def test_files_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.npz"):
        run(system()).save(tmp_path / "run.pt")
    with pytest.raises(FileNotFoundError):
        SampledEquilibrium.load(tmp_path / "none.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="was not written by spinformer"):
        SampledEquilibrium.load(tmp_path / "other.npz")
    path = tmp_path / "state.npz"
    run(system(), checkpoint=path)
    with pytest.raises(ValueError, match="a checkpoint, not a saved run"):
        SampledEquilibrium.load(path)
    run(system()).save(path)
    with pytest.raises(ValueError, match="is a file of something else"):
        run(system(), checkpoint=path)
    storage.save(path, {}, {"kind": "run", "format": 99})
    with pytest.raises(ValueError, match="format 99"):
        SampledEquilibrium.load(path)


def test_without_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "h5py":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"spinformer\[sampling\]"):
        run(system()).save(tmp_path / "run.h5")


def test_fingerprints_see_every_bit() -> None:
    first = storage.fingerprint({"a": torch.zeros(3)}, {"b": 1})
    assert storage.fingerprint({"a": torch.zeros(3)}, {"b": 1}) == first
    for arrays, description in (
        ({"a": torch.zeros(4)}, {"b": 1}),
        ({"a": torch.zeros(3, dtype=F64)}, {"b": 1}),
        ({"a": torch.tensor([0.0, -0.0, 0.0])}, {"b": 1}),
        ({"c": torch.zeros(3)}, {"b": 1}),
        ({"a": torch.zeros(3)}, {"b": 2}),
    ):
        assert storage.fingerprint(arrays, description) != first
