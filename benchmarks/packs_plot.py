"""A plot of what packs.py measured with --flashinfer: python benchmarks/packs_plot.py OUT.jsonl PLOT.png

FlashInfer's time over the op's time by the tokens of a pack, without and with the lengths on the host.
"""
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def main() -> None:
    """Write the plot."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    figure, sides = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, name, title in zip(sides, ("op", "op_cpu"), ("lengths on the device", "with cu_seqlens_cpu"), strict=True):
        for kind in sorted({r["kind"] for r in rows}):
            of_kind = [r for r in rows if r["kind"] == kind]
            ratios = [r["us"]["flashinfer"] / r["us"][name] for r in of_kind]
            axes.scatter([sum(r["lens"]) for r in of_kind], ratios, s=12, label=kind)
        axes.axhline(1, color="gray", linewidth=.8)
        axes.set(xscale="log", yscale="log", xlabel="tokens in all", title=title, yticks=[.5, .7, 1, 1.4, 2, 3, 4])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    sides[0].set_ylabel("FlashInfer's time / ours")
    sides[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=80)


if __name__ == "__main__":
    main()
