"""Which contractions may be split together: sources by their out features, and the sink by its in features."""

from __future__ import annotations

from .calls import Findings, Influence, Key


def paired(found: Findings) -> dict[Key, dict[Key, Influence]]:
    """sink -> the sources that may be split with it.

    A source qualifies if everything it reaches is a sink that it reaches feature by feature; a sink if a source
    that qualifies reaches it. In a chain the first pair wins: what is split by its in features gives sums, and those
    are whole before they are split again.
    """
    influences = {key: dict(sinks) for key, sinks in found.influences.items()}
    for key, sinks in found.bridged.items():
        if any(not one.is_mixing for one in sinks.values()):
            influences[key] = dict(sinks)
    order = {key: call.order for key, call in found.calls.items()}
    sinks = {sink for reached in influences.values() for sink, one in reached.items() if not one.is_mixing}
    while True:
        pairs: dict[Key, dict[Key, Influence]] = {}
        for sink in sorted(sinks, key=order.__getitem__):
            for key in sorted(influences, key=order.__getitem__):
                reached = influences[key]
                one = reached.get(sink)
                if one is None or one.is_mixing or key in pairs or order[key] >= order[sink] or set(reached) - sinks:
                    continue
                if any(other.is_mixing for other in reached.values()):
                    continue
                pairs.setdefault(sink, {})[key] = one
        pairs = {sink: sources for sink, sources in pairs.items() if any(not _is_table(found, key) for key in sources)}
        bridged = {s for s, sources in pairs.items() if all(key in found.bridged for key in sources)} - found.enclosed
        pairs = {sink: sources for sink, sources in pairs.items() if sink not in bridged}
        if set(pairs) == sinks:
            return pairs
        sinks = set(pairs)


def _is_table(found: Findings, key: Key) -> bool:
    return found.calls[key].lookup
