"""Shoal beside its peers: the measuring that `shoal demo` and the benchmarks share.

A front above the other fronts: it may import every library that it compares with,
each one inside the contender that needs it. Nothing in the package imports it but
the command line.
"""
