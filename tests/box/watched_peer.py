"""A `fusion-peer` that also prints, once a second, what its links are and what measuring them has cost. Run by path in
the place of the command; see `fusion.cli.local.fleet.Fleet.start_peer`."""

from __future__ import annotations

import json
import sys
import time

from fusion.cli.main import main
from fusion.runtime.peer import machine
from fusion.swarm.links.monitor import LinkMonitor


class WatchedLinks(LinkMonitor):
    async def tick(self) -> None:
        await super().tick()
        traffic = self._transport.traffic()
        print(
            json.dumps(
                {
                    "event": "links",
                    "at": time.monotonic(),
                    "mbps": {pair.peer: pair.mbps for pair in self.record().pairs},
                    "up_mbps": self.up_mbps,
                    "down_mbps": self.down_mbps,
                    "probe_bytes": self.probe_bytes,
                    "sent_bytes": sum(count.sent_bytes for count in traffic.values()),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    machine.LinkMonitor = WatchedLinks  # type: ignore[misc]
    sys.exit(main())
