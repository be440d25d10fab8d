"""Sequences of different lengths: batches of similar ones, filled up to the longest of their shard.

    python variable_lengths.py              one worker
    lockstep run -n 2 variable_lengths.py   two, and the same digest
    python variable_lengths.py 10           only ten steps

`lockstep.ByLength` puts sequences of similar length into one batch, so that little is padded; every sequence once per
epoch. A GRU learns whether a sequence has an even or an odd number of ones, and ends above 95 %.
"""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import lockstep

STEPS, BATCH = int(sys.argv[1]) if len(sys.argv) > 1 else None, 64


def make_sequences(count):
    rows = [torch.randint(2, (int(length),)) for length in torch.randint(2, 13, (count,))]
    return [(row, int(row.sum() % 2)) for row in rows]


def pad(samples):
    """Of samples: rows [samples, longest], their lengths [samples] and labels [samples]."""
    rows, labels = zip(*samples, strict=True)
    return pad_sequence(list(rows), True), torch.tensor([len(row) for row in rows]), torch.tensor(labels)


class Parity(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(2, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 2)

    def forward(self, rows, lengths):
        packed = pack_padded_sequence(self.embed(rows), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.gru(packed)[1][0])


def loss(model, batch):
    rows, lengths, labels = batch
    guess = model(rows, lengths)
    accuracy = (guess.argmax(1) == labels).sum(), len(labels)
    return nn.functional.cross_entropy(guess, labels, reduction="sum"), len(labels), {"accuracy": accuracy}


with lockstep.Run(seed=1) as run:
    train_set, test_set = make_sequences(2048), make_sequences(512)
    model = run.replicate(Parity())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    order = lockstep.ByLength([len(row) for row, _ in train_set], BATCH, seed=1)
    batches = run.batches(train_set, global_batch_size=BATCH, shards=8, epochs=5, order=order, collate_fn=pad)
    for batch in run.train(batches, optimizer, steps=STEPS):
        run.step(loss, batch)
    found, digest = run.evaluate(loss, test_set, collate_fn=pad), run.digest()
    run.on_main(lambda: print(f"accuracy {found['accuracy']:.2%}  digest {digest}"))
