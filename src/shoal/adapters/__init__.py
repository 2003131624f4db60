"""Env libraries as the narrow env contract of the engine."""
