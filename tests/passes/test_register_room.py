"""Kernels over chunks on Triton, whose tiles have room in registers: their order, pieces of K, and loads of middle rows."""
from dataclasses import replace

import pytest

from gdn_codegen.ir.core import Kernel
from gdn_codegen.passes.loops.few_live import most_live
from gdn_codegen.passes.loops.register_room import OF_A_WARP
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call.gradient_builds import asked_of, undecided
from gdn_codegen.schedule import varied
from gdn_codegen.targets.triton import BY_CHANNEL, FIVE


def gradient(**fields):
    """The gradient that calls on a GPU take, with these fields of the schedule."""
    b = asked_of(Build("triton", 64, algorithm="gated_delta_rule", dtype="bfloat16"), True)
    return replace(undecided(b, True).gradient, schedule=varied("gradient", v_block=64, **fields))


def live(k: Kernel, b: Build) -> int:
    return most_live(k, {**lowered(b).sizes, **k.sizes})


def pieces(k: Kernel) -> set[str]:
    return {o.attr("tensor") for o in k.ops if o.kind == "load" and o.attr("piece")}


def test_a_gradient_of_five_kernels_has_room():
    """Only the kernel that reads both states takes pieces; with twice the registers none does. One kernel for all has no room."""
    b = gradient(kernels=FIVE)
    first, early, _, last, numbers = lowered(b).kernels
    assert all(live(k, b) <= 4 * OF_A_WARP for k in (first, early, last, numbers))
    assert pieces(last) >= {"S_chunks_vk", "d_S_ws", "k"} and not pieces(first) | pieces(early)
    assert not any(o.kind == "matmul" for o in numbers.ops)
    assert not any(map(pieces, lowered(gradient(kernels=FIVE, warps=8)).kernels))
    whole = gradient()
    assert live(lowered(whole).kernels[-1], whole) > 4 * OF_A_WARP


@pytest.mark.parametrize("page", ["kimi_delta_attention", "rwkv7"])
def test_middle_rows_of_stored_sums_are_loaded(page):
    """Kernels that compute the sums themselves find the rows among their own."""
    b = Build("triton", 32, algorithm=page, schedule=varied("operand_walk", **BY_CHANNEL[1]))
    middle = [o for k in lowered(b).kernels for o in k.ops if o.kind == "to_middle"]
    assert middle and all(o.attr("given") for o in middle)
    one = lowered(Build("triton", 32, algorithm=page, schedule="operand_walk"))
    assert not any(o.attr("given") for k in one.kernels for o in k.ops)
    assert len(lowered(b).kernels) == 3
