"""The engine: plans in force, where each pair of a layer runs, and what that counts and takes."""
