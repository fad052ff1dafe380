"""Language models as reinforcement-learning policies.

The names of the Python interface are imported when they are first used, so that ``import lrl`` takes no time.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrl.algorithms.grpo import GRPOModule
    from lrl.algorithms.ppo import CriticConfig, PPOValueHeadModule
    from lrl.algorithms.reinforce_pp import REINFORCEPlusPlusModule
    from lrl.algorithms.reward_model import RewardModelModule
    from lrl.algorithms.sft import SFTModule
    from lrl.algorithms.trpo import LineSearchConfig, NaturalGradientConfig, TRPOModule
    from lrl.api import evaluate, load, train
    from lrl.data.demonstrations import DemonstrationsDataModule
    from lrl.data.jsonl import JsonlDemonstrations
    from lrl.data.minari import MinariDemonstrations
    from lrl.data.rollout_buffer import RolloutDataModule
    from lrl.data.run_data import ValidationConfig
    from lrl.data.sources import ExpertDemonstrations
    from lrl.data.transitions import TransitionsDataModule
    from lrl.envs.factory import EnvFactory, GymnasiumEnvs
    from lrl.envs.frozen_lake import ExpertQRows
    from lrl.envs.prompt_env import PromptEnvs
    from lrl.lm.config import LanguageModelConfig, LoRAConfig
    from lrl.lm.heads import ValueHeadConfig
    from lrl.policies.actor import Actor
    from lrl.policies.baselines import ConstantActor, ExpertActor, RandomActor
    from lrl.policies.head import HeadPolicy
    from lrl.policies.mlp import MLPPolicy
    from lrl.policies.policy import Policy
    from lrl.policies.scoring import ScoringPolicy
    from lrl.policies.text import TextPolicy
    from lrl.prompts import PromptTemplate
    from lrl.rewards.expert_q import QGapReward
    from lrl.rewards.reward import Reward
    from lrl.training.checkpoint import CollectionCheckpoint
    from lrl.training.credit import AdaptiveKLConfig, CreditConfig, GroupCreditConfig, KLConfig
    from lrl.training.gradient_module import GradientModule
    from lrl.training.optimizer import OptimizerConfig
    from lrl.training.progress import ConsoleProgress
    from lrl.training.transcripts import Transcripts
    from lrl.training.value_fit import ValueFit
    from lrl.types import Credit, Decisions, Evaluation, Rollout, SamplingConfig, TokenLoss, TurnBatch

__all__ = [
    "Actor",
    "AdaptiveKLConfig",
    "CollectionCheckpoint",
    "ConsoleProgress",
    "ConstantActor",
    "Credit",
    "CreditConfig",
    "CriticConfig",
    "Decisions",
    "DemonstrationsDataModule",
    "EnvFactory",
    "Evaluation",
    "ExpertActor",
    "ExpertDemonstrations",
    "ExpertQRows",
    "GRPOModule",
    "GradientModule",
    "GroupCreditConfig",
    "GymnasiumEnvs",
    "HeadPolicy",
    "JsonlDemonstrations",
    "KLConfig",
    "LanguageModelConfig",
    "LineSearchConfig",
    "LoRAConfig",
    "MLPPolicy",
    "MinariDemonstrations",
    "NaturalGradientConfig",
    "OptimizerConfig",
    "PPOValueHeadModule",
    "Policy",
    "PromptEnvs",
    "PromptTemplate",
    "QGapReward",
    "REINFORCEPlusPlusModule",
    "RandomActor",
    "Reward",
    "RewardModelModule",
    "Rollout",
    "RolloutDataModule",
    "SFTModule",
    "SamplingConfig",
    "ScoringPolicy",
    "TRPOModule",
    "TextPolicy",
    "TokenLoss",
    "Transcripts",
    "TransitionsDataModule",
    "TurnBatch",
    "ValidationConfig",
    "ValueFit",
    "ValueHeadConfig",
    "evaluate",
    "load",
    "train",
]

_PLACES = {
    name: module
    for module, names in re.findall(r"^    from (\S+) import (.+)$", Path(__file__).read_text("utf-8"), re.MULTILINE)
    for name in names.split(", ")
}
"""Module of each name of the interface, read from the imports above, which only type checkers execute."""


def __getattr__(name: str) -> Any:
    """Import a name of the interface."""
    if name not in _PLACES:
        raise AttributeError(f"module 'lrl' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the names of the interface, for completion."""
    return sorted({*globals(), *_PLACES})
