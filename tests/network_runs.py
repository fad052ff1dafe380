"""Random networks as policies, and their run directories."""

import numpy as np
import torch
import yaml

from lrl.policies.mlp import MLPPolicy
from lrl.types import RandomKeys

MLP = {"hidden_sizes": [8], "normalise_observations": True, "init_seed": 0}


KEYS = RandomKeys(seed=0, purpose="evaluation", collection=0, env=np.zeros(1, int), turn=np.zeros(1, int))


def network(env, scale=1e4):
    """Return a random network that normalises observations; its means for a Box are far out of bounds."""
    policy = MLPPolicy(**MLP)
    policy.connect(env.codec)
    policy.connect_spaces(*env.spaces)
    policy.configure()
    size = policy.norm.counting.shape[1]
    policy.norm.learn(1.0 + 3.0 * torch.randn(50, size, generator=torch.Generator().manual_seed(0)), 0)
    policy.norm.settle(1)
    with torch.no_grad():
        policy.actor[-1].weight.mul_(scale)
    return policy


def save_run(run, policy, env, trained=None):
    """Write a run directory of a policy (by default a network) and of its environment's arguments."""
    factory = {"class_path": "GymnasiumEnvs", "init_args": env}
    trained = trained or {"class_path": "MLPPolicy", "init_args": MLP}
    config = {"model": {"init_args": {"policy": trained}}, "data": {"init_args": {"env": factory}}}
    state = {f"policy.{name}": tensor for name, tensor in policy.state_dict().items()}
    ours = {"config": yaml.safe_dump(config), "env_steps": 7, "fingerprint": policy.fingerprint}
    (run / "checkpoints").mkdir(parents=True)
    torch.save({"state_dict": state, "lrl": ours}, run / "checkpoints" / "last.ckpt")


def save_reward_model(model, path):
    """Write a checkpoint of a reward model, as a run of ``RewardModelModule`` does."""
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": weights, "lrl": {"reward_model": model.about}}, path)
