"""One update for a learner of several ranks: rank 0 speaks to the coordinator, every rank scores its share.

Each rank of the process group runs the same lines::

    with SharedUpdate(run.update() if rank == 0 else None) as update:
        candidates = update.candidates(groups=8, wait_seconds=300)
        reserved = update.reserve(candidates, learner.log_probs)
        step(reserved.admitted[rank::world])
        update.commit()

The calls are collective. Before each one all ranks say that they are there and well, so that an error on one rank
ends the block on all of them, and rank 0 aborts the update. An error between the calls is heard at the next one; inside
collectives of the step's own, which the other ranks may be waiting in, only the process group's timeout helps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from coordinator.client import Candidates, Reserved, Update
from coordinator.wire.updates import Discard, UpdateView

Answer = TypeVar("Answer")
Score = Callable[[list[npt.NDArray[np.int64]], list[npt.NDArray[np.bool_]]], Sequence[npt.ArrayLike]]
"""From token ids (int64) and action masks (bool) of some sequences, each of shape [tokens], to the log-probs of each
under the weights that the learner now holds, of the same shape; masked positions may hold anything."""


class RankError(Exception):
    """Another rank failed, or the ranks do not make the same call; the text says which rank, and how."""


def on_rank_zero(call: Callable[[], Answer], group: dist.ProcessGroup | None = None) -> Answer:
    """What `call` answers on rank 0, on every rank; `call` is made there alone. Collective.

    For what follows an update: `on_rank_zero(lambda: run.activate(version))`. Where it raises, rank 0 raises the same
    and the others `RankError`. The answer is pickled.
    """
    answer: Answer | None = None
    error: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            answer = call()
        except Exception as raised:  # noqa: BLE001  raised below, once the other ranks know
            error = raised
    said: list[tuple[Answer | None, str | None]] = [(answer, _words(error))]
    dist.broadcast_object_list(said, group=group, group_src=0)
    answer, failure = said[0]
    if error is not None:
        raise error
    if failure is not None:
        raise RankError(f"rank 0: {failure}")
    return answer  # type: ignore[return-value]  # None only where that is the answer


class SharedUpdate:
    """An update that all ranks of `group` (left out: of the whole world) step on together; entering opens it.

    `update` is `Run.update(...)` on rank 0 and None elsewhere. `group` needs a backend for objects on the CPU, such as
    gloo. Every method is collective, answers the same on every rank, and raises `RankError` where another rank failed.
    """

    def __init__(self, update: Update | None, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        if (update is None) == (self._rank == 0):
            raise ValueError("rank 0 gives the update, and no other rank does")
        self._update = update
        self._opened = False
        self._failed = False
        """All ranks know that one of them failed, or one is gone: nobody waits for this one at the end."""

    def __enter__(self) -> SharedUpdate:
        def enter(update: Update) -> None:
            update.__enter__()
            self._opened = True

        try:
            self._on_rank_zero("open", enter)
        except Exception as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._failed:
                self._meet("leave", error)
        except Exception as raised:
            if error is not None:
                return  # this rank's own goes on by itself
            error = raised
            raise
        finally:
            self._close(error)

    def candidates(
        self, groups: int | None = None, wait_seconds: float = 0.0, *, rollouts: int | None = None
    ) -> Candidates:
        """`Update.candidates`, on every rank. Waits for long should stay below the process group's timeout."""
        return self._on_rank_zero(
            "candidates", lambda update: update.candidates(groups, wait_seconds, rollouts=rollouts)
        )

    def reserve(
        self,
        candidates: Candidates,
        score: Score,
        *,
        after_commit_no: int | None = None,
        use: Sequence[str | None] | None = None,
        confirm_drift: bool = False,
    ) -> Reserved:
        """`Update.reserve` with log-probs that the ranks made: rank r scores candidates r, r + world, r + 2 world ...

        `score` is called once on every rank, with equally many sequences on each, since sharded models run in step: a
        rank whose share is shorter scores its first candidate, or the first of all, again.
        """
        if not candidates:
            raise ValueError(f"there are no candidates to reserve: {candidates.empty or 'none were given'}")
        self._meet("reserve")
        share = list(range(self._rank, len(candidates), self._world))
        wanted = -(-len(candidates) // self._world)
        scored: list[npt.NDArray[np.float64]] = []
        error: Exception | None = None
        try:
            filled = [candidates[i] for i in (share + [share[0] if share else 0] * wanted)[:wanted]]
            rows = score([t.token_ids for t in filled], [t.action_mask for t in filled])
            if len(rows) != len(filled):
                raise ValueError(f"log-probs of {len(rows)} sequences for {len(filled)}")
            scored = [np.asarray(row, np.float64) for row in rows[: len(share)]]
        except Exception as raised:  # noqa: BLE001  raised again once the other ranks know
            error = raised
        self._meet("reserve: scored", error)
        gathered: list[list[npt.NDArray[np.float64]]] | None = [[]] * self._world if self._rank == 0 else None
        dist.gather_object(scored, gathered, group=self._group, group_dst=0)

        def reserve(update: Update) -> Reserved:
            assert gathered is not None
            current = [gathered[i % self._world][i // self._world] for i in range(len(candidates))]
            return update.reserve(
                candidates, current, after_commit_no=after_commit_no, use=use, confirm_drift=confirm_drift
            )

        return self._on_rank_zero("reserve: bind", reserve)

    def commit(self, discards: Sequence[Discard] = ()) -> UpdateView:
        """`Update.commit`, once every rank has made its step; rank 0's `discards` count."""
        return self._on_rank_zero("commit", lambda update: update.commit(discards))

    def _close(self, error: BaseException | None) -> None:
        if self._opened and self._update is not None:
            self._update.__exit__(error and type(error), error, error and error.__traceback__)

    def _on_rank_zero(self, name: str, call: Callable[[Update], Answer]) -> Answer:
        self._meet(name)

        def made() -> Answer:
            assert self._update is not None
            return call(self._update)

        try:
            return on_rank_zero(made, self._group)
        except Exception:
            self._failed = True
            raise

    def _meet(self, name: str, error: BaseException | None = None) -> None:
        """All ranks come to the same call, or all learn why not. Raises this rank's own error if it has one."""
        said: list[tuple[str, str | None]] = [(name, None)] * self._world
        try:
            dist.all_gather_object(said, (name, _words(error)), group=self._group)
        except Exception:
            self._failed = True  # a rank is gone: there is nobody to meet any more
            raise
        failures = [f"rank {rank}: {words}" for rank, (_, words) in enumerate(said) if words is not None]
        if not failures and len({call for call, _ in said}) > 1:
            where = ", ".join(f"rank {rank} at {call}" for rank, (call, _) in enumerate(said))
            failures = [f"the ranks make different calls: {where}"]
        self._failed = bool(failures)
        if error is not None:
            raise error
        if failures:
            raise RankError("; ".join(failures))


def _words(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
