"""The app of the README, train.py there: its commands run it in tests, and its pictures show it. It needs no torch.

It trains nothing, for README_SECONDS, and says so once an epoch. With the highest learning rate, a cnn's loss is no
number, and a vit ends in a segmentation fault.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

EPOCHS = 20

ConfigStore.instance().store("config", {"lr": 0.1, "model": "mlp", "seed": 0})


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def train(cfg: DictConfig) -> float:
    chance = random.Random(f"{cfg.model} {cfg.lr} {cfg.seed}")
    best = 0.97 - 0.06 * abs(math.log10(cfg.lr) + 2) + chance.uniform(-0.02, 0.02)
    pace = float(os.environ.get("README_SECONDS", "0")) / EPOCHS * chance.uniform(0.6, 1.4)
    accuracy = 0.1
    for epoch in range(1, EPOCHS + 1):
        time.sleep(pace)
        accuracy += 0.3 * (best - accuracy)
        if cfg.lr >= 0.1 and epoch == 4 + cfg.seed:
            if cfg.model == "cnn":
                raise FloatingPointError(f"the loss is nan in epoch {epoch}")
            if cfg.model == "vit":
                os.kill(os.getpid(), signal.SIGSEGV)
        bar = "#" * (epoch * 10 // EPOCHS)
        print(f"epoch {epoch:2}/{EPOCHS}|{bar:10}| loss {2 * (1 - accuracy):.3f}", flush=True)
    return round(accuracy, 3)


if __name__ == "__main__":
    train()
