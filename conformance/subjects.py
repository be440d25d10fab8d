"""What can be tested: a class in the place of torch's DistributedDataParallel, or a backend in the place of Gloo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import disguise
import swap
from suite import Setting


@dataclass(frozen=True)
class DdpClass:
    """`torch`, `lockstep` or a dotted name; and the backend that it runs on."""

    name: str
    backend: str = "gloo"
    product: str = "an object of the class under test"

    def import_tests(self, setting: Setting, *, built: Path) -> ModuleType:
        cls = swap.load(self.name)
        swap.put_in_place(self.name, cls)
        if setting.stand_in:
            swap.drop_devices(cls)
        if setting.one_gpu:
            swap.use_first_device(cls)
        swap.count_constructions(cls, built)
        return disguise.import_tests(self.backend, known_as=setting.known_as)


@dataclass(frozen=True)
class Backend:
    """`gloo`, `shm` or `module.name`, with torch's own DDP class."""

    given: str

    @property
    def name(self) -> str:
        return disguise.name_of(self.given)

    @property
    def product(self) -> str:
        return f"a {self.name} group"

    def import_tests(self, setting: Setting, *, built: Path) -> ModuleType:
        if setting.stand_in:
            swap.drop_devices(swap.TORCH_CLASS)
        disguise.let_subgroups_through(setting.world_size)
        disguise.count_groups(self.name, built)
        return disguise.import_tests(self.given, known_as=setting.known_as)
