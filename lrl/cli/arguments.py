"""Options that several subcommands share."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lrl.codecs.numbers import NumberFormat
from lrl.envs.factory import GymnasiumEnvs
from lrl.ranges import check_seed

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from lrl.chat.model import ChatModel
    from lrl.envs.factory import EnvFactory
    from lrl.evaluation.load import Loaded
    from lrl.policies.retrying import InvalidRetryConfig


def command_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows ``description`` with its line breaks."""
    return argparse.ArgumentParser(prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


@contextmanager
def exit_on_user_error(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Print a user's error as one sentence and exit with status 2; silence what libraries print meanwhile.

    An interruption by the user exits with status 130.
    """
    from lrl.cli.quiet import silence_libraries

    silence_libraries()
    try:
        yield
    except Exception as error:
        from lrl.cli.error_messages import sentence_of

        sentence = str(error) if isinstance(error, ValueError) else sentence_of(error)
        if sentence is None:
            raise
        parser.exit(2, f"{parser.prog}: {_naming_options(sentence, parser)}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")


def _naming_options(sentence: str, parser: argparse.ArgumentParser) -> str:
    """Return an error of the library, which begins with the name of a setting, with the option of that name."""
    option = f"--{sentence.split(' ', 1)[0].rstrip(':')}"
    return f"--{sentence}" if option in parser._option_string_actions else sentence


def subcommand(
    make_parser: Callable[[str], argparse.ArgumentParser], run: Callable[[argparse.Namespace], None]
) -> Callable[[str, Sequence[str]], None]:
    """Return the ``main`` of a subcommand, which takes the name of the program and the words that follow it.

    It parses the words and runs; a user's error is printed as one sentence, with exit status 2.

    Args:
        make_parser: returns the parser for the name of the program, as its help and its errors show it.
        run: does what the parsed options ask for; they also hold that name as ``prog`` and the words as ``words``.
    """

    def main(prog: str, words: Sequence[str]) -> None:
        parser = make_parser(prog)
        arguments = parser.parse_args(words, argparse.Namespace(prog=prog, words=words))
        with exit_on_user_error(parser):
            if isinstance(getattr(arguments, "seed", None), int):
                check_seed("--seed", arguments.seed)
            run(arguments)

    return main


def add_env_arguments(
    parser: argparse.ArgumentParser, default: str = "the checkpoint's validation environment, or FrozenLake-v1"
) -> None:
    """Add ``--env_id``, whose ``default`` its help names, and the options that belong to it, for :func:`envs_of`."""
    parser.add_argument("--env_id", help=f"default: {default}")
    parser.add_argument("--env_kwargs", default="{}", help="JSON object for --env_id")
    parser.add_argument("--reset_options", default="{}", help="JSON object for every reset of --env_id")
    parser.add_argument(
        "--numbers", help="decimals, integers or a mapping of env.numbers; default: as saved in the checkpoint"
    )


def envs_of(arguments: argparse.Namespace, numbers: NumberFormat | None = None, **settings: Any) -> GymnasiumEnvs:
    """Return the factory of the environment that the options name.

    Args:
        arguments: the parsed command line.
        numbers: the number format that the policy was trained with; None takes ``--numbers``.
        settings: further arguments of :class:`~lrl.envs.factory.GymnasiumEnvs`.

    Raises:
        ValueError: ``--env_kwargs`` or ``--reset_options`` is not a JSON object, or ``--numbers`` no number format.
    """
    if numbers is None and arguments.numbers is not None:
        numbers = NumberFormat.parse(arguments.numbers)
    kwargs, options = (json_object(name, getattr(arguments, name)) for name in ("env_kwargs", "reset_options"))
    return GymnasiumEnvs(
        arguments.env_id or "FrozenLake-v1", kwargs, numbers=numbers, reset_options=options, **settings
    )


def add_env_url_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--env_url``, for :func:`envs_at`."""
    parser.add_argument(
        "--env_url", help="an OpenEnv server in place of --env_id; --env_kwargs are then settings of OpenEnvEnvs"
    )


def envs_at(arguments: argparse.Namespace, numbers: NumberFormat | None = None) -> EnvFactory:
    """Return the factory of the environment that ``--env_url`` or ``--env_id`` names.

    Args:
        arguments: the parsed command line.
        numbers: the number format that the policy was trained with, for ``--env_id``; None takes ``--numbers``.

    Raises:
        ValueError: both are given, a setting does not exist, or ``--numbers`` is given for a server, which writes them.
    """
    if arguments.env_url is None:
        return envs_of(arguments, numbers)
    for name in ("env_id", "numbers"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} is given with --env_url, whose server determines it; leave --{name} out.")
    envs = importlib.import_module("lrl.openenv.factory").OpenEnvEnvs
    settings = json_object("env_kwargs", arguments.env_kwargs)
    options = json_object("reset_options", arguments.reset_options)
    return envs.of({**settings, "url": arguments.env_url, "reset_options": options})


def check_env_arguments(arguments: argparse.Namespace) -> None:
    """Raise if ``--env_kwargs`` or ``--reset_options`` would be ignored.

    Raises:
        ValueError: one of them is given and ``--env_id`` is not.
    """
    for name in ("env_kwargs", "reset_options"):
        named = arguments.env_id or getattr(arguments, "env_url", None)
        if not named and json_object(name, getattr(arguments, name)):
            raise ValueError(f"--{name} is given without --env_id; name the environment that it is for.")


def add_fabric_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--accelerator``, ``--devices``, ``--strategy`` and ``--precision``; :func:`fabric_of` reads them."""
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="1", help="number of devices; they share the episodes")
    parser.add_argument("--strategy", default="auto", help="how Fabric starts the devices: ddp, ddp_spawn, dp")
    parser.add_argument("--precision", help="of Fabric, for example bf16-mixed; default: that of the weights")


def fabric_of(arguments: argparse.Namespace) -> Fabric:
    """Return Lightning Fabric with the devices that the options name.

    Raises:
        ValueError: Fabric does not know a setting, or the strategy would shard the policy.
    """
    from lightning.fabric import Fabric

    from lrl.functional.distributed import shards_parameters

    names = ("accelerator", "devices", "strategy", "precision")
    try:
        fabric = Fabric(**{name: getattr(arguments, name) for name in names})
    except RuntimeError as error:  # "No supported gpu backend found!"
        raise ValueError(
            f"--accelerator is {arguments.accelerator!r}, which this machine does not have ({error}); give auto or cpu."
        ) from error
    if shards_parameters(fabric.strategy):
        raise ValueError(
            f"--strategy is {arguments.strategy!r}, which shards the weights; devices play episodes of different "
            "lengths, so each needs the whole policy: give ddp."
        )
    return fabric


def json_object(name: str, text: str) -> dict[str, Any]:
    """Parse the JSON object that was given as ``--name``.

    Raises:
        ValueError: ``text`` is not a JSON object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--{name} is {text!r}; it must be a JSON object.") from error
    if not isinstance(value, dict):
        raise ValueError(f"--{name} is {text!r}; it must be a JSON object.")
    return value


def labelled_number(name: str, text: str) -> tuple[str, float]:
    """Split ``LABEL=NUMBER``, which was given as ``--name``; a number alone is its own label.

    Raises:
        ValueError: what follows the last ``=`` is not a number.
    """
    label, _, value = text.rpartition("=")
    try:
        return label or value, float(value)
    except ValueError as error:
        raise ValueError(f"--{name} is {text!r}; it must be LABEL=VALUE with a number as value.") from error


# Options for language models without training by lrl: loaded here, behind an endpoint, or run by vLLM.

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
    from lrl.evaluation.load import load_model

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

    if not arguments.invalid_retries or loaded.policy.asks_chat_model:
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
    from lrl.evaluation.load import load_served

    retries = retries_of(arguments)
    chat_model = _vllm(arguments, prompt) if arguments.api_url is None else _endpoint(arguments)
    return load_served(chat_model, envs, prompt, arguments.max_new_tokens, retries)


def _endpoint(arguments: argparse.Namespace) -> ChatModel:
    from lrl.chat.served import Prices, ServedChatModel

    same = ("api_key_env", "max_concurrency", "timeout", "max_retries", "max_tokens_field", "accept_empty")
    return ServedChatModel(
        arguments.model,
        arguments.api_url,
        cache=None if arguments.cache == _NO_CACHE else arguments.cache,
        prices=None if arguments.prices is None else Prices(prompt=arguments.prices[0], completion=arguments.prices[1]),
        extra_body=json_object("extra_body", arguments.extra_body),
        **{name: getattr(arguments, name) for name in same},
    )


def _vllm(arguments: argparse.Namespace, prompt: dict[str, Any]) -> ChatModel:
    from lrl.chat.local import LocalChatModel
    from lrl.chat.vllm import VLLMGenerator
    from lrl.lm.config import LanguageModelConfig
    from lrl.prompts import get_response_format

    config = LanguageModelConfig(name=arguments.model, chat_template=arguments.chat_template, dtype=arguments.dtype)
    stop = get_response_format(prompt["response_format"]).stop
    options = json_object("vllm_options", arguments.vllm_options)
    return LocalChatModel(config, VLLMGenerator(config, stop, options), stop, batch_size=1024)
