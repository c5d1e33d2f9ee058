"""Bytes between peers: who a peer is, streams, signed records, claims, blobs, links. Knows no tensors and no jobs beyond
their ids.

errors         everything that can go wrong between peers, in one tree
printable      text that others wrote, made harmless
identity       the key on disk, the peer id made from it, signatures
clock          where a peer reads the time from
yielding       long loops that let others run
cancelling     ending tasks that run beside what ends
swarm_key      a closed swarm: whose members show each other tokens, and answer nobody else
transport      what the rest knows of the wire: frames, streams, a transport; `call` for one question and one answer
protocol       how a protocol is listed, with its cap; those of the swarm itself
subnets        whose neighbours two addresses are; pure
recent         what was made of bytes that come back, for a while
machine        the cores and control groups that this process has of its machine
delay_window   how much of what can wait is on its way over a link; pure
idle_connections   which connections that nobody uses are given up; pure
shares         who holds how much of what has run out, and who gives way; pure
turns          whoever holds some of it is told when it has to be given up
lean_imports   leaving out of a library what is not used of it
coordinates    round trips between peers who never met (Vivaldi)
streams/       frames over libp2p, and all that makes one stream of them
directory/     signed, short-lived records; who is in the swarm
authority/     who may do what in a job: its law, grants
dht/           the directory over a Kademlia DHT that strangers may join
control/       how commands on the same machine use a running peer
thin/          how clients elsewhere ask one, without hivemind and p2pd
claims/        who owns a stage: the election, leases, standbys
blobs/         content-addressed bytes, fetched from several holders
links/         what the links between peers are like
memory/        transport and directory of one process, for tests

Words: a peer is a process, known by its peer id; a record, what a peer says of itself, signed; a link, what two peers have between
them; a term, the number that makes an older claim void.
"""
