"""Runs as files: named arrays and one description, in NumPy's ``.npz`` or in HDF5."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import spinformer.spins.couplings as kinds
from spinformer.sampling.observables import Observables, Record, binned_means
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem

__all__ = [
    "check_ending",
    "check_writable",
    "described",
    "fingerprint",
    "load",
    "pack_run",
    "pack_system",
    "room",
    "save",
    "unpack_run",
    "unpack_system",
]

_FORMAT = 1
_NPZ, _HDF5 = (".npz",), (".h5", ".hdf5")
_RUN = "run"
_DESCRIPTION = "description"

Arrays = dict[str, Tensor]
Description = dict[str, Any]


def check_ending(path: str | Path) -> Path:
    """The path, if it has one of the known endings."""
    path = Path(path)
    if path.suffix not in _NPZ + _HDF5:
        raise ValueError(f"path={str(path)!r} must end in {', '.join(_NPZ + _HDF5)}")
    return path


def check_writable(path: str | Path) -> Path:
    """The path, if a file can be made there: what is written at the end of a run has to fail first.

    Raises:
        FileNotFoundError: its folder does not exist.
        ImportError: HDF5 without h5py.
        ValueError: another ending than .npz, .h5 or .hdf5.
    """
    path = check_ending(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path={str(path)!r}: the folder {str(path.parent)!r} is not there")
    if path.suffix in _HDF5:
        _h5py()
    return path


def save(path: str | Path, arrays: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Write arrays and a description; a file of that name is replaced in one step.

    Raises:
        FileNotFoundError: its folder does not exist.
        ImportError: HDF5 without h5py.
        ValueError: another ending than .npz, .h5 or .hdf5.
    """
    path = check_writable(path)
    text = json.dumps({"format": _FORMAT, **_versions(), **description})
    numbers = {name: value.detach().cpu().numpy() for name, value in arrays.items()}
    # Whoever stops the program while it writes still has the old file.
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    if path.suffix in _NPZ:
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **numbers, **{_DESCRIPTION: np.array(text)})
    else:
        h5py = _h5py()
        with h5py.File(partial, "w") as file:
            file.attrs[_DESCRIPTION] = text
            for name, value in numbers.items():
                file.create_dataset(name, data=value)
    partial.replace(path)


def load(path: str | Path) -> tuple[Arrays, Description]:
    """What :func:`save` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file of something else, or of a later version.
    """
    path = check_ending(path)
    if path.suffix in _NPZ:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        text = arrays.pop(_DESCRIPTION, None)
    else:
        h5py = _h5py()
        with h5py.File(path, "r") as file:
            text = file.attrs.get(_DESCRIPTION)
            arrays = {name: value[()] for name, value in file.items()}
    if text is None:
        raise ValueError(f"{path} was not written by spinformer: it has no description")
    description = json.loads(str(text))
    if description["format"] > _FORMAT:
        raise ValueError(
            f"{path} has format {description['format']}, this version of spinformer reads up to "
            f"{_FORMAT}: update it"
        )
    return {name: torch.as_tensor(value) for name, value in arrays.items()}, description


def _h5py() -> Any:
    try:
        import h5py  # noqa: PLC0415 (heavy, and not everyone has it)
    except ImportError as error:
        raise ImportError(
            "HDF5 files need h5py: pip install 'spinformer[sampling]', or save as .npz"
        ) from error
    return h5py


def _versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def room(arrays: Mapping[str, Tensor], prefix: str) -> Arrays:
    """The arrays whose names begin so, without that beginning."""
    return {
        name.removeprefix(prefix): value
        for name, value in arrays.items()
        if name.startswith(prefix)
    }


def described(thing: object) -> str:
    """A class with its options, the same in every process."""
    options = ", ".join(
        f"{name}={value!r}"
        for name, value in sorted(vars(thing).items())
        if not name.startswith("_")
    )
    return f"{type(thing).__name__}({options})"


def fingerprint(arrays: Mapping[str, Tensor], description: Mapping[str, Any]) -> str:
    """A hash of every bit."""
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for name, value in sorted(arrays.items()):
        value = value.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


# -- systems --------------------------------------------------------------------------------------


def pack_system(system: SpinSystem) -> tuple[Arrays, Description]:
    """A system as arrays and a description."""
    arrays = {"field": system.field, "beta": system.beta}
    if system.mask is not None:
        arrays["mask"] = system.mask
    couplings, description = _pack_couplings(system.couplings)
    arrays |= {f"couplings.{name}": value for name, value in couplings.items()}
    return arrays, {"site": _pack_site(system.site), "couplings": description}


def unpack_system(arrays: Mapping[str, Tensor], description: Mapping[str, Any]) -> SpinSystem:
    """The system that :func:`pack_system` took apart."""
    return SpinSystem(
        _unpack_couplings(room(arrays, "couplings."), description["couplings"]),
        arrays["field"],
        arrays["beta"],
        _unpack_site(description["site"]),
        mask=arrays.get("mask"),
        check_finite=False,
    )


def _pack_site(site: SiteLaw) -> Description:
    if isinstance(site, Ising):
        return {"law": "Ising"}
    if isinstance(site, Gaussian):
        return {"law": "Gaussian", "dim": site.dim, "variance": site.variance}
    return {"law": type(site).__name__, "dim": site.dim, "radius": site.radius}


def _unpack_site(description: Mapping[str, Any]) -> SiteLaw:
    laws = {"Ising": Ising, "Gaussian": Gaussian, "Sphere": Sphere, "LargeDSphere": LargeDSphere}
    options = {name: value for name, value in description.items() if name != "law"}
    law: SiteLaw = laws[description["law"]](**options)
    return law


def _pack_couplings(couplings: kinds.Couplings) -> tuple[Arrays, Description]:
    if isinstance(couplings, kinds.Masked):
        arrays, inner = _pack_couplings(couplings.couplings)
        return {**arrays, "absent": couplings.absent}, {"kind": "Masked", "inner": inner}
    if isinstance(couplings, kinds.Lattice):
        form = {"shape": list(couplings.shape), "periodic": list(couplings.periodic)}
        return {"strength": couplings.strength}, {"kind": "Lattice", **form}
    if isinstance(couplings, kinds.CurieWeiss):
        strength = {"strength": couplings.strength}
        return strength, {"kind": "CurieWeiss", "num_spins": couplings.num_spins}
    if isinstance(couplings, kinds.LowRank):
        return _factors(couplings), {"kind": "LowRank"}
    kind = "Dense" if couplings.dim is None else "MatrixValued"
    return {"matrix": couplings.to_dense()}, {"kind": kind}


def _factors(couplings: kinds.LowRank) -> Arrays:
    """By name: which of them were given, their shapes don't tell."""
    named = {"left": couplings._left, "right": couplings._right, "weights": couplings._weights}
    return {name: value for name, value in named.items() if value is not None}


def _unpack_couplings(arrays: Arrays, description: Mapping[str, Any]) -> kinds.Couplings:
    kind = description["kind"]
    if kind == "Masked":
        absent = arrays.pop("absent")
        return kinds.Masked(_unpack_couplings(arrays, description["inner"]), absent)
    if kind == "Lattice":
        return kinds.Lattice(description["shape"], description["periodic"], arrays["strength"])
    if kind == "CurieWeiss":
        return kinds.CurieWeiss(description["num_spins"], arrays["strength"])
    if kind == "LowRank":
        return kinds.LowRank(arrays["left"], arrays.get("right"), arrays.get("weights"))
    if kind == "Dense":
        return kinds.Dense(arrays["matrix"], check=False)
    return kinds.MatrixValued(arrays["matrix"], check=False)


# -- equilibria -----------------------------------------------------------------------------------


def pack_run(
    system: SpinSystem,
    observables: Observables,
    record: Record,
    broken: Tensor | None,
    log_partition: tuple[Tensor, Tensor] | None,
) -> tuple[Arrays, Description]:
    """A run as arrays and a description."""
    arrays, description = pack_system(system)
    arrays |= {f"series.{name}": value for name, value in record.series.items()}
    arrays |= {f"reports.{name}": value for name, value in record.reports.items()}
    for name, mean in record.means.items():
        arrays |= {f"means.{name}.{part}": value for part, value in mean.state().items()}
    arrays |= {"samples": record.samples, "keys": record.keys}
    if broken is not None:
        arrays["broken"] = broken
    if log_partition is not None:
        arrays["log_partition"] = torch.stack(log_partition)
    return arrays, {
        "kind": _RUN,
        "system": description,
        "every": record.every,
        "interrupted": record.interrupted,
        "configuration": record.configuration,
        "observables": {
            "conditional": observables.conditional,
            "pairs": observables.pairs,
            "structure": observables.structure,
        },
    }


def unpack_run(
    arrays: Arrays, description: Description
) -> tuple[SpinSystem, Observables, Record, Tensor | None, tuple[Tensor, Tensor] | None]:
    """What :func:`pack_run` took apart.

    Raises:
        ValueError: a file of something else.
    """
    if description.get("kind") != _RUN:
        raise ValueError(
            f"this is a {description.get('kind')}, not a saved run: SampledEquilibrium.load reads "
            "what SampledEquilibrium.save wrote"
        )
    system = unpack_system(arrays, description["system"])
    record = Record(
        series=room(arrays, "series."),
        means=binned_means(arrays),
        samples=arrays["samples"],
        keys=arrays["keys"],
        every=description["every"],
        interrupted=description["interrupted"],
        reports=room(arrays, "reports."),
        configuration=description["configuration"],
    )
    log_partition = None
    if "log_partition" in arrays:
        log_partition = (arrays["log_partition"][0], arrays["log_partition"][1])
    observables = Observables(system, **description["observables"])
    return system, observables, record, arrays.get("broken"), log_partition
