"""The buffer: every turn in every pass, once, in parts that keep their prompts together; and what is saved of it."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import from_settings

from lrl.data.rollout_buffer import RolloutDataModule, _clusters
from lrl.envs.factory import GymnasiumEnvs
from lrl.training.collect import VectorEnvRollouts
from lrl.types import TurnBatch


def data(**changes):
    sizes = {"num_groups": 2, "group_size": 2, "num_epochs": 3, "num_minibatches": 4} | changes
    return from_settings(RolloutDataModule, GymnasiumEnvs("FrozenLake-v1"), **sizes)


def turns(count=22, prompts=5):
    """Return turns with different advantages and few prompts."""
    ids = (torch.arange(count) * 7) % prompts
    nothing = torch.zeros(count, 2)
    return TurnBatch(
        inputs={
            "prompt_ids": ids[:, None],
            "prompt_mask": torch.ones_like(ids[:, None], dtype=torch.bool),
            "response_ids": nothing.long(),
        },
        response_mask=torch.ones(count, 2, dtype=torch.bool),
        old_logprobs=nothing,
        advantages=torch.arange(count)[:, None].expand(count, 2).float(),
    )


def filled(batch=None, collection=0, **changes):
    module = data(**changes)
    module.fill(collection, None, turns() if batch is None else batch)
    return module


def numbers(part):
    return part.advantages[:, 0].long().tolist()


def test_a_pass_visits_every_turn_once_and_each_pass_in_another_order():
    module = filled()
    passes = [[n for part in range(4) for n in numbers(module.minibatch(4 * epoch + part))] for epoch in range(3)]
    assert all(sorted(order) == list(range(22)) for order in passes)
    assert len({tuple(order) for order in passes}) == 3
    again = filled(collection=1)
    assert numbers(again.minibatch(0)) != numbers(module.minibatch(0))
    first = [numbers(turns(22)[part]) for part in module.first_pass(1, turns(22))]
    assert first == [numbers(again.minibatch(part)) for part in range(len(first))]
    assert numbers(filled().minibatch(0)) == numbers(module.minibatch(0)) != numbers(filled(seed=1).minibatch(0))


def test_a_pass_is_shuffled_once_and_again_for_another_batch_of_the_same_collection(monkeypatch):
    module, orders = data(), []
    order = RolloutDataModule._order
    monkeypatch.setattr(
        RolloutDataModule,
        "_order",
        lambda self, batch, epoch, *args: orders.append(epoch) or order(self, batch, epoch, *args),
    )
    for count in (22, 9):
        module.fill(0, None, turns(count))
        whole = [n for part in range(4) for n in numbers(module.minibatch(part)) if sum(module.step_sizes(part, 1))]
        assert sorted(whole) == list(range(count)) and sum(module.step_sizes(n, 1)[0] for n in range(4)) == count
    assert orders == [0, 0], "once for each batch"
    kept, other = module.state_dict(), data()
    other.fill(0, None, turns(22))
    other.minibatch(0)
    other.load_state_dict(kept)
    assert numbers(other.minibatch(0)) == numbers(module.minibatch(0))


def test_parts_are_as_equal_as_can_be_and_exactly_as_many_as_asked_for():
    assert [len(filled().minibatch(index)) for index in range(4)] == [6, 6, 5, 5]
    assert [len(filled(turns(2)).minibatch(index)) for index in range(4)] == [1, 1, 0, 0]
    assert len(data().train_dataloader()) == data().minibatches_per_collection == 12


def test_a_step_of_accumulated_parts_is_as_large_as_its_parts_together():
    module = filled()
    for parts in (range(3), range(9, 12)):
        expected = sum(len(module.minibatch(part)) for part in parts)
        assert all(module.step_sizes(part, 3) == (expected, 2 * expected) for part in parts)
    assert module.step_sizes(11, 5) == (10, 20), "the last step of a collection has two parts"


def test_one_part_of_a_network_is_all_that_was_collected_and_texts_still_stand_by_prompt():
    texts = turns()
    vectors = texts.replace(inputs={"observation": torch.zeros(22, 3)})
    whole = filled(vectors, num_minibatches=1)
    assert all(whole.minibatch(index) is vectors for index in range(3))
    prompts = filled(texts, num_minibatches=1).minibatch(0).inputs["prompt_ids"][:, 0].tolist()
    assert len(prompts) == 22
    assert sum(a != b for a, b in itertools.pairwise(prompts)) == len(set(prompts)) - 1


def test_turns_whose_prompts_continue_each_other_are_in_one_minibatch():
    episodes, rows = 6, []
    for episode in range(episodes):  # prompts of an episode: its number, then one more token per turn
        rows += [[100, episode, *range(1, turn + 1)] for turn in range(4)]
    ids = torch.zeros(len(rows), 5, dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, prompt in enumerate(rows):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), True
    zeros = torch.zeros(len(rows), 1)
    inputs = {"prompt_ids": ids, "prompt_mask": mask, "response_ids": zeros.long()}
    batch = TurnBatch(inputs=inputs, response_mask=zeros == 0, old_logprobs=zeros, advantages=zeros)
    module, seen = filled(batch, num_minibatches=3), []
    for index in range(3):
        numbers_of = module.minibatch(index).inputs["prompt_ids"][:, 1].tolist()
        assert len(set(numbers_of)) == 2 and len(numbers_of) == 8
        seen += numbers_of
    assert sorted(seen) == sorted(list(range(episodes)) * 4)
    assert seen != sorted(seen)  # the episodes are shuffled


def test_episodes_with_the_same_first_prompt_are_shuffled_and_each_stays_together():
    rows = [[100, 5]] * 8 + [[100, 5, 10 + episode, *range(1, turn)] for episode in range(8) for turn in range(1, 5)]
    order, sizes = sorted(rows), [len(row) for row in sorted(set(map(tuple, rows)))]
    paths = sorted(set(map(tuple, rows)))
    shared = [0, *(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*two, strict=False)))
                   for two in itertools.pairwise(paths))]  # fmt: skip
    clusters = _clusters(sizes, shared)
    assert clusters == [0, *(episode + 1 for episode in range(8) for _ in range(4))] and len(order) == 40


def test_turns_with_equal_prompts_stand_side_by_side():
    module = filled()
    order = [int(p) for index in range(4) for p in module.minibatch(index).inputs["prompt_ids"][:, 0]]
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes == len(set(order)) - 1


def test_at_a_boundary_only_the_clocks_are_saved():
    module = data()
    module.tick(env_steps=8, episodes=4, tokens=20)
    state = module.state_dict()
    assert sorted(state) == ["clocks", "collection"]
    again = data()
    again.load_state_dict(state)
    assert again.clocks == module.clocks and again.clocks["env_steps"] == 8 and not again.has_untrained_minibatches
    trained = filled()
    trained.trained_minibatches = trained.minibatches_per_collection
    assert sorted(trained.state_dict()) == ["clocks", "collection"] and not trained.has_untrained_minibatches


def test_no_minibatch_of_a_new_collection_counts_as_trained():
    module = filled()
    for _ in range(module.minibatches_per_collection):
        assert module.has_untrained_minibatches
        module.count_minibatch()
    assert not module.has_untrained_minibatches
    module.fill(1, None, turns())
    assert module.has_untrained_minibatches and module.trained_minibatches == 0


def test_inside_a_collection_what_is_left_of_it_is_saved(tmp_path):
    module = filled(collection=7)
    module.trained_minibatches = 5
    torch.save(module.state_dict(), tmp_path / "state")
    again = data()
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert again.has_untrained_minibatches and again.trained_minibatches == 5 and again.collection == 7
    for index in range(12):
        ours, theirs = module.minibatch(index), again.minibatch(index)
        assert numbers(ours) == numbers(theirs) and torch.equal(ours.inputs["prompt_ids"], theirs.inputs["prompt_ids"])


def test_a_collection_of_two_ranks_is_not_resumed_by_one():
    state = filled().state_dict()
    state["batches"] = state["batches"] * 2
    with pytest.raises(ValueError, match="during a collection by 2 ranks, and this run has 1.*with 2 ranks"):
        data().load_state_dict(state)


def test_an_empty_buffer_says_what_is_missing():
    with pytest.raises(ValueError, match="VectorEnvRollouts"):
        data().minibatch(0)


@pytest.mark.parametrize("name", ["num_groups", "group_size", "num_epochs", "num_minibatches"])
def test_impossible_sizes_raise_their_name(name):
    with pytest.raises(ValueError, match=f"data.{name} is 0; it must be at least 1"):
        data(**{name: 0})


@pytest.mark.parametrize("name", ["num_envs", "num_groups"])
def test_sizes_that_two_devices_cannot_share_raise_their_key(name):
    five = RolloutDataModule(GymnasiumEnvs("FrozenLake-v1"), **{name: 5})
    with pytest.raises(ValueError, match=f"data.{name} is 5; it must be a multiple of the 2 devices"):
        VectorEnvRollouts().setup(SimpleNamespace(datamodule=five, world_size=2), None, "fit")


def test_held_out_seeds_come_as_one_item():
    (seeds,) = data(validation={"episodes": 3, "seed": 50}).val_dataloader()
    assert seeds.tolist() == [50, 51, 52]
