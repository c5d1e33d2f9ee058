"""Peers as processes of this machine, for the demo, chaos and the tests.

fleet            real peers, in one folder, gone afterwards
janitor          the process that sees to it
chaos            `chaos`: trained in peace and with kills, and compared
chaos_plan       which faults, and when; pure
chaos_job        the job of a chaos run
chaos_swarm      its peers: killed, frozen, cut off, replaced
chaos_trace      what its peers print of each step
chaos_timeline   the reports of the leads as a history; pure
chaos_report     what it found
"""
