"""Bad calls of the other members' ops, for docs/errors.md: (argument, the op and what is wrong with the argument) -> the call."""
import torch

import gdn_codegen as ops

T, H, HV, K, V = 40, 2, 4, 32, 32
half = lambda *shape: torch.zeros(shape, dtype=torch.float16)
zeros = torch.zeros
#: Inputs of each op.
QKV = dict(q=half(1, T, H, K), k=half(1, T, H, K), v=half(1, T, HV, V))
CHANNELS = dict(QKV, g=zeros(1, T, HV, K))
KDA = dict(CHANNELS, beta=zeros(1, T, HV))
ROWS = {n: half(1, T, HV, K) for n in "rkvab"} | dict(w=zeros(1, T, HV, K))
PRODUCT = dict(q=half(1, T, H, K), k=half(1, 2 * T, H, K), v=half(1, 2 * T, HV, V), g=None, beta=zeros(1, 2 * T, HV),
               num_householder=2)
MAMBA = dict(x=half(1, T, HV, V), dt=zeros(1, T, HV), A=zeros(HV), B=half(1, T, H, K), C=half(1, T, H, K), chunk_size=16)
STEP = dict(state=zeros(2, HV, V, K), x=half(2, HV, V), dt=zeros(2, HV), A=zeros(HV), B=half(2, H, K), C=half(2, H, K))
PACK = torch.tensor([0, 10, T])
NUMBERS = torch.repeat_interleave(torch.tensor([10, 30]))[None]


def _of(op, inputs, **trials):
    """Trials of an op. trials: argument__what -> what is passed in place of the inputs."""
    for key, change in trials.items():
        argument, what = key.split("__")
        yield (argument, f"`{op}`: {what.replace('_', ' ')}"), dict(op=getattr(ops, op), whole=True, **{**inputs, **change})


MEMBERS = dict([
    *_of("chunk_kda", KDA,
         lower_bound__not_below_0=dict(lower_bound=1.0), lower_bound__less_than_the_safe_gate_has=dict(
             use_gate_in_kernel=True, A_log=zeros(HV), lower_bound=-9.0, safe_gate=True),
         use_gate_in_kernel__contradicts_gate=dict(use_gate_in_kernel=True, gate="linear"),
         A_log__missing_for_raw_gates=dict(use_gate_in_kernel=True), dt_bias__as_many_numbers_as_g_has_channels=dict(
             use_gate_in_kernel=True, A_log=zeros(HV), dt_bias=zeros(K)),
         g__a_factor_below_0=dict(g=zeros(1, T, HV, K) - 0.5, gate="linear"),
         v__dtype=dict(v=zeros(1, T, HV, V, dtype=torch.int8)), checkpoint_states__beside_a_buffer_for_states_by_token=dict(
             checkpoint_positions=zeros(1, 1).int(), checkpoint_slots=zeros(1, 1).int(), checkpoint_states=zeros(1, HV, K, V),
             intermediate_states_buffer=zeros(1, 1, HV, K, V)),
         k__dtype_unlike_that_of_v=dict(k=half(1, T, H, K).bfloat16()), out__memory_of_an_input=dict(out=KDA["v"])),
    *_of("chunk_gla", CHANNELS, beta__an_input_of_another_member=dict(beta=zeros(1, T, HV)),
         beta_form__no_such_input=dict(beta_form="sigmoid")),
    *_of("fused_recurrent_gla", dict(QKV, gk=CHANNELS["g"]), gv__gates_of_values=dict(gv=CHANNELS["g"]), reverse__backwards=dict(
        reverse=True)),
    *_of("chunk_rwkv7", ROWS, lower_bound__beside_raw_gates=dict(gate="raw", A_log=zeros(HV), lower_bound=-5.0)),
    *_of("fused_mul_recurrent_rwkv7", {n: ROWS[n] for n in "rwkva"}, kk__shape_unlike_that_of_k=dict(kk=half(1, T, H, K)),
         reverse__backwards=dict(kk=ROWS["k"], reverse=True)),
    *_of("chunk_delta_rule", dict(QKV, beta=zeros(1, T, HV)), gate__no_log_decays=dict(gate="linear")),
    *_of("chunk_simple_gla", QKV, g_gamma__two_decays=dict(g=zeros(1, T, HV), g_gamma=zeros(HV))),
    *_of("fused_recurrent_simple_gla", dict(QKV, g=zeros(1, T, HV)), reverse__backwards=dict(reverse=True)),
    *_of("chunk_lightning_attn", QKV, layer_idx__not_an_int=dict(layer_idx=0.5, num_layers=2),
         layer_idx__past_the_last_layer=dict(layer_idx=3, num_layers=2)),
    *_of("chunk_gated_delta_product", PRODUCT, num_householder__none=dict(num_householder=0), k__steps_of_a_token=dict(
        k=half(1, T, H, K)), chunk_offsets__tables_of_chunks=dict(chunk_offsets=PACK), out__shape=dict(out=half(1, 2 * T, HV, V)),
         out__memory_of_an_input=dict(out=PRODUCT["v"][:, :T])),
    *_of("mamba_chunk_scan_combined", MAMBA, D__a_number_for_each_channel=dict(D=zeros(HV, V)), dt_limit__limits=dict(
        dt_limit=(-1.0, 1.0)), dt__rank_beside_limits=dict(dt=zeros(T, HV), dt_limit=(0.1, 1.0)),
         dt_bias__shape_beside_limits=dict(dt_bias=zeros(3), dt_limit=(0.1, 1.0)), chunk_size__none=dict(chunk_size=0),
         return_varlen_states__one_sequence=dict(return_varlen_states=True),
         cu_seqlens__without_numbers_of_sequences=dict(cu_seqlens=PACK),
         return_final_states__two_kinds_of_states=dict(
             cu_seqlens=PACK, seq_idx=NUMBERS, return_final_states=True, return_varlen_states=True),
         seq_idx__shape=dict(seq_idx=NUMBERS[0]), scale__a_factor_of_C=dict(scale=0.5), z__shape=dict(z=half(1, T, H, V)),
         z__beside_out=dict(z=MAMBA["x"], out=half(1, T, HV, V)), z__dtype=dict(z=MAMBA["x"].long()),
         dt__dtype_beside_limits=dict(dt=zeros(1, T, HV).long(), dt_limit=(0.1, 1.0))),
    (("seq_idx", "`mamba_chunk_scan_combined`: unlike cu_seqlens (*)"),
     dict(MAMBA, op=ops.mamba_chunk_scan_combined, whole=True, cu_seqlens=PACK, seq_idx=NUMBERS.flip(1))),
    *_of("selective_state_update", STEP, pad_slot_id__another=dict(pad_slot_id=0), x__rank=dict(x=half(HV, V)), B__rank=dict(
        B=half(2, 1, H, K)), A__a_number_for_each_channel=dict(A=zeros(HV, V, K).normal_()),
         dt_bias__shape_without_a_softplus=dict(dt_bias=zeros(1)), z__device=dict(z=STEP["x"].to("meta")),
         dt_bias__device_without_a_softplus=dict(dt_bias=zeros(HV, device="meta"))),
    (("checkpoint_chunks", "`fused_recurrent_kda`: beside states by token"), dict(
        {n: y[:, :4] for n, y in KDA.items()}, op=ops.fused_recurrent_kda, whole=True, cu_seqlens=torch.tensor([0, 1, 4]),
        initial_state=zeros(8, HV, K, V), state_indices=torch.arange(6).view(2, 3), num_accepted_tokens=torch.tensor([1, 1]),
        checkpoint_chunks=1)),
])
