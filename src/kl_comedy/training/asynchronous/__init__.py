"""Sampling in a process of its own while the learner learns, never more than a stated number of updates behind.

    learner --requests--> sampler process --scored rollouts--> buffer --batches--> stream
            --weights, one shared block-->

:mod:`buffer` decides what may be drawn and what is too old, and accounts for every prompt. :mod:`block` holds the
published weights. :mod:`sampler` is the process's handle, :mod:`worker` what runs in it, :mod:`source` what the stream
reads from.
"""
