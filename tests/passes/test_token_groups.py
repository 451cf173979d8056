"""token_groups: what depends on tokens alone is computed for several tokens at once. The interpreter compares the program with
the one before the pass (tests/conftest.py)."""
from dataclasses import replace

import pytest
import torch
from reference import expected, problem, rms_error

from gdn_codegen.ir.core import Loop, Op, loops, walk
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.passes.loops.token_groups import TOKENS
from gdn_codegen.prove.storage import OverwrittenError, check_storage
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract

SERVED = "beta=sigmoid,g=raw,k=l2norm,q=l2norm,state=vk/bfloat16/pool/in_place"


def build(accept="", algorithm="gated_delta_rule", **fields):
    return Build("tilelang", 1, algorithm=algorithm, schedule=varied("fused", **fields), dtype="float32", head_dim_k=32,
                 head_dim_v=32, contract=Contract.parse(accept))


@pytest.mark.parametrize("algorithm, accept", [("gated_delta_rule", ""), ("gated_delta_rule", SERVED), ("simple_gla", ""),
                                               ("gated_delta_rule", "state=rows/parents")])
def test_an_iteration_loads_no_token_and_sums_only_what_the_state_enters(algorithm, accept):
    b = build(accept, algorithm, state_layout="vk")
    (k,) = lowered(b).kernels
    (loop,) = loops(k.body)
    here = [o for o in loop.body if isinstance(o, Op) and not o.attr("ahead")]
    ahead = [o for o in loop.body if isinstance(o, Op) and o.attr("ahead")]
    assert not [o for o in here if o.kind == "load"]
    assert {o.type.rank for o in here if o.kind == "row_sum"} == {1}, "sums over tiles of the state, and none over a vector [K]"
    loads = [o for o in ahead if o.kind == "load"]
    assert loads and all(o.attr("tokens") == o.type.dims[0] == TOKENS for o in loads)
    assert ahead == list(loop.body[-len(ahead):]), "the next group overwrites this one"
    render(b)


def test_values_of_a_group_lie_in_shared_memory_and_the_first_group_follows_the_loads_of_the_state():
    (k,) = lowered(build(SERVED, state_layout="vk")).kernels
    (loop,) = loops(k.body)
    space = {b.name: b.space for b in k.buffers}
    read = {o.args[0] for o in loop.body if isinstance(o, Op) and o.kind == "of_token"}
    assert read and {space[x] for x in read} == {"shared"}
    before = [(o.kind, bool(o.attr("ahead"))) for o in k.body if not isinstance(o, Loop)]
    first = before.index(("load", True))
    assert ("load", False) in before[:first] and ("cast", False) in before[first:], "while tokens are loaded"


def test_late_the_first_group_follows_what_reads_the_state():
    (k,) = lowered(build(SERVED, state_layout="vk", token_groups="late")).kernels
    before = [(o.kind, bool(o.attr("ahead"))) for o in k.body if not isinstance(o, Loop)]
    assert before.index(("cast", False)) < before.index(("load", True))


@pytest.mark.parametrize("accept", ["", "state=rows", "state=vk/float16/pool/in_place/slots/accepted/parents"])
def test_rows_of_no_sequence_are_cleared_by_their_own_indices(accept):
    """Also where the loop's last ops work on the next group."""
    text = render(build(accept, state_layout="vk"))
    clear = text.split("if clear_o != 0:")[1].split("= 0\n")[0]
    assert "i < rows:" in clear and "row + i" in clear and "next" not in clear


def test_a_group_that_is_overwritten_early_is_found():
    p = lowered(build(state_layout="vk"))
    (k,) = p.kernels
    (loop,) = loops(k.body)
    ahead = [o for o in loop.body if isinstance(o, Op) and o.attr("ahead")]
    early = replace(loop, body=(*ahead, *(o for o in loop.body if o not in ahead)))
    with pytest.raises(OverwrittenError):
        check_storage(replace(p, kernels=(replace(k, body=tuple(early if s is loop else s for s in k.body)),)))


@pytest.mark.parametrize("layout, groups", [("kv", "early"), ("vk", "early"), ("kv", "late")])
def test_sequences_begin_and_end_anywhere_in_a_group(layout, groups):
    """Lengths around one and two groups; a group's rows past the end are zero, and no op reads the next sequence's."""
    lengths = [0, 1, 3, 4, 5, 7, 8, 9]
    x = problem(lengths, 1, 2, 32, 32, torch.float32, gate="mixed", same_keys=True, seed=3)
    b = build("state=vk" if layout == "vk" else "", state_layout=layout, token_groups=groups)
    given = {**{n: x[n] for n in ("q", "k", "v", "g", "beta")}, "initial_state": x["S"].mT if layout == "vk" else x["S"]}
    want = expected(x)
    got = interpret(lowered(b), Problem(lengths, 1, 2), given, {"scale": x["scale"]})
    assert rms_error(got["o"], want[0]) < 1e-8
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    o, S = function(b)(*(x[n][None] for n in ("q", "k", "v", "g", "beta")), scale=x["scale"], output_final_state=True,
                       initial_state=given["initial_state"], cu_seqlens=cu)
    assert rms_error(o[0], want[0]) < 1e-5 and rms_error(S.mT if layout == "vk" else S, want[1]) < 1e-5


def test_other_targets_and_chunks_have_no_groups():
    for b in (Build("triton", 1, schedule="fused"), Build("tilelang", 64)):
        assert not [o for k in lowered(b).kernels for o in walk(k.body) if o.kind == "of_token"]
