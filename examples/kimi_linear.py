"""Kimi-Linear with its Kimi Delta Attention replaced by generated ops, as they are: same prompt logits, same greedy tokens.

    pip install 'gdn_codegen[triton,tilelang,examples]'
    python examples/kimi_linear.py --target all

The model is small and its weights are random; layers, cache and generation are those of transformers (5.23 or newer), untouched.
In a program of your own one line does it: gdn_codegen.integrations.transformers.enable(model) (docs/integrations.md).
Prints one line a target; exits with 1 where one disagrees or was never called.
"""
from __future__ import annotations

import sys

import torch
from model_comparison import Example, linear_layers, main
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.utils import logging


def small_model(seed: int = 0) -> KimiLinearForCausalLM:
    """Three layers of Kimi Delta Attention and one of latent attention, float32."""
    logging.set_verbosity_error()  # else one line a layer about packages that are not installed
    torch.manual_seed(seed)
    config = KimiLinearConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, linear_num_heads=4, linear_head_dim=32,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        initializer_range=0.125,  # 1 / sqrt(hidden_size): no layer drowns in the residual
        pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype=torch.float32)
    model = KimiLinearForCausalLM(config).eval()
    for layer in linear_layers(EXAMPLE, model):  # as initialised, a channel's gate hardly depends on the token
        gate = layer.forget_gate
        gate.A_log.data = torch.logspace(-2, 1, layer.num_heads).log().view_as(gate.A_log)
        gate.dt_bias.data.uniform_(-4, 1)
    return model


EXAMPLE = Example("Kimi-Linear", small_model, "DeltaAttention", ("chunk_kimi_delta_attention", "chunk_kda"),
                  ("recurrent_kimi_delta_attention", "fused_recurrent_kda"))

if __name__ == "__main__":
    sys.exit(main(EXAMPLE))
