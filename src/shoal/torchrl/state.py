"""The state of the workers in the state dict of a transformed env.

Knows TorchRL's transforms. ``TransformedEnv.state_dict`` holds its transforms' state and
nothing else, so what shall be in it has to be a transform's.
"""

from __future__ import annotations

from typing import Any

from torchrl.envs import Transform, TransformedEnv

__all__ = ["WorkerState"]


class WorkerState(Transform):
    """Saves and loads the state of the env below, as its own; changes no data.

    Append it where a ``TransformedEnv``, or a collector around one, shall save the state
    of the children as well::

        env = TransformedEnv(ParallelEnv(8, make_env), Compose(RewardSum(), WorkerState()))

    Saving and loading start the workers if need be.
    """

    def get_extra_state(self) -> Any:
        """Returns the state dict of the env below the transforms."""
        return self._base_env().state_dict()

    def set_extra_state(self, state: Any) -> None:
        """Loads the state dict of the env below the transforms."""
        self._base_env().load_state_dict(state)

    def _base_env(self) -> Any:
        env = self.container
        while isinstance(env, TransformedEnv):
            env = env.base_env
        if env is None:
            raise RuntimeError("WorkerState belongs to no env: append it to a TransformedEnv first")
        return env
