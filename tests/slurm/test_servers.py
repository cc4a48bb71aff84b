"""Servers beside a trainer: they publish their addresses, end with the trainer, and their failures are reported."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

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
    """A job's folder for servers, and a function that starts one task of their step: of a command, or (sweep, cell)."""
    folder = tmp_path / "servers"
    folder.mkdir()
    monkeypatch.setenv("KL_COMEDY_SERVERS_DIR", str(folder))
    monkeypatch.setenv("KL_COMEDY_SERVERS_COUNT", "2")
    monkeypatch.setenv("KL_COMEDY_SERVER_URLS", "")
    tasks = []

    def start(index, code, *words, wait=60):
        server = ["--", sys.executable, "-c", code, "{port}", *words] if isinstance(code, str) else ["--cell", *code]
        command = [sys.executable, "-m", "kl_comedy.slurm.servers", "--wait", str(wait), *server]
        tasks.append(subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(index)}))
        return tasks[-1]

    yield folder, start
    (folder / "done").touch()
    for task in tasks:
        task.wait(timeout=30)


def answer(url):
    with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
        return reply.read().decode()


def test_two_servers_answer_on_ports_of_their_own_until_the_trainer_is_done(job):
    folder, start = job
    tasks = [start(index, SERVER, "number {index}") for index in range(2)]
    urls = await_servers()
    assert [answer(url) for url in urls] == ["number 0", "number 1"]
    assert os.environ["KL_COMEDY_SERVER_URLS"] == ",".join(urls) and len(set(urls)) == 2
    children = [psutil.Process(task.pid).children()[0] for task in tasks]
    for pid in (tasks[0].pid, children[0].pid):  # SLURM's warning goes to every process of the job
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    assert answer(urls[0]) == "number 0"
    for pid in (tasks[1].pid, children[1].pid):  # and so does a preemption: the trainer still needs the server
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.5)
    assert answer(urls[1]) == "number 1"
    (folder / "done").touch()
    assert [task.wait(timeout=30) for task in tasks] == [0, 0]
    for url, child in zip(urls, children, strict=True):
        assert not child.is_running()
        with pytest.raises(OSError):
            answer(url)


def test_a_server_that_ends_or_never_answers_fails_the_trainer_in_one_line(job, monkeypatch):
    folder, start = job
    task = start(1, "raise SystemExit(3)")
    with pytest.raises(RunFailed, match=r"server 1 of this job ended with code 3: \(its log is empty\)"):
        await_servers()
    assert task.wait(timeout=30) == 3
    (folder / "1.failed").unlink()
    monkeypatch.setenv("KL_COMEDY_JOB_LOG", str(folder / "train-7_0.out"))
    log = folder / "train-7_0.server-0.log"
    code = "import time; print('CUDA error: out of memory', flush=True); time.sleep(600)"
    task = start(0, code, wait=3)
    message = rf"server 0 of this job did not answer /health within 3 s: CUDA error: out of memory \(log: {log}\)"
    with pytest.raises(RunFailed, match=message):
        await_servers()
    assert task.wait(timeout=30) == 1
    monkeypatch.delenv("KL_COMEDY_SERVERS_DIR")
    assert await_servers() == [], "a job without servers waits for none"


def test_a_step_of_servers_that_never_starts_or_never_reports_ends_the_wait(job, monkeypatch):
    folder, _ = job
    monkeypatch.setattr(servers, "STEP_START_S", 0.0)
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


def test_a_server_whose_trainer_never_starts_gives_its_place_and_says_why(job, monkeypatch):
    """The trainer's step may wait for what the servers' step holds."""
    folder, _ = job
    monkeypatch.setattr(servers, "STEP_START_S", -60.0)  # the trainer is late as soon as the server answers
    monkeypatch.setenv("KL_COMEDY_JOB_LOG", str(folder / "train-7_0.out"))
    words = [sys.executable, "-c", SERVER]
    task = servers.ServerTask(folder=folder, index=0, host="127.0.0.1", ready="/health", wait_s=60.0)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGUSR1, signal.SIGTERM)]
    try:
        code = servers.serve(lambda port: ([*words, str(port), "a"], None), task)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert code == 1 and (folder / "0.url").exists()
    with pytest.raises(RunFailed, match=rf"server 0 .* the trainer did not start; .* {folder}/train-7_0.out"):
        await_servers()


@pytest.fixture
def torch_settings():
    """A server's task sets its process up; here that is undone."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


FOLDER, GLOO = (TRANSPORTS[name](torch.device("cpu")) for name in ("folder", "gloo"))
TINY_MODEL = ["model.options={preset: tiny}", "train.threads=1"]


def test_the_command_for_a_job_is_the_one_that_the_run_uses_itself(tmp_path, torch_settings):
    """For vLLM too, which need not be installed; the model is not loaded."""
    for asked, transport in (("auto", FOLDER), ("gloo", GLOO)):
        options = {"kv_cache_gib": 0.5, "max_model_len": 64, "transport": asked}
        overrides = ["rollout.backend=vllm_server", f"rollout.options={json.dumps(options)}"]
        config = load_config(None, [*TINY_MODEL, *overrides])
        loaded = load_model(config.model)
        vllm = VLLMServers(config.rollout, engine_options(VLLMServerOptions, options), loaded)
        words, environment = job_server(config, tmp_path / "model", host="n7", port=81)
        source = words[words.index("--model") + 1]
        assert words == vllm.command(source, 81, transport, "n7") and os.path.exists(f"{source}/model.safetensors")
        assert environment == vllm.environment() and environment["VLLM_SERVER_DEV_MODE"] == "1"

    config = load_config(None, [*TINY_MODEL, "lag.mode=async"])
    words, environment = job_server(config, tmp_path / "model", host="n7", port=81)
    ours = HFServers(config.rollout, engine_options(HFServerOptions, {"threads": 1}), loaded)
    assert words[:-1] == ours.command(tmp_path / "model", 81, FOLDER, "n7")[:-1]
    expected = {**json.loads(ours.command(tmp_path / "model", 81, FOLDER, "n7")[-1]), "deterministic": True}
    assert json.loads(words[-1]) == expected
    assert not list((tmp_path / "model").glob("*.safetensors")), "its weights come from the trainer"


def test_a_vllm_server_of_a_job_starts_with_an_adapter_that_changes_nothing(tmp_path, torch_settings):
    settings = ["model.lora={rank: 3, target_modules: [q_proj, up_proj]}", "rollout.backend=vllm_server"]
    config = load_config(None, [*TINY_MODEL, *settings])
    check_job_servers(replace(config, rollout=replace(config.rollout, options={"transport": "adapter"})), 0)
    words, _ = job_server(config, tmp_path / "adapter", host="n7", port=81)
    assert "--enable-lora" in words and words[words.index("--max-lora-rank") + 1] == "8"
    assert words[words.index("--lora-target-modules") :][1:3] == ["q_proj", "up_proj"]
    assert json.loads(words[words.index("--lora-modules") + 1])["path"] == str(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["r"] == 3
    factors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    policy = load_model(config.model)
    expected = {f"base_model.model.{name}.weight": list(each.shape) for name, each in adapter_weights(policy.model)}
    assert {name: list(each.shape) for name, each in factors.items()} == expected
    assert not any(factor.any() for factor in factors.values())
    assert os.path.exists(f"{words[words.index('--model') + 1]}/model.safetensors"), "the base is model.source"
    hf = load_config(None, [*TINY_MODEL, settings[0], "rollout.backend=hf_server"])
    assert "lora" not in " ".join(job_server(hf, tmp_path / "hf", host="n7", port=81)[0]), "it takes merged weights"


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
            ["rollout.backend=vllm_server", "model.options.gguf_file=a.gguf", "model.source=m"],
            0,
            r"model\.options\.gguf_file: got",
        ),
    ],
)
def test_a_config_that_cannot_use_the_jobs_servers_is_refused(overrides, gpus, message):
    with pytest.raises(UserError, match=message):
        check_job_servers(load_config(None, overrides), gpus)


def test_a_cell_that_uses_no_server_fails_in_one_line(tmp_path, job, monkeypatch):
    _, start = job
    sweep = plan_sweep(tmp_path, "seeds: 1\n")
    task = start(0, (sweep.path, "0"))
    with pytest.raises(RunFailed, match=r"server 0 of this job cannot be started: rollout\.backend: got 'hf'"):
        await_servers()
    assert task.wait(timeout=30) == 2


@pytest.mark.slow
def test_a_cells_servers_come_from_its_config_and_are_started_again_when_killed(tmp_path, job, monkeypatch):
    folder, start = job
    monkeypatch.setenv("VLLM_API_KEY", "the key of this job")
    monkeypatch.setenv("KL_COMEDY_SERVER_KEY", "the key of this job")
    settings = "rollout.backend: hf_server, train.threads: 1, rollout.options: {request_timeout_s: 20}"
    sweep = plan_sweep(tmp_path, f"overrides: {{{settings}}}\nseeds: 1\n")
    tasks = [start(index, (sweep.path, "0"), wait=120) for index in range(2)]
    await_servers()
    config = load_config(sweep.base, sweep.overrides(sweep.cell(0)))
    backend = build_hf_server(config.rollout, loaded=load_model(config.model))
    backend.work_in(tmp_path)
    prompts = [Prompt(problem=Problem(id=str(n), text="", answer=""), text="", token_ids=(3, 4, n)) for n in (5, 6, 7)]
    settings = {"group_size": 2, "sampling": Sampling(temperature=1.0, max_new_tokens=8), "seed": 0}
    rows = backend.generate(prompts, **settings)
    assert {version for row in rows for version in row.versions} == {0}
    (server,) = psutil.Process(tasks[1].pid).children()
    assert b"of this job" not in b" ".join(word.encode() for word in server.cmdline())
    server.kill()
    server.wait()
    assert backend.generate(prompts, **settings) == rows
    backend.update_weights(1)  # waits for the one that was started again
    assert {version for row in backend.generate(prompts, **settings) for version in row.versions} == {1}
    assert [server.failure for server in backend._servers] == [None, None]
    (again,) = psutil.Process(tasks[1].pid).children()
    assert again.pid != server.pid
    backend.close()
    (folder / "done").touch()
    assert [task.wait(timeout=60) for task in tasks] == [0, 0]
