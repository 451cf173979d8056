"""Barriers among warp groups: all that there are are needed, and stand where they must."""
from dataclasses import replace

import pytest
from walks import PLANS, SIZES, SYNC, inside, lowered, walker, with_body

from gdn_codegen.algorithms import find
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.ir.builder import algorithm, carried, strictly_lower, unit_lower_inverse
from gdn_codegen.ir.builder import lower as below
from gdn_codegen.ir.core import Buffer, Op, loops
from gdn_codegen.passes.sync.mbarriers import mbarriers
from gdn_codegen.prove.happens_before import RaceError
from gdn_codegen.prove.ring_accesses import reads
from gdn_codegen.prove.ring_runs import iterations, warm_ups
from gdn_codegen.prove.rings import check_ring, check_rings
from gdn_codegen.schedule import Schedule
from gdn_codegen.targets import lower

#: The kernels that compute the summaries of parts.
SUMS = ("S_offset", "S_factor")


@pytest.mark.parametrize("plan, kernel", [*((x, "") for x in PLANS), *(("warm_up", x) for x in SUMS),
                                          *(pytest.param("fused_warm_up", x, marks=pytest.mark.slow) for x in SUMS)])
def test_every_wait_arrival_fence_and_drain_is_needed(plan, kernel):
    """Take one out, at once or with its other half, and the check fails."""
    p = lowered(plan)
    ops, spare = inside(p, name=kernel), []
    syncs = [n for n, o in enumerate(ops) if o.kind in SYNC]
    assert {ops[n].kind for n in syncs} == set(SYNC) - ({"drain"} if kernel == "S_factor" or plan == "own" else set())
    for n in syncs:
        try:
            check_rings(with_body(p, ops[:n] + ops[n + 1:], kernel), SM_90A)
            spare.append(ops[n])
        except RaceError:
            pass
    for channel in {ops[n].attr("channel") for n in syncs} - {None}:
        rest = [o for o in ops if o.kind not in ("wait", "signal") or o.attr("channel") != channel]
        try:
            check_rings(with_body(p, rest, kernel), SM_90A)
            spare.append(channel)
        except RaceError:
            pass
    assert not spare


def test_the_result_of_a_search_without_warm_ups_is_checked_with_them(monkeypatch):
    """Let tries without a warm-up drop everything: the search is then repeated with warm-ups."""
    p = lower(find("gated_delta_rule").trace(), "tilelang", PLANS["fused_warm_up"], SIZES, "float16", "sm_90a",
              upto="async_copies")
    want = mbarriers(p, SM_90A)
    monkeypatch.setattr("gdn_codegen.passes.sync.mbarriers.check_ring",
                        lambda p, k, device, warmed_up: check_ring(p, k, device) if warmed_up else None)
    assert mbarriers(p, SM_90A) == want and any(o.kind == "wait" for o in inside(want))


def test_what_the_rest_orders_has_no_barrier():
    """The loader waits once an iteration, as k is freed after all else that the iteration loaded."""
    ops = inside(lowered())
    assert [o.attr("channel") for o in ops if o.kind == "wait" and o.agent == "loader"] == ["k_free"]
    assert [o.agent for o in ops if o.kind == "signal" and o.attr("channel") == "k_free"] == ["state"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["walk", "fused_walk", "fused_warm_up"])
@pytest.mark.parametrize("kind", ["late wait", "late drain", "early signal", "early fence"])
def test_each_stands_where_it_must(kind, plan):
    """Move a wait or drain after the op that it guards, or a signal or fence before the op that it follows."""
    p = lowered(plan)
    ops, passed = inside(p), []
    for n, o in enumerate(ops):
        if o.kind != kind.split()[1] or (o.kind == "fence" and (o.agent == "loader" or o.attr("late"))):
            # The loader has a later one. A late one is of the iteration before.
            continue
        ahead = kind.startswith("late")
        order = range(n + 1, len(ops)) if ahead else range(n - 1, -1, -1)
        other = next((m for m in order if ops[m].agent == o.agent and ops[m].buffer), None)
        if other is None:
            continue
        less = ops[:n] + ops[n + 1:]
        try:
            check_rings(with_body(p, [*less[:other], o, *less[other:]]), SM_90A)
            passed.append(o)
        except RaceError:
            pass
    # k_free orders all but the last write of that ring, too.
    assert [o.attr("channel") for o in passed] == ["exp_G_shared_free"] * (kind == "late wait")


@pytest.mark.parametrize("plan", ["fused_walk", "fused_warm_up"])
def test_a_product_that_was_begun_is_drained_before_it_is_read(plan):
    """Not without its drain, nor with it after the reader or before the product."""
    p = lowered(plan)
    ops = inside(p)
    (n,) = (n for n, o in enumerate(ops) if o.kind == "drain" and o.agent == "aux")
    (product,) = (o for o in ops if o.attr("asynchronous") and o.agent == "aux")
    read = reads(walker(p))
    reader = next(m for m, o in enumerate(ops) if product.out in read(o))
    assert product.agent == ops[n].agent == ops[reader].agent and ops.index(product) < n < reader
    message = f"{ops[reader].out} of aux reads {product.out} in iteration 0, a product that was begun and not drained"
    for body in (ops[:n] + ops[n + 1:], [*ops[:n], *ops[n + 1:reader + 1], ops[n], *ops[reader + 1:]],
                 [*ops[:ops.index(product)], ops[n], *(o for o in ops[ops.index(product):] if o is not ops[n])]):
        with pytest.raises(RaceError, match=message if plan == "fused_walk" else message.replace("iteration 0", r"iteration \d")):
            check_rings(with_body(p, body), SM_90A)


def test_what_a_product_reads_is_free_once_it_is_drained():
    """Where nothing that `aux` hands over later says so, `aux` says so itself."""
    @algorithm(q="C K", k="C K", v="C V", beta="C", S=carried("K V"))
    def twice(q, k, v, beta, S):
        T = unit_lower_inverse(strictly_lower(beta[:, None] * (k @ k.T)))
        U = T @ (T @ (beta[:, None] * (v - k @ S)))
        o = below(q @ k.T) @ U + q @ S
        S = S + k.T @ U
        return o, S

    p = lower(twice.trace(), "tilelang", Schedule("own", (("o", "S"),), state_layout="vk"), SIZES, "float16", "sm_90a")
    ops = inside(p)
    aux = [(o.kind, o.attr("channel") or o.out) for o in ops if o.agent == "aux"]
    begun, drained, told = (aux.index(x) for x in (("matmul", "q_kT"), ("drain", ""), ("signal", "k_free")))
    assert begun < drained < told
    (early,) = (o for o in ops if o.agent == "aux" and o.attr("channel") == "k_free")
    at = next(n for n, o in enumerate(ops) if o.kind == "drain" and o.agent == "aux")
    with pytest.raises(RaceError, match="before q_kT of aux is sure to be done"):
        moved = [*ops[:at], early, *(o for o in ops[at:] if o is not early)]
        check_rings(with_body(p, moved), SM_90A)


def test_a_product_that_is_not_begun_needs_no_drain():
    p = lowered("fused_walk")
    whole = [replace(o, attrs=tuple(a for a in o.attrs if a[0] != "asynchronous")) for o in inside(p) if o.kind != "drain"]
    check_rings(with_body(p, whole), SM_90A)


@pytest.mark.parametrize("drained", [False, True])
def test_what_a_begun_product_reads_is_not_written(drained):
    """By its own agent, whose ops are in order otherwise."""
    p, body = lowered("fused_walk"), []
    for o in inside(p):
        body.append(o)
        if o.agent == "aux" and (o.kind == "drain" if drained else o.attr("asynchronous")):
            body.append(Op("move", "again", ("G_col",), (), None, 0, "aux", "q"))
    with pytest.raises(RaceError) as e:
        check_rings(with_body(p, body), SM_90A)
    assert ("again of aux is written in iteration 0 while q_kT of aux reads its slot" in str(e.value)) != drained


def test_registers_that_a_begun_product_reads_are_not_written():
    """`state` moves v while k S runs: not to the registers with S."""
    p = lowered("fused_walk")
    ops = inside(p)
    product = next(o for o in ops if o.attr("asynchronous") and o.agent == "state")
    home = next(o.buffer for o in ops if o.out == product.args[0])
    moved = [replace(o, buffer=home) if o.out == "v_T" else o for o in ops]
    with pytest.raises(RaceError, match="v_T of state is written in iteration 0 while k_S of state reads its slot"):
        check_rings(with_body(p, moved), SM_90A)


@pytest.mark.parametrize("plan", ["fused_walk", "fused_warm_up"])
def test_a_signal_to_stores_comes_behind_the_next_product(plan):
    """With the fence before it. Neither may be of its own iteration there, nor in another order."""
    p = lowered(plan)
    ops = inside(p)
    (start,) = (n for n, o in enumerate(ops) if o.attr("asynchronous") and o.agent == "state")
    fence, signal = ops[start + 1:start + 3]
    assert [o for o in ops if o.attr("late")] == [fence, signal]
    assert (fence.kind, signal.attr("channel")) == ("fence", "o_f16_shared_ready")
    at_once = {o: replace(o, attrs=tuple(x for x in o.attrs if x[0] != "late")) for o in (fence, signal)}
    for body in ([at_once.get(o, o) for o in ops], [at_once[o] if o is fence else o for o in ops],
                 [at_once[o] if o is signal else o for o in ops], [*ops[:start + 1], signal, fence, *ops[start + 3:]]):
        with pytest.raises(RaceError):
            check_rings(with_body(p, body), SM_90A)


def test_nothing_reads_a_slot_into_which_a_copy_was_begun_with_another():
    """Between the two loads, `aux` may still read v of the chunk before, as `state` alone frees k. A copy that no load begins is
    refused, too."""
    p = lowered("fused_walk")
    k, loads = walker(p), {o.out: o for o in inside(p) if o.kind == "load"}
    threads = {a.name: a.threads for a in k.agents}

    def sync(kind, agent, channel, **attrs):
        return Op(kind, "", (), tuple(sorted({"channel": channel, **attrs}.items())), None, agent=agent)

    def move(out, value, agent, buffer):
        return Op("move", out, (value,), (), loads["v"].type, 0, agent, buffer)

    def loop(begun):
        first, second = (loads[n].with_attrs(channel=f"{n}_full", tail=f"{n}_tail", begun=x).changed(buffer=f"{n}_tile")
                         for n, x in (("k", None), ("v", begun)))
        body = (sync("wait", "loader", "k_empty", back=1), first, sync("signal", "loader", "k_full"),
                sync("wait", "loader", "v_empty", back=1), second, sync("signal", "loader", "v_full"),
                sync("wait", "aux", "x_full"), sync("wait", "aux", "v_full"), move("a", "v", "aux", "a_own"),
                move("b", "x", "aux", "b_own"), sync("signal", "aux", "v_empty"), sync("signal", "aux", "x_empty"),
                sync("wait", "state", "k_full"), move("c", "k", "state", "c_own"), sync("wait", "state", "v_full"),
                move("d", "v", "state", "d_own"), sync("wait", "state", "x_empty", back=1), move("x", "c", "state", "x_tile"),
                sync("signal", "state", "x_full"), sync("signal", "state", "v_empty"), sync("signal", "state", "k_empty"))
        counts = {"k_full": 32, "v_full": 32, "k_tail": 32, "v_tail": 32, "k_empty": threads["state"], "x_full": threads["state"],
                  "x_empty": threads["aux"], "v_empty": threads["aux"] + threads["state"]}
        spaces = {**dict.fromkeys(("k_tile", "v_tile", "x_tile"), "shared"),
                  **dict.fromkeys(("a_own", "b_own", "c_own", "d_own"), "fragment")}
        buffers = (*(Buffer(n, s, (64, 64), "float16") for n, s in spaces.items()),
                   *(Buffer(n, "barrier", (x,), "uint64") for n, x in counts.items()))
        (lp,) = loops(k.body)
        return replace(k, body=(replace(lp, carried=(), body=body),), buffers=buffers, agents=k.agents[:3])

    assert [a.name for a in k.agents[:3]] == ["state", "aux", "loader"]
    check_ring(p, loop(None), SM_90A)
    with pytest.raises(RaceError, match="v of loader is written in iteration 1 before a of aux is sure to be done"):
        check_ring(p, loop("k"), SM_90A)
    with pytest.raises(RaceError, match="v of loader waits in iteration 0 for a copy that q did not begin"):
        check_ring(p, loop("q"), SM_90A)


@pytest.mark.parametrize("plan", ["fused_walk", "fused_warm_up"])
def test_copies_of_ragged_tails_begin_with_the_first(plan):
    """k's and v's, whose slots are free by then. That of q is not."""
    p = lowered(plan)
    ops = inside(p)
    tails = [o for o in ops if o.attr("tail")]
    assert [o.attr("begun") for o in tails] == [None, *[tails[0].out] * (len(tails) - 1)] and len(tails) > 1
    with pytest.raises(RaceError, match=r"q of loader is written in iteration \d before"):
        check_rings(with_body(p, [o.with_attrs(begun="k") if o.out == "q" else o for o in ops]), SM_90A)


@pytest.mark.parametrize("drained", [False, True])
def test_a_begun_product_frees_its_rings_when_it_is_drained(drained):
    """Let `aux` alone read q, of one slot, and say so to the loader before the drain or after it."""
    p, body = lowered("fused_walk"), []
    ops = inside(p)
    (frees_k,), (frees_q,) = ([o for o in ops if o.kind == "signal" and o.attr("channel") == c] for c in ("k_free", "q_free"))
    for o in ops:
        if o.kind == "wait" and o.attr("channel") == "q_free":
            o = replace(o, attrs=tuple((n, 1 if n == "back" else x) for n, x in o.attrs))
        if o is not frees_k and o is not frees_q:
            body.append(replace(o, args=("S_f16", "k")) if o.out == "q_S" else o)
        body += [frees_k] * (o.out == "q_S")
        body += [replace(frees_q, agent="aux")] * bool(
            o.agent == "aux" and (o.kind == "drain" if drained else o.attr("asynchronous")))
    one = tuple(replace(b, slots=1) if b.name in ("q", "q_ready", "q_free") else b for b in walker(p).buffers)
    if drained:
        check_rings(with_body(p, body, buffers=one), SM_90A)
    else:
        with pytest.raises(RaceError, match="q of loader is written in iteration 1 before q_kT of aux is sure"):
            check_rings(with_body(p, body, buffers=one), SM_90A)


@pytest.mark.parametrize("name, change, message", [
    ("k", {"slots": 1}, "written in iteration|without waiting"), ("k_ready", {"slots": 1}, "phase|parity"),
    ("k_ready", {"shape": (64,)}, "nothing ends it"),
    ("exp_G_shared_ready", {"shape": (64,)}, "phase|without waiting|arrive")])
def test_counts_and_slots_are_checked(name, change, message):
    p = lowered()
    buffers = tuple(replace(b, **change) if b.name == name else b for b in walker(p).buffers)
    with pytest.raises(RaceError, match=message):
        check_rings(with_body(p, inside(p), buffers=buffers), SM_90A)


def test_a_fragment_stays_with_its_agent():
    p = lowered()
    ops = [replace(o, agent="aux") if o.out == "U_unscaled_f16" else o for o in inside(p)]
    with pytest.raises(RaceError, match="fragment of"):
        check_rings(with_body(p, ops), SM_90A)


def test_a_producer_looks_back_as_far_as_its_ring_is_long():
    p = lowered()
    ops = [replace(o, attrs=tuple(x for x in o.attrs if x[0] != "back")) if o.attr("back") else o for o in inside(p)]
    with pytest.raises(RaceError, match="nothing ends it"):
        check_rings(with_body(p, ops), SM_90A)


def long_rings(plan, slots):
    """A walk whose rings have as many slots as no named schedule has, with its barriers."""
    p = lower(find("gated_delta_rule").trace(), "tilelang", PLANS[plan], SIZES, "float16", "sm_90a", upto="async_copies")
    buffers = tuple(replace(b, slots=slots) if b.space == SM_90A.operand else b for b in walker(p).buffers)
    return mbarriers(with_body(p, inside(p), buffers=buffers), SM_90A)


@pytest.mark.parametrize("slots", [3, 5, 9])
def test_a_missing_wait_is_found_however_long_the_rings_are(slots):
    """A producer's wait for a free slot orders nothing before the ring is used a second time."""
    p = long_rings("walk", slots)
    check_rings(p, SM_90A)
    ops = inside(p)
    back = [n for n, o in enumerate(ops) if o.kind == "wait" and o.attr("back")]
    assert back
    for n in back:
        with pytest.raises(RaceError):
            check_rings(with_body(p, ops[:n] + ops[n + 1:]), SM_90A)


@pytest.mark.parametrize("slots, runs, lengths", [
    (1, 8, [0, 1, 2, 3, 4]), (3, 8, [0, 1, 2, 3, 4]), (4, 10, [0, 1, 2, 3, 4, 5]), (9, 20, [0, 1, 2, 3, 4, 8, 9, 10])])
def test_the_checker_runs_each_slot_twice(slots, runs, lengths):
    k = walker(long_rings("walk", slots))
    assert (iterations(k), warm_ups(k)) == (runs, lengths)


def test_kernels_over_chunks_need_no_barriers():
    p = lowered()
    assert mbarriers(replace(p, stage="placed", kernels=p.kernels[:1]), SM_90A).kernels == p.kernels[:1]
