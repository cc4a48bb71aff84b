"""Speed and memory against TRL and TorchRL: the same work in alternating child processes, and what an update costs.

    setup.py -> the peers beside our environment    run.py -> child.py (ours.py, trl_side.py or torchrl_side.py)
    equal_step.py -> one step with the same completions in ours and a peer: losses and gradients must agree

`variants.py` says what is compared, `workload.py` on which prompts, `clock.py` and `memory.py` measure,
`summary.py` and `report.py` turn repetitions into a table.
"""
