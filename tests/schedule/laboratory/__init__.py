"""Simulate schedules: recorded texts are decoded under simulated clocks.

A schedule sees noisy seconds, as on a real machine. Its calls are scored by the average seconds of
the same rounds, so results differ by decisions and not by luck.
"""
