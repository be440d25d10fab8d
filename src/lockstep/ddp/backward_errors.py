"""Messages for errors in a backward pass.

They contain torch's key phrases, because programs match on them, and add the names of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

BACKWARD_TWICE = (
    "backward() ran a second time through a forward whose gradients have already been averaged over the workers: what "
    "it adds now would stay on this worker alone, and the replicas would diverge. Add the losses and call backward "
    "once; or put the forward and the first backward together inside `with model.no_sync():`, and forward again."
)


def graph_changed(name: str) -> str:
    return (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then "
        "got used in the second iteration. this is not compatible with static_graph set to True. "
        f"The parameter is {name}; leave static_graph at False, with find_unused_parameters=True if needed."
    )


def ready_twice(index: int, name: str, find_unused: bool) -> str:
    third = (
        " 3) Incorrect unused parameter detection: the parameter was not part of the graph when the backward pass "
        "began, but got a gradient later, for example from a reentrant `checkpoint`. If every parameter takes part, "
        "pass `find_unused_parameters=False`."
        if find_unused
        else ""
    )
    return (
        "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
        "1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not shared "
        "across multiple concurrent forward-backward passes. or try to use _set_static_graph() as a workaround if this "
        "module graph does not change during training loop. "
        "2) Reused parameters in multiple reentrant backward passes. For example, if you use multiple `checkpoint` "
        "functions to wrap the same part of your model, its parameters get a gradient from each of them: use "
        f"checkpoint(..., use_reentrant=False), or static_graph=True.{third}\n"
        f"Parameter at index {index} with name {name} has been marked as ready twice. This means that multiple "
        "autograd engine  hooks have fired for this particular parameter during this iteration."
    )


def unfinished(*, rank: int, missing: Mapping[int, str], find_unused: bool, static_graph: bool) -> str:
    """The message for a pass in which parameters got no gradient; `missing` maps their indices to their names."""
    begin = "Expected to have finished reduction in the prior iteration before starting a new one. "
    if static_graph:
        return (
            f"{begin}This error indicates that your training graph has changed in this iteration, e.g., one parameter "
            "is used in first iteration, but then got unused in the second iteration. this is not compatible with "
            f"static_graph set to True.\n{_list(rank, missing)}"
        )
    cause = "This error indicates that your module has parameters that were not used in producing loss. "
    if find_unused:
        cure = (
            "Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` outputs "
            "participate in computing loss. You can fix this by making sure all `forward` function outputs participate "
            "in calculating loss. "
        )
    else:
        cure = (
            "You can enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` "
            "to `torch.nn.parallel.DistributedDataParallel`, and by \nmaking sure all `forward` function outputs "
            "participate in calculating loss. "
        )
    return (
        f"{begin}{cause}{cure}\n{_list(rank, missing)}\n"
        "(Elsewhere you would now have to set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
        "DETAIL to see these names.)"
    )


def _list(rank: int, missing: Mapping[int, str]) -> str:
    modules: dict[str, list[str]] = {}
    for name in missing.values():
        modules.setdefault(name.rpartition(".")[0] or "(the module itself)", []).append(name.rpartition(".")[2])
    by_module = "; ".join(f"{module}: {', '.join(names)}" for module, names in modules.items())
    return (
        f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}\n"
        f"Parameters which did not receive grad for rank {rank}: {', '.join(missing.values())}\n"
        f"By module: {by_module}"
    )
