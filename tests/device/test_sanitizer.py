"""Kernels of warp groups under compute-sanitizer: racecheck, memcheck, synccheck. Run with: pytest -m device tests/device"""
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from reference import call, expected, problem, rms_error

from gdn_codegen.host.parts import _needs_summaries
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import import_path, write
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract

TOOLS = ("racecheck", "memcheck", "synccheck")
on_hopper = [pytest.mark.device, pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not runs("tilelang", "cuda"),
    reason="needs a Hopper GPU and TileLang"), pytest.mark.skipif(not shutil.which("compute-sanitizer"),
                                                                  reason="needs compute-sanitizer")]
EARLY = {"agents": "early_outputs"}
#: Of each: schedule, fields, dtype, and the mean of g. Where gates forget little, parts of a chunk make summaries.
KERNELS = {"fused": ("fused_walk", {}, "float16", -0.5),
           "fused-bf16": ("fused_walk", {}, "bfloat16", -0.5),
           "fused-parts": ("fused_walk", {"partition": "decay", "part_chunks": 2}, "float16", -0.5),
           "fused-persistent": ("fused_walk", {"persistent": True}, "float16", -0.5),
           "fused-summaries": ("fused_walk", {"partition": "decay", "part_chunks": 1}, "float16", -0.001),
           "walk": ("walk", {}, "float16", -0.5),
           "walk-parts": ("walk", {"partition": "decay", "part_chunks": 2, "longest_first": True}, "float16", -0.5),
           "walk-summaries": ("walk", {"partition": "decay", "part_chunks": 1}, "float16", -0.001),
           "walk-2-heads": ("walk", {"value_heads": 2}, "float16", -0.5),
           "walk-4-heads-parts": ("walk", {"value_heads": 4, "partition": "decay", "part_chunks": 2}, "bfloat16", -0.5),
           "in-turn": ("walk_in_turn", {}, "bfloat16", -0.5),
           "in-turn-halves-parts": ("walk_in_turn", {"v_block": 64, "partition": "decay", "part_chunks": 2}, "bfloat16", -0.5),
           "operands": ("operand_walk", {"v_block": 64, "residuals": "@update"}, "bfloat16", -0.5),
           "operands-parts": ("operand_walk", {"v_block": 64, "partition": "decay", "part_chunks": 2}, "bfloat16", -0.5),
           "early-outputs": ("operand_walk", {"v_block": 64, "residuals": "@update", **EARLY}, "bfloat16", -0.5),
           "early-outputs-parts": ("operand_walk", {"v_block": 64, "partition": "decay", "part_chunks": 2, **EARLY}, "bfloat16",
                                   -0.5),
           "pipelined": ("operand_walk", {"v_block": 64, "partition": "pipelined", "part_chunks": 1, **EARLY}, "bfloat16", -0.5)}
#: Tokens of a sequence whose parts of a chunk need summaries.
LONG = 705
#: What is broken, in which kernel, which tool must say so, and how the text is broken: a wait left out, one that comes after what
#: it is for (left out, solve runs two turns ahead, and state waits forever: a tool says nothing before the end), a barrier of a
#: warp left out, tails read past their end.
BROKEN = {"state does not wait for gates": ("fused", "racecheck", r"^ +T\.barrier_wait\(exp_G_shared_ready.*\n", ""),
          "solve does not wait for what it inverts": ("fused", "racecheck",
                                                    r"^( +T\.barrier_wait\(k_kT_D_beta_f16_shared_ready.*\n)"
                                                    r"((?:.*\n)*?)"
                                                    r"(?= +T\.fence_proxy_async)", r"\2\1"),
          "a warp inverts what its threads have not stored": ("in-turn", "racecheck", r"^ +T\.sync_warp\(\)\n"
                                                            r"(?= +# \w+ = unit_lower_inverse)", ""),
          "gates past the end": ("fused", "memcheck", r"if_then_else\(i < rows", "if_then_else(i < C")}


def text_of(name, folder):
    schedule, fields, dtype, _ = KERNELS[name]
    page = {"algorithm": "kimi_delta_attention", "contract": Contract.parse("g=floored")} if of_channels(name) else {}
    chunk = 16 if schedule == "walk_in_turn" else 64
    b = Build("tilelang", chunk, schedule=varied(schedule, "sm_90a", **fields), dtype=dtype, arch="sm_90a", **page)
    return write(b, folder)


def of_channels(name):
    """Whether kernels are of KDA. Its channels get the same gates, so that the same recurrence is expected."""
    return KERNELS[name][0] in ("walk_in_turn", "operand_walk")


def broken(name, folder):
    """The module of a kernel with a fault."""
    kernel, _, pattern, instead = BROKEN[name]
    path = text_of(kernel, folder)
    text, n = re.subn(pattern, instead, path.read_text(), flags=re.M)
    assert n, f"nothing to break for: {name}"
    path.write_text(text)
    return path


def sanitized(path, name, tools):
    """What each tool says of a call, in a process of its own: its exit status, its summary, and all of it."""
    module = import_path(path)
    for k in module._launcher.kernels:  # into TileLang's cache, by its text
        module._launcher.compiled(k, "sm_90a")
    # each tensor is an allocation of its own, or memcheck does not see where it ends
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
           "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    def run(tool):
        words = "compute-sanitizer", "--tool", tool, sys.executable, __file__, str(path), name
        p = subprocess.run(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400)
        return p.returncode, " ".join(re.findall(r"SUMMARY: .*", p.stdout)), p.stdout[-3000:]

    with ThreadPoolExecutor() as pool:
        return dict(zip(tools, pool.map(run, tools), strict=True))


def found(summary):
    """How many errors and warnings a tool counts, None if it counts nothing. racecheck warns of a race within a warp."""
    numbers = re.findall(r"(\d+) (?:error|warning)", summary)
    return sum(map(int, numbers)) if numbers else None


def lengths_of(name):
    """Sequences with tails, without tokens, of whole chunks. Persistent walks are more than a GPU has multiprocessors.
    Summaries are made where a sequence has more chunks than the longest warm-up."""
    if KERNELS[name][1].get("persistent"):
        return [65, 0, 30, 64] * 12
    return [LONG if name.endswith("summaries") else 321, 64, 0, 30]


def one_call(path, name):
    """In the process that is looked at: a call, beside float64."""
    _, _, dtype, gate = KERNELS[name]
    lengths = lengths_of(name)
    x = problem(lengths, 1, 4, 128, 128, getattr(torch, dtype), gate=gate)
    module = import_path(Path(path))
    fn = getattr(module, module.TABLES.function)
    move = lambda t: t.cuda() if isinstance(t, torch.Tensor) else t
    gates = x["g"][:, :, None].expand(*x["g"].shape, 128) if of_channels(name) else x["g"]
    got = call(lambda *a, **k: fn(*map(move, a), **{n: move(t) for n, t in k.items()}), {**x, "g": gates})
    errors = [rms_error(t.cpu(), want) for t, want in zip(got, expected(x), strict=True)]
    assert max(errors) < 5e-3, errors


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("name", KERNELS)
    def test_nothing_is_found(self, name, tmp_path):
        for tool, (status, summary, said) in sanitized(text_of(name, tmp_path), name, TOOLS).items():
            assert status == 0 and found(summary) == 0, f"{tool}: {summary}\n{said}"

    @pytest.mark.parametrize("name", BROKEN)
    def test_what_is_broken_is_found(self, name, tmp_path):
        kernel, tool, *_ = BROKEN[name]
        _, summary, said = sanitized(broken(name, tmp_path), kernel, (tool,))[tool]
        assert found(summary), f"{tool}: {summary}\n{said}"


@pytest.mark.parametrize("name", [n for n in KERNELS if n.endswith("summaries")])
def test_calls_with_summaries_make_them(name, tmp_path):
    """Without a GPU: the longest sequence needs them, so that the host launches their kernels, and slow heads take them."""
    t = import_path(text_of(name, tmp_path)).TABLES
    needs = partial(_needs_summaries, span=1, most=t.most, cost=t.part_cost)
    assert needs(-(-LONG // 64)) and not needs(-(-321 // 64)) and lengths_of(name)[0] == LONG and len(t.summaries) == 3


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_to_be_broken_is_there(name, tmp_path):
    """Without a GPU: the faults are still faults of the text."""
    compile(broken(name, tmp_path).read_text(), name, "exec")


if __name__ == "__main__":
    one_call(*sys.argv[1:])
