"""Chooses the builds of a gradient: one for the states before chunks, and one that walks back."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ...host.tensors import _fail
from ...schedule import varied
from ..build import Build
from ..targets import choose
from .choose import refused, unfit
from .device import facts
from .request import DEFAULT_CHUNK, DTYPES, Call

#: Schedules of gradients with changed fields, by target and architecture; "" is for any. The first that fits is taken. A target
#: that is not here has no gradients.
SCHEDULES: dict[tuple[str, str], tuple[tuple[str, dict[str, Any]], ...]] = {
    ("triton", ""): (("fused", {}),), ("tilelang", ""): (("fused", {}),)}
#: Tokens of a chunk, tried from the largest that the call allows.
CHUNKS = (128, 64, 32, 16)


@dataclass(frozen=True)
class Builds:
    """The builds of a gradient: the states before chunks, and the gradient itself."""

    states: Build
    gradient: Build


def candidates(b: Build, arch: str, most: int) -> Iterator[Build]:
    """Builds of a gradient, the best first. b: with target, page, dtype, K, V and contract. arch: of the device. most: tokens of
    the largest chunk."""
    for chunk in (n for n in CHUNKS if n <= most):
        for key in dict.fromkeys(((b.target, arch), (b.target, ""))):
            for name, fields in SCHEDULES.get(key, ()):
                yield replace(b, chunk=chunk, schedule=varied(name, **fields) if fields else name)


def builds_for(call: Call) -> Builds:
    """The builds of the gradient of a call. ValueError where none fits.

    Rows and states lie as the pages have them, in float32 where they may: the gradient makes of them what the caller has.
    """
    x = call.request
    target = choose(call.device.type, x.target)
    if (target, "") not in SCHEDULES:
        _fail("target", repr(target), f"{', '.join(sorted({n for n, _ in SCHEDULES}))}, which have gradients")
    b = Build(target, layout=x.layout, algorithm=x.page, dtype=DTYPES[call.dtype], head_dim_k=call.head_dims[0],
              head_dim_v=call.head_dims[1], contract=replace(call.contract.unpromised(), dtypes=(), strided=False,
                                                             state_layout="kv", state_dtype="float32"))
    most = DEFAULT_CHUNK if x.chunk is None else max(x.chunk, CHUNKS[-1])
    return _fitting(b, facts(call.device).arch, most, call.device)


@lru_cache(maxsize=256)
def _fitting(b: Build, arch: str, most: int, device: Any) -> Builds:
    """The first builds that fit. b, arch, most: as for `candidates`."""
    why = ""
    for x in candidates(b, arch, most):
        found = Builds(*(replace(x, algorithm=f"{b.algorithm}.{kind}") for kind in ("states", "gradient")))
        against = [unfit(y) or refused(y, device) for y in (found.states, found.gradient)]
        if not any(against):
            return found
        why = next(filter(None, against))
    _fail("target", repr(b.target), f"a target that has a gradient of {b.algorithm} with K = {b.head_dim_k}, "
                                    f"V = {b.head_dim_v} in {b.dtype} ({why})")
