"""Models whose servers call the ops, as data: the heads of their linear attention layers, and what engines pass.

Heads and dims are from the models' configurations (linear_num_key_heads and others; of Kimi, GLM and Ling linear_attn_config or
num_attention_heads); those of Qwen3.5 2B and 122B-A10B are from their model cards ("Number of Linear Attention Heads"), those of
Kimi K3 from vLLM's and SGLang's layers. Calls are those that the plug-ins for vLLM and SGLang make (integrations). `build
--model` takes the names.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Calls:
    """What an engine's calls of the ops of a layer say, in contracts as --accept spells them.

    prefill, decode: of prompts, and of decoding steps. drafts: what steps that verify draft tokens say of states instead of
    "in_place", joined by /. beside_drafts: prefill in a batch with draft tokens, where it differs. stores: prefill that may store
    states for a cache of prefixes; aligned: whether these are after whole chunks (the ops' `aligned_positions`).
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    drafts: tuple[str, ...] = ()
    beside_drafts: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    aligned: bool = True


#: Engines whose plug-ins make the calls.
ENGINES = ("vllm", "sglang")
#: Verification of draft tokens: in vLLM with a slot of the pool for each token; in SGLang, and FlashInfer's kernels, with a
#: buffer for states beside a pool that stays as it is, of tokens in a row and of a tree.
SLOTS, BUFFERS = ("in_place/slots/accepted",), ("rows/frozen", "rows/parents/frozen")
_NORMS = "k=l2norm,q=l2norm"


def _raw(gate: str, more: str = "") -> str:
    """Inputs before their norms, and gates and beta before their activations."""
    return f"beta=sigmoid/bfloat16,{more}g={gate}/bfloat16,{_NORMS}"


def _dense(inputs: str, dtype: str = "float32") -> str:
    """Inputs, and states that the engine gathers before a call and scatters after it."""
    return f"{inputs},state=vk/{dtype}"


def _pool(inputs: str, dtype: str = "float32") -> str:
    """Inputs, and a pool of states in place."""
    return f"{_dense(inputs, dtype)}/pool/in_place"


def _gated_delta_net(vllm: str = "float32", sglang: str = "float32") -> dict[str, Calls]:
    """Calls of Qwen's layers, by the dtypes of the engines' states. In vLLM batches with draft tokens have gates, norms and
    states from kernels of vLLM. SGLang computes gates before prefill."""
    raw = _raw("raw", "dt_bias=bfloat16,")
    own, computed = (_pool(raw, vllm),), (_pool(_NORMS, sglang),)
    return {"vllm": Calls(own, own, SLOTS, (f"state=vk/{vllm}",), own),
            "sglang": Calls(computed, (_pool(raw, sglang),), BUFFERS, stores=computed)}


@dataclass(frozen=True)
class Model:
    """What calls of a model's linear attention layers have in common.

    heads: H and HV of the whole model. head_dims: K and V. dtype: of q, k and v. algorithm: the layers' page. engines: by name,
    the calls of each engine.
    """

    heads: tuple[int, int]
    head_dims: tuple[int, int] = (128, 128)
    dtype: str = "bfloat16"
    algorithm: str = "gated_delta_rule"
    engines: Mapping[str, Calls] = field(default_factory=_gated_delta_net)

    def share(self, tensor_parallel: int) -> tuple[int, int]:
        """H and HV of each of so many devices. ValueError for a number that does not divide both."""
        H, HV = self.heads
        if tensor_parallel < 1 or H % tensor_parallel or HV % tensor_parallel:
            fit = [str(n) for n in range(1, H + 1) if not (H % n or HV % n)]
            raise ValueError(f"tensor_parallel: got {tensor_parallel}, for {H}/{HV} heads; accepted: {', '.join(fit)}")
        return H // tensor_parallel, HV // tensor_parallel


def _kda(heads: int, gate: str, *more: str, stores: bool = False, vllm: Calls | None = None) -> Model:
    """A model with KDA layers. gate: the input form of their gates, "safe" where these are -5 or more. more: inputs of further
    calls of vLLM's for prefill. stores: whether vLLM's layer may take FlashKDA, whose prefill stores states within chunks. vllm:
    its calls, if it computes gates and beta before them."""
    raw = _raw(gate)
    pool, flash = (_pool(raw),), (_dense(raw),) * stores
    theirs = Calls(tuple(map(_dense, (raw, *more))), pool, SLOTS, stores=flash, aligned=False)
    return Model((heads, heads), algorithm="kimi_delta_attention",
                 engines={"vllm": vllm or theirs, "sglang": Calls(pool, pool, BUFFERS, stores=pool)})


#: By name. vLLM keeps states of Qwen3-Next and of Olmo Hybrid in the dtype of the model. Configurations of Qwen3.5 ask for
#: float32. Where vLLM does not take FlashKDA for GLM it computes beta before prefill. SGLang has no Olmo Hybrid.
MODELS = {
    "qwen3-next": Model((16, 32), engines=_gated_delta_net("bfloat16")),
    "qwen3.5-0.8b": Model((16, 16)), "qwen3.5-2b": Model((16, 16)), "qwen3.5-4b": Model((16, 32)), "qwen3.5-9b": Model((16, 32)),
    "qwen3.5-27b": Model((16, 48)), "qwen3.5-35b-a3b": Model((16, 32)), "qwen3.5-122b-a10b": Model((16, 64)),
    "qwen3.5-397b-a17b": Model((16, 64)),
    "kimi-linear": _kda(32, "raw"), "kimi-k3": _kda(96, "safe", stores=True),
    "glm-5.3-flash": _kda(64, "safe", f"g=safe/bfloat16,{_NORMS}", stores=True),
    "ling-3.0-flash": _kda(32, "safe", vllm=Calls((_dense(_NORMS),), (_pool(_NORMS),))),
    "olmo-hybrid-7b": Model((30, 30), (96, 192), engines={"vllm": Calls(
        (_dense(_NORMS, "bfloat16"),), (_pool(_NORMS, "bfloat16"),), SLOTS)})}


def find(name: str) -> Model:
    """The model of that name. ValueError for a name that is none, or of which there are several sizes."""
    if name in MODELS:
        return MODELS[name]
    sizes = [n for n in MODELS if n.startswith(f"{name}-")]
    raise ValueError(f"model: got {name!r}{', whose sizes differ in heads' if sizes else ''}; accepted: "
                     f"{', '.join(sizes or MODELS)}")
