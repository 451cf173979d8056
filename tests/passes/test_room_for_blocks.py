"""few_live, early_loads and recompute: orders of kernels over chunks for which shared memory has room."""
from __future__ import annotations

import pytest

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.core import Program
from gdn_codegen.ir.differentiate import chunk_states
from gdn_codegen.passes.loops import early_loads as early_loads_module
from gdn_codegen.passes.loops.early_loads import early_loads
from gdn_codegen.passes.storage import place
from gdn_codegen.passes.storage.live_bytes import most_of_two, packed_bytes, two_fit
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call.choose import unfit
from gdn_codegen.runtime.call.gradient_builds import asked_of, candidates
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.schedule.contract import Contract


def gradient(page: str, schedule: str, arch: str = "sm_90a") -> Program:
    """The gradient of a page, in bfloat16 with K = V = 128 and chunks of 64 tokens."""
    return lowered(Build("tilelang", algorithm=f"{page}.gradient", schedule=varied(schedule, arch, v_block=64, stages=1),
                         dtype="bfloat16", arch=arch, contract=Contract(dtypes=((chunk_states("S"), "bfloat16"),))))


def test_two_blocks_share_a_multiprocessor_if_another_order_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order a block of the first kernel takes more than half of shared memory. The last has too many fragments."""
    first, _, last = gradient("gated_delta_rule", "gradient").kernels
    assert two_fit(first, SM_90A) and not two_fit(last, SM_90A)
    for order in ("few_live", "late"):
        monkeypatch.setattr(place, order, lambda k, sizes: k)
    lowered.cache_clear()
    assert not two_fit(gradient("gated_delta_rule", "gradient").kernels[0], SM_90A)
    lowered.cache_clear()


def test_early_values_come_before_the_walk() -> None:
    """The gradient by q depends on no gradient by a state. So the last kernel reads neither q nor d_o."""
    first, _, last = gradient("gated_delta_rule", "operand_gradient").kernels
    stored, read = ({o.attr("tensor") for o in k.ops if o.kind == kind} for k, kind in ((first, "store"), (last, "load")))
    assert "d_q" in stored and not read & {"q", "d_o"}


@pytest.mark.parametrize("page", ["gla", *(pytest.param(n, marks=pytest.mark.slow)
                                           for n in ("kimi_delta_attention", "gated_delta_rule_2"))])
def test_gradients_of_a_gate_for_each_channel_fit_in_chunks_of_64(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk back runs on warp groups. On other GPUs GDN-2 fits if each reader of a decayed operand computes it again."""
    assert [bool(k.agents) for k in gradient(page, "operand_gradient").kernels] == [False, True, False]
    if page != "gated_delta_rule_2":
        return
    gradient(page, "operand_gradient", "")
    monkeypatch.setattr(place, "recompute", lambda k: k)
    lowered.cache_clear()
    with pytest.raises(ScheduleError, match="shared of "):
        gradient(page, "operand_gradient", "")
    lowered.cache_clear()


def test_loads_come_in_the_order_in_which_ops_need_them() -> None:
    """Also where two blocks have room without another order: running sums of g begin while q and k are still under way."""
    p = lowered(Build("tilelang", algorithm="kimi_delta_attention", dtype="bfloat16", arch="sm_90a",
                      schedule=varied("operand_walk", "sm_90a", v_block=64)))
    ops = p.kernels[0].ops
    assert [o.attr("tensor") for o in ops if o.kind == "load"] == ["beta", "g", "k", "q"]
    first_wait = next(n for n, o in enumerate(ops) if o.kind == "wait")
    assert sum(o.kind == "load" for o in ops[:first_wait]) == 4 and ops[first_wait].attr("pending") == 3


@pytest.mark.parametrize("few", [False, True])
def test_functions_of_a_loaded_tile_are_computed_where_they_are_read(few: bool) -> None:
    """softplus adds two functions of a raw gate. As a step of its own it was live beside what products give, in walks in parts:
    a block then had 512 threads, and its kernel took 1374 us instead of 911 (8192 tokens, 64 heads, an H200)."""
    layer = Contract.parse("g=raw,beta=sigmoid,q=l2norm,k=l2norm")
    b = asked_of(Build("tilelang", algorithm="kimi_delta_attention", contract=layer, dtype="bfloat16", head_dim_k=128,
                       head_dim_v=128), True)
    x = next(x for x in candidates(b, "cuda", "sm_90a", 64, True, False, few) if not any(map(unfit, x.all)))
    (k,) = (k for k in lowered(x.gradient).kernels if any(o.attr("tensor") == "d_dt_bias" for o in k.ops))
    assert k.threads == 256 and two_fit(k, SM_90A)


def places(p: Program) -> list[int]:
    """Where the first kernel of `p` loads tiles."""
    return [n for n, o in enumerate(p.kernels[0].ops) if o.kind == "load" and o.type is not None and o.type.rank == 2]


def test_loads_come_as_early_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room they stay before their first readers."""
    early = gradient("gated_delta_rule", "gradient")
    assert packed_bytes(early.kernels[0]) <= most_of_two(SM_90A)
    monkeypatch.setattr(place, "early_loads", lambda k, limit, device: early_loads(k, 0, device))
    lowered.cache_clear()
    late = gradient("gated_delta_rule", "gradient")
    lowered.cache_clear()
    assert sum(places(early)) < sum(places(late))


def test_a_load_gets_its_own_buffer_if_it_comes_earlier_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last kernel of KDA's gradient has no room for two blocks in the page's order. In another order loads share buffers, so
    that they would come late. There is room for buffers of their own, and most loads come before the first product. They keep
    their order."""
    def last() -> tuple[list[str], int]:
        """Its loads of tiles in order, and how many come before the first product."""
        k = gradient("kimi_delta_attention", "channel_gradient").kernels[-1]
        assert two_fit(k, SM_90A) and k.threads == 256 and k.blocks_per_sm == 2
        ops = [o for o in k.ops if o.kind == "matmul" or (o.kind == "load" and o.type is not None and o.type.rank == 2)]
        return [o.out for o in ops if o.kind == "load"], [o.kind for o in ops].index("matmul")

    names, before = last()
    monkeypatch.setattr(early_loads_module, "_with_own_buffer", lambda k, name: None)
    lowered.cache_clear()
    same, fewer = last()
    lowered.cache_clear()
    assert names == same and before > fewer
