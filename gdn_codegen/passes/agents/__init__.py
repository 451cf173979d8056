"""Passes that choose the agent of each op: a core or a warp group."""
