"""A model whose forward returns an object with `.loss` and `.logits`, as those of Hugging Face's Transformers do.

    python hf_style.py                      one worker
    lockstep run -n 2 hf_style.py           two, and the same digest
    python hf_style.py 10                   only ten steps

Its `.loss` is a mean over the labels that are not -100. `run.step` wants a sum and a weight, so that the mean over a
global batch is exact where its parts hold different numbers of labels: the mean times that number is the sum.
It learns to tag each number in a row with whether it is larger than the one before, and ends below 0.1 nats per label.
"""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep

STEPS, NUMBERS, LONGEST = int(sys.argv[1]) if len(sys.argv) > 1 else None, 20, 12


@dataclass
class TokenClassifierOutput:
    loss: Tensor | None
    logits: Tensor


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.conv, self.head = nn.Embedding(NUMBERS, 32), nn.Conv1d(32, 64, 3, padding=1), nn.Linear(64, 2)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.conv(self.embed(input_ids).transpose(1, 2)).relu().transpose(1, 2))
        loss = None if labels is None else F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100)
        return TokenClassifierOutput(loss, logits)


def make_sample():
    row = torch.randint(1, NUMBERS, (int(torch.randint(3, LONGEST + 1, ())),))
    labels, fill = (row[1:] > row[:-1]).long(), LONGEST - len(row)
    return {"input_ids": F.pad(row, (0, fill)), "labels": F.pad(labels, (1, fill), value=-100)}


def loss(model, batch):
    n = (batch["labels"] != -100).sum()
    return model(**batch).loss * n, n


with lockstep.Run(seed=1) as run:
    train_set, test_set = [make_sample() for _ in range(2048)], [make_sample() for _ in range(512)]
    model = run.replicate(Tagger())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in run.train(run.batches(train_set, global_batch_size=64, shards=8, epochs=4), optimizer, steps=STEPS):
        run.step(loss, batch)
    nats, digest = run.evaluate(loss, test_set), run.digest()
    run.on_main(lambda: print(f"{nats:.4f} nats per label  digest {digest}"))
