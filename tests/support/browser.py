"""A real browser, driven over its own debugging pipe: no driver program, no port.

Chromium reads commands from file descriptor 3 and answers on 4, JSON messages ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_S = 120
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
"""Width and height of a window in CSS pixels."""


def program() -> str | None:
    """The path of the first browser that is installed; None without one."""
    for name in PROGRAMS:
        path = shutil.which(name)
        if path:
            return path
    return None


class Browser:
    """One page. ``requests`` are the addresses it asked for; ``errors`` what its console and policy complained of."""

    def __init__(self) -> None:
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        self._scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        words = [
            str(program()),
            "--headless",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            f"--user-data-dir={self._scratch.name}",
        ]
        if os.geteuid() == 0:
            # Chromium refuses to start its sandbox as root.
            words.append("--no-sandbox")

        def descriptors() -> None:
            # The copies come first: one of the pipes may itself be descriptor 3 or 4.
            os.dup2(os.dup(to_read), 3)
            os.dup2(os.dup(to_write), 4)

        self._process = subprocess.Popen(
            words, preexec_fn=descriptors, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._number = 0
        self._buffer = b""
        self._session = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def resize(self, width: int, height: int) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, url: str, width: int, height: int) -> None:
        self.resize(width, height)
        self.ask("Page.navigate", url=url)
        end = time.monotonic() + WAIT_S
        while self.evaluate("document.readyState + location.href") != "complete" + url:
            assert time.monotonic() < end, "the page did not load"
            time.sleep(0.05)

    def block(self, *patterns: str) -> None:
        """Load no address that has one of the patterns (``*`` is anything) from now on; without any, all again."""
        self.ask("Network.setBlockedURLs", urls=list(patterns))

    def evaluate(self, script: str) -> Any:
        reply = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait_for(self, value: str) -> Any:
        """The value of a JavaScript expression as soon as it is true, not 0 and not empty."""
        look = f"() => {{ const value = {value}; value && value.length !== 0 ? done(value) : setTimeout(look, 50); }}"
        return self.evaluate(f"new Promise((done) => {{ const look = {look}; look(); }})")

    def picture(self) -> bytes:
        return base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=False)["data"])

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        # Events come at any time between a command and its answer.
        while True:
            answer = self._next()
            self._note(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._out)
        os.close(self._in)
        self._scratch.cleanup()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._in, 1 << 16)
            assert more, "the browser is gone"
            self._buffer += more
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message.get("method") == "Log.entryAdded":
            self.errors.append(message["params"]["entry"]["text"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
