"""The model zoo: the paper's six multimodal models and Spindle's three workloads, as plain modules.

::

    model = models.build("imagebind", size="tiny")
    loss = models.loss_of(model(**models.make_batch("imagebind", size="tiny")))

Each model exists ``tiny``, as published (``public``) and with the dimensions of the paper's Table 1 on the inputs of
its Table 2 (``paper``); its file says where the table and the published model differ. Weights and samples are random.
"""

from mosaic.models.catalogue import MODELS, SIX, Entry, Size, build, config_of, entry_of, loss_of, make_batch
from mosaic.models.inputs import TABLE_2, InputSizes

__all__ = [
    "MODELS",
    "SIX",
    "TABLE_2",
    "Entry",
    "InputSizes",
    "Size",
    "build",
    "config_of",
    "entry_of",
    "loss_of",
    "make_batch",
]
