"""``env_index`` entries behave as TensorDict's own, whoever touches them first and how."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from shoal.torchrl.pool_index import EnvIndices, as_made

if TYPE_CHECKING:
    from collections.abc import Callable

IDS = [1, 3, 5]


def made() -> NonTensorStack:
    return EnvIndices([torch.Size([])] * 8).of(np.array(IDS))


def plain() -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(i) for i in IDS])


def within(entry: Any) -> TensorDict:
    return TensorDict({"a": entry, "b": torch.zeros(3)}, [3])


TOUCHES: dict[str, Callable[[Any], Any]] = {
    "tolist": lambda x: x.tolist(),
    "len": len,
    "item": lambda x: x[1],
    "slice": lambda x: x[:2],
    "repr": repr,
    "equal": lambda x: x == x,
    "clone": lambda x: x.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "stack": lambda x: torch.stack([x, x]),
    "cat": lambda x: torch.cat([x, x]),
    "unbind": lambda x: x.unbind(0),
    "batch size": lambda x: x.batch_size,
    "to": lambda x: x.to("cpu"),
    "iterate": list,
    "lock": lambda x: x.lock_(),
    "expand": lambda x: x.expand(2, 3),
    "reshape": lambda x: x.reshape(3, 1),
    "where": lambda x: torch.where(torch.tensor([True, False, True]), x, x),
    "class": lambda x: x.__class__.__name__,
    "attributes": lambda x: sorted(vars(x)),
    "entry": lambda x: within(x)["a"],
    "get": lambda x: within(x).get("a"),
    "row": lambda x: within(x)[0],
    "mask": lambda x: within(x)[torch.tensor([True, False, True])],
    "clone around": lambda x: within(x).clone(),
    "stack around": lambda x: torch.stack([within(x)] * 2),
    "lazy stack around": lambda x: lazy_stack([within(x)] * 2),
    "dict": lambda x: within(x).to_dict(),
    "pickle around": lambda x: pickle.loads(pickle.dumps(within(x))),
    "apply": lambda x: within(x).apply(lambda y: y + 1),
    "update": lambda x: within(plain()).update(within(x)),
    "flatten keys": lambda x: TensorDict({"a": {"c": x}}, [3]).flatten_keys(),
}


def seen(value: Any) -> Any:
    return type(value), value.tolist() if hasattr(value, "tolist") else repr(value)


@pytest.mark.parametrize("touch", TOUCHES)
def test_like_tensordicts_own_at_the_first_touch(touch: str) -> None:
    entry = made()
    assert seen(TOUCHES[touch](entry)) == seen(TOUCHES[touch](plain()))
    assert entry.tolist() == IDS
    assert type(entry) is NonTensorStack
    assert as_made(entry) is None


def test_says_what_it_was_made_of_until_somebody_looks() -> None:
    entry = made()
    found = as_made(entry)
    assert found is not None
    assert found.tolist() == IDS
    entry[0] = NonTensorData(7)
    assert as_made(entry) is None
    assert entry.tolist() == [7, 3, 5]


def test_two_threads_at_the_first_touch() -> None:
    for _ in range(200):
        entry, found = made(), []
        start = threading.Barrier(2)

        def look(entry: Any = entry, found: Any = found, start: Any = start) -> None:
            start.wait(10)
            found.append(entry.tolist())

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert found == [IDS, IDS]
        assert entry.tensordicts is entry.tensordicts
