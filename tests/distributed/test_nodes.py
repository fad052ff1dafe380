"""The documented commands for several nodes, by two processes that are one node each."""

import csv
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

import nodes
import pytest
import yaml

from lrl.functional.distributed import is_sharded_checkpoint, read_checkpoint

pytestmark = pytest.mark.distributed
PAGE = Path("docs/guides/devices.md")


def documented(program):
    """Return the words of the page's command that starts with a program."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8").replace("\\\n", " "), re.DOTALL)
    (line,) = [line for block in blocks for line in block.splitlines() if line.startswith(f"{program} ")]
    return shlex.split(line)


def value_of(words, option):
    return words[words.index(option) + 1]


def free_port():
    """Return a free port among those that Lightning takes for Slurm jobs: 15000 plus four digits."""
    for port in range(15000 + os.getpid() % 9000, 25000):
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def words_of_srun(words, folder):
    """Run the job script as ``sbatch`` would, and return the words that it gives to ``srun``."""
    recorded, program = folder / "words", folder / "srun"
    program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {recorded}\n')
    program.chmod(0o755)
    script = words.index("scripts/train.slurm")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1"}
    subprocess.run(["bash", *words[script:]], check=True, env=environment)
    return recorded.read_text().splitlines()


@pytest.fixture(scope="module")
def root(tmp_path_factory, processes):
    """Folder in which two nodes wrote one run by torchrun and one by Slurm."""
    root = tmp_path_factory.mktemp("nodes")
    torchrun, port = documented("torchrun")[1:], free_port()
    one = {"--nproc_per_node": "1", "--rdzv_endpoint": f"127.0.0.1:{port}", "--run_directory": f"{root}/torchrun"}
    for option, value in one.items():
        torchrun[torchrun.index(option) + 1] = value
    program, *srun = words_of_srun(documented("sbatch"), root)
    assert program == "lrl"
    srun.append(f"--run_directory={root}/slurm")
    job = 10000 + free_port() - 15000
    workers = [processes.Process(target=nodes.work, args=(node, torchrun, srun, job)) for node in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(500)
        worker.kill()
    return root


@pytest.mark.parametrize(
    ("program", "number", "processes"),
    [("torchrun", "--nnodes", "--nproc_per_node"), ("sbatch", "--nodes", "--ntasks-per-node")],
)
def test_documented_numbers_of_nodes_and_processes_are_those_of_the_trainer(program, number, processes):
    words = documented(program)
    assert value_of(words, number) == value_of(words, "--trainer.num_nodes") == "2"
    assert value_of(words, processes) == value_of(words, "--trainer.devices")


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "strategy"), [("torchrun", "fsdp"), ("slurm", "ddp")])
def test_two_nodes_train_one_run(root, launcher, strategy):
    run = root / launcher
    config = yaml.safe_load((run / "config.yaml").read_text())["trainer"]
    if strategy == "fsdp":
        assert config["strategy"]["class_path"] == "lightning.pytorch.strategies.ModelParallelStrategy"
        assert config["strategy"]["init_args"]["data_parallel_size"] == "auto"
        assert "trainer.strategy fsdp: the weights are sharded by FSDP2" in (run / "run.log").read_text()
    else:
        assert config["strategy"] == strategy
    with (run / "metrics.csv").open(newline="") as lines:
        losses = [row["train/loss"] for row in csv.DictReader(lines) if row.get("train/loss")]
    assert len(losses) == 1 and config["num_nodes"] == 2
    last = run / "checkpoints" / "last.ckpt"
    assert is_sharded_checkpoint(last) == (strategy == "fsdp")
    assert len(list(last.glob("*.distcp"))) == (2 if strategy == "fsdp" else 0)
    assert read_checkpoint(last)["lrl"]["env_steps"] == 4
