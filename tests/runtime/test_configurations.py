"""Configurations of autotuned Triton kernels, which `bench` compiles side by side for peers."""
import sys
import threading
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from gdn_codegen.tools import compile_ahead as ahead
from gdn_codegen.tools import configurations
from gdn_codegen.tools.check_triton import Driver
from gdn_codegen.tools.configurations import compiled_side_by_side

triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")
pytest.importorskip("triton.runtime._async_compile")
Autotuner = triton.runtime.Autotuner
PLAIN = Autotuner.prune_configs
META = {"grid": (1,), "warmup": False}


@pytest.fixture(autouse=True)
def all_lines():
    """A line that another test has seen is said again."""
    configurations._say.cache_clear()


@contextmanager
def tuned(compiles, widths=(16, 32)):
    """An autotuner of a kernel with a configuration for each width, of which `compiles` compiles each. It times none."""
    @triton.jit
    def kernel(n, WIDTH: tl.constexpr):
        tl.device_print("n", tl.arange(0, WIDTH) + n)

    timed = []

    def times(call, quantiles):
        timed.append(call)
        return [0.0, 0.0, 0.0]
    triton.runtime.driver.set_active(Driver(ahead._target("sm_90a")))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tuner = triton.autotune([triton.Config({"WIDTH": w}) for w in widths], key=[], do_bench=times)(kernel)
        _ = kernel.device_caches[0]  # sets what compiles
        if compiles is not None:
            kernel.compile = compiles
        tuner.nargs, tuner.timed, tuner.found = {"n": 3}, timed, kernel.device_caches[0][0]
        yield tuner
    finally:
        triton.runtime.driver.set_active(None)


def test_two_compile_side_by_side():
    both = threading.Barrier(2, timeout=60)  # passed by two threads that are inside at once
    here, seen = threading.current_thread(), set()

    def compiles(src, **options):
        both.wait()
        seen.add((threading.current_thread() is here, src.constants[(1,)]))
        return f"width {src.constants[(1,)]}"
    with tuned(compiles) as tuner:
        with compiled_side_by_side(2):
            assert tuner.prune_configs(META) == tuner.configs
        assert seen == {(False, 16), (False, 32)}
        assert sorted(tuner.found.values()) == ["width 16", "width 32"], "where launches look for them"
        seen.clear()
        tuner.prune_configs(META)
        assert not seen, "the context has ended"


def test_it_is_as_before_afterwards():
    with compiled_side_by_side(2):
        assert Autotuner.prune_configs is not PLAIN
    assert Autotuner.prune_configs is PLAIN
    with pytest.raises(KeyError), compiled_side_by_side(2):
        raise KeyError
    assert Autotuner.prune_configs is PLAIN


@pytest.mark.parametrize("threads", [1, None])
def test_one_thread_gains_nothing(threads, monkeypatch):
    monkeypatch.setattr(configurations.os, "sched_getaffinity", lambda pid: {0})
    with compiled_side_by_side(threads):
        assert Autotuner.prune_configs is PLAIN


@pytest.mark.parametrize("missing", ["triton.runtime.autotuner", "triton.runtime._async_compile"])
def test_without_what_compiles_aside(missing, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, missing, None)
    with compiled_side_by_side(2):
        assert Autotuner.prune_configs is PLAIN
    assert capfd.readouterr().err == ""


def test_another_triton(monkeypatch, capfd):
    """An autotuner that this does not know is left alone, and a line says so."""
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", SimpleNamespace(Autotuner=object()))
    for _ in range(2):
        with compiled_side_by_side(2):
            pass
    assert capfd.readouterr().err.count("\n") == 1


def test_what_fails_is_left_to_triton(capfd):
    """A kernel whose configurations this cannot compile is tuned by Triton, and a process says so once."""
    with tuned(None) as tuner, compiled_side_by_side(2):
        tuner.nargs = {"n": 3, "no such argument": 4}
        for _ in range(3):
            assert tuner.prune_configs(META) == tuner.configs
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("gdn_codegen: configurations of a Triton kernel compile one after another: TypeError: ")


def test_a_configuration_that_does_not_compile(capfd):
    """The others are there. Its error is not lost: Triton, which may take it for a configuration that does not fit, meets it."""
    def compiles(src, **options):
        if src.constants[(1,)] == 32:
            raise triton.OutOfResources(3, 2, "registers")
        return "width 16"
    with tuned(compiles) as tuner:
        with compiled_side_by_side(2):
            tuner.prune_configs(META)
        assert "width 16" in tuner.found.values() and capfd.readouterr().err == ""
        with pytest.raises(triton.OutOfResources):
            tuner.fn.run(3, WIDTH=32, grid=(1,), warmup=False)


def test_an_interrupt_waits_for_none_that_has_not_begun(monkeypatch):
    begun, stopped = [], threading.Event()

    class Threads(configurations._Threads):
        @property
        def stopped(self):
            return stopped.is_set()

        @stopped.setter
        def stopped(self, to):
            stopped.set()

    def compiles(src, **options):
        begun.append(src.constants[(1,)])
        assert stopped.wait(20)
    monkeypatch.setattr(configurations, "_Threads", Threads)
    with tuned(compiles, widths=(1, 2, 4, 8, 16)) as tuner, pytest.raises(KeyboardInterrupt), compiled_side_by_side(2):
        def run(n, *, WIDTH, plain=tuner.fn.run, **meta):
            if WIDTH == 16:
                raise KeyboardInterrupt
            return plain(n, WIDTH=WIDTH, **meta)
        monkeypatch.setattr(tuner.fn, "run", run)
        tuner.prune_configs(META)
    assert len(begun) <= 2 and Autotuner.prune_configs is PLAIN


@pytest.mark.slow
def test_triton_itself(tmp_path, monkeypatch):
    """With Triton's own compiler, which has no ranges of 48: binaries of the others are where launches look for them, before one
    is timed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with tuned(None, widths=(16, 32, 48)) as tuner, compiled_side_by_side(2):
        tuner.prune_configs(META)
        there = [x for x in tuner.found.values() if isinstance(x, triton.compiler.CompiledKernel)]
        assert len(there) == 2 and all(x.asm["cubin"] for x in there) and not tuner.timed
