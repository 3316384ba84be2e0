"""Configuration of the documentation: MyST pages, reference by autodoc."""

import configparser
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The reference is that of this tree, installed or not.
sys.path.insert(0, str(ROOT))

_setup = configparser.ConfigParser()
_setup.read(ROOT / "setup.cfg", encoding="utf-8")

project = _setup["metadata"]["name"]
author = _setup["metadata"]["author"]
copyright = author
release = version = _setup["metadata"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
# Attributes of dataclasses are described once, in the docstring of the class.
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"{project} {release}"

# Docstrings write shapes as in code, (chains, *batch, N, D); to docutils a star begins an emphasis.
_UNPACKED = re.compile(r"(``.*?``)|(?<![\w*\\])\*(?=[a-z_]+\b)(?![^*\n]*\w\*)")


def _escape_shapes(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    for number, line in enumerate(lines):
        lines[number] = _UNPACKED.sub(lambda match: match[1] or "\\*", line)


def setup(app: Any) -> None:
    """Sphinx calls this."""
    # Before napoleon, which has its own way with a star at the head of a field.
    app.connect("autodoc-process-docstring", _escape_shapes, priority=400)
