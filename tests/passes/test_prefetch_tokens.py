"""prefetch_tokens: tokens that are chunks of their own are loaded one iteration ahead, the first before the initial state."""
import pytest

from gdn_codegen.ir.core import Loop, Op, loops, walk
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract


def kernel(target, accept="", **fields):
    b = Build(target, 1, schedule=varied("fused", **fields), head_dim_k=32, head_dim_v=32, contract=Contract.parse(accept))
    (k,) = lowered(b).kernels
    return b, k


SERVED = "beta=sigmoid,g=raw,k=l2norm,q=l2norm,state=vk/bfloat16/pool/in_place"


@pytest.mark.parametrize("accept", ["", SERVED, "state=rows/parents"])
def test_no_token_waits_for_a_load_of_its_own(accept):
    b, k = kernel("triton", accept, state_layout="vk")
    (loop,) = loops(k.body)
    inside = [o for o in loop.body if isinstance(o, Op) and o.attr("one_token")]
    loads = [o for o in inside if o.kind == "load"]
    assert loads and all(o.attr("ahead") == 1 for o in loads)
    assert {o.out for o in loads} <= {c.next for c in loop.carried}
    assert [o.kind for o in inside].index("store") >= len(loads), "a store, which the compiler moves no load across, comes after"
    render(b)


def test_the_first_token_is_loaded_before_the_initial_state():
    _, k = kernel("triton", state_layout="vk")
    before = [s for s in k.body if not isinstance(s, Loop)]
    kinds = [(o.kind, bool(o.attr("ahead"))) for o in before if o.kind == "load"]
    assert kinds == sorted(kinds, key=lambda x: not x[1]) and {a for _, a in kinds} == {True, False}


def test_chunks_of_several_tokens_stay():
    (k,) = lowered(Build("triton", 64, schedule="fused")).kernels
    assert not [o for o in walk(k.body) if o.attr("ahead") and o.type.rank == 2]
