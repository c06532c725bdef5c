"""What people ask beside a server: what fits on a machine, is it ready, what is going on, where replicas come from."""
