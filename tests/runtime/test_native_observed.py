"""Kernels that functions of TVM's FFI start: CUDA's driver starts them instead, with the parameters seen in a captured graph.

driver.c stands for the driver, a Python function for what TVM compiled, and CPU tensors for those of a GPU.
"""
import ctypes
import shutil
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("tvm_ffi")
pytest.importorskip("tilelang")

import tvm_ffi
from test_native_launcher import NONE, lent
from test_native_triton import Driver

from gdn_codegen.host.tilelang import _as_data
from gdn_codegen.runtime.call import native_launcher
from gdn_codegen.runtime.call.native_launcher import ARGUMENT, FIXED, WORKSPACE, Asked, launcher, row

pytestmark = [pytest.mark.slow,  # the first compiles the launcher
              pytest.mark.skipif(not (shutil.which("g++") and shutil.which("gcc")), reason="needs C and C++ compilers")]
ASKED = Asked(("fused",), True, True, (), 0.5, lambda t: None)
#: Given to the function: tensors x, w and ends, whole numbers 7 and -2^40, and the scale.
NAMES = "x", "w", "fixed", "ends", "seven", "far", "scale"
FIXED_ONE = torch.ones(3)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "driver.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(Path(__file__).with_name("driver.c")), "-o", str(path)], check=True)
    return path


@pytest.fixture
def driver(library, monkeypatch):
    monkeypatch.setattr(native_launcher, "DRIVER", str(library))
    monkeypatch.setattr(native_launcher, "is_nvidia", lambda device: True)
    made = Driver(library)
    made.set(cooperative=0, cluster=0, invalid=0, streams=0, graphs=0, mode=1, user=0, unknown=0)
    ctypes.c_ulonglong.in_dll(made.of, "edge").value = 0
    return made


def bits(x, form):
    return int.from_bytes(struct.pack(form, x), "little")


#: Parameters of the kernel: their sizes and bits, in another order than the function's.
TAKES = {"far": (8, lambda a: a.far % 2**64), "w": (8, lambda a: a.w), "scale": (4, lambda a: bits(a.scale, "<f")),
         "seven": (4, lambda a: a.seven), "fixed": (8, lambda a: a.fixed), "three": (2, lambda a: 3),
         "ends": (8, lambda a: a.ends), "wide": (8, lambda a: bits(a.scale, "<d")), "x": (8, lambda a: a.x),
         "x again": (8, lambda a: a.x)}


def stream():
    """That of TVM's FFI, on which its functions launch."""
    get = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()).TVMFFIEnvGetStream
    get.restype = ctypes.c_void_p
    return ctypes.c_void_p(get(1, 0))


def chain(driver, takes=TAKES, kernels=1, grid=lambda a: (3, 2, 1), end=lambda a: None):
    """A launcher of a function that starts so many kernels and then calls `end`, and the calls of the function."""
    seen = []
    sizes = (ctypes.c_int * 32).in_dll(driver.of, "sizes")
    sizes[:] = [*(size for size, _ in takes.values()), *[0] * (32 - len(takes))]
    driver.set(parameters=len(takes))

    def function(*args):
        values = [torch.from_dlpack(y).data_ptr() if hasattr(y, "shape") else y for y in args]
        a = SimpleNamespace(**dict(zip(NAMES, values, strict=True)))
        seen.append(a)
        held = [(ctypes.c_ulonglong * 16)(f(a)) for _, f in takes.values()]
        places = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        for _ in range(kernels):
            assert not driver.of.cuLaunchKernel(ctypes.c_void_p(0xABC), *grid(a), 64, 1, 1, 4096, stream(), places, None)
        end(a)

    slots = [(ARGUMENT, 0, (8,)), (WORKSPACE, torch.empty(3)), (FIXED, FIXED_ONE), (ARGUMENT, 1, (2,))]
    run = launcher(NONE, ASKED, [torch.zeros(8), torch.zeros(2, dtype=torch.int32)], slots,
                   [row(_as_data(lent()(function), (7, -(1 << 40)), 3, 1), range(4))], (0,))
    return (lambda x, ends, scale=None: run((x, ends), ASKED.options, scale, True)), seen


def left_behind(driver):
    """Streams and graphs that are not destroyed, whether a stream is captured, and the thread's mode."""
    return [ctypes.c_int.in_dll(driver.of, n).value for n in ("streams", "graphs", "capturing", "mode")]


def test_the_driver_starts_what_the_function_started(driver):
    run, seen = chain(driver)
    assert len(seen) == 2 and driver.launches == 0 and left_behind(driver) == [0, 0, 0, 1]
    for n, scale in enumerate((None, 0.25)):
        x, ends = torch.zeros(8), torch.zeros(2, dtype=torch.int32)
        assert run(x, ends, scale)[0] is x and driver.launches == n + 1 and len(seen) == 2
        handle, about, values = driver.seen()
        assert handle == 0xABC and about == [3, 2, 1, 64, 1, 1, 4096, 0]
        got = {name: value % 256 ** size for value, (name, (size, _)) in zip(values, TAKES.items(), strict=False)}
        said = SimpleNamespace(x=x.data_ptr(), w=got["w"], fixed=FIXED_ONE.data_ptr(), ends=ends.data_ptr(), seven=7,
                               far=-(1 << 40), scale=scale or 0.5)
        assert got == {name: bits_of(said) for name, (_, bits_of) in TAKES.items()}
        assert got["w"] % 16 == 0 and got["w"] not in (0, x.data_ptr())


#: Kernels that the driver does not start: what differs from the one above, and what the driver says of its graph.
OTHERS = {
    "a place in a tensor": (dict(takes={"x": (8, lambda a: a.x + 4)}), {}),
    "half of an address": (dict(takes={"x": (4, lambda a: a.x >> 16 & 0xffffffff)}), {}),
    "what address it is": (dict(takes={"x": (4, lambda a: a.x % 32)}), {}),
    "one address or the other": (dict(takes={"x": (8, lambda a: a.x if a.scale < 0.5 else a.w)}), {}),
    "another number": (dict(takes={"scale": (4, lambda a: bits(2 * a.scale, "<f"))}), {}),
    "a flag of the number": (dict(takes={"scale": (4, lambda a: int(a.scale < 1))}), {}),
    "a whole number of it": (dict(takes={"scale": (4, lambda a: int(a.scale))}), {}),
    "a number in 16 bits": (dict(takes={"scale": (2, lambda a: bits(a.scale, "<e"))}), {}),
    "a descriptor": (dict(takes={"x": (128, lambda a: 5)}), {}),
    "a grid that depends on the number": (dict(grid=lambda a: (int(10 + 10 * a.scale), 1, 1)), {}),
    "no kernel": (dict(kernels=0), {}),
    "two kernels": (dict(kernels=2), {}),
    "an early start": ({}, dict(edge=1 << 16)),
    "a cooperative launch": ({}, dict(cooperative=1)),
    "clusters": ({}, dict(cluster=2)),
    "a failed capture": ({}, dict(invalid=1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_more_than_a_grid_and_parameters_stays_with_tvm(name, driver):
    about, says = OTHERS[name]
    ctypes.c_ulonglong.in_dll(driver.of, "edge").value = says.get("edge", 0)
    driver.set(**{n: x for n, x in says.items() if n != "edge"})
    run, seen = chain(driver, **about)
    assert len(seen) == 2 and left_behind(driver) == [0, 0, 0, 1]
    for n in range(2):
        assert run(torch.zeros(8), torch.zeros(2, dtype=torch.int32))
        assert len(seen) == 3 + n and driver.launches == (n + 1) * about.get("kernels", 1)


@pytest.mark.parametrize("what, calls", [("grid", 1), ("end", 2)])
def test_a_function_that_fails_stays_with_tvm(what, calls, driver):
    def fails(a):
        if what == "grid" or a.scale != -0.3:
            raise ValueError("wrong")
    run, seen = chain(driver, **{what: fails})
    assert len(seen) == calls and left_behind(driver) == [0, 0, 0, 1]
    assert run(torch.zeros(8), torch.zeros(2, dtype=torch.int32)) is None and len(seen) == calls + 1


def test_a_captured_call_has_ends_of_rows_of_its_own(driver):
    made = []
    run = launcher(NONE, ASKED, [torch.zeros(8)], [(ARGUMENT, 0, (8,)), (ARGUMENT, 1, (2,))], [], (0,),
                   rows=lambda: made.append(torch.zeros(2, dtype=torch.int32)) or made[-1])
    for state, makes in ((dict(), 1), (dict(), 1), (dict(user=1), 2), (dict(user=2), 3), (dict(user=0), 3), (dict(unknown=1), 4)):
        driver.set(**state)
        assert run((torch.zeros(8),), ASKED.options, None, True) and len(made) == makes


def test_an_older_driver_observes_nothing(driver, tmp_path, monkeypatch):
    source, path = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(Path(__file__).with_name("driver.c").read_text().replace("cuGraphGetEdges_v2", "cuGraphGetEdges"))
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    monkeypatch.setattr(native_launcher, "DRIVER", str(path))
    run, seen = chain(driver)
    assert not seen and run(torch.zeros(8), torch.zeros(2, dtype=torch.int32)) and len(seen) == 1


def test_only_nvidia_gpus_are_observed(library, monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(native_launcher, "DRIVER", str(library))
    assert native_launcher.is_nvidia(gpu) and not native_launcher.is_nvidia(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not native_launcher.is_nvidia(gpu)
    monkeypatch.undo()
    monkeypatch.setattr(native_launcher, "DRIVER", "/nowhere/libcuda.so.1")
    assert not native_launcher.is_nvidia(gpu)
