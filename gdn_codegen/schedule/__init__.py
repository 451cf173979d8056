"""Schedules and contracts, as data. The passes carry them out."""
from .schedule import SCHEDULES, Schedule, ScheduleError, changes, named, spelled, varied

__all__ = ["SCHEDULES", "Schedule", "ScheduleError", "changes", "named", "spelled", "varied"]
