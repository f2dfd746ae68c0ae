"""Words of a BERT that are negated.

A small BERT of the package transformers classifies opinions such as "the film was not good and the cast was so long".
One of two adjectives is an opinion, and "not" reverses it; before the other adjective "not" has no effect. In each text
the pair of the opinion and its own adverb must have the largest `TokenSmoothHess.strength`. The figure shows the
interactions around the first text, with σ = 0.5: the network is certain there, and with a smaller σ, or after training
with another seed, other pairs can be stronger around the text.
"""

import torch
import transformers
from torch.nn import functional

import smoothhess as sh

KINDS = {
    "noun": "film plot music cast ending script",
    "adverb": "not so very quite",
    "opinion": "good great lovely fine bad dull weak awful",
    "other adjective": "long short new loud",
}
WORDS = ["[PAD]", "[CLS]", "[SEP]", *" ".join(KINDS.values()).split(), "the", "was", "and"]
ID = {word: i for i, word in enumerate(WORDS)}


def among(kind, n):
    """The ids of n random words of a kind."""
    words = KINDS[kind].split()
    return torch.randint(ID[words[0]], ID[words[-1]] + 1, (n,))


def clause(adjective):
    """Clauses such as "the film was not good", for given adjectives."""
    n = len(adjective)
    the, was = (torch.full((n,), ID[word]) for word in ("the", "was"))
    return torch.stack([the, among("noun", n), was, among("adverb", n), adjective], 1)


def texts(n):
    """Two clauses in random order; the label is 1 for a good opinion."""
    opinion, other = clause(among("opinion", n)), clause(among("other adjective", n))
    label = (opinion[:, 4] < ID["bad"]) != (opinion[:, 3] == ID["not"])
    first = torch.rand(n, 1) < 0.5
    parts = [torch.where(first, opinion, other), torch.where(first, other, opinion)]
    start, and_, end = (torch.full((n, 1), ID[word]) for word in ("[CLS]", "and", "[SEP]"))
    return torch.cat([start, parts[0], and_, parts[1], end], 1), label.long()


torch.manual_seed(0)
config = transformers.BertConfig(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=len(WORDS),
    max_position_embeddings=16, initializer_range=0.1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = transformers.BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, 300)
for _ in range(300):
    ids, label = texts(64)
    optimizer.zero_grad()
    functional.cross_entropy(model(ids).logits, label).backward()
    optimizer.step()
    schedule.step()
model.eval()
ids, label = texts(1000)
accuracy = float((model(ids).logits.argmax(1) == label).double().mean())
print(f"accuracy {accuracy:.0%}")
assert accuracy > 0.97

planted = {
    "the film was not good and the cast was so long": (4, 5),
    "the music was quite loud and the script was not dull": (10, 11),
}
names = [["[CLS]", *text.split(), "[SEP]"] for text in planted]
ids = torch.tensor([[ID[word] for word in text] for text in names])
explainer = sh.TokenSmoothHess(model, "bert.embeddings.word_embeddings", output="logits")
target, frozen = sh.contrast(1, 0), [ID["[CLS]"], ID["[SEP]"]]  # good − bad
strength = explainer.strength(ids, target, sigma=0.3, n_centers=64, n_calls=352, control=None, frozen=frozen)
for text, value, error, (i, j), tokens in zip(
    planted, strength.value, strength.stderr, planted.values(), names, strict=True
):
    print(text)
    order = [divmod(int(k), len(tokens)) for k in value.triu(1).flatten().argsort(descending=True)[:2]]
    for a, b in order:
        where = f"{tokens[a]} × {tokens[b]}" + (" of the same clause" if (a, b) == (i, j) else "")
        print(f"    strength of {where}: {float(value[a, b]):.1f} ± {float(error[a, b]):.1f}")
    assert order[0] == (i, j)
    assert value[i, j] > 3 * error[i, j]

result = explainer.attribute(ids[:1], target, sigma=0.5, n_calls=16_000, frozen=frozen, names=names[:1])
(pair,) = result.top_pairs(1)[0]
print(f"around the first text, {' × '.join(pair.names)}: {pair.value:+.2f} in [{pair.low:+.2f}, {pair.high:+.2f}]")
print(f"relative error {float(result.relative_error):.0%}")
assert bool(result.relative_error < 0.2)

result.plot("text", k=4).figure.savefig("bert_negation.png", dpi=110)
