"""Options for language models without training by lrl: loaded here, behind an endpoint, or run by vLLM."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lrl.cli.arguments import json_object

if TYPE_CHECKING:
    from lrl.envs.factory import EnvFactory
    from lrl.evaluation.checkpoint import Loaded
    from lrl.models.chat import ChatModel
    from lrl.policies.retrying import InvalidRetryConfig

_NO_CACHE = "none"
_LOADED = {"choose": False, "chat_template": "auto", "dtype": "float32", "use_vllm": False, "vllm_options": "{}"}
"""Options of a model that is loaded by this program, with their defaults."""
_SERVED: dict[str, Any] = {
    "api_key_env": "OPENAI_API_KEY",
    "cache": "runs/responses.sqlite",
    "max_concurrency": 8,
    "timeout": 120.0,
    "max_retries": 8,
    "prices": None,
    "extra_body": "{}",
    "max_tokens_field": "max_tokens",
    "accept_empty": False,
}
"""Options of ``--api_url``, with their defaults."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that belong to ``--model``, for :func:`load_untrained`."""
    model = parser.add_argument_group("with --model")
    model.add_argument("--choose", action="store_true", help="score the legal actions instead of writing one")
    formats = "direct, think_answer or final_answer; default: think_answer, with --choose direct"
    model.add_argument("--response_format", help=formats)
    model.add_argument("--num_examples", type=int, default=0, help="few-shot turns of the environment's expert")
    model.add_argument("--examples_from", metavar="ID", help="Minari data set whose turns are shown, not the expert's")
    model.add_argument("--history", type=int, default=0, help="past turns of the episode in the prompt")
    model.add_argument("--system", help="system message; default: the environment's description")
    model.add_argument(
        "--chat_template", default=_LOADED["chat_template"], help="auto, plain, content, chatml or a file"
    )
    model.add_argument("--dtype", default=_LOADED["dtype"])
    model.add_argument("--max_new_tokens", type=int, default=64, help="of a response; none are written with --choose")
    model.add_argument("--use_vllm", action="store_true", help="generate with vLLM in this process (extra vllm)")
    model.add_argument("--vllm_options", default=_LOADED["vllm_options"], help="JSON object of arguments of vllm.LLM")
    served = parser.add_argument_group("with --model, where another program runs it (extra serve)")
    served.add_argument("--api_url", metavar="URL", help="OpenAI-compatible endpoint, as http://127.0.0.1:8000/v1")
    served.add_argument("--api_key_env", default=_SERVED["api_key_env"], help="environment variable with the API key")
    served.add_argument("--cache", default=_SERVED["cache"], help="SQLite file of responses, or none")
    served.add_argument("--max_concurrency", type=int, default=_SERVED["max_concurrency"], help="requests at once")
    served.add_argument("--timeout", type=float, default=_SERVED["timeout"], help="seconds without any data")
    served.add_argument("--max_retries", type=int, default=_SERVED["max_retries"], help="of a failed request")
    served.add_argument(
        "--prices", type=float, nargs=2, metavar=("PROMPT", "RESPONSE"), help="of a million tokens, for the cost"
    )
    served.add_argument("--extra_body", default=_SERVED["extra_body"], help="JSON object added to each request")
    served.add_argument("--max_tokens_field", default=_SERVED["max_tokens_field"], help="or max_completion_tokens")
    served.add_argument("--accept_empty", action="store_true", help="an empty response is an invalid action")
    again = parser.add_argument_group("for policies that write text")
    more = "further responses where none holds an action; default: 10 with --api_url or --use_vllm, else 0"
    again.add_argument("--invalid_retries", type=int, help=more)
    of_these = "of the further responses; default: 0.3"
    again.add_argument("--retry_temperature", type=float, help=of_these)


def load_untrained(arguments: argparse.Namespace, envs: EnvFactory) -> Loaded:
    """Load the policy that ``--model`` and its options name.

    Args:
        arguments: the parsed command line.
        envs: the environment that it plays.

    Raises:
        ValueError: options contradict each other, or something cannot be loaded.
    """
    from lrl.evaluation.checkpoint import load_model

    check_model_arguments(arguments)
    response_format = arguments.response_format or ("direct" if arguments.choose else "think_answer")
    prompt = {
        "response_format": response_format,
        "num_examples": arguments.num_examples,
        "examples_from": arguments.examples_from,
    }
    if arguments.history:
        prompt["history"] = arguments.history
    if arguments.system is not None:
        prompt["system"] = arguments.system
    if arguments.api_url is not None or arguments.use_vllm:
        return _load_served(arguments, envs, prompt)
    return load_model(
        arguments.model,
        envs,
        prompt,
        choose=arguments.choose,
        chat_template=arguments.chat_template,
        dtype=arguments.dtype,
        max_new_tokens=arguments.max_new_tokens,
    )


def retries_of(arguments: argparse.Namespace) -> InvalidRetryConfig:
    """Return how often the options ask again for a legal action, by default as rlft4rl does."""
    from lrl.policies.retrying import InvalidRetryConfig

    given = {"max_retries": arguments.invalid_retries, "temperature": arguments.retry_temperature}
    return InvalidRetryConfig(**{name: value for name, value in given.items() if value is not None})


def with_retries(loaded: Loaded, arguments: argparse.Namespace) -> Loaded:
    """Return a policy of this program that samples invalid responses again as the options say.

    Raises:
        ValueError: the policy writes no text, or the options are out of range.
    """
    from lrl.policies.retrying import RetryingActor
    from lrl.policies.served import ServedPolicy

    if not arguments.invalid_retries or isinstance(loaded.policy, ServedPolicy):
        return loaded
    return loaded._replace(policy=RetryingActor(loaded.policy, retries_of(arguments)))


def check_model_arguments(arguments: argparse.Namespace) -> None:
    """Check that no option is given that would be ignored.

    Raises:
        ValueError: there is one.
    """
    served = "--use_vllm" if arguments.use_vllm else "--api_url" if arguments.api_url is not None else None
    if served is not None and arguments.model is None:
        raise ValueError(f"{served} is given without --model; name the model.")
    counted = served or ("--invalid_retries" if arguments.invalid_retries else None)  # by this process alone
    if counted is not None and getattr(arguments, "devices", "1") != "1":
        raise ValueError(f"--devices is {arguments.devices!r}; with {counted} it must be 1.")
    retried = arguments.invalid_retries if served is None or arguments.invalid_retries == 0 else True
    if arguments.retry_temperature is not None and not retried:
        raise ValueError(
            f"--retry_temperature is {arguments.retry_temperature:g}, but --invalid_retries is "
            f"{arguments.invalid_retries or 0}, so that nothing is sampled again; give both or neither."
        )
    if arguments.choose and arguments.invalid_retries:
        raise ValueError(
            "--invalid_retries is given with --choose, which always takes a legal action; give one of them."
        )
    if arguments.use_vllm and arguments.choose:
        raise ValueError("--use_vllm is given with --choose, for which vLLM is not used; give one of them.")
    if arguments.vllm_options != _LOADED["vllm_options"] and not arguments.use_vllm:
        raise ValueError("--vllm_options is given without --use_vllm; give both or neither.")
    ignored = _SERVED if arguments.api_url is None else _LOADED
    for name, default in ignored.items():
        if getattr(arguments, name) != default and ignored is _SERVED:
            raise ValueError(f"--{name} is given without --api_url; give both or neither.")
        if getattr(arguments, name) != default:
            raise ValueError(f"--{name} is given with --api_url; it is for models that lrl loads itself.")


def _load_served(arguments: argparse.Namespace, envs: EnvFactory, prompt: dict[str, Any]) -> Loaded:
    """Load a policy that asks a chat model."""
    from lrl.evaluation.served import load_served

    retries = retries_of(arguments)
    chat_model = _vllm(arguments, prompt) if arguments.api_url is None else _endpoint(arguments)
    return load_served(chat_model, envs, prompt, arguments.max_new_tokens, retries)


def _endpoint(arguments: argparse.Namespace) -> ChatModel:
    from lrl.models.chat_retries import RetryConfig
    from lrl.models.served_chat import Prices, ServedChatModel

    return ServedChatModel(
        arguments.model,
        arguments.api_url,
        arguments.api_key_env,
        arguments.max_concurrency,
        None if arguments.cache == _NO_CACHE else arguments.cache,
        RetryConfig(max_retries=arguments.max_retries, timeout=arguments.timeout),
        None if arguments.prices is None else Prices(prompt=arguments.prices[0], completion=arguments.prices[1]),
        json_object("extra_body", arguments.extra_body),
        arguments.max_tokens_field,
        arguments.accept_empty,
    )


def _vllm(arguments: argparse.Namespace, prompt: dict[str, Any]) -> ChatModel:
    from lrl.models.language_model import LanguageModelConfig
    from lrl.models.local_chat import LocalChatModel
    from lrl.models.vllm_generator import VLLMGenerator
    from lrl.prompts.response_format import get_response_format

    config = LanguageModelConfig(name=arguments.model, chat_template=arguments.chat_template, dtype=arguments.dtype)
    stop = get_response_format(prompt["response_format"]).stop
    options = json_object("vllm_options", arguments.vllm_options)
    return LocalChatModel(config, VLLMGenerator(config, stop, options), stop, batch_size=1024)
