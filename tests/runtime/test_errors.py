"""docs/errors.md: each row has a trial here and each trial a row there. `python tests/runtime/test_errors.py` writes the rows."""
import ast
import re
import sys
import traceback
from pathlib import Path

import pytest
import torch
from trials_of_convolution import CONVOLUTION
from trials_of_members import MEMBERS

import gdn_codegen
from gdn_codegen import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.targets import OWN

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
TARGET = next(t for t in OWN if runs(t, "cpu"))
T, H, HV, K, V = 40, 2, 4, 32, 32
half = lambda *shape: torch.zeros(shape, dtype=torch.float16)
zeros = torch.zeros


def arguments(**change):
    x = dict(q=half(1, T, H, K), k=half(1, T, H, K), v=half(1, T, HV, V), g=zeros(1, T, HV), beta=zeros(1, T, HV),
             target=TARGET, chunk_size=16)
    return x | change


def cu(*ends):
    return torch.tensor(ends)


def vmapped(q, **others):
    return torch.func.vmap(lambda q: chunk_gated_delta_rule(q, **others)[0])(q[None])


def dual(v, **others):
    with torch.autograd.forward_ad.dual_level():
        chunk_gated_delta_rule(v=torch.autograd.forward_ad.make_dual(v, v), **others)


def traced(k, **others):
    torch.jit.trace(lambda k: chunk_gated_delta_rule(k=k, **others)[0], k)


F8 = torch.float8_e4m3fn
STATE, STATES = zeros(1, HV, K, V), zeros(3, HV, K, V)
OVER, BIG = half(1, T + 1, HV, V), zeros(1, HV, K, V)
INSIDE = BIG.view(torch.float16).view(-1)[V:][:T * HV * V].view(1, T, HV, V)
POOL = dict(initial_state=zeros(6, HV, K, V), cu_seqlens=cu(0, 10, 40))
#: A step that verifies draft tokens: sequences of one and of three tokens, and slots for them.
STEP = dict(op=recurrent_gated_delta_rule, q=half(1, 4, H, K), k=half(1, 4, H, K), v=half(1, 4, HV, V), g=zeros(1, 4, HV),
            beta=zeros(1, 4, HV), initial_state=zeros(8, HV, K, V), cu_seqlens=cu(0, 1, 4))
SLOTS, PARENTS = cu(0, 1, 2, 3, 4, 5).view(2, 3), cu(-1, 0, 1, -1, 0, 0).view(2, 3)
AT = dict(POOL, state_indices=cu(0, 1), checkpoint_positions=cu(9, 10, 30, 1).view(2, 2),
          checkpoint_slots=cu(2, 3, 4, 5).view(2, 2))
ROWS = dict(q=half(2, 20, H, K), k=half(2, 20, H, K), v=half(2, 20, HV, V), g=zeros(2, 20, HV), beta=zeros(2, 20, HV))
#: (argument, what is wrong with it) -> what is passed.
TRIALS = {
    ("q", "not a tensor"): dict(q=[1.0]),
    ("q", "without memory"): dict(q=half(1, T, H, K).to("meta")),
    ("q", "rank"): dict(q=half(T, H, K)),
    ("q", "dtype"): dict(q=zeros(1, T, H, K, dtype=torch.int8)),
    ("k", "dtype unlike v's"): dict(k=half(1, T, H, K).bfloat16()),
    ("q", "16 bits beside v in float32"): dict(v=zeros(1, T, HV, V)),
    ("k", "tokens unlike q's"): dict(k=half(1, T + 1, H, K)),
    ("k", "head dim unlike q's"): dict(k=half(1, T, H, 64)),
    ("q", "torch's negative bit, which kernels do not see"): dict(
        q=torch.complex(zeros(1, T, H, K), zeros(1, T, H, K)).conj().imag),
    ("q", "inside vmap"): dict(op=vmapped),
    ("v", "dual, in forward-mode differentiation"): dict(op=dual),
    ("q", "inside torch.jit.trace"): dict(op=traced),
    ("v", "rank"): dict(v=half(1, T, HV)),
    ("v", "device"): dict(v=torch.zeros(1, T, HV, V, dtype=torch.float16, device="meta")),
    ("v", "batch unlike q's"): dict(v=half(2, T, HV, V)),
    ("g", "not a tensor"): dict(g=None),
    ("g", "dtype"): dict(g=zeros(1, T, HV, dtype=torch.float64)),
    ("g", "heads unlike v's"): dict(g=zeros(1, T, H)),
    ("out", "beside a tensor that requires grad"): dict(g=zeros(1, T, HV, requires_grad=True), out=half(1, T, HV, V)),
    ("checkpoint_chunks", "beside a tensor that requires grad"): dict(g=zeros(1, T, HV, requires_grad=True), checkpoint_chunks=1),
    ("initial_state", "overwritten, and a tensor requires grad"): dict(
        g=zeros(1, T, HV, requires_grad=True), initial_state=zeros(1, HV, K, V), inplace_final_state=True),
    ("save", "another word"): dict(save="all"),
    ("beta", "dtype"): dict(beta=zeros(1, T, HV, dtype=torch.int32)),
    ("beta", "rank"): dict(beta=zeros(1, T, HV, V)),
    ("beta", "tokens unlike q's"): dict(beta=zeros(1, 1, HV)),
    ("heads", "HV no multiple of H"): dict(q=half(1, T, 3, K), k=half(1, T, 3, K)),
    ("heads", "none"): dict(v=half(1, T, 0, V), g=zeros(1, T, 0), beta=zeros(1, T, 0)),
    ("scale", "not finite"): dict(scale=float("nan")),
    ("scale", "more than float32 holds"): dict(scale=1e300),
    ("scale", "a tensor with a dim"): dict(scale=zeros(1)),
    ("use_qk_l2norm_in_kernel", "a tensor: vLLM's order, by position"): dict(use_qk_l2norm_in_kernel=cu(0, T)),
    ("initial_state", "shape"): dict(initial_state=zeros(2, HV, K, V)),
    ("initial_state", "dtype"): dict(initial_state=zeros(1, HV, K, V, dtype=torch.float64)),
    ("initial_state", "device"): dict(initial_state=torch.zeros(1, HV, K, V, device="meta")),
    ("initial_state", "not a tensor"): dict(initial_state=[0.0]),
    ("state_dtype", "dtype"): dict(state_dtype=torch.int8),
    ("inplace_final_state", "without initial_state"): dict(inplace_final_state=True),
    ("initial_state", "in place, elements in two places"): dict(initial_state=zeros(1, 1, K, V).expand(1, HV, K, V),
                                                                inplace_final_state=True),
    ("initial_state", "in place, memory of an input"): dict(initial_state=BIG, inplace_final_state=True, v=INSIDE),
    ("initial_state", "a pool in place, memory of an input"): dict(
        initial_state=BIG, state_indices=cu(0), cu_seqlens=cu(0, T), v=INSIDE),
    ("state_indices", "without initial_state"): dict(state_indices=cu(0)),
    ("state_indices", "dtype"): dict(POOL, state_indices=zeros(2)),
    ("state_indices", "fewer than sequences"): dict(POOL, state_indices=cu(0)),
    ("state_indices", "past the pool (*)"): dict(POOL, state_indices=cu(0, 6)),
    ("state_indices", "below -1 (*)"): dict(POOL, state_indices=cu(-2, 0)),
    ("state_indices", "two sequences in a slot (*)"): dict(POOL, state_indices=cu(3, 3)),
    ("initial_state", "a pool of tiles that are not dense"): dict(POOL, initial_state=zeros(6, K, HV, V).transpose(1, 2),
                                                                  state_indices=cu(0, 1)),
    ("final_state", "dtype unlike the pool's"): dict(POOL, final_state=half(6, HV, K, V), state_indices=cu(0, 1)),
    ("final_state", "shape"): dict(final_state=zeros(2, HV, K, V)),
    ("state_dtype", "unlike the buffer's"): dict(initial_state=STATE, inplace_final_state=True, state_dtype=torch.float16),
    ("final_state", "two places for it"): dict(initial_state=STATE, inplace_final_state=True, final_state=zeros(1, HV, K, V)),
    ("final_state", "part of what initial_state lies in"): dict(initial_state=STATES[:1], final_state=STATES[:1]),
    ("final_state", "elements in two places"): dict(final_state=zeros(1, HV, 1, V).expand(1, HV, K, V)),
    ("final_state", "rows over one another"): dict(final_state=zeros(9 * HV * K * V).as_strided(
        (1, HV, K, V), (1, K * V, V // 2, 1))),
    ("final_state", "memory of an input"): dict(final_state=STATE, g=STATE.view(-1)[:T * HV].view(1, T, HV)),
    ("checkpoint_chunks", "negative"): dict(checkpoint_chunks=-1),
    ("checkpoint_chunks", "more than kernels count"): dict(checkpoint_chunks=2**31),
    ("checkpoint_chunks", "of a decoding step"): dict(op=recurrent_gated_delta_rule, checkpoint_chunks=1),
    ("cu_seqlens", "a bool: FLA 0.5's order, by position"): dict(cu_seqlens=True),
    ("cu_seqlens", "dtype"): dict(cu_seqlens=zeros(2)),
    ("cu_seqlens", "sparse"): dict(cu_seqlens=cu(0, T).to_sparse()),
    ("cu_seqlens", "rank"): dict(cu_seqlens=cu((0, T))),
    ("cu_seqlens", "device"): dict(cu_seqlens=torch.zeros(2, dtype=torch.int32, device="meta")),
    ("cu_seqlens", "with rows"): dict(ROWS, cu_seqlens=cu(0, 20, 40)),
    ("cu_seqlens", "does not start at 0 (*)"): dict(cu_seqlens=cu(1, T)),
    ("cu_seqlens", "falls (*)"): dict(cu_seqlens=cu(0, 30, 20)),
    ("cu_seqlens", "past T (*)"): dict(cu_seqlens=cu(0, T + 1)),
    ("cu_seqlens_cpu", "unlike cu_seqlens (*)"): dict(cu_seqlens=cu(0, T), cu_seqlens_cpu=cu(0, 9)),
    ("max_seqlen", "less than a sequence has (*)"): dict(cu_seqlens=cu(0, 30, T), max_seqlen=29),
    ("max_seqlen", "not an int"): dict(cu_seqlens=cu(0, T), max_seqlen=cu(T)),
    ("max_seqlen", "negative"): dict(cu_seqlens=cu(0, T), max_seqlen=-1),
    ("max_seqlen", "without cu_seqlens"): dict(max_seqlen=T),
    ("max_length_q", "less than a sequence has (*)"): dict(cu_seqlens=cu(0, 30, T), max_length_q=29),
    ("chunk_indices", "shape"): dict(cu_seqlens=cu(0, T), chunk_indices=cu(0, 1, 2)),
    ("chunk_indices", "without cu_seqlens"): dict(chunk_indices=cu((0, 0), (0, 1), (0, 2))),
    ("chunk_indices", "of other sequences (*)"): dict(cu_seqlens=cu(0, T), chunk_indices=cu((0, 0), (1, 0))),
    ("chunk_offsets", "of other sequences (*)"): dict(cu_seqlens=cu(0, T), chunk_offsets=cu(0, 9)),
    ("out", "shape"): dict(out=half(1, T, H, V)),
    ("out", "dtype"): dict(out=zeros(1, T, HV, V)),
    ("out", "elements in two places"): dict(out=half(1, 1, HV, V).expand(1, T, HV, V)),
    ("out", "rows over one another"): dict(out=half(T * HV * V).as_strided((1, T, HV, V), (1, HV * V // 2, V, 1))),
    ("out", "memory of an input"): dict(v=OVER[:, :T], out=OVER[:, 1:]),
    ("out", "memory of the final state"): dict(final_state=BIG, out=INSIDE),
    ("out", "memory of a state in place"): dict(initial_state=BIG, inplace_final_state=True, out=INSIDE),
    ("chunk_size", "not one that there is"): dict(chunk_size=60),
    ("chunk_size", "not an int"): dict(chunk_size=16.0),
    ("layout", "not one that there is"): dict(layout="tbhd"),
    ("head_first", "contradicts layout"): dict(head_first=True, layout="bthd"),
    ("target", "not one that there is"): dict(target="cuda"),
    ("target", "not a name"): dict(target=["triton"]),
    ("schedule", "not one that there is"): dict(schedule="fastest"),
    ("gate", "not one that there is"): dict(gate="tanh"),
    ("g", "a factor below 0 (*)"): dict(gate="linear", g=zeros(1, T, HV) - 0.5),
    ("A_log", "without raw gates"): dict(A_log=zeros(HV)),
    ("dt_bias", "without raw gates"): dict(dt_bias=zeros(HV), gate="linear"),
    ("A_log", "missing for raw gates"): dict(gate="raw"),
    ("A_log", "not a tensor"): dict(gate="raw", A_log=1.0),
    ("A_log", "dtype"): dict(gate="raw", A_log=zeros(HV, dtype=torch.float64)),
    ("A_log", "shape"): dict(gate="raw", A_log=zeros(H)),
    ("dt_bias", "device"): dict(gate="raw", A_log=zeros(HV), dt_bias=torch.zeros(HV, device="meta")),
    ("use_gate_in_kernel", "contradicts gate"): dict(use_gate_in_kernel=True, A_log=zeros(HV), gate="linear"),
    ("beta_form", "not one that there is"): dict(beta_form="tanh"),
    ("unit_keys", "not a bool"): dict(unit_keys=cu(0, T)),
    ("checkpoint_positions", "past the sequence's end (*)"): dict(AT, checkpoint_positions=cu(9, 10, 31, 1).view(2, 2)),
    ("checkpoint_positions", "not an end of a chunk (*)"): dict(AT, aligned_positions=True),
    ("checkpoint_positions", "missing"): dict(aligned_positions=True),
    ("checkpoint_slots", "missing"): dict(AT, checkpoint_slots=None),
    ("checkpoint_slots", "shape"): dict(AT, checkpoint_slots=cu(3, 4)),
    ("checkpoint_slots", "dtype"): dict(AT, checkpoint_slots=zeros(2, 2)),
    ("checkpoint_slots", "twice (*)"): dict(AT, checkpoint_slots=cu(3, 4, 4, 5).view(2, 2)),
    ("checkpoint_slots", "slots of sequences (*)"): dict(AT, checkpoint_slots=cu(3, 4, 1, 5).view(2, 2)),
    ("checkpoint_slots", "a pool that is only read"): dict(AT, inplace_final_state=False),
    ("checkpoint_states", "without positions"): dict(POOL, state_indices=cu(0, 1), checkpoint_states=zeros(6, HV, K, V)),
    ("checkpoint_states", "shape"): dict(AT, checkpoint_states=zeros(1, 6, HV, K, V)),
    ("checkpoint_chunks", "beside positions"): dict(AT, checkpoint_chunks=1),
    ("batch_invariant", "not a bool"): dict(batch_invariant=1),
    ("schedule", "parts, in a batch invariant call"): dict(batch_invariant=True, schedule=varied("walk", partition="decay")),
    ("state_dtype", "16 bits, in a batch invariant call"): dict(batch_invariant=True, state_dtype=torch.float16),
    ("state_dtype", "float8, in a batch invariant call"): dict(batch_invariant=True, state_dtype=F8),
    ("state_dtype", "float8 beside a tensor that requires grad"): dict(g=zeros(1, T, HV, requires_grad=True), state_dtype=F8),
    ("final_state", "in float8, fewer slots than the pool"): dict(
        POOL, initial_state=zeros(6, HV, K, V).to(F8), final_state=zeros(5, HV, K, V).to(F8), state_indices=cu(0, 1)),
    ("initial_state", "in float8 and in place, elements in two places"): dict(
        initial_state=zeros(1, 1, K, V).to(F8).expand(1, HV, K, V), inplace_final_state=True),
    ("checkpoint_positions", "beside states in float8"): dict(AT, initial_state=zeros(6, HV, K, V).to(F8)),
    ("state_indices", "slots of tokens, beside states in float8"): dict(STEP, state_indices=SLOTS,
                                                                       initial_state=zeros(8, HV, K, V).to(F8)),
    ("allow_neg_eigval", "without a sigmoid"): dict(allow_neg_eigval=True),
    ("ssm_state_indices", "beside state_indices"): dict(POOL, ssm_state_indices=cu(0, 1), state_indices=cu(0, 1)),
    ("inplace_update", "contradicts inplace_final_state"): dict(initial_state=STATE, inplace_update=True,
                                                                inplace_final_state=False),
    ("use_gate_in_kernel", "contradicts gate='raw'"): dict(use_gate_in_kernel=False, A_log=zeros(HV), gate="raw"),
    ("use_beta_sigmoid_in_kernel", "contradicts beta_form"): dict(use_beta_sigmoid_in_kernel=False, beta_form="sigmoid"),
    ("gk", "one gate for each key"): dict(gk=zeros(1, T, HV, K)),
    ("num_accepted_tokens", "draft tokens of a prompt"): dict(num_accepted_tokens=cu(1)),
    ("num_accepted_tokens", "a slot for each sequence"): dict(STEP, state_indices=cu(0, 1), num_accepted_tokens=cu(1, 1)),
    ("num_accepted_tokens", "more than slots (*)"): dict(STEP, state_indices=SLOTS, num_accepted_tokens=cu(1, 4)),
    ("state_indices", "a slot for each token of a prompt"): dict(POOL, state_indices=SLOTS),
    ("state_indices", "fewer slots than tokens (*)"): dict(STEP, state_indices=SLOTS[:, :2]),
    ("state_indices", "two tokens in a slot (*)"): dict(STEP, state_indices=SLOTS // 2),
    ("state_indices", "slots for tokens, and another final state"): dict(STEP, state_indices=SLOTS, output_final_state=True,
                                                                         inplace_final_state=False),
    ("retrieve_parent_token", "a later token (*)"): dict(STEP, state_indices=SLOTS, retrieve_parent_token=PARENTS + 2),
    ("retrieve_parent_token", "below -1 (*)"): dict(STEP, state_indices=SLOTS, retrieve_parent_token=PARENTS - 2),
    ("retrieve_parent_token", "states not kept"): dict(STEP, state_indices=cu(0, 1), retrieve_parent_token=PARENTS),
    ("intermediate_states_buffer", "shape"): dict(STEP, state_indices=cu(0, 1), intermediate_states_buffer=zeros(3, 3, HV, K)),
    ("intermediate_states_buffer", "too few states (*)"): dict(STEP, state_indices=cu(0, 1),
                                                              intermediate_states_buffer=zeros(3, 2, HV, K, V)),
    ("intermediate_states_buffer", "beside slots for tokens"): dict(STEP, state_indices=SLOTS,
                                                                   intermediate_states_buffer=zeros(3, 3, HV, K, V)),
    ("intermediate_states_buffer", "dtype unlike the pool's"): dict(STEP, state_indices=cu(0, 1),
                                                                   intermediate_states_buffer=half(3, 3, HV, K, V)),
    ("intermediate_states_buffer", "memory of the pool"): dict(STEP, state_indices=cu(0, 1), disable_state_update=True,
                                                              intermediate_states_buffer=STEP["initial_state"][None, :3]),
    ("intermediate_state_indices", "two sequences in a row (*)"): dict(STEP, state_indices=cu(0, 1), **{
        "intermediate_states_buffer": zeros(3, 3, HV, K, V), "intermediate_state_indices": cu(2, 2)}),
    ("intermediate_state_indices", "without a buffer"): dict(STEP, state_indices=cu(0, 1), intermediate_state_indices=cu(0, 1)),
    ("cache_steps", "unlike the buffer's"): dict(op=recurrent_gated_delta_rule, cache_steps=4),
    ("target", "a tree of draft tokens on an NPU"): dict(STEP, state_indices=SLOTS, target="pto", retrieve_parent_token=PARENTS),
    ("return_intermediate_states", "another name"): dict(return_intermediate_states=True),
    ("softplus_beta", "another softplus"): dict(softplus_beta=2.0),
    ("is_kda", "another member of the family"): dict(is_kda=True),
    ("output_state_indices", "other slots to write"): dict(POOL, state_indices=cu(0, 1), output_state_indices=cu(2, 3)),
    ("disable_state_update", "contradicts inplace_final_state"): dict(initial_state=STATE, inplace_final_state=True,
                                                                     disable_state_update=True),
    ("state", "beside initial_state"): dict(initial_state=STATE, state=STATE),
    ("core_attn_out", "beside out"): dict(out=half(1, T, HV, V), core_attn_out=half(1, T, HV, V)),
    ("checkpoint_every_n_tokens", "no multiple of the chunk"): dict(checkpoint_every_n_tokens=24),
    ("seq_idx", "packed, without cu_seqlens"): dict(seq_idx=cu(0, 0)),
    ("inital_state", "misspelt"): dict(inital_state=STATE),
    ("colour", "a keyword that nobody knows"): dict(colour=None),
    ("q", "more than 16 tokens to decode"): dict(op=recurrent_gated_delta_rule),
    ("g", "missing, in a form"): dict(op=fused_recurrent_gated_delta_rule, g=None, gate="linear"),
    ("beta", "missing, in a form"): dict(op=fused_recurrent_gated_delta_rule, beta=None, use_beta_sigmoid_in_kernel=True),
    ("cu_seqlens", "more than 16 tokens to decode (*)"): dict(op=recurrent_gated_delta_rule, cu_seqlens=cu(0, 20, T)),
    ("cu_seqlens_cpu", "not a tensor"): dict(cu_seqlens=cu(0, T), cu_seqlens_cpu=[0, T]),
    ("cu_seqlens_cpu", "without cu_seqlens"): dict(cu_seqlens_cpu=cu(0, T)),
    ("chunk_offsets", "shape"): dict(cu_seqlens=cu(0, T), chunk_offsets=cu(0, 1, 3)),
    ("final_state", "that of initial_state, which is not to be overwritten"): dict(
        initial_state=STATE, final_state=STATE, inplace_final_state=False),
    ("schedule", "empty"): dict(schedule=""),
    ("schedule", "not a name"): dict(schedule=5),
    ("checkpoint_slots", "past the pool (*)"): dict(AT, checkpoint_slots=cu(2, 3, 4, 6).view(2, 2)),
    ("checkpoint_every_n_tokens", "of a decoding step"): dict(op=recurrent_gated_delta_rule, checkpoint_every_n_tokens=16),
    ("checkpoint_every_n_tokens", "beside checkpoint_chunks"): dict(checkpoint_every_n_tokens=16, checkpoint_chunks=1),
    ("initial_state", "a pool of other tiles"): dict(POOL, initial_state=zeros(6, HV, K, 16), state_indices=cu(0, 1)),
    ("initial_state", "a pool that is not aligned"): dict(
        POOL, initial_state=zeros(6 * HV * K * V + 1)[1:].view(6, HV, K, V), state_indices=cu(0, 1)),
    ("intermediate_state_indices", "fewer than sequences"): dict(
        STEP, intermediate_states_buffer=zeros(3, 3, HV, K, V), intermediate_state_indices=cu(0)),
    ("state_indices", "slots for tokens, and nothing to write"): dict(STEP, state_indices=SLOTS, disable_state_update=True),
    ("state_indices", "a slot for each token, past the pool (*)"): dict(
        STEP, state_indices=SLOTS + 3, num_accepted_tokens=cu(1, 1), inplace_final_state=True),
    ("state_indices", "a slot for a token from which another sequence starts (*)"): dict(
        STEP, state_indices=cu(0, 1, 2, 3, 4, 1).view(2, 3), num_accepted_tokens=cu(2, 1), inplace_final_state=True),
    ("retrieve_parent_token", "fewer rows than sequences"): dict(
        STEP, state_indices=SLOTS, inplace_final_state=True, retrieve_parent_token=PARENTS[:1]),
    ("retrieve_parent_token", "fewer parents than tokens (*)"): dict(
        STEP, state_indices=SLOTS, inplace_final_state=True, retrieve_parent_token=PARENTS[:, :2]),
    **MEMBERS, **CONVOLUTION,
}


def refusal(trial):
    """The error of a trial."""
    x = TRIALS[trial]
    x = {n: y for n, y in x.items() if n != "whole"} | dict(target=TARGET) if "whole" in x else arguments(**x)
    op = x.pop("op", chunk_gated_delta_rule)
    if op in (recurrent_gated_delta_rule, fused_recurrent_gated_delta_rule):
        del x["chunk_size"]
    kept = {n: t.clone() for n, t in x.items() if isinstance(t, torch.Tensor) and t.device.type == "cpu"
            and t.layout == torch.strided}
    with pytest.raises(ValueError) as error:
        op(**x)
    assert all(torch.equal(x[n], t) for n, t in kept.items()), "an argument was written to"
    return error.value


def message(trial):
    return str(refusal(trial))


def row(trial):
    text = message(trial).replace("|", "\\|")
    return f"| `{trial[0]}` | {trial[1]} | {text} |"


def rows():
    return re.findall(r"^\| `.*$", PAGE.read_text(encoding="ascii"), re.MULTILINE)


@pytest.mark.parametrize("trial", TRIALS, ids=" ".join)
def test_bad_input_says_what_the_table_says(trial):
    text = message(trial)
    assert text.startswith(f"{trial[0]}: got ") and "; accepted: " in text, text
    assert row(trial) in rows()


def test_each_row_has_a_trial_and_each_trial_a_row():
    named = [tuple(re.match(r"\| `(\w+)` \| (.*?) \|", r).groups()) for r in rows()]
    assert named == list(TRIALS)


#: What the calls here cannot meet -> why.
OTHERS = {
    "(this module was built for them)": "a module that is called directly, with other heads than it has",
    "an instance of this module has": "a module that is called directly, with other heads than it serves",
    "(this module was built for {self.arch})": "a module for a GPU that is called directly, on another device",
    "'the memory of an initial state'": "a module that is called directly",
    "'checkpoint_rows'": "a module with state=positions that is called directly",
    "'a number: the page has no default'": "a module of a page of the caller's own",
    "half of a pair": "a module with one of two builds that is called directly",
    "a block for each chunk that each sequence may have": "a GPU, and sequences whose blocks are 2^31 or more",
    "'a tensor that requires grad'": "a module that is called directly",
    "a target that has a gradient of": "sizes for which no schedule of a gradient fits",
    "states with {word}": "the op of a page of the caller's own, whose contract has no gradient",
    "_fail(name, 'a tensor', NONE)": "the op of a page of the caller's own, with memory for results",
    "_fail(n, f'memory of {m}', 'memory of its own')": "the op of a page of the caller's own, with memory for results",
    "which have gradients": "a target of another package",
    "under torch.compile": "torch.compile, which raises an error of its own around it",
}


def refusals(text):
    """The calls in a source that refuse an argument."""
    return [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "_fail"]


def refused_at(error):
    """The call that refused an argument, "" if the error comes from elsewhere. Modules have copies of the package's."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames[-1].name != "_fail":
        return ""
    at = frames[-2]
    return next(ast.unparse(c) for c in refusals(Path(at.filename).read_text()) if c.lineno <= at.lineno <= c.end_lineno)


def test_the_table_has_every_refusal_that_a_call_can_meet():
    package = Path(gdn_codegen.__file__).parent
    # what plug-ins refuse goes to their hosts' own functions
    there = {ast.unparse(c) for p in package.rglob("*.py") if "integrations" not in p.parts for c in refusals(p.read_text())}
    met = {refused_at(refusal(trial)) for trial in TRIALS}
    left = {c for c in there - met if not any(said in c for said in OTHERS)}
    assert not left, f"docs/errors.md has no row for {left}: add a trial"
    assert all(any(said in c for c in there - met) for said in OTHERS)


def test_values_on_a_gpu_are_read_in_debug_mode_only(monkeypatch):
    """Rows with (*): what the kernels' own checks do is in test_runtime; here, that no tensor elsewhere is read."""
    from gdn_codegen.runtime.call import normalise as checks
    elsewhere = torch.zeros(2, dtype=torch.int32, device="meta")
    assert not checks.reads(elsewhere) and checks.reads(cu(0, 1), None)
    monkeypatch.setenv("GDN_CODEGEN_CHECK", "1")
    assert checks.reads(elsewhere)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="ascii").splitlines()
    first = page.index("| --- | --- | --- |") + 1
    rest = next((i for i in range(first, len(page)) if not page[i].startswith("|")), len(page))
    PAGE.write_text("\n".join([*page[:first], *map(row, TRIALS), *page[rest:]]) + "\n", encoding="ascii")
    sys.exit(f"{len(TRIALS)} rows written")
