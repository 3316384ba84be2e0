"""The code that the README and the tutorials show runs as it stands."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """The code of the page, each block moved to the line where it stands, for tracebacks."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text.count("\n", 0, m.start(1)) + m[1] for m in BLOCK.finditer(text)]


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem) for page in PAGES if blocks(page)]
)
def test_code_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are one program, read from top to bottom."""
    monkeypatch.chdir(tmp_path)  # a page may save its figures
    namespace: dict[str, object] = {"__name__": page.stem}
    try:
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), namespace)
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
    """A package that exports its parts is described as one."""
    reference = "".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")
    )
    described = set(re.findall(r"^\.\. automodule:: (\S+)$", reference, re.MULTILINE))
    missing = []
    for path in (ROOT / "spinformer").rglob("*.py"):
        if path.name != "__init__.py":
            parts = path.relative_to(ROOT).with_suffix("").parts
            names = {".".join(parts[:end]) for end in range(2, len(parts) + 1)}
            if not names & described:
                missing.append(".".join(parts))
    assert not missing
