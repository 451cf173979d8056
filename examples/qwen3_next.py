"""Qwen3-Next with its gated delta rule replaced by generated ops, as they are: same prompt logits, same greedy tokens.

    pip install 'gdn_codegen[triton,tilelang,examples]'
    python examples/qwen3_next.py --target all

The model is small and its weights are random; layers, cache and generation are those of transformers, untouched.
In a program of your own one line does it: gdn_codegen.integrations.transformers.enable(model) (docs/integrations.md).
Prints one line a target; exits with 1 where one disagrees or was never called.
"""
from __future__ import annotations

import sys

import torch
from model_comparison import Example, linear_layers, main
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.utils import logging


def small_model(seed: int = 0) -> Qwen3NextForCausalLM:
    """Three linear layers and a full one, K != V, two value heads to a key head, float32."""
    logging.set_verbosity_error()  # else one line a layer about packages that are not installed
    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=64,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
        initializer_range=0.125,  # 1 / sqrt(hidden_size): no layer drowns in the residual
        pad_token_id=0, dtype=torch.float32)
    model = Qwen3NextForCausalLM(config).eval()
    for layer in linear_layers(EXAMPLE, model):  # as initialised, most heads forget within a token and no state would matter
        layer.A_log.data = torch.logspace(-2, 0, layer.num_v_heads).log()
    return model


EXAMPLE = Example("Qwen3-Next", small_model, "GatedDeltaNet", ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"),
                  ("torch_recurrent_gated_delta_rule", "recurrent_gated_delta_rule"), ends="cu_seq_lens_q")

if __name__ == "__main__":
    sys.exit(main(EXAMPLE))
