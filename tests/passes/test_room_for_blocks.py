"""few_live, early_loads and recompute: orders of kernels over chunks for which shared memory has room."""
from __future__ import annotations

import pytest

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.core import Op, Program
from gdn_codegen.ir.differentiate import chunk_states
from gdn_codegen.passes.loops.early_loads import early_loads
from gdn_codegen.passes.storage import place
from gdn_codegen.passes.storage.live_bytes import live_bytes, most_of_two, two_fit
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.schedule.contract import Contract


def gradient(page: str, schedule: str) -> Program:
    """The gradient of a page for sm_90a, in bfloat16 with K = V = 128 and chunks of 64 tokens."""
    return lowered(Build("tilelang", algorithm=f"{page}.gradient", schedule=varied(schedule, "sm_90a", v_block=64, stages=1),
                         dtype="bfloat16", arch="sm_90a", contract=Contract(dtypes=((chunk_states("S"), "bfloat16"),))))


def test_two_blocks_of_each_kernel_over_chunks_share_a_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order one block of each takes more than half of shared memory."""
    found = gradient("gated_delta_rule", "gradient").kernels
    assert [two_fit(k, SM_90A) for k in found if k.grid == "chunks"] == [True, True]
    assert [k.blocks_per_sm for k in found if k.grid == "chunks"] == [2, 2]
    monkeypatch.setattr(place, "few_live", lambda k, sizes: k)
    lowered.cache_clear()
    assert not any(two_fit(k, SM_90A) for k in gradient("gated_delta_rule", "gradient").kernels if k.grid == "chunks")
    lowered.cache_clear()


def test_what_the_walk_back_does_not_need_comes_before_it() -> None:
    """The gradient by q depends on no gradient by a state. So the last kernel reads neither q nor d_o."""
    first, _, last = gradient("gated_delta_rule", "gradient").kernels
    stored, read = ({o.attr("tensor") for o in k.ops if o.kind == kind} for k, kind in ((first, "store"), (last, "load")))
    assert "d_q" in stored and not read & {"q", "d_o"}


@pytest.mark.parametrize("page", ["kimi_delta_attention", "gla"])
def test_gradients_of_a_gate_for_each_channel_fit_in_chunks_of_64(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk back runs on warp groups. Kimi Delta Attention fits if each reader of a decayed operand computes it again."""
    assert [bool(k.agents) for k in gradient(page, "operand_gradient").kernels] == [False, True, False]
    if page == "gla":  # it fits in the order of `few_live` alone
        return
    monkeypatch.setattr(place, "recompute", lambda k: k)
    lowered.cache_clear()
    with pytest.raises(ScheduleError, match="shared of sm_90a has"):
        gradient(page, "operand_gradient")
    lowered.cache_clear()


def test_loads_come_early_and_after_the_last_reader_of_their_buffer() -> None:
    k = gradient("gated_delta_rule", "gradient").kernels[-1]
    ops = [o for o in k.body if isinstance(o, Op)]
    loads = [n for n, o in enumerate(ops) if o.kind == "load" and len(o.type.dims) == 2]  # type: ignore[union-attr]
    assert live_bytes(k, "shared", "staged") <= most_of_two(SM_90A)
    assert sum(n < next(n for n, o in enumerate(ops) if o.kind == "matmul") for n in loads) > 3
    none = early_loads(k, 0)  # no room to move them
    assert none == k
