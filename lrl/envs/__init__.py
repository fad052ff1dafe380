"""Environments and their wrappers. Importing this package registers the environments of lrl with Gymnasium."""

import gymnasium as gym

gym.register(
    id="lrl/FrozenLakeRandomMaps-v0",
    entry_point="lrl.envs.frozen_lake:RandomMapsEnv",
    max_episode_steps=100,
    reward_threshold=0.70,
)

gym.register(
    id="lrl/HalfCheetah-v5",
    entry_point="lrl.envs.factory:half_cheetah",
    max_episode_steps=1000,
    reward_threshold=4800.0,
    kwargs={"gravity": 1.0, "friction": 1.0},
)

for _name, _kind, _limit, _threshold in (
    ("Maze3x3", "Maze", 200, 0.96),
    ("Nim", "Nim", None, None),
    ("Navigation", "Navigation", 1000, 4000.0),
    ("Pong", "Pong", 1000, 3.0),
):
    gym.register(
        id=f"lrl/{_name}-v0",
        entry_point=f"lrl.search.environments:{_kind}Env",
        vector_entry_point=f"lrl.search.environments:{_kind}VectorEnv",
        max_episode_steps=_limit,
        reward_threshold=_threshold,
    )

for _name, _kind, _arguments, _limit in (
    ("RagenFrozenLake", "RagenLake", {}, 25),
    ("RagenFrozenLakeSlippery", "RagenLake", {"is_slippery": True}, 25),
    ("Sokoban1Box", "Sokoban", {}, 10),
    ("Sokoban2Boxes", "Sokoban", {"num_boxes": 2}, 10),
):
    gym.register(
        id=f"lrl/{_name}-v0", entry_point=f"lrl.envs.boards:{_kind}Env", max_episode_steps=_limit, kwargs=_arguments
    )

_MIXED = ("goto", "pickup", "open", "putnext", "pickup_seq_goto")

for _name, _tasks, _split in (
    ("GoTo", ("goto",), "train"),
    ("Pickup", ("pickup",), "train"),
    ("Open", ("open",), "train"),
    ("PutNext", ("putnext",), "train"),
    ("PickUpSeqGoTo", ("pickup_seq_goto",), "train"),
    ("MixedTrain", _MIXED, "train"),
    ("MixedTest", _MIXED, "test"),
    ("GoToTest", ("goto",), "test"),
    ("PickupTest", ("pickup",), "test"),
):
    gym.register(
        id=f"lrl/BabyAI-{_name}Local-v0",
        entry_point="lrl.envs.babyai:LocalLevel",
        kwargs={"tasks": _tasks, "split": _split},
    )
