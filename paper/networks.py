"""The networks of the paper and of the benchmarks, each with its widths as arguments."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MLP", "VGG", "ResNet", "SpirometryCNN", "gelu_mlp", "image_mlp", "plane_mlp", "resnet18", "resnet101"]


class MLP(nn.Module):
    """Linear layers of the given sizes with an activation between them; images are flattened.

    The layers are called f.0, f.2, … as in the authors' published weights.

    >>> import torch
    >>> MLP((4, 8, 3))(torch.zeros(5, 1, 2, 2)).shape
    torch.Size([5, 3])
    """

    def __init__(self, sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out), activation()]
        self.f = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """The outputs, (B, sizes[-1])."""
        return self.f(x.flatten(1))


def image_mlp() -> MLP:
    """The paper's MNIST and FashionMNIST network."""
    return MLP((784, 500, 300, 250, 250, 250, 10))


def gelu_mlp(sizes: Sequence[int] = (784, 300, 100, 10)) -> MLP:
    """A smooth network for comparison, shallower because the deep one does not start learning with GELU."""
    return MLP(sizes, nn.GELU)


def plane_mlp(hidden: Sequence[int] = (500, 300, 250, 250, 250)) -> MLP:
    """The paper's two-dimensional network (Fig. 1, Four Quadrant, Nested Interactions), R² → R.

    >>> import torch
    >>> plane_mlp((8,) * 5)(torch.zeros(3, 2)).shape
    torch.Size([3, 1])
    """
    return MLP((2, *hidden, 1))


def _conv3x3(fan_in: int, fan_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)


def _shortcut(fan_in: int, fan_out: int, stride: int) -> nn.Module | None:
    if stride == 1 and fan_in == fan_out:
        return None
    return nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride=stride, bias=False), nn.BatchNorm2d(fan_out))


def _keep_variance(network: nn.Module) -> None:
    """Initialise the convolution weights as in He et al. 2015, which preserves the variance through many ReLUs."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class _BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(fan_in, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(fan_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + identity)


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        fan_out = width * self.expansion
        self.conv1 = nn.Conv2d(fan_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, fan_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(fan_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(fan_in, fan_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + identity)


class ResNet(nn.Module):
    """A residual network for small images: 3×3 stem, no max-pool, parameters named as in torchvision.

    `depths` is the number of blocks in the four stages, whose widths are 1, 2, 4, 8 times `width`.
    """

    def __init__(
        self,
        block: type[_BasicBlock] | type[_Bottleneck],
        depths: Sequence[int],
        width: int = 64,
        n_classes: int = 10,
    ) -> None:
        super().__init__()
        self.conv1 = _conv3x3(3, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        fan_in, stages = width, []
        for stage, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for i in range(depth):
                blocks.append(block(fan_in, width * 2**stage, stride=2 if stage and not i else 1))
                fan_in = width * 2**stage * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(fan_in, n_classes)
        _keep_variance(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (B, n_classes)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def resnet18(width: int = 64, n_classes: int = 10) -> ResNet:
    """ResNet-18 for CIFAR10.

    >>> import torch
    >>> resnet18(width=4)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return ResNet(_BasicBlock, (2, 2, 2, 2), width, n_classes)


def resnet101(width: int = 64, n_classes: int = 10) -> ResNet:
    """ResNet-101 for CIFAR10."""
    return ResNet(_Bottleneck, (3, 4, 23, 3), width, n_classes)


class VGG(nn.Module):
    """Two 3×3 convolutions and a max-pool for each width, then an average and a linear layer.

    >>> import torch
    >>> VGG((4, 8), in_channels=1)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, widths: Sequence[int] = (32, 64, 128), in_channels: int = 3, n_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in, width in zip((in_channels, *widths[:-1]), widths, strict=True):
            layers += [nn.Conv2d(fan_in, width, 3, padding=1), nn.ReLU(inplace=True)]
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(widths[-1], n_classes)
        _keep_variance(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (B, n_classes)."""
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


class _CurveBlock(nn.Module):
    def __init__(self, fan_in: int, channels: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.margins = ((kernel - 1) // 2, kernel // 2)  # keeps the length, for even kernels too
        self.conv = nn.Conv1d(fan_in, channels, kernel)
        self.bn = nn.BatchNorm1d(channels)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        # The skip of the first block adds the curve, one channel, to each of its channels.
        return x + self.dropout(self.relu(self.bn(self.conv(functional.pad(x, self.margins)))))


class SpirometryCNN(nn.Module):
    """The paper's 1-D CNN: volume curves (B, length) → one number (B, 1), e.g. FEV₁.

    Ten blocks of convolution, batch-norm, ReLU, dropout and skip. The paper does not describe the head; here
    it is one linear layer on all channels at all times.

    >>> import torch
    >>> SpirometryCNN(length=30, n_blocks=2, channels=3, kernel=6)(torch.zeros(5, 30)).shape
    torch.Size([5, 1])
    """

    def __init__(
        self,
        length: int = 300,
        n_blocks: int = 10,
        channels: int = 20,
        kernel: int = 200,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(_CurveBlock(channels if i else 1, channels, kernel, dropout) for i in range(n_blocks))
        )
        self.head = nn.Linear(channels * length, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The predicted number, (B, 1)."""
        return self.head(self.blocks(x[:, None]).flatten(1))
