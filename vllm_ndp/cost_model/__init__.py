"""Prices for plugin and replay alike: the step clock of the GPU, costs of experts, the balancer. Never measures."""
