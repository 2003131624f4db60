"""Ways to run envs behind the engine."""
