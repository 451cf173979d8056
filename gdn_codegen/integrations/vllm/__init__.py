"""vLLM: its general plug-in (entry points vllm.general_plugins), whose ops for GDN and KDA layers ours then serve.

vLLM's `load_general_plugins` (vllm/plugins/__init__.py) calls `register` in each of its processes, before it imports models, and
perhaps more than once. Nothing of vLLM, torch or our ops is imported then: an op (sites.py) or a layer (layers.py) is replaced
when vLLM has imported the module that defines it. So importers get the replacement, and other processes keep out of it.

GDN_CODEGEN_VLLM=0 turns the plug-in off, as vLLM's own VLLM_PLUGINS does. GDN_DEBUG=1 says what was replaced, and what was not.
"""
from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

#: The variable of the environment that turns the plug-in off, with 0.
SWITCH = "GDN_CODEGEN_VLLM"
#: Packages with the ops, where new versions of vLLM have them, and where older ones do.
OPS = "vllm.third_party.flash_linear_attention.ops", "vllm.model_executor.layers.fla.ops"
#: Modules with Qwen's layer, newest first.
LAYERS = ("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", "vllm.model_executor.layers.mamba.gdn_linear_attn",
          "vllm.model_executor.models.qwen3_next")
#: Packages with ops for KDA of one model; a layer's module with another, and a module whose layer has one as a method.
KERNELS = {f"vllm.models.{model}.{vendor}.ops.third_party.kda": names for vendor in ("nvidia", "amd") for model, names in (
    ("kimi_k3", ("chunk", "fused_recurrent")), ("glm5next", ("kernels",)))}
FLASHKDA = "vllm.models.kimi_k3.nvidia.kda"
GLM = "vllm.models.glm5next.common.kda"
KDA = frozenset((*(f"{package}.kda" for package in OPS), *(f"{package}.{n}" for package, names in KERNELS.items() for n in names),
                 FLASHKDA, GLM))
#: All modules that define what is replaced.
MODULES = frozenset((*(f"{package}.{n}" for package in OPS for n in ("chunk", "fused_recurrent", "fused_sigmoid_gating")), *KDA,
                     *LAYERS))


def say(text: str) -> None:
    """Print a line to stderr, with GDN_DEBUG=1."""
    if os.environ.get("GDN_DEBUG", "0") not in ("", "0"):
        print(f"gdn_codegen: vllm: {text}", file=sys.stderr)


def register() -> None:
    """Replace vLLM's ops as its modules are imported, and those of modules that are imported already. Once, however often it is
    called. Without vLLM's modules it does nothing."""
    if os.environ.get(SWITCH) == "0":
        say(f"nothing is replaced: {SWITCH}=0")
        return
    if not _is_here():
        say("nothing is replaced: there is no module of vLLM's ops or of Qwen's layer")
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in sorted(MODULES & sys.modules.keys()):
        _replace(sys.modules[name], everywhere=True)


def _is_here() -> bool:
    """Whether vLLM has one of MODULES. Nothing is imported."""
    spec = find_spec("vllm")
    folders = spec.submodule_search_locations if spec is not None else None
    return any(Path(folder, *name.split(".")[1:]).with_suffix(".py").is_file() for folder in folders or () for name in MODULES)


class _Finder:
    """Finds MODULES where Python does, and replaces what they define once they have run."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As importlib.abc.MetaPathFinder has it."""
        spec = PathFinder.find_spec(name, path, target) if name in MODULES else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _replace(module)
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace(module: ModuleType, everywhere: bool = False) -> None:
    """Replace what a module of vLLM defines. everywhere: also in modules of vLLM that have imported it. vLLM runs without us if
    that fails, and a warning says so."""
    try:
        if module.__name__ in LAYERS:
            from . import layers
            layers.replace(module)
        elif module.__name__ in KDA:
            from . import kda
            kda.replace(module, everywhere)
        else:
            from . import sites
            sites.replace(module, everywhere)
    except Exception as e:
        warnings.warn(f"gdn_codegen serves nothing of {module.__name__}: {type(e).__name__}: {e}", RuntimeWarning, stacklevel=2)
