"""Policies and references: loading, chunked token log-probs with exact KL and entropy, weight hashes."""
