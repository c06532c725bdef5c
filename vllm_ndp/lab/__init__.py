"""A trace under any system and policy on modelled hardware. Two engines: `exact` for our plugin's own system, to the
picosecond, and `vectorised` for every system in `systems`."""
