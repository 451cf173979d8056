"""Schedules and the passes that carry them out."""
from .schedule import SCHEDULES, Schedule, ScheduleError, named

__all__ = ["SCHEDULES", "Schedule", "ScheduleError", "named"]
