"""Pipeline schedules as the engines order them: when a step ends, and what is in flight. `order.py` says what a schedule is, each has a
file of its own, and `names.py` lists them."""

from orchestrator.cost.schedule.flights import fewest_by_stage, in_flight, in_flight_by_chunk
from orchestrator.cost.schedule.names import finish_times
from orchestrator.cost.schedule.timeline import Slot, timeline

__all__ = ["Slot", "fewest_by_stage", "finish_times", "in_flight", "in_flight_by_chunk", "timeline"]
