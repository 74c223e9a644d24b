"""A laboratory for schedules: recorded texts are decoded under simulated clocks.

A schedule sees noisy seconds, as on a real machine. Its calls are scored by the seconds that the
same rounds take on average, so that figures differ by what was decided and not by luck.
"""
