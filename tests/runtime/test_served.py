"""What a model's server calls is made beforehand: dispatch says which builds these are, and first calls compile nothing."""
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from devices import H200

from gdn_codegen import cli, models
from gdn_codegen.models import MODELS, Calls, Model
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.call import launch
from gdn_codegen.runtime.call.arguments import Options, Tensors
from gdn_codegen.runtime.call.device import described
from gdn_codegen.runtime.call.normalise import settled
from gdn_codegen.runtime.call.request import Call, call_of
from gdn_codegen.runtime.call.tables import Extent, least, power
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.tools import served
from gdn_codegen.tools.served import Kind, Most, Served, asked, builds

ROOT = Path(__file__).parents[2]
NEXT = MODELS["qwen3-next"]
#: What vLLM passes for it, in prefill and in steps.
ACCEPT = NEXT.engines["vllm"].decode[0]
ONE = replace(NEXT, engines={"vllm": NEXT.engines["vllm"]})
#: Models small enough to compile in a test.
KIMI = replace(MODELS["kimi-k3"], heads=(2, 2), head_dims=(16, 16), dtype="float16")
SMALL = Model((1, 2), (16, 16), "float16", engines={"vllm": Calls((ACCEPT,), (ACCEPT,), (*models.SLOTS, *models.BUFFERS))})


# --- the table --------------------------------------------------------------------------------------------------------
def test_a_model_is_found_by_its_name_or_refused_with_the_names_that_are():
    assert models.find("qwen3-next").heads == (16, 32) and models.find("qwen3.5-27b").share(4) == (4, 12)
    assert models.find("qwen3.5-2b").heads == (16, 16) and models.find("qwen3.5-122b-a10b").heads == (16, 64)
    assert models.find("kimi-linear").algorithm == "kimi_delta_attention" and models.find("kimi-k3").share(8) == (12, 12)
    for name, said in (("qwen3.5", ", whose sizes differ in heads; accepted: qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b"),
                       ("qwen", "; accepted: qwen3-next, "), ("", "; accepted: qwen3-next, ")):
        with pytest.raises(ValueError, match=f"^model: got '{name}'{said}"):
            models.find(name)
    for n in (0, 3, 32):
        with pytest.raises(ValueError, match=f"^tensor_parallel: got {n}, for 16/32 heads; accepted: 1, 2, 4, 8, 16$"):
            NEXT.share(n)


def test_the_models_are_those_of_their_configurations():
    transformers = pytest.importorskip("transformers")
    for name, config in (("qwen3-next", "Qwen3NextConfig"), ("qwen3.5-9b", "Qwen3_5TextConfig"),
                         ("qwen3.5-35b-a3b", "Qwen3_5MoeTextConfig"), ("olmo-hybrid-7b", "OlmoHybridConfig"),
                         ("kimi-linear", "KimiLinearConfig"), ("glm-5.3-flash", "Glm5NextTextConfig"),
                         ("ling-3.0-flash", "BailingHybridConfig")):
        x, m = getattr(transformers, config)(), MODELS[name]
        if hasattr(x, "linear_num_key_heads"):
            assert m.heads == (x.linear_num_key_heads, x.linear_num_value_heads)
            assert m.head_dims == (x.linear_key_head_dim, x.linear_value_head_dim)
        else:
            assert m.heads == (x.linear_num_heads,) * 2 and m.head_dims == (x.linear_head_dim,) * 2


def passed(m, extent, contract, views=False):
    """The tensors and options of a server's call."""
    H, HV, n, tokens = extent.H, extent.HV, extent.sequences, extent.tokens
    (K, V), dtype = m.head_dims, getattr(torch, m.dtype)
    row = torch.zeros(1, tokens, 2 * H * K + HV * V + views, dtype=dtype)
    q, k, v = (x.unflatten(-1, (h, -1)) for x, h in zip(row[..., :-1 if views else None].split([H * K, H * K, HV * V], -1),
                                                         (H, H, HV), strict=True))
    if not views:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    a, b = (torch.zeros(1, tokens, HV, dtype=getattr(torch, contract.dtype(x))) for x in ("g", "beta"))
    of_heads = [torch.zeros(HV, dtype=getattr(torch, contract.dtype(x))) for x in ("A_log", "dt_bias")]
    pool = torch.zeros(n + 1, HV, V, K, dtype=getattr(torch, contract.state_dtype))
    ends = torch.linspace(0, tokens, n + 1).int()
    given = dict(zip(("q", "k", "v", "g", "beta", "A_log", "dt_bias"), (q, k, v, a, b, *of_heads), strict=True))
    return given | {"initial_state": pool, "state_indices": torch.arange(n, dtype=torch.int32), "cu_seqlens": ends,
                    "use_qk_l2norm_in_kernel": True, "gate": "raw", "beta_form": "sigmoid", "state_v_first": True}


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("decode", [False, True])
def test_the_contract_is_that_of_a_servers_call(decode, views):
    contract = replace(Contract.parse(ACCEPT), strided=views)
    x = Extent(2, 4, 3, 9, packed=True)
    all_of = passed(ONE, x, contract, views)
    t = Tensors(**{n: all_of.get(n) for n in Tensors._fields})
    o = Options(False, True, False, None, "raw", "sigmoid", False, True, None, None, "auto", None)
    call = call_of(t, settled(t, o, decode))
    request = asked(Kind(contract, decode), "auto")
    want = Call(request, torch.bfloat16, torch.device("cpu"), (128, 128), x, contract, True, True, True)
    assert call == want and call.extent == x


@pytest.mark.parametrize("words, given", list(zip((*models.SLOTS, *models.BUFFERS), (
    {"state_indices": torch.zeros(3, 3, dtype=torch.int32), "num_accepted_tokens": torch.ones(3, dtype=torch.int32)},
    {"intermediate_states_buffer": torch.zeros(3, 3, 4, 128, 128, dtype=torch.bfloat16)},
    {"intermediate_states_buffer": torch.zeros(3, 3, 4, 128, 128, dtype=torch.bfloat16),
     "retrieve_parent_token": torch.zeros(3, 3, dtype=torch.int32)}), strict=True)))
def test_the_contract_is_that_of_a_step_that_verifies(words, given):
    x = Extent(2, 4, 3, 9, packed=True)
    kind = next(k for k in Served(speculative=True).kinds(SMALL) if k.contract.words_by_token == words.removeprefix("in_place/"))
    contract = kind.contract
    all_of = {**passed(ONE, x, contract), **given}
    t = Tensors(**{n: all_of.get(n) for n in Tensors._fields})
    o = Options(False, True, False, None, "raw", "sigmoid", False, True, None, False if "frozen" in words else None, "auto", None)
    call = call_of(t, settled(t, o, True))
    want = Call(asked(kind, "auto"), torch.bfloat16, torch.device("cpu"), (128, 128), x, contract, True, True,
                "frozen" not in words)
    assert call == want


# --- which builds -----------------------------------------------------------------------------------------------------
def test_the_least_number_of_each_class():
    assert [least(n) for n in range(6)] == [1, 2, 3, 6, 12, 23]
    assert all(power(least(n)) == n and power(least(n) - 1) < n for n in range(1, 40))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["NVIDIA H200", "sm_80 x 108"])
def test_calls_of_all_extents_get_builds_that_are_made(device):
    """Extents between those that are asked for, of each kind of call."""
    on, most = described(device), Most(40000, 24)
    heads = NEXT.share(4)
    found = builds(ONE, heads, on, most=most)
    assert len(found) > 6 and any("prefill" in c for calls in found.values() for c in calls)
    contract, got = Contract.parse(ACCEPT), set()
    for n in (1, 2, 5, 9, 24):
        prompts, steps = {n, n + 1, 2 * n, *range(n, 40001, 777), 40000}, range(n, 16 * n + 1)
        for tokens, decode in (*((t, False) for t in prompts), *((t, True) for t in steps)):
            x = Extent(*heads, n, tokens)
            call = Call(asked(Kind(contract, decode), "auto"), torch.bfloat16, torch.device("cuda"), (128, 128), x, contract)
            got.add(launch.chosen(call, on))
    assert got <= set(found) and {replace(b, contract=replace(b.contract, strided=True)) for b in got} <= set(found)


@pytest.mark.slow
def test_heads_and_the_device_decide():
    """Of one contract: with more heads on a device, other builds; without a GPU, those of the CPU."""
    few, many = (set(builds(ONE, NEXT.share(n), H200, "tilelang", Most(4096, 2))) for n in (8, 1))
    assert few != many and {b.arch for b in few if b.plan.partition} == {"sm_90a"}
    on_cpu = builds(SMALL, (1, 2), described("cpu"), "tilelang", Most(64, 1))
    assert {(b.target, b.arch, b.chunk) for b in on_cpu} == {("tilelang", "", 64), ("tilelang", "", 16)}
    assert sorted(calls[-1] for calls in on_cpu.values()) == ["decode 1 x 16"] * 2 + ["prefill 1 x 64"] * 2


# --- the command ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words, said", [
    (["--model", "x"], "model: got 'x'; accepted: "), (["--model", "qwen3.5"], "model: got 'qwen3.5', whose sizes differ"),
    (["--model", "olmo-hybrid-7b", "--engine", "sglang"], "engine: got 'sglang' for olmo-hybrid-7b; accepted: vllm"),
    (["--engine", "vllm"], "engine: got 'vllm' without --model"),
    (["--prefix-caching"], "prefix_caching: got True without --model"), (["--jobs", "2"], "jobs: got 2 without --model"),
    (["--model", "kimi-k3", "--jobs", "0"], "jobs: got 0; accepted: 1 or more"),
    (["--model", "kimi-k3", "--jobs", "2"], "jobs: got 2 without --compile; accepted: with --compile"),
    (["--model", "olmo-hybrid-7b", "--prefix-caching"], "prefix_caching: got True for olmo-hybrid-7b, of which"),
    (["--model", "ling-3.0-flash", "--engine", "vllm", "--speculative"], "speculative: got True for ling-3.0-flash, of"),
    (["--state-dtype", "float32"], "state_dtype: got 'float32' without --model"),
    (["--model", "qwen3-next", "--tensor-parallel", "5"], "tensor_parallel: got 5, for 16/32 heads"),
    (["--model", "qwen3-next", "--tensor-parallel", "0"], "tensor_parallel: got 0; accepted: 1 or more"),
    (["--model", "qwen3-next", "--sequences", "0"], "sequences: got 0; accepted: 1 or more"),
    (["--model", "qwen3-next", "--device", "x"], "device: got 'x'; accepted: NVIDIA H200, "),
    (["--model", "qwen3-next", "--chunk", "64"], "chunk: got 64 with --model; accepted: no --chunk"),
    (["--model", "qwen3-next", "--dtype", "float32"], "dtype: got 'float32' with --model; accepted: no --dtype"),
    (["--model", "qwen3-next", "--accept", "x=y"], "accept: got 'x=y'"),
    (["--model", "qwen3-next", "--target", "pto"], "target: got 'pto', and it has no kernels for cuda"),
    (["--model", "qwen3-next", "--compile", "sm_80"], "compile: got 'sm_80' for NVIDIA H200; accepted: sm_90a"),
    (["--tensor-parallel", "2"], "tensor_parallel: got 2 without --model; accepted: with --model"),
    (["--speculative"], "speculative: got True without --model; accepted: with --model"),
    (["--tokens", "2"], "tokens: got 2 without --model")])
def test_what_is_refused(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path))
    given = ["--device", "NVIDIA H200"] if "--model" in words and "--device" not in words else []
    assert cli.main(["build", *words, *given]) == 2
    assert capsys.readouterr().err.startswith(f"gdn_codegen: {said}") and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not runs("tilelang", "cpu"), reason="needs tilelang and a C compiler")
@pytest.mark.parametrize("jobs", [1, 2])
def test_builds_are_made_side_by_side_or_one_by_one(jobs, tmp_path, monkeypatch):
    """The same files. What fails in a process of its own is raised here, and ends the others."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    small = dict(chunk=16, head_dim_k=16, head_dim_v=16)
    builds = [Build("tilelang", layout=x, **small) for x in ("bthd", "bhtd")]
    found = {b: (path, lines) for b, path, lines in served.made(builds, tmp_path, "cpu", (1, 2), jobs)}
    assert set(found) == set(builds)
    for b, (path, lines) in found.items():
        assert path == tmp_path / "tilelang" / f"{b.name}.py" and lines[0] == f"{path}: {path.stat().st_size} bytes"
        assert len(lines) == 2 and "in TileLang's cache" in lines[1] and path.read_text() == render(b)
    pto = [Build("pto", layout=x, heads=(1, 2), **small) for x in ("bthd", "bhtd")]
    with pytest.raises(ValueError, match=r"^compile: got pto, whose kernels compile on first use"):
        list(served.made([*pto, *builds], tmp_path, "sm_90a", (1, 2), jobs))


def test_where_there_is_no_gpu_the_device_is_asked_for():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"^device: got none, where torch sees no GPU; accepted: --device"):
        served.device_of(None)


def environment(cache):
    """Variables of a process with caches in a folder, that finds the tests' modules."""
    return {**os.environ, "GDN_CODEGEN_CACHE": str(cache / "ours"), "TILELANG_CACHE_DIR": str(cache / "tilelang"),
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))}


def called(cache, *what):
    """Runs first_calls.py. The only compilers are files that fail: TileLang asks whether there is one."""
    for name in ("g++", "gcc", "cc", "nvcc"):
        fails = cache / "bin" / name
        fails.parent.mkdir(exist_ok=True)
        fails.write_text("#!/bin/sh\nexit 1\n")
        fails.chmod(0o755)
    env = {n: x for n, x in environment(cache).items() if n not in ("CC", "CXX")} | {"PATH": str(cache / "bin")}
    command = [sys.executable, Path(__file__).with_name("first_calls.py"), *what]
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(not runs("tilelang", "cpu"), reason="needs tilelang and a C compiler")
@pytest.mark.parametrize("model, words, number, what", [
    ("KIMI", "--engine vllm --prefix-caching", 7, ["kimi"]), pytest.param("SMALL", "", 4, ["plain"], marks=pytest.mark.long),
    pytest.param("SMALL", "--speculative", 10, ["plain", "drafts"], marks=pytest.mark.long)])
def test_first_calls_compile_nothing(tmp_path, model, words, number, what):
    """On the CPU, in a fresh process that may start no other. What was not made would start a compiler."""
    command = (f"from gdn_codegen import cli, models; from test_served import {model}; models.MODELS['small'] = {model}; "
               "raise SystemExit(cli.main('build --model small --target tilelang --device cpu --compile cpu --tokens 256 "
               f"--sequences 3 --jobs 1 {words}'.split()))")
    done = subprocess.run([sys.executable, "-c", command], env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("in TileLang's cache") == number, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{number} builds: ")
    first = called(tmp_path, *what)
    assert first.stdout == "called []\nstarted True\n", first.stderr
