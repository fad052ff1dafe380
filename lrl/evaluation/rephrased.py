"""Evaluate a trained policy on reworded prompts, renamed actions, or actions that are listed in another order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lrl.codecs.codec import TextCodec
from lrl.codecs.rephrased import Phrasing, RephrasedCodec
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.checkpoint import Loaded
from lrl.shipped import resolve
from lrl.types import PastTurn


def read_phrasings(path: str) -> dict[str, Phrasing]:
    """Read a YAML file of phrasings: from a name to the fields of :class:`~lrl.codecs.rephrased.Phrasing`.

    Raises:
        ValueError: there is no such file, or it has other contents.
    """
    file = Path(resolve(path))
    if not file.is_file():
        raise ValueError(f"--rephrase is {path!r}; there is no such file.")
    try:
        content: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"--rephrase is {path!r}, which is no YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"--rephrase is {path!r}; it must map names to phrasings.")
    phrasings: dict[str, Phrasing] = {}
    for name, fields in content.items():
        known = Phrasing.__dataclass_fields__
        unknown = sorted(set(fields) - set(known)) if isinstance(fields, Mapping) else [fields]
        if unknown:
            raise ValueError(f"--rephrase {path}: {name} has {unknown[0]!r}; it must be one of {', '.join(known)}.")
        for key, kind in (("actions", dict), ("observations", dict), ("order", list)):
            if key in fields and not isinstance(fields[key], kind):
                what = "a list" if kind is list else "a mapping"
                raise ValueError(f"--rephrase {path}: {key} of {name} is {fields[key]!r}; it must be {what}.")
        phrasings[str(name)] = Phrasing(**fields)
    return phrasings


@contextmanager
def rephrased(loaded: Loaded, phrasing: Phrasing) -> Iterator[Loaded]:
    """Provide the policy and its environment in other words inside a ``with`` block; few-shot examples are rephrased.

    Args:
        loaded: what is evaluated; its policy reads text.
        phrasing: the other words.

    Raises:
        ValueError: the policy reads no text, its system message is fixed, or the phrasing does not fit.
    """
    policy, envs = loaded.policy, loaded.env_factory
    if not isinstance(envs, GymnasiumEnvs) or policy.prompt is None:
        raise ValueError("--rephrase needs a policy that reads prompts, in a Gymnasium environment.")
    if policy.prompt.system is not None and (phrasing.description or phrasing.actions or phrasing.order):
        raise ValueError(
            f"--rephrase changes what the system message says, but the policy's prompt.system is "
            f"{policy.prompt.system!r}; give a file that rephrases observations only."
        )
    codec, prompt = RephrasedCodec(envs.codec, phrasing), policy.prompt
    examples = [
        PastTurn(codec.rephrase_observation(turn.observation), codec.rephrase_response(turn.response))
        for turn in prompt.examples
    ]
    try:
        policy.prompt = prompt.with_examples(examples) if examples else prompt
        _connect(policy, codec)
        yield loaded._replace(env_factory=envs.with_codec(codec))
    finally:
        policy.prompt = prompt
        _connect(policy, envs.codec)


def _connect(policy: Any, codec: TextCodec) -> None:
    policy.connect(codec)
    policy.configure()  # the tokens of the actions
