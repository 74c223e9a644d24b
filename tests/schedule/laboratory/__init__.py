"""Simulate schedules by decoding recorded texts under simulated clocks.

A schedule sees noisy times, as on a real machine. Its calls are scored by the average times of the
same rounds, so results differ because of decisions, not luck.
"""
