"""Lowered programs of several members without one wait, signal or barrier: the checkers refuse each."""
from dataclasses import replace

import pytest

from gdn_codegen.derived_pages import find
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.core import map_ops
from gdn_codegen.passes.sync import proofs
from gdn_codegen.prove.happens_before import RaceError
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import lower

KINDS = ("signal", "wait", "barrier", "fence", "drain")
SMALL, LARGE = {"C": 16, "K": 32, "V": 32}, {"C": 64, "K": 64, "V": 64}
#: architecture ("" for PTO), page, schedule, its changes, contract, sizes.
LOWERED = [("", "causal_conv1d", "fused", {}, "state=pool/in_place", SMALL),
           ("", "gated_delta_rule", "fused", {}, "state=vk/pool/in_place", SMALL | {"K": 64}),
           ("", "gla", "fused", {}, "", SMALL),
           ("", "gated_delta_rule", "staged", {"launch": "single"}, "", SMALL),
           ("", "gated_delta_rule", "replay", {"channel_slots": 2, "prefetch": "all"}, "", SMALL),
           ("sm_90a", "gated_delta_rule", "walk", {}, "state=pool/in_place", LARGE),
           ("sm_90a", "gla", "operand_walk", {}, "", LARGE),
           ("sm_90a", "kimi_delta_attention", "operand_walk", {"agents": "early_outputs", "residuals": "@update"}, "", LARGE),
           ("sm_90a", "gated_delta_rule", "fused_walk", {"persistent": True}, "", LARGE)]
LEAST = 10  # of each program, how many are left out


def ordering(o):
    """Whether the checkers ask for the op. Barriers of a block are TileLang's compiler's business (`reused_memory`)."""
    return o.kind in KINDS and o.attr("scope") != "block"


def less(p, n):
    """The program without its n-th op of these kinds."""
    left = [n]

    def kept(o):
        left[0] -= ordering(o)
        return [] if ordering(o) and left[0] == -1 else [o]
    return replace(p, kernels=tuple(replace(k, body=map_ops(k.body, kept)) for k in p.kernels))


@pytest.mark.slow
@pytest.mark.parametrize("arch, page, schedule, changes, contract, sizes", LOWERED)
def test_each_is_needed(arch, page, schedule, changes, contract, sizes):
    p = lower(find(page).trace(), "tilelang" if arch else "pto", varied(schedule, arch, **changes), sizes, "float16", arch,
              Contract.parse(contract))
    check, device = (proofs.check_rings, SM_90A) if arch else (proofs.check_waits, ASCEND_A2)
    check(p, device)
    count = sum(ordering(o) for k in p.kernels for o in k.ops)
    assert count >= LEAST
    spare = []
    for n in range(0, count, 1 if count < 60 else 7):
        try:
            check(less(p, n), device)
            spare.append(n)
        except RaceError:
            pass
    assert not spare
