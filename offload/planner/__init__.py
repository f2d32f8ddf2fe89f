"""What a configuration will need, before anything is allocated."""

from offload.planner.placement import Placement, least_cpu_memory, place

__all__ = ["Placement", "least_cpu_memory", "place"]
