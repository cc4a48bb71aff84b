"""One update of the product at the shape of a real model, as one rank of several, on a traced fake GPU.

Unchanged from the product: loading, the training step with its passes, loss, clip and optimizer, and what a publication
gathers. Replaced, because they need values or other processes: the reader of weights, exchanges of Python objects, and
Lightning's trainer.
"""

import collections
import contextlib
import gc
import json
import random
from pathlib import Path
from typing import Any

RANKS = 4
PROMPTS = 3
GROUP = 2
PROMPT_TOKENS = (10, 40)
COMPLETION_TOKENS = (20, 90)
MICROBATCH_TOKENS = 200
"""One group, so that the first three ranks have one micro-batch each, and the last passes a row of another rank."""

REPLY = slice(8, 14)
"""The tokens of each completion of a dialogue that an environment wrote."""

TINY_WORDS = {"<unk>": 0, "<eos>": 1, "<pad>": 2, "a": 3}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}
"""The config.json of Qwen2.5-7B, Llama-3.1-8B and Qwen3-4B, without their rope scaling."""

CONFIG = [
    "model.gradient_checkpointing=false",
    "model.head_chunk_elements=33554432",
    "kl=[{recipe: comedy/k1_in_reward, beta: 0.05}]",
    "algorithm.advantage=rloo",
    f"rollout.group_size={GROUP}",
    f"rollout.max_new_tokens={COMPLETION_TOKENS[1]}",
    f"train.microbatch_tokens={MICROBATCH_TOKENS}",
    "train.strategy=fsdp",
    f"train.devices={RANKS}",
    "train.precision=bf16",
    "train.exact_kl_every=0",
    "train.samples_every=0",
]
"""What all cases have beside the defaults of the configuration."""


SETTINGS = {
    "lora": ["model.lora={rank: 32, alpha: 64}"],
    "varlen": ["model.attention=varlen"],
    "exact": ["kl=[{estimator: exact, placement: loss, beta: 0.05}]"],
    "value": ["algorithm.advantage=gae"],
    "checkpointing": ["model.gradient_checkpointing=true"],
    "hsdp": ["train.nodes=2", "train.devices=2", "train.shards=node"],
    "teacher": [
        "kl=[{estimator: exact, placement: loss, reference: teacher, beta: 0.05}]",
        "reference.teacher.source=MODEL",
    ],
    "ddp": ["train.strategy=ddp"],
    # Past policies are not kept in shards.
    "past": ["kl=[{estimator: exact, placement: loss, reference: sampler, beta: 0.05}]", "train.strategy=ddp"],
    "dialogue": [],
}
"""The settings of each part of a case's name beside :data:`CONFIG`; a ``dialogue`` has other rows."""

CASES = [
    "full",
    "lora varlen checkpointing",
    "value exact hsdp",
    "teacher dialogue checkpointing",
    "past dialogue varlen",
]
"""Each part once, with others; after the update, what a publication gathers is traced."""

SINGLE_CASES = list(SETTINGS)
"""Each part alone."""


def settings_of(name: str, model: Path) -> list[str]:
    """The settings of a case, which is ``full`` or names its parts."""
    settings = list(CONFIG)
    for part in name.split():
        if part != "full":
            settings += [setting.replace("MODEL", str(model)) for setting in SETTINGS[part]]
    return settings


def write_model(folder: Path, shape: str, layers: int | None) -> Path:
    """A model folder without weights: config.json of ``shape`` cut to ``layers``, and a tokenizer of four words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    config = dict(SHAPES[shape])
    if layers is not None:
        config["num_hidden_layers"] = layers
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel(TINY_WORDS, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)
    return folder


def drawn_rows(dialogue: bool):
    """Scored completions of random tokens and lengths; the same on every rank.

    Of a ``dialogue`` an environment wrote some of the tokens, and one completion of each group has a second row.
    """
    from kl_comedy.records import FOREIGN_VERSION, Problem, Prompt, Reward, Rollout, Scored

    generator = random.Random(0)

    def tokens(bounds):
        return tuple(generator.randrange(4, 1000) for _ in range(generator.randint(*bounds)))

    rows = []
    for group in range(PROMPTS):
        prompt = Prompt(problem=Problem(id=str(group), text="", answer=""), text="", token_ids=tokens(PROMPT_TOKENS))
        for member in range(GROUP):
            ids = tokens(COMPLETION_TOKENS)
            trained = [True] * len(ids)
            restarts = []
            if dialogue:
                trained[REPLY] = [False] * len(trained[REPLY])
                if member == 0:
                    restarts.append((REPLY.stop, tokens(PROMPT_TOKENS)))
            rollout = Rollout(
                prompt=prompt,
                group_id=group,
                completion_ids=ids,
                logps=tuple(-0.5 if drawn else 0.0 for drawn in trained),
                versions=tuple(1 if drawn else FOREIGN_VERSION for drawn in trained),
                stop_reason="eos",
                text="",
                trained=tuple(trained) if dialogue else (),
                restarts=tuple(restarts),
            )
            rows.append(Scored(rollout=rollout, reward=Reward(value=float(member))))
    return tuple(rows)


class Exchanges:
    """Exchanges of Python objects without other processes: every other rank says what rank 0 said.

    ``of_rank_zero`` are the items that rank 0 gave, in order, and None on rank 0 itself, whose item stands for all.
    """

    def __init__(self, rank: int, rows, of_rank_zero) -> None:
        self._rank = rank
        self._rows = rows
        self._of_rank_zero = of_rank_zero
        self.items = []

    def gather(self, ranks, item):
        other = item
        if self._of_rank_zero is not None:
            other = self._of_rank_zero[len(self.items)]
        self.items.append(_storable(item))
        if _is_by_position(other):
            other = _old_policy_of_all_rows(self._rows)
        gathered = [other] * ranks.size
        gathered[self._rank] = item
        return gathered

    def broadcast(self, ranks, item):
        return self.gather(ranks, item)[0]


def _is_by_position(item) -> bool:
    """Whether an exchanged item has a row for each position in the batch, of which each rank has its own."""
    return isinstance(item, dict) and len(item) > 0 and all(isinstance(key, int) for key in item)


def _old_policy_of_all_rows(rows):
    """Log-probs and values before the first update, as the other ranks record them; of zeros."""
    import torch

    recorded = {}
    for position, row in enumerate(rows):
        zeros_T = torch.zeros(len(row.rollout.completion_ids))
        recorded[position] = {"logp": zeros_T, "value": zeros_T, "last": 0.0}
    return recorded


def _storable(item):
    """``item`` with real tensors of zeros in the place of fake ones, for another process."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_map

    def real(leaf):
        if isinstance(leaf, torch.Tensor):
            with _disable_current_modes():
                return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return leaf

    return tree_map(real, item)


def _patch_product(exchanges: Exchanges) -> None:
    """Replace what needs values of weights or other processes, for the rest of this process."""
    from tests.shapes.trace import without_modes

    from kl_comedy.models import load, sharding
    from kl_comedy.training.distributed import Ranks

    Ranks.gather = lambda ranks, item: exchanges.gather(ranks, item)
    Ranks.broadcast = lambda ranks, item: exchanges.broadcast(ranks, item)
    sharding._weight_reader_on_rank_zero = lambda *args: None
    # Modules exchange their tensors when they move, which weak references to fake tensors forbid. On the meta device
    # they have no memory, and buffers become fake when they move to the device.
    sharding.skeleton = without_modes(sharding.skeleton)
    sharding.add_lora = without_modes(sharding.add_lora)
    load.load_base = _base_on_the_device
    load.place = lambda model, device: None


def _base_on_the_device(config):
    """The model that one process loads whole, with memory that nothing filled."""
    from kl_comedy.models import load, sharding

    model = sharding.skeleton(config)
    sharding._allocate(model, load.pick_device(config.device))
    if model.config.tie_word_embeddings:
        model.tie_weights()
    return model


class Unpublished:
    """The sampler of a case without publication."""

    version = 1

    def update_weights(self, version: int) -> None:
        self.version = version


def _module(config):
    from kl_comedy.training.module import PolicyModule

    class Module(PolicyModule):
        """With what Lightning's trainer gives a module in a run."""

        def optimizers(self):
            return self.optimizer

        def lr_schedulers(self):
            return self.scheduler

        def manual_backward(self, loss, *args, **kwargs) -> None:
            loss.backward()

    return Module(config)


@contextlib.contextmanager
def loaded_case(name: str, *, shape: str, layers: int | None, rank: int, folder: Path, of_rank_zero=None):
    """The policy of a case, loaded as ``rank``: inside, :meth:`LoadedCase.update` runs an update of it."""
    import torch
    from tests.shapes.fake_cuda import patch_torch_cuda
    from tests.shapes.trace import tracing

    from kl_comedy.config import load_config
    from kl_comedy.cuda import leave_memory_unfilled
    from kl_comedy.training.distributed import Ranks

    model = write_model(folder / f"{shape}-{layers}", shape, layers)
    patch_torch_cuda(rank)
    config = load_config(None, [f"model.source={model}", "tracking.uri=none", *settings_of(name, model)])
    rows = drawn_rows(dialogue="dialogue" in name.split())
    exchanges = Exchanges(rank, rows, of_rank_zero)
    _patch_product(exchanges)
    with tracing(rank, RANKS) as trace:
        torch.use_deterministic_algorithms(config.train.deterministic)
        leave_memory_unfilled()
        module = _module(config)
        module.load(Ranks(rank=rank, size=RANKS, sharded=config.train.strategy == "fsdp"))
        module.backend = Unpublished()
        made = module.configure_optimizers()
        module.optimizer = made["optimizer"]
        module.scheduler = made["lr_scheduler"]["scheduler"]
        module.log_dict = lambda *args, **kwargs: None
        load = _counts(trace)
        _step_on_zeros(module)
        module.version = 1  # the first update checks and measures what others do not
        for reference in module.moving_references.values():
            reference.update(module.policy, module.version)
        yield LoadedCase(trace, module, rows, exchanges, load)


class LoadedCase:
    """A loaded policy and its trace. ``exchanges`` has the objects that this rank gave to others."""

    def __init__(self, trace, module, rows, exchanges: Exchanges, load: dict[str, Any]) -> None:
        self.exchanges = exchanges
        self._trace = trace
        self._module = module
        self._rows = rows
        self._load = load

    def update(self) -> dict[str, Any]:
        """Counts of the load, of one update, and of a publication after it."""
        import torch

        from kl_comedy.training.experience import UpdateBatch

        self._trace.restart()
        before = self._trace.bytes
        batch = UpdateBatch(rows=self._rows, batch=self._rows, offset=0, iteration=1, first=True, metrics={})
        without_gradient = _watch_gradients(self._module)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            self._module.training_step(batch, 0)
        update = _counts(self._trace)
        # What only a collector frees is freed before the next update.
        gc.collect()
        left = self._trace.bytes - before
        self._trace.restart()
        _publish(self._module)
        publication = _counts(self._trace)
        return {
            "load": self._load,
            "update": update,
            "publication": publication,
            "left_bytes": left,
            "without_gradient": without_gradient,
        }


def _step_on_zeros(module) -> None:
    """Let AdamW make its moments, as from the second update on."""
    import torch

    for group in module.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    module.optimizer.step()
    module.optimizer.zero_grad()


def _watch_gradients(module) -> list[str]:
    """A list that the optimizer's step fills with the trained parameters that have no gradient then."""
    names = {id(parameter): name for name, parameter in module.policy.named_parameters()}
    missing: list[str] = []

    def look(optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    missing.append(names.get(id(parameter), "value head"))

    module.optimizer.register_step_pre_hook(look)
    return missing


def _publish(module) -> None:
    """What all transports share: every weight is gathered, and on rank 0 copied to host memory."""
    import torch

    from kl_comedy.models.weights import full_weights
    from kl_comedy.rollouts.engines.transports import _host_copies

    weights = full_weights(module.policy, torch.bfloat16)
    if module.ranks.is_rank_zero:
        weights = _host_copies(weights)
    for _ in weights:
        pass


def _counts(trace) -> dict[str, Any]:
    """The counts of a trace as plain data. A collective: name, device, dtype, bytes of its largest tensor."""
    wire_bytes: collections.Counter[str] = collections.Counter()
    for name, _, dtype, size in trace.collectives:
        # A ring passes each part to all but one; a sum passes it twice.
        passes = 2 if "reduce_" in name and "scatter" not in name else 1
        wire_bytes[dtype.removeprefix("torch.")] += passes * size * (RANKS - 1) // RANKS
    return {
        "peak_bytes": trace.peak_bytes,
        "collectives": trace.collectives,
        "wire_bytes": dict(wire_bytes),
        "waits": dict(trace.waits),
        "flop": {str(dtype).removeprefix("torch."): operations for dtype, operations in trace.flop.items()},
        "violations": dict(trace.violations),
    }
