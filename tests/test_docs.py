"""The code that the README and the tutorials show runs as it stands."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem) for page in PAGES if blocks(page)]
)
def test_code_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are one program, read from top to bottom."""
    monkeypatch.chdir(tmp_path)  # a page may save its figures
    namespace: dict[str, object] = {"__name__": page.stem}
    try:
        for number, block in enumerate(blocks(page), start=1):
            exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)
    finally:
        plt.close("all")


def test_readme_gives_the_main_job_and_the_tests_as_one_line_each() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.startswith("python3 ")]
    assert [command.rpartition(" -m ")[2] for command in commands] == [
        "simulations compare",
        "pytest",
    ]
    # An install outside the constraints may fetch gigabytes.
    assert all("pip install -c constraints.txt " in command for command in commands)


def test_reference_describes_every_module() -> None:
    reference = "".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")
    )
    described = set(re.findall(r"^\.\. automodule:: (\S+)$", reference, re.MULTILINE))
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "spinformer").rglob("*.py")
        if not path.name.startswith("_")
    }
    assert modules == described
