"""The schema of a run: plain dataclasses, one per room. Imports nothing heavy.

A field's metadata may carry ``choices`` (the values allowed), ``registry`` (a kind whose names are
allowed) or ``minimum``/``above`` (a bound); :mod:`kl_comedy.config.validate` checks them all and names the key.

The schema of an evaluation suite: which problems, how they are asked, how an answer is judged.

Suites are YAML files (those of the package, or a user's own); :mod:`kl_comedy.evaluation.suites` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _one_of(default: Any, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


def _named(default: Any, registry: str) -> Any:
    return field(default=default, metadata={"registry": registry})


def _at_least(default: Any, minimum: float) -> Any:
    return field(default=default, metadata={"minimum": minimum})


def _above(default: Any, bound: float) -> Any:
    return field(default=default, metadata={"above": bound})


@dataclass
class LoraConfig:
    """A LoRA adapter on the policy; the reference is then the base model (adapter off)."""

    rank: int = _at_least(8, 1)
    alpha: float = _above(16.0, 0)
    dropout: float = _at_least(0.0, 0)
    target_modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])


@dataclass
class ModelConfig:
    """Which model: ``pocket`` (built and warm-started by us), a local folder, or a hub id."""

    source: str = "pocket"
    gguf_file: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    dtype: str = _one_of("float32", "float32", "bfloat16", "float16")
    device: str = _one_of("auto", "auto", "cpu", "cuda")
    attention: str = _one_of("sdpa", "sdpa", "eager", "flash_attention_2")
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    head_chunk_elements: int | None = _at_least(None, 1)
    share_prompt: bool = True
    lora: LoraConfig | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class DatasetConfig:
    """Where problems come from. ``fields`` maps our names (text, answer, id, ...) to the source's."""

    dataset: str = _named("pocket", "datasets")
    name: str | None = None
    path: str | None = None
    subset: str | None = None
    split: str | None = None
    fields: dict[str, str] = field(default_factory=dict)
    limit: int | None = _at_least(None, 1)
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class PromptConfig:
    """How a problem becomes tokens: the model's chat template, or plain text.

    ``template`` plain: ``prefix + problem + suffix``. chat: the same text as the user's turn, after
    ``system`` where given, and ``prefill`` as the beginning of the assistant's turn. ``{text}`` in
    ``prefill`` stands for the problem.
    """

    template: str = _one_of("plain", "plain", "chat")
    system: str | None = None
    prefix: str = ""
    suffix: str = ""
    prefill: str = ""
    max_tokens: int = _at_least(512, 1)


@dataclass
class DataConfig:
    train: DatasetConfig = field(default_factory=DatasetConfig)
    eval: dict[str, DatasetConfig] = field(default_factory=dict)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    decontaminate: bool = True
    allow_test_split: bool = False


@dataclass
class RolloutConfig:
    """How completions are drawn. The sampler must draw from the policy the learner differentiates:
    ``top_p``/``top_k``/``min_p`` other than off are refused in training. With ``train.strategy: fsdp`` no process
    holds the whole model unless it fits ``replica_gib``; weights travel at most ``bucket_mib`` at a time."""

    backend: str = _named("hf", "rollouts")
    prompts_per_batch: int = _at_least(8, 1)
    group_size: int = _at_least(8, 1)
    max_new_tokens: int = _at_least(64, 1)
    temperature: float = _above(1.0, 0)
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: list[str] = field(default_factory=list)
    batch_sequences: int = _at_least(256, 1)
    replica_gib: float = _above(16.0, 0)
    bucket_mib: int = _at_least(256, 1)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardConfig:
    """One part of the reward: a registered function, its weight, its options."""

    name: str = _named("math_verify", "rewards")
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class ValueConfig:
    """The value head of ``advantage: gae``: linear on the last hidden state. ``lr`` null: ``optimizer.lr``.

    ``trunk``: the value loss also trains the policy's body. ``bootstrap_truncated``: a completion cut at the limit
    goes on with the value after its last token; else it is over there, as its reward is.
    """

    gamma: float = field(default=1.0, metadata={"minimum": 0.0, "maximum": 1.0})
    lam: float = field(default=0.95, metadata={"minimum": 0.0, "maximum": 1.0})
    coefficient: float = _above(0.5, 0)
    lr: float | None = _above(None, 0)
    clip: float | None = _above(None, 0)
    trunk: bool = False
    bootstrap_truncated: bool = False
    normalize: bool = False


@dataclass
class DpoConfig:
    """Direct preference optimization on pairs of a better and a worse completion of one prompt, by verified reward."""

    beta: float = _above(0.1, 0)


@dataclass
class AlgorithmConfig:
    """The task part of the objective, and how one batch is used.

    ``correction`` maps policy corrections to their options, as ``{tis: {cap: 2.0}}``. ``proximal: recomputed`` holds
    the policy loss's ratio against the policy at the batch's first use (decoupled PPO) instead of the sampler.
    ``dpo`` replaces the policy term and the KL terms by pairwise preferences.
    """

    advantage: str = _named("rloo", "advantages")
    value: ValueConfig = field(default_factory=ValueConfig)
    policy_loss: str = _named("reinforce", "policy_losses")
    policy_loss_options: dict[str, float] = field(default_factory=dict)
    correction: dict[str, Any] = field(default_factory=dict)
    proximal: str = _one_of("behaviour", "behaviour", "recomputed")
    reduction: str = _one_of("token_mean", "token_mean", "sequence_mean_token_mean", "sequence_sum")
    reduction_constant: float = _above(1.0, 0)
    updates_per_batch: int = _at_least(1, 1)
    epochs_per_batch: int = _at_least(1, 1)
    mask_truncated: bool = False
    dpo: DpoConfig | None = None


@dataclass
class LagConfig:
    """``on_policy``; ``replayed``: every batch exactly ``steps`` optimizer updates old; ``async``: a process of its own
    samples while the learner learns, never more than ``max_steps`` updates behind. See docs/offpolicy.md.
    """

    mode: str = _one_of("on_policy", "on_policy", "replayed", "async")
    steps: int = _at_least(0, 0)
    max_steps: int = _at_least(0, 0)
    policy: str = _one_of("wait", "wait", "drop")
    in_flight: bool = False
    silence_limit_s: float = _above(60.0, 0)
    answer_limit_s: float = _above(3600.0, 0)


@dataclass
class OptimizerConfig:
    lr: float = _above(1e-6, 0)
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = _above(1e-8, 0)
    weight_decay: float = _at_least(0.0, 0)
    clip_norm: float | None = _above(1.0, 0)
    schedule: str = _one_of("constant", "constant", "linear", "cosine")
    warmup_steps: int = _at_least(0, 0)


@dataclass
class ReferenceConfig:
    """Moving references: EMA decay per update, period in updates (used by terms that name them)."""

    ema_decay: float = field(default=0.99, metadata={"minimum": 0.0, "maximum": 1.0})
    period: int = _at_least(100, 1)


SHARDED = ("fsdp",)
"""Strategies that hold the policy in shards."""


@dataclass
class TrainConfig:
    """``steps`` counts optimizer updates. ``microbatch_tokens`` bounds tokens per backward
    (open: by the memory that activations take).
    ``exact_kl_every``: measure the exact KL and entropy every so many updates (0: at update 0 and where
    a term needs it). ``strategy``: one process, whole copies (ddp) or shards (fsdp: FSDP2) in ``devices``
    processes on each of ``nodes`` nodes; how many there are is not part of
    the config hash."""

    strategy: str = _one_of("single", "single", "ddp", *SHARDED)
    devices: int = _at_least(1, 1)
    nodes: int = _at_least(1, 1)
    steps: int = _at_least(100, 1)
    microbatch_tokens: int | None = _at_least(None, 1)
    precision: str = _one_of("fp32", "fp32", "bf16")
    eval_every: int = _at_least(0, 0)
    checkpoint_every: int = _at_least(10, 0)
    keep_checkpoints: int = _at_least(2, 1)
    samples_every: int = _at_least(10, 0)
    exact_kl_every: int = _at_least(1, 0)
    record_rollouts: str = _one_of("none", "none", "jsonl", "parquet")
    deterministic: bool = True
    threads: int | None = _at_least(None, 1)


@dataclass
class EvalConfig:
    """Held-out evaluation: ``samples`` completions a problem at ``temperature`` (0 = greedy).

    ``kl``: measure exact KL, total variation and entropy on these completions, against the run's initial
    reference; ``kl-comedy evaluate`` takes ``reference`` instead (a config whose model it is, or a source).
    ``suites``: evaluated beside the sets of ``data.eval``, with their own prompts and verifiers or by log-prob of their
    choices; ``data_root`` is the folder of their files (open: by hub name).
    """

    samples: int = _at_least(1, 1)
    temperature: float = _at_least(0.0, 0)
    max_new_tokens: int | None = _at_least(None, 1)
    at_start: bool = True
    at_end: bool = True
    kl: bool = True
    reference: str | None = None
    suites: list[str] = field(default_factory=list)
    data_root: str | None = None


@dataclass
class AuditConfig:
    """The gradient audit while a run goes on: every so many updates (0: never), on the update's own completions.

    ``terms``: ``own`` (the terms of ``kl``), ``panel``, or recipes. ``samples`` bounds the completions (open: half of
    the update's, so that an audit costs less than an update). Changes nothing in training, so it is not part of the
    config hash.
    """

    every: int = _at_least(0, 0)
    terms: list[str] = field(default_factory=lambda: ["own"])
    samples: int | None = _at_least(None, 1)
    blocks: int = _at_least(8, 3)
    sketch: int = _at_least(65536, 0)


@dataclass
class CallbackConfig:
    """One Lightning callback: a registered name and the keyword arguments of its constructor."""

    name: str = _named("", "callbacks")
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrackingConfig:
    """MLflow. ``spool`` keeps everything in the run folder as well, and is what survives an outage."""

    uri: str = "sqlite:///mlflow.db"
    experiment: str = "kl_comedy"
    flush_every: int = _at_least(10, 1)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass
class Config:
    """A run. ``kl`` is a list of terms (see :class:`kl_comedy.kl.KLTerm`) or the name of a recipe."""

    name: str = "run"
    seed: int = 0
    output: str = "runs"
    resume: str = _one_of("never", "never", "auto")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: list[RewardConfig] = field(default_factory=lambda: [RewardConfig()])
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    kl: Any = field(default_factory=list)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    lag: LagConfig = field(default_factory=LagConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    callbacks: list[CallbackConfig] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


GROUPS = ("in_domain", "out_of_domain", "procedural", "own")
KINDS = ("generate", "likelihood")
FORMS = ("math", "number", "letter", "text", "answer_tag")
TEMPLATES = ("auto", "plain", "chat")


@dataclass
class SuiteFile:
    """The suite's problems in a local file (JSONL or Parquet); ``sha256`` of the file, where it must be that one."""

    path: str = ""
    sha256: str | None = None
    fields: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class SuiteConfig:
    """An evaluation suite.

    ``data`` is where the problems are published (or the task that makes them), ``file`` the same in a local file.
    ``where`` keeps the problems whose meta field is one of the values. ``items``: how many there must be.

    ``text`` is the question: ``{text}`` the problem, ``{options}`` its choices (each as ``choice_line``), any other
    name a field of the problem's meta (``{subject:words}``: underscores as spaces). ``prompt`` goes around it;
    ``template`` auto: the chat template where the tokenizer has one.

    ``generate``: completions are judged by ``reward`` (right from ``solved_at`` on); ``answer`` is how the answer that
    votes in maj@k is read. ``likelihood``: the choice with the highest log-prob as a continuation: ``delimiter``, then
    its letter or its text (``score``).
    """

    name: str = ""
    summary: str = ""
    source: str = ""
    licence: str = ""
    group: str = _one_of("own", *GROUPS)
    kind: str = _one_of("generate", *KINDS)
    data: DatasetConfig | None = None
    file: SuiteFile | None = None
    where: dict[str, list[str]] = field(default_factory=dict)
    items: int | None = _at_least(None, 1)
    text: str = "{text}"
    choice_line: str = "({letter}) {choice}"
    score: str = _one_of("letters", "letters", "texts")
    delimiter: str = " "
    template: str = _one_of("auto", *TEMPLATES)
    prompt: PromptConfig = field(default_factory=lambda: PromptConfig(max_tokens=4096))
    reward: RewardConfig = field(default_factory=RewardConfig)
    solved_at: float = _above(1.0, 0)
    answer: str = _one_of("math", *FORMS)
    max_new_tokens: int = _at_least(1024, 1)
    stop: list[str] = field(default_factory=list)
