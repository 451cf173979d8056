"""Where operands of `decayed_blocks` lie, which device code addresses by itself."""
from __future__ import annotations

import pytest

from gdn_codegen.ir.builder import algorithm, carried, cumsum, decayed_product, exp, last, lower
from gdn_codegen.ir.core import Program
from gdn_codegen.ir.differentiate import chunk_states
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract


@algorithm(q="C K", k="C K", v="C V", g="C K", S=carried("K V", forgets="g"))
def mixed_keys(q, k, v, g, S):  # type: ignore[no-untyped-def]
    """A product reads k along its columns."""
    G = cumsum(g)
    mixed = lower(q @ q.T) @ k
    o = (exp(G) * mixed) @ S + decayed_product(q, k, G) @ v
    S = exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ v
    return o, S


def gradient(page: str, schedule: str, K: int, k_block: int) -> Program:
    """The gradient of a page by a schedule for sm_90a."""
    return lowered(Build("tilelang", algorithm=f"{page}.gradient", arch="sm_90a", dtype="bfloat16", head_dim_k=K, head_dim_v=K,
                         schedule=varied(schedule, "sm_90a", v_block=64, k_block=k_block, stages=1),
                         contract=Contract(dtypes=((chunk_states("S"), "bfloat16"),))))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page, schedule, K, k_block, x_lies", [
    ("kimi_delta_attention", "channel_gradient", 128, 64, "padded"), ("gla", "channel_gradient", 64, 32, "linear"),
    ("gated_delta_rule_2", "operand_gradient", 128, 0, "swizzled"), ("rwkv7", "gradient", 64, 0, "swizzled"),
    ("rwkv7", "operand_gradient", 64, 0, "swizzled"), (f"{__file__}:mixed_keys", "channel_gradient", 64, 0, "swizzled")])
def test_operands_lie_as_device_code_expects(page: str, schedule: str, K: int, k_block: int, x_lies: str) -> None:
    """The tile p is swizzled, whether it is computed or loaded. x is padded where nothing else needs it whole. Neither shares
    memory with what a product reads along its columns, for which TileLang's compiler may choose another layout."""
    found = set()
    for k in gradient(page, schedule, K, k_block).kernels:
        home, buffers = {o.out: o.buffer for o in k.ops}, {b.name: b for b in k.buffers}
        along = {home[o.args[1]] for o in k.ops if o.kind == "matmul" and not o.attr("tb")}
        for p, x, g in (o.args for o in k.ops if o.kind == "decayed_blocks"):
            assert buffers[home[p]].layout == "swizzled" and not buffers[home[p]].pad and buffers[home[g]].pad
            assert not {home[p], home[x]} & along
            lies = buffers[home[x]]
            found.add("padded" if lies.pad else lies.layout or "linear")
    assert x_lies in found
