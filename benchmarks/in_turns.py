"""Generated modules of two commits at one shape, in turns in one process, us: python benchmarks/in_turns.py BEFORE.py AFTER.py
--lengths 32768 --heads 16/16 [--seed 2] [--slow-heads 4]

Each module is one that `gdn_codegen build` wrote for this GPU and bfloat16, with K = V = 128. Prints three medians of 15 graph
replays for each module, with a flushed L2, and whether o and the final state have the same bits.
"""
import argparse
from functools import partial
from pathlib import Path

import torch
from packs import inputs, us

from gdn_codegen.runtime.load import import_path


def main() -> None:
    """Time both modules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", type=Path, nargs=2)
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="tokens of each sequence of the pack")
    parser.add_argument("--heads", required=True, help="H/HV")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow-heads", type=int, default=0, metavar="N", help="every Nth value head forgets nothing (1: all)")
    a = parser.parse_args()
    h, hv = map(int, a.heads.split("/"))
    x = inputs(a.lengths, h, hv, a.seed)
    if a.slow_heads:
        x["g"][..., ::a.slow_heads] = 0
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    x |= dict(scale=128 ** -.5, output_final_state=True)
    calls = [partial(import_path(path).chunk_gated_delta_rule, **x) for path in a.modules]
    (o, final, *_), (o_after, final_after, *_) = (call() for call in calls)
    same = torch.equal(o, o_after) and torch.equal(final, final_after)
    times = [[us(call, flush, 15) for call in calls] for _ in range(3)]
    print(f"{len(a.lengths)} sequences, {sum(a.lengths)} tokens, {a.heads}: before, after {times}; "
          f"{'the same bits' if same else 'other results'}")


if __name__ == "__main__":
    main()
