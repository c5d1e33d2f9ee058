"""From frames to libp2p and back. Knows nothing of who is in the swarm, or of what frames say.

frames            how a frame looks on the wire, and its caps; pure
frame_parser      bytes as they arrive, cut into frames; no I/O
frame_stream      a stream of frames over one socket, and its three ends
memory_stream     the same between two ends of one process
striping          one stream over several of libp2p's
queued_stream     a long-lived stream with a task that writes, and its hello
handlers          who answers an incoming stream, in a task of its own; errors told in one line
p2p               the transport between real peers
p2p_config        how a peer takes part in it
p2pd              libp2p's daemon: started, watched, ended with us
p2pd_control      requests to it, and hivemind's view of it for the DHT
p2pd_guard        the process between us and it, so that it never outlives us
peer_ids          peer ids as text, as bytes, as hivemind has them
dialer            whom the daemon is connected to, and where others listen
dial_workaround   around libp2p's refusal to dial an address that failed a moment ago
reachable         which of our addresses others can dial
traffic           how many bytes went to and came from each peer
receive_log       when the bytes of payloads came in
link_estimate     what such timings say about a link; pure

Words: a frame is one message, of a header and a payload; striping, one stream over several of libp2p's, its lanes.
"""
