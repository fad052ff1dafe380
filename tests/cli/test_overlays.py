"""Overlays that one device can run."""

import pytest
from commands import run_words

from lrl.functional.distributed import read_checkpoint

SMALL = "--trainer.accelerator=cpu --trainer.max_epochs=1 --trainer.limit_val_batches=0 --data.init_args.num_groups=2 "
SMALL += "--data.init_args.group_size=2 --data.init_args.num_epochs=1 --data.init_args.num_minibatches=1"


@pytest.mark.slow
@pytest.mark.parametrize("overlay", ["qlora", "bf16"])
def test_a_run_with_the_overlay_trains_on_a_cpu(overlay, tmp_path):
    configs = ["--config", "configs/frozen_lake/grpo.yaml", "--config", f"overlays/{overlay}.yaml"]
    callbacks = "--trainer.callbacks=[{class_path: CollectionCheckpoint}]"
    run = tmp_path / "run"
    done = run_words(["python", "-m", "lrl", "fit", *configs, *SMALL.split(), callbacks, f"--run_directory={run}"])
    assert done.returncode == 0, done.stderr
    weights = read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"]
    assert weights and all("lora_" in name for name in weights) == (overlay == "qlora")
