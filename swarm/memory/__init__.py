"""The swarm inside one process: what unit tests and simulated worlds run over.

clock       time that stands still until a test moves it
network     what joins the peers
transport   streams between them, with the frames, caps and handlers of real ones
directory   records signed, checked and kept as the nodes of the DHT do
"""
