"""Seeded draws of configs, and what each of them covers.

A draw knows the keys and their values, not which of them may stand together: what the package refuses is counted, and
drawn again.
"""

import random
import tempfile
from pathlib import Path

import yaml
from tests.twin.base import base_config, policy_folder
from tests.twin.engine import PARTS

from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.kl import term as kl_term
from kl_comedy.kl.estimators import TOP_K_FORMS
from kl_comedy.registry import ADVANTAGES, CORRECTIONS, ESTIMATORS, POLICY_CORRECTIONS, POLICY_LOSSES, load_plugin_file
from kl_comedy.training.build import build_run

ESTIMATOR_OPTIONS = {
    "k_lambda": {"lam": (0.3, 0.9, -0.5)},
    "exact_jsd": {"share": (0.2, 0.5, 0.9)},
    "top_k": {"k": (1, 3, 5, 13), "tokens": ("policy", "reference"), "form": TOP_K_FORMS},
}
REDUCTIONS = ("token_mean", "sequence_mean_token_mean", "sequence_sum")
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
POLICY_LOSS_OPTIONS = {
    "ppo_clip": {"clip_low": (0.01, 0.05, 0.2), "clip_high": (0.01, 0.05, 0.3)},
    "gspo": {"clip_low": (3e-4, 0.02), "clip_high": (4e-4, 0.05)},
    "cispo": {"clip_low": (0.02, 0.2), "clip_high": (0.03, 0.5)},
    "aipo": {"cap": (1.01, 1.2)},
}
CORRECTION_RANGES = {
    "tis": {"cap": (1.01, 1.5)},
    "icepop": {"low": (0.6, 0.97), "high": (1.03, 2.0)},
    "sequence_tis": {"cap": (1.02, 2.0)},
    "sequence_mis": {"low": (0.3, 0.9), "high": (1.1, 3.0)},
    "geometric_tis": {"cap": (1.01, 1.2)},
    "geometric_mask": {"low": (0.8, 0.98), "high": (1.02, 1.2)},
    "opsm": {"threshold": (0.005, 0.2)},
    "dppo_tv": {"threshold": (0.003, 0.1)},
    "dppo_kl": {"threshold": (3e-4, 0.1)},
    "cppo": {"threshold": (0.01, 0.1), "budget": (0.005, 0.1), "floor": (0.1, 0.8)},
    "trm": {"threshold": (0.001, 0.2)},
    "prefix_budget": {"budget": (1e-3, 0.2)},
}
"""Values near what a few updates reach, so that every bound acts on some tokens and not on others."""


def built_in(table):
    """The names that come with the package: plugins that other tests loaded stay in the process, and are of no run."""
    return [name for name in table.names() if table.get(name).fn.__module__.startswith("kl_comedy.")]


def chance(rng, share):
    return rng.random() < share


def some_options(rng, values):
    """Each option with one of its values, or at its default."""
    return {name: rng.choice(choices) for name, choices in values.items() if chance(rng, 0.7)}


def near(rng, low, high):
    """A number between the two, as often in each power of ten; three digits."""
    return float(f"{low * (high / low) ** rng.random():.3g}")


def some_numbers(rng, ranges):
    """Most options with a number in their range, the others at their default."""
    return {name: near(rng, low, high) for name, (low, high) in ranges.items() if chance(rng, 0.8)}


def drawn_beta(rng):
    kind = rng.choice(("number", "number", "number", "schedule", "target", "zero"))
    if kind == "zero":
        return 0.0
    if kind == "schedule":
        start = near(rng, 0.05, 0.5)
        end = rng.choice((0.0, near(rng, 0.05, 0.5)))
        return {"start": start, "end": end, "steps": rng.choice((2, 4)), "shape": rng.choice(("linear", "cosine"))}
    if kind == "target":
        return {"target": near(rng, 0.01, 1.0), "init": 0.2, "gain": rng.choice((0.1, 0.5)), "maximum": 0.21}
    return near(rng, 0.03, 0.5)


def drawn_term(rng, references):
    """A term of any fields; most of them have a meaning."""
    estimator = rng.choice(built_in(ESTIMATORS))
    term = {"estimator": estimator, "beta": drawn_beta(rng), "placement": rng.choice(kl_term.PLACEMENTS)}
    is_sampled = ESTIMATORS.get(estimator).facts.get("needs", "log_ratio") == "log_ratio"
    if is_sampled and chance(rng, 0.2):
        term["level"] = "sequence"
    if chance(rng, 0.4):
        term["reference"] = rng.choice(references)
    term["correction"] = rng.choice(built_in(CORRECTIONS))
    if term["placement"] == "reward":
        term |= drawn_credit(rng, is_sampled, has_tokens="level" not in term)
    elif is_sampled and chance(rng, 0.2):
        term["gradient"] = "k2"
    term |= drawn_bounds(rng, term["correction"], is_sampled)
    if "level" not in term and chance(rng, 0.25):
        term["weight"] = rng.choice(kl_term.WEIGHTS[1:])
        term["weight_power"] = rng.choice((0.5, 1.0, 2.0))
    if estimator in ESTIMATOR_OPTIONS:
        term["options"] = {name: rng.choice(values) for name, values in ESTIMATOR_OPTIONS[estimator].items()}
    return term


def drawn_credit(rng, is_sampled, has_tokens):
    """The fields of a term in the reward alone."""
    fields = {"baseline": rng.choice(kl_term.BASELINES)}
    if has_tokens:
        fields["credit"] = rng.choice(kl_term.CREDITS)
    if fields["baseline"] == "batch":
        fields["credit"] = "own"
    if fields.get("credit") == "to_go" and chance(rng, 0.3):
        fields["discount"] = rng.choice((0.5, 0.9))
    if is_sampled and chance(rng, 0.2):
        fields["anchor"] = "behaviour"
    return fields


def drawn_bounds(rng, correction, is_sampled):
    """Caps, windows and clamps."""
    fields = {}
    if correction != "none" and chance(rng, 0.5):
        fields["cap"] = rng.choice((1.02, 1.1, 1.4))
        fields["cap_mode"] = rng.choice(kl_term.CAP_MODES)
    if correction.startswith("prefix") and chance(rng, 0.4):
        fields["window"] = rng.choice((1, 2, 3))
    if is_sampled and chance(rng, 0.2):
        fields["input_clamp"] = rng.choice((0.01, 0.05, 0.2))
    if chance(rng, 0.2):
        fields["output_clamp"] = rng.choice((1e-4, 1e-3, 0.05))
    return fields


def has_meaning(term):
    # On fresh samples its log-ratio is 0 but for rounding, whose sign would be the whole gradient.
    if term["estimator"] == "abs" and term.get("reference") == "sampler":
        return False
    try:
        drawn = kl_term.KLTerm(**term)
    except UserError:
        return False
    # Of the sampler's distributions; past_policies() gives terms that read them.
    return drawn.reference != "sampler" or drawn.reads <= {"log_ratio", "sampler_top"}


def drawn_algorithm(rng):
    algorithm = {"advantage": rng.choice(built_in(ADVANTAGES)), "reduction": rng.choice(REDUCTIONS)}
    if algorithm["reduction"] == "sequence_sum":
        algorithm["reduction_constant"] = rng.choice((1.0, 5.0))
    if algorithm["advantage"] == "gae":
        values = {
            "gamma": (0.9, 1.0),
            "lam": (0.5, 1.0),
            "coefficient": (0.3, 2.0),
            "lr": (0.02, 0.1),
            "clip": (0.01, 0.1),
            "trunk": (True, False),
            "bootstrap_truncated": (True,),
            "normalize": (True, False),
        }
        algorithm["value"] = some_options(rng, values)
    algorithm["policy_loss"] = rng.choice(built_in(POLICY_LOSSES))
    algorithm["policy_loss_options"] = some_options(rng, POLICY_LOSS_OPTIONS.get(algorithm["policy_loss"], {}))
    if chance(rng, 0.4):
        algorithm["proximal"] = "recomputed"
    ratios = []
    masks = []
    for name in built_in(POLICY_CORRECTIONS):
        is_ratio = POLICY_CORRECTIONS.get(name).facts.get("role", "ratio") == "ratio"
        (ratios if is_ratio else masks).append(name)
    chosen = rng.sample(masks, rng.choice((0, 1, 2)))
    if algorithm["policy_loss"] == "reinforce" or algorithm.get("proximal") == "recomputed":
        chosen += rng.sample(ratios, rng.choice((0, 1)))
    algorithm["correction"] = {name: some_numbers(rng, CORRECTION_RANGES.get(name, {})) for name in chosen}
    algorithm["updates_per_batch"] = rng.choice((1, 1, 2))
    algorithm["epochs_per_batch"] = rng.choice((1, 1, 1, 2))
    algorithm["mask_truncated"] = chance(rng, 0.2)
    algorithm["reward_weight"] = rng.choice((1.0, 1.0, 0.5, 2.0))
    return algorithm


def drawn_optimizer(rng):
    settings = {"lr": near(rng, 0.005, 0.2), "schedule": rng.choice(("constant", "linear", "cosine"))}
    settings["warmup_steps"] = rng.choice((0, 0, 2))
    settings["clip_norm"] = rng.choice((1.0, 0.05, 0.01, None))
    settings["ess_scaling"] = rng.choice(("none", "none", "sqrt", "linear"))
    settings |= some_options(
        rng, {"betas": ([0.5, 0.9], [0.9, 0.999]), "eps": (1e-8, 1e-3), "weight_decay": (0.1, 0.5)}
    )
    return settings


def drawn_model(rng, with_adapter):
    model = {"source": str(policy_folder()), "share_prompt": chance(rng, 0.7)}
    model["attention"] = rng.choice(("sdpa", "eager"))
    model["gradient_checkpointing"] = chance(rng, 0.2)
    if chance(rng, 0.4):
        model["head_chunk_elements"] = rng.choice((1, 48, 100))
    if chance(rng, 0.1):
        model["head_dtype"] = "bfloat16"
    if with_adapter:
        layers = rng.sample(LAYERS, rng.choice((1, 3, 7)))
        model["lora"] = {"rank": rng.choice((1, 2, 3)), "alpha": rng.choice((1.0, 5.0)), "target_modules": layers}
    return model


def drawn_rollout(rng, parts):
    return {
        "prompts_per_batch": parts * rng.choice((1, 2, 2)),
        "group_size": rng.choice((2, 3, 4)),
        "max_new_tokens": rng.choice((3, 5, 6)),
        "temperature": rng.choice((1.0, 1.0, 0.3, 0.7, 1.5)),
        "stop": rng.choice(([], [], ["+"], ["1", "23"])),
        "batch_sequences": rng.choice((2, 256)),
    }


def drawn_rewards(rng):
    rewards = [{"name": "twin_letters", "weight": rng.choice((1.0, 0.5))}]
    if chance(rng, 0.5):
        rewards.append({"name": "length", "weight": rng.choice((0.5, -0.5)), "options": {"free": 1, "full": 4}})
    return rewards


def drawn_age(rng, mapping):
    """Lag or mixed versions, and a run long enough for them."""
    per_batch = mapping["algorithm"]["updates_per_batch"] * mapping["algorithm"]["epochs_per_batch"]
    mapping["train"]["steps"] = rng.choice((3, 3, 4)) if per_batch <= 2 else 5
    if chance(rng, 0.4):
        batches = rng.choice((1, 2)) if per_batch == 1 else 1
        mapping["lag"] = {"mode": "replayed", "steps": batches * per_batch}
        mapping["train"]["steps"] = max(mapping["train"]["steps"], batches * per_batch + 2)
    elif chance(rng, 0.25):
        mapping["rollout"]["backend"] = "twin_mixed"
        mapping["train"]["steps"] = max(mapping["train"]["steps"], 4)
        # Of a token at exactly its sampler's probability, cppo with a spent budget asks for the sign of a difference
        # that is 0: rounding decides.
        mapping["algorithm"]["correction"].pop("cppo", None)
        # The backend samples with the head of the model, whose factors are not rounded.
        mapping["model"].pop("head_dtype", None)


def drawn_terms(rng, mapping):
    """The KL terms and their references."""
    references = ["initial", "sampler"]
    options = {}
    if chance(rng, 0.3):
        references += ["ema"] * 2
        options["ema"] = {"ema_decay": rng.choice((0.3, 0.8))}
    if chance(rng, 0.3):
        references += ["periodic"] * 2
        options["periodic"] = rng.choice(({"period": 1}, {"period": 2}, {"period": None}))
        if chance(rng, 0.7) or options["periodic"]["period"] is None:
            options["periodic"] = options["periodic"] | {"max_kl": near(rng, 3e-4, 0.03)}
    if chance(rng, 0.15):
        references += ["teacher"] * 2
    terms = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
        term = drawn_term(rng, references)
        while not has_meaning(term):
            term = drawn_term(rng, references)
        terms.append(term)
    mapping["kl"] = terms
    named = {term.get("reference") for term in terms}
    if named & {"ema", "periodic", "teacher"}:
        # Each pass of the policy rounds its own gradient of the logits, and the twin has one pass.
        mapping["model"].pop("head_dtype", None)
    mapping["reference"] = {}
    for name, values in options.items():
        if name in named:
            mapping["reference"] |= values
    if "teacher" in named:
        mapping["reference"]["teacher"] = {"source": str(policy_folder(seed=5))}


def centre_scores(rng, mapping):
    """Centre the scores of half of the terms that can be, where the sampler gives what it needs."""
    if mapping["rollout"].get("backend") == "twin_mixed":
        return
    for term in mapping["kl"]:
        value = {"score_centring": rng.choice(("exact", 1, 3, 12))}
        if term.get("correction") == "none" and chance(rng, 0.5) and has_meaning(term | value):
            term |= value


def past_policies(rng, mapping):
    """Measure some terms against the weights that drew their tokens, or those before the first update of the batch."""
    # The mixed versions of a completion are no past policy; and each pass of the policy rounds a gradient of its own.
    if mapping["rollout"].get("backend") == "twin_mixed" or "head_dtype" in mapping["model"]:
        return
    algorithm = mapping["algorithm"]
    references = ["sampler"]
    if algorithm["updates_per_batch"] * algorithm["epochs_per_batch"] > 1:
        references.append("old")
    for term in mapping["kl"]:
        reference = rng.choice(references)
        is_initial = term.get("reference", "initial") == "initial"
        # On fresh samples the log-ratio is 0 but for rounding, whose sign would be the whole gradient of abs.
        if not is_initial or term["estimator"] == "abs" or not chance(rng, 0.3):
            continue
        try:
            kl_term.KLTerm(**(term | {"reference": reference}))
        except UserError:
            continue
        term["reference"] = reference


def make_dpo(mapping):
    """The same run with pairs in the place of policy loss and terms."""
    keys = ("updates_per_batch", "epochs_per_batch", "mask_truncated")
    mapping["algorithm"] = {key: mapping["algorithm"][key] for key in keys} | {"dpo": {"beta": 0.3}}
    mapping["kl"] = []
    mapping["reference"] = {}
    mapping["optimizer"]["ess_scaling"] = "none"


def drawn(rng):
    """A config and the update before which it is interrupted (None: never). It may be one that is refused."""
    mapping = base_config()
    mapping["seed"] = rng.randrange(1000)
    mapping["algorithm"] = drawn_algorithm(rng)
    mapping["optimizer"] = drawn_optimizer(rng)
    mapping["model"] = drawn_model(rng, with_adapter=chance(rng, 0.25))
    rollout = drawn_rollout(rng, parts=mapping["algorithm"]["updates_per_batch"])
    mapping["rollout"] = rollout
    mapping["data"]["train"]["limit"] = max(rollout["prompts_per_batch"], rng.choice((3, 5, 7)))
    mapping["rewards"] = drawn_rewards(rng)
    train = mapping["train"]
    drawn_age(rng, mapping)
    train["microbatch_tokens"] = rng.choice((1, 12, 25, 60, 1000))
    train["exact_kl_every"] = rng.choice((1, 0, 2))
    drawn_terms(rng, mapping)
    # Numbers of its own: the draws of a seed stay those that are known to cover everything.
    centre_scores(random.Random(f"score centring/{mapping['seed']}"), mapping)
    past_policies(random.Random(f"past policies/{mapping['seed']}"), mapping)
    if chance(rng, 0.05):
        make_dpo(mapping)
    kill_at = None
    if rollout.get("backend") is None and chance(rng, 0.35):
        kill_at = rng.randrange(1, train["steps"])
        train["checkpoint_every"] = rng.choice((1, 1, 2))
    return mapping, kill_at


def draw(seed):
    """The config of ``seed``, the update before which it is interrupted, and how many were refused before it."""
    rng = random.Random(f"twin/{seed}")
    refused = 0
    while True:
        mapping, kill_at = drawn(rng)
        if refusal(mapping) is None:
            return mapping, kill_at, refused
        refused += 1


def draw_dialogues(seed):
    """As :func:`draw`, of dialogues: tools write between the policy's turns, and half of the rollouts have rows."""
    rng = random.Random(f"twin of dialogues/{seed}")
    refused = 0
    while True:
        mapping, _ = drawn(rng)
        mapping.pop("lag", None)
        mapping["train"]["checkpoint_every"] = 0
        mapping["rollout"] |= {
            "backend": "twin_mixed",
            "options": {"tools": True, "rows": chance(rng, 0.6)},
            "max_new_tokens": rng.choice((5, 6, 8)),
        }
        # As with every sampler of mixed versions, see drawn_age.
        mapping["algorithm"].get("correction", {}).pop("cppo", None)
        mapping["model"].pop("head_dtype", None)
        if mapping["algorithm"].get("advantage") == "gae":
            mapping["algorithm"].setdefault("value", {})["discount"] = rng.choice(("token", "turn"))
        if refusal(mapping) is None:
            return mapping, None, refused
        refused += 1


def draw_for_two(seed, strategy):
    """As :func:`draw`, for two processes, whose prompts are a multiple of two."""
    rng = random.Random(f"twin of two/{seed}")
    refused = 0
    while True:
        mapping, kill_at = drawn(rng)
        rollout = mapping["rollout"]
        rollout["prompts_per_batch"] = 2 * mapping["algorithm"]["updates_per_batch"]
        rollout.pop("backend", None)
        mapping["data"]["train"]["limit"] = max(mapping["data"]["train"]["limit"], rollout["prompts_per_batch"])
        mapping["train"] |= {"strategy": strategy, "devices": 2}
        if refusal(mapping) is None:
            return mapping, kill_at, refused
        refused += 1


def refusal(mapping):
    """Why the package refuses the config; None where it trains."""
    load_plugin_file(PARTS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(mapping))
        try:
            build_run(load_config(path))
        except UserError as error:
            return str(error)
    return None


# --- what a config covers ---------------------------------------------------------------------------------------------


def kind_of_beta(beta):
    if not isinstance(beta, dict):
        return "number"
    return "target" if "target" in beta else "schedule"


def covered(mapping, kill_at):
    """Names of what a config has in it."""
    names = covered_by_algorithm(mapping["algorithm"]) | covered_by_model(mapping["model"])
    for term in mapping["kl"]:
        names |= covered_by_term(term)
    names |= {f"moving {name}" for name in mapping["reference"] if name != "teacher"}
    names.add(f"lag {mapping.get('lag', {}).get('mode', 'on_policy')}")
    if mapping["rollout"].get("backend") == "twin_mixed":
        names.add("mixed versions")
    names |= {f"dialogues with {name}" for name, is_on in mapping["rollout"].get("options", {}).items() if is_on}
    sizes = {1: "a row", 1000: "all"}
    names.add(f"micro-batches of {sizes.get(mapping['train']['microbatch_tokens'], 'some rows')}")
    optimizer = mapping["optimizer"]
    names |= {f"{key} {optimizer[key]}" for key in ("schedule", "ess_scaling")}
    if kill_at is not None:
        per_batch = mapping["algorithm"]["updates_per_batch"] * mapping["algorithm"]["epochs_per_batch"]
        saved = kill_at - kill_at % mapping["train"]["checkpoint_every"]
        names.add("interrupted within a batch" if saved % per_batch else "interrupted between batches")
        names |= covered_by_resuming(mapping, is_within_a_batch=saved % per_batch != 0)
        if saved != kill_at:
            names.add("updates repeated after a resume")
    return names


def covered_by_algorithm(algorithm):
    names = {
        f"{key} {algorithm[key]}" for key in ("advantage", "policy_loss", "proximal", "reduction") if key in algorithm
    }
    names |= {f"policy correction {name}" for name in algorithm.get("correction", {})}
    names |= {f"critic {name}" for name, value in algorithm.get("value", {}).items() if value}
    names |= {f"several {key}" for key in ("updates_per_batch", "epochs_per_batch") if algorithm[key] > 1}
    names |= {key for key in ("mask_truncated", "dpo") if algorithm.get(key)}
    if "discount" in algorithm.get("value", {}):
        names.add(f"steps of the critic: {algorithm['value']['discount']}")
    return names


def covered_by_resuming(mapping, is_within_a_batch):
    """What a checkpoint must have of this config."""
    algorithm = mapping["algorithm"]
    names = set()
    if is_within_a_batch:
        if algorithm.get("proximal") == "recomputed":
            names.add("resumed with old log-probs")
        if algorithm.get("advantage") == "gae":
            names.add("resumed with old values")
    for term in mapping["kl"]:
        names.add(f"resumed with beta {kind_of_beta(term['beta'])}")
        names.add(f"resumed with reference {term.get('reference', 'initial')}")
    names.add(f"resumed with lag {mapping.get('lag', {}).get('mode', 'on_policy')}")
    if "lora" in mapping["model"]:
        names.add("resumed with an adapter")
    return names


def covered_by_term(term):
    fields = ("estimator", "placement", "level", "correction", "gradient", "anchor", "reference", "credit", "baseline")
    names = {f"{key} {term[key]}" for key in (*fields, "weight", "cap_mode") if key in term}
    names |= {key for key in ("window", "input_clamp", "output_clamp", "discount") if key in term}
    if "score_centring" in term:
        names.add("score_centring exact" if term["score_centring"] == "exact" else "score_centring of some tokens")
    names.add(f"beta {kind_of_beta(term['beta'])}")
    if term["beta"] != 0:
        needs = ESTIMATORS.get(term["estimator"]).facts.get("needs", "log_ratio")
        reads = "a sampled" if needs == "log_ratio" else "an exact"
        names |= {f"{term[key]} in {term['placement']}" for key in ("estimator", "correction")}
        names |= {f"{reads} estimator with {key} {term[key]}" for key in ("credit", "baseline") if key in term}
        if kl_term.KLTerm(**term).reads_past_policy:
            names.add(f"past policy in {term['placement']}")
        if "cap" in term and term.get("baseline") == "own":
            names.add("own baseline with a cap")
    if "form" in term.get("options", {}):
        names.add(f"form {term['options']['form']}")
    return names


def covered_by_model(model):
    names = {"adapter" if "lora" in model else "all weights", f"share_prompt {model['share_prompt']}"}
    named = {"head_dtype": "head in bfloat16", "head_chunk_elements": "head in chunks"}
    return names | {name for key, name in named.items() if key in model}


def needed():
    """What the configs of the default tests must have in them, from the registries and the choices of fields."""
    names = {f"estimator {name}" for name in built_in(ESTIMATORS)}
    names |= {f"correction {name}" for name in built_in(CORRECTIONS)}
    names |= {f"advantage {name}" for name in built_in(ADVANTAGES)}
    names |= {f"policy_loss {name}" for name in built_in(POLICY_LOSSES)}
    names |= {f"policy correction {name}" for name in built_in(POLICY_CORRECTIONS)}
    for key, choices in (
        ("placement", kl_term.PLACEMENTS),
        ("credit", kl_term.CREDITS),
        ("reference", kl_term.REFERENCES),
        ("baseline", kl_term.BASELINES),
        ("weight", kl_term.WEIGHTS[1:]),
        ("cap_mode", kl_term.CAP_MODES),
        ("reduction", REDUCTIONS),
        ("form", TOP_K_FORMS),
        ("schedule", ("constant", "linear", "cosine")),
        ("ess_scaling", ("none", "sqrt", "linear")),
        ("beta", ("number", "schedule", "target")),
        ("lag", ("on_policy", "replayed")),
        ("micro-batches of", ("a row", "some rows", "all")),
    ):
        names |= {f"{key} {choice}" for choice in choices}
    names |= {"window", "input_clamp", "output_clamp", "discount", "level sequence", "gradient k2", "anchor behaviour"}
    names |= {"adapter", "all weights", "mixed versions", "dpo", "mask_truncated", "proximal recomputed"}
    names |= {"share_prompt True", "share_prompt False", "head in bfloat16", "head in chunks"}
    names |= {"several updates_per_batch", "several epochs_per_batch", "moving max_kl", "moving ema_decay"}
    names |= {"interrupted within a batch", "interrupted between batches", "updates repeated after a resume"}
    names |= {f"{name} in {placement}" for name in built_in(ESTIMATORS) for placement in kl_term.PLACEMENTS}
    names |= {f"{name} in {placement}" for name in built_in(CORRECTIONS) for placement in kl_term.PLACEMENTS}
    names |= {f"{reads} estimator with credit {c}" for reads in ("a sampled", "an exact") for c in kl_term.CREDITS}
    for baseline in kl_term.BASELINES:
        names.add(f"a sampled estimator with baseline {baseline}")
        if baseline not in ("exact", "batch"):
            names.add(f"an exact estimator with baseline {baseline}")
    names |= {"score_centring exact", "score_centring of some tokens"}
    names |= {"own baseline with a cap", "resumed with old log-probs", "resumed with old values"}
    names |= {f"resumed with beta {kind}" for kind in ("schedule", "target")}
    names |= {f"resumed with reference {name}" for name in ("ema", "periodic", "old", "sampler")}
    names |= {f"past policy in {placement}" for placement in kl_term.PLACEMENTS}
    names |= {"resumed with lag replayed"}
    names |= {"resumed with an adapter"}
    critic = ("gamma", "lam", "coefficient", "lr", "clip", "trunk", "bootstrap_truncated", "normalize")
    names |= {f"critic {name}" for name in critic}
    return names


ALONG_TOKENS = [*(("credit", name) for name in kl_term.CREDITS), ("baseline", "before"), ("baseline", "own")]


def needed_of_dialogues():
    """What the default draws of dialogues must have in them: whatever runs along tokens, or compares their places."""
    names = {"dialogues with tools", "dialogues with rows", "discount", "window", "level sequence", "adapter"}
    names |= {f"a sampled estimator with {key} {choice}" for key, choice in ALONG_TOKENS}
    names |= {f"an exact estimator with {key} {choice}" for key, choice in ALONG_TOKENS}
    names |= {f"correction {name}" for name in ("prefix", "prefix_previous", "sequence")}
    names |= {"steps of the critic: token", "steps of the critic: turn", "advantage rloo", "advantage reinforce_pp"}
    names |= {f"reduction {name}" for name in REDUCTIONS}
    names |= {"micro-batches of a row", "micro-batches of some rows", "micro-batches of all", "share_prompt False"}
    return names
