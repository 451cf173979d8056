"""The part of a generated Triton module that launches its kernels.

Below the line the file is copied into generated modules word for word.
"""
from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import _allocation, interpreter
from triton.runtime.jit import JITFunction

from .tables import Tables

# --- copied from here on ---
_VERSION = tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))
# all generated modules of a process share it, because the state of the interpreter is global
_interpreting = vars(interpreter).setdefault("_one_launch_at_a_time", threading.Lock())


@contextlib.contextmanager
def _interpreted(names: dict[str, Any]) -> Iterator[None]:
    """Replace jitted functions by the Python functions that they wrap, for one launch in the interpreter on CPU tensors.

    names: the global names of the module with the kernels. Triton decides at import whether its library is for the interpreter
    (TRITON_INTERPRET). This context does it for one launch, so the process may compile for a GPU before and after. Another thread
    must not compile meanwhile.
    """
    with _interpreting:
        spaces: list[dict[str, Any]] = [vars(tl), names]
        jitted = [{n: f for n, f in space.items() if isinstance(f, JITFunction)} for space in spaces]
        for space, found in zip(spaces, jitted, strict=True):
            space.update({n: f.fn for n, f in found.items()})
        if _VERSION < (3, 7):
            spaces.append(vars(interpreter))
            jitted.append({"_patch_lang_tensor": interpreter._patch_lang_tensor})
            interpreter._patch_lang_tensor = functools.partial(_patch_lang_tensor, interpreter._patch_lang_tensor)
        try:
            yield
        finally:
            for space, found in zip(spaces, jitted, strict=True):
                space.update(found)


def _patch_lang_tensor(original: Callable[..., None], tensor: Any, *scope: Any) -> None:
    """Triton's function, but `__index__` unpacks an array of one entry: numpy 2.4 no longer converts it to an int."""
    original(tensor, *scope)
    tensor.__index__ = lambda x: x.handle.data.item()


def _lanes() -> int:
    """Threads of a warp of the current GPU."""
    return int(triton.runtime.driver.active.get_current_target().warp_size)


def _is_suspect(device: torch.device) -> bool:
    """True if this version of Triton miscompiles some chains of products on the GPU."""
    return (3, 4) <= _VERSION < (3, 7, 1) and not torch.version.hip and torch.cuda.get_device_capability(device)[0] == 9


#: The first release of CUDA whose ptxas is right about products on Hopper, and flags that change no code. Options of a kernel are
#: part of its key in Triton's cache, so these flags say by which ptxas it is assembled, and keep the binaries of two apart.
_LEAST_PTXAS, _NEWER_FLAGS = (12, 9), "-w --disable-warnings"


def _release(name: str) -> tuple[int, ...]:
    """The release of CUDA of one of Triton's two assemblers, ptxas and ptxas_blackwell; () without it."""
    try:
        return tuple(map(int, getattr(triton.knobs.nvidia, name).version.split(".")))
    except (AttributeError, RuntimeError):  # a Triton that has one of them
        return ()


def _ptxas() -> str:
    """The release of the ptxas that assembles kernels for the current GPU; "" for other GPUs than NVIDIA's."""
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda":
        return ""
    from triton.backends.nvidia.compiler import get_ptxas
    return str((triton.knobs.nvidia.ptxas_blackwell if _needs_newer_ptxas() else get_ptxas(target.arch)).version)


def _needs_newer_ptxas() -> bool:
    """Whether kernels for the current GPU need the ptxas that Triton brings for Blackwell, and may have it.

    Its own one for Hopper is CUDA 12.8's up to Triton 3.7.1. With that some products (wgmma) read wrong shared memory.
    What the user asks for (TRITON_PTXAS_PATH) is taken. What an assembler of a later major release than torch's makes may need
    another driver.
    """
    target = triton.runtime.driver.active.get_current_target()
    asked = "TRITON_PTXAS_PATH" in os.environ or "ptxas" in vars(triton.knobs.nvidia)
    if target.backend != "cuda" or target.arch != 90 or asked:
        return False
    known = int((torch.version.cuda or "99").partition(".")[0])
    other = _release("ptxas_blackwell")
    return _release("ptxas") < _LEAST_PTXAS <= other and other[0] <= known


def _newer_ptxas_options() -> dict[str, str]:
    """Options to compile a kernel with, so that the newer ptxas assembles it where the GPU needs that; else none."""
    if not _needs_newer_ptxas():
        return {}
    from triton.backends.nvidia import compiler
    with _interpreting:  # the lock that all generated modules of a process share
        if not hasattr(compiler, "_gdn_codegen_newer_ptxas"):
            compiler._gdn_codegen_newer_ptxas = threading.local()
            _choose_ptxas_by_options(compiler, compiler._gdn_codegen_newer_ptxas)
    return {"ptx_options": " ".join(filter(None, (triton.knobs.nvidia.ptxas_options, _NEWER_FLAGS)))}


def _choose_ptxas_by_options(compiler: Any, here: Any) -> None:
    """Patch Triton's compiler: kernels whose options have `_NEWER_FLAGS` are assembled by the ptxas for Blackwell, all others as
    before. here: a thread-local, which says whether this thread assembles such a kernel now."""
    own, make = compiler.get_ptxas, compiler.CUDABackend.make_cubin

    def make_cubin(self: Any, src: Any, metadata: Any, opt: Any, *rest: Any) -> Any:
        here.newer = _NEWER_FLAGS in (opt.ptx_options or "")
        try:
            return make(self, src, metadata, opt, *rest)
        finally:
            here.newer = False

    def get_ptxas(arch: int) -> Any:
        return triton.knobs.nvidia.ptxas_blackwell if getattr(here, "newer", False) else own(arch)
    compiler.CUDABackend.make_cubin, compiler.get_ptxas = make_cubin, get_ptxas


def _scratch(size: int, alignment: int, stream: Any) -> torch.Tensor:
    """Memory for the tensor descriptors of a launch."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _give_memory() -> None:
    """Let torch allocate for Triton, unless the caller has set an allocator. The setting is per thread."""
    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(_scratch)


#: Types of parameters that are passed as whole numbers.
_WHOLE = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64")
#: The most shared memory of a block that needs nothing special at the launch.
_SHARED = 227 * 1024


def _as_data(run: Any, instances: int, rest: Sequence[Any], tensors: int, numbers: int) -> tuple[Any, ...] | None:
    """A launch as data, for the native launcher, which calls CUDA's driver: the kernel's handle, its grid, its parameters, and
    what keeps it.

    Parameters: tensors and cu_seqlens ("t", place), numbers ("f" or "d", place), whole numbers ("i", number).
    None for kernels that need more: another driver, clusters, memory for tensor descriptors, a profiler's hooks.
    """
    about = run.metadata
    hooks = (getattr(triton.knobs.runtime, n) for n in ("launch_enter_hook", "launch_exit_hook"))
    more = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "tensordesc_meta")
    if (about.target.backend != "cuda" or about.num_ctas != 1 or about.shared > _SHARED or any(getattr(about, n, 0) for n in more)
            or getattr(run.run, "gsan_enabled", False) or any(getattr(hook, "calls", hook) for hook in hooks)):
        return None
    given = [*(("t", n) for n in range(tensors + 1)), *(("f", n) for n in range(numbers)), *(("i", x) for x in rest)]
    parameters = []
    for of, (what, x) in zip(run.src.signature.values(), given, strict=True):
        if of == "constexpr" and what == "i":  # compiled in
            continue
        takes = "t" if of[0] == "*" else "i" if of in _WHOLE else {"fp32": "f", "f32": "f", "fp64": "d"}.get(of)
        if takes != what and (takes, what) != ("d", "f"):
            return None
        parameters.append((takes, x))
    return run.function, (instances, about.num_warps * about.target.warp_size, about.shared), parameters, run


class TritonLauncher:
    """Launches the kernels of one module: on a GPU, and for CPU tensors in Triton's interpreter.

    kernels: by name. sizes: extents of dims in memory and of tiles. blocks: for each kernel, columns of a split dim that an
    instance computes. warps: for each kernel, warps of 32 threads. stages: how far ahead loops load. unspecialised: integers for
    which kernels are not specialised. in_shares: kernels with twice as many instances as others. descriptors: True if kernels
    make tensor descriptors, which need memory. check: (device, (H, HV)) -> None. It raises RuntimeError if a suspect GPU computes
    wrong results.

    compiled: compiled kernels, by what they are specialised for.
    """

    def __init__(self, tables: Tables, kernels: Mapping[str, Any], sizes: Mapping[str, int], blocks: Mapping[str, dict[str, int]],
                 warps: Mapping[str, int], stages: int, unspecialised: Collection[str], in_shares: Collection[str],
                 descriptors: bool, check: Callable[[torch.device, tuple[int, int]], None]) -> None:
        self.tables, self.kernels, self.sizes, self.blocks, self.check = tables, kernels, sizes, blocks, check
        self.of_32_threads, self.stages, self.unspecialised, self.in_shares = warps, stages, unspecialised, in_shares
        self.descriptors = descriptors
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, name: str, instances: int, sizes: Sequence[int], ints: Sequence[int], device: torch.device
                 ) -> Callable[[Sequence[Any], Any, Sequence[float]], None]:
        """A function that launches the kernel on its tensors, cu_seqlens and numbers."""
        kernel = self.kernels[name]
        instances *= 1 + (name in self.in_shares)
        options = self.options(name, sizes, ints, device)
        if device.type == "cpu":
            return lambda tensors, cu, scalars: self.interpret(kernel, instances, (*tensors, cu, *scalars), options)
        if _is_suspect(device):
            self.check(device, (sizes[3], sizes[4]))
        how = {"num_warps": self.warps(name, _lanes()), "num_stages": self.stages, "enable_fp_fusion": True}
        rest, known, descriptors, run = tuple(options.values()), self.compiled, self.descriptors, None
        kind = name, device.index, *(x for n, x in options.items() if n not in self.unspecialised)

        def launch(tensors: Sequence[Any], cu: Any, scalars: Sequence[float]) -> None:
            """Launch the kernel. The first launch compiles it, or finds it where it was compiled for other sizes."""
            nonlocal run
            if descriptors:
                _give_memory()
            if run is None:  # of pointers alignment is compiled in, on AMD also 32-bit offsets
                mine = (*kind, *((x.data_ptr() % 16 == 0, x.untyped_storage().nbytes() < 1 << 31) for x in tensors))
                run = known.get(mine)
                if run is None:
                    run = known[mine] = kernel[(instances,)](*tensors, cu, *scalars, **options, **how, **_newer_ptxas_options())
                    return
            run[(instances, 1, 1)](*tensors, cu, *scalars, *rest)

        # known after the first launch
        launch.compiled = (  # type: ignore[attr-defined]
            lambda tensors, numbers: None if run is None else _as_data(run, instances, rest, tensors, numbers))
        return launch

    def options(self, name: str, sizes: Sequence[int], ints: Sequence[int], device: torch.device) -> dict[str, Any]:
        """What the kernel is given after its tensors and numbers, in the order of its signature."""
        given: dict[str, Any] = {"OPERAND": tl.float32 if device.type == "cpu" else tl.bfloat16, **self.sizes,
                                 **self.blocks.get(name, {})}
        given.update(zip(("N", "T", "batched", "H", "HV", "slots", "parts", "span"), sizes, strict=False))
        given.update(zip(self.tables.ints[name], ints, strict=True))
        return {n: given[n] for n in self.kernels[name].arg_names if n in given}

    def warps(self, name: str, lanes: int) -> int:
        """Warps of so many lanes. Of 64 it takes half as many, but 4 at least, one for each SIMD unit of a compute unit."""
        warps = self.of_32_threads[name]
        return warps if lanes == 32 else min(warps, max(4, warps // 2))

    @staticmethod
    def interpret(kernel: Any, instances: int, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Run a kernel in Triton's interpreter."""
        if isinstance(kernel, JITFunction):
            with _interpreted(kernel.fn.__globals__):
                interpreter.InterpretedFunction(kernel.fn)[(instances,)](*arguments, **options)
        else:  # where TRITON_INTERPRET was set at import
            with _interpreting:
                kernel[(instances,)](*arguments, **options)
