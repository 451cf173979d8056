"""Plots that `bench` writes, and README's chart. Those of a GPU run are drawn from its JSON alone."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from ..runtime import cache


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files. ValueError where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plot: needs matplotlib; pip install 'gdn_codegen[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def _save(plt: Any, figure: Any, path: Path, **about: Any) -> Path:
    figure.tight_layout()
    with cache.naming(path):
        figure.savefig(path, dpi=110, **about)
    plt.close(figure)
    return path


def timed(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that have a time."""
    return [r for r in data["rows"] if r.get("device_ms") is not None]


def time_against_length(data: dict[str, Any], path: Path) -> Path:
    """A panel for each pair of head counts and number of sequences, with a line for each implementation."""
    plt, rows = pyplot(), timed(data)
    panels = list(dict.fromkeys((r["H"], r["HV"], len(r["lens"])) for r in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4.5), squeeze=False)
    for ax, panel in zip(axes[0], panels, strict=True):
        here = [r for r in rows if (r["H"], r["HV"], len(r["lens"])) == panel]
        for who in dict.fromkeys(r["who"] for r in here):
            points = sorted((sum(r["lens"]), r["device_ms"]) for r in here if r["who"] == who)
            ax.plot(*zip(*points, strict=True), marker="o", label=who)
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="device time, ms",
               title=f"H/HV {panel[0]}/{panel[1]}, {panel[2]} sequence{'s' if panel[2] > 1 else ''}")
        ax.set_xscale("log", base=2)
        ax.legend(fontsize=8)
    return _save(plt, figure, path)


def roofline(data: dict[str, Any], path: Path) -> Path:
    """Our kernels under the ceilings that this run measured."""
    plt = pyplot()
    memory, compute = data["ceilings"]["bytes"], data["ceilings"]["flops"]
    figure, ax = plt.subplots(figsize=(9, 6))
    points = [(k["flops"] / k["bytes"], k["flops"] / k["ms"] / 1e9, f"{r['who']}: {k['name']}", r["shape"])
              for r in timed(data) for k in r["kernels"] if k.get("flops") and k.get("bytes") and k["ms"]]
    for label in dict.fromkeys(p[2] for p in points):
        mine = [p for p in points if p[2] == label]
        ax.plot([p[0] for p in mine], [p[1] for p in mine], "o", label=label)
    reach = [compute / memory / 64, compute / memory * 16, *(p[0] for p in points)]
    at = [min(reach), compute / memory, max(reach)]
    ax.plot(at, [min(compute, memory * x) / 1e12 for x in at], color="black")
    ax.set(xscale="log", yscale="log", xlabel="float operations a byte", ylabel="TFLOP/s",
           title=f"{memory / 1e12:.2f} TB/s of a copy, {compute / 1e12:.0f} TFLOP/s of a product")
    if points:
        ax.legend(fontsize=7)
    return _save(plt, figure, path)


def where_time_goes(data: dict[str, Any], path: Path, most: int = 6) -> Path:
    """A bar for each row, made of its kernels. Kernels after the `most` longest ones are summed."""
    plt, rows = pyplot(), timed(data)
    figure, ax = plt.subplots(figsize=(12, 1.5 + 0.35 * len(rows)))
    names = list(dict.fromkeys((r["who"], k["name"]) for r in rows for k in r["kernels"]))
    colours = plt.get_cmap("tab20").colors
    for y, r in enumerate(rows):
        kernels, left = sorted(r["kernels"], key=lambda k: -k["ms"]), 0.0
        rest = sum(k["ms"] for k in kernels[most:])
        for k in [*kernels[:most], *([{"name": "others", "ms": rest}] if rest else [])]:
            colour = colours[names.index((r["who"], k["name"])) % 20] if (r["who"], k["name"]) in names else "0.8"
            ax.barh(y, k["ms"], left=left, color=colour, edgecolor="white")
            if k["ms"] > 0.08 * max(x["device_ms"] for x in rows):
                ax.text(left + k["ms"] / 2, y, k["name"][:22], ha="center", va="center", fontsize=6)
            left += k["ms"]
    ax.set_yticks(range(len(rows)), [f"{r['shape']}: {r['who']}" for r in rows], fontsize=7)
    ax.invert_yaxis()
    ax.set_xlabel("device time, ms")
    return _save(plt, figure, path)


def gpu_plots(data: dict[str, Any], path: Path) -> list[Path]:
    """Writes the plots of a GPU run. Their names are PATH's stem with _time, _roofline and _kernels."""
    if not timed(data):
        return []
    draw = {"time": time_against_length, "roofline": roofline, "kernels": where_time_goes}
    return [f(data, path.with_name(f"{path.stem}_{n}.png")) for n, f in draw.items()]


def beside_peers(data: dict[str, dict[str, float]], path: Path, texts: dict[str, str]) -> Path:
    """Bars for each shape: the time of each implementation as a multiple of ours.

    data: milliseconds by shape and implementation, "ours" among them. texts: kept in the PNG.
    """
    plt = pyplot()
    names = list(dict.fromkeys(who for times in data.values() for who in times))
    colours = dict(zip(names, ("#b6c2cf", "#f2b880", "#c9a0dc", "#76b900", "#0550ae"), strict=True))
    height = 0.8 / len(names)
    figure, ax = plt.subplots(figsize=(9, 1.2 + 0.6 * len(data)))
    for i, who in enumerate(names):
        at = [(y, times[who] / times["ours"]) for y, times in enumerate(data.values()) if who in times]
        bars = ax.barh([y + (i - (len(names) - 1) / 2) * height for y, _ in at], [x for _, x in at], height, color=colours[who],
                       label=who)
        ax.bar_label(bars, [f"{x:.2f}" for _, x in at], padding=2, fontsize=6)
    ax.set_yticks(range(len(data)), [f"{shape}\n{times['ours']:.3f} ms" for shape, times in data.items()], fontsize=8)
    ax.invert_yaxis()
    ax.margins(y=0.01)
    ax.set(xlabel="device time, ours = 1 (shorter is faster)", title="Sequences x tokens, H/HV; one H200, float16, K = V = 128")
    ax.legend(fontsize=8, loc="lower right")
    ax.spines[["top", "right"]].set_visible(False)
    return _save(plt, figure, path, metadata={"Software": None, **texts})
