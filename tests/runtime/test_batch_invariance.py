"""batch_invariant=True: the bits of a sequence's result depend on that sequence alone, and not on where its prompt is cut."""
from dataclasses import replace

import pytest
import torch
from choices import a_call
from devices import H200, passes_for
from reference import passed
from tiers import every

import gdn_codegen
from gdn_codegen import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import choose, choose_decode, launch, tables
from gdn_codegen.runtime.call.arguments import Tensors
from gdn_codegen.runtime.call.request import ANY_BATCH, Request, call_of
from gdn_codegen.runtime.call.tables import DECODE, Extent, Row
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied

HERE = [t for t in ("triton", "tilelang", "pto") if runs(t, "cpu")]
BY_TOKEN = [t for t in HERE if t != "pto"]
NAMES = ("q", "k", "v", "g", "beta")
RAW = {"g": "raw", "beta": "sigmoid", "q": "l2norm", "k": "l2norm"}
SAID = dict(gate="raw", beta_form="sigmoid", use_qk_l2norm_in_kernel=True, output_final_state=True, batch_invariant=True)


def bits(x):
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(got, want):
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


class Sequences:
    """Sequences with raw gates, two value heads of a key head and a state each, and an op that runs some of their tokens."""

    def __init__(self, lengths, op, **options):
        self.x, _ = passed(lengths, 1, 2, 32, 32, RAW, dtype=torch.bfloat16)
        self.x["more"]["A_log"][0] = -8  # a head that forgets little, so that all its chunks count
        self.op, self.options = op, {**SAID, **self.x["more"], **options}
        self.starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        self.S = self.x["S"]

    def rows(self, n, a=0, b=None):
        """The inputs of tokens a to b of a sequence."""
        first, stop = self.starts[n], self.starts[n + 1]
        return [self.x[i][first + a:stop if b is None else first + b] for i in NAMES]

    def run(self, *parts, states=None, **options):
        """[(o, final state)] of some parts of sequences, (n, a, b) each, packed in this order."""
        rows = [self.rows(*p) for p in parts]
        ends = torch.tensor([0, *torch.tensor([len(r[0]) for r in rows]).cumsum(0).tolist()])
        S = torch.stack([self.S[p[0]] for p in parts]) if states is None else states
        o, final = self.op(*(torch.cat(y)[None] for y in zip(*rows, strict=True)), initial_state=S, cu_seqlens=ends,
                           **self.options, **options)
        return [(o[0, ends[i]:ends[i + 1]], final[i]) for i in range(len(parts))]


@pytest.mark.slow
@pytest.mark.parametrize("schedule, target", every(2, [None, "walk"], HERE))
def test_a_prompt_has_the_same_bits_wherever_it_is_and_however_it_is_cut(target, schedule):
    """Of 37 tokens in chunks of 16, beside sequences of no, one and more tokens."""
    x = Sequences([37, 0, 1, 16, 53], chunk_gated_delta_rule, target=target, chunk_size=16, schedule=schedule)
    ((o, S),) = x.run((0,))
    for order in ((0, 4, 3), (4, 0), (2, 1, 3, 0), (3, 4, 2, 0, 1)):
        assert same(x.run(*((n,) for n in order))[order.index(0)], (o, S)), order
    for cuts in ((16, 32), (32,), (16,)):
        outs, state = [], x.S[0]
        for i, (a, b) in enumerate(zip((0, *cuts), (*cuts, 37), strict=True)):
            others = [(4, 0, 20), (3,)][:i + 1]  # other sequences beside each piece
            got = x.run(*others, (0, a, b), states=torch.stack([*(x.S[n[0]] for n in others), state]))
            outs.append(got[-1][0])
            state = got[-1][1]
        assert same((torch.cat(outs), state), (o, S)), cuts


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_rows_of_a_batch_views_and_slots_of_a_pool_have_the_bits_of_a_pack(target):
    x = Sequences([21, 21, 21], chunk_gated_delta_rule, target=target, chunk_size=16)
    want = [x.run((n,))[0] for n in range(3)]
    rows = [torch.stack(y) for y in zip(*(x.rows(n) for n in range(3)), strict=True)]
    o, S = chunk_gated_delta_rule(*rows, initial_state=x.S, **x.options)
    assert all(same((o[n], S[n]), want[n]) for n in range(3))
    qkv = torch.cat([y.flatten(2) for y in rows[:3]], -1)
    views = [y.unflatten(-1, (-1, 32)) for y in qkv.split([32, 32, 64], -1)]
    o, S = chunk_gated_delta_rule(*views, *rows[3:], initial_state=x.S, **x.options)
    assert all(same((o[n], S[n]), want[n]) for n in range(3))
    pool = torch.full((5, 2, 32, 32), float("nan"))
    slots = torch.tensor([4, 0, 3])
    pool[slots] = x.S
    o, S = chunk_gated_delta_rule(*rows, initial_state=pool, state_indices=slots, **x.options)
    assert all(same((o[n], pool[slots[n]]), want[n]) for n in range(3)) and pool[1:3].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("target", BY_TOKEN)
def test_a_step_of_several_tokens_is_so_many_steps_of_one(target):
    x = Sequences([6, 1, 3], recurrent_gated_delta_rule, target=target)
    ((o, S),) = x.run((0,))
    assert same(x.run((1,), (0,), (2,))[1], (o, S))
    outs, state = [], x.S[0]
    for a, b in ((0, 1), (1, 4), (4, 6)):
        got = x.run((1,), (0, a, b), states=torch.stack([x.S[1], state]))[1]
        outs.append(got[0])
        state = got[1]
    assert same((torch.cat(outs), state), (o, S))


def test_flas_recurrence_walks_over_tokens_however_many_there_are(monkeypatch):
    told = []
    monkeypatch.setattr(gdn_codegen.ops, "_call", lambda *a, decode, **more: told.append(decode))
    for tokens in (1, 16, 17, 400):
        q = torch.zeros(1, tokens, 2, 32)
        fused_recurrent_gated_delta_rule(q, q, q, q[..., 0], beta=q[..., 0], batch_invariant=True)
    assert told == [True] * 4


# --- the choice ------------------------------------------------------------------------------------------------------
EXTENTS = [Extent(2, 8, sequences, tokens) for sequences in (1, 4, 33, 300) for tokens in (1, 64, 1000, 40000, 900000)]


@pytest.fixture
def gpu(monkeypatch):
    """A CPU that passes for an H200, with rows of tables that would serve many of the extents."""
    passes_for(monkeypatch, H200)
    monkeypatch.setattr(choose_decode, "runs", lambda target, device: target in BY_TOKEN)
    monkeypatch.setattr(choose, "fits", lambda b: True)
    monkeypatch.setattr(choose, "unfit", lambda b: "")
    parts = varied("walk", "sm_90a", partition="decay")
    sizes = Extent(2, 8, 1, 40000), Extent(2, 8, 300, 300), Extent(2, 8, ANY_BATCH, ANY_BATCH)
    rows = [Row("NVIDIA H200", b, x, 0.1, 0.2, "", "", table) for x in sizes for b, table in (
        (Build("tilelang", schedule=parts, arch="sm_90a"), "tilelang"), (Build("triton", schedule=parts), "triton"),
        (Build("triton", 16), DECODE), (Build("tilelang", 16), DECODE))]
    monkeypatch.setattr(tables, "rows", lambda devices, table: tuple(r for r in rows if r.table == table))


def called(extent, **asked):
    """The call of this size that the op would make: its tensors lie nowhere."""
    n, T = (extent.sequences, extent.tokens) if extent.sequences == 1 else (1, extent.tokens)
    def made(heads, *dims):
        return torch.empty(n, T, heads, *dims, dtype=torch.float16, device="meta")
    q, v, g = made(extent.H, 128), made(extent.HV, 128), made(extent.HV).float()
    ends = torch.empty(extent.sequences + 1, dtype=torch.int32, device="meta")
    return call_of(Tensors(q, q, v, g, g, *[None] * 7, ends, None, None), Request(batch_invariant=True, **asked))


@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_one_build_serves_prompts_of_all_sizes(gpu, target):
    free = {choose.choice(a_call(x, device="meta", target=target)).build for x in EXTENTS}
    assert len(free) > 1  # else this test would hold for any model
    many = [x for x in EXTENTS if 2 * x.walks > 132]  # for fewer, the test below
    found = {choose.choice(called(x, target=target)) for x in many}
    assert len(found) == 1
    (one,) = found
    assert one.build.plan.partition is None and one.build.chunk == 64 and ("chunk", "fixed, so that prompts may be cut at its "
                                                                           "multiples") in one.why
    assert {choose.choice(called(x, target=target, chunk_size=16)).build.chunk for x in EXTENTS} == {16}
    assert len({choose.choice(called(x, target=target, checkpoint_chunks=1)).build.plan for x in many} | {one.build.plan}) == 1


@pytest.mark.parametrize("target, columns", [("tilelang", 64), ("triton", 0)])
def test_few_walks_have_blocks_of_columns_where_a_target_says_that_bits_stay(gpu, target, columns):
    """An H200 has 132 multiprocessors."""
    many, few = ([choose.choice(called(Extent(4, 33, n, 40000), target=target)).build for n in m] for m in ((3, 4), (1, 2)))
    assert len({*many}) == len({*few}) == 1 and few[0] == replace(many[0], schedule=replace(many[0].plan, v_block=columns))
    narrow = called(EXTENTS[0], target=target, schedule="fused")
    assert choose.choice(narrow).build.plan.v_block == 0, "a schedule is taken as it is"


def test_a_build_with_blocks_of_columns_that_was_refused_is_left(gpu, monkeypatch):
    x = called(EXTENTS[0], target="tilelang")
    narrow = choose.choice(x).build
    monkeypatch.setattr(choose, "_refused", {(narrow, x.device): "wrong"})
    assert choose.choice(x).build == replace(narrow, schedule=replace(narrow.plan, v_block=0))


@pytest.mark.parametrize("target", ["auto", "triton", "tilelang"])
def test_one_build_of_single_tokens_serves_steps_of_all_sizes(gpu, target):
    few = [x for x in EXTENTS if x.tokens <= 16 * x.sequences]
    assert len({choose_decode.choice(a_call(x, device="cuda", target=target, decode=True)) for x in few}) > 1
    found = {choose_decode.choice(called(x, target=target, decode=True)) for x in few}
    assert len(found) == 1 and next(iter(found)).build.chunk == 1


def test_views_are_copied_so_that_kernels_get_no_strides():
    wide = torch.zeros(1, 4, 2, 64, dtype=torch.float16)
    t = Tensors(wide[..., :32], wide[..., :32], wide[..., 32:], *[wide[..., 0]] * 2, *[None] * 10)
    assert call_of(t, Request()).contract.strided and not call_of(t, Request(batch_invariant=True)).contract.strided


# --- what is asked for -----------------------------------------------------------------------------------------------
def call(**more):
    q, g = torch.zeros(1, 4, 1, 32, dtype=torch.float16), torch.zeros(1, 4, 1)
    return chunk_gated_delta_rule(q, q, q, g, g, **more)


def test_what_depends_on_the_batch_or_on_cuts_is_refused():
    parts = varied("walk", partition="decay")
    with pytest.raises(ValueError, match=r"schedule: got walk with partition='decay' and batch_invariant=True"):
        call(batch_invariant=True, schedule=parts)
    pool = torch.zeros(3, 1, 32, 32, dtype=torch.bfloat16)
    for states in (dict(initial_state=pool, state_indices=torch.tensor([1])), dict(state_dtype=torch.bfloat16),
                   dict(final_state=pool[:1])):
        with pytest.raises(ValueError, match=r"state_dtype: got torch\.bfloat16 with batch_invariant=True"):
            call(batch_invariant=True, **states)
    with pytest.raises(ValueError, match="batch_invariant: got 1; accepted: True or False"):
        call(batch_invariant=1)


def test_the_environment_says_it_for_calls_that_do_not(monkeypatch):
    monkeypatch.setenv("GDN_CODEGEN_BATCH_INVARIANT", "1")
    launch.forget()
    with pytest.raises(ValueError, match=r"state_dtype: got torch\.bfloat16 with batch_invariant=True"):
        call(state_dtype=torch.bfloat16)
    asked = []
    monkeypatch.setattr(launch, "call_of", lambda t, x: asked.append(x.batch_invariant) or launch.chosen)
    for said in (None, True, False):
        with pytest.raises(AttributeError):
            call(batch_invariant=said)
    assert asked == [True, True, False]
    launch.forget()
