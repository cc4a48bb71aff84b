"""PipelineRL: k3 in the loss, on a clamped log-ratio; gone with gspo."""

from __future__ import annotations

from kl_comedy.lab.peers.flags import Flag
from kl_comedy.lab.peers.notes import FORWARD
from kl_comedy.lab.peers.reading import Given, Meaning, System, in_loss

PATH = "finetune.rl"

FLAGS = (
    Flag(name="kl_coef", path=f"{PATH}.kl_coef", default=0.0, meaning="the coefficient at the start"),
    Flag(
        name="final_kl_coef",
        path=f"{PATH}.final_kl_coef",
        default=None,
        nullable=True,
        meaning="the coefficient at the end; none is kl_coef",
    ),
    Flag(
        name="reward_minus_kl_coef",
        path=f"{PATH}.reward_minus_kl_coef",
        default=0.0,
        meaning="a KL in the reward, by its description",
    ),
    Flag(
        name="clamp_log_ratio_ref_new_value",
        path=f"{PATH}.clamp_log_ratio_ref_new_value",
        default=5.0,
        meaning="clamp of the log-ratio",
    ),
    Flag(
        name="policy_loss",
        path=f"{PATH}.policy_loss",
        default="reinforce",
        choices=("ppo", "reinforce", "gspo"),
        meaning="the policy loss",
    ),
)


def read(flags: Given) -> Meaning:
    start, clamp = flags["kl_coef"], flags["clamp_log_ratio_ref_new_value"]
    end = start if flags["final_kl_coef"] is None else flags["final_kl_coef"]
    no_ops = []
    if flags["reward_minus_kl_coef"] > 0:
        no_ops.append("reward_minus_kl_coef: declared, and read nowhere")
    switch: dict[str, object] = {"kl_coef": 0.001} if max(start, end) == 0 else {}
    if flags["policy_loss"] == "gspo":
        switch["policy_loss"] = "ppo"
        if max(start, end) > 0:
            no_ops.append("kl_coef with policy_loss=gspo: that branch never adds the KL to the loss")
    if clamp == 0:
        switch["clamp_log_ratio_ref_new_value"] = 5.0
        no_ops.append("clamp_log_ratio_ref_new_value=0 clamps every log-ratio to 0, so there is no KL")
    if switch:
        return Meaning(terms=(), no_ops=tuple(no_ops), switch_on=switch)
    notes = [
        FORWARD,
        f"the log-ratio is clamped at {clamp:g} nats, without gradient beyond",
        "no ratio is applied to the KL, though batches are stale by design (weights change during generation)",
    ]
    if start != end:
        notes.append(
            f"the coefficient goes linearly from {start:g} to {end:g} over the run; ours: beta {{start, end, steps}}"
        )
    return Meaning(terms=(in_loss("k3", start or end, input_clamp=clamp),), notes=tuple(notes), no_ops=tuple(no_ops))


ONLY_K3 = (
    "no flag of PipelineRL changes the estimate: it has k3 in the loss, whose gradient is that "
    "of the forward KL, without a ratio"
)

SYSTEM = System(
    name="pipelinerl",
    title="PipelineRL",
    version="58d3934 (2026-06-19), with its base config",
    source="pipelinerl/finetune/rl/__init__.py::rl_step, conf/finetune/base.yaml",
    flags=FLAGS,
    read=read,
    advice={
        "sequence": "no flag of PipelineRL puts the KL into the reward: reward_minus_kl_coef is read nowhere",
        "off_policy": ONLY_K3,
        "low_noise": ONLY_K3,
    },
)
