"""Rollouts from a vLLM server, which receives the weights whenever training has changed them.

Either the server holds the frozen base and loads each version of the adapter under a new name, or it reloads all of its
weights (``full_weights``, and always without LoRA). The weights are exchanged as a folder that both processes can read.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lrl.addresses import checked_url
from lrl.chat.vllm import RejectedError, SampledRow, StoppedError, VLLMServer, WeightsLostError
from lrl.files import write_whole
from lrl.functional.distributed import rank_and_world_size
from lrl.lm.adapters import save_pretrained
from lrl.lm.attention import is_halved
from lrl.lm.config import LanguageModelConfig
from lrl.lm.decoding import Responses
from lrl.lm.files import written_whole
from lrl.lm.forward import without_gradient
from lrl.lm.layouts import pad_prompts
from lrl.lm.loading import fingerprint
from lrl.lm.merging import merge
from lrl.lm.model import LanguageModel
from lrl.ranges import NonNegativeInt, PositiveFloat, PositiveInt, check_arguments
from lrl.registry import register
from lrl.types import SamplingConfig

_LOG = logging.getLogger("lrl")

_MAX_LOADS = 5
"""Maximum number of attempts to sample one batch of responses from the current weights."""
_COMPARED_ROWS, _COMPARED_TOKENS = 4, 32
"""Number of responses, and of tokens of each, whose log-probabilities are compared after a synchronisation."""
_TOLERANCE, _TOLERANCE_16_BITS = 1e-3, 0.2
"""Largest accepted mean difference of log-probabilities between server and trainer, in nats."""
_PATIENCE, _POLL = 1800.0, 0.02
"""Seconds that a rank waits for rank 0 to load new weights, and seconds between two looks."""
_NOT_IN_ADAPTER = ("random_init", "first_layers", "quantization", "ordered_numbers", "number_tokens", "added_tokens")
"""Options of a language model after which its base differs from the one that the server loads."""


@register
@final
class ServedGenerator:
    """Samples the responses of :class:`~lrl.policies.text.TextPolicy` on a vLLM server. It needs the extra ``serve``.

    Before each batch of responses, the hash of the trainable weights is compared with that of the weights on the
    server. If it differs, the current weights are written to ``folder`` and loaded by the server. No version of the
    weights has the name or path of an earlier one, because vLLM would reuse its prefix cache.

    A response depends only on its prompt and its row of ``uniforms``, except where the results of vLLM's kernels
    depend on the batch.

    Args:
        url: address of the server, such as ``http://localhost:8000``.
        folder: folder in which versions of the weights are written. The server must be able to read it at the same
            path. The last version remains there after the run.
        importance_cap: largest importance weight of a token, which corrects for the difference between the
            log-probabilities of the server and of the trainer; null disables the correction. It is used only where
            log-probabilities are recomputed (``language_model.recompute_logprobs``), by default only in 16 bits.
        full_weights: whether to load whole models into the server instead of adapters; without LoRA this is always
            done.
        max_concurrency: maximum number of simultaneous requests.
        timeout: seconds without data from the server after which a request counts as failed.
        max_retries: maximum number of times that a failed request is sent again.

    Attributes:
        server: sends the requests.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self,
        url: str,
        folder: str,
        importance_cap: PositiveFloat | None = 3.0,
        full_weights: bool = False,
        max_concurrency: PositiveInt = 64,
        timeout: PositiveFloat = 120.0,
        max_retries: NonNegativeInt = 8,
    ) -> None:
        check_arguments(ServedGenerator.__init__, locals(), "generator")
        self.url, self.folder = checked_url("generator.url", url, "http://localhost:8000"), folder
        self.importance_cap, self.full_weights, self.max_concurrency = importance_cap, full_weights, max_concurrency
        self.server = VLLMServer(self.url, timeout, max_retries)
        self._model: LanguageModel | None = None
        self._stop_text: str | None = None
        self._run, self._count = uuid.uuid4().hex[:8], 0
        self._name, self._digest = "", ""  # of the weights on the server
        self._written: Path | None = None
        self._is_compared, self._has_differed = False, False

    def connect(self, language_model: LanguageModel, stop_text: str | None) -> None:
        """Set the model whose weights are sent to the server, and the text that ends a response.

        Args:
            language_model: the model that is trained; it need not be configured yet.
            stop_text: the last tag of the response format; None if it has no tags.

        Raises:
            ValueError: If the server cannot hold the model as a base and an adapter.
        """
        self._model, self._stop_text = language_model, stop_text
        self._notice.unlink(missing_ok=True)  # of an earlier run; no rank samples before all ranks have come here
        self.full_weights = self.full_weights or language_model.config.lora is None
        if not self.full_weights:
            check_adapter(language_model.config)

    @property
    def language_model(self) -> LanguageModel:
        """The model that is trained."""
        assert self._model is not None, "connect() comes first"
        return self._model

    def generate(self, prompts: Sequence[Sequence[int]], uniforms: Tensor, sampling: SamplingConfig) -> Responses:
        """Sample one response per prompt with the current weights.

        If ranks train together, rank 0 must call it after each change of the weights; the others wait for it.

        Args:
            prompts: token ids, one sequence per row.
            uniforms: int64 ``(row, max_new_tokens)``; the first entry of a row is the seed of its request.
            sampling: the distribution to sample from, and the maximum number of tokens.

        Raises:
            ValueError: If the server cannot be reached, rejects a request or cannot load the weights, or if its
                log-probabilities are not those of the model.
        """
        self.language_model.prepare_decoding(max(map(len, prompts)), sampling.max_new_tokens)
        self._synchronise()
        bodies = [self._body(*row, sampling) for row in zip(prompts, uniforms[:, 0].tolist(), strict=True)]
        rows: dict[int, SampledRow] = {}
        for _ in range(_MAX_LOADS):
            try:
                self._request_all(bodies, rows)
                self._compare(prompts, rows, sampling)
            except WeightsLostError as error:
                _LOG.warning("%s: %s; the weights are loaded again.", self.url, error)
                self._publish()
            else:
                return self._stacked([rows[index] for index in range(len(bodies))])
        raise ValueError(
            f"generator.url is {self.url!r}, which lost the weights {_MAX_LOADS} times while it sampled the responses "
            "of one turn; no other run may use the server, and its log should say why it was started again."
        )

    # -- responses --------------------------------------------------------------------------------------------------

    def _body(self, prompt: Sequence[int], bits: int, sampling: SamplingConfig) -> dict[str, Any]:
        """Return the body of a request without the name of the model.

        Every field of the distribution is set, because vLLM takes others from the model's ``generation_config.json``.
        """
        return {
            "prompt": list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": bits & 0x7FFFFFFF,
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "stop": None if self._stop_text is None else [self._stop_text],
            "include_stop_str_in_output": True,
            "stop_token_ids": sorted(self.language_model.tokenizer.stop_ids(self._stop_text)),
        }

    def _request_all(self, bodies: Sequence[Mapping[str, Any]], rows: dict[int, SampledRow]) -> None:
        """Request the responses that are not in ``rows`` yet, and add them.

        The name of an adapter identifies its version, so its responses are kept if other requests fail. A whole model
        keeps its name, so its version is read before and after the requests, and after a failure all are repeated.

        Raises:
            ValueError: If a request fails permanently.
            WeightsLostError: If the server does not hold the current weights.
        """
        if not self.full_weights:
            self._request_missing(bodies, rows)
            return
        rows.clear()
        self.server.check_version(self._weight_version)
        if self._request_missing(bodies, rows):
            raise WeightsLostError("a request failed, and the server may have been started again")
        self.server.check_version(self._weight_version)

    def _request_missing(self, bodies: Sequence[Mapping[str, Any]], rows: dict[int, SampledRow]) -> bool:
        """Send requests in parallel, and return whether the server may have been started again in between."""
        self.server.connect()
        stop, lost = threading.Event(), threading.Event()
        missing = [index for index in range(len(bodies)) if index not in rows]
        pool = ThreadPoolExecutor(self.max_concurrency, "lrl-vllm")
        futures = {}
        try:
            for index in missing:
                body = {"model": self._name, **bodies[index]}
                futures[index] = pool.submit(self.server.complete, body, stop, lost)
            wait(futures.values(), return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
        errors = list[BaseException]()
        for index, future in futures.items():
            error = None if future.cancelled() else future.exception()
            if error is not None and not isinstance(error, StoppedError):
                errors.append(error)
            elif error is None and not future.cancelled():
                rows[index] = future.result()
        for error in sorted(errors, key=lambda error: isinstance(error, WeightsLostError)):
            raise error
        return lost.is_set()

    def _stacked(self, rows: Sequence[SampledRow]) -> Responses:
        """Return responses as tensors on the device of the model."""
        width, device = max(len(row.ids) for row in rows), self.language_model.device
        ids = torch.tensor([[*row.ids, *[0] * (width - len(row.ids))] for row in rows], dtype=torch.long)
        mask = torch.arange(width) < torch.tensor([[len(row.ids)] for row in rows])
        logprobs = torch.tensor([[*row.logprobs, *[0.0] * (width - len(row.ids))] for row in rows])
        return Responses(ids=ids.to(device), mask=mask.to(device), logprobs=logprobs.to(device))

    def _compare(self, prompts: Sequence[Sequence[int]], rows: dict[int, SampledRow], sampling: SamplingConfig) -> None:
        """Compare the first log-probabilities after a synchronisation with those of the trainer.

        They differ if the server has another base, stale weights, or log-probabilities before the temperature.

        Raises:
            ValueError: If they still differ after the weights have been loaded again.
            WeightsLostError: If they differ for the first time; then ``rows`` is emptied.
        """
        if self._is_compared or sampling.temperature == 0 or sampling.top_k is not None or sampling.top_p is not None:
            return
        model, count = self.language_model, min(len(rows), _COMPARED_ROWS)
        first = [rows[index] for index in range(count)]
        served = self._stacked(
            [SampledRow(row.ids[:_COMPARED_TOKENS], row.logprobs[:_COMPARED_TOKENS]) for row in first]
        )
        inputs = pad_prompts(prompts[:count], model.device) | {"response_ids": served.ids}
        with without_gradient(model):
            layout = model.lay_out(inputs, served.mask)
            own = model.distribution(layout, sampling.temperature)[0].logprobs(served.ids)
        difference = float((own - served.logprobs).abs()[served.mask].mean())
        tolerance = _TOLERANCE_16_BITS if is_halved(model.model) or model.recomputes else _TOLERANCE
        self._is_compared = difference <= tolerance
        if self._is_compared:
            return
        rows.clear()
        if self._has_differed:
            raise ValueError(
                f"generator.url is {self.url!r}, whose log-probabilities differ from the trainer's by {difference:.2g} "
                f"nats on average, more than rounding ({tolerance:g}); it must serve {model.config.name!r} with the "
                f"options --dtype {model.config.dtype} --logprobs-mode processed_logprobs, for this run only."
            )
        self._has_differed = True
        raise WeightsLostError(f"the log-probabilities differ from the trainer's by {difference:.2g} nats on average")

    # -- weights ----------------------------------------------------------------------------------------------------

    @property
    def _weight_version(self) -> str:
        """Name of the current version of a whole model, which is the same on all ranks."""
        return f"lrl-{self._digest}"

    def _synchronise(self) -> None:
        """Let the server load the weights if they have changed; rank 0 does this, and the others wait.

        Raises:
            ValueError: If the server cannot load them, or the weights are sharded.
        """
        digest = fingerprint(self.language_model.model, trained=True)
        if digest == self._digest:
            return
        if any(isinstance(part, FSDPModule) for part in self.language_model.modules()):
            raise ValueError("trainer.strategy shards the weights; for a ServedGenerator it must be auto or ddp.")
        self._digest, self._is_compared, self._has_differed = digest, False, False
        rank, world_size = rank_and_world_size()
        try:
            if world_size == 1:
                self._publish()
            elif rank == 0:
                self._publish_for_all()
            else:
                self._follow()
        except BaseException:
            self._digest = ""
            raise

    def _publish_for_all(self) -> None:
        """Load the current weights, and tell the other ranks their name, or the error.

        A collective call would deadlock if only some ranks sample, such as those that have an episode to validate.

        Raises:
            ValueError: If the server cannot load them.
        """
        message = ""
        try:
            self._publish()
        except ValueError as error:
            message = str(error)
            raise
        finally:
            with write_whole(self._notice) as file:
                json.dump({"digest": self._digest, "name": self._name, "error": message}, file)

    def _follow(self) -> None:
        """Wait until rank 0 has loaded the current weights.

        Raises:
            ValueError: If rank 0 could not load them, or takes too long.
        """
        if self._written is not None:  # this rank has loaded the previous weights again
            self._remove(self._name, self._written)
            self._written = None
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            notice = json.loads(self._notice.read_text(encoding="utf-8")) if self._notice.exists() else {}
            if notice.get("digest") == self._digest:
                if notice["error"]:
                    raise ValueError(notice["error"])
                self._name = notice["name"]
                return
            time.sleep(_POLL)
        raise ValueError(
            f"generator.folder is {self.folder!r}, in which rank 0 has not reported new weights for {_PATIENCE:.0f} s; "
            "all ranks must have the same folder and the same weights."
        )

    @property
    def _notice(self) -> Path:
        """File in which rank 0 reports the name of the current weights to the other ranks."""
        return Path(self.folder).absolute() / "current.json"

    def _publish(self) -> None:
        """Write the current weights under a new name, load them into the server, and remove the previous ones.

        Raises:
            ValueError: If the server cannot load them.
        """
        self._count += 1
        name, previous, written = f"lrl-{self._run}-{self._count}", self._name, self._written
        folder = Path(self.folder).absolute() / name
        self._write(folder)
        try:
            if self.full_weights:
                self._name = self.server.reload(self._weight_version, folder)
            else:
                self.server.load_adapter(name, folder)
                self._name = name
        except RejectedError as error:
            lora, options = self.language_model.config.lora, "VLLM_SERVER_DEV_MODE=1"
            if not self.full_weights and lora is not None:
                options = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 --max-lora-rank {lora.r}"
            raise ValueError(
                f"generator.url is {self.url!r}, which does not load the weights in {str(folder)!r} ({error}); it must "
                f"read this folder and be started with {options}."
            ) from error
        self._written = folder
        if written is not None:
            self._remove(previous, written)

    def _remove(self, name: str, folder: Path) -> None:
        """Unload a previous version of the weights, and delete its folder unless the server may still read it."""
        if self.full_weights or self.server.unload_adapter(name):
            shutil.rmtree(folder, ignore_errors=True)

    def _write(self, folder: Path) -> None:
        """Write the adapter or the whole model to a new folder.

        Raises:
            ValueError: If a file is missing or unreadable: vLLM ends at the next request after loading such a folder.
        """
        from safetensors import SafetensorError, safe_open

        model = self.language_model
        with written_whole(folder) as draft:
            if self.full_weights and model.config.lora is not None:
                merge(copy.deepcopy(model.model)).save_pretrained(draft)
                model.tokenizer.save(draft)
            else:
                save_pretrained(model, draft)
        files = sorted(folder.glob("*.safetensors"))
        complete = Path(folder, "config.json" if self.full_weights else "adapter_config.json").is_file() and bool(files)
        try:
            for file in files:
                with safe_open(file, "pt") as tensors:
                    complete = complete and bool(tensors.keys())
        except (SafetensorError, OSError):
            complete = False
        if not complete:
            raise ValueError(f"generator.folder is {self.folder!r}, in which no complete model can be written.")


def check_adapter(config: LanguageModelConfig) -> None:
    """Check that a server that loads the base by its name and an adapter has the same model.

    Args:
        config: configuration of the model, with ``lora`` set.

    Raises:
        ValueError: If an option changes weights that the adapter does not contain, or vLLM does not load.
    """
    assert config.lora is not None
    keys = [f"language_model.{key}" for key in _NOT_IN_ADAPTER if getattr(config, key)]
    keys += ["lora.modules_to_save"] if config.lora.modules_to_save else []
    if keys:
        raise ValueError(
            f"{keys[0]} is set, but the server of model.policy.generator loads only the unchanged base and an adapter; "
            "it must be left out, or generator.full_weights true."
        )
