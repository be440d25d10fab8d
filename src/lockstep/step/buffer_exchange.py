"""Exchange of the buffers that a forward pass changes, with a result that does not depend on the number of workers.

Every shard starts from the buffers as they were before the step, and the values that its forward pass writes are saved.
After the last shard the running averages of batch norm become the mean of the values of all shards, weighted by their
samples: one update per step, with the statistics of all shards. Any other buffer gets the value of the first shard that
changed it. The same holds for a buffer that has another shape now, or was registered in the forward pass.

Note [One table]
All values are sent in one all-reduce of a float64 table. The running averages of every shard have their own rows, since
all of them count; float64 represents float32 exactly. Any other buffer is sent by one shard only, as bytes: four bytes
are a whole number that float64 represents exactly. So one sum serves all dtypes. A buffer with another shape than
before is described in JSON first, which costs two more messages in the steps in which it happens.

Note [Overwritten differences]
A buffer that differs on one worker before a step is equal on all workers after it, because all get the same new value:
wrong on all of them, and comparing the replicas shows no difference. So the value of each buffer before it is
overwritten goes into a digest, which is compared as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.comm import agreement
from lockstep.comm.shard_sum import ShardSum
from lockstep.ddp.replica import cheap_digests, sum_of_bits
from lockstep.errors import LockstepError
from lockstep.step.buffer_changes import (
    BufferChange,
    BufferKind,
    NewBuffer,
    NewNorms,
    NewNumber,
    NewValue,
    NormLayers,
    compatible_change,
    read_value,
    to_words,
)
from lockstep.step.buffer_snapshot import BufferPlace, BufferSnapshot, BufferValue, Gone, Owner
from lockstep.step.norm_buffers import NormBuffers, NormValues

# How a change of a buffer was noticed: see Note [Silent writes] in buffer_snapshot.py.
COUNTED, FOUND_BY_VALUE = 1, 2


@final
class BufferExchange:
    """The buffers of one model during a step.

    In each step: `begin`; for each shard of this worker `collect` after its forward and `rewind` after its backward
    pass; `gather`, by all workers; `apply`. `abort` undoes a step that was not finished.
    """

    def __init__(self, module: nn.Module, shards: int, *, checks_weights: bool = True) -> None:
        """`shards`: of the global batch. `checks_weights`: raise if the first forward pass writes to weights."""
        self._module, self._snapshot = module, BufferSnapshot(module)
        self._weights: list[int] | None = None  # digests of the weights before a step, until they are checked
        self._checks_weights = checks_weights
        self._shards = shards
        self._new_values: dict[tuple[int, str], Tensor] = {}  # (shard, name) -> what its forward pass wrote
        self._new_norms: dict[int, tuple[list[int], NormValues]] = {}  # the same of norms: shard -> columns, values
        # Of a shard that has written all of them: those of later shards do not count.
        self._counters: Tensor | None = None
        self._layers: tuple[NormBuffers | None, dict[tuple[int, ...], NormLayers]] = (None, {})  # by shards
        self._incompatible: dict[int, list[list[Any]]] = {}  # shard -> changes without a column, as JSON
        # Names, and their digests: Note [Overwritten differences]
        self._overwritten: dict[tuple[str, ...], Tensor] = {}
        self._in_step = False

    def __len__(self) -> int:
        """Number of values that `collect` returns: one for each buffer, and one for all other changes."""
        self._snapshot.refresh()
        return len(self._snapshot.places) + 1

    def begin(self) -> None:
        """Begin a step from the buffers as they are."""
        self._new_values, self._new_norms, self._incompatible, self._counters = {}, {}, {}, None
        self._in_step = True
        self._snapshot.capture()
        if self._checks_weights:
            self._weights = cheap_digests(self._module.parameters())

    @torch.no_grad()
    def collect(self, shard: int) -> list[int]:
        """Save what the forward pass of a shard has written to the buffers.

        Returns for each buffer whether it was changed: 0, COUNTED or FOUND_BY_VALUE; and last, 1 if buffers were
        registered, deleted or changed their shape. Raises ValueError if the first forward pass has written to weights.
        """
        self._refuse_written_weights()
        changed, norms = [0] * len(self._snapshot.places), self._snapshot.check_norms()
        are_written = norms.are_written() if norms is not None else []
        if norms is not None and any(are_written):
            values = norms.values(self._counters)
            self._new_norms[shard] = self._snapshot.norm_columns, values
            if are_written is norms.all_written:
                self._counters = values.counters
            for n, is_written in zip(self._snapshot.norm_columns, are_written, strict=True):
                changed[n] = COUNTED if is_written else 0
        for n, place in self._snapshot.singles:
            if place.has_changed() and not place.is_incompatible():
                self._save(shard, place.name, place.current())
                changed[n] = COUNTED if place.is_written() else FOUND_BY_VALUE
        entries = [entry for owner in self._snapshot.incompatible_owners() for entry in self._describe(shard, owner)]
        if entries:
            self._incompatible[shard] = entries
        return [*changed, int(bool(entries))]

    def _refuse_written_weights(self) -> None:
        """Checked once: a program that writes to weights in a forward pass does so in every one."""
        before, self._weights, self._checks_weights = self._weights, None, False
        if before is None:
            return
        named = dict(self._module.named_parameters())
        written = [n for n, a, b in zip(named, before, cheap_digests(named.values()), strict=True) if a != b]
        if written:
            raise ValueError(
                f"the forward pass has written to {written[0]}"
                f"{f' and {len(written) - 1} more weights' if len(written) > 1 else ''}. Every worker would write "
                "something else, as often as it has shards; nothing was trained. Write to weights in the loop, behind "
                "run.step(loss, batch), where all workers do the same (an embedding's max_norm= writes, too)"
            )

    def _save(self, shard: int, name: str, value: BufferValue) -> None:
        if isinstance(value, Tensor):
            if type(value) is not Tensor or value.layout != torch.strided or value.is_meta:
                raise ValueError(
                    f"a forward pass made the buffer {name} a {type(value).__name__} ({value.layout}, on "
                    f"{value.device}); a buffer that a forward pass changes must be a plain dense tensor"
                )
            self._new_values[shard, name] = value.detach().clone()

    def _describe(self, shard: int, owner: Owner) -> list[list[Any]]:
        """[module, key, kind] for each buffer without a column, [module, key, {"number": value}] for each number."""
        places = [place for place in self._snapshot.places if place.owner is owner and place.is_incompatible()]
        found = []
        for key in [*(place.key for place in places), *owner.new_keys()]:
            value = owner.module._buffers.get(key, Gone.GONE)
            self._save(shard, owner.name_of(key), value)
            kept = key not in owner.module._non_persistent_buffers_set
            kind = BufferKind.of(value, is_persistent=kept)
            found.append([owner.prefix, key, list(astuple(kind))])
        return [*found, *([owner.prefix, key, {"number": n}] for key, n in owner.changed_numbers().items())]

    def rewind(self) -> None:
        """Restore the buffers to what they were before the step. Call after the backward pass, which may need them."""
        self._snapshot.restore()

    def abort(self) -> None:
        """Restore the buffers if a step has begun and was not applied."""
        if self._in_step:
            self.rewind()
        self._in_step = False

    @torch.no_grad()
    def gather(self, changed: Sequence[Sequence[float]], counts: Sequence[int], sum_: ShardSum) -> list[NewValue]:
        """Exchange the new values with all workers. Returns what `apply` is to write, equal on all; writes nothing yet.

        `changed[shard][buffer]`: what `collect` returned for all shards. `counts`: samples of each shard.
        """
        are_incompatible = any(row[-1] for row in changed)
        layers = None if are_incompatible else self._find_layers(changed)
        numbers: list[NewNumber] = []
        changes = self._changes(changed, self._snapshot.singles if layers else enumerate(self._snapshot.places))
        if are_incompatible:
            mine = [[shard, entries] for shard, entries in self._incompatible.items()]
            gathered = agreement.gather_values(sum_.group, mine, device=sum_.device)
            incompatible = sorted((entry for one in gathered for entry in one), key=lambda entry: int(entry[0]))
            changes, numbers = self._merge(changes, incompatible)
        self._compare_less(changed)
        if layers is None:
            self._split_norm_values()
            layers, changes = NormLayers.split(changes)
        if not layers.width and not changes:
            return [*numbers]
        widths = [layers.width, *(change.width for change in changes)]
        table = torch.zeros(sum(widths), dtype=torch.float64, device=sum_.device)
        head, *parts = torch.split(table, widths)
        self._fill_norms(layers, head)
        for change, part in zip(changes, parts, strict=True):
            self._fill(change, part)
        sum_.wait_for_values(sum_.start_small_sum(table), "the exchange of buffers")
        read = (NewBuffer(c, read_value(c, part, counts)) for c, part in zip(changes, parts, strict=True))
        return [*([layers.read(head, counts)] if layers.width else ()), *read, *numbers]

    def _changes(
        self, changed: Sequence[Sequence[float]], places: Iterable[tuple[int, BufferPlace]]
    ) -> list[BufferChange]:
        """`places`: those to look at, and their columns."""
        if not any(map(any, changed)):
            return []
        by_place = ((place, [shard for shard, row in enumerate(changed) if row[n]]) for n, place in places)
        return [compatible_change(place, shards) for place, shards in by_place if shards]

    def _find_layers(self, changed: Sequence[Sequence[float]]) -> NormLayers | None:
        """Return the buffers that are handled together as changes, if some shards have changed all of them, the other
        shards none, and no shard a batch norm buffer that is handled alone. That is the usual case, and what
        `NormLayers.split` would return then."""
        norms, columns = self._snapshot.norms, self._snapshot.norm_columns
        if norms is None or norms.tensors[0].dtype is not torch.float32:
            return None
        if any(place.detection.is_norm and any(row[n] for row in changed) for n, place in self._snapshot.singles):
            return None
        counts = [[row[n] for n in columns].count(COUNTED) for row in changed]
        shards = tuple(shard for shard, count in enumerate(counts) if count)
        if not shards or any(counts[shard] < len(columns) for shard in shards):
            return None
        if self._layers[0] is not norms:
            self._layers = norms, {}
        known = self._layers[1]
        if shards not in known:
            changes = [compatible_change(self._snapshot.places[n], shards) for n in columns]
            known[shards], _ = NormLayers.split(changes)
        return known[shards]

    def _split_norm_values(self) -> None:
        """Keep the new values of the buffers that are handled together by name, as those of all others."""
        for shard, (columns, values) in self._new_norms.items():
            names = ((shard, self._snapshot.places[n].name) for n in columns)
            self._new_values.update(zip(names, values.split(), strict=True))
        self._new_norms = {}

    def _fill_norms(self, layers: NormLayers, head: Tensor) -> None:
        if self._new_norms:
            values = {shard: values for shard, (_, values) in self._new_norms.items()}
            averages = {shard: one.averages for shard, one in values.items()}
            counters = {shard: one.counters for shard, one in values.items()}
        else:
            averages, counters = self._join_values(layers.averages), self._join_values(layers.counters)
        layers.fill(head, averages, counters)

    def _join_values(self, changes: Sequence[BufferChange]) -> dict[int, Tensor]:
        """Return the new values of these buffers in one tensor, by shard of this worker."""
        found: dict[int, Tensor] = {}
        for shard in changes[0].shards if changes else ():
            values = [self._new_values.get((shard, change.name)) for change in changes]
            there = [value.reshape(-1) for value in values if value is not None]
            if len(there) == len(values):
                found[shard] = torch.cat(there)
        return found

    def _merge(
        self, compatible: Sequence[BufferChange], incompatible: Sequence[tuple[int, list[list[Any]]]]
    ) -> tuple[list[BufferChange], list[NewNumber]]:
        """For each buffer, choose the change by the first shard. `incompatible`: (shard, entries), sorted by shard."""
        owners = {owner.prefix: owner for owner in self._snapshot.owners}
        changes, numbers = {change.name: change for change in compatible}, {}
        seen: set[str] = set()
        for shard, entries in incompatible:
            for prefix, key, what in entries:
                if prefix not in owners:
                    raise LockstepError(
                        f"the forward pass of shard {shard} has made the buffer {key} in the module {prefix}, which "
                        "other workers do not have; make all modules before run.replicate(model)"
                    )
                name, owner = owners[prefix].name_of(key), owners[prefix]
                if name in seen:
                    continue
                seen.add(name)
                if isinstance(what, Mapping):
                    value = what["number"]
                    numbers[name] = NewNumber(owner, key, tuple(value) if isinstance(value, list) else value)
                    continue
                dtype, shape, *flags = what
                other = changes.get(name)
                if other is not None and other.shards[0] < shard:
                    changes[name] = BufferChange(owner, key, other.kind, other.shards[:1], other.place)
                else:
                    kind = BufferKind(dtype, tuple(shape), *flags)
                    changes[name] = BufferChange(owner, key, kind, (shard,), None)
        return [changes[name] for name in sorted(changes)], list(numbers.values())

    def _fill(self, change: BufferChange, part: Tensor) -> None:
        rows = part.view(len(change.shards), -1) if change.averages else part.view(1, -1)
        for row, shard in zip(rows, change.shards, strict=True):
            value = self._new_values.get((shard, change.name))
            if value is not None and value.numel():
                row += (value.reshape(-1) if change.averages else to_words(value)).to(row.device)

    def _compare_less(self, changed: Sequence[Sequence[float]]) -> None:
        """After the first step, equally on all workers: see Note [Silent writes] in buffer_snapshot.py."""
        for n, place in self._snapshot.singles:
            place.compare_less(is_found=any(row[n] == FOUND_BY_VALUE for row in changed))

    @torch.no_grad()
    def apply(self, new: Sequence[NewValue]) -> None:
        """Write what `gather` returned, and end the step."""
        self._in_step = False
        for one in new:
            if isinstance(one, NewNorms):
                for names, digests in one.write():
                    self._add_digests(names, digests)
                continue
            if isinstance(one, NewNumber):
                setattr(one.owner.module, one.key, one.value)
                continue
            change, place = one.change, one.change.place
            before = change.owner.module._buffers.get(change.key)
            if before is not None:
                self._add_digests((change.name,), sum_of_bits(before).view(1))
            if place is None:
                put_buffer(change.owner.module, change.key, one.value, is_persistent=change.kind.is_persistent)
            elif place.tensor is not None and isinstance(one.value, Tensor):
                place.tensor.copy_(one.value.view(place.tensor.shape))

    def _add_digests(self, names: tuple[str, ...], digests: Tensor) -> None:
        past = self._overwritten.get(names)
        self._overwritten[names] = digests if past is None else past * 3 + digests

    def encode(self, new: Sequence[NewValue]) -> list[dict[str, Any]]:
        """Convert what `gather` returned to dicts of plain values and tensors, for a worker that has missed it."""
        found: list[dict[str, Any]] = []
        for one in new:
            if isinstance(one, NewNorms):
                averages, counters = (
                    [[change.owner.prefix, change.key] for change in changes]
                    for changes in (one.layers.averages, one.layers.counters)
                )
                found.append({"norms": [averages, counters], "averages": one.averages, "counters": one.counters})
                continue
            if isinstance(one, NewNumber):
                found.append({"module": one.owner.prefix, "key": one.key, "number": one.value})
                continue
            kind, is_gone = one.change.kind, isinstance(one.value, Gone)
            found.append(
                {
                    "module": one.change.owner.prefix,
                    "key": one.change.key,
                    "in_place": one.change.place is not None,
                    "is_persistent": kind.is_persistent,
                    "is_gone": is_gone,
                    "value": None if is_gone else one.value,
                }
            )
        return found

    def decode(self, sent: Sequence[Mapping[str, Any]]) -> list[NewValue]:
        """The inverse of `encode`, on a worker whose buffers are as they were before the step."""
        owners = {owner.prefix: owner for owner in self._snapshot.owners}
        places = {(place.owner.prefix, place.key): place for place in self._snapshot.places}
        found: list[NewValue] = []
        for one in sent:
            if "norms" in one:
                averages, counters = (
                    [_change_of(places[prefix, key]) for prefix, key in names] for names in one["norms"]
                )
                found.append(NewNorms(NormLayers(averages, counters), one["averages"], one["counters"]))
                continue
            owner, key = owners[one["module"]], one["key"]
            if "number" in one:
                found.append(NewNumber(owner, key, one["number"]))
                continue
            value = Gone.GONE if one["is_gone"] else one["value"]
            kind = BufferKind.of(value, is_persistent=one["is_persistent"])
            place = places[owner.prefix, key] if one["in_place"] else None
            found.append(NewBuffer(BufferChange(owner, key, kind, (), place), value))
        return found

    def overwritten_digests(self) -> dict[str, Tensor]:
        """Digests for comparing the replicas. See Note [Overwritten differences]."""
        found: dict[str, Tensor] = {}
        for names, digests in sorted(self._overwritten.items(), key=lambda item: item[0]):
            for name, digest in zip(names, digests, strict=True):
                found[name] = digest if name not in found else found[name] * 3 + digest
        return {f"{name} before a step": found[name] for name in sorted(found)}


def _change_of(place: BufferPlace) -> BufferChange:
    """Return a change of this buffer by shards that are not known."""
    kind = BufferKind.of(place.current(), is_persistent=True)
    return BufferChange(place.owner, place.key, kind, (), place, averages=place.is_norm_average)


def put_buffer(module: nn.Module, key: str, value: BufferValue, *, is_persistent: bool) -> None:
    """Set a buffer of a module, replacing one of the same name; or delete it if `value` is Gone."""
    if isinstance(value, Gone):
        if key in module._buffers:
            delattr(module, key)
        return
    if key in module._buffers:
        module._buffers[key] = value
    else:
        module.register_buffer(key, value)
    (set.discard if is_persistent else set.add)(module._non_persistent_buffers_set, key)
