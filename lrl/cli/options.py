"""Options that several commands share: dataclasses that create the environment, the model or the devices."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from lrl.chat.served import Prices, ServedChatModel, ServerSettings
from lrl.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Seed

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from lrl.chat.model import ChatModel
    from lrl.codecs.numbers import NumberFormat
    from lrl.envs.factory import EnvFactory, GymnasiumEnvs
    from lrl.evaluation.episodes import EpisodeResults
    from lrl.evaluation.load import Loaded


def changed(options: Any, names: Sequence[str] = ()) -> list[str]:
    """Return the names of options that are not at their default.

    Args:
        options: group of options.
        names: names of the options to compare with their defaults; empty compares all options of the group.
    """
    default = type(options)()
    names = names or [one.name for one in fields(options)]
    return [name for name in names if getattr(options, name) != getattr(default, name)]


def exactly_one(**options: Any) -> None:
    """Raise unless exactly one of several options is given.

    Raises:
        ValueError: If no option or more than one is given.
    """
    given = sum(value not in (None, False) for value in options.values())
    if given != 1:
        *names, last = (f"--{name}" for name in options)
        raise ValueError(f"{given} of {', '.join(names)} and {last} are given; give exactly one.")


def labelled_number(name: str, text: str) -> tuple[str, float]:
    """Return label and number of ``LABEL=NUMBER``; a number without label is its own label.

    Args:
        name: name of the option, for the error message.
        text: value of the option.

    Raises:
        ValueError: If what follows the last ``=`` is not a number.
    """
    label, _, value = text.rpartition("=")
    try:
        return label or value, float(value)
    except ValueError as error:
        raise ValueError(f"--{name} is {text!r}; it must be LABEL=VALUE with a number as value.") from error


@dataclass(frozen=True, kw_only=True)
class EnvOptions:
    """Options of the environment."""

    env_id: str | None = None
    """Registered name; default: the environment of the checkpoint, or FrozenLake-v1."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON object of arguments of the environment."""
    reset_options: dict[str, Any] = field(default_factory=dict)
    """JSON object for every reset of the environment."""
    numbers: str | None = None
    """Number format: decimals, integers or a mapping of env.numbers; default: as saved in the checkpoint."""

    @property
    def named(self) -> bool:
        """True if the options name an environment."""
        return self.env_id is not None

    def gymnasium(self, numbers: NumberFormat | None = None, **settings: Any) -> GymnasiumEnvs:
        """Return the factory of the environment.

        Args:
            numbers: number format that the policy was trained with; None takes ``--numbers``.
            settings: further arguments of :class:`~lrl.envs.factory.GymnasiumEnvs`.

        Raises:
            ValueError: If ``--numbers`` is not a number format, or a setting is out of range.
        """
        from lrl.codecs.numbers import NumberFormat
        from lrl.envs.factory import GymnasiumEnvs

        if numbers is None and self.numbers is not None:
            numbers = NumberFormat.parse(self.numbers)
        settings |= {"numbers": numbers, "reset_options": self.reset_options}
        return GymnasiumEnvs(self.env_id or "FrozenLake-v1", self.env_kwargs, **settings)

    def check_used(self) -> None:
        """Raise if ``--env_kwargs`` or ``--reset_options`` is given but no environment is named.

        Raises:
            ValueError: If ``--env_kwargs`` or ``--reset_options`` is given and no environment is named.
        """
        for name in changed(self, ("env_kwargs", "reset_options")):
            if not self.named:
                raise ValueError(f"--{name} is given without --env_id; give --env_id as well.")


@dataclass(frozen=True, kw_only=True)
class PlayedEnvOptions(EnvOptions):
    """Options of the environment that is played."""

    env_url: str | None = None
    """An OpenEnv server in place of --env_id; --env_kwargs are then settings of OpenEnvEnvs."""

    @property
    def named(self) -> bool:
        """True if the options name an environment or a server."""
        return self.env_id is not None or self.env_url is not None

    def factory(self, numbers: NumberFormat | None = None) -> EnvFactory:
        """Return the factory of the environment that ``--env_url`` or ``--env_id`` names.

        Args:
            numbers: number format that the policy was trained with, for ``--env_id``; None takes ``--numbers``.

        Raises:
            ValueError: If ``--env_url`` and ``--env_id`` are both given, a setting does not exist, or ``--numbers`` is
                given for a server.
        """
        if self.env_url is None:
            return self.gymnasium(numbers)
        for name in changed(self, ("env_id", "numbers")):
            raise ValueError(f"--{name} is given with --env_url, whose server determines it; leave --{name} out.")
        envs = importlib.import_module("lrl.openenv.factory").OpenEnvEnvs
        return envs.of({**self.env_kwargs, "url": self.env_url, "reset_options": self.reset_options})

    def load(self, checkpoint: str) -> Loaded:
        """Load the policy of a checkpoint, with the environment of the options, or of the checkpoint if none is named.

        Raises:
            ValueError: If the checkpoint contains no policy, or an option would be ignored.
        """
        from lrl.evaluation.load import load_policy, saved_numbers

        self.check_used()
        numbers = saved_numbers(checkpoint, self.numbers)
        return load_policy(checkpoint, self.factory(numbers) if self.named else None)


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    """Options of the episodes."""

    episodes: PositiveInt = 200
    """Number of episodes, one seed each, all played to their end."""
    seed: Seed = 10_000
    """Seed of the first episode."""
    num_envs: PositiveInt = 16
    """Number of episodes that are played in parallel; the result does not depend on it."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 takes the most probable response or action."""

    def play(self, fabric: Fabric, loaded: Loaded) -> EpisodeResults:
        """Play this device's share of the episodes with a progress bar, and return the results of all devices."""
        from lrl.cli.quiet import progress_bar
        from lrl.evaluation.episodes import evaluate_policy, gather

        policy, rank, world_size = loaded.policy.to(fabric.device), fabric.global_rank, fabric.world_size
        fabric.strategy.precision.convert_module(policy)  # in place; with mixed precision, weights stay in float32
        sampling = policy.sampling_at(self.temperature)
        share = range(rank, self.episodes, world_size)
        with progress_bar(loaded.info["name"], len(share), fabric.is_global_zero) as advance, fabric.autocast():
            settings = {"rank": rank, "world_size": world_size, "on_episode": advance}
            sizes = self.episodes, self.seed, self.num_envs
            return gather(evaluate_policy(policy, loaded.env_factory, *sizes, sampling, **settings))


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Options of the devices."""

    accelerator: str = "auto"
    """Kind of device for Lightning Fabric, such as cpu or gpu; auto takes a GPU if there is one."""
    devices: str = "1"
    """Number of devices; the episodes are divided among them."""
    strategy: str = "auto"
    """How Fabric starts the devices: ddp, ddp_spawn or dp."""
    precision: str | None = None
    """Precision for Lightning Fabric, for example bf16-mixed; default: the precision of the weights."""

    def fabric(self) -> Fabric:
        """Create the Lightning Fabric object for these devices.

        Raises:
            ValueError: If a setting is not valid for Fabric, or the strategy would shard the policy.
        """
        from lightning.fabric import Fabric

        from lrl.functional.distributed import shards_parameters

        try:
            fabric = Fabric(**{one.name: getattr(self, one.name) for one in fields(self)})
        except RuntimeError as error:  # raised if the machine has no such accelerator
            raise ValueError(
                f"--accelerator is {self.accelerator!r}, which this machine does not have ({error}); give auto or cpu."
            ) from error
        except (OverflowError, TypeError) as error:  # the only setting that Fabric does not check itself
            raise ValueError(
                f"--devices is {self.devices!r}; it must be auto, or a positive number of devices."
            ) from error
        if shards_parameters(fabric.strategy):
            raise ValueError(
                f"--strategy is {self.strategy!r}, which shards the weights; devices play episodes of different "
                "lengths, so each needs the whole policy: give ddp."
            )
        return fabric


@dataclass(kw_only=True, eq=False)
class ServerOptions(ServerSettings):
    """Options of a language model that another program runs (extra serve)."""

    api_url: str | None = None
    """OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1."""
    cache: str = "runs/responses.sqlite"
    """SQLite file of responses, or none."""
    prices: tuple[float, float] | None = None
    """Prices of a million tokens of prompts and of responses, for the cost."""

    def chat_model(self, name: str) -> ChatModel:
        """Return the model with this name on the server.

        Raises:
            ValueError: If a setting is out of range.
        """
        settings = {one.name: getattr(self, one.name) for one in fields(self)}
        settings["cache"] = None if self.cache == "none" else self.cache
        if self.prices is not None:
            settings["prices"] = Prices(prompt=self.prices[0], completion=self.prices[1])
        return ServedChatModel(name, **settings)


@dataclass(frozen=True, kw_only=True)
class RetryOptions:
    """Options for resampling invalid responses of policies that write text."""

    invalid_retries: int | None = None
    """Maximum number of times a response without a legal action is sampled again; default: 10 with --api_url,
    otherwise 0."""
    retry_temperature: float | None = None
    """Temperature at which invalid responses are sampled again; default: 0.3."""


_LOCAL_OPTIONS = ("choose", "chat_template", "dtype")
"""Options that only apply to a model in this process, not to one behind ``--api_url``."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a language model that lrl has not trained."""

    model: str | None = None
    """Any causal language model: a name on the Hugging Face hub, a folder, a GGUF file, or its name on the server of
    --api_url."""
    choose: bool = False
    """Choose the most probable legal action instead of generating text."""
    response_format: str | None = None
    """Response format: direct, think_answer or final_answer; default: think_answer, or direct with --choose."""
    num_examples: NonNegativeInt = 0
    """Number of few-shot examples, which are turns of the environment's expert."""
    examples_from: str | None = None
    """Minari data set from which few-shot examples are taken, instead of the environment's expert."""
    history: NonNegativeInt = 0
    """Number of past turns of the episode in the prompt."""
    system: str | None = None
    """System message; default: the environment's description."""
    chat_template: str = "auto"
    """Chat template: auto, plain, content, chatml or a file."""
    dtype: str = "float32"
    """Data type of the weights."""
    max_new_tokens: PositiveInt = 64
    """Maximum number of tokens of a response; without effect with --choose."""
    server: ServerOptions = field(default_factory=ServerOptions)
    retries: RetryOptions = RetryOptions()

    def check(self, devices: str = "1") -> None:
        """Check that the options do not contradict each other, and that none would be ignored.

        Args:
            devices: value of ``--devices``.

        Raises:
            ValueError: If options contradict each other, or an option would be ignored.
        """
        api_url, retries = self.server.api_url, self.retries.invalid_retries
        temperature = self.retries.retry_temperature
        served = None if api_url is None else "--api_url"
        if served is not None and self.model is None:
            raise ValueError("--api_url is given without --model; name the model.")
        # Requests and retries are counted in this process only, so counts of several devices would be incomplete.
        counted = served or ("--invalid_retries" if retries else None)
        if counted is not None and devices != "1":
            raise ValueError(
                f"--devices is {devices!r}; with {counted} it must be 1, because requests and retries are counted per "
                "process."
            )
        if temperature is not None and not (retries or (served and retries is None)):
            raise ValueError(
                f"--retry_temperature is {temperature:g}, but --invalid_retries is {retries or 0}, so that no response "
                "is sampled again; set --invalid_retries to at least 1, or leave --retry_temperature out."
            )
        if self.choose and retries:
            raise ValueError(
                "--invalid_retries is given with --choose, which always takes a legal action; give one of them."
            )
        ignored = [name for name in changed(self) if name not in ("server", "retries")] if self.model is None else []
        for name in ignored:
            raise ValueError(
                f"--{name} is given without --model; it is for --model, because a checkpoint has its own setting and "
                "a baseline none."
            )
        for name in changed(self.server) if api_url is None else ():
            raise ValueError(f"--{name} is given without --api_url; give both or neither.")
        for name in () if api_url is None else changed(self, _LOCAL_OPTIONS):
            raise ValueError(f"--{name} is given with --api_url; it is for models that lrl loads itself.")

    def load(self, envs: EnvFactory) -> Loaded:
        """Load the policy of the model.

        Args:
            envs: environment that it plays.

        Raises:
            ValueError: If options contradict each other, or the model cannot be loaded.
        """
        from lrl.evaluation.load import load_model, load_served

        self.check()
        assert self.model is not None
        response_format = self.response_format or ("direct" if self.choose else "think_answer")
        prompt: dict[str, Any] = {"response_format": response_format, "num_examples": self.num_examples}
        prompt["examples_from"] = self.examples_from
        prompt |= {name: getattr(self, name) for name in changed(self, ("history", "system"))}
        if self.server.api_url is not None:
            chat_model = self.server.chat_model(self.model)
            return load_served(chat_model, envs, prompt, self.max_new_tokens, self._invalid_retries())
        settings = {"chat_template": self.chat_template, "dtype": self.dtype, "max_new_tokens": self.max_new_tokens}
        return load_model(self.model, envs, prompt, choose=self.choose, **settings)

    def with_retries(self, loaded: Loaded) -> Loaded:
        """Wrap a loaded policy so that it samples invalid responses again, if ``--invalid_retries`` is set.

        A policy that queries a chat model is returned unchanged, because it already does this.

        Raises:
            ValueError: If the policy does not write text, or an option is out of range.
        """
        from lrl.policies.retrying import RetryingActor

        if not self.retries.invalid_retries or loaded.policy.asks_chat_model:
            return loaded
        return loaded._replace(policy=RetryingActor(loaded.policy, self._invalid_retries()))

    def _invalid_retries(self) -> Any:
        """Return the settings of the retries, with the defaults of their class for options that are not given."""
        from lrl.policies.retrying import InvalidRetryConfig

        given = {"max_retries": self.retries.invalid_retries, "temperature": self.retries.retry_temperature}
        return InvalidRetryConfig(**{name: value for name, value in given.items() if value is not None})
