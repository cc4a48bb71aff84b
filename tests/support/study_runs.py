"""A run of a made-up study, tracked; imported by the tests of results."""

from types import SimpleNamespace

from kl_comedy.tracking.logger import RunLogger

EVAL = "eval/heldout/reward"
KL = "eval/heldout/kl/exact_reverse_sequence"
COMMIT = "a" * 40
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>"
"""A completion that runs a script in a page that shows it without escaping."""
FAMILIES = {
    "k1_reverse_token in reward total": {0.05: (0.7, 3.0), 0.1: (0.6, 2.0), 0.3: (0.5, 1.0)},
    "k3_reverse_token in loss": {0.05: (0.5, 3.0), 0.1: (0.5, 2.0), 0.3: (0.4, 1.0)},
    "no KL": {0.0: (0.6, 5.0)},
}
"""Family to beta to (reward, KL) at the end of seed 0; seed s adds s / 100 to the reward."""


def track(folder, uri, family, beta, seed, reward, kl, **tags):
    """Track one run that ends at this reward and KL; its id in the store. ``tags`` are added, or replace others."""
    label = f"{beta} {family}"
    if family == "no KL":
        label = family
    name = f"{family[:2]}-{beta}-{seed}".replace(" ", "")
    logger = RunLogger(
        SimpleNamespace(uri=uri, experiment="study", tags={}),
        run_dir=folder / name,
        params={"name": "study", "seed": seed, "kl": label},
        tags={
            "kl.label": label,
            "kl.relative_bias": "0.1",
            "kl.variance": "2.5",
            "kl.verdict": "none: <b>bold</b>",
            "git.commit": COMMIT,
            "git.dirty": "false",
            "config.hash": f"{abs(hash((label, seed))):012x}"[:12],
            "run.command": f"kl-comedy train c.yaml seed={seed}",
            "version.torch": "2.13.0",
            **tags,
        },
    )
    for step in (0, 40, 80):
        share = step / 80
        logger.log_metrics({EVAL: 0.4 + share * (reward - 0.4), KL: share * kl, "train/reward": reward}, step)
    rows = [{"problem": "1+1=", "answer": "2", "completion": HOSTILE, "reward": 1.0, "status": "ok"}]
    logger.log_table("eval/heldout", rows, 80)
    logger.finish()
    return logger.run_id
