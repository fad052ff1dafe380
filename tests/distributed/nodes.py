"""Program of each of two nodes with one process: the documented commands of torchrun and Slurm, cut short."""

import os
import runpy
import sys
import warnings

import torch.distributed as dist

SMALL = {
    "trainer.accelerator": "cpu",
    "trainer.devices": "1",
    "trainer.max_epochs": "1",
    "trainer.limit_val_batches": "0",
    "trainer.callbacks": "[{class_path: CollectionCheckpoint}]",
    "data.init_args.num_groups": "2",
    "data.init_args.group_size": "2",
    "data.init_args.num_epochs": "1",
    "data.init_args.num_minibatches": "1",
}


def fit(*words):
    """Run ``python -m lrl`` with a command's words after ``lrl``, with fewer steps."""
    sys.argv = ["lrl", *words, *(f"--{name}={value}" for name, value in SMALL.items())]
    runpy.run_module("lrl", run_name="__main__")
    dist.destroy_process_group()


def by_torchrun(words):
    """Do what the program ``torchrun`` does with its words, but fork the process, which has imported everything."""
    from torch.distributed.run import config_from_args, elastic_launch, parse_args

    config, _, program = config_from_args(parse_args(words))
    assert program[:3] == ["-u", "-m", "lrl"]
    config.start_method = "fork"
    elastic_launch(config, fit)(*program[3:])


def work(node, torchrun, srun, job):
    """Run both commands as node ``node``.

    Args:
        node: 0 or 1.
        torchrun: words after ``torchrun``, with one process per node.
        srun: words after ``srun lrl``.
        job: number of the Slurm job, from whose last four digits Lightning takes the port.
    """
    import lrl.cli.main  # noqa: F401

    warnings.simplefilter("ignore")
    by_torchrun(torchrun)
    os.environ |= {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NAME": "train.slurm",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
    }
    fit(*srun)
