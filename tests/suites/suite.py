"""A pytest plugin that runs another project's tests of the gated delta rule against our op. `run_suites.py` starts it; an adapter
(`of_NAME.py`) says what stands for what. It has:

    ENV                the variable that names a checkout
    PATHS              test files in it
    WORDS              what pytest is told beside them
    DIFFERENT          pattern of a test's name -> why our op differs, or has no such thing: these are not run
    prepare(root)      before collection: what the tests import
    adapt(module)      after it: names in a test module
"""
from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gdn_codegen
from gdn_codegen.runtime.call.arguments import Options, Tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: What CPU tensors can bear of a test: tokens x value heads.
CPU_WORK = int(os.environ.get("SUITE_CPU_WORK", "1200"))
#: Results that are gradients, as tests name them.
GRADIENT = re.compile(r"\s*(d[qkvgb]|dh0|dA\w*|d?bias|ddt\w*|db\w*|dbeta)\b")
ADAPTERS = {"fla": "of_fla", "fla_plugin": "of_fla_plugin",
            "flashqla": "of_flashqla", "flashinfer": "of_flashinfer", "aiter": "of_aiter"}


def adapter(name: str) -> Any:
    return importlib.import_module(ADAPTERS[name])


# --- what adapters are made of ----------------------------------------------------------------------------------------
def package(name: str, folder: Path | None = None, **has: Any) -> ModuleType:
    """A module of this name with these attributes; its submodules, where a folder is given, are the checkout's own."""
    m = ModuleType(name)
    m.__path__ = [str(folder)] if folder else []
    for n, x in has.items():
        setattr(m, n, x)
    sys.modules[name] = m
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, m)
    return m


def absent(name: str) -> Callable[..., Any]:
    """Stands for a function that we do not have: a test that calls it fails, unless DIFFERENT names it."""
    def call(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{name} has no counterpart")
    return call


def target() -> dict[str, str]:
    return {"target": os.environ["SUITE_TARGET"]} if os.environ.get("SUITE_TARGET") else {}


def inference(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` on detached tensors. Its results have gradients of zero, so that a test's backward pass runs; what is compared of that
    is left out."""
    def run(*args: Any, **options: Any) -> Any:
        given = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
        plain = lambda x: x.detach() if isinstance(x, torch.Tensor) else x
        results = fn(*map(plain, args), **{n: plain(x) for n, x in options.items()}, **target())
        if not given or not torch.is_grad_enabled():
            return results
        nothing = sum((x * 0).nan_to_num(0, 0, 0).sum().float() for x in given)
        return tuple(r + nothing.to(r.dtype) if isinstance(r, torch.Tensor) else r for r in results)
    return run


chunk = inference(gdn_codegen.chunk_gated_delta_rule)
recurrent = inference(gdn_codegen.fused_recurrent_gated_delta_rule)
OURS = {*Tensors._fields, *Options._fields, "scale", "state_v_first"}


def without_gradients(assert_close: Callable[..., None]) -> Callable[..., None]:
    """A comparison that leaves gradients out, by the names that tests give."""
    def compare(name: str, *args: Any, **options: Any) -> None:
        if not GRADIENT.match(name):
            assert_close(name, *args, **options)
    return compare


class Torch:
    """The module torch, for tests that say "cuda", where there is no GPU."""

    def __init__(self) -> None:
        nothing = lambda *a: None
        self.cuda = package("torch_cuda_on_cpu", synchronize=nothing, manual_seed=nothing, manual_seed_all=nothing,
                            empty_cache=nothing, is_available=lambda: True)

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros"):
            return found
        return lambda *a, **more: found(*a, **{n: x for n, x in more.items() if n != "device"})

    def device(self, *given: Any) -> torch.device:
        return torch.device("cpu")


# --- the plugin ---------------------------------------------------------------------------------------------------------
def _tokens(p: dict[str, Any]) -> int:
    """Tokens x value heads of a test's parameters, as the four suites call them."""
    lists = p.get("cu_seqlens") or p.get("cu_seqlens_list")
    total = lists[-1] if lists else sum(p["seq_lens"]) if "seq_lens" in p else \
        p.get("B", p.get("batch_size", 1)) * p.get("T", p.get("num_tokens", p.get("seq_len", 1)))
    return int(total * max(p.get("HV", p.get("H", 1)), p.get("num_v_heads", 1), p.get("num_q_heads", 1)))


class Plugin:
    """Selects, and writes what came of each test to SUITE_OUT."""

    def __init__(self) -> None:
        self.adapter, self.start = adapter(os.environ["SUITE"]), time.monotonic()
        self.out: dict[str, Any] = {"passed": 0, "names": [], "failed": {}, "skipped": Counter(), "different": Counter(),
                                    "left out": Counter(), "seconds": 0, "done": False}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for module in {item.module for item in items}:  # type: ignore[attr-defined]
            self.adapter.adapt(module)
        every, at, kept = int(os.environ.get("SUITE_EVERY", "1")), Counter[str](), []
        for item in items:
            params = getattr(getattr(item, "callspec", None), "params", {})
            why = next((w for pattern, w in self.adapter.DIFFERENT.items() if re.search(pattern, item.nodeid)), "")
            function = item.nodeid.partition("[")[0]
            if why:
                self.out["different"][f"{function.rpartition('::')[2]}: {why}"] += 1
            elif DEVICE == "cpu" and _tokens(params) > CPU_WORK:
                self.out["left out"]["too large for CPU tensors"] += 1
            elif at[function] % every:
                self.out["left out"][f"all but every {every}th"] += 1
                at[function] += 1
            else:
                at[function] += 1
                kept.append(item)
        items[:] = kept
        self._write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a file that does not import is no empty file
            self.out["failed"][report.nodeid] = str(report.longrepr).strip().splitlines()[-1][:300]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = str(report.longrepr).splitlines()
            said = [x[1:].strip() for x in lines if x.startswith("E ")]
            self.out["failed"][report.nodeid] = (said or lines or [""])[0][:300]
        elif report.skipped:
            self.out["skipped"][str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)[:160]] += 1
        elif report.when == "call":
            self.out["passed"] += 1
            self.out["names"].append(report.nodeid)
        self._write()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        limit = float(os.environ.get("SUITE_SECONDS", "0"))
        if limit and time.monotonic() - self.start > limit and self.session is not None:
            self.session.shouldstop = "time is up"

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.out["done"] = not session.shouldstop
        if hasattr(session.config, "workeroutput"):  # one of several processes; each has collected the same
            session.config.workeroutput["suite"] = json.dumps([self.out["different"], self.out["left out"]])
        self._write()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if "suite" in getattr(node, "workeroutput", {}):
            self.out["different"], self.out["left out"] = json.loads(node.workeroutput["suite"])

    def _write(self) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            self.out["seconds"] = round(time.monotonic() - self.start)
            Path(os.environ["SUITE_OUT"]).write_text(json.dumps(self.out))


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("gpu", "hopper", "blackwell", "sm120", "long_running", "slow"):
        config.addinivalue_line("markers", f"{mark}: the suite's own")
    config.pluginmanager.register(Plugin(), "suite-results")


if "SUITE_ROOT" in os.environ:  # before a checkout's conftest is imported, which is before `pytest_configure`
    adapter(os.environ["SUITE"]).prepare(Path(os.environ["SUITE_ROOT"]))
