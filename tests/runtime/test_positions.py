"""States at token positions, to slots of a pool that the caller names, beside a recurrence in float64."""
import pytest
import torch
from reference import expected, passed, rms_error
from torch.utils._python_dispatch import TorchDispatchMode

from gdn_codegen import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from gdn_codegen.runtime.admit import Refused
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import positions, run
from gdn_codegen.runtime.call.arguments import Tensors
from gdn_codegen.runtime.call.request import Request, inputs_of
from gdn_codegen.runtime.load import module
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import OWN

HERE = [t for t in OWN if runs(t, "cpu")]
NAMES = ("q", "k", "v", "g", "beta")
RAW = {"g": "raw", "beta": "sigmoid", "q": "l2norm", "k": "l2norm"}
LENGTHS = [53, 1, 0, 37, 16, 20]
#: With chunks of 16: chunk boundaries, inside of chunks, twice in one, the last token, none, and a skipped sequence.
POSITIONS = [[16, 48, 37, 39, 53], [1, 9, 9, 9, 9], [7] * 5, [32, 15, 1, 33, 16], [16, 3, 99, -2, 0], [5] * 5]
SLOTS = [[3, 9, 14, 1, 20], [7, -1, -1, -1, -1], [-1] * 5, [21, 22, 18, 0, 25], [26, 27, -1, -1, -1], [4, 6, -1, -1, -1]]
OWNED, SKIPPED = [12, 2, 8, 5, 24, 29], 5


class Counted(TorchDispatchMode):
    """Counts ops that launch a kernel on a GPU: all but views and allocations."""

    def __init__(self):
        super().__init__()
        self.names = []

    @property
    def launches(self):
        return len(self.names)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if not (op.is_view or "empty" in op.name() or "_unsafe_view" in op.name()):
            self.names.append(op.name())
        return out


def problem(forms=RAW, dtype=torch.float16, state_dtype=torch.float32, v_first=False, lengths=LENGTHS):
    """Inputs, what the recurrence reads, and a pool of 30 slots, NaN but for those of sequences, whose slots lie apart."""
    x, page = passed(lengths, 1, 2, 32, 48, forms, dtype=dtype, seed=3)
    if "A_log" in x["more"]:
        x["more"]["A_log"][0] = -8  # a head that forgets little, so that all its tokens count
        page["g"] = page["g"].clone()
        raw = x["g"].double() + x["more"]["dt_bias"].double()
        page["g"] = -torch.exp(x["more"]["A_log"].double()) * torch.logaddexp(raw, torch.zeros(()).double())
    S = x["S"].to(state_dtype)
    page["S"] = S.double()
    S = S.mT.contiguous() if v_first else S
    pool = torch.full((30, S[0].numel() + 32), float("nan"), dtype=state_dtype)[:, :S[0].numel()].unflatten(1, S.shape[1:])
    pool[OWNED[:len(S)]] = S
    pool[SLOTS[SKIPPED][:2]] = 3.0
    return x, page, pool


def call(x, pool, op=chunk_gated_delta_rule, v_first=False, batch=0, positions=POSITIONS, slots=SLOTS, owned=OWNED, **more):
    """The op on a problem, packed or as rows of equal length. The last sequence of LENGTHS is skipped."""
    shaped = (lambda y: y.unflatten(0, (batch, -1))) if batch else (lambda y: y[None])
    ends = None if batch else torch.tensor([0, *torch.tensor(x["lengths"]).cumsum(0).tolist()])
    indices = torch.tensor([-1 if n == SKIPPED else s for n, s in enumerate(owned)])
    named = {n: shaped(x[n]) for n in NAMES}
    if op is chunk_gated_delta_rule:
        more = {"chunk_size": 16, **more}
    return op(**named, scale=x["scale"], initial_state=pool, state_indices=indices, cu_seqlens=ends, state_v_first=v_first,
              checkpoint_positions=torch.tensor(positions, dtype=torch.int64),
              checkpoint_slots=torch.tensor(slots, dtype=torch.int32), **x["more"], **more)


RAW_SAID = dict(gate="raw", beta_form="sigmoid", use_qk_l2norm_in_kernel=True)


def at(page, n, tokens):
    """The state of sequence n after so many tokens [HV, K, V], in float64."""
    first = sum(page["lengths"][:n])
    cut = {i: page[i][first:first + tokens] for i in NAMES}
    return expected({**page, **cut, "lengths": [tokens], "S": page["S"][n:n + 1]})[1][0]


def check(page, pool, before, o=None, bound=5e-3, v_first=False, positions=POSITIONS, slots=SLOTS, owned=OWNED):
    """Each slot has its state, sequences have theirs, and no other slot was written."""
    turned = pool.mT if v_first else pool
    for n, length in enumerate(page["lengths"]):
        if n == SKIPPED:
            continue
        for p, slot in [*zip(positions[n], slots[n], strict=True), (length, owned[n])]:
            if slot >= 0:
                error = rms_error(turned[slot], at(page, n, p))
                assert error < bound, (n, p, error)
    rest = [s for s in range(len(pool)) if s not in {s for row in slots[:SKIPPED] for s in row} | {*owned[:SKIPPED]}]
    assert torch.equal(pool[rest].nan_to_num(7), before[rest].nan_to_num(7))
    if o is not None:
        upto = sum(page["lengths"][:SKIPPED])
        assert rms_error(o.flatten(0, 1)[:upto], expected(page)[0][:upto]) < bound


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("v_first, state_dtype", [(False, torch.float32), (True, torch.bfloat16)])
def test_states_at_positions_are_those_of_the_recurrence(target, v_first, state_dtype):
    x, page, pool = problem(state_dtype=state_dtype, v_first=v_first)
    before = pool.clone()
    o, _ = call(x, pool, v_first=v_first, target=target, **RAW_SAID)
    check(page, pool, before, o, 5e-3 if state_dtype == torch.float32 else 1.5e-2, v_first)


@pytest.mark.slow
def test_a_refusal_comes_before_anything_is_written(monkeypatch):
    """Of the second call's build, too: a plug-in then calls the host's function with the pool as it was."""
    def refuse(*args):
        raise Refused("wrong")
    x, _, pool = problem()
    before = pool.clone()
    monkeypatch.setattr(positions, "admit", refuse)
    with pytest.raises(Refused):
        call(x, pool, target="triton", **RAW_SAID)
    assert torch.equal(pool.nan_to_num(7), before.nan_to_num(7))


#: Ends of chunks of 16, in any order; a position that the sequence does not have, beside the same one without a slot; none.
ENDS = [[48, 16, 64, 64], [16, 32, 0, 48], [16] * 4, [32, 16, 80, -16], [16, 32, 0, 0], [16] * 4]
ENDS_SLOTS = [[3, 9, -1, -1], [-1] * 4, [-1] * 4, [21, 22, -1, -1], [26, -1, -1, -1], [4, -1, -1, -1]]


@pytest.mark.slow
@pytest.mark.parametrize("target, v_first, state_dtype, schedule, here", [
    *((t, *x) for t in HERE for x in ((False, torch.float32, None, t != "pto"), (True, torch.bfloat16, "walk", t == "triton"))),
    *(("triton", False, torch.float32, varied("walk", partition="decay", part_chunks=1), True) for t in HERE if t == "triton")])
def test_states_at_ends_of_chunks(target, v_first, state_dtype, schedule, here, monkeypatch):
    """As packed sequences and as rows, in place and in another pool, whose slots lie apart. here: written as on a GPU, by the
    call itself."""
    monkeypatch.setattr(run, "writes_slots", lambda t, x: here)
    x, page, pool = problem(state_dtype=state_dtype, v_first=v_first)
    before, said = pool.clone(), dict(target=target, v_first=v_first, schedule=schedule, aligned_positions=True)
    bound, these = 5e-3 if state_dtype == torch.float32 else 1.5e-2, dict(positions=ENDS, slots=ENDS_SLOTS)
    o, _ = call(x, pool, **said, **these, **RAW_SAID)
    check(page, pool, before, o, bound, v_first, **these)
    x, page, pool = problem({}, lengths=[53, 53], state_dtype=state_dtype, v_first=v_first)
    other = torch.full_like(pool, float("nan"))
    these = dict(positions=[[32, 16], [48, 5]], slots=[[7, 9], [0, -1]], owned=OWNED[:2])
    call(x, pool, batch=2, final_state=other, **said, **these)
    check(page, other, torch.full_like(other, float("nan")), None, bound, v_first, **these)


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in HERE if t != "pto"])
def test_on_a_gpu_a_position_that_is_not_there_writes_nothing(target, monkeypatch):
    """There no value is read. The bits of the others are those of a call that computes states at any positions."""
    monkeypatch.setattr(positions, "reads", lambda *tensors: False)
    monkeypatch.setattr(run, "writes_slots", lambda t, x: x.aligned_positions)
    x, page, pool = problem({})
    before, again = pool.clone(), pool.clone()
    slots = changed(changed(ENDS_SLOTS, 0, 2, 1), 3, 2, 18)
    call(x, pool, target=target, aligned_positions=True, positions=ENDS, slots=slots)
    check(page, pool, before, positions=ENDS, slots=ENDS_SLOTS)
    call(x, again, target=target, positions=ENDS, slots=slots)
    assert torch.equal(pool.nan_to_num(7), again.nan_to_num(7))


@pytest.mark.parametrize("aligned, most", [(True, 10), (False, 37)])
def test_how_many_ops_of_torch_make_the_tables(aligned, most):
    x, _, pool = problem({})
    names = dict(checkpoint_positions=torch.tensor(ENDS, dtype=torch.int32), state_indices=torch.tensor(OWNED, dtype=torch.int32),
                 checkpoint_slots=torch.tensor(ENDS_SLOTS, dtype=torch.int32), initial_state=pool,
                 cu_seqlens=torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32))
    t = Tensors(**{n: names.get(n, x[n][None] if n in NAMES else None) for n in Tensors._fields})
    about = inputs_of(t, Request())
    for _ in range(2):  # tensors that depend on shapes alone are kept
        with Counted() as counted:
            if aligned:
                positions.slots_by_chunk(about, t, 16)
            else:
                pieces = positions.Pieces.of(about, t, 16)
                positions.buffer(t, pool)
                [positions._copied(y, pieces.tokens, "bthd") for y in t[:5]]
    assert counted.launches <= most, counted.names


@pytest.mark.slow
@pytest.mark.parametrize("target, schedule", [("triton", varied("walk", partition="decay", part_chunks=1)),
                                              pytest.param("triton", "staged", marks=pytest.mark.long),
                                              ("tilelang", varied("replay", partition="exact", part_chunks=1))])
def test_schedules_of_several_kernels_and_parts(target, schedule):
    if target not in HERE:
        pytest.skip(f"{target} is not here")
    x, page, pool = problem()
    before = pool.clone()
    o, _ = call(x, pool, target=target, schedule=schedule, **RAW_SAID)
    check(page, pool, before, o)


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in HERE if t != "pto"])
def test_rows_of_a_batch_single_tokens_and_another_pool(target):
    """Heads before tokens; chunks of one token; final states and checkpoints in another pool than initial ones."""
    lengths, owned = [21, 21], OWNED[:2]
    positions, slots = [[16, 20, 21], [1, 2, 3]], [[0, 1, 3], [4, -1, 6]]
    x, page, pool = problem({}, lengths=lengths)
    at_these = dict(positions=positions, slots=slots, owned=owned)
    rows = {**x, **{n: x[n].unflatten(0, (2, 21)).transpose(1, 2).contiguous().flatten(0, 1) for n in NAMES}}
    before = pool.clone()
    call(rows, pool, batch=2, layout="bhtd", target=target, **at_these)
    check(page, pool, before, **at_these)
    pool = before.clone()
    call(x, pool, fused_recurrent_gated_delta_rule, batch=2, target=target, batch_invariant=True, **at_these)
    check(page, pool, before, **at_these)
    pool, other = before.clone(), torch.full((30, 2, 32, 48), float("nan"))
    _, final = call(x, pool, batch=2, final_state=other, target=target, **at_these)
    check(page, final, torch.full_like(other, float("nan")), **at_these)
    assert final is other and torch.equal(pool.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in HERE if t != "pto"])
def test_the_bits_are_those_of_a_prompt_cut_there(target):
    """And o and the final state have the bits of a call without positions."""
    x, _, pool = problem()
    again, said = pool.clone(), dict(target=target, batch_invariant=True, **RAW_SAID)
    o, _ = call(x, pool, **said)
    plain, _ = call(x, again, positions=[[]] * 6, slots=[[]] * 6, **said)
    assert torch.equal(o, plain) and torch.equal(pool[OWNED[:5]], again[OWNED[:5]])
    first = sum(LENGTHS[:3])
    for p, slot in zip(POSITIONS[3], SLOTS[3], strict=True):
        _, S = chunk_gated_delta_rule(*(x[n][None, first:first + p] for n in NAMES), initial_state=x["S"][3:4], chunk_size=16,
                                      output_final_state=True, scale=x["scale"], **x["more"], **said)
        assert torch.equal(S[0], pool[slot]), p


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_a_module_of_another_page_stores_states_to_rows(target):
    build = Build(target, 16, algorithm="simple_gla", head_dim_k=32, head_dim_v=32, contract=Contract.parse("state=vk/positions"))
    found = module(build).check("cpu")
    assert all(error <= accepted for error, accepted in found.values()) and "state_checkpoints" in found


@pytest.mark.slow
def test_torch_compile_takes_the_call_whole():
    x, page, pool = problem({}, lengths=LENGTHS)
    before = pool.clone()
    op = torch.compile(lambda pool: call(x, pool, target=HERE[0])[0], fullgraph=True, backend="eager")
    check(page, pool, before, op(pool))


def refused(text, **more):
    x, _, pool = problem({})
    before = pool.clone()
    with pytest.raises(ValueError, match=text):
        call(x, pool, target=HERE[0], **more)
    assert torch.equal(pool.nan_to_num(7), before.nan_to_num(7))


def changed(table, n, i, value):
    return [[value if (m, j) == (n, i) else y for j, y in enumerate(row)] for m, row in enumerate(table)]


def test_positions_and_slots_that_cannot_be():
    refused(r"checkpoint_positions: got 54 for sequence 0; accepted: 1 to 53", positions=changed(POSITIONS, 0, 1, 54))
    refused(r"checkpoint_positions: got 0 for sequence 3; accepted: 1 to 37", positions=changed(POSITIONS, 3, 0, 0))
    refused(r"checkpoint_slots: got slot 21 for sequence 3, which sequence 0 has", slots=changed(SLOTS, 0, 0, 21))
    refused(r"checkpoint_slots: got slot 24 for sequence 0, which state_indices has", slots=changed(SLOTS, 0, 0, 24))
    refused(r"checkpoint_slots: got slot 30; accepted: slots from 0 to 29", slots=changed(SLOTS, 0, 0, 30))
    refused(r"checkpoint_slots: got shape \(6, 4\); accepted: \[N, P\] with N = 6", slots=[row[:4] for row in SLOTS])
    refused(r"checkpoint_positions: got 37 for sequence 0, with aligned_positions=True; accepted: multiples of 16, each once",
            aligned_positions=True)
    refused(r"checkpoint_positions: got 48 twice for sequence 0, with aligned_positions=True", aligned_positions=True,
            positions=changed(ENDS, 0, 1, 48), slots=ENDS_SLOTS)
    refused(r"aligned_positions: got 'yes'; accepted: True or False", aligned_positions="yes")
    refused(r"checkpoint_chunks: got 1 with checkpoint_positions; accepted: one of them", checkpoint_chunks=1)
    refused(r"checkpoint_slots: got slots without a pool that the call writes", inplace_final_state=False)
    x, _, pool = problem({})
    with pytest.raises(ValueError, match="checkpoint_slots: got None; accepted: one integer for each of checkpoint_positions"):
        chunk_gated_delta_rule(*(x[n][None] for n in NAMES), checkpoint_positions=torch.zeros(6, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="checkpoint_positions: got None; accepted: one integer for each of checkpoint_slots"):
        chunk_gated_delta_rule(*(x[n][None] for n in NAMES), aligned_positions=True)
    with pytest.raises(ValueError, match="checkpoint_slots: got slots without a pool"):
        chunk_gated_delta_rule(*(x[n][None] for n in NAMES), initial_state=pool[:1], checkpoint_positions=torch.ones(1, 1).int(),
                               checkpoint_slots=torch.ones(1, 1).int())
