"""Program of each of two ranks in the test of the overlays: several command lines in the same process."""

import os
import runpy
import sys
import warnings

import torch.distributed as dist

SMALL = {
    "trainer.accelerator": "cpu",
    "trainer.devices": "2",
    "trainer.max_epochs": "1",
    "trainer.limit_val_batches": "0",
    "trainer.callbacks": "[{class_path: CollectionCheckpoint}]",
    "data.init_args.num_groups": "2",
    "data.init_args.group_size": "2",
    "data.init_args.num_epochs": "1",
    "data.init_args.num_minibatches": "1",
}
OVERLAYS = ("ddp", "fsdp")


def work(rank, root, ports):
    """Run ``python -m lrl fit`` with every overlay as rank ``rank``, as a cluster would start it."""
    warnings.simplefilter("ignore")
    for overlay, port in zip(OVERLAYS, ports, strict=True):
        os.environ.pop("LRL_RUN_DIRECTORY", None)
        os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        configs = ["--config", "configs/frozen_lake/grpo.yaml"]
        if overlay == "fsdp":  # the name selects the settings of the overlay
            configs.append("--trainer.strategy=fsdp")
        else:
            configs += ["--config", f"overlays/{overlay}.yaml"]
        settings = [f"--{name}={value}" for name, value in SMALL.items()]
        sys.argv = ["lrl", "fit", *configs, *settings, f"--run_directory={root}/{overlay}"]
        runpy.run_module("lrl", run_name="__main__", alter_sys=False)
        dist.destroy_process_group()
