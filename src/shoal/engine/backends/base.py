"""The contract of a backend: where envs run, and how they are asked and waited for.

Knows specs, arrays, records and deadlines. Does not know any implementation.

A backend carries out what the engine has written into the op rows of the slab. It
decides nothing about envs: which of them may be sent to, and what a result means, is
the engine's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np

    from shoal.engine.core.deadline import Deadline
    from shoal.engine.core.layout import Arrays
    from shoal.engine.core.messages import CallEnvs, EnvNotes, Returned, SeedEnvs
    from shoal.engine.spec import EnvSpec, LeafPath

    Array = np.ndarray[Any, Any]

__all__ = ["Backend"]


class Backend(Protocol):
    """Runs the envs of one engine.

    Attributes:
        arrays: views of the rows.
        spec: what each env's leaves look like; the same for all.
        steps_done: where resets after the ends of episodes are a round trip of their own:
            tells whether all rows hold the step that was submitted, though resets may be
            under way. ``None`` where they come with the step.
    """

    arrays: Arrays
    spec: EnvSpec

    @property
    def steps_done(self) -> Callable[[], bool] | None:
        """See the class."""
        ...

    def take_observation(self) -> Mapping[LeafPath, Array] | None:
        """Gives the observation of the last step of all envs away, if it lies besides the rows.

        Once, and in memory that nobody else knows of.
        """
        ...

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers; empty where there are none."""
        ...

    def submit(self, env_ids: Sequence[int] | None) -> None:
        """Starts what the op rows of these envs (``None``: all) say."""
        ...

    def submit_resets(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int | None],
        kwargs: Sequence[Mapping[str, Any]],
        undo_prepared: Sequence[bool],
    ) -> None:
        """Starts resets with seeds or keyword arguments; results go into the rows."""
        ...

    def send_action_objects(self, actions: Mapping[int, Mapping[LeafPath, Any]]) -> None:
        """Hands over action leaves without a fixed shape, before `submit`."""
        ...

    def wait(self, done: Callable[[], bool], deadline: Deadline, *, for_all: bool = False) -> bool:
        """Waits until ``done()``; returns whether it is.

        ``for_all`` promises that ``done`` cannot be true before every worker has
        carried out all it was asked to, which saves wake-ups.

        Raises:
            WorkerDied: a worker has ended, and ``done()`` is still false.
        """
        ...

    def wake_fds(self) -> Sequence[int]:
        """Returns descriptors that are readable once something has happened after `arm`.

        Empty where nothing ever happens by itself: what is submitted is done.
        """
        ...

    def arm(
        self, armed: bool, *, watched: bool = True, is_due: Callable[[], bool] | None = None
    ) -> None:
        """Says whether every result makes a noise from now on, also outside of `wait`.

        Args:
            armed: whether it does.
            watched: somebody may watch `wake_fds`; else only a `doze` has to hear it.
            is_due: tells whether a result is enough to make a noise for, where whoever has
                it can ask; called on any thread, after the row was handed over.
        """
        ...

    def doze(self, deadline: Deadline) -> list[int]:
        """Waits until something happens, once armed; returns what `take_news` needs.

        Touches nothing else: one thread may doze while another uses the backend, as long
        as that one does not wait. Empty: time is up.
        """
        ...

    def poke(self) -> None:
        """Ends a `doze`, the present one or the next."""
        ...

    def take_news(self, news: list[int]) -> None:
        """Takes in what ended a `doze`. Does not wait.

        Raises:
            WorkerDied: a worker has ended. Also if it had been noticed before.
        """
        ...

    def all_done(self) -> bool:
        """Returns whether every worker has carried out all that was submitted."""
        ...

    def take_notes(self) -> dict[int, EnvNotes]:
        """Returns what results hold beside their rows, per env, and forgets it."""
        ...

    def has_notes(self) -> bool:
        """Returns whether `take_notes` would return something."""
        ...

    def call(
        self, commands: Iterator[tuple[int, CallEnvs | SeedEnvs]], deadline: Deadline
    ) -> list[Returned]:
        """Sends one command per worker named, all at once, and waits for the answers."""
        ...

    def worker_of(self, env_id: int) -> int:
        """Returns the worker that holds an env."""
        ...

    def resubmit(self, deadline: Deadline) -> None:
        """Asks again for whatever was written but perhaps not asked for.

        After an interrupt nobody knows how far `submit` came. Asking twice is harmless:
        a row that has been carried out has no op any more.
        """
        ...

    def close(self, deadline: Deadline) -> None:
        """Ends everything. May be called again, from any state."""
        ...
