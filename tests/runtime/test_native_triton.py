"""What the native launcher hands to CUDA's driver for a kernel of Triton.

driver.c stands for the driver, and CPU tensors for those of a GPU. What kernels take is compared with what Triton compiles for
sm_90."""
import ctypes
import re
import shutil
import struct
import subprocess
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

from gdn_codegen import recurrent_gated_delta_rule
from gdn_codegen.host.triton import _as_data
from gdn_codegen.runtime import cache
from gdn_codegen.runtime.build import render
from gdn_codegen.runtime.call import launch as calls
from gdn_codegen.runtime.call import native_launcher
from gdn_codegen.runtime.call.native_launcher import ARGUMENT, WORKSPACE, Asked, launcher, row
from gdn_codegen.runtime.load import import_path
from gdn_codegen.tools import check_triton

pytestmark = pytest.mark.skipif(not (shutil.which("g++") and shutil.which("gcc")), reason="needs C and C++ compilers")
NONE = native_launcher.Path("nothing was compiled ahead")
ASKED = Asked(("fused",), True, True, (), 0.5, lambda t: None)
SIGNATURE = {"q": "*bf16", "S": "*fp32", "cu": "*i32", "scale": "fp32", "N": "i32", "T": "i64", "one": "constexpr",
             "OPERAND": "constexpr"}
REST = (7, -(1 << 40), 1, torch.bfloat16)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "driver.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(native_launcher.Path(__file__).with_name("driver.c")), "-o", str(path)],
                   check=True)
    return path


class Driver:
    """The library that stands for CUDA's driver: how it answers, and what it saw."""

    def __init__(self, path):
        self.of = ctypes.CDLL(str(path))
        self.set(context=1, status=0, launches=0, parameters=0)

    def set(self, **what):
        for name, x in what.items():
            (ctypes.c_void_p if name == "context" else ctypes.c_int).in_dll(self.of, name).value = x

    @property
    def launches(self):
        return ctypes.c_int.in_dll(self.of, "launches").value

    def seen(self):
        """The kernel, (grid, block, shared memory, stream), and 64 bits of each parameter."""
        handle, *values = (ctypes.c_ulonglong * 65).in_dll(self.of, "seen")
        return handle, list((ctypes.c_ulonglong * 8).in_dll(self.of, "config")), values


@pytest.fixture
def driver(library, monkeypatch):
    monkeypatch.setattr(native_launcher, "DRIVER", str(library))
    return Driver(library)


def kernel(signature=None, **about):
    """A compiled kernel, as far as launches look at it."""
    plain = dict(target=SimpleNamespace(backend="cuda", warp_size=32), num_ctas=1, num_warps=4, shared=1024,
                 global_scratch_size=0, profile_scratch_size=0, tensordesc_meta=None,
                 launch_cooperative_grid=False, launch_pdl=False)
    return SimpleNamespace(metadata=SimpleNamespace(**dict(plain, **about)), run=SimpleNamespace(), function=0xABCDEF012345,
                           src=SimpleNamespace(signature=signature or SIGNATURE))


def chain(*compiled):
    slots = [(ARGUMENT, 0, (8,)), (WORKSPACE, torch.empty(3)), (ARGUMENT, 1, (2,))]
    run = launcher(NONE, ASKED, [torch.zeros(8), torch.zeros(2, dtype=torch.int32)], slots,
                   [row(x, range(3)) for x in compiled], (0,))
    return lambda x, ends, scale=None: run((x, ends), ASKED.options, scale, True)


@pytest.mark.slow
def test_the_driver_gets_what_the_kernel_takes(driver):
    x, ends = torch.zeros(8), torch.zeros(2, dtype=torch.int32)
    driver.set(parameters=8)
    run = chain(_as_data(kernel(), 9, REST, 2, 1))
    assert run(x, ends)[0] is x and run(x, ends, 0.25)[0] is x and driver.launches == 2
    handle, about, values = driver.seen()
    assert handle == 0xABCDEF012345 and about == [9, 1, 1, 128, 1, 1, 1024, 0]
    assert values[0] == x.data_ptr() and values[1] not in (0, x.data_ptr()) and values[2] == ends.data_ptr()
    assert struct.unpack("<f", struct.pack("<Q", values[3])[:4]) == (0.25,)
    assert values[4] == 7 and values[5] == (1 << 64) - (1 << 40) and values[6:8] == [0, 0]


@pytest.mark.slow
def test_numbers_in_64_bits(driver):
    driver.set(parameters=6)
    run = chain(_as_data(kernel(dict(SIGNATURE, scale="fp64")), 9, REST, 2, 1))
    assert run(torch.zeros(8), torch.zeros(2, dtype=torch.int32), 0.1)
    assert struct.unpack("<d", struct.pack("<Q", driver.seen()[2][3])) == (0.1,)


@pytest.mark.parametrize("about", [
    dict(num_ctas=2), dict(shared=228 * 1024), dict(global_scratch_size=128), dict(profile_scratch_size=8),
    dict(launch_cooperative_grid=True), dict(launch_pdl=True), dict(tensordesc_meta=[{}]),
    dict(target=SimpleNamespace(backend="hip", warp_size=64))], ids=lambda x: next(iter(x)))
def test_kernels_that_need_more_start_from_python(about):
    assert _as_data(kernel(), 9, REST, 2, 1) and _as_data(kernel(**about), 9, REST, 2, 1) is None


@pytest.mark.parametrize("changed", [{"q": "tensordesc<bf16[16, 16]>"}, {"q": "nvTmaDesc"}, {"q": "constexpr"}, {"scale": "i32"},
                                     {"scale": "constexpr"}, {"scale": "fp16"}, {"N": "fp32"}, {"N": "*i32"}])
def test_parameters_of_other_types_start_from_python(changed):
    assert _as_data(kernel(dict(SIGNATURE, **changed)), 9, REST, 2, 1) is None


def test_a_profilers_hooks_see_launches_from_python(monkeypatch):
    hook = SimpleNamespace(calls=[print])
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", hook)
    assert _as_data(kernel(), 9, REST, 2, 1) is None
    hook.calls.clear()
    assert _as_data(kernel(), 9, REST, 2, 1)


@pytest.mark.slow
def test_without_a_context_or_a_driver_python_launches(driver, monkeypatch):
    x = torch.zeros(8), torch.zeros(2, dtype=torch.int32)
    run = chain(_as_data(kernel(), 9, REST, 2, 1))
    driver.set(context=0)
    assert run(*x) is None and driver.launches == 0
    driver.set(context=1, status=700)
    assert run(*x) is None and driver.launches == 1
    monkeypatch.setattr(native_launcher, "DRIVER", "/nowhere/libcuda.so.1")
    native_launcher._drives.cache_clear()
    assert launcher(NONE, ASKED, [x[0]], [], [row(_as_data(kernel(), 9, REST, 2, 1), range(3))], ()) is None
    native_launcher._drives.cache_clear()


# --- generated kernels ------------------------------------------------------------------------------------------------
#: Decoding by single tokens, as README's example asks for it.
DECODE = dict(gate="raw", beta_form="sigmoid", use_qk_l2norm_in_kernel=True, state_v_first=True, inplace_final_state=True,
              output_final_state=True, target="triton")


def given(sequences, packed=False):
    torch.manual_seed(sequences)
    rows = (1, sequences) if packed else (sequences, 1)
    x = dict({n: torch.randn(*rows, h, 16).half() for n, h in (("q", 2), ("k", 2), ("v", 4))}, A_log=torch.rand(4),
             dt_bias=torch.rand(4), g=torch.randn(*rows, 4).half(), beta=torch.randn(*rows, 4).half(),
             initial_state=torch.randn(sequences + 2, 4, 16, 16), state_indices=torch.arange(sequences, dtype=torch.int32))
    return dict(x, cu_seqlens=torch.arange(sequences + 1, dtype=torch.int32)) if packed else x


@pytest.mark.slow
@pytest.mark.parametrize("text", ["gdn_c64_bthd", "gdn_c64_bthd_staged"])
def test_what_is_passed_is_what_triton_compiled(text, monkeypatch):
    """Its parameters in PTX, and the two of scratch after them."""
    m = import_path(native_launcher.Path(__file__).parents[2] / "generated" / "triton" / f"{text}.py")
    got, plain = [], triton.compile
    monkeypatch.setattr(triton, "compile", lambda *a, **k: got.append(plain(*a, **k)) or got[-1])
    for name, _, _, tensors, numbers in m.TABLES.kernels:
        assert not check_triton._compile(m, next(r for r in m.TABLES.kernels if r[0] == name), "sm_90", 2, 4).error
        made = got[-1]
        rest = [0] * (len(made.src.signature) - len(tensors) - 1 - len(numbers))
        made.function, made._run = 1, SimpleNamespace()
        _, _, parameters, _ = _as_data(made, 1, rest, len(tensors), len(numbers))
        text = made.asm["ptx"]
        declared = re.findall(r"\.param \.(\w+)", text[text.index(".entry"):text.index(".reqntid")])
        sizes = {"t": "u64", "f": "f32", "i": "u32"}
        assert [*(sizes[what] for what, _ in parameters), "u64", "u64"] == [n.replace("b", "u") for n in declared]


class Compiles:
    """A kernel that notes what it is launched with from Python, by name, and gives itself as what Triton compiled."""

    def __init__(self, of, seen):
        self.arg_names, self.of, self.seen = of.arg_names, of, seen
        self.__dict__.update(vars(kernel({})))

    def __getitem__(self, grid):
        def run(*a, num_warps=4, num_stages=1, enable_fp_fusion=True, **more):
            said = dict(zip(self.arg_names, (*a, *more.values()), strict=True))
            self.src = SimpleNamespace(signature={
                p.name: "*i32" if isinstance(x, torch.Tensor) else "fp32" if isinstance(x, float) else
                "constexpr" if p.is_constexpr or (x == 1 and not p.do_not_specialize) else "i32"
                for p, x in zip(self.of.params, said.values(), strict=True)})
            self.seen.append((grid[0], {n: x for n, x in said.items() if self.src.signature[n] != "constexpr"}))
            return self
        return run


@pytest.fixture
def op(driver, monkeypatch):
    """The op for CPU tensors as for those of a GPU, and what its kernels are launched with from Python."""
    seen = []

    def module(b):
        text = render(b)
        eager = 'looks = host.check or self.device.type == "cpu"'
        assert eager in text
        m = import_path(cache.write(cache.folder() / "texts" / f"driven_{cache.digest(text)}.py",
                                    text.replace(eager, "looks = host.check")))
        m._is_suspect, m._lanes, m._needs_newer_ptxas = (lambda device: False), (lambda: 32), (lambda: False)
        made = m._launcher
        if not hasattr(made, "plain"):
            made.plain = made.kernels
        made.kernels = {n: Compiles(k, seen) for n, k in made.plain.items()}
        made.compiled.clear()
        gpu = SimpleNamespace(type="cuda", index=0)
        m.HOST.launcher = lambda name, instances, sizes, ints, device: made(name, instances, sizes, ints, gpu)
        m.HOST.plans.clear()
        return m

    monkeypatch.setenv("GDN_CODEGEN_ADMIT", "0")
    monkeypatch.setattr(calls, "module", module)
    calls.forget()
    yield lambda x, **more: recurrent_gated_delta_rule(**x, **dict(DECODE, **more)), seen
    calls.forget()


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sequences", [1, 5])
def test_a_settled_call_launches_from_the_driver_what_python_launched(sequences, packed, op, driver):
    call, seen = op
    x = given(sequences, packed)
    call(x)
    (grid, by_name), = seen
    driver.set(parameters=len(by_name) + 2)
    for n, scale in enumerate((None, 0.5, None)):
        y = given(sequences, packed)  # other memory
        o, final = call(y, scale=scale)
        assert len(seen) == 1 and driver.launches == n + 1 and final is y["initial_state"] and o.shape == x["v"].shape
        _, about, values = driver.seen()
        assert about[:7] == [grid, 1, 1, 128, 1, 1, 1024]
        places = {**{f"{n}_ptr": t.data_ptr() for n, t in y.items() if isinstance(t, torch.Tensor)}, "o_ptr": o.data_ptr()}
        places.update({"cu_seqlens": y["cu_seqlens"].data_ptr()} if packed else {})
        for (name, was), value in zip(by_name.items(), values, strict=False):
            if isinstance(was, float):
                (said,) = struct.unpack("<f", struct.pack("<Q", value)[:4])
                assert said == pytest.approx(16 ** -0.5 if scale is None else scale)
            elif isinstance(was, torch.Tensor):
                assert value == places.get(name, value) and value % 16 == 0 and value
            else:
                assert value == was, name
        assert {"T", "q_ptr", "o_ptr", "initial_state_ptr", "cu_seqlens", "scale"} <= {*by_name}
        assert values[len(by_name):len(by_name) + 2] == [0, 0]
    launched = driver.launches
    with pytest.raises(ValueError, match="beta"):
        call(dict(x, beta=x["beta"][..., :3]))
    call(x, output_final_state=False)
    assert driver.launches == launched and len(seen) == 2  # another call, which Python launches first



@pytest.mark.slow
def test_kinds_of_calls_in_turn_are_all_found(op, driver):
    call, seen = op
    kinds = [given(n) for n in (1, 2, 3)]
    for _ in range(3):
        for x in kinds:
            call(x)
    assert len(seen) == 3 and driver.launches == 6 and len(calls.recent) == 3
    for n in range(4, 4 + calls.RECENT):
        call(given(n)), call(given(n))
    launches = driver.launches
    call(kinds[0])
    assert driver.launches == launches + 1 and len(seen) == 3 + calls.RECENT and len(calls.recent) == calls.RECENT
