"""The study of measured pipelines: steps and memory on gloo ranks of this machine, compared with simulations."""
