"""Models and tools as other packages make them: small stand-ins of their shapes, and the real captum and scipy."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import smoothhess as sh
from smoothhess import segments

OPTIONS = {"sigma": 0.2, "n_calls": 200}


# --- captum -----------------------------------------------------------------------------------------------------------


def test_a_feature_mask_means_what_it_means_to_captum():
    """Captum's FeatureAblation of a group moves all its features at once, as our group sums do along v = −x."""
    attr = pytest.importorskip("captum.attr", reason="captum is not installed")
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(6, 6, generator=generator).double()
    b = torch.randn(6, generator=generator).double()
    f = lambda x: ((x @ A) * x).sum(1) / 2 + x @ b  # its Hessian is (A + Aᵀ)/2, exactly
    x = torch.randn(1, 6, generator=generator).double()
    for mask in (torch.tensor([[0, 0, 1, 1, 2, 2]]), torch.tensor([0, 1, 1, 0, 2, 2])):
        ablated = attr.FeatureAblation(f).attribute(x, feature_mask=mask.reshape(1, 6))
        exact = sh.baselines.hessian(f, x)
        moved = exact.groups(mask, direction=-x[0])
        # f(x) − f(without I) = −(G·v + ½ vᵀHv) over the group, for a quadratic
        change = -(moved.gradient[0] + moved.hessian[0].diagonal() / 2)
        for i in range(6):
            assert float(ablated[0, i]) == pytest.approx(float(change[mask.reshape(-1)[i]]), abs=1e-9)
    sampled = sh.SmoothHess(f).attribute(x, feature_mask=mask, **OPTIONS)
    assert sampled.shape == (1, 3, 3)


def test_the_forward_function_of_a_captum_method_serves_as_it_is():
    attr = pytest.importorskip("captum.attr", reason="captum is not installed")
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    method = attr.Saliency(net)
    x = torch.randn(3, 4).double().requires_grad_()  # Saliency warns where it has to set this
    targets = torch.tensor([0, 2, 1])
    result = sh.SmoothHess(method.forward_func).attribute(x, target=targets, sigma=1e-3, n_calls=400)
    torch.testing.assert_close(
        result.gradient.abs(), method.attribute(x, target=targets).detach(), rtol=1e-3, atol=1e-4
    )


# --- torchvision- and timm-style networks -----------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block with batch-norm and an in-place ReLU that is used twice."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """The shape of torchvision's."""

    def __init__(self, classes=5):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        self.maxpool, self.layer1 = nn.MaxPool2d(2), nn.Sequential(Block(6))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(6, classes)

    def forward(self, x):
        x = self.layer1(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Attention(nn.Module):
    """A patch embedding, one pre-norm attention block and a class token, as in timm's vision transformers."""

    def __init__(self, width=8, classes=5):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, width))

    def forward_features(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm(x))

    def forward(self, x):
        return self.head(self.forward_features(x)[:, 0])


@pytest.mark.parametrize("make", [ResNet, Attention])
def test_image_networks_are_explained_by_segments_and_left_as_they_were(make):
    torch.manual_seed(0)
    net = make().eval()
    images = torch.rand(2, 3, 16, 16)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    result = sh.SmoothHess(net).attribute(
        images, target=net(images).argmax(1), radius=1.0, n_calls=64, feature_mask=segments.grid((3, 16, 16), 4)
    )
    assert result.hessian.shape == (2, 16, 16)
    assert bool(torch.isfinite(result.hessian).all())
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    torch.testing.assert_close(result.output, net(images).max(1).values)


@pytest.mark.parametrize(("make", "layer"), [(ResNet, "bn1"), (Attention, "mlp.2")])
def test_a_network_in_training_mode_is_refused_naming_the_layer(make, layer):
    with pytest.raises(ValueError, match=f"layer '{layer}'.*model.eval"):
        sh.SmoothHess(make()).attribute(torch.rand(1, 3, 16, 16), target=0, **OPTIONS)


# --- transformers-style models ----------------------------------------------------------------------------------------


@dataclass
class Output:
    """Like a ModelOutput."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


class Classifier(nn.Module):
    """Takes keywords, input_ids or inputs_embeds, and returns an object."""

    def __init__(self):
        super().__init__()
        self.embeddings, self.head = nn.Embedding(20, 4), nn.Linear(8, 2)
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())

    def get_input_embeddings(self):
        return self.embeddings

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None):
        vectors = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = self.encoder(vectors)
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        return Output(self.head(hidden.mean(1)), (hidden,))


def test_the_field_of_an_output_is_named():
    torch.manual_seed(0)
    model = Classifier().double().eval()
    ids = torch.tensor([[1, 2, 3]])
    vectors = model.get_input_embeddings()(ids).detach()
    mask = torch.tensor([[1.0, 1.0, 0.0]]).double()
    with pytest.raises(TypeError, match="must return one tensor, got Output. Pass output='logits'"):
        sh.SmoothHess(lambda e: model(inputs_embeds=e)).attribute(vectors, target=0, **OPTIONS)
    with pytest.raises(ValueError, match="returned Output with logits, hidden_states, which has no output 'logit'"):
        sh.SmoothHess(lambda e: model(inputs_embeds=e), "logit").attribute(vectors, target=0, **OPTIONS)
    with pytest.warns(UserWarning, match="Use TokenSmoothHess"):
        sh.SmoothHess(lambda e: model(inputs_embeds=e), output="logits").attribute(
            vectors, 0, feature_mask=torch.arange(3)[:, None], **OPTIONS
        )
    explainer = sh.TokenSmoothHess(model, "embeddings", output="logits")
    result = explainer.attribute(ids, 0, {"attention_mask": mask}, **OPTIONS)
    assert result.hessian.shape == (1, 3, 3)
    gradient = result.gradient[0].abs()  # the third token is masked: 0 up to rounding
    assert float(gradient[2]) <= 1e-12 * float(gradient[:2].min())
    assert bool((result.hessian[0, 2].abs() <= 5 * result.stderr()[0, 2]).all())


def test_a_model_that_takes_a_dictionary_is_called_through_a_small_function():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    model = lambda batch: {"score": net(torch.cat([batch["image"], batch["age"]], 1))}
    image, age = torch.randn(2, 4).double(), torch.tensor([[0.3], [0.7]]).double()
    by_dictionary = sh.SmoothHess(lambda x, a: model({"image": x, "age": a})["score"]).attribute(
        image, additional_forward_args=age, **OPTIONS
    )
    for i in range(2):  # each example with its own age
        alone = sh.SmoothHess(lambda x, a=age[i]: net(torch.cat([x, a.expand(len(x), 1)], 1)))
        torch.testing.assert_close(by_dictionary[i].hessian, alone.attribute(image[i : i + 1], **OPTIONS).hessian)


def test_interactions_between_two_inputs_by_putting_them_side_by_side():
    f = lambda x, y: (x * y).sum(1)  # ∂²f/∂x_i∂y_j = 1 where i = j
    both = lambda z: f(*z.chunk(2, dim=1))
    result = sh.SmoothHess(both).attribute(torch.zeros(1, 6).double(), sigma=0.5, n_calls=2000, shrink=False)
    expected = torch.zeros(6, 6).double()
    expected[:3, 3:] = expected[3:, :3] = torch.eye(3)
    assert bool(((result.hessian[0] - expected).abs() <= 5 * result.stderr()[0] + 1e-9).all())


def test_models_in_ordered_dictionaries_and_wrappers_are_seen():
    net = nn.Sequential(OrderedDict(first=nn.Linear(4, 8), drop=nn.Dropout(0.5), last=nn.Linear(8, 2)))

    class Wrapper:
        def __init__(self, model):
            self.model = model

        def __call__(self, x):
            return self.model(x)

    with pytest.raises(ValueError, match="layer 'drop'"):
        sh.SmoothHess(Wrapper(net)).attribute(torch.zeros(1, 4), target=0, **OPTIONS)
    assert sh.SmoothHess(Wrapper(net.eval())).attribute(torch.zeros(1, 4), target=0, **OPTIONS).shape == (1, 4, 4)


# --- scipy ------------------------------------------------------------------------------------------------------------


def test_a_result_is_an_operator_for_scipy():
    linalg = pytest.importorskip("scipy.sparse.linalg", reason="scipy is not installed")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 1)).double()
    result = sh.SmoothHess(net).attribute(torch.zeros(2, 40).double(), sigma=0.5, n_calls=100)
    operator = result[1].to_scipy()
    dense = result.hessian[1].numpy()
    values, vectors = linalg.eigsh(operator, k=4, which="LM", v0=np.ones(40))
    exact = np.linalg.eigvalsh(dense)
    np.testing.assert_allclose(np.sort(np.abs(values)), np.sort(np.abs(exact))[-4:], rtol=1e-8)
    np.testing.assert_allclose(dense @ vectors, vectors * values, atol=1e-8 * np.abs(exact).max())
    V = np.random.default_rng(0).normal(size=(40, 3))
    np.testing.assert_allclose(operator @ V, dense @ V, atol=1e-12)
    np.testing.assert_allclose(operator.T @ V[:, 0], dense @ V[:, 0], atol=1e-12)
    solution, info = linalg.minres(operator + linalg.aslinearoperator(10 * np.eye(40)), V[:, 0], rtol=1e-10)
    assert info == 0
    np.testing.assert_allclose(solution, np.linalg.solve(dense + 10 * np.eye(40), V[:, 0]), atol=1e-7)
    by_torch = np.sort(result[1].eigh(4).values[0].abs().numpy())
    np.testing.assert_allclose(by_torch, np.sort(np.abs(values)), rtol=1e-8)
