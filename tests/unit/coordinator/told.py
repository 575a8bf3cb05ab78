"""A reader of what the service tells of its pools."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from kvferry.coordinator.pool_events import Removed, Stored
from kvferry.coordinator.state import InstanceEvents
from kvferry.proto.ids import GroupedHash, pack_group


class Told:
    """How many copies of every key each instance has, by what was told."""

    def __init__(self) -> None:
        self.copies: defaultdict[str, Counter[GroupedHash]] = defaultdict(Counter)

    def follow(self, told: Iterable[InstanceEvents]) -> None:
        for instance_id, events in told:
            copies = self.copies[instance_id]
            for event in events:
                if isinstance(event, Stored):
                    copies.update(pack_group(h, event.group_id) for h in event.hashes)
                elif isinstance(event, Removed):
                    for key in (pack_group(h, event.group_id) for h in event.hashes):
                        copies[key] -= 1
                        assert copies[key] >= 0
                    copies += Counter()  # without those of which none is left
                else:
                    copies.clear()
