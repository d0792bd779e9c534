"""Train a torchvision ResNet-18 on scikit-learn's handwritten digits (1,797 real images, shipped with the package).

A plain PyTorch script: run it with python, with torchrun, or with `monetrun --budget 0.5x recipes/quickstart.py`.
"""

import argparse
import time

import torch
import torch.nn.functional as F
import torchvision
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def load(seed):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def enlarge(images, size):
    """Grey 8x8 images to size x size in three channels, the input of a ResNet-18."""
    return F.interpolate(images, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1).contiguous()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=192)
    parser.add_argument("--size", type=int, default=24, help="side of the enlarged images")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, test = load(args.seed)
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)  # the last batch is smaller
    test_loader = DataLoader(test, batch_size=args.batch_size)

    model = torchvision.models.resnet18(num_classes=10)
    model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)  # small images: keep their resolution at first
    model.maxpool = torch.nn.Identity()
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * len(train_loader))

    for epoch in range(args.epochs):
        start, total = time.perf_counter(), 0.0
        model.train()
        for images, labels in train_loader:
            images, labels = enlarge(images.to(device), args.size), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(labels)

        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test_loader:
                predicted = model(enlarge(images.to(device), args.size)).argmax(1)
                correct += (predicted == labels.to(device)).sum().item()
        print(
            f"epoch {epoch + 1}: loss {total / len(train):.6f}, test accuracy {correct / len(test):.4f}, "
            f"{time.perf_counter() - start:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
