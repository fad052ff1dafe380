"""Lightning trainers that log to memory and print nothing."""

import lightning as L
from tiny_runs import Rows

from lrl.training.checkpoint import CollectionCheckpoint


def trainer_of(root, *callbacks, **settings):
    bare = {"accelerator": "cpu", "devices": 1, "logger": Rows(), "enable_progress_bar": False, "max_epochs": 3}
    bare |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    bare |= {"log_every_n_steps": 1}
    writes = any(isinstance(callback, CollectionCheckpoint) for callback in callbacks)
    return L.Trainer(**bare | settings, callbacks=list(callbacks), default_root_dir=root, enable_checkpointing=writes)


def fit(root, *callbacks, module, data, ckpt_path=None, **settings):
    trainer = trainer_of(root, *callbacks, **settings)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer
