"""Imports what workers of tests need. The fork server of on_workers.py imports this module, so that no worker has to.

A worker imports the file of its test, and with it pytest, which takes longer than most tests.
"""

import gc
import importlib

gc.disable()  # collections would take an eighth of the time of these imports
for name in ("pytest", "torch._dynamo", "torch.distributed.optim", "lockstep.ddp.wrapper", "lockstep.train.run"):
    importlib.import_module(name)
gc.freeze()  # collections in workers would write to the memory of these objects, and so copy it
gc.enable()
