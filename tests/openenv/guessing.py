"""Game with the interface of OpenEnv's environments: an object, and pydantic models of its messages."""

import random
import typing

import pydantic


class GuessAction(pydantic.BaseModel):
    """Action of the game: a guess."""

    model_config = {"extra": "forbid"}
    guess: int = pydantic.Field(ge=0, le=9)
    metadata: dict[str, typing.Any] = {}


class GuessObservation(pydantic.BaseModel):
    """Observation of the game: a hint."""

    done: bool = False
    reward: float | None = None
    metadata: dict[str, typing.Any] = {}
    hint: str


class GuessingGame:
    """Game in which the seed determines the number, and the fourth guess is the last one."""

    def __init__(self, top: int = 9):
        self.top, self.closed = top, False

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> GuessObservation:
        self.number, self.turns = random.Random(seed).randint(0, self.top), 0
        return GuessObservation(hint="guess")

    def step(self, action: GuessAction, timeout_s: float | None = None) -> GuessObservation:
        if action.guess == 9:
            raise RuntimeError("nine is\nbroken")
        self.turns += 1
        right, last = action.guess == self.number, self.turns == 4
        hint = "right" if right else "lower" if action.guess > self.number else "higher"
        metadata = {"truncated": True} if last and not right else {}
        return GuessObservation(hint=hint, reward=float(right), done=right or last, metadata=metadata)

    def close(self):
        self.closed = True


class Untyped(GuessingGame):
    """Game whose ``step`` has no type of its action."""

    def step(self, action, timeout_s=None):
        return super().step(action)
