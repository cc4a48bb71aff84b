"""What a run will take before it begins: memory by component, time, device hours, and what would make it fit."""

from kl_comedy.lab.planning.memory import GPUS, KNOWN, Component, Device, Shape, device_named, known_config, shape_of
from kl_comedy.lab.planning.plan import Assumed, Lengths, Plan, Remedy, Timing, plan_run

__all__ = [
    "GPUS",
    "KNOWN",
    "Assumed",
    "Component",
    "Device",
    "Lengths",
    "Plan",
    "Remedy",
    "Shape",
    "Timing",
    "device_named",
    "known_config",
    "plan_run",
    "shape_of",
]
