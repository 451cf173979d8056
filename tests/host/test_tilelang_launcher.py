"""host/tilelang.py by itself: what kernels are launched with, and which tensors come back from a CPU."""
import contextlib
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("tilelang")

from gdn_codegen.host import tilelang as of_tilelang
from gdn_codegen.host.tables import Tables
from gdn_codegen.host.tilelang import TileLangLauncher, _as_dense, _with_rows
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import write
from gdn_codegen.tools.compile_ahead import fresh

CPU, GPU, tilelang = torch.device("cpu"), torch.device("cuda", 0), of_tilelang.tilelang
SIZES = (1, 5, 0, 2, 4, 3, 7, 2)  # sequences, tokens, batched, H, HV, slots, parts, span


def tables(**fields):
    return Tables("b", "f", 16, "bthd", "float16", inputs=(("x", "H", (8,), "float16"),), outputs=(), ints={"o": (), "p": ()},
                  kernels=(("o", "chunks", 1, ("x", "y"), ()), ("p", "parts", 1, ("x", "y"), ())), **fields)


def launcher(compiled, monkeypatch, arch="", **fields):
    made = TileLangLauncher(tables(**fields), __file__, {"o": None, "p": None}, None, {"o": ("y",), "p": ()}, ("p",), arch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    made.for_cpu = lambda name: compiled
    made.loaded = lambda name, arch: SimpleNamespace(main=lambda *a: compiled(name, arch, *a))
    return made


def test_kernels_over_parts_get_how_many_there_are(monkeypatch):
    seen = []
    made = launcher(lambda *a: seen.append(a), monkeypatch)
    for name in ("o", "p"):
        made(name, 9, SIZES, [1], GPU)(("x", "y"), "cu", [0.5])
    assert seen == [("o", "sm_90a", "x", "y", "cu", 0, 1, 0.5), ("p", "sm_90a", "x", "y", "cu", 0, 7, 2, 1, 0.5)]
    assert made.passes["p"] == {**made.passes["o"], "tl.disable_thread_storage_sync": True}


def test_what_a_settled_call_hands_to_the_native_launcher(monkeypatch):
    run, grid, parameters, held = launcher(print, monkeypatch)("p", 9, SIZES, [1], GPU).compiled(2, 1)
    assert callable(run) and held is run and grid is None
    assert parameters == [("t", 0), ("t", 1), ("t", 2), ("i", 0), ("i", 7), ("i", 2), ("i", 1), ("d", 0)]


@pytest.mark.parametrize("strided", [False, True])
def test_views_are_passed_as_dense_where_strides_come_apart(strided, monkeypatch):
    seen = []
    x = torch.zeros(2, 3).T
    launcher(lambda *a: seen.append(a[2]), monkeypatch, strided=strided)("o", 9, SIZES, [], GPU)([x, x], "cu", [])
    assert seen[0].stride() == ((2, 1) if strided else (1, 3)) and seen[0].data_ptr() == x.data_ptr()
    assert _as_dense(y := torch.zeros(2, 3)) is y


def test_a_module_for_one_architecture_takes_no_other_device_and_no_empty_tile(monkeypatch):
    seen = []
    made = launcher(lambda *a: seen.append(a), monkeypatch, arch="sm_90a")
    with pytest.raises(ValueError, match=r"x: got device cpu; accepted: a CUDA device \(this module was built for sm_90a\)"):
        made("o", 9, SIZES, [], CPU)
    made("o", 9, (1, 0, *SIZES[2:]), [], GPU)([torch.zeros(1, 0, 8), torch.zeros(0, 8)], "cu", [])
    assert seen[0][1] == "sm_90a" and [x.shape for x in seen[0][2:4]] == [(1, 1, 8), (0, 8)]
    assert _with_rows(y := torch.zeros(2, 3)) is y


def test_on_a_cpu_bfloat16_is_widened_and_results_come_back(monkeypatch):
    def kernel(x, y, *rest):
        assert x.dtype == y.dtype == torch.float32 and rest == ("cu", 0, 0.5)
        x += 1
        y += 2
    x, y = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)
    launcher(kernel, monkeypatch)("o", 9, SIZES, [], CPU)([x, y], "cu", [0.5])
    assert x.tolist() == [0, 0] and y.tolist() == [2, 2]  # the kernel stores to y alone


# --- kernels of a first call -------------------------------------------------------------------------------------------
@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(of_tilelang, "_cores", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_kernels_of_a_call_compile_side_by_side(device, two_cores, monkeypatch):
    """Each waits for the other to begin. Later calls of this kind have nothing to compile."""
    both, seen, made = threading.Barrier(2, timeout=60), [], launcher(None, monkeypatch)

    def compiled(*about):
        both.wait()
        seen.append(about)
    made.for_cpu = made.loaded = compiled
    for _ in range(2):
        made.together(("o", "p"), device)
    assert sorted(seen) == [(n,) if device is CPU else (n, "sm_90a") for n in "op"]


def test_the_first_kernel_that_fails_says_why(two_cores, monkeypatch):
    """Not the one that fails first. The call may be made again."""
    later, made = threading.Event(), launcher(None, monkeypatch)
    errors = {"o": KeyError("o"), "p": KeyError("p")}

    def compiled(name):
        if name == "p":
            later.set()
        assert later.wait(60)
        raise errors[name]
    made.for_cpu = compiled
    for _ in range(2):
        with pytest.raises(KeyError) as e:
            made.together(("o", "p"), CPU)
        assert e.value is errors["o"] and e.value.__cause__ is None
    made.for_cpu = lambda name: None
    made.together(("o", "p"), CPU)
    assert made.compiling.acquire(blocking=False)


@pytest.fixture
def interruptible():
    """A shell starts a background job with SIGINT ignored, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_does_not_wait_for_a_compiler(two_cores, monkeypatch):
    """What has not begun never does."""
    asked, go_on, begun, made = threading.Event(), threading.Event(), [], launcher(None, monkeypatch)

    class Threads(ThreadPoolExecutor):
        def submit(self, work, name, device):
            found = super().submit(work, name, device)
            if name == "r":
                asked.set()
            return found
    monkeypatch.setattr(of_tilelang, "ThreadPoolExecutor", Threads)

    def compiled(name):
        begun.append(name)
        if name == "p" and asked.wait(60):
            time.sleep(0.5)  # the main thread waits by then
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert go_on.wait(60)
    made.for_cpu = compiled
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        made.together(("o", "p", "q", "r"), CPU)
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2 and made.compiling.acquire(blocking=False)
    go_on.set()
    for x in mine:
        x.join(60)
    assert sorted(begun) == ["o", "p"]


def test_one_thread_traces_at_a_time(two_cores, monkeypatch):
    """CPython 3.11 raises SystemError now and then where two threads parse. The compiler is outside."""
    made, inside, most, both = launcher(None, monkeypatch), [], [], threading.Barrier(2)

    def traced(functions):
        inside.append(functions)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
    made.kernels, made.functions = dict.fromkeys("op", traced), {"cpu": None}
    made.for_cpu = lambda name: (made.program(name, cpu=True), both.wait(60))
    made.together(("o", "p"), CPU)
    assert most == [1, 1]


@pytest.mark.slow
def test_one_thread_traces_at_a_time_in_two_modules(tmp_path):
    """As where two ops are called for the first time in two threads."""
    b = Build("tilelang", chunk=16, schedule="replay", layout="bthd", head_dim_k=16, head_dim_v=16)
    modules, inside, most = [fresh(write(b, tmp_path)) for _ in range(2)], [], []

    def traced(functions):
        inside.append(functions)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
    for m in modules:
        m._launcher.kernels = {"o": traced}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda m: m._launcher.program("o", cpu=True), modules))
    assert most == [1, 1] and len({id(m) for m in modules}) == 2


@pytest.mark.parametrize("names, device, arch, cores, capturing", [
    (("o",), CPU, "", 2, False), ((), CPU, "", 2, False), (("o", "p"), CPU, "", 1, False), (("o", "p"), CPU, "sm_90a", 2, False),
    (("o", "p"), GPU, "sm_90a", 2, True)], ids=["one", "none", "one core", "another device", "a graph that is captured"])
def test_where_no_thread_begins(names, device, arch, cores, capturing, monkeypatch):
    """Kernels then compile when their launches are made."""
    made = launcher(None, monkeypatch, arch)
    monkeypatch.setattr(of_tilelang, "_cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(of_tilelang, "ThreadPoolExecutor", lambda n: pytest.fail("a thread"))
    made.together(names, device)


def side_by_side(m, monkeypatch):
    """TileLang's own compile in the module, which waits until two threads are inside."""
    both, plain, inside = threading.Barrier(2, timeout=100), tilelang.compile, []

    def compiles(*a, **k):
        inside.append(both.wait())
        return plain(*a, **k)
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    monkeypatch.setattr(tilelang, "compile", compiles)
    monkeypatch.setattr(m, "_cores", lambda: 2)
    return inside


@pytest.mark.slow
def test_a_first_call_on_a_cpu(tmp_path, monkeypatch):
    """Its kernels compile in threads, and it gives what the same kernels give that compiled one after another."""
    b = Build("tilelang", chunk=16, schedule="replay", layout="bthd", head_dim_k=16, head_dim_v=16)
    one, two = (fresh(write(b, tmp_path)) for _ in range(2))
    x = [torch.rand(1, 40, 2, 16).half() / 4 for _ in range(3)] + [-torch.rand(1, 40, 2), torch.rand(1, 40, 2)]
    one._launcher.together = lambda names, device: None
    want = getattr(one, one.TABLES.function)(*x, output_final_state=True)
    inside = side_by_side(two, monkeypatch)
    got = getattr(two, two.TABLES.function)(*x, output_final_state=True)
    assert len(inside) == len(two._launcher.kernels) == 2 and all(map(torch.equal, got, want))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_first_call_by_nvcc(tmp_path, two_cores, monkeypatch):
    """Kernels that compile side by side have the text of those that compile one after another."""
    one, two = (fresh(write(Build("tilelang", chunk=16, schedule="staged", head_dim_k=16, head_dim_v=16), tmp_path))
                for _ in range(2))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    want = [one._launcher.compiled(n, "sm_90a").get_kernel_source() for n in ("G", "A")]
    inside, made, plain = side_by_side(two, monkeypatch), {}, two._launcher.compiled

    def compiled(name, arch):
        made[name] = plain(name, arch)
        return made[name]
    monkeypatch.setattr(two._launcher, "compiled", compiled)
    two._launcher.together(("G", "A"), GPU)
    assert [made[n].get_kernel_source() for n in ("G", "A")] == want and len(inside) == 2
    monkeypatch.setattr(tilelang, "compile", lambda *a, **k: pytest.fail("compiled again"))
    for name in ("G", "A"):
        two._launcher(name, 6, (1, 40, 0, 1, 2, 3), [], GPU)
