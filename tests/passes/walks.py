"""Lowered kernels of warp groups, and what tests take out of them."""
from dataclasses import replace

from gdn_codegen.algorithms import find
from gdn_codegen.ir.core import Loop, loops
from gdn_codegen.schedule import Schedule, named
from gdn_codegen.targets import lower

SIZES = {"C": 64, "K": 64, "V": 64}
SYNC = ("wait", "signal", "fence", "drain")
OWN = Schedule("own", (("G", "Tinv"), ("o", "S")), form="split", state_layout="vk")
#: Three stages, blocks of V, a tile that crosses from group to group and one value per token that threads load.
WALK, FUSED_WALK = named("walk", "sm_90a"), named("fused_walk", "sm_90a")
PLANS = {"walk": WALK, "stages": replace(WALK, stages=3), "columns": replace(WALK, v_block=64),
         "own": OWN, "direct": replace(OWN, form="direct"),
         "unit": replace(OWN, form="unit"),
         "warm_up": replace(WALK, partition="decay", warm_up="state"), "fused_walk": FUSED_WALK,
         "fused_warm_up": replace(FUSED_WALK, partition="decay", warm_up="state"),
         "longest": replace(WALK, partition="decay", warm_up="all", longest_first=True)}


def lowered(plan="walk", page="gated_delta_rule", sizes=SIZES, dtype="float16", upto=""):
    plan = PLANS[plan] if isinstance(plan, str) else plan
    wide = {"columns": {**sizes, "V": 128}}.get(plan.name if plan is not PLANS["columns"] else "columns", sizes)
    return lower(find(page).trace(), "tilelang", plan, wide, dtype, "sm_90a", upto=upto)


def walker(p, name=""):
    """The kernel with agents, of that name or the last one: those that compute summaries come before it."""
    *_, k = (k for k in p.kernels if k.agents and name in ("", k.name))
    return k


def with_body(p, body, name="", **changes):
    """The program with another body in the loop over the chunks of its kernel that walks."""
    k = walker(p, name)
    new = tuple(replace(s, body=tuple(body)) if isinstance(s, Loop) and s.index == "chunk" else s for s in k.body)
    return replace(p, kernels=tuple(replace(k, body=new, **changes) if x is k else x for x in p.kernels))


def inside(p, index="chunk", name=""):
    """The ops of the loop over the chunks of a sequence or part; index: "before" for those of the warm-up."""
    (loop,) = (lp for lp in loops(walker(p, name).body) if lp.index == index)
    return list(loop.body)
