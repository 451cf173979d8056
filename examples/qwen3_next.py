"""Qwen3-Next with its gated delta rule replaced by generated ops, as they are: same prompt logits, same greedy tokens.

    pip install 'gdn_codegen[triton,tilelang,examples]'
    python examples/qwen3_next.py --target all

The model is small and its weights are random; layers, cache and generation are those of transformers, untouched.
Prints one line a target; exits with 1 where one disagrees or was never called.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.utils import logging

import gdn_codegen
from gdn_codegen import targets
from gdn_codegen.runtime.targets import runs

TARGETS = targets.names()
#: RMSE over RMS that logits may differ by. The model is float32 and so is the op: with 16 bits the rounding of inputs
#: alone, the op left as it is, moves a token to another expert and so changes what is generated.
TOLERANCE = 1e-5
LENGTHS = (75, 52)  # tokens of the two prompts: neither a whole number of chunks, the second padded on the left
PART = 40  # tokens of the first part where a prompt comes in two
NEW = 8


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
    for layer in linear_layers(model):  # as initialised, most heads forget within a token and no state would matter
        layer.A_log.data = torch.logspace(-2, 0, layer.num_v_heads).log()
    return model


def linear_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")]


def prompts(model: Qwen3NextForCausalLM, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, padded on the left."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, model.config.vocab_size, (len(LENGTHS), max(LENGTHS)), generator=gen)
    mask = torch.stack([torch.arange(max(LENGTHS)) >= max(LENGTHS) - n for n in LENGTHS]).long()
    return ids * mask, mask


def counted(op, calls: Counter, name: str):
    """`op` as it is, called by transformers as it calls its own. `calls` counts calls, and those given a state."""
    def call(*args, **options):
        calls[name] += 1
        calls[f"{name} with state"] += options.get("initial_state") is not None
        return op(*args, **options)

    return call


@contextmanager
def replaced(model: torch.nn.Module, op, step=None):
    """Inside, every GatedDeltaNet layer of `model` calls `op`, and `step` for a single token after others where there is one;
    yields the counter of calls."""
    calls: Counter = Counter()
    own = {"chunk": op} | ({"recurrent": step} if step else {})
    layers = linear_layers(model)
    with ExitStack() as stack:
        for name, f in own.items():
            fn = counted(f, calls, name)
            for module in {type(layer).__module__ for layer in layers}:  # where transformers 5.23 looks it up
                stack.enter_context(mock.patch.object(sys.modules[module], f"torch_{name}_gated_delta_rule", fn))
            for layer in layers:  # where older ones do
                if f"{name}_gated_delta_rule" in vars(layer):
                    stack.enter_context(mock.patch.object(layer, f"{name}_gated_delta_rule", fn))
        yield calls


@dataclass
class Outcome:
    """logits of all prompt tokens, prefilled at once; in_parts: the same through the cache; tokens generated greedily.

    margin: the least distance between the best token and the next, over the RMS of logits.
    """

    logits: torch.Tensor
    in_parts: torch.Tensor
    tokens: list[list[int]]
    margin: float


@torch.no_grad()
def run(model: Qwen3NextForCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> Outcome:
    real = mask.bool()
    whole = model(ids, attention_mask=mask).logits[real]
    first = model(ids[:, :PART], attention_mask=mask[:, :PART], use_cache=True)
    second = model(ids[:, PART:], attention_mask=mask, past_key_values=first.past_key_values, use_cache=True)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False,
                         return_dict_in_generate=True, output_logits=True)
    best = torch.stack(out.logits).topk(2).values
    return Outcome(whole, torch.cat([first.logits, second.logits], 1)[real], out.sequences[:, ids.shape[1]:].tolist(),
                   ((best[..., 0] - best[..., 1]).min() / whole.square().mean().sqrt()).item())


def rms_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMSE over RMS."""
    return ((got - want).double().square().mean().sqrt() / want.double().square().mean().sqrt()).item()


@dataclass
class Verdict:
    logits: float
    in_parts: float
    tokens_equal: bool
    calls: int
    with_state: int
    steps: int

    @property
    def agrees(self) -> bool:
        """Written so that a NaN disagrees."""
        return self.logits <= TOLERANCE and self.in_parts <= TOLERANCE and self.tokens_equal and self.calls > 0


def compare(model: Qwen3NextForCausalLM, op, want: Outcome, step=None) -> Verdict:
    """The model with `op` and `step` against `want`, the outcome of the untouched model."""
    ids, mask = prompts(model)
    with replaced(model, op, step) as calls:
        got = run(model, ids, mask)
    return Verdict(rms_error(got.logits, want.logits), rms_error(got.in_parts, want.in_parts), got.tokens == want.tokens,
                   calls["chunk"], calls["chunk with state"], calls["recurrent with state"])


def generated(target: str, name: str = "chunk"):
    """The package's op for one target."""
    return partial(getattr(gdn_codegen, f"{name}_gated_delta_rule"), target=target)


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each target: errors of logits, equal tokens, numbers of calls, seconds. Returns the exit status: 1 if a
    target disagrees with the untouched model, or none ran."""
    parser = argparse.ArgumentParser(description="Run a small Qwen3-Next on generated ops, next to the untouched model.")
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="all")
    options = parser.parse_args(argv)

    model = small_model()
    want = run(model, *prompts(model))
    print(f"Qwen3-Next, {len(linear_layers(model))} linear layers of {model.config.num_hidden_layers}; prompts of "
          f"{' and '.join(map(str, LENGTHS))} tokens; RMSE/RMS of logits, "
          f"tolerance {TOLERANCE:.0e}; least margin of a token {want.margin:.1e}")
    print(f"{'target':10}{'logits':>10}{'in parts':>10}{'tokens':>9}{'calls':>7}{'steps':>7}{'seconds':>9}")
    verdicts = []
    for target in TARGETS if options.target == "all" else [options.target]:
        if not runs(target, "cpu"):
            print(f"{target:10}does not run here: gdn_codegen doctor")
            verdicts += [False] if options.target == target else []
            continue
        start = time.perf_counter()
        v = compare(model, generated(target), want, generated(target, "recurrent"))
        print(f"{target:10}{v.logits:10.1e}{v.in_parts:10.1e}{'equal' if v.tokens_equal else 'differ':>9}{v.calls:7}{v.steps:7}"
              f"{time.perf_counter() - start:9.1f}{'' if v.agrees else '  DISAGREES'}")
        verdicts.append(v.agrees)
    return 0 if verdicts and all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
