"""Passes that give each op an agent: a core or a warp group."""
