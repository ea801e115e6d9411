"""The stack of another thread, as a rank's watch reads it."""

import inspect
import threading

from vescale_dtensor._communication.hangs.standing import Seen, seen


def stand(here: threading.Event, goes: threading.Event) -> None:
    here.set()
    goes.wait(60)


def stand_twice(events: list[tuple[threading.Event, threading.Event]]) -> None:
    stand(*events[0])
    stand(*events[1])


def line_of(function, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return next(first + at for at, line in enumerate(lines) if text in line)


def waiting(thread: threading.Thread) -> Seen:
    """The thread's stack once it waits."""
    while f":{line_of(stand, 'goes.wait')} in stand" not in (look := seen(thread.ident)).lines[0]:
        assert thread.is_alive()
    while (again := seen(thread.ident)).mark != look.mark:  # it enters its wait
        look = again
    return look


def test_the_lines_of_a_thread_and_whether_it_moved() -> None:
    events = [(threading.Event(), threading.Event()) for _ in range(2)]
    thread = threading.Thread(target=stand_twice, args=(events,))
    thread.start()
    looks = []
    for here, goes in events:
        assert here.wait(60)
        looks.append(waiting(thread))
        goes.set()
    thread.join()
    for which, look in enumerate(looks):
        assert look.lines[1].endswith(f":{line_of(stand_twice, f'events[{which}]')} in stand_twice"), look.lines
        assert look.call == look.busy == ""
    assert looks[0].mark != looks[1].mark
    assert seen(thread.ident).lines == [] and seen(None).place == "no line of the user's"
