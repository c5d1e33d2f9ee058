"""Commands on this machine use a running peer through its socket: as their transport and their directory.

server       the socket, its protocol, and the streams that it relays
client       the transport of a command
directory    its directory, read only
"""
