"""Where operands of `decayed_blocks` lie, which device code addresses by itself."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gdn_codegen.emit.base import EmitError
from gdn_codegen.ir.builder import algorithm, carried, cumsum, decayed_product, exp, last, lower
from gdn_codegen.ir.core import Op, Program, map_ops
from gdn_codegen.ir.differentiate import chunk_states
from gdn_codegen.ir.ops import OPS
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import find


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
        for p, x, g, *_ in (o.args for o in k.ops if o.kind == "decayed_blocks"):
            assert buffers[home[p]].layout == "swizzled" and not buffers[home[p]].pad and buffers[home[g]].pad
            assert not {home[p], home[x]} & along
            lies = buffers[home[x]]
            found.add("padded" if lies.pad else lies.layout or "linear")
    assert x_lies in found


@pytest.mark.usefixtures("unchecked")
def test_sums_are_float32_whatever_a_contract_says() -> None:
    """Device code reads them so."""
    b = Build("tilelang", algorithm="gla.stored_gradient", arch="sm_90a", dtype="bfloat16", head_dim_k=64, head_dim_v=64,
              schedule=varied("channel_gradient", "sm_90a"), contract=Contract(dtypes=(("G_chunks", "bfloat16"),)))
    found = 0
    for k in lowered(b).kernels:
        of = {o.out: o.type for o in k.ops}
        found += sum(of[o.args[2]].dtype == o.type.dtype == "float32" for o in k.ops if o.kind == "decayed_blocks")
    assert found == 2


def test_the_interpreter_refuses_entries_that_kernels_would_read() -> None:
    """On and above the diagonal of a block. Others are of no block."""
    p, x, g = torch.ones(8, 8).tril(-1), torch.ones(8, 3), torch.zeros(8, 3)
    meaning, attrs = OPS["decayed_blocks"].evaluate, {"size": 4, "limit": 0.0}
    assert meaning is not None
    assert meaning(attrs, p, x, g)[:, 0].tolist() == [0, 1, 2, 3] * 2
    assert meaning({**attrs, "transposed": True}, p, x, g)[:, 0].tolist() == [3, 2, 1, 0] * 2
    p[1, 6] = 1
    assert not meaning(attrs, p, x, g).isnan().any()
    p[1, 1] = 1
    assert meaning(attrs, p, x, g).isnan().all()


@pytest.mark.usefixtures("unchecked")
def test_other_blocks_are_refused() -> None:
    """Device code has chunks of 64 rows."""
    p = gradient("gla", "channel_gradient", 64, 0)
    def halved(o: Op) -> list[Op]:
        return [o.with_attrs(size=8) if o.kind == "decayed_blocks" else o]
    wrong = p.map_kernels(lambda k: replace(k, body=map_ops(k.body, halved)))
    with pytest.raises(EmitError, match=r"has blocks of 8 rows.*accepted: 64"):
        find("tilelang").emit(wrong, "bthd", 0)
