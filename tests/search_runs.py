"""Searches that take a fraction of a second, and ways to stop them; nothing in this file asks for pytest."""

import contextlib
import os
import signal

import lightning as L
import tiny_runs
from commands import run_command

from lrl.chat.model import ChatModel, Completion
from lrl.data.run_data import ValidationConfig
from lrl.envs.factory import GymnasiumEnvs
from lrl.search.module import PromptedSearchModule, SearchDataModule
from lrl.search.policies import LinearPolicy
from lrl.search.prompted import PromptedSearcher
from lrl.search.prompts import HistoryConfig, SearchPrompt
from lrl.search.rollouts import make_batched, play_parameters
from lrl.search.searchers import CMAES, RandomSearch
from lrl.search.stand_in import HillClimbingChatModel
from lrl.training.checkpoint import CollectionCheckpoint

PLUS = {"prompt": SearchPrompt(describe_environment=True), "history": HistoryConfig(trajectories=2)}


class Forgetful(ChatModel):
    """Chat model that climbs from the history, but every third reply is invalid."""

    name = "forgetful"

    def __init__(self):
        self.model, self.prompts = HillClimbingChatModel(), []

    def complete(self, conversations, sampling, seeds):
        self.prompts.append(conversations[0][-1]["content"])
        if seeds[0] % 3 == 0:
            return [Completion(text="params[0]: 1", finish_reason="stop", prompt_tokens=7, completion_tokens=2)]
        return self.model.complete(conversations, sampling, seeds)


def data_of(id="CartPole-v1", **settings):
    sizes = {"num_iterations": 6, "num_rollouts": 3, "warmup": 2, "max_steps": 60}
    sizes |= {"validation": ValidationConfig(episodes=4, num_envs=4)}
    return SearchDataModule(GymnasiumEnvs(id), **sizes | settings)


def module_of(kind="prompted"):
    searchers = {"random": RandomSearch, "cma": CMAES, "prompted": lambda: PromptedSearcher(Forgetful(), **PLUS)}
    return PromptedSearchModule(LinearPolicy(), searchers[kind]())


def fit(root, *callbacks, module=None, data=None, **settings):
    settings = {"max_epochs": 8, "check_val_every_n_epoch": 8} | settings
    return tiny_runs.train(root, *callbacks, module=module or module_of(), data=data or data_of(), **settings)


def train_to_search(run):
    """Train the embedded model on the histories of a few functions, by a command."""
    command, data = "python -m lrl fit --config configs/synthetic/sft.yaml", "--data.init_args"
    command += f" --run_directory {run} --trainer.max_epochs 1 --trainer.accelerator cpu {data}.batch_size 8"
    command += f" {data}.demonstrations.init_args.num_functions 8"
    command += f" {data}.validation_demonstrations.init_args.num_functions 2"
    result = run_command(command)
    assert result.returncode == 0, result.stderr


def play(policy, factory, parameters, seeds, *settings, **more):
    """Play episodes in environments that are created for this call only."""
    with contextlib.closing(make_batched(factory, max(1, len(seeds)))) as envs:
        return play_parameters(policy, envs, parameters, seeds, *settings, **more)


class StopAt(L.Callback):
    """Ends a run before a proposal, without a checkpoint."""

    def __init__(self, played):
        self.played = played

    def on_train_epoch_start(self, trainer, *_):
        if trainer.datamodule.played == self.played:
            raise KeyboardInterrupt


class KillAt(L.Callback):
    """Kills the process after a proposal, before its episodes."""

    def __init__(self, played):
        self.played = played

    def on_train_batch_start(self, trainer, *_):
        if trainer.datamodule.played == self.played:
            os.kill(os.getpid(), signal.SIGKILL)


class SignalAt(KillAt):
    """Sends SIGTERM after a proposal, before its episodes."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.datamodule.played == self.played:
            os.kill(os.getpid(), signal.SIGTERM)


def fit_until_killed(root):
    """Kill the process inside the sixth policy."""
    fit(root, KillAt(5), CollectionCheckpoint(1))
