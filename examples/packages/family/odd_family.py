from ndp_device.checkpoint.spellings import Spellings

WORDS = Spellings(
    num_experts=("specialists",),
    top_k=("specialists_per_token",),
    layers=("stages",),
    experts=("specialist",),
    gate=("open",),
    up=("widen",),
    down=("narrow",),
    norms=("ln_before",),
)
