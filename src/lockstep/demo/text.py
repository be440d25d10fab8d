"""Trains a character GPT on Python's documentation: the text of `help()`, which comes with every Python."""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.demo.digits import report

STEPS, BATCH, LENGTH, WIDTH, SEED = 100, 32, 64, 64, 7
SAMPLE = 160  # characters to write at the end


class CharGpt(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:  # [batch, length] -> [batch, length, characters]
        length = text.shape[1]
        ahead = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        x = self.token(text) + self.place.weight[:length]
        guess: Tensor = self.head(self.blocks(x, mask=ahead, is_causal=True))
        return guess


def loss(model: Any, text: Tensor) -> tuple[Tensor, int]:
    guess, wanted = model(text[:, :-1]), text[:, 1:]
    return F.cross_entropy(guess.flatten(0, 1), wanted.flatten(), reduction="sum"), wanted.numel()


@torch.no_grad()
def write(model: nn.Module, alphabet: Tensor, device: torch.device) -> str:
    """Returns text that the model generates; the seed is fixed."""
    model.eval()
    text = torch.zeros(1, 1, dtype=torch.long, device=device)
    generator = torch.Generator(device).manual_seed(SEED)
    for _ in range(SAMPLE):
        chances = F.softmax(model(text[:, -LENGTH:])[:, -1] / 0.8, dim=1)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return "".join(chr(int(alphabet[token])) for token in text[0].cpu())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="for checkpoints and the trace (default: none)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    args = parser.parse_args()
    text = "\n".join(topics[name] for name in sorted(topics))
    characters = torch.tensor([ord(character) for character in text])
    alphabet, tokens = torch.unique(characters, return_inverse=True)
    train_text, test_text = tokens.tensor_split([len(tokens) * 9 // 10])
    train_set = train_text.unfold(0, LENGTH + 1, LENGTH // 2)  # [windows, length + 1]
    test_set = test_text.unfold(0, LENGTH + 1, LENGTH)[:256]
    with lockstep.Run(args.directory, seed=SEED, max_grad_norm=1.0) as run:
        model = run.replicate(CharGpt(len(alphabet)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        batches = run.batches(train_set, global_batch_size=BATCH, shards=8)
        for batch in run.train(batches, optimizer, steps=args.steps):
            run.step(loss, batch)
        nats = float(run.evaluate(loss, test_set))  # type: ignore[arg-type]
        run.log(nats=nats)
        result = {"nats": nats, "digest": run.digest(), "text": write(model, alphabet, run.device)}
        line = f"{nats:.3f} nats per character  digest {result['digest']}"
        run.on_main(lambda: report(args.directory, line, result))


if __name__ == "__main__":
    main()
