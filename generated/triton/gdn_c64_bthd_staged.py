"""Token t: S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q.

Generated Triton: schedule staged, chunks of 64 tokens, layout bthd, float16. Needs torch and triton (3.6 to 3.9).
Made by: gdn_codegen build --target triton --chunk 64 --layout bthd --algorithm gated_delta_rule --schedule staged --dtype float16 --head-dim-k 128 --head-dim-v 128
Triton 3.4 to 3.7.0 miscompiles some chains of products on Hopper: there the first call holds the kernels against Triton's
interpreter, and refuses to go on if they differ. On CPU tensors the kernels run in the interpreter.
"""
import contextlib
import functools
import itertools
import math
import operator
import os
import re
import threading

import torch
import triton
import triton.language as tl
from triton.language import core  # noqa: F401  the interpreter adapts the Triton modules in a kernel's globals
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

CHUNK = 64
LAYOUT = "bthd"
#: Outputs and workspaces start as NaN: for tests.
POISON = os.environ.get("GDN_CODEGEN_POISON") == "1"
#: The values of cu_seqlens are checked on a GPU too, which waits for it.
CHECK = os.environ.get("GDN_CODEGEN_CHECK") == "1"
# name, heads, dims after [batch, tokens, heads], dtype
INPUTS = (
    ("q", "H", (128,), "float16"),
    ("k", "H", (128,), "float16"),
    ("v", "HV", (128,), "float16"),
    ("g", "HV", (), "float32"),
    ("beta", "HV", (), "float32"),
)
OUTPUTS = (
    ("o", (128,), "float16"),
)
# one tile a chunk slot and value head
WORKSPACES = (
    ("G_ws", (64,), "float32"),
    ("A_ws", (64, 64), "float32"),
    ("Tinv_ws", (64, 64), "float16"),
    ("W_ws", (64, 128), "float16"),
    ("U0_ws", (64, 128), "float32"),
    ("S_ws", (128, 128), "float16"),
    ("U_ws", (64, 128), "float16"),
)
# one float32 tile a sequence and value head
INITIAL = (
    ("initial_state", (128, 128)),
)
FINAL = (
    ("final_state", (128, 128)),
)
# defaults of the caller's numbers
SCALARS = {"scale": 0.08838834764831845}
# name, instances over, blocks of a split dim, tensors passed, numbers passed
KERNELS = (
    ("G", "chunks", 1, ("g", "G_ws"), ()),
    ("A", "chunks", 1, ("k", "beta", "G_ws", "A_ws"), ()),
    ("Tinv", "chunks", 1, ("A_ws", "Tinv_ws"), ()),
    ("W_U0", "chunks", 1, ("k", "v", "beta", "G_ws", "Tinv_ws", "W_ws", "U0_ws"), ()),
    ("S_U", "sequences", 2, ("k", "initial_state", "final_state", "G_ws", "W_ws", "U0_ws", "S_ws", "U_ws"), ()),
    ("o", "chunks", 1, ("q", "k", "o", "G_ws", "S_ws", "U_ws"), ("scale",)),
)
# whole numbers passed beside the sizes
INTS = {"G": [], "A": [], "Tinv": [], "W_U0": [], "S_U": ["has_initial_state", "has_final_state"], "o": ["clear_o"]}
SCHEDULE = "staged"
# tile sizes
SIZES = {"C": 64, "K": 128, "V": 128}
# columns a program computes of a split dim, and warps of 32 threads, by kernel; how far ahead loops load
BLOCKS = {"S_U": {"BV": 64}}
NUM_WARPS = {"G": 2, "A": 4, "Tinv": 4, "W_U0": 4, "S_U": 4, "o": 4}
NUM_STAGES = 2
# numbers that kernels are not compiled for
UNSPECIALISED = ("N", "T", "batched", "clear_o")

#: Kernels as launches run them, by what they are compiled for.
_compiled = {}
_VERSION = tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))


@triton.jit(do_not_specialize=["N"])
def find_sequence(cu_seqlens, slot, N, size):
    """The last sequence whose first slot, of as many tokens as `size`, cu_seqlens[n] // size + n, is not after `slot`."""
    low = tl.full([], 0, tl.int32)
    high = low + N - 1
    while low < high:
        middle = (low + high + 1) // 2
        reached = tl.load(cu_seqlens + middle) // size + middle <= slot
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["N"])
def G_kernel(
    g_ptr,
    G_ws_ptr,
    cu_seqlens,
    N,
    HV: tl.constexpr,
    C: tl.constexpr,
):
    pid = tl.program_id(0)
    hv = pid % HV
    slot = (pid // HV).to(tl.int64)
    n = find_sequence(cu_seqlens, slot, N, C)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = (tl.load(cu_seqlens + n + 1) - start).to(tl.int32)
    t = ((slot - start // C - n) * C).to(tl.int32)
    if t >= length:
        return
    i_C = tl.arange(0, C)
    row = start + t
    valid = i_C < length - t
    g = tl.load(g_ptr + (row * HV + hv) + i_C * HV, mask=valid, other=0.0)
    # G = cumsum(g)
    G = tl.cumsum(g, axis=0)
    tl.store(G_ws_ptr + (slot * HV + hv) * C + i_C, G)


@triton.jit(do_not_specialize=["N"])
def A_kernel(
    k_ptr,
    beta_ptr,
    G_ws_ptr,
    A_ws_ptr,
    cu_seqlens,
    N,
    H: tl.constexpr,
    HV: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
):
    pid = tl.program_id(0)
    hv = pid % HV
    h = hv // (HV // H)
    slot = (pid // HV).to(tl.int64)
    n = find_sequence(cu_seqlens, slot, N, C)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = (tl.load(cu_seqlens + n + 1) - start).to(tl.int32)
    t = ((slot - start // C - n) * C).to(tl.int32)
    if t >= length:
        return
    i_C = tl.arange(0, C)
    i_K = tl.arange(0, K)
    row = start + t
    valid = i_C < length - t
    G = tl.load(G_ws_ptr + (slot * HV + hv) * C + i_C)
    k = tl.load(k_ptr + (row * H + h) * K + i_C[:, None] * (H * K) + i_K[None, :], mask=valid[:, None], other=0.0)
    beta = tl.load(beta_ptr + (row * HV + hv) + i_C * HV, mask=valid, other=0.0)
    # A = strictly_lower(beta[:, None] * (k @ k.T) * D)
    k_k = tl.dot(k, tl.trans(k))
    tl.store(
        A_ws_ptr + (slot * HV + hv) * (C * C) + i_C[:, None] * C + i_C[None, :],
        beta[:, None] * k_k * tl.exp(tl.where(i_C[:, None] > i_C[None, :], G[:, None] - G[None, :], float("-inf"))),
    )


@triton.jit(do_not_specialize=["N"])
def Tinv_kernel(
    A_ws_ptr,
    Tinv_ws_ptr,
    cu_seqlens,
    N,
    HV: tl.constexpr,
    C: tl.constexpr,
):
    pid = tl.program_id(0)
    hv = pid % HV
    slot = (pid // HV).to(tl.int64)
    n = find_sequence(cu_seqlens, slot, N, C)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = (tl.load(cu_seqlens + n + 1) - start).to(tl.int32)
    t = ((slot - start // C - n) * C).to(tl.int32)
    if t >= length:
        return
    i_C = tl.arange(0, C)
    A = tl.load(A_ws_ptr + (slot * HV + hv) * (C * C) + i_C[:, None] * C + i_C[None, :])
    # Tinv = unit_lower_inverse(A)
    neg_A = -A
    Tinv_1 = tl.where(i_C[:, None] == i_C[None, :], 1.0, 0.0) + tl.where(
        (i_C[:, None] // 2 == i_C[None, :] // 2) & (i_C[:, None] > i_C[None, :]),
        neg_A,
        0.0,
    )
    Tinv_1_h = Tinv_1.to(tl.float16)
    Tinv_p = tl.dot(
        tl.where(
            (i_C[:, None] // 4 == i_C[None, :] // 4) & (i_C[:, None] // 2 > i_C[None, :] // 2),
            neg_A,
            0.0,
        ).to(tl.float16),
        Tinv_1_h,
    )
    Tinv_s = tl.dot(Tinv_1_h, Tinv_p.to(tl.float16), acc=Tinv_1)
    Tinv_s_h = Tinv_s.to(tl.float16)
    Tinv_p_3 = tl.dot(
        tl.where(
            (i_C[:, None] // 8 == i_C[None, :] // 8) & (i_C[:, None] // 4 > i_C[None, :] // 4),
            neg_A,
            0.0,
        ).to(tl.float16),
        Tinv_s_h,
    )
    Tinv_s_2 = tl.dot(Tinv_s_h, Tinv_p_3.to(tl.float16), acc=Tinv_s)
    Tinv_h_3 = Tinv_s_2.to(tl.float16)
    Tinv_p_5 = tl.dot(
        tl.where(
            (i_C[:, None] // 16 == i_C[None, :] // 16) & (i_C[:, None] // 8 > i_C[None, :] // 8),
            neg_A,
            0.0,
        ).to(tl.float16),
        Tinv_h_3,
    )
    Tinv_s_3 = tl.dot(Tinv_h_3, Tinv_p_5.to(tl.float16), acc=Tinv_s_2)
    Tinv_h_5 = Tinv_s_3.to(tl.float16)
    Tinv_p_7 = tl.dot(
        tl.where(
            (i_C[:, None] // 32 == i_C[None, :] // 32) & (i_C[:, None] // 16 > i_C[None, :] // 16),
            neg_A,
            0.0,
        ).to(tl.float16),
        Tinv_h_5,
    )
    Tinv_s_4 = tl.dot(Tinv_h_5, Tinv_p_7.to(tl.float16), acc=Tinv_s_3)
    Tinv_h_7 = Tinv_s_4.to(tl.float16)
    Tinv_p_9 = tl.dot(
        tl.where(
            (i_C[:, None] // 64 == i_C[None, :] // 64) & (i_C[:, None] // 32 > i_C[None, :] // 32),
            neg_A,
            0.0,
        ).to(tl.float16),
        Tinv_h_7,
    )
    Tinv = tl.dot(Tinv_h_7, Tinv_p_9.to(tl.float16), acc=Tinv_s_4)
    tl.store(Tinv_ws_ptr + (slot * HV + hv) * (C * C) + i_C[:, None] * C + i_C[None, :], Tinv.to(tl.float16))


@triton.jit(do_not_specialize=["N"])
def W_U0_kernel(
    k_ptr,
    v_ptr,
    beta_ptr,
    G_ws_ptr,
    Tinv_ws_ptr,
    W_ws_ptr,
    U0_ws_ptr,
    cu_seqlens,
    N,
    H: tl.constexpr,
    HV: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    pid = tl.program_id(0)
    hv = pid % HV
    h = hv // (HV // H)
    slot = (pid // HV).to(tl.int64)
    n = find_sequence(cu_seqlens, slot, N, C)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = (tl.load(cu_seqlens + n + 1) - start).to(tl.int32)
    t = ((slot - start // C - n) * C).to(tl.int32)
    if t >= length:
        return
    i_C = tl.arange(0, C)
    i_K = tl.arange(0, K)
    i_V = tl.arange(0, V)
    row = start + t
    valid = i_C < length - t
    G = tl.load(G_ws_ptr + (slot * HV + hv) * C + i_C)
    Tinv = tl.load(Tinv_ws_ptr + (slot * HV + hv) * (C * C) + i_C[:, None] * C + i_C[None, :])
    k = tl.load(k_ptr + (row * H + h) * K + i_C[:, None] * (H * K) + i_K[None, :], mask=valid[:, None], other=0.0)
    v = tl.load(v_ptr + (row * HV + hv) * V + i_C[:, None] * (HV * V) + i_V[None, :], mask=valid[:, None], other=0.0)
    beta = tl.load(beta_ptr + (row * HV + hv) + i_C * HV, mask=valid, other=0.0)
    # U = Tinv @ (beta[:, None] * (v - exp(G)[:, None] * (k @ S)))
    U0 = tl.dot(Tinv, (beta[:, None] * v.to(tl.float32)).to(tl.float16))
    tl.store(U0_ws_ptr + (slot * HV + hv) * (C * V) + i_C[:, None] * V + i_V[None, :], U0)
    W = tl.dot(Tinv, (beta[:, None] * (tl.exp(G)[:, None] * k.to(tl.float32))).to(tl.float16))
    tl.store(W_ws_ptr + (slot * HV + hv) * (C * K) + i_C[:, None] * K + i_K[None, :], W.to(tl.float16))


@triton.jit
def S_U_kernel(
    k_ptr,
    initial_state_ptr,
    final_state_ptr,
    G_ws_ptr,
    W_ws_ptr,
    U0_ws_ptr,
    S_ws_ptr,
    U_ws_ptr,
    cu_seqlens,
    has_initial_state: tl.constexpr,
    has_final_state: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    pid = tl.program_id(0)
    block = pid % (V // BV)
    pid = pid // (V // BV)
    hv = pid % HV
    h = hv // (HV // H)
    n = pid // HV
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = (tl.load(cu_seqlens + n + 1) - start).to(tl.int32)
    i_C = tl.arange(0, C)
    i_K = tl.arange(0, K)
    i_V = block * BV + tl.arange(0, BV)
    S = tl.zeros([K, BV], dtype=tl.float32)
    if has_initial_state:
        S = tl.load(initial_state_ptr + (n.to(tl.int64) * HV + hv) * (K * V) + i_K[:, None] * V + i_V[None, :])
    slot_next = start // C + n
    G = tl.load(G_ws_ptr + (slot_next * HV + hv) * C + i_C)
    last_G = tl.load(G_ws_ptr + (slot_next * HV + hv) * C + (C - 1))
    for t in range(0, length, C):
        row = start + t
        valid = i_C < length - t
        slot = start // C + n + t // C
        slot_next = start // C + n + tl.minimum(t + C, tl.maximum(length - 1, 0)) // C
        G_next = tl.load(G_ws_ptr + (slot_next * HV + hv) * C + i_C)
        last_G_next = tl.load(G_ws_ptr + (slot_next * HV + hv) * C + (C - 1))
        U0 = tl.load(U0_ws_ptr + (slot * HV + hv) * (C * V) + i_C[:, None] * V + i_V[None, :])
        W = tl.load(W_ws_ptr + (slot * HV + hv) * (C * K) + i_C[:, None] * K + i_K[None, :])
        S_h = S.to(tl.float16)
        tl.store(S_ws_ptr + (slot * HV + hv) * (K * V) + i_K[:, None] * V + i_V[None, :], S_h)
        k = tl.load(k_ptr + (row * H + h) * K + i_C[:, None] * (H * K) + i_K[None, :], mask=valid[:, None], other=0.0)
        # U = Tinv @ (beta[:, None] * (v - exp(G)[:, None] * (k @ S)))
        W_S = tl.dot(W, S_h)
        U = U0 - W_S
        tl.store(U_ws_ptr + (slot * HV + hv) * (C * V) + i_C[:, None] * V + i_V[None, :], U.to(tl.float16))
        # S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
        S = tl.dot(tl.trans(k), (tl.exp(last_G - G)[:, None] * U).to(tl.float16), acc=tl.exp(last_G) * S)
        G = G_next
        last_G = last_G_next
    if has_final_state:
        tl.store(final_state_ptr + (n.to(tl.int64) * HV + hv) * (K * V) + i_K[:, None] * V + i_V[None, :], S)


@triton.jit(do_not_specialize=["N", "T", "batched", "clear_o"])
def o_kernel(
    q_ptr,
    k_ptr,
    o_ptr,
    G_ws_ptr,
    S_ws_ptr,
    U_ws_ptr,
    cu_seqlens,
    scale,
    N,
    T,
    batched,
    clear_o,
    H: tl.constexpr,
    HV: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    pid = tl.program_id(0)
    hv = pid % HV
    h = hv // (HV // H)
    slot = (pid // HV).to(tl.int64)
    n = find_sequence(cu_seqlens, slot, N, C)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = (tl.load(cu_seqlens + n + 1) - start).to(tl.int32)
    t = ((slot - start // C - n) * C).to(tl.int32)
    i_C = tl.arange(0, C)
    i_K = tl.arange(0, K)
    i_V = tl.arange(0, V)
    if clear_o != 0:
        room = tl.where((batched == 0) & (n == N - 1), T - start, length).to(tl.int32)
        low = tl.maximum(t, length)
        high = tl.minimum(t + C, room)
        for rest in range(low, high, C):
            row_rest = start + rest
            valid_rest = i_C < high - rest
            tl.store(
                o_ptr + (row_rest * HV + hv) * V + i_C[:, None] * (HV * V) + i_V[None, :],
                0.0,
                mask=valid_rest[:, None],
            )
    if t >= length:
        return
    row = start + t
    valid = i_C < length - t
    G = tl.load(G_ws_ptr + (slot * HV + hv) * C + i_C)
    S = tl.load(S_ws_ptr + (slot * HV + hv) * (K * V) + i_K[:, None] * V + i_V[None, :])
    U = tl.load(U_ws_ptr + (slot * HV + hv) * (C * V) + i_C[:, None] * V + i_V[None, :])
    q = tl.load(q_ptr + (row * H + h) * K + i_C[:, None] * (H * K) + i_K[None, :], mask=valid[:, None], other=0.0)
    k = tl.load(k_ptr + (row * H + h) * K + i_C[:, None] * (H * K) + i_K[None, :], mask=valid[:, None], other=0.0)
    # o = scale * (exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ U)
    q_S = tl.dot(q, S)
    q_k = tl.dot(q, tl.trans(k))
    add_mul = tl.dot(
        (q_k * tl.exp(tl.where(i_C[:, None] >= i_C[None, :], G[:, None] - G[None, :], float("-inf")))).to(tl.float16),
        U,
        acc=tl.exp(G)[:, None] * q_S,
    )
    tl.store(
        o_ptr + (row * HV + hv) * V + i_C[:, None] * (HV * V) + i_V[None, :],
        (scale * add_mul).to(tl.float16),
        mask=valid[:, None],
    )


_KERNELS = {"G": G_kernel, "A": A_kernel, "Tinv": Tinv_kernel, "W_U0": W_U0_kernel, "S_U": S_U_kernel, "o": o_kernel}
# one for all generated modules of a process: the interpreter's state is global
_interpreting = vars(interpreter).setdefault("_one_launch_at_a_time", threading.Lock())


@contextlib.contextmanager
def _interpreted():
    """For CPU tensors: functions that kernels call, ours and Triton's own, stand as the plain Python that they wrap.

    Triton decides at import whether its library is for the interpreter (TRITON_INTERPRET); this does so for one launch,
    in a process that may compile for a GPU before and after. Not while another thread compiles.
    """
    with _interpreting:
        spaces = [vars(tl), globals()]
        jitted = [{n: f for n, f in space.items() if isinstance(f, JITFunction)} for space in spaces]
        for space, found in zip(spaces, jitted):
            space.update({n: f.fn for n, f in found.items()})
        if _VERSION < (3, 7):
            spaces.append(vars(interpreter))
            jitted.append({"_patch_lang_tensor": interpreter._patch_lang_tensor})
            interpreter._patch_lang_tensor = functools.partial(_patch_lang_tensor, interpreter._patch_lang_tensor)
        try:
            yield
        finally:
            for space, found in zip(spaces, jitted):
                space.update(found)


def _patch_lang_tensor(original, tensor, *scope):
    """Triton's, but for a number of the interpreter's as an int: it is an array of one entry, which numpy 2.4 takes no more."""
    original(tensor, *scope)
    tensor.__index__ = lambda x: x.handle.data.item()


def _warps(name, lanes):
    """Warps of so many lanes. Of 64 it takes half as many, but 4 at least, one for each SIMD unit of a compute unit."""
    warps = NUM_WARPS[name]
    return warps if lanes == 32 else min(warps, max(4, warps // 2))


def _lanes():
    return triton.runtime.driver.active.get_current_target().warp_size


def _is_suspect(device):
    return (3, 4) <= _VERSION < (3, 7, 1) and not torch.version.hip and torch.cuda.get_device_capability(device)[0] == 9


_proven = set()
_proving = threading.RLock()
#: RMSE over RMS by which roundings may make the GPU and the interpreter differ.
ROUNDINGS = 1e-2


def _prove(device, heads, value_heads):
    """Once for these head counts: a small problem on the GPU and in the interpreter. RuntimeError if they differ."""
    key = (device, heads, value_heads)
    with _proving:
        if key in _proven:
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"Triton {triton.__version__} on Hopper: call this once before a graph is captured, to test its "
                               "kernels, or use Triton 3.7.1 or later")
        _proven.add(key)  # the launches below ask again
        difference = math.inf
        try:
            difference = _difference(device, {"H": heads, "HV": value_heads})
        finally:
            if not difference <= ROUNDINGS:
                _proven.discard(key)
        if key not in _proven:
            raise RuntimeError(f"Triton {triton.__version__} miscompiles this module's kernels for Hopper: off by {difference:.1e} "
                               f"(RMSE over RMS; roundings explain {ROUNDINGS:.0e}). Use Triton 3.7.1 or later")


def _difference(device, heads, instances=512):
    """RMSE over RMS by which an instance on `device` is off what the interpreter makes of the same, at worst.

    Rows and heads are all the same, so that each must give what one gives, and enough to fill a GPU. Rows are short enough for no
    state to grow, in whatever form numbers of tokens come.
    """
    gen = torch.Generator().manual_seed(0)
    rows, tokens = 1 + instances // heads["HV"], 2 * CHUNK + CHUNK // 2
    one, all_ = {}, {}
    for name, head, dims, dtype in INPUTS:
        x = torch.randn(1, 1, tokens, *dims, generator=gen).to(_FLOATS[dtype]) * (1.2 * dims[0] ** -0.5 if dims else 0.2)
        turned = (lambda x: x.transpose(1, 2)) if LAYOUT == "bthd" else (lambda x: x)
        one[name], all_[name] = turned(x), turned(x.expand(rows, heads[head], *x.shape[2:]))
    for name, dims in INITIAL:
        one[name] = (torch.randn(1, 1, *dims, generator=gen) / 2).to(_STATE)
        all_[name] = one[name].expand(rows, heads["HV"], *dims)
    got = chunk_gated_delta_rule(**{n: x.to(device).contiguous() for n, x in all_.items()}, output_final_state=True)
    want = chunk_gated_delta_rule(**one, output_final_state=True)
    worst = []
    for i, (x, y) in enumerate(zip(got, want)):
        x, y = (t.transpose(1, 2) if LAYOUT == "bthd" and i < len(OUTPUTS) else t for t in (x.float(), y.float().to(device)))
        worst.append(((x - y).square().flatten(2).mean(2).max() / y.square().mean()).sqrt())
    return torch.stack(worst).max().item()


def _launcher(name, instances, sizes, ints, device):
    """A function that launches the kernel on its tensors, cu_seqlens and numbers."""
    sequences, tokens, batched, heads, value_heads, _ = sizes
    kernel = _KERNELS[name]
    given = {"N": sequences, "T": tokens, "batched": batched, "H": heads, "HV": value_heads, **SIZES, **BLOCKS.get(name, {})}
    given.update(zip(INTS[name], ints))
    options = {n: given[n] for n in kernel.arg_names if n in given}
    if device.type == "cpu":
        return lambda tensors, cu, scalars: _interpret(kernel, instances, (*tensors, cu, *scalars), options)
    if _is_suspect(device):
        _prove(device, heads, value_heads)
    how = {"num_warps": _warps(name, _lanes()), "num_stages": NUM_STAGES, "enable_fp_fusion": True}
    rest, compiled = tuple(options.values()), None
    kind = name, device.index, *(x for n, x in options.items() if n not in UNSPECIALISED)

    def launch(tensors, cu, scalars):
        nonlocal compiled
        if compiled is None:  # for other sizes it may be there; of pointers alignment is compiled in, on AMD also 32-bit offsets
            mine = (*kind, *((x.data_ptr() % 16 == 0, x.untyped_storage().nbytes() < 1 << 31) for x in tensors))
            compiled = _compiled.get(mine)
            if compiled is None:
                compiled = _compiled[mine] = kernel[(instances,)](*tensors, cu, *scalars, **options, **how)
                return
        compiled[(instances, 1, 1)](*tensors, cu, *scalars, *rest)

    return launch


def _interpret(kernel, instances, arguments, options):
    if isinstance(kernel, JITFunction):
        with _interpreted():
            interpreter.InterpretedFunction(kernel.fn)[(instances,)](*arguments, **options)
    else:
        kernel[(instances,)](*arguments, **options)


# --- host: the same text in every generated module -------------------------------------------------------------------
_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
#: A call's tensors, in this order; slices of those that it returns.
TENSORS = tuple(row[0] for row in (*INPUTS, *INITIAL, *FINAL, *OUTPUTS, *WORKSPACES))
_FINAL = slice(len(INPUTS) + len(INITIAL), len(INPUTS) + len(INITIAL) + len(FINAL))
_OUTPUTS = slice(_FINAL.stop, _FINAL.stop + len(OUTPUTS))
_STATE = _FLOATS["float32"]
_LARGEST = torch.finfo(torch.float32).max
_kept = {}
_plans = {}


def _fail(argument, got, accepted):
    raise ValueError(f"{argument}: got {got}; accepted: {accepted}")


def _check_inputs(given):
    """B, T, H, HV of the inputs, or a ValueError naming the argument at fault."""
    seen = {}
    device = None
    for (name, heads, dims, dtype), x in zip(INPUTS, given):
        if not isinstance(x, torch.Tensor):
            _fail(name, type(x).__name__, "a torch.Tensor")
        if x.dtype != _FLOATS[dtype] and not (not dims and dtype == "float32" and x.dtype in _FLOATS.values()):
            _fail(name, x.dtype, f"torch.{dtype} (this module was built for it)")
        if device is None:
            device = x.device
        if x.device != device:
            _fail(name, f"device {x.device}", f"device {device}, that of {INPUTS[0][0]}")
        tokens, head = (1, 2) if LAYOUT == "bthd" else (2, 1)
        if x.ndim != 3 + len(dims):
            _fail(name, f"rank {x.ndim}", f"rank {3 + len(dims)}, layout {LAYOUT}")
        if tuple(x.shape[3:]) != dims:
            _fail(name, f"shape {tuple(x.shape)}", f"last dim {dims[0]} (this module was built for it)")
        for key, size in (("B", x.shape[0]), ("T", x.shape[tokens]), (heads, x.shape[head])):
            if seen.setdefault(key, size) != size:
                _fail(name, f"shape {tuple(x.shape)}", f"{key} = {seen[key]}, as the inputs before it have")
    value_heads = seen.get("HV", seen.get("H"))
    heads = seen.get("H", value_heads)
    if min(heads, value_heads) < 1 or value_heads % heads:
        _fail("heads", f"H = {heads}, HV = {value_heads}", "HV a multiple of H, both at least 1")
    return seen["B"], seen["T"], heads, value_heads, device


def _check_sequences(cu_seqlens, batch, device):
    """Sequences that cu_seqlens packs."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        _fail("cu_seqlens", getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__), "an int32 or int64 tensor")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        _fail("cu_seqlens", f"shape {tuple(cu_seqlens.shape)}", "shape [N + 1] with N >= 1")
    if cu_seqlens.device != device:
        _fail("cu_seqlens", f"device {cu_seqlens.device}", f"device {device}")
    if batch != 1:
        _fail("cu_seqlens", f"inputs with B = {batch}", "inputs with B = 1: packed sequences")
    return cu_seqlens.numel() - 1


def _check_ends(cu_seqlens, tokens):
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] > tokens or any(a > b for a, b in zip(ends, ends[1:])):
        _fail("cu_seqlens", ends if len(ends) < 12 else f"{ends[:5]} ... {ends[-3:]}",
              f"values that start at 0, never fall and end at most at T = {tokens}")


def _stream(device):
    """The current stream, by its address where torch gives that: the object costs 4 us."""
    address = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return address(device.index) if address else torch.cuda.current_stream(device)


def _filled(make, *about):
    """What make(*about) gives, the last of which is the device, for calls to share. It serves the stream that filled it; a graph
    has its own, filled whenever it runs."""
    cuda = about[-1].type == "cuda"
    key = (make, *about, _stream(about[-1]) if cuda else None)
    kept = not (cuda and torch.cuda.is_current_stream_capturing())
    x = _kept.get(key) if kept else None
    if x is None:
        x = make(*about)
        if kept:
            if len(_kept) >= 64:
                _kept.clear()
            _kept[key] = x
    return x


def _equal_rows(batch, tokens, device):
    """Where equal rows end."""
    if not tokens:
        return torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device)


def _is_apart(x):
    """Whether no element of `x` is in two places: each dim steps over all that the finer ones reach."""
    reach = 1
    for far, n in sorted((far, n) for far, n in zip(x.stride(), x.shape) if n > 1):
        if far < reach:
            return x.numel() == 0
        reach += far * (n - 1)
    return True


def _check_state(name, x, shape, device, dtypes=(_STATE,), written=False):
    if not isinstance(x, torch.Tensor) or tuple(x.shape) != shape:
        _fail(name, tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__, f"shape {shape}")
    if x.dtype not in dtypes:
        _fail(name, x.dtype, ", ".join(map(str, dtypes)))
    if x.device != device:
        _fail(name, f"device {x.device}", f"device {device}")
    if written and not _is_apart(x):
        _fail(name, f"strides {x.stride()}", "no element in two places")


def _check_buffers(buffers, shapes, device):
    """Callers' memory for what has these names and shapes; whether it can be used as it is."""
    for x, (name, shape, _) in zip(buffers, shapes):
        if x is not None:
            _check_state(name, x, shape, device, written=True)
    return [x is None or _is_plain(x, _STATE) for x in buffers]


def _dense(shape):
    """The strides of what torch makes in this shape."""
    out, far = [], 1
    for n in reversed(shape):
        out.append(far)
        far *= n or 1
    return tuple(reversed(out))


def _is_plain(x, dtype):
    return x.dtype == dtype and x.stride() == _dense(x.shape)


def _plain(x, dtype):
    """`x` in `dtype`, contiguous, aligned to 16 bytes and with the strides of its shape: torch does not normalise those of
    size 1."""
    x = x.to(dtype).contiguous()
    return (x.clone() if x.data_ptr() % 16 else x).view(-1).view(x.shape)


def workspace_bytes(tokens, sequences, value_heads):
    """Bytes that a call holds between its kernels: `tokens` in all, of `sequences` sequences."""
    slots = tokens // CHUNK + sequences
    return sum(slots * value_heads * math.prod(dims) * _FLOATS[dtype].itemsize for _, dims, dtype in WORKSPACES)


def _kind(x):
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else type(x)


def _is_elsewhere(device):
    return device.type == "cuda" and torch._C._cuda_getDevice() != device.index


def _check_out(name, x, shape, dtype, device):
    if not isinstance(x, torch.Tensor) or tuple(x.shape) != shape:
        _fail(name, tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__, f"shape {shape}")
    if x.dtype != dtype or x.device != device:
        _fail(name, f"{x.dtype} on {x.device}", f"{dtype} on {device}")
    if x.stride(-1) != 1 or not _is_apart(x):
        _fail(name, f"strides {x.stride()}", "a last dim that is dense, and no element in two places")


#: A tensor with the kind of another. From its kin, a number that looks like it, this takes half the time of `torch.empty`.
_new = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=256)
def _made(shape, dtype, device):
    """A tensor for calls to share: nobody writes to it."""
    return torch.empty(shape, dtype=dtype, device=device)


def _kin(shape, dtype, device):
    return _made((1,), dtype, device).expand(shape)


def _picker(at):
    """Takes these of a call's TENSORS. `itemgetter`, which is faster, gives a single one bare."""
    return operator.itemgetter(*at) if len(at) > 1 else lambda memory: tuple(memory[i] for i in at)


def prepare(given, states, outs, cu_seqlens, buffers, wanted, indices=None, every=0):
    """Check a call's arguments: INPUTS, INITIAL, where OUTPUTS go, and FINAL; whether final states
    are wanted, slots of a pool, chunks from checkpoint to checkpoint. Returns a function that does the call for all tensors of
    these shapes, strides, dtypes and this device, and gives its TENSORS."""
    batch, tokens, heads, value_heads, device = _check_inputs(given)
    sequences = batch if cu_seqlens is None else _check_sequences(cu_seqlens, batch, device)
    slots = batch * tokens // CHUNK + sequences
    # what stands for an absent tensor, whether one goes as it is and its alignment then, its dtype
    expected = []
    for (*_, dtype), x in zip(INPUTS, given):
        expected.append((None, _is_plain(x, _FLOATS[dtype]), 16, _FLOATS[dtype]))
    for (name, dims), x in zip(INITIAL, states):
        if x is not None:
            _check_state(name, x, (sequences, value_heads, *dims), device, tuple(_FLOATS.values()))
        absent = _made((0, value_heads, *dims), _STATE, device)
        expected.append((absent, x is None or _is_plain(x, _STATE), 16, _STATE))
    rows = (batch, tokens, value_heads) if LAYOUT == "bthd" else (batch, value_heads, tokens)
    # name, shape, what stands for one that nobody wants
    lent = [(name, (sequences, value_heads, *dims), None) for name, dims in FINAL]
    if not wanted:
        lent = [(name, shape, _made((0, *shape[1:]), _STATE, device)) for name, shape, _ in lent]
    as_they_are = _check_buffers(buffers, lent, device)
    made = [((*rows, *dims), _FLOATS[dtype]) for _, dims, dtype in OUTPUTS]
    fits = []  # whether a caller's buffer for an output takes it as it is
    for (name, dims, _), x, (shape, dtype) in zip(OUTPUTS, outs, made):
        if x is not None:
            _check_out("out" if len(OUTPUTS) == 1 else f"out_{name}", x, shape, dtype, device)
        fits.append(x is not None and _is_plain(x, dtype))
    made += [((slots, value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in WORKSPACES]
    kin = [_kin(shape, dtype, device) for shape, dtype in made]
    state_kin = [(absent, _kin(shape, _STATE, device)) for _, shape, absent in lent]
    sizes = (sequences, tokens, int(cu_seqlens is None), heads, value_heads, slots)
    ints = {f"has_{name}": int(x is not None) for (name, _), x in zip(INITIAL, states)}
    ints.update({f"has_{name}": int(wanted) for name, _ in FINAL})
    # rows that no sequence covers are zero in what is made here
    clears = cu_seqlens is not None
    ints.update({f"clear_{name}": int(clears and x is None) for (name, *_), x in zip(OUTPUTS, outs)})
    launches = []
    for name, grid, blocks, tensors, scalars in KERNELS:
        instances = (slots if grid == "chunks" else sequences) * value_heads * blocks
        if instances:
            launch = _launcher(name, instances, sizes, [ints[x] for x in INTS[name]], device)
            numbers = [list(SCALARS).index(n) for n in scalars]
            launches.append((launch, [TENSORS.index(t) for t in tensors], numbers))
    # callers' memory for results, and whether what kernels wrote is elsewhere
    unwanted = [absent for absent, _ in state_kin] if all(absent is not None for absent, _ in state_kin) else None
    any_out, lends = any(x is not None for x in outs), any(x is not None for x in buffers)
    moved = lends
    check_ends = cu_seqlens is not None and (CHECK or device.type == "cpu")
    ends_are_plain = cu_seqlens is not None and _is_plain(cu_seqlens, torch.int32)

    picked = [(launch, _picker(tensors), numbers) for launch, tensors, numbers in launches]

    def call(given, numbers, states, outs, cu_seqlens, buffers, indices=None):
        if _is_elsewhere(device):
            with torch.cuda.device(device):
                return call(given, numbers, states, outs, cu_seqlens, buffers, indices)
        if check_ends:
            _check_ends(cu_seqlens, tokens)
        memory = [absent if x is None else x if plain and x.data_ptr() % aligned == 0 else _plain(x, dtype)
                  for x, (absent, plain, aligned, dtype) in zip((*given, *states), expected)]
        held = unwanted or [x if x is not None else _new(like) if absent is None else absent for x, (absent, like) in zip(buffers, state_kin)]
        memory += [x if plain and x.data_ptr() % 16 == 0 else _plain(x, _STATE)
                   for x, plain in zip(held, as_they_are)] if lends else held
        memory += map(_new, kin)
        if POISON:
            for x, buffer in itertools.zip_longest(memory[_FINAL.start:], buffers):
                if buffer is None:
                    x.fill_(float("nan"))
        if any_out:
            copied = []
            for i, (x, fit) in enumerate(zip(outs, fits), _OUTPUTS.start):
                if x is not None:
                    memory[i] = x if fit and x.data_ptr() % 16 == 0 else _plain(x, x.dtype)
                    copied += [(i, x)] * (memory[i] is not x)
        if cu_seqlens is None:
            ends = _filled(_equal_rows, batch, tokens, device)
        else:
            ends = cu_seqlens if ends_are_plain and cu_seqlens.data_ptr() % 16 == 0 else _plain(cu_seqlens, torch.int32)
        for launch, tensors, used in picked:
            launch(tensors(memory), ends, [numbers[i] for i in used] if used else [])
        if any_out:
            for i, x in copied:
                if memory[i].data_ptr() != x.data_ptr():
                    x.copy_(memory[i])
                memory[i] = x
        if moved:
            for n, x in enumerate(held, _FINAL.start):
                if memory[n].data_ptr() != x.data_ptr():
                    x.copy_(memory[n])
                memory[n] = x
        return memory

    call.pieces = None
    as_it_is = all(plain for _, plain, *_ in expected) and all(as_they_are) and all(x is None or fit for x, fit in zip(outs, fits))
    if as_it_is and not (check_ends or cu_seqlens is not None and not ends_are_plain):
        # for callers that launch by themselves. Of each of TENSORS: its place among (*given, *states, *outs, *buffers, indices)
        # and its shape in kernels, or what stands for it, or what it is made like. Then launches, and what gives ends of rows
        first_out = len(given) + len(states)
        first_buffer = first_out + len(outs)
        of = [("given", n, tuple(x.shape)) if x is not None else ("fixed", absent)
              for n, (x, (absent, *_)) in enumerate(zip((*given, *states), expected))]
        of += [("given", n, tuple(x.shape)) if x is not None else ("result", like) if absent is None else ("fixed", absent)
               for n, (x, (absent, like)) in enumerate(zip(buffers, state_kin), first_buffer)]
        of += [("given", n, tuple(x.shape)) if x is not None else ("result", like) for n, (x, like) in enumerate(zip(outs, kin), first_out)]
        of += [("workspace", like) for like in kin[len(outs):]]
        call.pieces = of, launches, functools.partial(_filled, _equal_rows, batch, tokens, device)
    return call


def _run(given, numbers, states, outs, cu_seqlens, buffers, wanted, indices=None, every=0):
    """Launch every kernel; a call's TENSORS. What does not depend on values is checked and worked out once."""
    key = (*map(_kind, given), *map(_kind, states), *map(_kind, outs), _kind(cu_seqlens), *map(_kind, buffers), wanted, _kind(indices), every)
    call = _plans.get(key)
    if call is None:
        call = prepare(given, states, outs, cu_seqlens, buffers, wanted, indices, every)
        if len(_plans) >= 256:
            _plans.clear()
        _plans[key] = call
    return call(given, numbers, states, outs, cu_seqlens, buffers, indices)


def numbers_of(given):
    """Of SCALARS, their values where None is given."""
    for name, x in zip(SCALARS, given):
        if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float))):
            _fail(name, type(x).__name__, "a number, or None")
        if x is not None and not abs(x) <= _LARGEST:
            _fail(name, x, "a number that float32 holds")
    return tuple(default if x is None else float(x) for x, default in zip(given, SCALARS.values()))


def results(memory, wanted):
    """What a call returns, of its TENSORS."""
    return (*memory[_OUTPUTS], *(memory[_FINAL] if wanted else (None,) * len(FINAL)))


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, final_state=None, out=None):
    """Token t: S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q.

    Shapes, layout bthd: q [B, T, H, 128] float16, k [B, T, H, 128] float16, v [B, T, HV, 128] float16, g [B, T, HV] float32, beta [B, T, HV] float32.
    initial_state: [N, HV, 128, 128] float32, or what widens to it; zero where absent.
    final_state: [N, HV, 128, 128] float32, to be written to.
    cu_seqlens: int32 or int64 [N + 1], ends of sequences packed into a batch of 1; without it each row is a sequence.
    out: where to write what is returned; rows of no sequence stay as they are, and are zero in what is made
        here. Its last dim is dense. It and a final state lie in memory that the call does not read; the package looks at
        that, this module does not.
    Returns (o, final state or None). CUDA tensors run on the GPU, CPU tensors on the CPU. ValueError on bad input.
    """
    if torch.is_grad_enabled():
        for _name, _x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta), ("initial_state", initial_state), ):  # no page's names
            if getattr(_x, "requires_grad", False):
                _fail(_name, "a tensor that requires grad", "inference only: call under torch.no_grad(), or detach it")
    numbers = numbers_of((scale,))
    if output_final_state is not True and output_final_state is not False:
        _fail("output_final_state", repr(output_final_state), "True or False")
    wanted = output_final_state or final_state is not None
    memory = _run((q, k, v, g, beta), numbers, (initial_state,), (out,), cu_seqlens,
                  (final_state,), wanted)
    return results(memory, wanted)
