"""Fixtures for tests of supervised fine-tuning: a run, its weights and rows, and checkpoints within a pass."""

import lightning as L
import torch
from tiny_runs import make_trainer


def fit(module, root, source, callbacks=(), ckpt_path=None, **changes):
    trainer = make_trainer(root, *callbacks, **{"gradient_clip_val": 1.0, "enable_checkpointing": False} | changes)
    trainer.fit(module, datamodule=source, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer


def weights(module):
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


def logged(trainer, name):
    return [row[name] for _, row in trainer.logger.rows if name in row]


class SaveInside(L.Callback):
    """Callback that saves a checkpoint after every optimiser step."""

    def __init__(self, folder):
        self.folder, self.saved = folder, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        ends = batch_idx + 1 == trainer.num_training_batches
        if ends or (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.saved.append(self.folder / f"{trainer.current_epoch}-{batch_idx}.ckpt")
            trainer.save_checkpoint(self.saved[-1])
