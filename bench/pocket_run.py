"""Settings of a short run of the pocket model that the plan is compared with: one thread, nothing written."""

# What a run does besides its updates (samples, checkpoints, tracking, evaluation) has memory and time of its own, which
# the plan does not predict.
SETTINGS = [
    "data.train={dataset: pocket, split: train, limit: 64, options: {digits: 1}}",
    "rewards=[{name: exact_answer}]",
    "kl=[{estimator: k3, placement: loss, beta: 0.01}]",
    "train.threads=1",
    "train.checkpoint_every=0",
    "train.samples_every=0",
    "tracking.uri=none",
    "eval.at_start=false",
    "eval.at_end=false",
]
