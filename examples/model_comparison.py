"""Compares a small model of another package with itself on generated ops. The examples beside this file share it.

An example says how its model is made and which functions of the model's own modules the package's ops replace. Layers, caches and
generation stay those of the model's package. Prompts are processed at once, in two parts through the cache, for generation, and
packed in one row.
"""
from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from unittest import mock

import torch

import gdn_codegen
from gdn_codegen import targets
from gdn_codegen.runtime.targets import runs

TARGETS = targets.names()
#: RMSE over RMS that logits may differ by. Models are float32 and so are the ops: with 16 bits the rounding of inputs alone, the
#: op left as it is, moves a token to another expert and so changes what is generated.
TOLERANCE = 1e-5
#: The same where products of float32 have operands of tf32, as TileLang's on a GPU. The model's own op, with operands rounded so,
#: changes logits by 0.03 in a model that thereby moves tokens to other experts, and by 5e-4 in others.
TOLERANCE_TF32 = 0.1
NEW = 16  # tokens that are generated
STATES = ("initial_state", "initial_states")


@dataclass(frozen=True)
class Example:
    """A model, and which of its functions ops of the package replace.

    model: makes it. layer: how the class names of its linear layers end. prompt: the function of the model's modules that
    computes prompts, and the op of the package in its place. step: the same for a single token after others. own: the model's
    own code in torch, where it is not the function itself. also: functions that are replaced in every run, because the model's
    own do not run on a CPU. lengths: tokens of the two prompts; neither is a whole number of chunks, and the second is padded
    on the left. part: tokens of the first part where a prompt comes in two. ends: the argument by which the model takes the ends
    of packed prompts; "" where it takes none.
    """

    title: str
    model: Callable[[], torch.nn.Module]
    layer: str
    prompt: tuple[str, str]
    step: tuple[str, str]
    own: Mapping[str, Callable] = field(default_factory=dict)
    also: Mapping[str, Callable] = field(default_factory=dict)
    lengths: tuple[int, int] = (75, 52)
    part: int = 40
    ends: str = "cu_seqlens"


def linear_layers(example: Example, model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith(example.layer)]


def prompts(example: Example, model: torch.nn.Module, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, padded on the left, on the model's device."""
    gen = torch.Generator().manual_seed(seed)
    T = max(example.lengths)
    ids = torch.randint(3, model.config.vocab_size, (len(example.lengths), T), generator=gen)
    mask = torch.stack([torch.arange(T) >= T - n for n in example.lengths]).long()
    return (ids * mask).to(model.device), mask.to(model.device)


def own_functions(example: Example, model: torch.nn.Module) -> tuple[Callable, Callable]:
    """What the model calls for prompts and for single tokens, in torch. transformers wraps it to choose another package's kernels
    where that is installed."""
    modules = _modules(model)
    return tuple(example.own.get(name) or inspect.unwrap(next(getattr(m, name) for m in modules if hasattr(m, name)))
                 for name in (example.prompt[0], example.step[0]))


def generated(example: Example, target: str) -> tuple[Callable, Callable]:
    """The package's ops for one target."""
    return tuple(partial(getattr(gdn_codegen, name), target=target) for name in (example.prompt[1], example.step[1]))


def _modules(model: torch.nn.Module) -> list:
    return [sys.modules[n] for n in sorted({type(m).__module__ for m in model.modules()})]


def counted(op: Callable, calls: Counter, name: str) -> Callable:
    """`op` as it is, called by the model as it calls its own. `calls` counts calls, and those given a state."""
    def call(*args, **options):
        calls[name] += 1
        calls[f"{name} with state"] += any(options.get(n) is not None for n in STATES)
        return op(*args, **options)

    return call


@contextmanager
def replaced(example: Example, model: torch.nn.Module, prompt: Callable, step: Callable):
    """Inside, linear layers of `model` call `prompt` for prompts and `step` for a single token after others. Yields the counter
    of calls."""
    calls: Counter = Counter()
    ours = {example.prompt[0]: counted(prompt, calls, "prompt"), example.step[0]: counted(step, calls, "step")}
    with ExitStack() as stack:
        for name, f in {**example.also, **ours}.items():
            for module in _modules(model):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, f))
            for layer in linear_layers(example, model):  # where transformers before 5.23 looks a function up
                if name.removeprefix("torch_") in vars(layer):
                    stack.enter_context(mock.patch.object(layer, name.removeprefix("torch_"), f))
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
def run(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, part: int) -> Outcome:
    """The model on two prompts. part: tokens of the first part."""
    real = mask.bool()
    whole = model(ids, attention_mask=mask).logits[real]
    first = model(ids[:, :part], attention_mask=mask[:, :part], use_cache=True)
    cache = "cache_params" if "cache_params" in first else "past_key_values"
    second = model(ids[:, part:], attention_mask=mask, use_cache=True, **{cache: first[cache]})
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                         return_dict_in_generate=True, output_logits=True)
    best = torch.stack(out.logits).topk(2).values
    return Outcome(whole, torch.cat([first.logits, second.logits], 1)[real], out.sequences[:, ids.shape[1]:].tolist(),
                   ((best[..., 0] - best[..., 1]).min() / whole.square().mean().sqrt()).item())


def outcome(example: Example, model: torch.nn.Module, prompt: Callable, step: Callable) -> tuple[Outcome, Counter]:
    """What the model gives with these two functions, and the counter of their calls."""
    with replaced(example, model, prompt, step) as calls:
        return run(model, *prompts(example, model), example.part), calls


def reference(example: Example, model: torch.nn.Module) -> Outcome:
    """What the model gives with its own functions."""
    return outcome(example, model, *own_functions(example, model))[0]


@torch.no_grad()
def packed(example: Example, model: torch.nn.Module, prompt: Callable, step: Callable) -> torch.Tensor:
    """Logits of both prompts, one after another in one row, where `prompt` keeps them apart. The convolutions of transformers
    do not in torch, so they are called for each sequence."""
    ids, mask = prompts(example, model)
    lengths = mask.sum(1)
    said = {example.ends: torch.nn.functional.pad(lengths.cumsum(0), (1, 0))}
    if "position_ids" in inspect.signature(model.forward).parameters:  # by which full attention keeps sequences apart
        said["position_ids"] = torch.cat([torch.arange(int(n), device=ids.device) for n in lengths])[None]
    name, also = "causal_conv1d_fn", dict(example.also)
    for convolution in (getattr(m, name) for m in _modules(model) if hasattr(m, name)):
        also[name] = _by_sequence(convolution, lengths.tolist())
    with replaced(replace(example, also=also), model, prompt, step):
        return model(ids[mask.bool()][None], use_cache=False, **said).logits[0]


def _by_sequence(convolution: Callable, lengths: list[int]) -> Callable:
    def call(x, *args, **options):
        return torch.cat([inspect.unwrap(convolution)(y, *args, **options) for y in x.split(lengths, -1)], -1)
    return call


def rms_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMSE over RMS."""
    return ((got - want).double().square().mean().sqrt() / want.double().square().mean().sqrt()).item()


@dataclass
class Verdict:
    """Errors of an outcome's logits, whether its tokens are those wanted, and how often the two functions were called. packed:
    the error of packed prompts, None where the model takes none or they were not asked for."""

    logits: float
    in_parts: float
    tokens_equal: bool
    calls: int
    with_state: int
    steps: int
    packed: float | None = None
    tolerance: float = TOLERANCE

    @property
    def agrees(self) -> bool:
        """Written so that a NaN disagrees."""
        errors = (self.logits, self.in_parts, *([] if self.packed is None else [self.packed]))
        return all(x <= self.tolerance for x in errors) and self.tokens_equal and self.calls > 0 and self.steps > 0


def compare(example: Example, model: torch.nn.Module, prompt: Callable, step: Callable, want: Outcome,
            packs: bool = False, tolerance: float = TOLERANCE) -> Verdict:
    """The model with two functions against `want`, the outcome of its own. packs: whether prompts are packed, too, which the
    model's own code in torch does not take."""
    got, calls = outcome(example, model, prompt, step)
    error = rms_error(packed(example, model, prompt, step), want.logits) if packs and example.ends else None
    return Verdict(rms_error(got.logits, want.logits), rms_error(got.in_parts, want.in_parts), got.tokens == want.tokens,
                   calls["prompt"], calls["prompt with state"], calls["step"], error, tolerance)


def _line(target: str, v: Verdict, seconds: float) -> str:
    packed = "-" if v.packed is None else f"{v.packed:.1e}"
    return (f"{target:10}{v.logits:10.1e}{v.in_parts:10.1e}{packed:>10}{'equal' if v.tokens_equal else 'differ':>9}"
            f"{v.calls:7}{v.steps:7}{seconds:9.1f}{'' if v.agrees else '  DISAGREES'}")


def main(example: Example, argv: list[str] | None = None) -> int:
    """Prints a line for each target: errors of logits, equal tokens, numbers of calls, seconds. Returns the exit status: 1 if a
    target disagrees with the model's own code, or none ran."""
    parser = argparse.ArgumentParser(description=f"Run a small {example.title} on generated ops, next to its own code.")
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu",
                        help="default: a GPU where there is one")
    options = parser.parse_args(argv)

    model = example.model().to(options.device)
    want = reference(example, model)
    print(f"{example.title} on {options.device}, {len(linear_layers(example, model))} linear layers of "
          f"{model.config.num_hidden_layers}; prompts of {' and '.join(map(str, example.lengths))} tokens; RMSE/RMS of logits; "
          f"least margin of a token {want.margin:.1e}")
    print(f"{'target':10}{'logits':>10}{'in parts':>10}{'packed':>10}{'tokens':>9}{'calls':>7}{'steps':>7}{'seconds':>9}")
    verdicts = []
    for target in TARGETS if options.target == "all" else [options.target]:
        if not runs(target, options.device):
            print(f"{target:10}does not run here: gdn_codegen doctor")
            verdicts += [False] if options.target == target else []
            continue
        start = time.perf_counter()
        tolerance = TOLERANCE_TF32 if (target, options.device) == ("tilelang", "cuda") else TOLERANCE
        v = compare(example, model, *generated(example, target), want, packs=True, tolerance=tolerance)
        print(_line(target, v, time.perf_counter() - start))
        verdicts.append(v.agrees)
    return 0 if verdicts and all(verdicts) else 1
