"""Writes down what a real SGLang server answers, for the fake one of tests/rollout/test_sglang.py.

    python tests/workers/record_sglang.py http://127.0.0.1:30000

The server has the model in baselines/warm-start (scripts/serve_rollout.sh), and nobody else uses it.
"""

import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "baselines/warm-start"
FILE = ROOT / "tests/rollout/sglang_replies.json"
PROMPT = [6, 8, 13, 4, 4, 17]  # "35+11="
SAMPLING = {"temperature": 1.0, "max_new_tokens": 6, "stop_token_ids": [1], "skip_special_tokens": False}
# Of the 400 settings that the server reports.
KEPT = ("dtype", "device", "tp_size", "pp_size", "dp_size", "max_req_input_len", "max_total_num_tokens", "version")


class Recorder:
    def __init__(self, url: str, folder: str):
        self.http = httpx.Client(base_url=url, timeout=60)
        self.folder = folder  # has the model's weights
        self.replies = {}

    def call(self, name: str, path: str, body: dict | None = None, method: str = "POST") -> None:
        reply = self.http.request(method, path, json=body)
        text = reply.text.replace(str(MODEL), "MODEL").replace(self.folder, "FOLDER")
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        content = json.loads(text) if is_json else text
        if path == "/server_info":
            content = {key: content[key] for key in KEPT}
        self.replies[name] = {"path": path, "status": reply.status_code, "reply": content}
        print(name, reply.status_code, text[:150])

    def generate(self, name: str, prompt=PROMPT, **changed) -> None:
        self.call(
            name, "/generate", {"input_ids": prompt, "sampling_params": SAMPLING | changed, "return_logprob": True}
        )

    def update(self, name: str, version: str, folder: str = "") -> None:
        self.call(name, "/update_weights_from_disk", {"model_path": folder or self.folder, "weight_version": version})

    def amid_responses(self, name: str, mode: str, version: str) -> None:
        """A response during which new weights come."""
        long = {"max_new_tokens": 60, "ignore_eos": True, "stop_token_ids": []}
        thread = threading.Thread(target=self.generate, args=(name,), kwargs=long)
        thread.start()
        time.sleep(0.15)
        self.call(f"pause {mode}", "/pause_generation", {"mode": mode})
        self.update(f"update {mode}", version)
        self.call("model_info after it", "/model_info", method="GET")
        self.call("continue", "/continue_generation", {})
        thread.join()

    def aborted(self) -> None:
        long = {"max_new_tokens": 200, "ignore_eos": True, "stop_token_ids": []}
        thread = threading.Thread(target=self.generate, args=("aborted",), kwargs=long)
        thread.start()
        time.sleep(0.15)
        self.call("abort", "/abort_request", {"abort_all": True})
        thread.join()


def main(url: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        shutil.copy(MODEL / "model.safetensors", folder)
        found = Recorder(url, folder)
        found.call("reset version", "/update_weight_version", {"new_version": "0"})
        found.update("update", "1")
        for path in ("/model_info", "/server_info", "/health"):
            found.call(path, path, method="GET")
        found.generate("two", n=2)
        found.generate("one")
        found.generate("greedy", temperature=0.0)
        found.generate("stopped", temperature=0.0, max_new_tokens=60)
        found.generate("without token 5", logit_bias={"5": -100.0})
        found.generate("unknown field", nonsense=1)
        found.generate("too long", prompt=[2] * 300)
        found.update("no folder", "2", folder="/no/such/folder")
        found.aborted()
        found.call("end without begin", "/end_weight_update", {})
        found.call("begin", "/begin_weight_update", {})
        found.call("begin twice", "/begin_weight_update", {})
        found.call("end", "/end_weight_update", {})
        found.amid_responses("amid retract", "retract", "2")
        found.amid_responses("amid in_place", "in_place", "3")
    lines = [f"{json.dumps(name)}: {json.dumps(reply)}" for name, reply in found.replies.items()]
    FILE.write_text("{" + ",\n".join(lines) + "}\n")


main(sys.argv[1])
