"""recent_rows: earlier rows of an input come from memory. last_chunk: walks whose next states need none run their last chunk."""
from dataclasses import replace

import pytest

from gdn_codegen.derived_pages import find
from gdn_codegen.ir.builder import algorithm, carried, delay, latest
from gdn_codegen.ir.core import Op, loops
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.schedule.schedule import varied
from gdn_codegen.targets import lower

SIZES = {"C": 16, "K": 32, "V": 32}
APART = varied("fused", kernels=(("@output",), ("@state",)))


@algorithm(x="C K", S=carried("K"), R=carried("K"))
def of_a_value(x, S, R):
    """The delayed tile is computed, so that memory does not have it."""
    y = x * x
    return delay(y, S) + delay(x, R), latest(y), latest(x)


@algorithm(x="C K", S=carried("K"), R=carried("K"))
def in_wrong_order(x, S, R):
    """S is the row before, and R the one before that: the oldest has to come first."""
    return delay(x, S, R), latest(x), latest(delay(x, S))


@algorithm(x="C K", S=carried("K"))
def sums(x, S):
    """The next state depends on the state."""
    return x + S[None, :], S + latest(x)


def lowered(page, target="triton", schedule=APART, upto=""):
    return lower((find(page) if isinstance(page, str) else page).trace(), target, schedule, SIZES, "float32", upto=upto)


def delays(p):
    """By how many tokens loads and ops move rows."""
    return ([o.attr("delay") for o in p.kernels[0].ops if o.attr("delay")],
            [len(o.args) - 1 for o in p.kernels[0].ops if o.kind == "delay" and not o.attr("given")])


def test_delayed_inputs_are_loads():
    assert delays(lowered("causal_conv1d", upto="recent_rows")) == ([1, 2, 3], [])
    kernels = {k.grid: k for k in lowered("causal_conv1d").kernels}
    assert not any(loops(kernels["chunks"].body)) and [lp.index for lp in loops(kernels["sequences"].body)] == ["last"]


@pytest.mark.parametrize("page, found", [(of_a_value, ([1], [1])), (in_wrong_order, ([1], [2]))])
def test_only_rows_of_inputs_that_states_continue(page, found):
    assert delays(lowered(page, upto="recent_rows")) == found


def test_other_devices_keep_the_ops():
    assert delays(lowered("causal_conv1d", "tilelang", varied("fused"), upto="recent_rows")) == ([], [1, 2, 3])


def test_a_walk_of_a_recurrence_runs_all_chunks():
    assert [lp.index for k in lowered(sums).kernels for lp in loops(k.body)] == ["chunk"] * len(lowered(sums).kernels)
    (whole,) = lowered("causal_conv1d", schedule=varied("fused")).kernels  # it stores y, too
    assert [lp.index for lp in loops(whole.body)] == ["chunk"]


def test_a_load_that_cannot_begin_earlier_is_refused():
    p = lowered("causal_conv1d", upto="cut")
    change = lambda o: o.with_attrs(transposed=True) if isinstance(o, Op) and o.attr("delay") == 1 else o
    bad = p.map_kernels(lambda k: replace(k, body=tuple(map(change, k.body))))
    with pytest.raises(VerifyError, match=r"loads rows of earlier tokens of x; accepted: of a tile of tokens, as it lies"):
        verify(bad)
