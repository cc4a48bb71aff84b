"""Speed and memory of an update in kl_comedy, TRL and TorchRL, measured on the same prompts in child processes.

    setup.py        installs TRL and TorchRL into folders of this package
    run.py          starts child.py once per repetition, which calls kl_comedy_runner, trl_runner or torchrl_runner
    equal_step.py   compares the loss and gradients of one step on the same completions

`variants.py` lists the compared settings, `workload.py` the tasks. `phase_timer.py`, `memory.py` and `recorder.py`
measure. `summary.py` and `report.py` write the tables.
"""
