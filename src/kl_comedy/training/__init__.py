"""Training: config -> objects -> the experience stream -> LightningModule -> checkpoints, metrics, summary.

stream.next() -> list[Scored] -> prepare (reference, advantages, weights) -> micro-batches
    -> policy pass -> policy loss + KL terms -> backward -> optimizer -> published weights (version + 1)
"""
