"""What the differential tests do with an env. Every script begins with a seed.

A script may not depend on what was done with the env before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from children_cases import SEED, Log
from tensordict import TensorDict
from torchrl.envs import step_mdp

if TYPE_CHECKING:
    from collections.abc import Callable


def begin(env: Any, log: Log) -> Any:
    """Seeds the env and this process, which may be the same, and resets the env."""
    log.add("seed", env.set_seed(SEED))
    torch.manual_seed(SEED)
    return log.add("reset", env.reset())


def only_action(env: Any) -> Any:
    action = env.rand_action(TensorDict({}, env.batch_size, device=env.device))
    # The specs of TorchRL's own have a device where the env has none.
    return action if env.device is not None else action.clear_device_()


def masks_for(env: Any, rows: list[bool]) -> dict[Any, torch.Tensor]:
    """Returns reset masks that name whole workers."""
    chosen = torch.tensor(rows)
    masks = {}
    for key in env.reset_keys:
        done = (*key[:-1], "done") if isinstance(key, tuple) else "done"
        if done not in env.full_done_spec.keys(True, True):
            done = next(
                k
                for k in env.full_done_spec.keys(True, True)
                if (k[:-1] if isinstance(k, tuple) else ())
                == (key[:-1] if isinstance(key, tuple) else ())
            )
        shape = env.full_done_spec[done].shape
        masks[key] = chosen.reshape(-1, *[1] * (len(shape) - 1)).expand(shape).clone()
    return masks


def with_masks(root: Any, masks: dict[Any, torch.Tensor]) -> Any:
    for key, mask in masks.items():
        root.set(key, mask)
    return root


def rand_policy(env: Any) -> Callable[[Any], Any]:
    return lambda td: td.update(env.full_action_spec.rand())


# --- the scripts -----------------------------------------------------------------------


def steps(env: Any, log: Log) -> None:
    root = begin(env, log)
    for t in range(7):
        td = env.step(env.rand_action(root))
        log.add(f"step {t}", td)
        root = log.add(f"maybe reset {t}", env.maybe_reset(step_mdp(td)))
    log.add("rand_step", env.rand_step(root))
    log.add("again", env.reset())


def steps_and_resets(env: Any, log: Log) -> None:
    root = begin(env, log)
    for t in range(12):
        root = env.rand_action(root)
        td, root = env.step_and_maybe_reset(root)
        log.add(f"td {t}", td)
        log.add(f"root {t}", root)


def past_the_end(env: Any, log: Log) -> None:
    """Nobody resets the envs; they go on as a lone env would."""
    root = begin(env, log)
    for t in range(9):
        td = env.step(env.rand_action(root))
        log.add(f"step {t}", td)
        root = step_mdp(td)
    log.add("reset", env.reset())


def only_actions(env: Any, log: Log) -> None:
    """The TensorDicts hold the action and nothing else."""
    begin(env, log)
    for t in range(6):
        log.add(f"step {t}", env.step(only_action(env)))
    for t in range(4):
        td, root = env.step_and_maybe_reset(only_action(env))
        log.add(f"td {t}", td)
        log.add(f"root {t}", root)


def masked_resets(env: Any, log: Log) -> None:
    root = begin(env, log)
    for t in range(6):
        td = env.step(env.rand_action(root))
        root = step_mdp(td)
        rows = [(t + k) % (k + 2) == 0 for k in range(env.num_workers)]
        masks = masks_for(env, rows)
        root = env.reset(with_masks(root, masks))
        log.add(f"reset {t}", root)
        for mask in masks.values():
            mask.fill_(True)
    root = env.reset(with_masks(root, masks_for(env, [True] * env.num_workers)))
    log.add("everybody", root)
    log.add("step", env.step(env.rand_action(root)))


def nobody_resets(env: Any, log: Log) -> None:
    root = begin(env, log)
    root = step_mdp(env.step(env.rand_action(root)))
    root = env.reset(with_masks(root, masks_for(env, [False] * env.num_workers)))
    log.add("nobody", root)
    log.add("step", env.step(env.rand_action(root)))


def masked_steps(env: Any, log: Log) -> None:
    """Some of the workers step, the rows of the others repeat what the root says."""
    root = begin(env, log)
    for t in range(8):
        rows = torch.tensor([(t >> k) % 2 == 0 for k in range(env.num_workers)])
        mask = rows.reshape(-1, *[1] * (len(env.batch_size) - 1)).expand(env.batch_size).clone()
        root = env.rand_action(root)
        td = env.step(root.set("_step", mask))
        mask.fill_(True)
        log.add(f"step {t}", td.exclude("_step"))
        root = step_mdp(td)
        root.pop("_step", None)
    root = log.add("maybe reset", env.maybe_reset(root))
    log.add("step", env.step(env.rand_action(root)))


def masked_steps_and_resets(env: Any, log: Log) -> None:
    root = begin(env, log)
    for t in range(8):
        rows = torch.tensor([(t >> k) % 2 == 0 for k in range(env.num_workers)])
        mask = rows.reshape(-1, *[1] * (len(env.batch_size) - 1)).expand(env.batch_size).clone()
        td, root = env.step_and_maybe_reset(env.rand_action(root).set("_step", mask))
        log.add(f"td {t}", td.exclude("_step"))
        root = log.add(f"root {t}", root.exclude("_step"))


def rollouts(env: Any, log: Log) -> None:
    begin(env, log)
    log.add("nonstop", env.rollout(12, break_when_any_done=False))
    log.add("any", env.rollout(12))
    log.add("one step", env.rollout(1, break_when_any_done=False))
    log.add("with a policy", env.rollout(9, rand_policy(env), break_when_any_done=False))
    data = log.add("with a policy", env.rollout(5, rand_policy(env)))
    root = step_mdp(data[:, -1] if len(env.batch_size) == 1 else data[..., -1])
    options: dict[str, Any] = {"auto_reset": False, "tensordict": root}
    log.add("gone on", env.rollout(7, break_when_any_done=False, **options))
    options["tensordict"] = env.reset()
    log.add("gone on from a reset", env.rollout(7, **options))


def waits(env: Any, log: Log) -> None:
    """Ended rows wait for the others."""
    begin(env, log)
    log.add("all", env.rollout(30, break_when_all_done=True))
    log.add("nonstop", env.rollout(9, break_when_any_done=False))
    log.add("all", env.rollout(30, rand_policy(env), break_when_all_done=True))


def lazy_rollouts(env: Any, log: Log) -> None:
    """For children that have no dense batch."""
    begin(env, log)
    options: dict[str, Any] = {"return_contiguous": False}
    log.add("nonstop", env.rollout(12, break_when_any_done=False, **options))
    log.add("any", env.rollout(12, **options))
    log.add("policy", env.rollout(9, rand_policy(env), break_when_any_done=False, **options))
    options |= {"auto_reset": False, "tensordict": env.reset()}
    log.add("gone on from a reset", env.rollout(7, **options))


def halves(env: Any, log: Log) -> None:
    """What a transform calls, for many ends."""
    root = begin(env, log)
    ends = 0
    for t in range(45):
        root = env.rand_action(root)
        td = env._step(root)
        if t % 8 == 0 or td["done"].any():
            log.add(f"_step {t}", td)
        done = td["done"]
        root = td.exclude("reward")
        if done.any():
            ends += 1
            fresh = env._reset(TensorDict({"_reset": done.clone()}, env.batch_size))
            # TorchRL returns outdated rows outside the mask; nobody uses them.
            log.add(f"_reset {t}", fresh[done.squeeze(-1)])
            root = torch.where(done.squeeze(-1), fresh, root)
    assert ends
    log.add("a plain reset", env.reset())
    log.add("a seed", env.set_seed(SEED + 1))
    log.add("goes on", env.reset())


def seeds(env: Any, log: Log) -> None:
    begin(env, log)
    log.add("static", env.set_seed(4, static_seed=True))
    log.add("reset", env.reset())
    log.add("another", env.set_seed(5))
    log.add("reset", env.reset())
    log.add("again", env.set_seed(5))
    log.add("reset", env.reset())


def reset_arguments(env: Any, log: Log) -> None:
    """For `Counter` only."""
    begin(env, log)
    log.add("a keyword", env.reset(start=5))
    listed = [{"start": 10 * k} for k in range(env.num_workers)]
    log.add("a list", env.reset(list_of_kwargs=listed))
    assert listed == [{"start": 10 * k} for k in range(env.num_workers)]
    log.add("both", env.reset(bonus=1, list_of_kwargs=[dict(k) for k in listed]))
    root = env.reset()
    masks = masks_for(env, [k == 1 for k in range(env.num_workers)])
    root = with_masks(root, masks)
    log.add("a mask and a list", env.reset(root, list_of_kwargs=[dict(k) for k in listed]))
    wide = torch.arange(env.batch_size.numel()).reshape(*env.batch_size, 1)
    given = TensorDict({"begin": wide}, env.batch_size, device=env.device)
    log.add("an entry", env.reset(given))
    root = with_masks(env.reset(), masks_for(env, [k != 1 for k in range(env.num_workers)]))
    root["begin"] = wide
    log.add("a mask and an entry", env.reset(root))
    td = env.rand_action(env.reset())
    log.add("step", env.step_and_maybe_reset(td)[1])


def specs(env: Any, log: Log) -> None:
    """What is said of data in advance."""
    for name in ("observation", "action", "reward", "done", "state"):
        # Specs have no device where none was asked for: in TorchRL's own it depends.
        log.add(name, getattr(env, f"full_{name}_spec").zero().clear_device_())
        keys = getattr(env, f"{name}_keys", None)
        log.add(f"{name} keys", sorted(map(str, keys or ())))
    log.add("reset keys", sorted(map(str, env.reset_keys)))
    log.add("batch", (tuple(env.batch_size), env.batch_locked, str(env.device)))
    fake = env.fake_tensordict().clear_device_()
    log.add("fake", fake if any_data(fake) else fake.apply(torch.zeros_like))
    begin(env, log)


def any_data(td: Any) -> bool:
    from tensordict.base import is_non_tensor

    return any(is_non_tensor(value) for value in td.values(True))


def attributes(env: Any, log: Log) -> None:
    """For `Counter` only."""
    root = begin(env, log)
    env.step(env.rand_action(root))
    log.add("values", list(env.length))
    log.add("calls", env.describe("at "))
    log.add("state", {k: {n: v.tolist() for n, v in s.items()} for k, s in saved(env).items()})


def saved(env: Any) -> dict[str, Any]:
    return dict(env.state_dict())


ALL = (
    past_the_end,  # before resets are prepared, which may cost a step past the end
    steps,
    steps_and_resets,
    only_actions,
    masked_resets,
    nobody_resets,
    masked_steps,
    masked_steps_and_resets,
    rollouts,
    waits,
    halves,
    seeds,
    specs,
)
