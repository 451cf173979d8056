"""Kernels of gradients on each target against torch.autograd through the recurrence in float64."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import gradients
import pytest
import torch
from members import Case, drawn
from torch import Tensor

from gdn_codegen.algorithms import names
from gdn_codegen.ir.differentiate import chunk_states
from gdn_codegen.passes.loops import column_pieces, register_room
from gdn_codegen.passes.storage import place
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets.gradient_plans import late_sums
from gdn_codegen.targets.triton import FIVE

#: Pages that all targets run in every run of the suite. TileLang, PTO and three kernels take others by hand (`-m long`), as
#: kernels take seconds to compile.
OFTEN = ("gated_delta_rule", "kimi_delta_attention", "mamba2")
ACCEPTED = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}


#: Schedules of the states before chunks and of the gradient, which hold them in the same orientation.
ONE_KERNEL, THREE_KERNELS = {"states": "fused", "gradient": "fused"}, {"states": "fused_walk", "gradient": "gradient"}
SOLVED = [{f"{kind}_states": "fused_walk", f"{kind}_gradient": "gradient"} for kind in ("solved", "inverse")]


def errors(target: str, name: str, case: Case, plans: dict[str, Any] = ONE_KERNEL, **options: Any) -> dict[str, float]:
    """RMSE over RMS of the gradient by each input and by the initial state S. The states before chunks are those that the module
    for them gives. plans: the schedules of both. A pack has rows of NaN past its end, of which gradients must be zero."""
    states, back = (Build(target, algorithm=f"{name}.{kind}", schedule=plan, **options) for kind, plan in plans.items())
    x, T = drawn(name, case, lowered(back), back.sizes), sum(case.lengths)
    gen = torch.Generator().manual_seed(1)
    d_o = torch.randn(T, case.value_heads, back.head_dim_v, generator=gen).to(getattr(torch, back.dtype))
    d_final = torch.randn(x["S"].shape, generator=gen)
    ends = torch.tensor([0, *case.lengths]).cumsum(0).to(torch.int32)

    def packed(y: Tensor) -> Tensor:
        return torch.cat([y, y.new_full((3, *y.shape[1:]), float("nan"))])[None]
    given = {n: packed(y) if y.ndim > 1 else y for n, y in x.items() if n != "S"}
    read = {n: y for n, y in given.items() if n in states.page.inputs}
    _, *chunks = function(states)(**read, initial_state=x["S"], cu_seqlens=ends)
    given |= dict(zip((t.name for t in lowered(states).role("output") if t.index == "slot"), chunks, strict=True))
    found = function(back)(**given, d_o=packed(d_o), d_final_state=d_final, cu_seqlens=ends, output_final_state=True)
    outputs, sums = ([t.name for t in back.page.trace().role("output") if t.index == index] for index in ("token", "slot"))
    assert all((y[0, T:] == 0).all() for y in found[:len(outputs)]), "rows of no sequence are not zero"
    of_tokens, others = found[:len(outputs)], found[len(outputs):]
    got = dict(zip([*outputs, "d_initial_state", *sums], [*(y[0, :T] for y in of_tokens), *others], strict=True))
    expected = gradients.expected(name, case, x, d_o, d_final)
    return {n: gradients.relative(gradients.of_input(n, got, want).double(), want) for n, want in expected.items()}


@pytest.mark.parametrize("name, target", [
    pytest.param(n, t, marks=[] if t == "triton" else pytest.mark.slow if n in OFTEN else pytest.mark.long)
    for n in names() for t in ("triton", "tilelang", "pto")])
def test_gradients(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged tails, a sequence without tokens, two value heads of a key head, equal keys, gates from 0 to -50."""
    monkeypatch.setenv("GDN_CODEGEN_POISON", "1")
    found = errors(target, name, Case((13, 0, 37, 1), 1, 2, repeat=True), chunk=16, head_dim_k=16, head_dim_v=32, dtype="float32")
    assert all(e < ACCEPTED["float32"] for e in found.values()), found


@pytest.mark.parametrize("name, target", [
    pytest.param(n, t, marks=[] if t == "triton" and n == "gated_delta_rule" else pytest.mark.long)
    for n in ("gated_delta_rule", "delta_rule", "gated_delta_product") for t in ("triton", "tilelang")])
@pytest.mark.parametrize("plans", SOLVED, ids=lambda x: next(iter(x)))
def test_gradients_that_read_solutions(plans: dict[str, str], name: str, target: str) -> None:
    """What solves the system of each chunk comes from the walk of the states, and a gradient computes no product for it. So may
    its inverse."""
    found = errors(target, name, Case((13, 0, 37, 1), 1, 2, repeat=True), plans, chunk=16, head_dim_k=16, head_dim_v=32,
                   dtype="float32")
    assert all(e < ACCEPTED["float32"] for e in found.values()), found


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in OFTEN else [pytest.mark.long]) for n in names()])
def test_gradients_by_three_kernels(name: str) -> None:
    """A walk for the derivative by the state alone, and kernels over chunks before and after it. The state is transposed."""
    found = errors("triton", name, Case((13, 0, 37, 1), 1, 2, repeat=True), THREE_KERNELS, chunk=16, head_dim_k=16, head_dim_v=32,
                   dtype="float32")
    assert all(e < ACCEPTED["float32"] for e in found.values()), found


@pytest.mark.parametrize("name, K", [
    pytest.param(n, K, marks=[] if (n, K) in zip(OFTEN, (36, 32), strict=False) else pytest.mark.long)
    for n in names() for K in (32, 36)])
def test_gradients_by_five_kernels_in_pieces(name: str, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in a kernel before what they are for, and values along K in pieces, as where registers have no room for tiles. Tiles
    of K = 36 have 64 columns: a piece with some padding, and one that is padding."""
    monkeypatch.setattr(register_room, "OF_A_WARP", 1)
    monkeypatch.setattr(column_pieces, "COLUMNS", 16)
    back = replace(varied("gradient", padded_pieces=True, **late_sums(FIVE)), name="pieces")
    p = lowered(Build("triton", 16, algorithm=f"{name}.gradient", schedule=back, dtype="float32", head_dim_k=K, head_dim_v=16))
    assert any(o.attr("piece") and p.padded(p.tensor(o.attr("tensor")))[-1] == (K == 36) for k in p.kernels for o in k.ops)
    found = errors("triton", name, Case((13, 0, 37, 1), 1, 2, repeat=True), {"states": "fused_walk", "gradient": back}, chunk=16,
                   head_dim_k=K, head_dim_v=16, dtype="float32")
    assert all(e < ACCEPTED["float32"] for e in found.values()), found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["gated_delta_rule", "simple_gla"])
@pytest.mark.parametrize("K", [32, 36])
def test_gradients_in_pieces_on_tilelang(name: str, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where two whole tiles of states have no room in shared memory."""
    tried = place._attempt
    whole = ScheduleError("too large")
    monkeypatch.setattr(place, "_attempt", lambda p, k, *more, **said: whole if k.grid == "chunks" and k.name.startswith("d_q")
                        and not any(o.attr("piece") for o in k.ops) else tried(p, k, *more, **said))
    monkeypatch.setattr(column_pieces, "COLUMNS", 16)
    plans = {"states": "fused_walk", "gradient": replace(varied("gradient", padded_pieces=True), name="pieces")}
    found = errors("tilelang", name, Case((13, 0, 37, 1), 1, 2, repeat=True), plans, chunk=16, head_dim_k=K, head_dim_v=16,
                   dtype="float32")
    assert all(e < ACCEPTED["float32"] for e in found.values()), found


@pytest.mark.parametrize("name, schedule", [
    ("gated_delta_rule", "operand_gradient"), ("gla", "operand_gradient"), ("kimi_delta_attention", "channel_gradient"),
    *(pytest.param(n, "channel_gradient", marks=pytest.mark.long) for n in ("gla", "gated_delta_rule_2", "rwkv7"))])
def test_gradients_whose_first_kernels_compute_what_they_can(name: str, schedule: str) -> None:
    """Outputs that depend on no gradient by a state, summands of others, and the operands of the walk back."""
    plans = {"states": "operand_walk", "gradient": schedule}
    found = errors("triton", name, Case((13, 0, 37, 1), 1, 2, repeat=True), plans, chunk=16, head_dim_k=16, head_dim_v=32,
                   dtype="float32")
    assert all(e < ACCEPTED["float32"] for e in found.values()), found


@pytest.mark.long
@pytest.mark.parametrize("name, schedule", [
    ("gated_delta_rule", "operand_gradient"), ("kimi_delta_attention", "operand_gradient"),
    ("kimi_delta_attention", "channel_gradient")])
def test_orders_with_room_on_tilelang(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels over chunks that are ordered anew, and that compute operands again, because their tiles leave too little room. By
    halves of K, too."""
    monkeypatch.setenv("GDN_CODEGEN_POISON", "1")
    plans = {"states": "operand_walk", "gradient": schedule}
    found = errors("tilelang", name, Case((70, 0, 64, 1), 1, 2, repeat=True), plans, chunk=64, head_dim_k=128, head_dim_v=128,
                   dtype="bfloat16", contract=Contract(dtypes=((chunk_states("S"), "bfloat16"),)))
    assert all(e < ACCEPTED["bfloat16"] for e in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_delta_rule", pytest.param("kimi_delta_attention", marks=pytest.mark.long)])
def test_large_states_on_pto(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that fit on a vector core only in an order for that, and with loads for each reader. Several chunks."""
    monkeypatch.setenv("GDN_CODEGEN_POISON", "1")
    found = errors("pto", name, Case((70, 0, 129), 1, 2, repeat=True), {"states": "prepared", "gradient": "prepared"}, chunk=64,
                   head_dim_k=128, head_dim_v=128, dtype="bfloat16")
    assert all(e < ACCEPTED["bfloat16"] / 4 for e in found.values()), found


@pytest.mark.parametrize("name, dtype, sizes", [
    ("gated_delta_rule", "float32", (16, 16, 52, 32)), *(pytest.param(*x, marks=pytest.mark.long) for x in (
        ("gated_delta_rule", "bfloat16", (16, 16, 64, 32)), ("gated_delta_rule", "bfloat16", (64, 256, 256, 64)),
        ("gated_delta_rule", "bfloat16", (64, 200, 200, 16)), ("kimi_delta_attention", "bfloat16", (32, 256, 256, 64)),
        *((n, "bfloat16", (16, 36, 56, 16)) for n in names())))])
def test_states_in_pieces_on_pto(name: str, dtype: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels over chunks that hold some columns of V of the states at a time. sizes: of a chunk, K, V, and a piece, the last of
    which may have padding. Kernels of which each instance has a block of V are not in pieces."""
    monkeypatch.setenv("GDN_CODEGEN_POISON", "1")
    C, K, V, n = sizes
    before = varied("prepared", v_block=n)
    back = replace(before, v_piece=n, order="page", padded_pieces=True, **late_sums(before.kernels))
    plans = {"states": before, "gradient": back}
    b = Build("pto", C, algorithm=f"{name}.gradient", schedule=plans["gradient"], dtype=dtype, head_dim_k=K, head_dim_v=V)
    assert {k.blocked_dim for k in lowered(b).kernels if any(o.attr("piece") for o in k.ops)} == {""}
    found = errors("pto", name, Case((2 * C + 6, 0, C + 1), 1, 2, repeat=True), plans, chunk=C, head_dim_k=K, head_dim_v=V,
                   dtype=dtype)
    assert all(e < ACCEPTED[dtype] / 4 for e in found.values()), found


def test_states_of_the_other_orientation_do_not_fit() -> None:
    """With K = V shapes do not tell. The name of the tensor does."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'S_chunks'"):
        errors("triton", "gla", Case((5,), 1, 1), {"states": "fused", "gradient": "gradient"}, chunk=16, head_dim_k=16,
               head_dim_v=16, dtype="float32")
