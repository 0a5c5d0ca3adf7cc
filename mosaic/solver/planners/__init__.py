"""The planners that Mosaic is compared with, under the same cost model: each a short file that draws waves of jobs.

A wave runs jobs at the same time on disjoint whole devices and ends when its slowest job does. What is drawn becomes a
plan in ``waves``; ``mosaic.solver.methods`` has their names.
"""
