from dataclasses import replace

from vllm_ndp.lab.systems.gpu_on_demand import GPU_ON_DEMAND


def on_a_faster_gpu(batches, costs, options):
    """GPU_ON_DEMAND where a share of each layer's copies is hidden behind the layer before."""
    hidden = options.number("hidden", 0.5, 0.0, 1.0)
    found = GPU_ON_DEMAND.replay(batches, costs, replace(options, own={}))
    return replace(found, policy=f"{hidden:g} hidden", moe_ps=found.moe_ps * (1 - hidden))


SYSTEM = replace(
    GPU_ON_DEMAND,
    name="warm_cache",
    replay=on_a_faster_gpu,
    assumptions=("a share `hidden` of every layer's time is hidden behind the layer before",),
    options=("hidden",),
)
