"""Commands beside a server: size a model to a machine, check the machine, fetch a checkpoint."""
