"""Models whose servers call the ops, as data: the heads of their linear attention layers, and what a server passes.

Heads and dims are from the models' configurations (linear_num_key_heads, linear_num_value_heads, linear_key_head_dim,
linear_value_head_dim); those of Qwen3.5 2B and 122B-A10B are from their model cards ("Number of Linear Attention Heads").
`build --model` takes their names.
"""
from __future__ import annotations

from dataclasses import dataclass

#: What a step that verifies draft tokens says of states besides: vLLM, with a slot of the pool for each token; SGLang and
#: FlashInfer, with a buffer for states beside a pool that stays as it is, of tokens in a row and of a tree.
DRAFT_TOKENS = ("in_place/slots/accepted", "rows/frozen", "rows/parents/frozen")


def _passed(*states: str) -> tuple[str, ...]:
    """Words of contracts: gates and beta before their activations, q and k before their norms, and a pool of states of one of
    these dtypes in the order V K, in place."""
    return tuple(f"beta=sigmoid/bfloat16,dt_bias=bfloat16,g=raw/bfloat16,k=l2norm,q=l2norm,state=vk/{s}/pool/in_place"
                 for s in states)


@dataclass(frozen=True)
class Model:
    """What calls of a model's linear attention layers have in common.

    heads: H and HV of the whole model. head_dims: K and V. dtype: of q, k and v. accept: the contracts of calls, as --accept
    spells them; more than one where servers differ. lacks: why the package does not serve the model; "" if it does.
    """

    heads: tuple[int, int]
    head_dims: tuple[int, int] = (128, 128)
    dtype: str = "bfloat16"
    accept: tuple[str, ...] = _passed("float32")
    lacks: str = ""

    def share(self, tensor_parallel: int) -> tuple[int, int]:
        """H and HV of each of so many devices. ValueError for a number that does not divide both."""
        H, HV = self.heads
        if tensor_parallel < 1 or H % tensor_parallel or HV % tensor_parallel:
            fit = [str(n) for n in range(1, H + 1) if not (H % n or HV % n)]
            raise ValueError(f"tensor_parallel: got {tensor_parallel}, for {H}/{HV} heads; accepted: {', '.join(fit)}")
        return H // tensor_parallel, HV // tensor_parallel


#: By name. vLLM keeps states of Qwen3-Next in bfloat16, SGLang in float32. Configurations of Qwen3.5 ask for float32.
MODELS = {
    "qwen3-next": Model((16, 32), accept=_passed("bfloat16", "float32")),
    "qwen3.5-0.8b": Model((16, 16)), "qwen3.5-2b": Model((16, 16)), "qwen3.5-4b": Model((16, 32)), "qwen3.5-9b": Model((16, 32)),
    "qwen3.5-27b": Model((16, 48)), "qwen3.5-35b-a3b": Model((16, 32)), "qwen3.5-122b-a10b": Model((16, 64)),
    "qwen3.5-397b-a17b": Model((16, 64)),
    "kimi-linear": Model((32, 32), lacks="whose layers have a gate for each channel (KDA), which pages cannot express yet")}


def find(name: str) -> Model:
    """The model of that name. ValueError for a name that is none, or of which there are several sizes, and for a model that the
    package does not serve."""
    known = [n for n, m in MODELS.items() if not m.lacks]
    if name in known:
        return MODELS[name]
    sizes = [n for n in known if n.startswith(f"{name}-")]
    why = f", {MODELS[name].lacks}" if name in MODELS else ", whose sizes differ in heads" if sizes else ""
    raise ValueError(f"model: got {name!r}{why}; accepted: {', '.join(sizes or known)}")
