"""A call's way from the caller's arguments to the launch: normalise, choose, plan, launch."""
