"""Barriers before an instance reads what it has written to global memory, and the checker that proves them."""
from dataclasses import replace

import pytest

from gdn_codegen.ir.core import Loop, map_ops, walk
from gdn_codegen.passes.sync.own_writes import own_writes
from gdn_codegen.prove.happens_before import RaceError
from gdn_codegen.prove.read_back import check_read_back
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract


def program(accept, target="triton"):
    return lowered(Build(target, 1, schedule=varied("fused"), head_dim_k=32, head_dim_v=32, contract=Contract.parse(accept)))


def without_barriers(p):
    return p.map_kernels(lambda k: replace(k, body=map_ops(k.body, lambda o: [] if o.kind == "barrier" else [o])))


@pytest.mark.parametrize("target", ["triton", "tilelang"])
@pytest.mark.parametrize("accept", ["state=rows/parents", "state=vk/bfloat16/pool/in_place/slots/parents"])
def test_a_barrier_stands_before_a_read_of_what_the_walk_has_written(accept, target):
    p = program(accept, target)
    (k,) = p.kernels
    loop = next(s for s in k.body if isinstance(s, Loop))
    kinds = [o.kind for o in loop.body]
    assert kinds[kinds.index("resume") - 1] == "barrier" and kinds.count("barrier") == 1
    check_read_back(p)
    bare = without_barriers(p)
    with pytest.raises(RaceError, match=r"resume\(.* reads what store\(.* wrote, without a barrier between"):
        check_read_back(bare)
    assert own_writes(bare) == p


@pytest.mark.parametrize("accept", ["", "state=pool/in_place", "state=rows", "state=pool/in_place/slots/accepted"])
def test_nothing_is_added_where_no_op_reads_back(accept):
    p = program(accept)
    assert not [o for k in p.kernels for o in walk(k.body) if o.kind == "barrier"]
    check_read_back(p)
