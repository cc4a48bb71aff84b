"""The documentation site as `make docs` builds it, once per process, and a server for it."""

import atexit
import contextlib
import functools
import http.server
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from browser import program

ROOT = Path(__file__).parents[2]
IS_INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("mkdocs", "mkdocstrings", "material"))
WITHOUT = "mkdocs is not installed: pip install -e '.[docs]'"
IN_A_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(program() is None, reason="no browser is installed"),
    pytest.mark.skipif(not IS_INSTALLED, reason=WITHOUT),
]
"""The marks of a test that looks at the site in a browser."""


def browser_test(function):
    """A test with the marks :data:`IN_A_BROWSER`, in a module whose other tests need no browser."""
    for mark in IN_A_BROWSER:
        function = mark(function)
    return function


def build(folder, destination):
    """Build the site of ``folder`` with its mkdocs.yml, as strictly as CI does: the ended process."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(destination)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


@functools.cache
def whole_site():
    """The folder of the built site of this repository. Fails with what mkdocs says where it cannot be built."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(folder)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(folder):
    """The address of a server of ``folder`` on this machine: the search of a page needs one."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
