"""Models of the package `transformers`, in small random configurations: gates equal the exact matrix."""

import pytest
import torch

import smoothhess as sh

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.rounding, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
IDS = torch.tensor([[5, 17, 3, 44, 21, 8]])


def gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=32)
    return transformers.GPT2LMHeadModel(config), "transformer.wte", (5, 7), {"use_cache": False}


def bert():
    config = transformers.BertConfig(**SMALL, num_labels=3, max_position_embeddings=32)
    mask = {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])}
    return transformers.BertForSequenceClassification(config), "bert.embeddings.word_embeddings", 2, mask


def llama():
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config), "model.embed_tokens", (5, 7), {"use_cache": False}


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu")  # the Hessian at a point misses kinks
    keywords = {"decoder_input_ids": torch.tensor([[0, 9]]), "use_cache": False}
    return transformers.T5ForConditionalGeneration(config), "encoder.embed_tokens", (1, 7), keywords


def sharpened(make):
    """A random model with larger weights: those of a new model make it almost linear."""
    torch.manual_seed(0)
    model, layer, target, keywords = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and make is not t5:
                parameter.mul_(4)
    return model.double().eval(), layer, target, keywords


@pytest.mark.parametrize("make", [gpt2, bert, llama, t5])
def test_gates_equal_the_exact_matrix(make):
    model, layer, target, keywords = sharpened(make)
    result = sh.TokenSmoothHess(model, layer, output="logits").attribute(IDS, target, keywords, sigma=0.003, n_calls=12)
    assert result.hessian.shape == (1, 6, 6)
    model.set_attn_implementation("eager")
    module = model.get_submodule(layer)
    e, b = module(IDS).detach(), module.weight.detach().mean(0)

    def forward(s):
        handle = module.register_forward_hook(lambda *_: b + s[:, None] * (e - b))
        try:
            logits = model(IDS, **keywords).logits
        finally:
            handle.remove()
        return logits[(0, *target)] if isinstance(target, tuple) else logits[0, target]

    true = torch.autograd.functional.hessian(forward, torch.ones(6, dtype=torch.float64))
    assert float((result.hessian[0] - true).norm() / true.norm()) <= 1e-3
    assert float(result.relative_error) <= 0.01
    if make is bert:
        assert float(result.hessian[0, 5].abs().max()) <= 1e-3 * float(true.norm())  # the masked token


def test_patches_of_vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **{k: v for k, v in SMALL.items() if k != "vocab_size"},
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=3,
    )
    model = transformers.ViTForImageClassification(config).double().eval()
    explainer = sh.TokenSmoothHess(model, "vit.embeddings.patch_embeddings", output="logits")
    result = explainer.attribute(torch.rand(2, 1, 8, 8).double(), 1, sigma=0.1, n_calls=64)
    assert result.hessian.shape == (2, 4, 4)
    assert bool((result.relative_error < 0.2).all())


def test_caches():
    model, layer, target, _ = sharpened(gpt2)
    explainer = sh.TokenSmoothHess(model, layer, output="logits")
    with pytest.warns(UserWarning, match="use_cache"):
        explainer.attribute(IDS, target, sigma=0.1, n_calls=12)
    cache = model(IDS).past_key_values
    with pytest.raises(ValueError, match="cache of keys and values was passed"):
        explainer.attribute(IDS, target, {"past_key_values": cache}, sigma=0.1)
