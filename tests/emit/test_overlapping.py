"""Kernels that start before the one before has ended: each waits before it touches memory that another one uses."""
import ast
import re
from dataclasses import replace

import pytest

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.core import loops
from gdn_codegen.passes.launch.overlapping import WRITES, overlapping
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.call.gradient_builds import candidates
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
        early = "== 0:\n" + " " * 16 + WAIT in text  # the first block waits
        assert (n > 0) == (WAIT in text) and text.count(START) == (n + 1 < len(texts))
        if early or (plan in WALKS and n):
            assert not early or n + 1 == len(texts) or text.index(START) < text.index(WAIT)
            continue
        body = text[text.index("with t.kernel("):]
        before, placed = body[:body.rindex(WAIT)] if n else "", n > 0 and "part_places[" in body
        assert not re.search(rf"\b(?!{INDICES})\w+(_in|_out|_ws|S_\w+)\[", before)
        assert text.count(WAIT) == (n > 0) + placed and (n in (0, len(texts) - 1) or text.rindex(WAIT) < text.index(START))
        assert not placed or WAIT in body[:body.index("part_places[")]


def waits_first(k, summed):
    """Whether all blocks of a kernel but the first wait, and only then let the next kernel start."""
    return not k.start or (k.start == "unless_summed" and not summed)


def guards(k):
    """For each access of a kernel to memory: the tensor, and whether the block has waited before it."""
    waited, seen = set(), []
    for s in k.body:
        for o in getattr(s, "ops", (s,)):
            if o.kind == "await_kernels":
                waited.add(o.args[0])
            if o.kind == "return_unless_negative":
                seen.append((None, o.args[0]))
            if name := o.attr("tensor"):
                under = {o.args[0]} if o.kind == "load" and o.args else set()
                under |= {n for t, n in seen if t is None}
                seen.append((name, bool(under & waited)))
    return [(t, w) for t, w in seen if t]


GDN, KDA = (Build("tilelang", 64, dtype="bfloat16", arch=ARCH, algorithm=n) for n in ("gated_delta_rule", "kimi_delta_attention"))
#: Builds with parts, and the two of a gradient.
PARTED = {
    "walk": lambda: replace(GDN, schedule=PLANS["decay"]), "exact": lambda: replace(GDN, schedule=PLANS["exact"]),
    "two blocks a part": lambda: replace(GDN, schedule=varied("walk", ARCH, partition="decay", longest_first=True)),
    "states": lambda: next(candidates(GDN, "cuda", ARCH, 64)).states,
    "gradient": lambda: next(candidates(GDN, "cuda", ARCH, 64)).gradient,
    "channels": lambda: replace(KDA, schedule=varied("operand_walk", ARCH, partition="decay", v_block=64)),
    "channels, states": lambda: next(candidates(KDA, "cuda", ARCH, 64, few=True)).states}


@pytest.mark.parametrize("plan", [n if "channels" not in n else pytest.param(n, marks=pytest.mark.slow) for n in PARTED])
def test_a_block_waits_for_kernels_that_may_still_run(plan, unchecked):
    """A block that starts has seen the end of the kernels that a kernel waited for which let the next one start afterwards. Of
    others it touches no memory that either writes, before it has waited. In calls with summaries and without."""
    p = lowered(PARTED[plan]())
    assert p.launch == "overlapping"
    for summed in (True, False):
        of_call = [k for k in p.kernels if summed or not any(o.kind == "return_unless_negative" for o in k.ops)]
        touched = [({o.attr("tensor") for o in k.ops if o.attr("tensor")},
                    {o.attr("tensor") for o in k.ops if o.kind in WRITES}) for k in of_call]
        ended, early = 0, []  # how many kernels have ended when blocks of this one start; kernels whose blocks do not wait first
        for n, k in enumerate(of_call[1:], 1):
            if k.start != "agents" and not waits_first(k, summed):
                early.append(k.name)
                for i in range(ended, n):
                    shared = (touched[i][0] & touched[n][1]) | (touched[i][1] & touched[n][0])
                    assert all(waited for name, waited in guards(k) if name in shared), (k.name, of_call[i].name)
            ended = n if waits_first(k, summed) else ended
        assert len(early) >= 3 * summed, early  # M, the fold, and the walk


@pytest.mark.parametrize("plan, back", [("walk", False), ("states", False), ("gradient", True)])
def test_kernels_that_compute_lengths_anew_count_in_the_direction_of_the_walk(plan, back, unchecked):
    """Also the fold, whose own loop goes over parts. For a walk back they count from the last chunk."""
    calls = [x for x in ast.walk(ast.parse(render(PARTED[plan]()))) if isinstance(x, ast.Call)
             and ast.unparse(x.func) == "t.warm_up_length"]
    assert len(calls) >= 5 and {ast.unparse(x.args[-1]) == "-1" for x in calls} == {back}


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
