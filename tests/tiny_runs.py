"""Whole runs that take a fraction of a second: a random Llama of hidden size 16 on FrozenLake, and ways to stop them.

Runs here may be started in processes of their own: nothing in this file asks for pytest.
"""

import dataclasses
import inspect
import os
import signal
import threading
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import Logger

import lrl
from lrl.algorithms.grpo import GRPOModule
from lrl.api import QUIET
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows
from lrl.envs.prompt_env import PromptEnvs
from lrl.lm.config import LanguageModelConfig
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.rewards.expert_q import QGapReward
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.types import SamplingConfig, TurnBatch

SPECIAL, ACTIONS = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"], ["LEFT", "DOWN", "RIGHT", "UP"]
WORDS = [*SPECIAL, "system", "user", "assistant", *ACTIONS, *"ASFHG0123"]
COLLECTIONS = 3
SIZES = {"num_groups": 4, "group_size": 3, "num_epochs": 2, "num_minibatches": 2}
IN_MEMORY = {"accelerator": "cpu", "max_epochs": COLLECTIONS, "log_every_n_steps": 1}
PARTS = SIZES["num_epochs"] * SIZES["num_minibatches"]


def save_tiny_model(folder, kind="llama", **changes):
    """A random model with a tokenizer of 20 words, of which four are FrozenLake's actions."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from lrl.lm.chat_template import CHATML

    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(architecture(kind, **changes))
    if not model.config.tie_word_embeddings:
        favour(model, [WORDS.index(word) for word in (*ACTIONS, "<|im_end|>")])
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def favour(model, words):
    """Make some words more probable than the others, by a hidden coordinate with a constant value."""
    model.get_input_embeddings().weight[:, 0] = 2.0
    model.get_output_embeddings().weight[:, 0] = -3.0
    model.get_output_embeddings().weight[words, 0] = 1.0


def architecture(kind, **changes):
    """A configuration with two layers of hidden size 16."""
    from transformers import AutoConfig

    sizes = {"vocab_size": len(WORDS), "initializer_range": 0.3}
    sizes |= {"bos_token_id": None, "eos_token_id": 3, "pad_token_id": 0}
    if kind == "gpt2":
        sizes |= {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 512}
    else:
        sizes |= {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
        }
    if kind == "falcon":
        del sizes["head_dim"]  # follows from the others
    return AutoConfig.for_model(kind, **sizes | changes)


def text_policy(
    folder,
    history=0,
    temperature=1.0,
    max_prompt_tokens=256,
    max_new_tokens=2,
    value_head=None,
    generator=None,
    system="",
    **model,
):
    """Return a policy whose responses have one or two words."""
    prompt = PromptTemplate(response_format="direct", system=system, history=history)
    sampling = SamplingConfig(max_new_tokens=max_new_tokens, temperature=temperature)
    model = LanguageModelConfig(name=folder, **model)
    return TextPolicy(model, prompt, sampling, max_prompt_tokens, value_head=value_head, generator=generator)


def on_two_ranks(work):
    """Run ``work(rank, reduce)`` in two threads, where ``reduce`` sums over both; return both results."""
    handed, said, meet = [None, None], [None, None], threading.Barrier(2)

    def rank(index):
        def reduce(tensor):
            handed[index] = tensor
            meet.wait(60)
            total = handed[0] + handed[1]
            meet.wait(60)
            return total

        said[index] = work(index, reduce)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def batch_of(decisions, advantage=0.0):
    """Return decisions as a batch to evaluate."""
    return TurnBatch(
        inputs=decisions.inputs,
        response_mask=decisions.response_mask,
        old_logprobs=decisions.logprobs,
        advantages=torch.full_like(decisions.logprobs, advantage),
    )


@torch.no_grad()
def sampled_values(policy, batch):
    """Return the critic's values of a batch, ``(turn, token)``."""
    return policy.critic_view(batch)(torch.arange(len(batch)))


def from_settings(kind, *args, **settings):
    """A module or data module; a mapping changes single fields of a dataclass among its settings, as in YAML."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    for name, value in settings.items():
        if isinstance(value, dict) and dataclasses.is_dataclass(defaults.get(name)):
            settings[name] = dataclasses.replace(defaults[name], **value)
    return kind(*args, **settings)


def merged(settings, changes):
    """Return settings as in YAML, some of which are changed."""
    both = {name for name in settings.keys() & changes.keys() if isinstance(changes[name], dict)}
    return settings | changes | {name: settings[name] | changes[name] for name in both}


def grpo(folder, history=0, temperature=1.0, model=None, **changes):
    """GRPO with a reference."""
    settings = {"optimizer": {"lr": 1e-2, "schedule": "linear"}, "kl": {"coef": 0.1}, "ent_coef": 0.01}
    return from_settings(
        GRPOModule, text_policy(folder, history, temperature, **model or {}), **merged(settings, changes)
    )


def ppo(folder, history=0, **changes):
    """PPO with nested credit, a value head and a reference, with episodes that continue in the next collection."""
    from lrl.algorithms.ppo import PPOValueHeadModule
    from lrl.lm.heads import ValueHeadConfig

    policy = text_policy(folder, history, value_head=ValueHeadConfig(hidden_sizes=(8,), init_seed=0))
    settings = {"optimizer": {"lr": 1e-2, "schedule": "linear"}, "kl": {"coef": 0.1, "target": 0.01}, "ent_coef": 0.01}
    return from_settings(PPOValueHeadModule, policy, **merged(settings, changes))


def network(folder, **changes):
    """PPO of a small network whose observations are normalised."""
    from lrl.algorithms.ppo import PPOValueHeadModule
    from lrl.policies.mlp import MLPPolicy

    policy = MLPPolicy((8,), normalise_observations=True, init_seed=0)
    return from_settings(
        PPOValueHeadModule, policy, **merged({"optimizer": {"lr": 1e-2, "schedule": "linear"}}, changes)
    )


def trpo(folder, model=None, value_iterations=25, **changes):
    """TRPO of a policy that writes text, with episodes that continue in the next collection."""
    from lrl.algorithms.trpo import TRPOModule
    from lrl.lm.heads import ValueHeadConfig
    from lrl.training.value_fit import ValueFit

    policy = text_policy(folder, value_head=ValueHeadConfig(hidden_sizes=(8,), init_seed=0), **model or {})
    return from_settings(TRPOModule, policy, value_fit=ValueFit(iterations=value_iterations), **changes)


def module_of(folder, kind, **changes):
    """Return the algorithm of a kind of run."""
    return {"continuing": ppo, "network": network}.get(kind, grpo)(folder, **OPTIONS.get(kind, {}) | changes)


def sft(folder, value_head=None, **changes):
    """SFT on demonstrations of the expert."""
    from lrl.algorithms.sft import SFTModule

    return from_settings(
        SFTModule, text_policy(folder, value_head=value_head), **merged({"optimizer": {"lr": 1e-2}}, changes)
    )


def demonstrations():
    """The best action of each of FrozenLake's eleven states."""
    from lrl.data.demonstrations import DemonstrationsDataModule
    from lrl.data.sources import ExpertDemonstrations

    return DemonstrationsDataModule(ExpertDemonstrations(ExpertQRows()), GymnasiumEnvs("FrozenLake-v1"), batch_size=4)


def rollout_data(kind, **changes):
    """``prompts``: one turn per episode. ``episodes``: several, of different numbers; ``continuing``: they go on,
    and do for a ``network``."""
    sizes = SIZES
    if kind in ("continuing", "network"):
        sizes = {"num_envs": 12, "num_steps": 4, "num_epochs": 2, "num_minibatches": 2}
    if kind == "network":
        env = GymnasiumEnvs("CartPole-v1", max_episode_steps=9)
    elif kind == "prompts":
        env = PromptEnvs(ExpertQRows(), [QGapReward()])
    else:
        env = GymnasiumEnvs("FrozenLake-v1", {"is_slippery": True}, max_invalid=3, max_episode_steps=6)
    return from_settings(RolloutDataModule, env, **merged({**sizes, "validation": {"episodes": 2}}, changes))


class Rows(Logger):
    """Logger that keeps all metrics except those that depend on wall-clock time."""

    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, {k: v for k, v in metrics.items() if "per_second" not in k and "minutes" not in k}))

    def log_hyperparams(self, *args, **kwargs):
        pass


class Counter(L.Callback):
    """Records collections ``c``, updates ``u`` and ends ``e``, each with its epoch and minibatch."""

    def __init__(self):
        self.events = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        collection = trainer.datamodule.collection
        if not self.events or (batch_idx == 0 and self.events[-1] != f"c{collection}"):
            self.events.append(f"c{collection}")
        self.events.append(f"u{trainer.current_epoch}.{batch_idx}")

    def on_train_epoch_end(self, trainer, pl_module):
        self.events.append(f"e{trainer.current_epoch}")


def make_trainer(root, *callbacks, **changes):
    """Return a trainer for one CPU that keeps all metrics in memory."""
    settings = {**QUIET, **IN_MEMORY, "logger": Rows(), "limit_val_batches": 0, "default_root_dir": str(root)}
    return L.Trainer(callbacks=list(callbacks), **merged(settings, changes))


def train(root, *callbacks, module, data, **changes):
    """Train on one CPU, with all metrics in memory."""
    settings = IN_MEMORY | {"logger": Rows(), "default_root_dir": root} | changes
    return lrl.train(module, data, callbacks=callbacks, **settings)


class Stop(L.Callback):
    """Ends the process without clean-up, at one of three moments of the second collection or its checkpoint."""

    def __init__(self, moment):
        self.moment = moment

    def on_fit_start(self, trainer, pl_module):
        if self.moment == "rollout":
            decide, turns = pl_module.policy.act, []

            def act(*args, **kwargs):
                decided = decide(*args, **kwargs)
                turns.append(trainer.current_epoch)
                if turns.count(1) == (3 if pl_module.policy.prompt.history else 1):
                    stop_here()
                return decided

            pl_module.policy.act = act
        if self.moment == "write":
            cut_writing(trainer)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.moment == "update" and trainer.current_epoch == 1 and trainer.datamodule.trained_minibatches == 2:
            stop_here()


def stop_here():
    """End the process without handlers and clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


def cut_writing(trainer):
    """Write half of the second checkpoint."""
    import lightning.fabric.plugins.io.torch_io as torch_io

    def write(checkpoint, path):
        torch.save(checkpoint, path)
        if trainer.current_epoch == 1:
            os.truncate(path, Path(path).stat().st_size // 2)
            stop_here()

    torch_io._atomic_save = write


def run_until_stopped(folder, kind, root, moment):
    """Train in a separate process until the run is stopped."""
    torch.set_num_threads(1)
    module, data = module_of(folder, kind), rollout_data(kind)
    make_trainer(root, CollectionCheckpoint(every_n_collections=1), Stop(moment)).fit(module, datamodule=data)


FEW_ITERATIONS = {"model": {"dtype": "float64"}, "natural_gradient": {"cg_iterations": 2}, "value_iterations": 2}
FLOAT64 = {"model": {"dtype": "float64"}, "optimizer": {"factory": lambda weights: torch.optim.SGD(weights, lr=0.1)}}
OPTIONS = {"prompts": {}, "episodes": {"history": "all"}, "continuing": {"history": "all"}}
