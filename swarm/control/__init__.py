"""How commands on this machine use a running peer: what it offers at its socket, and the transport and directory that
go through it.

server       the socket, its protocol, and the streams that are passed on
client       the transport of a command
directory    its directory, read only
"""
