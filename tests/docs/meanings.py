"""What each config key, KL-term field and room means: the hand-written column of the generated tables."""

_DATASET = {
    "dataset": "A registered loader (see [names](#names)).",
    "name": "`hub`: the dataset's name there. `reasoning_gym`: the task.",
    "path": "`jsonl`, `parquet`: the file.",
    "subset": "`hub`: the configuration of the dataset.",
    "split": "`hub`: which. `pocket`: `train`, `heldout`, `two_terms`, `four_terms`, `three_digits` or `subtraction`.",
    "fields": "Our names (`text`, `answer`, `id`, `choices`, any other goes to the problem's meta) to the source's.",
    "limit": "At most so many problems; for procedural datasets how many to make.",
    "seed": "0 takes the first `limit` rows, another seed a random subset; the generator's seed where procedural.",
    "options": (
        "Of the loader. Files and `hub`: `text_after`, `answer_after`, `answer_boxed`, `render_choices`; `hub` also "
        "`revision`; `pocket`: `terms`, `digits`; `reasoning_gym`: the task's own settings, `text_field`, `text_after`."
    ),
}

MEANINGS: dict[str, str] = {
    "name": "Names the run and its folder: letters, digits, `.`, `_`, `-`.",
    "seed": "Of everything drawn: prompts, completions, evaluation.",
    "output": "The folder that holds run folders. Not part of the config hash.",
    "resume": "`auto`: go on with the newest run of the same config hash. Not part of the config hash.",
    "kl": (
        "A list of [KL terms](#kl-terms), the name of a [recipe](#recipes), or `{recipe: NAME, beta: BETA}`. "
        "Overrides: `kl.0.beta=0.1`, or `kl.beta=0.1` on a recipe."
    ),
    "model.source": "`pocket` (built and warm-started here), a local folder, or a hub id.",
    "model.gguf_file": "The GGUF file within `source`.",
    "model.revision": "The hub revision of the weights.",
    "model.tokenizer": "A folder or hub id, where the tokenizer is not that of `source`.",
    "model.dtype": "Of the weights; log-probs, softmax and KL are float32 or wider whatever it is.",
    "model.device": "`auto` is the GPU where there is one.",
    "model.attention": "The attention implementation of transformers.",
    "model.gradient_checkpointing": "Recompute activations in the backward pass: less memory, more time.",
    "model.trust_remote_code": "Run code that comes with the model. Only for sources you have read.",
    "model.head_chunk_elements": (
        "Rows x vocabulary of logits held at once; never `[B, T, V]`. Open: 2^23 (2^27 on a GPU)."
    ),
    "model.share_prompt": "Compute a prompt once for its completions, without padding; the numbers stay the same.",
    "model.lora": "A LoRA adapter on the policy; the reference is then the base model, the adapter switched off.",
    "model.lora.rank": "Rank of the update.",
    "model.lora.alpha": "Scale: the update is multiplied by `alpha / rank`.",
    "model.lora.dropout": "Only 0 is accepted: dropout makes the trained policy another one than the sampler.",
    "model.lora.target_modules": "Names of the linear layers that get an adapter.",
    "model.options": "`pocket`: `preset` (`base`, `tiny`) or fields of the recipe. Else: passed to transformers.",
    **{f"data.train.{name}": text for name, text in _DATASET.items()},
    "data.eval": "Sets to evaluate on, by a name of yours.",
    "data.eval.NAME": "One set: the keys of `data.train`.",
    "data.prompt.template": "`plain`: prefix + text + suffix + prefill. `chat`: the tokenizer's chat template.",
    "data.prompt.system": "The system turn (chat only).",
    "data.prompt.prefix": "Before the problem's text.",
    "data.prompt.suffix": "After the problem's text.",
    "data.prompt.prefill": "The beginning of the answer; `{text}` in it stands for the problem's text.",
    "data.prompt.max_tokens": "Longer prompts are left out, and counted.",
    "data.decontaminate": "Remove from training every problem that an evaluation set holds too.",
    "data.allow_test_split": "Train on data that calls itself a test or evaluation split.",
    "rollout.backend": "The sampler (see [names](#names)).",
    "rollout.prompts_per_batch": "Prompts drawn at a time.",
    "rollout.group_size": "Completions per prompt.",
    "rollout.max_new_tokens": "Longest completion, in tokens.",
    "rollout.temperature": "Of sampling, and of every log-prob and KL.",
    "rollout.top_p": "Training accepts 1 (off) only: else the sampler is not the policy that is differentiated.",
    "rollout.top_k": "Training accepts 0 (off) only.",
    "rollout.min_p": "Training accepts 0 (off) only.",
    "rollout.stop": "Texts that end a completion, after the token that completes one.",
    "rollout.replica_gib": (
        "With `fsdp`: the largest model that one process may hold whole, to sample from it with `hf`, or to "
        "load what cannot be streamed."
    ),
    "rollout.bucket_mib": "With `fsdp`: weights gathered at a time on their way to a sampler or a file.",
    "rollout.batch_sequences": "Completions sampled at once. Changing it changes what a seed draws.",
    "rollout.options": "Of the backend (see [rollouts](rollouts.md)).",
    "rewards": "Summed by weight.",
    "rewards.N.name": "A registered reward (see [names](#names)).",
    "rewards.N.weight": "Its factor in the sum.",
    "rewards.N.options": "Its options; `timeout_s`: CPU seconds an item may cost in the worker pool.",
    "algorithm.advantage": "From returns to what weights the score of each token.",
    "algorithm.value.gamma": "Discount per token of `gae`.",
    "algorithm.value.lam": "Lambda of `gae`: 1 is the return to go less the value, 0 one temporal difference.",
    "algorithm.value.coefficient": "Of the value loss `(V - lambda return)^2 / 2`.",
    "algorithm.value.lr": "Learning rate of the value head; `null`: `optimizer.lr`. The schedule scales both.",
    "algorithm.value.clip": "Hold values this near to those at the batch's first use, counted; `null`: never.",
    "algorithm.value.trunk": "The value loss trains the policy's body too; else only the head.",
    "algorithm.value.bootstrap_truncated": (
        "A completion cut at `max_new_tokens` goes on with the value after its last token; else it is over there, as "
        "the verifier's reward is for it."
    ),
    "algorithm.value.normalize": "Advantages with mean 0 and deviation 1 over the update's tokens; scales beta too.",
    "algorithm.policy_loss": "The task part of the loss.",
    "algorithm.policy_loss_options": "Of the policy loss, as `clip_low`, `clip_high` of `ppo_clip`.",
    "algorithm.correction": (
        "Weights of the policy loss for stale samples: names to options, as `{tis: {cap: 2}}`; one ratio, any masks "
        "([algorithms.md](algorithms.md)). KL terms have their own `correction`."
    ),
    "algorithm.proximal": (
        "What the policy loss's ratio is against: the sampler, or the policy at the batch's first use (decoupled PPO)."
    ),
    "algorithm.reduction": (
        "The weight of a sequence's token sum: 1/(tokens of the update); 1/(sequences x own tokens); "
        "1/(sequences x `reduction_constant`). The same weights hold for every KL term."
    ),
    "algorithm.reduction_constant": "Only for `sequence_sum`.",
    "algorithm.updates_per_batch": "Parts of a batch, one optimizer update each; divides `prompts_per_batch`.",
    "algorithm.epochs_per_batch": "Times a batch is gone through.",
    "algorithm.mask_truncated": "Completions cut at `max_new_tokens` take no part in the loss.",
    "algorithm.dpo": (
        "DPO on pairs of completions of one prompt with different rewards, in the place of the policy term and of `kl` "
        "([replay.md](replay.md))."
    ),
    "algorithm.dpo.beta": "DPO's beta: how far the policy may leave the reference for a preference.",
    "reference.ema_decay": "Per update, for terms with `reference: ema`.",
    "reference.period": "In updates, for terms with `reference: periodic`.",
    "lag.mode": (
        "`replayed`: train on batches of older weights, in one process, reproducibly. `async`: another process samples "
        "meanwhile ([offpolicy.md](offpolicy.md))."
    ),
    "lag.steps": "`replayed`: how many updates old; a multiple of `updates_per_batch * epochs_per_batch`.",
    "lag.max_steps": "`async`: the most updates old that a batch may be at its first use.",
    "lag.policy": "`async`: at that bound the sampler waits, or goes on; what is too old is dropped and asked again.",
    "lag.in_flight": "`async`: new weights take effect within completions, not only between batches.",
    "lag.silence_limit_s": "`async`: a sampler that gives no sign of life for so long is killed and replaced.",
    "lag.answer_limit_s": "`async`: so is one that lives and finishes no batch or evaluation for so long.",
    "optimizer.lr": "AdamW's learning rate.",
    "optimizer.betas": "AdamW's, two numbers in [0, 1).",
    "optimizer.eps": "AdamW's.",
    "optimizer.weight_decay": "AdamW's.",
    "optimizer.clip_norm": "Clip the gradient to this L2 norm; `null`: never.",
    "optimizer.schedule": "After the warm-up: constant, or to zero at `train.steps`.",
    "optimizer.warmup_steps": "Updates of linear warm-up; at most `train.steps`.",
    "train.steps": "Optimizer updates.",
    "train.microbatch_tokens": (
        "Tokens per backward pass; the gradient does not depend on it. Open: as many as 1 GiB of activations holds "
        "(16 GiB on a GPU)."
    ),
    "train.precision": "`bf16`: mixed precision; the sampler runs under the same.",
    "train.eval_every": "Updates between evaluations; 0: only as `eval.at_start` and `eval.at_end` say.",
    "train.checkpoint_every": "Updates between checkpoints; 0: none, and the run cannot be resumed.",
    "train.keep_checkpoints": "The newest so many stay.",
    "train.samples_every": "Updates between tables of sampled completions; 0: none.",
    "train.strategy": (
        "`single`: one process; `ddp`: whole copies; `fsdp`: shards (FSDP2). The "
        "result does not depend on it, up to rounding ([clusters.md](clusters.md#several-processes))."
    ),
    "train.devices": "Processes on each node (one per GPU); with `single` 1.",
    "train.nodes": "Nodes; `rollout.prompts_per_batch` counts the prompts of all of them.",
    "train.exact_kl_every": "Updates between measurements of exact KL and entropy; 0: at update 0 only.",
    "train.record_rollouts": "Write every batch to `rollouts/` of the run folder ([replay.md](replay.md)).",
    "train.deterministic": "Ask torch for deterministic algorithms.",
    "train.threads": "CPU threads of torch; `null`: its own choice.",
    "eval.samples": "Completions per problem.",
    "eval.temperature": "0 is greedy.",
    "eval.max_new_tokens": "`null`: `rollout.max_new_tokens`.",
    "eval.at_start": "Evaluate before the first update.",
    "eval.at_end": "Evaluate after the last one.",
    "eval.kl": (
        "Measure exact KL, total variation and entropy on the completions as well; two forward passes. A run measures "
        "against its initial reference."
    ),
    "eval.reference": (
        "What `kl-comedy evaluate` measures KL against: a config file, for the model it names (a run's own "
        "`config.yaml`: where the run began), or a model as in `model.source`. `null`: entropy only."
    ),
    "eval.suites": (
        "[Suites](evaluation.md) evaluated beside `data.eval`, by name or YAML file, with their own prompts and "
        "verifiers; `eval.samples` and `eval.temperature` hold for them too. Suites by log-prob draw nothing."
    ),
    "eval.data_root": "The folder of the suites' files; `null`: by hub name.",
    "audit.every": "Updates between [gradient audits](audit.md) in a run; 0: none. No audit key is in the config hash.",
    "audit.terms": "`own` (the terms of `kl`), `panel`, or names of recipes.",
    "audit.samples": "At most so many completions of the update, in whole groups; `null`: half, at least 3 groups.",
    "audit.blocks": "Blocks of whole groups that estimates are made from; an update needs 3 groups.",
    "audit.sketch": "Numbers kept of the gradient of a layer group; 0: all.",
    "tracking.uri": "An MLflow store or server; `none`: files in the run folder only. Not part of the config hash.",
    "tracking.experiment": "The MLflow experiment.",
    "tracking.flush_every": "Steps of metrics between writes to the store.",
    "tracking.tags": "Further tags of the run.",
}

TERM_MEANINGS: dict[str, str] = {
    "estimator": "From the log-ratio `l = logp - ref_logp` to nats. `exact*`: the KL over the whole vocabulary.",
    "level": "Estimate each token's ratio, or the ratio of the whole completion.",
    "placement": "`reward`: a detached cost that weights the score. `loss`: differentiated.",
    "credit": "In reward, the costs that weight the score of token t: all, those at u >= t, or its own.",
    "correction": "Ratio of policy to behaviour policy on the KL part (see [names](#names)).",
    "gradient": "In loss: the estimate's own, or its value with the gradient of k2 (straight-through).",
    "anchor": "The log-probs the estimate is evaluated at: now, or as recorded at rollout.",
    "reference": "What KL is measured against: the start, a moving average, a periodic copy, the sampler.",
    "beta": (
        "A number; a schedule `{start, end, steps, shape: linear or cosine}` in updates; or `{target: nats}`: holds "
        "the KL of a completion near it, exact where measured, else k1 "
        "(`init` 0.1, `gain` 0.1, `minimum` 1e-06, `maximum` 1000)."
    ),
    "baseline": (
        "In reward: the cost enters before or after the advantage's baseline and normalization; `own`: after it, less "
        "the leave-one-out mean of its own returns over the group, weighted so that it stays unbiased off-policy."
    ),
    "cap": "A number above 0: the bound of the correction's ratio. Biased, so counted and logged.",
    "cap_mode": (
        "`truncate`: min(ratio, cap). `mask`: ratios beyond it become 0. `each`: every token's ratio is truncated "
        "before the product."
    ),
    "window": "For prefix ratios: the product of the last so many ratios instead of all.",
    "input_clamp": "Bound of the log-ratio (nats, both sides) before the estimator: no gradient beyond. Logged.",
    "output_clamp": "Bound of the estimate (nats, both sides): no gradient beyond. Counted and logged.",
    "options": "Keyword arguments of the estimator, as `{lam: 0.5}` of `k_lambda`.",
}

ROOMS: dict[str, str] = {
    "errors": "the one error of a user's mistake, and of a run that failed",
    "registry": "one typed table per kind of part; loads plugins",
    "records": "one frozen record per stage of the data flow",
    "config": "the schema of a run; YAML and overrides to a checked dataclass",
    "kl": "KL terms, estimators, corrections, the surrogate, claims, recipes, the exact oracle",
    "objective": "advantages, policy losses, sequence weights",
    "models": "loading, chunked log-probs and exact KL, reference policies, weight hashes",
    "rewards": "text and answer to a verdict; workers that survive hostile answers",
    "data": "problems, prompts, decontamination, the order of prompts",
    "rollouts": "the sampler's protocol and its backends",
    "statistics": "intervals, paired differences, aggregates over tasks, reward at equal KL, collapse",
    "tracking": "the spool, its MLflow mirror, queries, tables, plots, reports, verification",
    "peers": "other systems' KL flags read as terms, in words, with the flags that would do better",
    "laboratory": "Studies with the oracle: the open problem, curves over length and distance, figures, tables.",
    "evaluation": "a policy on held-out problems, with intervals",
    "training": "config to objects, the stream, the Lightning module, callbacks, the run folder",
    "slurm": "batch scripts and jobs",
    "planning": "memory, time and device hours of a run before it begins; what would make it fit",
    "cli": "the command line",
}
