"""The script that draws docs/matrix.svg: the quick matrix, and how two connectors did in it.

    python docs/matrix_picture.py

The numbers are those of the first report of each claim in docs/claims. tests/docs compares the picture with
what `picture` returns.
"""

from __future__ import annotations

import html
from collections import Counter
from pathlib import Path

from kept_claims import FOLDER, read

from model_matrix import load_families, load_geometries

DOCS = Path(__file__).parent
FILE = DOCS / "matrix.svg"
MINOR = "vllm-0.32"
PANELS = {
    "reference_connector": "Reference connector",
    "NixlConnector": f"NixlConnector of {MINOR.replace('vllm-', 'vLLM ')}",
}
NAMES, WIDTH, HEIGHT, GAP, TOP = 210, 48, 22, 18, 62  # pixels: row names, cells, between panels, headings
RIGHT, WRONG, NONE = "#2c6e1f", "#b3261e", "#eee"  # white text can be read on the first two
INK = "#222"

Cell = tuple[str, str]  # family, topology


def counts(connector: str) -> dict[Cell, tuple[int, int]]:
    """Cell -> how many cases passed, and how many apply, in the first report of the kept claim."""
    results = read(FOLDER / connector / MINOR)[0]["results"]
    applies: Counter[Cell] = Counter()
    passed: Counter[Cell] = Counter()
    for one in results:
        if (cell := one["cell"]) and one["outcome"] != "NOT-APPLICABLE":
            key = cell["family"], cell["topology"]
            applies[key] += 1
            passed[key] += one["outcome"] in ("PASS", "WARNING")
    return {key: (passed[key], number) for key, number in applies.items()}


def picture() -> str:
    """Return the drawing as SVG. It loads nothing, and has a background of its own for dark pages."""
    found = {title: counts(connector) for connector, title in PANELS.items()}
    cells = {cell for panel in found.values() for cell in panel}
    titles = {name: one.title.split(":")[0] for name, one in (load_families() | load_geometries()).items()}
    families = sorted({family for family, _ in cells}, key=lambda name: titles[name].lower())
    topologies = sorted({topology for _, topology in cells})
    panel_width = WIDTH * len(topologies)
    size = NAMES + 2 * panel_width + 2 * GAP, TOP + HEIGHT * len(families) + 40
    parts = [
        _text(
            GAP,
            TOP + HEIGHT * row + 15,
            titles[family].replace(" with an Eagle3 draft", " + Eagle3"),
            "start",
        )
        for row, family in enumerate(families)
    ]
    for panel, (title, of) in enumerate(found.items()):
        left = NAMES + panel * (panel_width + GAP)
        parts.append(_text(left, 24, title, "start", weight="bold"))
        for column, topology in enumerate(topologies):
            x = left + column * WIDTH
            parts.append(_text(x + WIDTH // 2, TOP - 10, topology))
            for row, family in enumerate(families):
                parts += _cell(x, TOP + HEIGHT * row, of.get((family, topology)))
    legend = "PpDd: tensor parallel sizes of P and D. Passed/applying cases; green: all of them pass."
    parts.append(_text(GAP, size[1] - 14, legend, "start"))
    label = "Cases that pass in each cell of the quick matrix"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{label}"><title>{label}</title>\n'
        f'<rect width="100%" height="100%" rx="6" fill="#fff"/>\n'
        '<g font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">\n'
        + "\n".join(parts)
        + "\n</g></svg>\n"
    )


def _cell(x: int, y: int, number: tuple[int, int] | None) -> list[str]:
    fill = NONE if number is None else RIGHT if number[0] == number[1] else WRONG
    box = f'<rect x="{x + 1}" y="{y + 1}" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="2" fill="{fill}"/>'
    if number is None:
        return [box]
    passed, applying = number
    word = str(passed) if passed == applying else f"{passed}/{applying}"
    return [box, _text(x + WIDTH // 2, y + 15, word, fill="#fff", size=10)]


def _text(
    x: int, y: int, text: str, anchor: str = "middle", *, weight: str = "", fill: str = INK, size: int = 11
) -> str:
    more = f' font-weight="{weight}"' if weight else ""
    more += f' font-size="{size}"' if size != 11 else ""
    more += f' text-anchor="{anchor}"' if anchor != "middle" else ""
    return f'<text x="{x}" y="{y}" fill="{fill}"{more}>{html.escape(text)}</text>'


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
