"""A kernel for each role, in any order: every lowering builds it, or says in a ScheduleError why it cannot."""

import pytest
from tiers import every

from gdn_codegen import targets
from gdn_codegen.ir.core import walk
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import Schedule, ScheduleError
from gdn_codegen.schedule.schedule import ROLES

LOWERINGS = [(t, arch) for t in targets.names() for arch in ("", *targets.find(t).archs)]
LAST = ((("@output", "@state"),), (("@state",), ("@output",)), (("@state", "@solution"), ("@output",)))
EARLIER = [r for r in ROLES if r not in ("output", "state")]


def schedules(*roles):
    """Schedules with a kernel for each of these roles, in this order, before the output's and the state's."""
    for last in LAST[:3 - 2 * len(roles[1:])]:
        if roles != ("solution",) or last != LAST[2]:
            yield Schedule("own", (*((f"@{r}",) for r in roles), *last))


def build(target, arch, schedule):
    return lowered(Build(target, 16 if not arch else 64, schedule=schedule, arch=arch, head_dim_k=64, head_dim_v=64))


@pytest.mark.parametrize("target, arch", [pytest.param(*x, marks=() if x == ("triton", "") else pytest.mark.slow)
                                          for x in LOWERINGS])
def test_a_walk_sums_gates_that_another_kernel_stored(target, arch):
    """The workspace of the gates has zeros past the sequence's end, as everything that is stored to it."""
    for s in schedules("gate"):
        if arch:  # a walk of warp groups has no rule for the sum
            with pytest.raises(ScheduleError, match="cumsum"):
                build(target, arch, s)
            continue
        kernels = [list(walk(k.body)) for k in build(target, arch, s).kernels]
        assert any(o.kind == "store" and o.attr("tensor") == "g_ws" for o in kernels[0])
        assert any(o.kind == "load" and o.attr("tensor") == "g_ws" for ops in kernels[1:] for o in ops)


@pytest.mark.slow
@pytest.mark.parametrize("near", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("target, arch, first", every(2, LOWERINGS, EARLIER))
def test_any_order_of_two_roles(target, arch, first, near):
    """Near: the role itself and its neighbours, so that each two of them come in both orders; on Triton, and with
    warp groups, which refuse most, all. Every second role comes first by default, the others by hand."""
    built, n = 0, EARLIER.index(first)
    some = EARLIER if arch or target == "triton" else [EARLIER[(n + d) % len(EARLIER)] for d in (-1, 0, 1)]
    for second in some if near else EARLIER:
        for s in schedules(*dict.fromkeys((first, second))):
            try:
                built += bool(build(target, arch, s).kernels)
            except ScheduleError as e:
                assert arch and "cumsum" in str(e)
    # a walk comes first, and there is no sum before it
    assert built or (arch and first in ("solution", "state_solution", "right_side", "keyless", "sum", "tile", "core"))
