"""What a GPU does otherwise: its branches, run on the CPU or on ``meta`` tensors, give what the CPU's give."""

import ast
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kl_comedy import cuda
from kl_comedy.config import config_hash, load_config
from kl_comedy.config.schema import LoraConfig, ModelConfig, RolloutConfig
from kl_comedy.errors import UserError
from kl_comedy.models import load_model
from kl_comedy.models.reference import Reference
from kl_comedy.models.sharding import decoder_layers
from kl_comedy.models.types import PassOptions
from kl_comedy.models.weights import full_tensor
from kl_comedy.records import Problem, Prompt
from kl_comedy.rollouts import Sampling, build_hf
from kl_comedy.rollouts.decoding import Draws, pick
from kl_comedy.rollouts.engines.vllm import VLLMRollouts
from kl_comedy.training.build import check_training
from kl_comedy.training.run import make_trainer
from operations import Operations
from passes import head_columns, token_pass
from ranks import spawn
from sharded_models import OPTIONS, batch, config_of

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "kl_comedy"
TINY = TESTS / "support" / "tiny.yaml"
AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16, "cache_enabled": False}


@pytest.fixture
def gpu_branches(monkeypatch):
    monkeypatch.setattr(cuda, "on_gpu", lambda tensor: True)


# --- running sums -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0, 1, 2, 3, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_running_sum_of_a_gpu_is_cumsum_with_its_gradient(gpu_branches, width, dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, width, generator=generator, dtype=dtype).requires_grad_(True)
    weights = torch.randn(4, width, generator=generator, dtype=dtype)
    ours, theirs = cuda.running_sum(values), values.cumsum(-1)
    bound = {"atol": 1000 * torch.finfo(dtype).eps, "rtol": 0}
    torch.testing.assert_close(ours, theirs, **bound)
    gradients = [torch.autograd.grad((weights * each).sum(), values)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*gradients, **bound)


def test_on_the_cpu_the_running_sums_are_cumsum_bit_for_bit():
    values = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cuda.running_sum(values), values.cumsum(-1))
    assert torch.equal(cuda.running_probability(values.exp()), values.exp().double().cumsum(-1))


def test_elsewhere_no_float_is_summed_by_cumsum():
    values = torch.empty(3, 100, device="meta")
    with Operations() as operations:
        assert cuda.running_sum(values).shape == values.shape
        assert cuda.running_probability(values).dtype == torch.float64
    assert {dtype for name, dtype in operations.names if name == "cumsum"} == {torch.int64}


def test_a_gpu_draws_the_tokens_of_the_cpu_and_none_of_probability_zero(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logp_BV = (6 * torch.randn(4000, 600, generator=generator)).log_softmax(-1)
    logp_BV[:, ::3] = float("-inf")
    uniform_B = torch.rand(4000, generator=generator, dtype=torch.float64)
    uniform_B[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    expected = pick(logp_BV, uniform_B)
    monkeypatch.setattr(cuda, "on_gpu", lambda tensor: True)
    drawn = pick(logp_BV, uniform_B)
    assert torch.equal(drawn, expected) and bool((drawn[1:] % 3 != 0).all())
    assert bool(logp_BV[torch.arange(4000), drawn].isfinite().all())


# --- the head ---------------------------------------------------------------------------------------------------------


def columns(hidden, weight, ids, *, autocast=False, reference=None, rows=64, **options):
    """Log-prob and exact KL with gradients, in chunks of ``rows``."""
    leaves = [tensor.clone().requires_grad_(True) for tensor in (hidden, weight)]
    options |= {"requested": ("kl",), "reference": (hidden, (reference, None))} if reference is not None else {}
    with torch.autocast(**AUTOCAST, enabled=autocast):
        columns = head_columns(leaves[0], (leaves[1], None), ids, temperature=0.8, chunk_elements=rows * 300, **options)
        sum(column.sum() for column in columns.values()).backward()
    return {**{name: column.detach() for name, column in columns.items()}, "h": leaves[0].grad, "w": leaves[1].grad}


def head_inputs():
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(50, 96, generator=generator), torch.randn(300, 96, generator=generator) / 10
    return hidden, weight, weight + 0.02 * torch.randn(300, 96, generator=generator), torch.arange(50) * 5


@pytest.mark.parametrize("rows", [7, 64])
@pytest.mark.parametrize("factor_dtype", [None, torch.bfloat16])
def test_ambient_autocast_changes_neither_the_heads_values_nor_its_gradients(rows, factor_dtype):
    hidden, weight, other, ids = head_inputs()
    options = {"reference": other, "rows": rows, "factor_dtype": factor_dtype}
    inside, outside = (columns(hidden, weight, ids, autocast=autocast, **options) for autocast in (True, False))
    assert all(torch.equal(inside[name], value) for name, value in outside.items())


def test_a_head_of_bf16_products_is_within_the_rounding_of_its_factors():
    """Each factor is off by 2^-8 of itself at most, so a logit by 2^-7 of the sum of its products' sizes."""
    hidden, weight, other, ids = head_inputs()
    wide = columns(hidden, weight, ids, reference=other)
    options = {"reference": other, "factor_dtype": torch.bfloat16}
    narrow, chunked = (columns(hidden, weight, ids, rows=rows, **options) for rows in (64, 7))
    bound_N = 2 * 1.01 * 2.0**-7 * (hidden.abs() @ weight.abs().t()).amax(1) / 0.8
    gap_N = (narrow["logp"] - wide["logp"]).abs()
    assert bool((gap_N < bound_N).all()) and 1e-4 < float(gap_N.mean()) < 0.01
    assert narrow["logp"].dtype == narrow["w"].dtype == torch.float32
    for name in "hw":
        cosine = torch.nn.functional.cosine_similarity(narrow[name].flatten(), wide[name].flatten(), dim=0)
        assert float(cosine) > 0.9999
    for name, value in narrow.items():
        torch.testing.assert_close(chunked[name], value, atol=1e-3 if name in "hw" else 1e-5, rtol=1e-2)
    same = columns(hidden, weight, ids, reference=weight, factor_dtype=torch.bfloat16)
    assert same["kl"].count_nonzero() == 0, "of equal policies, whatever the products"


def test_on_a_gpu_the_product_is_asked_for_with_float32_sums():
    rows, columns_KN = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((5, 8), (8, 3)))
    with Operations() as operations:
        out = cuda.wide_product(rows, columns_KN)
    assert out.dtype == torch.float32 and out.shape == (5, 3) and ("mm", torch.bfloat16) in operations.names


@pytest.mark.parametrize("loop", ["auto", "library"])
def test_sampler_learner_and_reference_round_the_head_alike(loop):
    loaded = load_model(ModelConfig(options={"preset": "tiny"}, head_dtype="bfloat16"))
    prompts = [Prompt(problem=Problem(id="", text="", answer=""), text="", token_ids=(3, 12, 4, 14))]
    sampling = Sampling(temperature=0.7, max_new_tokens=12)
    sampler = build_hf(RolloutConfig(options={"loop": loop}), loaded=loaded)
    rows = sampler.generate(prompts, group_size=8, sampling=sampling, seed=0)
    plain = load_model(ModelConfig(options={"preset": "tiny"}))
    gaps, other_gaps = [], []
    for row in rows:
        ids = {"prompt_ids_BP": torch.tensor([row.prompt.token_ids]), "ids_BT": torch.tensor([row.completion_ids])}
        inputs = ids | {name.replace("ids", "mask"): torch.ones_like(value) for name, value in ids.items()}
        reference = Reference(loaded.model, PassOptions(**OPTIONS)).forward_pass(**inputs)
        passed = token_pass(loaded.model, **inputs, **OPTIONS, reference=reference, kl=True)
        assert passed.kl_BT.count_nonzero() == 0 and torch.equal(passed.logp_BT, reference.logp_BT)
        sampled = torch.tensor(row.logps)
        gaps.append((passed.logp_BT[0].detach() - sampled).abs().max())
        other_gaps.append((token_pass(plain.model, **inputs, **OPTIONS).logp_BT[0].detach() - sampled).abs().max())
    assert float(max(gaps)) < 1e-5 < 1e-4 < float(max(other_gaps))


@pytest.mark.parametrize("loop", ["auto", "library"])
def test_a_sampler_computes_the_head_outside_autocast(loop, monkeypatch):
    draw, scores = Draws.draw, []
    monkeypatch.setattr(Draws, "draw", lambda self, each, *rest: (scores.append(each), draw(self, each, *rest))[1])
    loaded = load_model(ModelConfig(options={"preset": "tiny"}))
    prompts = [Prompt(problem=Problem(id="", text="", answer=""), text="", token_ids=(3, 12, 4, 14))]
    with torch.autocast(**AUTOCAST):
        sampler = build_hf(RolloutConfig(options={"loop": loop}), loaded=loaded)
        sampler.generate(prompts, group_size=2, sampling=Sampling(temperature=1.0, max_new_tokens=4), seed=0)
    assert scores and all(each.dtype == torch.float32 for each in scores)
    assert not any(torch.equal(each, each.bfloat16().float()) for each in scores)
    assert loaded.causal.lm_head(torch.zeros(1, 2, loaded.model.config.hidden_size)).shape[:2] == (1, 2), "as before"


# --- precision of weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_weights_are_trained_in_float32_only(dtype):
    with pytest.raises(UserError, match=r"model\.dtype: got .*allowed: float32 where.*train\.precision=bf16") as error:
        check_training(load_config(TINY, [f"model.dtype={dtype}"]))
    assert "\n" not in str(error.value)
    check_training(load_config(TINY, [f"model.dtype={dtype}", "model.lora={rank: 2}"]))


def test_the_adapter_of_a_bf16_policy_is_float32():
    model = load_model(ModelConfig(options={"preset": "tiny"}, dtype="bfloat16", lora=LoraConfig(rank=2))).model
    dtypes = {p.requires_grad: p.dtype for p in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.attention=varlen"], r"model\.attention: got 'varlen'.*train\.precision=bf16"),
        (["model.attention=varlen", "train.precision=bf16", "model.share_prompt=false"], r"model\.attention"),
        (
            ["train.strategy_options.shards=node"],
            r"train\.strategy_options\.shards: got 'node'; allowed: all with train\.strategy single",
        ),
        (["model.head_dtype=float16"], r"model\.head_dtype"),
    ],
)
def test_settings_that_need_others_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        load_config(TINY, words)


def test_the_kernel_for_a_gpu_is_refused_on_a_cpu():
    with pytest.raises(UserError, match=r"model\.attention: got 'varlen'; allowed: sdpa, eager.*needs a GPU"):
        load_model(ModelConfig(options={"preset": "tiny"}, attention="varlen", device="cpu"))


def test_new_keys_keep_the_hash_of_earlier_runs():
    plain = load_config(TINY)
    assert config_hash(plain) == config_hash(
        load_config(TINY, ["train.strategy=fsdp", "train.strategy_options.shards=node"])
    )
    assert config_hash(plain) != config_hash(load_config(TINY, ["model.head_dtype=bfloat16"]))


# --- variables --------------------------------------------------------------------------------------------------------


def test_variables_of_the_user_stay(monkeypatch):
    for name in (*cuda.VARIABLES, "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    cuda.set_variables()
    assert {name: os.environ[name] for name in cuda.VARIABLES} == cuda.VARIABLES
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    cuda.set_variables()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        make_trainer(load_config(TINY), [])
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory


# --- autocast and shards ----------------------------------------------------------------------------------------------


def test_autocast_is_never_on_with_its_cache():
    """With it a pass without gradient leaves later gradients None under FSDP2, whose weights are new in every pass."""
    calls = []
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.autocast":
                options = {word.arg: ast.unparse(word.value) for word in node.keywords}
                calls.append((file.name, "False" in (options.get("enabled"), options.get("cache_enabled"))))
    assert len(calls) >= 5 and [name for name, safe in calls if not safe] == []
    plugin = make_trainer(load_config(TINY, ["train.precision=bf16", "train.deterministic=false"]), []).precision_plugin
    with plugin.forward_context():
        assert not torch.is_autocast_cache_enabled()


def learned(model):
    """Log-probs and gradients after a pass without gradient, and the dtypes of weights that modules compute with."""
    dtypes, hooks = {}, []

    def note(name):
        def look(module, *_):
            for parameter in module.parameters(recurse=False):
                dtypes[name] = str(parameter.dtype)

        return look

    for name, module in decoder_layers(model)[0].named_modules():
        hooks.append(module.register_forward_pre_hook(note(name)))
    with torch.autocast(**AUTOCAST):
        with torch.no_grad():
            token_pass(model, **batch(), **OPTIONS)
        passed = token_pass(model, **batch(), **OPTIONS)
        (passed.logp_BT * torch.linspace(-1, 1, passed.logp_BT.shape[1])).sum().backward()
    for hook in hooks:
        hook.remove()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, p in trained.items() if p.grad is None] == []
    assert {p.grad.dtype for p in trained.values()} == {torch.float32}
    return {
        "logp": passed.logp_BT.flatten().tolist(),
        "gradients": [full_tensor(p.grad).flatten()[:300].tolist() for p in trained.values()],
        "dtypes": dtypes,
    }


def learned_in_shards(rank, world, folder, kind):
    from kl_comedy.models.sharding import load_sharded

    options = {"float32": {}, "bf16": {"bf16": True}, "a copy on each node": {"bf16": True, "copies": 2}}
    results = {}
    for name, each in options.items():
        loaded = load_sharded(config_of(kind), limit_bytes=0, **each)
        results[name] = learned(loaded.model)
        results[name]["mesh"] = list(next(loaded.model.parameters()).device_mesh.shape)
        with torch.no_grad():  # as a check or a probe: without the trainer's autocast
            assert bool(token_pass(loaded.model, **batch(), **OPTIONS).logp_BT.isfinite().all())
    return results


@pytest.mark.parametrize("kind", ["plain checkpointing", "lora"])
def test_gathers_in_bf16_change_no_number(tmp_path, kind):
    """Autocast rounds the same weights, so one process, float32 gathers and bf16 gathers have the same log-probs.

    A gradient may differ in its last digit, where it is summed over the places that use a weight in another order.
    """
    alone = learned(load_model(config_of(kind)).model)
    for results in spawn(learned_in_shards, tmp_path, kind):
        wide, narrow, copies = results.values()
        for other in (narrow, wide, copies):
            assert other["logp"] == alone["logp"]
            for ours, theirs in zip(other["gradients"], alone["gradients"], strict=True):
                assert ours == pytest.approx(theirs, rel=0, abs=1e-6 * max(map(abs, theirs)))
        dtypes = {name: "float32" if "norm" in name else "bfloat16" for name in narrow["dtypes"]}
        assert narrow["dtypes"] == {name: f"torch.{dtype}" for name, dtype in dtypes.items()} and len(dtypes) >= 9
        assert set(wide["dtypes"].values()) == {"torch.float32"}
        assert (wide["mesh"], copies["mesh"]) == ([2], [2, 1])


# --- the engine in the trainer's process ------------------------------------------------------------------------------


class SleepingEngine:
    """Takes note of what is asked of it, in order."""

    def __init__(self):
        self.calls = []

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")

    def collective_rpc(self, name, kwargs=None):
        self.calls.append(name)
        for _ in (kwargs or {}).get("weights_iterator", ()):
            pass
        return [{}]

    def reset_prefix_cache(self):
        return True

    def generate(self, requests, settings, use_tqdm):
        self.calls.append("generate")
        return [SimpleNamespace(outputs=[])]


def test_a_sleeping_engine_takes_the_weights_when_it_wakes_and_its_cache_after_them(monkeypatch):
    from kl_comedy.rollouts.engines import vllm

    monkeypatch.setattr(vllm, "checksum_complaint", lambda *args: None)
    sampler = object.__new__(VLLMRollouts)
    engine = sampler._engine = SleepingEngine()
    sampler._sleeps, sampler._dtype = True, "bfloat16"
    sampler._loaded = load_model(ModelConfig(options={"preset": "tiny"}))
    sampler._options = SimpleNamespace(probe=False)
    sampler.update_weights(3)
    assert engine.calls == [] and sampler.version == 3
    with sampler._awake():
        engine.calls.append("generate")
    weights, cache = "wake weights", "wake kv_cache"
    assert engine.calls == [weights, "reload_weights", cache, "compute_weight_checksums", "generate", "sleep 2"]
