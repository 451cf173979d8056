"""What `bench` prints and writes of rows measured on a GPU."""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..runtime import cache
from .peer_ops import LIBRARIES


def kept(rows: Iterable[dict[str, Any]], data: dict[str, Any], json_to: str | None) -> list[dict[str, Any]]:
    """The rows of a shape. Each is added to data["rows"] as it is there, and `data` is written to the file `json_to`, so that
    nothing is lost where a later row does not end."""
    here = []
    for r in rows:
        here.append(r)
        data["rows"].append(r)
        if json_to is not None:
            cache.write(Path(json_to), json.dumps(data, indent=1) + "\n")
    return here


def best_peer(rows: Sequence[dict[str, Any]], shape: str) -> float | None:
    """ms of the fastest peer at a shape."""
    return min((r["device_ms"] for r in rows if r["shape"] == shape and r["who"] in LIBRARIES and "device_ms" in r), default=None)


def table(data: dict[str, Any], detail: bool = False) -> list[str]:
    """The lines that `bench` prints: a block for each shape, the fastest peer first. detail: a line for each kernel."""
    lines = []
    for name in dict.fromkeys(r["shape"] for r in data["rows"]):
        here = [r for r in data["rows"] if r["shape"] == name]
        best, width = best_peer(here, name), max(20, *(len(r["who"]) for r in here))
        lines += ["", f"{name:{width + 2}} {'device ms':>10} {'wall ms':>9} {'graph ms':>9} {'host us':>8} {'add_ us':>8} "
                      f"{'err o':>8} {'err S':>8} {'x best':>7}"]
        for r in here:
            why = next((r[n] for n in ("absent", "refused", "error") if n in r), r["note"])
            if "device_ms" not in r:
                lines.append(f"  {r['who']:{width}} {why}")
                continue
            graph = f"{r['graph_ms']:.4f}" if r.get("graph_ms") else "-"
            ratio = f"{best / r['device_ms']:.2f}" if best else "-"
            lines.append(f"  {r['who']:{width}} {r['device_ms']:10.4f} {r['wall_ms']:9.4f} {graph:>9} "
                         f"{r['host_us']:8.1f} {r['launch_us']:8.1f} {r['error_o']:8.1e} {r['error_state']:8.1e} {ratio:>7}  "
                         f"{why}".rstrip())
            for k in r["kernels"]:
                if "flops" in k and k["ms"]:
                    lines.append(f"    {k['name']:{width - 2}} {k['ms']:10.4f}  {k['bytes'] / k['ms'] / 1e9:.2f} TB/s, "
                                 f"{k['flops'] / k['ms'] / 1e9:.0f} TFLOP/s, {100 * k['share']:.0f}% of the roofline")
                elif detail:
                    lines.append(f"    {k['name'][:width - 2]:{width - 2}} {k['ms']:10.4f}")
    return lines
