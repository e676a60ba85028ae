"""The pitfalls that a hand-written DDP script can walk into, one function each.

A check yields findings it is sure of; where the script does something it cannot follow, it yields
nothing.
"""
