"""Tiles padded beyond what memory has: extents of a device, meaning, text, and sums that the padding would spoil."""
from dataclasses import replace

import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen import algorithms
from gdn_codegen.devices import HOPPER, TRITON
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.ir.builder import algorithm, apply, carried, exp, row_sum
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.ops import OPS, op
from gdn_codegen.ir.padding import sums_over_padding
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.ir.types import Tile
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.passes.abi.memory import memory, tile_extent
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import SCHEDULES
from gdn_codegen.schedule.contract import PLAIN, Contract
from gdn_codegen.targets import lower

SIZES = {"C": 16, "K": 36, "V": 60}


def page():
    return algorithms.find("gated_delta_rule").trace()


@pytest.mark.parametrize("device, tiles", [(TRITON, (16, 32, 64, 64, 128, 256, 256)), (HOPPER, (16, 32, 64, 64, 128, 192, 256)),
                                           (ASCEND_A2, (16, 32, 48, 64, 112, 192, 256))])
def test_a_tile_has_an_extent_that_the_device_takes(device, tiles):
    assert tuple(tile_extent(n, device) for n in (16, 32, 36, 60, 100, 192, 252)) == tiles


def test_a_program_says_what_memory_has_only_where_that_is_less():
    p = memory(page(), {"C": 16, "K": 100, "V": 64}, TRITON, PLAIN)
    assert p.sizes == {"C": 16, "K": 128, "V": 64} and p.extents == (("K", 100),)
    assert p.shape(p.tensor("q")) == (16, 100) and p.padded(p.tensor("q")) == (False, True)
    assert p.shape(p.tensor("initial_state")) == (100, 64) and p.padded(p.tensor("v")) == (False, False)
    assert memory(page(), {"C": 16, "K": 128, "V": 64}, TRITON, PLAIN).extents == ()


def test_views_are_addressed_by_strides_where_the_contract_says_so():
    p = memory(page(), SIZES, TRITON, Contract(strided=True))
    assert {t.name for t in p.tensors if t.strided} == {"q", "k", "v", "g", "beta", "o"}
    assert not any(t.strided for t in memory(page(), SIZES, TRITON, PLAIN).tensors)


@pytest.mark.slow
@pytest.mark.parametrize("target, schedule, more", [
    ("triton", "staged", {}), ("tilelang", "prepared", {"partition": "decay"}), ("triton", "fused", {"v_block": 16}),
    ("tilelang", "walk", {}), ("pto", "fused", {}), ("pto", "staged", {})])
def test_every_stage_means_the_recurrence(target, schedule, more):
    """Each pass is interpreted before and after by the suite; the last program here, against the recurrence."""
    p = lower(page(), target, replace(SCHEDULES[schedule], **more), SIZES, "float32", contract=Contract(strided=True))
    assert parse_program(program_text(p)) == p and p.extents == (("K", 36), ("V", 60))
    x = problem([19, 0, 33], 1, 2, 36, 60, torch.float64)
    given = {n: x[n] for n in ("q", "k", "v", "g", "beta")} | {"initial_state": x["S"]}
    got = interpret(p, Problem(x["lengths"], 1, 2, span=1), given, {"scale": x["scale"]})
    want_o, want_S = expected(x)
    assert rms_error(got["o"], want_o) < 1e-9 and rms_error(got["final_state"], want_S) < 1e-9


def spoiled(name):
    """A page whose padding is not zero where it sums over it."""
    if name == "row_sum":
        @algorithm(k="C K", v="C V", S=carried("K V"))
        def of_rows(k, v, S):
            o = row_sum(exp(k))[:, None] * v
            S = S + k.T @ v
            return o, S
        return of_rows

    @algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
    def of_products(q, k, v, S):
        o = exp(q) @ S
        S = exp(k).T @ v
        S = 1 + S
        return o, S
    return of_products


@pytest.mark.parametrize("name, kind", [("row_sum", "row_sum"), ("matmul", "matmul")])
def test_a_sum_over_padding_that_is_not_zero_is_refused(name, kind):
    with pytest.raises(VerifyError, match=f"{kind} sums over K, tiles of which are padded from 36 to 64"):
        verify(memory(spoiled(name).trace(), SIZES, TRITON, PLAIN))
    verify(memory(spoiled(name).trace(), {"C": 16, "K": 32, "V": 32}, TRITON, PLAIN))


def test_a_product_with_the_identity_is_zero_where_its_operand_is():
    """The cube core of PTO starts a sum with one. The state that this gradient walks back is such a sum, from step to step."""
    p = lowered(Build("pto", 16, algorithm="gated_delta_product.gradient", schedule="prepared", dtype="bfloat16", head_dim_k=32,
                      head_dim_v=60))
    assert p.extents == (("V", 60),) and any(t.fill.startswith("eye") and t.dims == ("V", "V") for t in p.tensors)
    assert sums_over_padding(p) == []


@pytest.mark.parametrize("page_of, refused", [(lambda v: exp(v), True), (lambda v: v, False)])
def test_a_sum_of_an_op_from_outside_is_checked_like_others(page_of, refused):
    """Over tokens, which no op of the table but cumsum sums."""
    op("sum_of_columns", "sums of columns", lambda attrs, x: Tile(x.dims[1:], x.dtype), lambda attrs, x: x.sum(0),
       zero=lambda attrs, types, zero: frozenset(n - 1 for n in zero[0] if n), sums=lambda attrs: ((0, 0),))
    try:
        @algorithm(q="C K", v="C V", S=carried("K V"))
        def of_columns(q, v, S):
            o = q @ S
            S = S + apply("sum_of_columns", page_of(v))[None, :]
            return o, S

        found = sums_over_padding(of_columns.trace())
        assert [(o.kind, d) for _, o, d in found] == ([("sum_of_columns", "C")] if refused else [])
    finally:
        del OPS["sum_of_columns"]
