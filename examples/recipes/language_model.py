"""A small GPT learns to spell a language of forty words, until it is good enough; it may be interrupted anywhere.

    python language_model.py                       one worker
    lockstep run -n 2 language_model.py            two, and the same digest
    lockstep run -n 2 --fresh language_model.py    from the start again

End it by Ctrl-C, SIGTERM or SIGKILL, and start it on another number of workers: it resumes, and ends with the digest of
a run that was left alone. Sentences differ in length; the weight of a batch is its number of letters without padding,
so the loss is a mean over letters. It stops when that is below 1.1 nats for sentences that it has not seen.
"""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import lockstep

STEPS, WIDTH, LETTERS, SPACE, PAD = int(sys.argv[1]) if len(sys.argv) > 1 else None, 48, 28, 27, 0


def make_sentences(count, dice):
    """[count, length]: one to three words each, a SPACE around them, filled up with PAD."""
    draw = lambda low, high: int(torch.randint(low, high, (), generator=dice))  # noqa: E731
    words = [[draw(1, SPACE) for _ in range(draw(3, 7))] + [SPACE] for _ in range(40)]
    texts = [sum((words[draw(0, 40)] for _ in range(draw(1, 4))), [SPACE]) for _ in range(count)]
    return pad_sequence([torch.tensor(text) for text in texts], batch_first=True, padding_value=PAD)


class Gpt(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.letter, self.place = nn.Embedding(LETTERS, WIDTH), nn.Embedding(length, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.05, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, LETTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text):
        return self.head(self.layers(self.letter(text) + self.place.weight, mask=self.mask, is_causal=True))


def loss(model, text):
    guess, wanted = model(text[:, :-1]).transpose(1, 2), text[:, 1:]
    return nn.functional.cross_entropy(guess, wanted, ignore_index=PAD, reduction="sum"), (wanted != PAD).sum()


with lockstep.Run("runs/language_model", seed=1, max_grad_norm=1.0, save_every=20) as run:
    train_set, validation_set = make_sentences(1536, torch.Generator().manual_seed(0)).split([1280, 256])
    model = run.replicate(Gpt(train_set.shape[1] - 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
    batches = run.batches(train_set, global_batch_size=32, shards=4, epochs=10)
    for batch in run.train(batches, optimizer, scheduler=warm_up, steps=STEPS):
        run.step(loss, batch)
        if batch.ends_epoch and run.log(validation=run.evaluate(loss, validation_set))["validation"] < 1.1:
            break
    nats, digest = run.evaluate(loss, validation_set), run.digest()
    run.on_main(lambda: print(f"{nats:.3f} nats per letter  digest {digest}"))
