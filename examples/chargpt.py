"""A character GPT learns to write Python's documentation, from the text behind `help()` that every Python has.

    python examples/chargpt.py                               one worker
    lockstep run -n 2 examples/chargpt.py                    two: faster, and the same digest
    lockstep run -n 2 examples/chargpt.py --text my.txt      another text

On the last tenth of its own text, which it does not train on, it ends below 1.5 nats per character.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep

EPOCHS, BATCH, LENGTH, WIDTH, HEADS, LAYERS, DROPOUT = 2, 32, 64, 128, 4, 3, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        wide, narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), wide, nn.GELU(), narrow)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, length, width of a head]
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(x))


class Gpt(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)], nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(text) + self.place.weight))


def loss(model: nn.Module, text: Tensor) -> tuple[Tensor, int]:
    guess, wanted = model(text[:, :-1]), text[:, 1:]
    return F.cross_entropy(guess.flatten(0, 1).float(), wanted.flatten(), reduction="sum"), wanted.numel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, metavar="FILE", help="what to learn (default: Python's documentation)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--steps", type=int, help=f"end after so many (default: {EPOCHS} epochs)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", help="for checkpoints, from which the next run goes on (default: none)")
    args = parser.parse_args()

    text = args.text.read_text() if args.text else "\n".join(topics[name] for name in sorted(topics))
    alphabet, tokens = torch.tensor([ord(character) for character in text]).unique(return_inverse=True)
    train_text, test_text = tokens.tensor_split([len(tokens) * 9 // 10])
    train_set = train_text.unfold(0, LENGTH + 1, LENGTH // 2)  # [windows, length + 1]
    test_set = test_text.unfold(0, LENGTH + 1, LENGTH)
    with lockstep.Run(args.directory, seed=args.seed, precision=args.precision, max_grad_norm=1.0) as run:
        model = run.replicate(Gpt(len(alphabet)))
        matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}
        others = {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([matrices, others], lr=3e-3)
        batches = run.batches(train_set, global_batch_size=BATCH, shards=8, epochs=EPOCHS)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=batches.steps_in_all)
        for batch in run.train(batches, optimizer, scheduler=schedule, steps=args.steps):
            run.step(loss, batch)
        nats, digest = run.evaluate(loss, test_set), run.digest()
        run.on_main(lambda: print(f"{nats:.3f} nats per character  digest {digest}"))
