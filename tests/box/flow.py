"""What two programs on two hosts see of the network between them, over TCP, with sockets of our own. Run by path:

    python flow.py serve ADDRESS                        prints the port; ends with its standard input
    python flow.py rtt ADDRESS PORT COUNT               prints round trips of one byte, a JSON list of seconds
    python flow.py send ADDRESS PORT SECONDS            prints {"bytes", "began", "ended"}: what came there, from when to when

Nothing but the standard library, so that it starts at once.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

BLOCK = bytes(1 << 18)
PAUSE_SECONDS = 0.01  # between two round trips
ECHO, SINK = b"e", b"s"


def serve(address: str) -> None:
    listener = socket.create_server((address, 0))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    sys.stdin.read()


def _accept(listener: socket.socket) -> None:
    while True:
        connection = listener.accept()[0]
        threading.Thread(target=_attend, args=(connection,), daemon=True).start()


def _attend(connection: socket.socket) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connection.recv(1) == ECHO:
            while byte := connection.recv(1):
                connection.sendall(byte)
            return
        buffer = bytearray(len(BLOCK))
        began, count = time.monotonic(), 0
        while got := connection.recv_into(buffer):
            count += got
        connection.sendall(json.dumps({"bytes": count, "began": began, "ended": time.monotonic()}).encode())


def rtt(address: str, port: int, count: int) -> list[float]:
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(ECHO)
        times = []
        for _ in range(count):
            time.sleep(PAUSE_SECONDS)
            sent = time.monotonic()
            connection.sendall(b".")
            connection.recv(1)
            times.append(time.monotonic() - sent)
    return times


def send(address: str, port: int, seconds: float) -> str:
    with socket.create_connection((address, port)) as connection:
        connection.sendall(SINK)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            connection.sendall(BLOCK)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(1 << 10).decode()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", address]:
            serve(address)
        case ["rtt", address, port, count]:
            print(json.dumps(rtt(address, int(port), int(count))))
        case ["send", address, port, seconds]:
            print(send(address, int(port), float(seconds)))
        case _:
            sys.exit(__doc__)
