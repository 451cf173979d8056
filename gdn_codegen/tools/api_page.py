"""The text of docs/api.md: signatures and docstrings of what users of the package import."""
from __future__ import annotations

import importlib
import inspect
from typing import Any

#: Module -> what the page says of it, and the names that it lists.
PUBLIC = {
    "gdn_codegen": ("Ops. They build on first use; see [contract.md](contract.md).", (
        "chunk_gated_delta_rule", "recurrent_gated_delta_rule", "fused_recurrent_gated_delta_rule",
        "chunk_gated_delta_rule_npu", "chunk_delta_rule", "fused_recurrent_delta_rule", "chunk_gated_delta_product",
        "fused_recurrent_gated_delta_product", "chunk_simple_gla", "fused_recurrent_simple_gla", "chunk_lightning_attn",
        "fused_recurrent_lightning_attn", "mamba_chunk_scan_combined", "selective_state_update", "chunk_kda",
        "fused_recurrent_kda", "chunk_gla", "fused_recurrent_gla", "chunk_gdn2",
        "fused_recurrent_gdn2", "chunk_rwkv7", "fused_recurrent_rwkv7", "fused_mul_recurrent_rwkv7",
        "causal_conv1d", "causal_conv1d_fn", "causal_conv1d_update")),
    "gdn_codegen.pages": ("Pages from Python; see [your_own_algorithm.md](your_own_algorithm.md). The options are the fields of "
                          "`Build`.", ("show", "source", "compile", "verify")),
    "gdn_codegen.ir.builder": (
        "What a page is written with. Tiles also take `+ - * /`, `@`, `-x`, `.T`, `[:, None]` and `[None, :]`.", (
        "algorithm", "carried", "exp", "log", "sqrt", "sigmoid", "maximum", "row_sum", "cumsum", "last", "lower",
        "strictly_lower", "unit_lower_inverse", "row_norm", "valid", "apply")),
    "gdn_codegen.runtime.build": ("What is built.", ("Build",)),
    "gdn_codegen.schedule": ("Schedules; see [schedules.md](schedules.md).", ("Schedule", "named")),
    "gdn_codegen.schedule.contract": ("What callers pass; see [contract.md](contract.md).", ("Contract",)),
    "gdn_codegen.targets": (
        "Targets; see [adding_a_target.md](adding_a_target.md).", ("Target", "Toolchain", "register", "names")),
    "gdn_codegen.targets.candidates": (
        "What a target offers to dispatch and to `tune`; see [dispatch.md](dispatch.md).", ("Asked", "Candidate", "Space")),
    "gdn_codegen.ir.ops": ("Ops of the IR; see [adding_an_op.md](adding_an_op.md).", ("op", "OpDef")),
}
HEAD = """# API reference

Made from docstrings by `python -m gdn_codegen.tools.documents`; edit those. [glossary.md](glossary.md) defines the terms.
"""


def _parameter(p: inspect.Parameter) -> str:
    """A parameter as Python spells it. A function as a default is printed as "...", because its text has an address."""
    stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
    said = "" if p.annotation is p.empty else f": {p.annotation}"
    default = "..." if callable(p.default) or "<" in repr(p.default) else repr(p.default)
    return f"{stars}{p.name}{said}" + ("" if p.default is p.empty else f" = {default}")


def signature(name: str, x: Any) -> str:
    """`name` with its parameters, on one line if they fit, else one per line."""
    s = inspect.signature(x)
    parts = [_parameter(p) for p in s.parameters.values()]
    kinds = [p.kind for p in s.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    gives = "" if inspect.isclass(x) or s.return_annotation is s.empty else f" -> {str(s.return_annotation).strip(chr(39))}"
    line = f"{name}({', '.join(parts)}){gives}"
    return line if len(line) <= 110 else f"{name}(\n    " + ",\n    ".join(parts) + f"){gives}"


def text() -> str:
    """The whole page, in Markdown. ValueError for a name without a docstring."""
    out = [HEAD]
    for module, (about, names) in PUBLIC.items():
        out.append(f"## {module}\n{about}\n")
        found = importlib.import_module(module)
        for name in names:
            x = getattr(found, name)
            said = inspect.getdoc(x)
            if not said:
                raise ValueError(f"{module}.{name}: got no docstring; accepted: one, for docs/api.md")
            out.append(f"### `{name}`\n```python\n{signature(name, x)}\n```\n```text\n{said}\n```\n")
    return "\n".join(out)
