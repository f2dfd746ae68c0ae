import pytest
import torch
from torch import nn

from paper.networks import MLP, VGG, SpirometryCNN, gelu_mlp, image_mlp, plane_mlp, resnet18, resnet101


def n_parameters(network):
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("network", "shape", "n_outputs"),
    [
        (image_mlp(), (1, 28, 28), 10),
        (gelu_mlp(), (1, 28, 28), 10),
        (plane_mlp(), (2,), 1),
        (resnet18(width=2, n_classes=7), (3, 32, 32), 7),
        (resnet101(width=1), (3, 16, 16), 10),
        (VGG((2, 3)), (3, 32, 32), 10),
        (SpirometryCNN(n_blocks=2, channels=2), (300,), 1),
        (SpirometryCNN(length=31, n_blocks=3, channels=2, kernel=7), (31,), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_shapes_and_independence_of_the_batch(network, shape, n_outputs):
    network.double().eval()
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0)).double()
    output = network(x)
    assert output.shape == (3, n_outputs)
    torch.testing.assert_close(network(x[1:2]), output[1:2])


def test_sizes_are_those_of_the_published_networks():
    assert n_parameters(image_mlp()) == 784 * 500 + 500 * 300 + 300 * 250 + 2 * 250 * 250 + 250 * 10 + 1560
    assert [m.out_features for m in plane_mlp().modules() if isinstance(m, nn.Linear)] == [500, 300, 250, 250, 250, 1]
    assert n_parameters(resnet18()) == 11_173_962  # ResNet-18 with a 3×3 stem and ten classes
    assert n_parameters(resnet101()) == 42_512_970
    spirometry = SpirometryCNN()
    assert [m.kernel_size for m in spirometry.modules() if isinstance(m, nn.Conv1d)] == [(200,)] * 10


def test_resnet_parameters_are_named_as_in_torchvision():
    names = set(resnet18(width=1).state_dict())
    stage = {f"layer2.0.{n}.weight" for n in ("conv1", "bn1", "conv2", "bn2", "downsample.0", "downsample.1")}
    assert stage | {"conv1.weight", "bn1.running_var", "fc.bias"} <= names
    assert not any(name.startswith("layer1.0.downsample") for name in names)
    assert {"layer1.0.conv3.weight", "layer1.0.downsample.0.weight"} <= set(resnet101(width=1).state_dict())


def test_activation_is_between_layers_only():
    assert [type(m) for m in MLP((2, 3, 1), nn.GELU).f] == [nn.Linear, nn.GELU, nn.Linear]
