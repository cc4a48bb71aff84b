"""A server with the routes of MLflow's REST API that an upload uses, which records every request whole."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

RUN_ID = "0123456789abcdef" * 2
API = "/api/2.0/mlflow/"
EXPERIMENT = {"experiment_id": "7", "name": "trial", "lifecycle_stage": "active", "artifact_location": "x", "tags": []}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        url = urlsplit(self.path)
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        if data:
            asked = json.loads(data)
        else:
            asked = dict(parse_qsl(url.query))
        # MLflow's own client adds the run's older name, and its user.
        asked = {key: value for key, value in asked.items() if key not in ("run_uuid", "user_id")}
        route = url.path.removeprefix(API)
        self.server.requests.append((route, asked))
        content = json.dumps(self.server.answer(route, asked)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *arguments):
        pass


class Recorder(ThreadingHTTPServer):
    """``requests``: route and content of each, in order. It has one experiment, and one run once it was created."""

    daemon_threads = True

    def __init__(self, artifacts):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = []
        self.uri = f"http://127.0.0.1:{self.server_port}"
        self._info = {"run_id": RUN_ID, "experiment_id": "7", "status": "RUNNING", "lifecycle_stage": "active"}
        self._info["artifact_uri"] = artifacts.as_uri()

    def answer(self, route, asked):
        if route == "experiments/search":
            return {"experiments": [EXPERIMENT]}
        if route in ("experiments/get-by-name", "experiments/get"):
            return {"experiment": EXPERIMENT}
        if route in ("runs/create", "runs/get"):
            return {"run": {"info": self._info, "data": {}}}
        if route == "runs/update":
            return {"run_info": self._info}
        return {}


@contextlib.contextmanager
def recording_mlflow(artifacts):
    server = Recorder(artifacts)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
