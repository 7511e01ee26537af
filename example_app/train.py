"""Train a small network on scikit-learn's handwritten digits; a few seconds on one CPU core.

    python example_app/train.py                                                       one run
    python example_app/train.py -m lr=1e-3,1e-4 hydra/launcher=gpu_pool               two jobs, side by side
    python example_app/train.py -m hydra/launcher=box model=mlp,cnn optimizer=adam,sgd
    python example_app/train.py -m --config-name sweep                                all of it said in conf/sweep.yaml
    python example_app/train.py -m lr=1e-3,1e-4 hydra/launcher=ddp                    each job a group of two ranks
    torchrun --nproc-per-node 2 example_app/train.py                                  one run, as such a group

There is nothing of gpu_pool in here: the launcher is a matter of the configuration. A job sees its own GPU and no
other, so ``cuda`` is always right; where it is a group of ranks, they see the GPUs of the group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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


def join_the_others() -> tuple[int, int, torch.device]:
    """This process's rank, the number of ranks, its device. One that nobody has started as a rank is the only one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not dist.is_torchelastic_launched():
        return 0, 1, torch.device("cuda" if gpus else "cpu")
    # NCCL refuses two ranks on one GPU; gloo lets them share it.
    dist.init_process_group("nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if dist.get_rank() > 0:
        log.setLevel(logging.WARNING)  # the first one speaks for all
    return dist.get_rank(), dist.get_world_size(), device


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def train(cfg: DictConfig) -> float:
    """Return the validation accuracy after the last epoch, which is what a sweeper maximises.

    Each of several ranks trains on its share of every batch, which is as large as with one.
    """
    rank, ranks, device = join_the_others()
    torch.manual_seed(cfg.seed)  # the same for all ranks: they draw the same batches, and share them
    x_train, y_train, x_val, y_val = digits(device)

    model = MODELS[cfg.model.name](cfg.model.width).to(device)
    optimizer = OPTIMIZERS[cfg.optimizer.name](model.parameters(), lr=cfg.lr, **cfg.optimizer.options)
    trained = DistributedDataParallel(model) if dist.is_initialized() else model
    log.info("%s on %s, %d parameters", cfg.model.name, device, sum(p.numel() for p in model.parameters()))

    val_accuracy = accuracy(model, x_val, y_val)
    for epoch in range(1, cfg.epochs + 1):
        model.train()
        train_loss = 0.0
        order = torch.randperm(len(x_train))[: len(x_train) // ranks * ranks]  # shares of one size: they keep in step
        for batch in order[rank::ranks].to(device).split(max(1, cfg.batch_size // ranks)):
            loss = nn.functional.cross_entropy(trained(x_train[batch]), y_train[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_loss += loss.item() * len(batch) * ranks / len(order)
        val_accuracy = accuracy(model, x_val, y_val)
        log.info("epoch %d/%d: loss %.3f, validation accuracy %.3f", epoch, cfg.epochs, train_loss, val_accuracy)
    if dist.is_initialized():
        dist.destroy_process_group()
    return val_accuracy


if __name__ == "__main__":
    train()
