"""What `tune` tries: the candidates of a target's spaces (`targets/candidates.py`), and decoding steps."""
from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from ..runtime.build import Build
from ..runtime.call import choose
from ..schedule import varied

#: For decoding steps, by target: chunks, with the columns of the state that an instance holds, and warps. TileLang has one warp
#: with chunks of 16 tokens, and four with chunks of 32 (`block_threads`), which hold a state four times as large.
STEPS: dict[str, tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]] = {
    "triton": ((1, (8, 16, 32), (1, 2)), (16, (16, 32, 64, 128), (1, 2, 4, 8))),
    "tilelang": ((1, (8, 16, 32), (0,)), (16, (16, 32), (0,)), (32, (32, 64, 128), (0,)), (64, (64, 128), (0,)))}
#: Entries of the state that a warp may hold: more spill hundreds of bytes per thread (sm_90a, both targets), and are not timed.
A_WARP = 128 * 32


def steps(about: Build) -> list[Build]:
    """The builds to try for decoding steps, target by target: states in memory's order and transposed, with the columns and warps
    that can hold them. A step has few chunks, so there is nothing to prefetch, and stages are one or two."""
    found = []
    for target, ways in STEPS.items():
        for chunk, columns, warps in ways:
            for n, w, layout in product(columns, warps, ("vk", "kv")):
                n = min(n, about.head_dim_v)
                if w and not A_WARP * w // 8 <= about.head_dim_k * n <= A_WARP * w:
                    continue
                fields: dict[str, Any] = {"state_layout": layout, "v_block": n, "warps": w}
                plans = [varied("fused", **fields), *([varied("fused", **fields, stages=1)] if target == "triton" else [])]
                found += [replace(about, target=target, chunk=chunk, schedule=p) for p in plans]
    return list(dict.fromkeys(found))


def candidates(about: Build, arch: str) -> list[Build]:
    """The builds to try for inputs of a kind, those that differ least from what is expected to be best first: those made for
    the architecture where one of them fits, else those for any."""
    found: list[tuple[int, Build]] = []
    for here in (arch, "") if arch else ("",):
        for i, space in enumerate(s for s in about.of.spaces if s.arch == here):
            found += [(i + steps, replace(about, schedule=x.schedule, chunk=x.chunk, arch=x.arch))
                      for steps, x in space.candidates(arch)]
        if any(choose.fits(b) for _, b in found):
            break
    return [b for _, b in sorted(found, key=lambda x: x[0])]
