"""A network in a box, from the command line. Needs root and Linux.

python tests/box calibrate                          asked against measured, over rates and round trips
python tests/box calibrate tests/box/networks/b.toml    the same for each pair of a swarm file's network
python tests/box links tests/box/networks/b.toml    what its peers know of their links 30 s after joining
python tests/box links b.toml --cost 3              what that costs, idle and in training on 3 hosts, and how soon a cut is noticed
python tests/box run b.toml home-1 COMMAND ...      a command on one host of it; the box ends with the command
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from box import calibrate, kernel, link_accuracy, link_cost
from box.network import Box
from box.network_file import read_network
from support.endings import interruptible


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    measuring = commands.add_parser("calibrate")
    measuring.add_argument("network", nargs="?", type=Path, help="a swarm file")
    measuring.add_argument("--seconds", type=float, default=5.0, help="of sending, for each row")
    measuring.add_argument("--mbps", type=float, nargs="+", default=calibrate.RATES_MBPS)
    measuring.add_argument("--rtt-ms", type=float, nargs="+", default=calibrate.ROUND_TRIPS_MS)
    knowing = commands.add_parser("links")
    knowing.add_argument("network", type=Path)
    knowing.add_argument("--seconds", type=float, help="after joining; with --cost, of each part")
    knowing.add_argument("--cost", type=int, metavar="HOSTS")
    running = commands.add_parser("run")
    running.add_argument("network", type=Path)
    running.add_argument("host")
    running.add_argument("argv", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    reason = kernel.unavailable()
    if reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    if arguments.command == "run":
        with Box(read_network(arguments.network)) as box:
            return box.run(arguments.host, arguments.argv).wait()
    if arguments.command == "links":
        if arguments.cost is None:
            found = asyncio.run(link_accuracy.show(arguments.network, arguments.seconds or 30.0))
            return 0 if found.passed else 1
        asyncio.run(link_cost.show(arguments.network, arguments.cost, arguments.seconds or 60.0))
        return 0
    if arguments.network is not None:
        rows = calibrate.network(arguments.network, arguments.seconds)
    else:
        rows = calibrate.grid(arguments.seconds, arguments.mbps, arguments.rtt_ms)
    return 0 if calibrate.show(rows) else 1


if __name__ == "__main__":
    sys.exit(interruptible(main))
