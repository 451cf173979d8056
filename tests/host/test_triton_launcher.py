"""host/triton.py by itself: what kernels are launched with, and what happens before they are."""
import threading
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from gdn_codegen.host import triton as host
from gdn_codegen.host.tables import Tables

CPU, GPU = torch.device("cpu"), SimpleNamespace(type="cuda", index=0)
SIZES = (1, 5, 0, 2, 4, 3, 7, 2)  # sequences, tokens, batched, H, HV, slots, parts, span
TABLES = Tables("b", "f", 16, "bthd", "float16", inputs=(), outputs=(), ints={"o": ("has_x",), "p": ()},
                kernels=(("o", "chunks", 1, (), ()), ("p", "parts", 1, (), ())))


class Kernel:
    """It notes its launches. arg_names: its parameters after tensors and numbers."""

    def __init__(self, *arg_names):
        self.arg_names, self.seen = arg_names, []

    def __getitem__(self, grid):
        def run(*given, **options):
            self.seen.append((grid, given, options))
            return self
        return run


def launcher(kernel, check=None, descriptors=False):
    return host.TritonLauncher(TABLES, {"o": kernel, "p": kernel}, {"K": 8}, {"p": {"BV": 4}}, {"o": 8, "p": 2}, 3, ("N", "T"),
                               ("p",), descriptors, check)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(host, "_lanes", lambda: 32)
    monkeypatch.setattr(host, "_is_suspect", lambda device: False)
    monkeypatch.setattr(host, "_needs_newer_ptxas", lambda: False)


def test_a_kernel_gets_what_its_signature_names():
    kernel = Kernel("HV", "span", "BV", "K", "OPERAND")
    launcher(kernel)("p", 9, SIZES, [], CPU)(["x"], "cu", [0.5])
    assert kernel.seen == [((18,), ("x", "cu", 0.5), {"HV": 4, "span": 2, "BV": 4, "K": 8, "OPERAND": tl.float32})]


def test_the_first_launch_compiles_and_later_ones_run_what_it_gave():
    kernel, x = Kernel("N", "H", "has_x", "OPERAND"), [torch.zeros(64)]
    made = launcher(kernel)
    for sizes in (SIZES, (2, 6, *SIZES[2:])):
        run = made("o", 9, sizes, [1], GPU)
        for _ in range(2):
            run(x, "cu", [0.5])
    first, *later = kernel.seen
    assert first[0] == (9,) and first[2] == {"N": 1, "H": 2, "has_x": 1, "OPERAND": tl.bfloat16, "num_warps": 8, "num_stages": 3,
                                             "enable_fp_fusion": True}
    assert later == [((9, 1, 1), (*x, "cu", 0.5, n, 2, 1, tl.bfloat16), {}) for n in (1, 2, 2)] and len(made.compiled) == 1
    made("o", 9, SIZES, [0], GPU)(x, "cu", [0.5])
    assert len(made.compiled) == 2  # whether a tensor is there is compiled in


@pytest.mark.parametrize("descriptors", [False, True])
def test_only_kernels_with_descriptors_are_given_memory(descriptors, monkeypatch):
    given = []
    monkeypatch.setattr(host, "_give_memory", lambda: given.append(1))
    launcher(Kernel(), descriptors=descriptors)("p", 9, SIZES, [], GPU)([], "cu", [])
    assert given == [1] * descriptors


def test_a_suspect_gpu_is_checked_before_a_launch_is_made(monkeypatch):
    asked = []
    monkeypatch.setattr(host, "_is_suspect", lambda device: True)
    launcher(Kernel(), check=lambda *about: asked.append(about))("p", 9, SIZES, [], GPU)
    assert asked == [(GPU, (2, 4))]


def test_warps_of_64_threads_are_half_as_many_but_four():
    assert [launcher(Kernel()).warps(n, lanes) for n in ("o", "p") for lanes in (32, 64)] == [8, 4, 2, 2]


def test_threads_interpret_one_kernel_at_a_time():
    """With TRITON_INTERPRET a module has functions that are interpreted already. Triton's interpreter is one for all threads."""
    inside, met = [], []

    def run(*given, **options):
        inside.append(0)
        time.sleep(0.01)
        met.append(len(inside))
        inside.pop()
    kernel = type("Interpreted", (Kernel,), {"__getitem__": lambda self, grid: run})()
    launch = launcher(kernel)("o", 1, SIZES, [1], CPU)
    threads = [threading.Thread(target=launch, args=([], None, [])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [1, 1, 1, 1]
