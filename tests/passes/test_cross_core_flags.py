"""Flags between cores: when pairs of a signal and a wait share one, and what the checker refuses of it."""
from dataclasses import replace

import pytest

from gdn_codegen.cli import main
from gdn_codegen.derived_pages import find
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.ir.core import map_ops
from gdn_codegen.passes.sync import event_ids, synchronise
from gdn_codegen.prove.happens_before import RaceError, check_waits
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.targets import lower

SIZES = {"C": 64, "K": 16, "V": 16}


def placed(page, schedule):
    return lower(find(page).trace(), "pto", varied(schedule), SIZES, "float16", upto="pack")


def crossing(k):
    """The signals and waits between agents."""
    return [o for o in k.ops if o.kind in ("signal", "wait") and "." in o.attr("src")]


def ids(p):
    return [{o.attr("id") for o in crossing(k)} for k in p.kernels]


@pytest.mark.parametrize("page", ["gated_delta_product", "gated_delta_product.gradient"])
def test_two_inverses_of_two_heads_have_flags_enough(unchecked, page):
    """Of [T1 T2] the loop primes 16 signals. Each would have a flag of its own, beside two more; PTO-ISA gives kernels 13."""
    p = placed(page, "staged")
    done = synchronise.synchronise(p, ASCEND_A2)
    check_waits(done, ASCEND_A2)
    most = max(done.kernels, key=lambda k: len({o.attr("id") for o in crossing(k)}))
    assert {o.attr("id") for o in crossing(most)} == set(range(13))
    pipes = {}  # those that share one are of one pipe
    for o in crossing(most):
        pipes.setdefault(o.attr("id"), set()).add((o.attr("src"), o.attr("dst")))
    assert all(len(x) == 1 for x in pipes.values())
    alone = synchronise.synchronise(p, replace(ASCEND_A2, flags=18))
    assert max(map(len, ids(alone))) == 18  # none is shared where that is not needed


@pytest.mark.parametrize("schedule", ["staged", "prepared", "fused"])
@pytest.mark.parametrize("flags", [2, 3, 5, 9])
def test_with_fewer_flags_it_is_proved_or_refused(unchecked, schedule, flags):
    device = replace(ASCEND_A2, flags=flags)
    p = placed("gated_delta_product", schedule)
    try:
        check_waits(synchronise.synchronise(p, device), device)
    except ScheduleError as e:
        assert f"cross-core flags, ascend_a2 has {flags}" in str(e)


@pytest.mark.parametrize("condition", ["order", "pipe"])
def test_the_checker_refuses_what_may_not_share(unchecked, monkeypatch, condition):
    """Each time without one condition of `_may_share`, in a kernel with too few flags for it."""
    def share(found, parts):
        pairs = [x for x, *_ in parts]
        one = {"order": {(x.src, x.dst) for x in pairs}, "pipe": {x.dst for x in pairs}}
        return len(one[condition]) == 1
    device = replace(ASCEND_A2, flags=2)
    p = placed("gated_delta_product", "staged")
    monkeypatch.setattr(event_ids, "_may_share", share)
    with pytest.raises(RaceError, match=r"set again|does not wait|nothing sets"):
        check_waits(synchronise.synchronise(p, device), device)


def test_the_checker_refuses_a_flag_of_two_pipes_that_nothing_orders(unchecked):
    """In program order each wait takes the right signal. But the other pipe may be the first to signal."""
    done = synchronise.synchronise(placed("gated_delta_product", "prepared"), ASCEND_A2)
    check_waits(done, ASCEND_A2)
    refused = 0
    for n, k in enumerate(done.kernels):
        pipes = {o.attr("id"): (o.attr("src"), o.attr("dst")) for o in crossing(k)}
        for a, b in ((a, b) for a in pipes for b in pipes if pipes[a][1] == pipes[b][1] and pipes[a][0] < pipes[b][0]):
            body = map_ops(k.body, lambda o, a=a, b=b: [o.with_attrs(id=a) if o.attr("id") == b and "." in o.attr("src") else o])
            kernels = (*done.kernels[:n], replace(k, body=body), *done.kernels[n + 1:])
            with pytest.raises(RaceError, match="set again before the wait of the set before it"):
                check_waits(replace(done, kernels=kernels), ASCEND_A2)
            refused += 1
    assert refused


def test_no_count_is_above_12(unchecked):
    """The kernel that primes 16 signals reaches that."""
    assert ASCEND_A2.flag_limit == 12
    done = synchronise.synchronise(placed("gated_delta_product", "staged"), ASCEND_A2)
    counts = [max(sum(o.attr("id") == n for o in crossing(k) if o.kind == "signal") for n in range(13)) for k in done.kernels]
    assert max(counts) > 1
    with pytest.raises(RaceError, match=r"its counter is sure to have room|the wait of the set before"):
        check_waits(done, replace(ASCEND_A2, flag_limit=1))


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["kernels", "single"])
def test_it_runs(launch):
    assert main(["verify", "--target", "pto", "--schedule", "staged", "--chunk", "64", "--algorithm", "gated_delta_product",
                 "--head-dim-k", "32", "--head-dim-v", "32", "--quick", "--launch", launch]) == 0
