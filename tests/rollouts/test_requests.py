"""Every request to an inference server, whole: method, path, parameters and body; and its answer, read in any order."""

import pytest
import torch

from engine_policies import PROMPT
from faulty_servers import draw, move
from kl_comedy.records import Problem, Prompt
from kl_comedy.rollouts.engines.client import GENERATE, Completion, EngineOutput, prompt_seed

OTHER = Prompt(problem=Problem(id="2", text="9-", answer="9"), text="9-", token_ids=(11, 13))
SETTINGS = {"temperature": 0.9, "top_p": 0.8, "top_k": 5, "min_p": 0.01, "max_new_tokens": 7}
FIELDS = {"temperature": 0.9, "top_p": 0.8, "top_k": 5, "min_p": 0.01, "max_tokens": 7, "logprobs": 0}
END = {"stop_token_ids": [1], "ignore_eos": True}
PROBE_FIELDS = {"n": 4, "temperature": 1.3, "max_tokens": 1, "seed": 0, "logprobs": 0, "prompt_logprobs": 0}
PROBE_FIELDS |= {"ignore_eos": True, "detokenize": False}
PROBE_IDS = [1, 0, *range(15, 5, -1)]

pytestmark = pytest.mark.usefixtures("short_polls")


def probe():
    return ("POST", GENERATE, {}, {"token_ids": PROBE_IDS, "sampling_params": PROBE_FIELDS})


def around(transfer, label, version):
    """An update of vLLM's weights by ``transfer``: its requests, and those before and after them."""
    return [
        # keep: requests in progress stop where they are and continue with the new weights.
        ("POST", "/pause", {"mode": "keep"}, None),
        ("POST", "/update_weight_version", {}, {"new_version": f"{label}/-1"}),
        *transfer,
        # Without the parameter vLLM keeps the cache while requests are in progress: keys of the older weights.
        ("POST", "/reset_prefix_cache", {"reset_running_requests": "true"}, None),
        ("POST", "/update_weight_version", {}, {"new_version": f"{label}/{version}"}),
        ("POST", "/resume", {}, {}),
        ("POST", "/weight_checker", {}, {"action": "checksum"}),
        probe(),
    ]


def test_a_connection_and_an_update_from_a_folder(serve, connect, policy, tmp_path):
    server = serve()
    backend = connect(server, backend="vllm_server")
    draw(backend, [PROMPT])
    label = f"kl_comedy/{backend._run}"

    def reload(version):
        folder = f"{tmp_path}/sampler/weights-{version:08d}"
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        return [("POST", "/collective_rpc", {}, body)]

    questions = [("GET", path, {}, None) for path in ("/v1/models", "/version", "/weight_info")]
    health = ("GET", "/health", {}, None)
    connected = [*questions, probe(), health, *around(reload(0), label, 0)]
    assert server.requests[: len(connected)] == connected
    assert [request[1] for request in server.requests[len(connected) :]] == [GENERATE]

    server.requests.clear()
    move(policy.model)
    backend.update_weights(1)
    update = around(reload(1), label, 1)
    assert server.requests[-len(update) :] == update


def test_an_update_from_memory(serve, connect, policy):
    server = serve()
    backend = connect(server, backend="vllm_server", transport="gloo")
    draw(backend, [PROMPT])
    server.requests.clear()
    move(policy.model)
    backend.update_weights(1)
    begin = next(number for number, request in enumerate(server.requests) if request[1] == "/pause")
    requests = server.requests[begin:]
    address = requests[3][3]["init_info"]
    assert address.keys() == {"host", "port", "secret", "timeout_s"}
    assert len(address["secret"]) >= 32
    weights = dict(policy.model.named_parameters())
    names = list(requests[5][3]["update_info"]["names"])
    info = {
        "names": names,
        "dtype_names": ["float32"] * len(names),
        "shapes": [list(weights[name].shape) for name in names],
        "aliases": {"lm_head.weight": "model.embed_tokens.weight"},
    }
    assert sorted(names) == sorted(weights), "tied weights once"
    transfer = [
        ("GET", "/get_world_size", {}, None),
        ("POST", "/init_weight_transfer_engine", {}, {"init_info": address}),
        ("POST", "/start_weight_update", {}, {}),
        ("POST", "/update_weights", {}, {"update_info": info}),
        ("POST", "/finish_weight_update", {}, {}),
    ]
    assert requests == around(transfer, f"kl_comedy/{backend._run}", 1)


STOPS = {"stop": ["8", "+1"], "include_stop_str_in_output": True, "skip_special_tokens": False, "detokenize": True}


@pytest.mark.parametrize("stop", [(), ("8", "+1")])
def test_a_batch_asked_of_vllm(serve, connect, stop):
    server = serve()
    backend = connect(server, backend="vllm_server")
    draw(backend, [PROMPT])
    server.requests.clear()
    draw(backend, [PROMPT, OTHER], group_size=3, seed=5, stop=stop, **SETTINGS)
    expected = []
    for position, prompt in enumerate([PROMPT, OTHER]):
        fields = {"n": 3, "seed": prompt_seed(5, position), **FIELDS, **END, "detokenize": False}
        if stop:
            fields |= STOPS
        expected.append(("POST", GENERATE, {}, {"token_ids": list(prompt.token_ids), "sampling_params": fields}))
    asked = [request for request in server.requests if request[1] == GENERATE]
    # The two are asked at the same time.
    assert sorted(asked, key=lambda request: request[3]["token_ids"], reverse=False) == expected


def test_a_greedy_group_is_asked_for_once(serve, connect):
    server = serve()
    backend = connect(server, backend="vllm_server")
    draw(backend, [PROMPT])
    server.requests.clear()
    rows = draw(backend, [PROMPT], group_size=3, temperature=0.0)
    (asked,) = [request for request in server.requests if request[1] == GENERATE]
    assert asked[3]["sampling_params"]["n"] == 1
    assert asked[3]["sampling_params"]["temperature"] == 0.0
    assert len(rows) == 3
    assert len({row.completion_ids for row in rows}) == 1


def test_a_batch_asked_of_our_server(serve, connect):
    """All groups in one request, each after the random numbers of those before it."""
    server = serve()
    backend = connect(server)
    draw(backend, [PROMPT])
    server.requests.clear()
    draw(backend, [PROMPT, OTHER], group_size=2, seed=5, stop=("8", "+1"), **SETTINGS)
    groups = []
    # The shorter prompt first, as it is drawn.
    for prompt, first_row in ((OTHER, 2), (PROMPT, 0)):
        fields = {"n": 2, "seed": 5, "first_row": first_row, **FIELDS, **END, **STOPS}
        groups.append({"token_ids": list(prompt.token_ids), "sampling_params": fields, "autocast": None})
    asked = [request for request in server.requests if request[1] == GENERATE]
    assert asked == [("POST", GENERATE, {}, {"groups": groups})]


def test_our_server_ends_where_it_is_asked_to_and_draws_no_further(serve):
    """The client would cut what is too long; each token of it would have cost a pass."""
    server = serve()
    fields = {"n": 50, "seed": 3, "first_row": 0, **FIELDS, **STOPS, "stop_token_ids": [2], "temperature": 2.0}
    fields |= {"top_p": 1.0, "top_k": 0, "max_tokens": 12, "records_kept": False}
    group = {"token_ids": list(PROMPT.token_ids), "sampling_params": fields, "autocast": None}
    (answer,) = server.engine.generate([group])
    tokenizer = server.engine.loaded.tokenizer
    early = 0
    for choice in answer["choices"]:
        *before, last = choice["token_ids"]
        text = tokenizer.decode(before, skip_special_tokens=False)
        assert 2 not in before
        assert "8" not in text
        assert "+1" not in text
        whole = tokenizer.decode([*before, last], skip_special_tokens=False)
        assert last == 2 or "8" in whole or "+1" in whole or len(before) == 11
        early += len(before) < 11
    assert early > 20


# --- what is made of an answer ---------------------------------------------------------------------------------------


def test_completions_keep_their_place_in_whatever_order_a_server_lists_them(serve, connect, monkeypatch):
    server = serve()
    backend = connect(server, backend="vllm_server")
    expected = draw(backend)
    generate = server.engine.generate

    def shuffled(groups):
        answers = generate(groups)
        return [{"choices": answer["choices"][1:] + answer["choices"][:1]} for answer in answers]

    monkeypatch.setattr(server.engine, "generate", shuffled)
    assert draw(backend) == expected


def test_what_is_cut_off_takes_its_log_probs_versions_and_kept_sets_along(policy):
    output = EngineOutput(policy)
    row = Completion(ids=[5, 6, 1, 7, 8], logps=[-0.1, -0.2, -0.3, -0.4, -0.5], versions=[3, 4, 5, 6, 7])
    row.kept = [torch.tensor(kept) for kept in ([4, 5], [6], [1, 3, 9], [7], [2, 8])]
    (rollout,) = output.rollouts(PROMPT, 2, [row], group_size=1, stop=())
    assert rollout.completion_ids == (5, 6, 1)
    assert rollout.logps == (-0.1, -0.2, -0.3)
    assert rollout.versions == (3, 4, 5)
    assert rollout.kept.sizes_N.tolist() == [2, 1, 3]
    assert rollout.kept.ids_M.tolist() == [4, 5, 6, 1, 3, 9]
    assert rollout.stop_reason == "eos"
    assert rollout.group_id == 2


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_a_probe_draws_at_its_temperature_and_reads_log_probs_at_one(serve, temperature):
    """The trainer compares these numbers with its own: of the prompt untempered, of the draws tempered."""
    import math

    server = serve()
    model = server.engine.loaded.model
    ids = list(PROMPT.token_ids)
    answer = server.engine.probe(ids, PROBE_FIELDS | {"temperature": temperature, "n": 50})
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()

    def log_prob(position, token, at):
        scaled = (logits[position] / at).tolist()
        return scaled[token] - math.log(sum(map(math.exp, scaled)))

    for position, token in enumerate(ids[1:]):
        read = answer["prompt_logprobs"][position + 1][str(token)]["logprob"]
        assert read == pytest.approx(log_prob(position, token, 1.0), abs=1e-5)
    assert len(answer["choices"]) == 50
    for choice in answer["choices"]:
        (token,) = choice["token_ids"]
        read = choice["logprobs"]["content"][0]["logprob"]
        assert read == pytest.approx(log_prob(-1, token, temperature), abs=1e-5)
