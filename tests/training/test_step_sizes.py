"""Accumulated minibatches of any size take the step of the whole batch."""

import pytest
import torch
from tiny_runs import grpo, make_trainer, merged, ppo, rollout_data, save_tiny_model

SGD = {
    "optimizer": {"factory": lambda weights: torch.optim.SGD(weights, lr=0.1), "schedule": "constant"},
    "kl": {"coef": 0.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "normalisation"),
    [(grpo, "sequence"), (grpo, "token"), (grpo, "constant"), (ppo, "sequence"), (ppo, "token")],
)
def test_accumulated_minibatches_of_unequal_size_take_the_step_of_one_batch(folder, tmp_path, algorithm, normalisation):
    steps, sizes = [], []
    for parts in (1, 5):
        settings = SGD if algorithm is grpo else merged(SGD, {"kl": {"target": None}})
        module = algorithm(folder, loss_normalisation=normalisation, **settings)
        module.policy.configure()
        data = rollout_data("episodes" if algorithm is grpo else "continuing", num_epochs=1, num_minibatches=parts)
        trainer = make_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=parts, enable_checkpointing=False)
        start = torch.cat([weight.detach().flatten().clone() for weight in module.parameters()])
        trainer.fit(module, datamodule=data)
        steps.append(torch.cat([weight.detach().flatten() for weight in module.parameters()]) - start)
        sizes.append({len(data.minibatch(index)) for index in range(parts)})
    assert len(sizes[1]) == 2, "minibatches differ in size"
    assert float(steps[0].abs().max()) > 1e-3
    torch.testing.assert_close(steps[1], steps[0], atol=1e-3 * float(steps[0].abs().max()), rtol=0)
