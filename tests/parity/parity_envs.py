"""TorchRL envs for the parity tests, which say what was done to them."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase, Transform

PARENT_PID_VARIABLE = "SHOAL_PARITY_PARENT"


def flag() -> Binary:
    return Binary(1, shape=(1,), dtype=torch.bool)


class Counter(EnvBase):
    """Counts its steps from ``start``; the reward is the action; ends at ``start + length``.

    Notes what its last ``_step`` and ``_reset`` got. Bad actions do bad things: -1 raises,
    -2 ends the process.
    """

    def __init__(
        self,
        start: int = 0,
        length: int = 100,
        *,
        key: str = "observation",
        size: int = 1,
        diary: str | None = None,
        table: list[int] | None = None,
        action_size: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        batch = self.batch_size
        self.start, self.length, self.key, self.size = start, length, key, size
        self.diary, self.table = diary, table
        self.threads_at_start = torch.get_num_threads()
        self.num_resets = 0
        self.step_keys: list[Any] = []
        self.reset_keys_seen: list[Any] | None = None
        self.reset_kwargs: dict[str, Any] = {}
        self.seeds: list[int] = []
        self.observation_spec = Composite(
            {key: Unbounded((*batch, size), dtype=torch.int64)}, shape=batch
        )
        self.action_spec = Bounded(-100, 100, (*batch, action_size), dtype=torch.float32)
        self.reward_spec = Unbounded((*batch, 1))
        self.full_done_spec = Composite(
            {name: Binary(1, shape=(*batch, 1), dtype=torch.bool) for name in FLAGS}, shape=batch
        )
        self.count = torch.full((*batch, 1), start)
        self._note("built")

    def _note(self, what: str) -> None:
        if self.diary is not None:
            with open(self.diary, "a") as file:
                file.write(f"{what} {os.getpid()}\n")

    def _result(self, **more: Any) -> TensorDict:
        ended = self.count >= self.start + self.length
        return TensorDict(
            {
                self.key: self.count.expand(*self.batch_size, self.size).clone(),
                "done": ended,
                "terminated": ended.clone(),
                "truncated": torch.zeros_like(ended),
                **more,
            },
            batch_size=self.batch_size,
            device=self.device,
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        self.num_resets += 1
        self.reset_kwargs = kwargs
        self.reset_keys_seen = None if tensordict is None else sorted(tensordict.keys())
        mask = None if tensordict is None else tensordict.get("_reset", None)
        start = self.start + kwargs.get("offset", 0)
        if tensordict is not None and tensordict.get("begin_at", None) is not None:
            start = tensordict["begin_at"].to(torch.int64)
        fresh = torch.as_tensor(start).expand_as(self.count)
        self.count = fresh.clone() if mask is None else torch.where(mask, fresh, self.count)
        return self._result()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        action = tensordict["action"]
        self.step_keys = sorted(map(str, tensordict.keys(True, True)))
        if bool((action == -1).all()):
            raise ValueError("no step today")
        if bool((action == -2).all()):
            os._exit(7)
        self.count = self.count + 1
        return self._result(reward=action[..., :1].clone())

    def _set_seed(self, seed: int | None) -> None:
        self.seeds.append(seed)  # type: ignore[arg-type]

    def close(self, *, raise_if_closed: bool = True) -> None:
        self._note("closed")
        super().close(raise_if_closed=False)

    # --- for dispatch ----------------------------------------------------------------

    @property
    def doubled(self) -> int:
        return 2 * self.start

    def add(self, a: int, b: int = 0) -> int:
        return self.start + a + b

    def num_given(self, *args: Any) -> int:
        return len(args)

    def fail(self) -> None:
        raise LookupError("no such thing")

    def fail_at_two(self) -> int:
        if self.start == 2:
            raise LookupError("not in mine")
        self.start += 10
        return self.start

    def pid(self) -> int:
        return os.getpid()


FLAGS = ("done", "terminated", "truncated")


class SnapshotCounter(Counter):
    """May be put into the state of another one."""

    def __setitem__(self, item: Any, source: Any) -> None:
        self.count = source.count.clone()


class StatefulCounter(Counter):
    """A reset puts it where its input says."""

    _supports_set_state = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state_spec = Composite(place=Unbounded((1,), dtype=torch.int64))
        self.observation_spec["place"] = Unbounded((1,), dtype=torch.int64)

    def _result(self, **more: Any) -> TensorDict:
        return super()._result(place=self.count.clone(), **more)

    def _reset(
        self, tensordict: TensorDictBase | None = None, set_state: Any = None, **kwargs: Any
    ) -> TensorDict:
        super()._reset(None, **kwargs)
        if set_state:
            assert tensordict is not None
            self.count = tensordict["place"].clone()
        return self._result()


class Unprintable(Counter):
    def __repr__(self) -> str:
        raise RuntimeError("has no words")


class Stubborn(Counter):
    """Cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("one of a kind")


class Talkative(Counter):
    """Warns at every step, and returns an entry that it never declared."""

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        warnings.warn("a step was done", UserWarning, stacklevel=1)
        made = super()._step(tensordict)
        made["undeclared"] = torch.ones(1)
        return made


class Markov(EnvBase):
    """Without memory: the next observation is the last one plus the action."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_spec = Composite(observation=Unbounded((2,)))
        self.state_spec = Composite(observation=Unbounded((2,)))
        self.action_spec = Unbounded((2,))
        self.reward_spec = Unbounded((1,))
        self.full_done_spec = Composite({name: flag() for name in FLAGS})

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        return TensorDict({"observation": torch.ones(2), **self.full_done_spec.zero()})

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        observation = tensordict["observation"] + tensordict["action"]
        reward = observation.sum(-1, keepdim=True)
        return TensorDict(
            {"observation": observation, "reward": reward, **self.full_done_spec.zero()}
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


class Recurrent(Counter):
    """Sums what the policy has put into ``next``; leaves the entry itself alone."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state_spec = Composite(hidden=Unbounded((3,)))
        self.observation_spec["hidden"] = Unbounded((3,))
        self.observation_spec["seen"] = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        made = super()._reset(tensordict, **kwargs)
        return made.update({"hidden": torch.zeros(3), "seen": torch.zeros(1)})

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        preset = tensordict.get(("next", "hidden"), None)
        made = super()._step(tensordict)
        made["hidden"] = torch.zeros(3) if preset is None else preset.clone()
        made["seen"] = made["hidden"].sum(-1, keepdim=True)
        return made


class Writer(Counter):
    """Says a text of ``length`` letters, one further down the alphabet at each step."""

    def __init__(self, letter: str = "a", text_length: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.letter, self.text_length, self.said = letter, text_length, 0
        self.observation_spec["text"] = NonTensor(shape=(), example_data="a")

    def _result(self, **more: Any) -> TensorDict:
        made = super()._result(**more)
        letter = chr(ord(self.letter) + self.said)
        made.set_non_tensor("text", letter * self.text_length)
        return made

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        self.said = 0
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.said += 1
        return super()._step(tensordict)


class Dice(Counter):
    """Draws from the three global generators."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("torch", "numpy", "python"):
            self.observation_spec[name] = Unbounded((1,), dtype=torch.float64)

    def _result(self, **more: Any) -> TensorDict:
        import random

        return super()._result(
            torch=torch.rand(1, dtype=torch.float64),
            numpy=torch.from_numpy(np.random.random_sample(1)),
            python=torch.tensor([random.random()], dtype=torch.float64),
            **more,
        )


class OnlyDone(EnvBase):
    """Declares done and terminated, and returns done only; ends with its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.full_done_spec = Composite(done=flag(), terminated=flag())

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        return TensorDict({"observation": torch.zeros(1)})

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        return TensorDict(
            {
                "observation": torch.ones(1),
                "reward": torch.ones(1),
                "done": torch.ones(1, dtype=torch.bool),
            }
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


class Rendezvous(Counter):
    """Is built only together with another one, in another process.

    Opening a FIFO waits for its other end. The process of the test does not wait.
    """

    def __init__(self, fifo: str, is_first: bool, **kwargs: Any) -> None:
        if os.getpid() != int(os.environ[PARENT_PID_VARIABLE]):
            os.close(os.open(fifo, os.O_WRONLY if is_first else os.O_RDONLY))
        super().__init__(**kwargs)


class Waiting(Counter):
    """Action 5 waits until the test opens the other end of a FIFO."""

    def __init__(self, fifo: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fifo = fifo

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        if bool((tensordict["action"] == 5).all()):
            os.close(os.open(self.fifo, os.O_RDONLY))
        return super()._step(tensordict)


class Locked(Counter):
    """Its state holds a lock and a number, and loading it takes an argument."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loaded_with: dict[str, Any] = {}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        deep = {"lock": threading.RLock(), "count": self.count.clone()}
        return {"lock": threading.Lock(), "deep": deep, "start": self.start}

    def load_state_dict(self, state_dict: Any, strict: bool = True, **kwargs: Any) -> None:
        self.loaded_with = {"strict": strict, **kwargs}
        self.count = state_dict["deep"]["count"].clone()


class HomeBound(Transform):
    """A transform that must not live in a worker."""

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=[])

    def _check_batched_worker_compat(self) -> None:
        raise RuntimeError("HomeBound belongs outside of the batched env")


class EmptyPart(Counter):
    """Has an empty composite in one of its specs."""

    auto_complete_done_specs = False

    def __init__(self, where: str) -> None:
        super().__init__()
        name = f"full_{where}_spec"
        spec = getattr(self, name).clone().unlock_(recurse=True)
        spec["hollow"] = Composite()
        if where in ("action", "state"):
            self.input_spec.unlock_(recurse=True)
            self.input_spec[name] = spec
        else:
            self.output_spec.unlock_(recurse=True)
            self.output_spec[name] = spec


class Sharing(Counter):
    """Has its state in a tensordict, which an ``EnvCreator`` shares among all."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shared = TensorDict({"number": torch.zeros(1)})

    def get_extra_state(self) -> Any:
        return self.shared

    def set_extra_state(self, state: Any) -> None:
        self.shared = state
