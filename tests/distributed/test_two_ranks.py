"""Two ranks on one machine: DDP and FSDP2 train, save and resume, and make the same collective calls."""

import json
from types import SimpleNamespace

import equality
import lightning as L
import pytest
import ranks
import torch
from ranks import COLLECTIONS, SIZES
from safetensors.torch import load_file
from tiny_runs import grpo, make_trainer, merged, ppo, rollout_data, save_tiny_model

from lrl.functional.distributed import is_sharded_checkpoint, read_checkpoint
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.training.weights import initial_weights, shard_weights

pytestmark = pytest.mark.distributed
RUNS = sorted(ranks.RUNS)


@pytest.fixture(scope="session")
def root(once, processes):
    """Folder in which one pair of processes wrote the results of each rank, for all workers of the tests."""

    def start(root):
        folder = save_tiny_model(root / "tiny")
        save_tiny_model(f"{folder}-tied", tie_word_embeddings=True)
        equality.save_model(f"{folder}-double")
        torch.save(ranks.save_first(f"{folder}-double", root), root / "one.pt")
        ranks.start_pair(processes, ranks.work, folder, root)

    return once("ranks", start)


@pytest.fixture(scope="session")
def folder(root):
    """The model that they trained."""
    return str(root / "tiny")


@pytest.fixture(scope="session")
def results(root):
    """Results of each rank."""
    return ranks.results_of(root)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_two_iterations_leave_both_ranks_with_the_same_weights(results, run):
    ours, theirs = (rank[run]["weights"] for rank in results)
    assert ours and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert results[0][run]["rows"] == results[1][run]["rows"] and len(results[0][run]["rows"]) == COLLECTIONS


@pytest.mark.slow
def test_rank_0_loads_each_version_of_the_weights_into_a_server(results):
    ours, theirs = (rank["ddp_served"] for rank in results)
    assert ours["loads"] == COLLECTIONS and ours["violations"] == [] and ours["rows"] == theirs["rows"]
    assert all(torch.equal(weight, theirs["weights"][name]) for name, weight in ours["weights"].items())


@pytest.mark.parametrize("run", ranks.RESUMED)
def test_a_resumed_run_ends_bit_identical(results, run):
    for rank in results:
        whole, resumed = rank[run], rank[f"{run}_resumed"]
        assert all(torch.equal(weight, resumed["weights"][name]) for name, weight in whole["weights"].items())
        assert whole["rows"][-1:] == resumed["rows"] and whole["responses"] == resumed["responses"]


@pytest.mark.slow
@pytest.mark.parametrize("run", ranks.EARLY)
def test_one_device_resumes_a_run_of_two_ranks(results, root, folder, tmp_path, run):
    strategy, changes = ranks.RUNS[run]
    last = root / f"{run}.ckpt"  # of the first collection
    assert is_sharded_checkpoint(last) == (strategy == "fsdp2")
    kept = {}

    class Keep(L.Callback):
        def on_train_start(self, trainer, pl_module):
            kept["weights"] = {name: weight.clone() for name, weight in pl_module.state_dict().items()}
            kept["steps"] = {float(state["step"]) for state in trainer.optimizers[0].state.values()}

    if "ppo" in run:
        module = ppo(folder, "all", optimizer={"schedule": "constant"})
        data = rollout_data("continuing", num_epochs=1)
    else:
        module, data = (
            grpo(folder, **merged({"optimizer": {"schedule": "constant"}}, changes)),
            rollout_data("episodes", **SIZES),
        )
    alone = make_trainer(tmp_path, CollectionCheckpoint(1), Keep(), gradient_clip_val=1.0, max_epochs=COLLECTIONS)
    alone.fit(module, datamodule=data, ckpt_path=last, weights_only=True)
    early = results[0][run]["early_weights"]
    assert set(kept["weights"]) == set(early) and kept["steps"] == {2.0}
    assert all(torch.equal(kept["weights"][name], weight) for name, weight in early.items())
    assert data.rollout.responses == equality.side_by_side([rank[run]["responses"] for rank in results])


def test_a_checkpoint_from_inside_a_collection_is_resumed_with_as_many_ranks(results, root, folder, tmp_path):
    alone = make_trainer(tmp_path, CollectionCheckpoint(1), gradient_clip_val=1.0)
    with pytest.raises(ValueError, match="during a collection by 2 ranks"):
        alone.fit(
            grpo(folder, optimizer={"schedule": "constant"}),
            datamodule=rollout_data("episodes", **SIZES),
            ckpt_path=root / "ddp_inside" / "inside.ckpt",
            weights_only=True,
        )


def test_a_checkpoint_from_inside_a_collection_holds_what_each_rank_collected(results):
    for rank in results:
        whole, resumed = rank["ddp_inside"]["whole"], rank["ddp_inside"]["resumed"]
        assert all(torch.equal(weight, resumed["weights"][name]) for name, weight in whole["weights"].items())
        assert whole["rows"][-1:] == resumed["rows"]


def test_every_rank_makes_the_same_number_of_collective_calls(results):
    ours, theirs = ({name: outcome["collectives"] for name, outcome in rank.items()} for rank in results)
    assert ours == theirs and all(sum(calls) > 0 for calls in ours.values())
    unequal = [run for run in ours if results[0][run].get("turns") != results[1][run].get("turns")]
    assert "ddp_uneven" in unequal and "fsdp2_uneven" in unequal and "fsdp2_full" in unequal


@pytest.mark.parametrize("kind", ["full", "lora", "warm", "ppo"])
def test_fsdp2_trains_as_ddp_does_with_half_the_weights_on_each_rank(results, kind):
    for run in {f"fsdp2_{kind}", f"fsdp2_one_file_{kind}"} & set(results[0]):
        for name, weight in results[0][f"ddp_{kind}"]["weights"].items():
            torch.testing.assert_close(results[0][run]["weights"][name], weight, atol=1e-3, rtol=1e-3)
        sizes = [rank[run]["local_size"] for rank in results]
        assert sum(sizes) == results[0][f"ddp_{kind}"]["local_size"]


@pytest.mark.parametrize("run", ["fsdp2_full", "fsdp2_lora"])
def test_a_checkpoint_in_parts_is_read_as_one(results, root, run):
    checkpoint = read_checkpoint(root / run / "checkpoints" / "last.ckpt")
    assert is_sharded_checkpoint(root / run / "checkpoints" / "last.ckpt")
    weights = results[0][run]["weights"]
    assert set(checkpoint["state_dict"]) == set(weights) and checkpoint["lrl"]["env_steps"] > 0
    assert all(torch.equal(checkpoint["state_dict"][name], weight) for name, weight in weights.items())
    started = initial_weights(str(root / run / "checkpoints" / "last.ckpt"))
    assert {f"policy.{name}" for name in started} == set(weights)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_target_kl_stops_updates_on_both_ranks_or_on_none(results, strategy):
    ours, theirs = (rank[f"{strategy}_kl_trips"] for rank in results)
    assert ours["rows"] == theirs["rows"]
    assert all(torch.equal(weight, theirs["weights"][name]) for name, weight in ours["weights"].items())
    untold = results[0][f"{strategy}_kl_free"]["weights"]
    assert not all(torch.equal(weight, untold[name]) for name, weight in ours["weights"].items())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_loss_that_is_not_finite_on_one_rank_ends_both(results, root, strategy):
    for rank in results:
        assert "train/loss is not finite in minibatch 2 of collection 2" in rank[f"{strategy}_loss"]["sentence"]
    last = read_checkpoint(root / f"{strategy}_loss" / "checkpoints" / "last.ckpt")
    assert all(torch.isfinite(weight).all() for weight in last["state_dict"].values())


@pytest.mark.parametrize(("strategy", "moment"), ranks.SIGNALS)
def test_a_signal_to_one_rank_ends_both_and_they_resume_bit_identically(results, strategy, moment):
    for number, rank in enumerate(results):
        resumed, whole = rank[f"{strategy}_{moment}"], rank[f"{strategy}_full"]
        assert resumed["status"] == (0 if number else 143), "Lightning would kill rank 0 for another rank's status"
        assert all(torch.equal(weight, resumed["weights"][name]) for name, weight in whole["weights"].items())
        assert resumed["rows"] == whole["rows"][-1:]


@pytest.mark.parametrize("run", ranks.EXPORTED)
def test_the_exported_folder_holds_the_weights_of_both_ranks(results, root, run):
    (file,) = (root / run / "model").glob("*.safetensors")
    saved = load_file(file)
    for name, weight in results[0][run]["weights"].items():
        name = name.removeprefix("policy.language_model.model.").replace(".default", "")
        if name == "lm_head.weight" and run == "fsdp2_tied":
            name = "model.embed_tokens.weight"
        assert torch.equal(saved[name], weight), name
    whole = json.loads((root / run / "model" / "config.json").read_text()) if "adapter" not in file.name else {}
    assert whole.get("architectures", ["LlamaForCausalLM"]) == ["LlamaForCausalLM"]


@pytest.mark.parametrize("case", equality.SAMPLE)
def test_two_ranks_end_with_the_weights_of_one_process(results, folder, tmp_path, case):
    """See ``equality.py``; the other cases are in ``assets/results/ranks.json``."""
    alone = equality.run(case, f"{folder}-double", tmp_path)
    for strategy in equality.CASES[case].strategies:
        row = ranks.compared(case, strategy, alone, [rank[f"{case}, {strategy}"] for rank in results])
        assert row["difference"] <= row["tolerance"] < row["largest_change"] / 1e4


@pytest.mark.slow
def test_checkpoints_are_resumed_on_another_number_of_devices(results, root):
    """One process resumes what two ranks wrote, under FSDP2 after ``lrl consolidate``, and two what one wrote."""
    whole = torch.load(root / "one.pt")
    for row in ranks.resumed_rows(f"{root}/tiny-double", root, whole, results):
        assert row["difference"] <= row["tolerance"] < row["largest_change"] / 1e4, row


def test_both_ranks_move_inside_the_trust_region(results):
    ours, theirs = (rank["ddp_trpo"]["rows"] for rank in results)
    assert ours == theirs and all(0 < row["train/kl"] <= 0.01 for _, row in ours)


def test_a_critic_that_demonstrations_do_not_train_is_one_sentence(results):
    assert "model.policy has a critic, which demonstrations do not train" in results[1]["ddp_sft_critic"]["sentence"]


def test_sharded_weights_have_no_trust_region(results):
    assert "trainer.strategy shards the weights (FSDP2)" in results[0]["fsdp2_trpo"]["sentence"]


def test_sharded_weights_are_not_quantised():
    model = SimpleNamespace(has_critic_adapter=False, config=SimpleNamespace(quantization="nf4"))
    mesh = {"tensor_parallel": SimpleNamespace(size=lambda: 1)}
    with pytest.raises(ValueError, match="quantization is nf4, whose packed weights FSDP2 .* it must be null, or"):
        shard_weights(SimpleNamespace(trunk=SimpleNamespace(language_model=model)), mesh)
