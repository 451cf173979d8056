"""Mamba-2 with its state space duality replaced by generated ops, as they are: same prompt logits, same greedy tokens.

    pip install 'gdn_codegen[triton,tilelang,examples]'
    python examples/mamba2.py --target all

The model is small and its weights are random; layers, cache and generation are those of transformers (5.23 or newer), untouched.
In a program of your own one line does it: gdn_codegen.integrations.transformers.enable(model) (docs/integrations.md).
Prints one line a target; exits with 1 where one disagrees or was never called.
"""
from __future__ import annotations

import sys

import torch
from model_comparison import Example, main
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.utils import logging


def small_model(seed: int = 0) -> Mamba2ForCausalLM:
    """Three layers, two groups of B and C for four heads, states of 32 x 64, float32."""
    logging.set_verbosity_error()  # else one line a layer about packages that are not installed
    torch.manual_seed(seed)
    return Mamba2ForCausalLM(Mamba2Config(
        vocab_size=256, hidden_size=64, num_hidden_layers=3, num_heads=4, head_dim=32, state_size=64, n_groups=2,
        initializer_range=0.125,  # 1 / sqrt(hidden_size): no layer drowns in the residual
        pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype=torch.float32)).eval()


EXAMPLE = Example("Mamba-2", small_model, "Mamba2Mixer", ("mamba2_chunk_scan", "mamba_chunk_scan_combined"),
                  ("mamba2_selective_state_update", "selective_state_update"),
                  ends="")  # transformers' head does not pass them on

if __name__ == "__main__":
    sys.exit(main(EXAMPLE))
