"""Time that a test owns: events in order, and programs that block until one of them. One seed, one history.

Programs (hosts) are threads of which one runs at a time: who waits works off events until one of them wakes a program,
and hands over to that. Knows no network and no protocol.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress

S, MS, US = 1_000_000_000, 1_000_000, 1_000
MAX_EVENTS = 1_000_000


class Aborted(BaseException):
    """Another program failed: this one ends where it waits."""


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ns = 0
        self.digest = 0  # of everything that happened: equal digests, equal histories
        self.num_events = 0
        self.failure: BaseException | None = None
        self.programs: list[Program] = []
        self.numbers = itertools.count(1)  # of processes
        self._events: list[tuple[int, int, Callable[[], Program | None]]] = []

    def after(self, delay_ns: float, act: Callable[[], Program | None]) -> None:
        """Let it happen. What `act` returns is woken."""
        self.num_events += 1
        heapq.heappush(self._events, (self.now_ns + max(int(delay_ns), 0), self.num_events, act))

    def note(self, what: bytes) -> None:
        """Something that a history which is the same must have as well."""
        self.digest = zlib.crc32(what, self.digest ^ (self.now_ns & 0xFFFFFFFF))

    def run(self, *scripts: Callable[[Program], None]) -> None:
        """Until all have ended. Raises what the first of them, or an event, raised."""
        main = Program(self)
        with suppress(Aborted):  # the failure that it stands for is raised below
            if len(scripts) == 1:
                scripts[0](main)
            else:
                for script in scripts:
                    self.programs.append(Program(self, script, main))
                for program in self.programs:
                    self.after(0, program.resume)
                while not all(program.has_ended for program in self.programs):
                    main.wait(3600 * S)
        for program in self.programs:
            program.join()
        if self.failure is not None:
            raise self.failure

    def until_woken(self, waiting: Program) -> None:
        """Work off events until one of them wakes this program."""
        while True:
            if not self._events:
                raise AssertionError("everybody waits and nothing will happen")
            self.now_ns, number, act = heapq.heappop(self._events)
            if number > MAX_EVENTS:
                raise AssertionError(f"{MAX_EVENTS} events, and no end: something goes round in circles")
            self.digest = zlib.crc32(b"%d %d" % (self.now_ns, number), self.digest)
            try:
                woken = act()
            except Exception as error:
                self.abort(error)
                raise Aborted from None
            if woken is waiting:
                return
            if woken is not None:
                woken.take_over()
                waiting.stand_by()
                return

    def abort(self, failure: BaseException) -> None:
        self.failure = self.failure or failure
        for program in self.programs:
            program.take_over()


class Program:
    """What runs by itself and may wait: a host. Without a script it is the thread that made it."""

    def __init__(
        self, world: World, script: Callable[[Program], None] | None = None, main: Program | None = None
    ) -> None:
        self._world, self._script, self._main = world, script, main
        self._baton = threading.Semaphore(0)
        self._alarm = 0
        self.has_ended = False
        self._thread: threading.Thread | None = None
        if script is not None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def wait(self, timeout_ns: float) -> None:
        """Until `wake`, or until so much time has passed."""
        self._alarm += 1
        number = self._alarm
        self._world.after(timeout_ns, lambda: self._woken_by(number))
        self._world.until_woken(self)

    def sleep(self, duration_ns: float) -> None:
        """Until so much time has passed, whatever happens."""
        end_ns = self._world.now_ns + int(duration_ns)
        while self._world.now_ns < end_ns:
            self.wait(end_ns - self._world.now_ns)

    def wake(self) -> None:
        number = self._alarm
        self._world.after(0, lambda: self._woken_by(number))

    def resume(self) -> Program | None:
        return None if self.has_ended else self

    def take_over(self) -> None:
        self._baton.release()

    def stand_by(self) -> None:
        if self.has_ended:
            return
        self._baton.acquire()
        if self._world.failure is not None:
            raise Aborted

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _woken_by(self, number: int) -> Program | None:
        if self.has_ended or number != self._alarm:
            return None
        self._alarm += 1
        return self

    def _run(self) -> None:
        assert self._script is not None
        assert self._main is not None
        try:
            self.stand_by()
            self._script(self)
        except Aborted:
            pass
        except BaseException as error:
            self._world.abort(error)
        self.has_ended = True
        if self._world.failure is not None:
            self._main.take_over()
            return
        self._main.wake()
        try:
            self._world.until_woken(self)  # the thread ends here: whoever is woken next goes on without it
        except Aborted:
            self._main.take_over()
