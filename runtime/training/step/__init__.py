"""The protocol of a step. Pure: no I/O, no clock, no tensors.

protocol         the table: who says what when, and why it is exact
events           what happens to the two machines, and what they decide
stage            every stage's side
attendance       who is here: which stages have joined, and whom each is linked to
snapshot_books   which snapshots there are to go back to, and whether one is due
lead             the lead's side
messages         what goes over the wire
checkpoint       what everybody can go back to
handover_state   what a leaving owner gives to the next
run_statistics   losses, recoveries, steps discarded and replayed

Words: an attempt is (term of the lead, counter); ready, commit, discard, restore; a checkpoint names a snapshot.
"""
