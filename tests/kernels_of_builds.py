"""The emitted kernels of many builds, to show what a change does to them.

`python tests/kernels_of_builds.py BEFORE.json` writes them, in a checkout of the commit before the change; the same with
AFTER.json in one of the commit after. `python tests/kernels_of_builds.py BEFORE.json AFTER.json` compares the two: kernels are
equal up to names of values and comments, launches by their grids, blocks and threads. The builds: every named schedule on every
target, several sizes and dtypes, partitions, raw gates, simple GLA, and all that the packaged tables of `tune` have.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from up_to_names import difference

from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call import tables
from gdn_codegen.schedule import SCHEDULES, varied
from gdn_codegen.schedule.contract import Contract

PLACES = (("triton", ""), ("tilelang", ""), ("tilelang", "sm_90a"), ("pto", ""))
SIZES = ((64, 128, 128, "float16"), (64, 128, 128, "bfloat16"), (32, 64, 64, "float16"), (128, 128, 128, "bfloat16"),
         (64, 96, 160, "float16"), (32, 128, 128, "float32"))
RAW = Contract.parse("beta=sigmoid,g=raw/bfloat16,k=l2norm,q=l2norm,state=vk/float32/pool/in_place,strided")


def builds() -> Iterator[tuple[str, Build]]:
    """Builds with a key each, "TARGET ARCH SCHEDULE ...". Some do not fit, which is compared, too."""
    for (target, arch), s in product(PLACES, SCHEDULES):
        key = f"{target} {arch} {s}"
        for chunk, K, V, dtype in SIZES:
            b = Build(target, chunk, schedule=s, dtype=dtype, head_dim_k=K, head_dim_v=V, arch=arch)
            yield f"{key} {chunk} {K} {V} {dtype}", b
        yield f"{key} raw", Build(target, schedule=s, dtype="bfloat16", arch=arch, contract=RAW)
        yield f"{key} simple_gla", Build(target, algorithm="simple_gla", schedule=s, arch=arch)
        for how in ("decay", "exact") if target != "pto" else ():
            yield f"{key} {how}", Build(target, schedule=varied(s, arch, partition=how), arch=arch, dtype="bfloat16")
    for r in tables.packaged():
        yield f"{r.about.target} table {r.about.name}", r.about


def kernels(b: Build) -> Any:
    """Of each kernel: grid, blocks, text, warps and threads. Of a build that does not fit, the reason."""
    try:
        return [[k.grid, k.blocks, k.body, str(k.extra.get("warps")), str(k.extra.get("threads"))]
                for k in b.of.emit(lowered(b), b.layout, b.heads)]
    except ValueError as e:
        return f"{type(e).__name__}: {e}"


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """What differs, by build; builds that neither side has or both refuse do not."""
    return {key: text for key in {**before, **after} if (text := _difference(key, before.get(key), after.get(key)))}


def _difference(key: str, x: Any, y: Any) -> str:
    if x is None or y is None:
        return f"only {'before' if y is None else 'after'}"
    if isinstance(x, str) or isinstance(y, str):
        return "" if isinstance(x, str) and isinstance(y, str) else y if isinstance(y, str) else f"builds now; was refused: {x}"
    if [(g, n, *launch) for g, n, _, *launch in x] != [(g, n, *launch) for g, n, _, *launch in y]:
        return "other kernels or launches"
    return next(filter(None, (difference(a[2], b[2], not key.startswith("pto ")) for a, b in zip(x, y, strict=True))), "")


def main(files: list[str]) -> int:
    if len(files) == 1:
        Path(files[0]).write_text(json.dumps({key: kernels(b) for key, b in builds()}))
        return 0
    before, after = (json.loads(Path(f).read_text()) for f in files)
    found = compared(before, after)
    print("\n".join(f"{key}\n    {text[:400]}" for key, text in found.items()))
    print(f"{len(after)} builds, {len(found)} differ")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
