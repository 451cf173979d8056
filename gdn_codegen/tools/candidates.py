"""What `tune` tries: spaces of schedules and values of their fields, by target."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from ..runtime.build import Build
from ..runtime.call import choose
from ..schedule import varied

#: Fields that a candidate may have other than the first of its space.
MOST = 2


@dataclass(frozen=True)
class Space:
    """Candidates: chunks, schedules, and values of their fields, the expected best first. arch: for this architecture alone.
    base: fields of all of them."""

    schedules: tuple[str, ...]
    fields: dict[str, tuple[Any, ...]]
    chunks: tuple[int, ...] = (64, 32, 128)
    arch: str = ""
    base: dict[str, Any] = field(default_factory=dict)

    def plans(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Choices as a table keeps them, with how many changes lead to each; what says how to split implies parts."""
        for chunk, name, *values in product(self.chunks, self.schedules, *self.fields.values()):
            changed = {f: v for (f, known), v in zip(self.fields.items(), values, strict=True) if v != known[0]}
            split = bool(changed.keys() & {"part_chunks", "warm_up", "longest_first"})
            how = changed.get("partition")
            fits = how == "decay" or "longest_first" not in changed and (how or not split)
            steps = len(changed.keys() - {"value_heads"}) - split + (chunk != self.chunks[0]) + (name != self.schedules[0])
            if steps <= MOST and fits:
                yield steps, {"schedule": name, "set": {**self.base, **changed}, "chunk": chunk, "arch": self.arch}


#: The values of a schedule's `value_heads` to try. 0 means the device's number, which is 1.
HEADS = {"walk": (0, 4, 2), "fused_walk": (0,)}
SPACES: dict[str, tuple[Space, ...]] = {
    "tilelang": (
        *(Space((name,), {"partition": (None, "decay"), "part_chunks": (0, 8, 10, 16, 24, 32, 34, 40, 64, 128, 256),
                          "longest_first": (False, True), "value_heads": HEADS[name]}, (64,), "sm_90a")
          for name in ("walk", "fused_walk")),
        Space(("fused", "replay", "prepared", "staged"), {"partition": (None, "decay"), "part_chunks": (0, 16, 64),
                                                          "v_block": (0, 64, 32)})),
    "triton": (
        Space(("walk",), {"partition": (None, "decay"), "part_chunks": (0, 10, 16, 32, 64, 68, 128),
                          "longest_first": (False, True), "v_block": (0, 128)}, (32,), base={"stages": 3}),
        Space(("walk",), {}, (32,), base={"stages": 4, "partition": "decay", "part_chunks": 10, "longest_first": True}),
        Space(("walk", "prepared"), {"partition": (None, "decay"), "part_chunks": (0, 8, 16, 32, 64),
                                     "longest_first": (False, True)}, (64,))),
}

#: For decoding steps, by target: chunks, with the columns of the state that an instance holds, and warps. TileLang has one warp
#: with chunks of 16 tokens, and four with chunks of 32 (`block_threads`), which hold a state four times as large.
STEPS: dict[str, tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]] = {
    "triton": ((16, (16, 32, 64, 128), (1, 2, 4, 8)),),
    "tilelang": ((16, (16, 32), (0,)), (32, (32, 64, 128), (0,)), (64, (64, 128), (0,)))}
#: Entries of the state that a warp may hold: more spill hundreds of bytes per thread (sm_90a, both targets), and are not timed.
A_WARP = 128 * 32


def steps(about: Build) -> list[Build]:
    """The builds to try for decoding steps, target by target: states in memory's order and transposed, with the columns and warps
    that can hold them. A step is one chunk, so there is nothing to prefetch, and stages are one or two."""
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
        for i, space in enumerate(s for s in SPACES[about.target] if s.arch == here):
            for steps, c in space.plans():
                fields = dict(c["set"])
                if (about.target, c["schedule"]) == ("triton", "walk"):
                    fields |= choose.described(arch, c["chunk"], "partition" in fields)
                schedule = varied(c["schedule"], c["arch"], **fields) if fields else c["schedule"]
                found.append((i + steps, replace(about, schedule=schedule, chunk=c["chunk"], arch=c["arch"])))
        if any(choose.fits(b) for _, b in found):
            break
    return [b for _, b in sorted(found, key=lambda x: x[0])]
