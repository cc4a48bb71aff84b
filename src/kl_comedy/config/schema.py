"""The schema of a run and of an evaluation suite: dataclasses whose fields carry their documentation and rules.

docs/configuration.md is generated from this module (research/scripts/generate_docs.py). Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kl_comedy.config.trainer_arguments import check_trainer_arguments
from kl_comedy.config.validate import option
from kl_comedy.errors import bad_value
from kl_comedy.redaction import check_address

SHARDED = ("fsdp",)
"""Strategies that shard the policy over processes."""


@dataclass
class LoraConfig:
    """A LoRA adapter on the policy; the reference is then the base model (adapter off)."""

    rank: int = option(8, "Rank.", minimum=1)
    alpha: float = option(16.0, "Multiplies the update by `alpha / rank`.", above=0)
    target_modules: list[str] = option(lambda: ["q_proj", "k_proj", "v_proj", "o_proj"], "Layers that get an adapter.")


@dataclass
class ModelConfig:
    """The policy's model."""

    source: str = option(
        "pocket",
        "`pocket` (built here in seconds), a local folder, or a hub id. A folder of a PEFT LoRA adapter alone is "
        "merged with its base once (in the cache); the reference is then the adapter's start.",
    )
    revision: str | None = option(None, "The hub revision of the weights.")
    gguf_file: str | None = option(None, "The GGUF file within `source`.")
    trust_remote_code: bool = option(False, "Run code that comes with the model.")
    tokenizer: str | None = option(None, "Folder or hub id; `null`: that of `source`.")
    dtype: str = option(
        "float32",
        "Type of the weights; log-probs are float32. Training without `lora`: `float32` only.",
        choices=("float32", "bfloat16", "float16"),
    )
    device: str = option("auto", "`auto`: the GPU if there is one.", choices=("auto", "cpu", "cuda"))
    attention: str = option(
        "sdpa",
        "`varlen`: `sdpa`, with torch's flash kernel for sequences of different lengths in training (16 bits, "
        "[on a GPU](speed.md#on-a-gpu)).",
        choices=("sdpa", "eager", "flash_attention_2", "varlen"),
    )
    gradient_checkpointing: bool = option(False, "Recompute activations: less memory, more time.")
    head_dtype: str | None = option(
        None,
        "`bfloat16`: the head's products in bfloat16 with float32 sums ([faster on a GPU](speed.md#on-a-gpu)); `null`: "
        "in the type of the weights.",
        choices=("bfloat16",),
    )
    head_chunk_elements: int | None = option(None, "Logits in memory at once; `null`: 2^23 (GPU: 2^27).", minimum=1)
    share_prompt: bool = option(True, "Compute a prompt once for its completions; same results.")
    lora: LoraConfig | None = option(None, "Train a LoRA adapter; the initial reference is the model without it.")
    options: dict[str, Any] = option(
        dict,
        "`pocket`: `preset` (`base`, `tiny`) or recipe fields; else further arguments of transformers' "
        "`from_pretrained`.",
    )

    @property
    def library_attention(self) -> str:
        """:attr:`attention` as transformers knows it."""
        if self.attention == "varlen":
            return "sdpa"
        return self.attention

    def overrides_for_exported(self) -> list[str]:
        """The overrides that load the exported policy, whose files have these settings applied."""
        overrides = []
        if self.options:
            overrides.append("model.options={}")
        if self.revision is not None:
            overrides.append("model.revision=null")
        if self.gguf_file is not None:
            overrides.append("model.gguf_file=null")
        return overrides


@dataclass
class DatasetConfig:
    """Where problems come from."""

    dataset: str = option("pocket", "The [loader](#names).", registry="datasets")
    name: str | None = option(None, "`hub`: the dataset. `reasoning_gym`: the task.")
    path: str | None = option(None, "`csv`, `jsonl`, `parquet`: the file. `saved`: the folder.")
    subset: str | None = option(None, "`hub`: the configuration.")
    split: str | None = option(
        None,
        "`hub`, `saved`: the split. `pocket`: `train`, `heldout`, `two_terms`, `four_terms`, `three_digits`, "
        "`subtraction`.",
    )
    fields: dict[str, str] = option(
        dict, "Our names (`text`, `answer`, `id`, `choices`, or meta fields) to the source's."
    )
    limit: int | None = option(None, "Maximum number of problems; procedural datasets generate as many.", minimum=1)
    seed: int = option(0, "0: the first `limit` rows; else a random subset. Procedural datasets: their seed.")
    options: dict[str, Any] = option(
        dict,
        "Files, `saved` and `hub`: `text_after`, `answer_after`, `answer_boxed`, `render_choices`; `hub` also "
        "`revision`, `csv` also `delimiter`; `pocket`: `terms`, `digits`; `reasoning_gym`: the task's settings, "
        "`text_field`, `text_after`.",
    )


@dataclass
class PromptConfig:
    """How a problem becomes tokens: the model's chat template, or plain text."""

    template: str = option("plain", "`plain`: the texts joined. `chat`: a user turn.", choices=("plain", "chat"))
    system: str | None = option(None, "The system turn (chat only).")
    prefix: str = option("", "Text before the problem.")
    suffix: str = option("", "Text after the problem.")
    prefill: str = option("", "Beginning of the answer; `{text}`: the problem.")
    max_tokens: int = option(512, "Longer prompts are skipped and counted.", minimum=1)


@dataclass
class DataConfig:
    """Problems to train and to evaluate on."""

    train: DatasetConfig = option(DatasetConfig, "The training problems.")
    eval: dict[str, DatasetConfig] = option(dict, "Sets to evaluate on, by a name you choose.")
    prompt: PromptConfig = option(PromptConfig, "How a problem becomes a prompt.")
    decontaminate: bool = option(True, "Remove training problems that an evaluation set contains.")
    allow_test_split: bool = option(False, "Allow training on a test or evaluation split.")


@dataclass
class TruncationConfig:
    """Which tokens a sampler keeps of the next token's distribution; it draws from these, renormalized."""

    top_p: float = option(1.0, "Keep the likeliest tokens whose mass reaches this; 1: off.", above=0, maximum=1)
    top_k: int = option(0, "Keep this many of the likeliest tokens; 0: off.", minimum=0)
    min_p: float = option(0.0, "Keep tokens with at least this share of the likeliest one; 0: off.", minimum=0)

    @property
    def is_on(self) -> bool:
        """Whether a token may be left out."""
        return self != TruncationConfig()


@dataclass
class RolloutConfig:
    """How completions are sampled. The sampler must sample from the policy that is differentiated."""

    backend: str = option("hf", "The [sampler](rollouts.md).", registry="rollouts")
    prompts_per_batch: int = option(8, "Prompts per batch, over all processes.", minimum=1)
    group_size: int = option(8, "Completions per prompt.", minimum=1)
    max_new_tokens: int = option(64, "Longest completion, in tokens.", minimum=1)
    temperature: float = option(1.0, "Temperature for sampling and for all log-probs and KLs.", above=0)
    truncation: TruncationConfig = option(
        TruncationConfig, "The learner [renormalizes](rollouts.md#truncated-sampling) over what was kept."
    )
    stop: list[str] = option(list, "Texts that end a completion.")
    batch_sequences: int = option(256, "Completions sampled at once; changes the samples of a seed.", minimum=1)
    options: dict[str, Any] = option(dict, "Options of the [backend](rollouts.md).")


@dataclass
class RewardConfig:
    """One part of the reward."""

    name: str = option("math_verify", "A [reward](#names).", registry="rewards")
    weight: float = option(1.0, "Factor in the sum of rewards.")
    options: dict[str, Any] = option(dict, "Its options; `timeout_s`: CPU seconds per item.")


@dataclass
class GoldConfig:
    """The verdict that is measured and never trained on, where ``rewards`` are a proxy of it."""

    name: str = option("math_verify", "A [reward](#names).", registry="rewards")
    options: dict[str, Any] = option(dict, "Its options.")


@dataclass
class EnvironmentConfig:
    """What answers the policy between its turns: a completion is then a [dialogue](dialogues.md)."""

    name: str = option("", "An [environment](#names).", registry="environments")
    options: dict[str, Any] = option(dict, "Its options.")
    weights: dict[str, float] = option(dict, "Factor of each of its parts in the sum of rewards.")
    credit: str = option(
        "dialogue",
        "A token's return: the whole reward, or less what [earlier turns](dialogues.md#turns) earned; groups then "
        "compare turns.",
        choices=("dialogue", "turn"),
    )
    turns: int = option(4, "Most turns of the policy; a dialogue that is not over then counts as truncated.", minimum=1)
    turn_tokens: int | None = option(
        None, "Longest turn of the policy, in tokens; `null`: `rollout.max_new_tokens / turns`.", minimum=1
    )
    observation_tokens: int = option(256, "Longest observation, in tokens; a longer one is a failure.", minimum=1)
    timeout_s: float = option(3.0, "CPU seconds per turn.", above=0)
    role: str = option("user", "With `data.prompt.template: chat`: who says it.", choices=("user", "tool"))
    rerendered: str = option(
        "refuse",
        "Of a chat template that renders earlier turns anew: `split` makes [rows](dialogues.md#rows).",
        choices=("refuse", "split"),
    )

    @property
    def turn_weights(self) -> dict[str, float] | None:
        """``weights``, where parts count from the turn that earned them; None where they are of the whole dialogue."""
        return self.weights if self.credit == "turn" else None


@dataclass
class ValueConfig:
    """The value head of ``advantage: gae``: linear on the last hidden state."""

    gamma: float = option(1.0, "Discount per step.", minimum=0, maximum=1)
    lam: float = option(0.95, "1: return to go less value; 0: one-step TD.", minimum=0, maximum=1)
    coefficient: float = option(0.5, "Factor of the value loss `(V - lambda return)^2 / 2`.", above=0)
    lr: float | None = option(None, "Learning rate of the head, scheduled; `null`: `optimizer.lr`.", above=0)
    clip: float | None = option(None, "Largest distance of values from the first update's.", above=0)
    trunk: bool = option(False, "The value loss also trains the policy's body, not the head only.")
    bootstrap_truncated: bool = option(False, "Bootstrap truncated completions with the value after the last token.")
    normalize: bool = option(False, "Advantages with mean 0 and deviation 1 per update; scales beta too.")
    discount: str = option(
        "token",
        "The step of `gamma` and `lam`: a token of the policy, or a [turn](dialogues.md#turns).",
        choices=("token", "turn"),
    )


@dataclass
class DpoConfig:
    """Direct preference optimization on pairs of a better and a worse completion of one prompt, by verified reward."""

    beta: float = option(0.1, "Beta of DPO.", above=0)


@dataclass
class AlgorithmConfig:
    """The task part of the objective, and how one batch is used."""

    advantage: str = option("rloo", "From returns to weights of the tokens' scores.", registry="advantages")
    value: ValueConfig = option(ValueConfig)
    policy_loss: str = option("reinforce", "The task part of the loss.", registry="policy_losses")
    policy_loss_options: dict[str, float] = option(dict, "Its options, as `clip_low` of `ppo_clip`.")
    correction: dict[str, Any] = option(
        dict,
        "[Weights](algorithms.md) of stale samples, as `{tis: {cap: 2}}`: one ratio, any masks.",
    )
    reward_weight: float = option(
        1.0, "Factor of the reward in the returns; 0: the KL terms are the whole signal.", minimum=0
    )
    proximal: str = option(
        "behaviour",
        "Denominator of the ratio: the sampler, or the policy at the batch's first update.",
        choices=("behaviour", "recomputed"),
    )
    reduction: str = option(
        "token_mean",
        "Factor of a sequence's token sum, in the policy loss and every KL term: 1/(tokens of the update); "
        "1/(sequences x its tokens); 1/(sequences x `reduction_constant`).",
        choices=("token_mean", "sequence_mean_token_mean", "sequence_sum"),
    )
    reduction_constant: float = option(1.0, "For `sequence_sum`.", above=0)
    updates_per_batch: int = option(1, "Updates per batch and epoch; divides `prompts_per_batch`.", minimum=1)
    epochs_per_batch: int = option(1, "Passes over a batch.", minimum=1)
    mask_truncated: bool = option(False, "Leave truncated completions out of the loss.")
    groups_without_signal: str = option(
        "keep",
        "[Groups whose rewards are all equal](algorithms.md#groups-without-signal): `shrink` leaves them out of the "
        "loss and its denominators, KL terms included; `refill` draws the next prompts in their place.",
        choices=("keep", "shrink", "refill"),
    )
    refill_draws: int = option(
        10, "With `refill`: draws for one batch, at most; a group without signal then stays.", minimum=2
    )
    dpo: DpoConfig | None = option(None, "[DPO](replay.md#dpo) on pairs; replaces policy loss and `kl`.")


@dataclass
class TeacherConfig:
    """A second model over the policy's tokens, never trained. Device, attention and head settings are the policy's."""

    source: str = option("pocket", "`pocket`, a local folder, or a hub id.")
    revision: str | None = option(None, "The hub revision of the weights.")
    gguf_file: str | None = option(None, "The GGUF file within `source`.")
    trust_remote_code: bool = option(False, "Run code that comes with the model.")
    adapter: str | None = option(None, "Folder of a LoRA adapter (PEFT) on `source`, as a LoRA run exports it.")
    tokenizer: str | None = option(
        None, "Folder or hub id; default: the tokenizer of `source`. Its tokens must be the policy's."
    )
    dtype: str | None = option(
        None, "Type of the weights; `null`: `model.dtype`.", choices=("float32", "bfloat16", "float16")
    )
    options: dict[str, Any] = option(dict, "As `model.options`.")
    url: str | None = option(
        None,
        "Address of a vLLM or kl_comedy server that has the model; only the tokenizer of `source` is loaded. For terms "
        "that read log-probs of sampled tokens or of the teacher's likeliest ones ([servers](distillation.md)).",
    )
    server_model: str | None = option(None, "Name of the model on the server at `url`; `null`: its first.")
    api_key_env: str = option("VLLM_API_KEY", "Environment variable with the key of `url`.")

    def __post_init__(self) -> None:
        if self.url is not None:
            check_address(self.url, "reference.teacher.url")

    def model(self, policy: ModelConfig) -> ModelConfig:
        """The teacher as a model to load, with everything else as the policy has it."""
        return replace(
            policy,
            source=self.source,
            revision=self.revision,
            gguf_file=self.gguf_file,
            trust_remote_code=self.trust_remote_code,
            tokenizer=self.tokenizer,
            dtype=self.dtype or policy.dtype,
            options=self.options,
            lora=None,
            gradient_checkpointing=False,
        )


@dataclass
class ReferenceConfig:
    """References other than the initial policy, used by KL terms that name them."""

    ema_decay: float = option(0.99, "Decay per update of `reference: ema`.", minimum=0, maximum=1)
    period: int | None = option(
        100, "Updates between copies of `reference: periodic`; `null`: `max_kl` alone decides.", minimum=1
    )
    max_kl: float | None = option(
        None, "`reference: periodic` is copied too after an update with more KL to it, in nats per token.", above=0
    )

    past_gib: float = option(
        16.0, "Largest memory of the [past policies](references.md#past-policies) that a run keeps.", above=0
    )

    teacher: TeacherConfig | None = option(None, "The model of `reference: teacher` ([distillation](distillation.md)).")


@dataclass
class LagConfig:
    """How old the samples are that the policy trains on. See docs/offpolicy.md."""

    mode: str = option(
        "on_policy",
        "`replayed`: batches of older weights; `async`: engines sample [beside the trainer](offpolicy.md).",
        choices=("on_policy", "replayed", "async"),
    )
    steps: int = option(0, "`replayed`: age in updates; a multiple of the updates per batch.", minimum=0)
    max_steps: int = option(0, "`async`: largest age of a batch at its first update, in updates.", minimum=0)
    policy: str = option(
        "wait", "`async`, at the largest age: pause sampling, or drop old batches.", choices=("wait", "drop")
    )
    in_flight: bool = option(False, "`async`: new weights take effect within completions.")


@dataclass
class OptimizerConfig:
    """AdamW, its schedule, and gradient clipping."""

    lr: float = option(1e-6, "Learning rate of AdamW.", above=0)
    betas: list[float] = option(lambda: [0.9, 0.999], "Two decay rates, each in [0, 1).")
    eps: float = option(1e-8, "Added to the denominator.", above=0)
    weight_decay: float = option(0.0, "Decoupled weight decay.", minimum=0)
    clip_norm: float | None = option(1.0, "Largest L2 norm of the gradient; `null`: no clipping.", above=0)
    schedule: str = option(
        "constant", "After the warm-up; all but `constant` end at 0.", choices=("constant", "linear", "cosine")
    )
    warmup_steps: int = option(0, "Updates of linear warm-up; at most `train.steps`.", minimum=0)
    ess_scaling: str = option(
        "none",
        "Times `lr` of the policy: the share of completions that `policy/ess` counts, or its root (2602.17616).",
        choices=("none", "sqrt", "linear"),
    )


@dataclass
class TrainConfig:
    """Length, memory, processes and files of a training run."""

    strategy: str = option(
        "single",
        "One process, a copy in each, or [shards](clusters.md#several-processes).",
        choices=("single", "ddp", *SHARDED),
    )
    devices: int = option(1, "Processes on each node, one per GPU; `single`: 1.", minimum=1)
    nodes: int = option(1, "Number of nodes.", minimum=1)
    shards: str = option(
        "all",
        "`fsdp` on several nodes: over `all` processes (least memory), or over those of a `node`, a copy on each (less "
        "traffic).",
        choices=("all", "node"),
    )
    replica_gib: float = option(16.0, "`fsdp`: largest model that one process may hold unsharded.", above=0)
    bucket_mib: int = option(256, "`fsdp`: weights gathered at a time for a sampler or a file.", minimum=1)
    steps: int = option(100, "Optimizer updates.", minimum=1)
    microbatch_tokens: int | None = option(
        None, "Tokens per backward pass; `null`: 1 GiB of activations (GPU: 16).", minimum=1
    )
    precision: str = option("fp32", "`bf16`: mixed precision, in the sampler too.", choices=("fp32", "bf16"))
    eval_every: int = option(0, "Updates between evaluations; 0: only at start and end.", minimum=0)
    checkpoint_every: int = option(10, "Updates between checkpoints; 0: none, no resuming.", minimum=0)
    keep_checkpoints: int = option(2, "Newest checkpoints to keep.", minimum=1)
    samples_every: int = option(10, "Updates between tables of completions; 0: none.", minimum=0)
    exact_kl_every: int = option(1, "Updates between exact KL and entropy; 0: first and last only.", minimum=0)
    record_rollouts: str = option("none", "[Record](replay.md) every batch.", choices=("none", "jsonl", "parquet"))
    deterministic: bool = option(True, "Ask torch for deterministic algorithms.")
    threads: int | None = option(None, "CPU threads of torch; `null`: its default.", minimum=1)


@dataclass
class EvalConfig:
    """Evaluation on problems that are not trained on."""

    samples: int = option(1, "Completions per problem.", minimum=1)
    temperature: float = option(0.0, "0 is greedy.", minimum=0)
    sampling: TruncationConfig = option(TruncationConfig)
    max_new_tokens: int | None = option(None, "`null`: `rollout.max_new_tokens`.", minimum=1)
    at_start: bool = option(True, "Evaluate before the first update.")
    at_end: bool = option(True, "Evaluate after the last one.")
    kl: bool = option(True, "Measure KL, total variation and entropy too: two forward passes.")
    reference: str | None = option(None, "`evaluate`: KL to a run's `config.yaml` or a `model.source`.")
    suites: list[str] = option(list, "Further sets: [suites](evaluation.md), by name or YAML file.")
    data_root: str | None = option(None, "Folder of the suites' files; `null`: by hub name.")


@dataclass
class AuditConfig:
    """The gradient audit during a run. It changes nothing in training."""

    every: int = option(0, "Updates between [gradient audits](audit.md), which need 3 groups; 0: none.", minimum=0)
    terms: list[str] = option(lambda: ["own"], "`own` (the terms of `kl`), `panel`, or names of recipes.")
    samples: int | None = option(None, "Maximum completions, in whole groups; `null`: half of the update.", minimum=1)


@dataclass
class CallbackConfig:
    """One Lightning callback."""

    name: str = option("", "`kl-comedy list callbacks`.", registry="callbacks")
    options: dict[str, Any] = option(dict, "Arguments of its constructor.")


@dataclass
class LoggerConfig:
    """One Lightning logger beside MLflow."""

    name: str = option("", "`kl-comedy list loggers`.", registry="loggers")
    options: dict[str, Any] = option(dict, "Its options.")


@dataclass
class TrackingConfig:
    """MLflow. The run folder stores everything as well, and survives an outage of the server."""

    uri: str = option("sqlite:///mlflow.db", "MLflow store or server; `none`: only files in the run folder.")
    experiment: str = option("kl_comedy", "The MLflow experiment.")
    tags: dict[str, str] = option(dict, "Further tags of the run.")
    loggers: list[LoggerConfig] = option(list, "Lightning loggers beside MLflow.")


RESUME = ("never", "auto")
"""The values of ``resume`` that are not folders."""


def check_resume(value: str, key: str) -> None:
    """Raise :class:`UserError` for what is neither of :data:`RESUME` nor a path.

    That the folder is there is checked when a run begins: the config of a run is read long after.
    """
    if value not in RESUME and "/" not in value:
        raise bad_value(key, value, [*RESUME, "the folder of a run, as runs/RUN"])


@dataclass
class Config:
    """A run."""

    name: str = option("run", "Name of run and folder: letters, digits, `.`, `_`, `-`.")
    seed: int = option(0, "Seed of every random draw.")
    output: str = option("runs", "Folder of run folders.")
    resume: str = option(
        "never",
        "`auto`: the newest run of this `name` and config, or extend one of fewer `train.steps`; a folder: that run.",
        check=check_resume,
    )
    model: ModelConfig = option(ModelConfig)
    data: DataConfig = option(DataConfig)
    rollout: RolloutConfig = option(RolloutConfig)
    rewards: list[RewardConfig] = option(lambda: [RewardConfig()], "Their weighted sum is the reward.")
    environment: EnvironmentConfig | None = option(
        None, "What answers the policy between its turns ([dialogues](dialogues.md))."
    )
    gold: GoldConfig | None = option(
        None, "What evaluations measure where `rewards` are a [proxy](hacking.md) of it; `null`: the rewards."
    )
    algorithm: AlgorithmConfig = option(AlgorithmConfig)
    kl: list[Any] | dict[str, Any] | str = option(
        list,
        "[KL terms](#kl-terms), a [recipe's](#recipes) name, or `{recipe: NAME, beta: BETA}`. Override: "
        "`kl.0.beta=0.1`, of a recipe `kl.beta=0.1`.",
        terms="recipes",
    )
    reference: ReferenceConfig = option(ReferenceConfig)
    lag: LagConfig = option(LagConfig)
    optimizer: OptimizerConfig = option(OptimizerConfig)
    train: TrainConfig = option(TrainConfig)
    eval: EvalConfig = option(EvalConfig)
    audit: AuditConfig = option(AuditConfig)
    callbacks: list[CallbackConfig] = option(list, "Lightning callbacks, in this order.")
    trainer: dict[str, Any] = option(
        dict,
        "Further arguments of `lightning.Trainer`; those that a run sets are refused.",
        check_keys=check_trainer_arguments,
    )
    tracking: TrackingConfig = option(TrackingConfig)


GROUPS = ("in_domain", "out_of_domain", "procedural", "own")
KINDS = ("generate", "likelihood")
FORMS = ("math", "number", "letter", "text", "answer_tag")
TEMPLATES = ("auto", "plain", "chat")


@dataclass
class SuiteFile:
    """The suite's problems in a local file."""

    path: str = option("", "The file (JSONL or Parquet).")
    sha256: str | None = option(None, "SHA-256 that the file must have.")
    fields: dict[str, str] = option(dict, "Our names to the file's, as in `data.train.fields`.")
    options: dict[str, Any] = option(dict, "Options of the loader.")


@dataclass
class SuiteConfig:
    """An evaluation suite (a YAML file): which problems, how they are asked, how an answer is judged."""

    name: str = option("", "Name of the suite.")
    summary: str = option("", "What the suite tests.")
    source: str = option("", "Where the suite is published.")
    licence: str = option("", "Licence of the problems.")
    group: str = option("own", "Table of results that the suite belongs to.", choices=GROUPS)
    kind: str = option(
        "generate",
        "`generate`: `reward` judges completions; `likelihood`: the choice with the highest log-prob is the answer.",
        choices=KINDS,
    )
    data: DatasetConfig | None = option(None, "Where the problems are published, or the task that generates them.")
    file: SuiteFile | None = option(None, "The same problems in a local file.")
    where: dict[str, list[str]] = option(dict, "Keep only problems whose meta field has one of these values.")
    items: int | None = option(None, "Number of problems that the suite must have.", minimum=1)
    text: str = option(
        "{text}",
        "The question, of `{text}` (the problem), `{options}` (its choices) and fields of its meta "
        "(`{subject:words}`: underscores as spaces).",
    )
    choice_line: str = option("({letter}) {choice}", "How one choice is written.")
    score: str = option("letters", "`likelihood`: score the choice's letter or its text.", choices=("letters", "texts"))
    delimiter: str = option(" ", "`likelihood`: between the prompt and the choice.")
    template: str = option("auto", "`auto`: the chat template where the tokenizer has one.", choices=TEMPLATES)
    prompt: PromptConfig = option(lambda: PromptConfig(max_tokens=4096), "Text around the question.")
    reward: RewardConfig = option(RewardConfig, "`generate`: the verifier.")
    solved_at: float = option(1.0, "The reward from which an answer counts as right.", above=0)
    answer: str = option("math", "How the answer that votes in maj@k is read from a completion.", choices=FORMS)
    max_new_tokens: int = option(1024, "Longest completion, in tokens.", minimum=1)
    stop: list[str] = option(list, "Texts that end a completion.")
