"""Sweeps: from a grid to a manifest to jobs, on SLURM or on this machine.

    grid.yaml -> points -> manifest.json (every config checked) -> sbatch --array | --local N -> status -> resubmit

SLURM does the scheduling, the throttling, the dependencies and the requeueing; this package writes the scripts, calls
sbatch, squeue, sacct and scancel, and reads what the runs left in their folders.
"""
