"""Tests of models whose parameters are sharded, on one rank."""

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lrl.functional.distributed import unsharded


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_parameters_stay_gathered_over_several_forward_passes(one_rank):
    def are_sharded():
        return [isinstance(parameter, DTensor) for parameter in model.parameters()]

    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    fully_shard(model[0])
    fully_shard(model)
    assert are_sharded() == [True, True]
    with unsharded(model):
        for _ in range(2):
            assert are_sharded() == [False, False]
            model(torch.ones(1, 2))
    assert are_sharded() == [True, True]
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert are_sharded() == [True, True]  # as before the context, a forward pass frees what it gathered
