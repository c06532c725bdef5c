"""A trace step by step with the code the plugin runs: slow, and equal to the live run to the picosecond."""
