"""States by token: a verification of draft tokens, against a recurrence in float64 that keeps the state after each token."""
import pytest
import torch
from reference import DELTA, PLAIN, TOLERANCE, problem, rms_error

from gdn_codegen import fused_recurrent_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call import launch
from gdn_codegen.runtime.load import function, module
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import ScheduleError, varied
from gdn_codegen.schedule.contract import Contract, ContractError
from gdn_codegen.tools.cases import Case
from gdn_codegen.tools.verify import compare

TARGETS = [t for t in ("triton", "tilelang") if runs(t, "cpu")]
SLOW = {"tilelang": [pytest.mark.slow]}
ON_TARGETS = pytest.mark.parametrize("target", [pytest.param(t, marks=SLOW.get(t, [])) for t in TARGETS])
LENGTHS, W, H, HV, K, V = [3, 0, 5, 1], 6, 1, 2, 32, 32
NAN = float("nan")


def tree(seed):
    """Parents of tokens: any earlier token, or the initial state; that of the first token is not read."""
    gen = torch.Generator().manual_seed(seed)
    one = lambda: torch.tensor([40, *(int(torch.randint(-1, t, (), generator=gen)) for t in range(1, W))])
    return torch.stack([one() for _ in LENGTHS])


def by_token(x, initial, parents=None, delta=DELTA):
    """o [T, HV, V], and the states after each token, [T, HV, K, V], in float64. initial: [N, HV, K, V]."""
    rep = x["v"].shape[1] // x["q"].shape[1]
    q, k = (x[n].double().repeat_interleave(rep, 1) for n in ("q", "k"))
    v, g, beta = (x[n].double() for n in ("v", "g", "beta"))
    o, states, at = torch.zeros_like(v), torch.zeros(*v.shape[:2], q.shape[2], v.shape[2], dtype=torch.float64), 0
    for n, length in enumerate(x["lengths"]):
        for t in range(length):
            parent = t - 1 if parents is None or t == 0 else int(parents[n, t])
            S = initial[n].double() if parent < 0 else states[at + parent]
            S = g[at + t].exp()[:, None, None] * S
            u = beta[at + t][:, None] * (v[at + t] - torch.einsum("hkv,hk->hv", S, k[at + t])) if delta else v[at + t]
            states[at + t] = S + k[at + t][:, :, None] * u[:, None, :]
            o[at + t] = x["scale"] * torch.einsum("hkv,hk->hv", states[at + t], q[at + t])
        at += length
    return o, states


class Step:
    """A step of four sequences, one without a token, with a pool of states: what is passed, and what is expected."""

    def __init__(self, states=torch.float32, v_first=True, seed=1, delta=DELTA, dtype=torch.bfloat16, lengths=LENGTHS,
                 dense=False):
        self.x, self.v_first, gen = problem(lengths, H, HV, K, V, dtype, seed=seed), v_first, torch.Generator().manual_seed(seed)
        self.delta, self.n = delta, len(lengths)
        self.pool = torch.randn(self.n * W + 3, HV, K, V, generator=gen).to(states)
        self.slots = torch.randperm(len(self.pool), generator=gen)[:self.n * W].view(self.n, W)
        self.accepted = torch.tensor([1, 6, 3, 2])[:self.n]
        names = ("q", "k", "v", "g", "beta") if delta else ("q", "k", "v", "g")
        shaped = lambda y: y.unflatten(0, (self.n, -1)) if dense else y[None]
        self.given = dict({n: shaped(self.x[n]) for n in names}, scale=self.x["scale"])
        self.given["initial_state"] = self.turned(self.pool).clone()
        if not dense:
            self.given["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
        self.tokens = [(n, t) for n, length in enumerate(lengths) for t in range(length)]

    def turned(self, x):
        return x.mT.contiguous() if self.v_first else x

    def buffer(self, rows=6):
        """A buffer of NaN for intermediate states."""
        return self.turned(torch.full((rows, W, HV, K, V), NAN, dtype=self.pool.dtype))

    def first(self, accepted=True):
        """The slots of initial states."""
        return self.slots[torch.arange(self.n), self.accepted - 1] if accepted else self.slots[:, 0]

    def compare(self, o, kept, first, parents=None, tolerance=None):
        """o, and the states [tokens, ...] that were kept, if any, with the recurrence."""
        want_o, states = by_token(self.x, self.pool[first], parents, self.delta)
        near = tolerance or TOLERANCE["bfloat16"]
        assert rms_error(o.flatten(0, 1), want_o) < near
        if kept is not None:
            assert rms_error(kept.mT if self.v_first else kept, states) < (1e-5 if kept.dtype == torch.float32 and not tolerance
                                                                          else near)
        return states


@pytest.mark.parametrize("states, v_first, parents", [(torch.bfloat16, True, 3), (torch.float32, False, None)],
                         ids=["bf16-vk-tree", "f32-kv-chain"])
@ON_TARGETS
def test_slots_for_tokens_as_in_vllm(target, parents, states, v_first):
    s, parents = Step(states, v_first), parents and tree(parents)
    pool = s.given["initial_state"]
    o, final = recurrent_gated_delta_rule(**s.given, state_v_first=v_first, ssm_state_indices=s.slots, target=target,
                                          num_accepted_tokens=s.accepted, retrieve_parent_token=parents)
    assert final is pool
    s.compare(o, pool[[int(s.slots[n, t]) for n, t in s.tokens]], s.first(), parents)
    rest = sorted({*range(len(pool))} - {int(s.slots[n, t]) for n, t in s.tokens})
    assert torch.equal(pool[rest], s.turned(s.pool)[rest])


@pytest.mark.parametrize("states, v_first, parents, frozen", [
    (torch.bfloat16, True, 4, True), (torch.float32, False, None, True), (torch.float32, True, 4, False),
    (torch.bfloat16, False, None, False)], ids=["bf16-vk-tree-frozen", "f32-kv-frozen", "f32-vk-tree-updated", "bf16-kv-updated"])
@ON_TARGETS
def test_a_buffer_as_in_sglang(target, frozen, parents, states, v_first):
    s, parents = Step(states, v_first, seed=2), parents and tree(parents)
    pool, buffer, rows = s.given["initial_state"], s.buffer(), torch.tensor([4, 1, 0, 5], dtype=torch.int32)
    first = s.first(False)
    results = recurrent_gated_delta_rule(**s.given, state_v_first=v_first, initial_state_indices=first, target=target,
                                         intermediate_states_buffer=buffer, intermediate_state_indices=rows, cache_steps=W,
                                         disable_state_update=frozen, retrieve_parent_token=parents)
    want = s.compare(results[0], buffer[[int(rows[n]) for n, _ in s.tokens], [t for _, t in s.tokens]], first, parents)
    there = torch.zeros(6, W, dtype=torch.bool)
    there[[int(rows[n]) for n, _ in s.tokens], [t for _, t in s.tokens]] = True
    assert torch.equal(~buffer.flatten(2).isnan().all(-1), there) and not buffer[there].isnan().any()
    assert len(results) == 2 and (results[1] is None if frozen else results[1] is pool)
    ends = [i for i, (n, t) in enumerate(s.tokens) if t == s.x["lengths"][n] - 1]
    written = [] if frozen else [int(first[s.tokens[i][0]]) for i in ends]
    rest = sorted({*range(len(pool))} - set(written))
    assert torch.equal(pool[rest], s.turned(s.pool)[rest])
    if not frozen:
        assert rms_error(pool[written].mT if v_first else pool[written], want[ends]) < (1e-5 if states == torch.float32 else 5e-3)


@ON_TARGETS
def test_slots_and_rows_of_minus_one(target):
    """A token without a slot keeps no state, a sequence that starts from slot -1 is skipped, and a row -1 keeps nothing."""
    s = Step()
    slots, pool = s.slots.clone(), s.given["initial_state"]
    slots[0, 1], slots[2, 2] = -1, -1  # the third sequence starts there
    o, _ = recurrent_gated_delta_rule(**s.given, state_v_first=True, state_indices=slots, num_accepted_tokens=s.accepted,
                                      target=target)
    want, states = by_token(s.x, s.pool[s.first()])
    assert rms_error(o[0][[0, 1, 2, 8]], want[[0, 1, 2, 8]]) < 5e-3 and not o[0][3:8].any()
    kept = [int(slots[0, 0]), int(slots[0, 2]), int(slots[3, 0])]
    assert rms_error(pool[kept].mT, states[[0, 2, 8]]) < 1e-5
    rest = sorted({*range(len(pool))} - set(kept))
    assert torch.equal(pool[rest], s.pool.mT[rest])
    buffer, rows = s.buffer(3), torch.tensor([2, 0, -1, 1])
    s.given["initial_state"] = s.pool.mT.contiguous()
    o, _ = recurrent_gated_delta_rule(**s.given, state_v_first=True, state_indices=s.first(), intermediate_states_buffer=buffer,
                                      intermediate_state_indices=rows, target=target, inplace_final_state=False)
    assert rms_error(o[0], want) < 5e-3 and rms_error(buffer[2, :3].mT, states[:3]) < 1e-5
    assert buffer[0].isnan().all() and buffer[2, 3:].isnan().all() and rms_error(buffer[1, :1].mT, states[8:]) < 1e-5


@ON_TARGETS
def test_output_alone_from_accepted_slots(target):
    s = Step(torch.bfloat16)
    o, final = recurrent_gated_delta_rule(**s.given, state_v_first=True, state_indices=s.slots, target=target,
                                          num_accepted_tokens=s.accepted, disable_state_update=True)
    s.compare(o, None, s.first())
    assert final is None and torch.equal(s.given["initial_state"], s.pool.mT)


@ON_TARGETS
def test_rows_of_equal_length_and_rows_in_order(target):
    """Dense inputs, no pool, a buffer whose rows have gaps, and a final state beside it."""
    s = Step(lengths=[4, 4, 4], dense=True, dtype=torch.float32)
    whole = torch.full((3, W + 1, HV, V, K), NAN)
    s.given["initial_state"] = s.pool[:3].mT.contiguous()
    o, final = recurrent_gated_delta_rule(**s.given, state_v_first=True, intermediate_states_buffer=whole[:, :W], target=target,
                                          output_final_state=True)
    states = s.compare(o, whole[:, :4].flatten(0, 1), torch.arange(3))
    assert rms_error(final.mT, states[3::4]) < 1e-5 and whole[:, 4:].isnan().all()
    want = o.clone()
    for _ in range(3):  # calls of the same kind take what the first one settled
        whole.fill_(NAN)
        o, final = recurrent_gated_delta_rule(**s.given, state_v_first=True, intermediate_states_buffer=whole[:, :W],
                                              target=target, output_final_state=True)
        assert torch.equal(o, want) and not whole[:, :4].isnan().any()


@pytest.mark.parametrize("accept", ["vk/bfloat16/pool/in_place/slots/accepted/parents", "frozen/rows/parents"])
@ON_TARGETS
def test_another_page(target, accept):
    c = Contract.parse(f"state={accept}")
    fields = dict(v_block=16, state_layout=c.state_layout)
    fn = function(Build(target, 1, algorithm="simple_gla", schedule=varied("fused", **fields), dtype="bfloat16", head_dim_k=K,
                        head_dim_v=V, contract=c))
    s, parents = Step(getattr(torch, c.state_dtype), c.state_layout == "vk", seed=5, delta=PLAIN), tree(6)
    if c.slots:
        o, pool = fn(**s.given, state_indices=s.slots, num_accepted_tokens=s.accepted, retrieve_parent_token=parents)
        s.compare(o, pool[[int(s.slots[n, t]) for n, t in s.tokens]], s.first(), parents)
        return
    s.given["initial_state"], buffer = s.pool[:4].clone(), s.buffer(4)
    o, final = fn(**s.given, intermediate_states_buffer=buffer, retrieve_parent_token=parents)
    s.compare(o, buffer[[n for n, _ in s.tokens], [t for _, t in s.tokens]], torch.arange(4), parents)
    assert final is None


@pytest.mark.parametrize("accept", ["vk/bfloat16/pool/in_place/slots/accepted/parents", "pool/rows", "pool/frozen/accepted"])
@pytest.mark.skipif("tilelang" not in TARGETS, reason="needs TileLang")
@pytest.mark.slow
def test_a_module_checks_itself(accept):
    """The problem of admission covers states by token, and the memory beside them."""
    c = Contract.parse(f"state={accept}")
    b = Build("tilelang", 1, schedule=varied("fused", v_block=16, state_layout=c.state_layout), dtype="float32", head_dim_k=K,
              head_dim_v=V, contract=c)
    found = module(b).check("cpu")
    assert any("by token" in n for n in found) == (c.rows or c.slots)
    if c.rows or c.slots:
        m = module(b)
        right = m.check.problem.page
        m.check.problem.page = lambda inputs, states, numbers: [2 * y for y in right(inputs, states, numbers)]
        try:
            with pytest.raises(RuntimeError, match="by token off by"):
                m.check("cpu")
        finally:
            m.check.problem.page = right


@pytest.mark.parametrize("target, accept", [("triton", "vk/bfloat16/pool/in_place/slots/accepted/parents"),
                                            ("triton", "pool/frozen/rows")])
def test_the_command_line_verifies_such_builds(target, accept):
    c = Contract.parse(f"state={accept}")
    b = Build(target, 1, schedule=varied("fused", v_block=16, state_layout=c.state_layout), dtype="float32", head_dim_k=K,
              head_dim_v=V, contract=c)
    errors = compare(b, Case((3, 0, 5)))
    assert max(errors.values()) < 5e-3 and ("final_state" in errors) == c.slots


@pytest.mark.slow
def test_it_goes_by_other_names_and_through_compile():
    s = Step()
    o, _ = fused_recurrent_gated_delta_rule(**s.given, state_v_first=True, ssm_state_indices=s.slots, target=TARGETS[0],
                                            num_accepted_tokens=s.accepted)
    s.compare(o, None, s.first())
    s = Step()
    step = torch.compile(lambda **x: recurrent_gated_delta_rule(**x, target=TARGETS[0], state_v_first=True), backend="eager",
                         fullgraph=True)
    buffer = s.buffer(4)
    o, final = step(**s.given, state_indices=s.first(), intermediate_states_buffer=buffer, disable_state_update=True,
                    retrieve_parent_token=tree(1))
    s.compare(o, buffer[[n for n, _ in s.tokens], [t for _, t in s.tokens]], s.first(), tree(1))
    assert final is None
    o, final = step(**s.given, state_indices=s.slots, num_accepted_tokens=s.accepted)
    s.compare(o, s.given["initial_state"][[int(s.slots[n, t]) for n, t in s.tokens]], s.first())


def test_the_build_has_chunks_of_one_token_whatever_their_number():
    s = Step(lengths=[6, 6, 6])
    launch.forget()
    recurrent_gated_delta_rule(**s.given, state_v_first=True, state_indices=s.slots, target=TARGETS[0])
    (kept,) = launch._kept.values()
    assert kept.module.TABLES.chunk == 1 and kept.module.TABLES.by_token == ("state_indices",)


@pytest.mark.parametrize("state, why", [
    ("slots", "slots alone"), ("parents", "parents alone"), ("pool/frozen", "frozen alone"),
    ("pool/in_place/slots/rows", "slots and rows"), ("rows/checkpoints", "rows and checkpoints")])
def test_contracts_that_say_nothing(state, why):
    with pytest.raises(ContractError, match=why):
        Contract.parse(f"state={state}")


@pytest.mark.parametrize("target, chunk, why", [("triton", 16, "16 tokens, with states by token"),
                                                ("tilelang", 16, "16 tokens, with states by token"),
                                                ("pto", 1, "one token with the device"),
                                                ("pto", 16, "states by token with 6 kernels; accepted: one")])
def test_what_keeps_no_states_by_token(target, chunk, why):
    with pytest.raises(ScheduleError, match=why):
        lowered(Build(target, chunk, schedule="staged" if "kernels" in why else "fused", contract=Contract.parse("state=rows")))


def test_what_keeps_no_states_of_trees():
    with pytest.raises(ScheduleError, match="16 tokens, with states by token of a tree; accepted: 1, for TileLang or Triton"):
        lowered(Build("pto", 16, schedule="fused", contract=Contract.parse("state=rows/parents")))
