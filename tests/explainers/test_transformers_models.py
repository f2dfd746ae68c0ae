"""Models of the package `transformers`, in small random configurations: gates equal the exact matrix."""

from copy import deepcopy

import pytest
import torch

import smoothhess as sh

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.rounding, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = SMALL | {"vocab_size": 50, "max_position_embeddings": 32}
IDS = torch.tensor([[5, 17, 3, 44, 21, 8]])
NO_CACHE = {"use_cache": False}


def gpt2():
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), "transformer.wte"


def llama():
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config), "model.embed_tokens"


def bert():
    config = transformers.BertConfig(**TEXT, num_labels=3)
    return transformers.BertForSequenceClassification(config), "bert.embeddings.word_embeddings"


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu")  # the Hessian at a point misses kinks
    return transformers.T5ForConditionalGeneration(config), "encoder.embed_tokens"


def vit():
    config = transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    return transformers.ViTForImageClassification(config), "vit.embeddings.patch_embeddings"


FACTORS = {gpt2: 3.0, llama: 2.0, bert: 3.0, t5: 0.6, vit: 3.0}  # of the weights: most new models are almost linear


def made(make):
    """A random model, and the name of its embedding layer."""
    torch.manual_seed(0)
    model, layer = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(FACTORS[make])
    return model.eval(), layer


def exact(model, layer, value, inputs, keywords):
    """The token × token matrix of one text by double backward in float64, with eager attention.

    `value` maps the logits (1, …) to the number that is explained.
    """
    model = deepcopy(model).double()
    model.set_attn_implementation("eager")
    module = model.get_submodule(layer)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    e = module(inputs).detach()[0]
    b = module.weight.detach().mean(0) if isinstance(module, torch.nn.Embedding) else e.mean(0)

    def forward(s):
        handle = module.register_forward_hook(lambda *_: (b + s[:, None] * (e - b))[None])
        try:
            return value(model(inputs, **keywords).logits)
        finally:
            handle.remove()

    return torch.autograd.functional.hessian(forward, torch.ones(len(e), dtype=torch.float64))


def distance(found, true):
    return float((found.double() - true).norm() / true.norm())


DECODED = {"decoder_input_ids": torch.tensor([[0, 9]]), **NO_CACHE}
CASES = {
    "gpt2, a token at a position": (gpt2, (5, 7), lambda l: l[0, 5, 7], NO_CACHE),
    "gpt2, contrast": (gpt2, sh.contrast((-1, 7), (-1, 2)), lambda l: l[0, 5, 7] - l[0, 5, 2], NO_CACHE),
    "gpt2, continuation": (
        gpt2,
        sh.continuation([21, 8]),
        lambda l: l.log_softmax(-1)[0, 3, 21] + l.log_softmax(-1)[0, 4, 8],
        NO_CACHE,
    ),
    "llama, a token at a position": (llama, (5, 7), lambda l: l[0, 5, 7], NO_CACHE),
    "bert, a class": (bert, 2, lambda l: l[0, 2], {}),
    "bert, contrast with a masked token": (
        bert,
        sh.contrast(2, 0),
        lambda l: l[0, 2] - l[0, 0],
        {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])},
    ),
    "t5, a decoded token": (t5, (1, 7), lambda l: l[0, 1, 7], DECODED),
}


@pytest.mark.parametrize("case", CASES)
def test_gates_equal_the_exact_matrix(case):
    make, target, value, keywords = CASES[case]
    model, layer = made(make)
    result = sh.TokenSmoothHess(model, layer, output="logits").attribute(IDS, target, keywords, sigma=0.01, n_calls=12)
    true = exact(model, layer, value, IDS, keywords)
    assert distance(result.hessian[0], true) <= 1e-3
    assert float(result.relative_error) <= 0.02
    if "attention_mask" in keywords:
        assert float(result.hessian[0, 5].abs().max()) <= 1e-3 * float(true.norm())


def test_positions_of_a_target_are_those_of_the_decoder():
    """The masks and ids of the encoder say nothing about them."""
    model, layer = made(t5)
    explainer, options = sh.TokenSmoothHess(model, layer, output="logits"), {"sigma": 0.01, "n_calls": 12}
    mask, decoded = torch.tensor([[1, 1, 1, 1, 1, 0]]), torch.tensor([[0, 9, 4, 6, 7, 8]])
    keywords = {"attention_mask": mask, "decoder_input_ids": decoded, **NO_CACHE}
    result = explainer.attribute(IDS, (5, 7), keywords, **options)
    assert distance(result.hessian[0], exact(model, layer, lambda l: l[0, 5, 7], IDS, keywords)) <= 2e-3
    value = lambda l: l.log_softmax(-1)[0, 3, 7] + l.log_softmax(-1)[0, 4, 8]
    result = explainer.attribute(IDS, sh.continuation([7, 8]), keywords, **options)
    assert distance(result.hessian[0], exact(model, layer, value, IDS, keywords)) <= 2e-3
    with pytest.raises(ValueError, match="decoder_input_ids"):
        explainer.attribute(IDS, sh.continuation([8, 7, 9]), keywords, **options)
    with pytest.raises(ValueError, match="target position of a text is padding"):
        explainer.attribute(IDS, (5, 7), keywords | {"decoder_attention_mask": mask}, **options)
    decoder = sh.TokenSmoothHess(model, "decoder.embed_tokens", output="logits")
    assert decoder.attribute(IDS, (1, 7), DECODED, **options).feature_kind == "token"


def test_patches_equal_the_exact_matrix():
    model, layer = made(vit)
    image = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    result = sh.TokenSmoothHess(model, layer, output="logits").attribute(image, 1, sigma=0.01, n_calls=16)
    assert result.hessian.shape == (1, 4, 4)
    assert distance(result.hessian[0], exact(model, layer, lambda l: l[0, 1], image, {})) <= 1e-3


@pytest.mark.parametrize("make", [gpt2, bert])
def test_padding_on_the_right_does_not_change_a_text(make):
    model, layer = made(make)
    explainer = sh.TokenSmoothHess(model, layer, output="logits")
    ids = torch.tensor([[5, 17, 3, 44, 21, 8, 30, 2], [5, 17, 3, 44, 21, 8, 0, 0]])
    mask = (ids != 0).long()
    target, plain = ([(7, 7), (5, 7)], {"use_cache": False}) if make is gpt2 else ([2, 2], {})
    options = {"sigma": 0.01, "n_calls": 48}
    batch = explainer.attribute(ids, target, {"attention_mask": mask, **plain}, frozen=mask == 0, **options)
    short = explainer.attribute(ids[1:, :6], target[1], plain, **options)
    assert distance(batch.hessian[1, :6, :6], short.hessian[0].double()) <= 1e-2
    assert not batch[1].gradient[0, 6:].any()
    if make is gpt2:
        with pytest.raises(ValueError, match="target position of a text is padding"):
            explainer.attribute(ids, (-1, 7), {"attention_mask": mask, **plain}, frozen=mask == 0, **options)


def test_caches_are_refused_and_their_memory_is_pointed_out():
    model, layer = made(gpt2)
    explainer = sh.TokenSmoothHess(model, layer, output="logits")
    with pytest.warns(UserWarning, match="use_cache"):
        explainer.attribute(IDS, (5, 7), sigma=0.1, n_calls=12)
    cache = model(IDS).past_key_values
    with pytest.raises(ValueError, match="cache of keys and values was passed"):
        explainer.attribute(IDS, (5, 7), {"past_key_values": cache}, sigma=0.1)


def test_a_model_output_needs_the_name_of_a_field():
    model, layer = made(bert)
    assert sh.TokenSmoothHess(model, layer, output=0).attribute(IDS, 2, sigma=0.1, n_calls=12).shape == (1, 6, 6)
    with pytest.raises(ValueError, match="SequenceClassifierOutput.*logits.*no output 'scores'"):
        sh.TokenSmoothHess(model, layer, output="scores").attribute(IDS, 2, sigma=0.1, n_calls=12)


def test_an_image_and_a_text_of_clip():
    """Patches × words of the similarity of two towers, against second derivatives along the same directions."""
    text = {**TEXT, "hidden_size": 8, "intermediate_size": 16, "eos_token_id": 8, "bos_token_id": 0, "pad_token_id": 1}
    vision = {**SMALL, "hidden_size": 8, "intermediate_size": 16, "image_size": 8, "patch_size": 4, "num_channels": 1}
    torch.manual_seed(0)
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    model = model.double().eval()
    layer = model.text_model.embeddings.token_embedding
    words, pixels = 5 * layer(IDS).detach(), torch.rand(1, 1, 8, 8).double()
    inside = sh.Embedded(lambda ids, pixels: model(ids, pixels).logits_per_image.diagonal(), layer)

    def similarity(pixels, words):
        return inside(words, IDS.expand(len(words), -1), pixels)

    patches = torch.arange(4).reshape(2, 2).repeat_interleave(4, 0).repeat_interleave(4, 1)
    masks = (patches[None], 4 + torch.arange(6)[:, None].expand(6, 8))
    result = sh.SmoothHess(similarity).attribute(
        (pixels, words), sigma=(0.001, 0.0003), n_calls=224, feature_mask=masks, direction=(pixels, words), shrink=False
    )
    scaled = lambda u, v: similarity(pixels * u[patches], words * v[None, :, None])[0]
    model.set_attn_implementation("eager")
    ones = torch.ones(4).double(), torch.ones(6).double()
    true = torch.autograd.functional.hessian(scaled, ones)[0][1]
    assert distance(result.between(0, 1).value[0], true) <= 1e-2
