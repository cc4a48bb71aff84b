"""Speed and memory against TRL: the same work in alternating child processes, and what each update costs.

    setup.py -> TRL beside our environment        run.py -> child.py (ours.py or trl_side.py), one process a repetition
    equal_step.py -> one step with the same completions in both: losses and gradients must agree

`variants.py` says what is compared, `workload.py` on which prompts, `clock.py` and `memory.py` measure,
`summary.py` and `report.py` turn repetitions into a table.
"""
