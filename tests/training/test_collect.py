"""Every algorithm adds the callback that collects rollouts, for all callbacks that the user gives the trainer."""

import lightning as L
import pytest
from tiny_runs import Counter, demonstrations, make_trainer, network, rollout_data, save_tiny_model, sft

from lrl.training.collect import VectorEnvRollouts
from lrl.training.progress import ConsoleProgress


class CountedRollouts(VectorEnvRollouts):
    """Callback that counts its collections."""

    collections = 0

    def _collect(self, *args):
        self.collections += 1
        super()._collect(*args)


def collecting(trainer):
    return [callback for callback in trainer.callbacks if isinstance(callback, VectorEnvRollouts)]


@pytest.mark.parametrize("own", [[], [VectorEnvRollouts()], [CountedRollouts()]])
def test_a_run_collects_once_per_epoch_with_the_users_callback_or_with_one_of_its_own(own, tmp_path):
    counter = Counter()
    trainer = make_trainer(tmp_path, *own, counter, max_epochs=2)
    module, data = network(""), rollout_data("network")
    trainer.fit(module, data)
    assert [event for event in counter.events if event[0] == "c"] == ["c0", "c1"]
    assert data.clocks["env_steps"] == 2 * 12 * 4
    (used,) = collecting(trainer)
    assert used in own or not own
    assert getattr(used, "collections", 2) == 2
    trainer.validate(module, data, verbose=False)
    assert collecting(trainer) == [used]


class CollectionReader(L.Callback):
    """Records which collection the buffer holds at the start of each epoch."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.seen.append(trainer.datamodule.collection)


def test_callbacks_of_the_user_find_the_collection_of_their_epoch(tmp_path):
    reader = CollectionReader()
    trainer = make_trainer(tmp_path, ConsoleProgress(), reader, max_epochs=2)
    trainer.fit(network(""), rollout_data("network"))
    assert reader.seen == [0, 1]
    assert isinstance(trainer.callbacks[0], ConsoleProgress)


def test_a_run_on_demonstrations_collects_nothing(tmp_path):
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(sft(save_tiny_model(tmp_path)), demonstrations())
    assert not collecting(trainer)
