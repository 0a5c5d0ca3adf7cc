"""Six multimodal models of growing complexity, to be measured: sizes after the paper's Table 1, inputs after Table 2.

They are what a bench needs and no more: random weights, random batches, a loss. A model zoo is a matter of its own.
"""

from bench.multimodal.six import MODELS, ModelSpec, Sizes, build, make_batch

__all__ = ["MODELS", "ModelSpec", "Sizes", "build", "make_batch"]
