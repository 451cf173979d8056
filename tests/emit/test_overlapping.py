"""Kernels that start before the one before has ended: each waits before it touches memory that another one uses."""
import re
from dataclasses import replace

import pytest

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.core import loops
from gdn_codegen.passes.launch.overlapping import overlapping
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import named, varied

ARCH = "sm_90a"
WAIT, START = "t.wait_for_earlier_kernels()", "t.start_next_kernel()"
PLANS = {"walk": named("walk", ARCH), "fused_walk": named("fused_walk", ARCH), "decay": varied("walk", ARCH, partition="decay"),
         "exact": varied("fused_walk", ARCH, partition="exact")}
WALKS = {"walk": named("walk", ARCH), "fused_walk": named("fused_walk", ARCH),
         "persistent": varied("fused_walk", ARCH, persistent=True)}
#: Tensors that no kernel writes, and that say which rows an instance has.
INDICES = r"cu_seqlens|state_indices_in"


def kernels(b):
    """The texts of a module's kernels, in the order in which they are launched."""
    text = render(b)
    return [x.split("    return ", 1)[0] for x in re.split(r"\n(?=def \w+_kernel\(t\))", text)[1:]]


@pytest.mark.parametrize("plan", PLANS)
def test_a_kernel_waits_before_it_reads_or_writes(plan):
    texts = kernels(Build("tilelang", 64, schedule=PLANS[plan], dtype="bfloat16", arch=ARCH))
    assert len(texts) > 1
    for n, text in enumerate(texts):
        waits = 2 if n and plan in WALKS else n > 0  # the agent that loads waits in its loop and after it
        assert (text.count(WAIT), text.count(START)) == (waits, n + 1 < len(texts))
        if plan in WALKS and n:
            continue
        body = text[text.index("with t.kernel("):]
        before = body[:body.index(WAIT)] if n else ""
        assert not re.search(rf"\b(?!{INDICES})\w+(_in|_out|_ws|S_\w+)\[", before)
        assert n in (0, len(texts) - 1) or text.index(WAIT) < text.index(START)


def test_other_builds_start_kernels_one_after_the_other():
    for b in (Build("tilelang", 64), Build("triton", 64), Build("pto", 64)):
        assert lowered(b).launch == "kernels" and WAIT not in render(b)


@pytest.mark.parametrize("plan", WALKS)
def test_agents_of_a_walk_wait_where_they_touch_what_earlier_kernels_write(plan):
    p = lowered(Build("tilelang", 64, schedule=WALKS[plan], dtype="bfloat16", arch=ARCH))
    walk, written = p.kernels[-1], {o.attr("tensor") for o in p.kernels[0].ops if o.kind in ("store", "clear_counter")}
    assert walk.start == "agents"
    agents = {o.agent for o in walk.ops if o.attr("tensor") in written}
    assert agents == {"loader"} == {o.agent for o in walk.ops if o.kind == "await_kernels"}
    for body in (walk.body, *(lp.body for lp in loops(walk.body))):
        own = [o for o in body if getattr(o, "agent", "") in agents]
        touched = [n for n, o in enumerate(own) if o.attr("tensor") in written]
        waits = [n for n, o in enumerate(own) if o.kind == "await_kernels"]
        assert not touched or waits[:1] == [touched[0] - 1]
    chunks = list(loops(walk.body))[-1].body
    early = [o.attr("tensor") for o in chunks[:[o.kind for o in chunks].index("await_kernels")] if o.kind == "load"]
    assert plan == "walk" or "k" in early  # callers' tiles come before the wait
    last = [o for o in walk.ops if o.kind in ("await_kernels", "claim_item")][-1]
    assert last.kind == ("claim_item" if plan == "persistent" else "await_kernels")  # of an instance without a chunk, too


def test_a_walk_waits_first_if_it_overwrites_what_an_earlier_kernel_reads():
    p = lowered(Build("tilelang", 64, schedule=WALKS["fused_walk"], dtype="bfloat16", arch=ARCH))
    before = replace(p, launch="kernels", kernels=tuple(replace(k, start="", body=tuple(
        o for o in k.body if getattr(o, "kind", "") != "await_kernels")) for k in p.kernels))
    over = replace(before, tensors=tuple(replace(t, over="g") if t.name == "o" else t for t in p.tensors))
    agents = {o.agent for o in overlapping(over, SM_90A).kernels[-1].ops if o.kind == "await_kernels"}
    assert agents == {"loader", "store"}
