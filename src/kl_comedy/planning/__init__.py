"""What a run will take before it begins: memory by component, time, device hours, and what would make it fit."""
