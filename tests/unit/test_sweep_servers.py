"""Servers beside a trainer: they say where they answer, end with the trainer, and their failures are told."""

import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from kl_comedy.errors import RunFailed
from kl_comedy.slurm.servers import await_servers

SERVER = """
import http.server, os, sys

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
    """A job's folder for servers, and a function that starts one task of their step."""
    (tmp_path / "server.py").write_text(SERVER)
    folder = tmp_path / "servers"
    folder.mkdir()
    monkeypatch.setenv("KL_COMEDY_SERVERS_DIR", str(folder))
    monkeypatch.setenv("KL_COMEDY_SERVERS_COUNT", "2")
    monkeypatch.setenv("KL_COMEDY_SERVER_URLS", "")
    tasks = []

    def start(index, *words, wait=60):
        command = [sys.executable, "-m", "kl_comedy.slurm.servers", "--wait", str(wait), "--", *words]
        tasks.append(subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(index)}))
        return tasks[-1]

    yield folder, start
    (folder / "done").touch()
    for task in tasks:
        task.wait(timeout=30)


def answer(url):
    with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
        return reply.read().decode()


def test_two_servers_answer_on_ports_of_their_own_until_the_trainer_is_done(job, tmp_path):
    folder, start = job
    command = (sys.executable, str(tmp_path / "server.py"), "{port}", "number {index}")
    tasks = [start(index, *command) for index in range(2)]
    urls = await_servers()
    assert [answer(url) for url in urls] == ["number 0", "number 1"]
    assert os.environ["KL_COMEDY_SERVER_URLS"] == ",".join(urls) and len(set(urls)) == 2
    (child,) = (int(pid) for pid in _children(tasks[0].pid))
    for pid in (tasks[0].pid, child):  # SLURM's warning goes to every process of the job
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    assert answer(urls[0]) == "number 0"
    (folder / "done").touch()
    assert [task.wait(timeout=30) for task in tasks] == [0, 0]
    with pytest.raises(OSError):
        answer(urls[0])
    assert not _children(tasks[0].pid)


def _children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return file.read().split()
    except FileNotFoundError:
        return []


def test_a_server_that_ends_or_never_answers_fails_the_trainer_in_one_line(job):
    folder, start = job
    task = start(1, sys.executable, "-c", "raise SystemExit(3)", "{port}")
    with pytest.raises(RunFailed, match=r"server 1 of this job ended with code 3"):
        await_servers()
    assert task.wait(timeout=30) == 3
    (folder / "1.failed").unlink()
    task = start(0, sys.executable, "-c", "import time; time.sleep(600)", "{port}", wait=1)
    with pytest.raises(RunFailed, match=r"server 0 of this job did not answer /health within 1 s"):
        await_servers()
    assert task.wait(timeout=30) == 1


def test_a_job_without_servers_waits_for_none(monkeypatch):
    monkeypatch.delenv("KL_COMEDY_SERVERS_DIR", raising=False)
    assert await_servers() == []
