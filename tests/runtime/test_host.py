"""What a call costs on the host, counted rather than timed: the same work once for all calls of one kind."""
import contextlib
from collections import Counter
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from reference import call, check, expected, module, problem, rms_error
from torch.utils._python_dispatch import TorchDispatchMode

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.call import choose
from gdn_codegen.runtime.call import launch as calls
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

HERE = [t for t in OWN if runs(t, "cpu")]
SMALL = dict(head_dim_k=32, head_dim_v=32)


@lru_cache
def source(target, schedule):
    return render(Build(target, 16, schedule=schedule, **SMALL))


class Count(TorchDispatchMode):
    """Operators of torch that ran."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def stubbed(monkeypatch):
    """A module of a build whose kernels are not launched but recorded: name, tensors, ends, numbers."""
    def make(target, schedule="replay"):
        m = module(source(target, schedule))
        launched = []
        monkeypatch.setattr(m.HOST, "launcher", lambda name, *rest: lambda *x: launched.append((name, *x)))
        monkeypatch.setattr(m.HOST, "poison", False)
        monkeypatch.setattr(m.HOST, "plans", {})
        monkeypatch.setattr(m, "_kept", {})
        return m, launched
    return make


def given(device="cpu", tokens=40):
    half, single = dict(dtype=torch.float16, device=device), dict(device=device)
    return dict(q=torch.zeros(1, tokens, 2, 32, **half), k=torch.zeros(1, tokens, 2, 32, **half),
                v=torch.zeros(1, tokens, 4, 32, **half), g=torch.zeros(1, tokens, 4, **single),
                beta=torch.zeros(1, tokens, 4, **single))


def forbid(m, monkeypatch, *names):
    for n in names:
        monkeypatch.setattr(m, n, lambda *a, n=n: pytest.fail(f"{n} ran again"))


@pytest.mark.parametrize("target", OWN)
@pytest.mark.parametrize("packed", [False, True])
def test_a_second_call_allocates_what_it_writes_and_does_nothing_else(target, packed, stubbed, monkeypatch):
    m, launched = stubbed(target)
    x = given()
    x |= {"cu_seqlens": torch.tensor([0, 11, 40], dtype=torch.int32)} if packed else {}
    m.chunk_gated_delta_rule(**x)
    forbid(m, monkeypatch, "Plan", "_check_inputs", "_check_sequences", "_check_state", "_plain", "_is_plain")
    with Count() as count:
        m.chunk_gated_delta_rule(**x)
    # a final state is not made unless it is asked for
    cleared = {"zero_.default": len(m.TABLES.outputs)} if packed and target == "pto" else {}
    made = sum(map(len, (m.TABLES.outputs, m.TABLES.workspaces, m.TABLES.shared)))
    assert count.seen == {"empty_like.default": made, **cleared}
    names = [n for n, *_ in m.TABLES.kernels]
    assert [n for n, *_ in launched] == 2 * names


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("target", OWN)
def test_values_are_never_read(target, packed, stubbed):
    """Tensors of the meta device have none: whatever asked for a value would raise."""
    m, launched = stubbed(target)
    x = given("meta")
    if packed:
        x["cu_seqlens"] = torch.empty(3, dtype=torch.int64, device="meta")
    for state in (None, torch.empty(1 + packed, 4, 32, 32, device="meta", dtype=torch.bfloat16)):
        o, final = m.chunk_gated_delta_rule(**x, initial_state=state, output_final_state=True)
        assert o.shape == (1, 40, 4, 32) and final.shape == (1 + packed, 4, 32, 32)
    assert len(launched) == 2 * len(m.TABLES.kernels) and all(ends.dtype == torch.int32 for _, _, ends, _ in launched)


@pytest.mark.parametrize("target", OWN)
def test_tensors_go_to_kernels_as_they_are_in_the_order_of_the_table(target, stubbed):
    m, launched = stubbed(target)
    x = given()
    m.chunk_gated_delta_rule(**x, scale=0.5)
    for (name, tensors, _, numbers), (n, _, _, names, scalars) in zip(launched, m.TABLES.kernels, strict=True):
        assert name == n and len(tensors) == len(names) and numbers == [0.5] * len(scalars)
        assert all(t is x[i] for t, i in zip(tensors, names, strict=True) if i in x)


BAD_AFTER_GOOD = {
    "dtype": (dict(g=torch.zeros(1, 40, 4, dtype=torch.float64)), "g: got torch.float64"),
    "tokens": (dict(k=torch.zeros(1, 41, 2, 32).half()), r"k: got shape .*T = 40"),
    "type": (dict(v=None), "v: got NoneType"),
    "state": (dict(initial_state=torch.zeros(1, 3, 32, 32)), "initial_state: got"),
    "scale": (dict(scale=float("inf")), "scale: got inf"),
    "cu rank": (dict(cu_seqlens=torch.zeros(1, 2, dtype=torch.int32)), "cu_seqlens: got shape"),
    "cu values": (dict(cu_seqlens=torch.tensor([0, 41])), "cu_seqlens: got .*T = 40"),
}


@pytest.mark.parametrize("case", BAD_AFTER_GOOD)
def test_a_good_call_lets_no_bad_one_pass(case, stubbed):
    m, launched = stubbed("triton")
    change, text = BAD_AFTER_GOOD[case]
    for _ in range(2):
        m.chunk_gated_delta_rule(**given(), cu_seqlens=torch.tensor([0, 40]))
        m.chunk_gated_delta_rule(**given())
        good = len(launched)
        with pytest.raises(ValueError, match=text):
            m.chunk_gated_delta_rule(**{**given(), **change})
        assert len(launched) == good


def test_misaligned_and_oddly_strided_tensors_are_copied(stubbed):
    """Kernels are built for tensors aligned to 16 bytes with the strides of their shapes."""
    m, launched = stubbed("tilelang")
    x = given()
    odd = torch.zeros(x["q"].numel() + 1).half()[1:].view(x["q"].shape)
    flat = x["v"].as_strided(x["v"].shape, (7, *x["v"].stride()[1:]))
    m.chunk_gated_delta_rule(**x)
    m.chunk_gated_delta_rule(**{**x, "v": flat})
    m.chunk_gated_delta_rule(**{**x, "k": x["k"].transpose(2, 3).contiguous().transpose(2, 3)})
    m.chunk_gated_delta_rule(**{**x, "q": odd, "v": flat, "g": x["g"].half()})
    m.chunk_gated_delta_rule(**{**x, "q": odd})
    for _, tensors, _, _ in launched:
        assert all(t.data_ptr() % 16 == 0 and t.stride() == torch.empty(t.shape).stride() for t in tensors)
        assert all(t.dtype == torch.float32 for t in tensors if t.ndim == 3)


def test_no_memory_is_shared_between_calls(stubbed):
    m, launched = stubbed("triton", "staged")
    kept = [m.chunk_gated_delta_rule(**given(), output_final_state=True) for _ in range(2)]
    seen = [t for _, tensors, _, _ in launched for t in tensors if t.numel()]
    half = len(seen) // 2
    assert not {t.data_ptr() for t in seen[:half]} & {t.data_ptr() for t in seen[half:]}
    assert kept[0][0].data_ptr() != kept[1][0].data_ptr() and kept[0][1].data_ptr() != kept[1][1].data_ptr()


@pytest.mark.parametrize("target", HERE)
def test_one_plan_serves_other_values(target):
    fn = function(Build(target, 16, **SMALL))
    for seed, lengths in enumerate(([10, 30], [33, 7], [40, 0])):
        check(fn, problem(lengths, 1, 2, 32, 32, seed=seed))
    with pytest.raises(ValueError, match=r"cu_seqlens: got .*never fall"):
        call(fn, {**problem([40], 1, 2, 32, 32), "lengths": [45, -5], "S": torch.zeros(2, 2, 32, 32)})


class Gpu:
    type, index = "cuda", 0

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return isinstance(other, Gpu)


def test_equal_rows_are_filled_once_a_stream_and_anew_in_a_graph(stubbed, monkeypatch):
    """A tensor that another stream fills may not be full yet; one that a graph holds may not be dropped."""
    m, _ = stubbed("triton")
    state = SimpleNamespace(stream=1, capturing=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    filled = []
    real = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *a, device, **k: filled.append(a) or real(*a, **k))
    rows = lambda: m._filled(m._equal_rows, 3, 5, Gpu())
    first = rows()
    assert first.tolist() == [0, 5, 10, 15] and first.dtype == torch.int32 and rows() is first and len(filled) == 1
    state.stream = 2
    assert rows() is not first and rows() is not first and len(filled) == 2
    state.capturing = True
    graph = rows()
    assert len(filled) == 3 and rows() is not graph
    state.stream, state.capturing = 1, False
    assert rows() is first
    assert m._equal_rows(2, 0, torch.device("cpu")).tolist() == [0, 0, 0]


@pytest.mark.parametrize("target", ["triton", "tilelang"])
def test_kernels_over_single_tokens_read_no_ends_of_equal_rows(target, monkeypatch):
    """So nothing fills them, and a captured graph has one kernel less. Without tokens there is no length to compute them from."""
    m = module(render(Build(target, 1, schedule="fused", **SMALL)))
    monkeypatch.setattr(torch, "arange", lambda *a, **k: pytest.fail("fills the ends"))
    monkeypatch.setattr(m, "_unread_rows", lambda *a: torch.full((4,), 1 << 30, dtype=torch.int32))
    x = {n: torch.randn(3, 5, 1, 32).half() for n in ("q", "k", "v")} | {n: -torch.rand(3, 5, 1) for n in ("g", "beta")}
    o, S = m.chunk_gated_delta_rule(**x, output_final_state=True)
    monkeypatch.undo()
    want, last = m.chunk_gated_delta_rule(**{n: v.flatten(0, 1)[None] for n, v in x.items()}, output_final_state=True,
                                          cu_seqlens=torch.tensor([0, 5, 10, 15], dtype=torch.int32))
    assert torch.equal(o.flatten(0, 1), want[0]) and torch.equal(S, last)
    initial = torch.randn(3, 1, 32, 32)
    _, S = m.chunk_gated_delta_rule(**{n: v[:, :0] for n, v in x.items()}, initial_state=initial, output_final_state=True)
    assert torch.equal(S, initial)


def test_many_kinds_of_calls_keep_few_plans(stubbed):
    m, _ = stubbed("triton")
    for tokens in range(1, 300):
        m.chunk_gated_delta_rule(**given("meta", tokens))
    assert len(m.HOST.plans) <= 256 and len(m._kept) <= 64


# --- launching on a GPU, with the toolchains' objects stubbed -------------------------------------------------------
SIZES = (1, 40, 1, 2, 4, 2)  # sequences, tokens, batched, H, HV, slots


def test_triton_looks_a_kernel_up_once(monkeypatch):
    """The first launch compiles; the next ones, for other sizes too, run what it gave, on the same arguments in the order of the
    signature. What it was not compiled for compiles anew: a state that is not there, a tensor that is not aligned or has 2 GiB,
    another GPU."""
    m = module(source("triton", "replay"))
    seen, compiled = [], []

    class Compiled:
        def __init__(self):
            compiled.append(self)

        def __getitem__(self, grid):
            return lambda *a: seen.append((grid, a))

    class Kernel:
        def __init__(self, arg_names):
            self.arg_names = arg_names

        def __getitem__(self, grid):
            def run(*a, num_warps, num_stages, enable_fp_fusion, **options):
                rest = [options[n] for n in self.arg_names[len(a):]]
                assert len(options) == len(rest)
                seen.append(((*grid, 1, 1), (*a, *rest)))
                return Compiled()
            return run

    monkeypatch.setattr(m._launcher, "kernels", {n: Kernel(k.arg_names) for n, k in m._launcher.kernels.items()})
    monkeypatch.setattr(m, "_is_suspect", lambda device: False)
    monkeypatch.setattr(m, "_lanes", lambda: 32)
    monkeypatch.setattr(m, "_needs_newer_ptxas", lambda: False)
    over_chunks, walk = m.TABLES.kernels

    def launch(row, instances, sizes, ints, device, memory=None, times=1):
        run, x = m._launcher(row[0], instances, sizes, ints, device), memory or [torch.zeros(64) for _ in row[3]]
        for _ in range(times):
            run(x, "cu", [0.5] * len(row[4]))
        return dict(zip(m._launcher.kernels[row[0]].arg_names, seen[-1][1], strict=True))

    memory, other = [torch.zeros(64) for _ in walk[3]], Gpu()
    other.index = 1
    launch(walk, 7, SIZES, [0, 1, 0], Gpu(), memory, 3)
    assert len(compiled) == 1 and seen[0] == seen[1] == seen[2] and seen[0][0] == (7, 1, 1)
    launch(walk, 7, SIZES, [1, 1, 0], Gpu(), memory)
    launch(walk, 7, SIZES, [0, 1, 0], Gpu(), [x[1:] for x in memory])
    launch(walk, 7, SIZES, [0, 1, 0], other, memory)
    large = torch.empty(1 << 29, device="meta")
    launch(walk, 7, SIZES, [0, 1, 0], Gpu(), [large, *memory[1:]])  # 2 GiB: AMD's compiler is told which tensors have less
    launch(walk, 7, SIZES, [0, 1, 0], Gpu(), memory)
    assert len(compiled) == 5
    for n, (sequences, grid) in enumerate(((1, 7), (3, 9), (1, 7))):
        got = launch(over_chunks, grid, (sequences, 40 + n, *SIZES[2:]), [], Gpu())
        assert got["N"] == sequences and seen[-1][0] == (grid, 1, 1) and len(compiled) == 6
    launch(over_chunks, 7, (*SIZES[:4], 8, SIZES[5]), [], Gpu())  # value heads are compiled in
    assert len(compiled) == 7


@pytest.mark.parametrize("cached", [False, True])
def test_tilelang_calls_the_compiled_function_itself(cached, monkeypatch):
    """TileLang gives an executable to be linked where it compiled, a module where its cache had one."""
    m = module(source("tilelang", "replay"))
    seen, compiled = [], []
    main = lambda *a: seen.append(a)
    made = SimpleNamespace(main=main) if cached else SimpleNamespace(jit=lambda: SimpleNamespace(main=main))
    kernel = SimpleNamespace(adapter=SimpleNamespace(get_exportable_executable=lambda: made))
    monkeypatch.setattr(m._launcher, "compiled", lambda name, arch: compiled.append((name, arch)) or kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    launch = m._launcher("o_S", 4, SIZES, [0, 1], Gpu())
    for _ in range(2):
        launch(("a", "b"), "cu", [0.5])
    m._launcher.loaded.cache_clear()
    assert compiled == [("o_S", "sm_90a")] and seen == 2 * [("a", "b", "cu", 1, 0, 1, 0.5)]


def test_another_gpu_becomes_the_current_one_for_the_call(stubbed, monkeypatch):
    m, launched = stubbed("tilelang")
    current, entered = [1], []

    class Guard:
        def __init__(self, device):
            entered.append(device)

        def __enter__(self):
            current.append(0)

        def __exit__(self, *a):
            current.pop()

    monkeypatch.setattr(m, "_is_elsewhere", lambda device: current[-1] != 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    m.chunk_gated_delta_rule(**given())
    assert len(entered) == 1 and current == [1] and len(launched) == len(m.TABLES.kernels)
    current[0] = 0
    m.chunk_gated_delta_rule(**given())
    assert len(entered) == 1 and len(launched) == 2 * len(m.TABLES.kernels)


# --- the package's op ------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_op_is_looked_up_once(monkeypatch):
    x = problem([40], 1, 2, 32, 32)
    calls.forget()
    want = expected(x)
    o, _ = call(chunk_gated_delta_rule, x)
    for where, n in ((choose, "choose"), (choose, "Build"), (calls, "module")):
        monkeypatch.setattr(where, n, lambda *a, n=n: pytest.fail(f"{n} ran again"))
    again, _ = call(chunk_gated_delta_rule, x)
    assert torch.equal(o, again) and rms_error(o, want[0]) < 5e-3


def test_what_inference_mode_made_serves_calls_outside_of_it(monkeypatch):
    """GDN_CODEGEN_POISON=1 fills what calls share, too."""
    monkeypatch.setenv("GDN_CODEGEN_POISON", "1")
    m, x = module(source("triton", "fused")), given()
    with torch.inference_mode():
        first = m.chunk_gated_delta_rule(**x)[0].clone()
    assert torch.equal(m.chunk_gated_delta_rule(**x)[0], first)
