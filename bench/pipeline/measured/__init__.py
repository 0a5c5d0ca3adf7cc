"""Pipelines that run: steps, memory and host time on gloo ranks of this machine, with what was simulated beside."""
