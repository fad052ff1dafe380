"""The base class of actors that change what another actor decides."""

from __future__ import annotations

from abc import ABC

from gymnasium.vector import VectorEnv

from lrl.policies.actor import Actor


class ActorWrapper(Actor, ABC):
    """Wraps another actor, as :class:`gymnasium.Wrapper` wraps an environment; a subclass defines :meth:`act`.

    Args:
        actor: connected and configured.
    """

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.actor, self.codec, self.sampling = actor, actor.codec, actor.sampling

    @property
    def response_format(self) -> str | None:
        """The response format of the wrapped actor."""
        return self.actor.response_format

    def prepare(self, envs: VectorEnv) -> None:
        """Prepare the environments for the wrapped actor."""
        self.actor.prepare(envs)
