"""Communication between peers: identities, streams, signed records, claims, blobs, links. Knows no tensors, and of jobs only their
ids.

errors         everything that can go wrong between peers, in one tree
printable      makes text of others safe to print
identity       the key on disk, the peer id made from it, signatures
clock          a peer's injected clocks
yielding       long loops that yield to the event loop
cancelling     cancels tasks and awaits their end
swarm_key      closed swarms: members prove themselves by tokens, and answer nobody else
transport      the interface of the network: frames, streams, a transport; `call` for one request and its reply
protocol       the declaration of protocols, with their caps; those of the swarm itself
subnets        the public network of an address; pure
recent         a short-lived cache for pure functions
machine        the cores and control groups of this process
delay_window   congestion control for background transfers; pure
idle_connections   which idle connections to close; pure
shares         fair shares of a limited resource, with preemption; pure
turns          the same, with a signal to a preempted holder
newest_files   files of a folder, the most recently used ones
lean_imports   imports libraries without their unused parts
coordinates    round trips between peers that never measured each other (Vivaldi)
streams/       streams of frames over libp2p
directory/     signed, short-lived records; who is in the swarm
authority/     who may do what in a job: its law, grants
dht/           the directory over a Kademlia DHT that strangers may join
control/       commands on the same machine use a running peer
thin/          clients on other machines use one, without hivemind and p2pd
claims/        who owns a stage: the election, leases, standbys
blobs/         content-addressed bytes, fetched from several holders
links/         measurements of the links between peers
memory/        transport and directory of one process, for tests

Words: a peer is a process, known by its peer id; a record, signed data that a peer publishes; a link connects two peers; a term, the number
that makes older claims void.
"""
