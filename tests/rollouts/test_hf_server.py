"""Our inference server: the draws of the ``hf`` backend, weights between tokens, and servers that die or hang."""

import http.client
import json
import os
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine_policies import PROMPT, llama, loaded
from faulty_servers import KEY, draw, move
from forked_servers import ForkedServer
from kl_comedy.config.schema import LoraConfig, RolloutConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import load_model
from kl_comedy.models.lora import add_lora
from kl_comedy.models.sharding import load_sharded
from kl_comedy.processes import LOOPBACK, ChildProcess, _group_exists
from kl_comedy.records import Problem, Prompt
from kl_comedy.rollouts import build_hf, build_hf_server
from kl_comedy.rollouts.engines import hf_server, transports
from kl_comedy.rollouts.engines import servers as servers_module
from kl_comedy.rollouts.engines.client import GENERATE
from ranks import spawn
from sharded_models import config_of, save_tied
from small_policies import versions_of

OTHER = Prompt(problem=Problem(id="2", text="9-", answer="9"), text="9-", token_ids=(11, 13))
PROMPTS = [PROMPT, OTHER, PROMPT] * 4

pytestmark = pytest.mark.usefixtures("short_polls")


def hf(policy, **config):
    return build_hf(RolloutConfig(batch_sequences=8, **config), loaded=policy)


@pytest.mark.parametrize(
    "settings",
    [{"group_size": 4, "stop": ("8", "+1"), "top_k": 9}, {"group_size": 1, "temperature": 0.0}],
    ids=["sampled", "greedy"],
)
@pytest.mark.parametrize("loop", ["auto", "library"])
def test_the_completions_are_those_of_the_hf_backend_to_the_last_bit(policy, serve, connect, settings, loop):
    backend = connect(serve(use_library=loop == "library"))
    in_process = hf(policy, options={"loop": loop})
    assert draw(backend, PROMPTS, **settings) == draw(in_process, PROMPTS, **settings)
    move(policy.model)
    backend.update_weights(7)
    in_process.update_weights(7)
    assert draw(backend, PROMPTS, **settings) == draw(in_process, PROMPTS, **settings)
    move(policy.model)
    backend.update_weights(7)
    in_process.update_weights(7)
    # As the trainer does with ``train.precision: bf16``.
    with torch.autocast("cpu", torch.bfloat16):
        in_bfloat16 = draw(backend, PROMPTS, **settings)
        assert in_bfloat16 == draw(in_process, PROMPTS, **settings)
    assert in_bfloat16 != draw(backend, PROMPTS, **settings), "the trainer's autocast reaches the server"


@pytest.mark.parametrize("settings", [{"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.5, "stop": ("8", "+1")}])
def test_the_sets_that_a_truncation_kept_are_those_of_the_hf_backend(policy, serve, connect, settings):
    """With new weights too, and where a completion is cut at its end."""
    backend = connect(serve())
    in_process = hf(policy)
    for version in (1, 2):
        move(policy.model)
        backend.update_weights(version)
        in_process.update_weights(version)
        # Groups of 4, so that the batches of 8 rows are the same ones.
        rows = draw(backend, PROMPTS, group_size=4, records_kept=True, **settings)
        in_process_rows = draw(in_process, PROMPTS, group_size=4, records_kept=True, **settings)
        for row, expected in zip(rows, in_process_rows, strict=True):
            assert row == expected
            assert row.kept.sizes_N.tolist() == expected.kept.sizes_N.tolist()
            assert row.kept.ids_M.tolist() == expected.kept.ids_M.tolist()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda choice: choice.pop("kept"), "does not say which tokens its truncation kept"),
        (lambda choice: choice["kept"].pop(), r"group \d+ is not usable; truncated sampling: \d+ kept sets for \d+"),
        (lambda choice: choice["kept"][0].clear(), "the kept set of token 0 has 0 ids, and not"),
    ],
    ids=["no sets", "one too few", "without the sampled token"],
)
def test_a_server_without_the_right_sets_ends_the_run(serve, connect, monkeypatch, change, reason):
    """A learner without the sets would not renormalize, and nothing would say so."""
    server = serve()
    backend = connect(server)
    right_choice = server.engine.choice

    def wrong_choice(index, completion):
        choice = right_choice(index, completion)
        if completion.kept:
            change(choice)
        return choice

    monkeypatch.setattr(server.engine, "choice", wrong_choice)
    with pytest.raises(RunFailed, match=reason):
        draw(backend, PROMPTS, top_k=3, records_kept=True)
    assert draw(backend, PROMPTS, top_k=3), "sets that were not asked for are not missed"


def test_two_servers_share_a_batch(policy, serve, connect):
    backend = connect(serve(), serve(), batch_sequences=64)
    for row, expected in zip(draw(backend, PROMPTS), draw(hf(policy), PROMPTS), strict=True):
        assert row.completion_ids == expected.completion_ids
        assert row.logps == pytest.approx(expected.logps, abs=1e-5)


def test_an_adapter_arrives_merged(serve, connect, policy):
    # LoadedModel is frozen.
    object.__setattr__(policy, "model", add_lora(policy.model, LoraConfig(rank=2, target_modules=["q_proj"])))
    backend = connect(serve(loaded(llama(tied=True))))
    draw(backend)
    move(policy.model, size=1.0)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.add_(torch.randn_like(weight))
    backend.update_weights(1)
    first_logps = [row.logps[0] for row in draw(backend)]
    expected_logps = [row.logps[0] for row in draw(hf(policy))]
    assert first_logps == pytest.approx(expected_logps, abs=1e-4)


def test_weights_change_between_tokens_and_every_token_says_which(policy, serve, connect):
    """The batch waits at two of its passes until an update has ended, so that no speed decides what a token has."""
    server = serve()
    backend = connect(server, request_timeout_s=ENOUGH_S)
    draw(backend, max_new_tokens=2)
    version_of_pass = {4: 1, 9: 2}
    passes = 0
    between_tokens = server.engine._between_tokens

    def update(version):
        move(policy.model)
        backend.publish(version)
        assert backend.version == version - 1, "an engine has not confirmed it yet"
        assert backend.load() == version

    def update_at_some_passes():
        nonlocal passes
        version = version_of_pass.get(passes)
        passes += 1
        if version is not None:
            with ThreadPoolExecutor(1) as pool:
                updating = pool.submit(update, version)
                # The server answers an update in the thread of the batch, which is this one.
                while not updating.done():
                    between_tokens()
                    time.sleep(0.001)
                updating.result()
        between_tokens()

    server.engine._sampler.call_before_each_pass(update_at_some_passes)
    rows = draw(backend, [PROMPT] * 2, max_new_tokens=20)
    expected = [0] * 4 + [1] * 5 + [2] * 11
    for row in rows:
        assert list(row.versions) == expected[: len(row.versions)]
    assert versions_of(rows) == {0, 1, 2}


def test_a_publication_that_fails_walks_the_weights_to_the_end(policy, connect, serve, monkeypatch):
    """Where weights are in shards, each is gathered by all ranks: one that stops early leaves the others waiting."""
    walked = []

    def weights(model, dtype):
        for number in range(5):
            walked.append(number)
            yield f"w{number}", torch.zeros(1)

    def fail(transport, loaded, weights, *rest):
        next(weights)
        raise OSError("No space left on device")

    backend = connect(serve())
    monkeypatch.setattr(transports, "full_weights", weights)
    monkeypatch.setattr(servers_module, "stage", fail)
    with pytest.raises(OSError, match="No space left"):
        backend.publish(1)
    assert walked == [0, 1, 2, 3, 4]
    follower = build_hf_server(RolloutConfig(), loaded=policy, leader=False)
    follower.publish(1)
    assert walked == [0, 1, 2, 3, 4] * 2
    assert not follower.processes()


# --- strangers, and requests that are none ---------------------------------------------------------------------------

SAMPLING = {"temperature": 1.0, "max_tokens": 2, "seed": 0, "stop_token_ids": [1]}
REQUEST = {"token_ids": [3, 4], "sampling_params": SAMPLING}
WITH_KEY = (f"Authorization: Bearer {KEY}",)
JSON = "Content-Type: application/json"
ENOUGH_S = 60.0
"""A test that waits this long has failed: every answer here comes at once."""


def port_of(server):
    return int(server.url.rpartition(":")[2])


def head_of(method, path, *headers):
    """The bytes of a request up to its body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]
    return "\r\n".join(lines).encode()


def raw(server, *headers, body=b"", method="POST", path=GENERATE):
    """Status and body of the answer to a request of these words; None and what came where there is no answer.

    Reads until the server closes the connection.
    """
    with socket.create_connection((LOOPBACK, port_of(server)), timeout=ENOUGH_S) as connection:
        connection.sendall(head_of(method, path, *headers) + body)
        received = b""
        part = connection.recv(65536)
        while part:
            received += part
            part = connection.recv(65536)
    head, _, content = received.partition(b"\r\n\r\n")
    if not head:
        return None, received
    return int(head.split()[1]), content


@pytest.fixture
def no_traceback(capfd):
    """Fails where the server has printed a traceback."""
    yield
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 629145600",),
        ("Content-Length: 629145600", "Authorization: Bearer wrong"),
        ("Content-Length: 629145600", "Expect: 100-continue"),
        ("Transfer-Encoding: chunked",),
    ],
    ids=["no key", "wrong key", "waits before the body", "chunked"],
)
def test_a_stranger_is_refused_before_a_byte_of_the_body(serve, no_traceback, headers):
    """The body is never sent: a server that waited for it would not answer."""
    server = serve()
    assert raw(server, *headers)[0] == 401
    assert raw(server, *headers, method="GET", path="/health")[0] == 401


@pytest.mark.parametrize("length", ["-1", "two", "+2", "2_0", "\xb2", "100000000000000000000", "9" * 5000])
def test_a_length_that_is_none_is_refused(serve, no_traceback, length):
    assert raw(serve(), *WITH_KEY, f"Content-Length: {length}")[0] == 400


def test_two_lengths_are_refused(serve, no_traceback):
    assert raw(serve(), *WITH_KEY, "Content-Length: 2", "Content-Length: 600")[0] == 400


@pytest.mark.parametrize("size", [1000, 1001])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["with a length", "in chunks"])
def test_a_body_that_is_too_long_is_refused(serve, monkeypatch, no_traceback, size, is_chunked):
    monkeypatch.setattr(hf_server, "MAX_BODY_BYTES", 1000)
    content = b"{}" + b" " * (size - 2)
    headers = [*WITH_KEY, JSON, "Connection: close"]
    if is_chunked:
        headers.append("Transfer-Encoding: chunked")
        half = size // 2
        parts = [content[:half], content[half:], b""]
        content = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    else:
        headers.append(f"Content-Length: {size}")
    status, answer = raw(serve(), *headers, body=content, path="/weight_checker")
    assert status == (200 if size == 1000 else 413), answer


def test_a_body_is_asked_for_where_the_client_waits_for_that(serve):
    headers = (*WITH_KEY, JSON, "Content-Length: 2", "Expect: 100-continue", "Connection: close")
    status, rest = raw(serve(), *headers, body=b"{}", path="/weight_checker")
    assert status == 100
    assert rest.startswith(b"HTTP/1.1 200")


def send_bytes_slowly(connection, most):
    """Send a byte every 50 ms, ``most`` at most, until there is an answer: that, or ``closed``; None without one."""
    connection.settimeout(0.05)
    for _ in range(most):
        try:
            connection.sendall(b"x")
            return connection.recv(65536) or b"closed"
        except TimeoutError:
            continue
        except ConnectionError:
            return b"closed"
    return None


def test_a_client_that_sends_a_head_byte_by_byte_is_given_up(serve, monkeypatch, no_traceback):
    monkeypatch.setattr(hf_server, "REQUEST_SECONDS", 0.3)
    with socket.create_connection((LOOPBACK, port_of(serve())), timeout=ENOUGH_S) as connection:
        answer = send_bytes_slowly(connection, most=999)
    assert answer == b"closed"


def test_a_client_that_sends_a_body_byte_by_byte_is_given_up(serve, monkeypatch, no_traceback):
    monkeypatch.setattr(hf_server, "REQUEST_SECONDS", 0.3)
    with socket.create_connection((LOOPBACK, port_of(serve())), timeout=ENOUGH_S) as connection:
        connection.sendall(head_of("POST", GENERATE, *WITH_KEY, "Content-Length: 1000"))
        answer = send_bytes_slowly(connection, most=999)
    assert answer == b"closed"


def ask(server, body, path=GENERATE, method="POST"):
    """Status and text of the answer to a request with the key; ``body`` is JSON, or bytes as they are sent."""
    content = body
    if not isinstance(body, bytes):
        content = json.dumps(body).encode()
    connection = http.client.HTTPConnection(LOOPBACK, port_of(server), timeout=ENOUGH_S)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request(method, path, content, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def without(name, **changes):
    """A request without the sampling parameter ``name`` and with these others."""
    fields = SAMPLING | changes
    if name not in changes:
        fields.pop(name, None)
    return {"token_ids": [3], "sampling_params": fields}


WRONG_BODIES = [
    (GENERATE, b"{", "Expecting property name"),
    (GENERATE, b"\xff", "parsing the body"),
    (GENERATE, b"[" * 100_000, "parsing the body"),
    (GENERATE, b'{"token_ids": ' + b"1" * 5000 + b"}", "parsing the body"),
    (GENERATE, [], "body"),
    (GENERATE, 5, "body"),
    (GENERATE, {}, "token_ids"),
    (GENERATE, {"token_ids": [3]}, "sampling_params"),
    (GENERATE, {**REQUEST, "token_ids": "3"}, "token_ids"),
    (GENERATE, {**REQUEST, "token_ids": []}, "token_ids"),
    (GENERATE, {**REQUEST, "token_ids": [3, True]}, "token_ids.1"),
    (GENERATE, {**REQUEST, "token_ids": [3, 10**30]}, "token_ids.1"),
    (GENERATE, {**REQUEST, "token_ids": [3, 10**6]}, "out of vocabulary"),
    (GENERATE, {**REQUEST, "sampling_params": []}, "sampling_params"),
    (GENERATE, {**REQUEST, "autocast": "float8"}, "autocast"),
    (GENERATE, without("temperature"), "temperature"),
    (GENERATE, without("max_tokens"), "max_tokens"),
    (GENERATE, without("seed"), "seed"),
    (GENERATE, without("seed", seed=-1), "seed"),
    (GENERATE, without("seed", seed=2**64), "seed"),
    (GENERATE, without("", temperature=-1), "temperature"),
    (GENERATE, json.dumps(without("", temperature=float("nan"))).encode(), "temperature"),
    (GENERATE, without("", temperature=0, prompt_logprobs=0), "temperature"),
    (GENERATE, without("", top_p=0), "top_p"),
    (GENERATE, without("", top_p=None), "top_p"),
    (GENERATE, without("", top_k=-1), "top_k"),
    (GENERATE, without("", min_p=2), "min_p"),
    (GENERATE, without("", records_kept=1), "records_kept"),
    (GENERATE, without("", n=0), "sampling_params.n"),
    (GENERATE, without("", n=10**12), "n: got 1000000000000"),
    (GENERATE, without("", max_tokens=10**18), "max_tokens"),
    (GENERATE, without("", stop="x"), "stop"),
    (GENERATE, without("", stop_token_ids=["x"]), "stop_token_ids.0"),
    (GENERATE, without("", presence_penalty=1.0), "presence_penalty"),
    (GENERATE, {"groups": []}, "groups"),
    (GENERATE, {"groups": [REQUEST, without("", top_p=0.5)]}, "groups.1.sampling_params.top_p"),
    (GENERATE, {"groups": [REQUEST, without("", records_kept=True)]}, "groups.1.sampling_params.records_kept"),
    (GENERATE, {"groups": [REQUEST, {"token_ids": [3]}]}, "groups.1"),
    ("/collective_rpc", {"method": "reload_weights"}, "kwargs"),
    ("/collective_rpc", {"method": "reload_weights", "kwargs": {}}, "weights_path"),
    ("/collective_rpc", {"method": "exec", "kwargs": {"weights_path": "x"}}, "method"),
    ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}, "another model"),
    ("/init_weight_transfer_engine", {}, "init_info"),
    ("/init_weight_transfer_engine", {"init_info": {"host": "x"}}, "port"),
    ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": [], "shapes": [[1]]}}, "dtype_names"),
    ("/update_weight_version", {}, "new_version"),
    ("/weight_checker", {"action": "reset"}, "action"),
]


@pytest.mark.parametrize(("path", "body", "field"), WRONG_BODIES)
def test_a_body_that_a_route_does_not_take_names_its_field_and_leaves_no_traceback(
    serve, no_traceback, path, body, field
):
    status, text = ask(serve(), body, path)
    assert status == 400, text
    assert field in text
    assert len(text) < 2000, "the body is not repeated whole"


def test_a_route_that_does_not_exist_is_not_found(serve, no_traceback):
    assert ask(serve(), {}, "/nowhere")[0] == 404


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
def test_there_are_no_pages_about_the_routes(serve, path):
    assert ask(serve(), b"", path, "GET")[0] == 404


def test_a_form_of_a_web_page_is_no_body(serve, no_traceback):
    """A page of another site may send a form to loopback without asking, but not JSON."""
    headers = (*WITH_KEY, "Content-Type: text/plain", "Content-Length: 2", "Connection: close")
    assert raw(serve(), *headers, body=b"{}", path="/weight_checker")[0] == 400


def test_what_the_engine_raises_is_one_line_for_the_client_and_a_traceback_in_the_log(serve, capfd):
    server = serve()

    def fail(groups):
        raise RuntimeError("out of memory")

    server.engine.generate = fail
    status, text = ask(server, REQUEST)
    assert status == 500
    assert json.loads(text) == {"detail": "RuntimeError: out of memory"}
    assert ask(server, b"", "/health", "GET")[0] == 200


def test_a_pause_ends_however_many_requests_wait_for_that(serve):
    """Each waits without a thread: 40 is the size of the pool that FastAPI has for routes that take one."""
    server = serve()
    assert ask(server, {}, "/pause")[0] == 200
    with ThreadPoolExecutor(50) as pool:
        waiting = [pool.submit(ask, server, REQUEST) for _ in range(50)]
        while server.calls.count(GENERATE) < 50:
            time.sleep(0.01)
        assert not any(answer.done() for answer in waiting)
        assert ask(server, {}, "/resume")[0] == 200
        assert {answer.result()[0] for answer in waiting} == {200}


def test_a_request_needs_no_truncations(serve, no_traceback):
    """``top_p`` and the like have vLLM's defaults."""
    assert ask(serve(), REQUEST)[0] == 200


def test_a_client_that_is_gone_before_its_answer_leaves_no_traceback(serve, no_traceback):
    server = serve()
    client_is_gone = threading.Event()
    generate = server.engine.generate

    def generate_when_the_client_is_gone(groups):
        client_is_gone.wait(ENOUGH_S)
        return generate(groups)

    server.engine.generate = generate_when_the_client_is_gone
    content = json.dumps(REQUEST).encode()
    connection = socket.create_connection((LOOPBACK, port_of(server)), timeout=ENOUGH_S)
    connection.sendall(head_of("POST", GENERATE, *WITH_KEY, JSON, f"Content-Length: {len(content)}") + content)
    while not server.calls:
        time.sleep(0.01)
    # Without lingering, close() resets the connection: the server's answer raises an error.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    client_is_gone.set()
    assert ask(server, REQUEST)[0] == 200


def test_thirty_two_clients_at_once_lose_no_request(serve):
    server = serve()
    rounds = 10
    # All send at the same moment, ten times.
    together = threading.Barrier(32)

    def client(number):
        statuses = []
        for _ in range(rounds):
            together.wait(ENOUGH_S)
            statuses.append(ask(server, b"", "/health", "GET")[0])
        return statuses

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(client, range(32)))
    assert answers == [[200] * rounds] * 32


@pytest.mark.parametrize("key", ["", "k", "fifteen-letters"])
def test_a_server_is_not_started_with_a_short_key(key):
    with pytest.raises(UserError, match="KL_COMEDY_SERVER_KEY must hold a key of at least 16 characters") as raised:
        hf_server.serve({}, key)
    assert key not in str(raised.value).split(), "the key is not shown"


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start_two(tmp_path_factory):
    """Two servers in processes of their own, forked or started by their command, each pair once."""
    started = {}

    def start(process_class):
        if process_class in started:
            return started[process_class]
        servers_module.ChildProcess = process_class
        config = RolloutConfig(backend="hf_server", batch_sequences=6, temperature=1.3)
        config.options = {"servers": 2, "threads": 1, "request_timeout_s": 2}
        backend = build_hf_server(config, loaded=loaded(llama(tied=True)))
        started[process_class] = backend
        backend.work_in(tmp_path_factory.mktemp("run"))
        backend.update_weights(0)
        return backend

    yield start
    servers_module.ChildProcess = ChildProcess
    for backend in started.values():
        groups = [process.pid for process in backend.processes()]
        backend.close()
        assert sorted(path.name for path in backend._folder.iterdir()) == ["server-0.log", "server-1.log"]
        for group in groups:
            assert not _group_exists(group)


@pytest.mark.parametrize(
    ("process_class", "number"),
    [
        (ForkedServer, signal.SIGKILL),
        pytest.param(ForkedServer, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(ChildProcess, signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_server_that_dies_or_hangs_in_a_batch_costs_no_prompt_and_no_version(
    start_two, process_class, number, caplog
):
    servers = start_two(process_class)
    move(servers._loaded.model)
    version = servers.version + 1
    servers.update_weights(version)
    before = draw(servers, PROMPTS * 8)
    victim = servers.processes()[0].pid
    if process_class is ChildProcess:
        assert servers._key not in commands_of(victim), "others see the words of a command"
    # Soon enough to hit the batch, which takes longer than that.
    killer = threading.Timer(0.05, lambda: os.killpg(victim, number))
    killer.start()
    after = draw(servers, PROMPTS * 8)
    killer.join()
    assert [row.completion_ids for row in after] == [row.completion_ids for row in before]
    assert versions_of(after) == {version}
    servers.update_weights(version + 1)
    assert servers.processes()[0].pid != victim
    assert "restarting it" in caplog.text
    assert versions_of(draw(servers)) == {version + 1}


def commands_of(pid):
    """The commands of a process and of those that it started, in one text."""
    import psutil

    words = []
    process = psutil.Process(pid)
    for running in (process, *process.children(recursive=True)):
        words.extend(running.cmdline())
    return " ".join(words)


def update_from_shards(rank, world, folder, kind, transport):
    """What an engine draws after it took the weights of a sharded policy; None on the ranks without engines."""
    policy = load_sharded(config_of(kind, folder), limit_bytes=2**30)
    config = RolloutConfig(batch_sequences=8, temperature=1.3, options={"transport": transport})
    is_leader = rank == 0
    backend = build_hf_server(config, loaded=policy, leader=is_leader)
    if is_leader:
        backend.work_in(folder)
    move_evenly(policy.model)
    backend.update_weights(1)
    drawn = None
    if is_leader:
        (written,) = [path for path in (folder / "sampler").iterdir() if path.is_dir()]
        assert any(written.glob("*.safetensors")) == (transport == "folder")
        model_config = json.loads((written / "config.json").read_text())
        generation_config = json.loads((written / "generation_config.json").read_text())
        rows = draw(backend, [PROMPT] * 2)
        assert versions_of(rows) == {1}
        drawn = [
            model_config["architectures"],
            generation_config["eos_token_id"],
            [(row.completion_ids, row.logps) for row in rows],
        ]
    backend.close()
    return drawn


def move_evenly(model):
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.mul_(1.1).add_(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "transport"), [("tied lora", "gloo"), ("tied", "folder")])
def test_an_engine_takes_the_weights_of_a_policy_in_shards(tmp_path, kind, transport):
    save_tied(tmp_path)
    of_rank_0, of_rank_1 = spawn(update_from_shards, tmp_path, kind, transport)
    assert of_rank_1 is None
    architectures, ends, rows = of_rank_0
    whole = load_model(config_of(kind, tmp_path))
    move_evenly(whole.model)
    expected = draw(hf(whole), [PROMPT] * 2)
    assert architectures == ["LlamaForCausalLM"]
    assert ends == [1, 5]
    assert [tuple(ids) for ids, _ in rows] == [row.completion_ids for row in expected]
    for (_, logps), row in zip(rows, expected, strict=True):
        assert logps == pytest.approx(row.logps, abs=1e-4)
