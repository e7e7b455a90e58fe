"""Read a Chrome trace of torch's profiler: which kernels a step spends its time in, and under which named range."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

Event = dict[str, Any]

DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}


class Work(NamedTuple):
    """One kernel (on the CPU: one operator without those inside it), its us, and the innermost range around it."""

    name: str
    us: float
    range: str


class Line(NamedTuple):
    """All work of one name."""

    name: str
    ranges: str
    calls: float
    us: float
    share: float


def work_of(events: Iterable[Event]) -> list[Work]:
    """Return the kernels of a trace; of a trace without any, its operators.

    A kernel belongs to the range around its launch. In a replayed graph that is the range around the replay.
    """
    events = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in DEVICE_WORK]
    ranges = _Ranges(event for event in events if event.get("cat") == "user_annotation")
    if not kernels:
        return _operators([event for event in events if event.get("cat") == "cpu_op"], ranges)
    launches = {_correlation(event): event for event in events if event.get("cat") in LAUNCHES}
    found = []
    for event in sorted(kernels, key=lambda event: event["ts"]):
        launch = launches.get(_correlation(event))
        found.append(Work(event["name"], event["dur"], ranges.around(launch) if launch is not None else ""))
    return found


def table(work: list[Work], steps: int, step_us: float, labels: dict[str, str] | None = None) -> list[Line]:
    """Return one line a name, calls and us of a step, most time first.

    Args:
        step_us: what shares are of.
        labels: ranges by name, for work whose own range says nothing; see `labels_of`.
    """
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, us, _ in work:
        total[name] += us
        calls[name] += 1
    own = labels_of(work) if labels is None else labels
    return [
        Line(
            name, own.get(name, ""), round(calls[name] / steps, 2), round(us / steps, 2), round(us / steps / step_us, 4)
        )
        for name, us in total.most_common()
    ]


def labels_of(work: list[Work]) -> dict[str, str]:
    """Return by name the ranges that its work lies in, those with most of it first."""
    places: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, us, where in work:
        places[name][where] += us
    return {name: ", ".join(where for where, _ in found.most_common() if where) for name, found in places.items()}


def show(lines: list[Line], top: int) -> str:
    """Return the first lines as text."""
    rows = [f"{'us':>9} {'share':>6} {'calls':>6}  {'range':<24} kernel"]
    for name, ranges, calls, us, share in lines[:top]:
        rows.append(f"{us:>9.1f} {100 * share:>5.1f}% {calls:>6g}  {ranges[:24]:<24} {short(name)}")
    return "\n".join(rows)


def short(name: str) -> str:
    """Return a kernel's name without its template arguments."""
    return name.removeprefix("void ").split("<")[0].split("(")[0][:70]


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


class _Ranges:
    """Named ranges of every thread, properly nested."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._of: defaultdict[Any, list[Event]] = defaultdict(list)
        for event in sorted(events, key=lambda event: event["ts"]):
            self._of[event["tid"]].append(event)

    def around(self, event: Event) -> str:
        """Return the innermost range that an event starts in; "" if there is none."""
        inner = ""
        for outer in self._of[event["tid"]]:
            if outer["ts"] > event["ts"]:
                break
            if event["ts"] < outer["ts"] + outer["dur"]:
                inner = outer["name"]
        return inner


def _operators(events: list[Event], ranges: _Ranges) -> list[Work]:
    """Return operators with the time of those inside them taken off.

    Example: `linear` from 0 to 10 us around `addmm` from 2 to 9 us: 3 us and 7 us.
    """
    found = []
    by_thread: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        by_thread[event["tid"]].append(event)
    for thread in by_thread.values():
        own = [event["dur"] for event in thread]
        open_: list[int] = []
        for i, event in enumerate(thread):
            while open_ and event["ts"] >= thread[open_[-1]]["ts"] + thread[open_[-1]]["dur"]:
                open_.pop()
            if open_:
                own[open_[-1]] -= event["dur"]
            open_.append(i)
        found += [Work(event["name"], us, ranges.around(event)) for event, us in zip(thread, own, strict=True)]
    return found
