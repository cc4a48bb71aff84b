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
from kl_comedy.training.fit import make_trainer
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
    ours = cuda.running_sum(values)
    theirs = values.cumsum(-1)
    tolerance = 1000 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
    (gradient,) = torch.autograd.grad((weights * ours).sum(), values)
    (expected,) = torch.autograd.grad((weights * theirs).sum(), values)
    torch.testing.assert_close(gradient, expected, atol=tolerance, rtol=0)


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
    assert torch.equal(drawn, expected)
    # Every third token is impossible.
    assert bool((drawn[1:] % 3 != 0).all())
    assert bool(logp_BV[torch.arange(4000), drawn].isfinite().all())


# --- the head ---------------------------------------------------------------------------------------------------------


def columns(hidden, weight, ids, *, autocast=False, reference=None, rows=64, **options):
    """Log-prob and exact KL with gradients, in chunks of ``rows``."""
    hidden_leaf = hidden.clone().requires_grad_(True)
    weight_leaf = weight.clone().requires_grad_(True)
    if reference is not None:
        options["requested"] = ("kl",)
        options["reference"] = (hidden, (reference, None))
    with torch.autocast(**AUTOCAST, enabled=autocast):
        columns = head_columns(
            hidden_leaf, (weight_leaf, None), ids, temperature=0.8, chunk_elements=rows * 300, **options
        )
        sum(column.sum() for column in columns.values()).backward()
    results = {name: column.detach() for name, column in columns.items()}
    return {**results, "h": hidden_leaf.grad, "w": weight_leaf.grad}


def head_inputs():
    """Hidden states, the head's weight, that of a reference near it, and the ids of 50 tokens."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(50, 96, generator=generator)
    weight = torch.randn(300, 96, generator=generator) / 10
    reference = weight + 0.02 * torch.randn(300, 96, generator=generator)
    return hidden, weight, reference, torch.arange(50) * 5


@pytest.mark.parametrize("rows", [7, 64])
@pytest.mark.parametrize("factor_dtype", [None, torch.bfloat16])
def test_ambient_autocast_changes_neither_the_heads_values_nor_its_gradients(rows, factor_dtype):
    hidden, weight, other, ids = head_inputs()
    options = {"reference": other, "rows": rows, "factor_dtype": factor_dtype}
    inside = columns(hidden, weight, ids, autocast=True, **options)
    outside = columns(hidden, weight, ids, autocast=False, **options)
    for name, value in outside.items():
        assert torch.equal(inside[name], value), name


def test_a_head_of_bf16_products_is_within_the_rounding_of_its_factors():
    """Each factor is off by 2^-8 of itself at most, so a logit by 2^-7 of the sum of its products' sizes."""
    hidden, weight, other, ids = head_inputs()
    wide = columns(hidden, weight, ids, reference=other)
    narrow = columns(hidden, weight, ids, reference=other, factor_dtype=torch.bfloat16)
    # Twice: the logit of the token, and the normalizer. The temperature is 0.8.
    bound_N = 2 * 1.01 * 2.0**-7 * (hidden.abs() @ weight.abs().t()).amax(1) / 0.8
    gap_N = (narrow["logp"] - wide["logp"]).abs()
    assert bool((gap_N < bound_N).all())
    assert 1e-4 < float(gap_N.mean()) < 0.01
    assert narrow["logp"].dtype == torch.float32
    assert narrow["w"].dtype == torch.float32
    for gradient in ("h", "w"):
        cosine = torch.nn.functional.cosine_similarity(narrow[gradient].flatten(), wide[gradient].flatten(), dim=0)
        assert float(cosine) > 0.9999, gradient


def test_a_head_of_bf16_products_does_not_depend_on_chunks():
    hidden, weight, other, ids = head_inputs()
    whole = columns(hidden, weight, ids, reference=other, factor_dtype=torch.bfloat16, rows=64)
    chunked = columns(hidden, weight, ids, reference=other, factor_dtype=torch.bfloat16, rows=7)
    tolerances = {"logp": 1e-5, "kl": 1e-5, "h": 1e-3, "w": 1e-3}
    assert set(tolerances) == set(whole)
    for name, value in whole.items():
        torch.testing.assert_close(chunked[name], value, atol=tolerances[name], rtol=1e-2)


def test_the_kl_of_equal_policies_is_zero_whatever_the_products():
    hidden, weight, _, ids = head_inputs()
    equal = columns(hidden, weight, ids, reference=weight, factor_dtype=torch.bfloat16)
    assert equal["kl"].count_nonzero() == 0


def test_on_a_gpu_the_product_is_asked_for_with_float32_sums():
    rows_MK = torch.empty((5, 8), device="meta", dtype=torch.bfloat16)
    columns_KN = torch.empty((8, 3), device="meta", dtype=torch.bfloat16)
    with Operations() as operations:
        product_MN = cuda.wide_product(rows_MK, columns_KN)
    assert product_MN.dtype == torch.float32
    assert product_MN.shape == (5, 3)
    assert ("mm", torch.bfloat16) in operations.names


PROMPT = Prompt(problem=Problem(id="", text="", answer=""), text="", token_ids=(3, 12, 4, 14))


def pass_inputs(rollout):
    """A rollout without padding as the tensors of ``token_pass``."""
    prompt_ids_BP = torch.tensor([rollout.prompt.token_ids])
    ids_BT = torch.tensor([rollout.completion_ids])
    return {
        "prompt_ids_BP": prompt_ids_BP,
        "ids_BT": ids_BT,
        "prompt_mask_BP": torch.ones_like(prompt_ids_BP),
        "mask_BT": torch.ones_like(ids_BT),
    }


@pytest.mark.parametrize("loop", ["auto", "library"])
def test_sampler_learner_and_reference_round_the_head_alike(loop):
    loaded = load_model(ModelConfig(options={"preset": "tiny"}, head_dtype="bfloat16"))
    sampling = Sampling(temperature=0.7, max_new_tokens=12)
    sampler = build_hf(RolloutConfig(options={"loop": loop}), loaded=loaded)
    rollouts = sampler.generate([PROMPT], group_size=8, sampling=sampling, seed=0)
    with_float32_head = load_model(ModelConfig(options={"preset": "tiny"}))
    gaps = []
    gaps_of_float32_head = []
    for rollout in rollouts:
        inputs = pass_inputs(rollout)
        reference = Reference(loaded.model, PassOptions(**OPTIONS)).forward_pass(**inputs)
        learner = token_pass(loaded.model, **inputs, **OPTIONS, reference=reference, kl=True)
        assert learner.kl_BT.count_nonzero() == 0
        assert torch.equal(learner.logp_BT, reference.logp_BT)
        recorded_T = torch.tensor(rollout.logps)
        gaps.append((learner.logp_BT[0].detach() - recorded_T).abs().max())
        in_float32 = token_pass(with_float32_head.model, **inputs, **OPTIONS)
        gaps_of_float32_head.append((in_float32.logp_BT[0].detach() - recorded_T).abs().max())
    assert float(max(gaps)) < 1e-5
    assert float(max(gaps_of_float32_head)) > 1e-4, "the rounding of the head is seen"


@pytest.mark.parametrize("loop", ["auto", "library"])
def test_a_sampler_computes_the_head_outside_autocast(loop, monkeypatch):
    draw = Draws.draw
    scores = []

    def recording_draw(self, scores_BV, *rest):
        scores.append(scores_BV)
        return draw(self, scores_BV, *rest)

    monkeypatch.setattr(Draws, "draw", recording_draw)
    loaded = load_model(ModelConfig(options={"preset": "tiny"}))
    with torch.autocast(**AUTOCAST):
        sampler = build_hf(RolloutConfig(options={"loop": loop}), loaded=loaded)
        sampler.generate([PROMPT], group_size=2, sampling=Sampling(temperature=1.0, max_new_tokens=4), seed=0)
    assert scores
    for scores_BV in scores:
        assert scores_BV.dtype == torch.float32
        assert not torch.equal(scores_BV, scores_BV.bfloat16().float()), "they were rounded to bfloat16"
    logits = loaded.causal.lm_head(torch.zeros(1, 2, loaded.model.config.hidden_size))
    assert logits.shape[:2] == (1, 2), "the head is as before"


# --- precision of weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_weights_are_trained_in_float32_only(dtype):
    with pytest.raises(UserError, match=r"model\.dtype: got .*allowed: float32 where.*train\.precision=bf16") as error:
        check_training(load_config(TINY, [f"model.dtype={dtype}"]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_adapter_of_a_narrow_model_may_be_trained(dtype):
    check_training(load_config(TINY, [f"model.dtype={dtype}", "model.lora={rank: 2}"]))


def test_the_adapter_of_a_bf16_policy_is_float32():
    model = load_model(ModelConfig(options={"preset": "tiny"}, dtype="bfloat16", lora=LoraConfig(rank=2))).model
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.attention=varlen"], r"model\.attention: got 'varlen'.*train\.precision=bf16"),
        (["model.attention=varlen", "train.precision=bf16", "model.share_prompt=false"], r"model\.attention"),
        (
            ["train.shards=node"],
            r"train\.shards: got 'node'; allowed: all with train\.strategy single",
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


def test_how_a_run_is_sharded_is_no_part_of_its_hash():
    in_shards = load_config(TINY, ["train.strategy=fsdp", "train.shards=node"])
    assert config_hash(in_shards) == config_hash(load_config(TINY))


def test_the_dtype_of_the_head_is_part_of_the_hash():
    rounded = load_config(TINY, ["model.head_dtype=bfloat16"])
    assert config_hash(rounded) != config_hash(load_config(TINY))


# --- variables --------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_variables(monkeypatch):
    """Neither our variables nor torch's other name of one of them."""
    for name in (*cuda.VARIABLES, "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    # What the test has set by other means than monkeypatch.
    for name in cuda.VARIABLES:
        os.environ.pop(name, None)


def test_variables_that_are_not_set_are_set(without_variables):
    cuda.set_variables()
    assert {name: os.environ[name] for name in cuda.VARIABLES} == cuda.VARIABLES


def test_variables_of_the_user_stay(without_variables):
    """Torch reads PYTORCH_ALLOC_CONF too, under which the user has set the allocator."""
    without_variables.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    without_variables.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    cuda.set_variables()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_trainer_leaves_the_users_variable_and_fills_no_memory(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
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
    calls = 0
    with_cache = []
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "torch.autocast":
                continue
            calls += 1
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            is_off = options.get("enabled") == "False"
            has_no_cache = options.get("cache_enabled") == "False"
            if not is_off and not has_no_cache:
                with_cache.append(f"{file.name}:{node.lineno}")
    assert calls >= 5
    assert with_cache == []


def test_the_autocast_of_the_trainer_has_no_cache():
    config = load_config(TINY, ["train.precision=bf16", "train.deterministic=false"])
    with make_trainer(config, []).precision_plugin.forward_context():
        assert not torch.is_autocast_cache_enabled()


def learned(model):
    """Log-probs and gradients after a pass without gradient, and the dtypes of weights that modules compute with."""
    dtypes = {}
    hooks = []

    def recorder_of(name):
        def record_dtype(module, *_):
            for parameter in module.parameters(recurse=False):
                dtypes[name] = str(parameter.dtype)

        return record_dtype

    for name, module in decoder_layers(model)[0].named_modules():
        hooks.append(module.register_forward_pre_hook(recorder_of(name)))
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
    """Autocast rounds the same weights: one process, float32 and bf16 gathers have the same log-probs and gradients."""
    alone = learned(load_model(config_of(kind)).model)
    for results in spawn(learned_in_shards, tmp_path, kind):
        for name, result in results.items():
            assert result["logp"] == alone["logp"], name
            assert result["gradients"] == alone["gradients"], name

        dtypes_in_bf16 = results["bf16"]["dtypes"]
        assert len(dtypes_in_bf16) >= 9
        for module, dtype in dtypes_in_bf16.items():
            if "norm" in module:
                assert dtype == "torch.float32", module
            else:
                assert dtype == "torch.bfloat16", module
        assert set(results["float32"]["dtypes"].values()) == {"torch.float32"}
        assert results["float32"]["mesh"] == [2]
        assert results["a copy on each node"]["mesh"] == [2, 1]


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
    engine = SleepingEngine()
    sampler._engine = engine
    sampler._sleeps = True
    sampler._dtype = "bfloat16"
    sampler._loaded = load_model(ModelConfig(options={"preset": "tiny"}))
    sampler._options = SimpleNamespace(probe=False)
    sampler.update_weights(3)
    assert engine.calls == []
    assert sampler.version == 3
    with sampler._awake():
        engine.calls.append("generate")
    assert engine.calls == [
        "wake weights",
        "reload_weights",
        "wake kv_cache",
        "compute_weight_checksums",
        "generate",
        "sleep 2",
    ]
