"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["align"]


def align(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width under a rule: the first to the left, the others to the right."""
    table = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
