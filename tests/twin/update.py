"""The slow twin of training: a run's updates as loops over completions and tokens in float64.

    order of prompts, versions -> completions of the engine, checked -> rewards -> costs, returns, advantages
    -> policy loss, KL terms, value loss -> gradient -> clip -> AdamW -> references, coefficients -> next update

Only what was drawn is taken from the engine: the tokens of a completion and why it ended, of which the twin draws its
own to compare. Everything else is computed from the start weights and the config.
"""

import hashlib
import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.twin import algorithm, kl_terms
from tests.twin.kl_terms import ZERO, number
from tests.twin.model import ADAPTED, Sizes, Weights, hidden_states, log_probs

from kl_comedy.models.pocket import EOS, PAD, VOCABULARY


def sizes_of(folder):
    settings = json.loads((Path(folder) / "config.json").read_text())
    parameters = settings.get("rope_parameters") or settings
    return Sizes(
        layers=settings["num_hidden_layers"],
        heads=settings["num_attention_heads"],
        key_heads=settings["num_key_value_heads"],
        epsilon=settings["rms_norm_eps"],
        rope_theta=parameters["rope_theta"],
        pad=settings["pad_token_id"],
    )


# --- what is drawn ----------------------------------------------------------------------------------------------------


def prompt_order(items, batch, seed, number):
    """The prompts of batch ``number``: shuffled epochs end to end, and no prompt twice in a batch between two."""
    laid_out = []
    epoch = 0
    while len(laid_out) < (number + 1) * batch:
        order = list(range(items))
        random.Random(f"order:{seed}:{epoch}").shuffle(order)
        begun = laid_out[len(laid_out) - len(laid_out) % batch :]
        missing = batch - len(begun)
        if begun and items >= batch:
            # What the batch has already moves behind: each changes places with the next that it does not have.
            for place in range(missing):
                if order[place] in begun:
                    other = next(p for p in range(missing, items) if order[p] not in begun)
                    order[place], order[other] = order[other], order[place]
        laid_out += order
        epoch += 1
    return laid_out[number * batch : (number + 1) * batch]


def named_seed(seed, purpose, index):
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def drawn_numbers(config, number):
    """The numbers in [0, 1) of the completions of batch ``number``, by row and token."""
    rollout = config.rollout
    generator = torch.Generator().manual_seed(named_seed(config.seed, "rollout", number))
    rows = rollout.prompts_per_batch * rollout.group_size
    return torch.rand(rows, rollout.max_new_tokens, dtype=torch.float64, generator=generator).tolist()


def drawn_token(logs, number):
    """The first token at which the summed probability exceeds the number."""
    total = float(logs.exp().sum())
    reached = 0.0
    for token, log in enumerate(logs.tolist()):
        reached += math.exp(log)
        if reached > number * total:
            return token
    return len(logs) - 1


def text_of(ids):
    """The characters of a completion, without special tokens."""
    return "".join(VOCABULARY[token] for token in ids if VOCABULARY[token] not in (PAD, EOS))


def end_of(config, ids):
    """Why a completion ends where it does: ``early`` where it went on behind its end, or ended without a reason."""
    for length in range(1, len(ids) + 1):
        reason = None
        if VOCABULARY[ids[length - 1]] == EOS:
            reason = "eos"
        elif any(stop in text_of(ids[:length]) for stop in config.rollout.stop):
            reason = "stop"
        elif length == config.rollout.max_new_tokens:
            reason = "length"
        if reason is not None:
            return reason if length == len(ids) else "early"
    return "early"


# --- rewards ----------------------------------------------------------------------------------------------------------


def length_reward(text, free=0, full=4096):
    return algorithm.between((len(text) - free) / (full - free), 0.0, 1.0)


def letters_reward(text):
    """The reward that the comparison registers: the mean of the codes of the letters, modulo 3."""
    if not text:
        return 0.0
    return algorithm.mean([ord(letter) % 3 for letter in text]) / 2


REWARDS = {"length": length_reward, "zero": lambda text: 0.0, "twin_letters": letters_reward}


def reward_of(config, text):
    total = 0.0
    for part in config.rewards:
        total += part.weight * REWARDS[part.name](text, **part.options)
    return total


# --- coefficients and rates -------------------------------------------------------------------------------------------


def rate_factor(settings, step, steps):
    """Linear warm-up, then constant, linear or cosine to 0 at the last update's end."""
    warmup = settings.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    if settings.schedule == "linear":
        return 1 - done
    return (1 + math.cos(math.pi * done)) / 2


def beta_kind(beta):
    if hasattr(beta, "target"):
        return "target"
    return "schedule" if hasattr(beta, "start") else "number"


def first_beta(beta):
    kind = beta_kind(beta)
    if kind == "target":
        return beta.init
    return beta.start if kind == "schedule" else beta


def next_beta(beta, value, step, measured):
    """The coefficient of update ``step``, after ``measured`` nats per completion."""
    kind = beta_kind(beta)
    if kind == "schedule":
        done = min(step / beta.steps, 1.0)
        if beta.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return beta.start + (beta.end - beta.start) * done
    if kind == "target":
        error = algorithm.between(measured / beta.target - 1, -0.2, 0.2)
        return algorithm.between(value * (1 + beta.gain * error), beta.minimum, beta.maximum)
    return value


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass
class Adam:
    """AdamW of one tensor (decoupled weight decay)."""

    first: torch.Tensor
    second: torch.Tensor
    steps: int = 0

    def after(self, weight, gradient, rate, options):
        """The weight after a step."""
        beta1, beta2 = options.betas
        self.steps += 1
        self.first = beta1 * self.first + (1 - beta1) * gradient
        self.second = beta2 * self.second + (1 - beta2) * gradient * gradient
        mean = self.first / (1 - beta1**self.steps)
        square = self.second / (1 - beta2**self.steps)
        decayed = weight - rate * options.weight_decay * weight
        return decayed - rate * mean / (torch.sqrt(square) + options.eps)


@dataclass
class Twin:
    """The state of a run between two updates."""

    config: object
    terms: list
    sizes: Sizes
    frozen: dict
    """Weights that are not trained: under an adapter those of the base model."""
    trained: dict
    value: dict
    """The value head's; empty without a critic."""
    past: list
    """``trained`` and ``value`` before each update so far."""
    betas: list
    moving: dict
    """The trained weights of references that move, by the reference's name."""
    teacher: Weights | None = None
    adam: dict = field(default_factory=dict)

    @property
    def updates_of_a_batch(self):
        settings = self.config.algorithm
        return settings.updates_per_batch * settings.epochs_per_batch

    def policy(self, trained):
        scaling = 1.0
        if self.config.model.lora is not None:
            scaling = self.config.model.lora.alpha / self.config.model.lora.rank
        return Weights.of({**self.frozen, **trained}, scaling)

    def reference(self, name):
        """The policy that KL to ``name`` is measured against."""
        if name == "teacher":
            return self.teacher
        if name in self.moving:
            return self.policy(self.moving[name])
        # The start: with an adapter the model without it.
        if self.config.model.lora is not None:
            return self.policy({})
        return self.policy(self.past[0][0])

    def distributions(self, weights, row):
        """Log-probs over the vocabulary before each token of a completion ``[T][V]``, and hidden states ``[T + 1, H]``.

        Of the policy's own tokens; an environment's are read and no more. Each row of the completion is read by itself,
        behind its own context. The last hidden state is that after the last token.
        """
        before_own = []
        for context, ids, trained in row["rows"]:
            hidden = hidden_states(weights, [*context, *ids], self.sizes)[len(context) - 1 :]
            before_own += [hidden[position] for position, is_own in enumerate(trained) if is_own]
        hidden = torch.stack([*before_own, hidden[-1]])
        rounded = self.config.model.head_dtype == "bfloat16"
        logs = log_probs(weights, hidden[:-1], self.config.rollout.temperature, rounded=rounded)
        return list(logs.unbind()), hidden


def stored_weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def start_twin(config, terms, engine_start):
    """The twin before its first update. Of ``engine_start``, the engine's weights, it takes an adapter's factors A."""
    trained = stored_weights(config.model.source)
    frozen = {}
    if config.model.lora is not None:
        frozen = {ADAPTED + name: tensor for name, tensor in trained.items()}
        trained = {}
        for name, tensor in engine_start.items():
            if ".lora_A." in name:
                trained[name] = tensor
            elif ".lora_B." in name:
                trained[name] = torch.zeros_like(tensor)
    value = {}
    if config.algorithm.advantage == "gae":
        width = len(stored_weights(config.model.source)["model.norm.weight"])
        value["value.linear.weight"] = torch.zeros(1, width, dtype=torch.float64)
        value["value.linear.bias"] = torch.zeros(1, dtype=torch.float64)
    teacher = None
    if config.reference.teacher is not None:
        teacher = Weights.of(stored_weights(config.reference.teacher.source), 1.0)
    moving = {}
    for name in ("ema", "periodic", "old"):
        if any(term.reference == name for term in terms):
            moving[name] = dict(trained)
    adam = {}
    for name, tensor in {**trained, **value}.items():
        adam[name] = Adam(torch.zeros_like(tensor), torch.zeros_like(tensor))
    return Twin(
        config=config,
        terms=terms,
        sizes=sizes_of(config.model.source),
        frozen=frozen,
        trained=trained,
        value=value,
        past=[(trained, value)],
        betas=[first_beta(term.beta) for term in terms],
        moving=moving,
        teacher=teacher,
        adam=adam,
    )


@dataclass
class Completion:
    """A completion in an update: the engine's row, what terms read of it, hidden states with gradient."""

    row: dict
    terms: kl_terms.Row
    hidden: torch.Tensor
    old_logp: list
    """Log-probs of the policy before the batch's first update."""
    old_values: list
    """Values before each token, and after the last, at the same time; empty without a critic."""

    @property
    def length(self):
        return len(self.row["ids"])

    @property
    def truncated(self):
        return self.row["stop_reason"] == "length"


def one_update(twin, step, rows, prompts):
    """The quantities of update ``step`` by their names, in the order in which they are computed.

    ``rows``: the completions as the engine recorded them. ``prompts``: token ids of all training prompts.
    """
    quantities = drawing(twin, step, rows, prompts)
    leaves = {name: tensor.clone().requires_grad_(True) for name, tensor in {**twin.trained, **twin.value}.items()}
    policy = twin.policy({name: leaves[name] for name in twin.trained})
    completions = [completion_of(twin, step, policy, row) for row in rows]
    texts = [text_of(row["ids"]) for row in rows]
    rewards = [reward_of(twin.config, text) for text in texts]
    quantities["ends"] = [end_of(twin.config, row["ids"]) for row in rows]
    quantities["texts"] = texts
    quantities["rewards"] = rewards
    quantities["log-probs of the policy"] = [[number(logp) for logp in one.terms.logp] for one in completions]
    losses = losses_of(twin, completions, rewards, leaves, quantities)
    for name, loss in losses.items():
        quantities[f"loss of {name}"] = number(loss)
    names = list(leaves)
    total = sum(losses.values(), ZERO)
    gradient = {name: torch.zeros_like(leaves[name]) for name in names}
    # Where every token is clipped, the loss is a constant.
    if total.requires_grad:
        found = torch.autograd.grad(total, [leaves[name] for name in names], allow_unused=True)
        gradient |= {name: tensor for name, tensor in zip(names, found, strict=True) if tensor is not None}
    for name in names:
        quantities[f"gradient of {name}"] = gradient[name]
    with torch.no_grad():
        optimize(twin, step, completions, gradient, quantities)
        follow(twin, step, completions, quantities)
    return quantities


# --- sampling ---------------------------------------------------------------------------------------------------------


def drawing(twin, step, rows, prompts):
    """Which prompts, by which weights, which tokens: as the twin draws them."""
    config = twin.config
    iteration, update_of_batch = divmod(step, twin.updates_of_a_batch)
    groups = config.rollout.prompts_per_batch // config.algorithm.updates_per_batch
    first_group = update_of_batch % config.algorithm.updates_per_batch * groups
    order = prompt_order(len(prompts), config.rollout.prompts_per_batch, config.seed, iteration)
    # Exactly as old as the lag says, as soon as weights of that age exist.
    drawn_at = max(0, iteration * twin.updates_of_a_batch - config.lag.steps)
    numbers = drawn_numbers(config, iteration)
    group_size = config.rollout.group_size
    quantities = {"prompts": [], "groups": [], "versions": [], "tokens": [], "log-probs of the sampler": []}
    for place, row in enumerate(rows):
        group = first_group + place // group_size
        in_batch = first_group * group_size + place
        versions = []
        tokens = []
        logps = []
        for t, token in enumerate(row["ids"]):
            version = drawn_at
            if config.rollout.backend == "twin_mixed":
                version = max(0, drawn_at - (t + in_batch) % 3)
            trained, _ = twin.past[version]
            logs, _ = twin.distributions(twin.policy(trained), row)
            versions.append(version)
            tokens.append(drawn_token(logs[t], numbers[in_batch][t]))
            logps.append(number(logs[t][token]))
        quantities["prompts"].append(list(prompts[order[group]]))
        quantities["groups"].append(group)
        quantities["versions"].append(versions)
        quantities["tokens"].append(tokens)
        quantities["log-probs of the sampler"].append(logps)
    return quantities


def completion_of(twin, step, policy, row):
    logs, hidden = twin.distributions(policy, row)
    names = {"initial"} | {term.reference for term in twin.terms} - {"sampler"}
    first_of_batch = step - step % twin.updates_of_a_batch
    old_trained, old_value = twin.past[first_of_batch]
    with torch.no_grad():
        references = {name: twin.distributions(twin.reference(name), row)[0] for name in names}
        references["sampler"] = sampler_of(twin, row)
        old_logs, old_hidden = twin.distributions(twin.policy(old_trained), row)
        old_values = []
        if old_value:
            old_values = [number(value) for value in values_at(old_value, old_hidden)]
    terms = kl_terms.Row(
        ids=row["ids"],
        logp=[logs[t][token] for t, token in enumerate(row["ids"])],
        mu=list(row["logps"]),
        policy=logs,
        references=references,
        sampler=references["sampler"],
        columns=row["columns"],
    )
    old_logp = [number(old_logs[t][token]) for t, token in enumerate(row["ids"])]
    return Completion(row, terms, hidden, old_logp, old_values)


def sampler_of(twin, row):
    """The log-probs over the vocabulary of the weights that drew each token; none where no term reads them."""
    if not any(term.score_centring or term.reads_past_policy for term in twin.terms):
        return []
    with torch.no_grad():
        return [
            twin.distributions(twin.policy(twin.past[version][0]), row)[0][t]
            for t, version in enumerate(row["versions"])
        ]


def values_at(head, hidden):
    return hidden @ head["value.linear.weight"][0] + head["value.linear.bias"][0]


# --- the loss ---------------------------------------------------------------------------------------------------------


def losses_of(twin, completions, rewards, leaves, quantities):
    """The parts of the loss by name; advantages and shares of completions are put into ``quantities``."""
    settings = twin.config.algorithm
    lengths = [one.length for one in completions]
    groups = [one.row["group"] for one in completions]
    kept = [not (settings.mask_truncated and one.truncated) for one in completions]
    if settings.dpo is not None:
        log_ratios = []
        for one in completions:
            reference = one.terms.references["initial"]
            log_ratios.append(sum(number(one.terms.logp[t] - reference[t][y]) for t, y in enumerate(one.row["ids"])))
        coefficients = algorithm.dpo_coefficients(log_ratios, rewards, groups, kept, settings.dpo.beta)
        shares = [1.0] * len(completions)
        advantages = [[c] * length for c, length in zip(coefficients, lengths, strict=True)]
    else:
        shares = algorithm.sequence_weights(settings.reduction, lengths, kept, settings.reduction_constant)
        advantages = advantages_of(twin, completions, rewards, groups, quantities)
    quantities["advantages"] = advantages
    quantities["shares of the completions"] = shares
    losses = {
        "policy": summed(shares, [policy_loss(twin, one, a) for one, a in zip(completions, advantages, strict=True)])
    }
    for position, term in enumerate(twin.terms):
        beta = twin.betas[position]
        losses[f"kl_{position}"] = ZERO
        if beta != 0:
            per_token = kl_terms.surrogates(term, [one.terms for one in completions], groups)
            losses[f"kl_{position}"] = beta * summed(shares, per_token)
    if twin.value:
        per_token = value_losses(twin, completions, advantages, leaves, quantities)
        losses["value"] = settings.value.coefficient * summed(shares, per_token)
    return losses


def summed(shares, per_token):
    """The sum over tokens, each completion's times its share."""
    total = ZERO
    for share, tokens in zip(shares, per_token, strict=True):
        for token in tokens:
            total = total + share * token
    return total


def returns_of(twin, completions, rewards):
    """The weighted reward less the costs that enter before the baseline, up to the longest completion."""
    width = max(one.row["width"] for one in completions)
    returns = [[twin.config.algorithm.reward_weight * reward] * width for reward in rewards]
    for term, beta in zip(twin.terms, twin.betas, strict=True):
        if term.baseline != "before" or beta == 0:
            continue
        for b, one in enumerate(completions):
            costs = kl_terms.costs_of(term, one.terms)
            for t in range(width):
                returns[b][t] -= beta * kl_terms.cost_at(costs, t)
    return returns


def advantages_of(twin, completions, rewards, groups, quantities):
    settings = twin.config.algorithm
    returns = returns_of(twin, completions, rewards)
    columns = [one.row["columns"] for one in completions]
    if not twin.value:
        advantages = algorithm.ADVANTAGES[settings.advantage](returns, columns, groups)
        return [[row[column] for column in own] for row, own in zip(advantages, columns, strict=True)]
    options = settings.value
    last_values = []
    for one in completions:
        bootstraps = options.bootstrap_truncated and one.truncated
        last_values.append(one.old_values[-1] if bootstraps else 0.0)
    values = [one.old_values for one in completions]
    turns = None
    if options.discount == "turn":
        turns = [one.row["turns"] for one in completions]
    advantages = algorithm.gae(returns, columns, values, last_values, turns, gamma=options.gamma, lam=options.lam)
    # The critic learns the lambda return, which whitening has no part in.
    targets = []
    for row, one in zip(advantages, completions, strict=True):
        targets.append([a + v for a, v in zip(row, one.old_values[:-1], strict=True)])
    quantities["targets of the critic"] = targets
    if options.normalize:
        advantages = algorithm.whiten(advantages, [range(len(row)) for row in advantages])
    return advantages


def policy_loss(twin, completion, advantage):
    """The policy loss of each token, times the weights of the corrections."""
    settings = twin.config.algorithm
    logp = completion.terms.logp
    mu = completion.terms.mu
    if settings.dpo is not None:
        return [-a * log for a, log in zip(advantage, logp, strict=True)]
    old = mu
    anchor = [number(log) for log in logp]
    if settings.proximal == "recomputed":
        old = completion.old_logp
        anchor = completion.old_logp
    losses = algorithm.POLICY_LOSSES[settings.policy_loss](logp, old, advantage, **settings.policy_loss_options)
    for name, options in settings.correction.items():
        weights = algorithm.POLICY_CORRECTIONS[name](anchor, mu, advantage, **(options or {}))
        losses = [weight * loss for weight, loss in zip(weights, losses, strict=True)]
    return losses


def value_losses(twin, completions, advantages, leaves, quantities):
    """``(V - target)^2 / 2``, or the larger of this and the same of V clamped to near its old value."""
    options = twin.config.algorithm.value
    losses = []
    for one, targets in zip(completions, quantities["targets of the critic"], strict=True):
        hidden = one.hidden if options.trunk else one.hidden.detach()
        row = []
        for t, target in enumerate(targets):
            value = values_at(leaves, hidden[t])
            loss = (value - target) ** 2 / 2
            if options.clip is not None:
                old = one.old_values[t]
                limited = algorithm.between(number(value), old - options.clip, old + options.clip)
                limited_loss = (limited - target) ** 2 / 2
                is_clipped = limited != number(value)
                if is_clipped and limited_loss > number(loss):
                    loss = ZERO + limited_loss
            row.append(loss)
        losses.append(row)
    return losses


# --- the step ---------------------------------------------------------------------------------------------------------


def effective_share(completions):
    """``(sum w)^2 / (n sum w^2)`` of the ratios w of whole completions."""
    ratios = []
    for one in completions:
        ratios.append(math.exp(sum(number(log) - mu for log, mu in zip(one.terms.logp, one.terms.mu, strict=True))))
    return sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))


def clipped(gradient, bound):
    """The norm of some tensors together, and the factor that brings it to the bound."""
    norm = math.sqrt(sum(number((tensor**2).sum()) for tensor in gradient.values()))
    if bound is None:
        return norm, 1.0
    return norm, min(1.0, bound / (norm + 1e-6))


def optimize(twin, step, completions, gradient, quantities):
    """Clip, and a step of AdamW, of policy and value head."""
    settings = twin.config.optimizer
    factor = rate_factor(settings, step, twin.config.train.steps)
    scaling = {"none": 1.0, "linear": 1.0, "sqrt": 0.5}[settings.ess_scaling]
    policy_rate = settings.lr * factor
    if settings.ess_scaling != "none":
        policy_rate *= effective_share(completions) ** scaling
    quantities["learning rate"] = policy_rate
    value_rate = (twin.config.algorithm.value.lr or settings.lr) * factor
    for weights, rate, label in ((twin.trained, policy_rate, ""), (twin.value, value_rate, " of the value head")):
        if not weights:
            continue
        norm, scale = clipped({name: gradient[name] for name in weights}, settings.clip_norm)
        quantities[f"gradient norm{label}"] = norm
        after = {}
        for name, weight in weights.items():
            after[name] = twin.adam[name].after(weight, gradient[name] * scale, rate, settings)
            quantities[f"update of {name}"] = after[name] - weight
        if weights is twin.trained:
            twin.trained = after
        else:
            twin.value = after


def measured_kl(twin, step, completions, name, per):
    """KL to the reference ``name`` in nats per ``token`` or ``completion``: exact where measured, else k1.

    To the sampler it is ``rho l - rho + 1`` of its tokens where it is not exact.
    """
    settings = twin.config.train
    tokens = sum(one.length for one in completions)
    is_exact = any(
        term.reference == name and (term.estimator == "exact" or term.baseline == "exact") for term in twin.terms
    )
    if name == "initial":
        every = settings.exact_kl_every
        is_exact = is_exact or step in (0, settings.steps - 1) or (every > 0 and step % every == 0)
    total = 0.0
    for one in completions:
        for t, token in enumerate(one.row["ids"]):
            logp = number(one.terms.logp[t])
            if name == "sampler" and not is_exact:
                delta = logp - one.terms.mu[t]
                total += math.exp(delta) * delta - math.exp(delta) + 1
            elif is_exact:
                total += number(kl_terms.kl(one.terms.policy[t], one.terms.references[name][t]))
            else:
                total += logp - number(one.terms.references[name][t][token])
    if per == "token":
        return total / tokens
    return total / len(completions)


def put_into_its_slot(twin, version, trained, quantities):
    """The past policy of a version, in the place of the one that no sample names any more."""
    slots = twin.config.lag.steps + twin.updates_of_a_batch
    of_version = [version % slots]
    if version == 0:
        of_version = range(slots)
    for slot in of_version:
        for name, weight in trained.items():
            quantities[f"reference sampler: {slot}.{name}"] = weight.clone()


def follow(twin, step, completions, quantities):
    """What depends on the update: references that move, coefficients, the weights of later samples."""
    options = twin.config.reference
    if "ema" in twin.moving:
        decay = options.ema_decay
        for name, weight in twin.trained.items():
            twin.moving["ema"][name] = decay * twin.moving["ema"][name] + (1 - decay) * weight
    if "periodic" in twin.moving:
        is_due = options.period is not None and (step + 1) % options.period == 0
        is_far = False
        if options.max_kl is not None:
            is_far = measured_kl(twin, step, completions, "periodic", "token") > options.max_kl
        if is_due or is_far:
            twin.moving["periodic"] = dict(twin.trained)
    if "old" in twin.moving and (step + 1) % twin.updates_of_a_batch == 0:
        twin.moving["old"] = dict(twin.trained)
    if any(term.reads_past_policy for term in twin.terms):
        for version, (trained, _) in enumerate([*twin.past, (twin.trained, twin.value)]):
            put_into_its_slot(twin, version, trained, quantities)
    for reference, weights in twin.moving.items():
        for name, weight in weights.items():
            quantities[f"reference {reference}: {name}"] = weight.clone()
    for position, term in enumerate(twin.terms):
        measured = 0.0
        if beta_kind(term.beta) == "target":
            measured = measured_kl(twin, step, completions, term.reference, "completion")
        twin.betas[position] = next_beta(term.beta, twin.betas[position], step + 1, measured)
    quantities["coefficients"] = list(twin.betas)
    twin.past.append((twin.trained, twin.value))
