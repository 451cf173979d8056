"""The walk back that computes all outputs of a gradient, on warp groups: stage by stage, against torch.autograd in float64."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_gradients_in_parts import OF_GROUPS, Given

from gdn_codegen.derived_pages import find
from gdn_codegen.ir.core import Op, Program, loops
from gdn_codegen.ir.ops import OPS, infer
from gdn_codegen.ir.types import Tile
from gdn_codegen.passes import pipelines
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import lower

#: Two warp groups hold the state, and one a tile of tokens.
SIZES = {"C": 64, "K": 64, "V": 128}
#: States before chunks in 16 bits: in 32 they would not fit.
ROUNDED = Contract(dtypes=(("S_chunks", "float16"),))
STAGES = ("warp_groups", "rings", "warm_up_loop")


def lowered(page: str, sizes: dict[str, int] = SIZES, kind: str = "gradient") -> Program:
    plan = varied("fused_gradient", "sm_90a", partition="decay")
    read = (t.name for t in find(f"{page}.{kind}").trace().role("input") if t.index == "slot")
    rounded = Contract(dtypes=tuple((n, "float16") for n in sorted(read)))
    return lower(find(f"{page}.{kind}").trace(), "tilelang", plan, sizes, "float16", "sm_90a", rounded)


def test_registers_that_move_to_shared_memory_are_in_the_order_of_sums() -> None:
    """Also those of a tile that is cast from one in shared memory, as states before chunks in float32 are. Without an order
    TileLang chooses one, and the function that moves them addresses others."""
    plan = varied("fused_gradient", "sm_90a", stages=1)
    k = lower(find("simple_gla.gradient").trace(), "tilelang", plan, {**SIZES, "K": 128}, "float16", "sm_90a").kernels[-1]
    cast = {o.out: o for o in k.ops if o.kind == "cast"}
    product = {o.out for o in k.ops if o.kind == "matmul"} | {c.name for lp in loops(k.body) for c in lp.carried}
    moved = [cast[o.args[0]] for o in k.ops if o.kind == "move" and o.args[0] in cast]
    assert {o.args[0] for o in moved} >= {"S", "d_S"}
    assert all(o.attr("order") == "sums" or o.args[0] in product for o in moved), moved


@pytest.fixture
def stages() -> Iterator[dict[str, Program]]:
    """The programs after passes, by the passes' names, as they come."""
    seen: dict[str, Program] = {}

    def see(name: str, before: Program, p: Program, c: Any) -> None:
        seen[name] = p
    pipelines.observers.append(see)
    yield seen
    pipelines.observers.remove(see)


@pytest.mark.parametrize("page, kind", [pytest.param("simple_gla", "gradient", marks=pytest.mark.slow),
                                        pytest.param("gated_delta_rule", "gradient", marks=pytest.mark.long),
                                        pytest.param("gated_delta_rule", "solved_gradient", marks=pytest.mark.long),
                                        pytest.param("gated_delta_rule", "inverse_gradient", marks=pytest.mark.slow)])
def test_all_gradients_come_from_one_walk(page: str, kind: str, stages: dict[str, Program], monkeypatch: pytest.MonkeyPatch
                                          ) -> None:
    """In parts of one chunk, with summaries and warm-ups; ragged tails and an empty sequence."""
    monkeypatch.setattr("gdn_codegen.passes.cut.partition.longest_warm_up", lambda device: 2)
    given = Given(page, OF_GROUPS, SIZES, (-3.0, -0.2))
    k = lowered(page, kind=kind).kernels[-1]
    stored = {o.attr("tensor") for o in k.ops if o.kind == "store"}
    assert {"d_q", "d_k", "d_v", "d_g", "d_initial_state"} <= stored
    errors = {name: given.run(stages[name], 1)[1] for name in STAGES}
    assert all(e < 1e-4 for e in errors.values()), errors


@pytest.mark.slow
def test_nothing_reads_a_state_whose_registers_a_product_took(stages: dict[str, Program]) -> None:
    """Values that share a fragment are read before the next one of them is written."""
    lowered("simple_gla")
    for lp in loops(stages["warm_up_loop"].kernels[-1].body):
        ops = [o for o in lp.body if isinstance(o, Op)]
        under = {o.out: o for o in ops if o.out and not o.buffer}
        holds = {c.name: c.name for c in lp.carried}  # fragment -> the value that lies there

        def reads(o: Op) -> Iterator[str]:
            for a in o.args:
                yield from reads(under[a]) if a in under else (a,)
        fragment = {o.out: o.buffer for o in ops if o.buffer} | holds
        shared = {f for f in fragment.values() if list(fragment.values()).count(f) > 1}
        assert shared & set(holds)
        for o in (o for o in ops if o.buffer or not o.out):
            for a in reads(o):
                assert fragment.get(a) not in shared or holds[fragment[a]] == a, (o.out, a)
            if o.buffer in shared:
                holds[o.buffer] = o.out


def test_tiles_are_stored_by_rows_and_products_of_tokens_wait_for_readers() -> None:
    """Gradients in 16 bits leave registers by rows of 16 bytes a thread. `tokens` starts products, and drains them where it reads
    one; `state` has a product at a time."""
    dtypes = (*ROUNDED.dtypes, ("d_k", "float16"), ("d_q", "float16"))
    p = lower(find("simple_gla.gradient").trace(), "tilelang", varied("fused_gradient", "sm_90a", partition="decay"), SIZES,
              "float16", "sm_90a", Contract(dtypes=dtypes))
    (own,) = (lp for lp in loops(p.kernels[-1].body) if lp.index == "chunk")
    ops = [o for o in own.body if isinstance(o, Op)]
    assert [o.attr("order") for o in ops if o.kind == "store" and o.attr("tensor") in ("d_q", "d_k", "d_v")] == ["rows"] * 3
    assert {(o.agent, bool(o.attr("asynchronous"))) for o in ops if o.kind == "matmul"} == {("tokens", True), ("state", False)}
    drains = sum(o.kind == "drain" and o.agent == "tokens" for o in ops)
    assert 0 < drains < sum(o.kind == "matmul" and o.agent == "tokens" for o in ops)


def test_sums_of_columns_in_parts() -> None:
    """A row for each run of rows. Their sum is that of all rows."""
    x = torch.arange(24.0).view(8, 3)
    of, parts = OPS["column_sum"].evaluate, {"parts": 4}
    assert of is not None and infer("column_sum", (Tile(("V", "C")),), (("parts", 4),)) == Tile((4, "C"))
    assert torch.equal(of(parts, x), x.view(4, 2, 3).sum(1)) and torch.equal(of({}, of(parts, x)), of({}, x))


@pytest.mark.parametrize("page, sizes, message", [
    ("simple_gla", {"C": 64, "K": 64, "V": 64}, "state would compute running sums .*; accepted: an agent of one warp"),
    ("gla", SIZES, "has no rule for warp groups")])
def test_what_does_not_fit_is_refused(page: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lowered(page, sizes)
