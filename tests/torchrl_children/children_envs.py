"""TorchRL envs that count and tell. Workers import this module.

None of them draws from a global generator, so that they do the same in every process.
"""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import (
    CatFrames,
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    VecNormV2,
)
from torchrl.envs.gym_like import default_info_dict_reader
from torchrl.envs.transforms import FrameSkipTransform


def flags(batch_size: Any, *names: str) -> Composite:
    """Returns a done spec with flags of these names."""
    leaf = Categorical(2, dtype=torch.bool, shape=(*batch_size, 1))
    return Composite({name: leaf.clone() for name in names}, shape=batch_size)


class Counter(EnvBase):
    """Counts its steps, and shows which reset it lives in and a number drawn from its seed.

    Element ``k`` of its batch ends after ``length + k % 3`` steps: truncated in every other
    episode, else terminated.
    """

    def __init__(
        self,
        length: int = 3,
        *,
        batch_size: Any = (),
        key: str = "observation",
        size: int = 3,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__(batch_size=torch.Size(batch_size), device=device)
        b = self.batch_size
        self.key, self.size, self.dtype = key, size, dtype
        self.length = length
        self.lengths = length + torch.arange(b.numel()).reshape(*b, 1) % 3
        self.observation_spec = Composite(
            {
                key: Unbounded((*b, size), dtype=dtype, device=device),
                "resets": Unbounded((*b, 1), dtype=torch.int64, device=device),
            },
            shape=b,
            device=device,
        )
        self.action_spec = Bounded(-1, 1, (*b, 2), device=device)
        self.reward_spec = Unbounded((*b, 1), device=device)
        self.full_done_spec = flags(b, "done", "terminated", "truncated").to(device or "cpu")
        self.register_buffer("count", torch.zeros(*b, 1, dtype=torch.int64))
        self.register_buffer("resets", torch.zeros(*b, 1, dtype=torch.int64))
        self.register_buffer("drawn", torch.zeros(*b, 1))
        self.generator = torch.Generator().manual_seed(0)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.resets = torch.zeros_like(self.resets)

    def _shown(self) -> Any:
        weights = torch.arange(1, self.size + 1)
        shown = (self.count + self.drawn) * weights
        return {self.key: shown.to(self.dtype), "resets": self.resets.clone()}

    def _reset(self, tensordict: Any, *, start: int = 0, bonus: int = 0, **_: Any) -> Any:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        mask = torch.ones_like(self.count, dtype=torch.bool) if mask is None else mask
        begin = torch.full_like(self.count, start + bonus)
        if tensordict is not None and "begin" in tensordict:
            begin = begin + tensordict["begin"]
        fresh = torch.randint(0, 1000, self.drawn.shape, generator=self.generator) / 8
        self.count = torch.where(mask, begin, self.count)
        self.drawn = torch.where(mask, fresh, self.drawn)
        self.resets = self.resets + mask
        none = torch.zeros(*self.batch_size, 1, dtype=torch.bool)
        return TensorDict(
            {
                **self._shown(),
                "done": none,
                "terminated": none.clone(),
                "truncated": none.clone(),
            },
            batch_size=self.batch_size,
            device=self.device,
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict["action"]
        mask = tensordict.get("_step", None)  # only ever finer than a worker
        self.count = self.count + (1 if mask is None else mask.reshape(self.count.shape))
        done = self.count >= self.lengths
        odd = self.resets % 2 == 1
        return TensorDict(
            {
                **self._shown(),
                "reward": action.sum(-1, keepdim=True) + self.count,
                "done": done,
                "terminated": done & odd,
                "truncated": done & ~odd,
            },
            batch_size=self.batch_size,
            device=self.device,
        )

    def describe(self, prefix: str) -> str:
        return f"{prefix}{self.key}{int(self.count.sum())}"


class DoneOnly(EnvBase):
    """Returns ``done`` and leaves ``terminated`` to EnvBase's completion."""

    def __init__(self, length: int = 3) -> None:
        super().__init__()
        self.length, self.count = length, 0
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Bounded(-1, 1, (1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Categorical(2, dtype=torch.bool, shape=(1,))

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _told(self) -> dict[str, Any]:
        return {
            "observation": torch.tensor([float(self.count)]),
            "done": torch.tensor([self.count >= self.length]),
        }

    def _reset(self, tensordict: Any, **_: Any) -> Any:
        self.count = 0
        return TensorDict(self._told())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        return TensorDict({**self._told(), "reward": tensordict["action"].clone()})


class Walker(EnvBase):
    """Has no state: where it is and for how long is read from the TensorDict.

    A reset that is given a position begins there.
    """

    def __init__(self, length: int = 4, *, batch_size: Any = (), batch_locked: bool = True) -> None:
        super().__init__(batch_size=torch.Size(batch_size))
        self.__dict__["_batch_locked"] = batch_locked
        b = self.batch_size
        self.length = length
        own = {
            "position": Unbounded((*b, 2)),
            "steps": Unbounded((*b, 1), dtype=torch.int64),
        }
        self.observation_spec = Composite(own, shape=b)
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(-1, 1, (*b, 2))
        self.reward_spec = Unbounded((*b, 1))
        self.full_done_spec = flags(b, "done", "terminated")

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, tensordict: Any, **_: Any) -> Any:
        b = self.batch_size
        position = torch.full((*b, 2), 0.25)
        if tensordict is not None and tensordict.get("home", None) is not None:
            position = tensordict["home"].clone()
        none = torch.zeros(*b, 1, dtype=torch.bool)
        return TensorDict(
            {
                "position": position,
                "steps": torch.zeros(*b, 1, dtype=torch.int64),
                "done": none,
                "terminated": none.clone(),
            },
            batch_size=b,
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        position = tensordict["position"] + tensordict["action"] / 4
        steps = tensordict["steps"] + 1
        done = (steps >= self.length) | (position.abs().amax(-1, keepdim=True) > 0.6)
        return TensorDict(
            {
                "position": position,
                "steps": steps,
                "reward": position.sum(-1, keepdim=True),
                "done": done,
                "terminated": done.clone(),
            },
            batch_size=tensordict.batch_size,
        )


class Teams(EnvBase):
    """Two teams of agents whose episodes end apart; no flags at the root.

    Three red agents, each of whom ends after steps of his own, and a blue pair, which ends
    as one. All of it is reset only where a mask says so.
    """

    def __init__(self, length: int = 3, *, root_done: bool = False) -> None:
        super().__init__()
        self.root_done = root_done
        self.lengths = {
            "red": length + torch.arange(3).reshape(3, 1),
            "blue": torch.full((2, 1), length + 1),
        }
        observation, action, reward, done = Composite(), Composite(), Composite(), Composite()
        for name, size in (("red", 3), ("blue", 2)):
            s = (size,)
            observation[name] = Composite(seen=Unbounded((size, 2)), shape=s)
            observation[name, "inner"] = Composite(
                count=Unbounded((size, 1), dtype=torch.int32), shape=s
            )
            action[name] = Composite(move=Categorical(4, shape=s), shape=s)
            reward[name] = Composite(prize=Unbounded((size, 1)), shape=s)
            done[name] = flags(s, "done", "terminated", "truncated")
        if root_done:
            done.update(flags((), "done", "terminated", "truncated"))
        self.observation_spec, self.action_spec = observation, action
        self.reward_spec, self.done_spec = reward, done
        self.counts = {
            "red": torch.zeros(3, 1, dtype=torch.int32),
            "blue": torch.zeros(2, 1, dtype=torch.int32),
        }

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for name, count in self.counts.items():
            done = count >= self.lengths[name]
            if self.root_done:
                done = done.all().expand_as(done).clone()
            told[name] = TensorDict(
                {
                    "seen": count * torch.tensor([1.0, -0.5]),
                    "inner": TensorDict({"count": count.clone()}, [len(count)]),
                    "done": done,
                    "terminated": done.clone(),
                    "truncated": torch.zeros_like(done),
                },
                [len(count)],
            )
        if self.root_done:
            done = told["blue"]["done"][0] & told["red"]["done"][0]
            told |= {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}
        return told

    def _reset(self, tensordict: Any, **_: Any) -> Any:
        root = None if tensordict is None else tensordict.get("_reset", None)
        for name, count in self.counts.items():
            mask = None if tensordict is None else tensordict.get((name, "_reset"), None)
            if mask is None or root is not None:
                mask = torch.ones_like(count, dtype=torch.bool)
            self.counts[name] = count.masked_fill(mask, 0)
        return TensorDict(self._told())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        for name, count in self.counts.items():
            self.counts[name] = count + 1
        told = self._told()
        for name in self.counts:
            told[name]["prize"] = tensordict[name, "move"].unsqueeze(-1).float()
        return TensorDict(told)


class Words(EnvBase):
    """Speaks, and is spoken to: text, a dict, and text below another key."""

    def __init__(self, name: str = "", length: int = 3, *, text_action: bool = True) -> None:
        super().__init__()
        self.name, self.length, self.count = name, length, 0
        self.observation_spec = Composite(
            text=NonTensor((), example_data="words"),
            inner=Composite(thing=NonTensor((), example_data={"n": 0}), number=Unbounded((1,))),
        )
        self.action_spec = Composite(
            said=NonTensor((), example_data="hm") if text_action else Categorical(3)
        )
        self.text_action = text_action
        self.reward_spec = Unbounded((1,))
        self.full_done_spec = flags((), "done", "terminated", "truncated")

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _told(self, said: Any) -> Any:
        told = TensorDict(
            {
                "inner": {"number": torch.tensor([float(self.count)])},
                "done": torch.tensor([self.count >= self.length]),
                "terminated": torch.tensor([self.count >= self.length]),
                "truncated": torch.tensor([False]),
            }
        )
        told.set("text", NonTensorData(f"{self.name} at {self.count} heard {said}"))
        told.set(("inner", "thing"), NonTensorData({"n": self.count, "said": [said]}))
        return told

    def _reset(self, tensordict: Any, **_: Any) -> Any:
        self.count = 0
        return self._told("nothing")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        said = tensordict["said"]
        told = self._told(said if self.text_action else int(said))
        told["reward"] = torch.tensor([float(self.count)])
        return told


class Half(EnvBase):
    """Has leaves that numpy lacks, a scalar one and an empty one."""

    def __init__(self, length: int = 3) -> None:
        super().__init__()
        self.length, self.count = length, 0
        self.observation_spec = Composite(
            half=Unbounded((2,), dtype=torch.bfloat16),
            scalar=Unbounded((), dtype=torch.float64),
            empty=Unbounded((0, 2)),
            byte=Bounded(0, 255, (2, 2), dtype=torch.uint8),
        )
        self.action_spec = Bounded(-1, 1, (2,), dtype=torch.bfloat16)
        self.reward_spec = Unbounded((1,))
        self.full_done_spec = flags((), "done", "terminated", "truncated")

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _told(self, action: Any) -> dict[str, Any]:
        done = torch.tensor([self.count >= self.length])
        return {
            "half": action + self.count,
            "scalar": torch.tensor(self.count / 3, dtype=torch.float64),
            "empty": torch.zeros(0, 2),
            "byte": torch.full((2, 2), self.count, dtype=torch.uint8),
            "done": done,
            "terminated": torch.zeros_like(done),
            "truncated": done.clone(),
        }

    def _reset(self, tensordict: Any, **_: Any) -> Any:
        self.count = 0
        return TensorDict(self._told(torch.zeros(2, dtype=torch.bfloat16)))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        return TensorDict({**self._told(tensordict["action"]), "reward": torch.ones(1)})


class Weighted(EnvBase):
    """Its observations depend on the actions by a weight, so that gradients can flow."""

    def __init__(self, length: int = 3) -> None:
        super().__init__()
        self.length, self.count = length, 0
        self.weight = torch.nn.Parameter(torch.tensor([2.0]))
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.full_done_spec = flags((), "done", "terminated", "truncated")

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _told(self, observation: Any) -> dict[str, Any]:
        done = torch.tensor([self.count >= self.length])
        return {
            "observation": observation,
            "done": done,
            "terminated": done.clone(),
            "truncated": torch.zeros_like(done),
        }

    def _reset(self, tensordict: Any, **_: Any) -> Any:
        self.count = 0
        return TensorDict(self._told(torch.ones(1)))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        told = self._told(tensordict["action"] * self.weight + self.count)
        return TensorDict({**told, "reward": tensordict["action"] * 3})


def make_minigrid(max_steps: int = 5) -> EnvBase:
    import minigrid  # noqa: F401
    from minigrid.core.mission import MissionSpace
    from torchrl.envs.libs.gym import register_gym_spec_conversion

    register_gym_spec_conversion(MissionSpace)(
        lambda spec, **kwargs: NonTensor((), example_data="a mission")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GymEnv("MiniGrid-Empty-5x5-v0", max_steps=max_steps)


def make_rps(max_cycles: int = 4) -> EnvBase:
    from torchrl.envs import PettingZooWrapper

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pettingzoo.classic import rps_v2

        return PettingZooWrapper(rps_v2.parallel_env(max_cycles=max_cycles), use_mask=False)


def make_cheetah() -> EnvBase:
    from torchrl.envs import DMControlEnv

    return DMControlEnv("cheetah", "run", frame_skip=250)


class DictGame(gymnasium.Env[Any, Any]):
    """A Gymnasium env with nested observations, and numbers in its infos."""

    observation_space = spaces.Dict(
        {
            "picture": spaces.Box(0, 255, (2, 3), np.uint8),
            "inner": spaces.Dict({"count": spaces.Box(0, 99, (1,), np.int64)}),
            "choice": spaces.Discrete(5),
        }
    )
    action_space = spaces.MultiDiscrete([2, 3])

    def _told(self) -> tuple[Any, dict[str, Any]]:
        observation = {
            "picture": self.np_random.integers(0, 255, (2, 3)).astype(np.uint8),
            "inner": {"count": np.array([self.count])},
            "choice": self.count % 5,
        }
        info = {"half": np.float64(self.count / 2), "pair": np.full(2, self.count, np.float32)}
        return observation, info

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._told()

    def step(self, action: Any) -> Any:
        self.count += 1
        observation, info = self._told()
        ended = bool(self.np_random.integers(4) == 0)
        return observation, float(action[0] + action[1]), ended, self.count >= 4, info


def make_dict_game(*, with_infos: bool = False) -> EnvBase:
    env = GymWrapper(DictGame())
    if not with_infos:
        return env
    specs = [Unbounded((), dtype=torch.float64), Unbounded((2,))]
    return env.set_info_dict_reader(default_info_dict_reader(["half", "pair"], spec=specs))


def dressed(maker: Any, how: str) -> EnvBase:
    """Returns an env with transforms around it."""
    transforms: dict[str, Any] = {
        "counter": lambda: [StepCounter()],
        "usual": lambda: [StepCounter(), RewardSum(), InitTracker()],
        "short": lambda: [StepCounter(max_steps=2), RewardSum(), FrameSkipTransform(1)],
        "doubles": lambda: [
            DoubleToFloat(in_keys=["observation"]),
            ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"]),
            RewardScaling(loc=0.5, scale=3.0),
            RewardSum(),
        ],
        "frames": lambda: [CatFrames(N=3, dim=-1, in_keys=["observation"]), StepCounter()],
        "primed": lambda: [
            InitTracker(),
            TensorDictPrimer(hidden=Unbounded((1, 4)), default_value=0.0),
        ],
        "vecnorm": lambda: [VecNormV2(in_keys=["observation", "reward"]), StepCounter()],
        "gru": lambda: [InitTracker(), TensorDictPrimer(recurrent_state=Unbounded((1, 4)))],
        "lstm": lambda: [
            InitTracker(),
            TensorDictPrimer(hidden_h=Unbounded((1, 4)), hidden_c=Unbounded((1, 4))),
        ],
        "sum only": lambda: [RewardSum()],
    }
    return TransformedEnv(maker(), Compose(*transforms[how]()))
