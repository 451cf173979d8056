"""async_copies: no op reads a tile before its copy has arrived."""
from dataclasses import replace

import pytest

from gdn_codegen.algorithms import find
from gdn_codegen.ir.core import Loop, Op, walk
from gdn_codegen.schedule import SCHEDULES, named
from gdn_codegen.targets import lower

SIZES = {"C": 32, "K": 16, "V": 32}


def early(k):
    """Accesses to buffers whose copies were not waited for, over two iterations of a loop."""
    defs, coming, found = {o.out: o for o in walk(k.body) if o.out}, set(), []

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
                coming.clear()
            if s.buffer or not s.out:
                found.extend(b for b in (s.buffer, *(b for a in s.args for b in buffers(a))) if b in coming)
            if s.attr("channel") and s.kind == "load":
                coming.add(s.buffer)

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
