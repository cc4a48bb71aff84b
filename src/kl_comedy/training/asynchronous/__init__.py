"""Sampling in another process while the learner learns, at most ``lag.max_steps`` updates behind.

    learner --requests--> sampler process --scored rollouts--> RolloutBuffer --batches--> stream
            --weights, one shared copy-->

:mod:`buffer` decides what may be drawn and what is too old, and accounts for every prompt. :mod:`shared_weights` holds
the published weights. :mod:`sampler` starts and watches the process, and :mod:`worker` runs in it.
"""
