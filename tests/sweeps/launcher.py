"""A launcher as a process that can be killed: launches a prepared job, reports when the swarm holds it, and watches it to its
end.

    python tests/sweeps/launcher.py STORE JOB HOME PEER_ADDRESS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from fusion.cli.local import chaos_job
from fusion.cli.terminal.loop import wait_until_orphaned


async def main(store: str, job: str, home: str, peer: str) -> None:
    plan = chaos_job.stored(Path(store), job)
    orphaned = asyncio.create_task(wait_until_orphaned(os.getppid()))
    async with chaos_job.launched(plan, Path(home), peer) as holding:
        done, _ = await asyncio.wait([holding, orphaned], return_when=asyncio.FIRST_COMPLETED)
        if holding in done:
            holding.result()
            print(json.dumps({"event": "held"}), flush=True)
            await orphaned


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
