"""Layers of FLA and models of transformers on a CUDA GPU, with the plug-ins and with the hosts' own code, both beside the same
weights on a CPU, in float64 or, of transformers, in float32. Run with: pytest -m device

Weights and activations are bfloat16. So all that a layer computes besides our ops is rounded, with the plug-in and without. An
error with the plug-in may be a little more than without. Hosts' kernels run in the first configuration of their autotuner: all
of them take minutes to compile.
"""
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
from gdn_codegen import integrations

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
#: How much an error may be above that of the host's own code, and which error is taken for rounding in any case. The error of a
#: few numbers is a matter of chance: the gradient by A_log of two heads is two sums over tokens.
ABOVE, ROUNDING, FEW, ABOVE_FEW = 1.3, 4e-3, 64, 4.0


@pytest.fixture(autouse=True)
def one_configuration(monkeypatch):
    from triton.runtime.autotuner import Autotuner
    prune = Autotuner.prune_configs
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, given: prune(self, given)[:1])


@pytest.fixture(autouse=True)
def nothing_recorded():
    integrations.reset()
    yield
    integrations.reset()


def all_served(host):
    lines = integrations.report(host).splitlines()
    assert lines and all(line.split(": ")[2] == "served" for line in lines), integrations.report()


def no_worse(error, got, own, want):
    """Each result is as near to the one on a CPU as the host's own. Of that, names may be missing which the host refuses here."""
    assert got.keys() == want.keys()
    errors = {n: (error(got[n].cpu(), y), error(own[n].cpu(), y) if n in own else None) for n, y in want.items()}

    def accepted(n):
        ours, theirs = errors[n]
        above = ABOVE if want[n].numel() > FEW else ABOVE_FEW
        return ours < max(ROUNDING, above * (2e-2 if theirs is None else theirs))
    assert not (bad := {n: e for n, e in errors.items() if not accepted(n)}), bad


def in_steps(made, x):
    """Outputs of a training step and its gradients, and of a prompt and three decoding steps with the last state."""
    import fla_on_cpu as host
    found = {f"training {n}": y for n, y in host.step_of_training(made, x).items()}
    made.zero_grad()
    return found | {f"decoding {n}": y for n, y in host.decoded(made, x, (x.shape[1] - 3, 1, 2)).items()}


#: Sizes of layers here: heads of 64, or by the layer's own rule.
FLA_SIZES = {"GatedLinearAttention": dict(hidden_size=128), "DeltaNet": dict(hidden_size=128),
             "SimpleGatedLinearAttention": dict(hidden_size=128), "RWKV7Attention": dict(hidden_size=128, head_dim=64)}
FLA_LAYERS = ("GatedDeltaNet", "KimiDeltaAttention", "GatedLinearAttention", "DeltaNet", "SimpleGatedLinearAttention",
              "GatedDeltaNet2", "GatedDeltaProduct", "RWKV7Attention")


@pytest.mark.parametrize("name", FLA_LAYERS)
def test_layers_of_fla(name):
    pytest.importorskip("fla.layers", reason="needs flash-linear-attention")
    import fla_on_cpu as host

    from gdn_codegen.integrations import fla
    sizes = FLA_SIZES.get(name, dict(hidden_size=128, head_dim=64))
    made = host.layer(name, **sizes).bfloat16()
    x = torch.randn(2, 153, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    with host.on_cpu():
        want = host.by_references(made, in_steps, x)
    there, y = deepcopy(made).cuda(), x.cuda()
    try:
        own = in_steps(there, y)
    except Exception as e:  # FLA refuses some of its kernels on some GPUs
        print("without the plug-in:", type(e).__name__, str(e)[:200])
        own = {}
    there.zero_grad()
    fla.enable()
    try:
        got = in_steps(there, y)
        all_served("fla")
    finally:
        fla.disable()
    no_worse(host.error, got, own, want)


def logits(model):
    """Logits of padded prompts at once and in two parts through the cache, and gradients of a loss by the embeddings."""
    from small_transformers import prompts
    ids, mask = (y.to(next(model.parameters()).device) for y in prompts())
    real, part = mask.bool(), 40
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits[real]
        first = model(ids[:, :part], attention_mask=mask[:, :part], use_cache=True)
        name = "cache_params" if "cache_params" in first else "past_key_values"
        second = model(ids[:, part:], attention_mask=mask, use_cache=True, **{name: first[name]})
    model.zero_grad()
    model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    by = model.get_input_embeddings().weight.grad
    return {"whole": whole, "in two parts": torch.cat([first.logits, second.logits], 1)[real], "gradient": by}


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "mamba2"])
def test_models_of_transformers(name, monkeypatch):
    """A token goes to all experts. With two of four, roundings decide to which, and outputs differ by 13 % of their size."""
    pytest.importorskip("transformers", "5.23", reason="needs transformers, 5.23")
    from reference import rms_error
    from small_transformers import MODELS, enabled, make, own_code
    title, said = MODELS[name]
    if "num_experts_per_tok" in said:
        monkeypatch.setitem(MODELS, name, (title, {**said, "num_experts_per_tok": 4}))
    model = make(name, torch.bfloat16)
    exact = deepcopy(model).float()  # experts have no products in float64
    with own_code(exact):
        want = logits(exact)
    there = model.cuda()
    with own_code(there):
        own = logits(there)
    with enabled(there):
        got = logits(there)
    all_served("transformers")
    no_worse(rms_error, got, own, want)
