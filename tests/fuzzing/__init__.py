"""Inputs that nobody would send by accident: seeded mutations of real files and messages, and what reads them.

`files.py` has every kind of file that the two packages read, `peers.py` what a device and a host receive. The suite
runs a few hundred cases of each; `make fuzz SECONDS=600` goes on for as long as it is told, and keeps what it finds.
"""
