"""One MoE layer as data: where each expert is, where each pair runs, and what that counts and takes."""
