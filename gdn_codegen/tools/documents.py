"""The files of docs/ that a program makes: `python -m gdn_codegen.tools.documents` writes them, `--check` compares them."""
from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ..runtime.build import Build
from . import api_page, graph, plots

ROOT = Path(__file__).parents[2]
PEERS = ("FLA", "FlashQLA", "TileOps", "FlashInfer")
OURS = "ours"
#: The chunk graphs that README and design.md show, and their schedules.
GRAPHS = {"graph_fused.svg": "fused", "graph_replay.svg": "replay", "graph_staged.svg": "staged"}
#: Where the chart keeps its figures: a text of the PNG, as JSON.
KEY = "figures"

#: Milliseconds of each implementation, by shape; without those that have no time.
Figures = dict[str, dict[str, float]]


def figures(text: str) -> Figures:
    """The figures of the first Markdown table that has a column "ours", a column for each of PEERS, and the shape first.

    ValueError where there is no such table, or a cell is neither a number of milliseconds nor "-".
    """
    lines = [[c.strip() for c in line.strip().strip("|").split("|")] if line.lstrip().startswith("|") else []
             for line in text.splitlines()]
    at = next((i for i, cells in enumerate(lines) if {OURS, *PEERS} <= set(cells)), None)
    if at is None:
        raise ValueError(f"performance.md: got no table with the columns {', '.join((*PEERS, OURS))}; accepted: one such table")
    out: Figures = {}
    for cells in lines[at + 2:]:
        if not cells:
            break
        row = dict(zip(lines[at], cells, strict=True))
        if bad := [row[who] for who in (*PEERS, OURS) if not re.fullmatch(r"\d+\.\d+|-", row[who])]:
            raise ValueError(f"performance.md: got {bad[0]!r} at {cells[0]}; accepted: milliseconds, or - for no time")
        out[cells[0]] = {who: float(row[who]) for who in (*PEERS, OURS) if row[who] != "-"}
    return out


def chart_text(png: bytes) -> Figures:
    """The figures from which a chart was drawn. The PNG has them as a text."""
    at = 8
    while at < len(png):
        (size,), kind, body = struct.unpack(">I", png[at:at + 4]), png[at + 4:at + 8], png[at + 8:]
        name, _, text = body[:size].partition(b"\0")
        if kind == b"zTXt" and name == KEY.encode():
            text = zlib.decompress(text[1:])
        if kind in (b"tEXt", b"zTXt") and name == KEY.encode():
            found: Figures = json.loads(text)
            return found
        at += size + 12
    raise ValueError(f"png: got a picture without {KEY}; accepted: one that gdn_codegen.tools.documents drew")


def _chart(path: Path, check: bool) -> bool:
    """Whether the chart shows the table's figures; it is drawn where it does not. Its bytes depend on matplotlib's version, so
    figures are compared."""
    data = figures((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"))
    if path.is_file() and chart_text(path.read_bytes()) == data:
        return True
    if not check:
        plots.beside_peers(data, path, {KEY: json.dumps(data)})
    return False


def _text(made: str) -> Callable[[Path, bool], bool]:
    def same(path: Path, check: bool) -> bool:
        if path.is_file() and path.read_text(encoding="utf-8") == made:
            return True
        if not check:
            path.write_text(made, encoding="utf-8")
        return False
    return same


def made() -> dict[str, Callable[[Path, bool], bool]]:
    """Files of docs/, and for each a function of its path that says whether it is up to date and, unless `check`, makes it."""
    graphs = {name: _text(graph.svg(Build("triton", schedule=s))) for name, s in GRAPHS.items()}
    return {"beside_peers.png": _chart, "api.md": _text(api_page.text()), **graphs}


def main(argv: Sequence[str]) -> int:
    """Status 1 where --check finds a file out of date, 2 for other words."""
    if list(argv) not in ([], ["--check"]):
        print(f"documents: got {' '.join(argv)}; accepted: nothing, or --check", file=sys.stderr)
        return 2
    check, stale = bool(argv), False
    for name, same in made().items():
        current = same(ROOT / "docs" / name, check)
        stale |= not current
        print(f"docs/{name}: {'up to date' if current else 'out of date' if check else 'written'}")
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
