"""Real vLLM servers on the pocket policy: weights over gloo, tokens stamped by the server, death and the like."""

import copy
import itertools
import os
import signal
import threading
import time

import httpx2 as httpx
import pytest
import torch

from commands import FORKS
from kl_comedy.config.schema import RolloutConfig, TeacherConfig
from kl_comedy.errors import UserError
from kl_comedy.models.head import log_softmax
from kl_comedy.models.reference import Reference
from kl_comedy.models.types import PassOptions
from kl_comedy.models.weights import full_weights
from kl_comedy.processes import _group_exists
from kl_comedy.rollouts import Sampling, build_hf, build_vllm_server
from kl_comedy.rollouts.engines import transports
from kl_comedy.rollouts.engines.client import Client
from kl_comedy.rollouts.engines.teacher import TeacherServer
from small_policies import PROMPTS, largest_gap, perturb, pocket, versions_of

TOLERANCE = 5e-5
"""Nats, float32; as in process."""


def build(policy, **options):
    config = RolloutConfig(backend="vllm_server", batch_sequences=16, temperature=0.7, options=options)
    return build_vllm_server(config, loaded=policy)


def draw(backend, prompts=PROMPTS, *, group_size=3, seed=0, **changes):
    settings = {"temperature": 1.0, "max_new_tokens": 20} | changes
    return backend.generate(prompts, group_size=group_size, sampling=Sampling(**settings), seed=seed)


def content(rollouts):
    """What is drawn, without log-probs and versions."""
    return [(rollout.group_id, rollout.completion_ids, rollout.stop_reason, rollout.text) for rollout in rollouts]


@pytest.fixture(scope="module")
def policy():
    return pocket()


@pytest.fixture(scope="module")
def servers(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    backend = build(policy)
    backend.work_in(folder)
    yield backend
    groups = [process.pid for process in backend.processes()]
    backend.close()
    assert sorted(path.name for path in (folder / "sampler").iterdir()) == ["server-0.log"]
    for group in groups:
        assert not _group_exists(group)


@pytest.fixture
def moved(policy, servers):
    original = copy.deepcopy(policy.model.state_dict())
    perturb(policy.model)
    yield policy
    policy.model.load_state_dict(original)
    servers.update_weights(0)


def test_log_probs_are_the_learners_before_and_after_an_update(servers, moved):
    servers.update_weights(3)
    for temperature in (1.0, 0.7):
        rollouts = draw(servers, temperature=temperature)
        assert largest_gap(moved, rollouts, temperature) < TOLERANCE
        assert versions_of(rollouts) == {3}
    perturb(moved.model, seed=1)
    assert largest_gap(moved, draw(servers)) > 0.05
    servers.update_weights(4)
    assert largest_gap(moved, draw(servers)) < TOLERANCE


@pytest.mark.parametrize("changes", [{}, {"stop": (";4", "+")}, {"max_new_tokens": 3}])
def test_greedy_rollouts_are_those_of_the_hf_backend(policy, servers, changes):
    expected = draw(build_hf(RolloutConfig(), loaded=policy), temperature=0.0, **changes)
    assert content(draw(servers, temperature=0.0, **changes)) == content(expected)


def test_seeds_decide(servers):
    first = draw(servers, seed=5)
    assert content(draw(servers, seed=5)) == content(first)
    assert content(draw(servers, seed=6)) != content(first)


def test_a_teacher_gives_the_log_probs_of_its_likeliest_tokens(servers, policy, monkeypatch):
    servers.update_weights(0)
    monkeypatch.setenv("TEACHER_KEY", servers._key)
    settings = TeacherConfig(url=servers._servers[0].client.url, api_key_env="TEACHER_KEY")
    # The completions are all three columns; their token 2 counts as padding.
    ids = torch.tensor([[3, 4, 5], [6, 7, 2]])
    batch = {"prompt_ids_BP": ids[:, :2], "prompt_mask_BP": ids[:, :2] > 0, "ids_BT": ids, "mask_BT": ids > 2}
    served = TeacherServer(settings, policy, 4).forward_pass(**batch)
    whole = Reference(policy.model, PassOptions(temperature=1.0, chunk_elements=10**6)).forward_pass(**batch)
    torch.testing.assert_close(served.logp_BT, whole.logp_BT, atol=TOLERANCE, rtol=TOLERANCE)
    ids_NK, logp_NK = served.top
    logq_NV = log_softmax(whole.hidden_NH, *whole.head, 1.0)
    torch.testing.assert_close(logp_NK, logq_NV.topk(4).values, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(logp_NK, logq_NV.gather(1, ids_NK), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.fixture
def url(servers):
    """The address of the server, which is started by the first draw."""
    if not servers.processes():
        draw(servers)
    return servers._servers[0].client.url


@pytest.fixture
def key_file(servers, tmp_path):
    file = tmp_path / "key"
    file.write_text(servers._key)
    return file


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("POST", "/collective_rpc"),
        ("POST", "/pause"),
        ("GET", "/weight_info"),
        ("GET", "/health"),
    ],
)
def test_every_route_wants_the_key(url, method, path):
    assert httpx.request(method, url + path).status_code == 401


def test_a_run_without_the_key_of_a_server_is_refused(url, policy, key_file):
    with pytest.raises(UserError, match="it refuses an empty API key: there is none in the environment variable SOME"):
        build(policy, urls=[url], api_key_env="SOME")
    key_file.write_text("wrong")
    with pytest.raises(UserError, match=r"it refuses the API key in .*key"):
        build(policy, urls=[url], api_key_file=str(key_file))


@pytest.fixture
def foreign_label(servers, url):
    """The server's label is vLLM's own, as that of one which has its own weights; afterwards it is ours again."""
    servers._servers[0].client.call("/update_weight_version", new_version="default")
    yield
    servers.update_weights(0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"num_hidden_layers": 1}, "log-probs of the probe differ"), ({"vocab_size": 128}, "refuses")],
    ids=["fewer layers", "another vocabulary"],
)
def test_a_server_of_another_model_is_refused(url, key_file, foreign_label, changes, reason):
    with pytest.raises(UserError, match=f"a server of the model that is trained .*{reason}"):
        build(pocket(**changes), urls=[url], api_key_file=str(key_file))


def test_the_run_can_be_pointed_at_a_server(servers, url, key_file, foreign_label, policy, tmp_path):
    (process,) = servers.processes()
    weights_dir = str(tmp_path / "weights")
    second = build(policy, urls=[url], api_key_file=str(key_file), transport="gloo", weights_dir=weights_dir)
    assert largest_gap(policy, draw(second)) < TOLERANCE
    second.close()
    assert process.alive, "a server that is not ours is left alone"
    with pytest.raises(UserError, match="another run updates it; give each run its own servers"):
        draw(servers)
    servers.update_weights(0)
    assert largest_gap(policy, draw(servers)) < TOLERANCE


def test_weights_change_in_flight_and_every_token_says_which(servers, moved):
    """Updates while batches are drawn: completions begun under old weights go on, exactly, under the new ones."""
    servers.update_weights(100)
    rollouts = []
    enough = threading.Event()

    def sample():
        settings = {"group_size": 4, "temperature": 2.0, "max_new_tokens": 60}
        while not enough.is_set():
            rollouts.extend(draw(servers, PROMPTS * 4, seed=len(rollouts), **settings))

    def begun_before(version):
        """The completions whose last tokens this version drew, and whose first an earlier one."""
        ended_by_it = [rollout for rollout in rollouts if rollout.versions[-1] == version]
        return [rollout for rollout in ended_by_it if rollout.versions[0] != version]

    thread = threading.Thread(target=sample)
    thread.start()
    deadline = time.monotonic() + 120
    version = 100
    mixed = []
    # An update may fall between two batches: another one is made until one has met completions in flight.
    while not mixed and time.monotonic() < deadline:
        time.sleep(1.0)
        version += 1
        perturb(moved.model, seed=version, size=0.02)
        servers.update_weights(version)
        time.sleep(2.0)
        mixed = begun_before(version)
    enough.set()
    thread.join()
    assert mixed, "no update met a completion in flight"
    for rollout in rollouts:
        assert list(rollout.versions) == sorted(rollout.versions)
    for rollout in mixed[:8]:
        first = rollout.versions.index(version)
        assert largest_gap(moved, [rollout], 2.0, start=first) < TOLERANCE
        assert largest_gap(moved, [rollout], 2.0) > TOLERANCE, "its first tokens are those of other weights"


def test_a_server_killed_in_the_middle_of_a_batch_is_replaced_and_no_prompt_is_lost(servers, moved, caplog):
    """Killed when three of sixty prompts are answered."""
    servers.update_weights(7)
    (before,) = servers.processes()
    client = servers._servers[0].client
    answers = itertools.count(1)

    def generate_and_kill(requests, original=client.generate):
        answer = original(requests)
        if next(answers) == 3:
            os.killpg(before.pid, signal.SIGKILL)
        return answer

    client.generate = generate_and_kill
    sixty_prompts = PROMPTS * 15
    rollouts = draw(servers, sixty_prompts, group_size=8)
    (after,) = servers.processes()
    assert after.pid != before.pid
    assert [rollout.group_id for rollout in rollouts] == [number // 8 for number in range(480)]
    assert versions_of(rollouts) == {7}
    assert largest_gap(moved, rollouts[::16]) < TOLERANCE
    assert "restarting it" in caplog.text


def lose_the_trainer_in_a_transfer(url, key, folder):
    """Send five weights, then die without a word."""
    client = Client(url, key=key, timeout_s=60)
    transport = transports.SocketTransport()
    policy = pocket()
    staged = transports.stage(transport, policy, full_weights(policy.model), folder, 8, None, {})
    memory_of = transports.memory_of
    weights = itertools.count(1)

    def die_after_five(tensor):
        if next(weights) > 5:
            os._exit(9)
        return memory_of(tensor)

    transports.memory_of = die_after_five
    client.take_weights(staged, transport)


def test_a_trainer_lost_in_the_middle_of_a_transfer_leaves_a_server_that_takes_the_next_one(servers, moved, tmp_path):
    servers.update_weights(8)
    (process,) = servers.processes()
    client = servers._servers[0].client
    lost = FORKS.Process(target=lose_the_trainer_in_a_transfer, args=(client.url, servers._key, tmp_path / "weights"))
    lost.start()
    lost.join()
    assert lost.exitcode == 9
    servers.update_weights(9)
    client.call("/start_weight_update")  # and no more
    servers.update_weights(10)
    rows = draw(servers)
    assert largest_gap(moved, rows) < TOLERANCE
    assert versions_of(rows) == {10}
    assert servers.processes() == [process], "it was not restarted"


def test_a_server_that_refuses_a_transport_answers_again(servers, moved, key_file, tmp_path):
    servers.update_weights(11)
    client = servers._servers[0].client
    by_folder = {"transport": "folder", "weights_dir": str(tmp_path / "weights")}
    for _ in range(5):
        second = build(moved, urls=[client.url], api_key_file=str(key_file), **by_folder)
        with pytest.raises(UserError, match=r"urls: got .*which take its weights by folder"):
            draw(second)
        second.close()
        assert client.get("/is_paused") == {"is_paused": False}
    servers.update_weights(12)
    assert largest_gap(moved, draw(servers)) < TOLERANCE
