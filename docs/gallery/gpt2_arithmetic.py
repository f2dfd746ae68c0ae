"""Words of a GPT-2 that does arithmetic.

A small GPT-2 of the package transformers learns to continue "Anna has seven apples and eats two . now Anna has" with
"five". Three words decide the answer, the verb and both numbers, so their three pairs must be the strongest of
`TokenSmoothHess.strength`, the mean of |H| between the mean embedding (gate 0) and the words (gate 1). The figure shows
the interactions around the text itself.
"""

import torch
import transformers
from torch.nn import functional

import smoothhess as sh

NUMBERS = """
zero one two three four five six seven eight nine
ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
"""
OTHERS = "buys eats Anna Ben Clara David apples pears plums eggs has and . now"
WORDS = [*NUMBERS.split(), *OTHERS.split()]
ID = {word: i for i, word in enumerate(WORDS)}


def texts(n):
    """Texts whose numbers are random, of which a smaller one is eaten, or any is bought; and their answers."""
    a, b = torch.randint(1, 10, (2, n))
    eats = torch.rand(n) < 0.5
    a, b = torch.where(eats, torch.maximum(a, b), a), torch.where(eats, torch.minimum(a, b), b)
    name, food = torch.randint(ID["Anna"], ID["David"] + 1, (n,)), torch.randint(ID["apples"], ID["eggs"] + 1, (n,))
    has, and_, stop, now = (torch.full((n,), ID[word]) for word in ("has", "and", ".", "now"))
    ids = torch.stack([name, has, a, food, and_, ID["buys"] + eats.long(), b, stop, now, name, has], 1)
    return ids, torch.where(eats, a - b, a + b)


torch.manual_seed(0)
config = transformers.GPT2Config(
    n_embd=48, n_layer=2, n_head=4, vocab_size=len(WORDS), n_positions=16, initializer_range=0.1, use_cache=False,
    attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model = transformers.GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, 500)
for _ in range(500):
    ids, answer = texts(64)
    optimizer.zero_grad()
    functional.cross_entropy(model(ids).logits[:, -1], answer).backward()
    optimizer.step()
    schedule.step()
model.eval()
ids, answer = texts(1000)
accuracy = float((model(ids).logits[:, -1].argmax(1) == answer).double().mean())
print(f"accuracy {accuracy:.0%}")
assert accuracy > 0.97

text = "Anna has seven apples and eats two . now Anna has"
tokens = text.split()
ids = torch.tensor([[ID[word] for word in tokens]])
answer = int(model(ids).logits[0, -1].argmax())
print(text, "→", WORDS[answer])
assert WORDS[answer] == "five"
explainer = sh.TokenSmoothHess(model, "transformer.wte", output="logits")
strength = explainer.strength(ids, (-1, answer), sigma=0.3, n_centers=64, n_calls=352, control=None)
value, error = strength.value[0].triu(1), strength.stderr[0]
order = [divmod(int(i), len(tokens)) for i in value.flatten().argsort(descending=True)[:4]]
for i, j in order:
    print(f"strength of {tokens[i]} × {tokens[j]}: {float(value[i, j]):.1f} ± {float(error[i, j]):.1f}")
assert sorted(order[:3]) == [(2, 5), (2, 6), (5, 6)]  # seven, eats, two

result = explainer.attribute(ids, (-1, answer), sigma=0.2, n_calls=4000, names=tokens)
for pair in result.top_pairs(2)[0]:
    print(f"at the text, {' × '.join(pair.names)}: {pair.value:+.2f} in [{pair.low:+.2f}, {pair.high:+.2f}]")
print(f"relative error {float(result.relative_error):.0%}")
assert bool(result.relative_error < 0.1)

result.plot("text", k=4).figure.savefig("gpt2_arithmetic.png", dpi=110)
