"""What a run will need, before anything is allocated."""

from offload.planner.choice import least_cpu_memory
from offload.planner.placement import Placement, place

__all__ = ["Placement", "least_cpu_memory", "place"]
