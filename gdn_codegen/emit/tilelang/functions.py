"""Selects the device functions (device/) that a module's kernels call, by kind of device."""
from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..base import EmitError
from ..device_functions import definitions, needed, texts, used

FOLDER = Path(__file__).with_name("device")
_OF_WARPS = {"warp_product_cuda", "load_warp_tile_cuda", "store_warp_tile_cuda", "warp_entries"}
_DECAYED = {"decayed_blocks_cuda", "decayed_pairs_cuda"}
#: CUDA headers, in the order of a module, with the functions that call into them.
HEADERS = {"layout.cuh": {"expect_swizzled_cuda", "expect_rows_cuda"}, "inverse.cuh": {"inverted_by_warps"},
           "cumsum.cuh": {"cumsums_cuda"}, "mma.cuh": {*_DECAYED, *_OF_WARPS},
           "decayed_rows.cuh": _DECAYED, "block_products.cuh": {"decayed_blocks_cuda"},
           "pair_products.cuh": {"decayed_pairs_cuda"},
           "search.cuh": {"find_sequence_cuda"}, "warm_up.cuh": {"warm_up_length_cuda"},
           "returns.cuh": {"end_if_cuda", "return_if_zero_cuda", "return_if_set_cuda"},
           "by_length.cuh": {"by_length_cuda"}, "choose_parts.cuh": {"choose_parts_cuda"},
           "tails.cuh": {"zero_tail_cuda", "store_tail_cuda"},
           "tiles.cuh": {"below_diagonal_cuda", "load_transposed_cuda", "store_tile_cuda", "store_wide_tile_cuda"},
           "wide_tiles.cuh": {"store_wide_tile_cuda"},
           "rows.cuh": {"store_rows_cuda"},
           "warps.cuh": _OF_WARPS,
           "group_sums.cuh": {"group_row_sums_cuda", "group_column_sums_cuda", "warp_cumsum_cuda"}}
_LINES = textwrap.TextWrapper(120, initial_indent=" " * 8, subsequent_indent=" " * 8)


def called(parameters: Sequence[str], body: str) -> list[str]:
    """The device functions that a kernel's text uses, such as "gemm" for `t.gemm(x, y, z)`."""
    return sorted(x[2:] for x in used(f"def kernel({', '.join(parameters)}):\n{body}") if x.startswith("t."))


def module_texts(names: Collection[str], devices: Sequence[str], arch: str = "") -> list[str]:
    """Texts of a module whose kernels use `names` of `t`: CUDA headers, device functions, and DEVICE_FUNCTIONS.

    devices: "cuda", "cpu". arch: the architecture that the module is for, "" for any. EmitError for a name that no device has.
    """
    known = definitions(*sorted(x for x in FOLDER.glob("*.py") if x.name != "headers.py"))
    spaces = {device: _forms(known, names, device, arch) for device in devices}
    missing = set(names).difference(*spaces.values())
    if missing:
        raise EmitError(f"tilelang has no device function {', '.join(sorted(missing))}; emit/tilelang/device should have it")
    wanted = [form for forms in spaces.values() for form in forms.values()]
    headers = [x for x, callers in HEADERS.items() if callers & set(needed(known, wanted))]
    helpers = "".join((FOLDER / x).read_text(encoding="utf-8") for x in headers)
    return [*([f'HELPERS = r"""\n{helpers}"""'] if headers else []), *texts(known, wanted), _namespaces(spaces)]


def _forms(known: Collection[str], names: Collection[str], device: str, arch: str) -> dict[str, str]:
    """The forms of functions for a device: NAME_ARCH, else NAME_DEVICE, else NAME, which serves all devices."""
    found = {n: [x for x in (f"{n}_{arch}", f"{n}_{device}", n) if x in known] for n in sorted(names)}
    return {n: forms[0] for n, forms in found.items() if forms}


def _namespaces(spaces: Mapping[str, Mapping[str, str]]) -> str:
    """The assignment of DEVICE_FUNCTIONS: for each device, the namespace that kernels call `t`."""
    lines = ["DEVICE_FUNCTIONS = {"]
    for device, forms in spaces.items():
        text = ", ".join(f"{n}={form}" for n, form in forms.items())
        lines += [f'    "{device}": SimpleNamespace(', *_LINES.wrap(f"{text}),")]
    return "\n".join([*lines, "}"])
