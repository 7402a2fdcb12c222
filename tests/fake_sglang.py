"""An SGLang server that samples nothing: it answers with what a real one has answered (rollout/sglang_replies.json,
written by workers/record_sglang.py), keeps the weights that it is sent, and breaks where a test wants it to.
"""

import copy
import json
import re
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import torch
from conftest import ROOT
from safetensors.torch import load_file

REPLIES = json.loads((ROOT / "tests/rollout/sglang_replies.json").read_text())
SAMPLING_FIELDS = set(re.findall(r"`(\w+)`", REPLIES["unknown field"]["reply"]["error"])) - {"nonsense"}


class FakeSGLang:
    """Serves the model in a folder. `with FakeSGLang(folder) as server` runs it; server.url is its address."""

    def __init__(self, folder: str):
        self.replies = copy.deepcopy(REPLIES)
        self.replies["/model_info"]["reply"]["tokenizer_path"] = folder
        self.tensors: dict[str, torch.Tensor] = {}  # under the names of the model's files
        self.load(folder)
        self.version = "default"
        self.is_paused = False
        self.is_open = False  # a session for broadcasts
        self.asked: list[tuple[str, dict | None]] = []  # requests, but for /health
        self.answer = "stopped"  # name of the recorded reply to /generate
        self.faults: dict[str, Callable] = {}  # route -> what happens instead of an answer

    def load(self, folder: str) -> None:
        for file in Path(folder).glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                self.tensors[name] = tensor

    def respond(self, path: str, body: dict | None) -> tuple[int, object]:
        """Status and content of the answer to a request."""
        recorded = copy.deepcopy(self.replies.get(path, {"status": 200, "reply": {}}))
        if path == "/model_info":
            recorded["reply"]["weight_version"] = self.version
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/pause_generation":
            assert body == {"mode": "retract"}
            self.is_paused = True
        elif path == "/continue_generation":
            self.is_paused = False
        elif path == "/update_weights_from_disk":
            assert self.is_paused, "its cache may not be emptied then"
            self.load(body["model_path"])
            self.version = body["weight_version"]
        elif path == "/begin_weight_update":
            recorded = self.replies["begin twice" if self.is_open else "begin"]
            self.is_open = True
        elif path == "/end_weight_update":
            recorded = self.replies["end" if self.is_open else "end without begin"]
            self.is_open = False
        elif path == "/generate":
            recorded = self.generate(body)
        elif path == "/health" and self.is_paused:
            return self.hang()
        return recorded["status"], recorded["reply"]

    def generate(self, body: dict) -> dict:
        sampling = body["sampling_params"]
        if set(sampling) - SAMPLING_FIELDS:
            return self.replies["unknown field"]
        recorded = copy.deepcopy(self.replies[self.answer])
        if recorded["status"] == 200 and self.answer == "stopped":
            recorded["reply"]["meta_info"]["weight_versions"][0]["version"] = self.version
            if sampling["n"] > 1:
                recorded["reply"] = [recorded["reply"]] * sampling["n"]
        return recorded

    def __enter__(self):
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length) or "null")
                if self.path != "/health":  # its times are by chance
                    fake.asked.append((self.path, body))
                fault = fake.faults.get(self.path)
                found = fault(body) if fault else fake.respond(self.path, body)
                if found is None:
                    return  # the connection closes without an answer
                status, content = found
                content = json.dumps(content).encode()
                with suppress(BrokenPipeError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            do_GET = do_POST = answer

            def log_message(self, *args):
                pass

        self.stopped = Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.stopped.set()
        self.server.shutdown()
        self.server.server_close()

    def hang(self, body=None) -> None:
        """A fault: never answers. A paused server does so to /health, for which it would have to sample a token."""
        self.stopped.wait()

    def die(self, body=None) -> None:
        """A fault: the process is gone."""
        self.faults = dict.fromkeys(["/health", "/generate", "/update_weights_from_disk"], lambda body: None)
