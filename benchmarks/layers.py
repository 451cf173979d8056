"""A layer of Qwen3-Next's size in its host, with the plug-in and without, ms: python benchmarks/layers.py [HOST ...]

Hosts: transformers (Qwen3NextGatedDeltaNet) and fla (GatedDeltaNet): 2048 wide, 16 and 32 heads, K = V = 128, convolutions of 4
tokens, bfloat16. Cases: prompts of 8192 and 32768 tokens, one step of 64 sequences from the cache, and a training step of 8192
tokens. A time is the median of --runs calls by CUDA's events, after two that compile. "served" counts calls of our op; calls
that fell back, and why a host has no time of its own, are said on stderr. --json FILE writes the rows. Each row is printed, and
written, once it is measured. --small makes a small layer, to try the program on a CPU. There FLA's kernels do not run, which
transformers calls, too: so the host's own times are missing, and so is fla, whose layer calls more of them than the op.
"""
from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gdn_codegen import integrations

SIZES: dict[bool, dict[str, int]] = {False: dict(width=2048, heads=16, value_heads=32, dim=128),
                                     True: dict(width=64, heads=1, value_heads=2, dim=32)}
#: By name: sequences, tokens of each.
CASES = {False: {"prefill 8192": (1, 8192), "prefill 32768": (1, 32768), "decode 64": (64, 1), "training step 8192": (1, 8192)},
         True: {"prefill 70": (1, 70), "decode 3": (3, 1), "training step 70": (1, 70)}}


class Host:
    """A host's layer. on, off: switch its plug-in. cache: makes an empty cache. run: (tokens, cache or None) -> the layer's
    output. on_cpu: whether the layer with the plug-in runs on a CPU."""

    layer: nn.Module
    on_cpu = True

    def on(self) -> None: ...
    def off(self) -> None: ...
    def cache(self) -> Any: ...
    def run(self, x: Tensor, cache: Any) -> Tensor: ...  # type: ignore[empty-body]


class Transformers(Host):
    """Qwen3-Next's layer in transformers."""

    def __init__(self, width: int, heads: int, value_heads: int, dim: int) -> None:
        from transformers import DynamicCache, Qwen3NextConfig
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
        config = Qwen3NextConfig(hidden_size=width, num_hidden_layers=1, layer_types=["linear_attention"],
                                 linear_num_key_heads=heads, linear_num_value_heads=value_heads, linear_key_head_dim=dim,
                                 linear_value_head_dim=dim)
        self.layer = Qwen3NextGatedDeltaNet(config, 0)
        self._cache = lambda: DynamicCache(config=config)

    def on(self) -> None:
        from gdn_codegen.integrations import transformers as plugin
        plugin.enable(self.layer)

    def off(self) -> None:
        from gdn_codegen.integrations import transformers as plugin
        plugin.disable(self.layer)

    def cache(self) -> Any:
        return self._cache()

    def run(self, x: Tensor, cache: Any) -> Tensor:
        out = self.layer(x, cache_params=cache)
        return out if isinstance(out, Tensor) else out[0]


class Fla(Host):
    """FLA's layer. Its convolution and norm are kernels of Triton that need a GPU; Triton's interpreter does not tune them."""

    on_cpu = False

    def __init__(self, width: int, heads: int, value_heads: int, dim: int) -> None:
        from fla.layers import GatedDeltaNet
        from fla.models.utils import Cache
        self.layer = GatedDeltaNet(hidden_size=width, expand_v=1, head_dim=dim, num_heads=heads, num_v_heads=value_heads,
                                   layer_idx=0)
        self.cache = Cache

    def on(self) -> None:
        from gdn_codegen.integrations import fla as plugin
        plugin.enable()

    def off(self) -> None:
        from gdn_codegen.integrations import fla as plugin
        plugin.disable()

    def run(self, x: Tensor, cache: Any) -> Tensor:
        out: Tensor = self.layer(x, past_key_values=cache, use_cache=cache is not None)[0]
        return out


HOSTS: dict[str, Any] = {"transformers": Transformers, "fla": Fla}


def calls(host: Host, name: str, x: Tensor) -> Callable[[], object]:
    """What a case times."""
    if name.startswith("training"):
        def step() -> None:
            host.layer.zero_grad(set_to_none=True)
            host.run(x, None).float().square().mean().backward()
        return step
    if name.startswith("prefill"):
        return torch.no_grad()(lambda: host.run(x, None))
    cache = host.cache()
    with torch.no_grad():
        host.run(x.repeat(1, 64, 1), cache)
    return torch.no_grad()(lambda: host.run(x, cache))


def ms(call: Callable[[], object], runs: int, on_gpu: bool) -> float:
    """The median time of a call."""
    times = []
    for n in range(runs + 2):
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times += [start.elapsed_time(end)] * (n > 1)
        else:
            first = time.perf_counter()
            call()
            times += [1000 * (time.perf_counter() - first)] * (n > 1)
    return statistics.median(times)


def own(host: Host, case: str, x: Tensor, runs: int) -> tuple[float, str]:
    """The host's own time, and why there is none: FLA refuses to train some layers on Hopper."""
    try:
        return ms(calls(host, case, x), runs, True), ""
    except Exception as e:  # whatever a host raises is a row of the table
        return math.nan, f"{type(e).__name__}: {e}".splitlines()[0][:200]


def measured(name: str, small: bool, runs: int, device: str) -> Iterator[dict[str, Any]]:
    """A row for each case of a host."""
    torch.manual_seed(0)
    host: Host = HOSTS[name](**SIZES[small])
    host.layer.to(device, torch.float32 if small else torch.bfloat16)
    for case, (sequences, tokens) in CASES[small].items():
        x = torch.randn(sequences, tokens, SIZES[small]["width"], device=device, dtype=next(host.layer.parameters()).dtype)
        row: dict[str, Any] = {"host": name, "case": case}
        host.off()
        row["own_ms"], row["own_error"] = own(host, case, x, runs) if device == "cuda" else (math.nan, "")
        host.on()
        integrations.reset()
        row["ms"] = ms(calls(host, case, x), runs, device == "cuda")
        said = integrations.report(name).splitlines()
        row |= {"served": sum(int(s.rsplit(": ", 1)[1]) for s in said if ": served: " in s),
                "fell_back": [s for s in said if ": left to the host" in s]}
        host.off()
        yield row


def show(row: dict[str, Any]) -> None:
    """Print a row, whatever comes after it."""
    print(f"| {row['host']} | {row['case']} | {row['own_ms']:.3f} | {row['ms']:.3f} | {row['own_ms'] / row['ms']:.2f} | "
          f"{row['served']} |", flush=True)
    for said in (row["own_error"] and f"{row['host']}, {row['case']}: {row['own_error']}", *row["fell_back"]):
        if said:
            print(said, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", metavar="HOST", help=f"of {', '.join(HOSTS)} (default: all)")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    a = parser.parse_args(argv)
    for name in a.hosts:
        if name not in HOSTS:
            parser.error(f"HOST: got {name!r}; accepted: {', '.join(HOSTS)}")
    if a.runs < 1:
        parser.error(f"--runs: got {a.runs}; accepted: at least 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not a.small:
        parser.error("no GPU that torch sees: accepted on a CPU: --small")
    hosts = [n for n in a.hosts or HOSTS if device == "cuda" or HOSTS[n].on_cpu or a.hosts]
    for name in hosts:
        if device == "cpu" and not HOSTS[name].on_cpu:
            parser.error(f"HOST: got {name!r} on a CPU, where its convolution and norm do not run; accepted there: "
                         f"{', '.join(n for n in HOSTS if HOSTS[n].on_cpu)}")
    rows: list[dict[str, Any]] = []
    print("| host | case | its own, ms | with the plug-in, ms | own / ours | served |\n| --- | --- | ---: | ---: | ---: | ---: |",
          flush=True)
    for name in hosts:
        for row in measured(name, a.small, a.runs, device):
            show(row)
            rows.append(row)
            if a.json:
                with open(a.json, "w") as f:
                    json.dump({"device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                               "torch": torch.__version__, "rows": rows}, f, indent=1)
    return int(any(not r["served"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
