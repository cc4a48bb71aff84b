"""The schema of a run and of an evaluation suite: dataclasses whose fields carry their documentation and rules.

docs/configuration.md is generated from this module (scripts/generate_docs.py). Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kl_comedy.config.validate import option

SHARDED = ("fsdp",)
"""Strategies that shard the policy over processes."""


@dataclass
class LoraConfig:
    """A LoRA adapter on the policy; the reference is then the base model (adapter off)."""

    rank: int = option(8, "Rank of the update.", minimum=1)
    alpha: float = option(16.0, "Scale: the update is multiplied by `alpha / rank`.", above=0)
    dropout: float = option(0.0, "Must be 0: dropout would make the trained policy differ from the sampler.", minimum=0)
    target_modules: list[str] = option(
        lambda: ["q_proj", "k_proj", "v_proj", "o_proj"], "Names of the linear layers that get an adapter."
    )


@dataclass
class ModelConfig:
    """The policy's model."""

    source: str = option("pocket", "`pocket` (built and pretrained here in seconds), a local folder, or a hub id.")
    gguf_file: str | None = option(None, "The GGUF file within `source`.")
    revision: str | None = option(None, "The hub revision of the weights.")
    tokenizer: str | None = option(None, "A folder or hub id, if not that of `source`.")
    dtype: str = option(
        "float32",
        "Type of the weights. Log-probs and KL are always float32 or wider.",
        choices=("float32", "bfloat16", "float16"),
    )
    device: str = option("auto", "`auto`: the GPU if there is one.", choices=("auto", "cpu", "cuda"))
    attention: str = option(
        "sdpa", "The attention implementation of transformers.", choices=("sdpa", "eager", "flash_attention_2")
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass: less memory, more time.")
    trust_remote_code: bool = option(False, "Run code that comes with the model.")
    head_chunk_elements: int | None = option(
        None, "Rows x vocabulary of logits in memory at once; `null`: 2^23 (2^27 on a GPU).", minimum=1
    )
    share_prompt: bool = option(True, "Compute a prompt once for all its completions; same results.")
    lora: LoraConfig | None = option(None, "Train a LoRA adapter; the reference is the model without it.")
    options: dict[str, Any] = option(
        dict, "`pocket`: `preset` (`base`, `tiny`) or fields of its recipe. Else: passed to transformers."
    )


@dataclass
class DatasetConfig:
    """Where problems come from."""

    dataset: str = option("pocket", "The [loader](#names).", registry="datasets")
    name: str | None = option(None, "`hub`: the dataset's name there. `reasoning_gym`: the task.")
    path: str | None = option(None, "`jsonl`, `parquet`: the file.")
    subset: str | None = option(None, "`hub`: the configuration of the dataset.")
    split: str | None = option(
        None,
        "`hub`: the split. `pocket`: `train`, `heldout`, `two_terms`, `four_terms`, `three_digits` or `subtraction`.",
    )
    fields: dict[str, str] = option(
        dict, "Maps our names (`text`, `answer`, `id`, `choices`; others go to the problem's meta) to the source's."
    )
    limit: int | None = option(
        None, "Maximum number of problems; procedural datasets: the number to generate.", minimum=1
    )
    seed: int = option(0, "0: the first `limit` rows; else a random subset. Procedural datasets: the generator's seed.")
    options: dict[str, Any] = option(
        dict,
        "Options of the loader. Files and `hub`: `text_after`, `answer_after`, `answer_boxed`, `render_choices`; `hub` "
        "also `revision`; `pocket`: `terms`, `digits`; `reasoning_gym`: the task's settings, `text_field`, "
        "`text_after`.",
    )


@dataclass
class PromptConfig:
    """How a problem becomes tokens: the model's chat template, or plain text."""

    template: str = option(
        "plain",
        "`plain`: prefix + text + suffix + prefill. `chat`: prefix + text + suffix as the user's turn.",
        choices=("plain", "chat"),
    )
    system: str | None = option(None, "The system turn (chat only).")
    prefix: str = option("", "Text before the problem.")
    suffix: str = option("", "Text after the problem.")
    prefill: str = option("", "Beginning of the answer; `{text}` is the problem's text.")
    max_tokens: int = option(512, "Longer prompts are skipped and counted.", minimum=1)


@dataclass
class DataConfig:
    """Problems to train and to evaluate on."""

    train: DatasetConfig = option(DatasetConfig, "The training problems.")
    eval: dict[str, DatasetConfig] = option(dict, "Sets to evaluate on, each under a name you choose.")
    prompt: PromptConfig = option(PromptConfig, "How a problem becomes a prompt.")
    decontaminate: bool = option(True, "Remove training problems that are also in an evaluation set.")
    allow_test_split: bool = option(False, "Allow training on a split named test or evaluation.")


@dataclass
class RolloutConfig:
    """How completions are sampled. The sampler must sample from the policy that is differentiated."""

    backend: str = option("hf", "The [sampler](#names).", registry="rollouts")
    prompts_per_batch: int = option(8, "Prompts per batch, over all processes.", minimum=1)
    group_size: int = option(8, "Completions per prompt.", minimum=1)
    max_new_tokens: int = option(64, "Longest completion, in tokens.", minimum=1)
    temperature: float = option(1.0, "Temperature of sampling and of every log-prob and KL.", above=0)
    top_p: float = option(1.0, "Training accepts 1 (off) only: otherwise the sampler differs from the policy.")
    top_k: int = option(0, "Training accepts 0 (off) only.")
    min_p: float = option(0.0, "Training accepts 0 (off) only.")
    stop: list[str] = option(list, "Texts that end a completion.")
    batch_sequences: int = option(256, "Completions sampled at once; changes the samples of a seed.", minimum=1)
    replica_gib: float = option(
        16.0,
        "With `fsdp`: the largest model (GiB) a process may hold unsharded, to sample with `hf` or to load a format "
        "that cannot be streamed.",
        above=0,
    )
    bucket_mib: int = option(256, "With `fsdp`: MiB of weights gathered at a time for a sampler or a file.", minimum=1)
    options: dict[str, Any] = option(dict, "Options of the backend (see [rollouts](rollouts.md)).")


@dataclass
class RewardConfig:
    """One part of the reward."""

    name: str = option("math_verify", "A [reward](#names).", registry="rewards")
    weight: float = option(1.0, "Factor in the sum of rewards.")
    options: dict[str, Any] = option(
        dict, "Options of the reward; `timeout_s`: CPU seconds per item in the worker pool."
    )


@dataclass
class ValueConfig:
    """The value head of ``advantage: gae``: linear on the last hidden state."""

    gamma: float = option(1.0, "Discount per token of `gae`.", minimum=0.0, maximum=1.0)
    lam: float = option(
        0.95,
        "Lambda of `gae`: 1 is the return to go less the value, 0 one temporal difference.",
        minimum=0.0,
        maximum=1.0,
    )
    coefficient: float = option(0.5, "Coefficient of the value loss `(V - lambda return)^2 / 2`.", above=0)
    lr: float | None = option(
        None, "Learning rate of the value head; `null`: `optimizer.lr`. The schedule scales both.", above=0
    )
    clip: float | None = option(
        None, "Clip values to this distance from those of the batch's first update; `null`: never.", above=0
    )
    trunk: bool = option(False, "The value loss also trains the policy's body; otherwise only the head.")
    bootstrap_truncated: bool = option(
        False,
        "Bootstrap a completion cut at `max_new_tokens` with the value after its last token; otherwise the episode "
        "ends there.",
    )
    normalize: bool = option(
        False, "Normalize advantages to mean 0 and deviation 1 over the update's tokens; this scales beta too."
    )


@dataclass
class DpoConfig:
    """Direct preference optimization on pairs of a better and a worse completion of one prompt, by verified reward."""

    beta: float = option(0.1, "DPO's beta.", above=0)


@dataclass
class AlgorithmConfig:
    """The task part of the objective, and how one batch is used."""

    advantage: str = option("rloo", "From returns to the weight of each token's score.", registry="advantages")
    value: ValueConfig = option(ValueConfig, "The value head of `gae`.")
    policy_loss: str = option("reinforce", "The task part of the loss.", registry="policy_losses")
    policy_loss_options: dict[str, float] = option(
        dict, "Options of the policy loss, as `clip_low`, `clip_high` of `ppo_clip`."
    )
    correction: dict[str, Any] = option(
        dict,
        "Weights of the policy loss for stale samples: names to options, as `{tis: {cap: 2}}`; one ratio, any number "
        "of masks ([algorithms.md](algorithms.md)). KL terms have a `correction` of their own.",
    )
    proximal: str = option(
        "behaviour",
        "Denominator of the policy loss's ratio: the sampler, or the policy at the batch's first update (decoupled "
        "PPO).",
        choices=("behaviour", "recomputed"),
    )
    reduction: str = option(
        "token_mean",
        "The weight of a sequence's token sum: 1/(tokens of the update); 1/(sequences x its tokens); "
        "1/(sequences x `reduction_constant`). The same weights hold for every KL term.",
        choices=("token_mean", "sequence_mean_token_mean", "sequence_sum"),
    )
    reduction_constant: float = option(1.0, "Only for `sequence_sum`.", above=0)
    updates_per_batch: int = option(
        1, "Parts of a batch, one optimizer update each; divides `prompts_per_batch`.", minimum=1
    )
    epochs_per_batch: int = option(1, "Passes over a batch.", minimum=1)
    mask_truncated: bool = option(False, "Leave completions cut at `max_new_tokens` out of the loss.")
    dpo: DpoConfig | None = option(
        None,
        "DPO on pairs of completions of one prompt with different rewards; replaces the policy loss and `kl` "
        "([replay.md](replay.md)).",
    )


@dataclass
class ReferenceConfig:
    """Moving references, used by KL terms that name them."""

    ema_decay: float = option(0.99, "Decay per update, for terms with `reference: ema`.", minimum=0.0, maximum=1.0)
    period: int = option(100, "Updates between copies, for terms with `reference: periodic`.", minimum=1)


@dataclass
class LagConfig:
    """How old the samples are that the policy trains on. See docs/offpolicy.md."""

    mode: str = option(
        "on_policy",
        "`replayed`: train on batches of older weights, in one process, reproducibly. `async`: another process samples "
        "at the same time ([offpolicy.md](offpolicy.md)).",
        choices=("on_policy", "replayed", "async"),
    )
    steps: int = option(
        0, "`replayed`: age in updates; a multiple of `updates_per_batch * epochs_per_batch`.", minimum=0
    )
    max_steps: int = option(0, "`async`: the largest age in updates of a batch at its first update.", minimum=0)
    policy: str = option(
        "wait",
        "`async`, at the largest age: `wait` pauses the sampler; `drop` discards old batches and samples again.",
        choices=("wait", "drop"),
    )
    in_flight: bool = option(False, "`async`: new weights take effect within completions.")
    silence_limit_s: float = option(
        60.0, "`async`: replace a sampler process after this many seconds without a heartbeat.", above=0
    )
    answer_limit_s: float = option(
        3600.0, "`async`: and after this many without finishing a batch or an evaluation.", above=0
    )


@dataclass
class OptimizerConfig:
    """AdamW, its schedule, and gradient clipping."""

    lr: float = option(1e-6, "Learning rate of AdamW.", above=0)
    betas: list[float] = option(lambda: [0.9, 0.999], "Betas of AdamW, two numbers in [0, 1).")
    eps: float = option(1e-8, "Epsilon of AdamW.", above=0)
    weight_decay: float = option(0.0, "Weight decay of AdamW.", minimum=0)
    clip_norm: float | None = option(1.0, "Clip the gradient to this L2 norm; `null`: never.", above=0)
    schedule: str = option(
        "constant",
        "After the warm-up: constant, or to zero at `train.steps`.",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = option(0, "Updates of linear warm-up; at most `train.steps`.", minimum=0)


@dataclass
class TrainConfig:
    """Length, memory, processes and files of a training run."""

    strategy: str = option(
        "single",
        "`single`: one process; `ddp`: a copy of the policy in each process; `fsdp`: shards (FSDP2). Results agree up "
        "to rounding ([clusters.md](clusters.md#several-processes)).",
        choices=("single", "ddp", *SHARDED),
    )
    devices: int = option(1, "Processes on each node (one per GPU); 1 with `single`.", minimum=1)
    nodes: int = option(1, "Number of nodes.", minimum=1)
    steps: int = option(100, "Optimizer updates.", minimum=1)
    microbatch_tokens: int | None = option(
        None,
        "Tokens per backward pass; does not change the gradient. `null`: as many as fit 1 GiB of activations (16 GiB "
        "on a GPU).",
        minimum=1,
    )
    precision: str = option(
        "fp32", "`bf16`: mixed precision; the sampler runs under the same.", choices=("fp32", "bf16")
    )
    eval_every: int = option(0, "Updates between evaluations; 0: only `eval.at_start` and `eval.at_end`.", minimum=0)
    checkpoint_every: int = option(
        10, "Updates between checkpoints; 0: none, and the run cannot be resumed.", minimum=0
    )
    keep_checkpoints: int = option(2, "Number of newest checkpoints to keep.", minimum=1)
    samples_every: int = option(10, "Updates between tables of sampled completions; 0: none.", minimum=0)
    exact_kl_every: int = option(
        1, "Updates between measurements of exact KL and entropy; 0: at update 0 only.", minimum=0
    )
    record_rollouts: str = option(
        "none",
        "Write every batch to `rollouts/` of the run folder ([replay.md](replay.md)).",
        choices=("none", "jsonl", "parquet"),
    )
    deterministic: bool = option(True, "Ask torch for deterministic algorithms.")
    threads: int | None = option(None, "CPU threads of torch; `null`: torch's default.", minimum=1)


@dataclass
class EvalConfig:
    """Evaluation on problems that are not trained on."""

    samples: int = option(1, "Completions per problem.", minimum=1)
    temperature: float = option(0.0, "0 is greedy.", minimum=0)
    max_new_tokens: int | None = option(None, "`null`: `rollout.max_new_tokens`.", minimum=1)
    at_start: bool = option(True, "Evaluate before the first update.")
    at_end: bool = option(True, "Evaluate after the last one.")
    kl: bool = option(
        True,
        "Also measure exact KL to the initial reference, total variation and entropy on the completions; costs two "
        "forward passes.",
    )
    reference: str | None = option(
        None,
        "The model that `kl-comedy evaluate` measures KL against: a config file (a run's `config.yaml`: its initial "
        "model) or a model as in `model.source`. `null`: entropy only.",
    )
    suites: list[str] = option(
        list,
        "[Suites](evaluation.md) to evaluate beside `data.eval`, by name or YAML file. `eval.samples` and "
        "`eval.temperature` apply, except to likelihood suites.",
    )
    data_root: str | None = option(None, "The folder of the suites' files; `null`: by hub name.")


@dataclass
class AuditConfig:
    """The gradient audit during a run. It changes nothing in training."""

    every: int = option(
        0, "Updates between [gradient audits](audit.md); 0: none. No audit key is in the config hash.", minimum=0
    )
    terms: list[str] = option(lambda: ["own"], "`own` (the terms of `kl`), `panel`, or names of recipes.")
    samples: int | None = option(
        None, "Maximum completions, in whole groups; `null`: half of the update, at least 3 groups.", minimum=1
    )
    blocks: int = option(8, "Blocks of whole groups; an update needs 3 groups.", minimum=3)
    sketch: int = option(65536, "Sketch size of a layer group's gradient; 0: the whole gradient.", minimum=0)


@dataclass
class CallbackConfig:
    """One Lightning callback."""

    name: str = option("", "A registered callback (`kl-comedy list callbacks`).", registry="callbacks")
    options: dict[str, Any] = option(dict, "Keyword arguments of its constructor.")


@dataclass
class TrackingConfig:
    """MLflow. The run folder stores everything as well, and survives an outage of the server."""

    uri: str = option(
        "sqlite:///mlflow.db",
        "An MLflow store or server; `none`: files in the run folder only. Not in the config hash.",
    )
    experiment: str = option("kl_comedy", "The MLflow experiment.")
    flush_every: int = option(10, "Steps of metrics between writes to the store.", minimum=1)
    tags: dict[str, str] = option(dict, "Further tags of the run.")


@dataclass
class Config:
    """A run."""

    name: str = option("run", "Name of the run and its folder: letters, digits, `.`, `_`, `-`.")
    seed: int = option(0, "Seed of every random draw: prompts, completions, evaluation.")
    output: str = option("runs", "The folder that contains run folders. Not in the config hash.")
    resume: str = option(
        "never",
        "`auto`: resume the newest run with the same config hash. Not in the config hash.",
        choices=("never", "auto"),
    )
    model: ModelConfig = option(ModelConfig)
    data: DataConfig = option(DataConfig)
    rollout: RolloutConfig = option(RolloutConfig)
    rewards: list[RewardConfig] = option(lambda: [RewardConfig()], "The reward is the weighted sum of these.")
    algorithm: AlgorithmConfig = option(AlgorithmConfig)
    kl: list[Any] | dict[str, Any] | str = option(
        list,
        "A list of [KL terms](#kl-terms), the name of a [recipe](#recipes), or `{recipe: NAME, beta: BETA}`. "
        "Overrides: `kl.0.beta=0.1`, or `kl.beta=0.1` on a recipe.",
        check="kl_comedy.kl.recipes:resolve_terms",
    )
    reference: ReferenceConfig = option(ReferenceConfig)
    lag: LagConfig = option(LagConfig)
    optimizer: OptimizerConfig = option(OptimizerConfig)
    train: TrainConfig = option(TrainConfig)
    eval: EvalConfig = option(EvalConfig)
    audit: AuditConfig = option(AuditConfig)
    callbacks: list[CallbackConfig] = option(list, "Lightning callbacks, in calling order.")
    trainer: dict[str, Any] = option(dict, "Extra arguments of `lightning.Trainer`; those that a run sets are refused.")
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
    summary: str = option("", "What it tests.")
    source: str = option("", "Where it is published.")
    licence: str = option("", "Its licence.")
    group: str = option("own", "Which table it belongs to.", choices=GROUPS)
    kind: str = option(
        "generate",
        "`generate`: completions are judged by `reward`. `likelihood`: the choice with the highest log-prob as a "
        "continuation is the answer.",
        choices=KINDS,
    )
    data: DatasetConfig | None = option(None, "Where the problems are published, or the task that generates them.")
    file: SuiteFile | None = option(None, "The same problems in a local file.")
    where: dict[str, list[str]] = option(dict, "Only problems whose meta field has one of these values.")
    items: int | None = option(None, "How many problems there must be.", minimum=1)
    text: str = option(
        "{text}",
        "The question: `{text}` is the problem, `{options}` its choices (each as `choice_line`), another name a field "
        "of the problem's meta (`{subject:words}`: underscores as spaces).",
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
