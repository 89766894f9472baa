"""Lightning under torchrun: in the style of its guide for clusters."""

import argparse
import os
import sys
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from torch.utils.data import DataLoader, TensorDataset


class LitRegression(L.LightningModule):
    def __init__(self, delay, exit_at):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.delay, self.exit_at = delay, exit_at

    def training_step(self, batch, batch_idx):
        features, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(features), targets)
        self.log("train_loss", loss, prog_bar=True)
        time.sleep(self.delay)
        if batch_idx + 1 == self.exit_at:
            sys.exit(3)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num_nodes", type=int, default=1)
    parser.add_argument("--output", default=".")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--exit_at", type=int)
    args = parser.parse_args()
    L.seed_everything(1)
    inputs = torch.randn(1280, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    saves = ModelCheckpoint(dirpath=os.path.join(args.output), every_n_train_steps=20, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_epochs=1,
        logger=False,
        log_every_n_steps=1,
        callbacks=[saves, TQDMProgressBar()],
        enable_model_summary=False,
    )
    last = os.path.join(args.output, "last.ckpt")
    trainer.fit(
        LitRegression(args.delay, args.exit_at), loader, ckpt_path=last if os.path.exists(last) else None
    )


if __name__ == "__main__":
    main()
