"""The overlays for several devices, by the command line on two CPU ranks."""

import csv
import socket

import overlay_ranks
import pytest
import yaml

from lrl.functional.distributed import is_sharded_checkpoint, read_checkpoint

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def root(tmp_path_factory, processes):
    """Folder in which the ranks wrote one run per overlay."""
    root = tmp_path_factory.mktemp("overlays")
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1] for free in (first, second)]
    workers = [processes.Process(target=overlay_ranks.work, args=(rank, str(root), ports)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(500)
        worker.kill()
    return root


@pytest.mark.slow
@pytest.mark.parametrize("overlay", overlay_ranks.OVERLAYS)
def test_two_ranks_train_with_the_overlay(root, overlay):
    config = yaml.safe_load((root / overlay / "config.yaml").read_text())
    strategy = config["trainer"]["strategy"]
    if overlay == "fsdp":
        assert strategy["class_path"] == "lightning.pytorch.strategies.ModelParallelStrategy"
        assert strategy["init_args"]["data_parallel_size"] == "auto"
    else:
        assert strategy == "ddp"
    with (root / overlay / "metrics.csv").open(newline="") as lines:
        losses = [row["train/loss"] for row in csv.DictReader(lines) if row.get("train/loss")]
    assert len(losses) == 1
    last = root / overlay / "checkpoints" / "last.ckpt"
    assert is_sharded_checkpoint(last) == (overlay == "fsdp")
    assert read_checkpoint(last)["lrl"]["env_steps"] == 4
