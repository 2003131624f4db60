"""A step without the frames of Gymnasium's own wrappers that have nothing left to do.

Knows three wrappers of Gymnasium by their exact type. Each adds two Python calls to
every step; together they cost 7 % of a step of CartPole. What they do is done here:
the same counters are kept, in the same objects, and whenever one of them would do
more than pass on, the call goes through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["short_step"]


def short_step(env: Any) -> Callable[[Any], tuple[Any, Any, Any, Any, dict[str, Any]]]:
    """Returns what does the same as ``env.step``, in fewer calls where it can.

    Args:
        env: a Gymnasium env, wrapped or not. Its wrappers must not be changed after.
    """
    limit: Any = None
    order: Any = None
    checker: Any = None
    inner = env
    # The exact types: a subclass may do anything.
    if type(inner) is TimeLimit and isinstance(inner._max_episode_steps, int):
        limit, inner = inner, inner.env
    if type(inner) is OrderEnforcing:
        order, inner = inner, inner.env
    if type(inner) is PassiveEnvChecker:
        checker, inner = inner, inner.env
    if order is None:
        return env.step  # type: ignore[no-any-return]
    full, base = env.step, inner.step
    is_done_checking = False

    def passes() -> bool:
        """Returns whether the wrappers would only pass a step on, from now on."""
        nonlocal is_done_checking
        is_done_checking = order._has_reset and (
            checker is None
            or (checker.checked_step and getattr(checker, "checked_data_reuse", True))
        )
        return is_done_checking

    def step(action: Any) -> Any:
        return base(action) if is_done_checking or passes() else full(action)

    def step_within_limit(action: Any) -> Any:
        if not (is_done_checking or passes()):
            return full(action)
        result = base(action)
        limit._elapsed_steps = elapsed = limit._elapsed_steps + 1
        if elapsed >= limit._max_episode_steps:
            observation, reward, terminated, _, info = result
            return observation, reward, terminated, True, info
        return result

    return step if limit is None else step_within_limit
