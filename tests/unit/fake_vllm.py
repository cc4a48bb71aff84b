"""A stand-in for a vLLM server: the routes we use over a tiny model, with accidents on request. No vLLM needed."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file


class FakeServer:
    """``accidents``: how the next ``generate`` requests go wrong, in order: ``500``, ``drop``, ``hang``, ``garbage``.

    ``raw``: log-probs before the temperature, as a server without ``--logprobs-mode processed_logprobs`` gives them.
    """

    def __init__(self, model, *, key=None, dev_mode=True, raw=False, delay_s=0.0):
        self.model, self.key, self.dev_mode, self.raw, self.delay_s = model, key, dev_mode, raw, delay_s
        self.label = "default"
        self.accidents = []
        self.calls = []
        self.down = False
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                fake.answer(self, None)

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                fake.answer(self, json.loads(body) if body else {})

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler, body):
        path = urlsplit(handler.path).path
        with self._lock:
            self.calls.append(path)
            accident = self.accidents.pop(0) if self.accidents and path == "/inference/v1/generate" else None
        if accident == "down":
            self.down = True
        if self.down or accident == "drop":
            handler.connection.close()
            return
        if accident == "hang":
            time.sleep(30)
            return
        if self.key and handler.headers.get("Authorization") != f"Bearer {self.key}":
            send(handler, 401, {"error": "Unauthorized"})
        elif accident == "500":
            send(handler, 500, {"error": "engine died"})
        elif accident == "garbage":
            send(handler, 200, None)
        else:
            send(handler, *self.route(path, body))

    def route(self, path, body):
        if path == "/health":
            return 200, {}
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "max_model_len": 64}]}
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path == "/inference/v1/generate":
            time.sleep(self.delay_s)
            return 200, self.generate(body["token_ids"], body["sampling_params"])
        if not self.dev_mode:
            return 404, {"detail": "Not Found"}
        return self.control(path, body)

    def control(self, path, body):
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path == "/collective_rpc":
            state = {}
            for file in Path(body["kwargs"]["weights_path"]).glob("*.safetensors"):
                state |= load_file(file)
            try:
                with self._lock:
                    self.model.load_state_dict(state)
            except RuntimeError as error:  # names or shapes of another model
                return 500, {"error": str(error)}
            return 200, {"results": [None]}
        if path == "/update_weight_version":
            self.label = body["new_version"]
        return 200, {"success": True}

    def generate(self, ids, fields):
        with torch.no_grad():
            prompt_logp = self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        answer = {"choices": [self.choice(ids, fields, index) for index in range(fields["n"])]}
        if fields.get("prompt_logprobs") is not None:
            rows = [{str(token): {"logprob": float(prompt_logp[n, token])}} for n, token in enumerate(ids[1:])]
            answer["prompt_logprobs"] = [None, *rows]
        return answer

    def choice(self, ids, fields, index):
        generator = torch.Generator().manual_seed(fields["seed"] + index)
        drawn, content = [], []
        for _ in range(fields["max_tokens"]):
            with torch.no_grad(), self._lock:
                logits = self.model(torch.tensor([[*ids, *drawn]])).logits[0, -1].double()
            logp = (logits / fields["temperature"]).log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1, generator=generator))
            drawn.append(token)
            content.append({"token_id": token, "logprob": float((logits.log_softmax(-1) if self.raw else logp)[token])})
            if token in fields.get("stop_token_ids", ()):
                break
        spans = [{"version": self.label, "start": 0, "end": len(drawn)}]
        return {"index": index, "token_ids": drawn, "logprobs": {"content": content}, "weight_versions": spans}


def send(handler, status, content):
    data = b"<html>hello</html>" if content is None else json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
