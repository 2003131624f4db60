"""What the front needs of one running engine: actions in, TensorDicts out.

Knows the engine's rows and TensorDicts. Each kind of env has a class of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import torch
    from tensordict import TensorDictBase

    from shoal.engine import Engine

__all__ = ["ResetRequest", "Rows"]

ResetRequest = tuple["np.ndarray[Any, Any] | None", "list[dict[str, Any]] | None"]
"""Which envs, ascending (``None``: all), and the keyword arguments of each one's reset."""


class Rows(Protocol):
    """The rows of one engine as TensorDicts.

    Everything returned is new memory: the rows change with the next step, and what a
    caller has belongs to him.

    Attributes:
        engine: the engine.
        plain: key, rows of steps and rows of resets, where all entries are arrays under
            names of their own; else ``None``.
        steps_in_one: a step and the resets after it may be asked for together.
    """

    engine: Engine
    steps_in_one: bool

    @property
    def plain(self) -> list[tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]] | None:
        """See the class."""

    def select(self, env_ids: Sequence[int], reset_keys: Sequence[Any]) -> Rows:
        """Returns the rows of some envs, in this order."""

    def some(self, env_ids: np.ndarray[Any, Any]) -> Rows:
        """Returns the rows of some envs, ascending, for one call. Costs next to nothing."""

    @property
    def fresh_rows(self) -> np.ndarray[Any, Any] | None:
        """Bool ``[N]``: who was just reset; ``None`` for nobody."""

    def step(
        self,
        tensordict: TensorDictBase,
        *,
        autoreset: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor | None:
        """Steps the envs, or those in the ``_step`` mask.

        Args:
            tensordict: holds the actions.
            autoreset: reset envs whose episode ends.
            meanwhile: called if `stepped` may be had while those are being reset.

        Returns:
            The mask, if it left somebody out.
        """

    def reset(self, tensordict: TensorDictBase | None, kwargs: dict[str, Any]) -> None:
        """Resets the envs, or those in the ``_reset`` mask."""

    def encode(self, tensordict: TensorDictBase) -> Any:
        """Returns what a step of the envs takes, from one row per env."""

    def reset_request(
        self, tensordict: TensorDictBase | None, kwargs: dict[str, Any]
    ) -> ResetRequest | None:
        """Returns what a reset asks of the engine; ``None`` for nothing."""

    def stepped(self, unwanted: tuple[Any, ...] = ()) -> TensorDictBase:
        """Returns ``next`` of the last step, terminal observations included.

        Args:
            unwanted: keys to leave out, each a tuple.
        """

    def present(self, *, none_at_end: bool = False) -> TensorDictBase:
        """Returns the root: what to act on now, with its done flags.

        Args:
            none_at_end: the caller knows that no env is at the end of an episode.
        """
