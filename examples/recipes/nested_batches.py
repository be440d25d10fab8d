"""Samples that are dicts and tuples of tensors, in one another: they come to the loss function as they were.

    python nested_batches.py                one worker
    lockstep run -n 2 nested_batches.py     two, and the same digest
    python nested_batches.py 10             only ten steps

Each tensor of a sample gets a first dimension for the samples, numbers become tensors, texts become lists. The model
predicts from the skills of two players and the surface whether the first one wins, and ends above 90 %.
"""

import sys

import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else None


class Matches(Dataset):
    def __init__(self, count):
        self.players, self.surface = torch.rand(count, 2, 3), torch.randint(3, (count,))
        self.wins = (self.players[:, 0] - self.players[:, 1])[torch.arange(count), self.surface] > 0

    def __len__(self):
        return len(self.wins)

    def __getitem__(self, index):
        first, second = ({"name": f"player {2 * index + n}", "skills": self.players[index, n]} for n in (0, 1))
        return {"players": (first, second), "court": {"surface": self.surface[index]}}, int(self.wins[index])


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.skills, self.surface = nn.Linear(3, 32), nn.Embedding(3, 32)

    def forward(self, match):
        first, second = (self.skills(player["skills"]) for player in match["players"])
        lead = ((first - second) * self.surface(match["court"]["surface"])).sum(1)
        return torch.stack([-lead, lead], dim=1)


def loss(model, batch):
    guess, wins = model(batch[0]), batch[1]
    accuracy = (guess.argmax(1) == wins).sum(), len(wins)
    return nn.functional.cross_entropy(guess, wins, reduction="sum"), len(wins), {"accuracy": accuracy}


with lockstep.Run(seed=1) as run:
    train_set, test_set = Matches(4096), Matches(512)
    model = run.replicate(Forecast())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in run.train(run.batches(train_set, global_batch_size=64, shards=8, epochs=3), optimizer, steps=STEPS):
        run.step(loss, batch)
    found, digest = run.evaluate(loss, test_set), run.digest()
    run.on_main(lambda: print(f"accuracy {found['accuracy']:.2%}  digest {digest}"))
