"""Schedules and contracts, as data. The passes carry them out."""
from .schedule import OF_CORES, SCHEDULES, Schedule, ScheduleError, changes, named, spelled, varied

__all__ = ["OF_CORES", "SCHEDULES", "Schedule", "ScheduleError", "changes", "named", "spelled", "varied"]
