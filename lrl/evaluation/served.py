"""Load a policy that asks a chat model, and describe what was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lrl.envs.factory import EnvFactory
from lrl.evaluation.checkpoint import Loaded, env_id
from lrl.models.chat import ChatModel
from lrl.policies.retrying import InvalidRetryConfig, RetryingActor
from lrl.policies.served import ServedPolicy
from lrl.prompts.template import PromptTemplate
from lrl.rollouts.few_shot_examples import add_examples
from lrl.types import SamplingConfig


def load_served(
    chat_model: ChatModel,
    env_factory: EnvFactory,
    prompt: Mapping[str, Any],
    max_new_tokens: int,
    invalid_retries: InvalidRetryConfig = InvalidRetryConfig(),
) -> Loaded:
    """Make a policy of a chat model.

    Args:
        chat_model: responds.
        env_factory: environment to evaluate in.
        prompt: fields of :class:`~lrl.prompts.template.PromptTemplate`.
        max_new_tokens: maximum number of tokens of a response.
        invalid_retries: how often a response without a legal action is sampled again.

    Raises:
        ValueError: the environment has no codec, or no expert for few-shot examples.
    """
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    policy = ServedPolicy(chat_model, PromptTemplate(**prompt), sampling, invalid_retries)
    policy.connect(env_factory.codec)
    add_examples(policy, env_factory)
    return Loaded(policy, env_factory, {"name": chat_model.name, "env_id": env_id(env_factory)})


def usage_report(loaded: Loaded) -> dict[str, Any]:
    """Return what was asked, and how it is asked again; empty for policies that take every response as it is."""
    if not isinstance(loaded.policy, (ServedPolicy, RetryingActor)):
        return {}
    return {**loaded.policy.report(), "invalid_retries": asdict(loaded.policy.invalid_retries)}


def usage_line(report: Mapping[str, Any]) -> str:
    """Describe in a line what was asked and what it took.

    Args:
        report: see :func:`usage_report`.
    """
    parts = [
        f"{report['asked']} prompts, {report['asked_again']} asked again for a legal action "
        f"({report['further_responses']} further responses), {report['still_invalid']} in vain"
    ]
    if "requests" in report:
        parts.append(requests_line(report))
    return "; ".join(parts)


def requests_line(report: Mapping[str, Any]) -> str:
    """Describe in a line the requests to a server, and their tokens and cost.

    Args:
        report: see :meth:`lrl.models.served_chat.ServedChatModel.report`; what is missing counts 0.
    """
    requests, retries, cached = (report.get(name, 0) for name in ("requests", "retries", "cached"))
    parts = [f"{requests} requests, {retries} of them retries, {cached} prompts known before"]
    parts.append(f"{report.get('prompt_tokens', 0):,} + {report.get('completion_tokens', 0):,} tokens")
    if report.get("cost") is not None:
        parts.append(f"cost {report['cost']:.4g}")
    return "; ".join(parts)
