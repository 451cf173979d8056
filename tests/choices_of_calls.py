"""The builds that calls of many kinds get, to show what a change does to dispatch.

`python tests/choices_of_calls.py BEFORE.json` writes them, in a checkout of the commit before the change; the same with
AFTER.json in one of the commit after. `python tests/choices_of_calls.py BEFORE.json AFTER.json` compares the two. The calls are
500 of a grid: targets, devices, sizes, K and V, dtypes, chunks, contracts, with and without parts. For each call the file has
the choice with its reasons, and all builds of the model and of the tables in their order. The devices are described, so no GPU
is needed.
"""
from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from choices import a_call

from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import choose, device
from gdn_codegen.runtime.call.request import DTYPES
from gdn_codegen.runtime.call.size import size_of
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.schedule.contract import Contract

GPUS = (device.described("NVIDIA H200"), device.gpu("NVIDIA GH200", "sm_90", 114),
        device.gpu("NVIDIA A100", "sm_80", 108), device.described("cpu"))
#: Some are in the packaged tables.
EXTENTS = tuple(Extent(*x) for x in (
    (16, 16, 1, 8192), (16, 16, 1, 32768), (16, 32, 1, 32768), (4, 8, 1, 16384), (4, 16, 1, 2048), (16, 48, 2, 131072),
    (16, 32, 8, 8192), (4, 16, 2, 32768), (4, 4, 64, 4096), (1, 1, 1, 1)))
#: The values of each argument of `chosen`. What is given more often is drawn more often.
AXES: tuple[tuple[Any, ...], ...] = (
    ("triton", "triton", "tilelang", "tilelang", "pto", "auto"), (*GPUS, *GPUS[:3], *GPUS[:2]), EXTENTS,
    ((128, 128), (128, 128), (128, 128), (64, 128), (256, 256), (128, 160)),
    (torch.float16, torch.float16, torch.bfloat16, torch.float32), (None, None, None, 16, 32, 64, 128),
    ("", "", "k=unit", "beta=sigmoid,g=raw/bfloat16,k=l2norm,q=l2norm,state=vk/float32/pool/in_place,strided"),
    ("1", "1", "1", "0"))
COUNT = 500


def described(b: Build) -> str:
    """All fields of a build, with those of its schedule."""
    return f"{b} {b.plan}"


def chosen(target: str, on: device.Facts, x: Extent, dims: tuple[int, int], dtype: torch.dtype, chunk: int | None, accept: str,
           parts: str) -> dict[str, Any]:
    """What a call gets on a device, and the builds from which it is chosen."""
    contract = Contract.parse(accept)
    with mock.patch.dict(os.environ, GDN_CODEGEN_PARTITION=parts):
        choose.kept_choice.cache_clear()
        try:
            choice = choose.choice(a_call(x, dtype, "meta", dims, contract, target=target, chunk_size=chunk), on)
            found = f"{described(choice.build)} {choice}"
        except ValueError as e:
            found = f"{type(e).__name__}: {e}"
        choose.kept_choice.cache_clear()
        about = Build("triton" if target == "auto" else target, chunk or 64, dtype=DTYPES[dtype], head_dim_k=dims[0],
                      head_dim_v=dims[1], contract=contract)
        size = size_of(x, about.target, on)
        table = choose.measured(about, on.arch, on.names, x.shape_class, chunk, x.shared)
        model = choose.modelled(about, on.arch, size.few, x.shape_class, chunk, **size.asked)
        return {"choice": found, **{n: [(described(b), why) for b, why in builds] for n, builds in
                                    (("table", table), ("model", model))}}


def calls() -> dict[str, tuple[Any, ...]]:
    """Calls with a key each, the same on each run."""
    drawn, found = random.Random(0), {}
    while len(found) < COUNT:
        call = tuple(map(drawn.choice, AXES))
        found[" ".join(map(str, call))] = call
    return found


def main(files: list[str]) -> int:
    if len(files) == 1:
        Path(files[0]).write_text(json.dumps({key: chosen(*call) for key, call in calls().items()}))
        return 0
    before, after = (json.loads(Path(f).read_text()) for f in files)
    found = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    for key in found:
        print(f"{key}\n    before: {before.get(key)}\n    after:  {after.get(key)}")
    print(f"{len(after)} calls, {len(found)} differ")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
