"""The model zoo: the paper's six multimodal models and Spindle's three workloads, as plain modules.

::

    model = models.build("imagebind", size="tiny")
    loss = models.loss_of(model(**models.make_batch("imagebind", size="tiny")))

Each model is a file with a ``MODEL`` at its end, which ``catalogue`` names. It exists ``tiny``, as published
(``public``) and with the dimensions of the paper's Table 1 on the inputs of its Table 2 (``paper``); its file says
where the table and the published model differ. The table's operations are not those of its dimensions on these inputs:
where it has a row, ``table1`` has its layers, widths and ratios of operations, within 3 %. Weights and samples are
random. ``python -m bench.solver`` counts all three beside the table.
"""

from mosaic.models.catalogue import MODELS, PAPER_MODELS, build, config_of, find_model, make_batch
from mosaic.models.inputs import TABLE_2, InputSizes
from mosaic.models.zoo_model import ZooModel, loss_of

__all__ = [
    "MODELS",
    "PAPER_MODELS",
    "TABLE_2",
    "InputSizes",
    "ZooModel",
    "build",
    "config_of",
    "find_model",
    "loss_of",
    "make_batch",
]
