"""Fields of a schedule, each at a value other than its default, for the tests of PTO."""
from dataclasses import replace

from gdn_codegen.runtime.build import Build
from gdn_codegen.schedule import named

#: The field, with a schedule in which this value changes the source.
SWITCHED = {"form": ("replay", "gate-free"), "v_block": ("fused", 16),
            "cache_masks": ("staged", False), "value_heads": ("staged", 1),
            "order": ("staged", "page"), "inverse_block": ("staged", 0), "channel_slots": ("staged", 2),
            "l0_slots": ("staged", 1), "walk_piece": ("staged", 16), "prefetch": ("replay", "all"),
            "narrow_workspaces": ("staged", True), "residuals": ("replay", "@state")}


def switched(field: str) -> Build:
    """A small build with the field at that value."""
    schedule, value = SWITCHED[field]
    return Build("pto", 32, schedule=replace(named(schedule), **{field: value}), head_dim_k=32, head_dim_v=32)
