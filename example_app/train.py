"""Train a small network on scikit-learn's handwritten digits; a few seconds on one CPU core.

    python example_app/train.py                                                       one run
    python example_app/train.py -m lr=1e-3,1e-4 hydra/launcher=gpu_pool               two jobs, side by side
    python example_app/train.py -m hydra/launcher=box model=mlp,cnn optimizer=adam,sgd
    python example_app/train.py -m --config-name sweep                                all of it said in conf/sweep.yaml

There is nothing of gpu_pool in here: the launcher is a matter of the configuration. A job sees its own GPU and no
other, so ``cuda`` is always right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import hydra
import torch
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

log = logging.getLogger(__name__)


def digits(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (n, 1, 8, 8) from 0 to 1 and their labels (n,): 1437 to train on, 360 to validate; always the same."""
    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images / 16, dtype=torch.float32, device=device).view(-1, 1, 8, 8)
    y = torch.as_tensor(labels, dtype=torch.int64, device=device)
    train, val = train_test_split(range(len(y)), test_size=0.2, random_state=0)
    return x[train], y[train], x[val], y[val]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def cnn(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 4 * 4, 10),
    )


MODELS = {"mlp": mlp, "cnn": cnn}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of the images that the model takes for what they are."""
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).double().mean())


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def train(cfg: DictConfig) -> float:
    """Return the validation accuracy after the last epoch, which is what a sweeper maximises."""
    torch.manual_seed(cfg.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x_train, y_train, x_val, y_val = digits(device)

    model = MODELS[cfg.model.name](cfg.model.width).to(device)
    optimizer = OPTIMIZERS[cfg.optimizer.name](model.parameters(), lr=cfg.lr, **cfg.optimizer.options)
    log.info("%s on %s, %d parameters", cfg.model.name, device, sum(p.numel() for p in model.parameters()))

    val_accuracy = accuracy(model, x_val, y_val)
    for epoch in range(1, cfg.epochs + 1):
        model.train()
        train_loss = 0.0
        for batch in torch.randperm(len(x_train)).to(device).split(cfg.batch_size):
            loss = nn.functional.cross_entropy(model(x_train[batch]), y_train[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_loss += loss.item() * len(batch) / len(x_train)
        val_accuracy = accuracy(model, x_val, y_val)
        log.info("epoch %d/%d: loss %.3f, validation accuracy %.3f", epoch, cfg.epochs, train_loss, val_accuracy)
    return val_accuracy


if __name__ == "__main__":
    train()
