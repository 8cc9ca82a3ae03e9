"""A process for each contender, so that its memory and CPU time are its own; they take turns, as the parent says."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from .contenders import UnavailableError
from .contestant import Contestant, Task

_STOP_S = 10


class Worker:
    """The parent's end: calls a `Contestant`'s methods by name.

    Args:
        task: What it is to do.

    Attributes:
        reason: Why it cannot, once it has said so.
    """

    def __init__(self, task: Task) -> None:
        self.reason = ""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imports torch once for all
        self._connection, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(task, child), daemon=True)
        self._process.start()
        child.close()

    def call(self, method: str, *arguments: int) -> Any:
        """What the method answers.

        Raises:
            UnavailableError: the worker failed or is gone; it says why, and keeps saying so.
        """
        try:
            if not self.reason:
                self._connection.send((method, arguments))
                succeeded, answer = self._connection.recv()
                if succeeded:
                    return answer
                self.reason = answer
        except (EOFError, OSError):
            self._process.join(_STOP_S)
            self.reason = f"its process ended with status {self._process.exitcode}"
        raise UnavailableError(self.reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()  # it ends when there is nobody to hear from
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(task: Task, connection: Connection) -> None:
    contestant: Contestant | None = None
    try:
        while True:
            method, arguments = connection.recv()
            try:
                contestant = contestant or Contestant(task)
                call: Callable[..., object] = getattr(contestant, method)
                answer: tuple[bool, object] = True, call(*arguments)
            except UnavailableError as error:
                answer = False, str(error)
            except Exception:
                answer = False, traceback.format_exc(limit=-3)
            connection.send(answer)
    except (EOFError, OSError, KeyboardInterrupt):
        if contestant is not None:
            contestant.end()
