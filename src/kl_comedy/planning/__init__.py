"""What a run will take before it begins: memory by component, time, device hours, and what would make it fit."""

from kl_comedy.planning.devices import GPUS, Device, device_named
from kl_comedy.planning.memory import Component
from kl_comedy.planning.plan import Lengths, Plan, Remedy, plan_run
from kl_comedy.planning.shapes import KNOWN, Shape, known_config, shape_of
from kl_comedy.planning.timing import Assumed, Timing

__all__ = [
    "GPUS", "KNOWN", "Assumed", "Component", "Device", "Lengths", "Plan", "Remedy", "Shape", "Timing", "device_named",
    "known_config", "plan_run", "shape_of",
]  # fmt: skip
