"""Shared memory of a kernel with one agent: our count, TileLang's, and what is refused."""
import pytest

from gdn_codegen.ir.core import Buffer, Kernel, Op
from gdn_codegen.passes.storage.live_bytes import live_bytes, packed_bytes
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.call.choose import unfit
from gdn_codegen.runtime.load import module
from gdn_codegen.schedule import ScheduleError


def allocated(b):
    """The bytes that TileLang allocates for each kernel of a build, for Hopper."""
    tilelang = pytest.importorskip("tilelang")
    from gdn_codegen.tools.check_tilelang import _shared
    launcher = module(b)._launcher
    for k in lowered(b).kernels:
        with tilelang.tvm.transform.PassContext(config=launcher.passes[k.name]), \
                tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target:
            yield _shared(tilelang.lower(launcher.program(k.name), target=target))


@pytest.mark.slow
@pytest.mark.parametrize("page, plan", [
    pytest.param("rwkv7", "fused", marks=pytest.mark.long), ("gla", "fused"),
    pytest.param("gated_delta_product.gradient", "gradient", marks=pytest.mark.long)])
def test_tilelang_allocates_as_much(page, plan):
    """A walk holds all its buffers throughout. Kernels over chunks leave gaps between those that are live."""
    b = Build("tilelang", algorithm=page, head_dim_k=64, head_dim_v=64, schedule=plan, dtype="bfloat16")
    ours = [packed_bytes(k) for k in lowered(b).kernels]
    assert all(0 <= theirs - n <= 1024 for n, theirs in zip(ours, allocated(b), strict=True)), ours


@pytest.mark.parametrize("body, sizes, live, packed", [
    ("a -a b -b", {"a": 4, "b": 3}, 4, 4),
    ("a b -a c -bc", {"a": 4, "b": 1, "c": 6}, 7, 11),  # a's place is too small
    ("a b -a c d -bcd", {"a": 4, "b": 1, "c": 3, "d": 1}, 5, 5),  # or has room for two
    ("b a -a c -bc", {"a": 4, "b": 1, "c": 6}, 7, 7),  # or grows at the end
    ("a b c -a -c d -bd", {"a": 2, "b": 1, "c": 3, "d": 2}, 6, 6)])  # the smallest that is large enough
def test_buffers_that_are_not_live_at_once_leave_gaps(body, sizes, live, packed):
    """A letter fills a buffer of so many KiB, a minus reads some."""
    ops = tuple(Op("store", "", tuple(x[1:])) if x[0] == "-" else Op("load", x, buffer=x) for x in body.split())
    k = Kernel("k", "chunks", ops, buffers=tuple(Buffer(n, "shared", (512, kib), "float16") for n, kib in sizes.items()))
    assert (live_bytes(k, "shared") // 1024, packed_bytes(k) // 1024) == (live, packed)


def test_a_kernel_over_chunks_reuses_places_and_a_walk_does_not():
    by_grid = {}
    for plan in ("fused", "staged"):
        for k in lowered(Build("tilelang", algorithm="gla", schedule=plan, dtype="bfloat16")).kernels:
            size = sum(2 ** (b.dtype == "float32") * 2 * b.slots * b.shape[0] * (b.shape[1] if len(b.shape) > 1 else 1)
                       for b in k.buffers if b.space in ("shared", "staged"))
            by_grid.setdefault(k.grid, []).append((packed_bytes(k), size))
    assert all(live == size for live, size in by_grid["sequences"]) and any(live < size for live, size in by_grid["chunks"])


def test_a_build_that_needs_more_than_the_device_has_is_refused_with_the_numbers():
    """The tile through which o is stored is what is too much."""
    large, small = (Build("tilelang", algorithm="gla", chunk=n, schedule="replay", dtype="bfloat16") for n in (128, 64))
    with pytest.raises(ScheduleError, match=r"shared of hopper has 232448 bytes, 264192 are needed: .*o"):
        render(large)
    assert "264192 are needed" in unfit(large) and not unfit(small)
