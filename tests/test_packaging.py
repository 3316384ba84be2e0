"""The package as it is shipped: what the releases hold, how they install, what an import costs."""

import configparser
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import spinformer

ROOT = Path(__file__).resolve().parent.parent


def run(*command: object, cwd: Path) -> str:
    """Run a command; a failure shows what it printed."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} failed\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def metadata() -> configparser.SectionProxy:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser["metadata"]


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist of the working tree and the wheel built from that sdist.

    The build runs in a copy, since it leaves folders behind, and in this environment, so that it
    needs no network.
    """
    scratch = tmp_path_factory.mktemp("releases")
    tree = scratch / "tree"
    shutil.copytree(
        ROOT,
        tree,
        ignore=shutil.ignore_patterns(
            ".*", "venv", "build", "dist", "_build", "results", "*.egg-info", "__pycache__"
        ),
    )
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", scratch / "dist", cwd=tree)
    return scratch / "dist"


def test_wheel_holds_the_package_and_nothing_else(
    releases: Path, metadata: configparser.SectionProxy
) -> None:
    (wheel,) = releases.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = f"spinformer-{metadata['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"spinformer", "simulations", information}
    assert "spinformer/py.typed" in names
    assert f"{information}/licenses/LICENSE" in names
    # A folder without __init__.py would be left out silently.
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in ("spinformer", "simulations")
        for path in (ROOT / package).rglob("*.py")
    }
    assert modules == {name for name in names if name.endswith(".py")}


def test_sdist_holds_what_the_readme_commands_need(
    releases: Path, metadata: configparser.SectionProxy
) -> None:
    (sdist,) = releases.glob("*.tar.gz")
    top = f"spinformer-{metadata['version']}"
    with tarfile.open(sdist) as archive:
        names = set(archive.getnames())
    for name in (
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "CHANGELOG.md",
        "constraints.txt",
        "setup.cfg",
        "pyproject.toml",
        "docs/conf.py",
        "tests/conftest.py",
    ):
        assert f"{top}/{name}" in names


def test_wheel_installs_into_a_fresh_environment(
    releases: Path, metadata: configparser.SectionProxy, tmp_path: Path
) -> None:
    (wheel,) = releases.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    scheme = sysconfig.get_paths("venv", vars={"base": str(tmp_path / "env")})
    python = Path(scheme["scripts"]) / ("python.exe" if sys.platform == "win32" else "python")
    site = Path(scheme["purelib"])
    # The dependencies come from the running environment: a path in a .pth file is searched after
    # the new environment's own packages, and the .pth files in it (an editable install of this
    # tree among them) are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    run(
        sys.executable,
        *("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel),
        cwd=tmp_path,
    )
    # -I: neither the working directory nor PYTHONPATH can lend the package.
    report = run(
        python,
        "-I",
        "-c",
        "import importlib.metadata as metadata, simulations, spinformer, spinformer.nn\n"
        "print(spinformer.__file__, simulations.__file__, metadata.version('spinformer'))",
        cwd=tmp_path,
    )
    library, studies, version = report.split()
    assert Path(library).is_relative_to(site)
    assert Path(studies).is_relative_to(site)
    assert version == metadata["version"]
    assert "compare" in run(python, "-I", "-m", "simulations", "--list", cwd=tmp_path)


def test_import_adds_little_to_the_import_of_torch() -> None:
    """At most 0.3 s, counted in one interpreter after torch is there.

    The clock is the processor time of the importing thread, and the least of several fresh
    interpreters counts: on a machine with nothing else to do that is the time on the wall, other
    work on the machine only ever adds to either, and the first run, which compiles bytecode and
    finds the disk cold, drops out.
    """
    clock = (
        "import time, torch\n"
        "start = time.thread_time()\n"
        "import spinformer\n"
        "print(time.thread_time() - start)"
    )
    times = [float(run(sys.executable, "-c", clock, cwd=ROOT)) for _ in range(5)]
    assert min(times) <= 0.3, times


def test_layers_load_without_scipy() -> None:
    """Its import takes longer than all of this package's: whoever needs it loads it."""
    code = "import sys, spinformer.nn; print('scipy' in sys.modules)"
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == "False"


def test_version_is_the_same_everywhere(metadata: configparser.SectionProxy) -> None:
    version = metadata["version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^version: {re.escape(version)}$", citation, re.MULTILINE)
    assert f"## [{version}]" in changelog
    assert spinformer.__version__ == version


def test_every_dependency_is_pinned() -> None:
    """A package without a pin may ask for another torch, and with it for gigabytes of libraries."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    declared = parser["options"]["install_requires"].split("\n")
    for requirements in parser["options.extras_require"].values():
        declared += requirements.split("\n")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = set(re.findall(r"^([a-z0-9.-]+)==\S+", constraints, re.MULTILINE))
    names = {re.split(r"[^A-Za-z0-9.-]", line.strip())[0] for line in declared if line.strip()}
    assert names <= pinned, f"constraints.txt lacks {sorted(names - pinned)}"
