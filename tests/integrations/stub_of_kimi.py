"""Modules of vLLM with functions for Kimi Delta Attention: their signatures, read in 0.33.0. Each returns "the host's".

vllm/models/kimi_k3/nvidia/ops/third_party/kda (chunk.py, fused_recurrent.py), vllm/models/kimi_k3/nvidia/kda.py,
vllm/models/glm5next/nvidia/ops/third_party/kda/kernels.py and vllm/models/glm5next/common/kda.py.
"""
from pathlib import Path

KIMI = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
GLM = "vllm.models.glm5next.nvidia.ops.third_party.kda"
FUNCTIONS = {
    f"{KIMI}.chunk": (
        "chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "cu_seqlens=None, **kwargs)",
        "chunk_kda_with_fused_gate(q, k, v, raw_g, raw_beta, A_log, g_bias, scale=None, initial_state=None, "
        "output_final_state=False, lower_bound=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, out=None, **kwargs)"),
    f"{KIMI}.fused_recurrent": (
        "fused_recurrent_kda(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, "
        "ssm_state_indices, num_accepted_tokens=None, out=None, fuse_gate=None)",
        "fused_recurrent_kda_packed_decode(mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, "
        "state_indices, scale=None, out=None)"),
    "vllm.models.kimi_k3.nvidia.kda": (
        "_flashkda_prefill(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, out, final_state, "
        "workspace, checkpoint_state=None, checkpoint_offsets=None)",),
    f"{GLM}.kernels": (
        "fused_recurrent_kda(q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, "
        "use_qk_l2norm_in_kernel=True, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, out=None, "
        "sigmoid_beta=False, a_log=None, g_bias=None, compute_gate=False, lower_bound=-5.0, **kwargs)",
        "chunk_kda_with_fused_gate(q, k, v, raw_g, beta, A_log, g_bias, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, safe_gate=False, lower_bound=-5.0, **kwargs)")}

#: GLM-5.3's layer, in the module with this name.
LAYER = "vllm.models.glm5next.common.kda"
CLASS = """from vllm.v1.worker.workspace import current_workspace_manager


class Glm5NextLinearAttention:
    def _flashkda_prefill(self, q, k, v, g, beta, initial_state, cu_seqlens, out, checkpoint=None, raw_qkv=None, conv_state=None,
                          recurrent_state=None):
        return "the host's", None
"""


def write(folder: Path) -> None:
    """Add the modules to the package `vllm` in a folder. A package `kda` imports the functions of its modules."""
    texts = {module: "".join(f"def {f}:\n    return \"the host's\", None\n\n\n" for f in functions)
             for module, functions in FUNCTIONS.items()}
    for module, text in (texts | {LAYER: CLASS}).items():
        functions = FUNCTIONS.get(module, ())
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for above in path.relative_to(folder).parents[:-1]:
            (folder / above / "__init__.py").touch()
        if path.parent.name == "kda":
            with (path.parent / "__init__.py").open("a") as f:
                f.write("".join(f"from .{path.stem} import {x.partition('(')[0]}\n" for x in functions))
