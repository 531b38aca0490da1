"""Modes in which a module runs: exactly, with its sums in another order, and watched."""
