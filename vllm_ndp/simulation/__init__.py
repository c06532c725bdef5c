"""What plugin and replay both price with: the step clock of the GPU, costs of experts, the balancer. Never measures."""
