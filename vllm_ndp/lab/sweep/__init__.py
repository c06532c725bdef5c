"""`compare` over models, hardware and memory at once, on all cores or a Ray cluster, in pieces that survive a stop."""
