"""The table of what engines have at the rests of a soak, and which of it leaks.

Blocks and requests must be none. NIXL's objects, threads and open files leak if the last rest has more of
them than any rest of the first half. Python's objects and the resident set leak if the straight line through
the second half rises by more than the first half strays from its own line, and by more than a tenth for each
hand-over. The largest step that stays is left out: an allocator takes a large piece now and then, but a leak
comes again. In runs of fewer than 1,000 hand-overs, in which processes still warm up, the rise of all but
NIXL's objects is printed and no leak: connections to visitors come and go.
"""

from __future__ import annotations

import numpy as np

NONE, GROWING, WARM = ("blocks", "requests"), ("Python objects", "resident KiB"), 1000
HEAD = ["| engine | what | first rest | middle | last | rise | noise |", "|---|---|---|---|---|---|---|"]

Series = dict[str, list[dict[str, int]]]  # role -> what the engine had at each rest, by name


def leak_table(series: Series, handovers: int) -> tuple[list[str], list[str]]:
    """(lines of the table, sentences about leaks)."""
    lines, leaks = list(HEAD), list[str]()
    for role, rests in series.items():
        for what in rests[0] if rests else ():
            values = [rest[what] for rest in rests]
            grows = what in GROWING
            rise, noise = growth(values) if grows else (values[-1] - max(values[: (len(values) + 1) // 2]), 0)
            shown = f"{values[0]} | {values[len(values) // 2]} | {values[-1]} | {rise:.0f} | {noise:.0f}"
            lines.append(f"| {role} | {what} | {shown} |")
            least = handovers / 20 if grows else 0  # a tenth for each hand-over of the second half
            judged = what not in NONE and (what.startswith("NIXL") or handovers >= WARM)
            if judged and rise > max(noise, least):
                leaks.append(f"{role} leaks {what}: {', '.join(map(str, values))}")
    return lines, leaks


def growth(values: list[int]) -> tuple[float, float]:
    """Rise of the second half without its largest step that stays, and how far the first half strays.

    Both are of straight lines. (0, 0): too few values.
    """
    first, second = np.array_split(np.array(values, dtype=float), 2)
    if len(second) < 5:
        return 0.0, 0.0
    noise = np.ptp(first - np.polyval(np.polyfit(range(len(first)), first, 1), range(len(first))))
    rises = [
        (second[at:].min() - second[:at].max() + noise, second[at] - second[at - 1])
        for at in range(1, len(second))
    ]
    step, at = max((min(rise), at) for at, rise in enumerate(rises, 1))
    second[at:] -= max(0.0, step)
    return float(np.polyfit(range(len(second)), second, 1)[0] * (len(second) - 1)), float(noise)
