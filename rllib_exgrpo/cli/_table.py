"""Aligned tables for the terminal."""

from collections.abc import Mapping, Sequence

WIDTH = 100


def format_table(
    columns: Mapping[str, Sequence[str]],
    *,
    text: Sequence[str] = (),
    width: int = WIDTH,
) -> str:
    """Lays columns out side by side.

    Args:
        columns: header to cells.
        text: headers of columns that are aligned on the left; the first of them is cut
            where the table would be too wide.
        width: of the table, at most.
    """
    cells = {header: [header, *column] for header, column in columns.items()}
    widths = {h: max(map(len, column)) for h, column in cells.items()}
    if text:
        spare = width - sum(widths.values()) - 2 * (len(widths) - 1)
        widths[text[0]] = max(widths[text[0]] + min(spare, 0), 8)
    aligned = [
        [_fit(cell, widths[h], left=h in text) for cell in column]
        for h, column in cells.items()
    ]
    return "\n".join("  ".join(row).rstrip() for row in zip(*aligned, strict=True))


def _fit(cell: str, width: int, *, left: bool) -> str:
    if len(cell) > width:
        cell = cell[: width - 1] + "…"
    return f"{cell:<{width}}" if left else f"{cell:>{width}}"


def number(value: float, digits: int = 0) -> str:
    """Returns a number with thousands separators; "-" for NaN."""
    return "-" if value != value else f"{value:,.{digits}f}"


def share(value: float) -> str:
    """Returns a share in per cent; "-" for NaN."""
    return "-" if value != value else f"{100 * value:.0f} %"
