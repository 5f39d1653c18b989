"""Networks: a GPT, an autoencoder, embeddings, modular addition, and digits."""

from __future__ import annotations

import hashlib
import itertools
from functools import cache
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from comparison.tasks import Batch, Model, Params, Task, always, drawn_rows, draws

CONTEXT, WIDTH, HEADS, LAYERS = 32, 48, 4, 2
WORDS, TOPICS = 400, 20
PRIME = 23


@cache
def text() -> tuple[Tensor, int, str]:
    """The help texts that come with Python: symbols, how many there are, and a checksum."""
    whole = "".join(topics.topics[name] for name in sorted(topics.topics))
    symbols = {symbol: i for i, symbol in enumerate(sorted(set(whole)))}
    codes = torch.tensor([symbols[symbol] for symbol in whole])
    return codes, len(symbols), hashlib.sha256(whole.encode()).hexdigest()[:12]


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scikit-learn's handwritten digits: 1,200 pictures and labels to train, 597 to validate."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pictures / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    return x[:1200], y[:1200], x[1200:], y[1200:]


class Block(nn.Module):
    """Attention, and a network of two layers, each after a norm."""

    future: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.key, self.value, self.out = [
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        ]
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        future = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        def heads(projection: nn.Module, y: Tensor) -> Tensor:
            return projection(y).unflatten(-1, (HEADS, -1)).transpose(-2, -3)

        y = self.norms[0](x)
        query, key, value = [heads(p, y) for p in (self.query, self.key, self.value)]
        scores = query @ key.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5 + self.future
        x = x + self.out((scores.softmax(-1) @ value).transpose(-2, -3).flatten(-2))
        return x + self.down(relu(self.up(self.norms[1](x))).square())


class GPT(nn.Module):
    """Symbols to the logits of the next ones."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.layers = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, symbols, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(x) + self.position)))


def gpt() -> Task:
    codes, symbols, checksum = text()
    held_out = len(codes) // 10
    train, valid = codes[:-held_out], codes[-held_out:]
    model = Model(lambda: GPT(symbols))

    def windows(data: Tensor, starts: Tensor) -> Batch:
        rows = data[starts[:, None] + torch.arange(CONTEXT + 1)]
        return rows[:, :-1], rows[:, 1:]

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(params, x).flatten(0, -2), y.flatten())

    def batch(seed: int, step: int) -> Batch:
        last = len(train) - CONTEXT - 1
        return windows(train, torch.randint(last, (8,), generator=draws(seed, step)))

    seen = windows(valid, torch.linspace(0, held_out - CONTEXT - 1, 128).long())
    title = "small GPT on Python's help texts"
    return Task(
        "gpt", title, 300, model.init, loss, batch, lambda p: loss(p, *seen),
        "validation loss, nats a symbol", decay=True, data=checksum,
    )  # fmt: skip


class Autoencoder(nn.Module):
    """Eight layers with tanh and no norm between them."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 96, 64, 32, 8, 32, 64, 96, 64)
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(widths)])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) if i < len(self.layers) - 1 else layer(x)
        return x


def autoencoder() -> Task:
    x = digits()[0]
    model, rows = Model(Autoencoder), drawn_rows(len(x), 96)

    def loss(params: Params, seen: Tensor) -> Tensor:
        return (model(params, seen) - seen).square().sum(-1).mean()

    return Task(
        "autoencoder", "deep tanh autoencoder on digits", 600, model.init, loss,
        lambda seed, step: (x[rows(seed, step)],), lambda p: loss(p, x),
        "training loss, squares a picture",
    )  # fmt: skip


class Convolutions(nn.Module):
    """Two kernels and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)]
        )
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (1, 8, 8))
        for layer in self.layers:
            x = relu(layer(x))
        return self.head(x.flatten(1))


def convolutions() -> Task:
    x, y, x_valid, y_valid = digits()
    model, rows = Model(Convolutions), drawn_rows(len(x), 32)

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(params, x), y)

    def batch(seed: int, step: int) -> Batch:
        picked = rows(seed, step)
        return x[picked], y[picked]

    return Task(
        "conv", "convolutional network on digits", 200, model.init, loss, batch,
        lambda p: loss(p, x_valid, y_valid), "validation loss, nats", decay=True,
    )  # fmt: skip


class SkipGram(nn.Module):
    """A word to the logits of its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 24)
        self.head = nn.Linear(24, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def skip_gram() -> Task:
    """Words with Zipf's frequencies, each of one of twenty topics; neighbours share the topic."""
    generator = torch.Generator().manual_seed(7)
    frequency = 1.0 / torch.arange(1, WORDS + 1)
    topic = torch.randint(TOPICS, (WORDS,), generator=generator)
    together = frequency * (0.05 + (topic[:, None] == topic[None, :]).float())
    together = together / together.sum(1, keepdim=True)
    model = Model(SkipGram)

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(params, x), y)

    def batch(seed: int, step: int) -> Batch:
        own = draws(seed, step)
        x = torch.multinomial(frequency, 256, replacement=True, generator=own)
        return x, torch.multinomial(together[x], 1, generator=own)[:, 0]

    def score(params: Params) -> Tensor:
        """The expected loss less its least: the divergence from the true frequencies."""
        found = model(params, torch.arange(WORDS)).log_softmax(-1)
        each = (together * (together.log() - found)).sum(-1)
        return (each * frequency / frequency.sum()).sum()

    return Task(
        "skip-gram", "skip-gram on words with Zipf's frequencies", 400, model.init, loss, batch,
        score, "divergence from the truth, nats",
    )  # fmt: skip


class Addition(nn.Module):
    """Two numbers to the logits of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(PRIME, 32)
        self.layers = nn.ModuleList([nn.Linear(64, 96)])
        self.head = nn.Linear(96, PRIME, bias=False)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.head(relu(self.layers[0](self.embed(pairs).flatten(-2))))


def addition() -> Task:
    """Sums modulo a prime, of which six in ten are seen: what is learned by heart comes first."""
    pairs = torch.cartesian_prod(torch.arange(PRIME), torch.arange(PRIME))
    sums = pairs.sum(1) % PRIME
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(8))
    train, valid = order[: 6 * len(pairs) // 10], order[6 * len(pairs) // 10 :]
    model = Model(Addition)

    def loss(params: Params, rows: Tensor = train) -> Tensor:
        return cross_entropy(model(params, pairs[rows]), sums[rows])

    return Task(
        "addition", "addition modulo 23 (grokking)", 800, model.init, loss, always,
        lambda p: loss(p, valid), "validation loss, nats", decay=True,
    )  # fmt: skip


def tasks() -> list[Task]:
    return [gpt(), autoencoder(), convolutions(), skip_gram(), addition()]
