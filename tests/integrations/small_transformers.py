"""Small models of transformers with random weights, one for each of its classes that the plug-in serves."""
import inspect
import sys
from contextlib import contextmanager
from unittest import mock

import torch

from gdn_codegen.integrations import transformers as plugin

BASE = dict(vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, initializer_range=0.125, pad_token_id=0, bos_token_id=1, eos_token_id=2)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LATENT = dict(kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
              layer_types=[*["linear_attention"] * 3, "full_attention"])
MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=2, mamba_d_state=32, mamba_expand=2, mamba_chunk_size=64)
#: The modules, their class names without their endings, and what is said in a configuration besides BASE.
MODELS = {
    "qwen3_next": ("Qwen3Next", dict(DELTA, **EXPERTS, head_dim=32)),
    "qwen3_5": ("Qwen3_5", dict(DELTA, head_dim=32)),
    "qwen3_5_moe": ("Qwen3_5Moe", dict(DELTA, **EXPERTS, head_dim=32)),
    "qwen4_exp": ("Qwen4Exp", dict(
        DELTA, **EXPERTS, head_dim=32, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=32, indexer_budget=64,
        indexer_compress_ratio=4, hc_lowrank=16, layer_types=[*["linear_attention"] * 3, "indexed_attention"])),
    "olmo_hybrid": ("OlmoHybrid", DELTA),
    "kimi_linear": ("KimiLinear", dict(LATENT, **LOCAL, linear_num_heads=4, linear_head_dim=32)),
    "bailing_hybrid": ("BailingHybrid", dict(LATENT, **LOCAL, n_group=2, topk_group=1, head_dim=32, first_k_dense_replace=1,
                                             num_mtp_layers=0)),
    "mamba2": ("Mamba2", dict(num_heads=4, head_dim=32, state_size=32, n_groups=2)),
    "bamba": ("Bamba", dict(MAMBA, attn_layer_indices=[2])),
    "falcon_h1": ("FalconH1", dict(MAMBA, mamba_d_ssm=128, head_dim=16)),
    "granitemoehybrid": ("GraniteMoeHybrid", dict(MAMBA, **LOCAL, layer_types=["mamba", "mamba", "attention", "mamba"],
                                                  shared_intermediate_size=32)),
    "nemotron_h": ("NemotronH", dict(
        layers_block_type=["mamba", "attention", "mamba", "mlp"], mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=32,
        n_groups=2, chunk_size=64, head_dim=16)),
    "zamba2": ("Zamba2", dict(
        layers_block_type=["mamba", "hybrid", "mamba", "mamba"], mamba_d_state=32, mamba_expand=2, mamba_ngroups=2,
        n_mamba_heads=4, mamba_headdim=32, num_mem_blocks=1, use_mem_rope=True, chunk_size=64, attention_head_dim=32)),
}
#: A model that has no head of its own for text.
GLM = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, kv_lora_rank=32, q_lora_rank=32, v_head_dim=32,
           qk_nope_head_dim=32, index_topk=32, index_head_dim=32, index_n_heads=2, linear_head_dim=32, linear_num_heads=4,
           hc_mult=2, index_kpool=4)
LENGTHS = (70, 52)


def make(name, dtype=torch.float32):
    """A model in evaluation, the same weights each time."""
    import transformers
    from transformers.utils import logging
    logging.set_verbosity_error()
    torch.manual_seed(0)
    title, said = MODELS[name]
    config = getattr(transformers, f"{title}TextConfig", None) or getattr(transformers, f"{title}Config")
    model = getattr(transformers, f"{title}ForCausalLM")(config(**{**BASE, **said}, dtype=dtype))
    for at, p in model.named_parameters():  # as initialised, most heads forget within a token and no state would matter
        if at.endswith("A_log"):
            p.data = torch.logspace(-2, 0, p.numel()).log().view_as(p)
    return model.to(dtype).eval()


def prompts(lengths=LENGTHS):
    """Token ids and attention mask, padded on the left."""
    T = max(lengths)
    ids = torch.randint(3, BASE["vocab_size"], (len(lengths), T), generator=torch.Generator().manual_seed(5))
    mask = torch.stack([torch.arange(T) >= T - n for n in lengths]).long()
    return ids * mask, mask


def functions(model):
    """The host's functions that layers call: their modules, names and kernels."""
    return [(sys.modules[module], name, kernel) for (module, name), kernel in plugin._functions(model).items()]


@contextmanager
def own_code(model):
    """Inside, layers call the host's code in torch, and not kernels of packages which it prefers to that."""
    patches = [mock.patch.object(module, name, inspect.unwrap(getattr(module, name))) for module, name, _ in functions(model)]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def enabled(model, target="auto"):
    plugin.enable(model, target)
    try:
        yield
    finally:
        plugin.disable(model)
