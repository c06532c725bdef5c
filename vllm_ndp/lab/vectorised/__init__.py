"""A trace as dense arrays, every step of every group at once: fast, its device times averaged over the refresh."""
