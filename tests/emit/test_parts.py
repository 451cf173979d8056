"""Parts side by side in generated modules: Triton in its interpreter, TileLang by its C backend, few chunks a part."""
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from reference import call, check, expected, in_parts, module, problem, rms_error

from gdn_codegen.cli import main
from gdn_codegen.host.parts import _needs_summaries
from gdn_codegen.passes.cut.partition import BOUND
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import SCHEDULES, named

pytestmark = pytest.mark.slow

#: Closer than TOLERANCE: what is forgotten must not show.
TIGHT = {"float16": 1e-3, "bfloat16": 5e-3, "float32": 1e-6}


def build(target, schedule, partition, dtype="float16", v_block=0, longest_first=False, **options):
    plan = replace(named(schedule), partition=partition, v_block=v_block, longest_first=longest_first)
    return Build(target, 16, schedule=plan, dtype=dtype, head_dim_k=16, head_dim_v=32, **options)


BUILDS = [build("triton", *x) for x in (("replay", "decay"), ("prepared", "exact", "float32"),
                                        ("walk", "decay", "float16", 16, True), ("walk", "decay", "bfloat16"))]
#: What the four above show, of other schedules.
ALIKE = [build("triton", "fused", "exact", "bfloat16"), build("triton", "staged", "decay", "float16", 16)]
#: A kernel takes seconds to compile: one module each.
BUILDS += [build("tilelang", "replay", "decay", layout="bhtd"), build("tilelang", "fused", "exact", v_block=16)]


#: What heads forget: within a chunk, in two, in many, never; the last mostly at once, with a quiet stretch.
GATES = (-3.0, -0.6, -0.2, 0.0, -5.0)


def mixed(lengths, dtype="float16", heads=1, seed=0, gates=GATES, **options):
    """A problem with so many value heads a key head, one a gate."""
    n = len(gates)
    x = problem(lengths, heads, n * heads, 16, 32, getattr(torch, dtype), seed=seed, **options)
    for h, g in enumerate(gates):
        x["g"][:, h::n] = g
        if g == -5.0:
            x["g"][len(x["g"]) // 3: len(x["g"]) // 2, h::n] = -0.01
    return x


@pytest.fixture(params=[*BUILDS, *(pytest.param(b, marks=pytest.mark.long) for b in ALIKE)], ids=lambda b: f"{b.target}-{b.name}")
def built(request):
    if request.param.target == "tilelang":
        pytest.importorskip("tilelang")
        if shutil.which("gcc") is None:
            pytest.skip("needs gcc")
    else:
        pytest.importorskip("triton")
    return request.param


def test_parts_packs_tails_and_states(built):
    fn, options = function(built), {"tolerance": TIGHT[built.dtype], "layout": built.layout}
    for chunks, lengths in ((1, [163, 0, 16, 1]), (2, [0, 65, 32]), (0, [33, 3])):  # 163: the last part is folded
        gates = GATES if chunks == 1 else (-0.6, 0.0)
        x = mixed(lengths, built.dtype, seed=chunks, gates=gates, initial=chunks != 2)
        check(in_parts(fn, chunks), x, cu_dtype=torch.int64 if chunks % 2 else torch.int32, **options)
    check(in_parts(fn, 1), mixed([33, 33], built.dtype, 2, gates=(-0.6, 0.0)), batched=True, **options)
    check(in_parts(fn, 1), mixed([0, 0], built.dtype), batched=True, **options)


def test_same_bits_and_no_other_sequence(built):
    """A sequence's bits do not depend on what its neighbours hold, NaN included, nor on the run."""
    fn = in_parts(function(built), 1)
    x = mixed([33, 17, 17], built.dtype, gates=(-0.6, 0.0))
    first = call(fn, x, layout=built.layout)
    assert all(torch.equal(a, b) for a, b in zip(first, call(fn, x, layout=built.layout), strict=True))
    for n in ("q", "k", "v", "g", "beta"):
        x[n][33:50] = float("nan")
    o, S = call(fn, x, layout=built.layout)
    assert torch.equal(o[:33], first[0][:33]) and torch.equal(o[50:], first[0][50:])
    assert torch.equal(S[::2], first[1][::2]) and S[1].isnan().any()


@pytest.mark.parametrize("norm, beta, gate", [(2.0, 1.0, -0.9), (2.0, 1.0, -1.15), (1.0, 2.0, -0.1), (2.0, 1.0, -80.0)])
def test_keys_and_gates_against_the_bound(norm, beta, gate):
    """One key, so long that beta |k|^2 is up to 4: no worse than one walk, which is float32 here and loses little."""
    x = problem([4 * 16], 1, 1, 16, 32, torch.float32, beta=beta, same_keys=True)
    x["k"], x["g"][:] = x["k"] * norm, gate
    want = expected(x)
    whole, parts = (call(in_parts(function(build("triton", "prepared", "decay", "float32")), n), x) for n in (0, 1))
    for one, got, ref in zip(whole, parts, want, strict=True):
        assert rms_error(got, ref) < 2 * rms_error(one, ref) + 1e-6


@pytest.mark.parametrize("how, most", [("decay", 8), ("exact", 0)])
def test_summaries_are_made_where_a_walk_may_need_them(how, most, monkeypatch):
    """Not where the longest sequence there can be has so few parts that each may begin at its start."""
    fn = function(build("triton", "replay", how))
    host = fn.__globals__["HOST"]
    launched, launcher = [], host.launcher
    monkeypatch.setattr(host, "launcher", lambda name, *a: (launched.append(name), launcher(name, *a))[1])
    whole = ["G_Tinv" + "_F_chunk" * (how == "decay"), "o_S"]
    sums = [*whole[:1], "S_offset", "S_factor", "S_start", *whole[1:]]
    assert host.tables.most == most
    for chunks, lengths, batched, want in ((0, [40, 20], False, whole), (1, [16 * most + 16] * 2, True, whole),
                                           (1, [16 * most + 17] * 2, True, sums), (1, [16 * most + 16, 1], False, sums)):
        launched.clear()
        check(in_parts(fn, chunks), mixed(lengths, gates=(-0.6, 0.0)), batched=batched)
        assert launched == want, lengths
    one, more = (host.workspace_bytes(tokens, 1, 1, "cpu") for tokens in (16 * most + 16, 16 * most + 17))
    assert more - one > (most + 2) * 16 * 32 * 4  # a chunk slot of tiles more would be less


@pytest.mark.parametrize("target, span", [("triton", 5), ("tilelang", 20)])
def test_how_early_walks_begin(target, span, monkeypatch):
    """Against sums in float64: at once, many chunks early, at the sequence's start, and not without a summary."""
    pytest.importorskip(target)
    b = build(target, "replay", "decay", **({"layout": "bhtd"} if target == "tilelang" else {}))
    fn, early = in_parts(function(b), span), {}
    host = fn.__globals__["HOST"]
    launcher = host.launcher

    def first_kernels(name, *a):
        row = host.tables.kernel(name)
        run = launcher(name, *a) if row[1] == "chunks" or name == "S_offset" else lambda *_: None

        def launch(tensors, *rest):
            run(tensors, *rest)
            if name == "S_offset":
                early["S"] = dict(zip(row[3], tensors, strict=True))["S_warm_up"]
        return launch
    monkeypatch.setattr(host, "launcher", first_kernels)
    lengths = [62 * 16 - 3, 30 * 16]
    x, gen = problem(lengths, 1, 3, 16, 32), torch.Generator().manual_seed(0)
    for h, g in enumerate((-3.0, -0.021, -0.01)):
        x["g"][:, h] = g * (0.5 + torch.rand(len(x["g"]), generator=gen))
    call(fn, x, layout=b.layout)
    bound, most, start, seen = BOUND["float16"], host.tables.most * span, 0, set()
    for n, length in enumerate(lengths):
        sums = torch.stack([y.double().sum(0) for y in x["g"][start:start + length].split(16)])
        for part in range(1, -(-len(sums) // span)):  # the first part has no warm-up
            for h in range(3):
                back = sums[:part * span, h].flip(0).cumsum(0)
                need = int((back > -bound).sum()) + 1
                slow = back[-1] * most > -bound * len(back)  # then a warm-up from the start would delay later parts' summaries
                want = need if need <= min(len(back), most) else -1 if slow or len(back) > most else len(back)
                assert early["S"][start // (16 * span) + n + part, h] == want
                seen.add(want)
        start += length
    assert {1, -1} < seen and any(32 < w < most and w % span for w in seen), seen
    host.plans.clear()


@pytest.mark.parametrize("target, chunk, span, chunks", [("triton", 64, 8, 65), ("tilelang", 16, 201, 403)])
def test_without_summaries_a_warm_up_has_no_limit(target, chunk, span, chunks):
    """A sequence's last part may be short. It then begins later than the longest warm-up of a call that has summaries, which is
    50 chunks of 64 tokens more than a part. This call has none, and the head never forgets."""
    pytest.importorskip(target)
    fn = function(Build(target, chunk, schedule=replace(named("replay"), partition="decay"), dtype="float16",
                        head_dim_k=16, head_dim_v=16))
    cost, most = fn.__globals__["HOST"].tables.part_cost, fn.__globals__["HOST"].tables.most
    begins = (chunks - 1) // span * span
    assert begins > min(most * span, span + cost.warm_up_limit) and not _needs_summaries(chunks, span, most, cost)
    check(in_parts(fn, span), problem([chunks * chunk], 1, 1, 16, 16, torch.float16, gate=0.0), tolerance=TIGHT["float16"])


def test_number_of_parts(monkeypatch):
    """Chosen by the cost model on a GPU: a long sequence in as many parts as fill it, a batch that fills it in none."""
    for how in ("exact", "decay"):
        fn = function(Build("triton", schedule=replace(named("replay"), v_block=128, partition=how)))
        host = in_parts(fn, 0).__globals__["HOST"]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
        span, gpu = host.span, torch.device("cuda", 0)
        assert span(32768, 1, 16, gpu) * 16 == 512  # two walks share a multiprocessor
        assert span(32768, 16, 16, gpu, packed=False) == span(32768, 16, 16, torch.device("cpu")) == 513
        assert span(32768, 16, 16, gpu) == span(32768, 1, 16, gpu)  # one of a pack may have nearly all tokens
        assert span(32768, 16, 16, gpu, longest=2048) == 513 > span(32768, 16, 16, gpu, longest=30720)  # but for a known one
        assert span(2048, 1, 16, gpu) <= 33 and span(0, 1, 16, gpu) == 1 and span(64, 3, 1, gpu, packed=False) == 2
        assert span(0, 0, 16, gpu) == 1  # no rows
        parts = 32768 // (64 * span(32768, 1, 16, gpu)) + 1
        held = 4 * 64 + 2 * 64 * 64 + 4 * (how == "decay")
        folded = 2 * 4 * 128 * 128 + 2 * 128 * 128 + 4 * (how == "decay")
        assert host.workspace_bytes(32768, 1, 16, gpu) == 16 * (513 * held + parts * folded)


@pytest.mark.parametrize("given, want", [({}, 4), ({"GDN_CODEGEN_PART_CHUNKS": "2"}, 2), ({"GDN_CODEGEN_PARTITION": "0"}, 4),
                                         ({"GDN_CODEGEN_PARTITION": "0", "GDN_CODEGEN_PART_CHUNKS": "2"}, 4)])
def test_environment(tmp_path, given, want):
    (tmp_path / "m.py").write_text(render(build("triton", "replay", "decay")))
    code = f"import m, torch; assert m.HOST.span(48, 1, 1, torch.device('cpu')) == {want}"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env={**os.environ, **given})


def test_command_rebuilds(tmp_path, capsys):
    b = Build("triton", schedule=replace(SCHEDULES["replay"], partition="decay"))
    assert b.name == "gdn_c64_bthd_replay_decay"
    text = render(b)
    words = re.search(r"gdn_codegen (build .*)", text)[1].split()
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "triton" / f"{b.name}.py").read_text() == text
    assert main(["show", "--target", "triton", "--schedule", "replay", "--partition", "exact", "--kernels"]) == 0
    assert "o_S: walks a part's chunks" in capsys.readouterr().out
    assert main(["build", "--target", "pto", "--partition", "decay", "--out", str(tmp_path)]) == 2
    assert "partition='decay'; accepted for pto is None" in capsys.readouterr().err


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("target", ["triton", "tilelang"])
@pytest.mark.parametrize("how", ["exact", "decay"])
def test_text_is_stable_ascii_and_short_lined(target, how):
    """A schedule has one way on each target, the other way on the other target."""
    for schedule in list(SCHEDULES)[(target == "triton") ^ (how == "exact")::2]:
        b = Build(target, schedule=replace(SCHEDULES[schedule], partition=how), dtype="bfloat16")
        text = render(b)
        assert text == render(b) and text.isascii()
        body = text[text.index("_kernel("):text.index("# --- host")]
        assert max(map(len, body.splitlines())) <= 120
        assert not re.search(r"[ \t]$", text, re.M) and not re.search(r"\n{4}", text)


# --- negative controls: the module's text edited, the same comparison must fail ---------------------------------------
MUTATIONS = {
    ("triton", "exact"): {
        "no fold": (r"S = tl\.dot\(M, .*\)", "S = N_"),
        "the initial state in every part": (r"if begin == 0:", "if True:"),
    },
    ("triton", "decay"): {
        "no fold": (r"S = tl\.dot\(M, .*\)", "S = N_"),
        "a warm-up of a chunk less": (r"begin = first - tl\.maximum\(warm_up, 0\)", "begin = first - tl.maximum(warm_up - 1, 0)"),
        "a warm-up that stores": (r"if t >= first:", "if True:"),
        "no fallback": (r"if warm_up < 0:", "if False:"),
        "no summaries": (r"skipped = \*\(\(\) if self\.summed else t\.summaries\)", "skipped = *t.summaries"),
    },
    ("triton", "longest first"): {
        "one instance for two": (r"instances \*= .*", "pass"),
        "long walks of no instance": (r"(\(2 \* warm_up > span\)) != \(instance == 0\)", r"\1 | (instance != 0)"),
        "one iteration of the warm-up for all": (r"range\(begin, first, C\)", "range(begin, first - C, C)"),
    },
    ("tilelang", "decay"): {
        "a warm-up that stores": (r"if chunk >= first:", "if chunk >= 0:"),
        "no fallback": (r"if warm_up < 0:(?=\n.*\n +S\[i, j\] = S_start)", "if warm_up < -5.0:"),
    },
}


@pytest.mark.parametrize("target, how, what", [(*key, what) for key, all_ in MUTATIONS.items() for what in all_])
def test_mutation_fails(target, how, what):
    pytest.importorskip(target)
    if how == "longest first":
        b = build(target, "walk", "decay", longest_first=True)
    else:
        b = build(target, "replay", how, **({"layout": "bhtd"} if target == "tilelang" else {}))
    text, n = re.subn(*MUTATIONS[target, how][what], render(b))
    assert n
    x = mixed([11 * 16, 3], gates=(0.0, -0.6))  # more parts than a walk may begin early
    x["g"][:, 1] = -0.6
    want = expected(x)
    o, S = call(in_parts(module(text).chunk_gated_delta_rule, 1), x, layout=b.layout)
    assert not (rms_error(o, want[0]) <= 1e-3 and rms_error(S, want[1]) <= 1e-3)
