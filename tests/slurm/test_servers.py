"""Servers beside a trainer: they publish their addresses, end with the trainer, and their failures are reported."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file

from fake_slurm import plan_sweep
from kl_comedy.config import load_config
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import load_model
from kl_comedy.models.weights import adapter_weights
from kl_comedy.records import Problem, Prompt
from kl_comedy.rollouts import Sampling, build_hf_server
from kl_comedy.rollouts.engines.jobs import check_job_servers, job_server
from kl_comedy.rollouts.engines.options import HFServerOptions, VLLMServerOptions, engine_options
from kl_comedy.rollouts.engines.servers import HFServers
from kl_comedy.rollouts.engines.transports import TRANSPORTS
from kl_comedy.rollouts.engines.vllm import VLLMServers
from kl_comedy.slurm import servers
from kl_comedy.slurm.servers import await_servers
from small_policies import versions_of

SERVER = """
import http.server, sys

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(sys.argv[2].encode())

    def log_message(self, *ignored):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job with two servers: ``folder``, where they meet the trainer, and functions that start a task of their step.

    ``start(index, code)`` starts Python code as a server, ``start_cell(index, sweep, cell)`` the server of a cell.
    """
    folder = tmp_path / "servers"
    folder.mkdir()
    monkeypatch.setenv("KL_COMEDY_SERVERS_DIR", str(folder))
    monkeypatch.setenv("KL_COMEDY_SERVERS_COUNT", "2")
    monkeypatch.setenv("KL_COMEDY_SERVER_URLS", "")
    tasks = []

    def start_task(index, wait, server):
        command = [sys.executable, "-m", "kl_comedy.slurm.servers", "--wait", str(wait), *server]
        task = subprocess.Popen(command, env=os.environ | {"SLURM_PROCID": str(index)})
        tasks.append(task)
        return task

    def start(index, code, *words, wait=60):
        return start_task(index, wait, ["--", sys.executable, "-c", code, "{port}", *words])

    def start_cell(index, sweep, cell, wait=60):
        return start_task(index, wait, ["--cell", sweep.path, cell])

    yield SimpleNamespace(folder=folder, start=start, start_cell=start_cell)
    (folder / "done").touch()
    for task in tasks:
        task.wait(timeout=30)


def answer(url):
    with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
        return reply.read().decode()


@pytest.mark.slow
def test_two_servers_answer_on_ports_of_their_own_until_the_trainer_is_done(job):
    tasks = [job.start(index, SERVER, "number {index}") for index in range(2)]
    urls = await_servers()
    assert [answer(url) for url in urls] == ["number 0", "number 1"]
    assert os.environ["KL_COMEDY_SERVER_URLS"] == ",".join(urls)
    assert len(set(urls)) == 2
    children = [psutil.Process(task.pid).children()[0] for task in tasks]

    # SLURM's warning goes to every process of the job.
    os.kill(tasks[0].pid, signal.SIGUSR1)
    os.kill(children[0].pid, signal.SIGUSR1)
    time.sleep(0.5)
    assert answer(urls[0]) == "number 0"
    # So does a preemption: the trainer, which saves now, still needs the server.
    os.kill(tasks[1].pid, signal.SIGTERM)
    os.kill(children[1].pid, signal.SIGTERM)
    time.sleep(0.5)
    assert answer(urls[1]) == "number 1"

    (job.folder / "done").touch()
    assert [task.wait(timeout=30) for task in tasks] == [0, 0]
    for url, child in zip(urls, children, strict=True):
        assert not child.is_running()
        with pytest.raises(OSError):
            answer(url)


def test_a_server_that_ends_fails_the_trainer_in_one_line(job):
    task = job.start(1, "raise SystemExit(3)")
    with pytest.raises(RunFailed, match=r"server 1 of this job ended with code 3: \(its log is empty\)"):
        await_servers()
    assert task.wait(timeout=30) == 3


@pytest.mark.slow
def test_a_server_that_never_answers_fails_the_trainer_in_one_line(job, monkeypatch):
    monkeypatch.setenv("KL_COMEDY_JOB_LOG", str(job.folder / "train-7_0.out"))
    log = job.folder / "train-7_0.server-0.log"
    code = "import time; print('CUDA error: out of memory', flush=True); time.sleep(600)"
    task = job.start(0, code, wait=3)
    message = rf"server 0 of this job did not answer /health within 3 s: CUDA error: out of memory \(log: {log}\)"
    with pytest.raises(RunFailed, match=message):
        await_servers()
    assert task.wait(timeout=30) == 1


def test_a_job_without_servers_waits_for_none(monkeypatch):
    monkeypatch.delenv("KL_COMEDY_SERVERS_DIR", raising=False)
    assert await_servers() == []


def test_a_step_of_servers_that_never_starts_or_never_reports_ends_the_wait(job, monkeypatch):
    folder = job.folder
    monkeypatch.setattr(servers, "STEP_START_S", 0.0)
    # No time for the step to start; then a little for its servers to answer.
    monkeypatch.setenv("KL_COMEDY_SERVERS_WAIT_S", "0.3")
    monkeypatch.setenv("KL_COMEDY_JOB_LOG", str(folder / "train-7_0.out"))
    (folder / "0.url").write_text("http://localhost:1")
    with pytest.raises(RunFailed, match=rf"server 1 of this job was not started .* is in {folder}/train-7_0.out"):
        await_servers()
    (folder / "train-7_0.server-1.log").write_text("loading weights\n")
    with pytest.raises(RunFailed, match=r"server 1 of this job did not answer within 0.3 s: loading weights \(log: "):
        await_servers()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")  # what an earlier start wrote is not the reason
    with pytest.raises(RunFailed, match=r"server 1 of this job was not started"):
        await_servers()
    (folder / "train-7_0.server-1.restart-2.log").write_text("reading tokens\n")
    with pytest.raises(RunFailed, match=r"server 1 of this job did not answer within 0.3 s: reading tokens"):
        await_servers()


@pytest.mark.slow
def test_a_server_whose_trainer_never_starts_gives_its_place_and_says_why(job, monkeypatch):
    """The trainer's step may wait for what the servers' step holds."""
    folder = job.folder
    monkeypatch.setattr(servers, "STEP_START_S", -60.0)  # the trainer is late as soon as the server answers
    monkeypatch.setenv("KL_COMEDY_JOB_LOG", str(folder / "train-7_0.out"))
    words = [sys.executable, "-c", SERVER]
    task = servers.ServerTask(folder=folder, index=0, host="127.0.0.1", ready="/health", wait_s=60.0)
    # serve() takes these signals for its process, which is that of the tests here.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        code = servers.serve(lambda port: ([*words, str(port), "a"], None), task)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert code == 1
    assert (folder / "0.url").exists()
    with pytest.raises(RunFailed, match=rf"server 0 .* the trainer did not start; .* {folder}/train-7_0.out"):
        await_servers()


@pytest.fixture
def torch_settings():
    """A server's task sets its process up; here that is undone."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


FOLDER = TRANSPORTS["folder"](torch.device("cpu"))
GLOO = TRANSPORTS["gloo"](torch.device("cpu"))
TINY_MODEL = ["model.options={preset: tiny}", "train.threads=1"]


def value_of(words, option):
    """The word after ``option``."""
    return words[words.index(option) + 1]


@pytest.mark.parametrize(("name", "transport"), [("auto", FOLDER), ("gloo", GLOO)])
def test_the_command_of_vllm_for_a_job_is_the_one_that_the_run_uses_itself(tmp_path, torch_settings, name, transport):
    """vLLM need not be installed, and the model is not loaded."""
    options = {"kv_cache_gib": 0.5, "max_model_len": 64, "transport": name}
    overrides = ["rollout.backend=vllm_server", f"rollout.options={json.dumps(options)}"]
    config = load_config(None, [*TINY_MODEL, *overrides])
    words, environment = job_server(config, tmp_path / "model", host="n7", port=81)
    servers = VLLMServers(config.rollout, engine_options(VLLMServerOptions, options), load_model(config.model))
    source = value_of(words, "--model")
    assert words == servers.command(source, 81, transport, "n7")
    assert os.path.exists(f"{source}/model.safetensors")
    assert environment == servers.environment()
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_command_for_a_job_is_the_one_that_the_run_uses_itself(tmp_path, torch_settings):
    config = load_config(None, [*TINY_MODEL, "lag.mode=async"])
    words, _ = job_server(config, tmp_path / "model", host="n7", port=81)
    servers = HFServers(config.rollout, engine_options(HFServerOptions, {"threads": 1}), load_model(config.model))
    expected = servers.command(tmp_path / "model", 81, FOLDER, "n7")
    assert words[:-1] == expected[:-1]
    # The last word has the settings. A job's server is deterministic because the trainer's config says so.
    expected_settings = json.loads(expected[-1]) | {"deterministic": True}
    assert json.loads(words[-1]) == expected_settings
    assert not list((tmp_path / "model").glob("*.safetensors")), "its weights come from the trainer"


ADAPTER = "model.lora={rank: 3, target_modules: [q_proj, up_proj]}"


def test_a_vllm_server_of_a_job_starts_with_an_adapter_that_changes_nothing(tmp_path, torch_settings):
    folder = tmp_path / "adapter"
    config = load_config(None, [*TINY_MODEL, ADAPTER, "rollout.backend=vllm_server"])
    words, _ = job_server(config, folder, host="n7", port=81)
    assert "--enable-lora" in words
    assert value_of(words, "--max-lora-rank") == "8", "the smallest that vLLM allows for a rank of 3"
    targets = words.index("--lora-target-modules") + 1
    assert words[targets : targets + 2] == ["q_proj", "up_proj"]
    assert json.loads(value_of(words, "--lora-modules"))["path"] == str(folder)
    assert os.path.exists(f"{value_of(words, '--model')}/model.safetensors"), "the base is model.source"

    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 3
    expected_shapes = {}
    for name, factor in adapter_weights(load_model(config.model).model):
        expected_shapes[f"base_model.model.{name}.weight"] = factor.shape
    factors = load_file(folder / "adapter_model.safetensors")
    assert {name: factor.shape for name, factor in factors.items()} == expected_shapes
    for name, factor in factors.items():
        assert not factor.any(), name


def test_a_job_with_an_adapter_may_name_its_transport():
    options = "rollout.options={transport: adapter}"
    check_job_servers(load_config(None, [*TINY_MODEL, ADAPTER, "rollout.backend=vllm_server", options]), 0)


def test_a_transformers_server_of_a_job_takes_merged_weights(tmp_path, torch_settings):
    config = load_config(None, [*TINY_MODEL, ADAPTER, "rollout.backend=hf_server"])
    words, _ = job_server(config, tmp_path / "hf", host="n7", port=81)
    assert "lora" not in " ".join(words)


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        (["rollout.backend=hf"], 0, r"rollout\.backend: got 'hf'; allowed: hf_server, vllm_server \(the profile has"),
        (
            ["rollout.backend=hf_server", "rollout.options={urls: ['http://a:1']}"],
            0,
            r"urls: got .* allowed: not given",
        ),
        (["rollout.backend=vllm_server"], 2, r"options\.tensor_parallel_size: got 1; allowed: 2"),
        (
            ["rollout.backend=vllm_server", "rollout.options={transport: ipc}"],
            0,
            r"options\.transport: got 'ipc'; allowed: auto, folder, gloo, nccl \(the job starts servers",
        ),
        (
            ["rollout.backend=vllm_server", "model.gguf_file=a.gguf", "model.source=m"],
            0,
            r"model\.gguf_file: got",
        ),
    ],
)
def test_a_config_that_cannot_use_the_jobs_servers_is_refused(overrides, gpus, message):
    with pytest.raises(UserError, match=message):
        check_job_servers(load_config(None, overrides), gpus)


def test_a_cell_that_uses_no_server_fails_in_one_line(tmp_path, job):
    sweep = plan_sweep(tmp_path, "seeds: 1\n")
    task = job.start_cell(0, sweep, "0")
    with pytest.raises(RunFailed, match=r"server 0 of this job cannot be started: rollout\.backend: got 'hf'"):
        await_servers()
    assert task.wait(timeout=30) == 2


@pytest.mark.slow
def test_a_cells_servers_come_from_its_config_and_are_started_again_when_killed(tmp_path, job, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "the key of this job")
    monkeypatch.setenv("KL_COMEDY_SERVER_KEY", "the key of this job")
    settings = "rollout.backend: hf_server, train.threads: 1, rollout.options: {request_timeout_s: 20}"
    sweep = plan_sweep(tmp_path, f"overrides: {{{settings}}}\nseeds: 1\n")
    tasks = [job.start_cell(index, sweep, "0", wait=120) for index in range(2)]
    await_servers()
    config = sweep.read_config(0)
    backend = build_hf_server(config.rollout, loaded=load_model(config.model))
    backend.work_in(tmp_path)
    prompts = []
    for token in (5, 6, 7):
        problem = Problem(id=str(token), text="", answer="")
        prompts.append(Prompt(problem=problem, text="", token_ids=(3, 4, token)))

    def draw():
        sampling = Sampling(temperature=1.0, max_new_tokens=8)
        return backend.generate(prompts, group_size=2, sampling=sampling, seed=0)

    rows = draw()
    assert versions_of(rows) == {0}
    (server,) = psutil.Process(tasks[1].pid).children()
    assert "of this job" not in " ".join(server.cmdline()), "the key is no word of a command"
    server.kill()
    server.wait()
    assert draw() == rows
    backend.update_weights(1)  # waits for the one that was started again
    assert versions_of(draw()) == {1}
    assert [server.failure for server in backend._servers] == [None, None]
    (restarted,) = psutil.Process(tasks[1].pid).children()
    assert restarted.pid != server.pid
    backend.close()
    (job.folder / "done").touch()
    assert [task.wait(timeout=60) for task in tasks] == [0, 0]
