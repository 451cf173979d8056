"""async_copies: no op reads a tile before its copy has arrived."""
import re
from dataclasses import replace

import pytest

from gdn_codegen.algorithms import find
from gdn_codegen.ir.core import Loop, Op, walk
from gdn_codegen.ir.differentiate import chunk_states
from gdn_codegen.prove.copies import check_copies
from gdn_codegen.prove.happens_before import RaceError
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import SCHEDULES, named, varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import lower

SIZES = {"C": 32, "K": 16, "V": 32}


def early(k):
    """Accesses to buffers whose copies were not waited for, over two iterations of a loop."""
    defs, coming, found = {o.out: o for o in walk(k.body) if o.out}, [], []

    def buffers(a):
        o = defs.get(a)
        return [] if o is None else [o.buffer] if o.buffer else [b for x in o.args for b in buffers(x)]

    def each(body):
        for s in body:
            if isinstance(s, Loop):
                each(s.body)
                each(s.body)
                continue
            if s.kind == "wait":
                del coming[:max(len(coming) - s.attr("pending", 0), 0)]
            if s.buffer or not s.out:
                found.extend(b for b in (s.buffer, *(b for a in s.args for b in buffers(a))) if b in coming)
            if s.attr("channel") and s.kind == "load":
                coming.append(s.buffer)

    each(k.body)
    return found


def dropped(body, n):
    out = []
    for s in body:
        if isinstance(s, Loop):
            inner, n = dropped(s.body, n)
            s = replace(s, body=inner)
        elif s.kind == "wait":
            n -= 1
            if n == -1:
                continue
        out.append(s)
    return tuple(out), n


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_copy_is_waited_for_and_no_wait_is_idle(name):
    p = lower(find("gated_delta_rule").trace(), "tilelang", named(name), SIZES, "float16")
    for k in p.kernels:
        assert not early(k)
        for n in range(sum(o.kind == "wait" for o in walk(k.body))):
            assert early(replace(k, body=dropped(k.body, n)[0]))
    assert any(o.kind == "load" and o.attr("channel") for k in p.kernels for o in walk(k.body))


GRADIENT = Build("tilelang", algorithm="kimi_delta_attention.gradient", arch="sm_90a", dtype="bfloat16", head_dim_k=128,
                 head_dim_v=128, schedule=varied("channel_gradient", "sm_90a", v_block=64, k_block=64, stages=1),
                 contract=Contract(dtypes=((chunk_states("S"), "bfloat16"),)))


def test_waits_leave_later_copies_under_way():
    """Each wait of a kernel over chunks is as short as it may be: with one copy more under way some op would be early. Operands
    of `decayed_blocks` in a row arrive together, because their warps end at different times."""
    b = GRADIENT
    kernels, found, pairs = [k for k in lowered(b).kernels if k.grid == "chunks"], 0, 0
    for k in kernels:
        assert not early(k)
        waits = [o for o in k.ops if o.kind == "wait"]
        found += len(waits) > 1
        for o in waits:
            later = replace(k, body=tuple(x.with_attrs(pending=x.attr("pending", 0) + 1) if x is o else x for x in k.body))
            assert early(later)
            with pytest.raises(RaceError, match="does not wait for the copy"):
                check_copies(replace(lowered(b), kernels=(later,)))
        ops = [x.kind for x in k.ops if x.buffer or x.kind == "wait"]
        pairs += sum(ops[n:n + 2] == ["decayed_blocks"] * 2 for n in range(len(ops)))
        assert ["decayed_blocks", "wait", "decayed_blocks"] not in [ops[n:n + 3] for n in range(len(ops))]
    assert found >= 3 and pairs == 2


@pytest.mark.usefixtures("unchecked")
def test_each_load_of_rows_counts_as_one_copy():
    """`wait_copies` counts what `commit_copy` ends, and `start_copy`. So each load is one of these, in the order of the ops."""
    text, checked = render(GRADIENT), 0
    kernels = text[:text.index("# --- host: ")].split("_kernel(t):\n")[1:]
    rows, tile = r"async_parallel\([^\n]*\n +(\w+)\[[^\n]*\n +t\.commit_copy\(\)", r"start_copy\(.*, (\w+)(?:\[[^\]]*\])?\)\n"
    for k, printed in zip(lowered(GRADIENT).kernels, kernels, strict=True):
        loads = [o.buffer for o in walk(k.body) if o.kind == "load" and o.attr("channel") == "copies"]
        assert [a or b for a, b in re.findall(f"{rows}|{tile}", printed)] == loads
        assert printed.count("commit_copy") + printed.count("start_copy") == len(loads)
        checked += len(loads)
    assert checked > 20


def test_other_targets_load_as_before():
    for target in ("triton", "pto"):
        p = lower(find("gated_delta_rule").trace(), target, named("fused"), SIZES, "float16")
        assert not any(isinstance(o, Op) and o.kind == "load" and o.attr("channel") for k in p.kernels for o in walk(k.body))


@pytest.mark.parametrize("name", ["rwkv7", "gated_delta_rule", "gated_delta_product"])
def test_no_copy_goes_to_registers(name):
    """A workspace that a product adds to is loaded to registers."""
    p = lower(find(name).trace(), "tilelang", named("staged"), SIZES, "bfloat16")
    for k in p.kernels:
        space = {b.name: b.space for b in k.buffers}
        assert {space[o.buffer] for o in walk(k.body) if o.kind == "load" and o.attr("channel")} <= {"shared"}
