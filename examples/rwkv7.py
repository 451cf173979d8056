"""RWKV-7 with its recurrence replaced by generated ops, as they are: same prompt logits, same greedy tokens.

    pip install 'gdn_codegen[triton,tilelang,examples]' flash-linear-attention
    python examples/rwkv7.py --target all

transformers 5.23 has no RWKV-7. flash-linear-attention (read: 0.6.0) has one in transformers' classes, with Triton kernels for
GPUs. They do not run on a CPU. So those beside the recurrence are replaced by the references in torch that the package has for
them, and by one here. Logits are compared with those of its recurrence in torch. The model is small and its weights are random;
layers, cache and generation are those of the package.
Prints one line a target; exits with 1 where one disagrees or was never called.
"""
from __future__ import annotations

import sys
import warnings

import torch
from model_comparison import Example, main
from transformers.utils import logging

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no GPU
    from fla.models.rwkv7 import RWKV7Config, RWKV7ForCausalLM
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
    from fla.ops.rwkv7.fused_k_update import k_update_ref
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref


def small_model(seed: int = 1) -> RWKV7ForCausalLM:
    """Three layers with two heads, float32."""
    logging.set_verbosity_error()
    torch.manual_seed(seed)
    config = RWKV7Config(
        vocab_size=256, hidden_size=64, num_hidden_layers=3, head_dim=32, decay_low_rank_dim=16, gate_low_rank_dim=16,
        a_low_rank_dim=16, v_low_rank_dim=16, fuse_norm=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that results of this RWKV are to be checked
        model = RWKV7ForCausalLM(config).eval()
    for name, x in model.named_parameters():  # as initialised, no layer adds to the residual
        if x.ndim == 2 and "norm" not in name:
            torch.nn.init.normal_(x, std=x.shape[1] ** -0.5 if "embeddings" not in name else 1.0)
    return model


def token_shift(x, cu_seqlens=None, cache=None, output_cache=False):
    """The token before, less the token, and the last token. FLA's reference takes no cache."""
    before = torch.zeros_like(x[:, :1]) if cache is None else cache
    return torch.cat([before, x[:, :-1]], 1) - x, x[:, -1:]


def prompt(r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False, **options):
    """FLA's recurrence in torch, in the order of `chunk_rwkv7`'s arguments."""
    r, w, k, v, a, b = (x.transpose(1, 2) for x in (r, w, k, v, a, b))
    o, state = dplr_recurrence(r * (scale * r.shape[-1] ** 0.5), k, v, a, b, w, initial_state, output_final_state)
    return o.transpose(1, 2), state


def step(r, w, k, v, kk, a, **options):
    """FLA's recurrence in torch, in the order of `fused_mul_recurrent_rwkv7`'s arguments."""
    return prompt(r, w, k, v, -kk, kk * a, **options)


EXAMPLE = Example(
    "RWKV-7", small_model, "RWKV7Attention", ("chunk_rwkv7", "chunk_rwkv7"),
    ("fused_mul_recurrent_rwkv7", "fused_mul_recurrent_rwkv7"),
    own={"chunk_rwkv7": prompt, "fused_mul_recurrent_rwkv7": step},
    also={"token_shift": token_shift, "fused_addcmul_rwkv7": torch_addcmul_rwkv7, "fused_k_rwkv7": k_update_ref,
          "gate_output_correction": gate_output_correction_ref},
    lengths=(139, 110), part=70)  # layers call chunk_rwkv7 for 64 tokens or more

if __name__ == "__main__":
    sys.exit(main(EXAMPLE))
