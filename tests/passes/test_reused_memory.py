"""reused_memory: barriers between buffers of different element sizes that may share memory."""
from dataclasses import replace

import pytest

from gdn_codegen.ir.core import Kernel, Loop, Op
from gdn_codegen.ir.ops import BESIDE
from gdn_codegen.ir.types import BYTES, Buffer, Tile
from gdn_codegen.passes.storage.live_bytes import live_ranges
from gdn_codegen.passes.sync.reused_memory import SHARED, _ordered
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import SCHEDULES, varied
from gdn_codegen.schedule.contract import Contract


def kernels():
    for name in SCHEDULES:
        yield from lowered(Build("tilelang", 64, schedule=SCHEDULES[name], head_dim_k=64, head_dim_v=64)).kernels
    walk = varied("operand_walk", "sm_90a", v_block=64, residuals="@update")
    for forms in ("", "g=raw,beta=sigmoid,q=l2norm,k=l2norm"):
        yield from lowered(Build("tilelang", 64, algorithm="kimi_delta_attention", dtype="bfloat16", arch="sm_90a", schedule=walk,
                                 contract=Contract.parse(forms))).kernels


def unordered(k):
    """Pairs of buffers with elements of different sizes that are not live at once and have no barrier between them."""
    size = {b.name: BYTES[b.dtype] for b in k.buffers}
    live = live_ranges(k, SHARED)
    barriers = [n for n, s in enumerate(k.body) if isinstance(s, Op) and s.kind in ("barrier", "wait")]
    return [(x, y) for x, (_, last) in live.items() for y, (first, _) in live.items()
            if last < first and size[x] != size[y] and not any(last < n < first for n in barriers)]


def test_each_barrier_is_there_and_is_needed():
    tried = 0
    for k in (k for k in kernels() if not k.agents):
        assert not unordered(k), k.name
        for n, s in enumerate(k.body if k.grid == "chunks" else ()):
            if isinstance(s, Op) and s.kind == "barrier":
                assert unordered(replace(k, body=(*k.body[:n], *k.body[n + 1:]))), k.name
                tried += 1
    assert tried > 10


def test_where_barriers_are():
    """d is in float32, and a and b in bfloat16. A loop is one statement, and so are ops side by side."""
    def buffers(**dtypes):
        return tuple(Buffer(n, "shared", (8, 8), dtype) for n, dtype in dtypes.items())

    def op(kind, out, *args, **attrs):
        return Op(kind, out, args, tuple(attrs.items()), Tile(("C", "C")), buffer=out)
    d, y = op("load", "d", tensor="d"), op("exp", "y", "b")
    k = Kernel("k", "chunks", (op("load", "a", tensor="a"), op("exp", "b", "a"), d, op("exp", "e", "d"), y),
               buffers=buffers(a="bfloat16", b="bfloat16", d="float32", e="float32", y="bfloat16"))
    kinds = [s.kind for s in _ordered(k, "block")]
    assert kinds == ["load", "exp", "barrier", "load", "exp", "barrier", "exp"]
    beside = replace(k, body=(*k.body[:2], *(x.with_attrs(**{BESIDE: 2}) for x in (op("exp", "e", "b"), op("exp", "y", "b")))),
                     buffers=buffers(a="float32", b="bfloat16", e="bfloat16", y="bfloat16"))
    assert [s.kind for s in _ordered(beside, "block")] == ["load", "exp", "barrier", "exp", "exp"]
    loop = replace(k, body=(k.body[0], op("row_sum", "s", "a"), Loop("chunk", (), (op("load", "b", tensor="b"),))),
                   buffers=buffers(a="bfloat16", b="bfloat16", s="bfloat16"))
    assert [getattr(s, "kind", "loop") for s in _ordered(loop, "block")] == ["load", "row_sum", "barrier", "loop"]


@pytest.mark.parametrize("target", ["triton", "pto"])
def test_other_targets_have_none(target):
    p = lowered(Build(target, 64 if target == "triton" else 128, head_dim_k=128, head_dim_v=128))
    assert not [o for k in p.kernels for o in k.ops if o.kind == "barrier" and o.attr("scope") == "block"]
